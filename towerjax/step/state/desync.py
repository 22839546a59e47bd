"""Find devices whose copy of a replicated value differs from the others."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import as_bits
from towerjax.mesh.devices import Device, canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import wait_on_cpus
from towerjax.towers.executors import over_devices
from towerjax.types import Layout, PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.refusals import Portable, listed, shown
from towerjax.types.trees import key_data, readable_leaves


@dataclasses.dataclass(frozen=True)
class Differing:
    """A device whose copy of a leaf differs from that of most devices."""

    device: str  # such as "cpu:5"
    leaf: str  # such as "params/Dense_2/kernel"

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
    """Hash each device's copy of each array, ``[D, L]`` uint32."""
    names = tuple(map(canonical_device_name, devices))
    placement = Placement(names, len(names))
    mirrored = placement.sharding(Layout.MIRRORED)

    def as_placed(x: jax.Array) -> jax.Array:  # uses the same buffers
        copies = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, mirrored, copies)

    # One program is compiled for each shape. A single program for all leaves would take
    # seconds to compile.
    prints = [_of_copies(as_placed(x), placement) for x in arrays]
    return np.asarray(jax.device_get(wait_on_cpus(_stack_on_all(prints, placement))))


@functools.partial(jax.jit, static_argnums=1)
def _of_copies(x: jax.Array, placement: Placement) -> jax.Array:
    """Hash each device's copy of an array on that device, ``[D]``."""

    def on_device(x: jax.Array) -> jax.Array:
        return fingerprint(x)[None]

    return over_devices(on_device, placement, (Layout.MIRRORED,), Layout.PER_TOWER)(x)


@functools.partial(jax.jit, static_argnums=1)
def _stack_on_all(prints: list[jax.Array], placement: Placement) -> jax.Array:
    mirrored = placement.sharding(Layout.MIRRORED)
    return lax.with_sharding_constraint(jnp.stack(prints, axis=1), mirrored)


def fingerprint(x: jax.Array) -> jax.Array:
    """Hash an array's bits and their positions, ``()`` uint32.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """The fingerprints of the leaves of one tower, or with a row for each of several.

    Attributes:
      table: ``[M]`` or ``[rows, M]`` uint32.
      names: For each leaf its part, such as ``"gradient"``, and its name.
    """

    table: jax.Array
    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, named: Sequence[tuple[str, str, jax.Array]]) -> "Bits":
        """Hash leaves, each given as ``(part, name, array)``."""
        prints = [fingerprint(key_data(jnp.asarray(x))) for _, _, x in named]
        names = tuple((part, name) for part, name, _ in named)
        return cls(jnp.array(prints, jnp.uint32), names)


def outliers(prints: np.ndarray) -> np.ndarray:
    """Mark the copies that differ from those of most devices, ``[D, L]`` bool.

    ``prints`` has the fingerprints of ``D`` devices' copies of ``L`` leaves.
    """
    wrong = np.zeros(prints.shape, bool)
    for leaf in np.flatnonzero((prints != prints[:1]).any(axis=0)):
        _, first, group, sizes = np.unique(
            prints[:, leaf], return_index=True, return_inverse=True, return_counts=True
        )
        right = min(range(len(sizes)), key=lambda g: (-sizes[g], first[g]))
        wrong[:, leaf] = group.reshape(-1) != right
    return wrong
