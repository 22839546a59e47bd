"""Lints: where a number that is returned depends on which rows its tower has.

Towers equal one tower where what becomes of a row depends on that row alone, and what a
tower computes of all its rows is merged over towers before a row meets it. Values carry
where rows lie in them, and where rows have met; of what is not known nothing is said.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from towerjax.proof import tags
from towerjax.proof.equation import Site, user_line
from towerjax.proof.findings import ReplicationError
from towerjax.types.leaves import listed
from towerjax.types.version import page
from towerjax.types.warning import warn


class RowDim(NamedTuple):
    """A dim along which rows lie."""

    at: int
    rows: int  # how many, which are the dim's outer part
    apart: int = 1  # how many rows further its next element is
    is_other: bool = False  # the rows that those of another dim meet
    is_group: bool = False  # sums over rows that lie as far apart as a tower has them


Dims: TypeAlias = tuple[RowDim, ...] | None  # or one of these; None: it is not known
NO_ROWS: Dims = ()  # It depends on no row, or is merged over towers.
TOTAL: Dims = (RowDim(-1, 0),)  # It is a sum over the tower's rows, or of such sums.
FUNCTION: Dims = (RowDim(-2, 0),)  # It is a function of totals, such as a ratio.
MIXED: Dims = (RowDim(-3, 0),)  # Rows have met a total, or other rows.


class OwnRows(NamedTuple):
    """At `line`, a number depends on which rows a tower has."""

    how: str  # a key of ``_OWN_ROWS``; or the "weight" of a loss, "square" of a mean
    line: str
    leaves: frozenset[str] = frozenset()  # that denominators, or a weight, come from
    at: int | None = None  # the dim of a mean's rows; None: they meet each other


class Lint(NamedTuple):
    """What a value has of its tower's rows."""

    dims: Dims = NO_ROWS
    met: frozenset[OwnRows] = frozenset()  # where rows have met, on the way to it
    leaves: frozenset[str] = frozenset()  # of the batch, that it is computed from
    over: frozenset[str] = frozenset()  # those of what its totals were divided by
    # Of a loop, it depends on the "turn", its "row", or one that was "passed" on.
    loops: frozenset[tuple[str, int]] = frozenset()


_NOTHING = Lint()
# The name of this number, and of the weights made of it, where it is asked for.
NUM_VALID, WEIGHTS = "batch: how many rows are examples", "tower.weight"


def of_batch(name: str, shape: tuple[int, ...]) -> Lint:
    """The rows of an array of a batch."""
    dims = (RowDim(0, shape[0]),) if shape else NO_ROWS
    return Lint(dims, leaves=frozenset([name]))


def either(first: Lint, second: Lint) -> Lint:
    """The rows of a value that is one or the other of two, or of both."""
    if first == second or _NOTHING in (first, second):
        return second if first == _NOTHING else first
    a, b = first.dims, second.dims
    dims = None if None in (a, b) or (a and b and a != b) else a or b
    dims = FUNCTION if {a, b} == {TOTAL, FUNCTION} else dims
    sets: Any = zip(first[1:], second[1:], strict=True)
    return Lint(MIXED if MIXED in (a, b) else dims, *[x | y for x, y in sets])


def of_part(rows: Lint) -> Lint:
    """The rows of an unknown part of a value, such as what a kernel reads."""
    dims = FUNCTION if rows.dims in (TOTAL, FUNCTION) else None
    return rows if rows.dims in (NO_ROWS, MIXED) else rows._replace(dims=dims)


def merged(rows: Lint, *, is_whole: bool) -> Lint:
    """The rows of what towers merge, all of them or groups."""
    return rows._replace(dims=NO_ROWS if is_whole else None, loops=frozenset())


def carried(rows: Lint, loop: JaxprEqn) -> Lint:
    """The rows of a carry in each turn of a loop."""
    passed = {("passed", at) for x, at in rows.loops if (x, at) == ("row", id(loop))}
    return rows._replace(loops=rows.loops | passed | {("turn", id(loop))})


def unstacked(rows: Lint, loop: JaxprEqn) -> Lint:
    """The rows of each part of a value along dim 0, which a loop takes in turn."""
    given, new = rows.dims or (), {("turn", id(loop))}
    if any((x.at, x.rows) == (0, loop.params["length"]) for x in given):
        new.add(("row", id(loop)))
    kept = tuple(x._replace(at=x.at - (x.at > 0)) for x in given if x.at)
    return rows._replace(dims=kept or (rows.dims and None), loops=rows.loops | new)


def stacked(rows: Lint, loop: JaxprEqn, line: Callable[[], str]) -> Lint:
    """The rows of what the turns of a loop give, along a new dim 0."""
    dims = rows.dims and tuple(x._replace(at=x.at + (x.at >= 0)) for x in rows.dims)
    is_passed = ("passed", id(loop)) in rows.loops and line()  # "" of a derivative
    met = {OwnRows("passed", line())} if is_passed else set()
    return rows._replace(dims=dims, met=rows.met | met)


def of_equation(
    eqn: JaxprEqn, ins: Sequence[Lint], site: Site, is_derived: Callable[..., bool]
) -> Lint:
    """The rows of each result of an equation that holds no jaxpr."""
    known = [x for x in ins if x != _NOTHING]
    if not known:
        return _NOTHING
    given, name, met = [x.dims for x in ins], eqn.primitive.name, ""
    dims = dims_of_equation(eqn, given)
    rows = functools.reduce(either, known)._replace(dims=dims)
    if MIXED not in given and not any([d.is_other for x in given for d in x or ()]):
        pairs = any([x.is_other for x in dims or ()])
        met = "pairs" if pairs else "total" if dims == MIXED else ""
    turns = {at for x in ins[1:] for what, at in x.loops if what == "turn"}
    if name in ("dynamic_slice", "gather") and given[0] and dims is None:
        rows = rows._replace(loops=rows.loops | {("row", at) for at in turns})
    if name in ("scatter", "dynamic_update_slice"):
        update = ins[1 + (name == "scatter")].loops
        met = "passed" if any(("passed", at) in update for at in turns) else met
    # No line: a loop of ours, over micro-batches inside one over towers.
    if met and not is_derived(eqn) and (line := user_line(site)):
        rows = rows._replace(met=rows.met | {OwnRows(met, line)})
    if name in ("div", "integer_pow") and dims == FUNCTION:
        rows = rows._replace(over=rows.over | ins[-1].leaves)
    if name in ("div", "mul") and any([_is_of_all(x) for x in ins]):
        rows = rows._replace(over=rows.over | {WEIGHTS})
    return rows


def _is_of_all(rows: Lint) -> bool:
    """Whether a value is made of the weights of all towers' rows."""
    return rows.dims == NO_ROWS and WEIGHTS in rows.leaves


def of_named(name: str, rows: Lint, line: Callable[[], str], site: Site) -> list[Any]:
    """What is found in a value that towerjax named: see `towerjax.proof.tags`."""
    dims = rows.dims
    if name == tags.LOSS_SUM and dims == FUNCTION:
        return [OwnRows("function", line(), rows.over)]
    is_masked = WEIGHTS in rows.leaves - rows.over
    if name == tags.LOSS_SUM and dims == TOTAL and is_masked:
        return [OwnRows("padding", line())]
    if name == tags.LOSS_WEIGHT and dims != NO_ROWS:
        return [OwnRows("weight", "", rows.leaves)]
    if name == tags.SQUARE and dims and (are_pairs(dims) or dims[0].at > 0):
        at = None if are_pairs(dims) else dims[0].at
        return [OwnRows("square", user_line(site), at=at)]
    return []


# What rows of a tower do, and what to write instead.
_OF_ALL = "The rows of all towers are tower.all_gather(x, axis=0)."
_OWN_ROWS = {
    "total": (
        "are combined with what is computed of all of them, such as their mean",
        "The mean of all towers' rows is tower.mean(x, tower.weight), and their batch"
        " norm towerjax.layers.batch_norm.",
    ),
    "pairs": ("are combined with each other", _OF_ALL),
    "passed": ("pass something on to the next in a loop", _OF_ALL),
    "function": (
        "make a loss that is a function of sums, such as a ratio or a root",
        "Return a sum and its weight, tj.Weighted((losses * mask).sum(), mask.sum());"
        f" others: {page('how_to/several_losses', 'A function of a mean')}",
    ),
    "padding": (
        "are padded, and make a loss with a weight that counts the padding",
        "Return tj.Weighted.mean(losses, tower.weight), or another sum and the weights"
        " of the same rows.",
    ),
}


def warn_of_own_rows(own_rows: Sequence[OwnRows]) -> None:
    """Warn where numbers depend on which rows a tower or micro-batch has."""
    lines: dict[str, list[str]] = {}
    weights = {x.leaves for x in own_rows if x.how == "weight"}
    for how, line, leaves, _ in dict.fromkeys(own_rows):
        # A ratio times its own denominator is the sum again.
        if how != "function" or leaves not in weights:
            lines.setdefault(how, []).append(line)
    for how, (what, advice) in _OWN_ROWS.items():
        if how in lines:
            warn(
                f"Rows of a tower {what}, at {listed(lines[how])}. Other numbers of"
                f" towers or micro-batches may give other numbers. {advice} If its own"
                " are meant, say warnings.filterwarnings('ignore', 'Rows of a tower')."
            )


def wrong_where_padded(
    padded: Sequence[OwnRows], whole: Sequence[OwnRows]
) -> list[OwnRows]:
    """Losses that are wrong only where towers have padding."""
    known = {x.line for x in whole if x.how == "function"}
    weights = [x for x in padded if x.how == "weight"]
    kinds = ("function",) if weights else ("function", "padding")
    return weights + [x for x in padded if x.how in kinds and x.line not in known]


def refuse_squares(own_rows: Sequence[OwnRows]) -> None:
    """Raise where a mean is of pairs of a tower's rows, or of rows in another dim."""
    squares = [x for x in own_rows if x.how == "square"]
    lines = listed(dict.fromkeys(x.line for x in squares))
    for at in {x.at for x in squares} - {None}:
        raise ReplicationError(
            f"tj.Weighted.mean of values at {lines} whose rows lie along dim {at}."
            f" Examples are dim 0: give jnp.moveaxis(values, {at}, 0)."
        )
    if squares:
        raise ReplicationError(
            "tj.Weighted.mean of values [b, b], each of a tower's b rows with each, at"
            f" {lines}: other towers would make other pairs. If predictions [b] were"
            " compared with labels [b, 1], write labels[:, 0]. Where pairs in a tower"
            " are meant, say tj.Weighted.mean(values.mean(axis=1), tower.weight); the"
            " rows of all towers come from tower.all_gather or an earlier pass."
        )


def are_pairs(dims: Dims) -> bool:
    """Whether the value has an element for each row and each other row."""
    return bool(dims) and any([x.is_other for x in dims])


def dims_of_equation(eqn: JaxprEqn, ins: Sequence[Dims]) -> Dims:
    """Where rows lie in the results of an equation that holds no jaxpr."""
    name = eqn.primitive.name
    if None in ins or MIXED in ins:
        return MIXED if MIXED in ins else None
    if all([x in (NO_ROWS, TOTAL, FUNCTION) for x in ins]):
        # A flag decides, and adds nothing of other rows to a row.
        is_free = name in _FLAGS or not any(ins)
        is_sum = name in _SUMS or (name in _BILINEAR and ins.count(TOTAL) == 1)
        by = {"div": ins[1:], "select_n": ins[:1]}.get(name, ins)
        is_sum |= not any(by)  # divided, or chosen, by what does not depend on rows
        total = TOTAL if is_sum and FUNCTION not in ins else FUNCTION
        return NO_ROWS if is_free else total
    if name in _NOT_FOLLOWED:
        return None
    avals: list[Any] = [v.aval for v in (*eqn.outvars[:1], *eqn.invars)]
    out, *given = [x.shape for x in avals]
    if name == "reshape":
        return _reshape(given[0], out, ins[0] or ())
    moves, gone = _moves(name, eqn.params, given, out), _GONE.get(name)
    each = [_follow(dims, to, gone) for dims, to in zip(ins, moves, strict=False)]
    return functools.reduce(_two_together, each, NO_ROWS)


_NAMES_OF_DIMS = "axes", "axis", "dimension", "dimensions"
_BILINEAR = frozenset("conv_general_dilated dot_general mul".split())
_SUMS = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type copy cumsum"
    " dynamic_slice gather imag neg pad real reduce_precision reduce_sum reshape rev"
    " slice split squeeze stack stop_gradient sub transpose unstack".split()
)
_FLAGS = frozenset("eq ge gt is_finite le lt ne reduce_and reduce_or".split())
# Results may have an operand's shape, but an element depends on several.
_NOT_FOLLOWED = frozenset(
    "cholesky dynamic_update_slice eig eigh fft lu qr scatter scatter-add scatter-max"
    " scatter-min scatter-mul svd triangular_solve".split()
)
# What becomes of a value where dims of its rows are gone; if nothing is said, unknown.
_PART = "a part"  # the rows along the dims that are left
_GONE: dict[str, Any] = {"reduce_sum": TOTAL, "dot_general": TOTAL}
# A maximum is subtracted and added again, as in a softmax, more often than meant.
_GONE |= dict.fromkeys("reduce_max reduce_min reduce_and reduce_or".split(), NO_ROWS)
_CUTS = "dynamic_slice pad slice split squeeze top_k unstack".split()
_GONE |= dict.fromkeys(_CUTS, _PART)


def _follow(dims: Dims, to: Mapping[int, int], gone: Any) -> Dims:
    """The rows where dim ``d`` becomes ``to[d]``; ``gone`` says what else they are."""
    if not dims or dims in (TOTAL, FUNCTION):
        return dims
    kept = tuple(sorted([x._replace(at=to[x.at]) for x in dims if x.at in to]))
    if len(kept) == len(dims) or are_pairs(dims):
        return kept if len(kept) == len(dims) else MIXED
    if gone == _PART or not kept:
        return (kept or None) if gone == _PART else gone
    of_all = math.prod([x.rows for x in dims])  # the rows of a tower
    are_far = any([x.rows * x.apart == of_all for x in dims if x.at not in to])
    if gone != TOTAL or not are_far or math.prod([x.rows for x in kept]) == 1:
        return None
    return tuple(x._replace(is_group=True) for x in kept)


def _two_together(first: Dims, second: Dims) -> Dims:
    """The rows of what is computed of two values, element by element."""
    if not (first and second) or first == second:
        return None if None in (first, second) else first or second
    totals = [x in (TOTAL, FUNCTION) for x in (first, second)]
    groups = [any([x.is_group for x in dims]) for dims in (first, second)]
    if any(totals) or MIXED in (first, second) or sum(groups) == 1:
        return FUNCTION if all(totals) else MIXED
    given, others = ({x.at for x in rows} for rows in (first, second))
    if are_pairs(first) or are_pairs(second):
        is_part = given <= others or others <= given
        return max(first, second, key=len) if is_part else MIXED
    pairs = tuple(sorted((*first, *(x._replace(is_other=True) for x in second))))
    return None if given & others else pairs


def _size(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod([shape[d] for d in dims])


def _reshape(given: Sequence[int], out: Sequence[int], dims: Any) -> Dims:
    """Follow the rows where they are the outer part of dims that become others."""
    olds, news = ([d for d, n in enumerate(x) if n != 1] for x in (given, out))
    moved: list[RowDim] = []
    while olds and news:  # the shortest runs of dims of as many elements in both
        old, new = [olds.pop(0)], [news.pop(0)]
        while (a := _size(given, old)) != (b := _size(out, new)):
            run, rest = (old, olds) if a < b else (new, news)
            run.append(rest.pop(0))
        own = [x for x in dims if x.at in old]
        is_outer = [x.at for x in own] == old[: len(own)]
        for x, y in zip(own, own[1:], strict=False):
            is_outer &= x.rows == given[x.at] and x.apart == y.rows * y.apart
        if not is_outer:
            return None
        left = math.prod([x.rows for x in own])
        for at in new if left > 1 else ():
            part = math.gcd(left, out[at])
            if part not in (left, out[at]):
                return None
            left //= part
            apart = left * own[-1].apart
            moved += [own[0]._replace(at=at, rows=part, apart=apart)] * (part > 1)
    if are_pairs(dims) and len(moved) != len(dims):
        return MIXED
    # A new dim of 1 before the rows may be the number of their groups.
    ones = range(moved[0].at if moved and 1 not in given else 0)
    return (*(RowDim(at, 1) for at in ones if out[at] == 1), *moved)


def _moves(name: str, params: Any, given: Sequence[Any], out: Sequence[int]) -> Any:
    """For each operand, the dim of the result that its dims become, whole."""
    if name == "transpose":
        return [{d: i for i, d in enumerate(params["permutation"])}]
    if name == "broadcast_in_dim":
        to = enumerate(params["broadcast_dimensions"])
        return [{d: at for d, at in to if given[0][d] == out[at]}]
    if name == "conv_general_dilated":
        numbers, is_whole = params["dimension_numbers"], params["batch_group_count"] < 2
        return [{numbers.lhs_spec[0]: numbers.out_spec[0]} if is_whole else {}, {}]
    if name == "dot_general":
        (gone, others), (shared, same) = params["dimension_numbers"]
        free = [d for d in range(len(given[0])) if d not in (*gone, *shared)]
        rest = [d for d in range(len(given[1])) if d not in (*others, *same)]
        each = (*shared, *free), (*same, *[-1] * len(free), *rest)
        return [{d: i for i, d in enumerate(dims)} for dims in each]
    if name == "gather":
        return _moves_by_index(params, given[0], out)
    named = next((params[x] for x in _NAMES_OF_DIMS if x in params), ())
    named = {*named} if isinstance(named, tuple) else {named}
    named |= {d for d, n in enumerate(params.get("window_dimensions", ())) if n != 1}
    moves = []
    for x in given:  # the named are gone, or new, or their elements meet
        fewer = len(x) - len(out)
        dims = [d for d in range(max(len(x), len(out))) if d not in named]
        to = dict(enumerate(dims)) if abs(fewer) == len(named) else {}
        to = {d: i for i, d in to.items()} if fewer > 0 else to
        moves.append(to if fewer else {d: d for d in dims if x[d] == out[d]})
    return moves


def _moves_by_index(params: Any, given: Sequence[int], out: Sequence[int]) -> Any:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    outer = [d for d in range(len(out)) if d not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    left = [d for d in range(len(sizes)) if d not in gone]
    pairs = zip(left, numbers.offset_dims, strict=True)
    to = {d: at for d, at in pairs if sizes[d] == given[d]}
    shared = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    to |= {d: outer[i] for d, i in zip(*shared, strict=True)}
    return [to, dict(enumerate(outer))]
