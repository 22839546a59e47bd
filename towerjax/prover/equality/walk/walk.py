"""Walk two programs of one tower side by side, and find the kind of every value."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs.flow import is_ref
from towerjax.jaxprs.params import is_foreign, named_axes, open_jaxpr, sub_jaxprs
from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import user_line
from towerjax.prover.equality.answers.reasons import reason_of_equation
from towerjax.prover.equality.kinds import widths, zeros
from towerjax.prover.equality.kinds.constants import kind_of_constant
from towerjax.prover.equality.kinds.equation_pair import (
    EquationPair,
    ProgramsDifferError,
    Scope,
    Sizes,
    failed,
)
from towerjax.prover.equality.kinds.joined import Joined
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    PADDING,
    SAME_FOR_ALL,
    ZERO,
    AtLeast,
    Buffer,
    Columns,
    Copy,
    Counter,
    FirstRow,
    GroupDims,
    Groups,
    Identity,
    Kind,
    Mean,
    NotOfOneKindError,
    OneValue,
    Part,
    Power,
    Row,
    RowNumbers,
    RowOrder,
    SoFar,
    TowerId,
    TowerRows,
    Unknown,
    Zero,
    function_of,
    rows_as,
)
from towerjax.prover.equality.kinds.stacked import Dealt, Slots, Stacked
from towerjax.prover.equality.rules import orders
from towerjax.prover.equality.rules.rules import BY_ELEMENT, RULES, refused, rule_for
from towerjax.prover.equality.rules.within import is_within, met_within
from towerjax.prover.equality.walk.aligned import aligned
from towerjax.prover.equality.walk.compared import other_params

# Values of the kinds _WITH_ROWS have a dim of rows; those of _IN_TRIPS and
# _WITHOUT_ROWS have none. Values of all other kinds may have one. Values of the kinds
# _WITH_TOWERS may have a dim of towers.
_WITH_ROWS: TypeAlias = TowerRows | RowNumbers | Columns | Buffer | RowOrder
_WITH_TOWERS: TypeAlias = Stacked | Slots | Joined | Zero | Unknown
_IN_TRIPS: TypeAlias = Row | SoFar | Counter
_WITHOUT_ROWS: TypeAlias = (
    _IN_TRIPS | Part | EXTREME | Mean | AtLeast | TowerId | FirstRow
)

# Maps and calls. Their programs are walked themselves, so they take a `Joined` array,
# and an equation inside of them tells why the size of a result fits no kind.
_RUN_PROGRAMS = frozenset(
    "shard_map jit pjit closed_call core_call remat remat2 checkpoint".split()
)
_TOP = Scope()
_MOST_FLAGS = 8  # the most flags that a kind's `zeros` keeps; more would cost time


class _Walked(NamedTuple):
    """The results of a walk of two programs, and the identities it created.

    These are the numbers after ``start`` up to ``end``. ``programs`` are the two.
    """

    out: list[Kind]
    start: int
    end: int
    programs: tuple[Any, Any]


class Walk:
    """A walk through two programs of one function, for two numbers of towers.

    It pairs their equations and finds the kind of each value. ``axes`` are the names of
    the axis of all towers; a tuple names axes that together have all towers, in order.
    ``alone`` are the names of axes that have one device. With ``has_keys``, a tower's
    own key stands for one key per row. The batch's rows are in the order in which
    ``dealt`` gives them to the towers, one tower after another.

    Attributes:
      kinds: For each first program, by its id: the kinds of its variables.
    """

    def __init__(
        self,
        sizes: Sizes,
        axes: Sequence[str | tuple[str, ...]],
        *,
        has_keys: bool,
        alone: frozenset[str] = frozenset(),
        dealt: Dealt = TowerRows,
    ) -> None:
        self.sizes = sizes
        self.axes = frozenset((x,) if isinstance(x, str) else x for x in axes)
        self.has_keys = has_keys
        self.kinds: dict[int, dict[Any, Kind]] = {}
        self.alone = alone
        self.dealt = dealt
        self._known: dict[Any, _Walked] = {}
        self._count = 0

    def has_padding(self, zeros: frozenset[Any]) -> bool:
        """Return whether padding rows may hold something other than 0.

        ``zeros`` are the places where the value is known to be 0.
        """
        return self.sizes.padded and PADDING not in zeros

    def new_identity(self) -> Identity:
        """Make a new identity, which no other value has."""
        self._count += 1
        return Identity(self._count)

    def closed(
        self, first: Any, second: Any, ins: Sequence[Kind], scope: Scope = _TOP
    ) -> list[Kind]:
        """Walk two programs, from the kinds of their arguments to those of results.

        Two programs are walked once for the same kinds of arguments. A second call with
        such kinds returns the same kinds, but with new identities, because its
        arguments may be other values.
        """
        key = id(first), id(second), tuple(ins), scope._replace(site=None)
        if key not in self._known:
            a, b = [getattr(x, "consts", ()) for x in (first, second)]
            if len(a) != len(b):
                raise ProgramsDifferError(
                    "the program closes over other arrays for another number of {many}"
                )
            consts = [self.constant(*pair) for pair in zip(a, b, strict=True)]
            start = self._count
            out = self._run(first, second, [*consts, *ins], scope)
            # The cache's keys have ids of the programs. A reference to the programs
            # keeps these ids from being used again.
            programs = first, second
            self._known[key] = _Walked(out, start, self._count, programs)
            return out
        walked = self._known[key]
        shift = self._count - walked.start
        self._count += walked.end - walked.start
        return [_renumbered(x, walked, shift) for x in walked.out]

    def _run(
        self, first: Any, second: Any, ins: Sequence[Kind], scope: Scope
    ) -> list[Kind]:
        one, two = aligned(open_jaxpr(first), open_jaxpr(second), self.sizes)
        # The kind of each value, by its variables in the two programs.
        known = dict(zip(zip(one.inputs, two.inputs, strict=True), ins, strict=True))

        def read(x: Any, y: Any) -> Kind:
            if isinstance(x, Literal):
                return self.constant(x.val, y.val)
            return known[x, y]

        for pair in zip(one.eqns, two.eqns, strict=True):
            read_by = zip(*[x.invars for x in pair], strict=True)
            operands = [read(*both) for both in read_by]
            outs = self.equation(*pair, operands, scope)
            results = zip(*[x.outvars for x in pair], strict=True)
            known |= zip(results, outs, strict=True)
        # A variable may be in several pairs: its first kind is recorded.
        kinds = {x: value for (x, _), value in [*known.items()][::-1]}
        self.kinds[id(open_jaxpr(first))] = kinds
        return [read(*both) for both in zip(one.results, two.results, strict=True)]

    def constant(self, first: Any, second: Any) -> Kind:
        """Compare a constant of the two programs; see `kind_of_constant`."""
        return kind_of_constant(self.sizes, first, second)

    def equation(
        self, one: JaxprEqn, two: JaxprEqn, ins: Sequence[Kind], scope: Scope
    ) -> list[Kind]:
        """Apply a rule to an equation; its results are unknown if none fits."""
        pair = EquationPair(self, one, two, scope, ins, (), (), (), ())
        count = len(one.outvars)
        try:
            pair = self._with_axes(pair)
            kinds = self._by_rule(pair)
            return [self._checked(pair, i, value) for i, value in enumerate(kinds)]
        except NotOfOneKindError as error:
            reason = error.reason or reason_of_equation(pair)
            return [pair.unknown(str(error), reason)] * count
        except ProgramsDifferError as error:
            # An operand of a size that fits no kind is unknown, for the first reason.
            has_sizes = len(pair.rows_in) == len(ins)
            before = [] if has_sizes else [x for x in ins if isinstance(x, Unknown)]
            return [*before, pair.unknown_by(error)][:1] * count
        except Exception as error:  # A fault in a rule must not end a user's training.
            return [pair.unknown(failed(error))] * count

    def _with_axes(self, pair: EquationPair) -> EquationPair:
        self._refuse_other_params(pair)
        operands = zip(pair.first.invars, pair.second.invars, strict=True)
        results = zip(pair.first.outvars, pair.second.outvars, strict=True)
        is_run = pair.name in _RUN_PROGRAMS
        of_result = self._axes_if_known if is_run else self._axes
        ins = [self._axes(*both) for both in operands]
        outs = [of_result(*both) for both in results]
        return dataclasses.replace(
            pair,
            rows_in=[x for x, _ in ins],
            towers_in=[x for _, x in ins],
            rows_out=[x for x, _ in outs],
            towers_out=[x for _, x in outs],
        )

    def _axes(self, x: Any, y: Any) -> tuple[int | None, int | None]:
        return (None, None) if is_ref(x) else self.sizes.axes(x.aval, y.aval)

    def _axes_if_known(self, x: Any, y: Any) -> tuple[int | None, int | None]:
        try:
            return self._axes(x, y)
        except ProgramsDifferError:
            return None, None

    def _refuse_other_params(self, pair: EquationPair) -> None:
        # The param "perm" lists pairs of towers, so it differs. The rule for `ppermute`
        # checks it.
        of_rule = set() if is_within(pair) else {"perm"}
        for key in other_params(pair.first, pair.second):
            if key not in of_rule:
                raise ProgramsDifferError(
                    f"{key} of {pair.name} depends on the number of {{many}}"
                )

    def _by_rule(self, pair: EquationPair) -> list[Kind]:
        """Apply the rule that accepts an equation."""
        unknown = [x for x in pair.ins if isinstance(x, Unknown)]
        if unknown and rule_for(pair) is None:
            first = unknown[0]
            if not first.has_line:  # It is a constant or an argument, for example.
                first = pair.unknown(first.why, first.reason)
            return [first] * len(pair.rows_out)
        joined = [x for x in pair.ins if isinstance(x, Joined)]
        if joined and pair.name not in _RUN_PROGRAMS:
            return [joined[0].outside] * len(pair.rows_out)
        if is_within(pair):
            return met_within(pair)
        if zeros.is_zero(pair):
            return [ZERO] * len(pair.rows_out)
        for value, axis in zip(pair.ins, pair.towers_in, strict=True):
            if axis is not None and not isinstance(value, _WITH_TOWERS):
                raise NotOfOneKindError("no rule for an array with one entry per {one}")
        if pair.name in BY_ELEMENT and _is_of_groups(pair):
            return _by_groups(pair)
        if layout := orders.order_of(pair):
            kinds = _by_its_rule(orders.as_in_order(pair))
            return orders.in_order(pair, kinds, layout)
        return _by_its_rule(pair)

    def _checked(self, pair: EquationPair, result: int, value: Kind) -> Kind:
        """Refuse a kind that contradicts its result's shape, and add its zeros."""
        if isinstance(value, Unknown | Joined):
            return value
        if pair.name in _RUN_PROGRAMS:
            self._axes(pair.first.outvars[result], pair.second.outvars[result])
        has_rows = pair.rows_out[result] is not None
        if isinstance(value, _WITHOUT_ROWS if has_rows else _WITH_ROWS):
            return pair.unknown(
                f"the result of {pair.name} is {value}, which does not fit its shape"
            )
        if why := widths.why_not_held(pair, result, value):
            return pair.unknown(why)
        has_towers = pair.towers_out[result] is not None
        if has_towers and not isinstance(value, _WITH_TOWERS):
            why = f"{pair.name} makes an array with one entry per {{one}}"
            return pair.unknown(why, reason_of_equation(pair))
        value = value.replace(in_padding=zeros.in_padding(pair, result, value))
        if isinstance(value, zeros.KNOWN_ZEROS):
            places = value.zeros | zeros.zeros_of(pair, result)
            if len(places) > _MOST_FLAGS:
                places &= {PADDING}
            value = value.replace(zeros=places)
        if isinstance(value, Part) and value.fact is None:
            value = value.replace(fact=OneValue(self.new_identity()))
        if value.power and not isinstance(value.power, Power):
            line = _line_of_power(pair, value.power)
            value = value.replace(power=Power(value.power, line))
        return value


def _by_its_rule(pair: EquationPair) -> list[Kind]:
    """Apply the rule that fits the operands of an equation."""
    asked = rule_for(pair)
    if asked is not None:
        registered, pair = asked
        return registered.ask(pair)
    if pair.name in RULES:
        raise refused(pair)
    return [_of_plain_copies(pair)] * len(pair.rows_out)


def _is_of_groups(pair: EquationPair) -> bool:
    """Return whether the operands are rows along the same several dims, or scalars."""
    layouts = {x.layout for x in pair.ins if isinstance(x, Groups)}
    others = [i for i, x in enumerate(pair.ins) if not isinstance(x, Groups)]
    are_numbers = all(
        isinstance(pair.ins[i], SAME_FOR_ALL)
        and (pair.shape(i) == () or pair.constant(i) is not None)
        for i in others
    )
    return len(layouts) == 1 and all(x.by_row for x in layouts) and are_numbers


def _by_groups(pair: EquationPair) -> list[Kind]:
    """Apply an elementwise rule to rows along several dims."""
    ins = [rows_as(x) if isinstance(x, Groups) else x for x in pair.ins]
    layout = next(x.layout for x in pair.ins if isinstance(x, Groups))
    return [
        Groups(x.power, layout=layout) if isinstance(x, TowerRows) else x
        for x in _by_its_rule(pair.with_kinds(ins))
    ]


def _line_of_power(pair: EquationPair, power: Any) -> str:
    """Find the line where a result of the equation got its power of T."""
    lines = {x.power: x.power.line for x in pair.ins if isinstance(x.power, Power)}
    return lines.get(power) or user_line(pair.site)


def _renumbered(value: Kind, walked: _Walked, shift: int) -> Kind:
    """Give a kind from an earlier walk new identities.

    Those that the walk created are moved by ``shift``; all others stay.
    """

    def new(x: Any) -> Any:
        if isinstance(x, Identity):
            return Identity(x + shift) if walked.start < x <= walked.end else x
        if isinstance(x, GroupDims):
            return x._replace(order=new(x.order))
        if isinstance(x, tuple):
            return tuple(map(new, x))
        if isinstance(x, frozenset):
            return frozenset(map(new, x))
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        fields = {y.name: getattr(x, y.name) for y in dataclasses.fields(x)}
        changed = {name: new(y) for name, y in fields.items()}
        return x if changed == fields else dataclasses.replace(x, **changed)

    return new(value)


def _of_plain_copies(pair: EquationPair) -> Kind:
    """Apply a pure function that has no rule, to replicated values.

    All its operands must be replicated, or values of one row in a loop over rows.
    """
    primitive = pair.first.primitive
    axes = [*pair.rows_in, *pair.rows_out]
    is_apart = all(x is None for x in axes) and not named_axes(pair.first)
    is_function = primitive in PLAIN and not sub_jaxprs(pair.first)
    is_function &= not is_foreign(pair.first, None)
    if not (is_apart and is_function and pair.are(Copy | Row | Zero)):
        raise refused(pair)
    return function_of(pair.ins, pair.name).without_identity()


def kinds_of_results(
    programs: tuple[Any, Any],
    ins: Sequence[Kind],
    sizes: Sizes,
    axes: Sequence[str],
) -> list[Kind]:
    """Walk two programs, from the kinds of their inputs to those of results.

    Args:
      programs: Two closed jaxprs, for the two numbers in ``sizes.towers``.
      ins: The kinds of their inputs.
      sizes: The numbers of towers and of rows in the two programs.
      axes: The names of the axis of all towers.

    Returns:
      One kind for each result. All are unknown if the programs' structures differ.
    """
    first, second = programs
    try:
        return Walk(sizes, axes, has_keys=True).closed(first, second, ins)
    except ProgramsDifferError as error:
        unknown = Unknown(why=str(error), reason=error.reason)
        return [unknown] * len(open_jaxpr(first).outvars)
