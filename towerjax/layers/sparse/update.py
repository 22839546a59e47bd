"""Update only the rows that have a gradient, with an optimizer that sees only these."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.collectives.sparse_rows import (
    IndexedRows,
    as_dense,
    is_rows,
    set_rows,
    sum_duplicates,
)
from towerjax.step.state.trainable import check_like_params
from towerjax.types import PyTree
from towerjax.types.options import check_flag, check_methods
from towerjax.types.trees import named_leaves


def update_with_rows(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    lazy: bool = False,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Update by an optimizer, with gradients that hold ``IndexedRows``.

    Rows of the same index are added first. Without ``lazy`` the optimizer sees a dense
    gradient, whose other rows are 0. With ``lazy`` it sees only these rows. It also
    sees the same rows of the parameter, and of each part of the state that has the
    parameter's shape. The new rows of the state are scattered back, in place if the
    state is donated. Nothing else of size ``N`` is read or written.

    The lazy update gives the same as the dense update if a row with gradient zero does
    not change. This holds for ``sgd`` and ``adagrad``, also after
    ``clip_by_global_norm``. With momentum, moments or weight decay the dense update
    also moves rows that were not looked up. The lazy update does not move them, while
    counters count every step. A norm or mean over one leaf is then over the rows that
    were looked up.

    Args:
      optimizer: Any optax transformation. With ``lazy``, each part of its state has the
        shape of such a leaf, or does not depend on ``N``.
      grads: A tree like ``params``, whose leaves may be ``IndexedRows``. These may
        repeat an index. An index out of range gives NaN, as for ``array + rows``.
      opt_state: The result of ``optimizer.init(params)`` or of the last update.
      params: The parameters.
      lazy: Update only the rows in ``grads``, their moments and their weight decay.
      **extra_args: For ``optimizer.update``.

    Returns:
      ``(updates, opt_state)``, for ``optax.apply_updates``. With ``lazy``, the updates
      of tables are ``IndexedRows``. Each index occurs once, except for rows of zeros.

    Raises:
      ValueError: Rows do not fit a parameter. With ``lazy`` also: the state does not
        fit the optimizer, or has other shapes, such as the factors of ``adafactor``.
        The error names the leaf.

    Example:
      >>> params = {"table": np.ones((4, 1), np.float32)}
      >>> rows = IndexedRows(np.ones((2, 1), np.float32), np.array([3, 3]), (4, 1))
      >>> optimizer = optax.adam(0.5)
      >>> @jax.jit
      ... def step(params, opt_state, grads):
      ...     updates, opt_state = update_with_rows(
      ...         optimizer, grads, opt_state, params, lazy=True
      ...     )
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params, _ = step(params, optimizer.init(params), {"table": rows})
      >>> [f"{x:.2f}" for x in np.ravel(params["table"])]
      ['1.00', '1.00', '1.00', '0.50']

    Source:
      ``lazy``: ``LazyAdamOptimizer`` of TensorFlow (2017).
    """
    check_methods("optimizer", optimizer, "init update", "optax.sgd(0.1)")
    check_flag("lazy", lazy)
    optimizer = optax.with_extra_args_support(optimizer)
    named, _ = _named_rows(grads)
    tables = {i: name for i, (name, x) in enumerate(named) if is_rows(x)}
    if tables or params is not None:
        check_like_params(grads, params)
    if not tables:
        return optimizer.update(grads, opt_state, params, **extra_args)
    if not lazy:
        return optimizer.update(as_dense(grads), opt_state, params, **extra_args)
    owners = _owners(optimizer.init, params, opt_state, tables)
    update = functools.partial(optimizer.update, **extra_args)
    return _update_rows(update, grads, opt_state, params, owners)


def _named_rows(grads: PyTree) -> tuple[list[tuple[str, Any]], Any]:
    """List the leaves with names, and the tree's structure.

    ``IndexedRows`` count as one leaf.
    """
    named = named_leaves("grads", grads, is_leaf=is_rows)
    return named, jax.tree.structure(grads, is_leaf=is_rows)


def _update_rows(
    update: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    owners: list[int | None],
) -> tuple[PyTree, PyTree]:
    """Do one update by an optimizer that sees only the rows in ``grads``.

    ``owners`` has for each leaf of the state the index of the table whose rows it has.
    """
    named, treedef = _named_rows(grads)
    inner = [x for _, x in named]
    indices = {}
    for i, rows in enumerate(inner):
        if is_rows(rows):
            values = jnp.asarray(rows.values)
            size = rows.dense_shape[0]
            summed, indices[i] = sum_duplicates(values, rows.indices, size)
            inner[i] = summed.astype(values.dtype)

    def rows_of(x: Any, table: int | None) -> Any:
        if table not in indices:
            return x
        return jnp.asarray(x).at[indices[table]].get(mode="fill", fill_value=0)

    def scatter(x: Any, rows: Any, table: int | None) -> Any:
        if table not in indices:
            return rows
        return set_rows(jnp.asarray(x), indices[table], rows)

    state, state_def = jax.tree.flatten(opt_state)
    wholes = treedef.flatten_up_to(params)
    updates, after = update(
        treedef.unflatten(inner),
        state_def.unflatten(map(rows_of, state, owners)),
        treedef.unflatten(map(rows_of, wholes, range(len(wholes)))),
    )
    after = map(scatter, state, jax.tree.leaves(after), owners)
    out = treedef.flatten_up_to(updates)
    for i, at in indices.items():
        # Padding rows have an index that does not exist. They get a valid one, with
        # zeros.
        values = out[i]
        shape = np.shape(wholes[i])
        exist = at < shape[0]
        mask = exist.reshape(exist.shape + (1,) * (values.ndim - 1))
        values = jnp.where(mask, values, jnp.zeros((), values.dtype))
        out[i] = IndexedRows(values, jnp.where(exist, at, at[:1]), shape)
    return treedef.unflatten(out), state_def.unflatten(after)


def _owners(
    init: Any, params: PyTree, opt_state: PyTree, names: Mapping[int, str]
) -> list[int | None]:
    """Find for each leaf of the state the index of the table that it belongs to.

    The index is None for a leaf that belongs to no table. A leaf belongs to a table if
    its shape changes when the table is a row longer. This is found by ``eval_shape``,
    so it also works for ``masked`` and ``partition``.
    """
    structs, treedef = jax.tree.flatten(jax.eval_shape(lambda x: x, params))

    def shapes_of(structs: list[Any]) -> list[tuple[str, tuple[int, ...]]]:
        state = jax.eval_shape(init, treedef.unflatten(structs))
        return [(name, x.shape) for name, x in named_leaves("opt_state", state)]

    expected = shapes_of(structs)
    got = [(name, np.shape(x)) for name, x in named_leaves("opt_state", opt_state)]
    if got != expected:
        differing = sorted({*map(str, got)} ^ {*map(str, expected)})
        raise ValueError(
            "opt_state is not the result of optimizer.init(params):"
            f" {', '.join(differing[:4]) or 'the order of leaves'} differ."
        )
    owners: list[int | None] = [None] * len(expected)
    for table, table_name in names.items():
        (rows, *row) = structs[table].shape
        longer = list(structs)
        longer[table] = structs[table].update(shape=(rows + 1, *row))
        pairs = zip(expected, shapes_of(longer), strict=True)
        for i, ((name, old), (_, new)) in enumerate(pairs):
            if old == new:
                continue
            if old != (rows, *row):
                raise ValueError(
                    f"{table_name} has a gradient of rows, but the optimizer keeps"
                    f" {name} for it, whose shape is not that of the parameter,"
                    f" {(rows, *row)}. Write lazy=False, which updates all rows."
                )
            owners[i] = table
    return owners
