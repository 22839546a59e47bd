"""Prove of any JAX program that what its maps call the same on all devices is so."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from towerjax.proof.analysis import COPIES, analyse, becomes_of
from towerjax.proof.equation import (
    all_sites,
    manual_axes,
    named_axes,
    outwards,
    user_line,
)
from towerjax.proof.findings import OwnMesh, ReplicationError
from towerjax.proof.meshes import mistakes, of_equals
from towerjax.tools.testing.traced import (
    ARRAY_TYPES,
    TracedProgram,
    flatten,
    state_places,
    trace_program,
)
from towerjax.types import named_leaves
from towerjax.types.door import door
from towerjax.types.leaves import key_data, listed

_ARRAYS: Any = ARRAY_TYPES | jax.ShapeDtypeStruct

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


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """What `prove` found in a program.

    Attributes:
      maps: A line for each `shard_map` and `pmap`: where it is, its axes, how many of
        its results it calls the same, all of which are, and how many it splits.
      notes: Sums and means of what is the same on all devices, and copies of a state
        that do not stay the same: which may be meant; draws by rbg, and ``ppermute``
        over axes in another order than the mesh's: which are not portable.
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
    return proved(trace_program(fn, args, kwargs), args)


def proved(traced: TracedProgram, args: Sequence[Any]) -> ProgramReport:
    """What `prove` says of a program that was traced with these arguments."""
    jaxpr = traced.jaxpr
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
    kept = _copies(traced, args) if maps else {}
    if drifts := {name: how for name, how in kept.items() if how != COPIES}:
        [(first, how), *more] = drifts.items()
        leaves = f"{first} and {len(more)} more" if more else first
        notes.append(
            f"{leaves}: each device is given a copy, and returns another: {how}"
        )
    notes += dict.fromkeys(_elsewhere(jaxpr))
    unread = [f"{x.primitive} at {x.line}" for x in analysis.unread]
    lines = [f"{_at(x)}: {x.alike} results are the same, {x.split} split" for x in maps]
    told_of = tuple(lines), tuple(notes), tuple(dict.fromkeys(unread))
    same = sum(x.alike for x in maps)
    return ProgramReport(*told_of, same, len(kept) - len(drifts))


def _elsewhere(jaxpr: ClosedJaxpr) -> Iterator[str]:
    """What gives other numbers on other devices, or in another version of JAX."""
    for site in all_sites(jaxpr):
        eqn, outer = site
        at = user_line(site) or "a line of a library"
        maps = [x for x in outwards(outer) if x.primitive.name == "shard_map"]
        if _draws_by_rbg(eqn, is_manual=_is_manual(maps)):
            yield (
                f"rbg and unsafe_rbg draw at {at}: on TPUs by the number of shards, and"
                " under vmap by that of keys. Use jax.random.key(seed,"
                " impl='threefry2x32')."
            )
        if eqn.primitive.name == "ppermute" and maps:
            names, given = maps[0].params["mesh"].axis_names, named_axes(eqn)
            if sorted(given, key=names.index) != [*given]:
                yield (
                    f"ppermute at {at} is over {given}, in another order than the"
                    f" mesh's {names}: JAX 0.10 counts devices in the mesh's order,"
                    " whatever is written, and JAX 0.12 refuses it. Write the mesh's."
                )


def _draws_by_rbg(eqn: JaxprEqn, *, is_manual: bool) -> bool:
    """Whether rbg draws what the compiler may split, or of several keys at once."""
    if eqn.primitive.name == "rng_bit_generator":  # of a raw key
        return not is_manual
    if eqn.primitive.name not in ("random_bits", "random_gamma"):
        return False
    keys: Any = eqn.invars[0].aval
    return "rbg" in str(keys.dtype) and (keys.ndim > 0 or not is_manual)


def _is_manual(maps: Sequence[JaxprEqn]) -> bool:
    """Whether maps leave the compiler no axis over which it could split a draw."""
    axes = {axis for x in maps for axis in manual_axes(x)}
    return bool(maps) and all(
        axis in axes or size == 1 for axis, size in maps[0].params["mesh"].shape.items()
    )


def _at(x: OwnMesh) -> str:
    at = f" at {x.line}" if x.line else ""
    return f"shard_map or pmap{at} over {listed(map(repr, x.along))}"


def _copies(traced: TracedProgram, args: Sequence[Any]) -> dict[str, str]:
    """What becomes of one copy a device of a state, by the names of its leaves.

    A leaf of which devices are given different ones, as of keys, is no copy; a setting
    may be one.
    """
    jaxpr, out = traced
    places = state_places(args, out)
    sizes = [len(flatten(x)[0]) for x in out] if _is_list(out) else [0]
    starts = [*itertools.accumulate(sizes, initial=0)]
    copied, back = list[bool](), list[int]()
    for i, x in enumerate(args):
        start = starts[places.get(i) or 0]
        for n, leaf in enumerate(flatten(x)[0]):
            if isinstance(leaf, _ARRAYS):
                is_asked = i in places or _is_setting(leaf)
                copied.append(is_asked and _may_be_copies(leaf))
                if i in places and copied[-1]:
                    back.append(start + n)
    copied += [False] * (len(jaxpr.in_avals) - len(copied))  # arguments by name
    told, names = becomes_of(jaxpr, copied), [x for x, _ in named_leaves("result", out)]
    return {names[i]: told[i] for i in back if told[i]}


def _is_list(out: Any) -> bool:
    return isinstance(out, tuple | list)


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
