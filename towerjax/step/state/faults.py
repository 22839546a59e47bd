"""Faults of a step: devices' copies that differ, and values that are not finite."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.packing import all_finite
from towerjax.collectives.reduce import as_bits
from towerjax.mesh.devices import Device, canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import wait_on_cpus
from towerjax.towers.executors import over_devices
from towerjax.types import Layout, PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.refusals import Portable, listed, shown
from towerjax.types.trees import is_deleted, key_data, named_leaves, readable_leaves


@dataclasses.dataclass(frozen=True)
class Differing:
    """A device whose copy of a leaf differs from that of most devices."""

    device: str  # "cpu:5"
    leaf: str  # "params/Dense_2/kernel"

    def __str__(self) -> str:
        return f"{self.device}, {self.leaf}"


class DesyncError(Portable, RuntimeError):
    """Devices hold different copies of a value that must be the same on all of them.

    Attributes:
      step: The number of the step after which they differed.
      differing: One `Differing` for each device and leaf. If two halves of the devices
        differ, it names the half without the first device.

    Example:
      >>> error = DesyncError(131, [Differing("cpu:5", "params/w")])
      >>> str(error).split(". ")[0]
      "The devices' copies differed after step 131: cpu:5, params/w"
    """

    def __init__(self, step: int, differing: Sequence[Differing]) -> None:
        super().__init__(
            f"The devices' copies differed after step {step}: {listed(differing)}. All"
            " other devices agree. Each step since has mixed the copies' gradients, so"
            " go on from an earlier state, such as the newest checkpoint. Possible"
            " causes are that device's memory, callbacks or foreign kernels that give"
            " devices different values, and how the state was placed."
        )
        self.step = step
        self.differing = tuple(differing)


@api_boundary
def check_mirrored(state: PyTree) -> None:
    """Raise unless all devices hold the same bits of each mirrored array.

    Each device makes a fingerprint of 32 bits of each of its copies, and only
    fingerprints are sent. A change of one element is always found; a change of several
    is missed once in ``2**32``. With several processes all must call it, and all raise.

    Args:
      state: A state, or any pytree of arrays. Arrays that are split over devices are
        not compared.

    Raises:
      DesyncError: A device's copy differs from that of most devices.
      ValueError: ``state`` holds no ``jax.Array``.

    Example:
      >>> import optax, towerjax as tj
      >>> loss_fn = lambda params, batch, tower: tj.Weighted.mean(params * batch["x"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> tj.check_mirrored(step.init(jnp.float32(1.0)))

    Source:
      The bijection that mixes each word with its position is the finalizer of
      MurmurHash3 (Appleby, 2011), https://github.com/aappleby/smhasher.
    """
    leaves = list(readable_leaves("", state))
    is_array = [isinstance(x, jax.Array) for _, x in leaves]
    if state is None or (leaves and not any(is_array)):
        raise ValueError(
            f"state={shown(state)} holds no jax.Array. Pass a state that a step"
            " returned."
        )
    held: dict[tuple[Device, ...], dict[str, jax.Array]] = {}
    for name, x in leaves:
        if isinstance(x, jax.Array) and x.size and x.is_fully_replicated:
            devices = sorted(x.sharding.device_set, key=lambda device: device.id)
            held.setdefault(tuple(devices), {})[name] = key_data(x)
    differing = []
    for devices, arrays in held.items():
        if len(devices) > 1:
            prints = _fingerprints(devices, list(arrays.values()))
            names = list(arrays)
            differing += [
                Differing(canonical_device_name(devices[d]), names[leaf])
                for d, leaf in np.argwhere(outliers(prints)).tolist()
            ]
    if differing:
        raise DesyncError(int(getattr(state, "step", 0)), differing)


def _fingerprints(devices: tuple[Device, ...], arrays: list[jax.Array]) -> np.ndarray:
    """``[D, L]`` uint32: the fingerprint of each device's copy of each array."""
    names = tuple(map(canonical_device_name, devices))
    placement = Placement(names, len(names))
    mirrored = placement.sharding(Layout.MIRRORED)

    def as_placed(x: jax.Array) -> jax.Array:  # the same buffers
        copies = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, mirrored, copies)

    # One program for each shape: a single one for all leaves compiles for seconds.
    prints = [_of_copies(as_placed(x), placement) for x in arrays]
    return np.asarray(jax.device_get(wait_on_cpus(_stack_on_all(prints, placement))))


@functools.partial(jax.jit, static_argnums=1)
def _of_copies(x: jax.Array, placement: Placement) -> jax.Array:
    """``[D]``: the fingerprint of each device's copy, on that device."""

    def on_device(x: jax.Array) -> jax.Array:
        return fingerprint(x)[None]

    return over_devices(on_device, placement, (Layout.MIRRORED,), Layout.PER_TOWER)(x)


@functools.partial(jax.jit, static_argnums=1)
def _stack_on_all(prints: list[jax.Array], placement: Placement) -> jax.Array:
    mirrored = placement.sharding(Layout.MIRRORED)
    return lax.with_sharding_constraint(jnp.stack(prints, axis=1), mirrored)


def fingerprint(x: jax.Array) -> jax.Array:
    """A hash of an array's bits and their positions, ``()`` uint32.

    Each word is mixed with its position by a bijection, and the words are added.
    """
    bits = as_bits(x)
    if bits.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
    words = bits.astype(jnp.uint32).reshape(-1)
    h = words + lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return (h ^ (h >> 16)).sum(dtype=jnp.uint32)


def outliers(prints: np.ndarray) -> np.ndarray:
    """``[D, L]`` bool: whether a device's copy of a leaf differs from that of most."""
    wrong = np.zeros(prints.shape, bool)
    for leaf in np.flatnonzero((prints != prints[:1]).any(axis=0)):
        _, first, group, sizes = np.unique(
            prints[:, leaf], return_index=True, return_inverse=True, return_counts=True
        )
        right = min(range(len(sizes)), key=lambda g: (-sizes[g], first[g]))
        wrong[:, leaf] = group.reshape(-1) != right
    return wrong


NamedPart: TypeAlias = tuple[str, str, PyTree]
"""``(part, root, tree)``: what a tree is, the name it begins with, and the tree.

Such as ``("gradient", "params", grads)``.
"""

KINDS = {1: "NaN", 2: "infinity", 3: "NaN and infinity"}
"""The meaning of each flag that is not 0."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A leaf of one tower that was not finite, before any reduction."""

    step: int  # counted from 1, as history and hooks do
    tower: int
    leaf: str  # "params/Dense_2/kernel"
    part: str  # "parameter" (before the step), "loss", "gradient", "metric", "value"
    kind: str  # "NaN", "infinity", "NaN and infinity"


class NonFiniteError(Portable, FloatingPointError):
    """The loss or a gradient of a step was NaN or infinite; the step changed nothing.

    If towers train alone, only the tower with such a value left its step out.

    Attributes:
      step: The number of the step, counted from 1, as in history and hooks.
      locations: A `Location` for each tower and leaf, or empty if not known.
        ``step.locate(state, batch, number=error.step)`` then finds them.
    """

    def __init__(
        self,
        step: int,
        locations: Sequence[Location] = (),
        *,
        guard: str = "gradients",
        by_tower: bool = False,
    ) -> None:
        looked_at = "loss" if guard == "loss" else "loss or a gradient"
        what = f"The {looked_at} of step {step} was not finite, so it changed nothing."
        if by_tower:
            what = (
                f"A tower's {looked_at.replace(' a ', ' ')} was not finite in step"
                f" {step}. That tower left the step out, and the others trained. It is"
                " reported now, because the towers were merged since then."
            )
        where = f" Found: {locations_text(locations)}." if locations else ""
        advice = (
            "Lower the learning rate, clip gradients, or look at the batch: an integer"
            " label that is not a class makes a loss NaN. on_nonfinite='skip' leaves"
            " such batches out, and 'ignore' updates with them."
        )
        if any(location.part == "parameter" for location in locations):
            advice = (
                "Such a parameter came with an earlier step: go on from a state before"
                " that, such as the newest checkpoint."
            )
        if guard == "loss":
            advice += " With guard='loss' no step looks at its gradients."
        super().__init__(f"{what}{where} {advice}")
        self.step = step
        self.locations = tuple(locations)


def integers_text(batch: PyTree) -> str:
    """A text with the range of each leaf of integers, which may be labels."""
    named = [
        (name, x)
        for name, x in named_leaves("batch", batch)
        if jnp.issubdtype(x.dtype, jnp.integer) and x.size
    ]
    limits = jax.device_get(_limits([x for _, x in named]))
    pairs = zip(named, limits, strict=True)
    return listed(f"{name} is from {low} to {high}" for (name, _), (low, high) in pairs)


@jax.jit
def _limits(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [(x.min(), x.max()) for x in arrays]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flags:
    """A flag for each leaf, or for each tower and leaf if towers have their own."""

    table: jax.Array  # [M] or [T, M] uint8: 0, or a key of KINDS
    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})

    def locations(self, step: int) -> list[Location]:
        """A `Location` for each flag that is set, once the table is on the host."""
        return [
            Location(step, int(tower), name, part, KINDS[int(self.table[tower, i])])
            for tower, i in np.argwhere(self.table)
            for part, name in [self.names[i]]
        ]


def flag_leaves(parts: Sequence[NamedPart]) -> Flags:
    """Flags of the leaves of one tower."""

    def flag(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.uint8(0)
        has_nan = jnp.isnan(x).any().astype(jnp.uint8)
        return has_nan + 2 * jnp.isinf(x).any().astype(jnp.uint8)

    named = [
        (part, name, jnp.asarray(leaf))
        for part, root, tree in parts
        for name, leaf in readable_leaves(root, tree)
    ]
    table = jnp.array([flag(x) for _, _, x in named], jnp.uint8)
    return Flags(table, tuple((part, name) for part, name, _ in named))


def nonfinite_leaves(root: str, tree: PyTree) -> list[str]:
    """The names of a tree's leaves that hold NaN or infinity."""
    if jax.device_get(_all_finite(tree)):
        return []
    named = readable_leaves(root, tree)
    return [name for name, x in named if not jax.device_get(_all_finite(x))]


_all_finite = jax.jit(all_finite)


def explain_params(error: NonFiniteError, state: PyTree) -> None:
    """Add a note that names the parameters, where they are the cause."""
    params = getattr(state, "params", None)
    leaves = jax.tree.leaves(params)
    if any(is_deleted(x) or not x.is_fully_addressable for x in leaves):
        return
    if names := nonfinite_leaves("params", params):
        error.add_note(
            f"The parameters were not finite before this step: {listed(names)}. Look at"
            " where they come from."
        )


def join_flags(replicated: Flags, per_tower: Flags) -> Flags:
    """The flags of each tower, with those of replicated leaves before its own."""
    rows = jnp.broadcast_to(
        replicated.table, (per_tower.table.shape[0], *replicated.table.shape)
    )
    table = jnp.concatenate([rows, per_tower.table], axis=1)
    return Flags(table, replicated.names + per_tower.names)


def _towers_text(towers: Sequence[int]) -> str:
    """A text for the towers, such as ``"towers 0, 2-5"``."""
    runs: list[list[int]] = []
    for tower in towers:
        if runs and tower == runs[-1][-1] + 1:
            runs[-1][1:] = [tower]
        else:
            runs.append([tower])
    texts = ["-".join(map(str, run)) for run in runs]
    return ("tower " if len(towers) == 1 else "towers ") + ", ".join(texts)


def locations_text(locations: Sequence[Location]) -> str:
    """A text for the locations, in which several towers of one leaf are one entry."""
    towers: dict[Location, list[int]] = {}
    for location in locations:
        towers.setdefault(dataclasses.replace(location, tower=0), []).append(
            location.tower
        )
    before = ", which came with an earlier step"
    texts = [
        f"{_towers_text(ids)}, {x.leaf}, step {x.step}: {x.kind} in the {x.part}"
        f"{before * (x.part == 'parameter')}"
        for x, ids in towers.items()
    ]
    return listed(texts)
