"""What does a step carry over? TrainState and its tower-local variables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.collectives import CrossTowerOps, sum_rows_over_towers
from towerjax.placement import (
    Placement,
    TowerAxes,
    first_tower_of_device,
    place,
)
from towerjax.reduce import reduce_stacked
from towerjax.types import Layout, PyTree, Reduction, named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerLocal:
    """A tower-local variable: one copy a tower, aggregated only when read.

    Batch-norm statistics and metric accumulators are such variables. A tower sees
    them, and returns them, without this wrapper: ``tower.local`` and
    ``TowerOutput(local=...)`` are plain values.

    Attributes:
      value: For ``step.init``: the initial value of every tower, a pytree. In a
        ``TrainState``: leaves ``[T, ...]``, split over the devices.
      reduction: How it is read as one value; NONE when it never is.

    Example:
      >>> TowerLocal({"mean": np.zeros(3)}, Reduction.MEAN).reduction
      Reduction.MEAN
    """

    value: PyTree
    reduction: Reduction = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuse a reduction that is none."""
        if not isinstance(self.reduction, Reduction):
            raise ValueError(
                f"TowerLocal.reduction is {self.reduction!r}; write"
                " tj.Reduction.MEAN, SUM, ONLY_FIRST_TOWER or NONE."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step needs and changes: a plain pytree.

    Attributes:
      step: ``()`` int32, steps done.
      params: The parameters, mirrored.
      opt_state: The optimizer's state, mirrored.
      local: A pytree of ``TowerLocal``, leaves ``[T, ...]``.
      rng: ``()`` typed key; each step and tower derives its own from it.

    Example:
      >>> import towerjax as tj
      >>> loss_fn = lambda params, batch, tower: tj.Weighted.mean(params * batch["x"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> int(step.init(jnp.float32(1.0)).step)
      0
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    local: PyTree
    rng: jax.Array


CARRY_LAYOUT = {
    "params": Layout.MIRRORED,
    "opt_state": Layout.MIRRORED,
    "local": Layout.PER_TOWER,
}
"""What a step takes over and hands on, as a prefix tree of layouts; donated."""

CLOCK_LAYOUT = {"step": Layout.MIRRORED, "rng": Layout.MIRRORED}
"""What a step reads besides; kept, so that old step numbers can still be read."""

_LAYOUTS: Any = {**CARRY_LAYOUT, **CLOCK_LAYOUT}
STATE_LAYOUT = TrainState(**_LAYOUTS)
"""The layout of each part of a state: the state's own type."""


def split_state(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state as a program takes it: what is donated, and what is not.

    Args:
      state: The state.

    Returns:
      ``(carry, clock)``, of the layouts above.
    """
    carry = {
        "params": state.params,
        "opt_state": state.opt_state,
        "local": state.local,
    }
    return carry, {"step": state.step, "rng": state.rng}


def _is_local(x: Any) -> bool:
    return isinstance(x, TowerLocal)


def local_values(local: PyTree) -> PyTree:
    """The tree with each ``TowerLocal`` replaced by its value.

    Args:
      local: A pytree of ``TowerLocal``.

    Returns:
      The values alone.
    """
    return jax.tree.map(lambda x: x.value, local, is_leaf=_is_local)


def with_local_values(local: PyTree, values: PyTree) -> PyTree:
    """The inverse of `local_values`.

    Args:
      local: A pytree of ``TowerLocal``.
      values: What `local_values` returned, changed.

    Returns:
      The tree of ``TowerLocal`` with these values.
    """
    return jax.tree.map(
        lambda x, value: TowerLocal(value, x.reduction),
        local,
        values,
        is_leaf=_is_local,
    )


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    local: PyTree,
    rng: jax.Array | None,
) -> TrainState:
    """The state before the first step, a copy, placed where the steps want it.

    Args:
      params: Floating arrays; copied, so the caller's stay usable.
      optimizer: Its ``init`` makes the optimizer state.
      placement: Where the state shall live.
      local: A pytree of ``TowerLocal``, or None.
      rng: A key, typed or raw; None is ``jax.random.key(0)``.

    Returns:
      A ``TrainState`` committed to its final shardings and dtypes.

    Raises:
      ValueError: ``params`` has no leaves or leaves that are not floating; a leaf
        of ``local`` is not inside a ``TowerLocal``; ``rng`` is not one key.
    """
    params = _checked_params(params)
    state = TrainState(
        step=np.int32(0),  # type: ignore[arg-type]
        params=params,
        opt_state=optimizer.init(params),
        local=_stacked_local(local, placement.num_towers),
        rng=_checked_key(rng),
    )
    return place(state, placement, STATE_LAYOUT)


def abstract_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    num_towers: int,
    local: PyTree,
) -> TrainState:
    """The shapes of a state, without any device.

    Args:
      params: Floating arrays or shapes.
      optimizer: Its ``init`` makes the optimizer state.
      num_towers: ``T``.
      local: A pytree of ``TowerLocal``, or None.

    Returns:
      A ``TrainState`` of ``jax.ShapeDtypeStruct``.
    """

    def make(params: PyTree) -> TrainState:
        stacked = jax.tree.map(jnp.asarray, _stacked_local(local, num_towers))
        opt_state = optimizer.init(params)
        return TrainState(jnp.int32(0), params, opt_state, stacked, jax.random.key(0))

    return jax.eval_shape(make, params)


def _checked_params(params: PyTree) -> PyTree:
    leaves = named_leaves("params", params)
    if not leaves:
        raise ValueError(f"params holds no arrays: {params!r}.")
    bad = [
        f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for name, leaf in leaves
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if bad:
        raise ValueError(
            "Every leaf of params gets a gradient and so is floating, but "
            + "; ".join(bad)
            + ". Put counters into local=... and constants into a closure."
        )
    return jax.tree.map(jnp.asarray, params)


def _stacked_local(local: PyTree, num_towers: int) -> PyTree:
    local = {} if local is None else local
    bare = [
        name
        for name, leaf in named_leaves("local", local, is_leaf=_is_local)
        if not _is_local(leaf)
    ]
    if bare:
        raise ValueError(
            f"{', '.join(bare)}: a tower-local variable says how it is read as one"
            " value. Wrap it: tj.TowerLocal(value, tj.Reduction.MEAN)."
        )

    def stack(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return jnp.broadcast_to(x, (num_towers, *x.shape))
        return np.broadcast_to(np.asarray(x), (num_towers, *np.shape(x)))

    return jax.tree.map(stack, local)


def _checked_key(rng: Any) -> jax.Array:
    if rng is None:
        return jax.random.key(0)
    rng = jnp.asarray(rng)
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.dtype != jnp.uint32 or rng.ndim != 1:
            raise ValueError(
                f"rng is {rng.dtype}{list(rng.shape)}; pass one key, such as"
                " jax.random.key(0)."
            )
        rng = jax.random.wrap_key_data(rng)
    if rng.shape:
        raise ValueError(f"rng holds {rng.shape} keys; pass one, jax.random.key(0).")
    return rng


def read_local(local: PyTree) -> PyTree:
    """Tower-local variables as one value each, from outside a step.

    Args:
      local: A ``TowerLocal`` of a ``TrainState``, or a pytree of them.

    Returns:
      The values, SUM, MEAN or ONLY_FIRST_TOWER of the towers' copies.

    Raises:
      ValueError: A variable's reduction is NONE.

    Example:
      >>> read_local(TowerLocal(jnp.array([1.0, 3.0]), Reduction.MEAN)).item()
      2.0
    """
    return jax.tree.map(
        lambda x: reduce_stacked(x.reduction, x.value), local, is_leaf=_is_local
    )


def read_local_over_towers(
    local: PyTree, ops: CrossTowerOps, axes: TowerAxes
) -> PyTree:
    """Tower-local variables as one value each, inside a device function.

    Args:
      local: A pytree of ``TowerLocal`` with leaves ``[k, ...]``.
      ops: How the sums travel.
      axes: The axes that the towers meet over.

    Returns:
      The values, mirrored; None for a variable whose reduction is NONE.
    """
    ids = first_tower_of_device(axes) + jnp.arange(axes.num_local)

    def addend(variable: TowerLocal) -> PyTree:
        def one(x: jax.Array) -> jax.Array:
            if variable.reduction is Reduction.ONLY_FIRST_TOWER:
                first = (ids == 0).reshape((-1,) + (1,) * (x.ndim - 1))
                return jnp.where(first, x, jnp.zeros_like(x))
            if variable.reduction is Reduction.MEAN:
                return x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return x

        if variable.reduction is Reduction.NONE:
            return None
        return jax.tree.map(one, variable.value)

    def finish(variable: TowerLocal, total: PyTree) -> PyTree:
        if variable.reduction is not Reduction.MEAN:
            return total
        return jax.tree.map(
            lambda s, x: (s / axes.num_towers).astype(
                jnp.promote_types(x.dtype, jnp.bfloat16)
            ),
            total,
            variable.value,
        )

    rows = jax.tree.map(addend, local, is_leaf=_is_local)
    if not jax.tree.leaves(rows):
        return rows
    totals = sum_rows_over_towers(ops, rows, axes)
    return jax.tree.map(finish, local, totals, is_leaf=_is_local)


def check_state(state: Any, placement: Placement) -> None:
    """Raise unless the state was made for these towers and devices.

    Args:
      state: What was passed to the step.
      placement: The step's.

    Raises:
      ValueError: It is not a ``TrainState``, lies elsewhere, or its tower-local
        variables have another number of towers.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"The state is a {type(state).__name__}, not a TrainState. Make it with"
            " step.init(params)."
        )
    wrong_towers = [
        f"{name} has {np.shape(x)[:1]} copies"
        for name, x in named_leaves("state.local", state.local)
        if np.shape(x)[:1] != (placement.num_towers,)
    ]
    if wrong_towers:
        raise ValueError(
            f"The state was made for another number of towers than"
            f" {placement.num_towers}: {'; '.join(wrong_towers)}. Read its tower-local"
            " variables with tj.read_local and start them anew with"
            " step.init(state.params, local=...)."
        )
    expected = set(placement.jax_devices)
    elsewhere = [
        f"{name} is on {_where(x)}"
        for name, x in named_leaves("state", state)
        if not isinstance(x, jax.Array) or x.devices() != expected
    ]
    if elsewhere:
        shown = "; ".join(elsewhere[:4]) + (" ..." if len(elsewhere) > 4 else "")
        raise ValueError(
            f"The state lies elsewhere than the strategy's devices"
            f" {list(placement.devices)}: {shown}. Move it with step.place(state)."
        )


def _where(x: Any) -> str:
    if not isinstance(x, jax.Array):
        return f"the host ({type(x).__name__})"
    return ", ".join(sorted(str(device) for device in x.devices()))
