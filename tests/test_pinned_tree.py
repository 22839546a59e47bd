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


def test_broadcasts_are_written_at_once_and_give_the_same():
    """From each dim of 1, of another broadcast or reshape, and inside a loop."""

    def fn(x, column, number):
        spread = jnp.broadcast_to(column[None], (3, 1, 4))
        spread = jnp.broadcast_to(spread, (3, 2, 4))
        ones = [number.reshape(1, 1), number.reshape(1, 1, 1)[0]]
        rows = jax.lax.broadcast_in_dim(x[:, :1], (2, 3, 4), (1, 2))
        each = jax.lax.map(lambda row: row[None] / column * ones[0], x)
        none = jnp.broadcast_to(column[:, :1], (0, 4)).sum() + x.sum(0, keepdims=True)
        pairs = spread * column[None] + jnp.sin(x[:, None]) * jnp.ones((3, 2, 4))
        return pairs, x / ones[0] + x * ones[1], rows, each, none

    rng = np.random.default_rng(0)
    args = [np.float32(rng.uniform(1, 2, shape)) for shape in ((3, 4), (1, 4), ())]
    lowered = jax.jit(fn).lower(*args)
    inline_and_merge(lowered)
    for found, expected in zip(lowered.compile()(*args), fn(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    form = r"(%\w+) = stablehlo.broadcast_in_dim (%\w+), dims = \[(.*?)\]"
    form += r" : \(tensor<(.*?)f32>\) -> tensor<(.*?)f32>"
    written = re.findall(form, lowered.as_text())
    sizes = lambda text: [*map(int, re.findall(r"\d+", text))]  # noqa: E731
    for *_, dims, given, out in written:
        assert sizes(given) == [sizes(out)[at] for at in sizes(dims)]
    spread = {result for result, *_ in written}
    reshaped = re.findall(r"stablehlo.reshape (%\w+)", lowered.as_text())
    assert len(written) > 8 and not spread & {*reshaped, *[x for _, x, *_ in written]}
