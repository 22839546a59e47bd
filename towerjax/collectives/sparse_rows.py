"""Some rows of a large array, as values and indices, before they are added."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.types import PyTree
from towerjax.types.refusals import refuse_no_numbers
from towerjax.types.trees import native, promote_dtypes, widen_dtype


def sum_dtype(dtype: Any) -> Any:
    """Choose the dtype to add in: float32 for 16-bit floats, int32 for booleans."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return widen_dtype(dtype)
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def sum_duplicates(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Add rows that have one index, and sort the rows by index.

    The number of different indices is not known before tracing, so the result has ``u =
    min(r, N)`` rows. Padding rows are zeros with the indices ``N, N + 1, ...``, so that
    all indices differ. A scatter with ``mode="drop"`` leaves them out.
    """
    values, indices = poison_missing(values, indices, num_rows)
    rows = values.shape[0]
    wide = sum_dtype(values.dtype)
    size = min(rows, num_rows)
    order = jnp.argsort(indices, stable=True)
    indices = indices[order]
    values = values[order].astype(wide)
    differs = jnp.concatenate(
        [jnp.ones(min(rows, 1), bool), indices[1:] != indices[:-1]]
    )
    slots = jnp.cumsum(differs.astype(jnp.int32)) - 1
    summed = jnp.zeros((size, *values.shape[1:]), wide)
    summed = summed.at[slots].add(values, indices_are_sorted=True)
    unique = num_rows + jnp.arange(size, dtype=indices.dtype)
    return summed, unique.at[slots].set(indices, indices_are_sorted=True)


def set_rows(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Replace some rows of an array; in place if the array is donated."""
    # Before JAX 0.12, XLA:CPU makes a float32 copy of an array of 16-bit floats for
    # this.
    return array.at[indices].set(
        rows.astype(array.dtype),
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
    )


def poison_missing(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Clip the indices; if one is out of range, spoil all values.

    Spoiled values are NaN, or for integers the number that `poison_value` returns.
    """
    indices = widen_indices(indices)
    exist = ((indices >= 0) & (indices < num_rows)).all()
    values = jnp.where(exist, values, poison_value(values.dtype))
    return values, jnp.clip(indices, 0, num_rows - 1)


def widen_indices(indices: jax.Array) -> jax.Array:
    """Cast indices to int32, or to int64 if they have 64 bits."""
    indices = jnp.asarray(indices)
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    return indices.astype(wide)


def poison_value(dtype: Any) -> Any:
    """Choose the value that ``jnp.take`` fills in for an index out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(info.min if is_signed else info.max, dtype)


_HAS_SHAPE = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedRows:
    """Some rows of an array ``[N, ...]``, whose other rows are 0.

    A row that is named twice counts twice, because rows of the same index are added
    when they are applied. So the SUM of several towers' rows is all of these rows,
    joined, and nothing of size ``N`` is sent.

    An index below 0 or from ``N`` on names no row; JAX would drop or wrap it silently.
    Here it raises a ValueError if the indices are known before tracing: NumPy indices
    at construction, JAX indices when they are applied. If the indices are traced, the
    whole result becomes the fill value of ``jnp.take``. That is NaN for floats, the
    smallest number for signed integers, and the largest for unsigned ones. To pad to a
    fixed ``r``, add rows of zeros at a valid index.

    Attributes:
      values: ``[r, ...]``, the rows.
      indices: ``[r]`` of an integer dtype, the numbers of these rows in the array.
      dense_shape: ``[N, ...]``, the shape of the array, which is static. ``values`` and
        ``indices`` may both have more leading dims, such as ``[T]``: a stack of
        ``IndexedRows``.

    Raises:
      ValueError: Shapes do not fit, indices are not integers, values are booleans, or
        an index names no row.

    Example:
      >>> rows = IndexedRows(np.ones((2, 3)), np.array([1, 1]), (4, 3))
      >>> rows.to_dense()[1].tolist()
      [2.0, 2.0, 2.0]

    Source:
      ``IndexedSlices`` of TensorFlow (2015).
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        """Check what is known of the rows; leaves may be tracers, or not arrays."""
        shape: Any = self.dense_shape
        if not isinstance(shape, Iterable) or not tuple(shape):
            raise ValueError(
                f"IndexedRows.dense_shape is {shape!r}, but must be (N, ...), the shape"
                " of the array whose rows these are."
            )
        object.__setattr__(self, "dense_shape", tuple(shape))
        object.__setattr__(self, "values", native(self.values))
        object.__setattr__(self, "indices", native(self.indices))
        dtype = getattr(self.indices, "dtype", None)
        # Indices of float0 are the tangent of integers.
        if isinstance(self.indices, _HAS_SHAPE) and dtype != jax.dtypes.float0:
            _check_rows(self)

    def to_dense(self) -> jax.Array:
        """Put these rows in an array of ``dense_shape`` that is 0 elsewhere."""
        dtype = jnp.asarray(self.values).dtype
        return self.add_to(jnp.zeros(self.dense_shape, dtype))

    def add_to(self, array: jax.Array) -> jax.Array:
        """Add these rows to ``array``, in the array's dtype.

        16-bit floats are added in float32 and rounded once.
        """
        refuse_no_numbers("IndexedRows.add_to: array", array)
        array = jnp.asarray(array)
        values = jnp.asarray(self.values)
        check_fits("IndexedRows", self, array.shape)
        _check_holds(array.dtype, values.dtype)
        indices = widen_indices(self.indices)
        wide = sum_dtype(array.dtype)
        added = array.astype(wide).at[indices].add(values.astype(wide))
        added = added.astype(array.dtype)
        if not isinstance(indices, Tracer):
            return added
        exist = ((indices >= 0) & (indices < array.shape[0])).all()
        return jnp.where(exist, added, poison_value(array.dtype))

    def check_range(self, name: str = "IndexedRows") -> None:
        """Raise unless each known index names a row."""
        if isinstance(self.indices, Tracer):
            return
        indices = np.asarray(self.indices)
        num_rows = self.dense_shape[0]
        bad = indices[(indices < 0) | (indices >= num_rows)]
        if bad.size:
            raise ValueError(
                f"{name}.indices has {', '.join(map(str, bad[:5]))}, but the array has"
                f" {num_rows} rows, from 0 to {num_rows - 1}. To pad, add rows of zeros"
                " at a valid index."
            )

    # None makes NumPy's ``array + rows`` call ``__radd__``, as JAX's does.
    __array_ufunc__ = None

    def __radd__(self, array: Any) -> jax.Array:
        """Add rows to ``array`` in its dtype, for `optax.apply_updates`.

        Rows are added as by `add_to`, but nothing of size ``N`` is read or written. So
        an index that names no row makes only the rows at the nearest indices NaN. Rows
        of a wider float dtype are added in that dtype and rounded once, as optax adds
        updates.
        """
        array = jnp.asarray(array)
        check_fits("IndexedRows", self, array.shape)
        values = jnp.asarray(self.values)
        num_rows = array.shape[0]
        wide = sum_dtype(promote_dtypes(array.dtype, values.dtype))
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            _check_holds(array.dtype, values.dtype)
        elif jnp.issubdtype(wide, jnp.complexfloating):
            _check_holds(sum_dtype(array.dtype), values.dtype)
        if wide == array.dtype:
            values, indices = poison_missing(values, self.indices, num_rows)
            return array.at[indices].add(values.astype(wide))
        # Each row is added in the wider dtype and rounded once.
        values, indices = sum_duplicates(values.astype(wide), self.indices, num_rows)
        rows = array.at[indices].get(mode="fill", fill_value=0).astype(wide) + values
        return set_rows(array, indices, rows)


def check_fits(name: str, rows: IndexedRows, shape: tuple[int, ...]) -> None:
    """Raise unless rows can be added to an array of this shape."""
    if shape != rows.dense_shape or np.ndim(rows.indices) != 1:
        raise ValueError(
            f"{name} has rows of an array of shape {rows.dense_shape}, with indices of"
            f" shape {np.shape(rows.indices)}, which cannot be added to an array of"
            f" shape {shape}. Give the same shape, and indices [r]."
        )
    rows.check_range()


def _check_holds(dtype: Any, values: Any) -> None:
    if promote_dtypes(dtype, values) != dtype:
        raise ValueError(
            f"IndexedRows of {values} cannot be added to an array of {dtype}, which"
            " cannot hold them. Cast the values, rows.values.astype(array.dtype)."
        )


def _check_rows(rows: IndexedRows) -> None:
    indices = rows.indices
    shape = np.shape(rows.indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"IndexedRows.indices are {indices.dtype}, not integers. Give the numbers"
            " of the rows."
        )
    if isinstance(rows.values, _HAS_SHAPE):
        if rows.values.dtype == np.bool_:
            raise ValueError(
                "IndexedRows.values are bool, which cannot be added. Give numbers."
            )
        row = rows.dense_shape[1:]
        if not shape or np.shape(rows.values) != (*shape, *row):
            expected = ", ".join(map(str, ("r", *row)))
            raise ValueError(
                f"IndexedRows of an array of shape {rows.dense_shape} got values of"
                f" shape {np.shape(rows.values)} and indices of shape {shape}. Give"
                f" values [{expected}] and indices [r]."
            )
    if isinstance(indices, np.ndarray):
        rows.check_range()


is_rows: Callable[[Any], bool] = IndexedRows.__instancecheck__
"""Whether ``x`` is ``IndexedRows``; asked of each node of many trees."""


def is_sparse(x: Any) -> bool:
    """Return whether ``x`` is a sparse array of this library, of JAX or of SciPy."""
    # A sparse array exists only if its module has been imported already. An import here
    # would be slow.
    module = sys.modules.get("jax.experimental.sparse")
    return (
        is_rows(x)
        or isinstance(x, getattr(module, "JAXSparse", ()))
        or type(x).__module__.startswith("scipy.sparse.")
    )


def dense_shape(x: Any) -> tuple[int, ...]:
    """Return the shape of an array, dense or sparse."""
    return x.dense_shape if is_rows(x) else np.shape(x)


def rebuild(leaf: Any, values: Any, indices: Any, shape: tuple[int, ...]) -> Any:
    """Make a sparse array of the class of ``leaf`` of these values and indices."""
    if is_rows(leaf):
        return IndexedRows(values, indices, shape)
    aux = {"shape": shape, "indices_sorted": False, "unique_indices": False}
    return type(leaf).tree_unflatten(aux, (values, indices))


def splits_entries(tree: PyTree) -> bool:
    """Look for a sparse leaf that lists all examples' entries in one array.

    Such entries must be split over towers. A sparse leaf with a dim of examples can be
    split along that dim.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_sparse)
    return any(is_sparse(x) and not getattr(x, "n_batch", 0) for x in leaves)


def split_micro_batches(rows: PyTree, parts: int) -> PyTree:
    """Split a tower's rows into ``parts`` micro-batches, stacked along dim 0."""

    def split_leaf(x: Any) -> Any:
        split = [
            leaf.reshape((parts, leaf.shape[0] // parts) + leaf.shape[1:])
            for leaf in jax.tree.leaves(x)
        ]
        shape = (num_rows(x) // parts, *dense_shape(x)[1:])
        return rebuild(x, split[0], split[1], shape) if is_sparse(x) else split[0]

    return jax.tree.map(split_leaf, rows, is_leaf=is_sparse)


def all_rows_of(dense: jax.Array) -> IndexedRows:
    """List all rows of an array ``[N, ...]`` as ``IndexedRows``."""
    dense = jnp.asarray(dense)
    indices = jnp.arange(dense.shape[0], dtype=jnp.int32)
    return IndexedRows(dense, indices, dense.shape)


def end_to_end(rows: Sequence[IndexedRows], shape: tuple[int, ...]) -> IndexedRows:
    """Join several ``IndexedRows`` of one table, which has this shape, to one."""
    values = jnp.concatenate([jnp.asarray(x.values) for x in rows])
    indices = jnp.concatenate([jnp.asarray(x.indices) for x in rows])
    return IndexedRows(values, indices, shape)


def flatten_stack(rows: IndexedRows) -> IndexedRows:
    """Join a stack of towers' ``IndexedRows`` to one, with ``T * r`` rows.

    The stack's indices are ``[T, r]``.
    """
    values = jnp.asarray(rows.values)
    indices = jnp.asarray(rows.indices)
    if indices.ndim != 2:
        raise ValueError(
            "IndexedRows of all towers need indices [T, r], but these have shape"
            f" {indices.shape}. Stack one IndexedRows for each tower."
        )
    values = values.reshape(indices.size, *values.shape[2:])
    return IndexedRows(values, indices.reshape(-1), rows.dense_shape)


def map_values(fn: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Apply ``fn`` to each array of a tree and to the values of ``IndexedRows``."""

    def map_leaf(*args: Any) -> Any:
        out = fn(*[x.values if is_rows(x) else x for x in args])
        return dataclasses.replace(args[0], values=out) if is_rows(args[0]) else out

    return jax.tree.map(map_leaf, tree, *others, is_leaf=is_rows)


def as_dense(tree: PyTree) -> PyTree:
    """Replace ``IndexedRows`` in a tree by arrays.

    An index out of range makes the array NaN.
    """

    def densify(x: Any) -> Any:
        return jnp.zeros(x.dense_shape, x.values.dtype) + x if is_rows(x) else x

    return jax.tree.map(densify, tree, is_leaf=is_rows)


def add_trees(first: PyTree, second: PyTree) -> PyTree:
    """Add trees leaf by leaf; join rows of a table end to end."""

    def add_leaves(x: Any, y: Any) -> Any:
        return end_to_end((x, y), x.dense_shape) if is_rows(x) else x + y

    return jax.tree.map(add_leaves, first, second, is_leaf=is_rows)


def num_rows(rows: Any) -> int:
    """Count the rows of a tower's part of a batch."""
    first = jax.tree.leaves(rows, is_leaf=is_sparse)[0]
    return dense_shape(first)[0]
