"""Audits of loss functions: what is wrong is found and named, what is right passes."""

import json
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def normalized(x, mean, var):
    return (x - mean) * jax.lax.rsqrt(var + 1e-3)


# What is wrong: a loss function, the cause, what is found, options.


def mean_as_one(params, batch, tower):
    loss = tj.Weighted.mean(losses(params, batch), tower.weight)
    return tj.Weighted(loss.value, 1.0)


def mean_of_scalars(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight).value


def total_as_one(params, batch, tower):
    return tj.Weighted((losses(params, batch) * tower.weight).sum(), 1.0)


def forgets_weight(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch))


def batch_norm(params, batch, tower):
    w = tower.weight[:, None]
    count = jnp.maximum(w.sum(), 1)
    mean = (batch["x"] * w).sum(0, keepdims=True) / count
    var = (w * (batch["x"] - mean) ** 2).sum(0, keepdims=True) / count
    x = normalized(batch["x"], mean, var)
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


def dropout(params, batch, tower):
    keep = jax.random.bernoulli(tower.rng, 0.5, batch["x"].shape)
    x = jnp.where(keep, batch["x"] / 0.5, 0.0)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


def reads_id(params, batch, tower):
    scale = 1.0 + 0.1 * tower.id
    return tj.Weighted.mean(scale * losses(params, batch), tower.weight)


def places(params, batch, tower):
    values = predictions(params, batch) * jnp.arange(1.0, len(batch["y"]) + 1)
    return tj.Weighted.mean(values, tower.weight)


def with_metric(name):
    def loss_fn(params, batch, tower):
        hits = (predictions(params, batch) > 0).astype(jnp.float32)
        mean = tj.Weighted.mean(hits, tower.weight)
        metric = {
            "mean_as_one": tj.Weighted(mean.value, 1.0),
            "plain": hits.mean(),
            "forgets": tj.Weighted.mean(hits),
        }[name]
        return tj.TowerOutput(mean_loss(params, batch, tower), {"hits": metric})

    return loss_fn


def mean_loss(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight)


def counts(params, batch, tower):
    local = {"seen": tower.local["seen"] + tower.weight.sum()}
    return tj.TowerOutput(mean_loss(params, batch, tower), local=local)


def moving_mean(params, batch, tower):
    mean = tj.Weighted.mean(batch["x"][:, 0], tower.weight).value
    local = {"seen": 0.9 * tower.local["seen"] + 0.1 * mean}
    return tj.TowerOutput(mean_loss(params, batch, tower), local=local)


def seen(value, reduction):
    return {"local": {"seen": tj.TowerLocal(np.float32(value), reduction)}}


BAD = {
    "mean as one": (mean_as_one, "loss", {}),
    "mean of scalars": (mean_of_scalars, "gradient['b']", {"loss_reduction": MEAN}),
    "scalars added": (mean_of_scalars, "loss", {"loss_reduction": SUM}),
    "total as one": (total_as_one, "loss", {}),
    "batch norm": (batch_norm, "loss", {}),
    "clipped": (clips_in_tower, "gradient['w']", {}),
    "dropout": (dropout, "gradient['w']", {}),
    "reads id": (reads_id, "loss", {}),
    "places": (places, "loss", {"towers": (1,)}),
    "metric as one": (with_metric("mean_as_one"), "metrics['hits']", {}),
    "initial": (counts, "local['seen']", seen(2, SUM)),
    "count as mean": (counts, "local['seen']", seen(0, MEAN)),
    "first tower": (counts, "local['seen']", seen(0, FIRST)),
    "moving mean": (moving_mean, "local['seen']", seen(1, MEAN)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_depends_on_the_split_is_found(name):
    loss_fn, leaf, options = BAD[name]
    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, PARAMS, BATCH, **{"towers": (3,)} | options)
    found = {finding.leaf: finding for finding in error.value.findings}
    assert found[leaf].difference > 0 and leaf in str(error.value)
    if leaf.startswith(("metrics", "local")):
        assert found.keys() == {leaf}  # and nothing that is right
    if name == "clipped":
        assert "loss" not in found


@pytest.mark.slow
def test_what_a_train_step_refuses_is_refused():
    for loss_fn, text in {
        forgets_weight: "loss.*padded|padded.*loss",
        with_metric("forgets"): "hits",
        with_metric("plain"): "hits.* depends on",
    }.items():
        with pytest.raises(ValueError, match=text):
            assert_replicates(loss_fn, PARAMS, BATCH, towers=(3,))


# What is right.


def weights_of_batch(params, batch, tower):
    weight = tower.weight * batch["weight"]
    hits = tj.metrics.accuracy(batch["y"] > 0, predictions(params, batch) > 0, weight)
    scores = jax.nn.sigmoid(predictions(params, batch))
    auc = tj.metrics.auc(batch["y"] > 0, scores, weight)
    loss = tj.Weighted.mean(losses(params, batch), weight)
    root = tj.metrics.root_mean_squared_error(
        batch["y"], predictions(params, batch), weight
    )
    return tj.TowerOutput(loss, {"hits": hits, "auc": auc, "root": root})


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
    own = (a * a).sum(1) + params["b"]
    return tj.Weighted.mean(jax.nn.logsumexp(logits, axis=1) - own, tower.weight)


def contrastive_by_merge(params, batch, tower):
    a = jnp.tanh(batch["x"] * params["w"][None, :])

    def total(strategy, a, weight):
        rows = jnp.concatenate(strategy.unwrap(a))
        valid = jnp.concatenate(strategy.unwrap(weight))
        return (rows * valid[:, None]).sum(0)

    center = tower.merge_call(total, a, tower.weight)
    return tj.Weighted.mean(((a - 0.1 * center[None, :]) ** 2).sum(1), tower.weight)


def at_the_optimum(params, batch, tower):
    return tj.Weighted.mean(
        (params["b"] - batch["y"]) ** 2 + 0 * predictions(params, batch), tower.weight
    )


def large_numbers(params, batch, tower):
    return tj.Weighted.mean(1e4 * losses(params, batch) + 3e4, tower.weight)


def in_half(params, batch, tower):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    errors = x.astype(jnp.float32) - batch["y"] + params["b"]
    return tj.Weighted.mean(errors**2, tower.weight)


def random_metric(params, batch, tower):
    noise = jax.random.uniform(tower.rng, batch["y"].shape)
    metrics = {"noise": tj.Weighted.mean(noise, tower.weight)}
    return tj.TowerOutput(mean_loss(params, batch, tower), metrics)


def mirrored_metric(params, batch, tower):
    metrics = {"norm": jnp.linalg.norm(params["w"]), "step": tower.step}
    return tj.TowerOutput(mean_loss(params, batch, tower), metrics)


OPTIMUM = {**PARAMS, "b": np.float32(np.float64(BATCH["y"]).mean())}
EVEN = {"padding": False, "towers": (1, 2, 7)}
GOOD = {
    "mean": (mean_loss, PARAMS, {"towers": (1, 3)}),
    "metrics": (weights_of_batch, PARAMS, {}),
    "total": (total, PARAMS, {"loss_reduction": SUM}),
    "mean of even": (mean_of_even, PARAMS, {"loss_reduction": MEAN, **EVEN}),
    "contrastive": (contrastive_over_all, PARAMS, {}),
    "merge call": (contrastive_by_merge, PARAMS, {}),
    "optimum": (at_the_optimum, OPTIMUM, {}),
    "large": (large_numbers, PARAMS, {}),
    "half": (in_half, PARAMS, {}),
    "random, ignored": (random_metric, PARAMS, {"rng": "ignore"}),
    "mirrored metric": (mirrored_metric, PARAMS, {}),
    "counter": (counts, PARAMS, seen(0, SUM)),
    "first of none": (mean_loss, PARAMS, seen(3, FIRST)),
    "no one value": (counts, PARAMS, seen(0, tj.Reduction.NONE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(name):
    loss_fn, params, options = GOOD[name]
    report = assert_replicates(loss_fn, params, BATCH, **{"towers": (3,)} | options)
    assert report.examples == 14 and report.largest < 1e-2
    assert {"loss", "gradient['w']"} <= set(report.compared)
    assert report.splits == 2 * len(report.towers)
    left_out = {
        "random, ignored": ("metrics['noise']",),
        "no one value": ("local['seen']",),
    }
    assert report.not_compared == left_out.get(name, ())


def test_a_batch_that_all_towers_divide_is_split_unevenly():
    """Of equally many rows a mean of the towers' means is right."""
    even = {name: np.concatenate([x, x])[:24] for name, x in BATCH.items()}
    with pytest.raises(SplitError):
        assert_replicates(mean_as_one, PARAMS, even, (1, 2))
    with pytest.raises(ValueError, match="was padded"):
        assert_replicates(forgets_weight, PARAMS, even, (1, 2))


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
        "must be >= 0": {"rtol": -1.0},
        "one of None, Reduction.SUM": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
        "wrapp|Wrap": {"local": {"n": np.float32(0)}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, "towers": (3,), **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)
    with pytest.raises(ValueError, match="nothing to compare: every leaf"):
        assert_replicates(dropout, PARAMS, BATCH, towers=(3,), rng="ignore")
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
    metrics = {"noise": tj.Weighted(jax.random.uniform(tower.rng), 1.0)}
    return tj.TowerOutput(good(params, batch, tower), metrics)

def counting(params, batch, tower):
    return tj.TowerOutput(good(params, batch, tower), local=tower.local + 1.0)

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
    code, out, _ = audit("of_user:good")
    assert code == 0 and "2 leaves are the same on 1, 2, 3, 4, 8 towers" in out
    code, out, _ = audit("of_user:good", "--towers", "2,5", "--json")
    found = json.loads(out)
    assert code == 0 and found["same"] and found["towers"] == [2, 5]
    assert found["compared"] == ["gradient['w']", "loss"]
    two = ("--towers", "2")
    assert audit("of_user:scalar", "--loss-reduction", "sum", *two)[0] == 0
    assert audit("of_user:counting", "--local", "of_user:make_local", *two)[0] == 0
    code, out, _ = audit("of_user:noisy", "--ignore-random", *two)
    assert code == 0 and "not compared: metrics['noise']" in out
    assert audit("of_user:bad", "--no-padding", *two)[0] == 0
    assert audit("of_user:bad", "--rtol", "10", *two)[0] == 0


@pytest.mark.slow
def test_the_command_says_what_is_wrong(audit):
    bad = ("of_user:bad", "--towers", "5")
    code, out, _ = audit(*bad)
    assert code == 1 and "loss is " in out and "on one: they differ by" in out
    code, out, _ = audit(*bad, "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert [x["leaf"] for x in found["findings"]] == ["gradient['w']", "loss"]
    assert found["findings"][0]["towers"] == 5
    assert audit("of_user:noisy", "--towers", "2")[0] == 1


def test_the_command_refuses_wrong_arguments(audit):
    for wrong, arguments in {
        "of the form module:name": ["of_user.good"],
        "has no 'better'": ["of_user:better"],
        "no module 'of_nobody'": ["of_nobody:good"],
        "is no function": ["of_user:params"],
        "whole numbers with commas": ["of_user:good", "--towers", "two"],
        "bare scalar": ["of_user:scalar"],
        "invalid choice": ["of_user:good", "--loss-reduction", "middle"],
    }.items():
        code, _, error = audit(*arguments)
        assert code == 2 and wrong in error, error
