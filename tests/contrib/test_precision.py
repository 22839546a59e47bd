"""Losses in 16 bits and the loss scale, against plain JAX on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.contrib import LossScale, ema_params, train_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(26, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.tanh(X[:, 0]), "row": np.arange(26)}
START = {
    "w1": 0.3 * RNG.normal(size=(8, 16)).astype(np.float32),
    "w2": 0.3 * RNG.normal(size=16).astype(np.float32),
}
OPTIMIZER = optax.sgd(0.1, momentum=0.5)


def losses_of(params, batch):
    out = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
    return (out.astype(jnp.float32) - batch["y"]) ** 2


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(losses_of(params, batch), tower.weight)


def build(loss=loss_fn, devices=2, how=None, optimizer=OPTIMIZER, **options):
    names = [f"cpu:{i}" for i in range(devices)]
    strategy = tj.Mirrored(names, towers=4, **how or {})
    options = {"remainder": "pad", **options}
    return train_step(loss, optimizer, strategy, **options)


def train(step, count=6, start=START, batch=BATCH):
    state, history = tj.run(step, step.init(start), [batch] * count, progress=False)
    return state, history.metrics


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def by_hand(dtype, scale, double_every, count):
    """What plain JAX gives on one device, with the scale in Python."""
    params, opt_state, finite = START, OPTIMIZER.init(START), 0

    @jax.jit
    def scaled(params, scale):
        """Each tower's gradient is in 16 bits, and their sum in 32."""
        total = 0
        for rows in np.split(np.arange(26), (7, 14, 21)):
            own = {"x": X[rows], "y": BATCH["y"][rows]}
            total += losses_of(*optax.tree.cast((params, own), dtype)).sum()
        return scale * total, total / len(X)

    losses, scales = [], []
    for _ in range(count):
        grads, loss = jax.grad(scaled, has_aux=True)(params, scale)
        losses.append(loss)
        scales.append(scale)
        if not all(np.isfinite(g).all() for g in grads.values()):
            scale, finite = max(scale / 2, 1), 0
            continue
        grads = jax.tree.map(lambda g: g / scale / len(X), grads)  # noqa: B023
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        finite += 1
        if finite == double_every:
            scale, finite = scale * 2, 0
    return params, losses, scales


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.03), ("float16", 0.004)])
def test_a_loss_in_16_bits_is_that_of_plain_jax(dtype, tolerance):
    scale = LossScale(2.0**18, 4) if dtype == "float16" else None
    state, metrics = train(build(compute_dtype=dtype, loss_scale=scale), 12)
    first = 1.0 if scale is None else scale.start
    params, losses, scales = by_hand(dtype, first, 4, 12)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=tolerance)
    for name in params:
        assert state.params[name].dtype == np.float32
        np.testing.assert_allclose(state.params[name], params[name], atol=tolerance)
    if scale is None:
        assert "loss_scale" not in metrics
        return
    assert metrics["loss_scale"].tolist() == scales
    assert {*np.sign(np.diff(scales))} == {-1, 0, 1}  # halved, kept and doubled
    assert float(state.opt_state.scale) == scales[-1]


@pytest.mark.slow
def test_what_is_cast_is_what_computes():
    """In bfloat16 a loss has some digits of float32, and not all."""
    _, half = train(build(compute_dtype="bfloat16"))
    _, full = train(build())
    np.testing.assert_allclose(half["loss"], full["loss"], rtol=0.03)
    assert not np.allclose(half["loss"], full["loss"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    {"tower_loop": "vmap"}, {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()},
    {"state": "sharded"}], ids=str)  # fmt: skip
def test_a_scale_changes_no_bit_of_a_step_in_float32(how):
    """A power of two only moves exponents."""
    options = {"how": how, "micro_batches": 2}
    plain, losses = train(build(**options))
    scaled, metrics = train(build(loss_scale=LossScale(2.0**10, 2), **options))
    assert bits(scaled.params) == bits(plain.params)
    assert bits(scaled.opt_state.inner) == bits(plain.opt_state)
    assert bits(metrics["loss"]) == bits(losses["loss"])
    assert (
        metrics["loss_scale"].tolist() == [2.0**10] * 2 + [2.0**11] * 2 + [2.0**12] * 2
    )


@pytest.mark.slow
def test_a_step_that_overflows_changes_nothing_but_the_scale():
    step = build(compute_dtype="float16", donate=False)
    before, _ = step(step.init(START), BATCH)
    large = before.opt_state._replace(scale=jnp.float32(2.0**30))
    before = step.place(tj.TrainState(**{**vars(before), "opt_state": large}))
    after, metrics = step(before, BATCH)
    step.settle()
    assert bits((after.params, after.opt_state.inner)) == bits(
        (before.params, before.opt_state.inner)
    )
    assert float(after.opt_state.scale) == 2.0**29
    assert float(metrics["loss_scale"]) == 2.0**30 and np.isfinite(metrics["loss"])
    assert int(after.step) == int(before.step) + 1


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_at_a_scale_of_one_a_step_is_refused_like_any_other(on_nonfinite):
    step = build(loss_scale=LossScale(1), donate=False, on_nonfinite=on_nonfinite)
    state = step.init(START)
    after, _ = step(state, {**BATCH, "y": BATCH["y"] * np.nan})
    if on_nonfinite == "raise":
        with pytest.raises(tj.NonFiniteError, match="step 1 was not finite"):
            step.settle()
    assert bits(after.params) == bits(state.params)
    assert float(after.opt_state.scale) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"compute_dtype": "bfloat16"}, {"compute_dtype": jnp.float16},
    {"loss_scale": LossScale()}, {"compute_dtype": "float16", "remainder": "error"},
    {"compute_dtype": "float16", "how": {"state": "sharded"}}], ids=str)  # fmt: skip
def test_it_is_proved_like_other_steps(options):
    step = build(**options)
    batch = {k: x[:24] for k, x in BATCH.items()}
    assert step.check(step.init(START), batch).unproved == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wrong_loss_is_refused_as_without_it(dtype):
    def wrong(params, batch, tower):
        losses = losses_of(params, batch)
        return tj.Weighted((losses * tower.weight).sum(), jnp.float32(1))

    step = build(wrong, compute_dtype=dtype)
    with pytest.raises(tj.testing.SplitError, match="loss"):
        step.check(step.init(START), BATCH)


def several_terms(params, batch, tower):
    own = tj.Weighted.mean(batch["x"][:, 1] * params["w2"][0], tower.weight)
    loss = (
        loss_fn(params, batch, tower)
        + 0.5 * own
        + tj.penalty((params["w1"] ** 2).sum())
    )
    rows = tj.Weighted.mean(batch["row"], tower.weight)
    return tj.TowerOutput(loss, {"row": rows}, extra={"seen": tower.extra["seen"] + 1})


def a_bare_mean(params, batch, tower):
    return losses_of(params, batch).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss, options", [
    (several_terms, {"trainable": lambda name, leaf: name == "w2"}),
    (several_terms, {"trainable": {"w1": True, "w2": False}}),
    (several_terms, {"update_extra": lambda state, extra: {"seen": extra["seen"] + 1}}),
    (a_bare_mean, {"loss_reduction": tj.Reduction.MEAN, "audit": False}),
], ids=["function", "tree", "extra", "bare"])  # fmt: skip
def test_options_of_a_train_step_work_with_it(loss, options):
    batch = {k: x[:24] for k, x in BATCH.items()}
    ends = []
    for scale in (None, LossScale(2.0**8)):
        step = build(loss, loss_scale=scale, **options)
        state = step.init(START, extra={"seen": np.int32(0)})
        for _ in range(3):
            state, metrics = step(state, batch)
        metrics.pop("loss_scale", None)
        ends.append(bits((state.params, state.extra, metrics)))
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_it_is_averaged_logged_saved_and_resumed(tmp_path):
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    options = {"ema": 0.9, "log": ("learning_rate", "gradient_norm")}
    options |= {"compute_dtype": "float16", "optimizer": rate}
    options |= {"loss_scale": LossScale(2.0**16, 3)}

    def run(steps, saving=None):
        step = build(**options)
        return tj.run(
            step, step.init(START), [BATCH] * 10, steps=steps, checkpointer=saving,
            progress=False)  # fmt: skip

    expected, history = run(10)
    run(6, tj.Checkpointer(tmp_path))
    resumed, _ = run(10, tj.Checkpointer(tmp_path))
    assert bits((resumed.params, resumed.opt_state)) == bits(
        (expected.params, expected.opt_state)
    )
    assert len({*history.metrics["loss_scale"].tolist()}) > 2
    assert np.isfinite(history.metrics["gradient_norm"]).any()
    assert not np.allclose(ema_params(expected)["w1"], expected.params["w1"], rtol=1e-3)


@pytest.mark.parametrize("call, text", [
    (lambda: build(compute_dtype="int8"), "compute_dtype='int8' must be None or"),
    (lambda: build(compute_dtype=jnp.int32), "must be None or one of bfloat16"),
    (lambda: build(loss_scale=2.0**15), "must be None or a tj.contrib.LossScale"),
    (lambda: LossScale(1000.0), "must be a power of two"),
    (lambda: LossScale(0.5), "must be a power of two, >= 1"),
    (lambda: LossScale(float("nan")), "must be a power of two"),
    (lambda: LossScale(double_every=0), "double_every=0 must be a whole number"),
])  # fmt: skip
def test_options_are_checked(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_metric_of_that_name_and_towers_alone_are_refused():
    def named(params, batch, tower):
        loss = loss_fn(params, batch, tower)
        return tj.TowerOutput(loss, {"loss_scale": loss})

    step = build(named, loss_scale=LossScale())
    with pytest.raises(
        ValueError, match="'loss_scale', which is the name of the scale"
    ):
        step(step.init(START), BATCH)
