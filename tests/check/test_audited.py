"""Which steps are audited unasked, how often, and what is said of the others."""

import dataclasses
import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited_losses import BATCH, PARAMS, RIGHT, WRONG, errors
from first_calls import FOUR, evaluation, not_proved, scaled, step_of, train
from flax import linen as nn
from jax.experimental import io_callback
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import towerjax as tj
from towerjax.check import first_call
from towerjax.check.audit import kept as audited
from towerjax.check.equality.told import NotProved, StepEquality
from towerjax.prover.comparison import NotAudited
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.leaf_name import WHOLE_STEP, LeafName, whole_pass
from towerjax.sweeps.bench import _timed

# What is not proved is audited, and said.
pytestmark = pytest.mark.filterwarnings("ignore:not proved")
ONE = tj.OneDevice()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum_with_weight_1", "cumsum_along_rows"])
def test_a_changed_loss_is_refused_before_anything_changes(runs, name):
    train(step_of())
    step = step_of(WRONG[name])
    state = step.init(PARAMS)
    for _ in range(2):
        with pytest.raises(tj.testing.SplitError):
            step(state, BATCH)
    assert int(state.step) == 0 and not step.is_audited
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)


def own_step(wrong, **options):
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(RIGHT["plain_mean"])(state.params, batch, tower)
        norm = optax.tree.norm(grads.sum) if wrong else tower.weight.sum()
        return {"loss": loss, "grads": grads, "norm": tj.Sum(norm)}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    return tj.build_step(tower_fn, update_fn, FOUR, **options)


def prediction(wrong, **options):
    def predict_fn(params, batch, tower):
        own = errors(params, batch)
        return jnp.cumsum(own) if wrong else own

    return tj.build_predict_step(predict_fn, FOUR, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [own_step, evaluation, prediction])
def test_each_kind_of_step_is_proved_unasked(runs, make):
    for wrong in (True, False):
        step = make(wrong)
        state = step.init(PARAMS) if make is own_step else PARAMS
        if wrong:
            with pytest.raises(tj.testing.SplitError):
                step(state, BATCH)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(state, BATCH)
        assert (step.unproved == {}) is not wrong and not runs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = make(True, audit=False)
        step(step.init(PARAMS) if make is own_step else PARAMS, BATCH)
    assert not step.is_audited and step.audit_report is None


def root_of_own_mean(params, batch, tower):
    return tj.Weighted(jnp.sqrt(errors(params, batch).mean()), 1.0)


def trained_by_a_model(loss_fn):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))
    mode = tj.estimator.Mode.TRAIN

    def model_fn(variables, features, labels, mode, tower):
        of = lambda params: loss_fn(params, features, tower)  # noqa: E731
        loss, train_op = optimizer.minimize(of, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    model = tj.estimator.replicate_model_fn(model_fn, devices=FOUR)
    return model(model.init(tj.TrainState.create(PARAMS, optimizer)), BATCH, None, mode)


def evaluated(loss_fn):
    metric_fn = lambda *args: {"loss": loss_fn(*args)}  # noqa: E731
    return tj.build_eval_step(metric_fn, FOUR)(PARAMS, BATCH)


MAY_PAD = {
    "step": lambda loss_fn: train(step_of(loss_fn, remainder="pad")),
    "evaluation": evaluated,
    "model": trained_by_a_model,
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("way", MAY_PAD)
def test_what_full_batches_show_is_refused_where_others_may_be_padded(runs, way):
    with pytest.raises(tj.testing.SplitError) as error:
        MAY_PAD[way](root_of_own_mean)
    [loss] = [x for x in error.value.findings if "loss" in x.leaf]
    own = np.asarray(errors(PARAMS, BATCH), np.float64)[:12]
    np.testing.assert_allclose(loss.one_tower, np.sqrt(own.mean()), rtol=1e-5)
    if loss.split == "evenly":
        halves = np.sqrt(own.reshape(2, 6).mean(1))
        np.testing.assert_allclose(loss.value, halves.mean(), rtol=1e-5)


def flax_norm(params, batch, tower):
    norm = nn.BatchNorm(False, axis_name=tower.axis_names, use_scale=False)
    variables = norm.init(jax.random.key(0), batch["x"][:1])
    x, _ = norm.apply(variables, batch["x"], mutable=["batch_stats"])
    return tj.Weighted.mean(errors(params, {**batch, "x": x}), tower.weight)


def without_weights(params, batch, tower):
    return tj.Weighted.mean(errors(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [flax_norm, without_weights])
@pytest.mark.parametrize("way", MAY_PAD)
def test_what_is_right_of_full_batches_is_proved_of_these(runs, way, loss_fn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MAY_PAD[way](loss_fn)
    assert not runs


@pytest.mark.slow
def test_a_batch_that_is_padded_is_refused_with_its_own_number_of_examples():
    step = step_of(without_weights, remainder="pad")
    short = jax.tree.map(lambda x: x[:22], BATCH)
    for call in (step, step.audit):
        with pytest.raises(ValueError, match="A batch of 22 examples was padded"):
            call(step.init(PARAMS), short)


def divides_by_padding(params, batch, tower):
    rows = tower.weight / (tower.weight > 0)
    return tj.Weighted((errors(params, batch) * rows).sum(), 1.0)


@pytest.mark.slow
def test_what_is_wrong_of_some_rows_is_refused_though_others_give_no_number(runs):
    """Padding has 0 / 0, so that the second comparison has nothing to compare."""
    with pytest.raises(tj.testing.SplitError, match="evenly"):
        train(step_of(divides_by_padding, remainder="pad"))


LAID_OUT = {"w": np.float32([1, -1, 2, 0.5]), "m": np.ones((4, 4, 4), np.float32)}
HALVES = tj.Mirrored(devices=("cpu:0", "cpu:1"), state="sharded")
LAYOUTS = {
    "shards": HALVES,
    "optimizer in shards": dataclasses.replace(HALVES, state="sharded_optimizer"),
    "of two devices": tj.Mirrored(
        towers=2, devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"), within={"model": 2}
    ),
    "in turn": tj.Mirrored(
        towers=4, tower_loop="scan", cross_tower_ops=tj.PinnedTree()
    ),
    "pmap": tj.Mirrored(devices=("cpu:0", "cpu:1"), executor="pmap"),
    "by owner": HALVES,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_each_layout_are_proved_or_audited_unasked(runs, name):
    def loss_fn(params, batch, tower, of=RIGHT["plain_mean"]):
        moved = {"w": (params["w"] @ params["m"].sum(0)), "b": 0.25}
        return of(moved, batch, tower)

    optimizer = optax.adam(0.1)
    strategy = LAYOUTS[name]
    if name == "by owner":
        args = strategy, lambda name, leaf: leaf.ndim == 3
        optimizer = tj.contrib.by_owner(optimizer, *args)
    wrong = functools.partial(loss_fn, of=WRONG["cumsum_along_rows"])
    step = tj.build_train_step(wrong, optimizer, strategy)
    state = step.init(LAID_OUT)
    with pytest.raises(tj.testing.SplitError, match="cumsum"):
        step(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, step.place(state).params, LAID_OUT)
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    step(step.init(LAID_OUT), BATCH)
    assert step.unproved == {} and not runs
    unproved = functools.partial(loss_fn, of=not_proved)
    step = tj.build_train_step(unproved, optimizer, strategy)
    step(step.init(LAID_OUT), BATCH)
    assert [*step.unproved] == ["loss"]
    assert step.is_audited and not step.audit_report.not_compared


@pytest.mark.slow
def test_of_towers_that_train_alone_nothing_is_said(runs):
    step = step_of(extend=tj.contrib.DiLoCo(2))
    train(step)  # a warning would be an error
    assert not runs and not step.is_audited
    assert "merge nothing" in step.unproved["step"]
    with pytest.raises(tj.testing.NotProved, match="its towers merge nothing"):
        train(step_of(extend=tj.contrib.DiLoCo(2), audit=True))
    with pytest.raises(NotAudited, match="these leaves are per tower: gradient; loss"):
        step.audit(step.init(PARAMS), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("mode", tj.estimator.Mode)
def test_each_mode_of_a_model_is_proved_unasked(runs, mode):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def make(wrong):
        loss_fn = WRONG["sum_with_weight_1"] if wrong else RIGHT["plain_mean"]

        def model_fn(variables, features, labels, mode, tower):
            own = errors(variables.params, features)
            rows = jnp.cumsum(own) if wrong else own
            if mode is tj.estimator.Mode.PREDICT:
                return tj.estimator.ModelSpec(mode, predictions={"rows": rows})
            of = lambda params: loss_fn(params, features, tower)  # noqa: E731
            if mode is tj.estimator.Mode.EVAL:
                return tj.estimator.ModelSpec(mode, loss=of(variables.params))
            loss, train_op = optimizer.minimize(of, variables)
            return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

        return tj.estimator.replicate_model_fn(model_fn, devices=FOUR)

    state = tj.TrainState.create(PARAMS, optimizer)
    model = make(wrong=True)
    with pytest.raises(tj.testing.SplitError):
        model(model.init(state), BATCH, None, mode)
    model = make(wrong=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(model.init(state), BATCH, None, mode)
    assert not runs


@pytest.mark.slow
@pytest.mark.parametrize("patience_s, lines", [(0.0, 1), (60.0, 0)])
def test_a_long_proof_says_that_it_runs(monkeypatch, capsys, patience_s, lines):
    monkeypatch.setattr(first_call, "_PATIENCE_S", patience_s)
    step = tj.build_train_step(scaled(2.0), optax.sgd(0.1), FOUR)
    step.check(step.init(PARAMS), BATCH)
    step(step.init(PARAMS), BATCH)
    said = capsys.readouterr().err
    assert said.count("towerjax: proving that the step is equal to one tower") == lines


@pytest.mark.slow
def test_a_step_that_is_to_be_proved_is_refused_at_each_call(counted):
    step = step_of(audit=True)
    state = step.init(PARAMS)
    for _ in range(2):
        with pytest.raises(NotProved, match="A sample agreed"):
            step(state, BATCH)
    assert int(state.step) == 0 and step.is_audited


@pytest.mark.slow
def test_what_is_too_large_is_told_in_one_line(counted, monkeypatch):
    monkeypatch.setattr(audited, "MOST_PARAMETERS", 16)
    text = "Not audited: it has 17 parameters, more than 16. Run .*audit.* small model"
    with pytest.warns(UserWarning, match=text) as told:
        step = step_of()
        train(step)
    assert len(told) == 1 and not counted and not step.is_audited
    train(step_of(audit=False))
    with pytest.raises(NotProved, match=text):
        train(step_of(audit=True))
    proved = step_of(RIGHT["plain_mean"], audit=True)
    train(proved)
    assert proved.unproved == {} and not counted


def test_what_an_accelerator_has_left_decides(monkeypatch):
    class Device:
        def __init__(self, left):
            self.left = left

        def memory_stats(self):
            return {"bytes_limit": 1000 + self.left, "bytes_in_use": 1000}

    traced = type("Traced", (), {"passes": ()})
    for left, is_left_out in (4 * 68, False), (4 * 68 - 1, True):
        monkeypatch.setattr(jax, "local_devices", lambda x=left: [Device(x)])
        problem = audited._problem_of(traced, jax.tree.map(jnp.asarray, PARAMS), 1)
        assert ("cannot hold four" in str(problem)) is is_left_out


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_what_calls_python_is_run_by_no_proof(runs, ordered):
    called = []

    def loss_fn(params, batch, tower):
        io_callback(lambda: called.append(0), None, ordered=ordered)
        return RIGHT["plain_mean"](params, batch, tower)

    def prints(params, batch, tower):
        jax.debug.callback(lambda: called.append(0), ordered=ordered)
        return RIGHT["plain_mean"](params, batch, tower)

    for loss in (loss_fn, prints):
        called.clear()
        step = step_of(
            loss, tj.Mirrored(towers=2, devices=jax.devices()[:1], tower_loop="scan")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.block_until_ready(train(step, steps=1))
        jax.effects_barrier()
        assert len(called) == 2 and not runs and step.unproved == {}


@pytest.mark.slow
def test_what_cannot_be_run_is_told_and_raised_where_it_was_asked_for(runs):
    def loss_fn(params, batch, tower):
        own = errors(params, batch)
        return tj.Weighted.mean(own.reshape(6), tower.weight)

    text = r"step \(its function, .* raises TypeError: .*\)\. Not audited: .*TypeError"
    with pytest.warns(UserWarning, match=text + ".*audit=False leaves this line out"):
        train(step_of(loss_fn))
    with pytest.raises(NotProved, match=text) as error:
        train(step_of(loss_fn, audit=True))
    assert [*error.value.unproved] == ["step"]


@pytest.mark.slow
def test_a_function_that_asserts_its_number_of_rows_is_told(runs):
    def loss_fn(params, batch, tower):
        if len(batch["y"]) != 24 // FOUR.num_towers:
            raise AssertionError
        return RIGHT["plain_mean"](params, batch, tower)

    text = "Not audited: its function, .* keys, raises AssertionError. aud"
    with pytest.warns(UserWarning, match=text):
        train(step_of(loss_fn, remainder="pad"))
    assert not runs


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("audit", [None, True])
@pytest.mark.parametrize("kind", [KeyError, RuntimeError, ValueError, AssertionError])
def test_what_no_audit_expects_is_raised_and_names_the_audit(monkeypatch, kind, audit):
    def broken(*_, **__):
        raise kind("gradient.w")

    monkeypatch.setattr(first_call, "run_audit", broken)
    with pytest.raises(kind, match="gradient.w") as error:
        train(step_of(audit=audit))
    assert error.value.__notes__[0].startswith("The audit of the step raised this")


@pytest.mark.slow
def test_nothing_says_audited_of_what_was_not(runs):
    step = step_of(audit=False)
    state = train(step)
    assert not step.is_audited and "audit" not in repr(step_of())
    report = str(step.report(state, BATCH)).replace("test_audited.py", "")
    data = tj.batches(BATCH, 24, epochs=1)
    _, history = tj.run(step, state, data, progress=False)
    assert "audit" not in report and "audit" not in repr(history)
    assert not runs and not step.is_audited


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "together", "in_turn"])
def test_no_time_is_that_of_the_audit(counted, monkeypatch, way):
    now = time.perf_counter
    audit_s = [0.0]
    run_audit = first_call.run_audit

    def long(*args, **options):
        audit_s[0] += 1e6
        return run_audit(*args, **options)

    monkeypatch.setattr(first_call, "run_audit", long)
    monkeypatch.setattr(time, "perf_counter", lambda: now() + audit_s[0])

    def build(rate):
        return (step := step_of(optimizer=optax.sgd(rate))), step.init(PARAMS)

    data = lambda: tj.batches(BATCH, 24, epochs=2)  # noqa: E731
    if way == "run":
        _, history = tj.run(*build(0.1), data(), progress=False)
        seconds = [
            history.summary.compile_seconds,
            2 / history.summary.steps_per_second,
        ]
    else:
        how = {"progress": False, "order": way}
        swept = tj.sweep(build, {"rate": [0.1, 0.2]}, data, **how)
        seconds = [member.seconds for member in swept.members]
    assert len(counted) == 1 and max(seconds) < 1e5
    assert sum(seconds) > 0


def to_bench():
    step = step_of(audit=True)
    return step, step.init(PARAMS), BATCH


@pytest.mark.slow
def test_bench_leaves_the_audit_out(runs):
    job = {"config": {}, "builders": {"": "test_audited:to_bench"}, "rtol": None}
    _timed({**job, "seconds_per_round": 0.01, "rounds": 6})
    assert not runs


@pytest.mark.slow
def test_one_tower_has_nothing_to_audit(counted):
    train(step_of(WRONG["sum_with_weight_1"], ONE))
    train(step_of(strategy=ONE, micro_batches=2))
    assert len(counted) == 1


@pytest.mark.slow
def test_a_step_in_another_program_is_proved_and_not_audited(runs):
    def loss_of(step, state):
        return jax.jit(step.fn)(state, BATCH)[1]["loss"]

    state = step_of().init(PARAMS)
    with pytest.warns(UserWarning, match="Not audited: step.fn .* run step.audit"):
        loss_of(step_of(), state)
    with pytest.raises(tj.testing.SplitError, match="it is 1/T times"):
        loss_of(step_of(WRONG["sum_with_weight_1"]), state)
    with pytest.raises(NotProved, match="step.fn is traced without rows"):
        loss_of(step_of(audit=True), state)
    loss_of(step_of(RIGHT["plain_mean"], audit=True), state)
    right = step_of()
    right.audit(state, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for told in (right, step_of(audit=False), step_of(strategy=ONE)):
            loss_of(told, told.init(PARAMS))


@pytest.mark.slow
@pytest.mark.parametrize("look", ["report", "program", "audit", "__call__"])
def test_a_run_tells_of_the_audit_that_a_look_has_made(counted, capsys, look):
    step = step_of(donate=False)
    state = step.init(PARAMS)
    getattr(step, look)(state, BATCH)
    is_told = look == "__call__"  # as in a loop of one's own
    assert capsys.readouterr().err.count("audited in") == is_told
    for told in (not is_told, 0):
        tj.run(step, state, tj.batches(BATCH, 24, epochs=1))
        err = capsys.readouterr().err
        assert err.count("audited in") == err.count("audited") == told
    assert len(counted) == 1


@pytest.mark.slow
@pytest.mark.parametrize("column", ["predicted", "given"])
def test_rows_that_meet_a_column_are_refused_on_one_tower(runs, column):
    def loss_fn(params, batch, tower):
        predicted = batch["x"] @ params["w"][:, None]
        if column == "given":
            predicted = predicted[:, 0]
        with jax.numpy_rank_promotion("allow"):
            own = optax.huber_loss(predicted - batch["y"])
        return tj.Weighted.mean(own, tower.weight)

    batch = dict(BATCH) if column == "predicted" else BATCH | {"y": BATCH["y"][:, None]}
    step = step_of(loss_fn, ONE)
    with pytest.raises(tj.testing.SplitError, match=r"makes \[b, b\], at .*loss_fn"):
        train(step, batch)
    with pytest.raises(tj.testing.SplitError):
        train(step, batch)
    train(step_of(loss_fn, ONE, audit=False), batch)
    assert not runs


@pytest.mark.slow
def test_rows_that_are_meant_to_meet_are_not_audited_on_one_tower(runs):
    def pairs(params, batch, tower):
        s = batch["x"] @ params["w"]
        return tj.Weighted.mean((s[:, None] - s[None] - 1) ** 2, tower.weight)

    def waves(params, batch, tower):  # of as many frequencies as there are rows
        angle = batch["x"] @ params["w"][:, None] * jnp.arange(24.0)[None]
        return tj.Weighted.mean(jnp.sin(angle).mean(1), tower.weight)

    train(step_of(pairs, ONE))
    assert not runs
    step = step_of(waves, ONE)
    train(step)
    assert step.unproved is not None  # it was looked at, and found to be right


def test_a_gradient_is_open_where_a_term_of_its_loss_is():
    loss, gradient, metrics, metric = (
        LeafName.at(tuple(map(DictKey, keys.split())))
        for keys in ("loss", "grads w", "metrics hits", "metrics hits_of_all")
    )
    terms = [loss.within((GetAttrKey("terms"), SequenceKey(i))) for i in range(2)]
    of_terms = Equality(terms[0], Says.PROVED), Equality(terms[1], Says.UNKNOWN)
    found = StepEquality(of_terms, 0.0)
    assert found.is_open(loss) and found.is_open(gradient)
    assert not found.is_open(metrics)
    of_metric = StepEquality((Equality(metrics, Says.UNKNOWN),), 0.0)
    assert of_metric.is_open(metrics) and not of_metric.is_open(gradient)
    assert not of_metric.is_open(metric)
    later = [x.in_pass(2) for x in (loss, gradient, metrics)]
    of_passes = StepEquality((Equality(loss.in_pass(1), Says.UNKNOWN),), 0.0)
    assert not any(map(of_passes.is_open, later))
    for whole in (WHOLE_STEP, whole_pass(2)):
        of_whole = StepEquality((Equality(whole, Says.UNKNOWN),), 0.0)
        assert all(map(of_whole.is_open, later))
        assert of_whole.is_open(loss.in_pass(1)) == (whole is WHOLE_STEP)


@pytest.mark.slow
def test_a_report_says_what_is_not_proved():
    proved = step_of(RIGHT["plain_mean"])
    unknown = step_of()
    for step, names in (proved, []), (unknown, ["loss"]):
        report = step.report(step.init(PARAMS), BATCH)
        assert [*report.unproved] == names
        assert f"not proved equal to one tower {names[0] if names else 'nothing'}" in (
            " ".join(str(report).split())
        )


@pytest.mark.slow
def test_an_audit_of_one_tower_says_why_it_speaks_of_two():
    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(batch * w / jnp.std(batch * w), tower.weight)

    strategy = tj.Mirrored(towers=1)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
    rows = np.arange(1, 5, dtype=np.float32)
    with pytest.raises(ValueError, match="This step has one tower; the audit gave its"):
        step(step.init(np.float32(1)), rows)
