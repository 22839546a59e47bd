"""Statistics of the towers' gradients: exact, and nothing is sent for them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import data, mirrored

import towerjax as tj
from towerjax.contrib import TowerStatistics

W = {"w": np.float32([0.5, -1.0, 2.0, 0.25, -0.75]), "b": np.float32(0.3)}
NAMES = "all-reduce all-gather all-to-all reduce-scatter collective-permute".split()
STATISTICS = TowerStatistics()


def loss_fn(params, batch, tower):
    errors = jnp.tanh(batch["x"] @ params["w"] + params["b"] - batch["y"])
    return tj.Weighted.mean(errors**2, batch["weight"] * tower.weight)


def step_of(T, D=1, local="vmap", A=1, statistics=STATISTICS, **options):
    strategy = mirrored(T, D, local, **options)
    options = {"micro_batches": A, "remainder": "pad", "extend": statistics}
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def sums_of(rows):
    """A part's weight, loss sum and gradient sum, in float64."""
    weight = rows["weight"].astype(float)
    error = np.tanh(rows["x"].astype(float) @ W["w"] + W["b"] - rows["y"])
    slope = weight * 2 * error * (1 - error**2)
    grad = np.concatenate([slope @ rows["x"].astype(float), [slope.sum()]])
    return weight.sum(), weight @ error**2, grad


def expected(batch, T, A):
    """The metrics of the first step, as the classical analysis of variance has it."""
    size = len(batch["y"])
    each = -(-size // (T * A))
    parts = [
        sums_of({k: x[i * each : (i + 1) * each] for k, x in batch.items()})
        for i in range(T * A)
    ]
    parts_seen = [part for part in parts if part[0]]
    total = [sum(x) for x in zip(*parts, strict=True)]
    mean = total[2] / total[0]
    between = sum(w * ((g / w - mean) ** 2).sum() for w, _, g in parts_seen)
    noise = between / (len(parts_seen) - 1)
    towers = [
        [sum(x) for x in zip(*parts[t * A : (t + 1) * A], strict=True)]
        for t in range(T)
    ]
    norm = np.linalg.norm

    def of_towers(one):
        return [one(*tower) if tower[0] else 0.0 for tower in towers]

    return {
        "gradient/norm": norm(mean),
        "gradient/noise": noise,
        "gradient/signal": mean @ mean - noise / total[0],
        "towers/loss": of_towers(lambda w, s, g: s / w),
        "towers/norm": of_towers(lambda w, s, g: norm(g) / w),
        "towers/cosine": of_towers(lambda w, s, g: g @ mean / norm(g) / norm(mean)),
    }


def close(metrics, of):
    for name, value in of.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(
            metrics[name], value, atol=1e-5 * scale, rtol=0, err_msg=name
        )


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(("T", "D", "local", "A", "size"), [
    (4, 2, "scan", 2, 17),  # of 6, 6, 5 and none
    (4, 4, "vmap", 1, 21),  # towers of 6, 6, 6 and 3 rows
])  # fmt: skip
def test_statistics_are_those_of_numpy(T, D, local, A, size):
    step, batch = step_of(T, D, local, A), data(size)
    after, metrics = step(step.init(W), batch)
    close(metrics, expected(batch, T, A))
    _, metrics = step(after, data(1))  # of one tower there is no variance
    assert np.isnan(metrics["gradient/noise"]) and metrics["gradient/norm"] > 0


def test_the_noise_is_that_of_two_batch_sizes():
    """Appendix A.1 of McCandlish et al., for parts of one size."""
    batch = {**data(20), "weight": np.ones(20, np.float32)}
    parts = [
        sums_of({k: x[i : i + 5] for k, x in batch.items()}) for i in (0, 5, 10, 15)
    ]
    small = np.mean([((g / w) ** 2).sum() for w, _, g in parts])
    large = ((sum(g for *_, g in parts) / 20) ** 2).sum()
    of = expected(batch, 4, 1)
    np.testing.assert_allclose(of["gradient/noise"], (small - large) / (1 / 5 - 1 / 20))
    signal = (20 * large - 5 * small) / (20 - 5)
    np.testing.assert_allclose(of["gradient/signal"], signal)


def collectives(text):
    found = re.findall(rf"= (\S.*?) ({'|'.join(NAMES)})(?:-start)?\(", text)
    return [(name, shapes.count("[")) for shapes, name in found]


@pytest.mark.slow
def test_two_numbers_more_travel_and_no_collective():
    """Of the op with two collectives: all that is summed goes to an op at once."""
    found, bits, ops = [], [], tj.PinnedTree()
    for statistics in (None, STATISTICS):
        step = step_of(4, 2, "scan", 1, statistics, cross_tower_ops=ops)
        state, batch = step.init(W), data(24)
        text = step.program(state, batch).call.as_text()
        found.append(collectives(text))
        bits.append(jax.device_get(step(state, batch)[0].params))
    assert found[1] == found[0] != []
    jax.tree.map(np.testing.assert_array_equal, *bits)


@pytest.mark.slow
def test_a_run_tells_of_each_step():
    step = step_of(4, 2)
    batches = [data(20, seed) for seed in range(3)]
    state, history = tj.run(step, step.init(W), batches, progress=False)
    assert history.metrics["towers/cosine"].shape == (3, 4)
    close({k: x[0] for k, x in history.metrics.items()}, expected(batches[0], 4, 1))


@pytest.mark.slow
def test_a_step_of_ones_own_is_the_same_mechanism():
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
        told = TowerStatistics(per_tower=False).of_tower(loss, grads)
        own = tj.PerTower(tj.Sum(tower.weight.sum()))
        return {"loss": loss, "grads": grads, "told": told, "rows": own}

    def update_fn(state, merged):
        statistics = TowerStatistics(per_tower=False)
        metrics = statistics.metrics(merged["told"], merged["grads"])
        metrics |= {"loss": merged["loss"]}
        metrics["rows"] = tj.PerTower(merged["rows"].values.value)
        return dataclasses.replace(state), metrics

    step = tj.build_step(
        tower_fn, update_fn, mirrored(4, 2, "scan"), micro_batches=2, remainder="pad"
    )
    _, metrics = step(step.init(W), data(17))
    of = expected(data(17), 4, 2)
    close(metrics, {name: x for name, x in of.items() if name.startswith("gradient")})
    assert metrics.keys() == {k for k in of if "tower" not in k} | {"loss", "rows"}
    assert metrics["rows"].tolist() == [6, 6, 5, 0]


@pytest.mark.slow
def test_the_noise_scale_of_a_run_is_that_of_all_rows():
    rows = data(4000)
    rows["weight"] = np.ones(4000, np.float32)
    step = tj.build_train_step(
        loss_fn, optax.sgd(0.0), mirrored(8), extend=TowerStatistics(False)
    )
    batches = tj.batches(rows, 40)
    _, history = tj.run(step, step.init(W), batches, progress=False)
    each = np.stack(
        [sums_of({k: x[i : i + 1] for k, x in rows.items()})[2] for i in range(4000)]
    )
    mean = each.mean(axis=0)
    scale = each.var(axis=0).sum() / (mean @ mean)
    found = TowerStatistics.noise_scale(history.metrics, smoothing=1)
    assert found.shape == (100,) and abs(found[-1] / scale - 1) < 0.1
    last = TowerStatistics.noise_scale(history.metrics, smoothing=0)[-1]
    seen = {name: x[-1] for name, x in history.metrics.items()}
    np.testing.assert_allclose(last, seen["gradient/noise"] / seen["gradient/signal"])


def test_a_step_that_is_not_finite_is_left_out_of_the_noise_scale():
    seen = {"gradient/noise": [np.nan, 4, np.inf, 8], "gradient/signal": [1, 2, 1, 1]}
    found = TowerStatistics.noise_scale(seen, smoothing=0.5)
    np.testing.assert_allclose(found, [np.nan, 2, 2, 10 / 2])


def of_two_means(params, batch, tower):
    loss = loss_fn(params, batch, tower)
    return loss + 0.1 * tj.Weighted(loss.sum, 2 * loss.weight)


def with_taken_name(params, batch, tower):
    loss = loss_fn(params, batch, tower)
    return tj.TowerOutput(loss, {"towers/norm": loss})


@pytest.mark.parametrize(("loss", "T", "statistics", "text"), [
    (loss_fn, 1, STATISTICS, "use several towers, or micro_batches=2"),
    (loss_fn, 2, True, "extend=True is not a function; write def extend(fns)"),
    (of_two_means, 2, STATISTICS, "no one weight"),
    (with_taken_name, 2, STATISTICS, "'towers/norm'] is a name of TowerStat"),
])  # fmt: skip
def test_what_has_no_statistics_is_refused(loss, T, statistics, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.build_train_step(loss, optax.sgd(0.1), mirrored(T), extend=statistics).check(
            W, data(4)
        )


@pytest.mark.parametrize("smoothing", [2, -0.1, None])
def test_noise_scale_refuses_what_it_cannot_smooth(smoothing):
    with pytest.raises(ValueError, match=f"={smoothing} must be a number from 0 to 1"):
        TowerStatistics.noise_scale({}, smoothing=smoothing)
    with pytest.raises(ValueError, match="no 'gradient/noise': build the step with"):
        TowerStatistics.noise_scale({})


@pytest.mark.parametrize("per_tower", [1, None, "yes"])
def test_a_choice_that_is_none_is_refused(per_tower):
    with pytest.raises(ValueError, match=r"per_tower=.* must be True or False\."):
        TowerStatistics(per_tower=per_tower)
