"""A program without calls: equal equations become one, and constants are computed.

The calls of a program are written out. An equation that does the same to the same
values as an earlier one is that equation. Where constants decide what happens, the
program is simplified:

* whole numbers and flags are computed, such as the counter of ``optax.MultiSteps``;
* a `cond` or a `select_n` with a constant predicate is the case that it chooses;
* ``x + 0`` and ``x - 0`` are ``x``, and 0 times a finite value is 0.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.sites import Site
from towerjax.prover.equality.kinds.constants import ConstValue, real_number
from towerjax.prover.equality.loops.finite import FiniteValues
from towerjax.prover.equality.walk.walk import is_same

_CALLS = """jit pjit closed_call core_call checkpoint remat2 custom_jvp_call
    custom_vjp_call""".split()
_COMPUTED = frozenset(
    """add sub mul neg abs sign max min clamp rem div integer_pow eq ne lt le gt ge and
    or not xor select_n convert_element_type""".split()
)
_SUMS = "add add_any".split()


class Node(NamedTuple):
    """An equation of a program whose calls are written out.

    Values are numbered; an operand is such a number, or a constant.
    """

    eqn: JaxprEqn
    outer: Site | None
    ins: tuple[Any, ...]  # the number of each operand, or a constant
    outs: tuple[int, ...]
    program: Jaxpr

    @property
    def key(self) -> Any:
        """A key that is equal for equations of one primitive and the same operands.

        All constants count as equal.
        """
        return self.eqn.primitive, tuple(map(place_of, self.ins))

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the shape of the result with this index."""
        aval: Any = self.eqn.outvars[result].aval
        return aval.shape


def place_of(value: Any) -> Any:
    """Return the number of a value; for all constants the same number."""
    return "constant" if isinstance(value, ConstValue) else value


def whole_number(x: Any) -> int | None:
    """Return a constant as an int if it is a whole number; otherwise None."""
    is_number = isinstance(x, ConstValue) and x.is_scalar
    return int(x.array) if is_number and x.array.dtype.kind in "iu" else None


class Flat:
    """A program without calls, in which equal equations of equal values are one.

    Its values are numbered. ``sizes_of_rows`` are the sizes that a dim of rows may
    have.

    Attributes:
      nodes: The equations, in order.
      by_key: The equations of each `Node.key`.
      users: For each value, the equations that read it.
      names: A triple of program, variable and value, for each variable.
      zeros: The values that are 0 everywhere.
      not_finite: The equation whose result may be infinite or NaN and is multiplied by
        0, so that the product is not known to be 0; None if there is none.
      ins: The values of the arguments.
      outs: The values of the results.
    """

    def __init__(self, closed: Any, sizes_of_rows: Collection[int]) -> None:
        self.nodes: list[Node] = []
        self.by_key: dict[Any, list[Node]] = defaultdict(list)
        self.users: dict[Any, list[Node]] = defaultdict(list)
        self.names: list[tuple[Jaxpr, Any, Any]] = []
        self.zeros: set[int] = set()
        self.not_finite: Node | None = None
        self._times_zero = list[Any]()  # the values that are finite, times which 0 is 0
        self._made_by: dict[int, Node] = {}
        self._count = itertools.count()
        jaxpr = open_jaxpr(closed)
        self.ins = [next(self._count) for _ in jaxpr.invars]
        self._finite = FiniteValues(self.ins, sizes_of_rows)
        self.outs = self._run(closed, self.ins, None)

    def is_zero(self, value: Any) -> bool:
        """Return whether a value or a constant is 0 everywhere."""
        return value.is_zero if isinstance(value, ConstValue) else value in self.zeros

    def is_finite(self, value: Any) -> bool:
        """Return whether a value or a constant is finite if the arguments are."""
        return self._finite.is_finite(value)

    def assumed_finite(self) -> set[int]:
        """Return the results that must be finite, so that the zeros are right.

        They are results of gathers, which are finite if no index is out of bounds.
        """
        assumed = set[int]()
        waiting = [*self._times_zero]
        seen = set[Any]()
        while waiting:
            value = waiting.pop()
            if isinstance(value, ConstValue) or value in seen:
                continue
            seen.add(value)
            if value in self._finite.assumed:
                assumed.add(value)
            if value in self._made_by:
                waiting += self._made_by[value].ins
        return assumed

    def linear_in(self, bases: Sequence[int]) -> dict[int, tuple[float, ...]]:
        """Return the values that are linear in the values ``bases``, with factors.

        Each value is the sum of the bases times its factors. The bases are among the
        values. A factor is computed in float64 from the program's constants.
        """
        count = len(bases)
        factors = {
            base: tuple(float(i == place) for i in range(count))
            for place, base in enumerate(bases)
        }
        waiting = [out for base in bases for x in self.users[base] for out in x.outs]
        # A value comes after its operands, because these have lower numbers.
        heapq.heapify(waiting)
        seen = set[int]()
        while waiting:
            value = heapq.heappop(waiting)
            if value in seen:
                continue
            seen.add(value)
            node = self._made_by[value]
            combined = self._combined(node, factors, count)
            if combined is not None:
                factors[value] = combined
                for user in self.users[value]:
                    for out in user.outs:  # a print has none
                        heapq.heappush(waiting, out)
        return factors

    def _combined(
        self, node: Node, factors: dict[int, tuple[float, ...]], count: int
    ) -> tuple[float, ...] | None:
        """Return the factors of an equation's result, from those of its operands.

        The result is None if it is not linear in the ``count`` bases; see `linear_in`.
        """

        def of(x: Any) -> tuple[float, ...] | None:
            return (0.0,) * count if self.is_zero(x) else factors.get(place_of(x))

        name = node.eqn.primitive.name
        first = of(node.ins[0])
        if first is not None and name == "neg":
            return tuple(-x for x in first)
        if len(node.ins) != 2:
            return None
        second = of(node.ins[1])
        if name in (*_SUMS, "sub"):
            sign = -1.0 if name == "sub" else 1.0
            if first is None or second is None:
                return None
            return tuple(x + sign * y for x, y in zip(first, second, strict=True))
        number = real_number(node.ins[1])
        if name == "div" and first is not None and number:
            return tuple(x / number for x in first)
        if name == "mul" and first is not None and number is not None:
            return tuple(x * number for x in first)
        number = real_number(node.ins[0])
        if name == "mul" and second is not None and number is not None:
            return tuple(x * number for x in second)
        return None

    def _run(
        self, program: Any, operands: Sequence[Any], outer: Site | None
    ) -> list[Any]:
        """Add a program's equations, and return the numbers of its results."""
        jaxpr = open_jaxpr(program)
        consts = [ConstValue(x) for x in getattr(program, "consts", ())]
        names = [*jaxpr.constvars, *jaxpr.invars]
        env: dict[Any, Any] = dict(zip(names, [*consts, *operands], strict=True))

        def read(x: Any) -> Any:
            return ConstValue(x.val) if isinstance(x, Literal) else env[x]

        for eqn in jaxpr.eqns:
            outs = self._values(eqn, outer, tuple(map(read, eqn.invars)), jaxpr)
            env |= zip(eqn.outvars, outs, strict=True)
        self.names += [(jaxpr, var, value) for var, value in env.items()]
        return [*map(read, jaxpr.outvars)]

    def _values(
        self, eqn: JaxprEqn, outer: Site | None, ins: tuple[Any, ...], jaxpr: Jaxpr
    ) -> Sequence[Any]:
        """Return an equation's results as numbers or constants.

        The equation is added to the program, unless it can be computed or is a call.
        """
        name = eqn.primitive.name
        if name in _CALLS:
            called = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self._run(called, ins, (eqn, outer))
        if name == "cond" and isinstance(ins[0], ConstValue):
            branches = eqn.params["branches"]
            chosen = min(max(int(ins[0].array), 0), len(branches) - 1)
            return self._run(branches[chosen], ins[1:], (eqn, outer))
        same = [x for x in self._operands_that_it_is(eqn, ins) if _is_like(eqn, x)]
        if same:
            return [ins[same[0]]]
        if name in _COMPUTED and all(isinstance(x, ConstValue) for x in ins):
            if all(x.is_whole for x in ins):
                return [_computed(eqn, ins)]
        return self._node(eqn, outer, ins, jaxpr)

    def _operands_that_it_is(self, eqn: JaxprEqn, ins: Sequence[Any]) -> Iterator[int]:
        """Yield each operand to which the equation's result is equal."""
        name = eqn.primitive.name
        if _is_identity(eqn):
            yield 0
        elif name == "select_n" and isinstance(ins[0], ConstValue) and ins[0].is_whole:
            yield 1 + int(ins[0].array)
        elif name in (*_SUMS, "sub") and self.is_zero(ins[1]):
            yield 0
        elif name in _SUMS and self.is_zero(ins[0]):
            yield 1

    def _node(
        self, eqn: JaxprEqn, outer: Site | None, ins: tuple[Any, ...], jaxpr: Jaxpr
    ) -> tuple[int, ...]:
        """Add an equation, and return its results.

        If there is an equal equation, nothing is added, and the results are those of
        that equation.
        """
        outs = tuple(next(self._count) for _ in eqn.outvars)
        node = Node(eqn, outer, ins, outs, jaxpr)
        equal = [x for x in self.by_key[node.key] if _does_the_same(x, node)]
        if equal:
            return equal[0].outs
        self.nodes.append(node)
        self._made_by |= dict.fromkeys(outs, node)
        self.by_key[node.key].append(node)
        for x in {x for x in ins if not isinstance(x, ConstValue)}:
            self.users[x].append(node)
        if self._is_product_with_zero(node):
            self.zeros.update(outs)
        self._finite.add(eqn, ins, outs)
        return outs

    def _is_product_with_zero(self, node: Node) -> bool:
        """Return whether an equation's result is 0, because an operand is.

        It is 0 times a finite value, or a 0 that is repeated or reshaped.
        """
        if node.eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            return self.is_zero(node.ins[0])
        if node.eqn.primitive.name != "mul":
            return False
        if not any(map(self.is_zero, node.ins)):
            return False
        others = [x for x in node.ins if not self.is_finite(x)]
        if others and self.not_finite is None:
            self.not_finite = self._first_not_finite(others[0])
        if not others:
            self._times_zero += node.ins
        return not others

    def _first_not_finite(self, value: Any) -> Node | None:
        """Return the equation from which on a value may be infinite or NaN."""
        node = self._made_by.get(value)
        while node is not None:
            others = [x for x in node.ins if not self.is_finite(x)]
            before = self._made_by.get(others[0]) if others else None
            if before is None:
                break
            node = before
        return node


def _computed(eqn: JaxprEqn, ins: Sequence[ConstValue]) -> ConstValue:
    """Compute an equation whose operands are constants: whole numbers or flags."""
    with jax.ensure_compile_time_eval():
        operands = [jnp.asarray(x.value) for x in ins]
        results: Any = eqn.primitive.bind(*operands, **eqn.params)
    return ConstValue(np.asarray(results))


def _is_like(eqn: JaxprEqn, operand: int) -> bool:
    """Return whether an operand has the shape and dtype of the equation's result."""
    before: Any = eqn.invars[operand].aval
    after: Any = eqn.outvars[0].aval
    return (before.shape, before.dtype) == (after.shape, after.dtype)


def _is_identity(eqn: JaxprEqn) -> bool:
    """Return whether a result equals operand 0 if both have one shape and dtype.

    Examples are a conversion of the dtype, and a slice of all elements.
    """
    name = eqn.primitive.name
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    if name == "reshape":
        return eqn.params["dimensions"] is None
    if name == "slice":
        return set(eqn.params["strides"] or [1]) == {1}
    return name in ("concatenate", "split", "copy", "convert_element_type")


def _does_the_same(x: Node, y: Node) -> bool:
    """Return whether two equations have the same results; `Node.key` is equal."""
    pairs = zip(x.ins, y.ins, strict=True)
    is_equal = all(a.is_same(b) for a, b in pairs if isinstance(a, ConstValue))
    return is_equal and all(
        a is b or (_is_plain(a) and is_same(a, b)) for a, b in _params(x, y)
    )


def params_agree(x: Node, y: Node) -> bool:
    """Return whether two equations have equal params.

    Params that are programs or functions are not compared.
    """
    return all(a is b or not _is_plain(a) or is_same(a, b) for a, b in _params(x, y))


def _params(x: Node, y: Node) -> list[tuple[Any, Any]]:
    """Return pairs of the params of two equations that have the same name."""
    keys = x.eqn.params.keys() | y.eqn.params.keys()
    return [(x.eqn.params.get(k), y.eqn.params.get(k)) for k in keys]


def _is_plain(param: Any) -> bool:
    """Return whether a param is neither a function nor a program."""
    return not (callable(param) or hasattr(param, "eqns") or hasattr(param, "jaxpr"))
