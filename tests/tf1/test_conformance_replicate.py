"""What the original promises of replicated model functions, with its file's numbers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance_table import Table, assert_equal, mirrored

import towerjax as tj
from towerjax.tf1.estimator.variables import variable_devices

WITHOUT_MEANING = {
    "optimizer.error.cross_tower_apply": "there is no second way to apply: outside of"
    " towers a TowerOptimizer is the wrapped one, as test_tower_optimizer.py shows"
}
# The original's own definitions depend on the number of towers.
WITHOUT_AUDIT = {
    "rmf.train.mean.2": "a mean over towers of sums, and compat='tf1'",
    "rmf.export.classification.both": "each tower returns a class of its own",
    "rmf.export.classification.classes_only": "each tower returns a class of its own",
}
TABLE = Table(
    "optimizer.error rmf.concat_dicts rmf.error rmf.eval rmf.export rmf.placement"
    " rmf.predict rmf.predictspec rmf.round_robin rmf.train",
    WITHOUT_MEANING,
    WITHOUT_AUDIT,
)
RATE = 1.0
SUM = tj.estimator.LossReduction.SUM
EXACT = tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS


def towers_of(case):
    """The case's number of towers."""
    id = case["id"]
    if ".single" in id or id in ("rmf.error.reduction_none", "rmf.placement.single_ps"):
        return 1
    return {"rmf.concat_dicts": 3, "rmf.round_robin.variables": 3}.get(id, 2)


def tower_losses(c, features, labels):
    return jnp.abs(features * c - labels).sum()


def model_fn_of(optimizer):
    """The model of the original's tests: one scalar, whose loss is a total."""

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            return tower_losses(params["c"], features, labels)

        predictions = features * variables.params["c"]
        outputs = {"predictions": {"probabilities": predictions}}
        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(mode, **outputs)
        hits = tj.Weighted.mean(predictions == labels, None)
        if mode is tj.estimator.Mode.EVAL:
            # The original casts its labels, 0.01 and 0.02, to booleans; we refuse to.
            auc = tj.metrics.auc(labels != 0, predictions)
            metrics = {"accuracy": hits, "auc": auc}
            loss = loss_fn(variables.params)
            return tj.estimator.ModelSpec(
                mode, loss=loss, eval_metrics=metrics, **outputs
            )
        loss, train_op = minimize(optimizer, loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op, **outputs)

    return model_fn


def minimize(optimizer, loss_fn, variables):
    """As TowerOptimizer.minimize, for any optimizer."""
    loss, grads = jax.value_and_grad(loss_fn)(variables.params)
    updates, opt_state = optimizer.update(grads, variables.opt_state, variables.params)
    params = optax.apply_updates(variables.params, updates)
    return loss, dataclasses.replace(variables, params=params, opt_state=opt_state)


def start(optimizer, **params):
    return tj.TrainState.create(
        {name: np.float64(x) for name, x in params.items()}, optimizer
    )


def arrays(given, *names):
    return [np.array(given[name], np.float64) for name in names]


def wrapped():
    return tj.estimator.TowerOptimizer(optax.sgd(RATE))


@TABLE.checks(
    "rmf.train.single", "rmf.train.single.plain_optimizer", "rmf.train.mean.2"
)
def check_one_step(case, strategy):
    # Of one tower nothing is shared, so that no reduction scales.
    optimizer = wrapped()
    kinds = [(SUM, "tf1"), (EXACT, None)]
    if case["id"].endswith("plain_optimizer"):
        optimizer = optax.sgd(RATE)
        kinds = kinds[1:]
    if case["id"].endswith("mean.2"):
        kinds = [(EXACT, "tf1"), (tj.estimator.LossReduction.MEAN, None)]
    features, labels = arrays(case["input"], "features", "labels")
    for reduction, compat in kinds:
        model_fn = model_fn_of(optimizer)
        model = tj.estimator.replicate_model_fn(
            model_fn, reduction, strategy, compat=compat, **TABLE.how(case)
        )
        # Another variable, without a gradient.
        spec = model(start(optimizer, c=10.0, unused=1.0), features, labels)
        assert_equal(spec.loss, case, case["expected"]["loss_before_step"])
        assert_equal(spec.train_op.params["c"], case, case["expected"]["c_after"])
        assert_equal(spec.train_op.params["unused"], case, 1.0)


@TABLE.checks("rmf.train.two_steps")
def check_two_steps(case, strategy):
    optimizer = wrapped()
    losses = []
    values = []
    model = tj.estimator.replicate_model_fn(model_fn_of(optimizer), SUM, strategy)
    variables = start(optimizer, c=10.0)
    for batch in case["input"]["batches"]:
        spec = model(variables, *arrays(batch, "features", "labels"))
        variables = spec.train_op
        losses.append(float(spec.loss))
        values.append(float(variables.params["c"]))
    assert_equal(losses, case, case["expected"]["losses"])
    assert_equal(values, case, case["expected"]["c_after_each"])


def two_losses(optimizer, calls):
    """Two losses, each minimized over its own variable."""

    def model_fn(variables, features, labels, mode, tower):
        params = dict(variables.params)
        slots = dict(variables.opt_state)
        loss = 0.0
        for name in calls(tower):

            def loss_fn(x):
                return tower_losses(x, features, labels)

            one, grad = optimizer.compute_gradients(loss_fn, params[name])
            params[name], slots[name] = optimizer.apply_gradients(
                grad, slots[name], params[name], loss=one
            )
            loss = loss + one
        after = dataclasses.replace(variables, params=params, opt_state=slots)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    return model_fn


def two_variables(optimizer):
    state = start(optimizer, c=10.0, d=2.0)
    slots = {name: optimizer.init(x) for name, x in state.params.items()}
    return dataclasses.replace(state, opt_state=slots)


@TABLE.checks("rmf.train.two_losses")
def check_two_losses(case, strategy):
    optimizer = wrapped()
    expected = case["expected"]
    fn = two_losses(optimizer, lambda tower: "cd")
    model = tj.estimator.replicate_model_fn(fn, SUM, strategy)
    features, labels = arrays(case["input"], "features", "labels")
    spec = model(two_variables(optimizer), features, labels)
    assert_equal(spec.loss, case, expected["loss_before_step"])
    assert_equal(spec.train_op.params["c"], case, expected["c_after"])
    assert_equal(spec.train_op.params["d"], case, expected["d_after"])
    assert int(spec.train_op.step) == 1  # one call is one step


@TABLE.checks("rmf.error.unequal_optimizer_calls")
def check_unequal_calls(case, strategy):
    # One program runs all towers, so that a Python branch cannot tell them apart, and
    # one of the program that would is refused before anything runs.
    optimizer = wrapped()

    def branch(tower):
        return "cd" if tower.id == 0 else "c"

    features, labels = arrays(case["input"], "features", "labels")
    fn = two_losses(optimizer, branch)
    model = tj.estimator.replicate_model_fn(fn, SUM, strategy)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        model(two_variables(optimizer), features, labels)
    assert "A tower function is traced once for all towers" in caught.value.__notes__[0]

    def model_fn(variables, features, labels, mode, tower):
        first = two_losses(optimizer, lambda tower: "c")
        both = two_losses(optimizer, lambda tower: "cd")
        return jax.lax.cond(
            tower.id == 0,
            lambda v: both(v, features, labels, mode, tower),
            lambda v: first(v, features, labels, mode, tower),
            variables,
        )

    model = tj.estimator.replicate_model_fn(model_fn, SUM, strategy)
    with pytest.raises(ValueError, match="Only some towers reach") as caught:
        model(two_variables(optimizer), features, labels)
    assert isinstance(caught.value, tj.ReplicationError)


@TABLE.checks("rmf.error.unwrapped_optimizer")
def check_unwrapped(case, strategy):
    [text] = case["expected"]["message_has"]
    optimizer = optax.sgd(RATE)
    features, labels = arrays(case["input"], "features", "labels")
    model = tj.estimator.replicate_model_fn(model_fn_of(optimizer), SUM, strategy)
    with pytest.raises(ValueError, match=text) as caught:
        model(start(optimizer, c=10.0), features, labels)
    assert re.search(r"train_op.*params.*'c'", str(caught.value), re.DOTALL)


@TABLE.checks("rmf.error.reduction_none")
def check_none(case, strategy):
    with pytest.raises(ValueError) as caught:
        tj.estimator.replicate_model_fn(
            model_fn_of(wrapped()), tj.estimator.LossReduction.NONE, strategy
        )  # at wrapping, before any call
    for text in case["expected"]["message_has"]:
        assert text in str(caught.value)


@TABLE.checks("rmf.eval.single")
def check_eval(case, strategy):
    optimizer = wrapped()
    features, labels = arrays(case["input"], "features", "labels")
    model = tj.estimator.replicate_model_fn(model_fn_of(optimizer), devices=strategy)
    spec = model(start(optimizer, c=10.0), features, labels, tj.estimator.Mode.EVAL)
    assert_equal(spec.loss, case, case["expected"]["loss"])
    accuracy = spec.eval_metrics["accuracy"].value
    assert_equal(accuracy, case, case["expected"]["accuracy"])
    auc = jax.device_get(spec.eval_metrics["auc"]).compute()
    assert_equal(auc, case, case["expected"]["auc"])


@TABLE.checks("rmf.predict.single")
def check_predict(case, strategy):
    optimizer = wrapped()
    [features] = arrays(case["input"], "features")
    for one in (strategy, mirrored(2)):
        model = tj.estimator.replicate_model_fn(model_fn_of(optimizer), devices=one)
        spec = model(
            start(optimizer, c=10.0), features, None, tj.estimator.Mode.PREDICT
        )
        expected = case["expected"]["predictions"]
        assert spec.predictions.keys() == expected.keys()
        assert_equal(spec.predictions["probabilities"], case, expected["probabilities"])


def predicted(fn, strategy, features, **options):
    """What it predicts of a variable of 0.25."""

    def model_fn(variables, features, labels, mode, tower):
        return fn(variables, features, mode, tower)

    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, **options)
    return model({"c": np.float64(0.25)}, features, None, tj.estimator.Mode.PREDICT)


@TABLE.checks("rmf.predictspec")
def check_predict_spec(case, strategy):
    def fn(variables, features, mode, tower):  # two rows for each example
        rows = jnp.repeat(features[:, 0], 2) + variables["c"]
        return tj.estimator.ModelSpec(mode, predictions={"probabilities": rows})

    spec = predicted(fn, strategy, *arrays(case["input"], "features"))
    expected = case["expected"]["predictions"]["probabilities"]
    assert_equal(spec.predictions["probabilities"], case, expected)


@TABLE.checks("rmf.concat_dicts")
def check_concat(case, strategy):
    # One program has the same keys on all towers, and sizes that divide: the tower's
    # examples are its rows, with padding where it has fewer.
    towers = case["input"]
    keys = sorted(case["expected"])
    rows = np.arange(3.0)

    def fn(variables, features, mode, tower):
        return tj.estimator.ModelSpec(mode, predictions={key: features for key in keys})

    spec = predicted(fn, strategy, rows)
    assert list(spec.predictions) == keys and len(towers) == strategy.num_towers
    for x in spec.predictions.values():
        assert x.tolist() == rows.tolist()
    # Ragged towers' values are joined outside of a step.
    for key in "ab":
        of_towers = [np.float32(tower.get(key, [])) for tower in towers]
        joined = np.concatenate(strategy.unwrap(tj.PerTower(tuple(of_towers))))
        assert_equal(joined, case, case["expected"][key])


@TABLE.checks("rmf.export.predict")
def check_export_predict(case, strategy):
    def fn(variables, features, mode, tower):
        outputs = {"probabilities": features * 10.0}
        exports = {"predict_outputs": tj.estimator.PredictOutput(outputs)}
        return tj.estimator.ModelSpec(mode, predictions=outputs, export_outputs=exports)

    spec = predicted(fn, strategy, *arrays(case["input"], "features"))
    expected = case["expected"]["predict_outputs"]
    for name, numbers in expected.items():
        outputs = spec.export_outputs["predict_outputs"].outputs
        assert_equal(outputs[name], case, numbers)


def classes_of_tower(scores):
    """The tower's classes as a scalar for each tower: strings become their numbers."""

    def fn(variables, features, mode, tower):
        output = tj.estimator.ClassificationOutput(
            scores=features * 10.0 if scores else None, classes=jnp.atleast_1d(tower.id)
        )
        exports = {"classification": output}
        predictions = {"rows": features}
        return tj.estimator.ModelSpec(
            mode, predictions=predictions, export_outputs=exports
        )

    return fn


@TABLE.checks("rmf.export.classification.both")
def check_export_both(case, strategy):
    given = case["input"]
    expected = case["expected"]
    for compat in ("tf1", None):
        how = {"compat": compat, **TABLE.how(case)}
        [features] = arrays(given, "features")
        spec = predicted(classes_of_tower(True), strategy, features, **how)
        output = spec.export_outputs["classification"]
        assert_equal(output.scores, case, expected["scores"])
        shape = (2,) if compat is None else (2, 1)
        assert output.classes.shape == shape
        names = [given["classes_per_tower"][i] for i in output.classes.reshape(-1)]
        assert names == expected["classes"]


@TABLE.checks("rmf.export.classification.classes_only")
def check_export_classes(case, strategy):
    for compat in ("tf1", None):
        features = np.array([0.01, 0.002])
        how = {"compat": compat, **TABLE.how(case)}
        spec = predicted(classes_of_tower(False), strategy, features, **how)
        output = spec.export_outputs["classification"]
        assert output.scores is None
        given = case["input"]["classes_per_tower"]
        names = [given[i] for i in output.classes.reshape(-1)]
        assert names == case["expected"]["classes"]


# Where variables lie. The original's devices are GPUs; these are the same numbers.


def kept_on(devices, names, policy):
    """Which device holds each variable between steps, in the order of names."""
    strategy = tj.Mirrored(devices=[f"cpu:{i}" for i in devices])

    def model_fn(variables, features, labels, mode, tower):
        return tj.estimator.ModelSpec(mode, predictions={"x": features})

    model = tj.estimator.replicate_model_fn(
        model_fn, devices=strategy, variable_placement=policy
    )
    variables = model.init({name: np.float32(1) for name in names})
    return {name: [d.id for d in x.devices()] for name, x in variables.items()}


def numbers(names):
    return [int(name.removeprefix("gpu:")) for name in names]


@TABLE.checks("rmf.placement.round_robin")
def check_round_robin(case, strategy):
    expected = numbers(case["expected"]["variables_on"])
    names = [f"v{i}" for i in range(case["input"]["n_variables"])]
    policy = tj.estimator.VariablePlacement.ROUND_ROBIN
    assert list(kept_on(expected[:4], names, policy).values()) == [
        [i] for i in expected
    ]


@TABLE.checks("rmf.round_robin.variables")
def check_round_robin_variables(case, strategy):
    given = case["input"]
    expected = case["expected"]
    devices = numbers(given["devices"])
    policy = tj.estimator.VariablePlacement.ROUND_ROBIN
    found = kept_on(devices, given["variables"], policy)
    placement = expected["placement"]
    assert found == {name: numbers([placement[name]]) for name in placement}
    strategy = tj.tf1.MirroredStrategy(devices=[f"cpu:{i}" for i in devices])
    ids = strategy.call_for_each_tower(lambda tower: tower.id)
    towers_on = [shard.device.id for shard in ids.values.addressable_shards]
    assert towers_on == numbers(expected["tower_loss_devices"])


@TABLE.checks("rmf.placement.single_ps")
def check_one_holder(case, strategy):
    # The one holder is the only GPU, or the host's memory; variables lie there alone.
    names = case["input"]["variables"]
    policy = tj.estimator.VariablePlacement.ON_ONE_DEVICE
    assert set(map(tuple, kept_on([1, 2], names, policy).values())) == {(0,)}

    @dataclasses.dataclass(frozen=True)
    class Gpu:
        platform: str = "gpu"
        process_index: int = 0

    class OneGpu:
        jax_devices = (Gpu(), *jax.devices("cpu")[:2])

    assert variable_devices(OneGpu, policy) == [Gpu()]


@pytest.mark.slow
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    with jax.enable_x64(True):
        TABLE.run(id, towers_of, one_device)
