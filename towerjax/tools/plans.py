"""Plan a step for other devices, by compiling it for them."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import jax

from towerjax.mesh.absent import Absent
from towerjax.step.report.step_report import StepReport
from towerjax.towers.strategies import Mirrored, StateLayout
from towerjax.types import PyTree
from towerjax.types.options import check_choice, check_wholes
from towerjax.types.tables import Shown, Table, in_bytes, in_flops, in_seconds

MakeStep: TypeAlias = Callable[[Mirrored], tuple[Any, PyTree, PyTree]]
"""``strategy -> (step, params, batch)``, the last two in shapes or arrays."""


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A step compiled for ``T`` devices, one tower on each.

    Attributes:
      state: The layout of the state: ``"mirrored"``, ``"sharded_optimizer"`` or
        ``"sharded"``.
      examples: The examples in the global batch.
      report: The report of the compiled step.
      largest_batch: The most examples with which it fits, to an eighth; None if it
        was not searched for.
      bound_s: A lower bound of the step's time: the longer of its products at the
        stated rate and its bytes sent at the stated bandwidth; None without either.
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
class Plan(Shown):
    """What a step needs on devices that are not here; see ``tj.tools.plan``.

    It prints as text, in a notebook as HTML.

    Attributes:
      on: The target that the devices are of, as `plan` was given it.
      rows: A row for each number of towers and layout of the state.
    """

    on: str
    rows: tuple[PlanRow, ...]

    def tables(self) -> tuple[Table, ...]:
        """The shown table."""
        head = ("towers", "state", "examples", "held", "peak", "products", "sent")
        more = {"largest batch": "largest_batch", "at least": "bound_s"}
        for name, field in more.items():
            if any(getattr(row, field) is not None for row in self.rows):
                head += (name,)
        notes = dict.fromkeys(x for row in self.rows for x in row.report.flops.notes)
        title = f"{self.rows[0].report.platform}, one tower a device"
        return (Table(title, head, tuple(map(_cells, self.rows)), "; ".join(notes)),)


def _cells(row: PlanRow) -> tuple[str, ...]:
    report, bound_s = row.report, row.bound_s
    return (
        f"{row.towers}",
        row.state,
        f"{row.examples}",
        in_bytes(report.memory.arguments),
        in_bytes(report.memory.peak) + ("" if report.memory.fits else " (too much)"),
        in_flops(report.flops.matmul),
        in_bytes(report.bytes_sent),
        *([] if row.largest_batch is None else [f"{row.largest_batch}"]),
        *([] if bound_s is None else [in_seconds(bound_s)]),
    )


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
    """Compile a step for any numbers of devices that are not here; report its needs.

    The compiler is that of the devices, so that memory and communication are as they
    would be there.

    Args:
      make_step: ``strategy -> (step, params, batch)``, the last two arrays or
        ``jax.ShapeDtypeStruct``; choose the global batch by ``strategy.num_towers``.
      on: A target of `Absent`: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, XLA's
        text of a GPU, or TPUs by their topology, ``"v5e:2x4"``, which is the number of
        towers, too.
      towers: The numbers of towers ``T``, one tower a device.
      states: The layouts of the state; see `Mirrored`.
      largest_batch: Whether to search for the largest batch that fits, to an eighth:
        some ten compilations a row.
      flop_rate: The most FLOP/s of a device's products that you expect.
      bandwidth: The most bytes a second that a device sends.

    Returns:
      A `Plan`, which prints as text, in a notebook as HTML.

    Raises:
      ReplicationError: As ``step.check``.
      ValueError: The compiler is not installed, an option is invalid, or the towers
        cannot share the batch.

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
    if Absent.is_topology(on):
        targets = [Absent(on)]
    else:
        targets = [Absent(on, number) for number in check_wholes("towers", towers)]
    without_memory = [x for x in targets if x.platform == "gpu" and not x.memory_bytes]
    if largest_batch and without_memory:
        raise ValueError(
            "The largest batch that fits needs the device's memory: write"
            " device_memory_size: ... into the text of the target."
        )
    rows = []
    for devices, state in itertools.product(targets, states):
        step, params, batch = make_step(Mirrored(devices=devices, state=state))
        report = step.report(params, batch)
        most = _largest_batch(step, params, batch, report) if largest_batch else None
        pairs = ((report.flops.matmul, flop_rate), (report.bytes_sent, bandwidth))
        times = [amount / rate for amount, rate in pairs if rate is not None]
        bound_s = max(times, default=None)
        rows.append(PlanRow(state, _num_rows(batch), report, most, bound_s))
    return Plan(on, tuple(rows))


def _num_rows(batch: PyTree) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _largest_batch(step: Any, params: PyTree, batch: PyTree, report: StepReport) -> int:
    """The most examples that fit, to an eighth, by bisection over compiles."""
    unit = step.strategy.num_towers * step.options.micro_batches

    def fits(units: int) -> bool:
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((units * unit, *x.shape[1:]), x.dtype), batch
        )
        try:
            return step.report(params, rows).memory.fits
        except jax.errors.JaxRuntimeError as error:  # raised by the TPU compiler
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return False

    start = max(_num_rows(batch) // unit, 1)
    return unit * most_that(fits, start, report.memory.fits)


def most_that(fits: Callable[[int], bool], start: int, start_fits: bool) -> int:
    """The most that fits, to an eighth: double until it does not fit, then bisect."""
    low, high = (start, None) if start_fits else (0, start)
    while high is None or high - low > max(high // 8, 1):
        middle = 2 * low if high is None else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
