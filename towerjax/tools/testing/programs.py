"""Any JAX program: what its own maps over devices call the same is the same."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from towerjax.proof.analysis import analyse
from towerjax.proof.findings import OwnMesh, ReplicationError
from towerjax.proof.meshes import mistakes, of_equals
from towerjax.types.door import door
from towerjax.types.leaves import listed

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
      notes: Sums and means of what is the same on all devices, which may be meant.
      unread: Code that no jaxpr shows, whose results may differ.
      same: The number of results that were proved the same, over all maps and axes.
    """

    maps: tuple[str, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...]
    same: int

    def __str__(self) -> str:
        notes = [f"note: {x}" for x in self.notes]
        unread = [f"not read: {x}" for x in self.unread]
        return "\n".join([*(self.maps or [_NO_MAP]), *notes, *unread])


@door
def prove(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ProgramReport:
    """Prove that what a program's maps over devices call the same is the same.

    The program is traced and not run. Of each `jax.shard_map` and `jax.pmap` in it, at
    any depth, each manual axis of more than one device is analysed, as a step's towers
    are, whatever ``check_vma`` says.

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
    jaxpr = traced_program(fn, args, kwargs)
    analysis = analyse(jaxpr, [None] * len(jaxpr.in_avals), None, 0)
    every = [x for x in analysis.meshes if x.along]
    maps = list({(x.line, *x.along, x.alike, x.split): x for x in every}.values())
    told, notes = list[str](), list[str]()
    for x in maps:
        for axis, in_axis in x.along.items():
            told += [f"  - {_at(x)}: {text}" for text in mistakes(in_axis, axis)]
            for how, so in _OF_EQUALS.items():
                if at := of_equals(in_axis, how):
                    what = f"what is the same on all is {how} {so}{at}"
                    notes.append(f"{_at(x)}: {what}")
    if told:
        raise ReplicationError("\n".join([_NOT_THE_SAME, *told]))
    unread = [f"{x.primitive} at {x.line}" for x in analysis.unread]
    lines = [f"{_at(x)}: {x.alike} results are the same, {x.split} split" for x in maps]
    told_of = tuple(lines), tuple(notes), tuple(dict.fromkeys(unread))
    return ProgramReport(*told_of, sum(x.alike for x in maps))


def _at(x: OwnMesh) -> str:
    at = f" at {x.line}" if x.line else ""
    return f"shard_map or pmap{at} over {listed(map(repr, x.along))}"


def traced_program(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The jaxpr; leaves that are no arrays are constants, as of static arguments."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    at = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]

    def of_arrays(*arrays: Any) -> Any:
        given = [*leaves]
        for i, x in zip(at, arrays, strict=True):
            given[i] = x
        args, kwargs = treedef.unflatten(given)
        return fn(*args, **kwargs)

    return jax.make_jaxpr(of_arrays)(*[leaves[i] for i in at])
