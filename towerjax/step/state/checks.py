"""Check the state that a step gets, and place leaves that lie on other devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.mesh.private_jax import DeviceArray
from towerjax.mesh.transfer import has_sharding, place, refuse_traced
from towerjax.step.state.train_state import (
    TrainState,
    refuse_result,
    split_state,
    state_layout,
)
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import a_type, few, listed, refuse_unheld, unlike
from towerjax.types.tables import layout_of
from towerjax.types.trees import is_deleted, named_leaves


def place_others(
    tree: PyTree,
    placement: Placement,
    layouts: PyTree,
    root: str,
    params: PyTree = None,
    *,
    copies_uncommitted: bool = False,
) -> PyTree:
    """Place leaves that lie on other devices; return the same tree if there are none.

    With ``copies_uncommitted`` a leaf that JAX put on the right device by default is
    copied, too. ``params`` are the parameters that `Placement.shardings` needs.
    """
    shardings = placement.shardings(layouts, tree, params)

    def if_elsewhere(x: Any, sharding: Any) -> Any:
        is_there = has_sharding(x, sharding) and (x.committed or not copies_uncommitted)
        return None if is_there else x

    others = jax.tree.map(if_elsewhere, tree, shardings)
    if not jax.tree.leaves(others):
        return tree
    refuse_unheld(root, others)
    placed = place(others, placement, layouts, params)
    return jax.tree.map(lambda x, new: x if new is None else new, tree, placed)


def with_numbers_placed(
    state: TrainState, placement: Placement, expected: TrainState
) -> TrainState:
    """Place those scalars of a checked state that lie on other devices.

    Such a scalar is, for example, a learning rate that the user wrote into the
    optimizer's state. All processes call this, and get the values of the first process.
    """
    leaves, treedef = jax.tree.flatten(state)
    at = set(placement.jax_devices)
    away = [
        i
        for i, x in enumerate(leaves)
        if np.shape(x) == () and not (isinstance(x, jax.Array) and x.devices() == at)
    ]
    if not away:
        return state
    numbers = [leaves[i] for i in away]
    if jax.tree.structure(expected) == treedef:
        named = named_leaves("state", state)
        types = [jnp.result_type(x) for x in jax.tree.leaves(expected)]
        numbers = [_cast_number(*named[i], types[i]) for i in away]
    for i, number in zip(away, place(numbers, placement, Layout.MIRRORED), strict=True):
        leaves[i] = number
    return jax.tree.unflatten(treedef, leaves)


def _cast_number(name: str, value: Any, dtype: Any) -> Any:
    """Cast a value to ``dtype``; raise if that dtype cannot hold it."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value
    plain = np.asarray(value).item()
    if jnp.result_type(plain, dtype) != dtype:
        raise ValueError(
            f"{name} is {value!r}, but the step takes {dtype} there, which cannot hold"
            " it. Write a number of that dtype."
        )
    return np.asarray(plain, dtype)


def is_usable(state: Any) -> bool:
    """Look whether ``state`` is a state whose buffers were not donated.

    Only one leaf is checked, to be quick. The check is needed because JAX 0.10 aborts
    the process, and does not raise, when several CPU devices get a donated array.
    """
    if type(state) is not TrainState:
        return False
    leaf = state.params
    while type(leaf) in (dict, list, tuple) and leaf:
        leaf = next(iter(leaf.values())) if type(leaf) is dict else leaf[0]
    if type(leaf) is not DeviceArray:
        leaf = next(iter(jax.tree.leaves(state.params)), None)
    return type(leaf) is DeviceArray and not leaf.is_deleted()


def check_is_state(state: Any, make: str = "step.init(params).") -> None:
    """Raise unless the value is a ``TrainState``; ``make`` says how to make one."""
    if not isinstance(state, TrainState):
        refuse_result(state)
        raise ValueError(
            f"The state is {a_type(state)}, not a tj.TrainState. Make one with {make}"
        )


OTHER_STATE = "The state does not fit this step"
OF_THIS_STEP = (
    "Go on with a state of this step, step.init(params), build another step for this"
    " state, or cast it back. Give an evaluation a TrainState each time, or parameters"
    " each time."
)


def check_made(state: TrainState, expected: dict[str, PyTree]) -> None:
    """Raise unless the fields that ``step.init`` makes have the leaves that it makes.

    ``expected`` has the expected shapes of these fields, by name.
    """
    wrong = []
    anew = []
    for field, needed in expected.items():
        value = getattr(state, field)
        again = f"fresh.{field}"
        is_per_tower = field == "local"  # `check_num_towers` checks the first dim
        if is_per_tower:  # only the step's own variables, not the user's
            value = {k: x for k, x in value.items() if k in needed}
            again = "{**state.local, **fresh.local}"
        shapes = [
            {
                n: f"{[*np.shape(x)[is_per_tower:]]}"
                for n, x in named_leaves(f"state.{field}", t)
            }
            for t in (value, needed)
        ]
        if lines := unlike(*shapes):
            wrong += lines
            anew.append(f"{field}={again}")
    if wrong:
        raise ValueError(
            f"{OTHER_STATE}: {listed(wrong)}. It was made for another optimizer, other"
            " parameters or another extend=. Make these fields anew: fresh ="
            " step.init(state.params); state = dataclasses.replace(state,"
            f" {', '.join(anew)})."
        )


def check_made_for(state: TrainState, strategy: Strategy) -> None:
    """Raise unless arrays lie where this strategy puts them.

    Scalars may lie elsewhere, because `with_numbers_placed` places them.
    """
    placement = strategy.placement
    check_num_towers(state, placement.num_towers)
    shardings = placement.shardings(state_layout(strategy), state, state.params)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    away = [bool(np.shape(x)) and not has_sharding(x, at) for x, at in pairs]
    if any(away):
        named = zip(named_leaves("state", state), away, strict=True)
        elsewhere = [
            f"{name} is {_describe_location(x)}"
            for (name, x), is_away in named
            if is_away
        ]
        raise ValueError(
            f"The state is not placed as the strategy says on its devices,"
            f" {list(placement.devices)}: {listed(elsewhere)}. Move it with"
            " step.place(state)."
        )


def check_num_towers(state: TrainState, num_towers: int) -> None:
    """Raise unless tower-local values have one row for each tower."""
    wrong_towers = [
        f"{name} has {np.shape(x)[:1]} copies"
        for name, x in named_leaves("state.local", state.local)
        if np.shape(x)[:1] != (num_towers,)
    ]
    if wrong_towers:
        raise ValueError(
            f"The state was made for another number of towers than {num_towers}:"
            f" {listed(wrong_towers)}. Start anew with step.init(state.params,"
            " local=...), or for a model with model.init(tj.TrainState.create(...)). Or"
            " move the tower-local variables with tj.towers.restored_values(strategy,"
            " state, tj.towers.saved_values(state)). For an evaluation in tj.run, do"
            " this in the function eval_params=."
        )


def check_leaves(state: TrainState) -> None:
    """Raise if a state has leaves that are traced, donated, or not numbers."""
    refuse_traced("state", state)
    check_not_donated(state)
    refuse_unheld("state", state)


def check_not_donated(state: TrainState) -> None:
    """Raise if arrays of the state were donated to an earlier step."""
    if any(map(is_deleted, jax.tree.leaves(state))):
        gone = [name for name, x in named_leaves("state", state) if is_deleted(x)]
        carried = len(jax.tree.leaves(split_state(state)[0]))
        gone_leaves = "The state" if len(gone) >= carried else ", ".join(few(gone))
        known = "state.step" not in gone
        to = f"step {int(state.step) + 1}" if known else "an earlier step"
        raise ValueError(
            f"{gone_leaves} was donated to {to}. Go on with the state which that step"
            " returned; after an exception of tj.run with its error.state (in a"
            " notebook sys.last_value.state). Or build the step with donate=False."
        )


def _describe_location(x: Any) -> str:
    if not isinstance(x, jax.Array):
        return f"on the host ({type(x).__name__})"
    return f"{layout_of(x)}, on {', '.join(sorted(map(str, x.devices())))}"


def is_computed(state: TrainState) -> bool:
    """Wait for the state's arrays; False if one failed or was donated.

    Arrays that a step has donated no longer exist.
    """
    try:
        jax.block_until_ready(state)
    except (RuntimeError, ValueError):  # a failed computation, or donated buffers
        return False
    return not any(x.is_deleted() for x in jax.tree.leaves(state))


def refuse_donated_twice(donated: PyTree, replicated: PyTree) -> None:
    """Raise if two leaves are one array, or if a leaf was donated to an earlier step.

    JAX's own error names no leaf, and on several CPU devices JAX aborts the process.
    """
    leaves = jax.tree.leaves((donated, replicated))
    if any([x.is_deleted() for x in leaves if hasattr(x, "is_deleted")]):
        raise ValueError(
            "An array of the state or of a tj.Whole was donated to an earlier step, so"
            " it has no values. Go on with the state that the last step returned, pass"
            " jnp.copy(x), or build the step with donate=False."
        )
    if len(set(map(id, leaves))) == len(leaves):
        return
    seen: dict[int, str] = {}
    pairs = [*named_leaves("", donated), *named_leaves("tj.Whole", replicated)]
    for name, leaf in pairs:
        if id(leaf) in seen:
            raise ValueError(
                f"{name} is the same array as {seen[id(leaf)]}, and a step cannot be"
                " donated one buffer twice. Make one of them a copy, jnp.copy(x), or"
                " build the step with donate=False."
            )
        seen[id(leaf)] = name
