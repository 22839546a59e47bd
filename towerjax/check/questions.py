"""The `Checks` of a step: its proof, audit, program, report, and locations of NaN."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from towerjax.check.equality.told import NO_ROWS
from towerjax.check.first_call import audited as audited
from towerjax.check.first_call import before_first as before_first
from towerjax.check.first_call import equality_of_step, prove_alone
from towerjax.check.first_call import prepare as prepare
from towerjax.check.first_call import tell_once as tell_once
from towerjax.check.report.report import StepReport, report_on, time_program
from towerjax.data.batch_rows import count_examples, without_replicated
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.transfer import place
from towerjax.step.run.compile import Program, collector_paused, compile_step
from towerjax.step.run.programs import send_replicated
from towerjax.step.run.prove import Proof
from towerjax.step.run.trace import Traced, trace
from towerjax.step.state.nonfinite import Location
from towerjax.step.state.train_state import (
    TrainState,
    split_state,
    state_layout,
    step_number,
)
from towerjax.step.step import Step
from towerjax.types import Layout, PyTree
from towerjax.types.options import check_whole


@collector_paused()
def prove_step(step: Step[Any], state: TrainState, batch: PyTree) -> Proof:
    """Prove, from shapes alone, that towers stay the same and equal one tower."""
    state = step.plan.states.as_state(state)
    args = step.placer.shapes(batch)
    traced = trace(step.plan, (*split_state(state), *args))
    for traced_pass in traced.passes:
        traced_pass.towers.rehearse()
    proof = traced.proof
    examples = _examples_of(step, batch)
    equality = equality_of_step(step, state, args, traced, examples)
    if step.num_calls > 1 and step.options.audit is not False:
        equality.refuse()
    return dataclasses.replace(proof, unproved=equality.unproved)


def _examples_of(step: Step[Any], batch: PyTree) -> int | None:
    """Count the examples of a batch that may be padded; None for others."""
    if not step.placer.may_pad:
        return None
    rows, _ = without_replicated(batch)
    return count_examples(rows, shapes=True)


def prove_traced(
    step: Step[Any], traced: Traced, state: TrainState, batch: PlacedBatch
) -> None:
    """Prove a step that is traced into another program, where no audit can run."""
    examples = batch.num_examples if batch.may_pad else None
    prove_alone(step, traced, state, batch.args, NO_ROWS, examples)


def program_of(step: Step[Any], state: PyTree, batch: PyTree) -> Program:
    """Compile a step's program for such a batch; for absent devices, from shapes."""
    placement = step.strategy.placement
    if placement.absent is not None:
        return _compile_for_absent(step, state, batch)
    state = step.start(state)
    placed = step.place_batch(batch)
    hook = functools.partial(step.before_first, state=state, batch=placed)
    kind = step.plan.states.kind(state)
    return step.programs.program(split_state(state), placed, kind, hook)


def _compile_for_absent(step: Step[Any], state: PyTree, batch: PyTree) -> Program:
    placement = step.strategy.placement
    state = state if isinstance(state, TrainState) else step.shapes(state)
    state = step.plan.states.as_state(state)
    args = step.placer.shapes(batch)
    full_rows = None
    if step.programs.leaves_out_weights and not step.placer.may_pad:
        full_rows = jax.tree.leaves(args[0])[0].shape[0] // placement.num_towers
    hook = functools.partial(
        prove_alone,
        step,
        state=state,
        args=args,
        why="its devices are absent",
        examples=_examples_of(step, batch),
    )
    first = split_state(state)
    return compile_step(
        step.plan, placement, (*first, *args), full_rows=full_rows, before_first=hook
    )


def report_step(
    step: Step[Any], state: PyTree, batch: PyTree, timed_calls: int
) -> StepReport:
    """Report on a step's compiled program, with times of calls.

    ``timed_calls`` is the number of calls that are timed.
    """
    check_whole("timed_calls", timed_calls, 0)
    placement = step.strategy.placement
    if not timed_calls:
        program = step.program(state, batch)
        return report_on(program, placement, step.unproved)
    placed = send_replicated(step.place_batch(batch))
    program = step.program(state, placed)
    state = step.start(state)
    copied = place(state, placement, state_layout(step.strategy), state.params)
    step_flag = [step.step_flags.none] * program.plan.gives_step_flag
    others = *placed.args, *step_flag
    timing = time_program(program, copied, others, timed_calls)
    report = report_on(program, placement, step.unproved)
    return dataclasses.replace(report, timing=timing)


def locate_nonfinite(
    step: Step[Any], state: TrainState, batch: PyTree, number: int | None
) -> tuple[Location, ...]:
    """Find the towers and leaves whose values in a step are not finite.

    ``number`` is that of the step; None is the next step of the state.
    """
    placement = step.strategy.placement
    state = step.start(state)
    placed = send_replicated(step.place_batch(batch))
    number = step_number(state) + 1 if number is None else number
    before = np.asarray(number - 1).astype(np.int32)
    at = place(before, placement, Layout.MIRRORED)
    donated_kept = split_state(dataclasses.replace(state, step=at))
    locator = dataclasses.replace(step.programs, plan=step.plan.flagging())
    program = locator.program(donated_kept, placed)
    (flags,) = locator(program, donated_kept, placed)
    locations = [y for x in jax.device_get(flags) for y in x.locations(number)]
    # A NaN in the parameters is found by each pass, so repetitions are left out.
    return tuple(dict.fromkeys(locations))
