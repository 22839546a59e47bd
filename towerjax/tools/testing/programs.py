"""Check any JAX program: what its devices have alike, and on how many they are."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from towerjax.proof.analysis import COPIES, analyse, becomes_of
from towerjax.proof.equation import all_sites, named_axes, user_line
from towerjax.proof.findings import OwnMesh, ReplicationError
from towerjax.proof.meshes import mistakes, of_equals
from towerjax.step.look.comparison import (
    AuditReport,
    Compared,
    Finding,
    Leaves,
    SplitError,
    judge,
    refuse_random,
    rounding_of,
)
from towerjax.step.look.run_towers import as_reals, rounded
from towerjax.types import PyTree, named_leaves
from towerjax.types.door import door
from towerjax.types.leaves import key_data, listed
from towerjax.types.options import check_function, check_number, check_wholes

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
_NUMBERS: Any = jax.Array | np.ndarray | np.generic | int | float | complex

_NO_MAP = (
    "no shard_map and no pmap: under jax.jit, shardings are of one global program, of"
    " which nothing is to be proved. Compare its numbers on several numbers of devices."
)
_NOT_THE_SAME = "Devices do not have what the program says that they have:"
_OF_EQUALS = {
    "added up": "as many times as there are devices, at ",
    "averaged": "and stays what it is (with check_vma=True jax.grad adds up over"
    " devices by itself, D times the mean), at ",
}
_TIMES = (
    "as many times as much as there are devices: a sum of what is a mean, or of what is"
    " the same on all (with check_vma=True jax.grad adds up over devices by itself)."
)
_OVER = "its share on one device: a mean of what is to be added up."


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """What `prove` found in a program.

    Attributes:
      maps: A line for each `shard_map` and `pmap`: where it is, its axes, how many of
        its results it calls the same, all of which are, and how many it splits.
      notes: Sums and means of what is the same on all devices, and copies of a state
        that do not stay the same: which may be meant.
      unread: Code that no jaxpr shows, whose results may differ.
      same: The number of results that were proved the same, over all maps and axes.
      copies: How many leaves of such a state stay the same on all devices.
    """

    maps: tuple[str, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...]
    same: int
    copies: int

    def __str__(self) -> str:
        kept = f"copies of a state that stay the same: {self.copies}"
        notes = [kept] * (self.copies > 0) + [f"note: {x}" for x in self.notes]
        unread = [f"not read: {x}" for x in self.unread]
        return "\n".join([*(self.maps or [_NO_MAP]), *notes, *unread])


@door
def prove(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ProgramReport:
    """Prove that what a program's maps over devices call the same is the same.

    The program is traced and not run. Of each `jax.shard_map` and `jax.pmap` in it, at
    any depth, each manual axis of more than one device is analysed, as a step's towers
    are, whatever ``check_vma`` says. Of a state that `jax.pmap` is given as one copy a
    device, and returns so, it notes what does not stay a copy.

    Args:
      fn: Any JAX function, jitted or not.
      *args: Its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: Arguments by name.

    Returns:
      A `ProgramReport`; of a program without any map it says so.

    Raises:
      ReplicationError: What ``out_specs`` call the same differs from device to device,
        or only some devices reach a collective; with all findings.

    Example:
      >>> import towerjax as tj
      >>> types = {"axis_types": (jax.sharding.AxisType.Auto,)}
      >>> mesh = jax.sharding.AbstractMesh((4,), ("i",), **types)
      >>> specs = {"in_specs": jax.P("i"), "out_specs": jax.P(), "check_vma": False}
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, **specs)
      >>> tj.testing.prove(total, jax.ShapeDtypeStruct((4,), "float32")).same
      1
    """
    jaxpr, out = traced_program(fn, args, kwargs)
    analysis = analyse(jaxpr, [None] * len(jaxpr.in_avals), None, 0)
    every = [x for x in analysis.meshes if x.along]
    maps = list({(x.line, *x.along, x.alike, x.split): x for x in every}.values())
    told, notes = list[str](), list[str]()
    for x in maps:
        for axis, in_axis in x.along.items():
            told += [f"  - {_at(x)}: {text}" for text in mistakes(in_axis, axis)]
            for how, so in _OF_EQUALS.items():
                at = of_equals(in_axis, how)
                if at and (x.typed or how != "averaged"):
                    what = f"what is the same on all is {how} {so}{at}"
                    notes.append(f"{_at(x)}: {what}")
    if told:
        raise ReplicationError("\n".join([_NOT_THE_SAME, *told]))
    kept = _copies(jaxpr, args, out) if maps else {}
    if drifts := {name: how for name, how in kept.items() if how != COPIES}:
        [(first, how), *more] = drifts.items()
        leaves = f"{first} and {len(more)} more" if more else first
        notes.append(
            f"{leaves}: each device is given a copy, and returns another: {how}"
        )
    unread = [f"{x.primitive} at {x.line}" for x in analysis.unread]
    lines = [f"{_at(x)}: {x.alike} results are the same, {x.split} split" for x in maps]
    told_of = tuple(lines), tuple(notes), tuple(dict.fromkeys(unread))
    same = sum(x.alike for x in maps)
    return ProgramReport(*told_of, same, len(kept) - len(drifts))


def _at(x: OwnMesh) -> str:
    at = f" at {x.line}" if x.line else ""
    return f"shard_map or pmap{at} over {listed(map(repr, x.along))}"


def _copies(jaxpr: ClosedJaxpr, args: tuple, out: PyTree) -> dict[str, str]:
    """What becomes of one copy a device of a state, by the names of its leaves.

    A state is an argument whose tree and shapes a result has. A leaf of which devices
    are given different ones, as of keys, is no copy; a setting may be one.
    """
    is_one = not isinstance(out, tuple | list) or _kind([out]) == _kind([*args[:1]])
    kinds = [_kind([x]) for x in ([out] if is_one else out)]
    starts = list(itertools.accumulate([len(kind[1]) for kind in kinds], initial=0))
    copied, back = list[bool](), list[int]()
    for i, x in enumerate(args):
        leaves = jax.tree.leaves(x)
        alike = [j for j, kind in enumerate(kinds) if kind == _kind([x])]
        # A lone array comes back at its own place.
        at = [i] if i in alike else alike * (len(leaves) > 1)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, _ARRAYS):
                is_asked = bool(at) or _is_setting(leaf)
                copied.append(is_asked and _may_be_copies(leaf))
                if at and copied[-1]:
                    back.append(starts[at[0]] + n)
    copied += [False] * (len(jaxpr.in_avals) - len(copied))  # arguments by name
    told, names = becomes_of(jaxpr, copied), [x for x, _ in named_leaves("result", out)]
    return {names[i]: told[i] for i in back if told[i]}


def _kind(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [getattr(x, "shape", None) for x in leaves]


def _is_setting(x: Any) -> bool:
    """Whether it is a scalar or a key for each device, such as a learning rate."""
    is_given = not isinstance(x, jax.ShapeDtypeStruct)
    return is_given and (x.ndim == 1 or key_data(x).dtype == np.uint32)


def _may_be_copies(x: Any) -> bool:
    is_here = getattr(x, "is_fully_addressable", True)
    if x.ndim == 0 or isinstance(x, jax.ShapeDtypeStruct) or not is_here:
        return x.ndim > 0
    rows = np.asarray(key_data(x))
    return bool((rows == rows[:1]).all())


def traced_program(
    fn: Callable[..., Any], args: tuple, kwargs: dict
) -> tuple[Any, PyTree]:
    """The jaxpr, and the shapes of the results.

    Leaves that are no arrays are constants, as of static arguments.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)]

    def of_arrays(*arrays: Any) -> Any:
        given = [*leaves]
        for i, x in zip(at, arrays, strict=True):
            given[i] = x
        args, kwargs = treedef.unflatten(given)
        return fn(*args, **kwargs)

    return jax.make_jaxpr(of_arrays, return_shape=True)(*[leaves[i] for i in at])


@door
def same_on_devices(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    devices: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
) -> AuditReport:
    """Raise if what a program returns depends on the number of devices.

    The program is made and run for each number; results are compared leaf by leaf with
    those on one device, as an audit compares: whole where they are split over devices,
    each copy where `jax.pmap` returns one of each device, and keys by their data.

    Args:
      make: ``number of devices -> (fn, args)``, with the same global arguments for each
        number; ``fn`` by ``jit``, ``shard_map``, ``pmap``, or a step. It may donate.
      devices: The numbers; the first is 1.
      rtol: As for `assert_replicates`.

    Returns:
      An `AuditReport`.

    Raises:
      SplitError: A leaf depends on it: with both numbers, their factor where it is the
        number of devices or one over it, and the lines that communicate.
      ValueError: There are not so many devices, or the program is not deterministic.

    Example:
      >>> import numpy as np
      >>> def make(devices):
      ...     mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "i")
      ...     mean = lambda x: jax.lax.pmean(x.mean(), "i")
      ...     specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}
      ...     return jax.shard_map(mean, mesh=mesh, **specs), [np.arange(8.0)]
      >>> same_on_devices(make, devices=(1, 2)).compared
      ('result',)
    """
    check_function("make", make, "make(devices)")
    numbers, here = check_wholes("devices", devices), len(jax.devices())
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")
    if numbers[0] != 1 or len(numbers) < 2 or max(numbers) > here:
        raise ValueError(
            f"devices={devices!r} must be 1 and other numbers, of at most {here}"
            ' devices. On CPUs say jax.config.update("jax_num_cpu_devices",'
            f" {max(numbers)}) before JAX is used."
        )
    fn, args = make(numbers[-1])
    jaxpr, _ = traced_program(fn, tuple(args), {})
    rounding, want = rounding_of([jaxpr]), _leaves_on(*make(1))

    @functools.cache
    def nearby() -> list[Leaves]:
        refuse_random(_leaves_on(*make(1)), want)
        by = rounding / 8 if rounding > 1e-4 else 2.0**-23
        return [_leaves_on(*make(1), by=step * by) for step in (1, -1, 2)]

    runs = []
    for number in numbers[1:]:
        got = _leaves_on(*make(number))
        if names := sorted(got.keys() ^ want.keys()):
            raise ValueError(
                f"On 1 and {number} devices results differ: {listed(names)}."
            )
        pairs = {name: _alike(got[name], want[name]) for name in want}
        got, single = ({name: x[i] for name, x in pairs.items()} for i in (0, 1))
        runs.append(Compared(number, "", got, single, nearby))
    try:
        report = judge(runs, 0, rounding if rtol is None else rtol)
    except SplitError as error:
        differing = [dataclasses.replace(x, of="devices") for x in error.findings]
        raise SplitError(differing, _reasons(differing, jaxpr)) from None
    return dataclasses.replace(report, of="devices")


def _leaves_on(fn: Callable[..., Any], args: Sequence[Any], by: float = 0.0) -> Leaves:
    """The results by their names; of arguments that are rounded, where ``by`` says."""

    def near(x: Any) -> Any:
        changed = rounded(x, by, only_broken=True)
        is_placed = isinstance(x, jax.Array) and changed is not x
        return jax.device_put(changed, x.sharding) if is_placed else changed

    out = named_leaves("result", fn(*(jax.tree.map(near, args) if by else args)))
    numbers = [pair for pair in out if isinstance(pair[1], _NUMBERS)]
    return {name: as_reals(key_data(x)) for name, x in numbers}


def _alike(got: Any, want: Any) -> tuple[Any, Any]:
    """Both in one shape: rows that `jax.pmap` has split are joined, copies are many."""
    if got.size == want.size and got.shape[2:] == want.shape[2:]:
        return got.reshape(want.shape), want
    is_of_copies = got.ndim == want.ndim > 0 and want.shape[0] == 1
    if is_of_copies and got.shape[1:] == want.shape[1:]:
        want = np.broadcast_to(want, got.shape)
    return got, want


def _reasons(findings: Sequence[Finding], jaxpr: ClosedJaxpr) -> Iterator[str]:
    """What the numbers say, and the lines that communicate."""
    for text, power in ((_TIMES, 1), (_OVER, -1)):
        expected = [(x, x.towers**power * x.one_tower) for x in findings]
        if names := [x.leaf for x, y in expected if np.isclose(x.value, y, 1e-4, 0)]:
            yield f"{listed(names)}: {text}"
    sites = [site for site in all_sites(jaxpr) if named_axes(site[0])]
    lines = [(user_line(x), x[0].primitive.name) for x in sites]
    if at := list(dict.fromkeys(f"{line} ({how})" for line, how in lines if line)):
        yield f"Devices communicate at {'; '.join(at[:3])}."
