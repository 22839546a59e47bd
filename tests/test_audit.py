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
from towerjax.tools.testing.audited import splits_of
from towerjax.tools.testing.findings import CAUSES

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


def weighted_mean_as_one(params, batch, tower):
    w = tower.weight * batch["weight"]
    return tj.Weighted((losses(params, batch) * w).sum() / (w.sum() + 1e-9), 1.0)


def mean_of_scalars(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight).value


def masked_tokens_per_tower(params, batch, tower):
    mask = jnp.arange(3)[None, :] < batch["length"][:, None]
    mask = mask * tower.weight[:, None]
    token_losses = (batch["x"] * params["w"][None, :] - params["b"]) ** 2
    mean = (token_losses * mask).sum() / jnp.maximum(mask.sum(), 1)
    return tj.Weighted(mean * tower.weight.sum(), tower.weight.sum())


def total_as_one(params, batch, tower):
    return tj.Weighted((losses(params, batch) * tower.weight).sum(), 1.0)


def mean_over_rows(params, batch, tower):
    mean = tj.Weighted.mean(losses(params, batch), tower.weight)
    return tj.Weighted(mean.value, tower.weight.sum())


def total_over_towers(params, batch, tower):
    loss = tj.Weighted.mean(losses(params, batch), tower.weight)
    return tj.Weighted(loss.sum / tower.num_towers, loss.weight)


def forgets_weight(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch))


def own_weight_alone(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), batch["weight"])


def batch_norm(params, batch, tower):
    w = tower.weight[:, None]
    count = jnp.maximum(w.sum(), 1)
    mean = (batch["x"] * w).sum(0, keepdims=True) / count
    var = (w * (batch["x"] - mean) ** 2).sum(0, keepdims=True) / count
    x = normalized(batch["x"], mean, var)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


def contrastive(params, batch, tower):
    a = jnp.tanh(batch["x"] * params["w"][None, :])
    logits = a @ a.T + params["b"]
    logits = jnp.where(tower.weight[None, :] > 0, logits, -1e9)
    return tj.Weighted.mean(
        jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits), tower.weight
    )


@jax.custom_vjp
def clipped(params):
    return params


def clip(_, g):
    norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g)))
    return (jax.tree.map(lambda x: x * jnp.minimum(1.0, 0.5 / norm), g),)


clipped.defvjp(lambda p: (p, None), clip)


def clips_in_tower(params, batch, tower):
    return tj.Weighted.mean(losses(clipped(params), batch), tower.weight)


@jax.custom_vjp
def cut(params):
    return params


cut.defvjp(
    lambda p: (p, None),
    lambda _, g: (jax.tree.map(lambda x: jnp.clip(x, -0.3, 0.3), g),),
)


def cuts_elements(params, batch, tower):
    return tj.Weighted.mean(losses(cut(params), batch), tower.weight)


def dropout(params, batch, tower):
    keep = jax.random.bernoulli(tower.rng, 0.5, batch["x"].shape)
    x = jnp.where(keep, batch["x"] / 0.5, 0.0)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


def reads_id(params, batch, tower):
    scale = 1.0 + 0.1 * tower.id
    return tj.Weighted.mean(scale * losses(params, batch), tower.weight)


def differences_of_neighbours(params, batch, tower):
    steps = predictions(params, batch) * jnp.arange(1.0, len(batch["y"]) + 1)
    return tj.Weighted.mean(steps, tower.weight)


def with_metric(name):
    def loss_fn(params, batch, tower):
        hits = (predictions(params, batch) > 0).astype(jnp.float32)
        mean = tj.Weighted.mean(hits, tower.weight)
        metric = {
            "mean_as_one": tj.Weighted(mean.value, 1.0),
            "root": tj.Weighted(
                jnp.sqrt(mean_loss(params, batch, tower).value), tower.weight.sum()
            ),
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
    "mean as one": (mean_as_one, "mean_of_means", "loss", {}),
    "weighted mean": (weighted_mean_as_one, "mean_of_means", "gradient['w']", {}),
    "mean of scalars": (
        mean_of_scalars,
        "mean_of_means",
        "gradient['b']",
        {"loss_reduction": MEAN},
    ),
    "tokens": (masked_tokens_per_tower, "mean_of_means", "loss", {}),
    "scalars added": (mean_of_scalars, "sum", "loss", {"loss_reduction": SUM}),
    "mean over rows": (mean_over_rows, "sum", "gradient['w']", {}),
    "total as one": (total_as_one, "divided", "loss", {}),
    "divided twice": (total_over_towers, "divided", "gradient['b']", {}),
    "no weight": (forgets_weight, "padding", "loss", {}),
    "own weight alone": (own_weight_alone, "padding", "gradient['w']", {}),
    "batch norm": (batch_norm, "batch_statistics", "loss", {}),
    "contrastive": (contrastive, "contrastive", "loss", {}),
    "clipped": (clips_in_tower, "clipping", "gradient['w']", {}),
    "elements cut": (cuts_elements, "clipping", "gradient['b']", {"towers": (1, 2)}),
    "dropout": (dropout, "rng", "gradient['w']", {}),
    "reads id": (reads_id, "tower_id", "loss", {}),
    "places": (differences_of_neighbours, "row_order", "loss", {}),
    "metric as one": (
        with_metric("mean_as_one"),
        "mean_of_means",
        "metrics['hits']",
        {},
    ),
    "root": (with_metric("root"), "sum", "metrics['hits']", {}),
    "plain metric": (with_metric("plain"), "per_tower", "metrics['hits']", {}),
    "metric padded": (with_metric("forgets"), "padding", "metrics['hits']", {}),
    "initial": (counts, "initial", "local['seen']", seen(2, SUM)),
    "count as mean": (counts, "divided", "local['seen']", seen(0, MEAN)),
    "first tower": (counts, "first_tower", "local['seen']", seen(0, FIRST)),
    "moving mean": (moving_mean, "mean_of_means", "local['seen']", seen(1, MEAN)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_found_and_named(name):
    loss_fn, cause, leaf, options = BAD[name]
    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, PARAMS, BATCH, **{"towers": (3,)} | options)
    found = {finding.leaf: finding for finding in error.value.findings}
    assert found[leaf].causes[0] == cause, str(error.value)
    assert found[leaf].difference > 0 or cause == "per_tower"
    if leaf.startswith(("metrics", "local")):
        assert found.keys() == {leaf}  # and nothing that is right
    if cause == "clipping":
        assert "loss" not in found
    assert leaf in str(error.value) and CAUSES[cause] in str(error.value)


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


def masked_tokens(params, batch, tower):
    mask = jnp.arange(3)[None, :] < batch["length"][:, None]
    token_losses = (batch["x"] * params["w"][None, :] - params["b"]) ** 2
    return tj.Weighted.mean(token_losses, mask * tower.weight[:, None])


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


def batch_norm_over_all(params, batch, tower):
    w = tower.weight[:, None]
    count = tower.reduce(SUM, w.sum())
    mean = tower.reduce(SUM, (batch["x"] * w).sum(0, keepdims=True)) / count
    var = tower.reduce(SUM, (w * (batch["x"] - mean) ** 2).sum(0, keepdims=True))
    x = normalized(batch["x"], mean, var / count)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


def dropout_of_rows(params, batch, tower):
    def keep(key):
        return jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, (3,))

    x = jnp.where(jax.vmap(keep)(batch["key"]), batch["x"] / 0.5, 0.0)
    return tj.Weighted.mean(losses(params, {**batch, "x": x}), tower.weight)


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


def straight_through(params, batch, tower):
    x = predictions(params, batch)
    x = x + jax.lax.stop_gradient(jnp.round(x) - x)
    return tj.Weighted.mean((x - batch["y"]) ** 2, tower.weight)


def regularized(params, batch, tower):
    loss = tj.Weighted.mean(losses(params, batch), tower.weight)
    return tj.Weighted(loss.sum + 0.1 * loss.weight * params["b"] ** 2, loss.weight)


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
    "mean": (mean_loss, PARAMS, {}),
    "metrics": (weights_of_batch, PARAMS, {}),
    "total": (total, PARAMS, {"loss_reduction": SUM}),
    "mean of even": (mean_of_even, PARAMS, {"loss_reduction": MEAN, **EVEN}),
    "no weight, even": (forgets_weight, PARAMS, EVEN),
    "tokens": (masked_tokens, PARAMS, {}),
    "contrastive": (contrastive_over_all, PARAMS, {}),
    "merge call": (contrastive_by_merge, PARAMS, {}),
    "batch norm": (batch_norm_over_all, PARAMS, {}),
    "dropout of rows": (dropout_of_rows, PARAMS, {}),
    "optimum": (at_the_optimum, OPTIMUM, {}),
    "large": (large_numbers, PARAMS, {}),
    "half": (in_half, PARAMS, {}),
    "straight through": (straight_through, PARAMS, {}),
    "regularized": (regularized, PARAMS, {}),
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
    report = assert_replicates(loss_fn, params, BATCH, **{"towers": (1, 3)} | options)
    assert report.examples == 14 and report.largest < 1e-2
    assert {"loss", "gradient['w']"} <= set(report.compared)
    assert report.splits == 2 * len(report.towers)
    left_out = {
        "random, ignored": ("metrics['noise']",),
        "no one value": ("local['seen']",),
    }
    assert report.not_compared == left_out.get(name, ())


@pytest.mark.slow
def test_an_audit_is_fast():
    assert_replicates(mean_loss, PARAMS, BATCH)
    begin = time.perf_counter()
    assert_replicates(mean_loss, PARAMS, BATCH)
    assert time.perf_counter() - begin < 4  # alone it takes a third; others may run


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
    splits = []
    for deal in splits_of(5, 2, padding=True):
        hands = [i[:n] for i, n in zip(deal.index, deal.counts, strict=True)]
        assert sorted(np.concatenate(hands)) == list(range(5))
        splits.append(3 * np.mean([x[hand].mean(dtype=np.float64) for hand in hands]))
    worst = max(splits, key=lambda value: abs(value - 3 * 31 / 5))
    np.testing.assert_allclose(loss.value, worst, rtol=1e-6)
    np.testing.assert_allclose(loss.one_tower, 3 * 31 / 5, rtol=1e-6)
    assert loss.towers == 2
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.slow
def test_a_value_that_is_right_on_the_first_tower_alone_is_found():
    def loss_fn(w, batch, tower):
        loss = tj.Weighted.mean(w * batch, tower.weight)
        return tj.TowerOutput(loss, {"plain": jnp.where(tower.id == 0, 1.0, 2.0)})

    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, np.float32(3), np.arange(4, dtype="f"), towers=(2,))
    [plain] = error.value.findings
    assert (plain.leaf, plain.causes) == ("metrics['plain']", ("per_tower",))
    assert plain.difference == 0


@pytest.mark.slow
def test_padding_that_counts_is_found_where_the_towers_divide_the_batch():
    def careless(w, batch, tower):
        return tj.Weighted.mean(w * batch)

    with pytest.raises(SplitError, match="padded rows count"):
        assert_replicates(careless, np.float32(3), np.arange(4, dtype="f"), towers=(2,))


@pytest.mark.slow
def test_bad_arguments_are_refused():
    short = jax.tree.map(lambda x: x[:3], BATCH)
    for wrong, options in {
        "needs 4 or more": {"batch": short},
        "do not divide": {"padding": False},
        "whole number >= 1": {"towers": (0,)},
        "'ignore'": {"rng": "off"},
        "must be >= 0": {"rtol": -1.0},
        "Reduction.SUM or": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
        "wrapp|Wrap": {"local": {"n": np.float32(0)}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)
    with pytest.raises(ValueError, match="nothing to compare: every leaf"):
        assert_replicates(dropout, PARAMS, BATCH, rng="ignore")
    with pytest.raises(ValueError, match="loss.*not finite"):
        assert_replicates(mean_loss, {**PARAMS, "b": np.float32("nan")}, BATCH)
    with pytest.raises(ValueError, match="bare scalar"):
        assert_replicates(total, PARAMS, BATCH)


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
    assert audit("of_user:scalar", "--loss-reduction", "sum")[0] == 0
    assert audit("of_user:counting", "--local", "of_user:make_local")[0] == 0
    code, out, _ = audit("of_user:noisy", "--ignore-random")
    assert code == 0 and "not compared: metrics['noise']" in out
    assert audit("of_user:bad", "--no-padding", "--towers", "1,2,4")[0] == 0
    assert audit("of_user:bad", "--rtol", "10")[0] == 0


@pytest.mark.slow
def test_the_command_says_what_is_wrong(audit):
    code, out, _ = audit("of_user:bad")
    assert code == 1 and "mean_of_means: a mean of the towers' means" in out
    code, out, _ = audit("of_user:bad", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert [x["leaf"] for x in found["findings"]] == ["gradient['w']", "loss"]
    assert found["findings"][0]["causes"] == ["mean_of_means"]
    assert audit("of_user:noisy")[0] == 1


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
