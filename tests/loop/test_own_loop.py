"""A loop of one's own: saved and resumed, stopped, told of its proof."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(26, 3)).astype(np.float32),
    "y": RNG.normal(size=26).astype(np.float32),
}


def loss_fn(params, batch, tower):
    keep = jax.random.bernoulli(tower.rng, 0.5, batch["x"].shape)
    errors = (batch["x"] * keep) @ params["w"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def build(devices=4, loss=loss_fn, **options):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(devices)], towers=4)
    optimizer = optax.sgd(0.05, momentum=0.9)
    return tj.build_train_step(loss, optimizer, strategy, remainder="pad", **options)


def first(step):
    return step.init({"w": np.ones(3, np.float32)}, rng=jax.random.key(3))


def train(until, saving=None, every=2):
    """What a new process does: four batches an epoch, the last of two rows."""
    step = build()
    batches = tj.batches(DATA, 8, epochs=None, seed=1)
    state = first(step)
    if saving is not None:
        state = saving.resume(step, state, batches)
    losses = []
    while int(state.step) < until:
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
        if saving is not None and int(state.step) % every == 0:
            saving.save(step, state, batches)
    step.settle()
    return state, losses


def bits(state):
    leaves = jax.tree.leaves((state.params, state.opt_state, state.step))
    key = jax.random.key_data(state.rng)
    return [np.asarray(x).tobytes() for x in [*leaves, key]]


@pytest.mark.slow
def test_a_resumed_loop_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path):
    undisturbed, losses = train(10)
    saving = tj.Checkpointer(tmp_path, keep=2)
    _, before = train(7, saving)  # the seventh step is lost
    assert saving.steps == (4, 6)
    state, after = train(10, saving)
    assert bits(state) == bits(undisturbed)
    assert before[:6] + after == losses and len(after) == 4


@pytest.mark.slow
def test_a_run_goes_on_from_what_a_loop_saved(tmp_path):
    undisturbed, _ = train(10)
    saving = tj.Checkpointer(tmp_path)
    train(6, saving)
    step = build()
    batches = tj.batches(DATA, 8, epochs=None, seed=1)
    state, history = tj.run(
        step, first(step), batches, steps=10, checkpointer=saving, progress=False
    )
    assert history.steps.tolist() == [7, 8, 9, 10]
    assert bits(state) == bits(undisturbed)


@pytest.mark.slow
def test_it_says_after_which_step_it_goes_on(tmp_path, capsys):
    saving = tj.Checkpointer(tmp_path)
    train(2, saving)
    assert "goes on" not in capsys.readouterr().err
    train(4, saving)
    told = "towerjax: goes on after step 2, from its checkpoint\n"
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_without_batches_the_user_skips_those_that_were_used(tmp_path):
    saving = tj.Checkpointer(tmp_path)
    step = build()
    batches = [{k: x[i : i + 8] for k, x in DATA.items()} for i in (0, 8, 16)]
    state, _ = step(first(step), batches[0])
    saving.save(step, state)
    assert saving.record(1).batches == {"used": 1, "cursor": None}
    again = saving.resume(step, first(step))
    for batch in batches[int(again.step) :]:
        again, _ = step(again, batch)
    expected = first(step)
    for batch in batches:
        expected, _ = step(expected, batch)
    assert bits(again) == bits(expected)


@pytest.mark.slow
def test_evaluations_are_kept_and_the_best_one_stays(tmp_path):
    saving = tj.Checkpointer(tmp_path, keep=1, best="loss")
    step = build()
    state = first(step)
    values = {}
    for value in (0.5, 0.25, 0.75, math.nan):
        state, _ = step(state, DATA)
        values[int(state.step)] = value
        saving.save(step, state, evaluations={"loss": values})
        saving.save(step, state, evaluations={"loss": values})  # once more: no harm
    assert saving.steps == (2, 4) and saving.best_step == 2
    again = saving.record(4).stopping["loss"]
    assert [*again] == [1, 2, 3, 4] and [*again.values()][:3] == [0.5, 0.25, 0.75]
    early = tj.EarlyStopping("loss", patience=2)
    assert early.reason(again) == early.reason(values) is not None


@pytest.mark.slow
def test_another_runs_state_of_a_step_that_is_saved_is_refused(tmp_path):
    """Otherwise its accuracy would stand beside the first run's parameters."""
    step = build(donate=False)
    saving = tj.Checkpointer(tmp_path, best="accuracy")
    mine, _ = step(first(step), DATA)
    others, _ = step(step.init({"w": np.zeros(3, np.float32)}), DATA)
    saving.save(step, mine, evaluations={"accuracy": {1: 0.5}})
    record = saving.record(1)
    for given in ({}, {"accuracy": {1: 0.99}}):
        with pytest.raises(tj.CheckpointError, match="with other values.*params/w"):
            saving.save(step, others, evaluations=given)
    assert saving.record(1) == record and saving.best_step == 1
    saving.save(step, mine, evaluations={"accuracy": {1: 0.75}})  # its own bits
    assert saving.record(1).evaluation == {"accuracy": 0.75}
    # The record of its own bits gets what it lacks, and loses nothing.
    batches = tj.batches(DATA, 8, epochs=None)
    next(batches)
    saving.save(step, mine, batches)
    again = saving.record(1)
    assert again.evaluation == {"accuracy": 0.75} and again.batches["used"] == 1
    assert again.batches["cursor"]["position"] == 1


LEAVES = {
    "bool": lambda bit: jnp.array([False, bool(bit)]),
    "int8": lambda bit: jnp.array([0, bit], jnp.int8),
    "zero": lambda bit: jnp.array([0.0, -0.0 if bit else 0.0], jnp.bfloat16),
    "nan": lambda bit: jnp.array([0x7FC00000 + bit], jnp.uint32).view(jnp.float32),
    "bits": lambda bit: jnp.array([0, bit], jnp.float8_e4m3),
    "key": jax.random.key,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEAVES)
def test_bits_of_every_dtype_are_compared(tmp_path, kind):
    step = build(donate=False, audit=False)
    one, other = (
        step.init({"w": np.ones(3, np.float32)}, extra={"leaf": LEAVES[kind](bit)})
        for bit in (0, 1)
    )
    saving = tj.Checkpointer(tmp_path)
    saving.save(step, one)
    saving.save(step, one)
    with pytest.raises(tj.CheckpointError, match="other values.*extra/leaf"):
        saving.save(step, other)


WRONG_EVALUATIONS = [
    ({"loss": {6.0: 0.5}}, r"a key of evaluations\['loss'\]=6.0 must be a step"),
    ({"loss": {"epoch 1": 0.5}}, "'epoch 1' must be a step number"),
    ({"loss": {np.float32(6): 0.5}}, r"=np.float32\(6.0\) must be a step number"),
    ({"loss": {True: 0.5}}, "=True must be a step number"),
    ({"loss": {-1: 0.5}}, "=-1 must be a step number"),
    ({"loss": {1: "0.5"}}, r"evaluations\['loss'\]\[1\]='0.5' must be one real number"),
    ({"loss": {1: np.ones(2)}}, "must be one real number"),
    ({"loss": {1: 1j}}, "must be one real number"),
    ({"loss": 0.5}, "must be a dict of numbers by step number"),
    ({1: {1: 0.5}}, "must be a dict of numbers by step number"),
    ([1], "must be a dict of numbers by step number"),
]


@pytest.mark.parametrize(("evaluations", "told"), WRONG_EVALUATIONS)
def test_evaluations_that_no_record_can_hold_are_refused(tmp_path, evaluations, told):
    step = build()
    saving = tj.Checkpointer(tmp_path)
    with pytest.raises(ValueError, match=told):
        saving.save(step, first(step), evaluations=evaluations)
    assert saving.steps == ()


@pytest.mark.slow
def test_evaluations_may_be_numbers_of_any_library(tmp_path):
    step = build(donate=False)
    state, _ = step(first(step), DATA)
    saving = tj.Checkpointer(tmp_path, best="loss")
    values = {np.int64(0): np.float32(0.5), 1: jnp.bfloat16(0.25)}
    saving.save(step, state, evaluations={"loss": values, "late": {0: jnp.int8(2)}})
    record = saving.record(1)
    assert record.stopping == {"loss": {0: 0.5, 1: 0.25}, "late": {0: 2.0}}
    assert record.evaluation == {"loss": 0.25} and saving.best_step == 1


@pytest.mark.slow
def test_batches_are_moved_after_a_restore_too(tmp_path, capsys):
    """Otherwise the rows before the checkpoint would be trained on twice."""
    saving = tj.Checkpointer(tmp_path)
    step = build()
    batches = tj.batches(DATA, 8, epochs=None, seed=1)
    state, _ = step(first(step), next(batches))
    saving.save(step, state, batches)
    state = saving.restore(step, first(step))
    batches = tj.batches(DATA, 8, epochs=None, seed=1)
    saving.resume(step, state, batches)
    assert batches.position == 1
    assert "goes on after step 1, from its checkpoint\n" in capsys.readouterr().err
    saving.resume(step, first(step))
    told = "to move batches to their saved position, pass resume(step, state, batches)"
    assert told in capsys.readouterr().err
    other = tj.Checkpointer(tmp_path / "no position")
    other.save(step, state)
    other.resume(step, first(step))
    assert "; skip the first 1 batches\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_says_that_its_batches_are_not_where_they_were(tmp_path, capsys):
    saving = tj.Checkpointer(tmp_path)
    step = build(audit=False)
    batches = tj.batches(DATA, 8, epochs=None, seed=1)

    def told(state, batches):
        tj.run(step, state, batches, steps=1, checkpointer=saving)
        return "batches that are not where those of its checkpoint" in (
            capsys.readouterr().err
        )

    assert not told(first(step), batches)
    assert not told(saving.restore(step, first(step)), batches)  # in pieces
    anew = tj.batches(DATA, 8, epochs=None, seed=1)
    assert told(saving.restore(step, first(step)), anew)


@pytest.mark.slow
def test_a_list_does_not_go_on_for_batches_with_a_position(tmp_path):
    """Their order was another one, so rows would be trained on twice, and never."""
    saving = tj.Checkpointer(tmp_path)
    step = build(audit=False)
    batches = tj.batches(DATA, 8, epochs=None, seed=1)
    state, _ = step(first(step), next(batches))
    saving.save(step, state, batches)
    listed = list(tj.batches(DATA, 8))
    for given in (listed, iter(listed)):
        with pytest.raises(
            tj.CheckpointError, match="lack get_state|have no get_state"
        ):
            tj.run(step, first(step), given, checkpointer=saving, progress=False)
    counting = dataclasses.replace(saving, batches="count")
    state, _ = tj.run(step, first(step), listed, checkpointer=counting, progress=False)
    assert int(state.step) == len(listed)


@pytest.mark.slow
def test_what_cannot_be_saved_or_resumed_is_refused(tmp_path):
    saving = tj.Checkpointer(tmp_path)
    step = build(donate=False)
    start = first(step)
    state, _ = step(start, DATA)
    with pytest.raises(ValueError, match=r"a generator.* skip the first int\(state"):
        saving.save(step, state, (x for x in [DATA]))
    with pytest.raises(ValueError, match="a list, which does not tell its position"):
        saving.resume(step, state, [DATA])
    saving.save(step, state)
    with pytest.raises(
        tj.CheckpointError, match="checkpoint of step 1, which is later"
    ):
        saving.save(step, start)
    with pytest.raises(tj.CheckpointError, match="the checkpoint of step 1 did not"):
        saving.resume(step, start, tj.batches(DATA, 8))
    broken, _ = step(state, {**DATA, "y": DATA["y"] * np.nan})
    with pytest.raises(tj.NonFiniteError, match="step 2 was not finite"):
        saving.save(step, broken)
    assert saving.steps == (1,)


def test_a_rule_of_early_stopping_is_asked_in_a_loop():
    early = tj.EarlyStopping("accuracy", patience=2, goal=0.9)
    values = {1: 0.5, 2: 0.6, 3: 0.55}
    assert early.reason(values) is None
    values[4] = 0.6
    assert early.reason(values) == (
        "accuracy did not improve in 2 evaluations in a row, best 0.6000 after 2"
    )
    assert early.reason({1: 0.95}).startswith("accuracy reached 0.9000")


def told_of_proofs(capsys):
    return [x for x in capsys.readouterr().err.splitlines() if "one tower" in x]


def test_a_loop_is_told_once_that_its_step_is_proved(capsys):
    step = build()
    state = first(step)
    for rows in (26, 26, 25):  # another number of examples is another proof
        state, _ = step(state, {k: x[:rows] for k, x in DATA.items()})
    lines = told_of_proofs(capsys)
    assert len(lines) == 1
    start = "towerjax: proved equal to one tower for batches of 26, in "
    assert lines[0].startswith(start)


@pytest.mark.slow
def test_a_step_of_one_tower_has_nothing_unproved_after_a_call():
    step = tj.build_train_step(loss_fn, optax.sgd(0.05), tj.OneDevice())
    assert step.unproved is None
    step(first(step), DATA)
    assert step.unproved == {}


def test_of_a_step_whose_towers_merge_nothing_no_line_is_printed(capsys):
    def tower_fn(state, batch, tower):
        return {"own": tj.PerTower(batch["x"].sum())}

    def update_fn(state, merged):
        return state, merged

    towers = tj.Mirrored(("cpu:0",), towers=2)
    step = tj.build_step(tower_fn, update_fn, towers)
    state = step.init({"w": np.zeros(3, np.float32)})
    step(state, {"x": DATA["x"][:26]})
    assert "merged" not in capsys.readouterr().err
    assert "merge nothing" in step.unproved["step"]


@pytest.mark.slow
def test_evaluations_and_steps_that_are_not_audited_say_nothing(capsys):
    step = build(audit=False)
    state, _ = step(first(step), DATA)

    def metric_fn(params, batch, tower):
        return {"x": tj.Weighted.mean(batch["x"][:, 0], tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, step.strategy, remainder="pad")
    evaluate(state, DATA)
    assert told_of_proofs(capsys) == []


@pytest.mark.slow
def test_a_loop_that_samples_says_so(capsys):
    def loss(params, batch, tower):
        scores = batch["x"] @ params["w"]
        losses = jnp.exp(scores - jax.lax.stop_gradient(scores.max()))
        return tj.Weighted.mean(losses * 0 + scores**2, tower.weight)

    step = build(loss=loss)
    with pytest.warns(UserWarning, match="not proved equal to one tower: loss"):
        state, _ = step(first(step), {k: x[:24] for k, x in DATA.items()})
    step(state, {k: x[:24] for k, x in DATA.items()})
    [line] = told_of_proofs(capsys)
    assert "; audited in" in line
