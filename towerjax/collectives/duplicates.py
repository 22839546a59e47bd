"""How are rows added up and put back, when indices repeat or name no row?"""

from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.reduce import addable


def sum_duplicates(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The rows with those of the same index added up, by ascending index.

    ``u = min(r, N)`` is known before tracing; how many different indices there are is
    not. So rows of zeros fill up, whose indices ``N, N + 1, ...`` name no row: a
    scatter with ``mode="drop"`` leaves them out, and all indices are different.
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
    """
    return array.at[indices].set(
        rows, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def existing_rows(
    values: jax.Array, indices: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The rows, with indices that all exist; poisoned if some did not.

    Costs nothing of size ``N``, and cannot go unseen.
    """
    indices = wide_indices(indices)
    exist = ((indices >= 0) & (indices < num_rows)).all()
    values = jnp.where(exist, values, poison(values.dtype))
    return values, jnp.clip(indices, 0, num_rows - 1)


def wide_indices(indices: jax.Array) -> jax.Array:
    """Indices in a dtype that counts the rows of any array."""
    indices = jnp.asarray(indices)
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    return indices.astype(wide)


def poison(dtype: Any) -> Any:
    """What ``jnp.take`` fills in for a row that there is not."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    value = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return jnp.asarray(value, dtype)
