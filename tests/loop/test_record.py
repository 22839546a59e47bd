"""What a checkpoint holds: files that Orbax reads, dtypes, containers and cursors."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys

import checkpoint_model as model
import chex
import containers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import CheckpointManager
from orbax.checkpoint.args import PyTreeRestore
from orbax.checkpoint.checkpoint_utils import construct_restore_args
from saved_runs import Stop, stopping_at, train

import towerjax as tj
from towerjax.data.stream import Position, Source
from towerjax.loop.checkpoint import folder, record
from towerjax.types.trees import is_key


@pytest.mark.slow
def test_a_state_holds_values_whose_class_checks_them(tmp_path):
    """Orbax maps names into a tree, which a mean of names would refuse."""

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((w - batch) ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
    mean = tj.Weighted(np.float32(3), np.float32(2))
    extra = {"mean": mean, "b": (np.arange(3.0), None), "a": [np.int32(1)]}
    state = step.init(np.float32(0), extra=extra)
    saving = tj.Checkpointer(tmp_path)
    batches = [np.ones(2, np.float32)]
    state, _ = tj.run(step, state, batches, checkpointer=saving, progress=False)
    back = saving.restore(step, step.init(np.float32(5), extra=extra))
    chex.assert_trees_all_equal((back.params, back.extra), (state.params, state.extra))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*containers.KINDS, "equinox"])
def test_parameters_in_any_container_go_on_as_they_were(kind, tmp_path):
    def loss_fn(params, batch, tower):
        p = containers.as_dicts(params)
        errors = batch["x"] @ p["inner"]["w"] - batch["y"]
        return tj.Weighted.mean(errors**2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.adam(0.1), tj.OneDevice())
    first = {"inner": {"w": model.params()["w"]}, "unused": np.ones(2, np.float32)}
    start = containers.held(kind, first)
    how = {"batches": [*model.batches(epochs=1)]}
    how["batches"] = how["batches"][:2] * 2
    ends = [
        train(step, saving, steps, state=step.init(start), **how)[0]
        for saving, steps in ((None, 4), (tj.Checkpointer(tmp_path), 2))
    ]
    state, history = train(
        step, tj.Checkpointer(tmp_path), 4, state=step.init(start), **how
    )
    assert len(history.metrics["loss"]) == 2 and int(ends[1].step) == 2
    model.assert_same_bits(state, model.bits(ends[0]))
    assert jax.tree.structure(state.params) == jax.tree.structure(start)


# Without this library


@pytest.mark.slow
def test_a_plain_manager_lists_and_restores_every_step(step, three):
    saving = tj.Checkpointer(three)
    with CheckpointManager(three) as manager:
        assert manager.all_steps() == [2, 3, 4] == list(saving.steps)
        restored = [manager.restore(number) for number in saving.steps]
    with CheckpointManager(three) as manager:
        like = {"params": restored[-1]["params"]}
        own = construct_restore_args(like)
        some = PyTreeRestore(like, restore_args=own, partial_restore=True)
        part = manager.restore(4, args=some)
    for number, found in zip(saving.steps, restored, strict=True):
        state = model.bits(saving.restore(step, model.init(step), number=number))
        assert found["params"].pop("none") is None  # Orbax has no arrays of size 0
        params = {name: x for name, x in state.params.items() if x.size}
        chex.assert_trees_all_equal(found["params"], params, strict=True)
        assert found["step"] == number and found["rng"].tolist() == state.rng.tolist()
        assert (
            found["opt_state"][0]["trace"]["w"] == state.opt_state[0].trace["w"]
        ).all()
        local = {name: x.value for name, x in state.local.items()}
        found = {name: x["value"] for name, x in found["local"].items()}
        chex.assert_trees_all_equal(found, local, strict=True)
    assert part["params"].pop("none") is None
    chex.assert_trees_all_equal(part["params"], params, strict=True)
    assert saving.record(4).step == 4  # the manager has changed nothing
    saving.restore(step, model.init(step))


PLAIN = """
import sys, numpy as np, orbax.checkpoint as ocp
manager = ocp.CheckpointManager(sys.argv[1])
found = [manager.restore(number) for number in manager.all_steps()]
print([float(np.sum(x["local"]["rows"]["value"])) for x in found], len(sys.modules))
assert not any(name.startswith("towerjax") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_process_with_one_device_and_orbax_alone_restores_every_step(three):
    words = [sys.executable, "-c", PLAIN, str(three)]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("[32.0, 40.0, 56.0]"), done.stderr


def test_leaves_that_orbax_takes_for_one_are_refused(light, tmp_path):
    params = {"a.b": np.float32(1), "a": {"b": np.float32(2)}}
    step = tj.build_train_step(
        lambda params, batch, tower: tj.Weighted.mean(batch["y"], tower.weight),
        optax.sgd(0.1),
        tj.OneDevice(),
    )
    text = r"params\['a'\]\['b'\] and .*params\['a.b'\] would have the same name"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, tj.Checkpointer(tmp_path), state=step.init(params))


# The record


@pytest.mark.slow
def test_the_record_says_what_is_inside(step, three):
    record = tj.Checkpointer(three).record(4)
    assert record.towers == 8 and record.devices == ("cpu:0", "cpu:1")
    assert record.strategy == repr(step.strategy)
    assert record.versions["jax"] == jax.__version__
    assert record.versions["towerjax"] == tj.__version__
    assert record.batches["used"] == 4
    assert record.batches["cursor"]["position"] == 4
    leaves = {leaf.name: leaf for leaf in record.leaves}
    assert leaves["state.local['rows'].value"].reduction == "SUM"
    assert leaves["state.params['half']"].dtype == "bfloat16"
    assert leaves["state.rng"].dtype == "key of threefry2x32"


EIGHT_BITS = """float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu""".split()
DTYPES = """bool int8 uint8 int16 uint16 int32 uint32 bfloat16 float16 float32
    complex64""".split()


def of_all_dtypes(number):
    """A leaf of each dtype that devices hold, and of each kind of key."""
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    keys = [jax.random.key(number, impl=kind) for kind in kinds]
    numbers = number * np.array([1.0, 2.0, 0.5])
    dtypes = DTYPES + EIGHT_BITS
    values = {name: numbers.astype(jnp.dtype(name)) for name in dtypes}
    return {"keys": [*keys, jax.random.split(keys[0], 3)], **values}


@pytest.mark.slow
def test_every_dtype_comes_back_with_its_bits(tmp_path):
    """Of values that all towers share, and of each tower's own."""

    def light_loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch["y"]) ** 2, tower.weight)

    def init(number):
        values = of_all_dtypes(number)
        local = tj.TowerLocal(values, tj.Reduction.ONLY_FIRST_TOWER)
        return step.init(np.float32(0), extra=values, local=local)

    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"))
    step = tj.build_train_step(light_loss_fn, optax.sgd(0.1), strategy)
    saving = tj.Checkpointer(tmp_path)
    state = init(1)
    state, _ = tj.run(step, state, [model.data()], checkpointer=saving, progress=False)
    found = saving.restore(step, init(2))

    def shown(x):
        numbers = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        return str(x.dtype), x.sharding, numbers.tobytes()

    assert jax.tree.map(shown, found) == jax.tree.map(shown, state)


@pytest.mark.slow
def test_a_later_format_is_refused(step, copied):
    path = copied / "4" / folder.TABLE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(tj.CheckpointError, match="has format 2, .* reads format 1"):
        train(step, tj.Checkpointer(copied))


# Where the data goes on


@pytest.mark.slow
def test_batches_that_do_not_know_where_they_are(light, light_bits, tmp_path):
    def generator():
        yield from model.batches()

    text = "no get_state and set_state. Write batches='count'"
    with pytest.raises(tj.CheckpointError, match=text):
        train(light, tj.Checkpointer(tmp_path), batches=generator())
    anew = tj.Checkpointer(tmp_path / "anew", batches="anew")
    train(light, anew, 3, generator())
    text = "checkpoint of step 3 did not. Pass batches like those, or write"
    with pytest.raises(tj.CheckpointError, match=text):
        train(light, tj.Checkpointer(tmp_path / "anew"), batches=model.batches())
    source = model.batches().at(3)
    state, _ = train(light, anew, batches=(b for b in source))
    model.assert_same_bits(state, light_bits)


@pytest.mark.slow
def test_a_list_that_ends_too_early_is_refused(light, tmp_path):
    source = model.batches()
    batches = [next(source) for _ in range(8)]
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 3, batches)
    copied = shutil.copytree(tmp_path, tmp_path / "copied")
    with pytest.raises(ValueError, match="An earlier run used 3 batches.* end after 2"):
        train(light, saving, None, batches[:2])
    with pytest.raises(ValueError, match="step 7, but batches ended after step 5"):
        train(light, tj.Checkpointer(copied), 7, batches[:5])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cursor", "count"])
def test_what_a_run_left_is_counted_from_the_first(light, light_bits, tmp_path, way):
    """The run that goes on with error.batches is ended, too; then a new process."""
    source = model.batches()
    batches = [next(source) for _ in range(8)]
    saving = tj.Checkpointer(tmp_path)
    saving = dataclasses.replace(saving, batches=way)
    made = (lambda: batches) if way == "cursor" else (lambda: (b for b in batches))
    with pytest.raises(Stop) as caught:
        train(light, saving, batches=made(), hooks=[stopping_at(2)])
    done = int(caught.value.state.step)
    left = {"batches": caught.value.batches, "state": caught.value.state}
    train(light, saving, 6 - done, **left)
    assert saving.record(6).batches["used"] == 6
    state, history = train(light, saving, batches=made())
    assert history.steps.tolist() == [7, 8]
    model.assert_same_bits(state, light_bits)


def test_no_batch_is_left_out_before_the_first_that_was_used():
    source = Source(iter(range(8)))
    stream = source.stream(lambda batch: batch, 0)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    used = stream.get_state()
    source.use(used)
    assert [next(stream), next(stream)] == [3, 4]
    left = source.rest()
    assert next(left) == 3  # by hand
    again = Source(left)
    again.go_to(Position(6))
    assert (again.last, next(again)) == (Position(6), 6)
    with pytest.raises(ValueError, match="2 batches, but these begin after 7"):
        Source(left).go_to(Position(2))


@pytest.mark.slow
def test_a_distributed_data_set_takes_no_other_cursor(light, tmp_path):
    with pytest.raises(ValueError, match="Pass the batches whose position was saved"):
        train(light, tj.Checkpointer(tmp_path), 2)
        batches = light.strategy.distribute_dataset(model.batches())
        train(light, tj.Checkpointer(tmp_path), 3, batches)


def test_bytes_among_a_cursors_fields():
    fields = {"elements": b"\0a", "rows": 2}
    for cursor in (fields, {"a": {"b": b"1"}, "c": None}, b"x"):
        encoded = json.loads(json.dumps(record.encode_cursor(cursor)))
        assert record.decode_cursor(encoded) == cursor
    for bad in ({1}, np.inf, (1, 2), np.arange(2), {"base64": "AA=="}, {1: 2}):
        with pytest.raises(
            tj.CheckpointError, match="get_state .* returned .* exactly"
        ):
            record.encode_cursor({"at": 1, "b": bad})


def test_a_record_has_the_real_numbers_of_an_evaluation():
    values = {
        "loss": 0.5,
        "half": jnp.bfloat16(1.5),
        "count": np.int64(3),
        "tree": {"a": 1.0},
        "pair": (1.0, [2.0, 3.0]),
        "turned": 1j,
        "column": np.ones(2),
        "nan": np.nan,
        "large": np.inf,
    }
    kept = {"loss": 0.5, "half": 1.5, "count": 3.0, "large": math.inf}
    assert record.real_scalars(values) == kept


def test_a_record_that_could_not_be_read_again_is_not_saved():
    good = record.CheckpointRecord(
        3, "OneDevice()", 1, ("cpu:0",), (), batches={"used": 3, "cursor": None}
    )
    values = {"loss": {1: math.nan, 2: math.inf}}
    record.check_readable(dataclasses.replace(good, stopping=values))
    for stopping in ({"loss": {1.5: 0.5}}, {"loss": {"x": 0.5}}, {"loss": {1: "x"}}):
        with pytest.raises(tj.CheckpointError, match="record of step 3 could not be"):
            record.check_readable(dataclasses.replace(good, stopping=stopping))


@pytest.mark.slow
def test_what_is_restored_says_where_it_shall_lie(step, tmp_path):
    state = model.init(step)
    saving = tj.Checkpointer(tmp_path)
    host = jax.tree.map(np.asarray, state.params)
    host = dataclasses.replace(state, params=host)
    (tmp_path / "12").mkdir()
    for into, given, number, text in (
        (step, None, 12, "The state is a NoneType"),
        (step, host, 12, r"params\['w'\] is on the host.*Move it with step.place"),
        (model.loss_fn, state, 12, "step=.* cannot be used here"),
        (step, state, 12.0, "no checkpoint of step 12.0"),
    ):
        with pytest.raises(ValueError, match=text):
            saving.restore(into, given, number=number)
