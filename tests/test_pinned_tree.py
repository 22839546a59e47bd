"""The order in which PinnedTree adds, and what its programs are before XLA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.private_jax import inline_and_merge


@pytest.mark.slow
def test_the_tree_depends_on_the_number_of_towers_alone():
    rows = np.random.default_rng(0).normal(size=(12, 1000)).astype(np.float32)

    @jax.jit
    def sums(rows):
        """Of all at once, and of parts that are added up first."""
        parts = [[add_pairwise(x) for x in jnp.split(rows, n)] for n in (12, 6, 3, 4)]
        return add_pairwise(rows), [add_pairwise(jnp.stack(x)) for x in parts]

    whole, (*again, of_thirds) = jax.device_get(sums(rows))
    for one in again:  # powers of two: a device's towers are a subtree
        np.testing.assert_array_equal(whole, one)
    assert (of_thirds != whole).any()


@pytest.mark.slow
def test_calls_are_inlined_and_equal_operations_of_a_computation_merged():
    divided = jax.jit(lambda x, by: jnp.sort(x) / by)

    def fn(x):
        twice = divided(x, x.sum()) * divided(x, x.sum()) + jnp.arange(8.0)
        # A loop has numbers of its own, equal to those before it.
        each = jax.lax.map(lambda row: divided(row, 2.0) + jnp.arange(8.0), x[None])
        return twice + each[0] + jnp.arange(8.0) + jax.lax.cond(x[0] > 0, hard, soft, x)

    hard, soft = jax.jit(jnp.sin), jax.jit(lambda x: jnp.sin(x) / jnp.sin(x))
    lowered, x = jax.jit(fn).lower(jnp.arange(8.0)), np.arange(8, dtype=np.float32)
    inline_and_merge(lowered)
    text = lowered.as_text()
    assert "call @" not in text and text.count("func.func") == 1
    expected = {"divide": 3, "sort": 2, "add across": 1, "iota": 2, "sine": 2}
    names = re.findall(r"stablehlo\.(\w+(?: across)?)", text)
    assert {name: names.count(name) for name in expected} == expected
    np.testing.assert_allclose(lowered.compile()(x), fn(x), rtol=1e-6)
