"""train_and_evaluate and predict: how long, of what data, and what is refused."""

import collections
import functools
import itertools
import operator
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_model import Calling

import towerjax as tj
from towerjax.tf1.estimator.train import Epochs, as_batch

RATE = 0.1
EPS = np.finfo(np.float32).eps
Pair = collections.namedtuple("Pair", "left right")


def losses_of(params, batch):
    errors = batch["features"]["x"] @ params["w"]
    if "labels" in batch:
        errors = errors - batch["labels"]
    return errors**2


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(losses_of(params, batch), tower.weight)


def metric_fn(params, batch, tower):
    return {"loss": loss_fn(params, batch, tower)}


def predict_fn(params, batch, tower):
    assert set(batch) == {"features"}
    x = batch["features"]["x"]
    return {"y": x @ params["w"], "double": 2 * x}


class Model:
    """What a replicated model offers, of a linear regression."""

    def __init__(self):
        self.strategy = tj.Mirrored()
        self.seen = []

    @functools.cache  # noqa: B019
    def train_step(self, donate=True, on_nonfinite="raise"):
        step = tj.build_train_step(
            loss_fn,
            optax.sgd(RATE),
            self.strategy,
            remainder="pad",
            donate=donate,
            on_nonfinite=on_nonfinite,
        )
        dispatch = step.dispatch

        def dispatch_and_find_hooks(state, batch):
            hooks = (lambda number, metrics: self.seen.append(number),)
            object.__setattr__(step.plan.states, "hooks", hooks)
            return dispatch(state, batch)

        step.dispatch = dispatch_and_find_hooks
        return step

    @functools.cache  # noqa: B019
    def eval_step(self):
        return tj.build_eval_step(metric_fn, self.strategy)

    @functools.cache  # noqa: B019
    def predict_step(self):
        return tj.build_predict_step(predict_fn, self.strategy)

    def init(self):
        return self.train_step().init({"w": np.array([0.5, -1.0, 2.0], np.float32)})


@pytest.fixture(scope="module")
def compiled():
    return Model()


@pytest.fixture
def model(compiled):
    compiled.seen.clear()
    return compiled


def arrays(num_examples, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, 3)).astype(np.float32)
    return {"x": x}, (x @ np.float32([1, 2, 3]) + rng.normal(size=len(x))).astype("f4")


def pairs(num_examples=44, batch_size=16, seed=0):
    """Batches of 16, 16, 12: the last one is padded on 8 towers."""
    return list(tj.batches(arrays(num_examples, seed), batch_size))


def oracle(batches, w=(0.5, -1.0, 2.0)):
    """Losses before each step and last weights of gradient descent in float64."""
    w = np.array(w)
    losses = []
    for features, labels in batches:
        x = features["x"].astype(np.float64)
        errors = x @ w - (0.0 if labels is None else labels.astype(np.float64))
        losses.append(np.mean(errors**2))
        w = w - RATE * 2 * x.T @ errors / len(x)
    return np.array(losses), w


def train(model, data, *rest, **options):
    options = {"variables": model.init(), "progress": False, **options}
    return tj.estimator.train_and_evaluate(model, data, *rest, **options)


def closing(closed, data, error=None, then=()):
    """Data that say when they are closed; an error may stand between two parts."""
    try:
        yield from data
        if error is not None:
            raise error
        yield from then
    finally:
        closed.append(1)


def in_advance():
    """How many threads take batches."""
    names = [thread.name for thread in threading.enumerate()]
    return names.count("towerjax-prefetch")


def check(result, expected):
    """The run did these batches, in this order."""
    (variables, history) = result
    (losses, w) = oracle(expected)
    bound = 16 * len(expected) * EPS
    np.testing.assert_allclose(history.metrics["loss"], losses, rtol=bound)
    np.testing.assert_allclose(variables.params["w"], w, rtol=bound)
    assert history.steps.tolist() == list(range(1, len(expected) + 1))
    assert history.summary.examples == sum(len(x["x"]) for x, _ in expected)


# How long

HOW_LONG = [
    (None, None, 3),  # one pass
    (None, 2, 6),
    (2, None, 2),
    (8, None, 8),  # gone through again
    (4, 3, 4),  # whichever ends first
    (9, 2, 6),
    (6, 2, 6),
]


FORMS = [("list", *row) for row in HOW_LONG]
FORMS += [(form, *HOW_LONG[i]) for form in ("function", "dataset") for i in (3, 4)]
FORMS += [("own dataset", *HOW_LONG[3])]
EVALUATED = pairs(29, 10, seed=1)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("form, steps, epochs, expected", FORMS)
def test_how_long(model, form, steps, epochs, expected):
    data = pairs()
    calls = []
    distribute = functools.partial(model.strategy.distribute_dataset, remainder="pad")

    def fn(context=None):
        calls.append(1)
        yield from data

    made = {
        "list": lambda: data,
        "function": lambda: fn,
        "dataset": lambda: distribute(data),
        "own dataset": lambda: distribute(fn),
    }[form]()
    result = train(model, made, steps=steps, epochs=epochs)
    check(result, list(itertools.islice(itertools.cycle(data), expected)))
    assert model.seen == list(range(1, expected + 1))
    if form == "function":
        assert len(calls) == -(-expected // 3)


@pytest.mark.slow
def test_batches_begin_anew_with_each_pass_and_evaluation(model):
    whole = pairs()
    given = tj.batches(arrays(44), 16)
    next(given)  # they go on from where they are
    result = train(model, given, tj.batches(arrays(44), 16), epochs=2, eval_every=2)
    check(result, whole[1:] * 2)
    assert [number for number, _ in result[1].evaluations] == [2, 4]
    alone = tj.estimator.evaluate(model, result[0], whole)
    assert result[1].final["loss"] == alone["loss"]


@pytest.mark.slow
def test_a_distributed_data_set_has_one_thread_and_no_other(model):
    def endless():
        yield from itertools.cycle(pairs())

    for data in (endless, model.strategy.distribute_dataset(endless, remainder="pad")):
        counts = []
        count = lambda *_, counts=counts: counts.append(in_advance())  # noqa: E731
        train(model, data, steps=3, epochs=1, hooks=[count])
        for _ in itertools.islice(tj.estimator.predict(model, model.init(), data), 2):
            count()
        assert max(counts) == 1 and in_advance() == 0


def test_data_that_can_be_gone_through_once_is(model):
    data = pairs()
    check(train(model, iter(data)), data)
    check(train(model, iter(data), epochs=1), data)
    endless = itertools.cycle(data)
    check(train(model, endless, steps=5), [*data, *data[:2]])
    assert next(endless) is data[2]
    mine = (batch for batch in data)
    check(train(model, mine, steps=2, prefetch=0), data[:2])
    assert next(mine) is data[2]  # the caller's own is not closed


@pytest.mark.slow
def test_without_labels_there_are_none():
    model = Model()
    data = [(features, None) for features, _ in pairs()]
    mixed = [data[0], *(features for features, _ in data[1:])]
    check(train(model, mixed), data)


@pytest.mark.slow
def test_evaluations_are_those_of_numpy(model):
    """Of data that are distributed, too."""
    data = pairs()
    distribute = model.strategy.distribute_dataset
    given = [lambda: EVALUATED, distribute(EVALUATED, remainder="pad")]
    runs = [train(model, data, x, epochs=3, eval_every=4)[1] for x in given]
    assert runs[0].evaluations == runs[1].evaluations
    assert [number for number, _ in runs[0].evaluations] == [4, 8, 9]
    for number, values in runs[0].evaluations:
        w = oracle((data * 3)[:number])[1]
        squares = [(np.float64(x["x"]) @ w - np.float64(y)) ** 2 for x, y in EVALUATED]
        expected = np.concatenate(squares).mean()
        np.testing.assert_allclose(values["loss"], expected, rtol=500 * EPS)


@pytest.mark.slow
def test_options_reach_the_loop(model, tmp_path):
    """Also an evaluation on other towers, as RunConfig(eval_distribute=...) had it."""
    path = tmp_path / "run.jsonl"
    seen = []

    def told(params, batch, tower):
        towers = tj.Weighted(tower.num_towers * 1.0, 1.0)
        return {**metric_fn(params, batch, tower), "towers": towers}

    saving = tj.Checkpointer(tmp_path / "saved", best="loss")
    options = {
        # A metric is the number of towers.
        "evaluate": tj.build_eval_step(
            told, tj.Mirrored(("cpu:5",), towers=3), audit=False
        ),
        "early_stopping": tj.EarlyStopping("loss", patience=2),
        "checkpointer": saving,
        "writers": [tj.JsonLines(path)],
        "hooks": [lambda number, metrics: seen.append((number, len(model.seen)))],
    }
    # Learning from data that diverges: the first evaluation is the best.
    worse = [(x, -10 * y) for x, y in pairs()]
    result = train(model, worse, pairs(), epochs=9, eval_every=2, **options)
    variables, history = result
    values = [x["loss"] for _, x in history.evaluations]
    assert values == sorted(values) and len(values) == 3
    assert history.final["towers"] == 3
    assert history.stopped and history.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert int(variables.step) == 6 and saving.best_step == 2
    variables = saving.restore(model.train_step(), model.init(), number=2)
    np.testing.assert_allclose(variables.params["w"], oracle(worse[:2])[1], rtol=1e-5)
    assert len(path.read_text().splitlines()) == 6 + 3
    assert seen == [(n, n) for n in range(1, 7)]  # the model's own hook comes first


def test_a_run_goes_on(model, tmp_path):
    data = pairs()
    writers = [tj.JsonLines(tmp_path / "run.jsonl")]
    variables, _ = train(model, data, writers=writers)
    variables, history = train(model, data, variables=variables, writers=writers)
    assert history.steps.tolist() == [4, 5, 6]
    np.testing.assert_allclose(variables.params["w"], oracle(data * 2)[1], rtol=1e-5)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    "kind, prefetch", [("loader", 2), ("loader", 0), ("hook", 0), ("ctrl-c", 2)]
)
def test_after_an_error_it_goes_on(model, kind, prefetch):
    data = pairs()
    error = LookupError("gone")
    closed = []
    between = error if kind == "loader" else None
    loader = functools.partial(closing, closed, data, between, data)

    def hook(number, metrics):
        if number == 3 and kind == "hook":
            raise error
        if number == 3 and kind == "ctrl-c":
            signal.raise_signal(signal.SIGINT)

    writer = Calling(close=lambda: closed.append(2))
    options = {"hooks": [hook], "writers": [writer], "prefetch": prefetch}
    with pytest.raises((KeyboardInterrupt, LookupError)) as caught:
        train(model, loader, **options)
    assert (caught.type is KeyboardInterrupt) == (kind == "ctrl-c")
    if kind == "loader":
        assert sorted(closed) == [1, 2]
        batches = data
    else:
        assert 2 in closed  # the loader is handed over, to be gone on with
        batches = caught.value.batches
    done = int(caught.value.state.step)
    assert done >= 3 and len(caught.value.history.steps) == done
    variables, _ = train(model, batches, variables=caught.value.state)
    assert sorted(closed) == [1, 2]
    np.testing.assert_allclose(variables.params["w"], oracle(data * 2)[1], rtol=1e-5)


class Shaky:
    """An iterator that raises once, and can be gone on with."""

    def __init__(self, data, at):
        self.left = list(data)
        self.at = at

    def __iter__(self):
        return self

    def __next__(self):
        if len(self.left) == self.at:
            self.at = None
            raise LookupError("gone")
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_batches_that_were_used_are_those_that_the_data_says():
    class Rest(list):
        used_before = 3

    assert Epochs("data", ["a", "b"]).used_before == 0
    assert Epochs("data", Rest("ab")).used_before == 3


@pytest.mark.parametrize("first, rest", [
    (lambda: Shaky("abc", 2), "bcde"),
    (lambda: closing([], "a", LookupError("gone")), ""),  # nor the next epoch
])  # fmt: skip
def test_data_that_raises_is_gone_on_with_where_it_can_be(first, rest):
    made = iter([first(), Shaky("de", None)])
    passes = iter(Epochs("data", lambda: next(made), epochs=2))
    assert next(passes)["features"] == "a"
    with pytest.raises(LookupError):
        next(passes)
    assert [x["features"] for x in passes] == list(rest)


def test_a_malformed_batch_closes_the_data(model):
    bad = ({"x": np.zeros((8, 3), np.float32)}, np.zeros(7, np.float32))
    for prefetch in (0, 2):
        closed = []
        loader = functools.partial(closing, closed, itertools.repeat(bad))
        with pytest.raises(ValueError, match=r"batch\['labels'\]") as caught:
            train(model, loader, prefetch=prefetch)
        assert caught.value.state is not None
        caught.value.batches.close()
        assert closed == [1] and in_advance() == 0


def test_how_many_batches_an_epoch_has_is_known_of_one():
    for data, epochs, hint in ([1, 2], 1, 2), ([], 1, 0), ([1], 2, -1), (once(), 1, -1):
        assert operator.length_hint(Epochs("data", data, epochs), -1) == hint


# What is refused

ONCE = "is a generator, which can be iterated only once"


def once():
    yield from pairs()


def always(data):
    return lambda: data


@pytest.mark.parametrize("data, options, text", [
    (once(), {"epochs": 2}, f"train_data {ONCE}, but epochs=2 iterates it"),
    (once(), {"epochs": 3, "steps": 4}, f"train_data {ONCE}, but epochs=3"),
    (pairs(), {"eval_data": once()}, f"eval_data {ONCE}, but every evaluation"),
    (pairs(), {"eval_every": 2}, "eval_every=2 needs an evaluation, and there is none"),
    (pairs(), {"checkpointer": tj.Checkpointer("a", best="loss")}, "best=loss needs"),
    (pairs()[0], {}, "train_data is one batch (a dict), but must be"),
    (arrays(8)[0], {}, "train_data is one batch (a dict), but must be"),
    (pairs(), {"eval_data": arrays(8)}, "eval_data is one batch (a dict), but"),
    (7, {}, "train_data is an int, but must be an iterable of batches"),
    (pairs(), {"variables": {"w": 1.0}},
        "state is a dict, not a tj.TrainState. Make one"),
    (pairs(), {"eval_data": pairs(), "eval_batches": pairs()},
        "eval_data and eval_batches= exclude each other. Pass only"),
    (pairs(), {"hooks": print}, "hooks=<built-in function print> must be a list"),
    (pairs(), {"steps": 1.5}, "steps=1.5 must be a whole number"),
    (pairs(), {"steps": -1}, "steps=-1 must be"),
    (pairs(), {"eval_data": pairs(), "early_stopping": tj.EarlyStopping("loss", 1)},
        "early_stopping without eval_every would never"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_anything_is_done(model, data, options, text):
    variables = model.init()
    with pytest.raises(ValueError, match=re.escape(text)):
        train(model, data, **{"variables": variables, **options})
    assert int(variables.step) == 0 and model.seen == []


@pytest.mark.parametrize("data, options, done, text", [
    (list, {}, 0, "batches is empty"),
    (list, {"steps": 3}, 0, "batches is empty"),
    (once(), {"steps": 4}, 3, "batches ended after step 3"),
    (lambda: 3, {}, 0, "train_data() is an int, but must be an iterable"),
    (lambda: arrays(8)[0], {}, 0, "train_data() is one batch (a dict), but must be"),
    (always(once()), {"epochs": 2}, 3, "gave no batches in epoch 2"),
    (always(once()), {"steps": 9}, 3, "gave no batches in epoch 2"),
    (lambda: [[1, 2]], {}, 0, "A batch is a list of two, which may be"),
    (lambda: [{"features": np.zeros(8), "labels": np.zeros(8)}], {}, 0,
        "A batch is a dict of two, which may be"),
])  # fmt: skip
def test_bad_data_is_told_of_and_nothing_is_lost(model, data, options, done, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        train(model, data, **options)
    assert int(caught.value.state.step) == done


def test_what_is_a_pair():
    one = np.zeros(2)
    two = np.ones(2)
    table = [
        ((one, two), {"features": one, "labels": two}),
        (({"x": one}, {"y": two}), {"features": {"x": one}, "labels": {"y": two}}),
        ((one, None), {"features": one}),
        ((one, two, one), {"features": (one, two, one)}),
        (Pair(one, two), {"features": Pair(one, two)}),
        ({"x": one}, {"features": {"x": one}}),
        ([one], {"features": [one]}),
    ]
    for element, expected in table:
        made = as_batch(element)
        assert jax.tree.structure(made) == jax.tree.structure(expected)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (made, expected))))
    assert as_batch((one, two), with_labels=False) == {"features": one}


@pytest.mark.parametrize("form, options", [
    ("pairs", {"prefetch": 2}),
    ("features", {"prefetch": 0}),
    ("function", {"prefetch": 1}),
    ("dataset", {"prefetch": 2}),
    ("pairs", {"per_example": True}),
    ("an error", {"prefetch": 2}),
], ids="pairs features function dataset per_example an_error".split())  # fmt: skip
def test_predictions_are_in_order_and_without_padding(model, form, options):
    batches = pairs(45)
    error = LookupError("gone")
    data = {
        "pairs": batches,
        "features": [features for features, _ in batches],
        "function": lambda: iter(batches),
        "dataset": model.strategy.distribute_dataset(batches, remainder="pad"),
        "an error": lambda: closing([], batches, error),  # which comes after them
    }[form]
    outputs = []
    told = []
    try:
        for output in tj.estimator.predict(model, model.init(), data, **options):
            outputs.append(output)
    except LookupError as found:
        told.append(found)
    assert told == [error] * (form == "an error")
    assert all(isinstance(output["y"], np.ndarray | np.generic) for output in outputs)
    each = options.get("per_example", False)
    sizes = [len(np.atleast_1d(output["y"])) for output in outputs]
    assert sizes == ([1] * 45 if each else [16, 16, 13])
    assert outputs[0]["double"].shape == ((3,) if each else (16, 3))
    x = np.concatenate([features["x"] for features, _ in batches]).astype(np.float64)
    put = np.stack if each else np.concatenate
    got = {name: put([output[name] for output in outputs]) for name in outputs[0]}
    y = x @ np.array([0.5, -1.0, 2.0])
    np.testing.assert_allclose(got["y"], y, rtol=8 * EPS, atol=8 * EPS)
    np.testing.assert_array_equal(got["double"], 2 * x)


def test_several_rows_of_an_example_are_not_handed_to_others():
    # Nor are variables a state.
    def model_fn(variables, features, labels, mode):
        outputs = {"one": features, "two": jnp.repeat(features, 2)}
        return tj.estimator.ModelSpec(mode, predictions=outputs)

    model = tj.estimator.replicate_model_fn(model_fn, devices=tj.OneDevice())
    start = {"w": np.float32(0)}
    [whole] = tj.estimator.predict(model, start, [np.ones(3)])
    assert whole["two"].tolist() == [1] * 6
    rows = tj.estimator.predict(model, start, [np.ones(3)], per_example=True)
    with pytest.raises(ValueError, match=r"predictions\['two'\]\": 6"):
        next(rows)


def test_endless_data_gives_endless_predictions(model):
    taken = []
    closed = []

    def counted():
        for number in itertools.count():
            taken.append(number)
            yield {"x": np.full((16, 3), number, np.float32)}

    endless = functools.partial(closing, closed, counted())
    options = {"prefetch": 2}
    made = tj.estimator.predict(model, model.init(), endless, **options)
    assert taken == []  # nothing before it is asked for
    for number, output in zip(range(5), made, strict=False):
        assert output["double"].flat[0] == 2 * number
    time.sleep(0.1)
    # 5 given, 1 more that runs, 2 that wait.
    assert len(taken) <= 5 + 1 + 2
    made.close()
    assert closed == [1] and in_advance() == 0


@pytest.mark.parametrize("data, options, text", [
    (7, {}, "data is an int, but must be an iterable"),
    (arrays(8)[0], {}, "data is one batch (a dict), but must be"),
    ([], {"prefetch": -1}, "prefetch=-1 must be a whole number >= 0"),
])  # fmt: skip
def test_bad_predictions_are_refused_at_once(model, data, options, text):
    for call in (tj.estimator.predict, tj.estimator.evaluate):
        with pytest.raises(ValueError, match=re.escape(text)):
            call(model, model.init(), data, **options)


def lines_model(**options):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(w):
            return tj.Weighted.mean((w * features - labels) ** 2, tower.weight)

        if mode is tj.estimator.Mode.EVAL:
            errors = tj.Weighted.mean(features * labels, tower.weight)
            return tj.estimator.ModelSpec(
                mode, loss=loss_fn(variables.params), eval_metrics={"product": errors}
            )
        loss, train_op = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    model = tj.estimator.replicate_model_fn(
        model_fn, devices=tj.Mirrored(towers=4), **options
    )
    return model, tj.TrainState.create(np.float32(0.5), optimizer)


@pytest.mark.slow
def test_evaluate_is_over_all_rows_however_they_are_cut():
    model, variables = lines_model()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 23)).astype(np.float32)
    exact = np.float64(0.5) * x - y
    expected = {"loss": (exact**2).mean(), "product": (np.float64(x) * y).mean()}
    for cut in ([23], [7, 7, 9], [1, 22]):
        ends = np.cumsum([0, *cut])
        data = [(x[a:b], y[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        found = tj.estimator.evaluate(model, variables, data)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    with pytest.raises(ValueError, match="no batches to evaluate"):
        tj.estimator.evaluate(model, variables, [])
    with pytest.raises(
        ValueError, match="model=.* cannot be used here: it has no eval_step"
    ):
        tj.estimator.evaluate(lambda: None, variables, [(x, y)])


def test_options_of_the_step_reach_it():
    class Asked:
        def train_step(self, **options):
            raise InterruptedError(options)

    given = {"micro_batches": 2, "guard": "gradients"}
    given |= {"on_nonfinite": "skip", "donate": False}
    variables = tj.TrainState.create(np.float32(0), optax.sgd(0.1))
    with pytest.raises(InterruptedError) as raised:
        tj.estimator.train_and_evaluate(
            Asked(), [], variables=variables, progress=False, **given
        )
    assert raised.value.args == (given,)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_skipped_and_training_again_compiles_nothing():
    model, variables = lines_model()
    x = np.ones(8, np.float32)
    data = [(x, x), (x, x * np.nan), (x, x)]
    expected = 0.5
    for _ in range(2):
        variables, history = tj.estimator.train_and_evaluate(
            model, data, variables=variables, on_nonfinite="skip", progress=False
        )
        assert history.skipped == (int(variables.step) - 1,)
        for _ in range(2):
            expected += 0.1 * 2 * (1 - expected)
        np.testing.assert_allclose(variables.params, expected, rtol=1e-6)
    step = model.train_step(on_nonfinite="skip")
    assert step is model.train_step(on_nonfinite="skip")
    assert len(step.programs.compiled) == 1
    assert model.train_step() is not step
