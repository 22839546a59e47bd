"""Towers on a GPU, against NumPy and against the CPU; skipped where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj


def has_gpu():
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # JAX has no such platform
        return False


HAS_GPU = has_gpu()
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="no GPU is here")
ROWS = 13
FEATURES = 5
STEPS = 4


def towers(number, tower_loop="vmap", device="gpu:0", **options):
    return tj.Mirrored((device,), towers=number, tower_loop=tower_loop, **options)


def rows(seed=0, size=ROWS):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, FEATURES)).astype(np.float32)
    y = draw.normal(size=size).astype(np.float32)
    return {"x": x, "y": y, "weight": 1 + np.arange(size, dtype=np.float32)}


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight * batch["weight"])


def init():
    return {"w": np.linspace(-1, 1, FEATURES, dtype=np.float32), "b": np.float32(0.5)}


@pytest.fixture(autouse=True)
def in_float32():
    """Matrix products are in float32, and not in TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def by_numpy(steps, rate=0.1, momentum=0.9):
    w = init()["w"].astype(float)
    b = 0.5
    moving = [0.0, 0.0]
    losses = []
    for seed in range(steps):
        x, y, weight = (v.astype(float) for v in rows(seed).values())
        errors = x @ w + b - y
        share = weight / weight.sum()
        losses.append(share @ errors**2)
        grads = 2 * (share * errors) @ x, 2 * share @ errors
        moving = [momentum * m + g for m, g in zip(moving, grads, strict=True)]
        w = w - rate * moving[0]
        b = b - rate * moving[1]
    return w, b, losses


@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize("ops", [tj.AllReduce(), tj.PinnedTree()])
def test_towers_train_as_one_does_by_numpy(number, tower_loop, ops):
    strategy = towers(number, tower_loop, cross_tower_ops=ops)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = tj.build_train_step(loss_fn, optimizer, strategy, remainder="pad")
    state = step.init(init())
    losses = []
    for seed in range(STEPS):
        state, metrics = step(state, rows(seed))
        losses.append(metrics["loss"])
    step.settle()
    w, b, expected = by_numpy(STEPS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5, atol=1e-6)


def noisy(params, batch, tower):
    keep = jax.random.bernoulli(tower.rng, 0.7, batch["x"].shape)
    hidden = jnp.tanh(jnp.where(keep, batch["x"], 0) @ params["w"] + params["b"])
    return tj.Weighted.mean((hidden - batch["y"]) ** 2, tower.weight)


def trained(device, **options):
    strategy = towers(4, device=device, **options)
    step = tj.build_train_step(noisy, optax.adam(0.01), strategy, remainder="pad")
    batches = [rows(seed) for seed in range(STEPS)]
    how = {"audit": False, "progress": False}
    return tj.run(step, step.init(init()), batches, **how)


def test_draws_on_a_gpu_are_those_on_a_cpu():
    state, history = trained("gpu:0")
    expected, on_cpu = trained("cpu:0")
    got = history.metrics["loss"]
    wanted = on_cpu.metrics["loss"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for got, wanted in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_bits_are_the_same_twice():
    pinned = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}
    first, again = (
        jax.tree.map(np.asarray, trained("gpu:0", **pinned)[0].params) for _ in "ab"
    )
    assert jax.tree.map(bytes, first) == jax.tree.map(bytes, again)


@pytest.mark.parametrize("waits", [True, False])
def test_a_refused_step_is_told_within_16_calls_and_changes_nothing(waits):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), towers(4), remainder="pad")
    state, _ = step(step.init(init()), rows())
    before = np.asarray(state.params["w"])
    bad = rows()
    bad["x"][3, 2] = np.nan
    state, metrics = step(state, bad)
    assert np.isnan(metrics["loss"])
    np.testing.assert_array_equal(state.params["w"], before)
    calls = 0
    with pytest.raises(tj.NonFiniteError, match="of step 2 "):
        for _ in range(20):
            state, metrics = step(state, rows())
            calls += 1
            if waits:
                jax.block_until_ready(metrics)
    assert calls <= 16
    state, metrics = step(state, rows())
    step.settle()
    assert np.isfinite(metrics["loss"])


def test_a_step_of_a_placed_batch_sends_nothing_unasked():
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), towers(4), remainder="pad")
    placed = step.place_batch(rows())
    state, _ = step(step.init(init()), placed)
    with jax.transfer_guard("disallow"):
        for _ in range(20):
            state, metrics = step(state, placed)
            jax.block_until_ready(metrics)
        step.settle()


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_the_audit_finds_what_is_wrong_and_passes_what_is_right(precision):
    def wrong(params, batch, tower):
        loss = loss_fn(params, batch, tower)
        return tj.Weighted(loss.value, 1.0)

    def deep(params, batch, tower):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return tj.Weighted.mean(((hidden @ params["down"]).sum(1) - batch["y"]) ** 2)

    draw = np.random.default_rng(0)
    params = {
        "up": draw.normal(size=(FEATURES, 256)).astype(np.float32) / 2,
        "down": draw.normal(size=(256, 64)).astype(np.float32) / 16,
    }
    with jax.default_matmul_precision(precision):
        step = tj.build_train_step(deep, optax.sgd(0.1), towers(4))
        step.audit(step.init(params), rows(size=64))
        step = tj.build_train_step(wrong, optax.sgd(0.1), towers(4))
        with pytest.raises(tj.testing.SplitError):
            step.audit(step.init(init()), rows(size=64))


def test_a_report_says_what_the_device_has():
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), towers(4), remainder="pad")
    report = step.report(step.init(init()), rows(), timed_calls=3)
    assert report.memory.fits and report.memory.capacity > 1e9
    assert report.timing.step_s > 0
