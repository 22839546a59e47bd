"""Audits of loss functions: what is wrong is found and named, what is right passes."""

import json
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import towerjax as tj
from towerjax.tools.cli import main
from towerjax.tools.testing import SplitError, assert_replicates

SUM, MEAN, FIRST = (
    tj.Reduction.SUM,
    tj.Reduction.MEAN,
    tj.Reduction.ONLY_FIRST_TOWER,
)
DRAW = np.random.default_rng(5)
BATCH = {
    "x": DRAW.normal(size=(14, 3)).astype(np.float32) + 0.3,
    "y": DRAW.normal(size=14).astype(np.float32),
    "weight": DRAW.uniform(0.2, 3, size=14).astype(np.float32),
    "key": DRAW.integers(0, 2**31, size=(14, 2)).astype(np.uint32),
    "length": DRAW.integers(1, 4, size=14),
}
PARAMS = {
    "w": np.array([0.5, -1.0, 2.0], np.float32),
    "b": np.float32(0.25),
}


def predictions(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def losses(params, batch):
    return (predictions(params, batch) - batch["y"]) ** 2


# What is wrong: a loss function, the cause, what is found, options.


def mean_as_one(params, batch, tower):
    loss = tj.Weighted.mean(losses(params, batch), tower.weight)
    return tj.Weighted(loss.value, 1.0)


def mean_of_scalars(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight).value


def forgets_weight(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch))


def batch_norm(params, batch, tower):
    w = tower.weight[:, None]
    count = jnp.maximum(w.sum(), 1)
    mean = (batch["x"] * w).sum(0, keepdims=True) / count
    var = (w * (batch["x"] - mean) ** 2).sum(0, keepdims=True) / count
    x = (batch["x"] - mean) * jax.lax.rsqrt(var + 1e-3)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


@jax.custom_vjp
def clipped(params):
    return params


def clip(_, g):
    norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g)))
    return (jax.tree.map(lambda x: x * jnp.minimum(1.0, 0.5 / norm), g),)


clipped.defvjp(lambda p: (p, None), clip)


def clips_in_tower(params, batch, tower):
    return tj.Weighted.mean(losses(clipped(params), batch), tower.weight)


def noise_of(tower):
    """A key's bits are random enough, and cheap."""
    return jax.random.key_data(tower.rng)[0].astype(jnp.float32) / 2.0**32


def noisy(params, batch, tower):
    x = batch["x"] * (0.5 + noise_of(tower))
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


def places(params, batch, tower):
    values = predictions(params, batch) * jnp.arange(1.0, len(batch["y"]) + 1)
    return tj.Weighted.mean(values, tower.weight)


def mean_loss(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight)


BAD = {
    "mean of scalars": (mean_of_scalars, "gradient['b']", {"loss_reduction": MEAN}),
    "scalars added": (mean_of_scalars, "loss", {"loss_reduction": SUM}),
    "clipped": (clips_in_tower, "gradient['w']", {}),
    "random": (noisy, "gradient['w']", {}),
    "places": (places, "loss", {"towers": (1,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_depends_on_the_split_is_found(name):
    loss_fn, leaf, options = BAD[name]
    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, PARAMS, BATCH, **{"towers": (3,)} | options)
    found = {finding.leaf: finding for finding in error.value.findings}
    assert found[leaf].difference > 0 and leaf in str(error.value)
    if name == "clipped":
        assert "loss" not in found


def measures(params, batch, tower):
    """Metrics and tower-local values, of which some depend on the split."""
    own, weight = losses(params, batch), tower.weight
    hits = (predictions(params, batch) > 0).astype(jnp.float32)
    metrics = {
        "total as one": tj.Weighted((own * weight).sum(), 1.0),
        "mean as one": tj.Weighted(tj.Weighted.mean(hits, weight).value, 1.0),
        "batch norm": batch_norm(params, batch, tower),
        "reads id": tj.Weighted.mean((1.0 + 0.1 * tower.id) * own, weight),
        "hits": tj.Weighted.mean(hits, weight),
        "norm": jnp.linalg.norm(params["w"]),
    }
    local = {name: tower.local[name] + weight.sum() for name in COUNTED}
    mean = tj.Weighted.mean(batch["x"][:, 0], weight).value
    local["moving mean"] = 0.9 * tower.local["moving mean"] + 0.1 * mean
    extra = {name: metrics[name] for name in EXTRA}
    extra["hits"] = tj.Weighted.mean(hits + tower.extra["hits"], weight)
    return tj.TowerOutput(mean_loss(params, batch, tower), metrics, local, extra)


def of_each_tower(values):
    return {name: tj.TowerLocal(np.float32(x), kind) for name, (x, kind) in values}


COUNTED = {
    "initial": (2, SUM),
    "count as mean": (0, MEAN),
    "first tower": (0, FIRST),
    "counter": (0, SUM),
    "no one value": (0, tj.Reduction.NONE),
}


EXTRA = {"total as one": np.float32(0), "hits": np.float32(1)}


@pytest.mark.slow
def test_each_metric_and_tower_local_value_that_depends_on_the_split_is_found():
    local = of_each_tower([*COUNTED.items(), ("moving mean", (1, MEAN))])
    with pytest.raises(SplitError) as error:
        of_state = {"local": local, "extra": EXTRA}
        assert_replicates(measures, PARAMS, BATCH, towers=(3,), **of_state)
    metrics = ("total as one", "mean as one", "batch norm", "reads id")
    values = ("initial", "count as mean", "first tower", "moving mean")
    wrong = {f"metrics['{x}']" for x in metrics} | {f"local['{x}']" for x in values}
    wrong.add("extra['total as one']")
    found = {finding.leaf: finding for finding in error.value.findings}
    assert found.keys() == wrong  # and nothing that is right
    for leaf, finding in found.items():
        assert finding.difference > 0 and leaf in str(error.value)


@pytest.mark.slow
def test_what_a_train_step_refuses_is_refused():
    def with_metric(of_hits):
        def loss_fn(params, batch, tower):
            hits = (predictions(params, batch) > 0).astype(jnp.float32)
            metrics = {"hits": of_hits(hits)}
            return tj.TowerOutput(mean_loss(params, batch, tower), metrics)

        return loss_fn

    for loss_fn, text in {
        forgets_weight: "loss.*padded|padded.*loss",
        with_metric(tj.Weighted.mean): "hits",
        with_metric(jnp.mean): "hits.* depends on",
    }.items():
        with pytest.raises(ValueError, match=text):
            assert_replicates(loss_fn, PARAMS, BATCH, towers=(3,))


# What is right.


def measures_well(params, batch, tower):
    weight = tower.weight * batch["weight"]
    hits = tj.metrics.accuracy(batch["y"] > 0, predictions(params, batch) > 0, weight)
    scores = jax.nn.sigmoid(predictions(params, batch))
    root = tj.metrics.root_mean_squared_error(
        batch["y"], predictions(params, batch), weight
    )
    metrics = {
        "hits": hits,
        "auc": tj.metrics.auc(batch["y"] > 0, scores, weight),
        "root": root,
        "noise": tj.Weighted(noise_of(tower), tower.weight.sum()),
        "norm": jnp.linalg.norm(params["w"]),
        "step": tower.step,
    }
    local = dict(tower.local)
    for name in ("counter", "no one value"):
        local[name] += tower.weight.sum()
    others = tj.Weighted.mean(abs(predictions(params, batch)), weight * batch["length"])
    loss = tj.Weighted.mean(losses(params, batch), weight) + 0.1 * others
    loss += tj.shared(0.01 * (params["w"] ** 2).sum())
    return tj.TowerOutput(loss, metrics, local)


def total(params, batch, tower):
    return (losses(params, batch) * tower.weight).sum()


def mean_of_even(params, batch, tower):
    return losses(params, batch).mean()


def contrastive_over_all(params, batch, tower):
    a = jnp.tanh(batch["x"] * params["w"][None, :])
    others = tower.all_gather(a, axis=0)
    valid = tower.all_gather(tower.weight, axis=0)
    # Of its own rows each tower has the terms; the gradient of the gathered rows comes
    # back through all_gather.
    logits = a @ others.T + params["b"]
    logits = jnp.where(valid[None, :] > 0, logits, -1e9)
    own = (a * a).sum(1)
    loss = tj.Weighted.mean(jax.nn.logsumexp(logits, axis=1) - own, tower.weight)

    def total(strategy, a, weight):
        rows = jnp.concatenate(strategy.unwrap(a))
        valid = jnp.concatenate(strategy.unwrap(weight))
        return (rows * valid[:, None]).sum(0)

    center = tower.merge_call(total, a, tower.weight)
    spread = tj.Weighted.mean(((a - 0.1 * center[None, :]) ** 2).sum(1), tower.weight)
    return tj.TowerOutput(loss + spread, {"spread": spread})


def large_at_the_optimum(params, batch, tower):
    errors = (params["b"] - batch["y"]) ** 2 + 0 * predictions(params, batch)
    return tj.Weighted.mean(1e4 * errors + 3e4, tower.weight)


def in_half(params, batch, tower):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    errors = x.astype(jnp.float32) - batch["y"] + params["b"]
    return tj.Weighted.mean(errors**2, tower.weight)


OPTIMUM = {**PARAMS, "b": np.float32(np.float64(BATCH["y"]).mean())}
EVEN = {"padding": False, "towers": (7,)}
LOCAL = {name: COUNTED[name] for name in ("counter", "no one value")}
LOCAL = of_each_tower([*LOCAL.items(), ("first of none", (3, FIRST))])
KEYS = {"key": jax.random.key(0), "step": np.int32(3)}
GOOD = {
    "metrics": (
        measures_well,
        PARAMS,
        {"rng": "ignore", "local": LOCAL, "extra": KEYS},
    ),
    "total": (total, PARAMS, {"loss_reduction": SUM}),
    "mean of even": (mean_of_even, PARAMS, {"loss_reduction": MEAN, **EVEN}),
    "contrastive": (contrastive_over_all, PARAMS, {}),
    "optimum": (large_at_the_optimum, OPTIMUM, {}),
    "half": (in_half, PARAMS, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(name):
    loss_fn, params, options = GOOD[name]
    report = assert_replicates(loss_fn, params, BATCH, **{"towers": (3,)} | options)
    assert report.examples == 14 and report.largest < 1e-2
    assert {"loss", "gradient['w']"} <= set(report.compared)
    assert report.splits == 2 * len(report.towers)
    left_out = {"local['no one value']", "metrics['noise']", "extra['key']"}
    assert {*report.not_compared} == (left_out if name == "metrics" else set())


@pytest.mark.slow
def test_a_batch_may_hold_shared_values_and_sparse_rows():
    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((batch["x"] @ w - batch["goal"]) ** 2, tower.weight)

    x = sparse.BCOO.fromdense(np.diag(np.arange(1, 6, dtype=np.float32)))
    batch = {"x": x, "goal": tj.Shared(np.float32(0.5))}
    report = assert_replicates(loss_fn, np.ones(5, np.float32), batch, (3,))
    assert (report.examples, report.compared) == (5, ("gradient", "loss"))


@pytest.mark.slow
def test_a_batch_that_all_towers_divide_is_split_unevenly():
    """Of equally many rows a mean of the towers' means is right."""
    even = {name: np.concatenate([x, x])[:24] for name, x in BATCH.items()}
    with pytest.raises(SplitError):
        assert_replicates(mean_as_one, PARAMS, even, (1, 2))
    with pytest.raises(ValueError, match="was padded"):
        assert_replicates(forgets_weight, PARAMS, even, (1, 2))


@pytest.mark.slow
def test_both_parts_of_a_complex_metric_are_compared():
    """Of a batch in another byte order, on numbers of towers of NumPy's."""
    x = np.arange(1, 201, dtype=">f4")

    def loss_fn(w, x, tower):
        mean = tj.Weighted.mean(x, tower.weight)
        metrics = {"c": tj.Weighted(1j * mean.value, 1.0)}
        return tj.TowerOutput(tj.Weighted(w * mean.sum, mean.weight), metrics)

    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, np.float32(1), x, np.array([3], np.int8))
    assert [finding.leaf for finding in error.value.findings] == ["metrics['c']"]


@pytest.mark.slow
def test_an_audit_is_fast():
    begin = time.process_time()
    assert_replicates(mean_loss, PARAMS, BATCH)
    assert time.process_time() - begin < 4  # it takes a third


@pytest.mark.slow
def test_the_numbers_of_a_finding_are_those_of_numpy():
    x = np.array([1, 2, 4, 8, 16], np.float32)

    def loss_fn(w, batch, tower):
        loss = tj.Weighted.mean(w * batch, tower.weight)
        return tj.Weighted(loss.value, 1.0)

    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, np.float32(3), x, towers=(2,))
    assert {f.leaf for f in error.value.findings} == {"gradient", "loss"}
    [loss] = [f for f in error.value.findings if f.leaf == "loss"]
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
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.slow
def test_bad_arguments_are_refused():
    for wrong, options in {
        "3 towers .* cannot share evenly": {"padding": False},
        "whole number >= 1": {"towers": (0,)},
        "'ignore'": {"rng": "off"},
        "must be a number >= 0": {"rtol": -1.0},
        "towers=3 must be whole numbers": {"towers": 3},
        "one of None, Reduction.SUM": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
        "wrapp|Wrap": {"local": {"n": np.float32(0)}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, "towers": (3,), **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)
    with pytest.raises(ValueError, match="nothing to compare: every leaf"):
        assert_replicates(noisy, PARAMS, BATCH, towers=(3,), rng="ignore")
    with pytest.raises(ValueError, match="loss.*not finite"):
        assert_replicates(mean_loss, {**PARAMS, "b": np.float32("nan")}, BATCH, (3,))
    with pytest.raises(ValueError, match="bare scalar"):
        assert_replicates(total, PARAMS, BATCH, (3,))


# The command.

MODULE = """
import numpy as np
import towerjax as tj

params = {"w": np.float32(2)}

def make_batch():
    return {"x": np.arange(12, dtype=np.float32)}

def good(params, batch, tower):
    return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)

def bad(params, batch, tower):
    return tj.Weighted(good(params, batch, tower).value, 1.0)

def scalar(params, batch, tower):
    return (params["w"] * batch["x"] * tower.weight).sum()

def noisy(params, batch, tower):
    import jax
    noise = jax.random.key_data(tower.rng)[0].astype("float32")
    metrics = {"noise": tj.Weighted(noise, 1.0)}
    local = jax.tree.map(lambda seen: seen + 1.0, tower.local)
    return tj.TowerOutput(good(params, batch, tower), metrics, local)

def make_local():
    return tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)
"""


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        given = ["audit", *arguments]
        if "--params" not in arguments:
            given += ["--params", "of_user:params", "--batch", "of_user:make_batch"]
        path = list(sys.path)
        try:
            code = main(given)
        except SystemExit as error:
            code = error.code
        assert sys.path == path
        return code, *capsys.readouterr()

    yield run
    sys.modules.pop("of_user", None)


@pytest.mark.slow
def test_the_command_passes_what_is_right(audit):
    two = ("--towers", "2")
    code, out, _ = audit("of_user:scalar", "--loss-reduction", "sum", *two, "--json")
    found = json.loads(out)
    assert code == 0 and found["same"] and found["towers"] == [2]
    assert found["compared"] == ["gradient['w']", "loss"]
    noisy = ("of_user:noisy", "--ignore-random", "--local", "of_user:make_local")
    code, out, _ = audit(*noisy, "--towers", "2,5")
    assert code == 0 and "3 leaves are the same on 2, 5 towers" in out
    assert "not compared: metrics['noise']" in out
    assert audit("of_user:bad", "--no-padding", *two)[0] == 0
    assert audit("of_user:bad", "--rtol", "10", *two)[0] == 0


@pytest.mark.slow
def test_the_command_says_what_is_wrong(audit):
    code, out, _ = audit("of_user:bad", "--towers", "5", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert [x["leaf"] for x in found["findings"]] == ["gradient['w']", "loss"]
    assert found["findings"][0]["towers"] == 5
    code, out, _ = audit("of_user:noisy", "--towers", "2")
    assert code == 1 and "metrics['noise'] is " in out
    assert "on one: they differ by" in out


def test_the_command_refuses_wrong_arguments(audit):
    for wrong, arguments in {
        "of the form module:name": ["of_user.good"],
        "'.of_user:good' is not of the form": [".of_user:good"],
        "has no 'better'": ["of_user:better"],
        "no module 'of_nobody'": ["of_nobody:good"],
        "is no function": ["of_user:params"],
        "whole numbers with commas": ["of_user:good", "--towers", "two"],
        "bare scalar": ["of_user:scalar"],
        "invalid Reduction": ["of_user:good", "--loss-reduction", "middle"],
    }.items():
        code, _, error = audit(*arguments)
        assert code == 2 and wrong in error, error
