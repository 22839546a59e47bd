"""Compare the results of several runs of a program, leaf by leaf, with the first."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from towerjax.prover.comparison import (
    AuditReport,
    Compared,
    Finding,
    Leaves,
    NotAudited,
    SplitError,
    compared_of,
    gaps,
    join_reports,
    judge,
    refuse_random,
    rounding_of_dtypes,
)
from towerjax.prover.programs.read import Reading
from towerjax.prover.programs.runs import Seen, UserProgram, Value
from towerjax.types.options import check_number
from towerjax.types.refusals import listed

_TIMES = (
    "multiplied by the number of devices: a mean, or a value that is the same on all"
    " devices, is added up (with check_vma=True jax.grad adds up over devices by"
    " itself)."
)
_OVER = "divided by the number of devices: a value that must be added up is averaged."
_FACTORS = {
    2: "proportional to {of}^2.",
    1: "proportional to {of}: a mean is added up, or a division is missing.",
    -1: "proportional to 1/{of}: it is divided once too often, or a value that must be"
    " added up is averaged.",
    -2: "proportional to 1/{of}^2.",
}
_ONE_CALL = (
    "only one call was compared, because no argument comes back as a result and nothing"
    " was changed in place. So a wrong factor of a gradient, which the first step of an"
    " optimizer such as Adam may hide, would not be seen. Return the new state."
)
_SCALARS = (
    "only scalars were compared, and no parameters or gradients. Return them, too."
)
_KEYS = "not compared, because each device has a key of its own"
_DIFFER = "devices return different values, whose {} is the value of one device"
_HOST = (np.mean, _DIFFER.format("mean")), (np.sum, _DIFFER.format("sum"))
_UNREAD = (
    "The program cannot be traced, so its lines were not read. If it computes in 16"
    " bits, write rtol=0.06 (--rtol 0.06)."
)
_NO_ARGUMENTS = (
    "The program has no arguments that are arrays, so the effect of rounding was not"
    " measured. If it trains for many steps, give rtol= (--rtol)."
)
DEVICES = "devices"  # the value of ``of`` if runs differ in their number of devices


def check_rtol(rtol: float | None) -> None:
    """Raise unless ``rtol`` is a tolerance, or None."""
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")


def compare_runs(
    runs: Mapping[int, Seen],
    reads: Mapping[int, Reading],
    again: Callable[[float], Sequence[Seen]],
    rtol: float | None,
    of: str = DEVICES,
) -> AuditReport:
    """Report on runs that agree with the first run; raise if one does not.

    Args:
      runs: The program's results, by the number that the runs differ in, such as the
        number of devices. All are compared with the first.
      reads: The findings in its traces, by this number; only of runs that were traced.
      again: A function ``rounding -> runs`` that repeats the first run with arguments
        that are changed by this relative amount.
      rtol: The tolerance; None takes it from the dtypes that are computed.
      of: The name of the number.
    """
    [(at_first, first), *others] = runs.items()
    rounding = max(
        rounding_of_dtypes(first.dtypes), *[x.rounding for x in reads.values()]
    )
    rtol = rounding if rtol is None else rtol
    nearby = functools.cache(functools.partial(again, rounding))
    differing = dict[str, dict[str, None]]()
    reports = list[AuditReport]()
    for call in range(min(len(run.calls) for run in runs.values())):
        split = f"call {call + 1}" if call else ""

        def near(call: int = call) -> list[Leaves]:
            return [_given_by(run, call, first) for run in nearby()]

        compared = []
        for number, run in others:
            named = f"With {of}={at_first} and {number}"
            if of == DEVICES:
                named = f"On {at_first} and {number} devices"
            pairs = _pairs(named, run.calls[call], first.calls[call], rtol, differing)
            got, want = ({name: x[i] for name, x in pairs.items()} for i in (0, 1))
            compared.append(Compared(number, split, got, want, near))
        if not compared_of(compared[0].want):
            break
        try:
            reports.append(judge(compared, 0, rtol))
        except SplitError as error:
            findings = [
                dataclasses.replace(x, of=of, first=at_first) for x in error.findings
            ]
            gave = first.calls[call]
            findings.sort(key=lambda x: gave[x.leaf].is_key)
            reasons = _reasons(findings, reads, of, first.has_arguments)
            raise SplitError(findings, reasons) from None
    if not reports:
        raise NotAudited(
            "there is nothing to compare, because no result has finite numbers and"
            " nothing was changed in place. Return the new state from fn"
        )
    hows = sorted(differing, key=lambda reduction: reduction == _KEYS)
    notes = [f"{listed(differing[reduction])}: {reduction}" for reduction in hows]
    notes += _unseen(first, reports[0], [x.why for x in reads.values() if x.why])
    joined = join_reports(reports)
    return dataclasses.replace(joined, of=of, first=at_first, notes=tuple(notes))


def _unseen(run: Seen, report: AuditReport, untraced: Sequence[str]) -> Iterator[str]:
    """Yield notes on what the comparison could not see.

    ``untraced`` are the reasons why some runs were not traced.
    """
    values = [run.calls[0][name].numbers for name in report.compared]
    if all(x is not None and x.size == 1 for x in values):
        yield _SCALARS
    elif len(run.calls) == 1 and run.has_arguments:
        yield _ONE_CALL
    for why in dict.fromkeys(untraced):
        yield f"the program cannot be traced, so its meshes were not read ({why})"


def runs_nearby(
    program: UserProgram,
    first: Seen,
    anew: Callable[[], UserProgram],
    rounding: float,
) -> list[Seen]:
    """Run a program with arguments whose rounding is changed, up and down.

    If the program changes values that it holds, it is made again for each run, by
    ``anew``. Raise if a run with the same arguments gives different results.
    """
    is_anew = first.is_changed or not program.is_plain
    if not is_anew:
        try:
            refuse_other_run(program.run(), first)
        except NotAudited:
            is_anew = True  # the program may have a state, such as a generator
    if is_anew:
        refuse_other_run(anew().run(), first)
    by = rounding / 8 if rounding > 1e-4 else min(rounding, 2.0**-23)
    programs = [anew() if is_anew else program for _ in range(3)]
    return [x.run(step * by) for x, step in zip(programs, (1, -1, 2), strict=True)]


def refuse_other_run(again: Seen, first: Seen) -> None:
    """Raise unless two runs on the same arguments have equal results.

    Only their first calls are compared.
    """
    refuse_random(_given_by(again, 0, first), _given_by(first, 0, first))


def _given_by(run: Seen, call: int, first: Seen) -> Leaves:
    """Pick the results of one call of a run, for the names that the first run has."""
    gave = run.calls[min(call, len(run.calls) - 1)]
    none = Value(None, is_state=False, is_key=False, is_returned=False)
    return {name: gave.get(name, none).numbers for name in first.calls[call]}


def _pairs(
    named: str,
    got: Mapping[str, Value],
    want: Mapping[str, Value],
    rtol: float,
    differing: dict[str, dict[str, None]],
) -> dict[str, tuple[Any, Any]]:
    """Pair, by name, the results of a run and of the first run, in equal shapes.

    The names of results that differ from device to device are added to ``differing``.
    """
    others = sorted(got.keys() ^ want.keys())
    both = {**got, **want}
    if names := [name for name in others if both[name].is_returned]:
        raise ValueError(
            f"{named} the program returns different results: {listed(names)}. Return"
            " results of the same names in each run."
        )
    pairs: dict[str, tuple[Any, Any]] = dict.fromkeys(others, (None, None))
    for name in [name for name in want if name in got]:
        *pair, reduction = _as_compared(got[name], want[name], rtol)
        pairs[name] = pair[0], pair[1]
        if reduction:
            differing.setdefault(reduction, {})[name] = None
    return pairs


def _as_compared(got: Value, want: Value, rtol: float) -> tuple[Any, Any, str]:
    """Bring two values into one shape; tell how devices' values were reduced.

    The last is "" if they were not. Rows that `jax.pmap` has split are joined. A state
    is compared as copies. For other values that each device returns, the host may take
    the mean or the sum.
    """
    x = got.numbers
    y = want.numbers
    if x is None or y is None:
        return None, None, ""
    if x.size == y.size and x.shape[2:] == y.shape[2:]:
        return x.reshape(y.shape), y, ""
    if not (x.ndim == y.ndim > 0 and y.shape[0] == 1 and x.shape[1:] == y.shape[1:]):
        return x, y, ""
    copies = np.broadcast_to(y, x.shape)
    if got.is_key and not (x == x[:1]).all():
        return None, None, _KEYS
    if got.is_state or not len(x):
        return x, copies, ""
    ways = (
        (x, copies, ""),
        *[(of(x, axis=0, keepdims=True), y, reduction) for of, reduction in _HOST],
    )
    return next((way for way in ways if _are_close(*way[:2], rtol)), ways[0])


def _are_close(x: np.ndarray, y: np.ndarray, rtol: float) -> bool:
    return bool((gaps(x, y) <= rtol * np.abs(y).max(initial=0.0)).all())


def _reasons(
    findings: Sequence[Finding],
    reads: Mapping[int, Reading],
    of: str,
    has_arguments: bool,
) -> Iterator[str]:
    """Yield reasons for the differences: factors, and lines that may be their cause."""
    texts = {1: _TIMES, -1: _OVER}
    if of != DEVICES:
        texts = {power: text.format(of=of) for power, text in _FACTORS.items()}
    for power, text in texts.items():
        expected = [(x, (x.towers / x.first) ** power * x.one_tower) for x in findings]
        if names := [x.leaf for x, y in expected if np.isclose(x.value, y, 1e-4, 0)]:
            yield f"{listed(names)}: {text}"
    if not has_arguments:
        yield _NO_ARGUMENTS
    read = [x for x in reads.values() if not x.why]
    if not read:
        yield _UNREAD
    elif of != DEVICES:
        yield from _uses_of_number(read, of)
    elif at := read[-1].communicates:
        yield f"Devices communicate at {'; '.join(at[:3])}."


def _uses_of_number(reads: Sequence[Reading], of: str) -> Iterator[str]:
    """Yield the lines that multiply or divide by the number in which runs differ."""
    factors = [dict.fromkeys(x.factors) for x in reads]
    several = {x: None for some in factors for x in some}
    changing = [x for x in several if not all(x in some for some in factors)]
    lines = dict.fromkeys(f"{line} ({operation})" for line, operation, _ in changing)
    if lines:
        yield (f"A factor or divisor depends on {of} at {'; '.join([*lines][:3])}.")
