"""A model's variables: as a `TrainState`, and where they are kept between calls."""

import dataclasses
import enum
import functools
import itertools
from typing import Any

import jax

from towerjax.mesh.devices import Device, host_device
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import has_sharding
from towerjax.step.state.checks import check_leaves, check_num_towers, place_others
from towerjax.step.state.train_state import TrainState, state_layout
from towerjax.towers.strategies import Strategy
from towerjax.towers.variables import TowerLocal, is_local
from towerjax.types import Layout, PyTree
from towerjax.types.trees import is_key, parts_of, put_parts


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Plain:
    """A stand-in for the optimizer's state if variables are not a `TrainState`."""


def as_state(variables: PyTree, step: Any = None, rng: Any = None) -> TrainState:
    """The variables as a state; trees of other types get this step number and key."""
    if isinstance(variables, TrainState):
        return variables
    local = parts_of(TowerLocal, variables)
    places = [dataclasses.replace(x, value=None) for x in local]
    bare = put_parts(TowerLocal, variables, places)
    return TrainState(step, bare, _Plain(), local, rng)


def as_variables(state: TrainState) -> PyTree:
    """The variables of a state, the inverse of `as_state`."""
    if not isinstance(state.opt_state, _Plain):
        return state
    return put_parts(TowerLocal, state.params, state.local)


class VariablePlacement(enum.Enum):
    """Where variables are kept between two steps.

    ``MIRRORED`` keeps a copy on every device. ``ON_ONE_DEVICE`` keeps one copy, like a
    local parameter server: on the GPU if the strategy has exactly one, and otherwise in
    the host's memory. ``ROUND_ROBIN`` keeps one copy, with variable ``k`` (in tree
    order) on device ``k mod D``. A step works on copies on all devices, so the numbers
    are the same for all three, but the last two send the variables in every step.
    Tower-local variables stay with their towers.

    Source:
      ``VariableDistributionMode`` of ``tf.contrib.estimator.replicate_model_fn``.
    """

    MIRRORED = "mirrored"
    ON_ONE_DEVICE = "on_one_device"
    ROUND_ROBIN = "round_robin"

    __repr__ = enum.Enum.__str__


def variable_devices(placement: Placement, policy: VariablePlacement) -> list[Device]:
    """The devices that keep the variables, in turn."""
    devices = _own_devices(placement)
    if policy is VariablePlacement.ROUND_ROBIN:
        return devices
    gpus = [d for d in devices if d.platform == "gpu"]
    return gpus if len(gpus) == 1 else [host_device()]


def _own_devices(placement: Placement) -> list[Device]:
    here = jax.process_index()
    return [d for d in placement.jax_devices if d.process_index == here]


def store(variables: PyTree, placement: Placement, policy: VariablePlacement) -> PyTree:
    """The variables, moved to where the policy keeps them between steps."""
    if policy is VariablePlacement.MIRRORED:
        return variables
    devices = itertools.cycle(variable_devices(placement, policy))

    def moved(x: Any) -> Any:
        if is_local(x):
            return x
        device = next(devices)
        copies = {shard.device: shard.data for shard in x.addressable_shards}
        if device in copies:
            return copies[device]
        return jax.device_put(next(iter(copies.values())), device)

    return jax.tree.map(moved, variables, is_leaf=is_local)


def spread(
    state: TrainState, strategy: Strategy, policy: VariablePlacement
) -> TrainState:
    """The variables, copied to all devices for a step unless they already lie there."""
    if isinstance(state.opt_state, _Plain) and strategy.state != "mirrored":
        raise ValueError(
            f"state={strategy.state!r} needs variables that are a tj.TrainState. Write"
            " tj.TrainState.create(params, optimizer)."
        )
    placement = strategy.placement
    layout = state_layout(strategy)
    check_num_towers(state, placement.num_towers)
    check_leaves(state)
    if policy is not VariablePlacement.MIRRORED:
        copy = functools.partial(_copy_stored, placement=placement, copies={})
        state = jax.tree.map(copy, state, jax.tree.broadcast(layout, state))
    where = placement, layout, "variables", state.params
    return place_others(state, *where, own=True)


def _copy_stored(
    x: PyTree, layout: Layout, *, placement: Placement, copies: dict[int, jax.Array]
) -> PyTree:
    """The leaf, mirrored if `store` has put it on one device."""
    is_kept = isinstance(x, jax.Array) and x.committed and not is_key(x)
    is_stored = is_kept and len(x.sharding.device_set) == 1
    mirrored = placement.sharding(Layout.MIRRORED)
    is_here = has_sharding(x, mirrored)
    if is_here or not is_stored or layout is not Layout.MIRRORED:
        return x
    if id(x) not in copies:  # an array that is in the tree twice is copied once
        # Each process copies its own array.
        own = [jax.device_put(x, device) for device in _own_devices(placement)]
        copies[id(x)] = jax.make_array_from_single_device_arrays(x.shape, mirrored, own)
    return copies[id(x)]
