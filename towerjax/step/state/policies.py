"""How a step takes a state and returns results: when it trains, or only reads."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.data.placer import PlacedBatch
from towerjax.mesh.transfer import on_every_process, place, refuse_traced
from towerjax.step.state.checks import (
    check_is_state,
    check_leaves,
    check_made,
    check_made_for,
    check_not_donated,
    check_num_towers,
    place_others,
    with_numbers_placed,
)
from towerjax.step.state.train_state import (
    TrainState,
    join_state,
    refuse_result,
    state_layout,
)
from towerjax.towers.outputs import PerTowerValue, unmark_per_tower
from towerjax.towers.strategies import Strategy
from towerjax.towers.values import stack_local
from towerjax.towers.variables import is_never_read
from towerjax.types import Layout, PyTree, Rows
from towerjax.types.refusals import refuse_unheld
from towerjax.types.trees import key_data, like_key, map_parts


@dataclasses.dataclass(frozen=True)
class StatePolicy:
    """How a training step takes a state, and returns the next one with metrics."""

    strategy: Strategy
    # A field of the first state that the step makes has a function of parameters here.
    makes: Mapping[str, Callable[[PyTree], PyTree]] = dataclasses.field(
        default_factory=dict, kw_only=True
    )
    # An error about a value that is not a state ends with this remedy.
    advice: ClassVar[str] = "step.init(params)."

    def made(self, params: PyTree) -> dict[str, PyTree]:
        """Find the shapes, by name, of the fields that ``step.init`` makes."""
        makes = self.makes.items()
        shapes = {name: jax.eval_shape(make, params) for name, make in makes}
        if more := shapes.pop("local", None):
            towers = self.strategy.num_towers
            shapes["local"] = jax.eval_shape(lambda x: stack_local(x, towers), more)
        return shapes

    @property
    def layout(self) -> TrainState:
        """The layout of each part of a state between two calls."""
        return state_layout(self.strategy)

    def check(self, state_or_params: PyTree) -> None:
        """Raise unless the value is a whole state, made for this number of towers."""
        check_is_state(state_or_params, self.advice)
        check_num_towers(state_or_params, self.strategy.placement.num_towers)
        check_leaves(state_or_params)

    def copied(self, state: TrainState) -> TrainState:
        """Copy the state to the strategy's devices."""
        return place(state, self.strategy.placement, self.layout, state.params)

    def placed(
        self,
        state: TrainState,
        root: str = "state",
        *,
        copies_uncommitted: bool = False,
    ) -> TrainState:
        """Place leaves that lie on other devices; return the same state if none does.

        ``root`` names the state in errors. With ``copies_uncommitted`` a leaf that JAX
        put on the right device by default is copied, too.
        """
        return place_others(
            state,
            self.strategy.placement,
            self.layout,
            root,
            state.params,
            copies_uncommitted=copies_uncommitted,
        )

    def returned(self, out: PyTree, batch: PlacedBatch) -> PyTree:
        """Make the towers' results readable on every process, without padded rows."""
        placement = self.strategy.placement
        out = unmark_per_tower(out, lambda value: on_every_process(value, placement))
        return _without_padding(out, batch)

    def as_state(self, state_or_params: PyTree) -> TrainState:
        """Check a state without placing it, because it has shapes or traced values."""
        check_is_state(state_or_params)
        check_not_donated(state_or_params)
        check_made(state_or_params, self.made(state_or_params.params))
        return state_or_params

    def start(self, state_or_params: PyTree, expected: TrainState | None) -> TrainState:
        """Check a state and place its scalars; return the same state if none moved.

        ``expected`` has the shapes that the last program takes, or is None.
        """
        check_is_state(state_or_params)
        check_leaves(state_or_params)
        made_fields = self.made(state_or_params.params)
        check_made(state_or_params, made_fields)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        known = expected or dataclasses.replace(
            state_or_params, step=number, **made_fields
        )
        placed = with_numbers_placed(state_or_params, self.strategy.placement, known)
        check_made_for(placed, self.strategy)
        return placed

    def take(self, state_or_params: PyTree) -> TrainState | None:
        """Accept a state that needs no check; None if `start` must check it.

        With several processes `start` must always run, because processes might hold
        different scalars.
        """
        return state_or_params if self.strategy.placement.num_processes == 1 else None

    def kind(self, state: TrainState) -> Hashable:
        """Give a key that differs between states that need different programs.

        States of a plain training step all need one program, so the key is None.
        """
        return None

    def result(self, state: TrainState, out: PyTree, batch: PlacedBatch) -> PyTree:
        """Make ``(state, metrics)``, a call's result, from a program's results."""
        metrics = out.metrics
        if per_tower := {
            name: x.value for name, x in metrics.items() if isinstance(x, PerTowerValue)
        }:
            metrics |= on_every_process(per_tower, self.strategy.placement)
        return join_state(out.donated, {"rng": state.rng, **out.now}), metrics


@dataclasses.dataclass(frozen=True)
class Read(StatePolicy):
    """How a step takes a state, or bare parameters, that it reads and never changes."""

    @functools.cached_property
    def counters(self) -> PyTree:
        """The step number and the key that go with bare parameters."""
        # The value is cached, so it must not be traced. A key cannot be transferred
        # explicitly, so transfers are allowed.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            counters = (np.int32(0), jax.random.key(0))
            return place(counters, self.strategy.placement, Layout.MIRRORED)

    def as_state(self, state_or_params: PyTree) -> TrainState:
        """Take the values that the step reads from a state or bare parameters."""
        if isinstance(state_or_params, TrainState):
            check_not_donated(state_or_params)
        else:
            _check_read(state_or_params)
            state_or_params = jax.tree.map(jnp.asarray, state_or_params)
        return _model_part(state_or_params, jnp.int32(0), jax.random.key(0))

    def start(self, state_or_params: PyTree, expected: TrainState | None) -> TrainState:
        """Check and place the values that the step reads; return them as a state."""
        refuse_traced("state", state_or_params)
        if not isinstance(state_or_params, TrainState):
            _check_read(state_or_params)
        model = _model_part(state_or_params, *self.counters)
        check_not_donated(model)
        check_num_towers(model, self.strategy.num_towers)
        return self.placed(model)

    def take(self, state_or_params: PyTree) -> TrainState | None:
        """Take the values that the step reads; None for bare parameters."""
        return (
            _model_part(state_or_params)
            if isinstance(state_or_params, TrainState)
            else None
        )

    def result(self, state: TrainState, out: PyTree, batch: PlacedBatch) -> PyTree:
        """Give the single result of the towers, without padded rows."""
        (merged,) = out
        (result,) = self.returned(merged, batch).values()
        return result


def _check_read(params: PyTree) -> None:
    """Raise unless devices can hold the bare parameters that were passed as a state."""
    refuse_result(params)
    if params is None:
        raise ValueError(
            "The state is None. Pass a tj.TrainState, or parameters; pass () to a"
            " function that reads no parameters."
        )
    refuse_unheld("params", params)


def _model_part(state_or_params: PyTree, *counters: jax.Array) -> TrainState:
    """Leave out of a state what an evaluation does not read.

    Bare parameters become a state with these ``counters``: a step number and a key.
    """
    state = state_or_params
    if not isinstance(state_or_params, TrainState):
        number, rng = counters
        state = TrainState(number, state_or_params, (), {}, rng)
    local = state.local
    if local and type(local) is dict:
        local = {k: x for k, x in local.items() if not is_never_read(x)}
    return join_state(vars(state), {"opt_state": (), "local": local})


def _without_padding(tree: PyTree, batch: PlacedBatch) -> PyTree:
    """Turn `Rows` into bare arrays, and cut off the padded rows."""
    is_example = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)

    def cut(x: Any) -> Any:
        if not batch.padded:
            return x
        if isinstance(x, Tracer):
            return x[np.flatnonzero(is_example)]
        # The host cuts the rows: a slice on the devices would compile for every new
        # size.
        return like_key(jax.device_put(jax.device_get(key_data(x))[is_example]), x)

    return map_parts(Rows, lambda x: jax.tree.map(cut, x.value), tree)
