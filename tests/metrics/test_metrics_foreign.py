"""Metrics of clu and metrax: merged over towers, and over batches, as their own are."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import metrax
import metrics_oracle as oracle
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from test_metrics import WAYS, Difference, Swapped, batches_of, own_states, random_rows

import towerjax as tj


@pytest.fixture(autouse=True)
def ranks_promote():
    """metrax compares scores ``[b]`` with thresholds ``[n, 1]``."""
    with jax.numpy_rank_promotion("allow"):
        yield


def foreign(batch, w):
    yes, score, value = (batch[name] for name in ("yes", "score", "value"))
    return {
        "clu/average": clu_metrics.Average.from_model_output(value, mask=w),
        "metrax/average": metrax.Average.from_model_output(value, sample_weights=w),
        "metrax/pr": metrax.AUCPR.from_model_output(score, yes, w, num_thresholds=50),
        "metrax/rmse": metrax.RMSE.from_model_output(value, batch["target"], w),
    }


ROWS = random_rows(2, 21)
WEIGHT = np.float64(ROWS["weight"])


@functools.cache
def expected():
    value = np.float64(ROWS["value"])

    @jax.jit
    def area():
        """metrax has thresholds of its own, from 0 to 1; a score at one says yes."""
        return foreign(ROWS, np.float32(WEIGHT))["metrax/pr"].compute()

    return {
        "clu/average": value[WEIGHT > 0].mean(),
        "metrax/average": oracle.weighted_mean(value, WEIGHT),
        "metrax/rmse": oracle.VALUES["rmse"](ROWS, WEIGHT),
        "metrax/pr": area(),
    }


def check(found, names):
    for name in names:
        value = expected()[name]
        np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.slow
def test_towers_and_batches_give_the_value_of_one_pass():
    names = ("clu/average", "metrax/rmse")  # in training all

    def metric_fn(params, batch, tower):
        found = foreign(batch, batch["weight"] * tower.weight)
        return {name: found[name] for name in names}

    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4, **WAYS["pinned"])
    evaluate = tj.build_eval_step(metric_fn, strategy)
    check(tj.evaluate(evaluate, np.float32(0), batches_of(ROWS, 8)), names)


@pytest.mark.slow
def test_train_metrics_are_values_of_the_global_batch():
    """Also where compute slices by a number of the state, as that of AUCPR does.

    And of our own states, which add up or do not.
    """

    def loss_fn(params, batch, tower):
        loss = tj.Weighted.mean(params * batch["value"], tower.weight)
        w = batch["weight"] * tower.weight
        own = own_states(batch["value"], tower.weight, jnp.int32(0))
        own["auc"] = tj.metrics.auc(batch["yes"], batch["score"], w)
        return tj.TowerOutput(loss, foreign(batch, w) | own)

    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4, tower_loop="scan")
    # Where a peak is, is told from a tower's first row.
    options = {"remainder": "pad", "micro_batches": 3, "audit": False}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
    _, metrics = step(step.init(np.float32(1)), ROWS)
    check(metrics, expected())
    value = ROWS["value"].astype(float)
    np.testing.assert_allclose(metrics["variance"], value.var(), rtol=1e-5)
    np.testing.assert_allclose(metrics["auc"], oracle.auc_roc(ROWS, WEIGHT), rtol=1e-5)
    assert metrics["peak"][0] == ROWS["value"].max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Difference, Swapped])
def test_what_is_not_quite_a_sum_is_merged_one_by_one(kind):
    def metric_fn(params, x, tower):
        return {"x": kind(x[0], 10 * x[0])}

    x = np.float32([1, 2, 3, 4])
    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4)
    # What it merges to depends on the number of parts.
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=False)
    found = evaluate(np.float32(0), x)["x"]
    state = kind(x[0], 10 * x[0])
    for y in x[1:]:
        state = state.merge(kind(y, 10 * y))
    assert (found.a, found.b) == (state.a, state.b)


@pytest.mark.sampled
@pytest.mark.slow
def test_a_last_value_is_the_mean_over_towers_and_the_last_of_batches():
    """As `clu.metrics` defines it: parts of a batch are not batches."""

    def metric_fn(params, x, tower):
        return {"last": clu_metrics.LastValue.from_model_output(x, mask=tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(("cpu:0", "cpu:1"), towers=4))
    x = np.float32([1, 2, 3, 4, 5, 6, 9])
    assert float(evaluate(np.float32(0), x[:4])["last"].compute()) == 2.5
    found = tj.evaluate(evaluate, np.float32(0), batches_of(x, 4))
    assert found == {"last": pytest.approx(20 / 3)}


@pytest.mark.slow
def test_a_collection_becomes_its_metrics():
    kinds = clu_metrics.Collection.create(
        accuracy=clu_metrics.Accuracy, loss=clu_metrics.Average.from_output("loss")
    )

    def collection(batch, w):
        return kinds.single_from_model_output(
            logits=batch["logits"], labels=batch["labels"], loss=batch["loss"], mask=w
        )

    def metric_fn(params, batch, tower):
        return {
            **tj.metrics.from_clu(collection(batch, tower.weight)),
            "one": jnp.ones(()),
        }

    rng = np.random.default_rng(0)
    batch = {
        "logits": rng.normal(size=(7, 3)).astype(np.float32),
        "labels": rng.integers(0, 3, 7, np.int32),
        "loss": rng.normal(size=7).astype(np.float32),
    }
    strategy = tj.Mirrored(("cpu:0", "cpu:1"))
    found = tj.evaluate(
        tj.build_eval_step(metric_fn, strategy), np.float32(0), batches_of(batch, 4)
    )
    hits = batch["logits"].argmax(-1) == batch["labels"]
    np.testing.assert_allclose(found["accuracy"], hits.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["loss"], batch["loss"].mean(), rtol=1e-5)

    evaluate = tj.build_eval_step(
        lambda _, batch, tower: {"all": collection(batch, tower.weight)}, strategy
    )
    with pytest.raises(ValueError, match=r"metrics\['all'\] is a Collection.*from_clu"):
        evaluate(np.float32(0), batch)


def test_counts_that_are_python_numbers_are_added():
    """As `clu.metrics.Metric` shows in its own text: `np.prod`, or a len."""

    def metric_fn(params, x, tower):
        metric = clu_metrics.Average(total=(x * tower.weight).sum(), count=len(x))
        return {"x": metric}

    x = np.float32([1, 2, 3, 6])
    strategy = tj.Mirrored(("cpu:0", "cpu:1"))
    full = tj.build_eval_step(metric_fn, strategy, remainder="error")
    assert tj.evaluate(full, np.float32(0), [x, x]) == {"x": 3.0}
    padded = tj.build_eval_step(metric_fn, strategy)
    with pytest.raises(tj.testing.SplitError, match="Padded rows count"):
        padded(np.float32(0), x)


def test_a_static_field_that_merging_changes_is_refused():
    """Towers would add the arrays alone, and count every tower as the first part."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class MeanOfParts:
        total: jax.Array
        parts: int = dataclasses.field(metadata={"static": True})

        def merge(self, other):
            return MeanOfParts(self.total + other.total, self.parts + other.parts)

        def compute(self):
            return self.total / self.parts

    def metric_fn(params, batch, tower):
        return {"mine": MeanOfParts((batch * tower.weight).sum(), 1)}

    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(("cpu:0", "cpu:1")))
    with pytest.raises(ValueError, match=r"metrics\['mine'\].*Keep shapes and dtypes"):
        evaluate(np.float32(0), np.ones(4, np.float32))


def test_metrics_that_collect_are_refused():
    kind = clu_metrics.CollectingMetric.from_outputs(("x",))
    evaluate = tj.build_eval_step(
        lambda params, x, tower: {"x": kind.from_model_output(x=x)},
        tj.Mirrored(("cpu:0", "cpu:1")),
    )
    with pytest.raises(ValueError, match=r"metrics\['x'\]: The merge of a FromOutputs"):
        evaluate(np.float32(0), np.ones(4, np.float32))


@pytest.mark.slow
def test_a_metric_without_mask_is_refused_where_rows_are_padded():
    def metric_fn(params, batch, tower):
        return {
            "auc": metrax.AUCROC.from_model_output(batch["score"], batch["yes"]),
            "recall": metrax.Recall.from_model_output(batch["said"], batch["yes"]),
        }

    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(("cpu:0", "cpu:1")))
    with pytest.raises(
        ValueError, match=r"metrics\['auc'\].*metrics\['recall'\].*does"
    ):
        evaluate(np.float32(0), random_rows(0, 3))
    jax.eval_shape(evaluate.fn, np.float32(0), random_rows(0, 4))  # nothing is padded


@pytest.mark.slow
def test_nothing_of_nothing_is_what_the_library_says():
    nothing = clu_metrics.Average.from_model_output(jnp.ones(4), mask=jnp.zeros(4))
    state = tj.metrics.from_clu(nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(tj.metrics.compute(jax.device_get(state)))


@pytest.mark.slow
def test_an_adapted_metric_gives_back_its_own_class():
    scores = np.float32([0.2, 0.7])
    labels = np.array([0, 1])
    metric = jax.jit(metrax.AUCPR.from_model_output)(scores, labels)
    state = tj.metrics.from_clu(metric)
    assert tj.metrics.from_clu(state) is state
    assert isinstance(state.metric, metrax.AUCPR) and state.metric.num_thresholds == 200
    value = float(metric.compute())
    assert float(tj.metrics.merge(state, state).compute()) == value
    with pytest.raises(ValueError, match="not a pytree with merge and compute"):
        tj.metrics.from_clu(metrax.AUCPR)
