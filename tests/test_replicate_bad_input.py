"""Each mistake with a model function gets one clear error, and loses nothing."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused as law

import towerjax as tj

TWO = ("cpu:0", "cpu:1")
SUM, MEAN = tj.estimator.LossReduction.SUM, tj.estimator.LossReduction.MEAN
EXACT = tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS
OPTIMIZER = tj.estimator.TowerOptimizer(optax.sgd(0.1))
TRAIN, EVAL, PREDICT = tj.estimator.Mode
HERE = r"test_replicate_bad_input\.py"


def squares(params, features, labels, tower):
    return tj.Weighted.mean((features @ params["w"] - labels) ** 2, tower.weight)


def model_fn(variables, features, labels, mode, tower):
    loss_fn = functools.partial(squares, features=features, labels=labels, tower=tower)
    predictions = {"x": features}
    if mode is PREDICT:
        return tj.estimator.ModelSpec(mode, predictions)
    if mode is EVAL:
        return tj.estimator.ModelSpec(mode, predictions, loss_fn(variables.params))
    loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
    return tj.estimator.ModelSpec(mode, predictions, loss, train_op)


def start(optimizer=OPTIMIZER, **more):
    params = {"w": np.array([1.0, 2.0, 3.0], np.float32), "b": np.float32(0)}
    return tj.TrainState.create(params, optimizer, **more)


def rows(count, *width):
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, *width)).astype(np.float32)


def replicated(fn=model_fn, reduction=EXACT, towers=2, devices=None, **options):
    names = TWO[: devices or min(towers, 2)]
    strategy = tj.Mirrored(names, towers=towers)
    return tj.estimator.replicate_model_fn(fn, reduction, strategy, **options)


def refused(names, text, model, variables, *call, error=ValueError):
    """Nothing is compiled and nothing is lost."""
    return law(names, lambda: model(variables, *call), text, error)


def test_what_is_compiled_is_seen(compiled):
    model = replicated()
    model(start(), rows(4, 3), rows(4))
    assert any("(step)" in name for name in compiled)


X, Y = rows(4, 3), rows(4)
FIXED = {"w": np.zeros(3, np.float32), "ids": np.arange(3)}
EXTRA = r"params\['ids'\] is int.*TrainState\.create\(\.\.\., extra=.*tower\.extra"
BATCH = r"batch .* is a {}; write \{{'features': .*train_and_evaluate"
PAIR, DICT = [(X, Y)], [{"x": X, "y": Y}]
WRAP, SPEC = tj.estimator.replicate_model_fn, tj.estimator.ModelSpec
Kind = tj.estimator.LossReduction
ABSENT = WRAP(model_fn, devices=["cpu:0", "cpu:77"])
WEIGHTED = tj.Weighted(start().params, np.float32(4))


def evaluate(data):
    return lambda: tj.evaluate(replicated().eval_step(), start(), data)


def run(data):
    return lambda: tj.run(replicated().train_step(), start(), data, progress=False)


def wrap(*fn, **options):
    return lambda: WRAP(*fn or (model_fn,), **options)


def of(optimizer):
    return lambda: tj.estimator.TowerOptimizer(optimizer)


# What is refused where a model function is wrapped and its parts are made.
# fmt: off
MISTAKES = {
    "parameters of ids": (lambda: tj.TrainState.create(FIXED, OPTIMIZER), EXTRA),
    "a gradient of ids": (  # any tree, of which JAX said less
        lambda: OPTIMIZER.compute_gradients(lambda p: p["w"].sum(), FIXED), EXTRA),
    "a weighted gradient": (lambda: OPTIMIZER.apply_gradients(
            WEIGHTED, start().opt_state, start().params),
        r"tj\.value_and_grad.*pass grads\.sum, and"),
    "a pair to evaluate": (evaluate(PAIR), BATCH.format("tuple")),
    "a dict to evaluate": (evaluate(DICT), BATCH.format("dict")),
    "a pair to train": (run(PAIR), BATCH.format("tuple")),
    "a dict to train": (run(DICT), BATCH.format("dict")),
    "reduction none": (wrap(loss_reduction=Kind.NONE),
        r"Tower losses need to be reduced in some way, yet none reduction is"
        r" specified\. Write tj\.estimator\.LossReduction\.SUM_BY_NONZERO_WEIGHTS"),
    "reduction text": (wrap(loss_reduction="sum"),
        r"loss_reduction='sum' is not a tj\.estimator\.LossRed"),
    "reduction of towers": (wrap(loss_reduction=tj.Reduction.SUM),
        r"loss_reduction=Reduction\.SUM is not a tj\.estimator\.LossReduction"),
    "init on absent devices": (lambda: ABSENT.init(start()),
        "'cpu:77' is not on this machine"),
    "a call on absent devices": (lambda: ABSENT(start(), X, Y),
        "'cpu:77' is not on this machine"),
    "no function": (wrap(3), r"model_fn=3 is not a function"),
    "a spec": (wrap(SPEC(PREDICT, {"x": 1})), r"is not a function"),
    "no labels": (wrap(lambda variables, features, mode: None),
        r"unexpected keyword argument 'labels'\. Write def model_fn\(variables"),
    "no arguments": (wrap(lambda: None), r"too many positional arguments"),
    "no variables": (wrap(lambda features, labels, mode, params: None),
        r"multiple values for argument 'features'\. Write def model_fn\(variables"),
    "unknown": (wrap(lambda variables, features, labels, mode, rate: None),
        r"model_fn\(variables, features, labels, mode, rate\): .* argument: 'rate'"),
    "optimizer 3": (of(3), r"TowerOptimizer got 3; give it an optax transformation"),
    "optimizer None": (of(lambda: None),
        r"TowerOptimizer got None; give it an optax transformation"),
    "MultiSteps": (of(optax.MultiSteps(optax.sgd(1), 2)),
        r"MultiSteps\(\.\.\.\)\.gradient_transf"),
}
# fmt: on


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name, compiled):
    call, text = MISTAKES[name]
    law(compiled, call, text)


def test_unknown_parameters_with_a_default_are_the_functions_own():
    def fn(variables, features, labels, mode, scale=2.0):
        return tj.estimator.ModelSpec(mode, predictions={"x": features * scale})

    spec = replicated(fn)(np.float32(1), rows(2), None, PREDICT)
    np.testing.assert_array_equal(spec.predictions["x"], 2 * rows(2))


# What a model is called with.

CALLS = {
    "mode": (
        (X, Y, "train"),
        r"mode='train' must be one of Mode\.TRAIN, Mode\.EVAL, Mode.*The order is"
        r" model\(variables, features, labels, mode",
    ),
    "labels shorter": ((X, Y[:2], TRAIN), r"got (.*, )?batch\['labels'\]: 2"),
    "params": ((X, Y, TRAIN, {"rate": 1}),
        r"params was given, but model_fn has no parameter 'params'.*leave params out"),
    "config": ((X, Y, TRAIN, None, 3),
        r"config was given, but model_fn has no parameter 'config'"),
}  # fmt: skip


@functools.cache
def in_use():
    """A model that has been called, and the variables that it was."""
    model = replicated()
    return model, model(model.init(start()), X, Y).train_op


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_malformed_calls_are_refused(name, compiled):
    call, text = CALLS[name]
    for model, variables in ((replicated(), start()), in_use()):
        refused(compiled, text, model, variables, *call)


@pytest.mark.slow
def test_a_batch_that_changes_is_refused_saying_what(compiled):
    model = replicated(max_programs=1)
    variables = model(start(), X, Y).train_op
    text = r"(?s)batch\['features'\].*was float32\[4, 3\] and is float32\[6, 3\]"
    refused(compiled, text, model, variables, rows(6, 3), rows(6))
    refused(compiled, r"max_programs=\.\.\. \(now 1\)", model, variables, X[:, :2], Y)
    text = r"batch\['labels'\] was float32\[4\] and is absent"
    refused(compiled, text, model, variables, X, None)
    model(variables, X, Y)  # nothing was lost
    model(variables, rows(6, 3), rows(6), EVAL)  # a mode has kinds of its own
    several = replicated(towers=1)
    several(variables, X, Y, EVAL)
    with pytest.warns(UserWarning, match="(?s)has changed.*compiles anew") as caught:
        several(variables, rows(6, 3), rows(6), EVAL)
    assert caught[0].filename == __file__


@dataclasses.dataclass(frozen=True)
class Frozen:
    table: np.ndarray


VALUES = {
    "array": (np.ones(3), r"^{} is an array.*put arrays into variables"),
    "on a device": ({"a": jnp.ones(())}, r"^{}\['a'\] is an array"),
    "deep": ({"a": [1, (np.float64(1), np.ones(2))]}, r"^{}\['a'\]\[1\]\[1\] is"),
    "set": ({"a": {1, 2}, "b": {}.keys()}, r"^{}\['b'\] is a dict_keys"),
    "in an object": (types.SimpleNamespace(table=np.ones(3)), "^{} is .* no hash"),
    "in a frozen one": (Frozen(np.ones(3)), "{}"),
}


@pytest.mark.parametrize("which", ["params", "config"])
@pytest.mark.parametrize("name", VALUES)
def test_values_that_a_program_cannot_be_compiled_for(name, which):
    def fn(variables, features, labels, mode, params, config):
        return tj.estimator.ModelSpec(mode, predictions={"x": features})

    value, text = VALUES[name]
    with pytest.raises(ValueError, match=text.format(which)):
        replicated(fn).predict_step(**{which: value})


LOCAL = {"n": tj.TowerLocal(np.zeros(3, np.float32), tj.Reduction.MEAN, "n")}


def test_tower_local_variables_need_one_copy_a_tower(compiled):
    mode = EVAL
    model = replicated()
    text = r"towers than 2: state.local\['n'\].* has \(3,\) copies.*model\.init"
    refused(compiled, text, model, start(local=LOCAL), X, Y, mode)
    other = replicated(towers=4)
    text = r"towers than 4: .* has \(2,\) copies.*tj\.towers\.restored_values\("
    two = model.init(start(local=LOCAL))
    refused(compiled, text, other, two, X, Y, mode)
    saved = tj.towers.saved_values(two)
    moved = tj.towers.restored_values(other.strategy, two, saved)
    assert moved.local["n"].value.shape == (4, 3)


# What a model function returns.


def of_loss(loss):
    """A function with that loss."""

    def fn(variables, features, labels, mode, tower):
        return tj.estimator.ModelSpec(
            mode, loss=loss(features, tower), train_op=variables
        )

    return fn


# fmt: off
RETURNS = {
    "nothing": (lambda v, x: None, r"called in Mode\.TRAIN and returned a NoneType"),
    "a dict": (lambda v, x: [("loss", 1.0)], "returned a list"),
    "another mode": (lambda v, x: tj.estimator.ModelSpec(PREDICT, {"x": x}),
        r"called in Mode\.TRAIN and returned a ModelSpec of Mode\.PREDICT"),
    "no loss": (lambda v, x: {"loss": None}, r"of Mode\.\w+ needs loss;"),
    "predictions an array": (lambda v, x: {"predictions": x},
        r"predictions is a .*, which has no names; return a dict"),
    "exports an output": (
        lambda v, x: {"export_outputs": tj.estimator.PredictOutput(x)},
        r"export_outputs is a PredictOutput, which has no names"),
    "export of another class": (lambda v, x: {"export_outputs": {"a": x}},
        r"export_outputs\['a'\] is a .*; write tj\.estimator\.PredictOutput, Regres"),
    "hooks a function": (lambda v, x: {"hooks": print},
        r"hooks=.* must be a list: write hooks="),
    "hooks no functions": (lambda v, x: {"hooks": (1,)},
        r"hooks\[0\]=1 is not a function"),
    "a prediction of text": (lambda v, x: {"predictions": {"p": "cat"}},
        r"predictions\['p'\] is a str: "),
    "rows": (
        lambda v, x: {"predictions": {"ok": x, "bad": x[:1].sum(0), "sum": x.sum()}},
        r"each leaf has 2 rows \(or a multiple\), but predictions\['bad'\] has shape"
        r" \(3,\); predictions\['sum'\] has shape \(\)\..* jnp\.full\(tower\.rows, x\)",
    ),
    "what minimize returns": (lambda v, x: {"train_op": (x.sum(), v)},
        r"a pair of a loss.* loss, train_op = optimizer\.minimize\(loss_fn, variables"),
    "rows of exports": (
        lambda v, x: {"export_outputs": {"a": tj.estimator.RegressionOutput(x[0])}},
        r"export_outputs\['a'\]\.value has shape \(3,\)"),
}
# fmt: on


@pytest.mark.parametrize("name", RETURNS)
def test_specs_that_are_none_are_refused(name, compiled):
    returned, text = RETURNS[name]

    def fn(variables, features, labels, mode):
        found = returned(variables, features)
        if not isinstance(found, dict):
            return found
        parts = {"loss": 1.0, "train_op": variables, **found}
        return tj.estimator.ModelSpec(mode, **parts)

    refused(compiled, text, replicated(fn, SUM), start(), X, None, TRAIN)


def test_what_a_mode_needs_is_named(compiled):
    def fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode)

    for mode, names in [(TRAIN, "loss and train_op"), (EVAL, "loss"),
                        (PREDICT, "predictions")]:  # fmt: skip
        text = rf"A ModelSpec of {mode!r} needs {names};"
        refused(compiled, text, replicated(fn), start(), X, None, mode)


# fmt: off
LOSSES = {
    "bare": (
        EXACT,
        lambda x, t: x.sum(),
        r"returned a bare scalar.*loss_reduction=LossReduction\.SUM_BY_NONZERO_WEIGHTS"
        r" needs.*compute_weighted_loss.*compat='tf1'",
    ),
    "bare, of the batch's size": (tj.estimator.LossReduction.SUM_OVER_BATCH_SIZE,
        lambda x, t: x.sum(), r"bare scalar.*LossReduction\.SUM_OVER_BATCH_SIZE needs"),
    "weighted": (SUM, lambda x, t: tj.Weighted.mean(x, t.weight),
        r"returned a tj\.Weighted, .*loss_reduction=LossReduction\.SUM is of scalar"),
    "weighted mean": (MEAN, lambda x, t: tj.Weighted.mean(x, t.weight),
        r"loss_reduction=LossReduction\.MEAN is of scalar losses"),
}
# fmt: on
ANYWHERE = {
    "vector": (
        SUM,
        lambda x, t: x[:, 0],
        r"loss is not a scalar: sum has shape \(2,\)",
    ),
    "integer": (SUM, lambda x, t: jnp.int32(1), "dtype int32, which has no gradient"),
    "negative": (EXACT, lambda x, t: tj.Weighted(x.sum(), -1.0), "must be >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LOSSES, *ANYWHERE])
def test_losses_that_are_none_are_refused(name, compiled):
    reduction, loss, text = (LOSSES | ANYWHERE)[name]
    for towers in (1, 2) if name in ANYWHERE else (2,):
        model = replicated(of_loss(loss), reduction, towers)
        refused(compiled, text, model, start(), rows(2 * towers, 3), None, EVAL)


def of_train_op(change):
    def fn(variables, features, labels, mode, tower):
        loss_fn = functools.partial(
            squares, features=features, labels=labels, tower=tower
        )
        loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=change(train_op))

    return fn


def with_params(state, **params):
    return dataclasses.replace(state, params={**state.params, **params})


TRAIN_OPS = {
    "dtype": (
        lambda s: with_params(s, b=s.params["b"].astype(jnp.bfloat16)),
        r"train_op\.params\['b'\] was float32\[\] and is bfloat16\[\]\. Look at"
        r" model_fn's train_op",
    ),
    "missing leaf": (lambda s: dataclasses.replace(s, params={"w": s.params["w"]}),
        r"train_op\.params\['b'\] was float32\[\] and is absent"),
    "params alone": (lambda s: s.params,
        r"train_op\['w'\] was absent and is float32\[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAIN_OPS)
def test_a_train_op_of_another_type_is_refused_by_name(name, compiled):
    change, text = TRAIN_OPS[name]
    model = replicated(of_train_op(change))
    refused(compiled, text, model, start(), X, Y)


@pytest.mark.slow
def test_towers_that_share_nothing_name_the_leaf_and_the_line(compiled):
    optimizer = optax.sgd(0.1)

    def bare(variables, features, labels, mode, tower):
        grads = jax.grad(
            lambda p: squares(p, features, labels, tower).value  # line of the rows
        )(variables.params)
        updates, opt_state = optimizer.update(grads, variables.opt_state)
        params = optax.apply_updates(variables.params, updates)
        after = dataclasses.replace(variables, params=params, opt_state=opt_state)
        loss = squares(params, features, labels, tower)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    for towers, devices in [(2, 1), (4, 2)]:
        model = replicated(bare, towers=towers, devices=devices)
        error = refused(
            compiled, "Please wrap optimizers with TowerOptimizer", model,
            start(optimizer), rows(8, 3), rows(8), error=tj.ReplicationError,
        )  # fmt: skip
        assert re.search(
            rf"train_op.*params\['w'\].*{HERE}:\d+", str(error), re.DOTALL
        ), str(error)
        assert "params['b']" not in str(error)  # has no gradient, so it is the same
    model = replicated(bare, towers=1)  # on one tower nothing is shared
    assert model(start(optimizer), X, Y).train_op is not None


OTHERS = {
    "adam": tj.estimator.TowerOptimizer(optax.adam(0.1)),
    "chain": optax.chain(optax.clip(1.0), tj.estimator.TowerOptimizer(optax.adam(0.1))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_optimizer_is_refused(name, compiled):
    model = replicated(towers=1)
    state = start(OTHERS[name])
    text = r"(?s)TowerOptimizer.*init.*tj\.TrainState\.create\(params, optimizer\)"
    refused(compiled, text, model, state, X, Y)


def test_an_update_without_its_loss_is_refused(compiled):
    def fn(variables, features, labels, mode, tower):
        def total(params):
            return squares(params, features, labels, tower).sum

        grads = jax.grad(total)(variables.params)
        updates, opt_state = OPTIMIZER.update(grads, variables.opt_state)
        params = optax.apply_updates(variables.params, updates)
        after = dataclasses.replace(variables, params=params, opt_state=opt_state)
        loss = squares(params, features, labels, tower)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    text = r"update got no loss.*optimizer\.update\(grads, .*loss=loss\)"
    refused(compiled, text, replicated(fn), start(), X, Y)


@pytest.mark.parametrize("kind", ["mean", "scalar", "stopped"])
def test_a_gradient_of_a_sum_where_towers_meet_is_not_the_originals(kind, compiled):
    def fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            out = features @ params["w"]
            middle = tower.reduce(tj.Reduction.SUM, out.sum()) / 8  # they meet
            middle = jax.lax.stop_gradient(middle) if kind == "stopped" else middle
            losses = (out - middle - labels) ** 2
            mean = tj.Weighted.mean(losses, tower.weight)
            return losses.mean() if kind == "scalar" else mean

        loss, grads = OPTIMIZER.compute_gradients(loss_fn, variables.params)
        given = grads, variables.opt_state, variables.params
        params, opt_state = OPTIMIZER.apply_gradients(*given, loss=loss)
        after = dataclasses.replace(variables, params=params, opt_state=opt_state)
        return SPEC(mode, loss=loss, train_op=after)

    model = replicated(fn, Kind.MEAN, compat="tf1")
    if kind == "mean":
        text = rf"towers meet in a loss, at .*{HERE}:\d+.*optimizer\.minimize\(loss_fn"
        refused(compiled, text, model, start(), X, Y)
    else:
        assert model(start(), X, Y).train_op is not None


# Where towers would part.


def test_an_update_on_some_towers_is_refused(compiled):
    def fn(variables, features, labels, mode, tower):
        loss_fn = functools.partial(
            squares, features=features, labels=labels, tower=tower
        )
        loss = loss_fn(variables.params)
        train_op = jax.lax.cond(
            tower.id == 0,
            lambda v: OPTIMIZER.minimize(loss_fn, v)[1],
            lambda v: v,
            variables,
        )
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    model = replicated(fn)
    error = refused(
        compiled, "Only some towers reach", model, start(), X, Y,
        error=tj.ReplicationError,
    )  # fmt: skip
    assert re.search(rf"under the cond at .*{HERE}:\d+", str(error)), str(error)


# Padding.

CARELESS = {
    "loss": (EVAL, r"loss\.sum does not depend on tower\.weight"),
    "train_op": (TRAIN, r"minimized\.sum, grads\['w'\]"),
    "local": (TRAIN, r"train_op\S* does not depend"),
    "metric": (EVAL, r"eval_metrics\['m'\]\S*sum does not depend"),
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", CARELESS)
def test_padding_that_nothing_masks_is_refused(name, compiled):
    mode, text = CARELESS[name]

    def fn(variables, features, labels, mode, tower):
        def masked(culprit):
            return None if culprit == name else tower.weight

        def loss_of(weight, params):
            return tj.Weighted.mean((features @ params["w"] - labels) ** 2, weight)

        loss = loss_of(masked("loss"), variables.params)
        metric = tj.Weighted.mean(features, masked("metric"))
        if mode is EVAL:
            return tj.estimator.ModelSpec(mode, loss=loss, eval_metrics={"m": metric})
        weight = masked("train_op")
        _, train_op = OPTIMIZER.minimize(functools.partial(loss_of, weight), variables)
        mean = tj.Weighted.mean(features[:, 0], masked("local")).value
        [local] = variables.local.values()
        local = {"n": dataclasses.replace(local, value=mean + local.value)}
        train_op = dataclasses.replace(train_op, local=local)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    model = replicated(fn)
    local = {"n": tj.TowerLocal(np.zeros(3, np.float32), tj.Reduction.MEAN)}
    variables = model.init(start(local=local))
    refused(compiled, text, model, variables, rows(7, 3), rows(7), mode)
    if name == "loss":  # where there was nothing to mask before
        model(variables, rows(8, 3), rows(8), mode)
        refused(compiled, text, model, variables, rows(7, 3), rows(7), mode)


# Metrics that are no states, and towers that run one after another.

METRICS = {
    "of the tower's rows": lambda x, tower: x.sum(),
    "a dict": lambda x, tower: {"deep": tj.Weighted(1.0, 1.0)},
    "a class": lambda x, tower: tj.Weighted,
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_cannot_be_merged_are_refused_by_name(name, compiled):
    def fn(variables, features, labels, mode, tower):
        metrics = {"fine": tj.Weighted(1.0, 1.0), "m": METRICS[name](features, tower)}
        loss = tj.Weighted.mean(features, tower.weight)
        return tj.estimator.ModelSpec(mode, None, loss, variables, metrics)

    text = r"eval_metrics\['m'\] is (.*tj\.Weighted|the class.* Return an object)"
    refused(compiled, text, replicated(fn), start(), X, None, EVAL)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", ["loss", "loss/0"])
def test_metrics_of_a_step_have_no_name_of_the_loss_or_a_term_of_it(name):
    def fn(variables, features, labels, mode, tower):
        first, second, _ = features.T
        loss = tj.Weighted.mean(first, tower.weight)
        loss += tj.Weighted.mean(second, tower.weight * first**2)
        metrics = {name: tj.Weighted(1.0, 1.0)}
        return tj.estimator.ModelSpec(mode, None, loss, variables, metrics)

    model = replicated(fn)
    for use in (model.train_step().check, model.eval_step()):
        with pytest.raises(ValueError, match=rf"\['{name}'\] is a name of .* the loss"):
            use(start(), {"features": X})


def in_turn(fn, devices):
    strategy = tj.Mirrored(TWO[:devices], towers=2, local="scan")
    return tj.estimator.replicate_model_fn(fn, EXACT, strategy)


@pytest.mark.slow
def test_towers_in_turn_cannot_meet_inside_a_jit(compiled):
    def fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            return squares(params, features, labels, tower)

        after = jax.jit(lambda v: OPTIMIZER.minimize(loss_fn, v)[1])(variables)
        return tj.estimator.ModelSpec(
            mode, loss=loss_fn(variables.params), train_op=after
        )

    text = r"TowerOptimizer\.update stands inside a jit.*wrap last.*local='vmap'"
    refused(compiled, text, in_turn(fn, 2), start(), X, Y)
    together = replicated(fn, devices=1)(start(), X, Y).train_op
    w = start().params["w"]
    expected = w - 0.2 * X.T @ (X @ w - Y) / len(X)
    np.testing.assert_allclose(together.params["w"], expected, rtol=1e-5)
