"""Run the towers of a device by ``vmap``, and sum their results in one operation.

The sum over towers of matrix products is one product, which also contracts the towers'
dim; that of convolutions is one convolution, and that of rows scattered into zeros, as
the gradient of a lookup, is one scatter of all rows. `jax.vmap` would compute ``k``
results and hold them all: for gradients, ``k`` times the parameters. The same is done
inside ``jit`` and ``checkpoint``, and in each step of a ``scan``.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.placement import LOCAL_AXIS
from towerjax.proof.equation import (
    all_eqns,
    loop_sizes,
    named_axes,
    open_jaxpr,
    refs,
    sub_jaxprs,
)
from towerjax.proof.interpreter import Interpreter, eqn_context
from towerjax.towers.fused_sums import apply_linear, fused_sum, is_linear
from towerjax.types import PyTree

Operands = Sequence[jax.Array]
Part = Callable[[Operands], jax.Array]


def vmap_and_sum(
    program: ClosedJaxpr,
    own: Sequence[jax.Array],
    common: Sequence[Any],
    num_sums: int,
    size: int,
) -> list[jax.Array]:
    """Run one tower's program for ``size`` towers: sums, then others ``[k, ...]``.

    ``own`` are its first arguments, ``[k, ...]``; all towers share the others. The
    first ``num_sums`` results are summed.
    """
    plan = SumPlan(program.jaxpr, len(own), num_sums)
    opened = {id(eqn): _with_sums(eqn, sums) for eqn, sums in plan.opened.values()}
    kept = program.jaxpr.outvars[num_sums:]

    def of_tower(number: jax.Array, *own: jax.Array) -> list[jax.Array]:
        walk = Interpreter(program, [*own, *common])
        for eqn in program.jaxpr.eqns:
            if id(eqn) in opened:
                with eqn_context(eqn):
                    out = opened[id(eqn)](number, *map(walk.read, eqn.invars))
                walk.values.update(zip(eqn.outvars, out, strict=True))
            else:
                walk.evaluate(eqn)
        return [jnp.asarray(walk.read(x)) for x in (*kept, *plan.operands)]

    axes = [0] * len(kept) + [None if one else 0 for one in plan.is_sum]
    towers = jax.vmap(of_tower, out_axes=axes, axis_name=LOCAL_AXIS)
    # Numbered, since no argument may be a tower's own.
    out = towers(jnp.arange(size), *own)
    operands = out[len(kept) :]
    sums = [reduce(operator.add, [x(operands) for x in one]) for one in plan.sums]
    return [*sums, *out[: len(kept)]]


def with_leading_dim(fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
    """``fn(value)``, computed with a leading dim of size 1, as in a state's rows.

    XLA:CPU copies a value, at every step, if its update has another shape than the
    state's. Scalars stay ``()``: with a divisor ``[1]`` bits would depend on ``D``.
    """
    axes = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, value)
    given = jax.tree.map(lambda x: x[None] if jnp.ndim(x) else x, value)
    out = jax.vmap(fn, in_axes=(axes,), axis_size=1)(given)
    return jax.tree.map(lambda x: x[0], out)


class SumPlan:
    """How to compute the sums of a program's first results from values inside it.

    Attributes:
      operands: The values that sums are computed from.
      is_sum: Whether an opened equation has already summed each operand over towers.
      sums: For each sum its parts.
      opened: Equations with an inner program, by ``id``, and their results to sum.
    """

    def __init__(self, body: Jaxpr, num_own: int, num_sums: int) -> None:
        self.operands: list[Any] = []
        self.is_sum: list[bool] = []
        self.opened: dict[int, tuple[JaxprEqn, set[int]]] = {}
        self._carried: dict[int, set[int]] = {}
        self._own = dependents(body, body.invars[:num_own])
        self._uses = _uses_in(body)
        self._made = {x: eqn for eqn in body.eqns for x in eqn.outvars}
        sums = body.outvars[:num_sums]
        self.sums = [self._parts(x) or [self._rows([x])] for x in sums]

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, Var) and value in self._own  # a literal has no hash

    def _take(self, value: Any, *, is_sum: bool = False) -> int:
        """Add a value to the operands, and return its index."""
        self.operands.append(value)
        self.is_sum.append(is_sum)
        return len(self.operands) - 1

    def _rows(self, values: Sequence[Any]) -> Part:
        return partial(_added_part, [self._take(x) for x in values])

    def _parts(self, value: Any) -> list[Part]:
        """The parts of the sum of a value; none where each tower best computes it."""
        parts, rest, left = [], [], [value]
        while left:  # a chain of additions, one for each use of a parameter
            value = left.pop()
            once = isinstance(value, Var) and self._uses[value] == 1
            eqn = self._made.get(value) if once else None
            if eqn and _is_addition(eqn):
                left += reversed(eqn.invars)
            elif eqn and (found := fused_sum(eqn, self._is_own, self._made)):
                merge, given = found
                given = [self._take(x) for x in given]
                parts.append(partial(_fused_part, merge, eqn, given))
            elif eqn and is_linear(eqn) and (before := self._parts(eqn.invars[0])):
                parts += [partial(_linear_part, eqn, part) for part in before]
            elif eqn and self._is_own(value) and self._adds_inside(eqn, value):
                sums = self.opened.setdefault(id(eqn), (eqn, set()))[1]
                sums.add(eqn.outvars.index(value))
                parts.append(operator.itemgetter(self._take(value, is_sum=True)))
            else:
                rest.append(value)
        return [*parts, self._rows(rest)] if parts and rest else parts

    def _adds_inside(self, eqn: JaxprEqn, value: Any) -> bool:
        """Whether the inner program can sum this result of an equation over towers."""
        if eqn.primitive.name in ("jit", "remat2"):
            return True
        if eqn.primitive.name != "scan":
            return False
        if id(eqn) not in self._carried:
            self._carried[id(eqn)] = _carried_sums(eqn)
        number, (_, num_carry) = eqn.outvars.index(value), loop_sizes(eqn)
        return number >= num_carry or number in self._carried[id(eqn)]


def dependents(body: Jaxpr, given: Sequence[Any]) -> set[Any]:
    """The values that depend on ``given``, or on an axis of towers, and so differ."""
    found: set[Any] = set(given)
    for eqn in body.eqns:
        is_own = any(isinstance(x, Var) and x in found for x in eqn.invars)
        if is_own or _names_local_axis(eqn):
            found.update([*eqn.outvars, *refs(eqn)])
    return found


def _names_local_axis(eqn: JaxprEqn) -> bool:
    """Whether the equation, or one inside it, runs over the towers of a device."""
    inside = itertools.chain.from_iterable(map(all_eqns, sub_jaxprs(eqn)))
    return any(LOCAL_AXIS in named_axes(x) for x in itertools.chain([eqn], inside))


def _is_addition(eqn: JaxprEqn) -> bool:
    """Whether an equation adds values of one shape, without broadcasting."""
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    is_sum = eqn.primitive.name in ("add", "add_any")
    return is_sum and all(x.shape == avals[0].shape for x in avals)


def _uses_in(body: Jaxpr) -> Counter[Any]:
    uses = Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, Var))
    return uses + Counter(x for x in body.outvars if isinstance(x, Var))


def _fused_part(
    merge: Callable[..., jax.Array],
    eqn: JaxprEqn,
    taken: Sequence[int],
    given: Operands,
) -> jax.Array:
    return merge(eqn, *[given[i] for i in taken])


def _linear_part(eqn: JaxprEqn, part: Part, given: Operands) -> jax.Array:
    return apply_linear(eqn, part(given))


def _added_part(rows: Sequence[int], given: Operands) -> jax.Array:
    return _add_rows(reduce(operator.add, [given[i] for i in rows]))


def _add_rows(x: jax.Array) -> jax.Array:
    # XLA:CPU fuses a sum with the product that it adds up, and then computes both
    # element by element: 2 to 5 times slower than additions.
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return add_pairwise(x)
    return x.sum(axis=0, dtype=x.dtype)


def _carried_sums(eqn: JaxprEqn) -> set[int]:
    """The carries of a scan that each step only adds to, and does not read."""
    body, (first, num_carry) = open_jaxpr(eqn.params["jaxpr"]), loop_sizes(eqn)
    uses, made = _uses_in(body), {x: e for e in body.eqns for x in e.outvars}
    found = set()
    for number in range(num_carry):
        carry, left = body.invars[first + number], [body.outvars[number]]
        while left:
            value = left.pop()
            if not isinstance(value, Var) or uses[value] != 1:
                continue
            if value is carry:
                found.add(number)
            elif value in made and _is_addition(made[value]):
                left += made[value].invars
    return found


def _with_sums(eqn: JaxprEqn, sums: set[int]) -> Callable[..., Any]:
    """An equation with an inner program, for which ``vmap`` sums some results.

    ``of_tower`` is mapped, so that the rule runs even if all towers share the rest.
    """

    @jax.custom_batching.custom_vmap
    def one(of_tower: jax.Array, *given: jax.Array) -> list[jax.Array]:
        return eqn.primitive.bind(*given, **eqn.params)

    @one.def_vmap
    def of_all(size: int, are_own: list[bool], *all_given: Any) -> Any:
        (_, *is_own), (_, *given) = are_own, all_given
        if eqn.primitive.name == "scan":
            return _scan_on_all(eqn, sums, is_own, given, size)
        out = _call_on_all(eqn, sums, is_own, given, size)
        return out, [i not in sums for i in range(len(out))]

    return one


def _call_on_all(
    eqn: JaxprEqn, sums: set[int], is_own: list[bool], given: list[Any], size: int
) -> list[jax.Array]:
    program = eqn.params["jaxpr"]
    if eqn.primitive.name == "remat2":
        if not isinstance(program, ClosedJaxpr):
            program = ClosedJaxpr(program, ())
        # A barrier, so that XLA does not use the values of the forward pass instead.
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            given = lax.optimization_barrier(given)
    return _vmap_any_order(program, sums, is_own, given, size)


def _vmap_any_order(
    program: ClosedJaxpr,
    sums: set[int],
    is_own: Sequence[bool],
    given: Sequence[Any],
    size: int,
) -> list[jax.Array]:
    """`vmap_and_sum` with towers' own arguments, and sums, in any position."""
    body = program.jaxpr
    order = sorted(range(len(given)), key=lambda i: not is_own[i])
    results = sorted(range(len(body.outvars)), key=lambda i: i not in sums)
    body = body.replace(
        invars=[body.invars[i] for i in order],
        outvars=[body.outvars[i] for i in results],
    )
    values, num_own = [given[i] for i in order], sum(is_own)
    own, common = values[:num_own], values[num_own:]
    out = vmap_and_sum(program.replace(jaxpr=body), own, common, len(sums), size)
    return [out[results.index(i)] for i in range(len(out))]


def _scan_on_all(
    eqn: JaxprEqn, sums: set[int], is_own: list[bool], given: list[Any], size: int
) -> tuple[list[jax.Array], list[bool]]:
    """Scan all towers, summing in each step; and which results are ``[k, ...]``."""
    params, program = eqn.params, eqn.params["jaxpr"]
    first, number = loop_sizes(eqn)
    own, own_out = _own_in_scan(eqn, sums, is_own)
    consts, xs = given[:first], given[first + number :]

    def initial(i: int) -> jax.Array:
        # A scan of a number starts from a literal, which has no shape.
        x, has_towers = jnp.asarray(given[first + i]), is_own[first + i]
        if i in sums:
            return _add_rows(x) if has_towers else x * jnp.asarray(size, x.dtype)
        if own_out[i] and not has_towers:
            return jnp.broadcast_to(x, (size, *x.shape))
        return x

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        seen = [jnp.zeros_like(x) if i in sums else x for i, x in enumerate(carry)]
        out = _vmap_any_order(program, sums, own, [*consts, *seen, *xs], size)
        out = [x if i in sums or own_out[i] else x[0] for i, x in enumerate(out)]
        new = [x + out[i] if i in sums else out[i] for i, x in enumerate(carry)]
        return new, out[number:]

    carry, ys = lax.scan(
        step,
        [initial(i) for i in range(number)],
        [_swap_axes(x, is_own[first + number + i]) for i, x in enumerate(xs)],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    has_towers = [x and i not in sums for i, x in enumerate(own_out)]
    ys = [_swap_axes(y, has_towers[number + i]) for i, y in enumerate(ys)]
    return [*carry, *ys], has_towers


def _swap_axes(x: Any, has_towers: bool) -> Any:
    """Swap the dims of steps and of towers, where there are towers."""
    return jnp.swapaxes(x, 0, 1) if has_towers else x


def _own_in_scan(
    eqn: JaxprEqn, sums: set[int], is_own: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Whether each argument and result of a scan's step differs between towers."""
    body, own = open_jaxpr(eqn.params["jaxpr"]), list(is_own)
    first, number = loop_sizes(eqn)
    while True:
        for i in range(number):
            own[first + i] &= i not in sums  # all towers share a sum
        pairs = zip(body.invars, own, strict=True)
        found = dependents(body, [x for x, one in pairs if one])
        out = [isinstance(x, Var) and x in found for x in body.outvars]
        out = [x or (i < number and own[first + i]) for i, x in enumerate(out)]
        carry = [x and i not in sums for i, x in enumerate(out[:number])]
        if carry == own[first : first + number]:
            return own, out
        own[first : first + number] = carry
