"""What does ``towerjax doctor`` do? It looks at the machine, tests it, and advises."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
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
from towerjax.mesh import cluster
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement, place
from towerjax.step.report.step_report import timed
from towerjax.tools.doctor.machine import Advice, Machine, advice_on, this_machine
from towerjax.tools.shell import NOT_SO, OK, show
from towerjax.towers.executors import over_devices
from towerjax.types import Layout
from towerjax.types.tables import Table, as_text, in_bytes

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
    timing = timed(lambda _: (None, call()), None, _ROUNDS)
    return timing.step_s, call()


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
    call = jax.jit(fn).lower(placed).compile()
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


def doctor(options: argparse.Namespace) -> int:
    """What is here, do the devices add up, and what to mend.

    Print versions, devices and settings; test every device and every cross-tower op
    against NumPy and measure them; say what to mend. In a job of several processes each
    tests its own devices, and the first one prints.

    Example:
      towerjax doctor --mebibytes 256 --json
      JAX_NUM_CPU_DEVICES=8 towerjax doctor
      towerjax launch --processes 2 --devices-per-process 4 -- towerjax doctor

    exit code: 0 if all is well, 1 if something is wrong, 2 for wrong arguments.
    """
    if options.mebibytes < 1:
        raise ValueError(f"--mebibytes {options.mebibytes} must be at least 1.")
    cluster.initialize()
    machine = this_machine()
    num_bytes = options.mebibytes << 20
    alone, together = [], []
    if machine.devices:
        alone = [device_result(device, num_bytes) for device in jax.local_devices()]
        names = tuple(device.name for device in machine.devices)
        together = [op_result(op, names, num_bytes) for op in ops_for(len(names))]
    advice = (*_failures(alone, together), *advice_on(machine))
    is_well = not any(one.is_wrong for one in advice)
    if not machine.devices or jax.process_index() == 0 or not is_well:
        fields = {
            "well": is_well,
            "machine": dataclasses.asdict(machine),
            "devices": [dataclasses.asdict(x) for x in alone],
            "ops": [dataclasses.asdict(x) for x in together],
            "advice": [dataclasses.asdict(x) for x in advice],
        }
        show(options, _text(machine, alone, together, advice), fields)
    return OK if is_well else NOT_SO


_LEAVE_OUT = "Leave that device out, tj.Mirrored(devices=...), and have it looked at."
_TEST_FEWER = (
    "Test with fewer devices, tj.Mirrored(devices=...), to find the one or the link"
    " that is broken; then look at its driver and cables."
)


def _failures(alone: Sequence[Result], together: Sequence[Result]) -> list[Advice]:
    """What failed or was slow, each as something to mend."""
    parts = ((alone, "", _LEAVE_OUT), (together, ":", _TEST_FEWER))
    found = [
        Advice(True, f"{result.name}{colon} {sentence}.", fix)
        for results, colon, fix in parts
        for result in results
        for sentence in result.wrong
    ]
    rates = {x.name: x.gigabytes_per_second for x in alone if x.gigabytes_per_second}
    usual = statistics.median(rates.values()) if rates else 0.0
    return found + [
        Advice(
            False,
            f"{name} receives {rate:.1f} GB/s, the others {usual:.1f}.",
            "Look at the slot and the link of that device: it sets the pace of all.",
        )
        for name, rate in rates.items()
        if rate < usual / 2
    ]


def _text(
    machine: Machine,
    alone: Sequence[Result],
    together: Sequence[Result],
    advice: Sequence[Advice],
) -> str:
    versions = [f"{name} {text}" for name, text in machine.versions.items()]
    memory = machine.memory_bytes
    held = f", {in_bytes(memory)} of memory" if memory else ""
    lines = [
        ", ".join(versions),
        f"{machine.system}, {machine.cpus} processors{held}",
        *(f"{name}={value}" for name, value in machine.environment.items()),
    ]
    found = {device.name: device for device in machine.devices}
    devices = [(found[result.name], result) for result in alone]
    measured = ("test", "ms", "GB/s")
    of_devices = [
        (
            x.name,
            x.kind,
            in_bytes(x.memory_bytes) if x.memory_bytes else "-",
            *_measured(result),
        )
        for x, result in devices
    ]
    of_ops = [(result.name, *_measured(result)) for result in together]
    head = ("device", "kind", "memory", *measured)
    tables = [Table("Devices, each alone", head, tuple(of_devices))]
    head = ("cross-tower op", *measured)
    tables += [Table("All devices together", head, tuple(of_ops))]
    lines += ["", as_text([table for table in tables if table.rows])]
    lines += ["", *(str(one) for one in advice)]
    num_wrong = sum(one.is_wrong for one in advice)
    lines.append(f"{num_wrong} wrong." if num_wrong else "All is well.")
    return "\n".join(lines)


def _measured(result: Result) -> tuple[str, str, str]:
    rate = result.gigabytes_per_second
    shown = "-" if rate is None else f"{rate:.2f}"
    return "wrong" if result.wrong else "right", f"{result.milliseconds:.3f}", shown
