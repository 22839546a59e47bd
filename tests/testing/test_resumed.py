"""A training that is stopped and resumed, against one that never was."""

import functools
import itertools
import pathlib
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.testing import resumed

ROWS = [np.full(3, i, np.float32) for i in range(8)]


def step(state, batch):
    key, own = jax.random.split(state["key"])
    kept = jax.random.bernoulli(own, 0.5, batch.shape)
    w = state["w"] - 0.1 * batch * kept
    ema = 0.9 * state["ema"] + 0.1 * w
    return {"w": w, "key": key, "ema": ema}, {"size": jnp.abs(w).max()}


def start():
    return {"w": jnp.ones(3), "key": jax.random.key(0), "ema": jnp.ones(3)}


def save(folder, state, batches):
    words = jax.random.key_data(state["key"])
    saved = {x: np.asarray(state[x]) for x in ("w", "ema")}
    saved |= {"key": np.asarray(words), "next": next(batches)}
    pathlib.Path(folder, "state").write_bytes(pickle.dumps(saved))


def saved_in(folder):
    saved = pickle.loads(pathlib.Path(folder, "state").read_bytes())
    batch = saved.pop("next")
    return saved | {"key": jax.random.wrap_key_data(saved["key"])}, int(batch[0])


def restore(folder, state, batches, forget=()):
    saved, used = saved_in(folder)
    return saved | {x: state[x] for x in forget}, itertools.islice(batches, used, None)


def restore_from_the_start(folder, state, batches):
    return saved_in(folder)[0], batches


def right():
    return step, start(), ROWS, save, restore


def two_epochs():
    return step, start(), ROWS[:2] * 4, save, restore


def without_its_key():
    return step, start(), ROWS, save, functools.partial(restore, forget=["key"])


def without_its_average():
    return step, start(), ROWS, save, functools.partial(restore, forget=["ema"])


def from_the_first_batch():
    return step, start(), ROWS, save, restore_from_the_start


def with_a_counter():
    calls = itertools.count(1)
    return lambda state, x: step(state, x * next(calls)), start(), ROWS, save, restore


def of_another_shape():
    def restore_less(folder, state, batches):
        state, batches = restore(folder, state, batches)
        return state | {"ema": state["ema"][:1]}, batches

    return step, start(), ROWS, save, restore_less


def that_draws():
    draw = np.random.default_rng()
    return step, start(), [x + draw.random() for x in ROWS], save, restore


def ours():
    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((w - batch) ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.adam(0.1), tj.Mirrored(towers=2))
    rows = np.arange(32, dtype=np.float32)
    return step, step.init(jnp.float32(0)), tj.batches(rows, 4, seed=0, epochs=None)


def train_anew(folder, steps):
    """Whose batches begin again."""
    step, state, batches = ours()
    saving = tj.Checkpointer(folder, batches="anew")
    options = {"steps": steps, "checkpointer": saving, "progress": False}
    return tj.run(step, state, batches, **options)[0]


def trainer():
    return train_anew


def hangs():
    print("hangs", flush=True)
    time.sleep(600)


def without_a_save():
    return step, start(), ROWS


def with_half_a_result():
    return step, start(), ROWS, save, lambda folder, state, batches: state


def with_no_state():
    return lambda state, x: {"w": x}, start(), ROWS, save, restore


@pytest.fixture
def in_this_process(monkeypatch):
    def call(label, devices, run, *args, timeout_s=None):
        try:
            return run(*args)
        except Exception as told:  # one of another process holds that of its program
            raise getattr(told, "error", told) from None

    monkeypatch.setattr(resumed, "call_in_process", call)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_resume_that_is_exact_is_silent():
    report = tj.testing.same_resumed(right, steps=(3, 4))
    batches = [f"batches[{i}]" for i in (3, 4, 5, 6)]
    metrics = [f"metrics of step {i}[0]['size']" for i in (4, 5, 6, 7)]
    state = [f"state['{x}']" for x in ("ema", "key", "w")]
    assert report.compared == (*state, *batches, *metrics)
    said = "11 values are the same after 3 + 4 steps, with a restart between, as"
    assert str(report).startswith(said)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("make", "leaf", "advice"),
    [
        (without_its_key, "state['key']", "It has the value that make() returns"),
        (without_its_average, "state['ema']", "It has the value that make() returns"),
        (from_the_first_batch, "batches[2]", "The resumed process reads other batches"),
        (with_a_counter, "state['ema']", "something else is not saved"),
        (of_another_shape, "state['ema']", ""),
    ],
)
def test_what_is_not_resumed_is_named_first(make, leaf, advice):
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_resumed(make, steps=(2, 2))
    assert error.value.findings[0].leaf == leaf
    assert str(error.value).splitlines()[0].endswith("on a restart after step 2:")
    assert advice in str(error.value)
    assert len(error.value.advice) == (advice != "")


@pytest.mark.usefixtures("in_this_process")
def test_numbers_are_those_of_the_two_states():
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_resumed(from_the_first_batch, steps=(2, 1))
    told = error.value.findings[0].why
    assert told == "0 after the restart, and 2 without it"


@pytest.mark.usefixtures("in_this_process")
def test_a_tolerance_is_of_a_leafs_size():
    leaves = {"x": np.array([1.0, 100.0])}
    near = {"x": np.array([1.5, 100.0])}
    unlike = functools.partial(resumed._unlike, near, leaves, "here", "there")
    assert [*unlike(0.01)] == [] and [*unlike(0.004)] == [*unlike(0.0)]
    assert [*unlike(0.0)] == [("x", "1.5 here, and 1 there")]
    one_more = resumed._unlike({}, leaves, "here", "there", 0.0)
    assert [*one_more] == [("x", "there is none here")]


@pytest.mark.usefixtures("in_this_process")
def test_a_training_that_is_not_deterministic_is_told_apart():
    text = "not deterministic even without a restart"
    with pytest.raises(ValueError, match=text) as error:
        tj.testing.same_resumed(that_draws, steps=(1, 1))
    assert type(error.value).__name__ == "NotAudited"


@pytest.mark.usefixtures("in_this_process")
def test_that_no_batch_came_twice_is_noted():
    """Then a shuffling of the second epoch, that is not saved, goes unseen."""
    (note,) = tj.testing.same_resumed(right, steps=(1, 1)).notes
    assert note.startswith("no batch came twice in 2 steps, so a restart in a second")
    twice = tj.testing.same_resumed(two_epochs, steps=(2, 2))
    assert twice.notes == () and "note:" not in str(twice)


@pytest.mark.slow
def test_a_training_that_hangs_is_killed_after_the_timeout():
    text = r"of 2 steps at once did not end within 8 s, and was killed\. .*: hangs"
    with pytest.raises(tj.testing.ProgramDied, match=text):
        tj.testing.same_resumed(hangs, steps=(1, 1), timeout_s=8)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_our_own_checkpoints_are_exact_and_a_trainer_is_checked():
    report = tj.testing.same_resumed(ours, steps=(2, 2))
    assert "state.params" in report.compared and "state.rng" in report.compared
    assert "metrics of step 4['loss']" in report.compared
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_resumed(trainer, steps=(2, 2))
    assert error.value.findings[0].leaf == "state.params"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (without_a_save, r"make\(\) must return \(step, state, batches\), if the st"),
        (with_half_a_result, r"restore must return \(state, batches\), but returned"),
        (with_no_state, "must return the new state, with the same structure"),
        (lambda: None, "takes no argument, so other processes must"),
    ],
)
def test_other_forms_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        tj.testing.same_resumed(make, steps=(1, 1))


def test_options_are_checked():
    with pytest.raises(ValueError, match="must be two numbers, the steps before"):
        tj.testing.same_resumed(right, steps=(3,))
    with pytest.raises(ValueError, match=r"steps\[1\]=0"):
        tj.testing.same_resumed(right, steps=(3, 0))
    with pytest.raises(ValueError, match="rtol=-1"):
        tj.testing.same_resumed(right, rtol=-1)


def dies():
    raise RuntimeError("no more")


@pytest.mark.slow
def test_a_key_that_is_not_saved_is_found_by_a_new_process():
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_resumed(without_its_key, steps=(2, 1))
    assert error.value.findings[0].leaf == "state['key']"
    with pytest.raises(
        tj.testing.ProgramDied, match="(?s)of 2 steps at once ended.*no more"
    ):
        tj.testing.same_resumed(dies, steps=(1, 1))
