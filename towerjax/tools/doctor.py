"""``towerjax doctor``: test every device and cross-tower op, and print advice."""

import dataclasses
import os
import pathlib
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax import collectives
from towerjax.collectives.base import sum_rows_over_towers
from towerjax.mesh import cluster
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement, place
from towerjax.step.report.step_report import time_calls
from towerjax.tools.bench.sweep import describe_machine, versions
from towerjax.tools.shell import FAULT, OK, show
from towerjax.towers.executors import over_devices
from towerjax.types import Layout
from towerjax.types.options import check_whole
from towerjax.types.tables import Shown, Table, in_bytes

_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_", "TOWERJAX_", "TF_CONFIG")
_ROUNDS = 5
_LARGEST_ADDEND = 1000

Machine: TypeAlias = dict[str, Any]
"""The machine as one process of a job sees it, as `this_machine` describes it."""


def this_machine() -> Machine:
    """Versions, devices of the job in tower order, settings; starts JAX's backends."""
    devices, problem = [], None
    try:
        for device in jax.devices():
            is_own = device.process_index == jax.process_index()
            stats = (device.memory_stats() if is_own else None) or {}
            found = {
                "name": canonical_device_name(device),
                "kind": device.device_kind,  # the maker's name of it
                "process": device.process_index,
                "memory_bytes": stats.get("bytes_limit"),  # how much JAX may use
            }
            devices.append(found)
    except (RuntimeError, AssertionError) as error:
        # A RuntimeError if a platform does not start; an AssertionError without text if
        # JAX does not know the platform ("cuda" without its plugin).
        problem = str(error) or "it could start no platform of those told."
    shm = pathlib.Path("/dev/shm")
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    return {
        **describe_machine(),
        "versions": versions(),
        "devices": devices,
        "problem": problem,  # JAX's error if it has no devices
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "shared_memory_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
        "nvidia": pathlib.Path("/dev/nvidiactl").exists(),  # even one JAX does not find
        "environment": {name: os.environ[name] for name in names},
        "options": {name: bool(getattr(jax.config, name)) for name in _TRAPS},
    }


@dataclasses.dataclass(frozen=True)
class Advice:
    """One fault to mend, or fact to know."""

    is_wrong: bool  # whether it must be mended; else it may be intended
    what: str  # what was found
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{'wrong' if self.is_wrong else 'note'}: {self.what}\n  do: {self.fix}"


_DRAWS = "random draws depend on how arrays lie on devices"
_TRAPS = {  # options of JAX: the value to warn of, and why
    "jax_disable_jit": (True, "nothing is compiled"),
    "jax_threefry_partitionable": (False, _DRAWS),
}


def advice_on(machine: Machine) -> list[Advice]:
    """All advice on a machine, faults first."""
    found = list(_on_devices(machine))
    for option, (value, why) in _TRAPS.items():
        if machine["options"].get(option) is value:
            what = f"{option} is {'on' if value else 'off'}: {why}."
            found.append(Advice(True, what, f"Unset {option.upper()}."))
    return sorted(found, key=lambda advice: not advice.is_wrong)


def _on_devices(machine: Machine) -> Iterator[Advice]:
    install, devices = "pip install 'jax[cuda13]'", machine["devices"]
    platforms = machine["environment"].get("JAX_PLATFORMS")
    if not devices:
        fix = f"Unset JAX_PLATFORMS, which is {platforms!r}, or {install}."
        yield Advice(True, f"JAX has no devices: {machine['problem']}", fix)
        return
    on_cpu, cpus = devices[0]["name"].startswith("cpu"), machine["cores"]
    if on_cpu and machine["nvidia"]:
        what = "The machine has an NVIDIA GPU, but JAX computes on the CPU."
        fix = "Unset JAX_PLATFORMS, if that is not meant." if platforms else install
        yield Advice(not platforms, what, fix)
    if on_cpu and len(devices) == 1:
        what = "There is one CPU device, so nothing travels between devices."
        yield Advice(False, what, "To try several, set JAX_NUM_CPU_DEVICES=8.")
    count = sum(device["process"] == devices[0]["process"] for device in devices)
    if on_cpu and count > cpus:
        what = f"{count} CPU devices share {cpus} processors: good for tests, but times"
        fix = "For speed take as many devices as there are processors, or fewer."
        yield Advice(False, f"{what} say nothing about scaling.", fix)
    if len(kinds := sorted({device["kind"] for device in devices})) > 1:
        what = f"The devices are of several kinds, {', '.join(kinds)}; the slowest sets"
        fix = "Name those of one kind: tj.Mirrored(devices=...)."
        yield Advice(False, f"{what} the pace of all.", fix)
    shared = machine["shared_memory_bytes"]
    has_gpus = len(devices) > 1 and devices[0]["name"].startswith("gpu")
    if has_gpus and shared is not None and shared < 1 << 30:
        what = f"/dev/shm has {shared >> 20} MiB, too little for NCCL to send between"
        fix = "Start the container with --shm-size=8g, or --ipc=host."
        yield Advice(True, f"{what} {len(devices)} GPUs.", fix)


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

    def cells(self) -> tuple[str, str, str]:
        """The verdict, the time and the rate, as shown."""
        rate = self.gigabytes_per_second
        shown = "-" if rate is None else f"{rate:.2f}"
        return "wrong" if self.wrong else "right", f"{self.milliseconds:.3f}", shown


def ops_for(num_devices: int) -> tuple[collectives.CrossTowerOps, ...]:
    """One of every cross-tower op that can run on so many devices."""
    size = next((n for n in range(2, num_devices + 1) if num_devices % n == 0), 1)
    return (
        collectives.AllReduce(),
        collectives.Packed(num_packs=2),
        collectives.PinnedTree(),
        collectives.ReduceToOneDevice(),
        collectives.Hierarchical(group_size=size),
    )


def check_device(device: Any, num_bytes: int) -> Probe:
    """Test one device alone: a transfer there and back, and a matrix product."""
    wrong = []
    sent = np.arange(num_bytes // 4, dtype=np.int32)
    seconds, there = _median_time(lambda: jax.device_put(sent, device))
    if not np.array_equal(there, sent):
        wrong.append("gives back other numbers than it was given")
    # Small whole numbers: exact at any precision of a device's products.
    a, b = np.random.default_rng(0).integers(-8, 9, size=(2, 64, 64))
    put = [jax.device_put(x.astype(np.float32), device) for x in (a, b)]
    if not np.array_equal(jnp.dot(*put), a @ b):
        wrong.append("multiplies two matrices of small whole numbers wrongly")
    rate = None if device.platform == "cpu" else sent.nbytes / seconds / 1e9
    return Probe(canonical_device_name(device), tuple(wrong), seconds * 1e3, rate)


def _median_time(call: Callable[[], Any]) -> tuple[float, Any]:
    """The median seconds of calls after the first, and the result of a call."""
    timing = time_calls(lambda _: (None, call()), None, _ROUNDS)
    return timing.step_s, call()


def check_op(
    op: collectives.CrossTowerOps, devices: tuple[str, ...], num_bytes: int
) -> Probe:
    """Test one op on all devices: compare its sums with NumPy's, bit for bit."""
    towers = max(2, len(devices))
    placement = Placement(devices, towers)
    rows = tower_rows(towers, max(num_bytes // 4, towers))

    def device_fn(rows: jax.Array) -> jax.Array:
        return sum_rows_over_towers(op, rows, placement.axes)

    fn = over_devices(device_fn, placement, (Layout.PER_TOWER,), Layout.MIRRORED)
    placed = place(rows, placement, Layout.PER_TOWER)
    call = jax.jit(fn).lower(placed).compile()
    seconds, got = _median_time(lambda: call(placed))
    expected, wrong = rows.astype(np.float64).sum(axis=0), []
    for shard in got.addressable_shards:
        name = canonical_device_name(shard.device)
        wrong += wrong_sums(name, np.asarray(shard.data), expected, towers)
    share = 2 * (len(devices) - 1) / len(devices)
    rate = share * rows[0].nbytes / seconds / 1e9 if share else None
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
) -> list[str]:
    """A sentence on where a device's sums differ from NumPy's, if they do."""
    places = np.flatnonzero(~(got == expected))
    if not len(places):
        return []
    first = places[0]
    what = f"tower {first}'s part" if first < towers else f"sum {first}"
    return [
        f"{name} has {got[first]:g} of {what}, which is {expected[first]:g}; of"
        f" {len(got):,} sums {len(places):,} differ"
    ]


_LEAVE_OUT = "Leave that device out, tj.Mirrored(devices=...), and have it looked at."
_TEST_FEWER = (
    "Test with fewer devices, tj.Mirrored(devices=...), to find the one or the link"
    " that is broken; then look at its driver and cables."
)


def _failures(alone: Sequence[Probe], together: Sequence[Probe]) -> list[Advice]:
    """An `Advice` for each test that failed and each device that is slow."""
    found = [
        Advice(True, f"{probe.name}: {what}.", fix)
        for probes, fix in ((alone, _LEAVE_OUT), (together, _TEST_FEWER))
        for probe in probes
        for what in probe.wrong
    ]
    rates = {x.name: x.gigabytes_per_second for x in alone if x.gigabytes_per_second}
    usual = statistics.median(rates.values()) if rates else 0.0
    fix = "Look at the slot and the link of that device: it sets the pace of all."
    for name, rate in rates.items():
        if rate < usual / 2:
            what = f"{name} receives {rate:.1f} GB/s, the others {usual:.1f}."
            found.append(Advice(False, what, fix))
    return found


@dataclasses.dataclass(frozen=True)
class Diagnosis(Shown):
    """A machine, what its tests found, and what to do."""

    well: bool
    machine: Machine
    devices: list[Probe]  # each alone
    ops: list[Probe]  # on all devices together
    advice: list[Advice]

    def tables(self) -> tuple[Table, ...]:
        """What was tested."""
        known = {device["name"]: device for device in self.machine["devices"]}
        head, of_devices = ("test", "ms", "GB/s"), []
        for probe in self.devices:
            held, kind = (known[probe.name][x] for x in ("memory_bytes", "kind"))
            memory = in_bytes(held) if held else "-"
            of_devices.append((probe.name, kind, memory, *probe.cells()))
        of_ops = [(probe.name, *probe.cells()) for probe in self.ops]
        about = ("device", "kind", "memory")
        found = (
            Table("Devices, each alone", about + head, tuple(of_devices)),
            Table("All devices together", ("cross-tower op", *head), tuple(of_ops)),
        )
        return tuple(table for table in found if table.rows)

    def __str__(self) -> str:
        machine, num_wrong = self.machine, sum(one.is_wrong for one in self.advice)
        memory = f"{in_bytes(machine['memory_bytes'])} of memory"
        lines = [
            ", ".join(f"{name} {text}" for name, text in machine["versions"].items()),
            f"{machine['system']}, {machine['cores']} processors, {memory}",
            *(f"{name}={value}" for name, value in machine["environment"].items()),
            f"\n{super().__str__()}\n",
            *map(str, self.advice),
            f"{num_wrong} wrong." if num_wrong else "All is well.",
        ]
        return "\n".join(lines)


def doctor(mebibytes: int = 4, json: bool = False) -> int:
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
    check_whole("--mebibytes", mebibytes)
    cluster.initialize()
    machine, num_bytes = this_machine(), mebibytes << 20
    alone, together = [], []
    if names := tuple(device["name"] for device in machine["devices"]):
        alone = [check_device(device, num_bytes) for device in jax.local_devices()]
        together = [check_op(op, names, num_bytes) for op in ops_for(len(names))]
    advice = [*_failures(alone, together), *advice_on(machine)]
    is_well = not any(one.is_wrong for one in advice)
    if not names or jax.process_index() == 0 or not is_well:
        found = Diagnosis(is_well, machine, alone, together, advice)
        show(str(found), dataclasses.asdict(found), json)
    return OK if is_well else FAULT
