"""What other libraries have, and what Python says too little of: what to write."""

import dataclasses
import itertools
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored, with_verbs

import towerjax as tj

BATCH = np.ones((4, 3), np.float32)
W = np.ones(3, np.float32)
BY_NAME = {"x": BATCH}
SGD = optax.sgd(0.1)


def loss_fn(w, batch, tower):
    return tj.Weighted.mean(batch @ w, tower.weight)


def build(fn=loss_fn, **options):
    return tj.build_train_step(fn, optax.sgd(0.1), mirrored(2), **options)


def one_step(optimizer, params=W):
    """Call the step of an optimizer once."""

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(batch @ w, tower.weight)

    step = tj.build_train_step(loss_fn, optimizer, mirrored(2))
    return step(step.init(params), BATCH)


def kept():
    """Read a value of a loss function in a hook."""
    values = []

    def loss_fn(w, batch, tower):
        values.append(batch.sum())
        return tj.Weighted.mean(batch @ w, tower.weight)

    def hook(number, metrics):
        float(values[0])

    step = build(loss_fn)
    tj.run(step, step.init(W), [BATCH], progress=False, hooks=[hook])


def of_counter():
    """Call the step of a loss that Python counts the traces of."""
    calls = itertools.count(1)

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(batch @ w / next(calls), tower.weight)

    step = build(loss_fn)
    return step(step.init(W), BATCH)


def own(params_of):
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    def update_fn(state, merged):
        params = params_of(state, merged)
        return dataclasses.replace(state, params=params), {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, mirrored(2))
    return step(step.init(W), BATCH)


def run(**options):
    step = build()
    return tj.run(step, step.init(W), [BATCH], progress=False, **options)


def of_no_step():
    """The history of a run that found a checkpoint after its last step."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            history = run(checkpointer=tj.Checkpointer(folder))[1]
    return history


def assign():
    build().init(W).params = W


def of_extra(w, batch, tower):
    return tj.Weighted.mean(batch @ w * tower.extra["scale"], tower.weight)


def call(fn):
    step = build(fn)
    return step(step.init(W), BATCH)


def closes_over_donated():
    step = build()
    first = step.init(W)
    step(first, BATCH)
    return call(lambda w, batch, tower: loss_fn(w + first.params, batch, tower))


def of_another_loss():
    step = build(lambda w, batch, tower: loss_fn(w["v"], batch, tower))
    step(step.init({"v": W}), BATCH)
    step(build().init(W), BATCH)


def by_hand(loss_of):
    """A step whose tower differentiates a number of its own."""

    def tower_fn(state, batch, tower):
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    step = tj.build_step(tower_fn, lambda s, merged: (s, {}), mirrored(2))
    return step.check(W, BATCH)


def by_state():
    """A step whose tower differentiates by the state."""

    def tower_fn(state, batch, tower):
        def of_state(state):
            return (batch @ state.params).sum()

        return {"grads": jax.grad(of_state)(state).params}

    step = tj.build_step(tower_fn, lambda s, merged: (s, {}), mirrored(2))
    return step.check(W, BATCH)


def of_value(w, batch, tower):
    return loss_fn(w, batch, tower).value


def bare_metric(w, batch, tower):
    return tj.TowerOutput(loss_fn(w, batch, tower), {"mean": jnp.mean(batch @ w)})


def with_l2(w, batch, tower):
    return loss_fn(w, batch, tower) + 0.1 * jnp.sum(w**2)


def of_names(params, batch, tower):
    return tj.Weighted.mean(batch["x"] @ params["w"], tower.weight)


def evaluation(fn=loss_fn):
    return tj.build_eval_step(lambda *args: {"loss": fn(*args)}, mirrored(2))


def evaluate(params, batch):
    return tj.evaluate(evaluation(of_names), params, [batch])


def of_model(way, variables, features):
    def model_fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode, predictions=features @ variables.params)

    model = tj.estimator.replicate_model_fn(model_fn, devices=mirrored(2))
    return [*getattr(tj.estimator, way)(model, variables, [features])]


def dropped():
    strategy = with_verbs(2)
    v = strategy.create_var("v", 1.0)
    strategy.assign_add(v, 1.0)


def test_a_new_variable_that_is_dropped_is_warned_of():
    text = r"result of strategy.assign_add is dropped, .* Write v = strategy.assign_add"
    with pytest.warns(UserWarning, match=text):
        dropped()
    strategy = with_verbs(2)
    v = strategy.create_var("v", 1.0)
    v = strategy.assign_add(v, 1.0)
    assert float(strategy.assign_sub(v, 0.5).value) == 1.5


def leaked():
    kept = []
    call(lambda w, batch, tower: (kept.append(w), loss_fn(w, batch, tower))[1])
    with_verbs(2).call_for_each_tower(lambda tower: kept[0] + 1)


def donated():
    step = tj.build_train_step(loss_fn, SGD, mirrored(2, 2))
    state = step.init(W)
    step(state, BATCH)
    return state


def given(*batch, **options):
    step = build(**options)
    return step.check(W, *batch)


def in_tower(name):
    strategy = tj.tf1.with_verbs(mirrored(2))
    return strategy.call_for_each_tower(lambda tower: getattr(tower, name))


def history():
    return run()[1]


def run_out_of_memory():
    def fail(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    return with_verbs(1).call_for_each_tower(fail)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def unpacks(w, batch, tower):
    x, y = batch
    return tj.Weighted.mean(x @ w, tower.weight)


def of_infinity():
    step = build()
    state = step.init(W * np.nan)
    for _ in range(40):
        state, _ = step(state, BATCH)


def runs_with_infinity():
    step = build()
    return tj.run(step, step.init(W * np.nan), [BATCH], progress=False)


def call_with(batch, fn=loss_fn):
    step = build(fn)
    return step(step.init(W), batch)


def tower_of(use):
    return call(lambda w, batch, tower: (use(tower), loss_fn(w, batch, tower))[1])


WRITE = [
    (lambda: build(gradient_accumulation_steps=2), "write micro_batches=3"),
    (lambda: build(accum_steps=2), "write micro_batches=3"),
    (lambda: build(clip_norm=1.0), "optax.clip_by_global_norm(1.0), optimizer)"),
    (lambda: build(mixed_precision=True), "Write tj.contrib.train_step("),
    (lambda: build(precision=16), "or cast in the loss, x.astype(jnp.bfloat16)"),
    (lambda: build(dtype=16), "or cast in the loss, x.astype(jnp.bfloat16)"),
    (lambda: tj.batches(BATCH, 2, drop_last=True), "Write drop_remainder=True"),
    (lambda: tj.Checkpointer("x", max_to_keep=3), "Write keep=3"),
    (lambda: tj.EarlyStopping(monitor="loss"), "tj.EarlyStopping('loss', patience=3)"),
    (lambda: tj.TensorBoard(log_dir="x"), "Write logdir="),
    (lambda: build().save, "tj.run(..., checkpointer=tj.Checkpointer("),
    (lambda: tj.Checkpointer("x").load, "Write checkpointer.restore(step, state)"),
    (lambda: tower_of(lambda tower: tower.mask), "Write tower.weight, which is 1"),
    (lambda: tower_of(lambda tower: tower.rank), "Write tower.id, from 0 to"),
    (lambda: tower_of(lambda tower: tower.rngs), "Write nnx.Rngs(tower.rng), or rngs="),
    (lambda: tower_of(lambda tower: tower.rng()), "are values: write them without ()"),
    (lambda: tower_of(lambda tower: tower.reduce(W, tj.Reduction.SUM)),
        "have another order. Write tower.reduce(tj.Reduction.SUM, value)"),
    (lambda: tj.Weighted.sum(W, W), "Write tj.Sum(values.sum()) for a sum"),
    (lambda: tj.TowerOutput(1.0, aux=3), "Write metrics={...} for values to merge"),
    (lambda: tj.train, "Write tj.run(step, state, batches), where step ="),
    (lambda: tj.pmean, "return tj.Weighted.mean(values, tower.weight)"),
    (lambda: tj.metrics.f1, "Write 2 * p * r / (p + r) of the values"),
    (lambda: history().final.loss, "Write metrics['loss']"),
    (lambda: build()(build().init(W), BATCH, BATCH), "write step(state, (x, y))"),
    (lambda: build().save, "For parameters alone see "),
    (lambda: build().lower, "Write step.program(state, batch).call.as_text()"),
    (lambda: call(lambda w, b, tower: tj.Weighted.mean(np.square(b @ w))),
        "write jnp.square(x) in place of np.square(x)"),
    (lambda: call_with([W, W, W, W]), "stack them: jax.tree.map(lambda *rows: np.st"),
    (lambda: call_with({"x": BATCH, "y": BATCH}, unpacks),
        "Write x, y = batch['x'], batch['y']"),
    (lambda: call(lambda b, p, t: tj.Weighted.mean(b @ p, t.weight)),
        "its arguments have another order. Write def loss_fn(params, batch, tower)"),
    (lambda: tj.build_train_step(loss_fn, optax.constant_schedule(0.1), mirrored(2)),
        "this is a schedule: write optimizer=optax.adam(schedule)"),
    (lambda: build().init(jax.random.key(0)), "write step.init(init_fn, rng=jax.rand"),
    (lambda: call(lambda w, b, t: loss_fn(w, b, t) + tj.penalty({"w": w})),
        "takes one number, but got a dict. Write tj.penalty(1e-4 * optax.tree.norm("),
    (of_infinity, "The parameters were not finite before this step: params."),
    (runs_with_infinity, "The parameters were not finite before this step: params."),
    (lambda: jax.jit(build())(build().init(W), BATCH), "write step.fn(state, batch)"),
    (lambda: tj.testing.same_resumed(lambda: 3), "Define it with def at the top level"),
    (lambda: own(lambda s, m: s.params - 0.1 * m["grads"]),
        "merge write .value, as in"),
    (lambda: own(lambda s, m: {"w": W} - m["grads"]), "merged['grads'].value"),
    (lambda: own(lambda s, m: s.extra["a"]), "step.init(params, extra=...)"),
    (lambda: call(of_extra), "step.init(params, extra=...)"),
    (closes_over_donated, "Go on with the state that the step returned"),
    (of_another_loss, "Go on with a state of this step, step.init(params)"),
    (run_out_of_memory, "micro_batches=2 or more; use jax.checkpoint"),
    (lambda: run()[1].metrics["accuracy"], "There are 'loss'."),
    (lambda: of_no_step().metrics["loss"], "There are none. This run did no step"),
    (lambda: of_no_step().final["loss"], "There are none. This run did no step"),
    (lambda: run(evaluate=build(), eval_batches=[BATCH]),
        "is a train step, which returns a state and donates the one that it is given."
        " Pass tj.build_eval_step(metric_fn, strategy)"),
    (lambda: tj.evaluate(build(), W, [BATCH]), "is a train step"),
    (lambda: run(epochs=3), "tj.batches(data, batch_size, epochs=3)"),
    (lambda: run(callbacks=[]), "hooks=[hook]"),
    (lambda: tj.MirroredStrategy(), "Write tj.Mirrored();"),
    (lambda: tj.Trainer(), "for a loop over batches tj.run(step, state, batches)"),
    (lambda: tj.DataParallel(), "Write tj.Mirrored(), and give it to tj.build_train"),
    (lambda: tj.estimator.EstimatorSpec(0), "Write tj.estimator.ModelSpec(mode, loss"),
    (lambda: tj.estimator.ModeKeys.TRAIN, "Write tj.estimator.Mode.TRAIN"),
    (lambda: in_tower("key"), "Write tower.rng, the key of this tower"),
    (lambda: in_tower("index"), "Write tower.id, from 0 to"),
    (lambda: in_tower("psum"), "Write tower.reduce(tj.Reduction.SUM, value)"),
    (lambda: in_tower("pmean"), "Write tower.reduce(tj.Reduction.MEAN, value)"),
    (lambda: history().loss, "history.metrics['loss'] for the values of all steps"),
    (lambda: history()["loss"], "history.metrics['loss'] for the values of all steps"),
    (lambda: build().init(W, key=jax.random.key(0)), "rng=jax.random.key(0)"),
    (lambda: tj.batches(BATCH, 2, shuffle=True), "(data, batch_size, seed=0)"),
    (lambda: tj.EarlyStopping(patience=3), 'As in early = EarlyStopping("loss", pat'),
    (lambda: tj.build_train_step(loss_fn, strategy=mirrored(2)),
        "As in step = build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers="),
    (lambda: build().fit(BATCH), "tj.run(step, state, batches)"),
    (lambda: build().state, "state, metrics = step(state, batch)"),
    (assign, "Write state = state.replace(params=...)"),
    (lambda: build().init(W).apply_gradients(grads=W), "tj.apply_gradients(optimizer"),
    (lambda: build(Model()), "a module is no loss_fn: write a function that calls it"),
    (lambda: build().init(Model().init(jax.random.key(0), BATCH)),
        "pass variables['params']"),
    (lambda: tj.Mirrored(num_towers=4), "Write towers=..."),
    (lambda: build(accumulate=3), "write micro_batches=3"),
    (lambda: tj.run(build(), build().init(W), [BATCH], 10),
        "Write run(step, state, batches, steps=...)"),
    (lambda: tj.build_train_step(loss_fn, optax.adam, mirrored(2)),
        "tj.Mirrored(); call it, optimizer=adam(...)"),
    (lambda: tj.build_train_step(loss_fn, SGD, tj.Mirrored),
        "call it, strategy=Mirrored(...)"),
    (lambda: tj.build_train_step(loss_fn, SGD, jax.make_mesh((2,), ("data",))),
        "in place of this mesh write tj.Mirrored(towers=2)"),
    (kept, "Return it instead: from a loss function as tj.TowerOutput(loss, metri"),
    (of_counter, "A Python counter is another number in each trace: read tower.step."),
    (lambda: one_step(optax.adam("1e-3")), "given a text in place of a number, such"),
    (lambda: one_step(optax.clip_by_global_norm("1")), "Write it as float(text)."),
    (lambda: one_step(SGD, [1.0, 1.0, 1.0]), "Write np.array([...]) for it, in the"),
    (lambda: by_hand(loss_fn), "tj.value_and_grad(loss_fn) differentiates it"),
    (by_state, "Differentiate by state.params alone: jax.grad("),
    (lambda: by_hand(of_value), "for gradients call tj.value_and_grad(loss_fn)"),
    (lambda: call(bare_metric), "Return tj.Weighted.mean(values, tower.weight)"),
    (lambda: call(with_l2), "is not defined. Write mean + tj.penalty(number)"),
    (lambda: given(BATCH[:2], micro_batches=3),
        "which 2 towers of 3 micro-batches cannot share evenly. Use a multiple of 6"),
    (lambda: evaluate({"w": W}, {"z": BATCH}), "batch has 'z'."),
    (lambda: evaluate({"v": W}, BY_NAME), "params has 'v'."),
    (lambda: of_model("predict", -1, BATCH), "variables is int32[] here"),
    (lambda: of_model("evaluate", None, (BATCH, BATCH)), "variables is None here"),
    (lambda: with_verbs(2).call_for_each_tower(lambda tower: {"x": 1, 0: 2}),
        "make all keys strings"),
    (lambda: build().init({"a": print, "b": len, "c": [len] * 9}),
        "params['a'], params['b'], params['c'][0] (and 8 more of that list) are each"),
    (lambda: build().init({"a": print, "b": len}), "eqx.partition"),  # once
    (leaked, "stored a value in a list, a global or an attribute"),
    (lambda: tj.evaluate(evaluation(), donated(), [BATCH]),
        "The state was donated to step 1. Go on with"),
    (lambda: evaluation().check(donated(), BATCH),
        "The state was donated to step 1. Go on with"),
    (lambda: tj.check_mirrored(donated()), "A call of a step donated this array"),
    (lambda: tj.apply_gradients(SGD, donated(), W), "(jnp.copy(x)), or build the step"),
    (lambda: tj.towers.restored_values("x", W, W),
        "strategy='x' of type str cannot be used here"),
    (lambda: with_verbs(2).call_for_each_tower(
        lambda tower: tower.reduce(tj.Reduction.SUM, {"a": "x"})),
        "tower.reduce: value['a'] is a str"),
    (lambda: with_verbs(2).call_for_each_tower(lambda tower, x: x, tj.PerTower(("x",))),
        "but a PerTower argument's values[0] is a str"),
]  # fmt: skip


@pytest.mark.few_fast(3)
@pytest.mark.parametrize(("make", "text"), WRITE, ids=[x[1] for x in WRITE])
def test_an_error_says_what_to_write(make, text):
    with pytest.raises(Exception) as caught:  # noqa: B017 (of any kind)
        make()
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert text in told and told.count(text) == 1


def test_a_remedy_stands_before_what_jax_says_of_frames():
    step = build(lambda w, batch, tower: jax.jit(lambda x: x.score)(batch))
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
    try:
        with pytest.raises(AttributeError) as error:
            step(step.init(W), BATCH)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    *remedies, of_frames = error.value.__notes__
    assert "x is float32[2,3] here." in remedies and "frames" in of_frames


def test_an_error_of_ours_has_the_remedy_where_it_is_raised_alone():
    with pytest.raises(ValueError, match=r"tj\.Weighted.*write \.value") as caught:
        own(lambda state, merged: merged["loss"] + 1)
    notes = getattr(caught.value, "__notes__", [])
    assert not any("merged" in note for note in notes)


def test_what_is_no_name_of_others_is_told_as_by_python():
    for get in (lambda: tj.nonsense, lambda: build().nonsense):
        with pytest.raises(AttributeError, match="nonsense") as caught:
            get()
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.slow
def test_metrics_of_a_history_are_a_tree():
    metrics = run()[1].metrics
    doubled = jax.tree.map(lambda x: 2 * x, metrics)
    assert dict(doubled) == {"loss": 2 * metrics["loss"]}
    assert jnp.shape(metrics["loss"]) == (1,)


@pytest.mark.slow
def test_an_error_of_a_run_that_did_nothing_does_not_speak_of_its_state():
    step = build()
    with pytest.raises(ValueError, match="cannot share evenly") as caught:
        tj.run(step, step.init(W), [BATCH[:3]], progress=False)
    assert not [x for x in getattr(caught.value, "__notes__", ()) if "step 0" in x]
    assert int(caught.value.state.step) == 0
    with pytest.raises(ValueError, match="cannot share evenly") as caught:
        tj.run(step, step.init(W), [BATCH, BATCH[:3]], progress=False)
    assert "error.state is the state after step 1" in caught.value.__notes__[-1]


def test_a_platform_that_is_not_there_is_told_by_its_variable():
    """JAX says nothing, or which backend; this is how its function is called."""

    def backends(tower):
        raise AssertionError

    def fails(tower):
        raise RuntimeError("Unable to initialize backend 'cuda': no device")

    for fn in (backends, fails):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            with_verbs(1).call_for_each_tower(fn)
        assert "or write JAX_PLATFORMS=cpu." in caught.value.__notes__[-1]
