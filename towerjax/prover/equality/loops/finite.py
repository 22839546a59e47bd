"""Which values of a program are finite, if its arguments are.

0 times a value is 0 only if the value is finite. A quotient is finite if its divisor is
positive, such as ``sqrt(x**2) + eps``. So a lower bound of each value is found, too: it
is unknown, 0, or positive. Overflow and underflow are ignored.
"""

import enum
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp

from towerjax.jaxprs.primitives import ELEMENTWISE
from towerjax.prover.equality.kinds.constants import ConstValue, real_number
from towerjax.prover.equality.kinds.zeros import KEEPS_FINITE


class Sign(enum.IntEnum):
    """What is known of the sign of all elements of a value."""

    ANY = 0
    NOT_NEGATIVE = 1
    POSITIVE = 2


_KEEPS_SIGN = """broadcast_in_dim convert_element_type reshape squeeze expand_dims
    transpose slice concatenate stack copy stop_gradient reduce_sum reduce_max
    reduce_min sqrt rsqrt""".split()
_FINITE_FROM = {
    "sqrt": Sign.NOT_NEGATIVE,
    "log1p": Sign.NOT_NEGATIVE,
    "log": Sign.POSITIVE,
    "rsqrt": Sign.POSITIVE,
}
"""Functions that are finite if their operand's sign is at least this."""

_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "div": lambda x, y: x / y if y else math.nan,
    "pow": lambda x, y: x**y if x > 0 else math.nan,
    "convert_element_type": float,
    "broadcast_in_dim": float,
}
"""Functions that are computed if all operands are known numbers."""

_BY_ELEMENT = ELEMENTWISE | {
    *"""broadcast_in_dim concatenate convert_element_type expand_dims iota reshape
    select_n slice split squeeze stack transpose unstack""".split()
}
"""Functions that compute each element from one element of each operand."""


class FiniteValues:
    """What is known of the values of a program, whose equations are added in order.

    A value is a `ConstValue`, or the index of an argument or of a result. ``of_rows``
    has the sizes that a dim of a micro-batch's rows may have.

    Attributes:
      assumed: The results of gathers that are taken to be finite; see `_reads_inside`.
    """

    def __init__(self, arguments: Sequence[int], of_rows: Collection[int]) -> None:
        self.assumed = set[int]()
        self._finite = {*arguments}
        self._of_rows = of_rows
        # These are values whose elements each depend on one element of an argument.
        self._by_element = {*arguments}
        self._signs: dict[Any, Sign] = {}
        self._numbers: dict[Any, float] = {}
        self._made_by: dict[Any, tuple[Any, Sequence[Any]]] = {}

    def add(self, eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """Note what is known of an equation's results, from its operands.

        What is known of the operands must have been noted before.
        """
        self._made_by |= dict.fromkeys(outs, (eqn, ins))
        if self._keeps_finite(eqn, ins, frozenset()):
            self._finite.update(outs)
            if eqn.primitive.name == "gather" and self._number(ins[1]) is None:
                self.assumed.update(outs)
        if eqn.primitive.name in _BY_ELEMENT and all(map(self._is_by_element, ins)):
            self._by_element.update(outs)
        self._signs |= dict.fromkeys(outs, self._sign_of_result(eqn, ins))
        numbers = [self._number(x) for x in ins]
        if eqn.primitive.name in _OF_NUMBERS and None not in numbers:
            number = _OF_NUMBERS[eqn.primitive.name](*numbers)
            self._numbers |= dict.fromkeys(outs, number)

    def is_finite(self, value: Any) -> bool:
        """Return whether a value is finite."""
        return self._is_finite(value, frozenset())

    def _number(self, value: Any) -> float | None:
        """Return the number that all elements of a value are; None if unknown."""
        if isinstance(value, ConstValue):
            return real_number(value)
        return self._numbers.get(value)

    def _is_finite(self, value: Any, positive: frozenset[Any]) -> bool:
        """Return whether a value is finite if the values ``positive`` are above 0."""
        if isinstance(value, ConstValue):
            return value.is_finite
        if value in self._numbers:
            return math.isfinite(self._numbers[value])
        if value in self._finite or not positive or value not in self._made_by:
            return value in self._finite
        eqn, ins = self._made_by[value]
        # This is tried only for a quotient, or a product with one: a guard such as
        # ``where(norm < c, ...)`` makes its divisor positive.
        return eqn.primitive.name in ("mul", "div") and self._keeps_finite(
            eqn, ins, positive
        )

    def _keeps_finite(
        self, eqn: Any, ins: Sequence[Any], positive: frozenset[Any]
    ) -> bool:
        """Return whether an equation's results are finite.

        The values ``positive`` are taken to be above 0.
        """
        name = eqn.primitive.name
        if name == "select_n" and self._is_guarded(ins):
            return True
        if not any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars):
            return True
        if name == "max" and any(map(self._is_lowest, ins)):
            return any(self._is_finite(x, positive) for x in ins)
        if not all(self._is_finite(x, positive) for x in ins):
            return False
        if name == "div":
            return ins[1] in positive or self._sign(ins[1]) is Sign.POSITIVE
        if name in _FINITE_FROM:
            return self._sign(ins[0]) >= _FINITE_FROM[name]
        if name in ("reduce_max", "reduce_min"):
            return eqn.invars[0].aval.size > 0
        if name == "reduce_window_max":
            return _has_an_element_in_each_window(eqn)
        if name == "gather":
            return self._reads_inside(eqn, ins[1])
        if name == "integer_pow":
            return eqn.params["y"] >= 0 or self._sign(ins[0]) is Sign.POSITIVE
        return name in KEEPS_FINITE or name == "select_and_scatter_add"

    def _is_lowest(self, value: Any) -> bool:
        """Return whether a value is minus infinity, which a maximum ignores."""
        return self._number(value) == -math.inf

    def _is_by_element(self, value: Any) -> bool:
        """Return whether each element of a value depends on one of an argument."""
        return isinstance(value, ConstValue) or value in self._by_element

    def _reads_inside(self, eqn: Any, index: Any) -> bool:
        """Return whether a gather reads no element outside of its array.

        It is assumed if the indices are computed from single elements of arguments,
        such as labels, and the array has no dim of rows. That holds if the program of
        one micro-batch, which is assumed to be finite, has the same gather.
        """
        dims = eqn.params["dimension_numbers"].start_index_map
        sizes = [eqn.invars[0].aval.shape[i] for i in dims]
        if (number := self._number(index)) is not None:
            lengths = [eqn.params["slice_sizes"][i] for i in dims]
            ends = zip(sizes, lengths, strict=True)
            return all(0 <= number <= size - length for size, length in ends)
        return self._is_by_element(index) and not {*sizes} & {*self._of_rows}

    def _is_guarded(self, ins: Sequence[Any]) -> bool:
        """Return whether a choice by ``x < c`` is finite, for a positive number ``c``.

        The case for ``x >= c`` may divide by ``x``, which is then positive. Gradients
        are clipped in this way: ``where(norm < c, g, g / norm * c)``.
        """
        predicate, otherwise, chosen = ins if len(ins) == 3 else (None, None, None)
        if predicate not in self._made_by:
            return False
        eqn, compared = self._made_by[predicate]
        if eqn.primitive.name != "lt" or self._sign(compared[1]) is not Sign.POSITIVE:
            return False
        positive = frozenset(compared[:1])
        return self.is_finite(chosen) and self._is_finite(otherwise, positive)

    def _sign(self, value: Any) -> Sign:
        """Return what is known of the sign of all elements of a value."""
        number = self._number(value)
        if number is None:
            return self._signs.get(value, Sign.ANY)
        if number > 0:
            return Sign.POSITIVE
        return Sign.NOT_NEGATIVE if number == 0 else Sign.ANY

    def _sign_of_result(self, eqn: Any, ins: Sequence[Any]) -> Sign:
        """Return what is known of the sign of all elements of a result."""
        name = eqn.primitive.name
        signs = [self._sign(x) for x in ins]
        if _may_become_0(eqn) or _is_complex(eqn):
            return Sign.ANY
        if name == "exp":
            return Sign.POSITIVE
        if name in (*_KEEPS_SIGN, "mul", "div") and min(signs) > Sign.ANY:
            return min(signs)
        if name in ("add", "add_any"):
            return max(signs) if min(signs) > Sign.ANY else Sign.ANY
        if name == "max":
            return max(signs)
        if name == "select_n":
            return min(signs[1:])
        is_square = name == "mul" and ins[0] == ins[1]
        is_even = name == "integer_pow" and eqn.params["y"] % 2 == 0
        if is_square or is_even or name in ("abs", "square", "logistic"):
            return max(signs[0], Sign.NOT_NEGATIVE)
        return Sign.ANY


def _has_an_element_in_each_window(eqn: Any) -> bool:
    """Return whether each window of a `reduce_window_max` has an element.

    A window that has only padding gives minus infinity.
    """
    windows = eqn.params["window_dimensions"]
    pairs = zip(windows, eqn.params["padding"], strict=True)
    is_plain = {*eqn.params["base_dilation"], *eqn.params["window_dilation"]} == {1}
    return is_plain and all(max(pad) < window for window, pad in pairs)


def _is_complex(eqn: Any) -> bool:
    """Return whether a result is complex: its square may be negative."""
    return any(jnp.issubdtype(x.aval.dtype, jnp.complexfloating) for x in eqn.outvars)


def _may_become_0(eqn: Any) -> bool:
    """Return whether an equation may turn positive values into 0.

    It does if it rounds them, or if it is a sum of no elements.
    """
    if eqn.primitive.name == "convert_element_type":
        both = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        before, after = (jnp.issubdtype(x, jnp.inexact) for x in both)
        return before and not after
    return eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == 0
