"""Metric states: any split of any data gives the value of one pass over all of it."""

import functools
import operator

import jax
import jax.numpy as jnp
import metrax
import metrics_oracle as oracle
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import mirrored
from metric_states import Peak, m, weighted_loss

import towerjax as tj
from towerjax.metrics.rows import Pairs
from towerjax.metrics.state import is_additive, merge_parts, on_host, value_on_host


def states(rows, w, names=tuple(oracle.VALUES)):
    """These builders on these rows, by the oracle's names."""
    yes = rows["yes"]
    score = rows["score"]
    said = rows["said"]
    ids = (rows["label"], rows["class"])
    numbers = (rows["target"], rows["value"])
    builders = {
        "mean": lambda: m.mean(rows["value"], w),
        "accuracy": lambda: m.accuracy(*ids, w),
        "percentage_below": lambda: m.percentage_below(rows["value"], 0.5, w),
        "mse": lambda: m.mean_squared_error(*numbers, w),
        "rmse": lambda: m.root_mean_squared_error(*numbers, w),
        "mae": lambda: m.mean_absolute_error(*numbers, w),
        "true_positives": lambda: m.true_positives(yes, said, w),
        "false_positives": lambda: m.false_positives(yes, score, w, threshold=0.5),
        "false_negatives": lambda: m.false_negatives(yes, score, w, threshold=0.5),
        "true_negatives": lambda: m.true_negatives(yes, said, w),
        "precision": lambda: m.precision(yes, said, w),
        "recall": lambda: m.recall(yes, said, w),
        "auc": lambda: m.auc(yes, score, w),
        "auc_pr": lambda: m.auc(yes, score, w, curve="PR"),
        "auc_few": lambda: m.auc(yes, score, w, num_thresholds=5),
        "auc_of": lambda: m.auc(yes, score, w, thresholds=[0.0, 0.45, 1.0]),
        "auc_pr_few": lambda: m.auc(yes, score, w, curve="PR", num_thresholds=5),
        "sensitivity": lambda: m.sensitivity_at_specificity(yes, score, 0.8, w),
        "specificity": lambda: m.specificity_at_sensitivity(yes, score, 0.4, w),
        "precisions": lambda: m.precision_at_thresholds(yes, score, [0.2, 0.5], w),
        "recalls": lambda: m.recall_at_thresholds(yes, score, [0.2, 0.5], w),
        "mean_iou": lambda: m.mean_iou(*ids, oracle.NUM_CLASSES, w),
        "mean_per_class_accuracy": lambda: m.mean_per_class_accuracy(
            *ids, oracle.NUM_CLASSES, w
        ),
        "mean_per_class_accuracy_tf": lambda: m.mean_per_class_accuracy(
            *ids, oracle.NUM_CLASSES, w, absent="zero"
        ),
    }
    return {name: builders[name]() for name in names}


def random_rows(seed, size, kind="any"):
    """Rows with ties at thresholds, one class alone where told, and a weight each."""
    rng = np.random.default_rng(seed)
    scores = [
        rng.random(size),
        rng.choice([0, 0.2, 0.25, 0.5, 0.75, 1], size),
        rng.integers(0, 200, size) / 199,
    ]
    score = np.choose(rng.integers(0, 3, size), scores).astype(np.float32)
    yes = {
        "any": rng.random(size) < 0.4,
        "yes": np.ones(size, bool),
        "no": np.zeros(size, bool),
    }[kind]
    return {
        "yes": yes,
        "said": rng.random(size) < 0.5,
        "score": score,
        "label": rng.integers(0, oracle.NUM_CLASSES - 1, size, np.int32),
        "class": rng.integers(0, oracle.NUM_CLASSES, size, np.int32),
        "value": rng.normal(size=size).astype(np.float32),
        "target": rng.normal(size=size).astype(np.float32),
        "weight": rng.choice(np.float32([0, 0.5, 1, 2, 3]), size),
    }


def with_bad_values(rows):
    """What has weight 0 may be anything."""
    out = rows["weight"] == 0
    rows = dict(rows)
    for name in ("score", "value", "target"):
        rows[name] = np.where(out, np.float32(np.nan), rows[name])
    for name in ("label", "class"):
        rows[name] = np.where(out, np.int32(99), rows[name])
    return rows


def check(found, rows, w, prefix="", names=tuple(oracle.VALUES)):
    for name in names:
        np.testing.assert_allclose(
            found[prefix + name],
            oracle.VALUES[name](rows, np.float64(w)),
            rtol=4e-6,
            atol=1e-6,
            err_msg=prefix + name,
        )


@functools.cache
def compiled():
    return jax.jit(lambda rows: states(rows, rows["weight"]))


def part(rows, chosen, capacity):
    """Those rows alone, filled up with rows that do not count."""
    kept = {name: x[chosen] for name, x in rows.items()}
    more = capacity - len(kept["weight"])
    empty = {name: np.zeros(more, x.dtype) for name, x in rows.items()}
    empty["score"], empty["label"] = empty["score"] - 7, empty["label"] + 99
    return {name: np.concatenate([x, empty[name]]) for name, x in kept.items()}


@pytest.mark.slow
def test_states_on_the_host_give_values_of_the_same_dtype():
    rows = random_rows(3, 25, "any")
    of_devices = jax.eval_shape(states, rows, rows["weight"])
    for name, state in of_devices.items():
        of_host = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), state)
        value = jax.eval_shape(lambda state: state.compute(), state)
        assert np.asarray(of_host.compute()).dtype == value.dtype, name


@pytest.mark.slow
def test_a_value_does_not_depend_on_the_name_that_errors_show(monkeypatch):
    rows = random_rows(3, 25)
    names = ["sensitivity", "specificity"]
    renamed = property(lambda self: "a metric", lambda self, name: None)
    monkeypatch.setattr(Pairs, "name", renamed, raising=False)
    found = states(rows, rows["weight"], names)
    found = {name: state.compute() for name, state in found.items()}
    check(found, rows, rows["weight"], "", names)


@pytest.mark.slow
def test_the_weights_of_no_rows_are_none():
    none = np.zeros(0, np.float32)
    assert float(m.mean(none, none).weight) == 0
    assert float(m.accuracy(none.astype(int), none.astype(int), none).weight) == 0


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_parts=st.integers(1, 8),
    size=st.integers(1, 25),
    kind=st.sampled_from(["any", "yes", "no"]),
    zero=st.booleans(),
)
def test_any_split_gives_the_value_of_one_pass(seed, num_parts, size, kind, zero):
    rows = random_rows(seed, size, kind)
    if zero:
        rows["weight"] *= 0
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, num_parts, size)  # some may own nothing
    spoiled = with_bad_values(rows)
    parts = [
        jax.tree.map(np.asarray, compiled()(part(spoiled, owners == p, 25)))
        for p in range(num_parts)
    ]
    found = {}
    for name in oracle.VALUES:
        own = [on_host(one[name]) for one in parts]
        before = jax.tree.map(np.copy, own)
        merged = functools.reduce(m.merge, own)
        rng.shuffle(own)
        again = functools.reduce(m.merge, own)
        found[name] = value_on_host(merged)
        np.testing.assert_array_equal(found[name], value_on_host(merged))
        np.testing.assert_allclose(value_on_host(again), found[name], rtol=1e-9)
        for x, y in zip(
            jax.tree.leaves(functools.reduce(m.merge, before)),
            jax.tree.leaves(merged),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)
    check(found, rows, rows["weight"])
    if zero:
        assert all((np.asarray(value) == 0).all() for value in found.values())


@pytest.mark.slow
def test_dtypes_are_promoted_where_the_users_own_are_not():
    def values(rows):
        found = states(rows, rows["weight"])
        found["mask"] = tj.Weighted.mean(rows["class"], rows["yes"])
        found["loss"] = tj.estimator.compute_weighted_loss(rows["class"], rows["yes"])
        complex_ = rows["class"].astype(np.complex64)  # whose weights are real
        found["mean"] = tj.Weighted.mean(complex_, rows["weight"])
        found["error"] = tj.metrics.mean_absolute_error(complex_, rows["weight"])
        return {k: tj.metrics.merge(x, x).compute() for k, x in found.items()}

    rows = random_rows(0, 8)
    expected = jax.eval_shape(lambda rows: values(rows), rows)
    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(lambda rows: values(rows), rows) == expected


@pytest.mark.slow
def test_sixteen_bits_are_widened():
    scores = np.array([0.1, 0.4, 0.35, 0.8], jnp.bfloat16)
    labels = np.array([False, False, True, True])

    def made(labels, scores):
        return (
            m.auc(labels, scores, jnp.ones(4, jnp.bfloat16)),
            m.mean(scores, jnp.ones(4, jnp.bfloat16)),
            m.mean_squared_error(scores, scores + 1),
            m.precision(labels, scores, threshold=0.5),
        )

    leaves = jax.tree.leaves(jax.eval_shape(made, labels, scores))
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.float32)}


# What values are, to the last number.

INTEGERS = [
    (np.int32([-(2**31), 2**31 - 1]), np.int32([2**31 - 1, 2**31 - 2])),
    (np.uint32([2**32 - 1, 3]), np.int32([2**31 - 1, -(2**31)])),
    (np.array([2**40, -(2**62)]), np.array([2**40 + 512, -(2**62) - 7])),
    (np.array([2**63 + 5, 1], np.uint64), np.array([2**63 - 1, -2])),
]
IDS = [
    (np.uint32([2**32 - 1, 7]), np.int32([-1, 7])),
    (np.array([2**64 - 1, 7], np.uint64), np.array([-1, 7])),
    (np.array([2**32 + 1, 5]), np.array([1, 5])),
    (np.array([True, False]), np.array([2, 0])),
    (np.array([-1, 7], jnp.int4), np.array([15, 7], jnp.uint4)),
    (np.array([2**53 + 1, 5], np.uint64), np.array([2**53, 5])),
]
BELOW = [
    np.int32([-(2**31), -8, 1_700_000_000, 2**31 - 1]),
    np.uint32([0, 1_700_000_000, 2**32 - 1]),
    np.int64([-(2**62), 1_700_000_000, 2**40, 2**40 + 1]),
    np.uint8([1, 200, 255]),
]
LIMITS = [1_700_000_000, 1_700_000_000.5, np.float32(-7.5), np.inf, np.nan, 300, -1]
LIMITS += [2**40 + 1, -(2.0**70)]
WIDE = np.array([2**40, 1])  # wider than an array of JAX
# JAX would wrap it to 0
LARGE = np.array([2**32, 1])
SMALL = np.array([0, 1])
BACK = np.array([0, 1], ">i4")
TENTHS = np.array([0.2, 0.6], ">f4")
HALVES = np.array([2, 6], ">f4")
HALF = np.float32([0.25, 0.5, 0.75])
COLUMN = np.float32([[1, 2], [3, np.nan]]), np.float32([[3], [0]])
COMPLEX = np.complex64([1 + 2j, 3 - 1j, 5j]), np.float32([0.5, 0, 1.5])
NO_WEIGHT = np.int32([0, 7, 1]), np.float32([0.25, np.nan, 0.75]), np.int32([1, 0, 1])
RATES = np.array([False] * 5 + [True] * 2), np.float32([1, 1, 1, 9, 9, 5, 9.5]) / 10
SCORED = np.array([True, False, True]), np.float32([0.5, 0.5, 0.25])


def parts(mean):
    return jnp.stack([mean.sum, mean.weight])


def exact_rows():
    """By name: a state or an array, of what it is made, and the value."""
    for labels, predictions in INTEGERS:
        exact = np.abs(labels.astype(object) - predictions.astype(object))
        exact = np.float64(exact)
        square = (exact**2).mean()
        for state, value in (
            (m.mean_absolute_error, exact.mean()),
            (m.mean_squared_error, square),
            (m.root_mean_squared_error, square**0.5),
        ):
            yield f"{state.__name__} {labels}", state, (labels, predictions), value
    for values in BELOW:
        limits = np.iinfo(values.dtype)
        for limit in [*LIMITS, limits.min, limits.max, limits.max + 1]:
            state = lambda x, limit=limit: m.percentage_below(x, limit)  # noqa: E731
            share = np.mean([int(x) < limit for x in values])
            yield f"{values.dtype} below {limit!r}", state, (values,), share
    for ids in IDS:  # equal as numbers, and not as bits
        yield f"ids {ids}", m.accuracy, ids, 0.5
        yield f"ids {ids[::-1]}", m.accuracy, ids[::-1], 0.5
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(2, 3)).astype(np.float32)
    for shape in [(1, 3), (2, 1), (1, 1), (2, 3)]:  # as of tf.losses
        w = rng.choice([0, 1, 2], size=shape).astype(np.float32)
        total = (losses * w).sum(), np.count_nonzero(np.broadcast_to(w, (2, 3)))
        yield (
            f"weights {shape}",
            lambda *x: parts(weighted_loss(*x)),
            (losses, w),
            total,
        )
    for name, state in {
        "classes": lambda w: m.mean_iou(LARGE, SMALL, 2, w),
        "predictions": lambda w: m.mean_per_class_accuracy(SMALL, LARGE, 2, w),
        "labels": lambda w: m.recall(LARGE, SMALL, w),
    }.items():
        yield f"large {name}", state, (np.int32([1, 1]),), np.nan
        yield f"large {name} without weight", state, (np.int32([0, 1]),), 1
    for name, row in EXACT.items():
        yield name, *row


# fmt: off
EXACT = {
    "wide mean": (m.mean, (WIDE,), 2**39),
    "wide Weighted": (tj.Weighted.mean, (WIDE,), 2**39),
    "wide error": (lambda x: m.mean_absolute_error(x, [0, 0]), (WIDE,), 2**39),
    "wide weight": (lambda w: m.mean([1.0, 3.0], w), (WIDE,), 1),
    "wide values": (lambda x: m.percentage_below(x, 10), (WIDE,), 0.5),
    "wide ids": (m.accuracy, (WIDE, WIDE + 2**32), 0),
    "size squared": (lambda: m.mean_squared_error([3j, 4], [0, 0]), (), 12.5),
    "0.7 in 16 bits": (lambda x: m.percentage_below(x, 0.7),
        (np.array([0.69921875, 0.75], jnp.bfloat16),), 0.5),
    "more than 16 bits count": (m.true_positives, (np.ones(300), np.ones(300, int)),
        300),
    "complex": (tj.Weighted.mean, COMPLEX, 0.25 + 4.25j),
    "complex rows": (lambda x, w: tj.Weighted.mean(x, w, axis=0),
        (COMPLEX[0][:, None], COMPLEX[1]), [0.25 + 4.25j]),
    "weight of other byte order": (tj.Weighted.mean, (TENTHS, BACK), TENTHS[1]),
    "loss of other byte order": (lambda x, w: weighted_loss(x, w, valid=w),
        (TENTHS, BACK), TENTHS[1]),
    "scores of other byte order": (m.auc, (BACK, TENTHS), 1),
    "sum of other byte order": (lambda *x: tj.Weighted(*x).value,
        (HALVES, np.array(4, ">f4")), [0.5, 1.5]),
    "tree of other byte order": (lambda x: tj.Weighted({"a": x}, x[0]).value["a"],
        (HALVES,), [1, 3]),
    "weights in a column": (lambda *x: parts(m.mean(*x)), COLUMN, [9, 6]),
    "such a Weighted": (lambda *x: parts(tj.Weighted.mean(*x)), COLUMN, [9, 6]),
    "such a loss": (lambda *x: parts(weighted_loss(*x)), COLUMN, [9, 2]),
    "such an accuracy": (lambda w: m.accuracy(np.ones((2, 2)) > 0, np.eye(2) > 0, w),
        COLUMN[1:], 0.5),
    # A score at a threshold is not above it; of equally near rates the best is taken.
    "recalls at thresholds": (
        lambda *x: m.recall_at_thresholds(*x, [0.25, 0.4, 0.5]), SCORED, [0.5, 0.5, 0]),
    "at a threshold": (lambda *x: m.false_positives(*x, threshold=0.5), SCORED, 0),
    "thresholds at the ends": (lambda *x: m.auc(*x, thresholds=[0.0, 1.0]), SCORED,
        0.5),
    "0.6 and 1 near 0.8": (lambda *x: m.sensitivity_at_specificity(*x, 0.8), RATES, 1),
    "the same turned": (lambda y, x: m.specificity_at_sensitivity(~y, x[::-1], 0.8),
        RATES, 1),
    # What has weight 0 may be anything.
    "scores without weight": (m.auc, NO_WEIGHT, 1),
    "labels without weight": (lambda *x: m.precision(*x, threshold=0.5), NO_WEIGHT, 1),
    "predictions without weight": (lambda y, x, w: m.recall(y, y, w), NO_WEIGHT, 1),
    "classes without weight": (lambda y, x, w: m.mean_iou(y, y, 2, w), NO_WEIGHT, 1),
    # What is out of range makes NaN where nobody can refuse it.
    "scores": (lambda x: m.auc(x > 0.5, x * 3), (HALF,), np.nan),
    "labels": (lambda x: m.auc((x * 8).astype(int), x), (HALF,), np.nan),
    "scores of rates": (lambda x: m.sensitivity_at_specificity(x > 0.5, x * 3, 0.5),
        (HALF,), np.nan),
    "no number": (lambda x: m.precision(x > 0.5, x * jnp.nan, threshold=0.5), (HALF,),
        np.nan),
    "labels of a recall": (lambda x: m.recall(x * 3, x > 0.5), (HALF,), np.nan),
    "classes": (lambda x: m.mean_iou((x * 8).astype(int), (x > 0).astype(int), 2),
        (HALF,), np.nan),
    "predicted classes": (lambda x: m.mean_per_class_accuracy((x > 0).astype(int),
        (x * 8).astype(int), 2), (HALF,), np.nan),
}
# fmt: on


@pytest.mark.slow
def test_values_are_exact():
    """Of numbers that are known, and of those that only the program is given."""
    rows = {}
    given = {}
    for name, state, made_of, value in exact_rows():
        if value is not np.nan:  # what is known is refused
            rows[f"{name}, known"] = functools.partial(state, *made_of), value
        dtypes = [x.dtype for x in made_of]
        if all(x.isnative and jax.dtypes.canonicalize_dtype(x) == x for x in dtypes):
            rows[name] = (state, value)
            given[name] = made_of

    @jax.jit
    def run(given):
        found = {name: fn(*given.get(name, ())) for name, (fn, _) in rows.items()}
        states = {k: x for k, x in found.items() if hasattr(x, "compute")}
        return found | {k: x.compute() for k, x in states.items()}, states

    values, states = run(given)
    on_the_host = {k: value_on_host(on_host(x)) for k, x in states.items()}
    for found in (values, on_the_host):
        for name, value in found.items():
            close = dict(rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(value, rows[name][1], **close)
    assert states["complex"].weight.dtype == np.float32


@pytest.mark.slow
def test_in_64_bits_weights_are_not_rounded_and_thresholds_are_of_the_scores():
    with jax.enable_x64(True):
        hits = m.accuracy([1, 1], [1, 0], np.array([1, 2.0**24]))
        tenth = np.full(3, 0.1, np.float32)  # in float64 it is above 0.1
        wrong = m.false_positives(np.array([1, 0, 1]), tenth, threshold=np.float64(0.1))
    assert (float(hits.weight), float(wrong.compute())) == (2**24 + 1, 0)


@pytest.mark.slow
def test_the_mean_of_rows_is_a_tree_and_leaves_out_what_has_no_weight():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(5, 3)), "b": rng.integers(0, 9, 5)}
    weight = np.array([2.0, 0.0, 1.5, 3.0, 0.25])
    tree["a"][1] = np.nan
    parts = [
        jax.tree.map(lambda x, s=s: x[s], (tree, weight))
        for s in (slice(2), slice(2, 5))
    ]

    @jax.jit
    def merged(first, second):
        first, second = (tj.Weighted.mean(*x, axis=0) for x in (first, second))
        return first.merge(second).value

    expected = jax.tree.map(
        lambda x: np.average(np.delete(x, 1, 0), 0, np.delete(weight, 1)), tree
    )
    for name, value in merged(*parts).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7)
    plain = tj.Weighted.mean({"b": tree["b"]}, axis=0)
    assert float(plain.weight) == 5 and float(plain.value["b"]) == tree["b"].mean()


@pytest.mark.slow
def test_counts_are_exact_beyond_24_bits_on_the_host():
    state = on_host(m.true_positives(np.ones(3), np.ones(3, int)))
    large = jax.tree.map(lambda x: x * 0 + 2.0**24, state)
    assert value_on_host(m.merge(large, m.merge(large, state))) == 2**25 + 3
    large = on_host(tj.Weighted(np.complex64(2**24 * 1j), np.float32(2**24)))
    one = on_host(tj.Weighted(np.complex64(1j), np.float32(1)))
    assert complex(large.merge(one).sum) == (2**24 + 1) * 1j


def batches_of(rows, size):
    return lambda: tj.batches(rows, size)


WAYS = {
    "shard_map": {},
    "pmap": {"executor": "pmap"},
    "scan": {"tower_loop": "scan"},
    "pinned": {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()},
}


class Moments(tj.metrics.Additive):
    weight: jax.Array
    total: jax.Array
    squares: jax.Array

    def compute(self):
        return self.squares / self.weight - (self.total / self.weight) ** 2


def own_states(rows, w, first_place):
    x = jnp.where(w > 0, rows, -jnp.inf)
    place = x.argmax()
    return {
        "peak": Peak(x[place], first_place + place),
        "variance": Moments(w.sum(), (w * rows).sum(), (w * rows**2).sum()),
    }


# All states are added alike: where every metric is not asked for, some kinds are.
SOME = ("rmse", "auc_few", "mean_iou", "precision")


def metrics_named(names, params, batch, tower):
    found = states(batch, batch["weight"] * tower.weight, names)
    found |= {f"all/{n}": x for n, x in states(batch, tower.weight, SOME).items()}
    rounded = jnp.round(batch["value"])  # several are the greatest
    return found | own_states(rounded, tower.weight, tower.id * len(rounded))


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "T, D, way, names, sizes",
    # The largest first, so that smaller last batches are filled up to its size.
    [(6, 3, "shard_map", tuple(oracle.VALUES), range(19, 0, -3))]
    + [(4, 2, "pinned", SOME, (10, 7)), (1, 1, "shard_map", SOME, (5,))],
)
def test_any_number_of_rows_gives_the_value_of_one_pass(T, D, way, names, sizes):
    """Also of states of one's own, which merge in the order of towers and batches."""
    strategy = mirrored(T, D, **WAYS[way])
    evaluate = tj.build_eval_step(functools.partial(metrics_named, names), strategy)
    for size in sizes:
        rows = random_rows(size, size, ["any", "yes", "no"][size % 3])
        found = tj.evaluate(evaluate, np.float32(0), batches_of(rows, 2 * T))
        assert len(found) == len(names) + len(SOME) + 2
        check(found, rows, rows["weight"], "", names)
        check(found, rows, np.ones(size), "all/", SOME)
        values = np.round(rows["value"])
        # Of those that tie the first, and its place in its batch.
        assert found["peak"].tolist() == [values.max(), values.argmax() % (2 * T)]
        np.testing.assert_allclose(found["variance"], values.var(), rtol=1e-5)
    found = jax.tree.leaves(evaluate(np.float32(0), random_rows(0, 2 * T)))
    assert all(x.is_fully_replicated for x in found)


@pytest.mark.slow
def test_a_step_with_states_is_proved_for_any_number_of_towers():
    def loss_fn(w, x, tower):
        states = own_states(x, tower.weight, jnp.int32(0))
        return tj.TowerOutput(tj.Weighted.mean(w * x, tower.weight), states)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=512))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((), (1024,))]
    proof = step.check(*shapes)
    kinds = sorted(c.primitive for c in proof.analysis.collectives)
    # All sums in one, and each leaf of the state that does not add up.
    assert kinds == ["all_gather", "all_gather", "psum"]


@pytest.mark.slow
def test_a_train_metric_has_one_value():
    class Pair(tj.metrics.Additive):
        a: jax.Array

        def compute(self):
            return {"one": self.a, "two": 2 * self.a}

    def metric_fn(params, x, tower):
        return {"pair": Pair(x @ tower.weight)}

    def loss_fn(params, x, tower):
        loss = tj.Weighted.mean(params * x, tower.weight)
        return tj.TowerOutput(loss, metric_fn(params, x, tower))

    strategy = tj.Mirrored(towers=2)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    with pytest.raises(ValueError, match=r"metrics\['pair'\] is a dict"):
        step(step.init(np.float32(1)), np.ones(2, np.float32))
    evaluate = tj.build_eval_step(metric_fn, strategy)
    found = tj.evaluate(evaluate, np.float32(0), [np.ones(2, np.float32)])
    assert found["pair"] == {"one": 2.0, "two": 4.0}


@pytest.mark.slow
def test_small_integers_and_booleans_are_added_as_numbers():
    class Seen(tj.metrics.Additive):
        flags: jax.Array
        small: jax.Array

        def compute(self):
            return self.flags + self.small

    def metric_fn(params, x, tower):
        return {"seen": Seen(x.max() > 0, jnp.uint8(200))}

    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4)
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=False)  # it counts towers
    found = tj.evaluate(evaluate, np.float32(0), [np.ones(4, np.float32)] * 2)
    assert found["seen"] == 8 + 8 * 200
    one = Seen(True, np.uint8(200))
    assert operator.add(*jax.tree.leaves(m.merge(one, one))) == 2 + 400


class Difference(clu_metrics.Metric):
    """Adds one leaf and takes the other away: not additive."""

    def __init__(self, a, b):
        self.a = a
        self.b = b

    def merge(self, other):
        return Difference(self.a + other.a, self.b - other.b)

    def compute(self):
        return self.a - self.b


class Swapped(Difference):
    def merge(self, other):
        return Swapped(self.a + other.b, self.b + other.a)


for cls in (Difference, Swapped):
    jax.tree_util.register_pytree_node(
        cls, lambda x: ((x.a, x.b), None), lambda _, x, cls=cls: cls(*x)
    )


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")  # metrax has thresholds ``[n, 1]``
def test_sums_of_other_classes_are_seen_in_their_merge():
    value = np.arange(3, dtype=np.float32)
    average = clu_metrics.Average.from_model_output(value)
    last = clu_metrics.LastValue.from_model_output(value)
    area = tj.metrics.from_clu(metrax.AUCROC.from_model_output(value / 3, value > 1))
    assert [is_additive(x) for x in (average, last, area)] == [True, True, True]
    of_batches = [is_additive(x, type(x).merge) for x in (average, last, area)]
    assert of_batches == [True, False, True]
    value = float(area.compute())
    assert float(merge_parts(area, area).compute()) == value
    for kind in (Difference, Swapped):
        assert not is_additive(kind(jnp.float32(1), jnp.float32(2)))
