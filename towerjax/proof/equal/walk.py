"""Walk two programs of one tower side by side, and find the kind of every value."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs.flow import is_ref
from towerjax.jaxprs.params import is_foreign, named_axes, open_jaxpr, sub_jaxprs
from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import user_line
from towerjax.proof.equal import orders, widths, zeros
from towerjax.proof.equal.constants import kind_of_constant
from towerjax.proof.equal.equation_pair import (
    RULES,
    SPECIAL,
    EquationPair,
    ProgramsDifferError,
    Registered,
    Scope,
    Sizes,
    failed,
)
from towerjax.proof.equal.kinds import (
    NO_ZEROS,
    PADDING,
    ZERO,
    Count,
    Flag,
    Groups,
    HasRow,
    Identity,
    Kind,
    Known,
    NotOfOneKindError,
    OneValue,
    Power,
    function_of,
    rows,
)
from towerjax.proof.equal.nouns import nouns
from towerjax.proof.equal.within import is_within, met_within

# Whether a value of the kind has a dim of rows; other kinds may have one.
_HAS_ROWS = {
    **dict.fromkeys([Kind.ROWS, Kind.NUMBERS, Kind.COLUMNS, Kind.BUFFER], True),
    Kind.ORDER: True,
    **dict.fromkeys([Kind.PART, Kind.MAXIMUM, Kind.MINIMUM, Kind.MEAN], False),
    **dict.fromkeys([Kind.TOWER, Kind.FIRST_ROW, Kind.ROW, Kind.SO_FAR], False),
    **dict.fromkeys([Kind.COUNTER, Kind.NEXT, Kind.AT_LEAST], False),
}

# Parameters that are not compared: sizes, which follow from shapes or which rules
# check; precision; and programs, which are walked.
NOT_COMPARED = frozenset(
    """shape new_sizes limit_indices start_indices slice_sizes axis_size sizes length
    sharding out_sharding precision jaxpr call_jaxpr fun_jaxpr branches jaxprs
    cond_jaxpr body_jaxpr update_jaxpr jvp_jaxpr_fun fwd_jaxpr_thunk bwd dim
    donated_invars call reps _prim""".split()
)
# Parameters that say where arrays are, which changes no number.
PLACES = frozenset(
    """mesh in_shardings out_shardings dst_sharding ctx_mesh context_mesh devices
    srcs""".split()
)
_TOP = Scope()
_MOST_FLAGS = 8  # the most flags without which one value is known to vanish


class _Walked(NamedTuple):
    """The results of two programs, and the range of identities that are new in them."""

    out: list[Known]
    start: int
    end: int
    programs: tuple[Any, Any]


class Walk:
    """One walk of two programs.

    ``axes`` are names of the axis of all towers; a tuple names axes that together have
    all towers, in order. ``alone`` are those of axes that have one device. With
    ``has_keys``, a tower's own key stands for one key per row.

    Attributes:
      kinds: The kinds of the variables of each program, by the id of the first program.
    """

    def __init__(
        self,
        sizes: Sizes,
        axes: Sequence[str | tuple[str, ...]],
        *,
        has_keys: bool = True,
        alone: frozenset[str] = frozenset(),
    ) -> None:
        self.sizes = sizes
        self.axes = frozenset((x,) if isinstance(x, str) else x for x in axes)
        self.has_keys = has_keys
        self.kinds: dict[int, dict[Any, Known]] = {}
        self.alone = alone
        self._known: dict[Any, _Walked] = {}
        self._count = 0

    def has_padding(self, zeros: frozenset[Any]) -> bool:
        """Whether padding may count in a value that is known to be 0 in ``zeros``."""
        return self.sizes.padded and PADDING not in zeros

    def new_identity(self) -> Identity:
        """A new identity, which no other value has."""
        self._count += 1
        return Identity(self._count)

    def closed(
        self, first: Any, second: Any, ins: Sequence[Known], scope: Scope = _TOP
    ) -> list[Known]:
        """The kinds of two programs' results, given those of their arguments.

        The programs are walked once for the same kinds. Each call gives results that
        are values of their own, because the arguments' values may be others.
        """
        key = id(first), id(second), tuple(ins), scope._replace(site=None)
        if key not in self._known:
            a, b = [getattr(x, "consts", ()) for x in (first, second)]
            if len(a) != len(b):
                raise ProgramsDifferError(
                    "the program closes over other arrays for another number "
                    f"of {nouns().many}"
                )
            consts = [self.constant(*pair) for pair in zip(a, b, strict=True)]
            start = self._count
            out = self._run(first, second, [*consts, *ins], scope)
            kept = first, second  # kept, so that their ids stay unique
            self._known[key] = _Walked(out, start, self._count, kept)
            return out
        found = self._known[key]
        shift = self._count - found.start
        self._count += found.end - found.start
        return [_renumbered(x, found, shift) for x in found.out]

    def _run(
        self, first: Any, second: Any, ins: Sequence[Known], scope: Scope
    ) -> list[Known]:
        a = open_jaxpr(first)
        b = open_jaxpr(second)
        sides = [(len(x.constvars), len(x.invars), len(x.outvars)) for x in (a, b)]
        if sides[0] != sides[1]:
            raise ProgramsDifferError(
                "the program has other inputs or results for another number "
                f"of {nouns().many}"
            )
        given = [*zip(a.constvars, b.constvars, strict=True)]
        given += zip(a.invars, b.invars, strict=True)
        env = {x: value for (x, _), value in zip(given, ins, strict=True)}
        twin = dict(given)  # the variable of the second program for each of the first

        def read(x: Any, y: Any) -> Known:
            if isinstance(x, Literal) and isinstance(y, Literal):
                return self.constant(x.val, y.val)
            if isinstance(x, Literal) or twin[x] is not y:
                raise ProgramsDifferError(
                    "the program reads other values for another number of "
                    f"{nouns().many}"
                )
            return env[x]

        for one, two in _eqn_pairs(a, b):
            pairs = zip(one.invars, two.invars, strict=True)
            operands = [read(*pair) for pair in pairs]
            outs = self.equation(one, two, operands, scope)
            env |= zip(one.outvars, outs, strict=True)
            twin |= zip(one.outvars, two.outvars, strict=True)
        self.kinds[id(a)] = env
        return [read(*pair) for pair in zip(a.outvars, b.outvars, strict=True)]

    def constant(self, first: Any, second: Any) -> Known:
        """The kind of a literal, or of an array that a program closes over."""
        return kind_of_constant(self.sizes, first, second)

    def equation(
        self, one: JaxprEqn, two: JaxprEqn, ins: Sequence[Known], scope: Scope
    ) -> list[Known]:
        """The kinds of the results of an equation."""
        pair = EquationPair(self, one, two, scope, ins, (), (), (), ())
        count = len(one.outvars)
        try:
            pair = self._with_axes(pair)
            found = self._by_rule(pair)
            found = found if isinstance(found, list) else [found] * count
            return [self._checked(pair, i, value) for i, value in enumerate(found)]
        except (NotOfOneKindError, ProgramsDifferError) as error:
            return [pair.unknown(str(error))] * count
        except Exception as error:  # a fault of a rule ends no training
            return [pair.unknown(failed(error))] * count

    def _with_axes(self, pair: EquationPair) -> EquationPair:
        self._refuse_other_params(pair)
        axes = []
        for group in ("invars", "outvars"):
            both = zip(
                getattr(pair.first, group), getattr(pair.second, group), strict=True
            )
            each = [
                (None, None) if is_ref(x) else self.sizes.axes(x.aval, y.aval)
                for x, y in both
            ]
            axes += [[a for a, _ in each], [b for _, b in each]]
        names = "rows_in", "towers_in", "rows_out", "towers_out"
        return dataclasses.replace(pair, **dict(zip(names, axes, strict=True)))

    def _refuse_other_params(self, pair: EquationPair) -> None:
        one = pair.first
        two = pair.second
        # The rule for a permutation of towers checks it for both numbers of towers.
        of_rule = set() if is_within(pair) else {"perm"}
        keys = (one.params | two.params).keys()
        for key in keys - NOT_COMPARED - PLACES - of_rule:
            x = one.params.get(key)
            y = two.params.get(key)
            if callable(x) and callable(y) and type(x) is type(y):
                continue  # rules of derivatives, or of an unknown primitive
            if x is not y and not is_same(x, y):
                name = one.primitive.name
                raise ProgramsDifferError(
                    f"{key} of {name} depends on the number of {nouns().many}"
                )

    def _by_rule(self, pair: EquationPair) -> Known | list[Known]:
        registered = RULES.get(pair.name, _NO_RULE)
        unknown = [x for x in pair.ins if x.kind is Kind.UNKNOWN]
        if unknown and not registered.knows_unknown:
            return unknown[0]
        if is_within(pair):
            return met_within(pair)
        if zeros.is_zero(pair):
            return [ZERO] * len(pair.rows_out)
        for value, axis in zip(pair.ins, pair.towers_in, strict=True):
            knows = value.kind in (Kind.STACKED, Kind.ZERO, Kind.UNKNOWN)
            if axis is not None and not knows:
                raise NotOfOneKindError(
                    f"no rule for an array with one entry per {nouns().one}"
                )
        if registered.by_element and _is_of_groups(pair):
            return _by_groups(pair, registered)
        if order := orders.order_of(pair, is_by_element=registered.by_element):
            found = self._asked(orders.as_in_order(pair), registered)
            return orders.in_order(pair, found, order)
        for value in pair.ins:
            if value.kind in SPECIAL - registered.kinds:
                if unknown:
                    return unknown[0]
                raise NotOfOneKindError(f"no rule for {pair.name} of {value}")
        return self._asked(pair, registered)

    def _asked(self, pair: EquationPair, registered: Registered) -> list[Known]:
        """The answers of a rule, which is given what it says that it is."""
        if registered.copies_as_rows:
            ins = [
                _as_rows(x) if axis is not None else x
                for x, axis in zip(pair.ins, pair.rows_in, strict=True)
            ]
            pair = pair.with_kinds(ins)
        found = registered.rule(pair)
        found = found if isinstance(found, list) else [found] * len(pair.rows_out)
        if registered.knows_identity:
            return found
        return [_without_identity(x) for x in found]

    def _checked(self, pair: EquationPair, result: int, value: Known) -> Known:
        """The kind of a result, checked against its shape, with its zeros."""
        if value.kind is Kind.UNKNOWN:
            return value
        has_rows = pair.rows_out[result] is not None
        if _HAS_ROWS.get(value.kind, has_rows) is not has_rows:
            return pair.unknown(f"{pair.name} makes {value}, but not in its shape")
        if why := widths.why_not_held(pair, result, value):
            return pair.unknown(why)
        has_towers = pair.towers_out[result] is not None
        if has_towers and value.kind not in (Kind.STACKED, Kind.ZERO):
            return pair.unknown(
                f"{pair.name} makes an array with one entry per {nouns().one}"
            )
        value = value._replace(in_padding=zeros.in_padding(pair, result, value))
        if value.kind in zeros.KNOWN_ZEROS:
            found = value.zeros | zeros.zeros_of(pair, result)
            if len(found) > _MOST_FLAGS:
                found &= {PADDING}
            value = value._replace(zeros=found)
        if value.kind is Kind.PART and value.fact is None:
            value = value._replace(fact=OneValue(self.new_identity()))
        if value.power and not isinstance(value.power, Power):
            line = _line_of_power(pair, value.power)
            value = value._replace(power=Power(value.power, line))
        return value


def _is_of_groups(pair: EquationPair) -> bool:
    """Whether the operands are the same groups of rows, or one number for all."""
    notes = {x.note for x in pair.ins if x.kind is Kind.SPREAD}
    others = [i for i, x in enumerate(pair.ins) if x.kind is not Kind.SPREAD]
    are_numbers = all(
        pair.ins[i].kind in (Kind.COPY, Kind.ZERO)
        and (pair.shape(i) == () or pair.constant(i) is not None)
        for i in others
    )
    return len(notes) == 1 and all(x.each for x in notes) and are_numbers


def _by_groups(pair: EquationPair, registered: Registered) -> Known:
    """The kind that an elementwise rule gives for groups of rows."""
    ins = [
        rows(x.power)._replace(zeros=x.zeros, in_padding=x.in_padding)
        if x.kind is Kind.SPREAD
        else x
        for x in pair.ins
    ]
    found = registered.rule(pair.with_kinds(ins))
    assert isinstance(found, Known)
    if found.kind is not Kind.ROWS:
        return found
    note = next(x.note for x in pair.ins if x.kind is Kind.SPREAD)
    return Known(Kind.SPREAD, found.power, note=note)


def _line_of_power(pair: EquationPair, power: Any) -> str:
    """The line where a result of the equation got its power."""
    lines = {x.power: x.power.line for x in pair.ins if isinstance(x.power, Power)}
    return lines.get(power) or user_line(pair.site)


def _renumbered(value: Known, found: _Walked, shift: int) -> Known:
    """The value with new identities in place of those that were new in a walk."""

    def new(x: Any) -> Any:
        if isinstance(x, Groups):
            return x._replace(order=new(x.order))
        if isinstance(x, OneValue):
            return OneValue(new(x.number))
        if isinstance(x, Flag | Count | HasRow):
            return dataclasses.replace(x, flag=new(x.flag))
        if isinstance(x, tuple):
            return tuple(map(new, x))
        is_identity = type(x) is Identity and found.start < x <= found.end
        return Identity(x + shift) if is_identity else x

    zeros = frozenset(map(new, value.zeros))
    return value._replace(fact=new(value.fact), note=new(value.note), zeros=zeros)


def _eqn_pairs(a: Any, b: Any) -> list[tuple[JaxprEqn, JaxprEqn]]:
    """The pairs of equations of both programs; raise if their structures differ."""
    pairs = list(zip(a.eqns, b.eqns, strict=False))
    for one, two in pairs:
        if one.primitive is not two.primitive or len(one.invars) != len(two.invars):
            line = user_line((one, None))
            at = f", at {line}" if line else ""
            raise ProgramsDifferError(
                f"the program differs between numbers of {nouns().many}{at}"
            )
    if len(a.eqns) != len(b.eqns):
        raise ProgramsDifferError(
            f"the program differs between numbers of {nouns().many}"
        )
    return pairs


def _as_rows(value: Known) -> Known:
    """The value as rows, if it is a copy that is constant along its rows."""
    return rows(value.power) if value.kind is Kind.COPY else value


def _without_identity(value: Known) -> Known:
    """The value with its kind and power alone."""
    note = None if value.kind is Kind.COPY else value.note
    return value._replace(zeros=NO_ZEROS, fact=None, note=note)


def is_same(x: Any, y: Any) -> bool:
    """Whether two parameters of equations are the same."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return np.array_equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _of_plain_copies(pair: EquationPair) -> Known:
    """A copy, for a pure function of copies that has no rule of its own."""
    primitive = pair.first.primitive
    axes = [*pair.rows_in, *pair.rows_out]
    is_apart = all(x is None for x in axes) and not named_axes(pair.first)
    is_function = primitive in PLAIN and not sub_jaxprs(pair.first)
    is_function &= not is_foreign(pair.first, None)
    if not (is_apart and is_function) or Kind.ROWS in pair.kinds:
        told = ", ".join(dict.fromkeys(map(str, pair.ins)))
        raise NotOfOneKindError(f"no rule for {pair.name} of {told}")
    return function_of(pair.ins, pair.name)._replace(zeros=NO_ZEROS)


_NO_RULE = Registered(_of_plain_copies, copies_as_rows=True)


def kinds_of_results(
    programs: tuple[Any, Any],
    ins: Sequence[Known],
    sizes: Sizes,
    axes: Sequence[str],
) -> list[Known]:
    """The kinds of the results of two programs, from the kinds of their inputs.

    Args:
      programs: Closed jaxprs, for ``sizes.towers`` towers.
      ins: The kinds of their inputs.
      sizes: The numbers of towers and of rows.
      axes: The names of the axis of all towers.

    Returns:
      One kind for each result; all are unknown if the programs' structures differ.
    """
    first, second = programs
    try:
        return Walk(sizes, axes).closed(first, second, ins)
    except ProgramsDifferError as error:
        unknown = Known(Kind.UNKNOWN, why=str(error))
        return [unknown] * len(open_jaxpr(first).outvars)
