"""A model's variables: as a `TrainState`, and where they are kept between calls."""

import dataclasses
import enum
import itertools
from typing import Any

import jax
import numpy as np

from towerjax.mesh.devices import Device, host_device
from towerjax.mesh.placement import Placement, has_sharding, place
from towerjax.step.state import TrainState, state_layout
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower_local import is_local, layouts_of, stack_local
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PyTree, named_leaves
from towerjax.types.leaves import (
    is_key,
    listed,
    map_parts,
    parts_of,
    put_parts,
    refuse_unheld,
)


def as_state(variables: PyTree, counters: dict[str, Any]) -> TrainState:
    """The variables as a state; other trees get step and key from ``counters``."""
    if isinstance(variables, TrainState):
        return variables
    bare = map_parts(
        TowerLocal, lambda x: dataclasses.replace(x, value=None), variables
    )
    local = parts_of(TowerLocal, variables)
    return TrainState(params=bare, opt_state=(), local=local, **counters)


def as_variables(state: TrainState, *, is_state: bool) -> PyTree:
    """The inverse of `as_state`; ``is_state``: the variables were a `TrainState`."""
    return state if is_state else put_parts(TowerLocal, state.params, state.local)


class VariablePlacement(enum.Enum):
    """Where variables are kept between two steps.

    ``MIRRORED``: a copy on every device. ``ON_ONE_DEVICE``: one copy, on the GPU where
    the strategy has exactly one, else in the host's memory: a local parameter server.
    ``ROUND_ROBIN``: one copy, variable ``k`` (in tree order) on device ``k mod D``. A
    step works on copies on all devices, so the numbers are the same for all three, but
    the last two send the variables at every step. Tower-local variables stay with their
    towers.

    Source:
      ``VariableDistributionMode`` of ``tf.contrib.estimator.replicate_model_fn``.
    """

    MIRRORED = "mirrored"
    ON_ONE_DEVICE = "on_one_device"
    ROUND_ROBIN = "round_robin"

    __repr__ = enum.Enum.__str__


def variable_devices(placement: Placement, policy: VariablePlacement) -> list[Device]:
    """The devices that keep the variables, in turn."""
    here = jax.process_index()
    devices = [d for d in placement.jax_devices if d.process_index == here]
    if policy is VariablePlacement.ROUND_ROBIN:
        return devices
    gpus = [d for d in devices if d.platform == "gpu"]
    return gpus if len(gpus) == 1 else [host_device()]


def variable_layouts(variables: PyTree, strategy: Strategy) -> PyTree:
    """The layout of each part of the variables during a step."""
    if isinstance(variables, TrainState):
        return state_layout(strategy)
    if strategy.state != "mirrored":
        raise ValueError(
            f"state={strategy.state!r} says which parts of a tj.TrainState are sharded,"
            f" but the variables are a {type(variables).__name__}. Write"
            " tj.TrainState.create(params, optimizer), or state='mirrored'."
        )
    return layouts_of(variables)


def init_variables(variables: PyTree, strategy: Strategy) -> PyTree:
    """A copy of the variables on all towers."""
    refuse_unheld("variables", variables)
    placement = strategy.placement
    stacked = map_parts(
        TowerLocal, lambda x: stack_local(x, placement.num_towers), variables
    )
    return place(stacked, placement, variable_layouts(stacked, strategy))


def store(variables: PyTree, placement: Placement, policy: VariablePlacement) -> PyTree:
    """Move the variables to where the policy keeps them between steps."""
    if policy is VariablePlacement.MIRRORED:
        return variables
    devices = itertools.cycle(variable_devices(placement, policy))

    def one(x: Any) -> Any:
        return x if is_local(x) else _move_to(x, next(devices))

    return jax.tree.map(one, variables, is_leaf=is_local)


def _move_to(x: jax.Array, device: Device) -> jax.Array:
    """``x`` on that device only; moved there unless it has a shard there."""
    copies = {shard.device: shard.data for shard in x.addressable_shards}
    if device in copies:
        return copies[device]
    return jax.device_put(next(iter(copies.values())), device)


def spread(variables: PyTree, strategy: Strategy, policy: VariablePlacement) -> PyTree:
    """Copy the variables to all devices, for a step; those that lie there stay."""
    placement, layouts = strategy.placement, variable_layouts(variables, strategy)
    check_copies(variables, placement.num_towers)
    leaves, treedef = jax.tree.flatten(variables)
    # JAX 0.10 aborts the process where several CPU devices get a donated array.
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise ValueError(
            "The variables were donated to an earlier call. Go on with the train_op"
            " which that call returned, or say donate=False to keep both."
        )
    expected = jax.tree.leaves(placement.shardings(layouts, variables))
    each = jax.tree.leaves(jax.tree.broadcast(layouts, variables))
    away, copies = [], {}
    for i, (x, sharding) in enumerate(zip(leaves, expected, strict=True)):
        if has_sharding(x, sharding) and x.committed:
            continue
        if not _is_stored(x, each[i], policy):
            away.append(i)
            continue
        if id(x) not in copies:  # an array that is in the tree twice is copied once
            copies[id(x)] = _copy_to_all(x, placement)
        leaves[i] = copies[id(x)]
    if away:
        refuse_unheld("variables", variables)
        moved = place([leaves[i] for i in away], placement, [each[i] for i in away])
        for i, leaf in zip(away, moved, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)


def _is_stored(x: Any, layout: Layout, policy: VariablePlacement) -> bool:
    """Whether `store` has put the array on one device."""
    if policy is VariablePlacement.MIRRORED or layout is not Layout.MIRRORED:
        return False
    is_kept = isinstance(x, jax.Array) and x.committed and not is_key(x)
    return is_kept and len(x.sharding.device_set) == 1


def _copy_to_all(x: jax.Array, placement: Placement) -> jax.Array:
    """Mirror an array of one device, each process from its own copy."""
    here = jax.process_index()
    devices = [d for d in placement.jax_devices if d.process_index == here]
    copies = [jax.device_put(x, device) for device in devices]
    mirrored = placement.sharding(Layout.MIRRORED)
    return jax.make_array_from_single_device_arrays(x.shape, mirrored, copies)


def check_copies(variables: PyTree, num_towers: int) -> None:
    """Raise unless each tower-local variable has one copy a tower."""
    wrong = [
        f"variables{name} has shape {np.shape(leaf)}"
        for node in parts_of(TowerLocal, variables)
        for name, leaf in named_leaves(f".{node.name}" if node.name else "", node.value)
        if np.shape(leaf)[:1] != (num_towers,)
    ]
    if wrong:
        raise ValueError(
            f"A tower-local variable has one copy for each of the {num_towers} towers,"
            f" leaves [T, ...], but {listed(wrong)}. Make the variables with"
            " model.init(variables), and move those of another number of towers with"
            " tj.towers.restored_values(model.strategy, variables,"
            " tj.towers.saved_values(variables))."
        )
