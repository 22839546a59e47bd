"""Look up rows of a table in a loss, with a gradient that has only these rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from towerjax.collectives.sparse_rows import IndexedRows, widen_indices
from towerjax.types.refusals import refuse_no_numbers


def take(table: Any, ids: Any) -> jax.Array:
    """Look up rows of a table, with a gradient that has only these rows.

    The result is that of ``jnp.take(table, ids, axis=0)``.

    In a loss that `tj.build_train_step`, `tj.of_loss`, `tj.value_and_grad` or a
    ``TowerOptimizer`` differentiates, the gradient of a table is ``IndexedRows``. It
    has one row for each id, so it has two rows if an id occurs twice. Towers send only
    these rows; no gradient of the table's shape is computed. Elsewhere, also in
    ``jax.grad``, `take` is an ordinary lookup.

    Args:
      table: ``[N, ...]``, floats. It must be a leaf of the parameters. Look up first,
        and compute with the rows afterwards, because a computation on the table is one
        on all its rows.
      ids: Integers of any shape, from ``-N`` to ``N - 1``. Another id gives a row of
        NaN, without a gradient.

    Returns:
      The rows, ``[*ids.shape, ...]``.

    Raises:
      ValueError: ``ids`` are not integers, or the table has no rows. In such a loss
        three more cases are errors: the table depends on the parameters but is not one
        of them; the lookup is inside a jit, scan, cond, while_loop, remat, custom_jvp
        or custom_vjp; or the table has another use, which makes the gradient dense.

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
        table = table.__jax_array__()  # as for a variable of Flax
    refuse_no_numbers("tj.sparse.take: table", table)
    refuse_no_numbers("tj.sparse.take: ids", ids)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or not jnp.ndim(table):
        raise ValueError(
            f"tj.sparse.take got ids of {ids.dtype} and a table of shape"
            f" {jnp.shape(table)}. Give integers, and a table [N, ...]."
        )
    return LOOKUP.bind(jnp.asarray(table), ids, stacked=0)


LOOKUP = Primitive("towerjax_take")
"""A lookup in a program: ``(table, ids) -> rows``, those of ids one by one.

``stacked`` is the number of leading dims that table and ids both have: of a table for
each.
"""


def _take_rows(table: jax.Array, ids: jax.Array, *, stacked: int) -> jax.Array:
    fn: Callable[..., jax.Array] = functools.partial(jnp.take, axis=0)
    for _ in range(stacked):
        fn = jax.vmap(fn)
    return fn(table, ids)


def _shape_of_rows(table: Any, ids: Any, *, stacked: int) -> Any:
    return table.update(shape=(*ids.shape, *table.shape[stacked + 1 :]))


def _rows_jvp(primals: Any, tangents: Any, *, stacked: int) -> tuple[jax.Array, Any]:
    table, ids = primals
    moved, _ = tangents  # the tangent of integer ids is always zero
    rows = LOOKUP.bind(table, ids, stacked=stacked)
    return rows, _take_rows(moved, ids, stacked=stacked)


def _rows_of_batch(value: Any, dims: Any, *, stacked: int) -> tuple[jax.Array, int]:
    """Apply the batching rule of a lookup: ids and rows get the mapped dim in front."""
    table, ids = value
    of_table, of_ids = dims
    if of_table is None and not stacked:
        return LOOKUP.bind(table, jnp.moveaxis(ids, of_ids, 0), stacked=0), 0
    size = table.shape[of_table] if of_ids is None else ids.shape[of_ids]
    table = batching.bdim_at_front(table, of_table, size)
    ids = batching.bdim_at_front(ids, of_ids, size)
    return LOOKUP.bind(table, ids, stacked=stacked + 1), 0


LOOKUP.def_impl(jax.jit(_take_rows, static_argnames="stacked"))
LOOKUP.def_abstract_eval(_shape_of_rows)
ad.primitive_jvps[LOOKUP] = _rows_jvp
batching.primitive_batchers[LOOKUP] = _rows_of_batch
mlir.register_lowering(LOOKUP, mlir.lower_fun(_take_rows, multiple_results=False))


def join_lookups(lookups: list[tuple[Any, Any]], table: Any) -> IndexedRows:
    """Join the rows of all lookups in one table, as rows of its gradient.

    An id out of range gets a row of zeros.
    """
    shape = table.shape
    none = jnp.zeros((0, *table.shape[1:]), table.dtype)
    values = [none, *(rows.reshape(-1, *shape[1:]) for _, rows in lookups)]
    ids = [jnp.zeros(0, jnp.int32), *(widen_indices(x).reshape(-1) for x, _ in lookups)]
    values = jnp.concatenate(values)
    ids = jnp.concatenate(ids)
    if ids.size:
        ids = jnp.where(ids < 0, ids + shape[0], ids)
        exist = (ids >= 0) & (ids < shape[0])
        mask = exist.reshape(exist.shape + (1,) * (values.ndim - 1))
        values = jnp.where(mask, values, jnp.zeros((), values.dtype))
        first = jnp.clip(ids[jnp.argmax(exist)], 0, shape[0] - 1)
        ids = jnp.where(exist, ids, first)
    return IndexedRows(values, ids, shape)
