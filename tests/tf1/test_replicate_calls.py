"""How a replicated model is called, what its function is given, and what comes back."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored as towers
from layouts import rows

import towerjax as tj
from towerjax.tf1.estimator.model_fn import ModelFn, static_keys

Kind = tj.estimator.LossReduction
SUM = Kind.SUM
EXACT = Kind.SUM_BY_NONZERO_WEIGHTS
OPTIMIZER = tj.estimator.TowerOptimizer(optax.sgd(0.1))


def squares(params, features, labels, tower):
    return tj.Weighted.mean((features @ params["w"] - labels) ** 2, tower.weight)


def model_fn(variables, features, labels, mode, tower):
    loss_fn = functools.partial(squares, features=features, labels=labels, tower=tower)
    if mode is tj.estimator.Mode.TRAIN:
        loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)
    return tj.estimator.ModelSpec(mode, loss=loss_fn(variables.params))


def start(optimizer=OPTIMIZER, width=3, **more):
    return tj.TrainState.create({"w": rows(width, seed=5)}, optimizer, **more)


def predicting(
    fn, strategy, features, labels=None, *, mode=tj.estimator.Mode.PREDICT, **options
):
    """The spec of a function of the rows alone."""

    def model_fn(variables, features, labels, mode, tower):
        return tj.estimator.ModelSpec(mode, **fn(features, labels, tower))

    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, **options)
    return model({"w": np.float32(1)}, features, labels, mode)


@pytest.mark.parametrize("mode", [tj.estimator.Mode.EVAL, tj.estimator.Mode.PREDICT])
def test_an_error_of_missing_labels_says_that_there_are_none(mode):
    def model_fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode, loss=features - labels)

    model = tj.estimator.replicate_model_fn(model_fn, devices=tj.OneDevice())
    with pytest.raises(TypeError) as caught:
        model({"w": np.float32(1)}, np.ones(2, np.float32), None, mode)
    assert any(f"labels is None in {mode!r}" in note for note in caught.value.__notes__)


def test_labels_are_none_where_none_are_given():
    def fn(features, labels, tower):
        assert labels is None
        return {"predictions": {"x": features}}

    x = rows(5, 2)
    spec = predicting(fn, towers(2, 1, executor="pmap"), x)
    np.testing.assert_array_equal(spec.predictions["x"], x)


def test_no_predictions_come_back_where_none_are_made():
    spec = predicting(lambda *_: {"predictions": {}}, towers(2, 1), rows(4))
    assert spec.predictions == {}


@pytest.mark.slow
def test_features_and_labels_are_any_trees():
    def fn(features, labels, tower):
        a = features["a"]
        (b, c) = features["rest"]
        assert a.shape[0] == b.shape[0] == labels[0]["y"].shape[0] <= 6
        total = a.sum(1) + b + c[:, 0, 0] + labels[0]["y"]
        tree = {"a": a, "rest": [b, c]}
        thrice = jnp.repeat(a[:, 0], 3)
        pairs = jnp.stack([a, -a], 1).reshape(-1, 2)
        outputs = {"total": total, "tree": tree, "thrice": thrice, "pairs": pairs}
        return {"predictions": outputs}

    a = rows(5, 2)
    b = rows(5, seed=1)
    c = rows(5, 2, 3, seed=2)
    y = rows(5, seed=3)
    features = {"a": a, "rest": (b, c)}
    found = predicting(fn, towers(4, 2), features, [{"y": y}]).predictions
    expected = a.sum(1) + b + c[:, 0, 0] + y
    np.testing.assert_allclose(found["total"], expected, rtol=1e-5)
    np.testing.assert_array_equal(found["tree"]["a"], a)
    np.testing.assert_array_equal(found["tree"]["rest"][1], c)
    np.testing.assert_array_equal(found["thrice"], np.repeat(a[:, 0], 3))
    pairs = np.stack([a, -a], 1).reshape(-1, 2)
    np.testing.assert_array_equal(found["pairs"], pairs)


def classes_of(features, ids):
    return {
        "scores": tj.estimator.ClassificationOutput(scores=features),
        "ids": tj.estimator.ClassificationOutput(classes=ids),
        "both": tj.estimator.ClassificationOutput(features, ids),
        "named": tj.estimator.ClassificationOutput(features, ["cat", "dog"]),
        "names": tj.estimator.ClassificationOutput(classes=("cat", "dog")),
        "predict": tj.estimator.PredictOutput({"x": features, "deep": [ids]}),
        "bare": tj.estimator.PredictOutput(ids),
        "regression": tj.estimator.RegressionOutput(features[:, 0]),
    }


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    ("count", "devices", "compat", "size", "executor"),
    [(4, 2, "tf1", 5, "shard_map"), (2, 1, None, 5, "pmap")],
)
def test_exports_are_joined_row_by_row(count, devices, compat, size, executor):
    def fn(features, labels, tower):
        ids = jnp.int32(10 * features[:, 0]) + 100 * tower.id
        exports = classes_of(features, ids)
        return {"predictions": {"x": features}, "export_outputs": exports}

    x = rows(size, 2)
    strategy = towers(count, devices, executor=executor)
    how = {"compat": compat, "audit": False}  # classes have the tower's number
    exports = predicting(fn, strategy, x, **how).export_outputs
    each = -(-size // count)
    whole = 100 * (np.arange(each * count) // each)
    whole[:size] += np.int32(10 * x[:, 0])
    for name in ("scores", "both", "named"):
        np.testing.assert_array_equal(exports[name].scores, x)
    assert exports["scores"].classes is None and exports["ids"].scores is None
    for name in ("ids", "both"):
        classes = np.asarray(exports[name].classes)
        if compat == "tf1":  # stacked: each tower's, with its padding
            assert classes.shape == (count, each)
            classes = classes.reshape(-1)[:size]
        np.testing.assert_array_equal(classes, whole[:size])
        assert classes.dtype == np.int32
    assert exports["named"].classes == exports["names"].classes == ("cat", "dog")
    assert exports["names"].scores is None
    np.testing.assert_array_equal(exports["predict"].outputs["x"], x)
    np.testing.assert_array_equal(exports["predict"].outputs["deep"][0], whole[:size])
    np.testing.assert_array_equal(exports["bare"].outputs, whole[:size])
    np.testing.assert_array_equal(exports["regression"].value, x[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mode"),
    [(4, 2, tj.estimator.Mode.TRAIN), (2, 1, tj.estimator.Mode.EVAL)],
)
def test_train_and_eval_hand_back_predictions_and_exports(count, devices, mode):
    def model_fn(variables, features, labels, mode, tower):
        outputs = {
            "predictions": {"x": features, "id": jnp.full(len(features), tower.id)},
            "export_outputs": {"x": tj.estimator.RegressionOutput(features)},
        }
        loss = tj.Weighted.mean(features, tower.weight)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=variables, **outputs)

    strategy = towers(count, devices)
    # A prediction is the tower's number.
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, audit=False)
    x = rows(7)
    spec = model({"w": np.float32(1)}, x, None, mode)
    np.testing.assert_array_equal(spec.predictions["x"], x)
    np.testing.assert_array_equal(spec.export_outputs["x"].value, x)
    each = -(-7 // count)
    np.testing.assert_array_equal(spec.predictions["id"], np.arange(7) // each)
    assert (spec.train_op is None) == (mode is tj.estimator.Mode.EVAL)


@pytest.mark.slow
def test_hooks_come_back_from_every_mode():
    def first(step, metrics):
        return None

    def second(step, metrics):
        return None

    def model_fn(variables, features, labels, mode, tower):
        loss = tj.Weighted.mean(features, tower.weight)
        return tj.estimator.ModelSpec(
            mode, {"x": features}, loss, variables, hooks=[first, second]
        )

    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(1))
    for mode in (tj.estimator.Mode.TRAIN, tj.estimator.Mode.PREDICT):
        for _ in range(2):  # as traced, and as compiled before
            spec = model(np.float32(1), rows(4), None, mode)
            assert spec.hooks == (first, second) and spec.mode is mode


@pytest.mark.slow
def test_one_tower_alone_is_neither_split_nor_scaled():
    # A Weighted loss says what it is divided by, under any reduction.
    x = rows(5, 3)
    y = rows(5, seed=1)
    w = np.asarray(start().params["w"])
    errors = x @ w - y
    expected = w - 0.1 * 2 * (x * errors[:, None]).mean(0)
    for kind, compat in ((SUM, "tf1"), (tj.estimator.LossReduction.MEAN, None)):
        model = tj.estimator.replicate_model_fn(
            model_fn, kind, towers(1), compat=compat
        )
        spec = model(start(), x, y)
        np.testing.assert_allclose(spec.train_op.params["w"], expected, rtol=1e-5)
        np.testing.assert_allclose(spec.loss.value, (errors**2).mean(), rtol=1e-5)


@pytest.mark.slow
def test_a_tower_without_weights_counts_its_penalty_as_the_original_did():
    def of_weights(variables, features, labels, mode, tower):
        def loss_fn(w):
            errors = w - jnp.ones_like(features)
            return tj.Weighted.mean(errors**2, features) + tj.penalty(w**2 / 2)

        loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    how = {"compat": "tf1", "audit": False}  # which depends on the towers
    model = tj.estimator.replicate_model_fn(of_weights, EXACT, towers(2), **how)
    start = model.init(tj.TrainState.create(np.float32(3), OPTIMIZER))
    spec = model(start, np.float32([0, 1]))
    assert float(spec.loss.value) == (4.5 + 8.5) / 2
    np.testing.assert_allclose(spec.train_op.params, 3 - 0.1 * (3 + 7) / 2, rtol=1e-6)


def test_params_and_config_come_only_where_they_are_named():
    seen = []

    def telling(fn):
        @functools.wraps(fn)
        def model_fn(*args, mode, **kwargs):
            seen.append(fn(*args, mode=mode, **kwargs))
            return tj.estimator.ModelSpec(mode, predictions=kwargs["features"])

        return model_fn

    @telling
    def both(variables, features, labels, mode, params, config):
        return params, config

    @telling
    def defaults(variables, features, labels, mode, params="none", config="none"):
        return params, config

    neither = telling(lambda variables, features, labels, mode: ())
    anything = telling(lambda variables, features, labels, mode, **rest: sorted(rest))
    reordered = telling(lambda weights, *, mode, config, labels, features: config)
    given = {"params": {"rate": 0.5}, "config": ("a", 1)}
    for fn, arguments, expected in [
        (both, given, ({"rate": 0.5}, ("a", 1))),
        (both, {}, (None, None)),
        (defaults, {}, ("none", "none")),
        (defaults, given, ({"rate": 0.5}, ("a", 1))),
        (functools.partial(both, params=1, config=2), {}, (1, 2)),
        (defaults, {"params": 2}, (2, "none")),
        (functools.partial(both, params=1), {"config": 2}, (1, 2)),
        (functools.partial(both, params=1, config=2), {"params": 3}, (3, 2)),
        (neither, {}, ()),
        (anything, given, ["config", "params", "tower"]),
        (reordered, {"config": 3}, 3),
    ]:
        seen.clear()
        wrapped = ModelFn.of(fn)
        args = {"params": None, "config": None, **arguments}
        batch = {"features": {"x": rows(4)}}
        wrapped.call(None, batch, tj.estimator.Mode.PREDICT, "tower", args)
        assert seen == [expected]


def test_each_trace_has_params_of_its_own():
    seen = []

    def model_fn(variables, features, labels, mode, params, config):
        seen.append((copy.deepcopy(params), copy.deepcopy(config)))
        params["list"].append(len(seen))
        config.rate = 7
        return tj.estimator.ModelSpec(mode, predictions={"x": features})

    class Config:
        rate = 1

    params = {"list": [1]}
    config = Config()
    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(1), max_programs=2)
    for size in (4, 6, 4):
        model(
            np.float32(1), rows(size), None, tj.estimator.Mode.PREDICT, params, config
        )
    assert len(seen) >= 2  # one for each kind of batch
    assert all(one == {"list": [1]} and other.rate == 1 for one, other in seen)
    assert params == {"list": [1]} and config.rate == 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int
    rates: tuple = (0.5, 0.25)


PAIRS = {  # equal ones, and another
    "dict": (lambda: {"a": 1, "b": [2.0]}, {"a": 1, "b": [3.0]}),
    "names": (lambda: {"a": 1}, {"b": 1}),
    "type": (lambda: {"a": 1}, {"a": True}),
    "float": (lambda: {"a": 1}, {"a": 1.0}),
    "none": (lambda: None, {}),
    "sets": (lambda: {"a", "b", "c"}, {"a", "b"}),
    "frozen": (lambda: Frozen(3), Frozen(4)),
    "sign of 0": (lambda: 0.0, -0.0),
    "nan": (lambda: {"a": float("nan")}, {"a": np.float32("nan")}),
    "text": (lambda: "".join(["a", "b"]), "ba"),
    "list or tuple": (lambda: [1, 2], (1, 2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_other_params_have_another_key(name):
    make, other = PAIRS[name]
    assert static_keys({"params": make()}) == static_keys({"params": make()})
    assert static_keys({"params": make()}) != static_keys({"params": other})


@pytest.mark.slow
@pytest.mark.parametrize("which", ["params", "config"])
def test_params_that_change_after_a_call_change_later_calls_only(which, compiled):
    def model_fn(variables, features, labels, mode, params, config):
        factor = (params or config)["factor"]
        return tj.estimator.ModelSpec(mode, predictions={"x": features * factor})

    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(1), max_programs=2)

    def run(params, programs, size=4):
        compiled.clear()
        spec = model(np.float32(1), np.ones(size, np.float32), None,
                     tj.estimator.Mode.PREDICT, **{which: params})  # fmt: skip
        assert compiled.count("jit(step)") == programs
        return float(spec.predictions["x"][0])

    params = {"factor": 2.0}
    assert run(params, 1) == 2
    params["factor"] = 3.0
    assert run(params, 1) == 3
    # Equal to what the first call was given: the same, for a new kind of batch too.
    assert run({"factor": 2.0}, 0) == 2
    assert run({"factor": 2.0}, 1, size=6) == 2


def alive(tree):
    return not any(x.is_deleted() for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "donate", "executor"),
    [(1, 1, True, "shard_map"), (4, 2, True, "pmap")],
)
def test_only_what_lies_on_the_towers_is_donated(count, devices, donate, executor):
    strategy = towers(count, devices, executor=executor)
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, donate=donate)
    x = rows(8, 3)
    y = rows(8, seed=1)
    host = jax.device_get(start())
    kept = copy.deepcopy(jax.tree.map(np.asarray, host.params))
    made = start()
    for state in (host, made):  # copied, so never taken
        after = model(state, x, y).train_op
        assert alive(made)
    np.testing.assert_array_equal(host.params["w"], kept["w"])
    placed = model.init(made)
    assert alive(made)
    again = model(placed, x, y).train_op
    assert alive(placed) == (not donate)
    np.testing.assert_array_equal(again.params["w"], after.params["w"])
    if donate:
        with pytest.raises(ValueError, match="donated"):
            model(placed, x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "kind"),
    [*zip(tj.estimator.VariablePlacement, ["call", "step"], strict=False)],
)
def test_an_array_that_is_there_twice_is_not_donated(placement, kind):
    def pair_fn(variables, features, labels, mode, tower):
        def loss_fn(p):
            errors = features @ p["online"] - features @ p["target"] - labels
            return tj.Weighted.mean(errors**2, tower.weight)

        loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    pair = {"online": rows(3, seed=5), "target": rows(3, seed=6)}
    model = tj.estimator.replicate_model_fn(
        pair_fn, devices=towers(2), variable_placement=placement, donate=True
    )
    variables = model.init(tj.TrainState.create(pair, OPTIMIZER))
    online = variables.params["online"]
    both = dataclasses.replace(variables, params={"online": online, "target": online})
    x = rows(4, 3)
    y = rows(4)
    with pytest.raises(ValueError, match="target.*is the same array as.*online"):
        if kind == "call":
            model(both, x, y)
        else:
            model.train_step()(both, {"features": x, "labels": y})
    assert alive(both) and alive(variables)


@pytest.mark.slow
def test_devices_are_named_or_all_or_a_strategy():
    count = 2
    names = [f"cpu:{i}" for i in range(count)]
    for devices in (names, tuple(jax.devices()[:count]), tj.Mirrored(devices=names)):
        model = tj.estimator.replicate_model_fn(model_fn, devices=devices)
        assert model.strategy.num_towers == count
        assert model.strategy.placement.jax_devices == tuple(jax.devices()[:count])
    assert tj.estimator.replicate_model_fn(model_fn).strategy.num_towers == 8
