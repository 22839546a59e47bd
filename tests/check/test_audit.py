"""Audits: what depends on the split is found and named, what does not passes."""

import itertools

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
from audits import (
    BATCH,
    FIRST,
    MEAN,
    PARAMS,
    SUM,
    loss_alone,
    losses,
    mean_loss,
    predictions,
    refused,
    train_step,
)
from containers import KINDS, as_dicts, held
from flax import nnx
from later_faults import BATCH as LATER_ROWS
from later_faults import FAULTS
from later_faults import PARAMS as LATER_MODEL
from layouts import cases

import towerjax as tj
from towerjax.check.audit.later_batches import Splits
from towerjax.prover.comparison import (
    NotAudited,
)
from towerjax.testing import SplitError, assert_replicates

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
    "advantage_less_its_mean": "a mean over the tower's own rows, at [\\s\\S]*"
    r"tower\.mean\(x, tower\.weight\), or with axis=0 the mean row",
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("how", [SUM, MEAN])
def test_of_a_bare_loss_is_told_what_its_reduction_makes_of_it(how):
    """The proof does not know what a median of a tower's own rows is of all rows."""
    step = train_step(median_of_own, loss_reduction=how)
    wanted = "a sum" if how is SUM else "a mean"
    reduction = f"loss_reduction={how.name}"
    text = (
        f"It sorts a tower's own rows .*\n.*{reduction} .* return {wanted} over .*\n.*"
    )
    refused(step, step.init(MODEL), ROWS, text=text)


@pytest.mark.slow
def test_of_a_sum_and_a_penalty_the_factor_of_the_sum_is_told():
    def loss_fn(params, batch, tower):
        own = WRONG["sum_with_weight_1"](params, batch, tower)
        return own + tj.penalty((params["w"] ** 2).sum())

    step = train_step(loss_fn)
    error, _ = refused(step, step.init(MODEL), ROWS, text="it is 1/T times")
    assert "num_towers" not in str(error)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_without_gradients_a_wrong_loss_is_refused(name):
    refused(loss_alone, WRONG[name])


# Whose derivatives are told by a rule, or left out.
WITH_GRADIENTS = {"advantage_less_the_mean_of_all"}
# The others are audited with gradients, above.
ALONE = ["plain_mean", "class_balance_over_all_towers", "dropout", *WITH_GRADIENTS]


@pytest.mark.slow
@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("name", ALONE)
def test_without_gradients_a_right_loss_passes_and_the_report_says_so(name, remainder):
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


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_not_audited():
    step = train_step(RIGHT["plain_mean"])
    state = step.init({**MODEL, "b": np.float32("nan")})
    with pytest.raises(NotAudited, match="on one tower loss is not finite"):
        step.audit(state, ROWS)


@pytest.mark.slow
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
