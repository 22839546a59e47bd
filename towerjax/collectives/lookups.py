"""Look up rows of a table in a loss, so that the table's gradient is of these rows."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

from towerjax.collectives.sparse_rows import IndexedRows, widen_indices
from towerjax.mesh.private_jax import carries_gradient
from towerjax.types import PyTree, named_leaves
from towerjax.types.leaves import listed, refuse_no_numbers


def take(table: Any, ids: Any) -> jax.Array:
    """``jnp.take(table, ids, axis=0)``; in a loss the gradient is of these rows alone.

    In a loss that `tj.build_train_step`, `tj.of_loss`, `tj.value_and_grad` or a
    ``TowerOptimizer`` differentiates, the gradient of a parameter that is looked up is
    ``IndexedRows``: a row for each id, and of an id twice, two. Towers send these rows;
    no gradient of the table's shape is made or sent. Elsewhere, ``jax.grad`` included,
    it is a lookup as any other.

    Args:
      table: ``[N, ...]``, floats: a leaf of the parameters, itself. What is computed
        from it would be computed of all rows: look up first.
      ids: Integers of any shape, from ``-N`` to ``N - 1``; others give rows of NaN,
        without gradient.

    Returns:
      The rows, ``[*ids.shape, ...]``.

    Raises:
      ValueError: ``ids`` are no integers or the table has no rows; or in such a loss:
        the table is no leaf of the parameters, though it depends on them; or the lookup
        stands inside a jit, scan, cond, remat or a derivative, or, if
        `tj.value_and_grad` or a ``TowerOptimizer`` differentiates the loss, a vmap.
        When the gradient is taken: the table is also used otherwise, which makes it one
        of all rows.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def loss_fn(params, ids):
      ...     return tj.Weighted.mean(tj.sparse.take(params, ids).sum(-1) * 3)
      >>> _, grads = tj.value_and_grad(loss_fn)(np.ones((9, 2), "f"), np.array([7, 7]))
      >>> grads.sum.indices.tolist(), grads.sum.values.tolist()
      ([7, 7], [[3.0, 3.0], [3.0, 3.0]])

    Source:
      ``tf.gather``, whose gradient is ``IndexedSlices``, of TensorFlow (2015).
    """
    if not isinstance(table, jax.Array) and hasattr(table, "__jax_array__"):
        table = table.__jax_array__()  # a variable of Flax
    refuse_no_numbers("tj.sparse.take: table", table)
    refuse_no_numbers("tj.sparse.take: ids", ids)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or not jnp.ndim(table):
        raise ValueError(
            f"tj.sparse.take got ids of {ids.dtype} and a table of shape"
            f" {jnp.shape(table)}. Give integers, and a table [N, ...]."
        )
    lookups = _differentiated.get()
    return _looked_up(table, ids) if lookups is None else lookups.look_up(table, ids)


def vjp(
    fn: Callable[[PyTree], tuple[jax.Array, Any]], params: PyTree
) -> tuple[jax.Array, Callable[[jax.Array], PyTree], Any]:
    """As ``jax.vjp`` with ``has_aux``, of one gradient, with rows for `take`."""
    leaves, treedef = jax.tree.flatten(params)
    lookups = _Lookups([name for name, _ in named_leaves("params", params)])

    def of_leaves(leaves: list[Any]) -> tuple[jax.Array, Any]:
        lookups.begin(leaves)
        token = _differentiated.set(lookups)
        try:
            return fn(treedef.unflatten(lookups.leaves))
        finally:
            _differentiated.reset(token)

    total, pull_back, aux = jax.vjp(of_leaves, leaves, has_aux=True)

    def pull(cotangent: jax.Array) -> PyTree:
        for rows in lookups.rows.values():
            rows.clear()
        (grads,) = pull_back(cotangent)
        return treedef.unflatten(lookups.gradients(grads))

    return total, pull, aux


class _Lookups:
    """The lookups of one differentiation, whose rules leave their cotangents here."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.leaves: list[Any] = []
        self.rows: dict[int, list[tuple[Any, Any]]] = {}  # by table
        self.dense: set[int] = set()  # leaves with a gradient of all rows

    def begin(self, leaves: list[Any]) -> None:
        """Note the leaves and their trace, before the function is called."""

        @jax.custom_vjp
        def same(leaves: list[Any]) -> list[Any]:
            return leaves

        def note(_: None, grads: list[Any]) -> tuple[list[Any]]:
            kept = [None if isinstance(g, SymbolicZero) else g for g in grads]
            self.dense = {i for i, g in enumerate(kept) if g is not None}
            return (kept,)

        same.defvjp(
            lambda leaves: ([x.value for x in leaves], None), note, symbolic_zeros=True
        )
        self.leaves, self.trace = same(leaves), get_opaque_trace_state()

    def look_up(self, table: Any, ids: jax.Array) -> jax.Array:
        """The rows; their cotangents are kept, and the table's own is zero."""
        # A jitted function that was traced before, elsewhere, is not seen: its lookup
        # has a gradient of all rows, as any other.
        if get_opaque_trace_state() != self.trace and isinstance(table, Tracer):
            raise ValueError(NO_WAY_OUT)
        leaf = next((i for i, x in enumerate(self.leaves) if x is table), None)
        if leaf is None:
            if any(carries_gradient(table, x) for x in self.leaves):
                raise ValueError(COMPUTED)
            return _looked_up(table, ids)
        kept = self.rows.setdefault(leaf, [])

        def keep(ids: jax.Array, rows: jax.Array) -> tuple[None, None]:
            kept.append((ids, rows))
            return None, None

        read = jax.custom_vjp(_looked_up)
        read.defvjp(lambda table, ids: (_looked_up(table, ids), ids), keep)
        return read(table, ids)

    def gradients(self, grads: list[Any]) -> list[Any]:
        """The gradients, of tables the rows; raise where one has another use."""
        refuse_dense([self.names[i] for i in self.rows if i in self.dense])
        own = {i: join_lookups(rows, self.leaves[i]) for i, rows in self.rows.items()}
        return [own.get(i, g) for i, g in enumerate(grads)]


def refuse_dense(names: list[str]) -> None:
    """Raise for tables that are looked up and used otherwise too."""
    if names:
        raise ValueError(
            f"{listed(names)}: looked up by tj.sparse.take and used otherwise too,"
            " so that the gradient is of all rows. Write table[ids] for such a"
            " table; or jax.lax.stop_gradient(table) where it is used otherwise."
        )


_differentiated: contextvars.ContextVar[_Lookups | None] = contextvars.ContextVar(
    "differentiated", default=None
)
NO_WAY_OUT = (
    "tj.sparse.take stands inside a jit, scan, cond, vmap, remat or derivative in the"
    " loss function, out of which its rows have no way. Look up before it, all ids at"
    " once, and pass the rows in; or write table[ids], whose gradient is of all rows."
)
COMPUTED = (
    "tj.sparse.take got a table that is computed from the parameters, which takes all"
    " its rows. Look up first, and compute with the rows, as in"
    " tj.sparse.take(params['table'], ids).astype(...); or write table[ids]."
)


LOOKUP = Primitive("towerjax_take")
"""A lookup in a program: ``(table, ids) -> rows``, those of ids one by one."""


def _take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0)


def _rows_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    (table, ids), (moved, _) = primals, tangents  # of which one is not zero
    return LOOKUP.bind(table, ids), _take_rows(moved, ids)


def _rows_of_batch(given: Any, dims: Any) -> tuple[jax.Array, int]:
    """The lookups of a batch, whose dim comes first in ids and in rows."""
    (table, ids), (of_table, of_ids) = given, dims
    if of_table is not None:
        # A table for each: what is looked up has no rows of one table.
        return jax.vmap(_take_rows, in_axes=(of_table, of_ids))(table, ids), 0
    return LOOKUP.bind(table, jnp.moveaxis(ids, of_ids, 0)), 0


LOOKUP.def_impl(jax.jit(_take_rows))
LOOKUP.def_abstract_eval(
    lambda table, ids: table.update(shape=(*ids.shape, *table.shape[1:]))
)
ad.primitive_jvps[LOOKUP] = _rows_jvp
batching.primitive_batchers[LOOKUP] = _rows_of_batch
mlir.register_lowering(LOOKUP, mlir.lower_fun(_take_rows, multiple_results=False))


def _looked_up(table: Any, ids: jax.Array) -> jax.Array:
    return LOOKUP.bind(jnp.asarray(table), ids)


def join_lookups(lookups: list[tuple[Any, Any]], table: Any) -> IndexedRows:
    """All rows that were looked up; zeros, at one that was, where an id names none."""
    shape, none = table.shape, jnp.zeros((0, *table.shape[1:]), table.dtype)
    values = [none, *(rows.reshape(-1, *shape[1:]) for _, rows in lookups)]
    ids = [jnp.zeros(0, jnp.int32), *(widen_indices(x).reshape(-1) for x, _ in lookups)]
    values, ids = jnp.concatenate(values), jnp.concatenate(ids)
    if ids.size:
        ids = jnp.where(ids < 0, ids + shape[0], ids)
        exist = (ids >= 0) & (ids < shape[0])
        mask = exist.reshape(exist.shape + (1,) * (values.ndim - 1))
        values = jnp.where(mask, values, jnp.zeros((), values.dtype))
        first = jnp.clip(ids[jnp.argmax(exist)], 0, shape[0] - 1)
        ids = jnp.where(exist, ids, first)
    return IndexedRows(values, ids, shape)
