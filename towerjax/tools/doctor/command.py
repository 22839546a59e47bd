"""What does ``towerjax doctor`` do? It looks at the machine, tests it, and advises."""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import jax

from towerjax.mesh import cluster
from towerjax.step.report.tables import Table, as_text, in_bytes
from towerjax.tools.doctor.machine import Advice, Machine, advice_on, this_machine
from towerjax.tools.doctor.self_test import (
    Result,
    device_result,
    op_result,
    ops_for,
)
from towerjax.tools.shell import NOT_SO, OK, show


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


def _failures(alone: Sequence[Result], together: Sequence[Result]) -> list[Advice]:
    """What failed or was slow, each as something to mend."""
    found = [
        Advice(
            True,
            f"{result.name} {sentence}.",
            "Leave that device out, tj.Mirrored(devices=...), and have it looked at.",
        )
        for result in alone
        for sentence in result.wrong
    ]
    found += [
        Advice(
            True,
            f"{result.name}: {sentence}.",
            "Test with fewer devices, tj.Mirrored(devices=...), to find the one or the"
            " link that is broken; then look at its driver and cables.",
        )
        for result in together
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
