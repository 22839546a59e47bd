"""What did the compiler make of a step? Sent, computed, held, and how long it takes."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from towerjax.mesh.placement import Placement
from towerjax.step.program import Program
from towerjax.step.report.alive import Alive, alive_at_peak
from towerjax.step.report.communication import CompiledCollective, collectives_of
from towerjax.step.report.flops import Flops, flops_of
from towerjax.step.report.hlo import parse
from towerjax.step.report.memory import Buffer, Memory, memory_of
from towerjax.step.report.tables import (
    Stored,
    Table,
    in_bytes,
    in_flops,
    in_seconds,
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over some calls, each awaited before the next.

    Attributes:
      calls: How many.
      dispatch_s: Until the call returned: the host's own time, in which it could not
        prepare the next batch.
      step_s: Until the results were there.
    """

    calls: int
    dispatch_s: float
    step_s: float


def timed(call: Callable[[Any], Any], start: Any, calls: int) -> Timing:
    """How long calls take, after one that does not count."""
    dispatched, done = [], []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        start, results = call(start)
        dispatched.append(time.perf_counter() - begin)
        jax.block_until_ready((start, results))
        done.append(time.perf_counter() - begin)
    return Timing(calls, statistics.median(dispatched[1:]), statistics.median(done[1:]))


@dataclasses.dataclass(frozen=True)
class StepReport(Stored):
    """What a compiled step does, on each device, in one call.

    Printed it is text, in a notebook HTML, with ``rich.print`` rich tables.

    Attributes:
      towers: ``T``.
      devices: ``D``.
      platform: Of the devices; of absent ones what they are.
      collectives: What is sent, how often, and where that is written.
      flops: Loops counted as often as they run.
      memory: By kind; which buffers are used again.
      at_peak: The eight largest values that lie in memory when most does, an `Alive`
        each.
      compile_s: For tracing, proving and compiling.
      timing: Of a few calls; None where none was asked for.

    Example:
      >>> import jax, numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.OneDevice("cpu:0"))
      >>> state = step.init({"w": np.ones(3, np.float32)})
      >>> report = step.report(state, {"x": np.ones((4, 3), np.float32)})
      >>> report.collectives, report.memory.by_kind["parameters"]
      ((), 12)
    """

    towers: int
    devices: int
    platform: str
    collectives: tuple[CompiledCollective, ...]
    flops: Flops
    memory: Memory
    at_peak: tuple[Alive, ...]
    compile_s: float
    timing: Timing | None = None

    @property
    def bytes_sent(self) -> int:
        """What each device sends in one call, round rings."""
        return sum(found.sent * found.trips for found in self.collectives)

    def tables(self) -> tuple[Table, ...]:
        """What is shown."""
        return (
            _of_step(self),
            _of_collectives(self),
            _of_memory(self.memory),
            _of_peak(self.at_peak),
            _of_buffers(self.memory),
        )


def report_of(
    program: Program,
    placement: Placement,
    *,
    keeps: bool,
    timing: Timing | None,
) -> StepReport:
    """The report on a compiled program."""
    capacity = placement.absent.memory_bytes if placement.absent else None
    module, roots = parse(program.call.as_text()), tuple(program.recipe.in_layouts)
    return StepReport(
        towers=placement.num_towers,
        devices=placement.num_devices,
        platform=placement.absent.kind if placement.absent else placement.platform,
        collectives=collectives_of(module),
        flops=flops_of(program.jaxpr),
        memory=memory_of(
            program.call, module, roots=roots, keeps=keeps, capacity=capacity
        ),
        at_peak=alive_at_peak(module)[:8],
        compile_s=program.seconds,
        timing=timing,
    )


def _of_step(report: StepReport) -> Table:
    flops, timing = report.flops, report.timing
    rows = [
        ("matrix products and convolutions", in_flops(flops.matmul)),
        ("other float arithmetic", in_flops(flops.other)),
        ("sent", in_bytes(report.bytes_sent)),
        ("memory", in_bytes(report.memory.total)),
        ("tracing, proving and compiling", in_seconds(report.compile_s)),
    ]
    if timing is not None:
        rows.append(("host, until a call returns", in_seconds(timing.dispatch_s)))
        rows.append(("until it is done", in_seconds(timing.step_s)))
        if timing.step_s > 0 and not flops.notes:
            rate = in_flops(flops.total / timing.step_s) + "/s"
            rows.append(("achieved", rate))
    title = (
        f"{report.towers} towers on {report.devices} devices ({report.platform}),"
        " each device in one call"
    )
    return Table(title, ("what", "how much"), tuple(rows), "; ".join(flops.notes))


def _of_collectives(report: StepReport) -> Table:
    rows = tuple(
        (
            found.opcode,
            in_bytes(found.bytes),
            in_bytes(found.sent),
            f"{found.trips}" if found.trips_known else "unknown",
            f"{found.num_devices}",
            _when(found),
            found.line,
        )
        for found in report.collectives
    )
    head = ("collective", "operands", "sent", "times", "devices", "when", "where")
    return Table("Collectives", head, rows, "" if rows else "None.")


def _when(found: CompiledCollective) -> str:
    """Between which operations of how many it runs, and what hides it."""
    if found.start == found.end:
        return f"at {found.start} of {found.length}, exposed"
    beside = f"beside {in_bytes(found.beside)} read and written"
    return f"{found.start} to {found.end} of {found.length}, {beside}"


def _of_memory(memory: Memory) -> Table:
    rows = tuple((kind, in_bytes(size)) for kind, size in memory.by_kind.items())
    note = f"{in_bytes(memory.aliased)} of the results take over arguments' buffers."
    total = ("together", in_bytes(memory.total))
    peak = f"The most at once: {in_bytes(memory.peak)}"
    if memory.capacity is not None:
        fits = "fits" if memory.fits else "does not fit"
        peak += f", which {fits} in {in_bytes(memory.capacity)}"
    note = f"{peak}. {note}"
    return Table("Memory of a device", ("kind", "bytes"), (*rows, total), note)


def _of_peak(values: tuple[Alive, ...]) -> Table:
    rows = tuple((x.name, x.shape, in_bytes(x.bytes), x.line) for x in values)
    head = ("value", "on a device", "bytes", "where")
    return Table("Largest when most is held", head, rows)


def _of_buffers(memory: Memory) -> Table:
    rows = tuple(
        (
            buffer.name,
            f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]",
            in_bytes(buffer.bytes),
            _fate(buffer),
        )
        for buffer in memory.buffers
    )
    return Table("Arguments", ("leaf", "on a device", "bytes", "buffer"), rows)


def _fate(buffer: Buffer) -> str:
    if buffer.aliased:
        return "taken over"
    return buffer.why_not or ("kept" if buffer.bytes else "not read")
