"""Compute the update of whole matrices, each on one of the devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import towerjax as tj

_AXIS = "owner"


def by_owner(
    optimizer: optax.GradientTransformation,
    strategy: tj.Mirrored | tj.OneDevice,
    stacked: Callable[[str, Any], bool],
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that updates stacks of matrices a part on each device.

    Muon, Shampoo and SOAP need a matrix whole. Of a stack ``[n, ...]``, such as the
    parameters of scanned layers, each device here updates ``n / D`` matrices, as their
    owner; everything else is updated on all. The results are those of ``optimizer``,
    as long as that computes each leaf, and each matrix of a stack, by itself: chain
    what looks at all, such as clipping by the global norm, before it.

    Args:
      optimizer: An optax transformation whose state holds arrays like the parameters.
      strategy: Of the step, with any ``state=``; not ``within=``.
      stacked: ``(name, leaf) -> bool`` with names such as ``"layers/up"``: whether the
        matrices of a parameter lie along its first dim, whose size ``D`` divides.

    Returns:
      The transformation, with the state of ``optimizer``.

    Raises:
      ValueError: At the update, ``D`` does not divide a stack, or an argument is of
        another type.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> strategy = tj.Mirrored(towers=2, state="sharded")
      >>> optimizer = by_owner(optax.sgd(0.5), strategy, lambda name, x: x.ndim == 3)
      >>> def loss_fn(params, batch, tower):
      ...     losses = (batch @ params["layers"].sum(0)).sum(-1)
      ...     return tj.Weighted.mean(losses, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optimizer, strategy)
      >>> state = step.init({"layers": np.zeros((2, 3, 4), np.float32)})
      >>> state, _ = step(state, np.ones((2, 3), np.float32))
      >>> float(state.params["layers"][0, 0, 0])
      -0.5

    Source:
      That one device computes the update of a matrix and shares it: Jordan et al.
      (2024), "Muon: An optimizer for hidden layers in neural networks",
      https://kellerjordan.github.io/posts/muon/; here of stacks, by the partitioning of
      one program.
    """
    if not hasattr(optimizer, "update") or not callable(stacked):
        raise ValueError(
            "Write by_owner(optax.contrib.muon(1e-3), strategy, lambda name, x:"
            f" name.startswith('layers/')), not by_owner({optimizer!r:.50},"
            f" {strategy!r:.50}, {stacked!r:.50})."
        )
    if isinstance(strategy, tj.Mirrored) and dict(strategy.within):
        raise ValueError(
            "by_owner gives whole matrices to single devices, and within= splits them"
            " over the devices of a tower. Leave one of the two out."
        )
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        devices = len(strategy.worker_devices)
        stacks = _stacks(updates if params is None else params, stacked, devices)
        if devices == 1:
            return inner.update(updates, state, params, **extra)
        given = updates, state, params, extra
        run = jax.shard_map(
            lambda *args: inner.update(*args[:3], **args[3]),
            mesh=AbstractMesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,)),
            in_specs=_dealt(given, stacks),
            out_specs=_dealt((updates, state), stacks),
            check_vma=False,
        )
        return run(*given)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _way(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((x,), simple=True) for x in path)


def _stacks(
    params: Any, stacked: Callable[[str, Any], bool], devices: int
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shapes of the parameters that are stacks, by the way to them."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        keys, shape = _way(path), jnp.shape(x)
        if not stacked("/".join(keys), x):
            continue
        if len(shape) < 3 or shape[0] % devices:
            fitting = math.gcd(shape[0] if shape else 1, devices)
            raise ValueError(
                f"stacked= says that {'/'.join(keys)} of shape {[*shape]} is a stack of"
                f" matrices, [n, ...] with an n that the {devices} devices divide."
                f" Leave it out, or take {fitting} devices."
            )
        found[keys] = shape
    return found


def _dealt(tree: Any, stacks: dict[tuple[str, ...], tuple[int, ...]]) -> Any:
    """A spec for each leaf: what has the name and shape of a stack is dealt out."""

    def of(path: Any, x: Any) -> PartitionSpec:
        keys, shape = _way(path), jnp.shape(x)
        is_one = any(stacks.get(keys[i:]) == shape for i in range(len(keys)))
        return PartitionSpec(_AXIS) if is_one else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of, tree)
