"""Do the devices add up? Each cross-tower op on whole numbers, and how fast."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives import (
    AllReduce,
    CrossTowerOps,
    Hierarchical,
    Packed,
    PinnedTree,
    ReduceToOneDevice,
)
from towerjax.collectives.base import sum_rows_over_towers
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement, place
from towerjax.towers.executors import jit_on_devices, over_devices
from towerjax.types import Layout

_ROUNDS = 5
_LARGEST = 1000


@dataclasses.dataclass(frozen=True)
class Result:
    """What one device did by itself, or one cross-tower op on all devices."""

    name: str  # "gpu:0", or the op
    wrong: tuple[str, ...]  # what was not as it should be, in sentences
    # Median time to bring the bytes there, or of one sum of all towers.
    milliseconds: float
    # The same as a rate: of an op, 2 (D - 1) / D times each device's bytes, what the
    # links carry when none is idle. None where nothing has to travel.
    gigabytes_per_second: float | None


def ops_for(num_devices: int) -> tuple[CrossTowerOps, ...]:
    """One of every cross-tower op that so many devices can honour."""
    sizes = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return (
        AllReduce(),
        Packed(num_packs=2),
        PinnedTree(),
        ReduceToOneDevice(),
        Hierarchical(group_size=sizes[0] if sizes else 1),
    )


def device_result(device: Any, num_bytes: int) -> Result:
    """One device alone: numbers there and back, and a product of matrices."""
    wrong = []
    sent = np.arange(num_bytes // 4, dtype=np.int32)
    seconds, there = _timed(lambda: jax.device_put(sent, device))
    if not np.array_equal(np.asarray(there), sent):
        wrong.append("gives back other numbers than it was given")
    # Small whole numbers: exact at any precision that a device multiplies with.
    a, b = np.random.default_rng(0).integers(-8, 9, size=(2, 64, 64))
    put = [jax.device_put(x.astype(np.float32), device) for x in (a, b)]
    if not np.array_equal(np.asarray(jnp.dot(*put)), a @ b):
        wrong.append("multiplies two matrices of small whole numbers wrongly")
    return Result(
        canonical_device_name(device),
        tuple(wrong),
        seconds * 1e3,
        None if device.platform == "cpu" else sent.nbytes / seconds / 1e9,
    )


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """The median of the seconds that it takes after a first time, and its result."""
    out, seconds = jax.block_until_ready(call()), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        out = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), out


def op_result(op: CrossTowerOps, devices: tuple[str, ...], num_bytes: int) -> Result:
    """One op on all devices, its sums compared with NumPy's bit for bit."""
    towers = max(2, len(devices))
    placement = Placement(devices, towers, local="vmap", executor="shard_map")
    rows = tower_rows(towers, max(num_bytes // 4, towers))

    def device_fn(rows: jax.Array) -> jax.Array:
        return sum_rows_over_towers(op, rows, placement.axes)

    layouts = (Layout.PER_TOWER,)
    fn = over_devices(device_fn, placement, layouts, Layout.MIRRORED)
    placed = place(rows, placement, Layout.PER_TOWER)
    jitted = jit_on_devices(fn, placement, layouts, Layout.MIRRORED, donate=False)
    call = jitted.lower(placed).compile()
    seconds, got = _timed(lambda: call(placed))
    share = 2 * (len(devices) - 1) / len(devices)
    expected = rows.astype(np.float64).sum(axis=0)
    wrong = [
        sentence
        for shard in got.addressable_shards
        for sentence in differences(
            canonical_device_name(shard.device),
            np.asarray(shard.data),
            expected,
            towers,
        )
    ]
    rate = share * rows[0].nbytes / seconds / 1e9 if len(devices) > 1 else None
    return Result(repr(op), tuple(wrong), seconds * 1e3, rate)


def tower_rows(towers: int, length: int) -> np.ndarray:
    """What each tower adds: whole numbers whose sums are exact, in any order."""
    numbers = np.random.default_rng(towers)
    rows = numbers.integers(-_LARGEST, _LARGEST, size=(towers, length))
    rows[:, :towers] = np.diag(np.arange(1, towers + 1))
    return rows.astype(np.float32)


def differences(
    name: str, got: np.ndarray, expected: np.ndarray, towers: int
) -> tuple[str, ...]:
    """Where a device's sums are not those of NumPy."""
    places = np.flatnonzero(~(got == expected))
    if not len(places):
        return ()
    if not (heads := places[places < towers]).size:
        first = places[0]
        return (
            f"{name} differs in {len(places):,} of {len(got):,} sums, first at"
            f" {first}: {got[first]:g}, which is {expected[first]:g}",
        )
    return tuple(
        f"{name} has {got[t]:g} of tower {t}'s part, which is {expected[t]:g}"
        for t in heads[:4]
    )
