"""What a step takes as its state, and what a call returns: of a training, or read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.placer import PlacedBatch
from towerjax.mesh.transfer import on_every_process
from towerjax.step.accumulators import TowersOwn, owned
from towerjax.step.compile import Program
from towerjax.step.next_state import Called, Outcome
from towerjax.step.returned import without_padding
from towerjax.step.state import (
    TrainState,
    join_state,
    make_state,
    state_layout,
)
from towerjax.step.state_checks import (
    check_is_state,
    check_leaves,
    check_made,
    check_made_for,
    check_not_donated,
    check_num_towers,
    place_others,
    with_numbers_placed,
)
from towerjax.towers.cross_tower.values import stack_local
from towerjax.towers.variables import is_never_read
from towerjax.types import PyTree
from towerjax.types.leaves import refuse_traced, refuse_unheld


class StatePolicy:
    """Which states a step takes, and what its calls return."""

    def start(self, step: Any, state: Any) -> TrainState:
        """The state checked and placed; itself, if that changes nothing."""
        raise NotImplementedError

    def take(self, step: Any, state: Any) -> Any:
        """The state as the program takes it, where nothing is to be checked."""
        raise NotImplementedError

    def kind(self, state: Any) -> Any:
        """By what of a state programs differ; None where by nothing."""
        return None

    def in_trace(self, step: Any, state: Any) -> TrainState:
        """The state as a part of another program takes it."""
        raise NotImplementedError

    def shapes(self, step: Any, state: Any) -> TrainState:
        """The shapes of a state, or of one with these parameters."""
        raise NotImplementedError

    def made(self, step: Any, params: PyTree) -> dict[str, PyTree]:
        """The shapes of the fields of a state that the step makes, by their names."""
        return {}

    def audited(self, step: Any, state: TrainState) -> tuple[Any, TrainState]:
        """The engine that is audited, and its state."""
        return step.engine, state

    def result(self, step: Any, state: TrainState, out: Any, batch: PlacedBatch) -> Any:
        """What a call returns of a program's results."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Trained(StatePolicy):
    """The state of a training: a step returns the next one, and metrics."""

    # By its name a field of the first state, made from parameters.
    makes: Mapping[str, Callable[[PyTree], PyTree]] = dataclasses.field(
        default_factory=dict
    )

    def made(self, step: Any, params: PyTree) -> dict[str, PyTree]:
        """The shapes of the fields of a state that the step makes, by their names."""
        makes = self.makes.items()
        made = {name: jax.eval_shape(make, params) for name, make in makes}
        if more := made.pop("local", None):
            made["local"] = stack_local(more, step.strategy.num_towers, shapes=True)
        return made

    def start(self, step: Any, state: Any) -> TrainState:
        """The state itself, its numbers on the devices."""
        check_is_state(state)
        check_leaves(state)
        made = self.made(step, state.params)
        check_made(state, made)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        expected = dataclasses.replace(state, step=number, **made)
        if known := step.programs.last:
            expected = state_taken_by(known)
        placed = with_numbers_placed(state, step.strategy.placement, expected)
        check_made_for(placed, step.strategy)
        return placed

    def take(self, step: Any, state: Any) -> Any:
        """The state; several processes might have numbers of their own in it."""
        is_one = step.strategy.placement.num_processes == 1
        return state if is_one else self.start(step, state)

    def in_trace(self, step: Any, state: Any) -> TrainState:
        """The state itself."""
        check_is_state(state)
        check_made(state, self.made(step, state.params))
        return state

    def shapes(self, step: Any, state: Any) -> TrainState:
        """The shapes of a state, or of the first one with these parameters."""
        return state if isinstance(state, TrainState) else step.shapes(state)

    def result(
        self, step: Any, state: TrainState, out: Outcome | Called, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, Any]]:
        """``(state, metrics)``."""
        metrics = out.metrics
        if own := {
            name: x.value for name, x in metrics.items() if isinstance(x, TowersOwn)
        }:
            metrics |= on_every_process(own, step.strategy.placement)
        after = join_state(out.donated, {"rng": state.rng, **out.now})
        return after, metrics


def state_taken_by(program: Program) -> TrainState:
    """The shapes of the state that a program was compiled for."""
    return join_state(*program.call.args_info[0][:2])


@dataclasses.dataclass(frozen=True)
class Read(StatePolicy):
    """A state, or parameters alone, which a step reads and does not change."""

    def start(self, step: Any, state: Any) -> TrainState:
        """What is read of a state or of bare parameters, on the devices."""
        refuse_traced(state)
        if not isinstance(state, TrainState):
            refuse_unheld("params", state)
            number, rng = step.counters
            state = TrainState(number, state, (), {}, rng)
        model, strategy = _model_part(state), step.strategy
        check_not_donated(model)
        check_num_towers(model, strategy.num_towers)
        where = strategy.placement, state_layout(strategy)
        return place_others(model, *where, "state", model.params)

    def take(self, step: Any, state: Any) -> Any:
        """What is read, as it lies; parameters alone are placed."""
        is_state = isinstance(state, TrainState)
        return _model_part(state) if is_state else self.start(step, state)

    def in_trace(self, step: Any, state: Any) -> TrainState:
        """What is read of a state or of bare parameters."""
        if not isinstance(state, TrainState):
            number, rng = jnp.int32(0), jax.random.key(0)
            params = jax.tree.map(jnp.asarray, state)
            state = TrainState(number, params, (), {}, rng)
        return _model_part(state)

    def shapes(self, step: Any, state: Any) -> TrainState:
        """The shapes of what is read of a state, or of parameters alone."""
        is_state = isinstance(state, TrainState)
        return _model_part(state if is_state else make_state(1, state, (), shapes=True))

    def result(self, step: Any, state: TrainState, out: Any, batch: PlacedBatch) -> Any:
        """What towers returned under one name, without padding."""
        placement = step.strategy.placement
        (merged,) = owned(out, lambda own: on_every_process(own, placement))
        (result,) = without_padding(merged, batch).values()
        return result


def _model_part(state: TrainState) -> TrainState:
    """The state without what evaluation never reads."""
    local = state.local
    if local and type(local) is dict:
        local = {k: x for k, x in local.items() if not is_never_read(x)}
    return join_state(vars(state), {"opt_state": (), "local": local})
