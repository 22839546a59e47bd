"""Sums in few bits: what NumPy makes of the same codes, what is sent, what is lost."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored

import towerjax as tj
from towerjax.contrib import Compressed
from towerjax.proof.equation import all_eqns

BLOCK = 8
SHAPES = {"small": (3,), "w": (5, 13), "v": (30,)}
W = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
ROWS = tj.TowerLocal(np.float32(0), tj.Reduction.SUM)


def compressed(bits=8, **options):
    options = {"block": BLOCK, "above_bytes": 40} | options
    return Compressed(bits=bits, **options)


def loss_fn(params, batch, tower):
    """The gradient of a tower is the sum of its rows; batches weigh more or less."""
    rows = jax.tree.map(lambda x: x.sum(axis=0), batch)
    products = jax.tree.map(lambda w, x: (w * x).sum(), params, rows)
    loss = tj.Weighted(sum(jax.tree.leaves(products)), weight_of(batch))
    return tj.TowerOutput(loss, {"rows": tj.Weighted(rows["w"], 1.0)})


def weight_of(batch):
    return (batch["small"] > 0).sum(dtype=np.float32)


def data(size, seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=(size, *shape)) * rng.uniform(0.1, 9, shape)).astype("f")
        for name, shape in shapes.items()
    }


@functools.cache
def step_of(T, D, local="vmap", ops=None, **options):
    """A step, whose programs all tests share."""
    ops = compressed() if ops is None else ops
    options = {"on_nonfinite": "skip", "extend": ops} | options
    strategy = mirrored(T, D, local)
    return tj.build_train_step(loss_fn, optax.sgd(1.0), strategy, **options)


# The codes, in NumPy float64.


def coded(x, bits):
    """``[..., n]``: what it is once it was sent."""
    most = 2 ** (bits - 1) - 1
    blocks = x.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1) / most).astype(np.float32).astype(float)
    units = np.where(scales == 0, 1, scales)[:, None]
    return (np.rint(blocks / units) * units).reshape(x.shape)


def filled_up(x):
    return np.pad(x.reshape(-1), (0, -x.size % BLOCK))


class Oracle:
    """Devices that code, add and keep what they lose."""

    def __init__(self, devices, bits, feedback=True):
        self.devices, self.bits, self.feedback = devices, bits, feedback
        self.sizes = [filled_up(W[name]).size for name in ("v", "w")]
        total = sum(self.sizes)
        self.rest = -total % (BLOCK * devices)
        self.lost = np.zeros((devices, total + self.rest))

    def leaves(self, x):
        """By name, of ``[..., n]``."""
        v, w = (x[..., : self.sizes[0]], x[..., self.sizes[0] : sum(self.sizes)])
        return {"v": v, "w": w}

    def mean(self, batch):
        """The mean gradient, and the certificate."""
        rows = {k: batch[k].astype(float) / weight_of(batch) for k in ("v", "w")}
        parts = {k: np.split(x, self.devices) for k, x in rows.items()}
        devices = range(self.devices)
        own = [[filled_up(parts[k][d].sum(0)) for k in ("v", "w")] for d in devices]
        x = np.stack([np.concatenate(x) for x in own])
        x = np.pad(x, ((0, 0), (0, self.rest))) + self.lost
        sent = coded(x, self.bits)
        share = sent.sum(axis=0)
        total = coded(share, self.bits)
        lost, lost_shares = x - sent, share - total
        self.exact = x.sum(axis=0)
        parts = [self.leaves(x) for x in (lost, lost_shares, total)]
        error = max(
            (np.linalg.norm(own[k], axis=1).sum() + np.linalg.norm(shares[k]))
            / np.linalg.norm(whole[k])
            for own, shares, whole in [parts]
            for k in ("v", "w")
        )
        if self.feedback:
            at = np.split(np.arange(x.shape[1]), self.devices)
            for device, part in enumerate(at):
                lost[device, part] += lost_shares[part]
            self.lost = lost
        return self.leaves(total), error, self.leaves(self.exact)


def of_leaf(flat, name):
    return flat[: W[name].size].reshape(W[name].shape)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "D", "local", "bits", "A", "feedback"), [
    (2, 2, "vmap", 8, 1, True),
    (4, 4, "vmap", 4, 1, True),
    (6, 3, "scan", 4, 2, False),
    (8, 8, "vmap", 8, 1, True),  # shares at the end are of no leaf
])  # fmt: skip
def test_sums_are_those_of_the_same_codes_in_float64(T, D, local, bits, A, feedback):
    ops = compressed(bits, error_feedback=feedback)
    options = {} if A == 1 else {"local": local, "micro_batches": A}
    ops = {} if (T, bits) == (2, 8) else {"ops": ops}  # that of other tests
    step, oracle = step_of(T, D, **ops, **options), Oracle(D, bits, feedback)
    state, expected = step.init(W), {name: 0.0 for name in W}
    for seed in range(3):
        batch = data(2 * T, seed)
        state, metrics = step(state, batch)
        total, error, exact = oracle.mean(batch)
        expected["small"] -= batch["small"].astype(float).sum(0) / weight_of(batch)
        for name in ("v", "w"):
            expected[name] -= of_leaf(total[name], name)
            sums = exact[name], total[name]
            gap = np.linalg.norm(np.subtract(*sums)) / np.linalg.norm(sums[1])
            assert gap <= error
        np.testing.assert_allclose(metrics["compression/error"], error, rtol=1e-5)
        rows = batch["w"].astype(float).sum(0) / (T * A)  # a metric, above the size
        assert abs(metrics["rows"] - rows).max() <= 1e-6 * abs(rows).max()
    for name, x in expected.items():
        np.testing.assert_allclose(state.params[name], x, atol=2e-5 * abs(x).max())
    if feedback:
        kept = state.local["compressed"].value
        lost = oracle.leaves(oracle.lost.sum(axis=0))
        assert kept["small"] is None and kept["w"].shape == (T, 5, 13)
        for name in ("v", "w"):
            found = np.asarray(kept[name], float).sum(axis=0)
            np.testing.assert_allclose(found, of_leaf(lost[name], name), atol=1e-4)
    else:
        assert not jax.tree.leaves(state.local)


@pytest.mark.slow
@pytest.mark.parametrize("D, bits", [(2, 8), (4, 4)])
def test_what_is_sent_is_what_the_formula_says(D, bits):
    step = step_of(D, D, ops=compressed(bits))
    text = step.program(step.init(W), data(2 * D)).call.as_text()
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = {
        name: re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        for shapes, name in re.findall(rf"= (\S.*?) ({kinds})(?:-start)?\(", text)
    }
    share = Oracle(D, bits).lost.shape[1] // D
    size = share * bits // 8 + share // BLOCK * 4
    assert found.keys() == {"all-to-all", "all-gather", "all-reduce"}
    assert found["all-to-all"] == [("u8", f"1,{size}")] * D
    assert found["all-gather"][-1] == ("u8", f"{D},{size + 2 * 2 * 4}")
    # Exact: the small leaf, the loss, the metric, and what each is divided by.
    numbers = sum(int(n or 1) for _, n in found["all-reduce"])
    assert {kind for kind, _ in found["all-reduce"]} == {"f32"}
    assert numbers == (3 + 1) + (1 + 1) + (65 + 1)


def opposed(params, batch, tower):
    """Large gradients that cancel, and small ones that do not."""
    sign = 1 - 2 * (tower.id % 2)
    loss = 0.5 * ((params - 1) ** 2).sum() + 100 * sign * params[0]
    return tj.Weighted(loss * batch.sum() / len(batch), 1.0)


@pytest.mark.slow
def test_error_feedback_learns_what_rounding_alone_hides():
    for sign in (1, -1):  # where nothing is learned, these small ones are sent as 0
        gradient = np.full(BLOCK, -1.0) + 100 * sign * np.eye(1, BLOCK)[0]
        assert not coded(gradient, 4)[1:].any()
    step = tj.build_train_step(
        opposed, optax.sgd(0.05), mirrored(4, 4), extend=compressed(4)
    )
    batches = [np.ones(4, np.float32)] * 600
    state = step.init(np.zeros(32, np.float32))
    state, _ = tj.run(step, state, batches, progress=False)
    gap = abs(np.asarray(state.params[1:8]) - 1).max()
    assert gap < 0.5


@pytest.mark.slow
def test_one_device_loses_nothing_and_pays_what_others_lost():
    batch, step = data(8), step_of(4, 4, ops=compressed(4))
    state, _ = step(step.init(W), batch)
    alone = step_of(4, 1, ops=compressed(4))
    state, metrics = alone(alone.place(state), batch)
    assert metrics["compression/error"] == 0
    assert not any(x.any() for x in jax.tree.leaves(jax.device_get(state.local)))
    for name in W:
        exact = -2 * batch[name].astype(float).sum(0) / weight_of(batch)
        np.testing.assert_allclose(state.params[name], exact, atol=2e-5)


@pytest.mark.slow
def test_gradients_in_one_buffer_keep_their_dtypes():
    def dtypes(fns):
        def update(state, merged):
            state, metrics = fns.update(state, merged)
            return state, metrics | merged["grads"].sum

        return compressed()(fns._replace(update=update))

    with jax.enable_x64(True):
        params = W | {"v": W["v"].astype(np.float64)}
        step = step_of(2, 2, extend=dtypes)
        _, grads = jax.eval_shape(step.fn, step.shapes(params), data(2))
    assert {name: grads[name].dtype for name in W} == {
        name: x.dtype for name, x in params.items()
    }


@pytest.mark.slow
def test_a_leaf_without_a_gradient_has_no_rounding_error():
    batch, step = data(4), step_of(2, 2)
    _, metrics = step(step.init(W), batch | {"v": np.zeros_like(batch["v"])})
    assert 0 < metrics["compression/error"] < 1


def test_a_metric_does_not_have_the_name_of_the_rounding_error():
    def named(params, batch, tower):
        loss = loss_fn(params, batch, tower).loss
        return tj.TowerOutput(loss, {"compression/error": tower.step})

    args = named, optax.sgd(1.0), mirrored(2, 2)
    step = tj.build_train_step(*args, extend=compressed())
    with pytest.raises(ValueError, match=r"\['compression/error'\] is a name of"):
        step.check(W, data(2))


@pytest.mark.slow
def test_what_is_lost_is_in_checkpoints_and_goes_on_with_other_towers(tmp_path):
    batches = [data(8, seed) for seed in range(3)]
    checkpointer, step = tj.Checkpointer(tmp_path), step_of(4, 4, ops=compressed(4))

    def ran(number):
        state = step.init(W)
        saved = {"checkpointer": checkpointer, "steps": number, "progress": False}
        saved |= {"audit": False}  # the metric has a weight for each tower
        return jax.device_get(tj.run(step, state, batches, **saved)[0])

    two = ran(2)
    moved = step_of(2, 2, ops=compressed(4))
    moved = checkpointer.restore(moved, moved.init(W))
    again, whole = ran(3), step.init(W)
    for batch in batches:
        whole, _ = step(whole, batch)
    tj.testing.assert_same(*((x.params, x.local) for x in (whole, again)))
    pair = (jax.tree.leaves(x.local) for x in (two, moved))
    for x, y in zip(*pair, strict=True):
        assert x.any() and y.shape[0] == 2
        np.testing.assert_allclose(y.sum(axis=0), x.sum(axis=0), atol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_guarded_where_the_loss_is():
    def rooted(params, batch, tower):  # 0, with a slope of NaN
        return tj.Weighted(jnp.sqrt((params["v"] ** 2).sum()), weight_of(batch))

    how = {"on_nonfinite": "skip", "guard": "gradients", "extend": compressed()}
    step = tj.build_train_step(rooted, optax.sgd(1.0), mirrored(2, 2), **how)
    state, metrics = step(step.init({"v": W["v"]}), data(2))
    assert np.isnan(metrics["loss"]) and not state.params["v"].any()


@pytest.mark.slow
def test_a_mean_without_weight_keeps_what_was_lost_before():
    step = step_of(2, 2, on_nonfinite="ignore")  # which a step without examples is not
    state, _ = step(step.init(W), data(2))
    before = jax.device_get(state.local)
    state, _ = step(state, data(2) | {"small": np.full((2, 3), -1, np.float32)})
    for x, y in zip(*map(jax.tree.leaves, (before, state.local)), strict=True):
        assert x.any()
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("call", "text"), [
    (lambda: compressed(3), "Compressed.bits=3 must be 8 or 4"),
    (lambda: compressed(block=7), "Compressed.block=7 must be a multiple of 2"),
    (lambda: step_of(2, 2, ops=Compressed()).check(W, data(2)),
        "above 131072 bytes, and params has none"),
    (lambda: step_of(2, 2).init(W, local={"compressed": ROWS}),
        "must be a dict without the keys ['compressed']"),
])  # fmt: skip
def test_what_cannot_be_compressed_is_refused_by_name(call, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_shares_of_more_numbers_than_int32_counts_are_found_by_their_row():
    ops, numbers = compressed(block=1 << 20), jax.ShapeDtypeStruct((3 << 30,), "f")
    fn = functools.partial(ops._sum_encoded, num_devices=4)
    traced = jax.make_jaxpr(fn, axis_env=[("devices", 4)])([numbers])
    eqns = all_eqns(traced.jaxpr)
    sliced = [x for x in eqns if x.primitive.name.startswith("dynamic_")]
    shapes = {x.invars[0].aval.shape for x in sliced}
    assert (4, 3 << 28) in shapes and max(map(max, shapes)) < 1 << 31
