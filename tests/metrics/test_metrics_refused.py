"""Metric states: what is no state, label or weight is refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored
from metric_states import N, Peak, m, mean, weighted_loss

import towerjax as tj


@pytest.mark.slow
def test_an_evaluation_says_which_metric_an_invalid_label_made_nan():
    def metric_fn(params, batch, tower):
        ids = batch["label"], batch["label"] % 3
        return {
            "iou": m.mean_iou(*ids, 3, tower.weight * batch["weight"]),
            "sensitivity": m.sensitivity_at_specificity(
                ids[0] == 1, batch["score"], 0.5, tower.weight
            ),
            "mean": m.mean(batch["score"], tower.weight),
        }

    evaluate = tj.build_eval_step(metric_fn, mirrored(2, 2))
    rows = {"label": np.int32([0, 1, 2, 3]), "score": np.float32([0, 0.5, 1, 0.2])}
    left_out = rows | {"weight": np.float32([1, 1, 1, 0])}
    values = tj.evaluate(evaluate, (), [left_out])
    assert values["iou"] == 1 and np.isfinite([*values.values()]).all()
    text = (
        r"^iou: NaN, because a row .* a class id .* weight 0 to rows that .* count\.$"
    )
    invalid = rows | {"weight": np.ones(4, np.float32)}
    with pytest.warns(UserWarning, match=text):
        values = tj.evaluate(evaluate, (), [left_out, invalid])
    assert np.isnan(values["iou"]) and np.isfinite(values["sensitivity"])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["peak", "auc"])
def test_a_state_that_does_not_read_the_weight_is_refused_by_name(kind, train):
    def unmasked(params, batch, tower):
        if kind == "peak":
            return {"mine": Peak(batch.max(), batch.argmax())}
        return {"mine": m.auc(batch > 0.5, batch)}

    def loss_fn(params, batch, tower):
        loss = tj.Weighted.mean(params * batch, tower.weight)
        return tj.TowerOutput(loss, unmasked(params, batch, tower))

    strategy = tj.Mirrored(("cpu:0", "cpu:1"))
    rows = np.float32([0, 0.5, 1])
    params = np.float32(0)
    if train:
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
        run = functools.partial(step, step.init(params))
    else:
        run = functools.partial(tj.build_eval_step(unmasked, strategy), params)
    with pytest.raises(
        ValueError, match=r"metrics\['mine'\].* does not depend on tower"
    ):
        run(rows)


# What is refused, and what is only seen.

B = np.array([True, False])
I = np.array([0, 1])  # noqa: E741
OF_LOSS = "compute_weighted_loss got"
ADDED = r"mean \+ tj\.penalty\(number\).*or add a mean of the rows"
TIMES = r"Multiply the rows.*or .* earlier pass"


def several():
    return mean() + 2 * mean()


# fmt: off
REFUSED = [
    (lambda: m.accuracy(I, np.zeros((2, 3), int)), r"\(2,\).*\(2, 3\).*argmax"),
    (lambda: m.accuracy(I, N), r"predictions of dtype float32.*probabilities > 0\.5"),
    (lambda: m.accuracy(N, I), r"labels of dtype float.*labels.astype\(jnp.int32\)"),
    (lambda: m.accuracy(np.array([2**32 + 1, 5]), jnp.array([1, 5])),
        "accuracy got labels with the id 4294967297, which would wrap.*x64"),
    (lambda: m.accuracy(I, I, N - 1), "accuracy got a weight of -0.75"),
    (lambda: m.mean(N, np.ones(3)), r"mean got values of shape \(2,\).*\(3,\)"),
    (lambda: m.mean(N, np.ones(1)), r"mean got values of shape \(2,\).*\(1,\)"),
    (lambda: m.mean(np.ones((2, 2)), np.ones((1, 2))), r"weights of shape \(1, 2\)"),
    (lambda: tj.Weighted.mean({"a": N}, np.ones(2)), "but got a dict.*axis=0"),
    (lambda: tj.Weighted.mean(N, axis=1), "axis=1"),
    (lambda: tj.Weighted.mean([N, N[:1]], axis=0), r"\(2,\), \(1,\)"),
    (lambda: tj.Weighted.mean({}, axis=0), r"but got shapes \[\]"),
    (lambda: tj.Weighted.mean({"a": 1.0}, axis=0), r"\(\)"),
    (lambda: tj.Weighted.mean(np.ones((2, 2)), np.ones((2, 2)), axis=0), "weights"),
    (lambda: m.mean_squared_error(N, N[:1]), "mean_squared_error got labels of shape"),
    (lambda: m.precision(B, N), "Scores need a threshold"),
    (lambda: m.precision(B, B, threshold=0.5), "threshold=0.5.*0 and 1 take none"),
    (lambda: m.recall(B, N, threshold=[0.5]), r"threshold=\[0.5\].*must be one number"),
    (lambda: m.true_positives(B, N, threshold=N), "one number.*true_positives.*for t"),
    (lambda: m.percentage_below(N, [0.2, 0.5]), "percentage_below got threshold=.*one"),
    (lambda: m.recall([0, 2], B), "labels with the value 2"),
    (lambda: m.recall(B, [0, 3]), "predictions with the value 3"),
    (lambda: m.true_positives(B, B, [1, -2]), "true_positives got a weight of -2"),
    (lambda: m.auc(B, N, curve="XY"), "curve='XY'.*'ROC', 'PR'"),
    (lambda: m.auc(B, N, num_thresholds=1), "num_thresholds=1.*>= 2"),
    (lambda: m.auc(B, N, thresholds=[0.5, 0.5]), "auc got thresholds=.*ascending"),
    (lambda: m.auc(B, N, thresholds=[-0.5, 0.5]), "auc got thresholds=.*between 0 an"),
    (lambda: m.auc(B, I), "predictions of dtype int.*floating scores"),
    (lambda: m.auc(B, N * 5), "scores with the value 1.25.*sigmoid"),
    (lambda: m.auc(B, N * np.nan), "scores with the value nan"),
    (lambda: m.sensitivity_at_specificity(B, N, 1.5), "specificity=1.5.*0 and 1"),
    (lambda: m.specificity_at_sensitivity(B, N, -1), "sensitivity=-1.*0 and 1"),
    (lambda: m.recall_at_thresholds(B, N, [0.5, 0.5]), "thresholds=.*ascending"),
    (lambda: m.mean_iou(I, I, 1), "labels with the value 1.*ids 0 to 0"),
    (lambda: m.mean_iou(I, I - 1, 2), "predictions with the value -1"),
    (lambda: m.mean_iou(I, I, 2.0), "num_classes=2.0"),
    (lambda: m.mean_per_class_accuracy(N, I, 2), "labels of dtype float32"),
    (lambda: m.mean_per_class_accuracy(I, I, 2, absent=0), "absent=0.*left out.*zero"),
    (lambda: m.merge(m.mean(N), m.auc(B, N)), "a Weighted and a Tally"),
    (lambda: m.merge(m.auc(B, N), m.auc(B, N, curve="PR")), "different options"),
    (lambda: m.merge(*(m.auc(B, N, thresholds=[x]) for x in (0.3, 0.5))),
        "different options"),
    (lambda: m.merge(m.auc(B, N, thresholds=[0.3]), m.auc(B, N, num_thresholds=3)),
        "different options"),
    (lambda: m.merge(*(m.auc(B, N, num_thresholds=n) for n in (3, 4))),
        "different options"),
    (lambda: m.merge(*(m.precision_at_thresholds(B, N, [x]) for x in (0.3, 0.5))),
        "different options"),
    (lambda: m.merge(*(m.recall_at_thresholds(B, N, [x]) for x in (0.3, 0.5))),
        "different options"),
    (lambda: m.merge(m.mean_iou([0], [0], 1), m.mean_iou(I, I, 2)),
        r"\(1, 1\).*\(2, 2\).*different options"),
    (lambda: m.recall_at_thresholds(B, N, [np.nan]), "thresholds=.*ascending"),
    (lambda: m.merge(m.mean(N), N), "second an ndarray.*not a metric state"),
    (lambda: m.compute({"a": m.mean(N)}), "got a dict.*not a metric state"),
    (lambda: m.compute({"a": m.mean(N)}),
        r"write jax\.tree\.map\(tj\.metrics\.compute, \.\.\., is_leaf=tj\.metrics\.i"),
    (lambda: m.merge({}, {}), r"jax\.tree\.map\(tj\.metrics\.merge, \.\.\., is_leaf="),
    (lambda: m.from_clu(N), "not a pytree with merge and compute"),
    (lambda: weighted_loss(np.ones((2, 3)), valid=np.ones((1, 3))), OF_LOSS),
    (lambda: weighted_loss(np.ones((2, 3)), np.ones(3)), OF_LOSS),
    (lambda: weighted_loss(np.ones((2, 3)), -np.ones((1, 3))), "a weight of -1"),
    (lambda: weighted_loss(np.ones(2), reduction=tj.estimator.LossReduction.NONE),
        "yet none reduction is"),
    (lambda: mean() + 0.5, ADDED), (lambda: jnp.float32(0.5) + mean(), ADDED),
    (lambda: np.ones(1) + mean(), ADDED),
    (lambda: mean() * mean(), TIMES), (lambda: mean() * several(), TIMES),
    (lambda: several() * mean(), TIMES),
    *[(lambda fn=fn, of=of: fn(of()), r"is not a mean, .*#a-function-of-a-mean")
        for of in (mean, several) for fn in (
            lambda a: 2.0 / a, lambda a: a / a, lambda a: jnp.float32(1) / a,
            lambda a: a**0.5, lambda a: 2**a, abs, lambda a: a < 2, lambda a: a <= a,
            lambda a: jnp.float32(1) < a, lambda a: np.float32(1) <= a,
            lambda a: max(a, 0.0))],
]
# fmt: on


@pytest.mark.parametrize(("build", "text"), REFUSED)
def test_bad_input_is_refused(build, text):
    with pytest.raises(ValueError, match=text):
        jax.make_jaxpr(build)()  # what is known is refused before anything runs


@pytest.mark.slow
def test_a_weight_that_may_be_of_the_first_dims_or_the_last_is_refused():
    sums = np.float32([[1, 2], [3, 4]])
    weight = np.float32([2, 4])
    for total in (sums, {"w": sums}):  # as a tj.PerTower of gradients has them
        both = tj.Weighted(total, weight)
        with pytest.raises(ValueError, match=r"weight of shape \(2,\).*jax\.vmap"):
            _ = both.compute()
        (found,) = jax.tree.leaves(jax.jit(jax.vmap(lambda x: x.value))(both))
        np.testing.assert_array_equal(found, [[0.5, 1], [0.75, 1]])
        rows = tj.Weighted(total, weight[None])
        (found,) = jax.tree.leaves(jax.jit(lambda x: x.value)(rows))
        np.testing.assert_array_equal(found, [[0.5, 0.5], [1.5, 1]])


def test_a_sum_of_means_is_not_their_pool():
    a = tj.Weighted.mean(N, np.float32([3, 1]))
    b = tj.Weighted.mean(7 + N)
    first = np.average(N, weights=[3, 1])
    second = np.mean(7 + N)
    np.testing.assert_allclose((a + b).value, first + second, rtol=1e-6)
    for total in (
        a + b,
        sum([a, b]),
        b + a,
        a + np.float32(1) * b,
        jnp.ones(()) * a + b,
    ):
        np.testing.assert_allclose(total.value, first + second, rtol=1e-6)
    for total in (2 * (a + b), (a + b) * np.float32(2), jnp.float32(2) * (b + a)):
        np.testing.assert_allclose(total.value, 2 * (first + second), rtol=1e-6)
    assert isinstance(np.float32(2) * a, tj.Weighted)
    assert a == a and a + a != a
    pooled = np.average([*N, *(7 + N)], weights=[3, 1, 1, 1])
    np.testing.assert_allclose(float(a.merge(b).value), pooled, rtol=1e-6)


class Unregistered:
    def merge(self, other):
        return self

    def compute(self):
        return 0


class Growing(Peak):
    def merge(self, other):
        return Growing(jnp.stack([self.value, other.value]), self.place)


class Untraced(Peak):
    def merge(self, other):
        return self if self.value > other.value else other


for cls in (Growing, Untraced):
    jax.tree_util.register_pytree_node(
        cls, lambda x: (tuple(x), None), lambda _, x, cls=cls: cls(*x)
    )


@pytest.mark.parametrize("metric, text", [
    (lambda: Unregistered(), r"metrics\['x'\] is a Unregistered .*not a pytree"),
    (lambda: Peak, r"metrics\['x'\] is the class Peak"),
    (lambda: {"y": m.mean(N)}, r"metrics\['x'\] is a dict.*'group/part'"),
    (lambda: Growing(jnp.float32(1), 2), r"metrics\['x'\]: .*Growing changes"),
    (lambda: Untraced(jnp.float32(1), 2), "merge of a Untraced cannot be traced"),
])  # fmt: skip
def test_what_is_no_metric_state_is_refused(metric, text):
    evaluate = tj.build_eval_step(lambda *_: {"x": metric()}, tj.Mirrored(towers=2))
    with pytest.raises(ValueError, match=text):
        evaluate(np.float32(0), np.ones(2))
