"""Do the devices' copies of what is mirrored agree, bit for bit?"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import as_bits
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.types import PyTree, readable_leaves
from towerjax.types.leaves import key_data, listed


@dataclasses.dataclass(frozen=True)
class Differing:
    """A device whose copy of a leaf is not that of most devices.

    Attributes:
      device: Its name, ``"cpu:5"``.
      towers: The towers that run on it, where that is known.
      leaf: The leaf, ``"params/Dense_2/kernel"``.
    """

    device: str
    towers: tuple[int, ...]
    leaf: str

    def __str__(self) -> str:
        """One line for an error."""
        towers = f" ({told_towers(self.towers)})" if self.towers else ""
        return f"{self.device}{towers}, {self.leaf}"


class DesyncError(RuntimeError):
    """The devices' copies of the state were not the same, where they have to be.

    Attributes:
      step: Before which step, counted from 0.
      differing: One `Differing` for each device and leaf; of two halves the one
        without the first device is named.

    Example:
      >>> error = DesyncError(131, [Differing("cpu:5", (5,), "params/w")])
      >>> str(error).split(". ")[0]
      'The copies of the state differed before step 131: cpu:5 (tower 5), params/w'
    """

    def __init__(self, step: int, differing: Sequence[Differing]) -> None:
        """Say which devices and leaves."""
        super().__init__(
            f"The copies of the state differed before step {step}: {listed(differing)}."
            " All other devices agree. Each step since has mixed the copies' gradients,"
            " so go on from a state of before the check that last passed, such as a"
            " checkpoint, and look at that device's memory, at callbacks and foreign"
            " kernels that do not give each device the same, or at how the state was"
            " placed."
        )
        self.step, self.differing = step, tuple(differing)


def told_towers(towers: Sequence[int]) -> str:
    """The towers in words."""
    runs: list[list[int]] = []
    for tower in towers:
        if runs and tower == runs[-1][-1] + 1:
            runs[-1].append(tower)
        else:
            runs.append([tower])
    told = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return ("tower " if len(towers) == 1 else "towers ") + ", ".join(told)


def fingerprint(x: jax.Array) -> jax.Array:
    """A number made of an array's bits and of where they are.

    Each word is mixed with its position by a bijection, and the words are added. So
    a change of one element always shows, whatever it is; of changes of several, one
    in ``2**32`` does not.

    Source:
      The bijection is the finalizer of MurmurHash3 (Appleby, 2011),
      https://github.com/aappleby/smhasher.
    """
    bits = as_bits(key_data(x))
    if bits.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
    words = bits.astype(jnp.uint32).reshape(-1)
    h = words + lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return (h ^ (h >> 16)).sum(dtype=jnp.uint32)


def fingerprints(tree: PyTree) -> jax.Array:
    """The fingerprint of each leaf."""
    return jnp.stack([fingerprint(x) for x in jax.tree.leaves(tree)])


def outliers(prints: np.ndarray) -> np.ndarray:
    """Which devices differ from most, leaf by leaf."""
    wrong = np.zeros(prints.shape, bool)
    for leaf in np.flatnonzero((prints != prints[:1]).any(axis=0)):
        _, first, group, sizes = np.unique(
            prints[:, leaf], return_index=True, return_inverse=True, return_counts=True
        )
        right = min(range(len(sizes)), key=lambda g: (-sizes[g], first[g]))
        wrong[:, leaf] = group.reshape(-1) != right
    return wrong


def differing_leaves(
    prints: np.ndarray, leaves: tuple[str, ...], placement: Placement
) -> list[Differing]:
    """Which devices' copies of which leaves differ from most."""
    k = placement.num_towers // placement.num_devices
    return [
        Differing(placement.devices[d], tuple(range(d * k, d * k + k)), leaves[leaf])
        for d, leaf in np.argwhere(outliers(prints)).tolist()
    ]


def check_mirrored(state: PyTree) -> None:
    """Nothing, when all devices hold the same bits of each array that they share.

    Looks at every byte, on the host: for tests and for searching. Of several
    processes each looks at its own devices.

    Args:
      state: A state, or any pytree of arrays. What is split over devices passes.

    Raises:
      DesyncError: Some device's copy differs from that of most.

    Example:
      >>> import optax, towerjax as tj
      >>> loss_fn = lambda params, batch, tower: tj.Weighted.mean(params * batch["x"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> check_mirrored(step.init(jnp.float32(1.0)))
    """
    found = []
    for name, leaf in readable_leaves("", state):
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_replicated:
            continue
        shards = key_data(leaf).addressable_shards
        seen: dict[bytes, int] = {}
        copies = [np.asarray(shard.data).tobytes() for shard in shards]
        prints = np.array([seen.setdefault(copy, len(seen)) for copy in copies])
        for at in np.flatnonzero(outliers(prints[:, None])[:, 0]).tolist():
            device = canonical_device_name(shards[at].device)
            found.append(Differing(device, (), name))
    if found:
        raise DesyncError(int(getattr(state, "step", 0)), found)
