"""Prove that results which a program's maps declare equal are equal on all devices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from towerjax.jaxprs.params import manual_axes, named_axes
from towerjax.jaxprs.sites import Site, all_sites, outwards, user_line
from towerjax.prover.comparison import SplitError
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.programs.devices import FORM_OF_MAKE, lists_of_devices
from towerjax.prover.programs.drawn import compare_on_drawn
from towerjax.prover.programs.equality import MadeProgram, equal_for_all
from towerjax.prover.programs.runs import UserProgram
from towerjax.prover.programs.traced import (
    ARRAY_TYPES,
    TracedProgram,
    flatten,
    state_places,
    trace_program,
)
from towerjax.prover.programs.words import OF_DEVICES, OF_MICRO_BATCHES, Words
from towerjax.prover.replication.analysis import COPIES, analyse, becomes_of
from towerjax.prover.replication.findings import OwnMesh, ReplicationError
from towerjax.prover.replication.meshes import mistakes, of_equals
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_different, check_function, check_takes
from towerjax.types.refusals import listed
from towerjax.types.trees import key_data, named_leaves

_ARRAYS: Any = ARRAY_TYPES | jax.ShapeDtypeStruct

_NO_MAP = (
    "no shard_map and no pmap: under jax.jit there is one global program, whose meaning"
    " XLA keeps on any number of devices."
)
_ASK_FOR_MANY = (
    " Use prove(make, devices=(1, 2, 4)) to prove that it is the same program on each"
    " number."
)
NOT_THE_SAME = (
    "Devices have different values where the program says that they are the same:"
)
FORM_OF_PARTS = "make(micro_batches)"
_OF_EQUALS = {
    "added up": "as many times as there are devices, at ",
    "averaged": "and stays what it is (with check_vma=True jax.grad adds up over"
    " devices by itself, D times the mean), at ",
}


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """What `prove` found in a program.

    Attributes:
      maps: A line for each `shard_map` and `pmap`: where it is, its axes, how many
        results it declares the same (which is proved), and how many it splits.
      notes: Notes on what may be a mistake: sums and means of values that are equal on
        all devices, and copies of a state that do not stay the same. Other notes name
        what is not portable: draws by rbg, and ``ppermute`` over axes in another order
        than the mesh's.
      unread: Code that no jaxpr shows, so that its results may differ.
      same: The number of results that are proved the same, over all maps and axes.
      copies: The number of leaves of a state that stay the same on all devices.
      equal: For a program for several numbers of devices, or of micro-batches, whether
        each result is the same as with one: its ``says`` is "proved", "refuted",
        "unknown", or "ran the same" if it was only run.
      words: The words for what was counted: devices, or micro-batches.
    """

    maps: tuple[str, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...]
    same: int
    copies: int
    equal: tuple[Equality, ...] = ()
    words: Words = OF_DEVICES

    @property
    def unproved(self) -> dict[str, str]:
        """The reason for each result that is not proved the same as with one."""
        return {x.leaf: x.why for x in self.equal if x.says is not Says.PROVED}

    def __str__(self) -> str:
        copies = f"copies of a state that stay the same: {self.copies}"
        notes = [copies] * (self.copies > 0) + [f"note: {x}" for x in self.notes]
        unread = [f"not read: {x}" for x in self.unread]
        without = [_NO_MAP if self.equal else _NO_MAP + _ASK_FOR_MANY]
        maps = self.maps or without * (self.words is OF_DEVICES)
        return "\n".join([*maps, *self._equal(), *notes, *unread])

    def _equal(self) -> Iterator[str]:
        """Yield lines on the results: which are proved as on one device, which not.

        The reason for a refuted result stands in the error that refuses it.
        """
        if self.equal:
            number = sum(x.says is Says.PROVED for x in self.equal)
            alone = self.words.alone
            yield f"the same as {alone}: {number} of {len(self.equal)} results"
        by_answer = dict[tuple[Says, str], list[str]]()
        for x in self.equal:
            if x.says is not Says.PROVED:
                why = "" if x.says is Says.REFUTED else x.why
                by_answer.setdefault((x.says, why), []).append(x.leaf)
        for (says, why), (first, *more) in by_answer.items():
            leaves = f"{first} and {len(more)} more" if more else first
            yield f"  {Equality(leaves, says, why)}"


@api_boundary
def prove(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
    **kwargs: Any,
) -> ProgramReport:
    """Prove that the results which a program declares replicated are so on all devices.

    The program is traced and not run. Each `jax.shard_map` and `jax.pmap` in it is
    analysed, at any depth, along each manual axis of more than one device, whatever
    ``check_vma`` says. If `jax.pmap` is given a state as one copy per device, and
    returns it so, the report notes leaves that do not stay copies.

    With ``devices`` each result is also proved to be the same as on one device, for all
    values of the arguments, up to rounding. The report's ``unproved`` has the results
    that are not proved; `same_on_devices` compares their numbers.

    With ``micro_batches`` each result is proved to be the same for any of these numbers
    of micro-batches, into which the program splits its batch to accumulate a gradient.
    Results that are not proved, such as those of a Python loop, are run for each number
    and compared in float64, on the given arguments and on drawn ones. Such a result
    ``says`` "ran the same". It stays in ``unproved``, because a run is no proof.

    Args:
      fn: Any JAX function, jitted or not. With ``devices``, a function
        ``make(devices)`` that returns ``(fn, args)``, as for `same_on_devices`. With
        ``micro_batches``, a function ``make(micro_batches)``, as for `same_for`.
      *args: The function's arguments; arrays may be `jax.ShapeDtypeStruct`.
      devices: The numbers of devices; the first must be 1.
      micro_batches: The numbers of micro-batches; two or more.
      **kwargs: The function's arguments by name.

    Returns:
      A `ProgramReport`; it says so if the program has no map.

    Raises:
      ReplicationError: A result that ``out_specs`` call the same differs from device to
        device; only some devices reach a collective; or a result differs from that on
        one device, or with one micro-batch, by their number or a power of it. The error
        has all findings.
      SplitError: A result that is not proved was run, and depends on the number of
        micro-batches.

    Example:
      >>> import towerjax as tj
      >>> types = {"axis_types": (jax.sharding.AxisType.Auto,)}
      >>> mesh = jax.sharding.AbstractMesh((4,), ("i",), **types)
      >>> specs = {"in_specs": jax.P("i"), "out_specs": jax.P(), "check_vma": False}
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, **specs)
      >>> tj.testing.prove(total, jax.ShapeDtypeStruct((4,), "float32")).same
      1
    """
    if devices is None and micro_batches is None:
        return proved(trace_program(fn, args, kwargs), args)
    if args or kwargs or None not in (devices, micro_batches):
        raise ValueError(
            "prove(make, devices=...) takes no other arguments, and so does prove(make,"
            " micro_batches=...). Let make return the function and its arguments."
        )
    if micro_batches is not None:
        words = OF_MICRO_BATCHES
        by_number = made_for_parts(fn, micro_batches)
    else:
        words = OF_DEVICES
        check_function("make", fn, FORM_OF_MAKE)
        lists = lists_of_devices(devices or ())
        by_number = {
            number: UserProgram(FORM_OF_MAKE, fn(x)) for number, x in lists.items()
        }
    report, why = proved_on(by_number, words)
    if report is None:
        raise ValueError(f"Nothing is proved: {why}.")
    if refuted := refuted_in(report):
        raise ReplicationError(refuted)
    return run_the_rest(report, fn, by_number) if words is OF_MICRO_BATCHES else report


def made_for_parts(
    make: Callable[..., Any], numbers: Sequence[int], form: str = FORM_OF_PARTS
) -> dict[int, UserProgram]:
    """Make the program by ``make`` for each number of micro-batches."""
    check_function("make", make, form)
    counts = check_different("micro_batches", numbers)
    check_takes(form, make, counts[0])
    return {number: UserProgram(form, make(number)) for number in counts}


def proved_on(
    programs: Mapping[int, UserProgram], words: Words = OF_DEVICES
) -> tuple[ProgramReport | None, str]:
    """Prove a program that was made for several numbers, and return the report.

    ``programs`` are by these numbers, of devices or of micro-batches.

    Returns:
      A report, from which refuted results are not yet raised; or None, and why nothing
      is proved.
    """
    by_number = dict[int, MadeProgram]()
    for number, program in programs.items():
        traced, why = program.trace()
        if traced is None:
            return None, f"the program cannot be traced ({why})"
        draws = [*_split_draws(traced.jaxpr)]
        by_number[number] = MadeProgram(
            traced, program.traced_args, program.unseen, draws
        )
    most = by_number[max(by_number)]
    report = proved(most.traced, most.args, equal_for_all(by_number, words))
    return dataclasses.replace(report, words=words), ""


def run_the_rest(
    report: ProgramReport,
    make: Callable[[int], Any],
    traced: Mapping[int, UserProgram],
    rtol: float | None = None,
) -> ProgramReport:
    """Run and compare the results that are unknown; say which ran the same.

    ``traced`` are the programs of `made_for_parts`, for the same ``make``.

    Raises:
      SplitError: A result depends on the number of micro-batches.
    """
    unknown = {x.leaf for x in report.equal if x.says is Says.UNKNOWN}
    if not unknown:
        return report
    arrays = [flatten(x.traced_args)[0] for x in traced.values()]
    if any(isinstance(x, jax.ShapeDtypeStruct) for leaves in arrays for x in leaves):
        note = "nothing was run, because arguments are shapes alone: pass arrays"
        return dataclasses.replace(report, notes=(*report.notes, note))
    try:
        ran = compare_on_drawn(
            lambda number: UserProgram(FORM_OF_PARTS, make(number)),
            traced,
            unknown,
            rtol,
        )
    except SplitError as error:
        differ = {x.leaf for x in error.findings}
        whys = dict.fromkeys(x.why for x in report.equal if x.leaf in differ)
        advice = (*error.advice, *[f"Not proved: {why}." for why in whys])
        raise SplitError(error.findings, advice) from None
    numbers = ", ".join(map(str, traced))
    ran_why = f"with {numbers} micro-batches, on drawn rows; not proved: {{}}"
    answers = list[Equality]()
    for x in report.equal:
        if x.leaf in ran.leaves:
            why = ran_why.format(x.why)
            x = dataclasses.replace(x, says=Says.RAN_THE_SAME, why=why)
        elif x.leaf in unknown:
            x = dataclasses.replace(x, why=f"{x.why}; {ran.why_not}")
        answers.append(x)
    notes = (*report.notes, *ran.notes)
    return dataclasses.replace(report, equal=tuple(answers), notes=notes)


def refuted_in(report: ProgramReport) -> str:
    """Write an error that lists refuted results; "" if there are none."""
    lines = [f"  - {x.leaf}: {x.why}" for x in report.equal if x.says is Says.REFUTED]
    return "\n".join([report.words.depends, *lines]) if lines else ""


def proved(
    traced: TracedProgram, args: Sequence[Any], equal: Sequence[Equality] = ()
) -> ProgramReport:
    """Prove a traced program, and report as `prove` does.

    ``args`` are the arguments that it was traced with. If ``equal`` has an answer for
    each result, a sum of equal values is not noted.
    """
    jaxpr = traced.jaxpr
    analysis = analyse(jaxpr, [None] * len(jaxpr.in_avals), None, 0)
    every = [x for x in analysis.meshes if x.along]
    maps = list({(x.line, *x.along, x.replicated, x.split): x for x in every}.values())
    texts = list[str]()
    notes = list[str]()
    for x in maps:
        for axis, in_axis in x.along.items():
            texts += [f"  - {_at(x)}: {text}" for text in mistakes(in_axis, axis)]
            for verb, so in _OF_EQUALS.items():
                at = "" if equal else of_equals(in_axis, verb)
                if at and (x.typed or verb != "averaged"):
                    value = f"a value that is the same on all is {verb} {so}{at}"
                    notes.append(f"{_at(x)}: {value}")
    if texts:
        raise ReplicationError("\n".join([NOT_THE_SAME, *texts]))
    copies = _what_copies_become(traced, args) if maps else {}
    if drifts := {name: verb for name, verb in copies.items() if verb != COPIES}:
        [(first, verb), *more] = drifts.items()
        leaves = f"{first} and {len(more)} more" if more else first
        notes.append(
            f"{leaves}: each device is given a copy, and returns another: {verb}"
        )
    notes += dict.fromkeys(_elsewhere(jaxpr))
    unread = [f"{x.primitive} at {x.line}" for x in analysis.unread]
    faults = [
        f"{x.line}, since the proof failed with {x.error}; please report this"
        for part in (analysis, *[y for x in maps for y in x.along.values()])
        for x in part.failures
    ]
    unread += faults
    known = [] if faults else maps  # after a fault, nothing is said of any result
    lines = [
        f"{_at(x)}: {x.replicated} results are the same, {x.split} split" for x in known
    ]
    same = sum(x.replicated for x in known)
    return ProgramReport(
        tuple(lines),
        tuple(notes),
        tuple(dict.fromkeys(unread)),
        same,
        len(copies) - len(drifts),
        tuple(equal),
    )


def _elsewhere(jaxpr: ClosedJaxpr) -> Iterator[str]:
    """Yield notes on code whose numbers depend on the devices or the version of JAX."""
    for at in _split_draws(jaxpr):
        yield (
            f"{at}: the numbers depend on TPUs on the number of shards, and under vmap"
            " on that of keys. Use jax.random.key(seed, impl='threefry2x32')."
        )
    for site in all_sites(jaxpr):
        eqn, outer = site
        maps = _maps_around(outer)
        if eqn.primitive.name == "ppermute" and maps:
            at = user_line(site) or "a line of a library"
            names = maps[0].params["mesh"].axis_names
            axes = named_axes(eqn)
            if sorted(axes, key=names.index) != [*axes]:
                yield (
                    f"ppermute at {at} is over {axes}, in another order than the"
                    f" mesh's {names}. JAX 0.10 counts devices in the mesh's order in"
                    " any case, and JAX 0.12 refuses it. Write the mesh's order."
                )


def _split_draws(jaxpr: ClosedJaxpr) -> Iterator[str]:
    """Yield the lines where rbg's draws depend on the number of shards or of keys."""
    for site in all_sites(jaxpr):
        if _draws_by_rbg(site[0], is_manual=_is_manual(_maps_around(site[1]))):
            at = user_line(site) or "a line of a library"
            yield f"rbg and unsafe_rbg draw at {at}"


def _maps_around(outer: Site | None) -> list[JaxprEqn]:
    return [x for x in outwards(outer) if x.primitive.name == "shard_map"]


def _draws_by_rbg(eqn: JaxprEqn, *, is_manual: bool) -> bool:
    """Return whether rbg draws from several keys at once, or XLA may split its draw.

    ``is_manual`` tells whether the draw is inside a map over all devices, where XLA
    cannot split it.
    """
    if eqn.primitive.name == "rng_bit_generator":  # has one raw key
        return not is_manual
    keys: Any = eqn.invars[0].aval if eqn.invars else None
    if eqn.primitive.name in ("random_fold_in", "random_split"):
        avals: list[Any] = [v.aval for v in eqn.invars]
        return "urbg" in str(keys.dtype) and any(x.ndim > 0 for x in avals)
    if eqn.primitive.name not in ("random_bits", "random_gamma"):
        return False
    return "rbg" in str(keys.dtype) and (keys.ndim > 0 or not is_manual)


def _is_manual(maps: Sequence[JaxprEqn]) -> bool:
    """Return whether the maps cover all mesh axes, so that XLA can split no draw."""
    axes = {axis for x in maps for axis in manual_axes(x)}
    return bool(maps) and all(
        axis in axes or size == 1 for axis, size in maps[0].params["mesh"].shape.items()
    )


def _at(x: OwnMesh) -> str:
    at = f" at {x.line}" if x.line else ""
    return f"shard_map or pmap{at} over {listed(map(repr, x.along))}"


def _what_copies_become(traced: TracedProgram, args: Sequence[Any]) -> dict[str, str]:
    """Find what a program makes of a state of which each device has a copy.

    The result is by the names of leaves; see `becomes_of`. A leaf that differs from
    device to device, such as keys, is not a copy. A setting, such as a learning rate,
    may be one.
    """
    jaxpr = traced.jaxpr
    at_result = state_places(args, traced.out)
    arrays = _arrays_in(args)
    is_copied = [
        (x.argument in at_result or _is_setting(x.array)) and _may_be_copies(x.array)
        for x in arrays
    ]
    num_by_name = len(jaxpr.in_avals) - len(arrays)
    of_results = becomes_of(jaxpr, is_copied + [False] * num_by_name)
    first_leaf = _first_leaves(traced.out)
    names = [name for name, _ in named_leaves("result", traced.out)]
    becomes = dict[str, str]()
    for x, copied in zip(arrays, is_copied, strict=True):
        if not (copied and x.argument in at_result):
            continue
        leaf = first_leaf[at_result[x.argument] or 0] + x.leaf
        if of_results[leaf]:
            becomes[names[leaf]] = of_results[leaf]
    return becomes


class _GivenArray(NamedTuple):
    """An array among a program's arguments, with its place there."""

    argument: int
    leaf: int  # its index among the leaves of the argument
    array: Any


def _arrays_in(args: Sequence[Any]) -> list[_GivenArray]:
    """List the arrays among the arguments, in order."""
    return [
        _GivenArray(number, leaf, x)
        for number, argument in enumerate(args)
        for leaf, x in enumerate(flatten(argument)[0])
        if isinstance(x, _ARRAYS)
    ]


def _first_leaves(out: Any) -> list[int]:
    """Find, for each result, the index of its first leaf among all leaves."""
    sizes = [len(flatten(x)[0]) for x in out] if _is_list(out) else [0]
    return [*itertools.accumulate(sizes, initial=0)]


def _is_list(out: Any) -> bool:
    return isinstance(out, tuple | list)


def _is_setting(x: Any) -> bool:
    """Return whether an array may be a setting: it has a scalar or a key per device."""
    is_given = not isinstance(x, jax.ShapeDtypeStruct)
    return is_given and (x.ndim == 1 or key_data(x).dtype == np.uint32)


def _may_be_copies(x: Any) -> bool:
    is_here = getattr(x, "is_fully_addressable", True)
    if x.ndim == 0 or isinstance(x, jax.ShapeDtypeStruct) or not is_here:
        return x.ndim > 0
    rows = np.asarray(key_data(x))
    return bool((rows == rows[:1]).all())
