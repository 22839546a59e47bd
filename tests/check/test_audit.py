"""Audits: what depends on the split is found and named, what does not passes."""

import itertools
import json
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
    WRONG_STEPS,
    WRONG_WHERE_PADDED,
    errors,
    scores,
)
from containers import KINDS, as_dicts, held
from flax import nnx
from later_faults import BATCH as LATER_ROWS
from later_faults import FAULTS
from later_faults import PARAMS as LATER_MODEL
from layouts import cases

import towerjax as tj
from towerjax.check.audit.audit import run_audit
from towerjax.check.audit.later_batches import Splits
from towerjax.check.audit.run_towers import _local_of
from towerjax.check.audit.two_towers import _rounding_decides
from towerjax.check.comparison import (
    AuditReport,
    Compared,
    Finding,
    NotAudited,
    _gap_of_leaf,
    _sizes,
    gaps,
    judge,
    rounded,
    rounding_of,
)
from towerjax.check.equality.told import NotProved
from towerjax.check.leaf_name import LeafName
from towerjax.testing import SplitError, assert_replicates
from towerjax.towers.row_free_keys import ALL_TOWERS, row_free_key

SUM = tj.Reduction.SUM
MEAN = tj.Reduction.MEAN
FIRST = tj.Reduction.ONLY_FIRST_TOWER
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


def refused(call, *args, text=None, **options):
    """The error, and what it found by leaf."""
    call = getattr(call, "audit", call)  # of a step, whatever is proved of it
    with pytest.raises(SplitError, match=text) as error:
        call(*args, **options)
    return error.value, {finding.leaf: finding for finding in error.value.findings}


# What is wrong: a loss function, what is found, options.


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


def places(params, batch, tower):
    values = predictions(params, batch) * jnp.arange(1.0, len(batch["y"]) + 1)
    return tj.Weighted.mean(values, tower.weight)


def mean_loss(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight)


BAD = {
    "mean of scalars": (mean_of_scalars, "gradient['b']", {"loss_reduction": MEAN}),
    "places": (places, "loss", {"towers": (1,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_depends_on_the_split_is_found(name):
    loss_fn, leaf, options = BAD[name]
    options = {"towers": (3,)} | options
    error, found = refused(assert_replicates, loss_fn, PARAMS, BATCH, **options)
    assert found[leaf].difference > 0 and leaf in str(error)


def measures(params, batch, tower):
    """Metrics and tower-local values, of which some depend on the split."""
    own = losses(params, batch)
    weight = tower.weight
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
    options = {"towers": (3,), "local": local, "extra": EXTRA}
    error, found = refused(assert_replicates, measures, PARAMS, BATCH, **options)
    metrics = ("total as one", "mean as one", "batch norm", "reads id")
    values = ("initial", "count as mean", "first tower", "moving mean")
    wrong = {f"metrics['{x}']" for x in metrics} | {f"local['{x}']" for x in values}
    wrong.add("extra['total as one']")
    assert found.keys() == wrong  # and nothing that is right
    assert all(finding.difference > 0 for finding in found.values())
    named = [leaf in str(error) for leaf in found]  # the first three
    assert named == [True] * 3 + [False] * 6
    assert "..." in str(error) and "..." not in str(SplitError(error.findings[:3]))


@pytest.mark.slow
def test_what_a_train_step_refuses_is_refused():
    """Also of a batch that all numbers of towers divide: it is split unevenly."""
    even = {name: x[:12] for name, x in BATCH.items()}
    with pytest.raises(ValueError, match="was padded"):
        assert_replicates(forgets_weight, PARAMS, even, (2,))


# What is right.


def measures_well(params, batch, tower):
    weight = tower.weight * batch["weight"]
    hits_of = batch["y"].shape
    hits = tj.metrics.accuracy(batch["y"] > 0, predictions(params, batch) > 0, weight)
    metrics = {
        "hits": hits,
        "noise": tj.Weighted.mean(jax.random.normal(tower.rng, hits_of), weight),
        "norm": jnp.linalg.norm(params["w"]),
        "step": tower.step,
    }
    local = dict(tower.local)
    for name in ("counter", "no one value"):
        local[name] += tower.weight.sum()
    loss = tj.Weighted.mean(losses(params, batch), weight)
    return tj.TowerOutput(loss, metrics, local)


LOCAL = {name: COUNTED[name] for name in ("counter", "no one value")}
LOCAL = of_each_tower([*LOCAL.items(), ("first of none", (3, FIRST))])
KEYS = {"key": jax.random.key(0), "step": np.int32(3)}


@pytest.mark.slow
@pytest.mark.parametrize("padding", [True, False])
def test_what_is_right_passes(padding):
    how = {"towers": (3 if padding else 7,), "padding": padding}
    how |= {"local": LOCAL, "extra": KEYS}
    report = assert_replicates(measures_well, PARAMS, BATCH, **how)
    assert report.examples == 14 and report.largest < 1e-5
    assert {"loss", "gradient['w']"} <= set(report.compared)
    assert report.splits == 2 * len(report.towers)
    assert report.not_compared == ("local['no one value']",)


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
def test_rows_that_a_loss_returns_are_compared_in_the_order_of_the_batch():
    x = np.random.default_rng(0).normal(size=(11, 2)).astype(np.float32)

    def returns(rows_of):
        def loss_fn(w, batch, tower):
            kept = {"x": rows_of(batch), "c": 1j * batch, "weight": tower.weight}
            loss = tj.Weighted.mean(((w - batch) ** 2).sum(axis=1), tower.weight)
            return tj.TowerOutput(loss, extra=tj.Rows(kept))

        return loss_fn

    report = assert_replicates(returns(lambda x: x + 1), np.float32(1), x, (2, 3))
    assert {"extra['x']", "extra['c']", "extra['weight']"} <= {*report.compared}
    wrong = returns(lambda x: x - x.max(axis=0, keepdims=True))
    _, found = refused(assert_replicates, wrong, np.float32(1), x, (2,))
    assert found.keys() == {"extra['x']"}


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


@pytest.mark.slow
def test_bad_arguments_are_refused():
    for wrong, options in {
        "whole number >= 1": {"towers": (0,)},
        "padding='no' must be": {"padding": "no"},
        "permuted=2 must be": {"permuted": 2},
        "must be a number >= 0": {"rtol": -1.0},
        "towers=3 must be a list of one or more whole numbers": {"towers": 3},
        "one of None, Reduction.SUM": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, "towers": (3,), **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)


# The audit of a step.


def train_step(loss_fn, strategy=tj.Mirrored(towers=4), **options):  # noqa: B008
    options = {"remainder": "error", "audit": True} | options
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


# What is said of some of them.
CAUSES = {
    "sum_with_weight_1": "it is 1/T times .* its weight is no sum over rows",
    "a_column_less_a_row": r"rows of shape \[b, 1\].*less_a_row.*\n.*same shape",
    "cumsum_along_rows": "It accumulates a tower's own rows .*cumsum_along_rows",
    "scan_along_rows": "It goes through a tower's own rows .*scan_along_rows",
    "top_k_of_the_losses": "takes the largest of a tower's own rows",
    "quantile_clipped": "It sorts a tower's own rows .*quantile_clipped",
    "mixup_with_the_flipped_batch": "It reverses a tower's own rows",
    "noise_from_the_shared_key": "Draw the random numbers of rows from tower.rng",
    "noise_from_its_own_key": "a key that the function makes.*, at .*own_key",
    "advantage_less_its_mean": "computed from the rows of one tower alone",
    "gradient_by_the_mean_of_rows": "a function of a tower's own gradient",
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", WRONG)
def test_a_habitual_wrong_loss_is_refused_before_anything_changes(name):
    step = train_step(WRONG[name])
    state = step.init(MODEL)
    for _ in range(2 if name == "sum_with_weight_1" else 1):  # and again
        error, found = refused(step, state, ROWS, text=CAUSES.get(name))
    assert found.keys() & {"loss", "gradient['w']", "gradient['k']"}
    assert int(state.step) == 0 and not step.is_audited
    jax.tree.map(np.testing.assert_array_equal, state.params, MODEL)
    assert "on 2 towers" in str(error) and "on one" in str(error)
    assert len(str(error).splitlines()) <= 7  # three leaves, the cause, one remedy
    assert "equally many rows" not in str(error)  # ROWS are shared evenly


CALLS = itertools.count(1)
DRAWS_OF_NUMPY = np.random.default_rng(3)


class Anew:
    """Losses of which each trace gives another program."""

    def counted(p, b, t):
        factor = float(next(CALLS))
        return tj.Weighted.mean(errors(p, b) * factor, t.weight)

    def drawn(p, b, t):
        return tj.Weighted.mean(errors(p, b) * DRAWS_OF_NUMPY.uniform(), t.weight)

    def drawn_for_each_row(p, b, t):
        noise = DRAWS_OF_NUMPY.normal(size=b["y"].shape).astype(np.float32)
        return tj.Weighted.mean(errors(p, b) * noise, t.weight)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", cases(Anew))
def test_what_is_drawn_or_counted_in_python_is_named(name):
    loss_fn = cases(Anew)[name]
    step = train_step(loss_fn)
    text = "The function gives a different program when it is traced again"
    error, _ = refused(step, step.init(MODEL), ROWS, text=text)
    has_line = name != "drawn_for_each_row"  # an array has no line of its own
    assert (f".{name})" in str(error)) is has_line and "tower.rng" in str(error)


class ByNumber:
    """Losses with the number of towers in them."""

    def divided(p, b, t):
        return tj.Weighted.mean(errors(p, b) / t.num_towers, t.weight)

    def sum_divided(p, b, t):
        mean = tj.Weighted.mean(errors(p, b), t.weight)
        return tj.Weighted(mean.sum / t.num_towers, mean.weight)

    def multiplied(p, b, t):
        return tj.Weighted.mean(t.num_towers * errors(p, b), t.weight)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("name", cases(ByNumber))
def test_the_number_of_towers_is_named_as_the_factor(name, remainder):
    step = train_step(cases(ByNumber)[name], remainder=remainder)
    factor = "T" if name == "multiplied" else "1/T"
    text = rf"On T towers it is {factor} times .*\.{name}\)\.\n"
    _, found = refused(step, step.init(MODEL), ROWS, text=text)
    factor = 2.0 if name == "multiplied" else 0.5
    loss = found["loss"]
    np.testing.assert_allclose(loss.value, factor * loss.one_tower, rtol=1e-5)


@pytest.mark.slow
def median_of_own(params, batch, tower):
    return jnp.median(errors(params, batch))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("how", [SUM, MEAN])
def test_of_a_bare_loss_is_told_what_its_reduction_makes_of_it(how):
    """The proof does not know what a median of a tower's own rows is of all rows."""
    step = train_step(median_of_own, loss_reduction=how)
    wanted = "a sum" if how is SUM else "a mean"
    reduction = f"loss_reduction={how.name}"
    text = f"sorts a tower's own rows .*\n.*{reduction} .* return {wanted} over .*\n.*"
    refused(step, step.init(MODEL), ROWS, text=text)


def test_of_a_sum_and_a_penalty_the_factor_of_the_sum_is_told():
    def loss_fn(params, batch, tower):
        own = WRONG["sum_with_weight_1"](params, batch, tower)
        return own + tj.penalty((params["w"] ** 2).sum())

    step = train_step(loss_fn)
    error, _ = refused(step, step.init(MODEL), ROWS, text="it is 1/T times")
    assert "num_towers" not in str(error)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "equinox"])
def test_parameters_in_any_container_are_audited(kind, wrong):
    of = WRONG["sum_with_weight_1"] if wrong else RIGHT["plain_mean"]
    step = train_step(lambda p, b, t: of(as_dicts(p), b, t))
    state = step.init(held(kind, MODEL))
    if wrong:
        found = refused(step, state, ROWS, text="it is 1/T times")[1]
    else:
        found = step.audit(state, ROWS).compared
    of_one = ("gradient['w']", "loss") if kind == "dict" else ("gradient.w", "loss")
    assert set(of_one) <= set(found)


@pytest.mark.slow
def test_a_whole_module_of_nnx_is_audited():
    class Module(nnx.Module):
        def __init__(self):
            for name, x in MODEL.items():
                setattr(self, name, nnx.Param(jnp.asarray(x)))

    def loss_fn(module, batch, tower):
        params = {name: getattr(module, name)[...] for name in MODEL}
        return WRONG["sum_with_weight_1"](params, batch, tower)

    step = train_step(loss_fn)
    _, found = refused(step, step.init(Module()), ROWS, text="it is 1/T times")
    assert {"gradient.w.value", "loss"} <= found.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*padded")
@pytest.mark.parametrize("name", WRONG_WHERE_PADDED)
def test_what_counts_padding_is_refused_where_batches_are_padded(name):
    loss_fn = WRONG_WHERE_PADDED[name]
    full = train_step(loss_fn)
    full.audit(full.init(MODEL), ROWS)
    step = train_step(loss_fn, remainder="pad")
    text = "[Pp]added rows count"
    error, _ = refused(step, step.init(MODEL), ROWS, text=text)
    assert "equally many rows" not in str(error) and not step.is_audited


@pytest.mark.slow
def test_a_metric_that_counts_padding_is_refused_where_batches_are_padded():
    def metric_fn(params, batch, tower):
        own = (errors(params, batch) * tower.weight).mean()
        return {"mean": tower.reduce(tj.Reduction.MEAN, own)}

    how = {"audit": True, "remainder": "pad"}
    step = tj.build_eval_step(metric_fn, tj.Mirrored(towers=4), **how)
    _, found = refused(step, MODEL, ROWS, text="Padded rows count")
    (mean,) = found.values()
    # Twelve rows or nine, in two towers of six, and in one of 18.
    rows = {"evenly": 12, "unevenly": 9}[mean.split]
    total = np.asarray(errors(MODEL, ROWS), float)[:rows].sum()
    np.testing.assert_allclose((mean.value, mean.one_tower), total / [12, 18], 1e-5)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_that_looks_like_a_wrong_one_passes(name):
    # Padding would part pairs: such batches are not padded.
    padded = {} if name == "pairs_of_neighbours" else {"remainder": "pad"}
    step = train_step(RIGHT[name], **padded)
    report = step.audit(step.init(MODEL), ROWS)
    assert {"loss", "gradient['w']", "gradient['k']"} <= {*report.compared}
    assert report.examples == 12 and not report.not_compared
    assert report.splits >= 5 and not report.by_rounding
    assert step.is_audited


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_what_a_tower_makes_of_its_own_gradient_is_refused(name):
    def tower_fn(state, batch, tower):
        of_loss = tj.value_and_grad(RIGHT["plain_mean"])
        loss, grads = of_loss(state.params, batch, tower)
        return {"loss": loss, "grads": grads, **WRONG_STEPS[name](loss, grads)}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, tj.Mirrored(towers=4), audit=True)
    text = r"a tower's own gradient.*\n.*to the merged gradient, in|it is T times"
    _, found = refused(step, step.init(MODEL), ROWS, text=text)
    assert not found.keys() & {"loss", "grads['w']", "gradient['w']"}


BY_CHANCE = {
    "above_the_median": lambda own: own * (own > jnp.median(own)),
    "hardest_quarter": lambda own: own * (own >= jnp.quantile(own, 0.75)),
}


@jax.custom_vjp
def without_easy_rows(own):
    return own


without_easy_rows.defvjp(
    lambda own: (own, own > jnp.median(own)), lambda hard, g: (g * hard,)
)
BY_CHANCE["drops_easy_rows_of_the_gradient"] = without_easy_rows


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_CHANCE)
def test_what_agrees_by_chance_on_the_rows_as_they_come_is_found(name):
    chosen = BY_CHANCE[name]

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(chosen(w * batch), tower.weight)

    # Each half has two of the upper four, and the one of its upper quarter.
    batch = np.float32([1, 2, 5, 8, 3, 4, 6, 7])
    both = batch.reshape(2, 4)
    np.testing.assert_array_equal(
        (both > np.median(both, 1)[:, None]).ravel(), batch > np.median(batch)
    )
    step = train_step(loss_fn, tj.Mirrored(towers=2))
    _, found = refused(step, step.init(np.float32(1)), batch)
    assert {finding.split for finding in found.values()} == {"permuted"}


LATER = [(split, name) for split, faults in FAULTS.items() for name in faults]


@pytest.mark.slow
@pytest.mark.parametrize("split, name", LATER)
def test_a_fault_that_only_later_batches_show_is_refused(split, name):
    """The rows as they come, and permuted, were compared before."""
    padded = {"remainder": "pad"} if split == "one row in all" else {}
    step = train_step(FAULTS[split][name], **padded)
    error, found = refused(step.audit, step.init(LATER_MODEL), LATER_ROWS)
    assert {finding.split for finding in found.values()} == {split}
    assert f"({split})" in str(error)


@pytest.mark.slow
def test_a_clip_of_own_gradients_that_only_a_large_row_shows_is_refused():
    clip = optax.clip_by_global_norm(1e3)

    def tower_fn(state, batch, tower):
        of_loss = tj.value_and_grad(RIGHT["plain_mean"])
        loss, grads = of_loss(state.params, batch, tower)
        clipped, _ = clip.update(grads.value, clip.init(state.params))
        total = jax.tree.map(lambda g: g * grads.weight, clipped)
        return {"loss": loss, "grads": tj.Weighted(total, grads.weight)}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, tj.Mirrored(towers=4))
    _, found = refused(step.audit, step.init(MODEL), ROWS)
    assert {finding.split for finding in found.values()} == {"one row times 100"}


def loss_alone(loss_fn, batch=ROWS, params=MODEL, leaves=None, **options):
    """The audit that a first call makes, of leaves that are not proved."""
    step = train_step(loss_fn, **options)
    pads = step.options.remainder == "pad"
    given = step.plan, step.strategy, step.init(params), batch
    how = {"calls": 4, "pads": pads, "gradients": False, "leaves": leaves}
    return run_audit(*given, **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_without_gradients_a_wrong_loss_is_refused(name):
    refused(loss_alone, WRONG[name])


# Whose derivatives are told by a rule, or left out.
WITH_GRADIENTS = {"advantage_less_the_mean_of_all"}


@pytest.mark.slow
@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("name", RIGHT)
def test_without_gradients_a_right_loss_passes_and_the_report_says_so(name, remainder):
    if name == "pairs_of_neighbours" and remainder == "pad":
        return  # padding would part pairs
    report = loss_alone(RIGHT[name], remainder=remainder)
    follows = any("only the loss was run" in x for x in report.notes)
    assert follows is (name not in WITH_GRADIENTS)
    assert ("gradient['w']" in report.compared) is not follows


@pytest.mark.slow
def test_a_gradient_at_a_loss_of_zero_shows_where_parameters_have_moved():
    """As with a last layer that begins at 0: its gradient alone differs at first."""

    def loss_fn(params, batch, tower):
        own = batch["x"] - batch["x"].mean(0, keepdims=True)
        return tj.Weighted.mean((own @ params["w"] - batch["y"]) ** 2, tower.weight)

    zeros = jax.tree.map(np.zeros_like, MODEL)
    _, found = refused(loss_alone, loss_fn, params=zeros)
    assert found["loss"].split == "of other parameters"


@pytest.mark.slow
def test_a_made_row_may_have_a_loss_that_is_not_finite():
    """Of y times 100 the root is no number, on one tower either."""

    def loss_fn(params, batch, tower):
        own = jnp.sqrt(100 - batch["y"] ** 2) * scores(params, batch)
        return tj.Weighted.mean(own, tower.weight)

    assert loss_alone(loss_fn).splits == loss_alone(RIGHT["plain_mean"]).splits - 1


@pytest.mark.slow
def test_only_the_leaves_that_are_asked_for_are_judged():
    def loss_fn(params, batch, tower):
        own = errors(params, batch)
        metrics = {"median": tj.Weighted.mean(own * 0 + jnp.median(own), tower.weight)}
        return tj.TowerOutput(RIGHT["plain_mean"](params, batch, tower), metrics)

    report = loss_alone(loss_fn, leaves={"loss"}.__contains__)
    assert report.compared == ("loss",)
    _, found = refused(loss_alone, loss_fn, leaves=None)
    assert found.keys() == {"metrics['median']"}


def test_a_row_that_two_towers_have_keeps_its_number():
    """A program may find its rows among all by their numbers."""
    batch = {"x": np.arange(6, dtype=np.float32), "row": np.arange(6) + 3}
    splits = Splits(batch, 3).all(pads=False, draws=False)
    [twice] = [x.rows for x in splits if x.name == "one row on both towers"]
    assert twice["row"].tolist() == [3, 4, 5, 6, 7, 8]
    assert twice["x"].tolist() == [0, 1, 2, 0, 4, 5]


def test_a_function_that_draws_anew_is_not_audited():
    drawn = np.random.default_rng(0)

    def draw():
        return np.float32(drawn.uniform(1, 2))

    def loss_fn(params, batch, tower):
        noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))
        return tj.Weighted.mean(errors(params, batch) * noise, tower.weight)

    step = train_step(loss_fn)
    text = "not deterministic: for .* loss is .*Draw from tower.rng"
    with pytest.raises(NotAudited, match=text):
        step.audit(step.init(MODEL), ROWS)
    assert not step.is_audited


def test_a_loss_that_is_not_finite_is_not_audited():
    step = train_step(RIGHT["plain_mean"])
    state = step.init({**MODEL, "b": np.float32("nan")})
    with pytest.raises(NotAudited, match="on one tower loss is not finite"):
        step.audit(state, ROWS)


def test_a_gradient_that_is_not_finite_is_not_compared():
    def loss_fn(params, batch, tower):
        own = errors(params, batch) + jnp.sqrt(0.0 * params["b"])
        return tj.Weighted.mean(own, tower.weight)

    step = train_step(loss_fn)
    with jax.debug_nans(True):
        report = step.audit(step.init(MODEL), ROWS)
    assert report.not_compared == ("gradient['b']",) and "loss" in report.compared
    assert "gradient['w']" in report.compared


@pytest.mark.slow
@pytest.mark.parametrize("rows, apart", [(2, 1), (3, 1), (8, 2)])
def test_towers_of_one_row_are_audited_with_two(rows, apart):
    def loss_fn(w, batch, tower):  # of pairs, of which so many rows have none
        other = jnp.roll(batch, apart)
        return tj.Weighted.mean((w * (batch - other)) ** 2, tower.weight)

    batch = np.float32([1, 3, 4, 8, 16, 17, 18, 40])[:rows]
    how = {"remainder": "pad"} if rows == 3 else {}
    step = train_step(loss_fn, tj.Mirrored(towers=rows), **how)
    refused(step, step.init(np.float32(1)), batch)


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


def mean_of_means(params, batch, tower):
    own = tj.Weighted.mean(errors(params, batch), tower.weight)
    return tj.Weighted(own.value, 1.0)


def mean_of_finite_means(params, batch, tower):
    own = mean_of_means(params, batch, tower).value
    return tj.Weighted(jnp.nan_to_num(own), 1.0)


@pytest.mark.slow
def test_uneven_towers_are_compared_where_batches_are_padded():
    even = train_step(mean_of_finite_means)
    even.audit(even.init(MODEL), ROWS)
    uneven = train_step(mean_of_finite_means, remainder="pad")
    text = "agree if they have equally many rows"
    _, found = refused(uneven.audit, uneven.init(MODEL), ROWS, text=text)
    own = np.asarray(errors(MODEL, ROWS), float)
    loss = found["loss"]
    # Six rows and three of the nine first ones, and all nine.
    np.testing.assert_allclose(loss.value, (own[:6].mean() + own[6:9].mean()) / 2, 1e-5)
    np.testing.assert_allclose(loss.one_tower, own[:9].mean(), 1e-5)


@pytest.mark.slow
def test_micro_batches_are_audited_as_towers_are():
    step = train_step(WRONG["sum_with_weight_1"], tj.OneDevice(), micro_batches=3)
    _, found = refused(step.audit, step.init(MODEL), ROWS, text="on 2 towers")
    own = np.asarray(errors(MODEL, ROWS), float)
    np.testing.assert_allclose(found["loss"].one_tower, own[:12].sum(), 1e-5)


@pytest.mark.slow
def test_one_tower_needs_no_audit_unless_it_is_asked_for():
    step = train_step(mean_of_means, tj.OneDevice())
    state, _ = step(step.init(MODEL), ROWS)
    assert not step.is_audited
    step.audit(state, ROWS)
    first = jax.tree.map(lambda x: x[:1], ROWS)
    with pytest.raises(ValueError, match="but the batch has 1. Give at least 2"):
        step.audit(state, first)


@pytest.mark.slow
@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
def test_evaluations_predictions_and_towers_in_turn_are_audited(tower_loop):
    def metric_fn(params, batch, tower):
        own = errors(params, batch)
        return {
            "right": tj.Weighted.mean(own, tower.weight),
            "wrong": tj.Weighted((own * tower.weight).sum(), 1.0),
        }

    def predict_fn(params, batch, tower):
        own = scores(params, batch)
        return {"right": own, "wrong": jnp.cumsum(own)}

    strategy = tj.Mirrored(towers=4, tower_loop=tower_loop)
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=True)
    assert [*refused(evaluate, MODEL, ROWS)[1]] == ["metrics['wrong']"]
    predict = tj.build_predict_step(predict_fn, strategy)
    assert [*refused(predict.audit, MODEL, ROWS)[1]] == ["predictions['wrong']"]


@pytest.mark.slow
def test_predictions_by_the_number_of_a_tower_are_not_called_a_sum():
    def predict_fn(params, batch, tower):
        return scores(params, batch) * (1 + tower.id)  # twice as much on the second

    predict = tj.build_predict_step(predict_fn, tj.Mirrored(towers=4))
    error, found = refused(predict, MODEL, ROWS, text="or from tower.id or tower.num_t")
    assert [*found] == ["predictions"] and "wice" not in str(error)


def model_of(loss_fn, optimizer, **options):
    def model_fn(variables, features, labels, mode, tower):
        def loss_of(params):
            return loss_fn(params, features, tower)

        loss, train_op = optimizer.minimize(loss_of, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    devices = tj.Mirrored(towers=4)
    return tj.estimator.replicate_model_fn(model_fn, devices=devices, **options)


@pytest.mark.slow
def test_a_model_function_is_audited():
    optimizer = tj.estimator.TowerOptimizer(optax.adam(0.1))
    features = ROWS
    mode = tj.estimator.Mode.TRAIN
    state = tj.TrainState.create(MODEL, optimizer)
    model = model_of(WRONG["cumsum_along_rows"], optimizer, audit=True)
    _, found = refused(model, model.init(state), features, None, mode, text="gradient")
    assert "loss" in found
    model = model_of(RIGHT["plain_mean"], optimizer)
    step = model.train_step(audit=True)
    state, _ = step(model.init(state), {"features": features})
    assert step.unproved == {} and int(state.step) == 1
    model = model_of(RIGHT["plain_mean"], optimizer, audit=True, compat="tf1")
    with pytest.raises(NotProved, match="compat='tf1' divides by the number of"):
        model(state, features, None, mode)
    model = model_of(RIGHT["plain_mean"], optimizer, compat="tf1")
    with pytest.warns(UserWarning, match="not proved .* compat='tf1' divides"):
        model(state, features, None, mode)


@pytest.mark.slow
def test_a_placed_batch_and_its_shared_values_are_audited():
    def loss_fn(params, batch, tower):
        scale = batch["scale"]["all"]
        return tj.Weighted.mean(scale * errors(params, batch), tower.weight)

    batch = {**ROWS, "scale": {"all": tj.Whole(np.float32(2))}}
    step = train_step(loss_fn, audit=False, remainder="pad")
    state = step.init(MODEL)
    short = jax.tree.map(lambda x: x[:22] if np.ndim(x) else x, batch)
    for given in (batch, step.place_batch(short)):
        report = step.audit(state, given)
        assert report.examples == 12 and report.largest < 1e-5


@pytest.mark.slow
def test_what_depends_on_the_towers_by_design_is_left_out():
    class Towers(tj.metrics.Additive):
        counts_towers = True
        number: jax.Array

        def compute(self):
            return self.number

    def loss_fn(params, batch, tower):
        loss = tj.Weighted.mean(errors(params, batch), tower.weight)
        return tj.TowerOutput(loss, {"towers": Towers(jnp.float32(1))})

    step = train_step(loss_fn, audit=False)
    state = step.init(MODEL)
    assert step.audit(state, ROWS).largest < 1e-5
    assert float(step(state, ROWS)[1]["towers"]) == step.strategy.num_towers


@pytest.mark.slow
def test_local_and_extra_state_of_towers_that_have_gone_on_are_audited():
    def loss_fn(params, batch, tower):
        count = tower.local["count"] + tower.weight.sum()
        mean = tj.Weighted.mean(batch["x"][:, 0], tower.weight).value
        local = {"count": count, "mean": 0.5 * (tower.local["mean"] + mean)}
        local["own"] = tower.local["own"] + 1
        extra = tj.Weighted.mean(batch["x"][:, 1] + tower.extra, tower.weight)
        loss = RIGHT["plain_mean"](params, batch, tower)
        return tj.TowerOutput(loss, {}, local, extra)

    local = {
        "count": tj.TowerLocal(np.float32(0), SUM),
        "mean": tj.TowerLocal(np.float32(1), MEAN),
        "own": tj.TowerLocal(np.float32(1), tj.Reduction.NONE),
    }
    step = train_step(loss_fn, audit=False)
    state = step.init(MODEL, local=local, extra=np.float32(1))
    state, _ = step(state, ROWS)
    report = step.audit(state, ROWS)
    assert {"extra", "local['count']", "local['mean']"} <= {*report.compared}
    assert report.not_compared == ("local['own']",)


def test_each_of_two_towers_has_its_own_variables_and_one_has_both():
    own = [tj.TowerLocal(np.float32([1, 2]), x) for x in (SUM, tj.Reduction.NONE)]
    state = tj.TrainState.create(PARAMS, optax.sgd(0.1), local=own)
    for number, expected in (2, [[1, 2], [1, 2]]), (1, [[3], [1]]):
        local = _local_of(state.local, number)
        assert [x.value.tolist() for x in local] == expected


@pytest.mark.slow
def test_a_run_goes_on_without_an_audit_where_it_is_told_to():
    data = tj.batches(ROWS, 8, epochs=2)
    wrong = train_step(WRONG["cumsum_along_rows"], audit=None)
    error, _ = refused(tj.run, wrong, wrong.init(MODEL), data)
    state, history = tj.run(wrong, error.state, error.batches, audit=False)
    assert history.metrics["loss"].shape == (6,)
    again = tj.batches(ROWS, 8)
    refused(tj.run, wrong, wrong.init(MODEL), again, audit=True)


@pytest.mark.slow
def test_a_run_warns_of_what_towers_own_statistics_may_explain():
    def loss_fn(params, batch, tower):
        loss = WRONG["cumsum_along_rows"](params, batch, tower)
        return tj.TowerOutput(loss, {}, tower.local)

    step = train_step(loss_fn, audit=None)
    state = step.init(MODEL, local={"n": tj.TowerLocal(np.float32(0), SUM)})
    with pytest.warns(UserWarning, match="Unless each tower's own statistics are"):
        tj.run(step, state, tj.batches(ROWS, 8), steps=1)


def test_audit_is_one_of_three():
    step = train_step(mean_of_means, audit=None)
    with pytest.raises(ValueError, match="audit=2 must be"):
        tj.run(step, step.init(MODEL), tj.batches(ROWS, 8), audit=2)
    with pytest.raises(ValueError, match="audit=1 must be"):
        train_step(mean_of_means, audit=1)


@pytest.mark.slow
def test_keys_draw_the_same_for_all_rows_but_not_twice():
    @jax.jit
    def draw():
        key = row_free_key(0x45A319E6)
        first, second = jax.random.split(key)
        folded = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))
        shared = jax.random.fold_in(jax.random.fold_in(key, 7), ALL_TOWERS)
        alike = jax.random.fold_in(row_free_key(2, shared=False), ALL_TOWERS)
        normal = jax.random.normal
        same = [normal(key, (2, 3)), normal(alike, (9,))]
        apart = [normal(shared, (9,)), normal(jax.random.split(shared)[1], (9,))]
        bits = [jax.random.bits(key, (3,), f"uint{n}") for n in (8, 16, 32)]
        once = [jax.random.uniform(x) for x in (first, second, key)]
        return same, apart, bits, once, folded(jnp.arange(3))

    same, apart, bits, (first, second, whole), folded = jax.tree.map(np.asarray, draw())
    assert [np.unique(x).size for x in [*same, *apart, *bits]] == [1, 1, 9, 9, 1, 1, 1]
    assert first == second != whole and all(x[0] >> 4 > 0 for x in bits)
    assert np.array_equal(folded, same[0].ravel()[:3])


# The command.

PROGRAM = """
import numpy as np
import optax
import towerjax as tj

def good(params, batch, tower):
    return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)

def bad(params, batch, tower):
    return tj.Weighted((params["w"] * batch["x"] * tower.weight).sum(), 1.0)

def made(loss_fn):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=4))
    batch = {"x": np.arange(12, dtype=np.float32)}
    return step, step.init({"w": np.float32(2)}), batch

def make_good():
    return made(good)

def make_bad():
    return made(bad)
"""


@pytest.mark.slow
def test_the_command_says_what_is_wrong(shell):
    code, out, _ = shell("audit", "of_user:make_good", "--json")
    assert code == 0 and json.loads(out)["same"] and json.loads(out)["towers"] == [2]
    assert json.loads(out)["unproved"] == {}
    code, out, _ = shell("audit", "of_user:make_bad", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert {"loss"} == {x["leaf"] for x in found["findings"]}
    code, out, _ = shell("audit", "of_user:make_bad")
    assert code == 1 and "tj.Weighted.mean(" in out


def test_how_many_leaves_depend_is_said():
    one = Finding("loss", 2, "evenly", 1.0, 2.0, 1.0, 0.5)
    assert str(SplitError([one])).startswith("1 leaf depends on how the batch is split")
    assert str(SplitError([one, one])).startswith("2 leaves depend on how the batch is")


def test_the_command_refuses_wrong_arguments(shell):
    for wrong, name in {
        "of the form module:name": "of_user.good",
        "'.of_user:good' is not of the form": ".of_user:good",
        "has no attribute 'better'": "of_user:better",
        "No module named 'of_nobody'": "of_nobody:good",
        "cannot be called as good()": "of_user:good",
    }.items():
        code, _, error = shell("audit", name)
        assert code == 2 and wrong in error, error
