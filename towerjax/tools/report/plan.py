"""What does a step need on more devices, or other ones? Compiled for each of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import jax

from towerjax.mesh.absent import Absent
from towerjax.step.report.step_report import StepReport
from towerjax.towers.strategies import Mirrored, StateLayout
from towerjax.types import PyTree
from towerjax.types.options import check_choice, check_wholes
from towerjax.types.tables import Stored, Table, in_bytes, in_flops, in_seconds

MakeStep: TypeAlias = Callable[[Mirrored], tuple[Any, PyTree, PyTree]]
"""``strategy -> (step, params, batch)``, the last two in shapes or arrays."""


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A step compiled for so many devices, one tower on each.

    Attributes:
      state: How the strategy lays the state: ``"mirrored"``, ``"sharded_optimizer"``
        or ``"sharded"``.
      examples: Of the global batch.
      report: What the compiler made of it.
      largest_batch: The most examples with which it fits, to an eighth; None where it
        was not asked for.
      bound_s: No step is faster: the longer of its products at the stated rate and
        what it sends at the stated bandwidth; None where neither was stated.
    """

    state: str
    examples: int
    report: StepReport
    largest_batch: int | None = None
    bound_s: float | None = None

    @property
    def towers(self) -> int:
        """``T``."""
        return self.report.towers


@dataclasses.dataclass(frozen=True)
class Plan(Stored):
    """What a step needs on devices that are not here; see ``tj.tools.plan``.

    Printed it is text, in a notebook HTML, with ``rich.print`` rich tables.

    Attributes:
      on: The devices' target.
      rows: One for each number of towers and layout of the state.
    """

    on: str
    rows: tuple[PlanRow, ...]

    def tables(self) -> tuple[Table, ...]:
        """What is shown."""
        head = ("towers", "state", "examples", "held", "peak", "products", "sent")
        more = {
            "largest batch": any(row.largest_batch is not None for row in self.rows),
            "at least": any(row.bound_s is not None for row in self.rows),
        }
        head += tuple(name for name, is_there in more.items() if is_there)
        rows = tuple(_cells(row)[: len(head)] for row in self.rows)
        notes = dict.fromkeys(x for row in self.rows for x in row.report.flops.notes)
        kind = self.rows[0].report.platform
        return (Table(f"{kind}, one tower a device", head, rows, "; ".join(notes)),)


def _cells(row: PlanRow) -> tuple[str, ...]:
    memory = row.report.memory
    cells = [
        f"{row.towers}",
        row.state,
        f"{row.examples}",
        in_bytes(memory.arguments),
        in_bytes(memory.peak) + ("" if memory.fits else " (too much)"),
        in_flops(row.report.flops.matmul),
        in_bytes(row.report.bytes_sent),
    ]
    if row.largest_batch is not None:
        cells.append(f"{row.largest_batch}")
    if row.bound_s is not None:
        cells.append(in_seconds(row.bound_s))
    return tuple(cells)


def plan(
    make_step: MakeStep,
    *,
    on: str = "h200",
    towers: Sequence[int] = (1, 8, 64, 512, 4096),
    states: Sequence[StateLayout] = get_args(StateLayout),
    largest_batch: bool = False,
    flop_rate: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """What a step needs on any numbers of devices that are not here, by compiling it.

    The compiler is the devices' own, so that memory, what is sent and whether it fits
    are what they would be there. Times need the devices themselves; with rates that you
    state there is a bound.

    Args:
      make_step: ``strategy -> (step, params, batch)``, the last two arrays or
        ``jax.ShapeDtypeStruct``: ``strategy.num_towers`` says how large the global
        batch is to be.
      on: A target, as `Absent` takes it: ``"a100"``, ``"h100"``, ``"h200"``,
        ``"b200"``, XLA's text of a GPU, or TPUs by their topology, ``"v5e:2x4"``, which
        says how many towers there are.
      towers: Each ``T``, one tower a device.
      states: How state lies; see `Mirrored`.
      largest_batch: Search for the largest batch that fits, to an eighth: some ten
        compiles a row.
      flop_rate: FLOP/s of a device's products that you expect at most.
      bandwidth: Bytes a second that a device sends at most.

    Returns:
      A `Plan`: printed it is text, in a notebook HTML.

    Raises:
      ReplicationError: As ``step.check``.
      ValueError: The compiler is not installed, options that there are not, or a batch
        that towers cannot share.

    Example:
      >>> import jax, jax.numpy as jnp, optax, towerjax as tj
      >>> def make_step(strategy):
      ...     def loss_fn(params, batch, tower):
      ...         return tj.Weighted.mean((batch["x"] @ params["w"]).sum(-1))
      ...     step = tj.build_train_step(loss_fn, optax.adam(1e-3), strategy)
      ...     x = jax.ShapeDtypeStruct((32 * strategy.num_towers, 64), jnp.float32)
      ...     return step, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, {"x": x}
      >>> planned = plan(make_step, on="h200", towers=[8])  # doctest: +SKIP
    """
    for state in states:
        check_choice("states", state, get_args(StateLayout))
    rows = []
    for devices in _devices(on, towers):
        for state in states:
            step, params, batch = make_step(Mirrored(devices=devices, state=state))
            report = step.report(params, batch)
            row = PlanRow(
                state=state,
                examples=jax.tree.leaves(batch)[0].shape[0],
                report=report,
                largest_batch=_largest_batch(step, params, batch, report)
                if largest_batch
                else None,
                bound_s=_bound(report, flop_rate, bandwidth),
            )
            rows.append(row)
    return Plan(on, tuple(rows))


def _devices(on: str, towers: Sequence[int]) -> list[Absent]:
    if Absent.is_topology(on):
        return [Absent(on)]
    return [Absent(on, number) for number in check_wholes("towers", towers)]


def _largest_batch(step: Any, params: PyTree, batch: PyTree, report: StepReport) -> int:
    """The most examples that fit, to an eighth, by bisection over compiles."""
    unit = step.strategy.num_towers * step.options.micro_batches
    examples = jax.tree.leaves(batch)[0].shape[0]
    if report.memory.capacity is None and step.strategy.devices.platform == "gpu":
        raise ValueError(
            "The largest batch that fits needs the device's memory: write"
            " device_memory_size: ... into the text of the target."
        )

    def fits(units: int) -> bool:
        try:
            found = step.report(params, _with_rows(batch, units * unit))
        except jax.errors.JaxRuntimeError as error:  # the word of a TPU's compiler
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return False
        return found.memory.fits

    asked = max(examples // unit, 1)
    return unit * most_that(fits, asked, report.memory.fits)


def most_that(fits: Callable[[int], bool], start: int, start_fits: bool) -> int:
    """The most that fits, within an eighth: doubled until it does not, then halved."""
    low, high = (start, None) if start_fits else (0, start)
    while high is None or high - low > max(high // 8, 1):
        middle = 2 * low if high is None else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_rows(batch: PyTree, rows: int) -> PyTree:
    """The shapes of a batch of so many rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch
    )


def _bound(
    report: StepReport, flop_rate: float | None, bandwidth: float | None
) -> float | None:
    """The longer of what products and sending take at least."""
    pairs = ((report.flops.matmul, flop_rate), (report.bytes_sent, bandwidth))
    times = [amount / rate for amount, rate in pairs if rate is not None]
    return max(times, default=None)
