"""Run the towers of a device by ``vmap``, and sum their results in one operation.

The sum over towers of matrix products is one product, which also contracts the towers'
dim; that of convolutions is one convolution, and that of rows scattered into zeros, as
the gradient of a lookup, is one scatter of all rows. `jax.vmap` would compute ``k``
results and hold them all: for gradients, ``k`` times the parameters. The same is done
inside ``jit`` and ``checkpoint``, and in each step of a ``scan``.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

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
from towerjax.proof.interpreter import Interpreter, eqn_context, evaluate_eqn
from towerjax.towers.lowering.sums import SumSites, are_zeros, is_zero

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
    body = program.jaxpr
    results, kept = body.outvars[:num_sums], body.outvars[num_sums:]
    sites, work = _plan(body, len(own), results)
    pairs = [(eqn, i) for eqn in body.eqns for i in sites.opened.get(id(eqn), ())]
    inside = {eqn.outvars[i] for eqn, i in pairs}
    read = [x for _, _, operands in work.values() for x in operands]
    read = [x for x in (*read, *results) if isinstance(x, Var) and x not in work]
    read = [*dict.fromkeys(read)]

    def of_tower(number: jax.Array, *own: jax.Array) -> list[jax.Array]:
        walk = Interpreter(body, program.consts, [*own, *common])
        for eqn in body.eqns:
            if sums := sites.opened.get(id(eqn)):
                with eqn_context(eqn):
                    given = map(walk.read, eqn.invars)
                    out = _Opened(eqn, {*sums}).evaluate(number, *given)
                walk.values.update(zip(eqn.outvars, out, strict=True))
            elif not (eqn.outvars and eqn.outvars[0] in work):
                walk.evaluate(eqn)
        return [jnp.asarray(walk.read(x)) for x in (*kept, *read)]

    axes = [0] * len(kept) + [None if x in inside else 0 for x in read]
    towers = jax.vmap(of_tower, out_axes=axes, axis_name=LOCAL_AXIS)
    # Numbered, since no argument may be a tower's own.
    out = towers(jnp.arange(size), *own)
    values = dict(zip(read, out[len(kept) :], strict=True))

    def rows(x: Any) -> jax.Array:
        if isinstance(x, Var):
            return values[x]
        return jnp.broadcast_to(jnp.asarray(x.val, x.aval.dtype), (size, *x.aval.shape))

    def total(x: Any) -> jax.Array:
        is_sum = isinstance(x, Var) and (x in work or x in inside)
        return values[x] if is_sum else add_rows(rows(x))

    for x, (eqn, merge, operands) in work.items():
        with eqn_context(eqn):
            if merge is None:
                [values[x]] = evaluate_eqn(eqn, [*map(total, operands)])
            else:
                values[x] = merge(eqn, *map(rows, operands))
    return [*map(total, results), *out[: len(kept)]]


def _plan(
    body: Jaxpr, num_own: int, results: Sequence[Any]
) -> tuple[SumSites, dict[Any, tuple[JaxprEqn, Any, Sequence[Any]]]]:
    """Where results are summed over towers, and what is computed after all of them.

    That is of sums, or by one operation of the rows of all towers.
    """
    differ = dependents(body, body.invars[:num_own])

    def is_own(x: Any) -> bool:
        return isinstance(x, Var) and x in differ  # a literal has no hash

    def opens(eqn: JaxprEqn, number: int, _: Any) -> bool:
        if not is_own(eqn.outvars[number]):
            return False
        if eqn.primitive.name == "scan" and number < loop_sizes(eqn)[1]:
            return number in sites.carried(eqn)
        return eqn.primitive.name in ("scan", "jit", "remat2")

    fused = lambda eqn: _fused_sum(eqn, is_own, sites)  # noqa: E731
    is_site = lambda eqn: fused(eqn) is not None  # noqa: E731
    sites = SumSites(body, passes=_is_linear, is_site=is_site, opens=opens)
    for x in results:
        sites.follow(x, True)
    work: dict[Any, tuple[JaxprEqn, Any, Sequence[Any]]] = {}
    for eqn in body.eqns:
        for x in eqn.outvars[:1]:
            if x in sites.added:
                work[x] = eqn, None, eqn.invars
            elif x in sites.sums and (of_rows := fused(eqn)):
                work[x] = eqn, *of_rows
    return sites, work


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

    def __init__(self, eqn: JaxprEqn, sums: set[int]) -> None:
        self.eqn, self.sums = eqn, sums  # the indices of these results

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
