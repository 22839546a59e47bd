"""A step is all or nothing: what is used, what is given back, and what is lost."""

import dataclasses
import pickle
import signal
import sys
import threading

import checkpoint_model as model
import chex
import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkout import TESTS

import towerjax as tj
from towerjax import estimator
from towerjax.contrib import DiLoCo, LocalSGD, by_owner


def batches_of(number):
    return [batch for batch, _ in zip(model.batches(), range(number), strict=False)]


@pytest.fixture(scope="module")
def evaluate():
    def metric_fn(w, batch, tower):
        return {"w": tj.Weighted.mean(w + 0 * batch["y"], tower.weight)}

    return tj.build_eval_step(metric_fn, tj.OneDevice())


@pytest.mark.slow
def test_batches_are_set_back_where_a_run_stops_early(evaluate):
    step = model.build_light()
    source = model.batches()
    state, history = tj.run(
        step,
        model.init(step),
        source,
        evaluate=evaluate,
        eval_batches=[model.data()],
        eval_every=2,
        early_stopping=tj.EarlyStopping("w", 1, "min", min_delta=1e9),
        progress=False,
    )
    assert history.stopped and source.position == int(state.step) == 4


@pytest.mark.slow
def test_ctrl_c_in_an_evaluation_or_a_prediction_leaves_no_thread(evaluate):
    def interrupting():
        yield from batches_of(7)
        raise KeyboardInterrupt

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        tj.evaluate(evaluate, np.float32(0), interrupting)
    names = [x.name for x in threading.enumerate() if x not in before]
    assert "towerjax-prefetch" not in names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pressed_before", [True, False])
def test_ctrl_c_as_a_run_ends_leaves_the_state(pressed_before):
    """Again, in any function that is called since the first; or once all is done."""
    source = model.batches()
    step = model.build_light()
    state = model.init(step)
    states = {}
    for batch in batches_of(3):
        state, _ = step(state, batch)
        states[int(state.step)] = jax.tree.map(jnp.copy, state)

    def trace(frame, event, arg):  # at calls, where Python asks for signals
        found.append(frame.f_code.co_name)
        if len(found) == when:
            signal.raise_signal(signal.SIGINT)

    def hook(number, metrics):
        if number == (2 if pressed_before else 3):
            sys.settrace(trace)
            if pressed_before:
                raise KeyboardInterrupt

    tracing = sys.gettrace()
    ended = 0
    for when in range(1, 10**6, 5):
        found = []
        state = model.init(step)
        source = model.batches()
        try:
            options = {"progress": False, "hooks": [hook], "steps": 3}
            state, _ = tj.run(step, state, source, **options)
            ended += 1
        except KeyboardInterrupt as error:
            assert hasattr(error, "state"), found[when - 1 :]
            state = error.state
        finally:
            sys.settrace(tracing)
        assert source.position == int(state.step), found[when - 1]
        chex.assert_trees_all_equal(state, states[int(state.step)])
        if when > len(found):
            break
    assert when > 50 and ended == (not pressed_before)  # of the last press


@pytest.mark.slow
def test_memory_that_runs_out_in_a_donated_step_takes_the_state():
    """In a process whose memory is limited, by a program that needs far more."""
    worker = TESTS / "workers" / "memory.py"
    found = forked.printed(worker)
    assert found.endswith("RESOURCE_EXHAUSTED: Out of memory None None\n"), found


@pytest.mark.slow
def test_devices_that_fail_in_a_donated_step_say_why(monkeypatch):
    """As on the other processes of a job when one of them ends."""
    step = model.build_light()
    state = model.init(step)
    batch = step.place_batch(model.data())

    def fails(donated, *_):
        jax.tree.map(lambda x: x.delete(), donated)
        raise ValueError("Connection closed by peer")

    program = step.program(state, batch)
    fails.args_info = program.call.args_info
    broken = dataclasses.replace(program, call=fails)
    monkeypatch.setitem(step.programs.compiled, *step.programs.compiled, broken)
    with pytest.raises(ValueError, match="^Connection closed by peer") as caught:
        tj.run(step, state, [batch], progress=False)
    assert caught.value.state is None
    assert "The state is lost, because the devices failed" in caught.value.__notes__[0]


RATE = 0.1
EPS = np.finfo(np.float32).eps


def norms(params, batch, tower):
    """A finite loss, whose gradient is NaN where a row is zero."""
    norm = jnp.linalg.norm(batch @ params["w"], axis=1)
    return tj.Weighted.mean(norm, tower.weight)


def rows_of_norms(bad=()):
    """Three batches, of which these have a row of zeros."""
    batches = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
    batches[list(bad), 5] = 0
    return list(batches)


FIRST = {"w": np.linspace(-1, 2, 8, dtype=np.float32).reshape(4, 2)}


def by_numpy(batches):
    """The parameters after plain gradient descent, in float64."""
    w = FIRST["w"].astype(float)
    for b in batches:
        out = b.astype(float) @ w
        norm = np.sqrt((out**2).sum(1, keepdims=True))
        w = w - RATE * b.T.astype(float) @ (out / norm) / len(b)
    return w


def in_two_passes(strategy, **options):
    """The gradient is of the first pass, and the loss of the second is finite."""

    def first(state, batch, tower):
        return tj.value_and_grad(norms)(state.params, batch, tower)

    def second(state, batch, tower, merged):
        return {"loss": norms(state.params, batch, tower), "grads": merged[1]}

    def update(state, merged):
        w = state.params["w"] - RATE * merged["grads"].value["w"]
        return dataclasses.replace(state, params={"w": w}), {"loss": merged["loss"]}

    return tj.build_step((first, second), update, strategy, **options)


def of_a_model(strategy, **options):
    optimizer = estimator.TowerOptimizer(optax.sgd(RATE))

    def model_fn(variables, features, labels, mode, tower):
        loss, after = optimizer.minimize(lambda p: norms(p, features, tower), variables)
        return estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = estimator.replicate_model_fn(model_fn, devices=strategy)
    step = model.train_step(**options)
    step.init = lambda params: model.init(tj.TrainState.create(params, optimizer))
    return step


def plain(strategy, optimizer=None, **options):
    optimizer = optimizer or optax.sgd(RATE)
    return tj.build_train_step(norms, optimizer, strategy, **options)


def owned(strategy, **options):
    optimizer = by_owner(optax.sgd(RATE), strategy, lambda name, x: x.ndim == 3)
    return plain(strategy, optimizer, **options)


def kinds():
    two = ("cpu:0", "cpu:1")
    four = [f"cpu:{i}" for i in range(4)]
    on_two = tj.Mirrored(two, towers=4)
    for state in ("mirrored", "sharded_optimizer", "sharded"):
        yield state, plain, tj.Mirrored(two, towers=4, state=state), {}
    yield "one device", plain, tj.Mirrored(two[:1], towers=2), {}
    within = tj.Mirrored(four, towers=2, within={"model": 2})
    yield "within", plain, within, {}
    in_turn = tj.Mirrored(
        two,
        towers=4,
        tower_loop="scan",
        cross_tower_ops=tj.PinnedTree(),
        state="sharded",
    )
    yield "in turn", plain, in_turn, {}
    yield "micro-batches", plain, on_two, {"micro_batches": 2}
    yield "passes", in_two_passes, on_two, {}
    yield "model", of_a_model, on_two, {}
    yield "local", plain, on_two, {"extend": LocalSGD(every=1)}
    yield "diloco", plain, on_two, {"extend": DiLoCo(every=1)}
    yield "by owner", owned, on_two, {}


KINDS = {name: how for name, *how in kinds()}
SKIPPING = "mirrored", "sharded", "micro-batches", "passes", "model"


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_refused_at_its_step(kind):
    """Named by the number that history has, and where it came from; the state lives."""
    build, strategy, options = KINDS[kind]
    step = build(strategy, **options)
    batches = rows_of_norms(bad=[1])
    if kind == "model":
        batches = [{"features": x} for x in batches]
    with pytest.raises(tj.NonFiniteError) as caught:
        tj.run(step, step.init(FIRST), batches, progress=False)
    error = caught.value
    text = "a gradient of step 2 was not finite, so it changed nothing"
    if trains_alone := kind in ("local", "diloco"):
        text = "A tower's loss or gradient was not finite in step 2. That tower left"
    assert text in str(error)
    assert error.step == 2 and error.history.skipped == (2,)
    towers = strategy.num_towers
    named = ("1/w", "value") if kind == "passes" else ("params/w", "gradient")
    location, *others = error.locations  # after a first pass all towers have it
    assert (location.tower, location.step) == (5 * towers // 8, 2)
    assert (location.leaf, location.part) == named and bool(others) == (
        kind == "passes"
    )
    done = [x for i, x in enumerate(rows_of_norms()) if i != 1]
    w = jax.device_get(error.state.params)["w"]
    assert np.isfinite(w).all()
    if not trains_alone:  # else the other towers go on
        done = done[: int(error.state.step) - 1]
        np.testing.assert_allclose(w, by_numpy(done), rtol=64 * EPS)
    if kind in SKIPPING:
        skips = build(strategy, on_nonfinite="skip", **options)
        state, history = tj.run(skips, skips.init(FIRST), batches, progress=False)
        assert history.skipped == (2,)
        done = rows_of_norms()[::2]
        np.testing.assert_allclose(state.params["w"], by_numpy(done), rtol=64 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded_optimizer", "sharded", "in turn"])
def test_it_is_refused_with_the_shards_that_users_have(kind, users_shards):
    test_a_gradient_that_is_not_finite_is_refused_at_its_step(kind)


@pytest.mark.slow
def test_a_parameter_that_is_not_finite_came_with_an_earlier_step():
    """The loss of step 2 is finite, its gradient not: the loss of step 3 tells."""
    step = plain(tj.OneDevice(), guard="loss")
    with pytest.raises(tj.NonFiniteError, match="^The loss of step 3 was") as caught:
        tj.run(step, step.init(FIRST), rows_of_norms(bad=[1]), progress=False)
    error = caught.value
    assert {x.step for x in error.locations} == {3}
    told = "params/w, step 3: NaN in the parameter, which came with an earlier step"
    assert told in str(error) and "go on from a state before that" in str(error)
    assert str(error).endswith("With guard='loss' no step looks at its gradients.")


OVERFLOWS = optax.chain(optax.scale(-3e38), optax.scale(1e3))


UPDATING = ["one device", "mirrored", "sharded", "within", "in turn", "local"]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("kind", UPDATING)
@pytest.mark.parametrize("guard", ["gradients", "loss"])
def test_parameters_that_the_last_update_makes_infinite_end_a_run(kind, guard):
    """A next step would find them, but the last one has none."""
    build, strategy, options = KINDS[kind]
    divides_by_0 = optax.sgd(lambda number: RATE / (1 - number))
    step = build(strategy, divides_by_0, guard=guard, **options)
    batches = rows_of_norms()[:2]
    with pytest.raises(tj.NonFiniteError, match="^Parameters are not") as caught:
        tj.run(step, step.init(FIRST), batches, progress=False)
    error = caught.value
    assert "not finite after step 2: params/w. " in str(error)
    assert error.step == 2 == int(error.state.step)
    assert len(error.history.steps) == 2 and not error.history.skipped
    seen = "loss was" if guard == "loss" else "loss and gradients were"
    assert f"The step's {seen} finite, so its update made them" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("how, first_bad", [
    ({"on_nonfinite": "ignore"}, 2),
    ({"guard": "loss"}, 2),
    ({"optimizer": OVERFLOWS}, 1),
], ids=lambda x: str(*x) if isinstance(x, dict) else "")  # fmt: skip
def test_no_checkpoint_is_written_of_parameters_that_are_not_finite(
    how, first_bad, tmp_path
):
    step = plain(tj.OneDevice(), **how)
    saver = tj.Checkpointer(tmp_path, 1, keep=2)
    with pytest.raises(tj.CheckpointError) as caught:
        given = step.init(FIRST), rows_of_norms(bad=[1])
        tj.run(step, *given, checkpointer=saver, progress=False)
    text = str(caught.value)
    assert text.startswith(
        f"Parameters are not finite after step {first_bad}: params/w. "
    )
    good = "the last good one is of step 1" if first_bad == 2 else "none is"
    assert f"They are not saved; {good} in '{tmp_path}'." in text
    assert saver.steps == ((1,) if first_bad == 2 else ())
