"""Run the towers of a device by ``vmap``, and sum their results in one operation.

The sum over towers of matrix products is one product, which also contracts the towers'
dim; that of convolutions is one convolution, and that of rows scattered into zeros, as
the gradient of a lookup, is one scatter of all rows. `jax.vmap` would compute ``k``
results and hold them all: for gradients, ``k`` times the parameters. The same is done
inside ``jit`` and ``checkpoint``, and in each step of a ``scan``.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from towerjax.collectives.reduce import add_rows, join_rows
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
from towerjax.towers.lowering.additions import (
    SumSites,
    are_zeros,
    carried_sums,
    is_addition,
    is_zero,
)

Operands = Sequence[jax.Array]
Part = Callable[[Operands], jax.Array]

# Linear in one operand: the result for a sum is the sum of the results.
_LINEAR = frozenset("transpose reshape squeeze broadcast_in_dim neg reduce_sum".split())


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
    kept = program.jaxpr.outvars[num_sums:]

    def of_tower(number: jax.Array, *own: jax.Array) -> list[jax.Array]:
        walk = Interpreter(program.jaxpr, program.consts, [*own, *common])
        for eqn in program.jaxpr.eqns:
            if opened := plan.opened.get(id(eqn)):
                with eqn_context(eqn):
                    out = opened.evaluate(number, *map(walk.read, eqn.invars))
                walk.values.update(zip(eqn.outvars, out, strict=True))
            else:
                walk.evaluate(eqn)
        return [jnp.asarray(walk.read(x)) for x in (*kept, *plan.operands)]

    axes = [0] * len(kept) + [None if is_sum else 0 for is_sum in plan.is_sum]
    towers = jax.vmap(of_tower, out_axes=axes, axis_name=LOCAL_AXIS)
    # Numbered, since no argument may be a tower's own.
    out = towers(jnp.arange(size), *own)
    operands = out[len(kept) :]
    sums = [reduce(operator.add, [x(operands) for x in parts]) for parts in plan.sums]
    return [*sums, *out[: len(kept)]]


class SumPlan:
    """How to compute the sums of a program's first results from values inside it.

    Attributes:
      operands: The values that sums are computed from.
      is_sum: Whether an opened equation has already summed each operand over towers.
      sums: For each sum its parts.
      opened: Equations whose inner programs also sum, by ``id``.
    """

    def __init__(self, body: Jaxpr, num_own: int, num_sums: int) -> None:
        self.operands: list[Any] = []
        self.is_sum: list[bool] = []
        self.opened: dict[int, _Opened] = {}
        self._carried: dict[int, set[int]] = {}
        self._own = dependents(body, body.invars[:num_own])
        self._sites = SumSites(body)
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
            eqn = self._sites.addend(value)
            if eqn and is_addition(eqn):
                left += reversed(eqn.invars)
            elif eqn and (fused := _fused_sum(eqn, self._is_own, self._sites)):
                merge, given = fused
                given = [self._take(x) for x in given]
                parts.append(partial(_fused_part, partial(merge, eqn), given))
            elif eqn and _is_linear(eqn) and (before := self._parts(eqn.invars[0])):
                parts += [partial(_linear_part, eqn, part) for part in before]
            elif eqn and self._is_own(value) and self._adds_inside(eqn, value):
                opened = self.opened.setdefault(id(eqn), _Opened(eqn))
                opened.sums.add(eqn.outvars.index(value))
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
            self._carried[id(eqn)] = carried_sums(eqn)
        number, (_, num_carry) = eqn.outvars.index(value), loop_sizes(eqn)
        return number >= num_carry or number in self._carried[id(eqn)]


def dependents(
    body: Jaxpr, given: Sequence[Any], axis: str = LOCAL_AXIS, ends: Any = None
) -> set[Any]:
    """The values that depend on ``given``, or on an axis of towers, and so differ.

    What a primitive ``ends`` returns is the same again.
    """
    differ: set[Any] = set(given)
    for eqn in body.eqns:
        inside = itertools.chain.from_iterable(map(all_eqns, sub_jaxprs(eqn)))
        is_own = any([isinstance(x, Var) and x in differ for x in eqn.invars])
        if is_own or any([axis in named_axes(x) for x in (eqn, *inside)]):
            differ.update([] if eqn.primitive is ends else [*eqn.outvars, *refs(eqn)])
    return differ


def _fused_part(
    merge: Callable[..., jax.Array], taken: Sequence[int], given: Operands
) -> jax.Array:
    return merge(*[given[i] for i in taken])


def _linear_part(eqn: JaxprEqn, part: Part, given: Operands) -> jax.Array:
    numbers = [x.val for x in eqn.invars[1:] if isinstance(x, Literal)]
    return eqn.primitive.bind(part(given), *numbers, **eqn.params)


def _added_part(rows: Sequence[int], given: Operands) -> jax.Array:
    return add_rows(reduce(operator.add, [given[i] for i in rows]))


def _fused_sum(
    eqn: JaxprEqn, is_own: Callable[[Any], bool], sites: SumSites
) -> tuple[Callable[..., jax.Array], list[Any]] | None:
    """The one operation that sums an equation's results over towers, and its operands.

    ``is_own(x)`` says if x differs between towers.
    """
    name, given = eqn.primitive.name, list(eqn.invars)
    if name == "scatter-add" and are_zeros(sites.maker(given[0])):
        return _sum_of_scatters, given[1:]
    if not all(map(is_own, given)):
        return None  # a value that all towers share would be copied ``k`` times
    if name == "dot_general":
        return _sum_of_products, given
    if name == "conv_general_dilated" and eqn.params["feature_group_count"] == 1:
        return _sum_of_convolutions, given
    return None


def _is_linear(eqn: JaxprEqn) -> bool:
    """Whether an equation gives for a sum the sum of its results.

    A conversion does not: a sum would be rounded to 16 bits once, and not the value of
    each tower, so that the result would depend on how many towers share a device.
    """
    if eqn.primitive.name == "pad":
        return is_zero(eqn.invars[1])
    return eqn.primitive.name in _LINEAR


def _sum_of_products(eqn: JaxprEqn, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over dim 0 of products, as one product that also contracts dim 0."""
    contracted, batch = eqn.params["dimension_numbers"]
    within = tuple((0, *(dim + 1 for dim in dims)) for dims in contracted)
    beside = tuple(tuple(dim + 1 for dim in dims) for dims in batch)
    params = eqn.params | {"dimension_numbers": (within, beside)}
    return eqn.primitive.bind(a, b, **params)


def _sum_of_convolutions(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The sum over dim 0 of convolutions, as one with ``k`` times the features."""
    dims = eqn.params["dimension_numbers"]
    x, kernel = join_rows(x, dims.lhs_spec[1]), join_rows(kernel, dims.rhs_spec[1])
    return eqn.primitive.bind(x, kernel, **eqn.params)


def _sum_of_scatters(eqn: JaxprEqn, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum over dim 0 of scatters into zeros, as one scatter of all rows."""
    dims = eqn.params["dimension_numbers"]
    batching = dims.scatter_indices_batching_dims
    dims = dims._replace(
        update_window_dims=tuple(i + 1 for i in dims.update_window_dims),
        scatter_indices_batching_dims=tuple(i + 1 for i in batching),
    )
    params = eqn.params | {"dimension_numbers": dims}
    params |= {"indices_are_sorted": False, "unique_indices": False}
    table: Any = eqn.outvars[0].aval
    zeros = jnp.zeros(table.shape, table.dtype)
    return eqn.primitive.bind(zeros, indices, rows, **params)


class _Opened:
    """An equation with an inner program, which sums some of its results over towers."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.eqn = eqn
        self.sums: set[int] = set()  # the indices of these results

    def evaluate(self, of_tower: jax.Array, *given: Any) -> list[jax.Array]:
        """Evaluate it for one tower, so that ``vmap`` sums these results.

        ``of_tower`` is mapped, so that the rule runs even if all towers share the rest.
        """
        on_tower = jax.custom_batching.custom_vmap(
            lambda _, *given: self.eqn.primitive.bind(*given, **self.eqn.params)
        )
        on_tower.def_vmap(self._on_all)
        return on_tower(of_tower, *given)

    def _on_all(self, size: int, are_own: list[bool], *all_given: Any) -> Any:
        (_, *is_own), (_, *given) = are_own, all_given
        params, program = self.eqn.params, self.eqn.params["jaxpr"]
        if self.eqn.primitive.name == "scan":
            return self._scan_on_all(is_own, given, size)
        if self.eqn.primitive.name == "remat2":
            if not hasattr(program, "consts"):  # before JAX 0.12
                program = ClosedJaxpr(program, ())
            # A barrier: else XLA would use the values of the forward pass instead.
            if params["differentiated"] and params["prevent_cse"]:
                given = lax.optimization_barrier(given)
        out = self._vmap_program(program, is_own, given, size)
        return out, [i not in self.sums for i in range(len(out))]

    def _vmap_program(
        self, program: ClosedJaxpr, is_own: list[bool], given: list[Any], size: int
    ) -> list[jax.Array]:
        """`vmap_and_sum` with towers' own arguments, and sums, in any position."""
        body = program.jaxpr
        order = sorted(range(len(given)), key=lambda i: not is_own[i])
        results = sorted(range(len(body.outvars)), key=lambda i: i not in self.sums)
        body = body.replace(
            invars=[body.invars[i] for i in order],
            outvars=[body.outvars[i] for i in results],
        )
        values, num_own = [given[i] for i in order], sum(is_own)
        own, common = values[:num_own], values[num_own:]
        program = program.replace(jaxpr=body)
        out = vmap_and_sum(program, own, common, len(self.sums), size)
        return [out[results.index(i)] for i in range(len(out))]

    def _scan_on_all(
        self, is_own: list[bool], given: list[Any], size: int
    ) -> tuple[list[jax.Array], list[bool]]:
        """Scan all towers, summing in each step; and which results are ``[k, ...]``."""
        params, sums, (first, number) = self.eqn.params, self.sums, loop_sizes(self.eqn)
        own, own_out = self._own_in_scan(is_own)
        consts, xs = given[:first], given[first + number :]

        def initial(i: int) -> jax.Array:
            # A scan of a number starts from a literal, which has no shape.
            x, has_towers = jnp.asarray(given[first + i]), is_own[first + i]
            if i in sums:
                return add_rows(x) if has_towers else x * jnp.asarray(size, x.dtype)
            if own_out[i] and not has_towers:
                return jnp.broadcast_to(x, (size, *x.shape))
            return x

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            seen = [jnp.zeros_like(x) if i in sums else x for i, x in enumerate(carry)]
            given = [*consts, *seen, *xs]
            out = self._vmap_program(params["jaxpr"], own, given, size)
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

    def _own_in_scan(self, is_own: list[bool]) -> tuple[list[bool], list[bool]]:
        """Whether each argument and result of a scan's step differs between towers."""
        body, own = open_jaxpr(self.eqn.params["jaxpr"]), list(is_own)
        first, number = loop_sizes(self.eqn)
        while True:
            pairs = zip(body.invars, own, strict=True)
            differ = dependents(body, [x for x, yes in pairs if yes])
            out = [isinstance(x, Var) and x in differ for x in body.outvars]
            out = [x or (i < number and own[first + i]) for i, x in enumerate(out)]
            # All towers share a sum, which the step only adds to.
            carry = [x and i not in self.sums for i, x in enumerate(out[:number])]
            if carry == own[first : first + number]:
                return own, out
            own[first : first + number] = carry


def _swap_axes(x: Any, has_towers: bool) -> Any:
    """Swap the dims of steps and of towers, where there are towers."""
    return jnp.swapaxes(x, 0, 1) if has_towers else x
