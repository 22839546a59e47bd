"""Random keys that draw the same for all rows, so that random losses can be audited."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

ALL_TOWERS = 2**32 - 1
"""The number that is folded into a step's key for all towers; it is no tower's id."""

KEY_NAME = "rowfree"
"""The name in the dtype of a row-free key."""


def row_free_key(word: int, *, shared: bool = True) -> jax.Array:
    """Make a key with which ``tower.rng`` draws the same for all rows and towers.

    An audit puts it in ``state.rng``. Its data are two words. While the first word is
    even, every element of a draw is made from that word alone. `jax.random.fold_in`
    then changes nothing, so that towers, rows and micro-batches have one key.
    `jax.random.split` does change the key, so that a loop which draws until it accepts
    a number ends.

    Folding in `ALL_TOWERS`, as ``tower.shared_rng`` does, makes an ordinary key,
    because all towers have that key and no row has one of its own. With
    ``shared=False`` this fold changes nothing, either.
    """
    data = np.array([word & (ALL_TOWERS - 1), 0 if shared else ALL_TOWERS], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=_impl())


@functools.cache
def _impl() -> Any:
    return define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=_split_key,
        random_bits=_random_bits,
        fold_in=_fold_in_key,
        name="the same for all rows",
        tag=KEY_NAME,
    )


def _is_ordinary(key: jax.Array) -> jax.Array:
    return key[0] % 2 == 1


def _threefry(key: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _as_ordinary(key: jax.Array) -> jax.Array:
    return key.at[..., 0].set(key[..., 0] | jnp.uint32(1))


def _next_word(word: jax.Array) -> jax.Array:
    """Step to the next even word by a congruential generator."""
    return (word * jnp.uint32(1664525) + jnp.uint32(1013904223)) & jnp.uint32(
        ALL_TOWERS - 1
    )


def _split_key(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    same = jnp.stack([_next_word(key[0]), key[1]])
    children = jax.random.key_data(jax.random.split(_threefry(key), shape))
    return jnp.where(_is_ordinary(key), _as_ordinary(children), same)


def _fold_in_key(key: jax.Array, data: Any) -> jax.Array:
    folded = _as_ordinary(jax.random.key_data(jax.random.fold_in(_threefry(key), data)))
    is_shared = jnp.asarray(data).astype(jnp.uint32) == jnp.uint32(ALL_TOWERS)
    is_shared &= key[1] != jnp.uint32(ALL_TOWERS)
    return jnp.where(_is_ordinary(key) | is_shared, folded, key)


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    dtype = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[width]
    word = key[0]
    if width == 64:
        high = word.astype(dtype) << dtype(32)
        same = high | _next_word(word).astype(dtype)
    else:
        same = (word >> jnp.uint32(32 - width)).astype(dtype)
    drawn = jax.random.bits(_threefry(key), shape, dtype)
    return jnp.where(_is_ordinary(key), drawn, same)
