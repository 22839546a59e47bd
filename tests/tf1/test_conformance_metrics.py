"""What the original promises of metrics over towers, in numbers, on real towers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_table import Table, assert_equal

import towerjax as tj

FIRST_ROWS = "each tower's accumulators are of its first row alone"
TABLE = Table(
    "metric rmf.metricvars",
    {},
    dict.fromkeys(["rmf.metricvars.reduce", "rmf.metricvars.idempotent"], FIRST_ROWS),
)

# The elements that the original's batches are cut from, in cycles.
LABELS = [True, False, True, False]
PREDICTIONS = [True, True, False, False]
SCORES = [1.0, 0.75, 0.25, 0.0]
NUMBERS = [1.0, 0.5, 1.0, 0.0]


def towers_of(case):
    if case["id"].startswith("metric."):
        return max(case["input"]["k"])
    return len(case["input"]["per_tower"])


def check_all(case, strategy, batch, metric):
    """On 1 and 4 towers, on one device 4, each with a batch per update, k in all.

    ``batch``: the size of one, and a function from elements' numbers to their values.
    ``metric``: gives a state, or several that are to have the same value.
    """
    size, elements = batch

    def metric_fn(rows, w):
        found = metric(rows, w)
        return found if isinstance(found, dict) else {"value": found}

    for towers in (1, 4) if len(strategy.worker_devices) > 1 else (4,):
        devices = strategy.worker_devices[:towers]
        evaluate = tj.build_eval_step(
            lambda params, rows, tower: metric_fn(rows, tower.weight),
            tj.Mirrored(devices=devices, towers=towers),
        )
        for k, expected in zip(case["input"]["k"], case["expected"], strict=True):
            if k % towers == 0:
                data = elements(np.arange(size * k))
                batches = tj.batches(data, size * towers)
                found = tj.evaluate(evaluate, np.float32(0), lambda x=batches: x)
                for value in found.values():
                    assert_equal(value, case, expected)


def cycle(*columns):
    """Batches of 3 of elements that repeat."""
    arrays = [np.asarray(column) for column in columns]
    return 3, lambda i: tuple(x[i % len(x)] for x in arrays)


DECIDED_AND_SCORED = cycle(LABELS, PREDICTIONS, np.float32(SCORES))
SCORED = cycle(LABELS, np.float32(SCORES))


@TABLE.checks("metric.mean")
def check_mean(case, strategy):
    size = case["input"]["batch"]
    batch = size, lambda i: (i.astype(np.float32),)
    check_all(case, strategy, batch, lambda rows, w: tj.metrics.mean(rows[0], w))


@TABLE.checks("metric.mse", "metric.rmse")
def check_errors(case, strategy):
    builder = {
        "metric.mse": tj.metrics.mean_squared_error,
        "metric.rmse": tj.metrics.root_mean_squared_error,
    }[case["id"]]
    _, elements = cycle(np.float32(NUMBERS), np.float32(SCORES))
    check_all(case, strategy, (1, elements), lambda rows, w: builder(*rows, w))


@TABLE.checks("metric.recall", "metric.false_negatives", "metric.false_positives")
def check_outcomes(case, strategy):
    builder = getattr(tj.metrics, case["id"].removeprefix("metric."))

    def metrics(rows, w):
        labels, decided, scores = rows
        scored = builder(labels, scores, w, threshold=0.5)
        return {"decided": builder(labels, decided, w), "scored": scored}

    check_all(case, strategy, DECIDED_AND_SCORED, metrics)


@TABLE.checks("metric.auc_pr")
def check_auc(case, strategy):
    def metric(rows, w):
        return tj.metrics.auc(*rows, w, curve="PR", num_thresholds=8)

    check_all(case, strategy, SCORED, metric)


@TABLE.checks("metric.sensitivity_at_specificity")
def check_sensitivity(case, strategy):
    def metric(rows, w):
        return tj.metrics.sensitivity_at_specificity(*rows, 0.8, w)

    check_all(case, strategy, SCORED, metric)


@TABLE.checks("metric.mean_iou")
def check_mean_iou(case, strategy):
    # Batches of 4 of 0, 1, 2, ...: labels modulo 5 and predictions modulo 3.
    batch = 4, lambda i: (i % 5, i % 3)
    check_all(case, strategy, batch, lambda rows, w: tj.metrics.mean_iou(*rows, 5, w))


class Accumulators(tj.metrics.Additive):
    first: jax.Array
    second: jax.Array
    third: jax.Array

    def compute(self):
        return jnp.stack([self.first, self.second, self.third.sum()])


def merged_accumulators(case, strategy):
    """The towers' accumulators of the case, merged; a batch of one row each."""
    tables = zip(*case["input"]["per_tower"], strict=True)
    tables = [np.float32(column) for column in tables]

    def metric_fn(params, batch, tower):
        return {"all": Accumulators(*(x[0] for x in batch))}

    evaluate = tj.build_eval_step(metric_fn, strategy, **TABLE.how(case))
    return evaluate(np.float32(0), tuple(tables))["all"]


@TABLE.checks("rmf.metricvars.reduce")
def check_reduce(case, strategy):
    """The original leaves tower 0 the sums and the others 0: here they are one."""
    merged = merged_accumulators(case, strategy)
    for value, expected in zip(
        jax.tree.leaves(merged), case["expected"]["tower0"], strict=True
    ):
        assert_equal(value, case, expected)
        assert value.is_fully_replicated


@TABLE.checks("rmf.metricvars.idempotent")
def check_idempotent(case, strategy):
    """Reading adds nothing: the value of one state, however often it is computed."""
    merged = merged_accumulators(case, strategy)
    for _ in range(case["input"]["times"]):
        tj.metrics.compute(merged)
    *scalars, several = case["expected"]["tower0"]
    assert_equal(tj.metrics.compute(merged), case, [*scalars, sum(several)])


@TABLE.checks("rmf.metricvars.error_uneven")
def check_uneven(case, strategy):
    """One trace gives all towers the same metrics; states that differ do not merge."""

    class OneMore(Accumulators):
        extra: jax.Array

    first, second = case["input"]["per_tower"][:2]
    even = Accumulators(*map(np.float32, first))
    uneven = OneMore(*map(np.float32, second), np.float32(case["input"]["extra"]))
    for states in ((even, uneven), (uneven, even)):
        with pytest.raises(ValueError, match="Accumulators.*OneMore|OneMore.*Accumu"):
            tj.metrics.merge(*states)


@pytest.mark.slow
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)
