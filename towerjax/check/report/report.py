"""`StepReport`: what a compiled step sends and holds, what hides it, and its times."""

import dataclasses
import inspect
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.stages import Compiled

from towerjax.check.report.hlo import CompiledCollective, collectives_of, parse
from towerjax.jaxprs.flops import NO_FLOPS, Flops, count_flops
from towerjax.lowering.xla import compile_on_devices, lower_on_devices
from towerjax.mesh.peaks import peak_flops_of_all
from towerjax.mesh.placement import Placement
from towerjax.mesh.private_jax import read_arguments
from towerjax.step.run.compile import Program
from towerjax.step.state.train_state import TrainState, split_state
from towerjax.towers.strategies import Mirrored, OneDevice, check_roles
from towerjax.types import PyTree
from towerjax.types.refusals import listed
from towerjax.types.tables import (
    Shown,
    Table,
    in_bytes,
    in_flops,
    in_seconds,
    number_of,
)
from towerjax.types.trees import leaf_name

_KINDS = {"params": "parameters", "opt_state": "optimizer state", "num_valid": "batch"}
_KINDS |= {name: name for name in ("local", "batch")}
_IN_STATE = re.compile(r"(?:state|kept)(?:\['|\.)(\w+)")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over several calls; each call is awaited before the next one."""

    calls: int
    dispatch_s: float  # the time until the call returns, which is the host's time
    step_s: float  # the time until the results are ready


def time_calls(
    call: Callable[[PyTree], tuple[PyTree, PyTree]], start: PyTree, calls: int
) -> Timing:
    """Time ``calls`` calls, after a first call that is not timed."""
    dispatched = []
    done = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        start, results = call(start)
        dispatched.append(time.perf_counter() - begin)
        jax.block_until_ready((start, results))
        done.append(time.perf_counter() - begin)
    return Timing(calls, statistics.median(dispatched[1:]), statistics.median(done[1:]))


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that the compiler plans for one device while the program runs."""

    by_kind: dict[str, int]  # the bytes of "parameters", "batch", ..., "temporaries"
    arguments: int  # the bytes of the arguments that the program reads
    aliased: int  # the bytes of results that are written over arguments
    peak: int  # the most bytes at once
    capacity: int | None = None  # the bytes of the device, where known

    @property
    def fits(self) -> bool:
        """Whether the program fits on the device; True if the capacity is unknown."""
        return self.capacity is None or self.peak <= self.capacity


@dataclasses.dataclass(frozen=True)
class StepReport(Shown):
    """A report on one call of a compiled step on each device; it prints as two tables.

    Attributes:
      collectives: The collectives: their bytes, how often they run, their lines, and
        what runs at the same time.
      flops: The FLOPs by XLA's ``cost_analysis``, which counts a loop once; None if the
        compiler does not say.
      unproved: The reason for each merged leaf that is not proved equal to one tower.
      counted: The arithmetic of one call on all devices together, counted in the
        program before it is compiled, with all trips of loops.
      peak_flops: The peak FLOP/s of these devices together; None if not known.
    """

    towers: int
    devices: int
    platform: str  # the platform of the devices, or the kind of absent devices
    collectives: tuple[CompiledCollective, ...]
    flops: float | None
    memory: Memory
    kernels: int  # the fused kernels that a call starts, without those inside loops
    compile_s: float  # the time of tracing, proving and compiling
    timing: Timing | None = None  # None if none was asked for
    unproved: Mapping[str, str] | None = None  # None if no proof was asked for
    counted: Flops = NO_FLOPS
    peak_flops: float | None = None

    @property
    def flops_per_second(self) -> float | None:
        """The model's FLOP/s on all devices together; None if nothing was timed."""
        return self.timing and self.counted.products / self.timing.step_s

    @property
    def mfu(self) -> float | None:
        """The share of the peak FLOP/s (model FLOPs utilization); None if unknown."""
        rate = self.flops_per_second
        peak = self.peak_flops
        return None if rate is None or peak is None else rate / peak

    @property
    def bytes_sent(self) -> int:
        """The bytes that each device sends in one call, if collectives run as rings."""
        return sum(x.sent * x.trips for x in self.collectives)

    def tables(self) -> tuple[Table, ...]:
        """Make the two tables that are shown."""
        memory = self.memory
        timing = self.timing
        rows = {kind: in_bytes(size) for kind, size in memory.by_kind.items()}
        rows["most at once"] = in_bytes(memory.peak)
        rows["sent"] = in_bytes(self.bytes_sent)
        if self.flops is not None:
            rows["arithmetic, loops once"] = in_flops(self.flops)
        rows["model's products, all devices"] = in_flops(self.counted.products)
        if self.counted.recomputed:
            rows["products computed again"] = in_flops(self.counted.recomputed)
        if self.counted.uncounted:
            rows["arithmetic not counted"] = listed(self.counted.uncounted)
        rows["fused kernels"] = f"{self.kernels}"
        if self.unproved is not None:
            rows["not proved equal to one tower"] = listed(self.unproved) or "nothing"
        rows["tracing, proving and compiling"] = in_seconds(self.compile_s)
        if timing is not None:
            rows["host, until a call returns"] = in_seconds(timing.dispatch_s)
            rows["until it is done"] = in_seconds(timing.step_s)
            rate = in_flops(self.counted.products / timing.step_s)
            rows["model's products a second"] = f"{rate}/s"
        if self.mfu is not None:
            rows["of the devices' peak"] = f"{self.mfu:.1%}"
        there = number_of(self.towers, "tower"), number_of(self.devices, "device")
        title = f"{' on '.join(there)} ({self.platform})"
        fits = "It fits" if memory.fits else "It does not fit"
        note = f"{fits} in {in_bytes(memory.capacity)}." if memory.capacity else ""
        totals = Table(title, ("what", "how much"), tuple(rows.items()), note)
        head = ("collective", "operands", "sent", "times", "devices", "when", "where")
        cells = tuple(x.cells() for x in self.collectives)
        return totals, Table("Collectives", head, cells, "" if cells else "None.")


def report_of(
    fn: Callable[..., PyTree], args: Sequence[PyTree], strategy: Mirrored | OneDevice
) -> StepReport:
    """Report on your own jitted function, compiled for a strategy's devices.

    Args:
      fn: A function under ``jax.jit``, on devices of ``strategy.placement.mesh``.
      args: The function's arguments, arrays or ``jax.ShapeDtypeStruct``.
      strategy: The strategy, which names the devices. They may be absent, because
        nothing runs.

    Returns:
      A `StepReport`.

    Raises:
      ValueError: The function is not under ``jax.jit``.

    Example:
      >>> import jax, numpy as np, towerjax as tj
      >>> report_of(jax.jit(abs), [np.ones(3)], tj.OneDevice()).memory.arguments
      12
    """
    check_roles("report_of", strategy=strategy)
    if not hasattr(fn, "trace"):
        raise ValueError(
            f"report_of needs a function under jax.jit, but got {fn!r}. Write"
            " jax.jit(fn)."
        )
    start = time.perf_counter()
    placement = strategy.placement
    names = [*inspect.signature(fn).parameters]
    names += names[-1:] * len(args)  # the last name may be that of *args
    traced = fn.trace(*args)
    lowered = lower_on_devices(traced, placement)
    compiled = compile_on_devices(lowered, placement)
    seconds = time.perf_counter() - start
    report = _make_report(compiled, names, placement, seconds)
    return dataclasses.replace(report, counted=count_flops(traced.jaxpr))


def report_on(
    program: Program, placement: Placement, unproved: Mapping[str, str] | None
) -> StepReport:
    """Report on a step's program, with the leaves that are not proved."""
    names = [*program.plan.ins, "step_flag"]
    report = _make_report(program.call, names, placement, program.seconds)
    return dataclasses.replace(report, unproved=unproved, counted=program.flops)


def time_program(
    program: Program, state: TrainState, others: tuple[PyTree, ...], calls: int
) -> Timing:
    """Time calls of a program, made with a copy of the state."""
    first, others_kept = split_state(state)

    def call(first: PyTree) -> tuple[PyTree, PyTree]:
        out = program.call(first, others_kept, *others)
        return (out[0] if program.plan.donates else first), out

    return time_calls(call, first, calls)


def _make_report(
    compiled: Compiled, roots: Sequence[str], placement: Placement, compile_s: float
) -> StepReport:
    """Report on a compiled program whose arguments have these names."""
    absent = placement.absent
    module = parse(compiled.as_text() or "")
    entry = module.computations[module.entry].values()
    plan: Any = compiled.memory_analysis()
    held = _held(compiled, roots)
    capacity = absent.memory_bytes if absent else _memory_of(placement)
    held["results not aliased"] = plan.output_size_in_bytes - plan.alias_size_in_bytes
    held["temporaries"] = plan.temp_size_in_bytes
    held["code"] = plan.generated_code_size_in_bytes
    return StepReport(
        towers=placement.num_towers,
        devices=len(placement.devices),
        platform=absent.kind if absent else placement.platform,
        collectives=tuple(collectives_of(module)),
        flops=(compiled.cost_analysis() or {}).get("flops"),
        memory=Memory(
            held,
            plan.argument_size_in_bytes,
            plan.alias_size_in_bytes,
            plan.peak_memory_in_bytes,
            capacity,
        ),
        kernels=sum(x.opcode == "fusion" for x in entry),
        compile_s=compile_s,
        peak_flops=peak_flops_of_all(placement, None),
    )


def _memory_of(placement: Placement) -> int | None:
    """Read the bytes of memory of this process's first device; None if unknown."""
    local_devices = (
        x for x in placement.jax_devices if x.process_index == jax.process_index()
    )
    return (next(local_devices).memory_stats() or {}).get("bytes_limit")


def _held(compiled: Compiled, roots: Sequence[str]) -> dict[str, int]:
    """Add up the bytes per device of the arguments that the program reads, by kind.

    ``roots`` are the names of the arguments.
    """
    leaves: Any = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    shardings = jax.tree.leaves(compiled.input_shardings)
    held = {}
    for number, sharding in zip(read_arguments(compiled), shardings, strict=True):
        path, leaf = leaves[number]
        root = roots[int(path[1].idx)]
        field = _IN_STATE.match(leaf_name(root, path[2:]))
        kind = _KINDS.get(field[1] if field else root, "other")
        size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        held[kind] = held.get(kind, 0) + size
    return held
