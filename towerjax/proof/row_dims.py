"""Row dims: along which dims of a value a tower's examples lie, and where they meet.

Towers equal one tower where what becomes of a row depends on that row alone, and what a
tower computes of all its rows is merged over towers before a row meets it. Else a row's
numbers depend on which other rows its tower has.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn


class RowDim(NamedTuple):
    """A dim along which rows lie."""

    at: int
    rows: int  # how many, which are the dim's outer part
    is_other: bool = False  # the rows that those of another dim meet


RowDims: TypeAlias = tuple[RowDim, ...] | None
"""Where the tower's rows lie, or one of the values below; None: it is not known."""

NO_ROWS: RowDims = ()
"""The value does not depend on a tower's rows, or is merged over towers."""

TOTAL: RowDims = (RowDim(-1, 0),)
"""The value is a sum over the tower's own rows, or a sum of such."""

FUNCTION: RowDims = (RowDim(-2, 0),)
"""The value is a function of totals that is no sum, such as a root or a ratio."""

MIXED: RowDims = (RowDim(-3, 0),)
"""Rows have met a total, or have met other rows."""


def of_batch(shape: tuple[int, ...]) -> RowDims:
    """The rows of an array of a batch."""
    return (RowDim(0, shape[0]),) if shape else NO_ROWS


def have_met(rows: RowDims) -> bool:
    """Whether rows have met a total, or other rows."""
    return rows == MIXED or are_pairs(rows)


def are_pairs(rows: RowDims) -> bool:
    """Whether the value has an element for each row and each other row."""
    return any(dim.is_other for dim in rows or ())


def may_be_sum(rows: RowDims) -> bool:
    """Whether the value depends on rows, perhaps as a sum over them."""
    return rows not in (NO_ROWS, FUNCTION)


def of_choice(first: RowDims, second: RowDims) -> RowDims:
    """The rows of a value that is one or the other of two."""
    if first == second or not (first and second):
        return None if None in (first, second) else first or second
    return MIXED if MIXED in (first, second) else None


def of_part(rows: RowDims) -> RowDims:
    """The rows of an unknown part of a value, such as what a kernel reads."""
    return rows if rows in (NO_ROWS, MIXED) else FUNCTION if _is_total(rows) else None


def stacked(rows: RowDims) -> RowDims:
    """The rows of values stacked along a new dim 0."""
    return rows and tuple(x._replace(at=x.at + (x.at >= 0)) for x in rows)


def unstacked(rows: RowDims) -> RowDims:
    """The rows of each part of a value along dim 0."""
    kept = tuple(x._replace(at=x.at - (x.at > 0)) for x in rows or () if x.at)
    return kept if kept or rows == NO_ROWS else None


def of_equation(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    """The rows of each result of an equation that holds no jaxpr."""
    if not any(ins) and None not in ins:
        return NO_ROWS
    if MIXED in ins or None in ins:
        return MIXED if MIXED in ins else None
    name = eqn.primitive.name
    if all(x == NO_ROWS or _is_total(x) for x in ins):
        # A flag decides, and adds nothing of other rows to a row.
        return NO_ROWS if name in _FLAGS else _of_totals(name, ins)
    if rule := _ROW_RULES.get(name):
        return rule(eqn, ins)
    return None if name in _NOT_ELEMENTWISE else _elementwise(eqn, ins)


def _is_total(rows: RowDims) -> bool:
    return rows in (TOTAL, FUNCTION)


def _of_totals(name: str, ins: Sequence[RowDims]) -> RowDims:
    """What is computed of totals, and of what does not depend on rows."""
    is_sum = name in _SUM_NAMES or (name in _PRODUCT_NAMES and ins.count(TOTAL) == 1)
    is_sum |= name == "div" and ins[1] == NO_ROWS
    is_sum |= name == "select_n" and ins[0] == NO_ROWS
    return TOTAL if is_sum and FUNCTION not in ins else FUNCTION


_PRODUCT_NAMES = frozenset("conv_general_dilated dot_general mul".split())
_SUM_NAMES = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type copy cumsum"
    " dynamic_slice gather imag neg pad real reduce_precision reduce_sum reshape rev"
    " slice split squeeze stack stop_gradient sub transpose unstack".split()
)
_FLAGS = frozenset("eq ge gt is_finite le lt ne reduce_and reduce_or".split())
# Results may have an operand's shape, but an element depends on several.
_NOT_ELEMENTWISE = frozenset(
    "cholesky dynamic_update_slice eig eigh fft lu qr reduce_window scatter"
    " scatter-add scatter-max scatter-min scatter-mul svd triangular_solve".split()
)


def _elementwise(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    """Rows that lie alike stay; a dim of 1 is repeated."""
    out = _shape(eqn.outvars[0])
    for var, rows in zip(eqn.invars, ins, strict=True):
        given = _shape(var)
        own = [x.at for x in rows or () if x.at >= 0]
        if own and (len(given) != len(out) or any(given[d] != out[d] for d in own)):
            return None
    return _together(ins)


def _together(several: Iterable[RowDims]) -> RowDims:
    """The rows of what is computed of several values, element by element."""
    return functools.reduce(_two_together, several, NO_ROWS)


def _two_together(first: RowDims, second: RowDims) -> RowDims:
    if first is None or second is None:
        return None
    if not (first and second) or first == second:
        return first or second
    if _is_total(first) and _is_total(second):
        return FUNCTION
    if {TOTAL, FUNCTION, MIXED}.intersection((first, second)):
        return MIXED
    given, others = ({x.at for x in rows} for rows in (first, second))
    if are_pairs(first) or are_pairs(second):
        if given <= others or others <= given:
            return max(first, second, key=len)
        return MIXED
    if given & others:
        return None
    return tuple(sorted((*first, *(x._replace(is_other=True) for x in second))))


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _moved(rows: RowDims, to: Any) -> RowDims:
    """The rows where dim ``d`` becomes ``to[d]``; a total stays one."""
    if rows is None or _is_total(rows):
        return rows
    return tuple(sorted(x._replace(at=to[x.at]) for x in rows))


def _without(rows: RowDims, dims: Sequence[int], total: RowDims) -> RowDims:
    """The rows where dims are reduced, to ``total`` if these are all of the rows'."""
    own = {x.at for x in rows or ()}
    if own.isdisjoint(dims):
        return _moved(rows, {d: d - sum(x < d for x in dims) for d in own})
    if are_pairs(rows):
        return MIXED
    return total if own <= {*dims} else None


def _reduce(total: RowDims) -> Callable[..., RowDims]:
    return lambda eqn, ins: _without(ins[0], eqn.params["axes"], total)


def _along(param: str) -> Callable[..., RowDims]:
    """The rule where elements along some dims alone depend on each other."""

    def rule(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
        dims, rows = eqn.params[param], _together(ins)
        dims = dims if isinstance(dims, tuple) else (dims,)
        return rows if {x.at for x in rows or ()}.isdisjoint(dims) else None

    return rule


def _repeat(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    given, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    to, rows = eqn.params["broadcast_dimensions"], ins[0]
    is_whole = all(given[x.at] == out[to[x.at]] for x in rows or ())
    return _moved(rows, to) if is_whole else None


def _transpose(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    return _moved(ins[0], {d: i for i, d in enumerate(eqn.params["permutation"])})


def _reshape(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    """Follow the rows where they are the outer part of dims that become others."""
    given, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    found: list[RowDim] = []
    for old, new in _same_elements(given, out):
        own = [x for x in ins[0] or () if x.at in old]
        is_outer = [x.at for x in own] == old[: len(own)]
        if not is_outer or any(x.rows != given[x.at] for x in own[:-1]):
            return None
        left = math.prod(x.rows for x in own)
        for at in new:
            if left > 1:
                part = math.gcd(left, out[at])
                if part not in (left, out[at]):
                    return None
                found.append(own[0]._replace(at=at, rows=part))
                left //= part
    if are_pairs(ins[0]) and len(found) != len(ins[0] or ()):
        return MIXED
    # A new dim of 1 before the rows may be the number of their groups.
    ones = range(found[0].at if found and 1 not in given else 0)
    return (*(RowDim(at, 1) for at in ones if out[at] == 1), *found)


def _stack(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    """A new dim, before which rows stay; a total beside rows has met them."""
    rows, axis = _together(ins), eqn.params["axis"]
    own = [x.at for x in rows or ()]
    return rows if rows == MIXED else _moved(rows, {d: d + (d >= axis) for d in own})


def _unstack(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    return _without(ins[0], [eqn.params["axis"]], None)


def _squeeze(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    dims, rows = eqn.params["dimensions"], ins[0] or ()
    kept = tuple(x for x in rows if x.at not in dims)
    return _without(kept, dims, None) if kept else None


def _same_elements(
    given: tuple[int, ...], out: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims, without those of 1, of as many elements in both."""
    olds, news = ([d for d, n in enumerate(shape) if n != 1] for shape in (given, out))
    runs = []
    while olds and news:
        old, new = [olds.pop(0)], [news.pop(0)]
        while (a := math.prod(given[d] for d in old)) != (
            b := math.prod(out[d] for d in new)
        ):
            run, rest = (old, olds) if a < b else (new, news)
            run.append(rest.pop(0))
        runs.append((old, new))
    return runs


def _part(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    """A part of an array that has all the rows, or one of the batches of rows."""
    given, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    kept = tuple(x for x in ins[0] or () if given[x.at] == out[x.at])
    if are_pairs(ins[0]) and kept != ins[0]:
        return MIXED
    return None if any(ins[1:]) else kept or None


def _dot(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    contracted, batch = eqn.params["dimension_numbers"]
    found, start = [], len(batch[0])
    for var, rows, gone, shared in zip(eqn.invars, ins, contracted, batch, strict=True):
        free = [d for d in range(len(_shape(var))) if d not in (*gone, *shared)]
        to = {d: i for i, d in enumerate(shared)}
        to |= {d: start + i for i, d in enumerate(free)}
        start += len(free)
        own = {x.at for x in rows or () if x.at >= 0}
        if own.isdisjoint(gone):
            found.append(_moved(rows, to))
        else:
            found.append(TOTAL if own <= {*gone} else None)
    return _together(found)


def _convolve(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    numbers = eqn.params["dimension_numbers"]
    rows, at = ins[0], numbers.lhs_spec[0]
    if (
        ins[1]
        or eqn.params["batch_group_count"] > 1
        or {x.at for x in rows or ()} != {at}
    ):
        return None
    return _moved(rows, {at: numbers.out_spec[0]})


def _gather(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if any(_is_total(x) for x in ins):
        return None
    outer = [
        d for d in range(len(_shape(eqn.outvars[0]))) if d not in numbers.offset_dims
    ]
    batched = numbers.operand_batching_dims
    gone = {*numbers.collapsed_slice_dims, *batched}
    left = [d for d in range(len(sizes)) if d not in gone]
    pairs = zip(left, numbers.offset_dims, strict=True)
    to = {d: at for d, at in pairs if sizes[d] == _shape(eqn.invars[0])[d]}
    by_index = zip(batched, numbers.start_indices_batching_dims, strict=True)
    to |= {d: outer[i] for d, i in by_index}
    each = (ins[0], to), (ins[1], dict(enumerate(outer)))
    if any(x.at not in to for rows, to in each for x in rows or ()):
        return None
    return _together(_moved(rows, to) for rows, to in each)


def _window(eqn: JaxprEqn, ins: Sequence[RowDims]) -> RowDims:
    sizes, rows = eqn.params["window_dimensions"], ins[0]
    return None if any(sizes[x.at] != 1 for x in rows or ()) else rows


_Rule: TypeAlias = Callable[[JaxprEqn, Sequence[RowDims]], RowDims]
_ROW_RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _repeat,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _convolve,
    "dot_general": _dot,
    "gather": _gather,
    "reduce_sum": _reduce(TOTAL),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "transpose": _transpose,
}
_ROW_RULES |= dict.fromkeys("argmax argmin".split(), _reduce(None))
# A maximum is subtracted and added again, as in a softmax, more often than meant.
_ROW_RULES |= dict.fromkeys("reduce_max reduce_min".split(), _reduce(NO_ROWS))
_ROW_RULES |= dict.fromkeys("reduce_and reduce_or".split(), _reduce(NO_ROWS))
_ROW_RULES |= dict.fromkeys("dynamic_slice pad slice split top_k".split(), _part)
_ROW_RULES |= dict.fromkeys(
    "cumlogsumexp cummax cummin cumprod cumsum".split(), _along("axis")
)
_ROW_RULES |= dict.fromkeys(
    "reduce_window_max reduce_window_min reduce_window_sum".split(), _window
)
