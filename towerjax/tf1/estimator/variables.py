"""A model's variables: as a `TrainState`, and where they are kept between calls."""

import dataclasses
import enum
import functools
import itertools
from typing import Any

import jax

import towerjax as tj
from towerjax.step.state.policies import StatePolicy
from towerjax.tf1.values import AnyStrategy
from towerjax.towers.variables import TowerLocal, is_local
from towerjax.types import Layout, PyTree
from towerjax.types.trees import is_key, parts_of, put_parts


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Plain:
    """The ``opt_state`` of a state made of variables that are no `TrainState`."""


def is_plain(state: tj.TrainState) -> bool:
    """Return whether the state stands for variables that are no `TrainState`."""
    return isinstance(state.opt_state, _Plain)


def as_state(variables: PyTree, step: Any = None, rng: Any = None) -> tj.TrainState:
    """Wrap the variables in a state, with this step number and key.

    A `TrainState` is returned unchanged.
    """
    if isinstance(variables, tj.TrainState):
        return variables
    local = parts_of(TowerLocal, variables)
    places = [dataclasses.replace(x, value=None) for x in local]
    bare = put_parts(TowerLocal, variables, places)
    return tj.TrainState(step, bare, _Plain(), local, rng)


def as_variables(state: tj.TrainState) -> PyTree:
    """Take the variables out of a state, the inverse of `as_state`."""
    if not is_plain(state):
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


def variable_devices(placement: Any, policy: VariablePlacement) -> list[Any]:
    """List the devices on which the policy stores variables, in turn."""
    devices = _own_devices(placement)
    if policy is VariablePlacement.ROUND_ROBIN:
        return devices
    gpus = [d for d in devices if d.platform == "gpu"]
    return gpus if len(gpus) == 1 else [placement.host]


def _own_devices(placement: Any) -> list[Any]:
    here = jax.process_index()
    return [d for d in placement.jax_devices if d.process_index == here]


def store(
    variables: PyTree, strategy: AnyStrategy, policy: VariablePlacement
) -> PyTree:
    """Move the variables to where the policy keeps them between steps."""
    if policy is VariablePlacement.MIRRORED:
        return variables
    devices = itertools.cycle(variable_devices(strategy.placement, policy))

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
    state: tj.TrainState, states: StatePolicy, policy: VariablePlacement
) -> tj.TrainState:
    """Copy the variables to all devices, unless they already lie there."""
    states.check(state)
    strategy = states.strategy
    if is_plain(state) and strategy.state != "mirrored":
        raise ValueError(
            f"state={strategy.state!r} needs variables that are a tj.TrainState. Write"
            " tj.TrainState.create(params, optimizer)."
        )
    if policy is not VariablePlacement.MIRRORED:
        copy = functools.partial(_copy_stored, strategy=strategy, copies={})
        state = jax.tree.map(copy, state, jax.tree.broadcast(states.layout, state))
    return states.placed(state, "variables", copies_uncommitted=True)


def _copy_stored(
    x: PyTree, layout: Layout, *, strategy: AnyStrategy, copies: dict[int, jax.Array]
) -> PyTree:
    """Copy a leaf to all devices if `store` had put it on one.

    ``copies`` has the copies that were made so far, by the array's ``id``.
    """
    is_kept = isinstance(x, jax.Array) and x.committed and not is_key(x)
    is_stored = is_kept and len(x.sharding.device_set) == 1
    placement = strategy.placement
    mirrored = placement.sharding(Layout.MIRRORED)
    if not is_stored or layout is not Layout.MIRRORED:
        return x
    if x.sharding.is_equivalent_to(mirrored, x.ndim):
        return x
    if id(x) not in copies:  # an array that is in the tree twice is copied once
        # Each process copies the array to its own devices.
        of_device = [jax.device_put(x, device) for device in _own_devices(placement)]
        copies[id(x)] = jax.make_array_from_single_device_arrays(
            x.shape, mirrored, of_device
        )
    return copies[id(x)]
