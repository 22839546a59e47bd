"""``towerjax doctor``: test every device and cross-tower op, and print advice."""

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
from towerjax.step.report.step_report import time_calls
from towerjax.tools.doctor.machine import Advice, Machine, advice_on, this_machine
from towerjax.tools.shell import FAULT, OK, show
from towerjax.towers.executors import over_devices
from towerjax.types import Layout
from towerjax.types.tables import Table, as_text, in_bytes

_ROUNDS = 5
_LARGEST_ADDEND = 1000


@dataclasses.dataclass(frozen=True)
class Probe:
    """The test of one device alone, or of one cross-tower op on all devices."""

    name: str  # "gpu:0", or the op
    wrong: tuple[str, ...]  # the faults that were found, in sentences
    # Median time to transfer the bytes to a device, or of one sum over all towers.
    milliseconds: float
    # The same as a rate: for an op, 2 (D - 1) / D times each device's bytes, what the
    # links carry when none is idle. None where nothing is sent.
    gigabytes_per_second: float | None


def ops_for(num_devices: int) -> tuple[CrossTowerOps, ...]:
    """One of every cross-tower op that can run on so many devices."""
    sizes = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return (
        AllReduce(),
        Packed(num_packs=2),
        PinnedTree(),
        ReduceToOneDevice(),
        Hierarchical(group_size=sizes[0] if sizes else 1),
    )


def check_device(device: Any, num_bytes: int) -> Probe:
    """Test one device alone: a transfer there and back, and a matrix product."""
    wrong = []
    sent = np.arange(num_bytes // 4, dtype=np.int32)
    seconds, there = _median_time(lambda: jax.device_put(sent, device))
    if not np.array_equal(np.asarray(there), sent):
        wrong.append("gives back other numbers than it was given")
    # Small whole numbers: exact at any precision of a device's products.
    a, b = np.random.default_rng(0).integers(-8, 9, size=(2, 64, 64))
    put = [jax.device_put(x.astype(np.float32), device) for x in (a, b)]
    if not np.array_equal(np.asarray(jnp.dot(*put)), a @ b):
        wrong.append("multiplies two matrices of small whole numbers wrongly")
    return Probe(
        canonical_device_name(device),
        tuple(wrong),
        seconds * 1e3,
        None if device.platform == "cpu" else sent.nbytes / seconds / 1e9,
    )


def _median_time(call: Callable[[], Any]) -> tuple[float, Any]:
    """The median seconds of calls after the first, and the result of a call."""
    timing = time_calls(lambda _: (None, call()), None, _ROUNDS)
    return timing.step_s, call()


def check_op(op: CrossTowerOps, devices: tuple[str, ...], num_bytes: int) -> Probe:
    """Test one op on all devices: compare its sums with NumPy's, bit for bit."""
    towers = max(2, len(devices))
    placement = Placement(devices, towers)
    rows = tower_rows(towers, max(num_bytes // 4, towers))

    def device_fn(rows: jax.Array) -> jax.Array:
        return sum_rows_over_towers(op, rows, placement.axes)

    layouts = (Layout.PER_TOWER,)
    fn = over_devices(device_fn, placement, layouts, Layout.MIRRORED)
    placed = place(rows, placement, Layout.PER_TOWER)
    call = jax.jit(fn).lower(placed).compile()
    seconds, got = _median_time(lambda: call(placed))
    share = 2 * (len(devices) - 1) / len(devices)
    expected = rows.astype(np.float64).sum(axis=0)
    wrong = [
        sentence
        for shard in got.addressable_shards
        for sentence in wrong_sums(
            canonical_device_name(shard.device),
            np.asarray(shard.data),
            expected,
            towers,
        )
    ]
    rate = share * rows[0].nbytes / seconds / 1e9 if len(devices) > 1 else None
    return Probe(repr(op), tuple(wrong), seconds * 1e3, rate)


def tower_rows(towers: int, length: int) -> np.ndarray:
    """The addends of the towers: whole numbers whose sums are exact in any order."""
    numbers = np.random.default_rng(towers)
    rows = numbers.integers(-_LARGEST_ADDEND, _LARGEST_ADDEND, size=(towers, length))
    # The first sums have one addend that is not 0: a wrong one names its tower.
    rows[:, :towers] = np.diag(np.arange(1, towers + 1))
    return rows.astype(np.float32)


def wrong_sums(
    name: str, got: np.ndarray, expected: np.ndarray, towers: int
) -> tuple[str, ...]:
    """Sentences on where a device's sums differ from NumPy's."""
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
    """Show this machine's devices, test them, and say what to mend.

    Print versions, devices and settings; test every device and every cross-tower op
    against NumPy and measure them; say what to mend. In a job of several processes each
    tests its own devices; process 0 prints, and each that finds something wrong.

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
        alone = [check_device(device, num_bytes) for device in jax.local_devices()]
        names = tuple(device.name for device in machine.devices)
        together = [check_op(op, names, num_bytes) for op in ops_for(len(names))]
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
        show(options, _report_text(machine, alone, together, advice), fields)
    return OK if is_well else FAULT


_LEAVE_OUT = "Leave that device out, tj.Mirrored(devices=...), and have it looked at."
_TEST_FEWER = (
    "Test with fewer devices, tj.Mirrored(devices=...), to find the one or the link"
    " that is broken; then look at its driver and cables."
)


def _failures(alone: Sequence[Probe], together: Sequence[Probe]) -> list[Advice]:
    """An `Advice` for each test that failed and each device that is slow."""
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


def _report_text(
    machine: Machine,
    alone: Sequence[Probe],
    together: Sequence[Probe],
    advice: Sequence[Advice],
) -> str:
    versions = [f"{name} {text}" for name, text in machine.versions.items()]
    held = f"{in_bytes(machine.memory_bytes)} of memory"
    lines = [
        ", ".join(versions),
        f"{machine.system}, {machine.cpus} processors, {held}",
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
            *_probe_cells(result),
        )
        for x, result in devices
    ]
    of_ops = [(result.name, *_probe_cells(result)) for result in together]
    head = ("device", "kind", "memory", *measured)
    tables = [Table("Devices, each alone", head, tuple(of_devices))]
    head = ("cross-tower op", *measured)
    tables += [Table("All devices together", head, tuple(of_ops))]
    lines += ["", as_text([table for table in tables if table.rows])]
    lines += ["", *(str(one) for one in advice)]
    num_wrong = sum(one.is_wrong for one in advice)
    lines.append(f"{num_wrong} wrong." if num_wrong else "All is well.")
    return "\n".join(lines)


def _probe_cells(result: Probe) -> tuple[str, str, str]:
    rate = result.gigabytes_per_second
    shown = "-" if rate is None else f"{rate:.2f}"
    return "wrong" if result.wrong else "right", f"{result.milliseconds:.3f}", shown
