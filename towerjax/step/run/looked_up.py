"""Rows that a tower looks up in a table, of which alone the table has a gradient.

`tj.sparse.take` is one equation of a tower's program. Zeros are added to the rows that
it gives, and the gradient of these zeros is that of the rows.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from towerjax.collectives.lookups import (
    COMPUTED,
    LOOKUP,
    NO_WAY_OUT,
    join_lookups,
    refuse_dense,
)
from towerjax.proof.equation import open_jaxpr, sub_jaxprs
from towerjax.proof.interpreter import Interpreter
from towerjax.step.run.derivative import without_derivative
from towerjax.towers.executors import vmap_members
from towerjax.types import PyTree, named_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups of a tower's program.

    Attributes:
      program: One tower's.
      tables: For each lookup the number, among the values that are trained, of its
        table; None where that is not one of them.
      names: The names of the values that are trained.
    """

    program: ClosedJaxpr
    tables: tuple[int | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, program: ClosedJaxpr, first: int, trained: PyTree) -> "Lookups | None":
        """Those of a program whose inputs from ``first`` on are ``trained``, if any."""
        names = tuple(name for name, _ in named_leaves("params", trained))
        given = program.jaxpr.invars
        known = given[first : first + len(names)]
        number = {id(var): i for i, var in enumerate(known)}
        free = {*given[:first], *given[first + len(names) :], *program.jaxpr.constvars}
        _refuse_inside(program, free, is_top=True)
        eqns = [*_lookups(program)]
        if all(_is_free(eqn.invars[0], free) for eqn in eqns):
            return None
        tables = tuple(number.get(id(eqn.invars[0])) for eqn in eqns)
        return cls(program, tables, names)

    def zeros(self, lead: tuple[int, ...]) -> list[jax.Array]:
        """What is added to the rows of each lookup, with these leading dims."""
        avals: list[Any] = [eqn.outvars[0].aval for eqn in _lookups(self.program)]
        return [jnp.zeros((*lead, *x.shape), x.dtype) for x in avals]

    def gradient_shapes(self, trained: PyTree) -> PyTree:
        """The shapes of one tower's gradients, of tables those of the rows."""
        avals: list[Any] = [eqn.invars[1].aval for eqn in _lookups(self.program)]
        ids = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        of = functools.partial(self.gradients, of_several=False)
        return jax.eval_shape(of, trained, self.zeros(()), ids)

    def evaluate(
        self, leaves: Sequence[Any], zeros: list[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """The program's results, and the ids of each lookup."""
        walk = Interpreter(self.program.jaxpr, self.program.consts, leaves)
        each, ids = iter(zip(self.tables, zeros, strict=True)), []
        for eqn in self.program.jaxpr.eqns:
            if not _is_lookup(eqn):
                walk.evaluate(eqn)
                continue
            (number, zero), (table, index) = next(each), map(walk.read, eqn.invars)
            if number is None:
                table = without_derivative(table, COMPUTED)
            walk.evaluate(eqn, [lax.stop_gradient(table), index])
            walk.values[eqn.outvars[0]] += zero
            ids.append(index)
        return [*map(walk.read, self.program.jaxpr.outvars)], ids

    def gradients(
        self,
        grads: PyTree,
        rows: list[jax.Array],
        ids: list[jax.Array],
        *,
        of_several: bool,
    ) -> PyTree:
        """The gradients, of tables the rows; those of several towers are stacked."""
        leaves, treedef = jax.tree.flatten(grads)
        for i in {x for x in self.tables if x is not None}:
            chosen = [n for n, table in enumerate(self.tables) if table == i]
            pairs = [(ids[n], rows[n]) for n in chosen]
            shape = leaves[i].shape, leaves[i].dtype

            def join(pairs: Any, shape: Any = shape) -> Any:
                return join_lookups(pairs, jax.ShapeDtypeStruct(*shape))

            leaves[i] = vmap_members(join)(pairs) if of_several else join(pairs)
        return treedef.unflatten(leaves)

    def refuse_dense(self, reads: set[int]) -> None:
        """Raise where one of ``reads``, which have a whole gradient, is a table."""
        tables = {x for x in self.tables if x is not None}
        refuse_dense([self.names[i] for i in sorted(tables & reads)])


def _is_lookup(eqn: JaxprEqn) -> bool:
    return eqn.primitive is LOOKUP


def _lookups(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    return filter(_is_lookup, program.jaxpr.eqns)


def _refuse_inside(program: Any, free: set[Any], *, is_top: bool) -> None:
    """Raise for lookups in inner programs, out of which the rows have no way.

    Their tables may be values of which no gradient is taken: those in ``free``.
    """
    for eqn in open_jaxpr(program).eqns:
        if _is_lookup(eqn):
            if not is_top and not _is_free(eqn.invars[0], free):
                raise ValueError(NO_WAY_OUT)
            continue
        for inner in sub_jaxprs(eqn):
            given = eqn.invars[len(eqn.invars) - len(inner.invars) :]
            pairs = zip(inner.invars, given, strict=False)
            is_known = eqn.primitive.name != "while"  # whose operands lie otherwise
            known = {own for own, outer in pairs if is_known and _is_free(outer, free)}
            _refuse_inside(inner, known | {*inner.constvars}, is_top=False)


def _is_free(var: Any, free: set[Any]) -> bool:
    return isinstance(var, Literal) or var in free
