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
    """Share the matrices of a stack among the devices, each updated by its owner.

    Muon, Shampoo and SOAP need a whole matrix for its update. A stack ``[n, ...]`` has
    ``n`` of them, such as the parameters of scanned layers. Each device owns and
    updates ``n / D`` matrices of a stack. All devices update everything else. The
    results are those of ``optimizer``, which must compute each matrix of a stack by
    itself. An operation that computes one number from all matrices, such as clipping by
    the global norm, is refused. Chain it before.

    Args:
      optimizer: An optax transformation whose state holds arrays like the parameters.
      strategy: The strategy of the step, with any ``state=`` but without ``within=``.
      stacked: A function ``(name, leaf) -> bool`` that says whether a parameter is a
        stack along its first dim. A name is like ``"layers/up"``. ``D`` must divide the
        size of this dim.

    Returns:
      The transformation, with the state of ``optimizer``.

    Raises:
      ValueError: An argument has another type. At the update: ``D`` does not divide a
        stack, or the optimizer computes one number from a whole stack.

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
      Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks",
      https://kellerjordan.github.io/posts/muon/, where one device computes the update
      of a matrix and shares it. Here the matrices are those of stacks, and one program
      is partitioned.
    """
    if not hasattr(optimizer, "update") or not callable(stacked):
        raise ValueError(
            "Write by_owner(optax.contrib.muon(1e-3), strategy, lambda name, x:"
            f" name.startswith('layers/')), not by_owner({optimizer!r:.50},"
            f" {strategy!r:.50}, {stacked!r:.50})."
        )
    if isinstance(strategy, tj.Mirrored) and dict(strategy.within):
        raise ValueError(
            "by_owner gives whole matrices to single devices, but within= splits them"
            " over the devices of a tower. Leave one of the two out."
        )
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        devices = len(strategy.worker_devices)
        stacks = _stacks(updates if params is None else params, stacked, devices)
        if devices == 1:
            return inner.update(updates, state, params, **extra)
        args = (updates, state, params, extra)

        def fn(updates: Any, state: Any, params: Any, extra: Any) -> Any:
            return inner.update(updates, state, params, **extra)

        _refuse_mixed(fn, args, stacks)
        run = jax.shard_map(
            fn,
            mesh=AbstractMesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,)),
            in_specs=_dealt(args, stacks),
            out_specs=_dealt((updates, state), stacks),
            check_vma=False,
        )
        return run(*args)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _stacks(
    params: Any, stacked: Callable[[str, Any], bool], devices: int
) -> dict[str, int]:
    """Count the matrices of each stack, by the name of the parameter."""
    sizes = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        shape = jnp.shape(x)
        readable = jax.tree_util.keystr(path, simple=True, separator="/")
        if not stacked(readable, x):
            continue
        if len(shape) < 3 or shape[0] % devices:
            fitting = math.gcd(shape[0] if shape else 1, devices)
            raise ValueError(
                f"stacked= says that {readable} of shape {[*shape]} is a stack of"
                f" matrices, [n, ...] with an n that the {devices} devices divide."
                f" Leave it out, or take {fitting} devices."
            )
        sizes[name] = shape[0]
    return sizes


def _of_stacks(tree: Any, stacks: dict[str, int]) -> list[str | None]:
    """Find for each leaf the name of the stack whose rows it has, or None."""

    def of(path: Any, x: Any) -> str | None:
        name = jax.tree_util.keystr(path)
        rows = jnp.shape(x)[:1]
        fits = (k for k, n in stacks.items() if name.endswith(k) and rows == (n,))
        return next(fits, None)

    return [of(*x) for x in jax.tree_util.tree_leaves_with_path(tree)]


def _dealt(tree: Any, stacks: dict[str, int]) -> Any:
    """Choose a partition spec for each leaf; a stack is split over the devices."""
    split = PartitionSpec(_AXIS)
    whole = PartitionSpec()
    specs = [split if x else whole for x in _of_stacks(tree, stacks)]
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


def _refuse_mixed(fn: Callable[..., Any], args: Any, stacks: dict[str, int]) -> None:
    """Raise if an optimizer makes fewer numbers of a stack than it has matrices.

    Such a number, as a norm, would need the matrices of all devices.
    """

    def follow(jaxpr: Any, reads: list[str | None]) -> list[str | None]:
        of = dict(zip(jaxpr.invars, reads, strict=True))

        def get(x: Any) -> Any:
            return None if hasattr(x, "val") else of.get(x)

        for eqn in jaxpr.eqns:
            ins = [get(x) for x in eqn.invars]
            out = [next(filter(None, ins), None)] * len(eqn.outvars)
            if eqn.primitive.name == "jit":
                inner = eqn.params["jaxpr"]
                out = follow(getattr(inner, "jaxpr", inner), ins)
            # A loop or branch may have counters, which belong to no stack.
            if eqn.primitive.name in ("scan", "while", "cond"):
                kinds = [jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars]
                out = [x if kind else None for x, kind in zip(out, kinds, strict=True)]
            of.update(zip(eqn.outvars, out, strict=True))
            for stack, x in zip(out, eqn.outvars, strict=True):
                if stack is not None and x.aval.size < stacks[stack]:
                    raise ValueError(
                        f"The optimizer of by_owner computes one number from all of"
                        f" {stack}, but each device has only its own matrices. Chain"
                        " such a transformation before it:"
                        " optax.chain(optax.clip_by_global_norm(1.0), by_owner(...))."
                    )
        return [get(x) for x in jaxpr.outvars]

    follow(jax.make_jaxpr(fn)(*args).jaxpr, _of_stacks(args, stacks))
