"""Trace any JAX program: its jaxpr, results, devices, and the state it returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, Sharding

from towerjax.jaxprs.params import param_leaves
from towerjax.jaxprs.sites import all_eqns
from towerjax.mesh.devices import Device
from towerjax.types import PyTree
from towerjax.types.refusals import kind_of
from towerjax.types.trees import named_leaves

ARRAY_TYPES: Any = jax.Array | np.ndarray | np.generic
NUMBER_TYPES: Any = ARRAY_TYPES | int | float | complex
_SHAPED: Any = ARRAY_TYPES | jax.ShapeDtypeStruct
_NUMBERS: Any = NUMBER_TYPES | jax.ShapeDtypeStruct


class TracedProgram(NamedTuple):
    """A traced program.

    Attributes:
      jaxpr: The program's jaxpr.
      out: The program's results, as shapes.
      changed: The shapes of arguments that it changes in place, by name. In the jaxpr
        they are results after those that it returns.
    """

    jaxpr: ClosedJaxpr
    out: PyTree
    changed: Mapping[str, Any] = {}


def is_iterator(x: Any) -> bool:
    """Return whether ``x`` is an iterator, which JAX must treat as a leaf."""
    return isinstance(x, Iterator)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Flatten any tree to its leaves and structure; an iterator is a leaf."""
    return jax.tree.flatten(tree, is_leaf=is_iterator)


def traced_arrays(args: Sequence[Any]) -> dict[str, Any]:
    """Name the leaves of the arguments that a trace replaces by tracers.

    These are arrays and shapes. All other leaves are constants in the trace.
    """
    leaves = named_leaves("args", tuple(args), is_iterator)
    return {name: x for name, x in leaves if isinstance(x, _SHAPED)}


def trace_program(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict
) -> TracedProgram:
    """Trace a program with these arguments.

    Leaves of arguments that are not arrays are constants, as static arguments are. A
    result that is not a number is returned unchanged, and is 0 in the jaxpr.
    """
    leaves, treedef = flatten((tuple(args), kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, _SHAPED)]
    results: Any = None

    def of_arrays(*arrays: Any) -> Any:
        nonlocal results
        in_place = [*leaves]
        for i, x in zip(at, arrays, strict=True):
            in_place[i] = x
        args, kwargs = treedef.unflatten(in_place)
        results = flatten(fn(*args, **kwargs))
        return [x if isinstance(x, NUMBER_TYPES) else 0 for x in results[0]]

    jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(
        *[leaves[i] for i in at]
    )
    pairs = zip(results[0], shapes, strict=True)
    out = [shape if isinstance(x, NUMBER_TYPES) else x for x, shape in pairs]
    return TracedProgram(jaxpr, results[1].unflatten(out))


def trace_or_say_why(
    fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[TracedProgram | None, str]:
    """Trace a program that has run; or give None, and why there is no trace."""
    try:
        return trace_program(fn, args, {}), ""
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]:.150}"


def devices_in(jaxpr: ClosedJaxpr) -> Iterator[Device]:
    """Yield the devices of the meshes and shardings that a program names."""
    for eqn in all_eqns(jaxpr):
        for x in param_leaves(eqn.params):
            mesh = getattr(x, "mesh", x)
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield from mesh.devices.flat
            elif isinstance(x, Sharding) and not isinstance(mesh, AbstractMesh | Mesh):
                yield from x.device_set


def state_places(args: Sequence[Any], out: PyTree) -> dict[int, int | None]:
    """Find the arguments that a program returns as new state, and their results.

    The keys are indices of arguments. A value is the index of the result, or None if
    the state is the only result. An argument is a state if a result has its tree,
    shapes and dtypes. A single array must have the same index among the results.
    """
    is_one = not isinstance(out, tuple | list) or _kind([out]) == _kind([*args[:1]])
    kinds = [_kind([x]) for x in ([out] if is_one else out)]
    places: dict[int, int | None] = {}
    for i, x in enumerate(args):
        kind = _kind([x])
        leaves = flatten(x)[0]
        of_its_kind = [j for j, of_result in enumerate(kinds) if of_result == kind]
        at = [i] if i in of_its_kind else of_its_kind * (len(leaves) > 1)
        if at and any(isinstance(leaf, _SHAPED) for leaf in leaves):
            places[i] = None if is_one else at[0]
    return places


def _kind(tree: PyTree) -> Any:
    leaves, treedef = flatten(tree)
    return treedef, [kind_of(x) if isinstance(x, _NUMBERS) else None for x in leaves]
