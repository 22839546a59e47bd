"""Update only the rows that have a gradient, by an optimizer that sees only these.

It is tried whether this equals the optimizer's update of the whole table.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from towerjax.collectives.sparse_rows import (
    IndexedRows,
    check_fits,
    is_rows,
    set_rows,
    sum_duplicates,
)
from towerjax.proof.equation import all_eqns
from towerjax.types import PyTree, leaf_name, named_leaves
from towerjax.types.leaves import widen_dtype
from towerjax.types.options import is_one_real

_TABLE_ROWS = 6
# The rows that each step looks up: one twice, for a padding row; 4 and 5 in no step.
_STEPS = ((0, 1, 0), (1, 2, 2), (3, 3, 0))
_COUNTS = (1, 10, 100, 1_000, 10_000, 100_000)
_SCALES = (1e3, 1e-3)
_TRIAL_RTOL = 1e-4
_ADVICE = (
    " Write lazy=True to update moments and decay weights only of the rows looked up;"
    " or give a dense gradient: leave the leaf out of `sparse`, or use rows.to_dense()."
)

Owners = Sequence[int | None]
"""For each leaf of an optimizer's state, the index of the table whose rows it has."""


@dataclasses.dataclass(frozen=True)
class RowWise:
    """An optimizer whose parameters and gradients are lists of a tree's leaves."""

    optimizer: optax.GradientTransformationExtraArgs
    treedef: Any  # of the parameters
    names: tuple[str, ...]  # of its leaves, for errors
    tables: tuple[int, ...]  # the leaves whose gradients are rows
    extra_args: Mapping[str, Any]

    def owners(self, params: Sequence[Any], opt_state: PyTree) -> Owners:
        """For each leaf of the state, the table whose rows it has, or None.

        A leaf has a table's rows if its shape changes when the table is a row longer,
        by ``eval_shape``, which also works for ``masked``, ``partition`` and the like.
        """
        structs = jax.eval_shape(list, params)
        expected = self._state_of(structs)
        got = [(name, np.shape(x)) for name, x in named_leaves("opt_state", opt_state)]
        if got != expected:
            differing = sorted({*map(str, got)} ^ {*map(str, expected)})
            raise ValueError(
                "opt_state is not what optimizer.init(params) gives:"
                f" {', '.join(differing[:4]) or 'the order of leaves'} differ."
            )
        owners: list[int | None] = [None] * len(expected)
        for table in self.tables:
            (rows, *row), longer = structs[table].shape, list(structs)
            longer[table] = structs[table].update(shape=(rows + 1, *row))
            pairs = zip(expected, self._state_of(longer), strict=True)
            for i, ((name, old), (_, new)) in enumerate(pairs):
                if old == new:
                    continue
                if old != (rows, *row):
                    raise ValueError(
                        f"{self.names[table]} is of rows, but the optimizer keeps"
                        f" {name} for it, whose shape is not the parameter's,"
                        f" {(rows, *row)}. Give a dense gradient: leave the leaf out of"
                        " `sparse`, or use rows.to_dense()."
                    )
                owners[i] = table
        return owners

    def program(self, params: Sequence[Any]) -> tuple[list[str], set[int]]:
        """The primitives of one update, which is traced, and its whole numbers."""
        tree = self.treedef.unflatten(params)
        update = functools.partial(self.optimizer.update, **self.extra_args)
        state = jax.eval_shape(self.optimizer.init, tree)
        closed = jax.make_jaxpr(update)(tree, state, tree)
        eqns = list(all_eqns(closed.jaxpr))
        atoms = [x.val for eqn in eqns for x in eqn.invars if isinstance(x, Literal)]
        reals = [float(x) for x in (*atoms, *closed.consts) if is_one_real(x)]
        numbers = {int(x) for x in reals if x.is_integer()}
        return [eqn.primitive.name for eqn in eqns], numbers

    def _state_of(self, params: list[Any]) -> list[tuple[str, tuple[int, ...]]]:
        state = jax.eval_shape(self.optimizer.init, self.treedef.unflatten(params))
        return [(name, tuple(x.shape)) for name, x in named_leaves("opt_state", state)]

    def update_dense(
        self, grads: Sequence[Any], opt_state: PyTree, params: Sequence[Any]
    ) -> tuple[list[Any], PyTree]:
        """The optimizer's own update."""
        trees = self.treedef.unflatten(grads), opt_state, self.treedef.unflatten(params)
        updates, state = self.optimizer.update(*trees, **self.extra_args)
        return self.treedef.flatten_up_to(updates), state

    def update(
        self,
        grads: Sequence[Any],
        opt_state: PyTree,
        params: Sequence[Any],
        owners: Owners,
    ) -> tuple[list[Any], PyTree]:
        """One update; where ``grads`` has rows, the optimizer sees only those rows."""
        indices, inner_grads = {}, list(grads)
        for i in self.tables:
            values, size = jnp.asarray(grads[i].values), grads[i].dense_shape[0]
            summed, indices[i] = sum_duplicates(values, grads[i].indices, size)
            inner_grads[i] = summed.astype(values.dtype)

        def rows_of(x: Any, table: int | None) -> Any:
            if table not in indices:
                return x
            return jnp.asarray(x).at[indices[table]].get(mode="fill", fill_value=0)

        def scatter(x: Any, rows: Any, table: int | None) -> Any:
            if table not in indices:
                return rows
            return set_rows(jnp.asarray(x), indices[table], rows)

        state, state_def = jax.tree.flatten(opt_state)
        updates, new_state = self.update_dense(
            inner_grads,
            state_def.unflatten(map(rows_of, state, owners)),
            list(map(rows_of, params, range(len(params)))),
        )
        new_state = map(scatter, state, jax.tree.leaves(new_state), owners)
        for i, rows in indices.items():
            updates[i] = _as_rows(updates[i], rows, np.shape(params[i]))
        return updates, state_def.unflatten(new_state)


def _as_rows(
    values: jax.Array, indices: jax.Array, shape: tuple[int, ...]
) -> IndexedRows:
    """Rows to apply; a padding row becomes zeros, at an index that exists."""
    exist = indices < shape[0]
    mask = exist.reshape(exist.shape + (1,) * (values.ndim - 1))
    values = jnp.where(mask, values, jnp.zeros((), values.dtype))
    return IndexedRows(values, jnp.where(exist, indices, indices[:1]), shape)


def check_row_wise(row_wise: RowWise, params: Sequence[Any]) -> None:
    """Raise unless updating rows equals updating the table, by trials on a small one.

    Rows without a gradient, and their state, must keep every bit; all else must agree
    to 1e-4. The trials run on concrete numbers, under any trace, by one program.
    """
    known = jax.tree.map(_ones_like, dict(row_wise.extra_args))
    row_wise = dataclasses.replace(row_wise, extra_args=known)
    with jax.ensure_compile_time_eval():
        try:
            differs = _Trials(row_wise, params).first_difference()
        except Exception as error:
            names = ", ".join(row_wise.names[i] for i in row_wise.tables)
            raise ValueError(
                f"{names}: of rows, but the optimizer could not be tried on a small"
                f" table: {error!r}. Its update must not depend on traced values other"
                " than its state and params, nor communicate." + _ADVICE
            ) from error
    if differs is not None:
        raise ValueError(
            f"{row_wise.names[differs]} is of rows, but this optimizer's dense update"
            " differs: it also changes rows whose gradient is 0, or their state"
            " (momentum, moments, weight decay), or reads all rows at once." + _ADVICE
        )


def _ones_like(x: Any) -> Any:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return jnp.ones(x.shape, x.dtype)
    return x


class _Trials:
    """Updates of small tables, in a tree like the parameters, by rows and dense."""

    def __init__(self, row_wise: RowWise, params: Sequence[Any]) -> None:
        self.row_wise, self.params, self.tables = row_wise, params, row_wise.tables
        self.rng = np.random.default_rng(0)
        self.small = [self._small_array(i, x) for i, x in enumerate(params)]
        self.state = row_wise.optimizer.init(row_wise.treedef.unflatten(self.small))
        self.owners = row_wise.owners(self.small, self.state)
        self.update_both_ways = jax.jit(self._update)

    def first_difference(self) -> int | None:
        """The first table whose row-wise and dense updates differ, or None."""
        state = self.state
        for indices in np.array(_STEPS):
            differs, self.small, state = self._try_once(indices, state)
            if differs is not None:
                return differs
        others = [(x, 1.0) for x in self._with_other_scalars(state)]
        others += [(state, scale) for scale in _SCALES]
        found = (self._try_once(np.array(_STEPS[0]), *other)[0] for other in others)
        return next((x for x in found if x is not None), None)

    def _small_array(self, number: int, x: Any) -> Any:
        shape = tuple(min(n, 3) for n in np.shape(x))
        shape = (_TABLE_ROWS, *shape[1:]) if number in self.tables else shape
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.ones(shape, dtype)
        # At least float32: rounding to 16 bits could hide a small change.
        return jnp.asarray(self.rng.normal(size=shape), widen_dtype(dtype))

    def _noise(self, x: jax.Array, scale: float) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, x.dtype)
        return (scale * self.rng.normal(size=x.shape)).astype(x.dtype)

    def _try_once(self, indices: np.ndarray, state: PyTree, scale: float = 1.0) -> Any:
        """The first table that differs, and the dense update's params and state."""
        grads = [self._noise(x, scale) for x in self.small]
        got, expected, moved = self.update_both_ways(indices, grads, self.small, state)
        untouched = np.setdiff1d(np.arange(_TABLE_ROWS), indices)
        of_params = [i if i in self.tables else None for i in range(len(self.small))]
        tables = [*of_params, *self.owners]
        leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
        for table, x, y in zip(tables, *leaves, strict=True):
            if not _agree(x, y, untouched if table is not None else None):
                return self.tables[0] if table is None else table, moved, expected[1]
        return None, moved, expected[1]

    def _update(
        self, indices: jax.Array, grads: list[Any], params: list[Any], state: PyTree
    ) -> tuple[Any, Any, Any]:
        """Updates and states, row-wise and dense, and the dense update's params."""
        of_rows, dense = list(grads), list(grads)
        for i in self.tables:
            values = grads[i][: len(indices)]
            of_rows[i] = IndexedRows(values, indices, params[i].shape)
            dense[i] = of_rows[i].to_dense()
        got, got_state = self.row_wise.update(of_rows, state, params, self.owners)
        updates, next_state = self.row_wise.update_dense(dense, state, params)
        got = [x.to_dense() if is_rows(x) else x for x in got]
        moved = optax.apply_updates(params, updates)
        return (got, got_state), (updates, next_state), moved

    def _counts(self) -> list[int]:
        """Step counts to try: powers of ten, and those about the program's integers."""
        primitives, numbers = self.row_wise.program(self.small)
        real = list(self.small)
        for i in self.tables:
            real[i] = jax.ShapeDtypeStruct(np.shape(self.params[i]), real[i].dtype)
        if self.row_wise.program(real)[0] != primitives:
            raise ValueError("it does something else to a table of the real size")
        near = {n + off for n in numbers for off in (-1, 0, 1)}
        return sorted({*_COUNTS, *(n for n in near if 0 <= n <= 10**9)})

    def _with_other_scalars(self, state: PyTree) -> Iterator[PyTree]:
        """The state with each count in its integers, then with 0.5 in its floats."""
        leaves, treedef = jax.tree.flatten(state)
        counts = ((jnp.integer, n) for n in self._counts())
        for kind, value in [*counts, (jnp.floating, 0.5)]:
            yield treedef.unflatten(
                jnp.full_like(x, value)
                if jnp.ndim(x) == 0
                and owner is None
                and jnp.issubdtype(jnp.result_type(x), kind)
                else x
                for x, owner in zip(leaves, self.owners, strict=True)
            )


def _agree(x: Any, y: Any, untouched: np.ndarray | None) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    if untouched is not None:
        inexact = np.issubdtype(x.dtype, np.inexact)
        if not np.array_equal(x[untouched], y[untouched], equal_nan=inexact):
            return False
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.allclose(x, y, rtol=_TRIAL_RTOL, atol=1e-7, equal_nan=True)


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

    For such a leaf the optimizer sees the gradient's rows, those of the same index
    added up, and the same rows of the parameter and of each part of the state that has
    the parameter's shape. The rows' new state is scattered back, in place where the
    state is donated. Nothing else of size ``N`` is read or written.

    This equals the dense update, up to rounding, if the optimizer leaves a row of zero
    gradient unchanged: ``sgd``, ``adagrad``, either after ``clip_by_global_norm``, with
    any schedule. With momentum, moments or weight decay rows without a gradient change
    too. Trials show which it is: a small table of the same tree is updated both ways,
    over three steps and then with each counter of the state at powers of ten up to
    100,000 and about the whole numbers in the update's program, with each number of the
    state at 0.5, and with gradients of a thousand and a thousandth. They do not show
    what happens at other counts only, such as a weight decay behind a learning rate
    that is 0 at all of these, or for parameters far from 1.

    Args:
      optimizer: Any optax transformation whose state has, for each of these leaves,
        parts of the leaf's own shape and parts that do not depend on ``N``.
      grads: Like ``params``; leaves may be ``IndexedRows``, which may repeat an index.
        An index out of range gives NaN, as for ``array + rows``.
      opt_state: The result of ``optimizer.init(params)`` or of the last update.
      params: The parameters.
      lazy: Update moments, and decay weights, only of the rows in ``grads``, whatever
        the dense update would do; counters count every step. A norm or mean over one
        leaf is of these rows too.
      **extra_args: For ``optimizer.update``.

    Returns:
      ``(updates, opt_state)``. Updates are like ``grads``, for
      ``optax.apply_updates``; an ``IndexedRows`` in them has each index once, except
      for rows of zeros. Without ``IndexedRows`` this is ``optimizer.update``.

    Raises:
      ValueError: Rows do not fit a parameter, or the state does not fit the optimizer;
        the state has other shapes, such as the factors of ``adafactor``; not ``lazy``,
        and the dense update differs, or a trial raised. The message names the leaf.

    Example:
      >>> params = {"table": np.ones((4, 1), np.float32)}
      >>> rows = IndexedRows(np.ones((2, 1), np.float32), np.array([3, 3]), (4, 1))
      >>> optimizer = optax.adagrad(0.5)
      >>> @jax.jit
      ... def step(params, opt_state, grads):
      ...     updates, opt_state = update_with_rows(optimizer, grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params, _ = step(params, optimizer.init(params), {"table": rows})
      >>> [f"{x:.2f}" for x in np.ravel(params["table"])]
      ['1.00', '1.00', '1.00', '0.51']

    Source:
      ``lazy``: ``LazyAdamOptimizer`` of TensorFlow (2017).
    """
    optimizer = optax.with_extra_args_support(optimizer)
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_rows)
    leaves = [leaf for _, leaf in with_paths]
    tables = tuple(i for i, leaf in enumerate(leaves) if is_rows(leaf))
    if not tables:
        return optimizer.update(grads, opt_state, params, **extra_args)
    names = tuple(leaf_name("grads", path) for path, _ in with_paths)
    row_wise = RowWise(optimizer, treedef, names, tables, extra_args)
    params = treedef.flatten_up_to(params)
    for i in tables:
        check_fits(names[i], leaves[i], np.shape(params[i]))
    owners = row_wise.owners(params, opt_state)
    if not lazy:
        check_row_wise(row_wise, params)
    updates, opt_state = row_wise.update(leaves, opt_state, params, owners)
    return treedef.unflatten(updates), opt_state
