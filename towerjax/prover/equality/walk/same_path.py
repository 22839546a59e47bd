"""Compare traces of a function for two numbers of rows: whether it took one path.

JAX itself traces other equations for a dim of one row: it drops the dim from a gather,
and leaves reshapes and broadcasts out. So the program of a tower of one row cannot be
walked beside another. But if a function took the same path for one row and for two, its
program for two rows also says what it computes for one, because a function of JAX
computes the same for each number of rows.

To ignore the equations that only one program has would not pair the gathers. Here all
other equations have to be the same, of the same operands and from the same instructions
of the user's code.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from towerjax.jaxprs.params import open_jaxpr, sub_jaxprs
from towerjax.jaxprs.sites import is_library
from towerjax.prover.equality.walk.walk import NOT_COMPARED, PLACES, is_same

# These primitives change only a shape. JAX leaves them out if the shape is right.
_SHAPES = frozenset("reshape squeeze broadcast_in_dim expand_dims copy".split())
# These params hold sizes, so they may differ as the numbers of rows do.
_SIZES = frozenset(
    """shape new_sizes limit_indices start_indices slice_sizes axis_size sizes length
    dim reps""".split()
)


def way_of(
    first: ClosedJaxpr, second: ClosedJaxpr, rows: tuple[int, int]
) -> list[bool] | None:
    """Find the path that a function took for both of these numbers of rows, or None.

    Args:
      first: A function's program for ``rows[0]`` rows.
      second: Its program for ``rows[1]`` rows.
      rows: The numbers of rows.

    Returns:
      None, unless the same instructions of the user's code made the same equations of
      the same operands. Otherwise a list of bools: for each number and each size of a
      dim, in order, whether it is a multiple of the rows. For other numbers of rows the
      list is the same if the function takes the same path. If it differs, a number such
      as 1 or 2 was the user's choice, and equals the rows by chance.
    """
    pair = _Pair(rows)
    return pair.multiples if pair.is_same(first, second, at_top=True) else None


class _Pair:
    """Two programs of one function for two numbers of rows."""

    def __init__(self, rows: tuple[int, int]) -> None:
        self._rows = rows
        self.multiples: list[bool] = []

    def is_same(self, first: Any, second: Any, *, at_top: bool) -> bool:
        """Return whether two programs are the same, up to their numbers of rows.

        ``at_top`` tells whether they are outside of all calls.
        """
        a = open_jaxpr(first)
        b = open_jaxpr(second)
        consts = [getattr(x, "consts", ()) for x in (first, second)]
        sizes = [(len(x.constvars), len(x.invars), len(x.outvars)) for x in (a, b)]
        if sizes[0] != sizes[1] or len(consts[0]) != len(consts[1]):
            return False
        if not all(map(self._is_same_number, *consts)):
            return False
        eqns = [[e for e in x.eqns if e.primitive.name not in _SHAPES] for x in (a, b)]
        if len(eqns[0]) != len(eqns[1]):
            return False
        sources = [_sources_of(x) for x in (a, b)]
        inputs = zip([*a.constvars, *a.invars], [*b.constvars, *b.invars], strict=True)
        twin = dict(inputs)

        def reads_the_same(x: Any, y: Any) -> bool:
            x = _source(sources[0], x)
            y = _source(sources[1], y)
            if isinstance(x, Literal) or isinstance(y, Literal):
                both = isinstance(x, Literal) and isinstance(y, Literal)
                return both and self._is_same_number(x.val, y.val)
            return twin.get(x) is y

        for one, two in zip(*eqns, strict=True):
            if not self._is_same_equation(one, two, at_top=at_top):
                return False
            if not all(map(reads_the_same, one.invars, two.invars)):
                return False
            twin |= zip(one.outvars, two.outvars, strict=True)
        results = zip(a.outvars, b.outvars, strict=True)
        return all(reads_the_same(x, y) and self._fits(x, y) for x, y in results)

    def _is_same_equation(self, one: JaxprEqn, two: JaxprEqn, *, at_top: bool) -> bool:
        if one.primitive is not two.primitive:
            return False
        counts = [(len(x.invars), len(x.outvars)) for x in (one, two)]
        if counts[0] != counts[1]:
            return False
        # JAX traces an inner function once, so its equations have the lines of the call
        # that came first. Only lines of equations outside of calls can be compared.
        if at_top and _instructions(one) != _instructions(two):
            return False
        is_gather = one.primitive.name == "gather" and _is_in_take(one, two)
        of_gather = {"dimension_numbers", "slice_sizes"} if is_gather else set()
        free = (NOT_COMPARED - _SIZES) | PLACES | of_gather
        for key in sorted((one.params.keys() | two.params.keys()) - free):
            x = one.params.get(key)
            y = two.params.get(key)
            are_functions = callable(x) and callable(y) and type(x) is type(y)
            are_same = x is y or are_functions or is_same(x, y)
            if not (self._are_sizes(x, y) if key in _SIZES else are_same):
                return False
        inner = [[*sub_jaxprs(x)] for x in (one, two)]
        if len(inner[0]) != len(inner[1]):
            return False
        pairs = zip(*inner, strict=True)
        if not all(self.is_same(x, y, at_top=False) for x, y in pairs):
            return False
        return is_gather or all(map(self._fits, one.outvars, two.outvars))

    def _are_sizes(self, first: Any, second: Any) -> bool:
        """Return whether two params are equal, or the same multiples of the rows."""
        a = np.ravel(np.asarray(first, object))
        b = np.ravel(np.asarray(second, object))
        if len(a) != len(b):
            return False
        pairs = [*zip(a, b, strict=True)]
        if not all(isinstance(x, int) and isinstance(y, int) for x, y in pairs):
            return is_same(first, second)
        return all(self._is_multiple(x, y) for x, y in pairs)

    def _fits(self, first: Any, second: Any) -> bool:
        """Return whether two values have one dtype, and equal sizes up to rows."""
        a = first.aval
        b = second.aval
        if getattr(a, "dtype", None) != getattr(b, "dtype", None):
            return False
        sizes = [getattr(x, "shape", ()) for x in (a, b)]
        if len(sizes[0]) != len(sizes[1]):
            return False
        return all(self._is_multiple(m, n) for m, n in zip(*sizes, strict=True))

    def _is_multiple(self, first: Any, second: Any) -> bool:
        """Return whether two numbers are equal, or the same multiple of the rows."""
        is_equal = first == second
        self.multiples.append(not is_equal)
        return is_equal or first * self._rows[1] == second * self._rows[0]

    def _is_same_number(self, first: Any, second: Any) -> bool:
        """Return whether two constants are equal, or the same multiple of the rows."""
        if first is second:
            return True
        if isinstance(first, Tracer) or isinstance(second, Tracer):
            return False
        a = np.asarray(first)
        b = np.asarray(second)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.ndim:
            return np.array_equal(a, b)
        return bool(self._is_multiple(a.item(), b.item()))


def _sources_of(jaxpr: Any) -> dict[Any, Any]:
    """Map each result of an equation that only changes a shape to its operand."""
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _SHAPES
    }


def _source(sources: dict[Any, Any], x: Any) -> Any:
    while not isinstance(x, Literal) and x in sources:
        x = sources[x]
    return x


def _instructions(eqn: JaxprEqn) -> Sequence[tuple[Any, int]]:
    """List the instructions of the user's code that made an equation.

    The outermost instruction is the last.
    """
    traceback: Any = eqn.source_info.traceback
    if traceback is None:
        return []
    pairs = zip(*traceback.raw_frames(), strict=True)
    return [(code, at) for code, at in pairs if not is_library(code.co_filename)]


def _is_in_take(*eqns: JaxprEqn) -> bool:
    """Return whether `jnp.take_along_axis` made all of these equations.

    For a dim of size 1, it makes other equations.
    """

    def names(eqn: JaxprEqn) -> list[str]:
        traceback = eqn.source_info.traceback
        return [x.function_name for x in traceback.frames] if traceback else []

    return all("take_along_axis" in names(x) for x in eqns)
