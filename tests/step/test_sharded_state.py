"""A sharded state: the same numbers, less on each device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

SHARDED = ("sharded_optimizer", "sharded")
EVEN = 6 * 16 + 16 + 16  # what four devices divide; 4 numbers are not even
KINDS = {
    "clipped adamw": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1)
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
OWN = {"w1": "adafactor", "b1": "clipped adamw", "b2": "every second"}
OWN |= {"odd": "clipped adamw", "n": "every second"}
OPTIMIZERS = {
    "momentum": optax.sgd(0.01, momentum=0.9),
    "each its own": optax.partition(KINDS, OWN),
}


def mirrored(state="mirrored", towers=8, devices=4, **options):
    names = [f"cpu:{i}" for i in range(devices)]
    return tj.Mirrored(names, towers=towers, state=state, **options)


def start():
    rng = np.random.default_rng(0)
    sizes = {"w1": (6, 16), "b1": (16,), "b2": (16,), "odd": (3,), "n": ()}
    draw = {n: rng.normal(size=size) for n, size in sizes.items()}
    return {n: np.asarray(x, np.float32) for n, x in draw.items()}


def rows(size=48, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 6)).astype(np.float32)
    y = rng.normal(size=(size, 16)).astype(np.float32)
    return {"x": x, "y": y, "weight": rng.uniform(0.05, 1, size).astype(np.float32)}


def losses_of(np, params, batch):
    hidden = np.tanh(batch["x"] @ params["w1"] + params["b1"][None])
    out = hidden * params["b2"][None] * (1 + params["n"])
    out = out + params["odd"] @ np.arange(1.0, 4.0)
    return ((out - batch["y"]) ** 2).sum(-1)


def loss_fn(params, batch, tower):
    losses = losses_of(jnp, params, batch)
    return tj.Weighted.mean(losses, batch["weight"] * tower.weight)


@functools.cache
def build(state="mirrored", optimizer="momentum", devices=4):
    """A step, whose programs all tests share."""
    strategy = mirrored(state, devices=devices)
    return tj.build_train_step(loss_fn, OPTIMIZERS[optimizer], strategy)


def assert_same(state, expected):
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a = jax.random.key_data(a)
            b = jax.random.key_data(b)
        # Adam of a tiny gradient has its sign, whatever rounds it.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


def bytes_a_device(tree):
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(x.nbytes for x in shards)


@pytest.mark.slow
@pytest.mark.parametrize("state", SHARDED)
def test_a_device_holds_its_part_alone(state):
    step = build(state)
    after, _ = step(step.init(start()), rows())
    moments = (EVEN // 4 + 4) * 4
    assert bytes_a_device(after.opt_state) == moments
    parts = EVEN // 4 + 4 if state == "sharded" else EVEN + 4
    assert bytes_a_device(after.params) == parts * 4
    memory = step.program(after, rows()).call.memory_analysis()
    own = 4 * (48 // 4) * (6 + 16 + 1)  # of the batch
    whole = 2 * (EVEN + 4) * 4 + own
    saved = (EVEN - EVEN // 4) * 4 * (1 + SHARDED.index(state))
    assert memory.argument_size_in_bytes <= whole - saved + 64  # with the step
    assert memory.alias_size_in_bytes >= moments + parts * 4 - 16


@pytest.mark.slow
@pytest.mark.parametrize("state", SHARDED)
@pytest.mark.parametrize("guard", ["gradients", "loss"])
def test_a_device_is_sent_its_part_of_a_sum_alone(state, guard):
    """A guard that looked at whole sums would need an all-reduce of them."""
    alone = tj.AllReduce(pack_below_bytes=0)

    def build(state):
        strategy = mirrored(state, cross_tower_ops=alone)
        return tj.build_train_step(
            loss_fn, OPTIMIZERS["each its own"], strategy, guard=guard, remainder="pad"
        )

    step = build(state)
    batch = rows(46)  # of eight towers one has fewer
    report = step.report(step.init(start()), batch)
    sent = {"reduce-scatter": 0, "all-reduce": 0}
    for found in report.collectives:
        sent[found.opcode] = sent.get(found.opcode, 0) + found.bytes
    assert sent["reduce-scatter"] == 4 * EVEN
    assert sent["all-reduce"] < 4 * 6 * 16  # less than w1
    found, plain = step.init(start()), build("mirrored")
    expected = plain.init(start())
    for _ in range(3):
        found, _ = step(found, batch)
        expected, _ = plain(expected, batch)
    assert_same(found, expected)
    if guard == "gradients":
        bad = dict(batch, x=np.where(np.arange(46)[:, None] == 45, np.inf, batch["x"]))
        with pytest.raises(tj.NonFiniteError):
            step(found, bad)
            step.settle()


@pytest.mark.slow
def test_a_state_of_another_layout_is_refused_and_placed():
    mirrored_step = build()
    step = build("sharded")
    state = mirrored_step.init(start())
    with pytest.raises(ValueError, match=r"params\['w1'\] is mirrored.*step.place"):
        step(state, rows())
    step(step.place(state), mirrored_step.place_batch(rows()))
    with pytest.raises(ValueError, match=r"params\['b1'\] is sharded.*step.place"):
        mirrored_step(step.init(start()), rows())


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("state, ops", [
    ("mirrored", tj.AllReduce()),
    ("mirrored", tj.collectives.Hierarchical(2)),
    ("sharded", tj.AllReduce()),
])  # fmt: skip
def test_a_complex_parameter_without_use_keeps_its_bits(state, ops):
    """Its gradient is one constant, of which XLA aborts where it is added as it is."""

    def loss_fn(params, batch, tower):
        zeros = tower.reduce(tj.Reduction.SUM, jnp.zeros(3, jnp.complex64))
        losses = (batch["x"] @ params["w"] - 1) ** 2 + zeros.real.sum()
        return tj.Weighted.mean(losses, batch["weight"] * tower.weight)

    strategy = mirrored(state, cross_tower_ops=ops)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
    z = np.full((8, 4), 2 - 3j, np.complex64)
    start = {"w": np.ones(6, np.float32), "z": z}
    batch = rows()
    after, _ = step(step.init(start), batch)
    x = batch["x"]
    weight = batch["weight"]
    slope = np.average(2 * (x.sum(1) - 1)[:, None] * x, axis=0, weights=weight)
    np.testing.assert_allclose(after.params["w"], 1 - 0.1 * slope, rtol=2e-6)
    np.testing.assert_array_equal(after.params["z"], z)


@pytest.mark.parametrize("state, options, text", [
    ("no", {}, "state='no' must be one of"),
    ("sharded", {"executor": "pmap"}, "executor='shard_map'"),
    ("sharded_optimizer", {"cross_tower_ops": tj.PinnedTree()}, "PinnedTree"),
])  # fmt: skip
def test_what_cannot_be_sharded_is_refused(state, options, text):
    with pytest.raises(ValueError, match=text):
        mirrored(state, **options)


@pytest.mark.slow
def test_small_leaves_stay_whole(users_shards):
    params = {str(n): np.zeros(n, np.float32) for n in (508, 512)}

    def fn(params, batch, tower):
        total = sum(x.sum() for x in params.values())
        return tj.Weighted.mean((total - batch) ** 2, tower.weight)

    step = tj.build_train_step(fn, optax.adam(0.1), mirrored("sharded"))
    state, _ = step(step.init(params), np.arange(8, dtype=np.float32))
    for tree in (state.params, state.opt_state[0].mu):
        sizes = [x.addressable_shards[0].data.size for x in tree.values()]
        assert sizes == [508, 128]
