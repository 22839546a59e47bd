"""Loops over micro-batches that are written out, as JAX traces a Python loop.

Such a program has its equations once for each of n micro-batches. The program of one
micro-batch has them once. Each value of the program of one micro-batch is matched with
n values of the written-out program, one for each micro-batch; the micro-batches count
as towers. For each equation the proof looks for the n equations that do the same to
these values, and the rules give the kind of their results, as for towers. Where the n
values are added up, joined or stacked, the result is matched with one value; so is a
running mean, or any other sum in which all values have one coefficient. A batch is
matched with its n slices, too.

Each match is a true statement, so a value may have several. Equations that no result
needs are ignored.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from towerjax.jaxprs.flow import is_ref
from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.sites import all_eqns, user_line
from towerjax.prover.equality.kinds.constants import ConstValue
from towerjax.prover.equality.kinds.equation_pair import (
    ProgramsDifferError,
    Scope,
    Sizes,
)
from towerjax.prover.equality.kinds.kinds import (
    ZERO,
    Copy,
    FirstRow,
    InPadding,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    Stacked,
    TowerId,
    TowerRows,
    Unknown,
    Zero,
    added,
    added_over_towers,
    blocks_of,
    copy,
    joined,
    of_one_tower,
    rows,
)
from towerjax.prover.equality.loops.flat import (
    Flat,
    Node,
    params_agree,
    place_of,
    whole_number,
)
from towerjax.prover.equality.walk.walk import Walk

_CHAINS = "add add_any max min".split()
_OUT_OF_BOUNDS = (
    "0 times a {one}'s value is not 0 where an index is out of bounds, as one may be"
)
_MOST_MATCHES = 6  # the most matches that are noted for one value
_EXTREME = {"max": Maximum, "min": Minimum}
_OTHERS = "no equations do the same for each {one}"
_NOT_FINITE = (
    "0 times a {one}'s value is not 0 where that value is infinite or NaN, as it may be"
)
_ONE_EACH: TypeAlias = Copy | Part | Maximum | Minimum


class _Match(NamedTuple):
    """The kind of a value of one micro-batch's program, and the values it stands for.

    These are values of the program that has all micro-batches.
    """

    known: Kind
    values: tuple[Any, ...]  # a value for each micro-batch; or one, repeated, for all

    @property
    def is_shared(self) -> bool:
        """Whether it stands for one value, which all micro-batches share."""
        return len(set(self.values)) == 1


class Matched:
    """The kinds of a program's results, matched with those of one micro-batch.

    ``first`` is the program of one micro-batch. ``second`` does the same for ``n``
    micro-batches, written out one after another.
    """

    def __init__(self, walk: Walk, first: Any, second: Any) -> None:
        self._number = walk.sizes.towers[1]
        rows = _rows_of_micro_batch(second, self._number)
        self._one = Flat(first, rows)
        self._all = Flat(second, rows)
        self._walk = walk
        walk.sizes = Sizes(walk.sizes.towers, rows)
        self._matches: dict[int, list[_Match]] = defaultdict(list)
        self._failed: Kind | None = None  # the first unknown value, with its reason

    def results(self, ins: Sequence[Kind]) -> list[Kind]:
        """Return the kinds of the program's results, from those of its arguments."""
        for one, other, known in zip(self._one.ins, self._all.ins, ins, strict=True):
            self._add(one, _Match(known, (other,) * self._number), ())
        for node in self._needed():
            self._match(node)
        for program, var, value in self._one.names:
            if not isinstance(value, ConstValue) and self._matches[value]:
                kinds = self._walk.kinds.setdefault(id(program), {})
                kinds.setdefault(var, self._matches[value][0].known)
        pairs = zip(self._one.outs, self._all.outs, strict=True)
        if not self._all.assumed_finite() <= self._matched():
            return [_unknown(_OUT_OF_BOUNDS) for _ in pairs]
        return [self._result(*pair) for pair in pairs]

    def _matched(self) -> set[int]:
        """Return the values that are as finite as values of one micro-batch."""
        matches = itertools.chain.from_iterable(self._matches.values())
        known = [x for x in matches if not isinstance(x.known, Unknown)]
        return {value for match in known for value in match.values}

    def _needed(self) -> list[Node]:
        """Return, in order, the equations of one micro-batch that some result needs."""
        needed = {x for x in self._one.outs if not isinstance(x, ConstValue)}
        nodes = []
        for node in reversed(self._one.nodes):
            if needed & {*node.outs}:
                nodes.append(node)
                needed |= {x for x in node.ins if not isinstance(x, ConstValue)}
        return nodes[::-1]

    def _result(self, one: Any, other: Any) -> Kind:
        if isinstance(one, ConstValue) and isinstance(other, ConstValue):
            return self._walk.constant(one.value, other.value)
        matches = [] if isinstance(one, ConstValue) else self._matches[one]
        for match in matches:
            if match.is_shared and match.values[0] == other:
                return match.known
        return self._failed or _unknown(_OTHERS)

    def _match(self, node: Node) -> None:
        """Find equations that do for all micro-batches what ``node`` does for one.

        Their results become matches of the results of ``node``.
        """
        choices = [
            [x] if isinstance(x, ConstValue) else self._matches[x] for x in node.ins
        ]
        for operands in itertools.islice(itertools.product(*choices), 64):
            for nodes in self._same_for_each(node, operands):
                self._add_results(node, operands, nodes)
            if node.eqn.primitive.name in _CHAINS:
                self._add_chain(node, operands)
            if node.eqn.primitive.name == "stack" and len(operands) == 1:
                self._add_stack(node, operands[0])
        if self._failed is not None:
            return
        matches = self._matches[node.outs[0]]
        if not matches:
            why = _OTHERS, node
            if self._all.not_finite is not None:
                why = _NOT_FINITE, self._all.not_finite
            self._failed = _unknown(*why)
        elif all(isinstance(x.known, Unknown) for x in matches):
            self._failed = matches[0].known

    def _same_for_each(
        self, node: Node, operands: Sequence[Any]
    ) -> Iterator[list[Node]]:
        """Yield lists of equations, one per micro-batch, that may match ``node``."""
        lists = [
            [
                x
                for x in self._all.by_key.get((node.eqn.primitive, places), [])
                if _have_like_results(node, x, self._walk.sizes)
            ]
            for places in self._places(operands)
        ]
        if not all(lists):
            return
        is_shared = all(isinstance(x, ConstValue) or x.is_shared for x in operands)
        for first in lists[0]:
            if is_shared:
                yield [first] * self._number
                continue
            same = [[x for x in nodes if _agree(x, first)] for nodes in lists]
            if all(same):
                yield [nodes[0] for nodes in same]
        for step in dict.fromkeys([1, self._walk.sizes.rows[1]]):
            counted = [
                [x for x in nodes if _counts(x, i * step)]
                for i, nodes in enumerate(lists)
            ]
            if all(counted):
                yield [nodes[0] for nodes in counted]

    def _places(self, operands: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield, for each micro-batch, keys of the values that operands stand for."""
        for i in range(self._number):
            yield tuple(
                place_of(x) if isinstance(x, ConstValue) else place_of(x.values[i])
                for x in operands
            )

    def _add_results(
        self, node: Node, operands: Sequence[Any], nodes: Sequence[Node]
    ) -> None:
        """Note matches of the results of ``node`` with those of ``nodes``.

        ``nodes`` are the equations of all micro-batches; a rule must give a kind for
        all.
        """
        ins = self._kinds_of(node, operands, nodes)
        if ins is None:
            return
        scope = Scope(node.outer)
        answers = []
        for other in dict.fromkeys(nodes):
            answers.append(self._walk.equation(node.eqn, other.eqn, ins, scope))
        alike = [
            [(type(x), x.power, blocks_of(x)) for x in answer] for answer in answers
        ]
        if any(x != alike[0] for x in alike):
            return
        for i, known in enumerate(answers[0]):
            self._set_kind(node, i, known)
            values = tuple(other.outs[i] for other in nodes)
            self._add(node.outs[i], _Match(known, values), node.out_shape(i))

    def _kinds_of(
        self, node: Node, operands: Sequence[Any], nodes: Sequence[Node]
    ) -> list[Kind] | None:
        """Return the kinds of the operands, or None if constants differ.

        Constants may differ in one way: they count the micro-batches, or their rows.
        """
        ins = []
        for i, x in enumerate(operands):
            if not isinstance(x, ConstValue):
                ins.append(x.known)
                continue
            others = [other.ins[i] for other in nodes]
            if all(others[0].is_same(y) for y in others):
                ins.append(self._walk.constant(x.value, others[0].value))
                continue
            numbers = [whole_number(y) for y in others]
            step = self._walk.sizes.rows[1]
            if whole_number(x) != 0 or None in numbers:
                return None
            if numbers == [*range(self._number)]:
                ins.append(TowerId())
            elif numbers == [i * step for i in range(self._number)]:
                ins.append(FirstRow())
            else:
                return None
        return ins

    def _set_kind(self, node: Node, result: int, known: Kind) -> None:
        """Record the kind of a variable, for `Causes`."""
        kinds = self._walk.kinds.setdefault(id(node.program), {})
        kinds[node.eqn.outvars[result]] = known

    def _add_chain(self, node: Node, operands: Sequence[Any]) -> None:
        """Match a sum with the value to which the micro-batches' values add up."""
        name = node.eqn.primitive.name
        for start, part in (operands, operands[::-1]):
            if isinstance(part, ConstValue):
                continue
            if isinstance(start, ConstValue):
                begin: Any = start
                known = self._walk.constant(start.value, start.value)
            elif start.is_shared:
                begin = start.values[0]
                known = start.known
            else:
                continue
            end = self._end_of_chain(node.eqn.primitive, begin, part.values)
            if end is None:
                continue
            try:
                total = _total(name, part.known)
                whole = _chained(name, known, total)
            except NotOfOneKindError as error:
                whole = _unknown(str(error), node)
            self._set_kind(node, 0, whole)
            match = _Match(whole, (end,) * self._number)
            self._add(node.outs[0], match, node.out_shape())

    def _add_stack(self, node: Node, match: Any) -> None:
        """Match a stack of one value with the stack of all micro-batches' values."""
        if isinstance(match, ConstValue) or not isinstance(match.known, _ONE_EACH):
            return
        for other in self._all.by_key.get((node.eqn.primitive, match.values), []):
            if other.eqn.params["axis"] == node.eqn.params["axis"]:
                known = Stacked(match.known.power, of=type(match.known))
                stacked = _Match(known, other.outs * self._number)
                self._set_kind(node, 0, known)
                self._add(node.outs[0], stacked, node.out_shape())

    def _end_of_chain(self, primitive: Any, begin: Any, parts: Sequence[Any]) -> Any:
        """Return the value to which ``parts`` are added one after another, or None.

        The sum starts at ``begin``. ``primitive`` may also be a maximum or minimum.
        """
        left = [*parts]
        value = begin
        while left:
            step = self._next_in_chain(primitive, value, left)
            if step is None:
                return None
            value, taken = step
            left.remove(taken)
        return value

    def _next_in_chain(
        self, primitive: Any, value: Any, left: Sequence[Any]
    ) -> tuple[Any, Any] | None:
        for x in dict.fromkeys(left):
            for places in ((place_of(value), x), (x, place_of(value))):
                for node in self._all.by_key.get((primitive, places), []):
                    constants = [y for y in node.ins if isinstance(y, ConstValue)]
                    if all(y.is_same(value) for y in constants):
                        return node.outs[0], x
        return None

    def _add(self, value: int, match: _Match, shape: tuple[int, ...]) -> None:
        """Note a match of a value, and the matches that follow from this one."""
        matches = self._matches[value]
        same = [x for x in matches if x.values == match.values]
        if same and isinstance(same[0].known, Unknown):
            matches.remove(same[0])
        elif same or len(matches) >= _MOST_MATCHES:
            return
        matches.append(match)
        if isinstance(match.known, Unknown):
            return
        self._follow(value, match, shape)

    def _follow(self, value: int, match: _Match, shape: tuple[int, ...]) -> None:
        """Note matches that follow from one: of sums, joined arrays, and slices."""
        for other in self._sums(match):
            self._add(value, other, shape)
        for other in self._joined(match, shape):
            self._add(value, other, shape)
        for other in self._slices(match):
            self._add(value, other, shape)
        for multiple, other in self._multiples(value, match):
            self._add(multiple, other, shape)

    def _sums(self, match: _Match) -> Iterator[_Match]:
        """Yield matches with the sum, the largest or the smallest of all values."""
        first, *others = match.values
        users = self._all.users[first]
        for primitive in dict.fromkeys(x.eqn.primitive for x in users):
            if primitive.name not in _CHAINS:
                continue
            end = self._end_of_chain(primitive, first, others)
            if end is None:
                continue
            try:
                known = _total(primitive.name, match.known)
            except NotOfOneKindError:
                continue
            yield _Match(known, (end,) * self._number)

    def _multiples(self, value: int, match: _Match) -> Iterator[tuple[int, _Match]]:
        """Yield matches of multiples of a value, with multiples of its sum.

        An example is a running mean, ``mean + (x - mean) / (i + 1)``.
        """
        if match.is_shared:
            return
        try:
            total = _total("add", match.known)
        except NotOfOneKindError:
            return
        if not isinstance(total, Copy):
            return
        of_all = [
            (place, factors[0])
            for place, factors in self._all.linear_in(match.values).items()
            if _are_one(factors)
        ]
        of_one = self._one.linear_in([value]).items() if of_all else ()
        for place, [factor] in of_one:
            for end, common in of_all:
                power = _power_of(self._number, common, factor)
                if power is not None:
                    known = copy(total.power + power)
                    yield place, _Match(known, (end,) * self._number)

    def _joined(self, match: _Match, shape: tuple[int, ...]) -> Iterator[_Match]:
        """Yield matches with an array that holds all values of a match in order.

        ``shape`` is the shape of the value in the program of one micro-batch.
        """
        rows_of_both = self._walk.sizes.rows
        for node in self._all.users[match.values[0]]:
            if node.eqn.primitive.name != "concatenate" or node.ins != match.values:
                continue
            dim = node.eqn.params["dimension"]
            aval: Any = node.eqn.invars[0].aval
            sizes = shape[dim], aval.shape[dim]
            x = match.known
            is_rows = isinstance(x, TowerRows) and x.blocks == 1
            if is_rows and sizes == rows_of_both:
                yield _Match(copy(x.power), node.outs * self._number)
            elif sizes == (1, 1) and isinstance(x, _ONE_EACH):
                known = Stacked(x.power, of=type(x))
                yield _Match(known, node.outs * self._number)

    def _slices(self, match: _Match) -> Iterator[_Match]:
        """Yield matches with the n slices that a program takes of a batch."""
        if not match.is_shared or not isinstance(match.known, Copy | Zero | Stacked):
            return
        cuts: dict[Any, dict[int, Any]] = defaultdict(dict)
        for node in self._all.users[match.values[0]]:
            for (dim, size, whole), start, out in _cuts_of(node):
                if size * self._number == whole:
                    cuts[dim, size].setdefault(start, out)
        for (dim, size), by_start in cuts.items():
            starts = [i * size for i in range(self._number)]
            if not all(x in by_start for x in starts):
                continue
            known = self._of_a_slice(match.known, dim, size)
            if known is not None:
                yield _Match(known, tuple(by_start[x] for x in starts))

    def _of_a_slice(self, x: Kind, dim: int, size: int) -> Kind | None:
        """Return the kind of a micro-batch's slice of an array, or None."""
        if isinstance(x, Zero):
            return ZERO
        if isinstance(x, Stacked):
            return of_one_tower(x, 1) if dim == 0 and size == 1 else None
        is_of_rows = size == self._walk.sizes.rows[1]
        own_rows = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        return own_rows if is_of_rows else None


def _rows_of_micro_batch(closed: Any, n: int) -> tuple[int, int]:
    """Return the numbers of rows of a batch and of a micro-batch.

    They are read from the first equation that cuts a dim into ``n`` pieces.
    """
    for eqn in all_eqns(open_jaxpr(closed)):
        name = eqn.primitive.name
        if name not in ("reshape", "slice", "dynamic_slice", "split"):
            continue
        before: Any = eqn.invars[0].aval
        after: Any = eqn.outvars[0].aval
        if name == "reshape":
            if before.shape and len(after.shape) > 1 and after.shape[0] == n:
                if before.shape[0] == n * after.shape[1]:
                    return before.shape[0], after.shape[1]
            continue
        for whole, size in zip(before.shape, after.shape, strict=True):
            if whole == n * size and size > 1:
                return whole, size
    return n, 1


def _unknown(why: str, node: Node | None = None) -> Kind:
    """Return an unknown kind, with a reason and the line of an equation."""
    line = user_line((node.eqn, node.outer)) if node else ""
    return Unknown(why=f"{why}, at {line}" if line else why)


def _total(name: str, x: Kind) -> Kind:
    """Return the kind of the sum, or of the extreme, of all micro-batches' values."""
    if isinstance(x, Zero | Unknown):
        return x
    if name.startswith("add") and isinstance(x, Part | Copy):
        return added_over_towers(x)
    if isinstance(x, Copy) or type(x) is _EXTREME.get(name):
        return copy(x.power)
    raise NotOfOneKindError(f"no rule for a sum over {{many}} of {x}")


def _are_one(factors: Sequence[float]) -> bool:
    """Return whether all factors equal one number that is not 0, up to rounding."""
    least = min(factors)
    return least != 0 and math.isclose(least, max(factors), rel_tol=1e-6)


def _power_of(number: int, factor: float, divisor: float) -> int | None:
    """Return p if ``factor / divisor`` is ``number**p``, up to rounding; else None."""
    ratio = factor / divisor if divisor else 0.0
    powers = [p for p in range(-3, 4) if math.isclose(ratio, number**p, rel_tol=1e-6)]
    return powers[0] if powers else None


def _chained(name: str, start: Kind, total: Kind) -> Kind:
    """Return the kind of the sum, or of the larger, of ``start`` and ``total``.

    ``start`` is where a chain of additions, or of maxima, begins.
    """
    for x in (total, start):
        if isinstance(x, Unknown):
            return x
    both = [start, total]
    return added(both) if name.startswith("add") else joined(both, "compared with")


def _have_like_results(node: Node, other: Node, sizes: Sizes) -> bool:
    """Return whether results have the same shapes, except for rows or micro-batches."""
    if len(node.outs) != len(other.outs):  # an unstack of more micro-batches
        return False
    for x, y in zip(node.eqn.outvars, other.eqn.outvars, strict=True):
        if is_ref(x) or is_ref(y):
            continue
        first: Any = x.aval
        second: Any = y.aval
        if first.dtype != second.dtype:
            return False
        try:
            sizes.axes(first, second)
        except ProgramsDifferError:
            return False
    return True


def _agree(x: Node, y: Node) -> bool:
    """Return whether two equations of one program have equal constants and params."""
    return _constants_agree(x, y) and params_agree(x, y)


def _constants_agree(x: Node, y: Node) -> bool:
    pairs = zip(x.ins, y.ins, strict=True)
    return all(a.is_same(b) for a, b in pairs if isinstance(a, ConstValue))


def _counts(node: Node, number: int) -> bool:
    """Return whether an equation's first constant is ``number`` and others are 0."""
    numbers = [whole_number(x) for x in node.ins if isinstance(x, ConstValue)]
    return bool(numbers) and numbers[0] == number and set(numbers[1:]) <= {0}


def _cuts_of(node: Node) -> Iterator[tuple[tuple[int, int, int], int, Any]]:
    """Yield the slices that an equation takes along one dim.

    Each is a tuple of three: the dim, with the sizes of the slice and of the whole; the
    start; and the slice.
    """
    name = node.eqn.primitive.name
    if name not in ("slice", "split"):
        return
    aval: Any = node.eqn.invars[0].aval
    params = node.eqn.params
    if name == "split":
        dim = params["axis"]
        starts = itertools.accumulate(params["sizes"], initial=0)
        for size, start, out in zip(params["sizes"], starts, node.outs, strict=False):
            yield (dim, size, aval.shape[dim]), start, out
        return
    ends = zip(params["start_indices"], params["limit_indices"], strict=True)
    cut = [i for i, x in enumerate(ends) if x != (0, aval.shape[i])]
    if len(cut) == 1 and set(params["strides"] or [1]) == {1}:
        [dim] = cut
        start = params["start_indices"][dim]
        size = params["limit_indices"][dim] - start
        yield (dim, size, aval.shape[dim]), start, node.outs[0]


def kinds_by_matches(
    walk: Walk, programs: tuple[Any, Any], ins: Sequence[Kind]
) -> list[Kind]:
    """Return the kinds of the results of two programs, of which the second has no loop.

    Its equations are written out once for each micro-batch, as JAX traces a Python
    loop.

    Raises:
      ProgramsDifferError: The first program is not of one tower, or a rule fails.
    """
    if walk.sizes.towers[0] != 1:
        raise ProgramsDifferError("a loop is written out, and no program has one {one}")
    return Matched(walk, *programs).results(ins)
