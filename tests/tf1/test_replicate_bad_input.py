"""Each mistake with a model function gets one clear error, and loses nothing.

A row is a call and its text; the law is that of `refusals`: it is refused before
anything is compiled, and what was alive lives on.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused

import towerjax as tj

est = tj.estimator
partial = functools.partial
Kind = est.LossReduction
Spec = est.ModelSpec
Mean = tj.Weighted.mean
EXACT = Kind.SUM_BY_NONZERO_WEIGHTS
OPTIMIZER = est.TowerOptimizer(optax.sgd(0.1))
TRAIN, EVAL, PREDICT = est.Mode
HERE = r"test_replicate_bad_input\.py:\d+"
NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(8, 3)).astype(np.float32)
Y = NUMBERS.normal(size=8).astype(np.float32)
LOCAL = {"n": tj.TowerLocal(np.zeros(3, np.float32), tj.Reduction.MEAN, "n")}


def start(optimizer=OPTIMIZER, **more):
    params = {"w": np.array([1.0, 2.0, 3.0], np.float32), "b": np.float32(0)}
    return tj.TrainState.create(params, optimizer, **more)


def squares(params, features, labels, tower):
    return Mean((features @ params["w"] - labels) ** 2, tower.weight)


def minimized(v, *batch):
    return OPTIMIZER.minimize(lambda params: squares(params, *batch), v)


def replicated(
    of=None, reduction=EXACT, towers=2, devices=2, tower_loop="vmap", **options
):
    """A model of ``of(variables, features, labels, tower)``: the parts of its spec."""

    def model_fn(variables, features, labels, mode, tower):
        given = variables, features, labels, tower
        if of is not None:
            found = of(*given)
            return Spec(mode, **found) if isinstance(found, dict) else found
        if mode is PREDICT:
            return Spec(mode, {"x": features})
        if mode is EVAL:
            return Spec(mode, loss=squares(variables.params, *given[1:]))
        loss, train_op = minimized(*given)
        return Spec(mode, loss=loss, train_op=train_op)

    names = ("cpu:0", "cpu:1")[: min(devices, towers)]
    strategy = tj.Mirrored(names, towers=towers, tower_loop=tower_loop)
    return est.replicate_model_fn(model_fn, reduction, strategy, **options)


def call(of=None, *more, rows=4, labels=True, mode=TRAIN, state=start, **options):
    """A call of a new model."""
    given = X[:rows], Y[:rows] if labels else None, mode, *more
    return lambda: replicated(of, **options)(state(), *given)


def evaluated(**parts):
    parts.setdefault("loss", lambda v, x: x.sum())
    of = lambda v, x, y, tower: {k: part(v, x) for k, part in parts.items()}  # noqa: E731
    return call(of, mode=EVAL, reduction=Kind.SUM)


def with_loss(reduction, loss, towers=2):
    of = lambda v, x, y, tower: {"loss": loss(x, tower)}  # noqa: E731
    how = {"reduction": reduction, "towers": towers, "mode": EVAL}
    return call(of, rows=2 * towers, **how)


def with_train_op(change):
    def of(*given):
        loss, train_op = minimized(*given)
        return {"loss": loss, "train_op": change(train_op)}

    return call(of)


def with_params(change):
    return with_train_op(lambda s: dataclasses.replace(s, params=change(s.params)))


def updating(update, of_loss=lambda mean: mean.value):
    """A training that calls ``update(grads, opt_state)`` itself."""

    def of(v, *batch):
        grads = jax.grad(lambda params: of_loss(squares(params, *batch)))(v.params)
        updates, opt_state = update(grads, v.opt_state)
        params = optax.apply_updates(v.params, updates)
        after = dataclasses.replace(v, params=params, opt_state=opt_state)
        return {"loss": squares(params, *batch), "train_op": after}

    return of


UNWRAPPED = updating(optax.sgd(0.1).update)


def forgotten(towers, devices):
    how = {"state": partial(start, optax.sgd(0.1)), "rows": 8}
    return call(UNWRAPPED, towers=towers, devices=devices, **how)


def on_the_first_tower(v, *batch):
    own = lambda v: minimized(v, *batch)[1]  # noqa: E731
    after = jax.lax.cond(batch[-1].id == 0, own, lambda v: v, v)
    return {"loss": squares(v.params, *batch), "train_op": after}


def in_a_jit(v, *batch):
    after = jax.jit(lambda v: minimized(v, *batch)[1])(v)
    return {"loss": squares(v.params, *batch), "train_op": after}


def meeting(kind):
    """Towers meet in a loss, of whose sum the gradient is taken."""

    def of(v, x, y, tower):
        def loss_fn(params):
            out = x @ params["w"]
            middle = tower.reduce(tj.Reduction.SUM, out.sum()) / 8
            middle = jax.lax.stop_gradient(middle) if kind == "stopped" else middle
            losses = (out - middle - y) ** 2
            return losses.mean() if kind == "scalar" else Mean(losses, tower.weight)

        loss, grads = OPTIMIZER.compute_gradients(loss_fn, v.params)
        given = grads, v.opt_state, v.params
        params, opt_state = OPTIMIZER.apply_gradients(*given, loss=loss)
        after = dataclasses.replace(v, params=params, opt_state=opt_state)
        return {"loss": loss, "train_op": after}

    # The original's numbers depend on the towers.
    return call(of, reduction=Kind.MEAN, compat="tf1", audit=False)


def careless(culprit, mode):
    """Of 7 rows and a padded one, where one part of the spec counts that."""

    def of(v, x, y, tower):
        weights = {part: tower.weight for part in CARELESS} | {culprit: None}

        def loss(part, params=v.params):
            return Mean((x @ params["w"] - y) ** 2, weights[part])

        found = {"loss": loss("loss")}
        if mode is EVAL:
            return {**found, "eval_metrics": {"m": Mean(x, weights["metric"])}}
        _, after = OPTIMIZER.minimize(partial(loss, "train_op"), v)
        mean = Mean(x[:, 0], weights["local"]).value
        old = v.local["n"]
        new = {"n": dataclasses.replace(old, value=mean + old.value)}
        return {**found, "train_op": dataclasses.replace(after, local=new)}

    state = lambda: replicated().init(start(local=LOCAL))  # noqa: E731
    return call(of, rows=7, mode=mode, state=state)


def wrap(*fn, **options):
    return lambda: est.replicate_model_fn(*fn or (print_spec,), **options)


def print_spec(variables, features, labels, mode, params=None, config=None):
    return Spec(mode, predictions={"x": features})


def compiled_in(value):
    model = est.replicate_model_fn(print_spec)
    return {x: partial(model.predict_step, **{x: value}) for x in ("params", "config")}


def data_of(kind, use):
    data = [{"tuple": (X, Y), "dict": {"x": X, "y": Y}}[kind]]
    if use == "evaluate":
        return lambda: tj.evaluate(replicated().eval_step(), start(), data)
    return lambda: tj.run(replicated().train_step(), start(), data, progress=False)


ABSENT = est.replicate_model_fn(print_spec, devices=["cpu:0", "cpu:77"])
FIXED = {"w": np.zeros(3, np.float32), "ids": np.arange(3)}
EXTRA = r"params\['ids'\] is int.*TrainState\.create\(\.\.\., extra=.*tower\.extra"
SUMS = tj.Weighted(start().params, np.float32(4))
ADAM = est.TowerOptimizer(optax.adam(0.1))
Frozen = dataclasses.make_dataclass("Frozen", ["table"], frozen=True)
# fmt: off
CARELESS = {
    "loss": (EVAL, r"loss\.sum does not depend on tower\.weight"),
    "metric": (EVAL, r"eval_metrics\['m'\]\S*sum does not depend"),
    "train_op": (TRAIN, r"minimized\.sum, grads\.sum\['w'\]"),
    "local": (TRAIN, r"train_op\S* does not depend"),
}
STATIC = {
    "array": (np.ones(3), r"^{} is an array.*Put arrays into variables"),
    "on a device": ({"a": jnp.ones(())}, r"^{}\['a'\] is an array"),
    "deep": ({"a": [1, (np.float64(1), np.ones(2))]}, r"^{}\['a'\]\[1\]\[1\] is"),
    "set": ({"a": {1, 2}, "b": {}.keys()}, r"^{}\['b'\] is a dict_keys"),
    "in an object": (types.SimpleNamespace(table=np.ones(3)), "^{} is .* no hash"),
    "in a frozen one": (Frozen(np.ones(3)), "^{} is .* no hash"),
}
ANY_TOWERS = {
    "vector": (Kind.SUM, lambda x, t: x[:, 0], r"not a scalar: sum has shape \(2,\)"),
    "integer": (Kind.SUM, lambda x, t: jnp.int32(1), "int32, which has no gradient"),
    "negative": (EXACT, lambda x, t: tj.Weighted(x.sum(), -1.0), "must be >= 0"),
}
METRICS = {
    "of the tower's rows": lambda x: x.sum(),
    "a dict": lambda x: {"deep": tj.Weighted(1.0, 1.0)},
    "a class": lambda x: tj.Weighted,
}
MISTAKES = {
    # Where a function is wrapped, and its parts are made.
    "parameters of ids": (lambda: tj.TrainState.create(FIXED, OPTIMIZER), EXTRA),
    "a gradient of ids": (  # any tree, of which JAX said less
        lambda: OPTIMIZER.compute_gradients(lambda p: p["w"].sum(), FIXED), EXTRA),
    "a weighted gradient": (
        lambda: OPTIMIZER.apply_gradients(SUMS, start().opt_state, start().params),
        r"tj\.value_and_grad.*pass grads\.sum with"),
    **{f"a {kind} to {use}": (data_of(kind, use),
        rf"batch .* is a {kind}, but must be \{{'features': .*train_and_evaluate")
        for kind in ("tuple", "dict") for use in ("evaluate", "train")},
    "reduction none": (wrap(loss_reduction=Kind.NONE),
        r"Tower losses need to be reduced in some way, yet none reduction is"
        r" specified\. Write tj\.estimator\.LossReduction\.SUM_BY_NONZERO_WEIGHTS"),
    "reduction text": (wrap(loss_reduction="sum"),
        r"loss_reduction='sum' is not a tj\.estimator\.LossRed"),
    "reduction of towers": (wrap(loss_reduction=tj.Reduction.SUM),
        r"loss_reduction=Reduction\.SUM is not a tj\.estimator\.LossReduction"),
    "init on absent devices": (lambda: ABSENT.init(start()), "'cpu:77' is not on this"),
    "a call on absent devices": (lambda: ABSENT(start(), X, Y), "'cpu:77' is not on"),
    "no function": (wrap(3), r"model_fn=3 is not a function"),
    "a spec": (wrap(Spec(PREDICT, {"x": 1})), r"is not a function"),
    "no labels": (wrap(lambda variables, features, mode: None),
        r"unexpected keyword argument 'labels'\. Write def model_fn\(variables"),
    "no arguments": (wrap(lambda: None), r"too many positional arguments"),
    "no variables": (wrap(lambda features, labels, mode, params: None),
        r"multiple values for argument 'features'\. Write def model_fn\(variables"),
    "unknown": (wrap(lambda variables, features, labels, mode, rate: None),
        r"model_fn\(variables, features, labels, mode, rate\): .* argument: 'rate'"),
    "optimizer 3": (lambda: est.TowerOptimizer(3), r"got 3, .* Pass an optax transf"),
    "optimizer None": (lambda: est.TowerOptimizer(lambda: None), r"got None, which"),
    "MultiSteps": (lambda: est.TowerOptimizer(optax.MultiSteps(optax.sgd(1), 2)),
        r"MultiSteps\(\.\.\.\)\.gradient_transf"),
    **{f"{name} as {x}": (each, text.format(x)) for name, (value, text)
        in STATIC.items() for x, each in compiled_in(value).items()},
    # What a model is called with.
    "mode": (call(mode="train"), r"mode='train' must be one of Mode\.TRAIN, Mode\.EVAL"
        r", Mode.*The order is model\(variables, features, labels, mode"),
    "labels shorter": (lambda: replicated()(start(), X, Y[:2]),
        r"got (.*, )?batch\['labels'\]: 2"),
    "params": (call(None, {"rate": 1}), r"params was given, but model_fn has no"
        r" parameter 'params'.*leave params out"),
    "config": (call(None, None, 3),
        r"config was given, but model_fn has no parameter 'config'"),
    "one copy of two": (call(state=lambda: start(local=LOCAL)),
        r"towers than 2: state.local\['n'\].* has \(3,\) copies.*model\.init"),
    "two copies of four": (
        call(towers=4, state=lambda: replicated().init(start(local=LOCAL))),
        r"towers than 4: .* has \(2,\) copies.*tj\.towers\.restored_values\("),
    # What its function returns.
    "nothing": (call(lambda *_: None), r"in Mode\.TRAIN but returned a NoneType"),
    "a list": (call(lambda *_: [("loss", 1.0)]), "returned a list"),
    "another mode": (call(lambda v, x, y, t: Spec(PREDICT, {"x": x})),
        r"called in Mode\.TRAIN but returned a ModelSpec of Mode\.PREDICT"),
    **{f"what {mode} needs": (call(lambda *_: {}, mode=mode),
        rf"A ModelSpec of {mode!r} needs {names}\.") for mode, names
        in {TRAIN: "loss and train_op", EVAL: "loss", PREDICT: "predictions"}.items()},
    "no loss": (call(lambda v, *_: {"train_op": v}), r"of Mode\.TRAIN needs loss\."),
    "predictions an array": (evaluated(predictions=lambda v, x: x),
        r"predictions is a .*, but must be a dict"),
    "a prediction of text": (evaluated(predictions=lambda v, x: {"p": "cat"}),
        r"predictions\['p'\] is a str: "),
    "exports an output": (evaluated(export_outputs=lambda v, x: est.PredictOutput(x)),
        r"export_outputs is a PredictOutput, but must"),
    "export of another class": (evaluated(export_outputs=lambda v, x: {"a": x}),
        r"export_outputs\['a'\] is a .*must be a tj\.estimator\.PredictOutput"),
    "hooks a function": (evaluated(hooks=lambda v, x: print),
        r"hooks=.* must be a list: write hooks="),
    "hooks no functions": (evaluated(hooks=lambda v, x: (1,)),
        r"hooks\[0\]=1 is not a function"),
    "rows": (
        evaluated(predictions=lambda v, x: {"bad": x[:1].sum(0), "sum": x.sum()}),
        r"must have 2 rows \(or a multiple\), but predictions\['bad'\] has shape"
        r" \(3,\); predictions\['sum'\] has shape \(\)\..* jnp\.full\(tower\.rows"),
    "rows of exports": (
        evaluated(export_outputs=lambda v, x: {"a": est.RegressionOutput(x[0])}),
        r"export_outputs\['a'\]\.value has shape \(3,\)"),
    **{f"a metric {name}": (evaluated(eval_metrics=lambda v, x, m=m: {"m": m(x)}),
        r"eval_metrics\['m'\] is (.*tj\.Weighted|the class.* Return an object)")
        for name, m in METRICS.items()},
    # Its loss.
    "bare": (with_loss(EXACT, lambda x, t: x.sum()), r"returned a bare scalar.*"
        r"loss_reduction=LossReduction\.SUM_BY_NONZERO_WEIGHTS needs"
        r".*compute_weighted_loss.*compat='tf1'"),
    "bare, of the batch's size": (
        with_loss(Kind.SUM_OVER_BATCH_SIZE, lambda x, t: x.sum()),
        r"bare scalar.*LossReduction\.SUM_OVER_BATCH_SIZE needs"),
    "weighted": (with_loss(Kind.SUM, lambda x, t: Mean(x, t.weight)),
        r"returned a tj\.Weighted, .*loss_reduction=LossReduction\.SUM needs a scalar"),
    "weighted mean": (with_loss(Kind.MEAN, lambda x, t: Mean(x, t.weight)),
        r"loss_reduction=LossReduction\.MEAN needs a scalar loss"),
    **{f"{name} of {towers}": (with_loss(*loss, towers), text) for towers in (1, 2)
        for name, (*loss, text) in ANY_TOWERS.items()},
    # Its next variables.
    "what minimize returns": (with_train_op(lambda s: (jnp.float32(0), s)),
        r"a pair of a loss.* loss, train_op = optimizer\.minimize\(loss_fn, variables"),
    "dtype": (with_params(lambda p: {**p, "b": p["b"].astype(jnp.bfloat16)}),
        r"train_op\.params\['b'\] is bfloat16\[\], expected float32\[\]\. Look at"
        r" model_fn's train_op"),
    "missing leaf": (with_params(lambda p: {"w": p["w"]}),
        r"train_op\.params\['b'\] is absent, expected float32\[\]"),
    "params alone": (with_train_op(lambda s: s.params),
        r"train_op\['w'\] is float32\[3\], expected absent"),
    **{f"the state of {name}": (call(state=partial(start, other), towers=1),
        r"TowerOptimizer.*init.*tj\.TrainState\.create\(params, optimizer\)")
        for name, other in {"adam": ADAM, "chain": optax.chain(optax.clip(1.0), ADAM)}
        .items()},
    "an update without its loss": (
        call(updating(OPTIMIZER.update, lambda mean: mean.sum)),
        r"update needs the loss.*optimizer\.update\(grads, .*loss=loss\)"),
    "a sum where towers meet": (meeting("mean"),
        rf"in which towers communicate, .*{HERE}.*optimizer\.minimize\(loss_fn"),
    "in turn, inside a jit": (call(in_a_jit, tower_loop="scan"),
        r"Optimizer\.update was called inside a jit.*the outer one.*tower_loop='vmap'"),
    # Padding.
    **{f"padding, {part}": (careless(part, mode), text)
        for part, (mode, text) in CARELESS.items()},
}
# Where towers would part.
REPLICATION = {
    "an update on some towers": (call(on_the_first_tower),
        rf"Only some towers reach.*under the cond at .*{HERE}"),
    **{f"a forgotten wrapper, {towers} on {devices}": (forgotten(towers, devices),
        rf"train_op.*params\['w'\].*{HERE}.*Please wrap optimizers with TowerOptimizer")
        for towers, devices in ((2, 1), (4, 2))},
}
# fmt: on


@pytest.mark.few_fast(30)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name, compiled):
    refused(compiled, *MISTAKES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATION)
def test_towers_that_would_part_name_the_leaf_and_the_line(name, compiled):
    said = refused(compiled, *REPLICATION[name], tj.ReplicationError)
    if "forgotten" in name:  # what has no gradient is the same
        assert "params['b']" not in said


@pytest.mark.slow
def test_what_is_compiled_is_seen(compiled):
    call()()
    assert any("(step)" in name for name in compiled)


def test_unknown_parameters_with_a_default_are_the_functions_own():
    def fn(variables, features, labels, mode, scale=2.0):
        return Spec(mode, predictions={"x": features * scale})

    spec = est.replicate_model_fn(fn)(np.float32(1), X, None, PREDICT)
    np.testing.assert_array_equal(spec.predictions["x"], 2 * X)


@pytest.mark.slow
def test_what_is_no_mistake_runs():
    for kind in ("scalar", "stopped"):
        assert meeting(kind)().train_op is not None
    assert forgotten(1, 1)().train_op is not None  # on one tower nothing is shared
    w = start().params["w"]
    (x, y) = (X[:4], Y[:4])
    together = call(in_a_jit, devices=1)().train_op.params["w"]
    np.testing.assert_allclose(together, w - 0.2 * x.T @ (x @ w - y) / 4, rtol=1e-5)


@pytest.mark.slow
def test_a_batch_that_changes_is_refused_saying_what(compiled):
    model = replicated(max_programs=1)
    variables = model(start(), X[:4], Y[:4]).train_op
    for text, *given in (
        (r"\['features'\].*is float32\[6, 3\], expected float32\[4, 3\]", X[:6], Y[:6]),
        (r"max_programs=\.\.\. \(now 1\)", X[:4, :2], Y[:4]),
        (r"batch\['labels'\] is absent, expected float32\[4\]", X[:4], None),
        (r"mode='train' must be one of", X[:4], Y[:4], "train"),
    ):
        refused(compiled, lambda given=given: model(variables, *given), text)
    model(variables, X[:4], Y[:4])  # nothing was lost
    model(variables, X[:6], Y[:6], EVAL)  # a mode has kinds of its own
    several = replicated(towers=1)
    several(variables, X[:4], Y[:4], EVAL)
    with pytest.warns(UserWarning, match="(?s)has changed.*compiles anew") as caught:
        several(variables, X[:6], Y[:6], EVAL)
    assert caught[0].filename == __file__


def test_copies_of_two_towers_become_those_of_four():
    two = replicated().init(start(local=LOCAL))
    four = replicated(towers=4).strategy
    saved = tj.towers.saved_values(two)
    moved = tj.towers.restored_values(four, two, saved)
    assert moved.local["n"].value.shape == (4, 3)


@pytest.mark.slow
def test_padding_is_refused_where_there_was_nothing_to_mask_before(compiled):
    model = replicated(lambda v, x, y, t: {"loss": Mean((x @ v.params["w"] - y) ** 2)})
    model(start(), X, Y, EVAL)
    text = CARELESS["loss"][1]
    refused(compiled, lambda: model(start(), X[:7], Y[:7], EVAL), text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "loss/0"])
def test_metrics_of_a_step_have_no_name_of_the_loss_or_a_term_of_it(name):
    def of(v, x, y, tower):
        loss = Mean(x[:, 0], tower.weight) + Mean(x[:, 1], tower.weight * x[:, 0] ** 2)
        metrics = {name: tj.Weighted(1.0, 1.0)}
        return {"loss": loss, "train_op": v, "eval_metrics": metrics}

    model = replicated(of)
    for use in (model.train_step().check, model.eval_step()):
        with pytest.raises(ValueError, match=rf"\['{name}'\] has the name of the loss"):
            use(start(), {"features": X})
