"""What a model function has of the engine: its steps' options, its proof, its state."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored as towers
from layouts import rows

import towerjax as tj

RATE = 0.1
SGD = tj.estimator.TowerOptimizer(optax.sgd(RATE, momentum=0.5))


def batch(size, number=0):
    weight = np.linspace(0.1, 2, size, dtype=np.float32)
    x = rows(size, 8, seed=number)
    y = rows(size, seed=number + 50)
    return {"features": {"x": x, "weight": weight}, "labels": y}


def model_fn(variables, features, labels, mode, tower):
    weight = tower.weight * features["weight"]

    def loss_fn(p):
        return tj.Weighted.mean((features["x"] @ p["w"] - labels) ** 2, weight)

    metrics = {"mean": tj.Weighted.mean(labels, weight)}
    if mode is tj.estimator.Mode.EVAL:
        loss = loss_fn(variables.params)
        return tj.estimator.ModelSpec(mode, loss=loss, eval_metrics=metrics)
    loss, after = SGD.minimize(loss_fn, variables)
    return tj.estimator.ModelSpec(mode, loss=loss, train_op=after, eval_metrics=metrics)


def start(optimizer=SGD):
    return tj.TrainState.create({"w": rows(8, seed=3)}, optimizer)


def replicated(count, devices, tower_loop="vmap", *, fn=model_fn, state="mirrored"):
    strategy = dataclasses.replace(
        towers(count, devices, tower_loop=tower_loop), state=state
    )
    return tj.estimator.replicate_model_fn(fn, devices=strategy)


def by_numpy(batches):
    """Parameters and losses in float64."""
    w = rows(8, seed=3).astype(float)
    trace = 0.0
    losses = []
    for one in batches:
        x = one["features"]["x"].astype(float)
        y = one["labels"].astype(float)
        weight = one["features"]["weight"].astype(float)
        errors = x @ w - y
        losses.append((weight * errors**2).sum() / weight.sum())
        trace = 0.5 * trace + 2 * x.T @ (weight * errors) / weight.sum()
        w = w - RATE * trace
    return w, losses


def averaging(variables, features, labels, mode, tower):
    """Moving averages that all towers share: of their rows, of the parameters."""
    spec = model_fn(variables, features, labels, mode, tower)
    weight = tower.weight * features["weight"]
    before = tower.extra
    mean = 0.9 * before["mean"] * weight.sum() + 0.1 * weight @ features["x"]
    extra = {
        "mean": tj.Weighted(mean, weight.sum()),
        "rows": tj.Sum(tower.weight.sum()),
        "slow": 0.5 * (before["slow"] + spec.train_op.params["w"]),
        "steps": before["steps"] + 1,
    }
    train_op = dataclasses.replace(spec.train_op, extra=extra)
    return dataclasses.replace(spec, train_op=train_op)


def start_averaging():
    extra = {"mean": np.zeros(8, np.float32), "slow": rows(8, seed=3)}
    extra |= {"rows": np.float32(0), "steps": np.int32(0)}
    return tj.TrainState.create({"w": rows(8, seed=3)}, SGD, extra=extra)


@pytest.mark.slow
@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
def test_a_model_function_may_close_over_values_of_the_program_around_it(tower_loop):
    """Its own program is then traced for the devices too."""

    def train(scale, state):
        def fn(variables, features, labels, mode, tower):
            features = {**features, "x": scale * features["x"]}
            return model_fn(variables, features, labels, mode, tower)

        step = replicated(4, 2, tower_loop, fn=fn).train_step()
        return step.fn(state, batch(16))

    state, metrics = jax.jit(train)(jnp.float32(1), start())
    w, losses = by_numpy([batch(16)])
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_the_numbers_of_the_original_are_not_audited():
    strategy = towers(2, 1)
    how = {"compat": "tf1", "audit": True}
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, **how)
    text = "compat='tf1' divides by the number of towers, as the original"
    with pytest.raises(ValueError, match=text):
        model(start(), *batch(8).values())


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(("name", "value", "text"), [
    ("steps", lambda x: tj.Weighted.mean(x[:, 0]), r"'steps'.* is float32.*int32"),
    ("slow", lambda x: x.sum(0), r"extra\['slow'\] depends on batch\['features'\]"),
    ("slow", lambda x: None, r"extra\['slow'\] is absent, expected float32\[8\]"),
])  # fmt: skip
def test_extra_variables_of_another_kind_are_refused(name, value, text):
    def fn(variables, features, labels, mode, tower):
        spec = averaging(variables, features, labels, mode, tower)
        extra = {**spec.train_op.extra, name: value(features["x"])}
        train_op = dataclasses.replace(spec.train_op, extra=extra)
        return dataclasses.replace(spec, train_op=train_op)

    model = replicated(2, 1, fn=fn)
    with pytest.raises(ValueError, match=text):
        model.train_step().check(model.init(start_averaging()), batch(8))


@pytest.mark.parametrize("kind", ["jit", "not wrapped"])
def test_an_update_of_some_rows_alone_is_refused(kind):
    def fn(variables, features, labels, mode, tower):
        def loss_fn(p):
            return tj.Weighted.mean((features["x"] @ p["w"] - labels) ** 2)

        if kind == "jit":
            minimize = jax.jit(lambda state: SGD.minimize(loss_fn, state))
            loss, after = minimize(variables)
        else:
            loss = loss_fn(variables.params)
            grads = jax.grad(lambda p: loss_fn(p).value)(variables.params)
            params = jax.tree.map(lambda x, g: x - g, variables.params, grads)
            after = dataclasses.replace(variables, params=params)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = replicated(1, 1, fn=fn)
    with pytest.raises(ValueError, match=r"inside a jit|depend on their rows: .*\['w"):
        model.train_step(micro_batches=2).check(model.init(start()), batch(8))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_local_variables_are_read_in_one_pass_of_micro_batches(micro_batches):
    def fn(variables, features, labels, mode, tower):
        before = variables.local.value
        after = dataclasses.replace(variables.local, value=before + features.sum())
        state = dataclasses.replace(variables, local=after)
        for _ in range(2):
            loss, state = SGD.minimize(
                lambda p: tj.Weighted.mean(features * before * p["w"].sum()), state
            )
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=state)

    local = tj.TowerLocal(np.float32(1), tj.Reduction.SUM)
    state = tj.TrainState.create({"w": rows(8)}, SGD, local=local)
    model = replicated(2, 1, fn=fn)
    step = model.train_step(micro_batches=micro_batches)
    refused = pytest.raises(ValueError, match="Write micro_batches=1")
    with refused if micro_batches > 1 else contextlib.nullcontext():
        step.check(model.init(state), {"features": rows(8)})


def in_layers(aux_weight, calls):
    """A model function of three layers, whose loss has a second mean."""

    def fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            calls.append(tower.num_towers)
            x = features
            for w in params:
                x = jnp.tanh(x @ w)
            loss = tj.Weighted.mean(x[:, 0], tower.weight)
            if not aux_weight:
                return loss
            counts = tower.weight * (features[:, 0] > 0)
            return loss + aux_weight * tj.Weighted.mean(x[:, 1], counts)

        loss, after = SGD.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    return fn


@pytest.mark.slow
@pytest.mark.parametrize("aux_weight", [0.0, 0.5])
def test_towers_of_a_device_share_one_gradient(aux_weight):
    """Of one mean or several, of a function that is called once."""
    calls = []
    size = 128
    model = replicated(8, 1, fn=in_layers(aux_weight, calls))
    params = [rows(size, size, seed=i) for i in range(3)]
    state = model.init(tj.TrainState.create(params, SGD))
    step = model.train_step(audit=False)
    program = step.program(state, {"features": rows(32, size)})
    assert calls == [8]
    held = program.call.memory_analysis().temp_size_in_bytes
    assert held < 2 * 3 * size * size * 4  # a gradient a tower is 8 of these


@pytest.mark.slow
def test_a_loss_of_several_means_is_audited():
    model = replicated(2, 1, fn=in_layers(0.5, []))
    size = 8
    state = model.init(tj.TrainState.create([rows(size, size)], SGD))
    report = model.train_step().audit(state, {"features": rows(8, size)})
    assert {"loss", "minimized", "gradient[0]"} <= {*report.compared}, report


@pytest.mark.slow
def test_a_loss_that_reads_what_another_returned_does_not_train_its_parameters():
    """Each loss has the gradient of its own parameters, from one pass of two."""
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(1.0))

    def fn(variables, features, labels, mode, tower):
        def of_first(a):
            scores = features * a
            return tj.Weighted.mean(scores, tower.weight), scores

        first = tj.TrainState.create(variables.params["a"], optimizer)
        (loss, scores), first = optimizer.minimize(of_first, first, has_aux=True)

        def of_second(b):
            return tj.Weighted.mean(scores**2 * b, tower.weight)

        second = tj.TrainState.create(variables.params["b"], optimizer)
        _, second = optimizer.minimize(of_second, second)
        params = {"a": first.params, "b": second.params}
        after = dataclasses.replace(variables, params=params)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = replicated(4, 2, fn=fn)
    params = {"a": np.float32(3), "b": np.float32(2)}
    state = model.init(tj.TrainState.create(params, optimizer))
    x = rows(8)
    after, _ = model.train_step()(state, {"features": x})
    wide = x.astype(float)
    expected = {"a": 3 - wide.mean(), "b": 2 - (9 * wide**2).mean()}
    for name, value in expected.items():
        np.testing.assert_allclose(after.params[name], value, rtol=1e-5)


def test_parameters_of_one_tower_are_refused_by_minimize():
    def fn(variables, features, labels, mode, tower):
        own = jax.tree.map(lambda x: x * features.sum(), variables.params)
        own = dataclasses.replace(variables, params=own)
        loss, _ = SGD.minimize(
            lambda p: tj.Weighted.mean(features * p["w"][0], tower.weight), own
        )
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=variables)

    model = replicated(2, 1, fn=fn)
    with pytest.raises(ValueError, match=r"from one tower's rows.*compute_grad"):
        model.train_step().check(model.init(start()), {"features": rows(8)})


def steep(variables, features, labels, mode, tower):
    """A loss whose gradient is infinite at 0, where it is not."""

    def loss_fn(p):
        return tj.Weighted.mean(jnp.sqrt(jnp.abs(features * p["w"][0])), tower.weight)

    loss, after = SGD.minimize(loss_fn, variables)
    return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_refused_and_named():
    model = replicated(4, 2, fn=steep)
    step = model.train_step(guard="gradients")
    state = model.init(start())
    state, _ = step(state, {"features": np.ones(8, np.float32)})
    before = jax.device_get(state.params["w"])
    bad = {"features": np.array([1] * 7 + [0], np.float32)}  # the last tower's
    state, metrics = step(state, bad)
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["w"], before)
    with pytest.raises(tj.NonFiniteError, match="step 2 was not finite"):
        step.settle()
    [place] = step.locate(state, bad)
    found = (place.tower, place.leaf, place.part)
    assert found == (3, "params/w", "gradient")


def test_what_a_sharded_state_cannot_be_is_refused():
    strategy = tj.Mirrored(towers=4, state="sharded")
    with pytest.raises(ValueError, match="both say where to keep variables"):
        tj.estimator.replicate_model_fn(
            model_fn,
            devices=strategy,
            variable_placement=tj.estimator.VariablePlacement.ON_ONE_DEVICE,
        )
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    with pytest.raises(ValueError, match="variables that are a tj.TrainState"):
        model({"w": np.ones(8, np.float32)}, **batch(8))


@pytest.mark.slow
def test_a_models_step_is_proved_for_towers_that_are_not_here():
    strategy = tj.Mirrored(towers=1024)
    step = tj.estimator.replicate_model_fn(model_fn, devices=strategy).train_step()
    given = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    opt_state = jax.eval_shape(SGD.init, given)
    proof = step.check(given, batch(2048), opt_state=opt_state)
    sums = [x for x in proof.analysis.collectives if x.primitive == "psum"]
    assert len(sums) == 1  # gradients, loss and metrics


@pytest.mark.slow
def test_an_evaluation_sees_local_variables_as_they_are_read():
    seen = []

    def fn(variables, features, labels, mode, tower):
        own = tower.local["own"]
        mean = tower.local["mean"]
        seen.append((own, mean.dtype, variables.local["own"].value))
        return tj.estimator.ModelSpec(mode, predictions={"mean": features + mean})

    local = {"own": tj.TowerLocal(np.int32(3), tj.Reduction.NONE)}
    local |= {"mean": tj.TowerLocal(np.int32(2), tj.Reduction.MEAN)}
    state = tj.TrainState.create({"w": rows(8)}, SGD, local=local)
    model = tj.estimator.replicate_model_fn(fn, devices=towers(2, 1))
    predict = tj.estimator.Mode.PREDICT
    spec = model(model.init(state), np.float32([1, 5]), mode=predict)
    assert spec.predictions["mean"].tolist() == [3, 7]
    assert {*seen} == {(None, np.dtype(np.float32), None)}


@pytest.mark.slow
def test_what_is_printed_after_the_last_update_is_seen():
    seen = []

    def fn(variables, features, labels, mode, tower):
        def loss_fn(w):
            return tj.Weighted.mean((w - features) ** 2, tower.weight)

        loss, after = SGD.minimize(loss_fn, variables)
        own = loss_fn(after.params).value  # of no result
        jax.debug.callback(lambda x: seen.append(float(x)), own)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = replicated(2, 1, fn=fn)
    variables = tj.TrainState.create(np.float32(1), SGD)
    model(variables, np.float32([0, 0, 3, 3]))
    jax.effects_barrier()
    moved = 1 - RATE * 2 * (1 - 1.5)
    np.testing.assert_allclose(sorted(seen), [moved**2, (moved - 3) ** 2], rtol=1e-6)
