"""The places where towers meet inside a tower function, as primitives in its program.

The primitives have no implementation. `SplitProgram` ends a pass at each, and supplies
its values.
"""

import dataclasses
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

import towerjax as tj
from towerjax.jaxprs import tags
from towerjax.mesh.private_jax import bind_axis, bound_axes
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.step.passes.looked_up import TracedLoss
from towerjax.types import PyTree, Reduction
from towerjax.types.trees import map_parts, widen_dtype

MEET = Primitive("towers_meet")
"""Maps ``(loss, gradients)`` of one tower to their sums over all towers."""

PARAMETERS = Primitive("towers_parameters")
"""An identity that marks the parameters by which one loss is differentiated."""

DIFFERENTIATE = Primitive("towers_differentiate")
"""Maps a tower's loss and its parameters to all towers' loss and its gradient."""

for _primitive in (MEET, PARAMETERS, DIFFERENTIATE):
    _primitive.multiple_results = True
PARAMETERS.def_abstract_eval(lambda *operands: [*operands])


@MEET.def_abstract_eval
def _summed_shapes(*operands: Any, treedef: Any, copies: tuple[int, ...]) -> list[Any]:
    del treedef
    return _with_all_rows(operands, copies)


@DIFFERENTIATE.def_abstract_eval
def _differentiated_shapes(
    *operands: Any, treedef: Any, trained: Any, grads: tuple[Any, ...]
) -> list[Any]:
    del trained
    return [*operands[: treedef.num_leaves], *grads]


_Bound = TypeVar("_Bound", bound=Hashable)


def bound(value: Hashable) -> AbstractContextManager[None]:
    """Open a context in which `bound_here` finds ``value``.

    JAX finds a named axis in the same way.
    """
    return bind_axis(value)


def bound_here(kind: type[_Bound]) -> _Bound | None:
    """Find the innermost value of this type that `bound` has bound, or None."""
    return next((x for x in bound_axes() if isinstance(x, kind)), None)


def meet(loss: Weighted | None, grads: PyTree, count: int) -> tuple[Any, PyTree]:
    """Sum losses and gradients over towers; rows of tables are concatenated.

    ``count`` is the number of towers times the number of micro-batches.
    """
    leaves, treedef = jax.tree.flatten((loss, grads))
    copies = _times_joined((loss, grads), count)
    outcomes = MEET.bind(*map(jnp.asarray, leaves), treedef=treedef, copies=copies)
    return jax.tree.unflatten(treedef, outcomes)


def sum_inside(tower: tj.Tower, value: PyTree) -> PyTree:
    """Add over towers, by a collective.

    It is used inside a jit or scan of the tower function, where no pass can end.
    """
    with jax.named_scope(tags.SUMMED_BY_STEP):
        return tower.reduce(Reduction.SUM, value)


def differentiate(
    of_params: Callable[[PyTree], tuple[Any, PyTree]], params: PyTree, count: int
) -> tuple[Weighted | Means, PyTree, PyTree]:
    """Add the losses of all towers, and differentiate their sums.

    ``of_params(params) -> (loss, rest)`` is called once, to be traced. No gradient
    flows back through the results. A loss of one mean is returned as ``Weighted``, and
    its gradient is not divided yet.
    """

    def of_one_mean(params: PyTree) -> tuple[Any, PyTree]:
        loss, rest = of_params(params)
        return one_mean(loss) or loss, rest

    params = jax.tree.map(jnp.asarray, params)
    leaves, treedef = jax.tree.flatten(params)
    marked = PARAMETERS.bind(*leaves)
    traced = TracedLoss.of(of_one_mean, params)
    (loss, rest), _ = traced.of_micro_batch(treedef.unflatten(marked), [])
    rest = map_parts(jax.Array, lax.stop_gradient, rest)
    shapes = params
    if traced.lookups.eqns:
        shapes = jax.eval_shape(lambda x: traced.gradient(x)[1].grads, params)
    wide = map_gradients(
        lambda x: jax.ShapeDtypeStruct(x.shape, widen_dtype(x.dtype)), shapes
    )
    shapes_of_grads, of_grads = jax.tree.flatten(wide)
    grads = [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes_of_grads]
    addends, of_loss = jax.tree.flatten(loss)
    outcomes = DIFFERENTIATE.bind(
        *map(jnp.asarray, addends),
        *marked,
        treedef=of_loss,
        trained=treedef,
        grads=tuple(_with_all_rows(grads, _times_joined(shapes, count))),
    )
    number = len(addends)
    total = jax.tree.unflatten(of_loss, outcomes[:number])
    return total, jax.tree.unflatten(of_grads, outcomes[number:]), rest


def operands_of(eqn: JaxprEqn) -> list[Any]:
    """Pick the values of an equation that are added over towers.

    For `DIFFERENTIATE` that is only the loss.
    """
    return eqn.invars[: eqn.params["treedef"].num_leaves]


def parameters_of(eqn: JaxprEqn) -> list[Any]:
    """Pick the values by which a `DIFFERENTIATE` equation differentiates its loss."""
    return eqn.invars[eqn.params["treedef"].num_leaves :]


def _times_joined(tree: PyTree, count: int) -> tuple[int, ...]:
    """Find for each leaf the factor by which a `meet` multiplies its rows.

    It is ``count`` for rows of a table, which are concatenated, and 0 for a leaf that
    is added and keeps its shape.
    """
    parts = jax.tree.leaves(tree, is_leaf=is_rows_of_table)
    counts = [count * is_rows_of_table(x) for x in parts]
    pairs = zip(parts, counts, strict=True)
    return tuple(times for x, times in pairs for _ in jax.tree.leaves(x))


def _with_all_rows(avals: Any, copies: tuple[int, ...]) -> list[Any]:
    return [
        x.update(shape=(x.shape[0] * count, *x.shape[1:])) if count else x
        for x, count in zip(avals, copies, strict=True)
    ]


def is_rows_of_table(x: Any) -> bool:
    """Return whether ``x`` is the gradient of a table, which has only some rows."""
    return isinstance(x, tj.sparse.IndexedRows)


def map_gradients(fn: Callable[..., Any], grads: PyTree, *others: PyTree) -> PyTree:
    """Apply ``fn`` to each gradient; for rows of a table, to the values of the rows."""

    def of_one(grad: Any, *others: Any) -> Any:
        if is_rows_of_table(grad):
            return dataclasses.replace(grad, values=fn(grad.values, *others))
        return fn(grad, *others)

    return jax.tree.map(of_one, grads, *others, is_leaf=is_rows_of_table)
