"""`TrainState`, which a step reads and changes: how it is made, placed and split."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.mesh.transfer import place, refuse_leaked
from towerjax.step.state.trainable import OF_MODELS, trainable_flags
from towerjax.towers.strategies import Strategy
from towerjax.towers.values import stack_local
from towerjax.towers.variables import check_tower_local
from towerjax.types import Layout, PyTree
from towerjax.types.notes import explain_missing, frozen
from towerjax.types.options import check_function, check_methods, check_whole
from towerjax.types.refusals import a_type, refuse_unheld, shown
from towerjax.types.tables import Table, as_text, by_rich, leaf_table
from towerjax.types.trees import (
    is_deleted,
    is_key,
    leaf_name,
    named_leaves,
    native,
    own_array,
)


@frozen
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All values that a step needs and changes: a plain pytree.

    Attributes:
      step: ``()`` int32, the number of steps that are done.
      params: The parameters, mirrored.
      opt_state: The optimizer's state, mirrored.
      local: A pytree of ``TowerLocal``, leaves ``[T, ...]``.
      rng: ``()`` typed key; each step and tower derives its own from it.
      extra: Mirrored values that do not train, such as statistics, codebooks or a
        target network: any pytree of arrays, or None.

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
    extra: PyTree = None

    if not TYPE_CHECKING:
        __getattr__ = explain_missing()

    def __repr__(self) -> str:
        """Show the fields as text; a donated array is shown by its shape alone."""
        shown = jax.tree.map(lambda x: jax.typeof(x) if is_deleted(x) else x, self)
        fields = [f"{x.name}={getattr(shown, x.name)!r}" for x in fields_of(self)]
        return f"TrainState({', '.join(fields)})"

    def __str__(self) -> str:
        """Tell the size of the state in one line."""
        return f"TrainState(step={self.step}: {self._table().note})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return by_rich([self._table()])

    def table(self, *, rows: int = 40) -> str:
        """Tabulate the leaves: name, shape, dtype, layout, bytes, bytes per device.

        Args:
          rows: The most leaves to show.

        Returns:
          A table as text, for ``print``. A notebook shows it for the state itself.

        Example:
          >>> state = TrainState.create(jnp.ones((3, 2)), optax.sgd(0.1))
          >>> print(state.table(rows=2).replace("  ", " ").partition("leaf")[0].strip())
          TrainState
        """
        check_whole("rows", rows)
        return as_text([self._table(rows)])

    def _table(self, rows: int = 40) -> Table:
        leaves = [
            (*leaf, "per tower" if field.name == "local" else None)
            for field in fields_of(self)
            for leaf in named_leaves(field.name, getattr(self, field.name))
        ]
        return leaf_table("TrainState", leaves, rows)

    def replace(self, **fields: Any) -> "TrainState":
        """Change some fields, like `dataclasses.replace`.

        Example:
          >>> state = TrainState.create(jnp.float32(1.0), optax.sgd(0.1))
          >>> float(state.replace(params=jnp.float32(2.0)).params)
          2.0
        """
        return dataclasses.replace(self, **fields)

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
        """Create the state before the first step, of one tower, on no device.

        Args:
          params: Floating or complex arrays.
          optimizer: Its ``init`` makes the optimizer state.
          local: A pytree of ``TowerLocal``, each of one tower's value, or None.
          extra: Mirrored values that do not train: any pytree of arrays, or None.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState`` for a model function. A train step makes and places its own
          with ``step.init``.

        Raises:
          ValueError: As ``step.init``.

        Example:
          >>> int(TrainState.create(jnp.float32(1.0), optax.sgd(0.1)).step)
          0
        """
        check_methods("optimizer", optimizer, "init update", "optax.sgd(0.1)")
        params = check_params(params)
        trainable_flags(params, True, advice=OF_MODELS)
        local = check_tower_local(local)
        refuse_unheld("extra", extra)
        extra = jax.tree.map(native, extra)
        key = _one_key(rng)
        opt_state = optimizer.init(params)
        return cls(jnp.int32(0), params, opt_state, local, key, extra=extra)


_LAYOUTS: Any = dict.fromkeys((x.name for x in fields_of(TrainState)), Layout.MIRRORED)
STATE_LAYOUT = TrainState(**{**_LAYOUTS, "local": Layout.PER_TOWER})
"""The layout of each part of a state, as a `TrainState`."""

_SHARDED = {
    "mirrored": (),
    "sharded_optimizer": ("opt_state",),
    "sharded": ("params", "opt_state"),
}


def state_layout(strategy: Strategy) -> TrainState:
    """Mark as sharded in `STATE_LAYOUT` the fields that the strategy shards."""
    sharded: Any = dict.fromkeys(_SHARDED[strategy.state], Layout.SHARDED)
    return dataclasses.replace(STATE_LAYOUT, **sharded)


def step_number(state: TrainState) -> int:
    """Read the number of steps done, also where transfers are disallowed.

    The state's int32 wraps round after ``2**31`` steps, the returned number after
    ``2**32``.
    """
    return int(jax.device_get(state.step)) % 2**32


def split_state(state: TrainState) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """Split a state into the two parts that a program takes, ``(donated, kept)``.

    The step number and the key are not donated, so that old step numbers can still be
    read.
    """
    donated = dict(vars(state))
    return donated, {"step": donated.pop("step"), "rng": donated.pop("rng")}


def join_state(donated: dict[str, PyTree], kept: dict[str, PyTree]) -> TrainState:
    """Join the two parts that `split_state` returned to a state.

    This takes half the time of ``TrainState(...)``.
    """
    state = object.__new__(TrainState)
    vars(state).update(donated)
    vars(state).update(kept)
    return state


def init_state(
    strategy: Strategy, *parts: PyTree, like: PyTree = None, **others: Any
) -> TrainState:
    """Make the first state by `make_state`, and place it on devices.

    ``like`` are the parameters for the shardings, if ``parts`` has a placeholder for
    parameters that are placed already.
    """
    placement = strategy.placement
    state = make_state(placement.num_towers, *parts, **others)
    if placement.num_processes > 1:
        kinds = ", ".join(
            f"{name} {jnp.result_type(x)}{list(jnp.shape(x))}"
            for name, x in named_leaves("state", state)
        )
        advice = "Run the same program on every process."
        placement.processes.require_same(
            "The strategy's towers", f"{placement}", advice
        )
        placement.processes.require_same("What step.init was given", kinds, advice)
    params = state.params if like is None else like
    return place(state, placement, state_layout(strategy), params)


def make_on_devices(
    strategy: Strategy,
    fn: Callable[[jax.Array], PyTree],
    make_opt_state: Callable[[PyTree], PyTree],
    rng: jax.Array | None,
) -> dict[str, PyTree]:
    """Make parameters and their optimizer state on the devices, by a function of a key.

    One program makes both, sharded if the strategy shards them. Draws from JAX's
    counter-based keys do not depend on how an array is split.
    """
    check_function("params", fn, "params(rng)")
    placement = strategy.placement
    at = state_layout(strategy)

    def both(key: jax.Array) -> dict[str, PyTree]:
        params = jax.tree.map(jnp.asarray, fn(key))
        return {"params": params, "opt_state": make_opt_state(params)}

    key = _one_key(rng)
    shapes = jax.eval_shape(both, key)
    jax.eval_shape(check_params, shapes["params"])
    layouts = {"params": at.params, "opt_state": at.opt_state}
    shardings = placement.shardings(layouts, shapes, shapes["params"])
    make = jax.jit(both, out_shardings=shardings)
    return make(place(key, placement, Layout.MIRRORED))


def make_state(
    num_towers: int,
    params: PyTree,
    opt_state: PyTree,
    local: PyTree = None,
    *,
    rng: jax.Array | None = None,
    extra: PyTree = None,
) -> TrainState:
    """Make the state before the first step, not yet placed on devices."""
    params = check_params(params)
    refuse_unheld("opt_state", opt_state)
    refuse_unheld("extra", extra)
    return TrainState(
        step=np.int32(0),  # type: ignore[arg-type]
        params=params,
        opt_state=opt_state,
        local=stack_local(local, num_towers),
        rng=_one_key(rng),
        extra=jax.tree.map(native, extra),
    )


def join_local(local: PyTree, more: dict[str, PyTree]) -> dict[str, PyTree]:
    """Join the user's tower-local variables and those that a step adds."""
    local = {} if local is None else local
    if not isinstance(local, Mapping) or local.keys() & more.keys():
        raise ValueError(
            f"local={shown(local)} must be a dict without the keys {[*more]}, which"
            " this step uses for its own variables."
        )
    return {**local, **more}


def refuse_result(value: Any) -> None:
    """Raise if a step's result was passed in place of a state or parameters."""
    if isinstance(value, tuple) and value and isinstance(value[0], TrainState):
        raise ValueError(
            "A state is expected, but this is the result of a step, (state, metrics)."
            " Unpack it: state, metrics = step(state, batch)."
        )


def check_params(params: PyTree) -> PyTree:
    """Check parameters, and return them as JAX arrays."""
    refuse_result(params)
    refuse_leaked("params", params)
    if hasattr(params, "opt_state"):
        further = "and give build_train_step its optimizer (of Flax state.tx)"
        if isinstance(params, TrainState):
            further = "or go on from the state itself, step.place(state)"
        raise ValueError(
            f"params is {a_type(params)}, not parameters. Begin anew with"
            f" step.init(state.params), {further}."
        )
    if not named_leaves("params", params):
        raise ValueError(f"params holds no arrays: {params!r}.")
    refuse_unheld("params", params)
    if "flax.nnx" in sys.modules:
        _refuse_shared_weights(params, sys.modules["flax.nnx"].Variable)
    return jax.tree.map(lambda x: own_array(native(x)), params)


def _refuse_shared_weights(params: PyTree, kind: type) -> None:
    """Raise if one variable of a Flax module stands at two places in ``params``.

    As two leaves the two copies would train apart.
    """
    names: dict[int, str] = {}
    flat = jax.tree_util.tree_leaves_with_path(params, lambda x: isinstance(x, kind))
    for path, x in flat:
        dtypes = map(jnp.result_type, jax.tree.leaves(x))
        if isinstance(x, kind) and any(jnp.issubdtype(y, jnp.inexact) for y in dtypes):
            name = leaf_name("params", path)
            if (first := names.setdefault(id(x), name)) != name:
                raise ValueError(
                    f"{first} and {name} are one nnx.{type(x).__name__}, but as two"
                    " leaves of params they would train apart. Split the module, which"
                    " keeps a shared variable as one leaf: graph, params ="
                    " nnx.split(model), and nnx.merge(graph, params) in the loss"
                    " function."
                )


def _one_key(rng: Any) -> jax.Array:
    if rng is None:
        return jax.random.key(0)
    refuse_unheld("rng", rng)
    if not hasattr(rng, "dtype"):
        raise ValueError(f"rng is {rng!r:.200}; pass one key, as jax.random.key(0).")
    key = key_given = own_array(native(rng))
    if key_given.dtype == jnp.uint32 and key_given.ndim == 1:
        key = jax.random.wrap_key_data(key_given)
    if not is_key(key) or key.shape:
        raise ValueError(
            f"rng is {key_given.dtype}{list(key_given.shape)}; pass one key, such as"
            " jax.random.key(0)."
        )
    return key
