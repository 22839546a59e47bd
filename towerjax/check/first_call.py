"""Before a step's first call, prove it equal to one tower, or audit it and say so."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from towerjax.check.audit.advice import crosses_rows
from towerjax.check.audit.audit import run_audit
from towerjax.check.audit.kept import (
    audit_result_of,
    folders_of_records,
    keep,
    noting_its_audit,
    program_hash,
    refuse_unasked,
    told_not_audited,
)
from towerjax.check.equality.of_step import (
    equality_of,
    line_of_own_devices,
    of_whole_step,
)
from towerjax.check.equality.own_devices import why_not_as_on_one_device
from towerjax.check.equality.read_by_update import per_tower_values_read
from towerjax.check.equality.told import LEAVE_OUT, NotProved, StepEquality, told_of
from towerjax.check.equality.traced_passes import StepToProve
from towerjax.data.batch_rows import with_replicated
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.lines import calls_after, print_line
from towerjax.mesh.transfer import readable
from towerjax.prover.comparison import AuditReport, NotAudited, SplitError
from towerjax.prover.equality.kinds.equation_pair import failed
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.replication.findings import ReplicationError
from towerjax.step.run.compile import Program, collector_paused
from towerjax.step.run.trace import Traced, trace
from towerjax.step.state.train_state import TrainState, split_state
from towerjax.step.step import Step
from towerjax.types import PyTree, Whole
from towerjax.types.boundary import warn

_OWN_STATISTICS = "If each tower's own statistics are meant, write audit=False."
_PATIENCE_S = 5.0  # seconds; a proof that takes longer prints that it is running
_MOST_EXAMPLES = (
    8  # padded batches are proved for up to 8 different numbers of examples
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The checks that a caller wants in a first call."""

    audit: bool | None = None  # replaces the step's own option
    folder: str | None = None  # another folder for records of audits


class Prepared(NamedTuple):
    """A compiled program, with a note on its proof and audit, and their duration."""

    program: Program
    note: str  # "" if everything has already been said
    seconds: float


def prepare(
    step: Step[Any], state: PyTree, batch: PlacedBatch, **fields: Any
) -> Prepared:
    """Compile a step for batches like this one, and check it as ``fields`` say.

    These are fields of `Asked`.
    """
    asked = Asked(**fields)
    _found(step, asked=asked)  # kept, to be used for batches of other sizes, too
    before_s = step.checked.seconds
    state = step.start(state)
    hook = functools.partial(before_first, step, state=state, batch=batch)
    kind = step.plan.states.kind(state)
    program = step.programs.program(split_state(state), batch, kind, hook)
    # A program that was compiled in an earlier call may be unproved.
    if asked.audit and step.checked.unproved is None:
        hook(trace(step.plan, (*split_state(state), *batch.args)))
    checked = step.checked
    _found(step, note="", is_told=True)
    return Prepared(program, checked.note, checked.seconds - before_s)


def before_first(
    step: Step[Any],
    traced: Traced,
    state: TrainState,
    batch: PlacedBatch,
) -> None:
    """Prove a step equal to one tower before its first call, if its options say so.

    A refuted leaf is an error. An unproved leaf is audited, and one line says so. If
    towers merge nothing, there is nothing to prove.
    """
    asked = step.checked.asked or Asked()
    wanted = _wanted(step, asked)
    if wanted is False or _is_one_of_many(step, batch):
        return
    is_split = step.num_calls > 1 or crosses_rows(traced, batch.rows)
    if is_split or asked.audit:
        sample = functools.partial(_sample, step, state, batch, traced, asked)
        examples = batch.num_examples if batch.may_pad else None
        to_prove = functools.partial(
            equality_of_step, step, state, batch.args, traced, examples
        )
        _prove(step, to_prove, sample, is_asked=bool(wanted))
    else:
        _found(step, is_alone=True)


def tell_once(step: Step[Any]) -> None:
    """Print what the proof and the audit of a step showed, unless it was printed.

    `run` prints this by itself. A loop that calls the step needs this function.
    """
    checked = step.checked
    if checked.is_told or not (checked.note and step.plan.gives_step_flag):
        return
    if step.strategy.placement.processes.is_first:
        print_line(checked.note)
    _found(step, note="", is_told=True)


def prove_alone(
    step: Step[Any],
    traced: Traced,
    state: TrainState,
    args: tuple[PyTree, ...],
    why: str,
    examples: int | None = None,
) -> None:
    """Prove a step equal to one tower, if its options say so, where no audit can run.

    ``why`` says why none can, for example because the devices are absent.
    """
    wanted = _wanted(step, Asked())
    if wanted is not False and step.num_calls > 1:

        def sample(_: Any) -> Any:
            return f"Not audited: {why}"

        to_prove = functools.partial(
            equality_of_step, step, state, args, traced, examples
        )
        _prove(step, to_prove, sample, is_asked=bool(wanted))


def audit_step(
    step: Step[Any], state: PyTree, batch: PyTree, **options: Any
) -> AuditReport:
    """Audit a step with options of `run_audit`, and return the report.

    The step stores the report, too.
    """
    start = time.perf_counter()
    plan, state = step.to_audit(step.start(state))
    try:
        # An audit transfers arrays of its own, and handles values that are not finite
        # itself. Guards that the user has set against these would stop it.
        with jax.transfer_guard("allow"), jax.debug_nans(False):
            state = jax.tree.map(readable, state)
            how_called = {
                "calls": step.num_calls,
                "pads": step.placer.may_pad,
            } | options
            report = run_audit(plan, step.strategy, state, batch, **how_called)
    finally:
        took = time.perf_counter() - start
        _found(step, seconds=step.checked.seconds + took)
    _found(step, report=report, note=f"audited in {took:.1f} s: {report}")
    return report


def audited(step: Step[Any], state: PyTree, batch: PyTree) -> AuditReport:
    """Audit the step, as the user asked for.

    The step's first call then makes no audit.
    """
    report = audit_step(step, state, batch)
    _found(step, is_done=True)
    return report


@collector_paused()
def equality_of_step(
    step: Step[Any],
    state: TrainState,
    args: tuple[PyTree, ...],
    traced: Traced,
    examples: int | None,
) -> StepEquality:
    """Prove the leaves that a step merges, for a batch of this shape.

    If the proof itself raises an error, or the proof that towers have the same values
    has raised one, the step is unknown, with that error as the reason.
    """
    faults = [
        f"the proof that all towers have equal values failed with {x.error}, at"
        f" {x.line}; please report this"
        for x in traced.proof.analysis.failures
    ]
    try:
        equality = _equality_of_step(step, state, args, traced, examples)
    except ReplicationError:
        raise
    except Exception as error:  # A fault of the proof must not end a user's training.
        return StepEquality(tuple(of_whole_step(failed(error))), 0.0)
    return equality.with_leaves([x for why in faults[:1] for x in of_whole_step(why)])


def _equality_of_step(
    step: Step[Any],
    state: TrainState,
    args: tuple[PyTree, ...],
    traced: Traced,
    examples: int | None,
) -> StepEquality:
    """Prove the leaves that a step merges, for a batch of this shape.

    The state and batch may be shapes. If a sum includes padding, a padded batch is
    refused anyway, so only full batches are proved. ``examples`` is the number of
    examples in the batch, if it may be padded; None is a full batch.
    """
    rows, _, replicated = args
    with jax.transfer_guard("allow"):  # the proof reads constants from the devices
        plan, state = step.to_audit(state)
        to_prove = StepToProve(
            plan,
            step.strategy,
            state,
            with_replicated(rows, [Whole(x) for x in replicated]),
            jax.tree.leaves(rows)[0].shape[0] // step.num_calls,
            examples,
            padded=step.placer.may_pad,
            programs=[] if plan is not step.plan else traced.tower_programs,
        )
        equality = equality_of(to_prove)
        if to_prove.padded and equality.unproved and traced.proof.unmasked():
            full = {"padded": False, "examples": None}
            equality = equality_of(dataclasses.replace(to_prove, **full))
    equality = equality.with_leaves(per_tower_values_read(traced))
    if line := line_of_own_devices(traced):
        why = why_not_as_on_one_device(to_prove)
        text = f"a shard_map over a tower's own devices, {line}: {why}" if why else ""
        equality = equality.not_of_own_devices(text)
    return equality


def _wanted(step: Step[Any], asked: Asked) -> bool | None:
    """Decide whether to prove a step: True, False, or None.

    With True an unproved leaf is an error. With None it is audited.
    """
    wanted = step.options.audit if asked.audit is None else asked.audit
    return False if step.checked.is_done else wanted


def _found(step: Step[Any], **fields: Any) -> None:
    """Store these fields in the results of checks that the step has."""
    step.checked = dataclasses.replace(step.checked, **fields)


def _is_one_of_many(step: Step[Any], batch: PlacedBatch) -> bool:
    """Decide whether too many sizes of batches were proved to prove this one.

    A warning is given the first time.
    """
    examples = step.checked.examples
    if len(examples) < _MOST_EXAMPLES or batch.num_examples in examples:
        return False
    if len(examples) == _MOST_EXAMPLES:
        numbers = ", ".join(str(x) for x in sorted(examples))
        warn(
            f"The step was proved for batches of {numbers} examples; batches of"
            f" {batch.num_examples} and of other numbers are not looked at. Give"
            f" batches fewer different sizes. {LEAVE_OUT}"
        )
        _found(step, examples=(*examples, batch.num_examples))
    return True


def _prove(
    step: Step[Any],
    to_prove: Callable[[], StepEquality],
    sample: Callable[[StepEquality], str],
    *,
    is_asked: bool,
) -> None:
    """Prove a step equal to one tower; audit leaves that are not proved, and warn.

    ``sample`` runs the audit. A leaf that was not proved for an earlier program is not
    audited again.

    Raises:
      SplitError: A leaf is proved to depend on the split, or differs in the audit.
      NotProved: A leaf is not proved, or none is merged, and a proof is asked for.
    """
    with calls_after(_PATIENCE_S, _say_that_it_is_proved):
        equality = to_prove()
    equality.refuse()
    _found(step, seconds=step.checked.seconds + equality.seconds)
    if not equality.leaves and is_asked:
        raise NotProved(equality.unproved)
    notes = [f"{equality}, in {equality.seconds:.1f} s"] if equality.leaves else []
    before = step.checked.unproved or {}
    new = {x: why for x, why in equality.unproved.items() if x not in before}
    if equality.leaves and (new or is_asked and equality.unproved):
        _found(step, note="")
        sampled = sample(equality)
        if is_asked:
            raise NotProved(equality.unproved, sampled)
        warn(told_of(new, f"{sampled}. {LEAVE_OUT}"))
        notes += [step.checked.note] if step.checked.note else []
    examples = step.checked.examples
    if equality.examples is not None and equality.examples not in examples:
        examples = *examples, equality.examples
    unproved = {**before, **new}
    _found(step, note="; ".join(notes), unproved=unproved, examples=examples)


def _say_that_it_is_proved() -> None:
    """Print that a proof is running, as the reason why the first call takes long."""
    if jax.process_index() == 0:
        print_line(f"proving that the step is equal to one tower. {LEAVE_OUT}")


def _sample(
    step: Step[Any],
    state: TrainState,
    batch: PlacedBatch,
    traced: Traced,
    asked: Asked,
    equality: StepEquality,
) -> str:
    """Audit the leaves that are not proved, and return the result as text.

    A difference is raised as an error, which ends with how to keep each tower's own
    statistics.
    """
    calls_and_pads = {"calls": step.num_calls, "pads": step.placer.may_pad}
    program = program_hash(traced, **calls_and_pads)
    folders = folders_of_records(asked.folder)
    placement = step.strategy.placement
    report = audit_result_of(program, folders, placement.processes)
    _found(step, report=report)
    try:
        if report is not None:
            _found(step, note=f"audited before: {report}")
        else:
            refuse_unasked(traced, state.params, placement)
            with noting_its_audit():
                report = audit_step(
                    step,
                    state,
                    batch,
                    gradients=False,
                    leaves=equality.is_open,
                    unproved=equality.open,
                )
                if placement.processes.is_first:
                    keep(program, report, folders)
    except NotAudited as error:
        return told_not_audited(error)
    except SplitError as error:
        advice = (*error.advice, _OWN_STATISTICS)
        raise SplitError(error.findings, advice) from None
    said = _told_of_sample(equality.open, step.plan.keeps_local)
    return f"{said}: {report}".replace("\nnote: ", "; ")


def _told_of_sample(unproved: Iterable[Equality], keeps_local: bool) -> str:
    """Word a sample that agreed, by the reasons for leaves that are not proved.

    A sample says little of what it leaves out: draws that another number of towers
    makes in another way, and per-tower values of later steps. With ``keeps_local`` it
    has run two steps, so that the values of later steps are not left out.
    """
    reasons = {x.reason for x in unproved}
    if Reason.DRAWS_OF_NO_ROW in reasons:
        return (
            "Another number of towers draws other numbers; with the same draws for all"
            " rows"
        )
    if not keeps_local and Reason.PER_TOWER in reasons:
        return "Per-tower values may differ more in later steps; with those of this one"
    return "A sample agreed"
