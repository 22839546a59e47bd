"""The order in which PinnedTree adds, and a run of a Flax model."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.private_jax import inline_and_merge

ROWS = 61  # ragged: 8 towers have 8 rows each, the last one 5


class Network(nn.Module):
    """A convolution and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(10)(x)


def loss_fn(params, batch, tower):
    logits = Network().apply({"params": params}, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    hits = logits.argmax(-1) == batch["y"]
    return tj.TowerOutput(
        loss=tj.Weighted.mean(losses, tower.weight * batch["weight"]),
        metrics={"accuracy": tj.Weighted.mean(hits, tower.weight)},
    )


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield {
            "x": rng.normal(size=(ROWS, 8, 8, 1)).astype(np.float32),
            "y": rng.integers(0, 10, ROWS),
            "weight": rng.uniform(size=ROWS).astype(np.float32),
        }


def start():
    # Eight rows a tower, as many as towers: in a loop both were one array once.
    key, rng = jax.random.key(0), np.random.default_rng(3)
    shapes = jax.eval_shape(Network().init, key, next(batches(1))["x"])["params"]
    return jax.tree.map(
        lambda x: (0.2 * rng.normal(size=x.shape)).astype(x.dtype), shapes
    )


def train(devices, *, steps):
    names = tuple(f"cpu:{i}" for i in range(devices))
    pinned = tj.PinnedTree()
    strategy = tj.Mirrored(names, towers=8, local="scan", cross_tower_ops=pinned)
    step = tj.build_train_step(loss_fn, optax.adam(1e-2), strategy, remainder="pad")
    params = start()
    state, metrics = step.init(params), []
    for batch in batches(steps):
        state, one = step(state, batch)
        metrics.append(one)
    after = jax.device_get(state.params)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, after)
    assert min(jax.tree.leaves(moved)) > 1e-4, "a parameter did not train"
    return jax.device_get((state.params, state.opt_state, metrics))


@pytest.mark.slow
def test_adam_steps_have_the_same_bits_on_one_device_and_on_8():
    # Needs a loop of one trip that XLA:CPU cannot drop; `test_same_bits` has many more.
    one, eight = (jax.tree.leaves(train(devices, steps=3)) for devices in (1, 8))
    assert [x.tobytes() for x in one] == [x.tobytes() for x in eight]


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
