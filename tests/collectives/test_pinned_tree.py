"""The order in which PinnedTree adds, and what its programs are before XLA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from towerjax.collectives.reduce import add_pairwise
from towerjax.lowering.xla import inline_and_merge


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

    hard = jax.jit(jnp.sin)
    soft = jax.jit(lambda x: jnp.sin(x) / jnp.sin(x))
    lowered = jax.jit(fn).lower(jnp.arange(8.0))
    x = np.arange(8, dtype=np.float32)
    inline_and_merge(lowered)
    text = lowered.as_text()
    assert "call @" not in text and text.count("func.func") == 1
    expected = {"divide": 3, "sort": 2, "add across": 1, "iota": 2, "sine": 2}
    names = re.findall(r"stablehlo\.(\w+(?: across)?)", text)
    assert {name: names.count(name) for name in expected} == expected
    np.testing.assert_allclose(lowered.compile()(x), fn(x), rtol=1e-6)


def test_a_division_by_what_is_spread_is_a_product_with_its_inverse():
    """Of a number, a column, a row, and of what was spread before; of floats alone."""

    def fn(x, column, number):
        rows = jnp.broadcast_to(jnp.broadcast_to(number, (4,))[None], x.shape)
        each = jax.lax.map(lambda row: row / column[:, 0], x.T)
        half = x.astype(jnp.bfloat16) / number.astype(jnp.bfloat16)
        counts = jax.lax.div((x * 8).astype(int), jnp.full((3, 4), number).astype(int))
        turned = (x + 1j) / (column * 1j)
        return x / number, x / column, x / rows, each, half, counts, turned

    rng = np.random.default_rng(0)
    args = [np.float32(rng.uniform(1, 2, shape)) for shape in ((3, 4), (3, 1), ())]
    lowered = jax.jit(fn).lower(*args)
    inline_and_merge(lowered)
    for found, expected in zip(
        lowered.compile()(*args), jax.jit(fn)(*args), strict=True
    ):
        assert found.dtype == expected.dtype
        rtol = 2.0**-7 if found.dtype == jnp.bfloat16 else 1e-6
        found, expected = (np.asarray(x, "complex64") for x in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=rtol)
    text = lowered.as_text()
    spread = set(re.findall(r"(%\w+) = stablehlo.broadcast_in_dim", text))
    divisions = re.findall(r"stablehlo.divide %\w+, (%\w+) : tensor<(.*)>", text)
    by_spread = [kind for by, kind in divisions if by in spread]
    assert by_spread and all("i32" in x or "complex" in x for x in by_spread)
    assert len(divisions) > len(by_spread)  # one for each array that was spread
