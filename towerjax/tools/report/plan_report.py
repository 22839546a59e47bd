"""What does a plan say? One row for each number of towers, and the model's figures."""

import dataclasses

from towerjax.step.report.formulas import Flops
from towerjax.step.report.shown import Shown
from towerjax.step.report.tables import (
    Table,
    in_bytes,
    in_flops,
    in_seconds,
)
from towerjax.tools.report.hardware import Hardware, Link


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A train step on ``T`` towers, one a device, of which each row tells one.

    Attributes:
      towers: ``T``.
      examples: Of the global batch.
      arguments: Bytes of state and batch on a device, those that the step reads.
      temporaries: Bytes in between, estimated: values live from where they are made
        to their last use.
      flops: Of a device in one step.
      bytes_sent: What a device sends in one step, round rings.
      compute_s: For products.
      update_s: For reading and writing state and batch.
      send_s: For collectives.
      step_s: All together, none beside another, with what any step takes.
      scaling: Examples a second and device, as a part of one tower's.
      measured_s: A step's time, where it was measured.
    """

    towers: int
    examples: int
    arguments: int
    temporaries: int
    flops: Flops
    bytes_sent: int
    compute_s: float
    update_s: float
    send_s: float
    step_s: float
    scaling: float
    measured_s: float | None

    @property
    def memory(self) -> int:
        """Bytes on a device; the state's results take over its buffers."""
        return self.arguments + self.temporaries

    @property
    def examples_per_s(self) -> float:
        """Of all towers."""
        return self.examples / self.step_s

    @property
    def error(self) -> float | None:
        """By which part of the measured time the predicted one is off; None without."""
        if self.measured_s is None:
            return None
        return self.step_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True)
class Plan(Shown):
    """What a train step would need and take; see ``tj.tools.plan``.

    Printed it is text, in a notebook HTML, with ``rich.print`` rich tables.

    Attributes:
      hardware: The machine.
      scaling: ``"weak"`` or ``"strong"``.
      rows: One for each number of towers.
    """

    hardware: Hardware
    scaling: str
    rows: tuple[PlanRow, ...]

    def tables(self) -> tuple[Table, ...]:
        """What is shown."""
        return _of_rows(self), _of_hardware(self.hardware)


def _of_rows(plan: Plan) -> Table:
    head = (
        "towers",
        "memory",
        "products",
        "sent",
        "compute",
        "update",
        "send",
        "step",
        "examples/s",
        "scaling",
    )
    with_error = any(row.measured_s is not None for row in plan.rows)
    rows = tuple(_cells(row, plan.hardware, with_error) for row in plan.rows)
    notes = dict.fromkeys(note for row in plan.rows for note in row.flops.notes)
    title = f"{plan.hardware.name}, {plan.scaling} scaling, one tower a device"
    head += ("measured", "error") if with_error else ()
    return Table(title, head, rows, "; ".join(notes))


def _cells(row: PlanRow, on: Hardware, with_error: bool) -> tuple[str, ...]:
    fits = row.memory <= on.memory_bytes
    cells = (
        f"{row.towers}",
        in_bytes(row.memory) + ("" if fits else " (too much)"),
        in_flops(row.flops.matmul),
        in_bytes(row.bytes_sent),
        in_seconds(row.compute_s),
        in_seconds(row.update_s),
        in_seconds(row.send_s),
        in_seconds(row.step_s),
        f"{row.examples_per_s:,.0f}",
        f"{row.scaling:.1%}",
    )
    if not with_error:
        return cells
    if row.error is None or row.measured_s is None:
        return (*cells, "-", "-")
    return (*cells, in_seconds(row.measured_s), f"{row.error:+.0%}")


def _of_hardware(on: Hardware) -> Table:
    rows = [
        (
            f"peak, {dtype}",
            f"{in_flops(flops)}/s, {on.matmul_efficiency:.0%} used",
        )
        for dtype, flops in on.peak
    ]
    rows.append(("memory", f"{on.memory_bytes / 1e9:,.4g} GB"))
    used = f"{on.memory_efficiency:.0%} used"
    rows.append(("memory bandwidth", f"{on.memory_bandwidth / 1e9:,.4g} GB/s, {used}"))
    name = f"link in a node of {on.devices_per_node}"
    rows += _of_link(name, on.node, on.link_efficiency)
    rows += _of_link("network between nodes", on.network, on.link_efficiency)
    if on.step_overhead_s:
        rows.append(("any step", in_seconds(on.step_overhead_s)))
    rows += [(f"source: {figures}", source) for figures, source in on.sources]
    return Table(f"The model's figures for {on.name}", ("figure", "value"), tuple(rows))


def _of_link(name: str, link: Link | None, efficiency: float) -> list[tuple[str, str]]:
    if link is None:
        return []
    bandwidth = f"{link.bandwidth / 1e9:,.4g} GB/s one way, {efficiency:.0%} used"
    return [(name, f"{bandwidth}, {in_seconds(link.latency_s)} a hop")]
