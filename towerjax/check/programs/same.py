"""Compare what a program gives for several values of what must not matter."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from towerjax.check.audit.comparison import (
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
    rounding_of,
    rounding_of_dtypes,
)
from towerjax.check.programs.runs import Seen, UserProgram, Value, meshes_of_trace
from towerjax.check.programs.traced import TracedProgram
from towerjax.jaxprs.equation import all_sites, named_axes, user_line
from towerjax.mesh.devices import Device, canonical_device_name
from towerjax.types.door import door
from towerjax.types.leaves import listed
from towerjax.types.options import check_function, check_number, check_wholes

_TIMES = (
    "as many times as much as there are devices: a sum of what is a mean, or of what is"
    " the same on all (with check_vma=True jax.grad adds up over devices by itself)."
)
_OVER = "its share on one device: a mean of what is to be added up."
_ONE_CALL = (
    "one call was compared, since no argument comes back as a result, and nothing was"
    " changed in place: a wrong factor of a gradient, which an optimizer's first step"
    " may hide, as Adam's does, would not be seen. Return the new state."
)
_SCALARS = (
    "nothing but scalars was compared: parameters and gradients were not seen. Return"
    " them, too."
)
_KEYS = "not compared: each device has a key of its own"
_DIFFER = "devices return different values, whose {} is that of one device"
_HOST = (np.mean, _DIFFER.format("mean")), (np.sum, _DIFFER.format("sum"))
_UNREAD = (
    "The program cannot be traced, so its lines were not read; where it computes in 16"
    " bits, say rtol=0.06 (--rtol 0.06)."
)
FORM_OF_MAKE = "make(devices)"


@door
def same_on_devices(
    make: Callable[[list[Device]], tuple[Callable[..., Any], Sequence[Any]]],
    devices: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
) -> AuditReport:
    """Raise if what a program gives depends on the number of devices.

    The program is made and run as it is, once for each number. Its results are compared
    leaf by leaf with those on one device, as an audit compares: whole where they are
    split over devices, each copy where `jax.pmap` returns one of each device. What it
    changes in place is compared, too: of its arguments, and of what the function holds.

    Where a result is an argument's new state, or something is changed in place, it is
    called three times.

    Args:
      make: ``devices -> (fn, args)``, where ``devices`` is a list of ``jax.Device``, of
        which the program uses all, and no other: ``jax.sharding.Mesh(devices, "i")``.
        Arguments are the same global ones each time. ``fn`` may be of ``jit``,
        ``shard_map``, ``pmap`` or Python, and it may donate.
      devices: The numbers of devices; the first is 1.
      rtol: As for `assert_replicates`.

    Returns:
      An `AuditReport`. Its notes say what could not be seen, and which results differ
      from device to device, with the mean or the sum of one device.

    Raises:
      SplitError: A leaf depends on it: with both numbers, their factor where it is the
        number of devices or one over it, and the lines that communicate.
      ValueError: There are not so many devices, or the program uses others; it gives
        nothing to compare, or is not deterministic.

    Example:
      >>> import numpy as np
      >>> def make(devices):
      ...     mesh = jax.sharding.Mesh(devices, "i")
      ...     mean = lambda x: jax.lax.pmean(x.mean(), "i")
      ...     specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}
      ...     return jax.shard_map(mean, mesh=mesh, **specs), [np.arange(8.0)]
      >>> same_on_devices(make, devices=(1, 2)).compared
      ('result',)
    """
    check_function("make", make, FORM_OF_MAKE)
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")
    lists = lists_of_devices(devices)

    def made(number: int) -> UserProgram:
        return UserProgram(FORM_OF_MAKE, make(lists[number]))

    programs = dict[int, UserProgram]()
    runs = dict[int, Seen]()
    for number in lists:
        program = programs[number] = made(number)
        runs[number] = program.run()
        if number > 1:
            program.release()
    # What a trace leaves behind would disturb a run.
    traces = {number: programs[number].trace() for number in [*lists][1:]}
    for number, run in runs.items():
        traced, _ = traces.get(number, (None, ""))
        refuse_others(lists[number], run.devices | meshes_of_trace(traced))
    again = functools.partial(_again, programs[1], runs[1], lambda: made(1))
    return compare_runs(runs, list(traces.values()), again, rtol)


def lists_of_devices(numbers: Sequence[int]) -> dict[int, list[Device]]:
    """The devices to give to ``make``, by their number; 1 is the first."""
    given = check_wholes("devices", numbers)
    here = len(jax.devices())
    if given[0] != 1 or len({*given}) < 2 or max(given) > here:
        raise ValueError(
            f"devices={numbers!r} must be 1 and other numbers, of at most {here}"
            ' devices. On CPUs say jax.config.update("jax_num_cpu_devices",'
            f" {max(given)}) before JAX is used."
        )
    return {number: jax.devices()[:number] for number in given}


def refuse_others(given: Sequence[Device], used: frozenset[Device]) -> None:
    """Raise unless a program uses the devices that it was given, and all of them.

    Those of another platform hold what is kept on the host.
    """
    used = frozenset(x for x in used if x.platform == given[0].platform)
    if used == {*given} or (len(given) == 1 and not used):
        return
    told = "says nowhere on which devices it runs"
    if used:
        names = ", ".join(sorted(map(canonical_device_name, used)))
        devices = "1 device" if len(used) == 1 else f"{len(used)} devices"
        told = f"runs on {devices}, {names}, as its arguments, results and meshes say"
    raise ValueError(
        f"make({len(given)} devices) {told}. Make its mesh of the devices that it is"
        " given, each time anew, jax.sharding.Mesh(devices, 'i'), and return an array"
        " that is on them."
    )


def use_what_is_given(
    programs: Mapping[int, UserProgram], lists: Mapping[int, Sequence[Device]]
) -> bool:
    """Whether programs say, without a run, that they use the devices of their lists."""
    try:
        for number, program in programs.items():
            refuse_others(lists[number], program.devices_named())
    except ValueError:
        return False
    return True


def compare_runs(
    runs: Mapping[int, Seen],
    traces: Sequence[tuple[TracedProgram | None, str]],
    again: Callable[[float], list[Seen]],
    rtol: float | None,
) -> AuditReport:
    """The report of runs that give the same as the first; raise if one does not.

    ``again(rounding)`` runs the first one of arguments that are rounded so.
    """
    [(_, first), *others] = runs.items()
    jaxprs = [traced.jaxpr for traced, _ in traces if traced]
    rounding = max(rounding_of(jaxprs), rounding_of_dtypes(first.dtypes))
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
            pairs = _pairs(number, run.calls[call], first.calls[call], rtol, differing)
            got, want = ({name: x[i] for name, x in pairs.items()} for i in (0, 1))
            compared.append(Compared(number, split, got, want, near))
        if not compared_of(compared[0].want):
            break
        try:
            reports.append(judge(compared, 0, rtol))
        except SplitError as error:
            findings = [dataclasses.replace(x, of="devices") for x in error.findings]
            gave = first.calls[call]
            findings.sort(key=lambda x: gave[x.leaf].is_key)
            raise SplitError(findings, _reasons(findings, jaxprs)) from None
    if not reports:
        raise NotAudited(
            "there is nothing to compare: no result has numbers that are finite, and"
            " nothing was changed in place. Return the new state from fn"
        )
    hows = sorted(differing, key=lambda how: how == _KEYS)
    notes = [f"{listed(differing[how])}: {how}" for how in hows]
    notes += _unseen(first, reports[0], [why for traced, why in traces if not traced])
    return dataclasses.replace(join_reports(reports), of="devices", notes=tuple(notes))


def _unseen(run: Seen, report: AuditReport, untraced: Sequence[str]) -> Iterator[str]:
    """What was not seen."""
    values = [run.calls[0][name].numbers for name in report.compared]
    if all(x is not None and x.size == 1 for x in values):
        yield _SCALARS
    elif len(run.calls) == 1:
        yield _ONE_CALL
    for why in dict.fromkeys(untraced):
        yield f"the program cannot be traced, so its meshes were not read ({why})"


def _again(
    program: UserProgram,
    first: Seen,
    anew: Callable[[], UserProgram],
    rounding: float,
) -> list[Seen]:
    """Runs on one device of arguments that are rounded once more, each way.

    The program is made anew for each where it changes what it holds. Raise if the same
    arguments gave something else.
    """
    is_anew = first.is_changed or not program.is_plain
    want = _given_by(first, 0, first)
    if not is_anew:
        try:
            refuse_random(_given_by(program.run(), 0, first), want)
        except NotAudited:
            is_anew = True  # it may hold what nobody sees, as a generator
    if is_anew:
        refuse_random(_given_by(anew().run(), 0, first), want)
    by = rounding / 8 if rounding > 1e-4 else 2.0**-23
    programs = [anew() if is_anew else program for _ in range(3)]
    return [x.run(step * by) for x, step in zip(programs, (1, -1, 2), strict=True)]


def _given_by(run: Seen, call: int, first: Seen) -> Leaves:
    """What a call gave, of what the first run's gave."""
    gave = run.calls[min(call, len(run.calls) - 1)]
    none = Value(None, is_state=False, is_key=False)
    return {name: gave.get(name, none).numbers for name in first.calls[call]}


def _pairs(
    number: int,
    got: Mapping[str, Value],
    want: Mapping[str, Value],
    rtol: float,
    differing: dict[str, dict[str, None]],
) -> dict[str, tuple[Any, Any]]:
    """What several devices and one gave, each in one shape, by name.

    What differs from device to device is added to ``differing``.
    """
    others = sorted(got.keys() ^ want.keys())
    if names := [name for name in others if name.startswith("result")]:
        raise ValueError(f"On 1 and {number} devices results differ: {listed(names)}.")
    pairs: dict[str, tuple[Any, Any]] = dict.fromkeys(others, (None, None))
    for name in [name for name in want if name in got]:
        *pair, how = _alike(got[name], want[name], rtol)
        pairs[name] = pair[0], pair[1]
        if how:
            differing.setdefault(how, {})[name] = None
    return pairs


def _alike(got: Value, want: Value, rtol: float) -> tuple[Any, Any, str]:
    """Both in one shape, and what of the first was taken where devices differ.

    Rows that `jax.pmap` has split are joined. A state is as many copies. Of what else
    each device returns, the host may take the mean, or the sum.
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
        *[(of(x, axis=0, keepdims=True), y, how) for of, how in _HOST],
    )
    return next((way for way in ways if _are_close(*way[:2], rtol)), ways[0])


def _are_close(x: np.ndarray, y: np.ndarray, rtol: float) -> bool:
    return bool((gaps(x, y) <= rtol * np.abs(y).max(initial=0.0)).all())


def _reasons(
    findings: Sequence[Finding], jaxprs: Sequence[ClosedJaxpr]
) -> Iterator[str]:
    """What the numbers say, and the lines that communicate."""
    for text, power in ((_TIMES, 1), (_OVER, -1)):
        expected = [(x, x.towers**power * x.one_tower) for x in findings]
        if names := [x.leaf for x, y in expected if np.isclose(x.value, y, 1e-4, 0)]:
            yield f"{listed(names)}: {text}"
    if not jaxprs:
        yield _UNREAD
    sites = [x for jaxpr in jaxprs[-1:] for x in all_sites(jaxpr) if named_axes(x[0])]
    lines = [(user_line(x), x[0].primitive.name) for x in sites]
    if at := list(dict.fromkeys(f"{line} ({how})" for line, how in lines if line)):
        yield f"Devices communicate at {'; '.join(at[:3])}."
