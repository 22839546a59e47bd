"""What does a step carry over? TrainState: made, placed, checked."""

import dataclasses
import functools
from dataclasses import fields as fields_of
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from towerjax.mesh.placement import Placement, place
from towerjax.mesh.processes import require_same
from towerjax.metrics.example_count import ExampleCount
from towerjax.step.optimizers import trainable_flags
from towerjax.towers.cross_tower.assign import copies
from towerjax.towers.tower_local import checked_local, stacked_local
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PyTree, Reduction, named_leaves
from towerjax.types.leaves import is_key, native, refuse_unheld
from towerjax.types.tables import leaf_table


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
      seen: Which examples the steps have learned from, an ``ExampleCount``, mirrored;
        None where the step was built without ``example_ids``.
      extra: What does not train and is one value for all towers, mirrored: statistics,
        codebooks, a target network; any pytree of arrays, or None.
      own: Each tower's own parameters and optimizer state, leaves ``[T, ...]``, where
        the step has a ``sync=`` by which towers go alone; ``params`` are then the
        outer ones. Or what a cross-tower op keeps, `towerjax.collectives.Compressed`.
        Else None.

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
    seen: ExampleCount | None = None
    extra: PyTree = None
    own: PyTree = None

    def __repr__(self) -> str:
        """Its fields; of arrays that a step has taken over, shapes and dtypes."""
        shown: Any = self
        if any(map(_is_given_away, jax.tree.leaves(self))):
            shown = jax.tree.map(lambda x: _Given(x) if _is_given_away(x) else x, self)
        fields = [f"{x.name}={getattr(shown, x.name)!r}" for x in fields_of(self)]
        return f"TrainState({', '.join(fields)})"

    def _repr_html_(self) -> str:
        leaves = [
            (*leaf, "per tower" if field.name in ("local", "own") else None)
            for field in fields_of(self)
            for leaf in named_leaves(field.name, getattr(self, field.name))
        ]
        return leaf_table("TrainState", leaves)

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        local: PyTree = None,
        extra: PyTree = None,
        rng: jax.Array | None = None,
    ) -> "TrainState":
        """The state before the first step, of one tower, on no particular device.

        Args:
          params: Floating arrays.
          optimizer: Its ``init`` makes the optimizer state.
          local: A pytree of ``TowerLocal``, each of one tower's value, or None.
          extra: Mirrored values that do not train: any pytree of arrays, or None.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``, for a model function; a train step's is made, and placed,
          by its own ``init``.

        Raises:
          ValueError: As ``step.init``.

        Example:
          >>> int(TrainState.create(jnp.float32(1.0), optax.sgd(0.1)).step)
          0
        """
        params = checked_params(params)
        trainable_flags(params, True)
        local = checked_local(local)
        key = _one_key(rng)
        opt_state = optimizer.init(params)
        return cls(jnp.int32(0), params, opt_state, local, key, extra=extra)


def _is_given_away(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


class _Given:
    """An array that is no more, in a text."""

    def __init__(self, array: jax.Array) -> None:
        self._text = f"<{array.dtype}{list(array.shape)}, given to a step>"

    def __repr__(self) -> str:
        return self._text


DONATED_LAYOUT = {
    "params": Layout.MIRRORED,
    "opt_state": Layout.MIRRORED,
    "local": Layout.PER_TOWER,
    "seen": Layout.MIRRORED,
    "extra": Layout.MIRRORED,
    "own": Layout.PER_TOWER,
}
"""What a step takes over and hands on, as a prefix tree of layouts; donated."""

KEPT_LAYOUT = {"step": Layout.MIRRORED, "rng": Layout.MIRRORED}
"""What a step reads besides; kept, so that old step numbers can still be read."""

_LAYOUTS: Any = {**DONATED_LAYOUT, **KEPT_LAYOUT}
STATE_LAYOUT = TrainState(**_LAYOUTS)
"""The layout of each part of a state: the state's own type."""


_SHARDED = {
    "mirrored": (),
    "sharded_optimizer": ("opt_state",),
    "sharded": ("params", "opt_state"),
}


def donated_layout(strategy: Any) -> dict[str, Layout]:
    """`DONATED_LAYOUT`, of parts sharded between steps, as the strategy says."""
    return DONATED_LAYOUT | dict.fromkeys(_SHARDED[strategy.state], Layout.SHARDED)


def state_layout(strategy: Any) -> TrainState:
    """`STATE_LAYOUT`, of parts sharded between steps, as the strategy says."""
    layouts: Any = {**donated_layout(strategy), **KEPT_LAYOUT}
    return TrainState(**layouts)


def step_number(state: TrainState) -> int:
    """The steps done; asked for, so that ``jax.transfer_guard`` lets it by."""
    return int(jax.device_get(state.step))


def split_state(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state as a program takes it: what is donated, and what is not."""
    donated = {name: getattr(state, name) for name in DONATED_LAYOUT}
    return donated, {"step": state.step, "rng": state.rng}


def init_state(
    params: PyTree,
    opt_state: PyTree,
    strategy: Any,
    *,
    local: PyTree,
    rng: jax.Array | None,
    extra: PyTree = None,
    counts: bool = False,
) -> TrainState:
    """The state before the first step, a copy, placed where the steps want it."""
    params, placement = checked_params(params), strategy.placement
    refuse_unheld("opt_state", opt_state)
    refuse_unheld("extra", extra)
    local = stacked_local(local, placement.num_towers)
    key = _one_key(rng)
    if placement.num_processes > 1:
        _check_processes(placement, (params, opt_state, local, key, extra))
    state = TrainState(
        step=np.int32(0),  # type: ignore[arg-type]
        params=params,
        opt_state=opt_state,
        local=local,
        rng=key,
        seen=ExampleCount.none() if counts else None,
        extra=jax.tree.map(native, extra),
    )
    return place(state, placement, state_layout(strategy))


def kept_for_sums(strategy: Any, gradient: PyTree) -> TowerLocal:
    """``state.own`` before the first step, where a cross-tower op keeps a state."""
    own = strategy.cross_tower_ops.init_state(gradient)
    return TowerLocal(copies(own, strategy.num_towers), Reduction.SUM, name="own")


def _check_processes(placement: Placement, tree: PyTree) -> None:
    """Raise unless all processes have the same towers and values of one kind."""
    kinds = ", ".join(
        f"{name} {jnp.result_type(x)}{list(jnp.shape(x))}"
        for root, part in zip(
            ("params", "opt_state", "local", "rng", "extra"), tree, strict=True
        )
        for name, x in named_leaves(root, part)
    )
    advice = "Run the same program on every process."
    require_same("The strategy's towers", f"{placement}", advice)
    require_same("What step.init was given", kinds, advice)


def abstract_state(
    params: PyTree,
    opt_state: PyTree,
    num_towers: int,
    local: PyTree,
    extra: PyTree = None,
    counts: bool = False,
) -> TrainState:
    """The shapes of a state, without any device."""
    refuse_unheld("opt_state", opt_state, shapes=True)
    refuse_unheld("extra", extra, shapes=True)

    def make(params: PyTree, opt_state: PyTree, extra: PyTree) -> TrainState:
        stacked = jax.tree.map(jnp.asarray, stacked_local(local, num_towers))
        opt_state, extra = jax.tree.map(jnp.asarray, (opt_state, extra))
        seen = jax.tree.map(jnp.asarray, ExampleCount.none()) if counts else None
        key = jax.random.key(0)
        return TrainState(jnp.int32(0), params, opt_state, stacked, key, seen, extra)

    return jax.eval_shape(make, checked_params(params, shapes=True), opt_state, extra)


def checked_params(params: PyTree, *, shapes: bool = False) -> PyTree:
    """The parameters as a state holds them: JAX arrays, or their shapes."""
    if isinstance(params, TrainState):
        raise ValueError(
            "params is a TrainState, not parameters. Begin anew with step.init("
            "state.params), or go on from the state itself, step.place(state)."
        )
    if not jax.tree.leaves(params):
        raise ValueError(f"params holds no arrays: {params!r}.")
    refuse_unheld("params", params, shapes=shapes)
    make = functools.partial(jax.tree.map, jnp.asarray)
    params = jax.tree.map(native, params)
    return jax.eval_shape(make, params) if shapes else make(params)


def _one_key(rng: Any) -> jax.Array:
    if rng is None:
        return jax.random.key(0)
    refuse_unheld("rng", rng)
    rng = jnp.asarray(native(rng))
    if not is_key(rng):
        if rng.dtype != jnp.uint32 or rng.ndim != 1:
            raise ValueError(
                f"rng is {rng.dtype}{list(rng.shape)}; pass one key, such as"
                " jax.random.key(0)."
            )
        rng = jax.random.wrap_key_data(rng)
    if rng.shape:
        raise ValueError(f"rng holds {rng.shape} keys; pass one, jax.random.key(0).")
    return rng
