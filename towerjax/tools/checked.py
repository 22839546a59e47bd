"""The work of ``towerjax check``: prove what can be proved, and run the rest."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towerjax.prover.comparison import AuditReport, SplitError
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.programs.child import FORM
from towerjax.prover.programs.compare import check_rtol
from towerjax.prover.programs.devices import (
    check_numbers,
    explained_list,
    lists_of_devices,
    use_what_is_given,
)
from towerjax.prover.programs.processes import name_function
from towerjax.prover.programs.programs import (
    ProgramReport,
    made_for_parts,
    proved_on,
    run_the_rest,
)
from towerjax.prover.programs.runs import UserProgram
from towerjax.prover.programs.same import (
    compare_ran,
    prove_in_process,
    run_in_processes,
    same_for,
    same_on_devices,
    takes_nothing,
)
from towerjax.prover.programs.words import OF_MICRO_BATCHES, Words
from towerjax.prover.replication.findings import ReplicationError
from towerjax.tools.faults import Fault
from towerjax.types.options import check_takes

SCREEN = 16  # the largest number of lines that one answer shows
_NOT_RUN = "{} without a run; --run runs it, too"


@dataclasses.dataclass
class Looked:
    """What a check has found so far.

    Attributes:
      texts: Texts for a person about things that are not faults.
      faults: The faults.
      notes: Notes on things that were not seen.
      fields: More fields of the JSON output.
    """

    texts: list[str] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    fields: dict[str, Any] = dataclasses.field(default_factory=lambda: {"ran": False})


def check_program(
    maker: Callable[..., Any],
    form: str,
    numbers: Sequence[int],
    rtol: float | None,
    *,
    words: Words,
    always_run: bool,
    timeout_s: float | None = None,
) -> Looked:
    """Check a program: prove it for these numbers, or run it; return the findings.

    Args:
      maker: A function ``devices -> (fn, args)``, or ``() -> (fn, args)``; of
        micro-batches a function ``micro_batches -> (fn, args)``.
      form: The call, as errors show it.
      numbers: The numbers of devices or of micro-batches.
      rtol: As for `same_on_devices`.
      words: The words for what is counted.
      always_run: Whether the program is also run if everything is proved.
      timeout_s: As for `same_on_devices`.
    """
    looked = Looked()
    if words is OF_MICRO_BATCHES:
        programs = made_for_parts(maker, numbers, form)
        _check_parts(maker, programs, rtol, looked, always_run=always_run)
        return looked
    if takes_nothing(maker):
        _check_in_processes(maker, numbers, rtol, looked, timeout_s)
        return looked
    lists = lists_of_devices(numbers)
    check_takes(form, maker, lists[max(numbers)])
    with explained_list():
        programs = {
            n: UserProgram(form, maker(devices)) for n, devices in lists.items()
        }
    is_answered = _prove(lambda: proved_on(programs), looked)
    if is_answered and not always_run and use_what_is_given(programs, lists):
        _tell_of_no_run(looked)
    else:
        _compare(lambda: same_on_devices(maker, numbers, rtol=rtol), looked)
    return looked


def _check_parts(
    maker: Callable[..., Any],
    programs: Mapping[int, UserProgram],
    rtol: float | None,
    looked: Looked,
    *,
    always_run: bool,
) -> None:
    """Prove a program for numbers of micro-batches, and run what is not proved."""
    has_run = False

    def prove_and_run() -> tuple[ProgramReport | None, str]:
        nonlocal has_run
        report, why = proved_on(programs, OF_MICRO_BATCHES)
        if report is None:
            return None, why
        has_run = any(x.says is Says.UNKNOWN for x in report.equal)
        try:
            return run_the_rest(report, maker, programs, rtol), ""
        except SplitError as error:
            _add_differences(error, looked)
            return report, ""

    is_answered = _prove(prove_and_run, looked)
    looked.fields["ran"] = has_run
    if always_run or not (is_answered or has_run):
        numbers = [*programs]
        _compare(lambda: same_for(maker, micro_batches=numbers, rtol=rtol), looked)
    elif not has_run:
        _tell_of_no_run(looked)


def _prove(
    prove: Callable[[], tuple[ProgramReport | None, str]], looked: Looked
) -> bool:
    """Prove what can be proved, and add the findings to ``looked``.

    Returns whether nothing is left to be checked by a run.
    """
    try:
        proof, why = prove()
    except ReplicationError as error:
        looked.faults += _faults_of_proof(str(error))
        return False
    if proof is None:
        looked.notes.append(f"nothing is proved: {why}")
        looked.texts.append(f"note: {looked.notes[-1]}")
        return False
    _tell_of_proof(proof, looked)
    results = {x.leaf: {"says": x.says, "why": x.why} for x in proof.equal}
    looked.fields["results"] = results
    looked.faults += [
        Fault("equality", x.leaf, f"{x.leaf}: {x.why}")
        for x in proof.equal
        if x.says is Says.REFUTED
    ]
    return bool(proof.equal) and all(x.says is not Says.UNKNOWN for x in proof.equal)


def _tell_of_no_run(looked: Looked) -> None:
    answer = Says.REFUTED if looked.faults else Says.PROVED
    looked.texts.append(_NOT_RUN.format(answer))


def _tell_of_proof(proof: ProgramReport, looked: Looked) -> None:
    looked.texts.append("\n".join(str(proof).splitlines()[:SCREEN]))
    looked.fields["proved"] = proof.maps
    looked.notes += [*proof.notes, *[f"not read: {x}" for x in proof.unread]]


def _faults_of_proof(report: str) -> list[Fault]:
    """Read the faults that the text of an error lists, one per line."""
    _, *lines = report.split("\n  - ")
    return [Fault("proof", "", line.strip()) for line in lines or [report]]


def _check_in_processes(
    maker: Callable[..., Any],
    devices: Sequence[int],
    rtol: float | None,
    looked: Looked,
    timeout_s: float | None,
) -> None:
    """Run the program in a process per number of devices; prove and compare."""
    named = name_function(FORM, maker)
    numbers = check_numbers(devices)
    check_rtol(rtol)
    ran = run_in_processes(named, numbers, timeout_s)
    if all(x.is_program for x in ran.values()):
        _prove(lambda: prove_in_process(named, ran, timeout_s), looked)
    _compare(lambda: compare_ran(named, ran, rtol, timeout_s), looked)


def _compare(compare: Callable[[], AuditReport], looked: Looked) -> None:
    """Run the program, and compare its results."""
    looked.fields["ran"] = True
    try:
        outcome = compare()
    except SplitError as error:
        _add_differences(error, looked)
        return
    looked.texts.append(str(outcome))
    looked.notes += outcome.notes
    looked.fields |= {
        "compared": outcome.compared,
        "not_compared": outcome.not_compared,
    }


def _add_differences(error: SplitError, looked: Looked) -> None:
    """Add the leaves that differ between runs to the faults."""
    advice = "\n".join(error.advice)
    looked.faults += [
        Fault("comparison", x.leaf, str(x), x.relative, advice) for x in error.findings
    ]
