"""Audits of loss functions: what is wrong is found and named, what is right passes."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.tools import cli
from towerjax.tools.testing import SplitError, assert_replicates
from towerjax.tools.testing.audit import _worst_finding

SUM, MEAN, FIRST = (tj.Reduction.SUM, tj.Reduction.MEAN, tj.Reduction.ONLY_FIRST_TOWER)
DRAW = np.random.default_rng(5)
BATCH = {
    "x": DRAW.normal(size=(14, 3)).astype(np.float32) + 0.3,
    "y": DRAW.normal(size=14).astype(np.float32),
    "weight": DRAW.uniform(0.2, 3, size=14).astype(np.float32),
}
PARAMS = {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.25)}


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


def penalised_in_its_sum(params, batch, tower):
    own = (losses(params, batch) * tower.weight).sum() + (params["w"] ** 2).sum()
    return tj.Weighted(own, tower.weight.sum())


BAD = {
    "mean of scalars": (mean_of_scalars, "gradient['b']", {"loss_reduction": MEAN}),
    "clipped": (clips_in_tower, "gradient['w']", {}),
    "places": (places, "loss", {"towers": (1,)}),
    "penalty": (penalised_in_its_sum, "gradient['w']", {}),
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
    """Also of a batch that all numbers of towers divide: it is split unevenly."""
    even = {name: x[:12] for name, x in BATCH.items()}
    with pytest.raises(ValueError, match="was padded"):
        assert_replicates(forgets_weight, PARAMS, even, (2,))


# What is right.


def measures_well(params, batch, tower):
    weight = tower.weight * batch["weight"]
    hits = tj.metrics.accuracy(batch["y"] > 0, predictions(params, batch) > 0, weight)
    metrics = {
        "hits": hits,
        "noise": tj.Weighted(noise_of(tower), tower.weight.sum()),
        "norm": jnp.linalg.norm(params["w"]),
        "step": tower.step,
    }
    local = dict(tower.local)
    for name in ("counter", "no one value"):
        local[name] += tower.weight.sum()
    loss = tj.Weighted.mean(losses(params, batch), weight)
    return tj.TowerOutput(loss, metrics, local)


def in_half(params, batch, tower):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    errors = x.astype(jnp.float32) - batch["y"] + params["b"]
    return tj.Weighted.mean(errors**2, tower.weight)


LOCAL = {name: COUNTED[name] for name in ("counter", "no one value")}
LOCAL = of_each_tower([*LOCAL.items(), ("first of none", (3, FIRST))])
KEYS = {"key": jax.random.key(0), "step": np.int32(3)}
GOOD = {
    "metrics": (measures_well, {"rng": "ignore", "local": LOCAL, "extra": KEYS}),
    "half": (in_half, {"padding": False, "towers": (7,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(name):
    loss_fn, options = GOOD[name]
    report = assert_replicates(loss_fn, PARAMS, BATCH, **{"towers": (3,)} | options)
    assert report.examples == 14 and report.largest < 1e-2
    assert {"loss", "gradient['w']"} <= set(report.compared)
    assert report.splits == 2 * len(report.towers)
    left_out = {"local['no one value']", "metrics['noise']", "extra['key']"}
    assert {*report.not_compared} == (left_out if name == "metrics" else set())


def test_a_gradient_that_is_0_up_to_rounding_has_the_size_of_the_others():
    def relative(loss, size, gap, name="gradient['b']"):
        expected = {name: np.zeros(2), "gradient['w']": np.full(3, size)}
        run = {name: np.array([0, gap])}
        finding = _worst_finding(name, {(3, "x"): run}, {**expected, "loss": loss})
        assert finding.difference == gap and finding.one_tower == 0
        return finding.relative

    assert relative(np.float64(3e4), 0.0, 1e-3) == 1e-3 / 30
    assert relative(np.float64(1), 2.0, 1e-3) == 1e-3 / 0.02
    assert relative(np.float64(3e4), 1.0, 1e-3, "metrics['b']") == 1.0
    changed = {(3, "x"): {"metrics['b']": np.zeros(3)}}
    assert (
        _worst_finding("metrics['b']", changed, {"metrics['b']": np.ones(2)}).relative
        == np.inf
    )


@pytest.mark.slow
def test_the_numbers_of_a_finding_are_those_of_numpy():
    """Of a batch in another byte order, with a shared value and a complex metric."""
    x = np.array([1, 2, 4, 8, 16], ">f4")

    def loss_fn(w, batch, tower):
        loss = tj.Weighted.mean(batch["w"] * w * batch["x"], tower.weight).value
        metrics = {"c": tj.Weighted(1 + 1j * loss, 1.0)}
        return tj.TowerOutput(tj.Weighted(loss, 1.0), metrics)

    batch = {"x": x, "w": tj.Shared(np.float32(3))}
    with pytest.raises(SplitError) as error:
        assert_replicates(loss_fn, np.float32(1), batch, np.array([2], np.int8))
    leaves = {finding.leaf for finding in error.value.findings}
    assert leaves == {"gradient", "loss", "metrics['c']"}
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
        "whole number >= 1": {"towers": (0,)},
        "'ignore'": {"rng": "off"},
        "must be a number >= 0": {"rtol": -1.0},
        "towers=3 must be whole numbers": {"towers": 3},
        "one of None, Reduction.SUM": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, "towers": (3,), **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)
    with pytest.raises(ValueError, match="nothing to compare: every leaf"):
        assert_replicates(noisy, PARAMS, BATCH, towers=(3,), rng="ignore")
    with pytest.raises(ValueError, match="gradient.*not finite"):
        assert_replicates(mean_loss, {**PARAMS, "b": np.float32("nan")}, BATCH, (3,))


# The command.

PROGRAM = """
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

def make_local():
    return tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)
"""


@pytest.fixture
def audit(shell):
    given = ("--params", "of_user:params", "--batch", "of_user:make_batch")
    return lambda *arguments: shell("audit", *arguments, *given)


def test_the_command_passes_its_options_on(audit, monkeypatch):
    calls = []

    def replicates(*args, **options):
        calls.append(options)
        return tj.testing.AuditReport((2,), 12, 2, ("loss",), (), 0.0, "loss")

    monkeypatch.setattr(cli, "assert_replicates", replicates)
    assert audit("of_user:good")[1].startswith("1 leaves are the same on 2 towers")
    given = "--towers 2,5 --rtol 10 --loss-reduction sum --ignore-random --no-padding"
    code, out, _ = audit(
        "of_user:good", *given.split(), "--local", "of_user:make_local", "--json"
    )
    assert code == 0 and json.loads(out)["same"] and json.loads(out)["towers"] == [2]
    assert calls[0].keys() == {"params", "batch"}
    assert calls[0]["params"] == {"w": 2} and calls[0]["batch"]["x"].shape == (12,)
    local = calls[1].pop("local")
    assert local.reduction == MEAN
    expected = {"towers": (2, 5), "rtol": 10.0, "loss_reduction": SUM}
    expected |= {"rng": "ignore", "padding": False}
    assert {k: x for k, x in calls[1].items() if k not in calls[0]} == expected


@pytest.mark.slow
def test_the_command_says_what_is_wrong(audit):
    code, out, _ = audit("of_user:bad", "--towers", "5", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert [x["leaf"] for x in found["findings"]] == ["gradient['w']", "loss"]
    assert found["findings"][0]["towers"] == 5


def test_the_command_refuses_wrong_arguments(audit):
    for wrong, arguments in {
        "of the form module:name": ["of_user.good"],
        "'.of_user:good' is not of the form": [".of_user:good"],
        "has no attribute 'better'": ["of_user:better"],
        "No module named 'of_nobody'": ["of_nobody:good"],
        "is no function": ["of_user:params"],
        "whole numbers with commas": ["of_user:good", "--towers", "two"],
        "invalid Reduction": ["of_user:good", "--loss-reduction", "middle"],
    }.items():
        code, _, error = audit(*arguments)
        assert code == 2 and wrong in error, error
