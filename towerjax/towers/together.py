"""How do the towers of a device run together? By ``vmap``, and their sums at once.

The sum over towers of products of two matrices is one product, which contracts the
towers' dim too; that of convolutions is one convolution, and of rows added into zeros,
as a lookup's gradient, all rows are added into the same. `jax.vmap` would make ``k`` of
each and hold them all: of gradients ``k`` times the parameters. So it is inside of
``jit``, of ``checkpoint`` and in each step of a ``scan``, too.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from towerjax.mesh.placement import LOCAL_AXIS
from towerjax.proof.equation import loop_sizes, open_jaxpr
from towerjax.proof.walk import Walk, as_written
from towerjax.towers.at_once import at_once, handed_on, hands_on
from towerjax.types import PyTree

Operands = Sequence[jax.Array]
Add = Callable[[jax.Array], jax.Array]
Part = Callable[[Operands, Add], jax.Array]


def together(
    program: ClosedJaxpr,
    own: Sequence[jax.Array],
    common: Sequence[Any],
    num_sums: int,
    add: Add,
) -> list[jax.Array]:
    """What one tower's program returns, of all towers, ``[k, ...]``, its sums added.

    ``own`` are its first arguments, ``[k, ...]``, and the others those of all towers;
    sums are the first ``num_sums`` of its results, which ``add`` adds up.
    """
    cut = Cut(program.jaxpr, len(own), num_sums)
    opened = {id(eqn): _opened(eqn, sums, add) for eqn, sums in cut.opened.values()}
    kept = program.jaxpr.outvars[num_sums:]

    def of_tower(*own: jax.Array) -> list[jax.Array]:
        walk = Walk(program, [*own, *common])
        for eqn in program.jaxpr.eqns:
            if id(eqn) in opened:
                with as_written(eqn):
                    out = opened[id(eqn)](own[0], *map(walk.read, eqn.invars))
                walk.values.update(zip(eqn.outvars, out, strict=True))
            else:
                walk.evaluate(eqn)
        return [jnp.asarray(walk.read(x)) for x in (*kept, *cut.operands)]

    axes = [0] * len(kept) + [None if one else 0 for one in cut.is_sum]
    out = jax.vmap(of_tower, out_axes=axes, axis_name=LOCAL_AXIS)(*own)
    operands = out[len(kept) :]
    sums = [reduce(operator.add, [x(operands, add) for x in one]) for one in cut.sums]
    return [*sums, *out[: len(kept)]]


def as_one_of_several(fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
    """``fn(value)``, computed with a dim before: as a state has one tower's value.

    What is updated in another shape than the state's XLA:CPU copies, at every step.
    Numbers stay ``()``: divided by one of ``[1]`` bits would depend on ``D``.
    """
    axes = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, value)
    given = jax.tree.map(lambda x: x[None] if jnp.ndim(x) else x, value)
    out = jax.vmap(fn, in_axes=(axes,), axis_size=1)(given)
    return jax.tree.map(lambda x: x[0], out)


class Cut:
    """A program without its sums: of what they are made, and how.

    Attributes:
      operands: The values of which sums are made.
      is_sum: Which of these an opened equation has added up over towers.
      sums: For each sum its parts.
      opened: Equations that hold a program, by ``id``, and which results are sums.
    """

    def __init__(self, body: Jaxpr, num_own: int, num_sums: int) -> None:
        self.operands: list[Any] = []
        self.is_sum: list[bool] = []
        self.opened: dict[int, tuple[JaxprEqn, set[int]]] = {}
        self._running: dict[int, set[int]] = {}
        self._own = depending(body, body.invars[:num_own])
        self._uses = _uses_in(body)
        self._made = {x: eqn for eqn in body.eqns for x in eqn.outvars}
        sums = body.outvars[:num_sums]
        self.sums = [self._parts(x) or [self._rows([x])] for x in sums]

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, Var) and value in self._own  # a literal has no hash

    def _taken(self, value: Any, *, is_sum: bool = False) -> int:
        self.operands.append(value)
        self.is_sum.append(is_sum)
        return len(self.operands) - 1

    def _rows(self, values: Sequence[Any]) -> Part:
        return partial(_rows, [self._taken(x) for x in values])

    def _parts(self, value: Any) -> list[Part]:
        """What adds a value up; of what is best done by each tower for itself none."""
        parts, rest, left = [], [], [value]
        while left:  # a chain of sums, as long as a parameter is often used
            value = left.pop()
            once = isinstance(value, Var) and self._uses[value] == 1
            eqn = self._made.get(value) if once else None
            if eqn and _adds(eqn):
                left += reversed(eqn.invars)
            elif eqn and (found := at_once(eqn, self._is_own, self._made)):
                merge, given = found
                given = [self._taken(x) for x in given]
                parts.append(partial(_merged, merge, eqn, given))
            elif eqn and hands_on(eqn) and (before := self._parts(eqn.invars[0])):
                parts += [partial(_handed_on, eqn, part) for part in before]
            elif eqn and self._is_own(value) and self._adds_inside(eqn, value):
                sums = self.opened.setdefault(id(eqn), (eqn, set()))[1]
                sums.add(eqn.outvars.index(value))
                parts.append(partial(_as_it_is, self._taken(value, is_sum=True)))
            else:
                rest.append(value)
        return [*parts, self._rows(rest)] if parts and rest else parts

    def _adds_inside(self, eqn: JaxprEqn, value: Any) -> bool:
        """Is the sum over towers of this result that of the program's it holds?"""
        if eqn.primitive.name in ("jit", "remat2"):
            return True
        if eqn.primitive.name != "scan":
            return False
        if id(eqn) not in self._running:
            self._running[id(eqn)] = _running_sums(eqn)
        number, (_, num_carry) = eqn.outvars.index(value), loop_sizes(eqn)
        return number >= num_carry or number in self._running[id(eqn)]


def depending(body: Jaxpr, given: Sequence[Any]) -> set[Any]:
    """What depends on these; all else would be held ``k`` times."""
    found: set[Any] = set(given)
    for eqn in body.eqns:
        if any(isinstance(x, Var) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return found


def _adds(eqn: JaxprEqn) -> bool:
    """Does it add values of one shape, and no number to each element?"""
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    is_sum = eqn.primitive.name in ("add", "add_any")
    return is_sum and all(x.shape == avals[0].shape for x in avals)


def _uses_in(body: Jaxpr) -> Counter[Any]:
    uses = Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, Var))
    return uses + Counter(x for x in body.outvars if isinstance(x, Var))


def _merged(
    merge: Callable[..., jax.Array],
    eqn: JaxprEqn,
    taken: Sequence[int],
    given: Operands,
    add: Add,
) -> jax.Array:
    return merge(eqn, *[given[i] for i in taken])


def _handed_on(eqn: JaxprEqn, part: Part, given: Operands, add: Add) -> jax.Array:
    return handed_on(eqn, part(given, add))


def _as_it_is(taken: int, given: Operands, add: Add) -> jax.Array:
    return given[taken]


def _rows(rows: Sequence[int], given: Operands, add: Add) -> jax.Array:
    return add(reduce(operator.add, [given[i] for i in rows]))


# Equations that hold a program, whose sums are those of the program.


def _running_sums(eqn: JaxprEqn) -> set[int]:
    """To which carries of a scan each step adds something, without a look at them."""
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
            elif value in made and _adds(made[value]):
                left += made[value].invars
    return found


def _opened(eqn: JaxprEqn, sums: set[int], add: Add) -> Callable[..., Any]:
    """An equation that holds a program, of which ``vmap`` adds up some results."""

    @jax.custom_batching.custom_vmap
    def one(of_tower: jax.Array, *given: jax.Array) -> list[jax.Array]:
        return eqn.primitive.bind(*given, **eqn.params)

    @one.def_vmap
    def of_all(size: int, are_own: list[bool], *all_given: Any) -> Any:
        (_, *is_own), (_, *given) = are_own, all_given
        if not any(is_own):
            is_own[0], given[0] = True, jnp.stack([given[0]] * size)
        if eqn.primitive.name == "scan":
            return _scanned(eqn, sums, is_own, given, add)
        out = _called(eqn, sums, is_own, given, add)
        return out, [i not in sums for i in range(len(out))]

    return one


def _called(
    eqn: JaxprEqn, sums: set[int], is_own: list[bool], given: list[Any], add: Add
) -> list[jax.Array]:
    program = eqn.params["jaxpr"]
    if eqn.primitive.name == "remat2":
        if not isinstance(program, ClosedJaxpr):
            program = ClosedJaxpr(program, ())
        # What keeps XLA from taking what was computed before in place of it.
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            given = lax.optimization_barrier(given)
    return _of_all(program, sums, is_own, given, add)


def _of_all(
    program: ClosedJaxpr,
    sums: set[int],
    is_own: Sequence[bool],
    given: Sequence[Any],
    add: Add,
) -> list[jax.Array]:
    """`together` of any arguments that are towers' own, and any results as sums."""
    body = program.jaxpr
    order = sorted(range(len(given)), key=lambda i: not is_own[i])
    results = sorted(range(len(body.outvars)), key=lambda i: i not in sums)
    body = body.replace(
        invars=[body.invars[i] for i in order],
        outvars=[body.outvars[i] for i in results],
    )
    values, num_own = [given[i] for i in order], sum(is_own)
    own, common = values[:num_own], values[num_own:]
    out = together(program.replace(jaxpr=body), own, common, len(sums), add)
    return [out[results.index(i)] for i in range(len(out))]


def _scanned(
    eqn: JaxprEqn, sums: set[int], is_own: list[bool], given: list[Any], add: Add
) -> tuple[list[jax.Array], list[bool]]:
    """A scan of all towers, in each step of which sums are added up; ``[k, ...]``?"""
    params, program = eqn.params, eqn.params["jaxpr"]
    size = next(len(x) for x, own in zip(given, is_own, strict=True) if own)
    first, number = loop_sizes(eqn)
    own, own_out = _own_in_loop(eqn, sums, is_own)
    consts, xs = given[:first], given[first + number :]

    def begun(i: int) -> jax.Array:
        x, has_towers = given[first + i], is_own[first + i]
        if i in sums:
            return add(x) if has_towers else x * jnp.asarray(size, x.dtype)
        if own_out[i] and not has_towers:
            return jnp.broadcast_to(x, (size, *x.shape))
        return x

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        seen = [jnp.zeros_like(x) if i in sums else x for i, x in enumerate(carry)]
        out = _of_all(program, sums, own, [*consts, *seen, *xs], add)
        out = [x if i in sums or own_out[i] else x[0] for i, x in enumerate(out)]
        new = [x + out[i] if i in sums else out[i] for i, x in enumerate(carry)]
        return new, out[number:]

    carry, ys = lax.scan(
        step,
        [begun(i) for i in range(number)],
        [_turned(x, is_own[first + number + i]) for i, x in enumerate(xs)],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    has_towers = [x and i not in sums for i, x in enumerate(own_out)]
    ys = [_turned(y, has_towers[number + i]) for i, y in enumerate(ys)]
    return [*carry, *ys], has_towers


def _turned(x: Any, has_towers: bool) -> Any:
    """Steps before towers for towers before steps, and the other way round."""
    return jnp.swapaxes(x, 0, 1) if has_towers else x


def _own_in_loop(
    eqn: JaxprEqn, sums: set[int], is_own: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Which arguments and results of a scan's step are towers' own."""
    body, own = open_jaxpr(eqn.params["jaxpr"]), list(is_own)
    first, number = loop_sizes(eqn)
    while True:
        for i in range(number):
            own[first + i] &= i not in sums  # a sum is of all towers
        pairs = zip(body.invars, own, strict=True)
        found = depending(body, [x for x, one in pairs if one])
        out = [isinstance(x, Var) and x in found for x in body.outvars]
        out = [x or (i < number and own[first + i]) for i, x in enumerate(out)]
        carry = [x and i not in sums for i, x in enumerate(out[:number])]
        if carry == own[first : first + number]:
            return own, out
        own[first : first + number] = carry
