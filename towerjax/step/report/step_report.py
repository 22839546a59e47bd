"""`StepReport`: what a compiled step sends, computes and holds, and its times."""

import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from towerjax.mesh.placement import Placement
from towerjax.step.program import send_shared
from towerjax.step.report.flops import Flops, flops_of
from towerjax.step.report.hlo import CompiledCollective, Shape, collectives_of, parse
from towerjax.step.report.memory import Alive, Buffer, Memory, alive_at_peak, memory_of
from towerjax.step.state import split_state
from towerjax.towers.executors import compile_on_devices, lower_on_devices
from towerjax.towers.strategies import Mirrored, OneDevice, check_roles
from towerjax.types import PyTree
from towerjax.types.options import check_whole
from towerjax.types.tables import Shown, Table, in_bytes, in_flops, in_seconds


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over calls, each awaited before the next."""

    calls: int
    dispatch_s: float  # until the call returns: the host's time
    step_s: float  # until the results are there


def time_calls(call: Callable[[Any], Any], start: Any, calls: int) -> Timing:
    """Time ``calls`` calls, after one that does not count."""
    dispatched, done = [], []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        start, results = call(start)
        dispatched.append(time.perf_counter() - begin)
        jax.block_until_ready((start, results))
        done.append(time.perf_counter() - begin)
    return Timing(calls, statistics.median(dispatched[1:]), statistics.median(done[1:]))


@dataclasses.dataclass(frozen=True)
class StepReport(Shown):
    """What a compiled step does, on each device, in one call.

    Printed it is text, in a notebook HTML.

    Attributes:
      towers: ``T``.
      devices: ``D``.
      platform: The devices' platform; the kind of absent devices.
      collectives: What is sent, how often, and by which line of code.
      flops: Per device and call; a loop counts as often as it runs.
      memory: Bytes by kind, and which buffers are reused.
      at_peak: The values that are alive at the peak of memory, an `Alive` each, the
        largest first; eight are shown.
      kernels: Fused kernels that a call starts, those inside loops left out.
      compile_s: Seconds for tracing, proving and compiling.
      timing: Times of a few calls; None if none was asked for.

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
    kernels: int
    compile_s: float
    timing: Timing | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that each device sends in one call, if collectives run as rings."""
        return sum(found.sent * found.trips for found in self.collectives)

    def tables(self) -> tuple[Table, ...]:
        """What is shown."""
        return (
            _step_table(self),
            _collectives_table(self),
            _memory_table(self.memory),
            _peak_table(self.at_peak[:8]),
            _buffers_table(self.memory),
        )

    def beside(self, other: "StepReport") -> "SideBySide":
        """Both in one table, such as a step and the one that you wrote by hand.

        Args:
          other: Another step's report, or that of a function of your own: see
            ``tj.tools.report_of``.

        Returns:
          A `SideBySide`: printed it is text, in a notebook HTML.
        """
        return SideBySide(self, other)


@dataclasses.dataclass(frozen=True)
class SideBySide(Shown):
    """Two reports in one table.

    Attributes:
      step: The report whose ``beside`` was called.
      other: The report that it was given.
    """

    step: StepReport
    other: StepReport

    def tables(self) -> tuple[Table, ...]:
        """What is shown."""
        step, other = _figures(self.step), _figures(self.other)
        rows = tuple((what, shown, other[what]) for what, shown in step.items())
        titles = dict.fromkeys([_title(self.step), _title(self.other)])
        return (Table(", beside ".join(titles), ("what", "step", "other"), rows),)


def report_of(
    fn: Any, args: Sequence[PyTree], strategy: Mirrored | OneDevice
) -> StepReport:
    """What the compiler makes of a function of your own on a strategy's devices.

    For a step that you wrote by hand, to set `StepReport.beside` a step of towerjax. It
    runs nothing, so the devices may be absent.

    Args:
      fn: A function under ``jax.jit``, which says where its arguments lie, what it
        donates, and what each device does: ``jax.jit`` of a ``jax.shard_map`` on
        ``strategy.placement.mesh``.
      args: Its arguments, arrays or ``jax.ShapeDtypeStruct``.
      strategy: Names the devices.

    Returns:
      A `StepReport`. Its FLOPs are of one device where the function is mapped over
      devices by ``shard_map``, and of all together where it is not.

    Raises:
      ValueError: The function is not under ``jax.jit``.

    Example:
      >>> import functools, jax, jax.numpy as jnp, towerjax as tj
      >>> from jax.sharding import PartitionSpec as P
      >>> strategy = tj.Mirrored()
      >>> mesh = strategy.placement.mesh
      >>> rows = P(*mesh.axis_names)
      >>> @jax.jit
      ... @functools.partial(
      ...     jax.shard_map, mesh=mesh, in_specs=(P(), rows), out_specs=P())
      ... def mean(w, x):
      ...     return jax.lax.pmean(jnp.tanh(x @ w).mean(), mesh.axis_names)
      >>> args = jnp.ones((3, 2)), jnp.ones((16, 3))
      >>> report = tj.tools.report_of(mean, args, strategy)
      >>> [found.opcode for found in report.collectives]
      ['all-reduce']
    """
    check_roles("report_of", strategy=strategy)
    if not hasattr(fn, "trace"):
        raise ValueError(f"report_of expects a function under jax.jit, got {fn!r}.")
    start, placement = time.perf_counter(), strategy.placement
    # The last name may be that of *args.
    names = [*inspect.signature(fn).parameters]
    names = [names[min(i, len(names) - 1)] for i in range(len(args))]
    traced = fn.trace(*args)
    compiled = compile_on_devices(lower_on_devices(traced, placement), placement)
    seconds = time.perf_counter() - start
    return _make_report(compiled, traced.jaxpr.jaxpr, names, placement, seconds)


def report_on(step: Any, state: PyTree, batch: PyTree, timed_calls: int) -> StepReport:
    """The report on a step's program."""
    check_whole("timed_calls", timed_calls, 0)
    if timed_calls:
        batch = send_shared(step.place_batch(batch))
    program, placement = step.program(state, batch), step.strategy.placement
    of_step = program.call, program.jaxpr, [*program.recipe.in_layouts]
    report = _make_report(*of_step, placement, program.seconds)
    if not timed_calls:
        return report
    first, kept = split_state(step.place(state))

    def call(first: Any) -> Any:
        out = program.call(first, kept, *batch.args)
        return (out[0] if program.recipe.donate else first), out

    return dataclasses.replace(report, timing=time_calls(call, first, timed_calls))


def _make_report(
    compiled: Any,
    jaxpr: Jaxpr,
    roots: Sequence[str],
    placement: Placement,
    compile_s: float,
) -> StepReport:
    """The report on a compiled program, whose arguments are called ``roots``."""
    absent, module = placement.absent, parse(compiled.as_text())
    operations = module.computations[module.entry].values()
    capacity = absent.memory_bytes if absent else None
    return StepReport(
        towers=placement.num_towers,
        devices=placement.num_devices,
        platform=absent.kind if absent else placement.platform,
        collectives=collectives_of(module),
        flops=flops_of(jaxpr),
        memory=memory_of(compiled, module, roots=roots, capacity=capacity),
        at_peak=alive_at_peak(module),
        kernels=sum(op.opcode == "fusion" for op in operations),
        compile_s=compile_s,
    )


def _title(report: StepReport) -> str:
    """``"8 towers on 8 devices (cpu), each device in one call"``."""
    return (
        f"{report.towers} towers on {report.devices} devices ({report.platform}),"
        " each device in one call"
    )


def _figures(report: StepReport) -> dict[str, str]:
    """Each figure that is one number, as shown."""
    flops, sent = report.flops, report.collectives
    return {
        "matrix products and convolutions": in_flops(flops.matmul),
        "other float arithmetic": in_flops(flops.other),
        "collectives": f"{sum(found.trips for found in sent)}",
        "sent": in_bytes(report.bytes_sent),
        "read and written meanwhile": in_bytes(sum(found.beside for found in sent)),
        "arguments": in_bytes(report.memory.arguments),
        "held at most": in_bytes(report.memory.peak),
        "fused kernels": f"{report.kernels}",
        "tracing, proving and compiling": in_seconds(report.compile_s),
    }


def _step_table(report: StepReport) -> Table:
    figures, flops, timing = _figures(report), report.flops, report.timing
    if timing is not None:
        figures["host, until a call returns"] = in_seconds(timing.dispatch_s)
        figures["until it is done"] = in_seconds(timing.step_s)
        if not flops.notes:
            figures["achieved"] = in_flops(flops.total / timing.step_s) + "/s"
    head, rows = ("what", "how much"), tuple(figures.items())
    return Table(_title(report), head, rows, "; ".join(flops.notes))


def _collectives_table(report: StepReport) -> Table:
    rows = tuple(
        (
            found.opcode,
            in_bytes(found.bytes),
            in_bytes(found.sent),
            f"{found.trips}" if found.trips_known else "unknown",
            f"{found.num_devices}",
            _schedule_text(found),
            found.line,
        )
        for found in report.collectives
    )
    head = ("collective", "operands", "sent", "times", "devices", "when", "where")
    return Table("Collectives", head, rows, "" if rows else "None.")


def _schedule_text(found: CompiledCollective) -> str:
    """Its place in the schedule, and what runs beside it."""
    if found.start == found.end:
        return f"at {found.start} of {found.length}, exposed"
    beside = f"beside {in_bytes(found.beside)} read and written"
    return f"{found.start} to {found.end} of {found.length}, {beside}"


def _memory_table(memory: Memory) -> Table:
    sizes = {**memory.by_kind, "together": memory.total}
    rows = tuple((kind, in_bytes(size)) for kind, size in sizes.items())
    note = f"The most at once: {in_bytes(memory.peak)}"
    if memory.capacity is not None:
        fits = "fits" if memory.fits else "does not fit"
        note += f", which {fits} in {in_bytes(memory.capacity)}"
    note += f". {in_bytes(memory.aliased)} of the results take over arguments' buffers."
    return Table("Memory of a device", ("kind", "bytes"), rows, note)


def _peak_table(values: tuple[Alive, ...]) -> Table:
    head = ("value", "on a device", "bytes", "where")
    rows = tuple((x.name, x.shape, in_bytes(x.bytes), x.line) for x in values)
    return Table("Largest when most is held", head, rows)


def _buffers_table(memory: Memory) -> Table:
    rows = tuple(
        (x.name, f"{Shape(x.dtype, x.shape)}", in_bytes(x.bytes), _fate(x))
        for x in memory.buffers
    )
    return Table("Arguments", ("leaf", "on a device", "bytes", "buffer"), rows)


def _fate(buffer: Buffer) -> str:
    if buffer.aliased:
        return "taken over"
    return buffer.why_not or ("kept" if buffer.bytes else "not read")
