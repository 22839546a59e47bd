"""Early stopping, counted by hand."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_model import Evaluation

import towerjax as tj

NAN = math.nan
INF = math.inf
# Each tower counts its own steps, which the audit would tell of.
run = functools.partial(tj.run, audit=False)


def loss_fn(params, batch, tower):
    loss = tj.Weighted.mean((params["w"] - batch) ** 2, tower.weight)
    return tj.TowerOutput(loss, local={"seen": tower.local["seen"] + 1.0})


def metric_fn(params, batch, tower):
    rows = tower.weight.sum(keepdims=True)
    column = tj.Weighted(rows * params["w"], rows)
    told = tj.Weighted.mean(batch, tower.weight)
    tree = tj.Weighted.mean({"a": batch, "b": 2 * batch}, tower.weight, axis=0)
    turned = tj.Weighted.mean(jnp.exp(1j * batch), tower.weight)
    return {"told": told, "column": column, "tree": tree, "complex": turned}


def build(executor="shard_map", devices=8, **options):
    names = tuple(f"cpu:{i}" for i in range(devices))
    strategy = tj.Mirrored(names, executor=executor)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = tj.build_train_step(loss_fn, optimizer, strategy, **options)
    return step, tj.build_eval_step(metric_fn, strategy)


@pytest.fixture(scope="module")
def steps():
    return build()


def init(step):
    local = {"seen": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}
    return step.init({"w": np.float32(0.5)}, local=local, rng=jax.random.key(7))


def told(values):
    """Data whose evaluations are these values, one after another."""
    values = iter(values)
    return lambda: [np.full(8, next(values), np.float32)]


def train(built, values, num_steps, **options):
    step, evaluate = built
    data = [np.full(8, float(i), np.float32) for i in range(num_steps)]
    options = {"eval_every": 1, "progress": False, **options}
    return run(
        step, init(step), data, evaluate=evaluate, eval_batches=told(values), **options
    )


def bits(tree):
    def of(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_several_rules_of_several_metrics_end_a_run(steps):
    step = steps[0]
    values = {"told": iter([3, 1, 2, 0]), "other": iter([1, 2, 3, 4])}

    def metrics(state):
        return {name: np.float32(next(x)) for name, x in values.items()}

    early = [
        tj.EarlyStopping("told", 2, "min"),
        tj.EarlyStopping("other", goal=4, mode="max"),
    ]
    data = [np.full(8, 1.0, np.float32)] * 9
    evaluate = Evaluation(metrics)
    how = dict(evaluate=evaluate, eval_batches=[0], eval_every=1, progress=False)
    state, history = run(step, init(step), data, early_stopping=early, **how)
    assert history.stopped == "other reached 4, best 4.000 after 4"
    assert int(state.step) == 4


@pytest.mark.slow
def test_what_stopped_a_run_is_said(steps, capsys):
    early = tj.EarlyStopping("told", 2, "min")
    _, history = train(
        steps, [3, 1, 2, 2], 9, steps=9, progress=None, early_stopping=early
    )
    why = "told did not improve in 2 evaluations in a row, best 1.000 after 2"
    assert history.stopped == why
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"stopped after step 4: {why}"
    assert lines[-2].startswith("evaluation after step 4")
    assert not history.evaluations[4:]


def test_stopping_leaves_the_rest_of_the_data_and_closes_ours(steps):
    step, evaluate = steps
    closed = []

    class Data:
        def __iter__(self):
            try:
                while True:
                    yield np.ones(8, np.float32)
            finally:
                closed.append("ours")

    def stopped(data, **more):
        options = {"evaluate": evaluate, "eval_every": 1, "progress": False, **more}
        options["early_stopping"] = tj.EarlyStopping("told", 1, "min")
        run(step, init(step), data, eval_batches=told([1, 1]), **options)

    for prefetch in (0, 2):
        stopped(Data(), steps=100, prefetch=prefetch)
        assert closed.pop() == "ours"
    mine = iter(Data())
    stopped(mine, prefetch=0)
    assert not closed
    next(mine)  # the caller's iterator goes on


@pytest.mark.parametrize("make, text", [
    (lambda: tj.EarlyStopping("loss", 0), "patience=0 must be a whole number >= 1"),
    (lambda: tj.EarlyStopping("loss", 2.0), "patience=2.0 must be a whole"),
    (lambda: tj.EarlyStopping("x", 1, "least"), "mode='least' must be one"),
    (lambda: tj.EarlyStopping("", 1), "metric='' must be the name of a metric"),
    (lambda: tj.EarlyStopping("loss"), "patience=None and goal=None would never stop"),
    (lambda: tj.EarlyStopping("loss", goal=INF), "goal=inf must be a finite number"),
    (lambda: tj.EarlyStopping("loss", goal=True), "goal=True must be a finite number"),
    (lambda: tj.EarlyStopping("loss", 1, min_steps=-1), "min_steps=-1 must be a whole"),
    (lambda: tj.EarlyStopping("x", 1, "min", -1.0), "min_delta=-1.0 must be a fin"),
    (lambda: tj.EarlyStopping("x", 1, "min", NAN), "min_delta=nan must be a fin"),
])  # fmt: skip
def test_bad_options_are_refused(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize("metric", ["reward", "told", "iou_loss", "map"])
@pytest.mark.parametrize("option", [
    lambda metric, **mode: tj.EarlyStopping(metric, patience=1, **mode),
    lambda metric, **mode: tj.Checkpointer("folder", best=metric, **mode),
])  # fmt: skip
def test_a_name_that_does_not_tell_asks_for_a_mode(option, metric):
    with pytest.raises(ValueError, match=f"{metric!r} does not tell .* Write mode="):
        option(metric)
    assert option(metric, mode="max").mode == "max"


def test_options_that_do_not_fit_are_refused_before_the_run(steps):
    step, evaluate = steps
    state = init(step)
    evaluated = {"evaluate": evaluate, "eval_batches": [np.ones(8, np.float32)]}
    early = tj.EarlyStopping("told", 1, "min")
    table = [
        ({"early_stopping": early}, "early_stopping=EarlyStopping(metric='told', pat"),
        ({"early_stopping": early, **evaluated}, "would never stop the run"),
        ({"early_stopping": "told", **evaluated}, "must be None, a tj.EarlyStopping"),
        ({"early_stopping": [early, 3], **evaluated}, "or a list of these"),
    ]
    for options, text in table:
        with pytest.raises(ValueError, match=re.escape(text)):
            run(step, state, [np.ones(8, np.float32)], **options)
    assert int(state.step) == 0


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("metric, text", [
    ("loss", r"is not a metric .* has \['column', 'complex', 'told', 'tree'\]."),
    ("column", r"one real number, but its value is an ndarray\(1,\)"),
    ("tree", "one real number, but its value is a dict"),
    ("complex", "one real number, but its value is a complex"),
])  # fmt: skip
def test_a_metric_that_is_not_there_is_told_at_the_first_evaluation(
    steps, metric, text
):
    early = tj.EarlyStopping(metric, 9, "min")
    with pytest.raises(ValueError, match=text) as caught:
        train(steps, [1, 2], 4, eval_every=2, early_stopping=early)
    assert int(caught.value.state.step) == 2
    assert len(caught.value.history.evaluations) == 1
