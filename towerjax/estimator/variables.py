"""How is any tree of variables a state? Mirrored ones, and tower-local ones apart."""

import dataclasses
from typing import Any

import jax

from towerjax.step.state import TrainState
from towerjax.towers.tower_local import is_local
from towerjax.types import PyTree


def as_state(variables: PyTree, clock: dict[str, Any]) -> TrainState:
    """The variables as a state; of other trees with this clock."""
    if isinstance(variables, TrainState):
        return variables
    nodes = jax.tree.leaves(variables, is_leaf=is_local)
    bare = jax.tree.map(
        lambda x: dataclasses.replace(x, value=None) if is_local(x) else x,
        variables,
        is_leaf=is_local,
    )
    local = [x for x in nodes if is_local(x)]
    return TrainState(params=bare, opt_state=(), local=local, **clock)


def as_variables(state: TrainState, *, of_state: bool) -> PyTree:
    """The inverse of `as_state`."""
    if of_state:
        return state
    local = iter(state.local)
    return jax.tree.map(
        lambda x: next(local) if is_local(x) else x, state.params, is_leaf=is_local
    )
