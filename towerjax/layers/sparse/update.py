"""How does an optimizer update a table? Only the rows that have a gradient."""

from typing import Any

import jax
import numpy as np
import optax

from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.layers.sparse.probe import check_row_wise
from towerjax.layers.sparse.row_wise import RowWise
from towerjax.types import PyTree, leaf_name


def update_with_rows(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    lazy: bool = False,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """``optimizer.update`` for gradients that hold ``IndexedRows``.

    For such a leaf the optimizer sees the rows, those of the same index added up; of
    the parameter, and of each part of the state that has the parameter's shape, the
    same rows. Their new state is scattered back, in place where the state is donated.
    Nothing of size ``N`` is read or written, but for that.

    That is the dense update, up to rounding, if to the optimizer a row of zeros means
    that nothing changes: ``sgd``, ``adagrad``, either after
    ``clip_by_global_norm``, with any schedule. With momentum, moments or weight decay
    rows without a gradient move too. This is found out by trying: a small table of the
    same tree is updated both ways, over three steps and then with each counter of the
    state at powers of ten up to 100,000 and about the whole numbers in the update's
    program, with each number of the state at 0.5, and with gradients of a thousand and
    a thousandth. Not seen is what happens at other counts alone, such as a weight decay
    behind a learning rate that is 0 at all of these, or for parameters far from 1.

    Args:
      optimizer: Any optax transformation of which the state has, for each of these
        leaves, parts of the leaf's own shape and parts that do not depend on ``N``.
      grads: Like ``params``; leaves may be ``IndexedRows``, with one index more than
        once. An index that names no row is as for ``array + rows``: NaN.
      opt_state: What ``optimizer.init(params)`` gave, or the last update.
      params: The parameters.
      lazy: Update moments, and decay weights, only of the rows in ``grads``, whatever
        the dense update would do; counters count every step. A norm or mean over one
        leaf is of these rows too.
      **extra_args: For ``optimizer.update``.

    Returns:
      ``(updates, opt_state)``. Updates are like ``grads``, for
      ``optax.apply_updates``; the rows of an ``IndexedRows`` in it have different
      indices, but for some of zeros. Without ``IndexedRows`` it is
      ``optimizer.update``.

    Raises:
      ValueError: Rows do not fit a parameter, or the state the optimizer; the state is
        of other shapes, such as the factors of ``adafactor``; not ``lazy``, and the
        dense update would be another one, or trying it raised. Names the leaf.

    Example:
      >>> params = {"table": np.ones((4, 1), np.float32)}
      >>> rows = IndexedRows(np.ones((2, 1), np.float32), np.array([3, 3]), (4, 1))
      >>> optimizer = optax.adagrad(0.5)
      >>> updates, opt_state = update_with_rows(
      ...     optimizer, {"table": rows}, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> [f"{x:.2f}" for x in params["table"][:, 0]]
      ['1.00', '1.00', '1.00', '0.51']

    Source:
      ``lazy``: ``LazyAdamOptimizer`` of TensorFlow (2017).
    """
    optimizer = optax.with_extra_args_support(optimizer)
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_rows)
    leaves = [leaf for _, leaf in with_paths]
    tables = [i for i, leaf in enumerate(leaves) if is_rows(leaf)]
    if not tables:
        return optimizer.update(grads, opt_state, params, **extra_args)
    names = tuple(leaf_name("grads", path) for path, _ in with_paths)
    row_wise = RowWise(optimizer, treedef, names)
    params = treedef.flatten_up_to(params)
    for i in tables:
        _check_rows(names[i], leaves[i], params[i])
    owners = row_wise.owners(params, tables, opt_state)
    if not lazy:
        check_row_wise(row_wise, leaves, params, extra_args)
    updates, opt_state = row_wise.update(leaves, opt_state, params, owners, extra_args)
    return jax.tree.unflatten(treedef, updates), opt_state


def _check_rows(name: str, rows: IndexedRows, param: Any) -> None:
    if rows.dense_shape != np.shape(param) or np.ndim(rows.indices) != 1:
        raise ValueError(
            f"{name} has rows of an array of shape {rows.dense_shape}, with indices of"
            f" shape {np.shape(rows.indices)}, but the parameter is of shape"
            f" {np.shape(param)}. Both must be the same, and indices [r]."
        )
    rows.check_range()
