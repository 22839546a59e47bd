"""Number the values of a program: values of one number have the same elements.

Dims of size 1 are left aside, so an array ``[1, 3]`` and an array ``[3]`` may have one
number. JAX treats such dims in other ways than larger ones: `jnp.matmul` removes them
before a product, and `jnp.take_along_axis` looks up a slice along them.

A value has the number of another only if a law here says that its elements are those,
in order. A law is a key: equations with equal keys, of operands with equal numbers,
have results with the same elements.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs.primitives import ELEMENTWISE

_RESHAPES = frozenset(["reshape", "squeeze", "broadcast_in_dim"])
_REDUCTIONS = frozenset(
    "reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or".split()
)
_OTHERS = frozenset(["transpose", "dot_general", "gather"])
_HAVE_LAWS = ELEMENTWISE | _RESHAPES | _REDUCTIONS | _OTHERS


def has_law(eqn: JaxprEqn) -> bool:
    """Return whether a law may say what an equation computes."""
    return eqn.primitive.name in _HAVE_LAWS and not eqn.effects


class Numbered:
    """The values of a program, and their numbers."""

    def __init__(self, inputs: Iterable[Any], eqns: Iterable[JaxprEqn]) -> None:
        self._by_key: dict[Hashable, int] = {}
        self._numbers: dict[Any, int] = {}
        self._first: dict[Hashable, Any] = {}
        for x in inputs:
            self._add(x, self._new())
        for eqn in eqns:
            self.add(eqn)

    def add(self, eqn: JaxprEqn) -> None:
        """Number the results of an equation."""
        if not has_law(eqn):
            for x in eqn.outvars:
                self._add(x, self._new())
            return
        [result] = eqn.outvars
        operands = tuple(self.number(x) for x in eqn.invars)
        if _has_elements_of_first(eqn):
            self._add(result, operands[0])
            return
        key = _key_of(eqn)
        number = self._new() if key is None else self._of_key((key, operands))
        self._add(result, number)

    def number(self, x: Any) -> int:
        """Look up the number of a value."""
        if not isinstance(x, Literal):
            return self._numbers[x]
        value = np.asarray(x.val)
        return self._of_key((value.dtype, value.shape, value.tobytes()))

    def first(self, x: Any) -> Any:
        """Find the first value that has the number and the shape of ``x``."""
        return x if isinstance(x, Literal) else self._first[self._place(x)]

    def _add(self, x: Any, number: int) -> None:
        self._numbers[x] = number
        self._first.setdefault(self._place(x), x)

    def _place(self, x: Any) -> Hashable:
        return self._numbers[x], getattr(x.aval, "shape", None)

    def _of_key(self, key: Hashable) -> int:
        return self._by_key.setdefault(key, len(self._by_key))

    def _new(self) -> int:
        return self._of_key(object())


def shape_of(x: Any) -> tuple[Any, ...]:
    """Look up the shape of a variable or a literal."""
    return x.aval.shape


def _places(shape: Sequence[Any]) -> dict[int, int]:
    """Map each dim that is not of size 1 to its index among these dims."""
    return {dim: i for i, dim in enumerate(i for i, n in enumerate(shape) if n != 1)}


def _has_elements_of_first(eqn: JaxprEqn) -> bool:
    """Return whether a result has the elements of the first operand, in order.

    So it is if a reshape, a broadcast or a transpose moves only dims of size 1. So it
    is, too, of a sum or another reduction of one element, and of ``x / 1 = x``.
    """
    name = eqn.primitive.name
    shape = shape_of(eqn.invars[0])
    places = _places(shape)
    if name in _RESHAPES:
        is_in_order = name != "reshape" or eqn.params["dimensions"] is None
        sizes = [n for n in shape_of(eqn.outvars[0]) if n != 1]
        return is_in_order and sizes == [shape[i] for i in places]
    if name == "transpose":
        moved = [i for i in eqn.params["permutation"] if i in places]
        return moved == sorted(moved)
    if name in _REDUCTIONS:
        return places.keys().isdisjoint(eqn.params["axes"])
    if name == "div":
        divisor: Any = eqn.invars[1]
        is_number = isinstance(divisor, Literal) and not shape_of(divisor)
        return is_number and bool(divisor.val == 1)
    return False


def _key_of(eqn: JaxprEqn) -> Hashable | None:
    """Make the key of an equation; None if no law fits it.

    It names dims by their index among the dims that are not of size 1.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _key_of_elements(eqn)
    if name == "transpose":
        places = _places(shape_of(eqn.invars[0]))
        moved = (places.get(i) for i in eqn.params["permutation"])
        return name, *[i for i in moved if i is not None]
    if name == "dot_general":
        return _key_of_product(eqn)
    return _key_of_lookup(eqn) if name == "gather" else None


def _key_of_elements(eqn: JaxprEqn) -> Hashable | None:
    """An element is computed of those at its place, whatever dims have size 1.

    An operand of size 1 along a larger dim of the result is repeated along it, so the
    key says along which dims each operand has elements of its own.
    """
    shape = shape_of(eqn.outvars[0])
    own = [shape_of(x) or (1,) * len(shape) for x in eqn.invars]
    if any(len(x) != len(shape) for x in own):
        return None
    dims = [tuple(x[i] != 1 for i in _places(shape)) for x in own]
    key = eqn.primitive.name, *dims, *sorted(eqn.params.items())
    return key if _is_hashable(key) else None


def _is_hashable(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _key_of_product(eqn: JaxprEqn) -> Hashable:
    """A product is added up over, or taken apart along, one element: it is the same."""
    left, right = [_places(shape_of(x)) for x in eqn.invars]
    pairs = [
        tuple((left[i], right[k]) for i, k in zip(*dims, strict=True) if i in left)
        for dims in eqn.params["dimension_numbers"]
    ]
    return eqn.primitive.name, *pairs, eqn.params["preferred_element_type"]


def _key_of_lookup(eqn: JaxprEqn) -> Hashable | None:
    """A lookup takes all there is along a dim of size 1 that has no index.

    The key says which dims of the result are those of slices. Along a dim of which it
    takes one element, the result has no dim, or one of size 1.
    """
    table, indices = map(shape_of, eqn.invars)
    dims = eqn.params["dimension_numbers"]
    places = _places(table)
    if any(i not in places for i in dims.start_index_map):
        return None
    rows = _places(indices[:-1])
    both = zip(
        dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
    )
    batched = tuple((places[i], rows[k]) for i, k in both if i in places)
    indexed = tuple(places[i] for i in dims.start_index_map)
    sizes = tuple(eqn.params["slice_sizes"][i] for i in places)
    of_slices = tuple(i in dims.offset_dims for i in _places(shape_of(eqn.outvars[0])))
    how = eqn.params["mode"], eqn.params["fill_value"]
    return eqn.primitive.name, batched, indexed, sizes, of_slices, *how
