"""The training that the tests of checkpoints stop and go on with, in any process."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

# 40 = 2 * 16 + 8: a ragged end; each third step is ragged
N = 40
SIZE = 16
STEPS = 8


def loss_fn(params, batch, tower):
    noise = jax.random.key_data(tower.rng)[0] / 2.0**32  # a draw compiles long
    x = batch["x"] + params["half"].astype(jnp.float32)[None]
    errors = x @ params["w"] - batch["y"] - 0.1 * noise
    weight = tower.weight.sum()
    key = jax.random.key_data(tower.local["key"]) + tower.id.astype(np.uint32)
    local = {
        "rows": tower.local["rows"] + weight.astype(jnp.int32),
        "mean": 0.5 * tower.local["mean"] + errors.mean(),
        "key": jax.random.wrap_key_data(key),
    }
    return tj.TowerOutput(tj.Weighted.mean(errors**2, tower.weight), local=local)


def build(devices, towers=8, **options):
    """The step on the first devices; None takes all of them."""
    strategy = tj.Mirrored(
        devices=devices and [f"cpu:{i}" for i in range(devices)],
        towers=towers,
        tower_loop="scan",
        cross_tower_ops=tj.PinnedTree(),
    )
    # A tower's noise is one number of its own key.
    options = {"remainder": "pad", "audit": False, **options}
    optimizer = optax.sgd(0.01, momentum=0.9)
    return tj.build_train_step(loss_fn, optimizer, strategy, **options)


def build_light(strategy=None, **options):
    """A step that compiles in a moment, for what any state shows."""

    def light_loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch["y"]) ** 2, tower.weight)

    options = {"remainder": "pad", "max_programs": 1, **options}
    optimizer = optax.sgd(0.01, momentum=0.9)
    strategy = strategy or tj.OneDevice()
    return tj.build_train_step(light_loss_fn, optimizer, strategy, **options)


def params():
    return {
        "w": np.array([0.5, -1, 2], np.float32),
        "half": jnp.array([1.0, 0.25, 3.0], jnp.bfloat16),
        "none": np.zeros((0, 3), np.float32),
    }


def init(step):
    if step.strategy == tj.OneDevice():
        return step.init(np.float32(0))
    first = tj.Reduction.ONLY_FIRST_TOWER
    local = {
        "rows": tj.TowerLocal(np.int32(0), tj.Reduction.SUM),
        "mean": tj.TowerLocal(np.float32(0), tj.Reduction.MEAN),
        "key": tj.TowerLocal(jax.random.key(9), first),
    }
    return step.init(params(), local=local, rng=jax.random.key(3))


def data():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(N, 3)).astype(np.float32),
        "y": rng.normal(size=N).astype(np.float32),
        "id": np.arange(N),
    }


def batches(**options):
    return tj.batches(data(), SIZE, **{"epochs": None, "seed": 5, **options})


def bits(state):
    """Everything of a state on the host, keys as numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    numbers = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)
    return jax.tree.map(np.array, numbers)


class Evaluation:
    """An evaluation step whose metrics a function makes of the state."""

    def __init__(self, metrics):
        self.metrics = metrics

    def place_batch(self, batch):
        return batch

    def __call__(self, state, batch):
        return self.metrics(state)


class Calling:
    """A writer that calls functions with each record, and at its end."""

    def __init__(self, write=lambda record: None, close=lambda: None):
        self.write = write
        self.close = close

    def open(self, start):
        return self


def assert_same_bits(state, expected):
    chex.assert_trees_all_equal(bits(state), expected, strict=True)
