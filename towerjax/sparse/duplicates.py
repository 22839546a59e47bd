"""How are rows added up and put back, when indices repeat or name no row?"""

from typing import Any

import jax
import jax.numpy as jnp

from towerjax.reduce import addable


def sum_duplicates(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The rows with those of the same index added up, by ascending index.

    ``u = min(r, N)`` is known before tracing; how many different indices there are is
    not. So rows of zeros fill up, whose indices ``N, N + 1, ...`` name no row: a
    scatter with ``mode="drop"`` leaves them out, and all indices are different.

    Args:
      values: ``[r, ...]``.
      indices: ``[r]``, an integer dtype.
      num_rows: ``N``.

    Returns:
      ``(values [u, ...], indices [u])``; 16-bit floats come back as the float32 they
      are added in, indices as int32 (int64 for 64-bit ones). Where an index names no
      row, all values are what ``jnp.take`` fills in: NaN for floats.

    Example:
      >>> values, indices = sum_duplicates(jnp.ones((3, 1)), jnp.array([2, 0, 2]), 5)
      >>> values[:, 0].tolist(), indices.tolist()
      ([1.0, 2.0, 0.0], [0, 2, 7])
    """
    values, indices = existing_rows(values, indices, num_rows)
    rows, wide = values.shape[0], addable(values.dtype)
    size = min(rows, num_rows)
    order = jnp.argsort(indices, stable=True)
    indices, values = indices[order], values[order].astype(wide)
    differs = jnp.concatenate(
        [jnp.ones(min(rows, 1), bool), indices[1:] != indices[:-1]]
    )
    slots = jnp.cumsum(differs.astype(jnp.int32)) - 1
    summed = jnp.zeros((size, *values.shape[1:]), wide)
    summed = summed.at[slots].add(values, indices_are_sorted=True)
    unique = num_rows + jnp.arange(size, dtype=indices.dtype)
    return summed, unique.at[slots].set(indices, indices_are_sorted=True)


def set_rows(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The array with some rows replaced; in place, where it is donated.

    But for 16-bit floats on CPUs before JAX 0.12, which XLA scatters in a float32 copy.

    Args:
      array: ``[N, ...]``.
      indices: ``[u]``, ascending and different, from 0; those from ``N`` on are left
        out.
      rows: ``[u, ...]``, of the array's dtype.

    Returns:
      An array like ``array``.
    """
    return array.at[indices].set(
        rows, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def existing_rows(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The rows, with indices that all exist; poisoned if some did not.

    Costs nothing of size ``N``, and cannot go unseen.

    Args:
      values: ``[r, ...]``.
      indices: ``[r]``, an integer dtype.
      num_rows: ``N``.

    Returns:
      ``(values, indices)``: as they were; or if an index names no row, all values
      poisoned and each index the nearest that exists.
    """
    indices = wide_indices(indices)
    exist = ((indices >= 0) & (indices < num_rows)).all()
    values = jnp.where(exist, values, poison(values.dtype))
    return values, jnp.clip(indices, 0, num_rows - 1)


def wide_indices(indices: jax.Array) -> jax.Array:
    """Indices in a dtype that counts the rows of any array.

    Args:
      indices: Integers.

    Returns:
      int32, or int64 for 64-bit integers.
    """
    indices = jnp.asarray(indices)
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    return indices.astype(wide)


def poison(dtype: Any) -> Any:
    """What ``jnp.take`` fills in for a row that there is not.

    Args:
      dtype: Of the values.

    Returns:
      NaN; for integers the smallest (signed) or largest (unsigned).
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    value = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return jnp.asarray(value, dtype)
