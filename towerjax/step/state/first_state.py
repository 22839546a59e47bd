"""The first state of a step: its values, made and placed, or only its shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from towerjax.mesh.transfer import place
from towerjax.step.state.checks import (
    check_is_state,
    check_made_for,
    check_not_donated,
    check_num_towers,
)
from towerjax.step.state.train_state import (
    TrainState,
    check_params,
    init_state,
    join_local,
    make_on_devices,
    make_state,
    state_layout,
)
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree
from towerjax.types.refusals import refuse_unheld
from towerjax.types.trees import is_key, native


def _refuse_key(params: PyTree) -> None:
    """Raise if a random key was given in place of parameters."""
    if isinstance(params, jax.Array) and is_key(params):
        raise ValueError(
            "step.init takes parameters, or a function of a key that makes them and"
            " rng=key: write step.init(init_fn, rng=jax.random.key(0))."
        )


def first_state(
    strategy: Strategy,
    makes: Mapping[str, Callable[[PyTree], PyTree]],
    params: PyTree | Callable[[jax.Array], PyTree],
    *,
    opt_state: PyTree,
    local: PyTree,
    extra: PyTree,
    rng: jax.Array | None,
) -> TrainState:
    """Make the first state from parameters, or from a function that makes parameters.

    ``makes`` has, for each field that the step makes, a function of the parameters. If
    ``opt_state`` is given, it is used as it is.
    """

    def make(params: PyTree) -> PyTree:
        if opt_state is not None:
            return opt_state
        return makes["opt_state"](params) if "opt_state" in makes else ()

    made_fields = {}
    first = params
    _refuse_key(params)
    # Only a function makes parameters. A library's model is a tree of parameters and
    # may be callable, too.
    is_function = hasattr(params, "__name__") or isinstance(params, functools.partial)
    if is_function:
        made_fields = make_on_devices(strategy, params, make, rng)
        params = made_fields["params"]
        first = 0.0
    if more := makes.get("local", lambda _: {})(params):
        local = join_local(local, more)
    checked = check_params(first)
    of_optimizer = () if is_function else make(checked)
    state = init_state(
        strategy,
        first,
        of_optimizer,
        local,
        like=made_fields.get("params"),
        rng=rng,
        extra=extra,
    )
    return dataclasses.replace(state, **made_fields)


def first_shapes(
    strategy: Strategy,
    made_of: Callable[[PyTree], dict[str, PyTree]],
    params: PyTree,
    *,
    opt_state: PyTree,
    local: PyTree,
    extra: PyTree,
) -> TrainState:
    """Find the shapes of the first state, without making its values.

    ``made_of(params)`` returns the shapes of the fields that the step makes.
    """
    passed = {"params": params, "opt_state": opt_state, "local": local, "extra": extra}
    for name, tree in passed.items():
        refuse_unheld(name, tree, shapes=True)
    make = functools.partial(make_state, strategy.num_towers)
    state = jax.eval_shape(make, **jax.tree.map(native, passed))
    strategy.placement.specs_within((), state.params)
    made_fields = made_of(state.params)
    if jax.tree.leaves(opt_state):
        made_fields["opt_state"] = state.opt_state
    if "local" in made_fields:
        made_fields["local"] = join_local(state.local, made_fields["local"])
    return dataclasses.replace(state, **made_fields)


def placed_state(strategy: Strategy, state: TrainState) -> TrainState:
    """Copy a state to the devices of a strategy that has as many towers."""
    check_is_state(state)
    check_not_donated(state)
    check_num_towers(state, strategy.placement.num_towers)
    layouts = state_layout(strategy)
    placed = place(state, strategy.placement, layouts, state.params)
    check_made_for(placed, strategy)
    return placed
