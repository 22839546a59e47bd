"""How would a step do on more towers, or elsewhere? From shapes, without devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import optax

from towerjax.collectives import AllReduce, CrossTowerOps, Hierarchical
from towerjax.proof.found import Collective
from towerjax.step.report.communication import ring_bytes
from towerjax.step.report.formulas import Flops
from towerjax.step.report.step_report import StepReport
from towerjax.step.train import build_train_step
from towerjax.tools.report.hardware import Hardware
from towerjax.tools.report.link_model import (
    seconds_to_compute,
    seconds_to_move,
    seconds_to_send,
)
from towerjax.tools.report.measured import measure_hardware
from towerjax.tools.report.plan_report import Plan, PlanRow
from towerjax.tools.report.traced_work import (
    Work,
    bytes_of,
    read_bytes,
    temporary_bytes,
    work_of,
)
from towerjax.towers.strategies import Mirrored
from towerjax.types import LossFn, PyTree, Reduction
from towerjax.types.options import check_choice, check_whole

Scaling = Literal["weak", "strong"]
_ALL_REDUCE = AllReduce()

_OPCODES = {
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


def plan(
    loss_fn: LossFn,
    params_spec: PyTree,
    batch_spec: PyTree,
    *,
    towers: Sequence[int] = (1, 8, 64, 512, 4096),
    hardware: Hardware | str = "H100",
    optimizer: optax.GradientTransformation | None = None,
    scaling: Scaling = "weak",
    cross_tower_ops: CrossTowerOps = _ALL_REDUCE,
    micro_batches: int = 1,
    loss_reduction: Reduction | None = None,
    local: PyTree = None,
    measured: Sequence[StepReport] = (),
) -> Plan:
    """What a train step needs and takes on any numbers of towers, one a device.

    The step is traced and proved as ``step.check`` does it; nothing is compiled, and
    no device is asked for. Times follow a stated model, see ``docs/reports.md``: they
    tell what limits a step, and are no measurement.

    Args:
      loss_fn: As for `build_train_step`.
      params_spec: Arrays or ``jax.ShapeDtypeStruct``.
      batch_spec: One tower's batch under weak scaling, the global one under strong;
        arrays or shapes.
      towers: Each ``T``.
      hardware: ``"A100"``, ``"H100"``, ``"H200"``, ``"TPU v5e"``; ``"here"`` measures
        these devices; or a ``tj.tools.Hardware``.
      optimizer: None is ``optax.adam(1e-3)``.
      scaling: ``"weak"``: each tower keeps its batch; ``"strong"``: they share one.
      cross_tower_ops: How sums travel; any but `Hierarchical`, which needs devices.
      micro_batches: As for `build_train_step`.
      loss_reduction: As for `build_train_step`.
      local: Tower-local variables, as for ``step.init``.
      measured: Reports with times; what the plan says of as many towers, one a
        device, is compared with them.

    Returns:
      A `Plan`: printed it is text, in a notebook HTML.

    Raises:
      ReplicationError: As ``step.check``.
      ValueError: Options that there are not; a batch that towers cannot share; a
        dtype or a link for which the hardware has no figure; a report without times.

    Example:
      >>> import jax, jax.numpy as jnp, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     errors = batch["x"] @ params["w"]
      ...     return tj.Weighted.mean((errors**2).sum(-1), tower.weight)
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
      >>> x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
      >>> planned = plan(loss_fn, {"w": w}, {"x": x}, towers=[1, 4096])
      >>> planned.rows[1].towers, planned.rows[1].scaling < 1
      (4096, True)
    """
    check_choice("scaling", scaling, get_args(Scaling))
    if isinstance(cross_tower_ops, Hierarchical):
        raise ValueError(
            "A plan's towers are on no devices, whose processes"
            " tj.collectives.Hierarchical goes"
            " by. Plan with tj.AllReduce(): its model reduces in and between nodes."
        )
    _check_towers(towers)
    times = _measured_times(measured)

    def traced(num_towers: int) -> _Traced:
        step = build_train_step(
            loss_fn,
            optax.adam(1e-3) if optimizer is None else optimizer,
            Mirrored(("cpu:0",), towers=num_towers, cross_tower_ops=cross_tower_ops),
            micro_batches=micro_batches,
            loss_reduction=loss_reduction,
            remainder="pad",
        )
        batch = _global_batch(batch_spec, num_towers if scaling == "weak" else 1)
        proof = step.check(params_spec, batch, local=local)
        body = step.trace_tower(params_spec, batch, local=local)
        found = proof.analysis.collectives if num_towers > 1 else ()
        examples = jax.tree.leaves(batch)[0].shape[0]  # checked with the step
        return _Traced(num_towers, examples, body, work_of(body), found)

    steps = {count: traced(count) for count in dict.fromkeys((1, *towers))}
    on = _hardware_of(hardware, steps[1].work)
    rows = {count: _row(step, on, times.get(count)) for count, step in steps.items()}
    alone = rows[1].examples_per_s
    scaled = [
        dataclasses.replace(
            rows[count], scaling=rows[count].examples_per_s / (count * alone)
        )
        for count in towers
    ]
    return Plan(on, scaling, tuple(scaled))


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A step on so many towers, traced: what one of them does."""

    towers: int
    examples: int
    body: Any
    work: Work
    collectives: Sequence[Collective]


def _hardware_of(hardware: Hardware | str, work: Work) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware == "here":
        return measure_hardware(dtypes=[dtype for dtype, _ in work.by_dtype])
    return Hardware.named(hardware)


def _check_towers(towers: Sequence[int]) -> None:
    if not towers:
        raise ValueError(f"towers={towers!r} must be whole numbers >= 1, at least one.")
    for i, number in enumerate(towers):
        check_whole(f"towers[{i}]", number)


def _measured_times(reports: Sequence[StepReport]) -> dict[int, float]:
    """Of each number of towers, how long a step took."""
    found = {}
    for report in reports:
        if report.timing is None:
            raise ValueError(
                f"The report of {report.towers} towers has no times to compare with."
                " Make it with step.report(state, batch, timed_calls=10)."
            )
        if report.towers != report.devices:
            raise ValueError(
                f"A plan is of one tower a device, and the report of {report.towers}"
                f" towers on {report.devices} devices."
            )
        found[report.towers] = report.timing.step_s
    return found


def _global_batch(batch: PyTree, times: int) -> PyTree:
    """The shapes of a batch, of so many times the examples."""

    def longer(x: Any) -> jax.ShapeDtypeStruct:
        if not getattr(x, "shape", ()):
            raise ValueError(
                "A leaf of batch_spec has no rows. Give arrays or"
                " jax.ShapeDtypeStruct((rows, ...), dtype)."
            )
        return jax.ShapeDtypeStruct((x.shape[0] * times, *x.shape[1:]), x.dtype)

    return jax.tree.map(longer, batch)


def _row(step: _Traced, on: Hardware, measured_s: float | None) -> PlanRow:
    work, towers = step.work, step.towers
    sent, send_s, notes = 0, 0.0, work.flops.notes
    for found in step.collectives:
        opcode, trips = _opcode_of(found.primitive), found.trips or 1
        sent += trips * ring_bytes(opcode, found.bytes, towers)
        send_s += trips * seconds_to_send(opcode, found.bytes, towers, on)
        if found.trips is None:
            notes += (f"{found.primitive} in a loop of unknown trips counts once",)
    arguments = read_bytes(step.body)
    # What the update reads and writes: state and gradients, and the batch once.
    results = sum(bytes_of(v.aval) for v in step.body.outvars)
    update_s = seconds_to_move(arguments + results, on)
    compute_s = seconds_to_compute(work.by_dtype, work.product_bytes, on)
    step_s = on.step_overhead_s + compute_s + update_s + send_s
    return PlanRow(
        towers=towers,
        examples=step.examples,
        arguments=arguments,
        temporaries=temporary_bytes(step.body),
        flops=Flops(work.flops.matmul, work.flops.other, tuple(dict.fromkeys(notes))),
        bytes_sent=sent,
        compute_s=compute_s,
        update_s=update_s,
        send_s=send_s,
        step_s=step_s,
        scaling=1.0,
        measured_s=measured_s,
    )


def _opcode_of(primitive: str) -> str:
    for start, opcode in _OPCODES.items():
        if primitive.startswith(start):
            return opcode
    return "all-reduce"
