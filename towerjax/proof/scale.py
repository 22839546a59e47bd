"""Track how many times a value is counted, as powers of the number of towers, ``T``.

The sum over towers of a value that is the same on all is ``T`` times the value. That
is right where a division by ``T`` follows, or by another such sum, as in a mean;
elsewhere it is a mistake that no shape shows. So every value carries the least and the
greatest power of ``T`` that it may hold. In doubt the program is taken to be right: a
constant that ``T`` divides may stand for ``T``, unless the same program for another
number of towers has it too.

A loss that is a mean is a sum and a weight, and what is the same on all towers may
stand in a tower's sum beside its rows, such as a penalty of the parameters. Each tower
and each micro-batch adds it, where one tower adds it once. What the weight counts
decides: in the means of towers, each of weight 1, such a term is right.
"""

import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.proof import lints, tags
from towerjax.proof.equation import Site, all_jaxprs, open_jaxpr, user_line
from towerjax.types.leaves import listed
from towerjax.types.warning import warn

PRODUCTS = frozenset("mul div dot_general conv_general_dilated".split())
SUMS_OF_TERMS = frozenset("add add_any sub".split())
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}
# The result is the same for T times the operand.
_SCALE_FREE = frozenset("sign argmax argmin is_finite axis_index".split())
_MAX_POWER = 8.0  # a bound, so that the fixed point of a loop is reached


class Scale(NamedTuple):
    """Which powers of ``T`` a value may hold."""

    low: float = 0.0  # above 0 the value is certainly counted T times
    high: float = 0.0
    # How many factors of it are sums over towers of values that differ. Each is a sum,
    # or a mean once divided by T or by another sum.
    sums: float = 0.0
    is_constant: bool = False  # whether it is computed from constants alone
    # The sum that counted it T times; None where `low` is not above 0, or where the sum
    # is not the user's.
    site: Site | None = None

    def times(self, other: "Scale") -> "Scale":
        """The scale of a product."""
        sums = self.sums + other.sums
        # What is certainly counted is divided first, and sums by what is left.
        means = min(sums, max(0.0, -self.low - other.low))
        powers = self.low + other.low + means, self.high + other.high, sums - means
        low, high, sums = [min(_MAX_POWER, max(-_MAX_POWER, x)) for x in powers]
        site = (self.site or other.site) if low > 0 else None
        return self._replace(low=low, high=max(low, high), sums=sums, site=site)

    def inverse(self) -> "Scale":
        """The scale of the inverse of the value."""
        low = -self.high - self.sums
        return self._replace(low=low, high=-self.low, sums=0.0, site=None)

    def once(self) -> "Scale":
        """The scale of a value that is counted once."""
        return Scale(is_constant=self.is_constant)


CONSTANT = Scale(is_constant=True)
COUNTED_ONCE = Scale()

MAY_COUNT_TOWERS = Scale(low=-1.0, high=1.0, is_constant=True)
"""The scale of a constant that may stand for ``T``, or for its inverse."""


def scale_of_sum(first: Scale, second: Scale) -> Scale:
    """The scale of the sum of two values, or of either; constants do not count."""
    if first.is_constant != second.is_constant:
        return second if first.is_constant else first
    site = first.site or second.site
    lows, *others = zip(first[:3], second[:3], strict=True)
    # A constant that is one of two may stand for what either may.
    low = min(lows) if first.is_constant else max(lows)
    return Scale(low, *map(max, others), is_constant=first.is_constant, site=site)


def varying_constants(
    jaxpr: Jaxpr | ClosedJaxpr, other: Jaxpr | ClosedJaxpr
) -> set[tuple[int, int]]:
    """The constants that differ for another number of towers: they may hold ``T``.

    Literals, by equation and operand; arrays, and results of another shape, by variable
    or equation and -1. Raises a ValueError where the programs differ in more.
    """
    varying: set[tuple[int, int]] = set()
    for mine, theirs in zip(all_jaxprs(jaxpr), all_jaxprs(other), strict=True):
        body, twins = open_jaxpr(mine), open_jaxpr(theirs)
        given: list[Any] = [getattr(each, "consts", None) for each in (mine, theirs)]
        if None not in given:
            arrays = zip(body.constvars, *given, strict=True)
            varying |= {(id(var), -1) for var, *pair in arrays if not _equal(*pair)}
        for eqn, twin in zip(body.eqns, twins.eqns, strict=True):
            if eqn.primitive is not twin.primitive:
                raise ValueError(f"{eqn.primitive} has become {twin.primitive}")
            if [v.aval for v in eqn.outvars] != [v.aval for v in twin.outvars]:
                varying.add((id(eqn), -1))
            for i, pair in enumerate(zip(eqn.invars, twin.invars, strict=True)):
                values = [v.val for v in pair if isinstance(v, Literal)]
                if len(values) == 1:
                    raise ValueError(f"an operand of {eqn.primitive} is a literal once")
                if values and not _equal(*values):
                    varying.add((id(eqn), i))
    return varying


def _equal(first: Any, second: Any) -> bool:
    return first is second or np.array_equal(first, second)


def scale_of_equation(
    eqn: JaxprEqn,
    scales: Sequence[Scale],
    num_towers: int,
    varying: Container[tuple[int, int]] | None = None,
) -> Scale:
    """The scale of the results of an equation that is no collective."""
    name, is_sure = eqn.primitive.name, varying is not None or num_towers < 2
    if is_sure and not varying and all([x in (COUNTED_ONCE, CONSTANT) for x in scales]):
        return COUNTED_ONCE if COUNTED_ONCE in scales else CONSTANT
    scales = [
        _scale_of_constant(v, scale, num_towers)
        if varying is None or (id(eqn), i) in varying
        else scale
        for i, (v, scale) in enumerate(zip(eqn.invars, scales, strict=False))
    ]
    result = scales[0] if len(scales) == 1 else _scale_of_numbers(eqn, scales)
    if name in PRODUCTS:
        result = scales[0].times(scales[1].inverse() if name == "div" else scales[1])
    elif name == "integer_pow":
        result = _scale_of_power(scales[0], eqn.params["y"])
    elif name in _POWERS:
        result = _scale_of_power(scales[0], _POWERS[name])
    elif name in _SCALE_FREE or all([_is_bool(v) for v in eqn.outvars]):
        result = result.once()
    if not all([scale.is_constant for scale in scales]):
        return result._replace(is_constant=False)
    counts = any([scale.low or scale.high for scale in scales])
    if counts or (varying is not None and (id(eqn), -1) in varying):
        return MAY_COUNT_TOWERS._replace(sums=result.sums)
    return result._replace(is_constant=True)


def _scale_of_numbers(eqn: JaxprEqn, scales: Sequence[Scale]) -> Scale:
    """Join the operands' scales, but skip indices and predicates beside numbers."""
    makes_numbers = any(map(_is_real, eqn.outvars))
    pairs = zip(eqn.invars, scales, strict=True)
    counted = [scale for v, scale in pairs if _is_real(v) or not makes_numbers]
    return functools.reduce(scale_of_sum, counted, CONSTANT)


def _scale_of_constant(var: Any, scale: Scale, num_towers: int) -> Scale:
    """A constant that ``T`` divides may stand for ``T``, its inverse for ``1/T``."""
    if not scale.is_constant or num_towers < 2:
        return scale
    if not isinstance(var, Literal):
        return scale._replace(low=min(scale.low, -1.0), high=max(scale.high, 1.0))
    value = np.asarray(var.val)
    if value.size != 1 or not np.isreal(value) or not value.item():
        return scale
    value = abs(complex(value.item()))
    if _stands_for(value, num_towers):
        return scale._replace(high=1.0)
    if _stands_for(1 / value, num_towers):
        return scale._replace(low=-1.0)
    return scale


def scale_of_summed(
    eqn: JaxprEqn,
    at: int,
    scale: Scale,
    num_towers: int,
    varying: Container[tuple[int, int]] | None = None,
) -> Scale:
    """The scale of operand ``at``, which towers assign and add up; 0 stays 0."""
    var = eqn.invars[at]
    if isinstance(var, Literal) and not np.any(var.val):
        return scale
    if isinstance(var, Literal) and (varying is None or (id(eqn), at) in varying):
        scale = _scale_of_constant(var, scale, num_towers)
    return scale._replace(is_constant=False)


def _stands_for(value: float, num_towers: int) -> bool:
    if not math.isfinite(value):
        return False
    multiple = round(value / num_towers)
    # T - 1 divides the sum of squares in an unbiased variance.
    wanted = [num_towers * multiple] if multiple else []
    wanted += [num_towers - 1, math.sqrt(num_towers)]
    return any(w > 1 and math.isclose(value, w, rel_tol=1e-6) for w in wanted)


def _scale_of_power(scale: Scale, exponent: float) -> Scale:
    if exponent < 0:
        return _scale_of_power(scale.inverse(), -exponent)
    low, high, sums = (x * exponent for x in scale[:3])
    return scale._replace(low=low, high=high, sums=sums).times(Scale())


def _is_bool(var: Any) -> bool:
    return getattr(var.aval, "dtype", None) == jnp.bool_


def _is_real(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


Terms: TypeAlias = frozenset[str]
"""The lines that added such a term to a value; and `COUNTED`."""

COUNTED = ""
"""A whole number, as of rows, is a factor: a term for each row is right."""


class LossPart(NamedTuple):
    """Of a loss: the ``line`` that adds a term to it, or "" for a weight of rows."""

    line: str


def terms_of_equation(eqn: JaxprEqn, ins: Sequence[Any], site: Site) -> Terms:
    """The terms of the results of a sum or a product; ``ins`` are operands' marks."""
    terms: Terms = frozenset().union(*[m.terms for m in ins])
    name, own = eqn.primitive.name, [m for m in ins if m.along]
    if name in SUMS_OF_TERMS:
        totals = [m for m in own if m.rows.dims == lints.TOTAL]
        shared = [m for m in ins if not m.along and _may_be_shared(m)]
        return terms | {user_line(site)} if totals and shared else terms
    if len(own) > 1:  # A total times the number of its rows.
        return frozenset()
    pairs = zip(eqn.invars, ins, strict=True)
    counts = any([m.scale.is_constant and _may_count(name, v) for v, m in pairs])
    return terms | {COUNTED} if counts and not own else terms


def _may_be_shared(mark: Any) -> bool:
    """Whether towers add the value as often as there are towers."""
    is_computed = not mark.scale.is_constant and mark.scale.low >= 0
    return is_computed and COUNTED not in mark.terms


def _may_count(name: str, var: Any) -> bool:
    """Whether a constant may be a number of rows."""
    if not isinstance(var, Literal):
        return True
    value = np.abs(np.asarray(var.val, np.complex128))
    value = 1 / np.maximum(value, 1e-300) if name == "div" else value
    return bool(np.any((value > 1) & np.isclose(value, np.round(value), atol=0)))


def terms_of_loss(
    name: str, mark: Any, is_flag: Callable[[Any], bool]
) -> list[LossPart]:
    """What is found in the sum or the weight of a loss, by the name it has."""
    if name == tags.LOSS_WEIGHT and mark.along and not is_flag(mark):
        return [LossPart("")]
    if name == tags.LOSS_SUM and mark.rows.dims == lints.TOTAL:
        return [LossPart(line) for line in sorted(mark.terms - {COUNTED})]
    return []


def warn_of_terms(parts: Sequence[LossPart]) -> None:
    """Warn where a sum over rows, with the weight of these, holds such a term."""
    lines = dict.fromkeys(x.line for x in parts)
    if "" in lines and len(lines) > 1:
        warn(
            "A term that is the same on all towers is added to a tower's sum of losses,"
            f" at {listed([x for x in lines if x])}: each tower and micro-batch counts"
            " it, and one tower once. Write mean + tj.penalty(term), or add it to each"
            " row's loss; a share of it, divided by tower.num_towers, is right without"
            " micro-batches."
        )
