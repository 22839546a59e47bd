"""The gradient of a table (an embedding): it has only the rows that were looked up.

`tj.sparse.take` is one equation of the loss's program. Zeros are added to the rows that
it returns, and the gradient by these zeros is the gradient by the rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.collectives.lookups import LOOKUP, join_lookups
from towerjax.jaxprs.flow import inner_programs
from towerjax.jaxprs.interpreter import Interpreter
from towerjax.jaxprs.params import open_jaxpr, sub_jaxprs
from towerjax.jaxprs.sites import all_jaxprs, user_line
from towerjax.step.passes.derivative import (
    Gradient,
    Ids,
    Zeros,
    gradient_of,
    held,
    refuse_derivative,
    vjp,
)
from towerjax.towers.executors import vmap_members
from towerjax.types import PyTree
from towerjax.types.refusals import listed
from towerjax.types.trees import named_leaves, parts_of, put_parts


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups of a program whose rows have a gradient.

    Attributes:
      program: One tower's program of the loss.
      eqns: The lookups in the program; none, if no table is trained.
      tables: One entry for each lookup: its table's number among the trained values, or
        None if the table is none of these.
      names: The names of the trained values.
      towers: The number of towers that evaluate the program together; their rows, ids
        and gradients are then stacked. None for one tower.
    """

    program: ClosedJaxpr
    eqns: tuple[JaxprEqn, ...] = ()
    tables: tuple[int | None, ...] = ()
    names: tuple[str, ...] = ()
    towers: int | None = None

    @classmethod
    def of(cls, program: ClosedJaxpr, first: int, trained: PyTree) -> "Lookups":
        """Find a program's lookups; its inputs from ``first`` on are ``trained``."""
        if not (jax.tree.leaves(trained) and _has_lookups(program)):
            return cls(program)
        names = tuple(name for name, _ in named_leaves("params", trained))
        inputs = program.jaxpr.invars
        known = inputs[first : first + len(names)]
        numbers = {id(var): i for i, var in enumerate(known)}
        free = {
            *inputs[:first],
            *inputs[first + len(names) :],
            *program.jaxpr.constvars,
        }
        _refuse_inside(program, free, is_top=True)
        eqns = tuple(filter(_is_lookup, program.jaxpr.eqns))
        if all(_is_free(eqn.invars[0], free) for eqn in eqns):
            return cls(program)

        def number(eqn: JaxprEqn) -> int | None:
            is_one = not eqn.params["stacked"]
            return numbers.get(id(eqn.invars[0])) if is_one else None

        return cls(program, eqns, tuple(map(number, eqns)), names)

    def of_towers(self, towers: int) -> "Lookups":
        """Fit these lookups to a program that evaluates several towers together."""
        return dataclasses.replace(self, towers=towers)

    def zeros(self) -> tuple[jax.Array, ...]:
        """Make zeros to add to the rows of lookups; see `Tables.zeros`."""
        lead = () if self.towers is None else (self.towers,)
        avals: list[Any] = [eqn.outvars[0].aval for eqn in self.eqns]
        return tuple(jnp.zeros((*lead, *x.shape), x.dtype) for x in avals)

    def evaluate(self, leaves: Sequence[Any], zeros: Zeros) -> tuple[list[Any], Ids]:
        """Evaluate one tower's program; return its results and the ids of each lookup.

        Without ``zeros`` a lookup is evaluated like any other equation, and no ids are
        returned.
        """
        walk = Interpreter(self.program.jaxpr, self.program.consts, leaves)
        number_of = {id(eqn): i for i, eqn in enumerate(self.eqns) if zeros}
        ids = []
        for eqn in self.program.jaxpr.eqns:
            number = number_of.get(id(eqn))
            if number is None:
                walk.evaluate(eqn)
                continue
            table, index = map(walk.read, eqn.invars)
            zero = zeros[number]
            if self.tables[number] is None:
                table = refuse_derivative(table, zero, _computed(eqn))
            else:
                table = held(table)
            walk.evaluate(eqn, [table, index])
            walk.values[eqn.outvars[0]] += zero
            ids.append(index)
        return [*map(walk.read, self.program.jaxpr.outvars)], ids

    def gradients(
        self, grads: PyTree, rows: Zeros, ids: Ids, reads: set[int]
    ) -> PyTree:
        """Join the gradients of a table's looked-up rows; see `Tables.gradients`."""
        self._refuse_dense(reads)
        leaves, treedef = jax.tree.flatten(grads)
        for i in {x for x in self.tables if x is not None}:
            numbers = [n for n, table in enumerate(self.tables) if table == i]
            pairs = [(ids[n], rows[n]) for n in numbers if len(leaves) + n in reads]
            table = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype)
            join = functools.partial(join_lookups, table=table)
            join = join if self.towers is None else vmap_members(join)
            leaves[i] = join(pairs)
        return treedef.unflatten(leaves)

    def _refuse_dense(self, reads: set[int]) -> None:
        """Raise if the loss uses a table other than by lookups.

        ``reads`` has the indices of the values that need a dense gradient.
        """
        tables = {x for x in self.tables if x is not None}
        if names := [self.names[i] for i in sorted(tables.intersection(reads))]:
            raise ValueError(
                f"{listed(names)}: the loss looks up rows by tj.sparse.take, and also"
                " uses the table in another way, so that all its rows have a gradient."
                " Write table[ids] for such a table, or jax.lax.stop_gradient(table) in"
                " the other place."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """A function of the trained values, traced to a program.

    The function, a loss of one tower or a loss without towers, was called once to be
    traced.
    """

    program: ClosedJaxpr
    lookups: Lookups
    returned: PyTree  # what the function returned while it was traced

    @classmethod
    def of(cls, fn: Callable[[PyTree], PyTree], trained: PyTree) -> "TracedLoss":
        """Trace ``fn`` for values of the shapes and dtypes of ``trained``."""
        leaves, treedef = jax.tree.flatten(trained)
        returned: PyTree = None

        def of_leaves(*leaves: jax.Array) -> list[jax.Array]:
            nonlocal returned
            returned = fn(treedef.unflatten(leaves))
            return parts_of(jax.Array, returned)

        program = jax.make_jaxpr(of_leaves)(*leaves)
        return cls(program, Lookups.of(program, 0, trained), returned)

    def of_micro_batch(self, trained: PyTree, zeros: Zeros) -> tuple[PyTree, Ids]:
        """Run the function; return its results, and the ids of looked-up rows."""
        values, ids = self.lookups.evaluate(jax.tree.leaves(trained), zeros)
        return put_parts(jax.Array, self.returned, map(jnp.asarray, values)), ids

    def vjp(
        self, trained: PyTree, differentiated: Callable[[Any, PyTree], PyTree]
    ) -> tuple[PyTree, Callable[[PyTree], PyTree], Any]:
        """Evaluate the function, and differentiate values that are made of its results.

        Returns ``(values, pull_back, results)``. ``differentiated(results, trained)``
        gives the values to differentiate, and ``pull_back(cotangents)`` returns the
        gradient.
        """

        def of_micro_batch(trained: PyTree, zeros: Zeros) -> tuple[PyTree, Any, Ids]:
            results, ids = self.of_micro_batch(trained, zeros)
            return differentiated(results, trained), results, ids

        values, pull, results = vjp(of_micro_batch, trained, self.lookups)

        def pull_back(cotangents: PyTree) -> PyTree:
            grads, _ = pull(cotangents)
            return grads

        return values, pull_back, results

    def gradient(self, trained: PyTree) -> tuple[PyTree, Gradient]:
        """Differentiate the loss of a function that returns ``(loss, rest)``.

        Returns ``(rest, gradient)``.
        """

        def of_micro_batch(
            trained: PyTree, zeros: Zeros
        ) -> tuple[dict[str, PyTree], Ids]:
            (loss, rest), ids = self.of_micro_batch(trained, zeros)
            return {"loss": loss, "rest": rest}, ids

        tree, gradient = gradient_of(
            of_micro_batch,
            trained,
            self.lookups,
            loss="loss",
            denominators=lambda weights: weights,
            share=1,
        )
        return tree["rest"], gradient


def _has_lookups(program: ClosedJaxpr | Jaxpr) -> bool:
    bodies = [open_jaxpr(x).eqns for x in all_jaxprs(program)]
    if any(LOOKUP in {eqn.primitive for eqn in eqns} for eqns in bodies):
        return True
    high = [eqn for eqns in bodies for eqn in eqns if "_prim" in eqn.params]
    return any(_has_lookups(x) for eqn in high for x in sub_jaxprs(eqn))


def _is_lookup(eqn: JaxprEqn) -> bool:
    return eqn.primitive is LOOKUP


def _computed(eqn: JaxprEqn) -> str:
    return (
        f"tj.sparse.take at {user_line((eqn, None))} got a table that is computed from"
        " the parameters, so that all its rows have a gradient. Look up first, and"
        " compute with the rows, as in tj.sparse.take(params['table'],"
        " ids).astype(...); or write table[ids]."
    )


def _refuse_inside(program: Any, free: set[Any], *, is_top: bool) -> None:
    """Raise for a lookup in an inner program, such as a ``scan``'s body.

    An inner program cannot return the rows that it looks up. A lookup in a table of
    ``free``, the values without a gradient, is allowed. ``is_top`` tells that
    ``program`` itself is no inner program.
    """
    for eqn in open_jaxpr(program).eqns:
        if _is_lookup(eqn):
            if not is_top and not _is_free(eqn.invars[0], free):
                raise ValueError(
                    f"tj.sparse.take at {user_line((eqn, None))} stands inside a jit,"
                    " scan, cond, while_loop, remat, custom_jvp or custom_vjp in the"
                    " loss function, which cannot hand its rows out. Look up before"
                    " it, all ids at once, and pass the rows in; or write table[ids],"
                    " whose gradient has all rows."
                )
            continue
        for inner in inner_programs(eqn):
            values = zip(inner.jaxpr.invars, inner.operands, strict=True)
            known = {x for x, operand in values if _is_free(operand, free)}
            known.update(inner.jaxpr.constvars)
            _refuse_inside(inner.jaxpr, known, is_top=False)


def _is_free(var: Any, free: set[Any]) -> bool:
    return isinstance(var, Literal) or var in free
