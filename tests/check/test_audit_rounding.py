"""What an audit compares: rounding is no difference, in any dtype, and others are."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited_losses import BATCH as ROWS
from audited_losses import PARAMS as MODEL
from audited_losses import (
    RIGHT,
    WRONG,
    errors,
    scores,
)
from audits import SUM, loss_alone, refused, train_step
from layouts import cases

import towerjax as tj
from towerjax.check.audit.two_towers import _rounding_decides
from towerjax.prover.comparison import (
    AuditReport,
    Compared,
    _gap_of_leaf,
    _sizes,
    gaps,
    judge,
    rounded,
    rounding_of,
)
from towerjax.prover.leaf_name import LeafName
from towerjax.testing import SplitError, assert_replicates


def leaf_at(*keys):
    return LeafName.at(tuple(map(jax.tree_util.DictKey, keys)))


def test_a_gradient_that_is_0_up_to_rounding_has_the_size_of_the_others():
    b = leaf_at("grads", "b")

    def relative(loss, size, gap, name=b, noise=0.0):
        want = {
            name: np.zeros(2),
            leaf_at("grads", "w"): np.full(3, size),
            "loss": loss,
        }
        got, near = ({**want, name: np.array([0, x])} for x in (gap, noise))
        run = Compared(3, "x", got, want, lambda: [near])
        excess, finding = _gap_of_leaf(name, run, _sizes(want), 1e-4)
        assert finding.difference == gap and finding.one_tower == 0
        return finding.relative, excess

    assert relative(np.float64(3e4), 0.0, 1e-3) == (1e-3 / 30, 1e-3 / 30 / 1e-4)
    assert relative(np.float64(1), 2.0, 1e-3)[0] == 1e-3 / 0.02
    assert relative(np.float64(1), 1.0, 1e-3, "metrics['b']")[0] == 1.0
    # What a last bit of the parameters changes by a 32nd of the difference.
    assert relative(np.float64(1), 2.0, 1e-3, noise=1e-3 / 32)[1] == 1.0
    assert relative(np.float64(1), 2.0, 1e-3, noise=1e-3 / 64)[1] == 2.0
    other = {"x": np.zeros(3)}, {"x": np.ones(2)}, list
    run = Compared(3, "x", *other)
    assert _gap_of_leaf("x", run, _sizes(run.want), 1e-4)[0] == np.inf


def test_parameters_are_changed_in_their_last_bit_to_and_fro():
    signs = np.array([1, -1, 1, -1, 1])
    kinds = np.float32, np.complex64, np.int32, np.float16
    params = [np.ones(5, kind) for kind in kinds]
    for x, changed in zip(params, rounded(params, 2.0**-23), strict=True):
        is_wide = x.dtype.kind in "fc" and x.dtype.itemsize >= 4
        last = 2.0**-23 * signs if is_wide else 0
        np.testing.assert_array_equal(changed, x * (1 + last))
        assert changed.dtype == x.dtype
    broken = np.float32([0, 1, 0.5, -3])
    changed = rounded(broken, 2.0**-22, only_broken=True)
    assert (changed != broken).tolist() == [False, False, True, False]


def test_the_tolerance_is_that_of_the_narrowest_dtype():
    for names, rtol in (["bfloat16 float16", 2**-4], ["float16", 2**-7], ["", 1e-4]):
        narrowed = lambda x: [x.astype(name) for name in names.split()]  # noqa: B023, E731
        assert rounding_of([jax.make_jaxpr(narrowed)(jnp.ones(2)).jaxpr]) == rtol


def test_gradients_that_overflow_both_ways_are_compared_without_a_warning():
    """As in float16, where one half of the rows gives inf and the other -inf."""
    up, down = (np.array([x, 1.0]) for x in (np.inf, -np.inf))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gaps(up, down)[0] > 1e300 and gaps(up, down)[1] == 0


@pytest.mark.slow
def test_the_numbers_of_a_finding_are_those_of_numpy():
    """Of a batch in another byte order, with a shared value and a complex metric."""
    x = np.array([1, 2, 4, 8, 16], ">f4")

    def loss_fn(w, batch, tower):
        loss = tj.Weighted.mean(batch["w"] * w * batch["x"], tower.weight).value
        metrics = {"c": tj.Weighted(1 + 1j * loss, 1.0)}
        return tj.TowerOutput(tj.Weighted(loss, 1.0), metrics)

    batch = {"x": x, "w": tj.Whole(np.float32(3))}
    given = loss_fn, np.float32(1), batch, np.array([2], np.int8)
    error, found = refused(assert_replicates, *given)
    assert found.keys() == {"gradient", "loss", "metrics['c']"}
    loss = found["loss"]
    # In order and permuted; the second tower has two rows and one of padding.
    order = np.random.default_rng(0).permutation(5)
    splits = [
        3 * (rows[:3].mean(dtype=np.float64) + rows[3:].mean(dtype=np.float64)) / 2
        for rows in (x, x[order])
    ]
    worst = max(splits, key=lambda value: abs(value - 3 * 31 / 5))
    np.testing.assert_allclose(loss.value, worst, rtol=1e-6)
    np.testing.assert_allclose(loss.one_tower, 3 * 31 / 5, rtol=1e-6)
    assert loss.towers == 2
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_where_rounding_decides_most_gradients_no_more_is_run():
    """One split is compared; two that are decided, of three, are enough."""

    def report(count):
        gradients = tuple(leaf_at("grads", i) for i in range(3))
        names = ("loss", *gradients)
        return AuditReport((2,), 12, 1, names, (), 0.1, "loss", gradients[:count])

    assert _rounding_decides(report(1)) is None
    assert _rounding_decides(report(2)).startswith("rounding decides 2 of 3 gradients")


def test_what_rounding_decides_is_said_and_passes():
    want = {"loss": np.ones(1), "x": np.ones(2)}
    got = {"loss": np.ones(1)}
    got["x"] = np.array([1, 1.01])
    near = {**want, "x": np.array([1, 1.001])}
    report = judge([Compared(2, "evenly", got, want, lambda: [want, near])], 4, 1e-4)
    assert report.by_rounding == ("x",) and "rounding decides x" in str(report)
    with pytest.raises(SplitError):
        judge([Compared(2, "evenly", got, want, lambda: [want])], 4, 1e-4)


def low(loss_fn, dtype):
    """The loss in 16 bits; of float16 with a scale."""

    def lower(params, batch, tower):
        def cast(x):
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        p, b = jax.tree.map(cast, (params, batch))
        scale = 64.0 if dtype == jnp.float16 else 1.0
        return scale * loss_fn(p, b, tower)

    return lower


class Unlike:
    """Right programs of which rounding might decide something."""

    def recurrent_of_200_steps(p, b, t):
        def body(h, _):
            return jnp.tanh(1.5 * h @ jnp.eye(4) + p["w"][None]), None

        last, _ = jax.lax.scan(body, b["x"], None, length=200)
        return tj.Weighted.mean((last.sum(1) - b["y"]) ** 2, t.weight)

    def logistic_map(p, b, t):
        def body(x, _):
            return 3.99 * x * (1 - x), None

        x = jax.nn.sigmoid(scores(p, b))
        last, _ = jax.lax.scan(body, x, None, length=60)
        return tj.Weighted.mean(last, t.weight)

    def argmax_with_ties(p, b, t):
        kept = jax.nn.one_hot(jnp.argmax(jnp.round(b["tokens"] @ p["w"]), 1), 5)
        own = (b["tokens"] @ p["w"] * kept).sum(1)
        return tj.Weighted.mean(own**2, t.weight)

    def tiny_variances(p, b, t):
        x = 1.0 + 1e-6 * b["x"] * p["w"][None]
        x = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-14)
        return tj.Weighted.mean((x @ p["w"] - b["y"]) ** 2, t.weight)

    def complex_numbers(p, b, t):
        z = jnp.fft.fft(b["tokens"] @ p["w"], axis=1)
        return tj.Weighted.mean((z * jnp.conj(z)).real.mean(1), t.weight)

    def straight_through(p, b, t):
        s = scores(p, b)
        hard = s + jax.lax.stop_gradient(jnp.round(s) - s)
        return tj.Weighted.mean((hard - b["y"]) ** 2, t.weight)

    def a_rule_of_its_own(p, b, t):
        return tj.Weighted.mean(clipped_rows(scores(p, b) - b["y"]) ** 2, t.weight)

    def differences_of_large_numbers(p, b, t):
        own = 1e5 + errors(p, b)
        return tj.Weighted.mean((own - 1e5) * b["weight"], t.weight)

    def batch_norm_of_all_rows(p, b, t):
        mean = t.mean(b["x"], t.weight, axis=0)
        var = t.mean((b["x"] - mean[None]) ** 2, t.weight, axis=0)
        x = (b["x"] - mean[None]) / jnp.sqrt(var + 1e-5)[None]
        return tj.Weighted.mean(errors(p, {**b, "x": x}), t.weight)

    def remat(p, b, t):
        own = jax.checkpoint(lambda w: jnp.tanh(b["tokens"] @ w).sum(1))(p["w"])
        return tj.Weighted.mean((own - b["y"]) ** 2, t.weight)


@jax.custom_vjp
def clipped_rows(x):
    return x


clipped_rows.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
MANY = {
    f"{name} {kind}": low(loss_fn, kind)
    for name, loss_fn in RIGHT.items()
    for kind in ("bfloat16", "float16")
    if name not in ("rejected_draws", "metrics_beside_the_loss")
}
MANY |= cases(Unlike)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_a_right_program_of_another_kind_is_accepted(name):
    step = train_step(MANY[name])
    report = step.audit(step.init(MODEL), ROWS)
    assert {"loss", "gradient['w']"} <= {*report.compared} and step.is_audited


def test_there_are_sixty_right_programs():
    assert len(RIGHT) + len(MANY) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_network_in_bfloat16_of_inputs_in_any_bits_is_accepted(dtype):
    """Its losses differ by up to a fifth of what the probe of rounding shows."""
    draw = np.random.default_rng(0).normal
    x = draw(size=(64, 32)).astype(np.float32)
    rows = {"x": x, "y": np.tanh(x[:, 0])}
    params = {"k": 0.2 * draw(size=(32, 64)), "w": 0.2 * draw(size=64)}
    params, rows = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, rows))

    def loss_fn(params, batch, tower):
        p, x = optax.tree.cast((params, batch["x"]), jnp.bfloat16)
        out = (jnp.tanh(x @ p["k"]) @ p["w"]).astype(jnp.float32)
        return tj.Weighted.mean((out - batch["y"]) ** 2, tower.weight)

    assert loss_alone(loss_fn, rows, params).compared == ("loss",)


# A tenth of them, a penalty in the sum, differs by less than rounding may.
WRONG_IN_BFLOAT16 = """
    mean_of_masked_means masked_mean_with_the_number_of_rows
    weights_divided_by_their_own_sum weights_divided_by_their_own_mean quantile_clipped
    class_balance_by_counts normalised_by_the_rows root_of_a_mean dice
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_IN_BFLOAT16)
def test_a_wrong_loss_in_bfloat16_is_refused(name):
    refused(loss_alone, low(WRONG[name], jnp.bfloat16))


@pytest.mark.slow
def test_a_program_whose_gradients_rounding_decides_is_run_once():
    """The sum over towers is rounded otherwise, which the map makes large."""

    def loss_fn(params, batch, tower):
        own = scores(params, batch).sum() + 1e5
        total = tower.reduce(SUM, own) - 1e5 * tower.num_towers
        moved = {**params, "b": params["b"] + 0.01 * total}
        return cases(Unlike)["logistic_map"](moved, batch, tower)

    step = train_step(loss_fn)
    report = step.audit(step.init(MODEL), ROWS)
    assert report.splits == 1
    assert "rounding decides 2 of 3 gradients, so that" in str(report)
