"""A run keeps all its files in an object store as it does on a disk."""

import json
import math
import pathlib
import tempfile

import checkpoint_model as model
import jax
import numpy as np
import object_store as store
import optax
import pytest
from etils import epath
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint import CheckpointManager
from test_checkpoint import metrics_of, saved_at_once, train
from test_writers import events_of

import towerjax as tj
from towerjax.loop.checkpoint import folder
from towerjax.loop.files import StoredFile, checked_path
from towerjax.loop.writers import Record
from towerjax.tools.sweep.grid import RecordFile


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """The store is empty, and no test makes a folder of its name on this machine."""
    store.FILES.clear()
    store.CHANGES.clear()
    store.LIMIT[0] = 10**9
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


@pytest.fixture(scope="module")
def light():
    return model.build_light()


@pytest.fixture(scope="module")
def light_bits(light):
    return model.bits(train(light, None)[0])


# Checkpoints


def test_a_run_goes_on_from_a_store(light, light_bits):
    saving = tj.Checkpointer("fake://bucket/run", every=2, keep=2)
    train(light, saving, 5)
    assert saving.steps == (4, 5) and saving.record(5).batches["used"] == 5
    state, history = train(light, saving)
    assert history.steps.tolist() == [6, 7, 8] and saving.steps == (6, 8)
    model.assert_same_bits(state, light_bits)
    model.assert_same_bits(saving.restore(light, model.init(light)), light_bits)
    folders = {name.split("/")[4] for name in store.FILES}
    assert folders == {".lock", "6", "8"}  # of the others nothing is left
    assert "fake://bucket/run/8/commit_success.txt" in store.FILES


def test_the_best_stays_in_a_store(light):
    saving = tj.Checkpointer("fake://bucket/run", keep=1, best="loss")
    train(light, saving, 4, **metrics_of([3, 1, 2, 4]))
    assert saving.steps == (2, 4) and saving.best_step == 2


@pytest.mark.slow
def test_towers_and_devices_are_others_in_a_store(tmp_path):
    step, other = model.build(2), model.build(4)
    saving = tj.Checkpointer(epath.Path("fake://bucket"))
    state, _ = train(step, saving, 3)
    expected = model.bits(state)
    model.assert_same_bits(saving.restore(other, model.init(other)), expected)


@pytest.mark.slow
def test_killed_at_any_write_it_goes_on_from_what_counts(light, light_bits):
    path = "fake://bucket/run"
    train(light, tj.Checkpointer(path, every=4, keep=1))
    last, inside = len(store.CHANGES), 0
    for number in range(2, last, max(1, last // 8)):
        store.FILES.clear()
        store.CHANGES.clear()
        store.LIMIT[0] = number
        saving = tj.Checkpointer(path, every=4, keep=1)
        store.REFUSED.clear()
        try:
            train(light, saving)
        except (tj.CheckpointError, store.GoneError):
            assert store.REFUSED
        else:  # Orbax makes a few changes more in one run than in another.
            assert not store.REFUSED and number > 0.9 * last
        store.LIMIT[0] = 10**9
        inside += bool(saving.steps) and len({*store.FILES}) > 20
        for found in saving.steps:
            saving.restore(light, model.init(light), number=found)
        state, _ = train(light, saving)
        model.assert_same_bits(state, light_bits)
        folders = {name.split("/")[4] for name in store.FILES} - {".lock"}
        assert folders == {*map(str, saving.steps)} and "8" in folders, number
    assert inside >= 2


def test_a_damaged_file_of_a_store_is_named(light):
    saving = tj.Checkpointer("fake://bucket")
    train(light, saving, 1)
    names = [x for x in store.FILES if "/1/" in x and not x.endswith("success.txt")]
    assert len(names) > 8
    for name in names:
        content = store.FILES[name]
        for bad in (content[:-1], content + b"x"):
            store.FILES[name] = bad
            with pytest.raises(tj.CheckpointError, match="bucket/1' is not what was"):
                saving.restore(light, model.init(light))
        store.FILES[name] = content
    saving.restore(light, model.init(light))


def test_several_processes_save_only_where_orbax_does(light, monkeypatch):
    monkeypatch.setitem(vars(light.strategy.placement), "num_processes", 2)
    saving = tj.Checkpointer("fake://bucket")
    with pytest.raises(tj.CheckpointError, match="cannot save to 'fake://.* no driver"):
        saved_at_once(light, saving, model.init(light))


class Bucket(DirFileSystem):
    """The buckets of gs://, in a folder."""

    protocol = "gs"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path).removeprefix("gs://").rstrip("/")


def test_orbax_writes_to_gs_by_itself(light, light_bits, tmp_path, monkeypatch):
    """With files in place of Google's, which are reached by fsspec and TensorStore."""
    from orbax.checkpoint._src.path import gcs_utils

    cloud = tmp_path / "cloud"
    (cloud / "bucket").mkdir(parents=True)
    files = Bucket(str(cloud), LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda _: files)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)

    def in_folder(path):
        path = str(cloud / path.removeprefix("gs://"))
        return {"driver": "file", "path": path}

    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", in_folder)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)  # nothing is copied
    saving = tj.Checkpointer("gs://bucket/run", every=2, keep=2)
    train(light, saving, 3)
    folder.discard(saving.path, 3)  # of which nothing is left to be finished
    assert saving.steps == (2, 3)
    state, _ = train(light, saving)
    model.assert_same_bits(state, light_bits)
    with CheckpointManager("gs://bucket/run") as manager:
        assert manager.all_steps() == [6, 8]
        assert manager.restore(8)["params"] == np.asarray(light_bits.params)


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run"])
def test_a_store_that_cannot_be_reached_is_named(light, path):
    """Here the packages that reach it are not installed."""
    with pytest.raises(
        tj.CheckpointError, match=f"cannot be written to '{path}'.*nstall"
    ):
        train(light, tj.Checkpointer(path))
    with pytest.raises(
        tj.CheckpointError, match=f"cannot be read from '{path}'.*nstall"
    ):
        print(tj.Checkpointer(path).steps)
    for writer in tj.JsonLines(path), tj.TensorBoard(path):
        with pytest.raises(ValueError, match=f"='{path}' cannot be written to.*nstall"):
            writer.open(0)


@pytest.mark.parametrize(
    "path", ["ftp://host/run", pathlib.Path("gs://bucket"), pathlib.Path("fake://b")]
)
def test_an_address_that_would_be_a_local_folder_is_refused(path):
    for make in (tj.Checkpointer, tj.JsonLines, tj.TensorBoard):
        with pytest.raises(ValueError, match="address that etils.epath knows"):
            make(path)
    with pytest.raises(ValueError, match="results=.* address that etils.epath knows"):
        RecordFile(path, {})


def test_a_local_path_is_made_absolute(tmp_path):
    for path in ("run", pathlib.Path("run"), epath.Path("run")):
        assert checked_path("x", path, "a file") == epath.Path(tmp_path / "run")


# Writers


def lines_of(name):
    return [json.loads(line) for line in store.FILES[name].splitlines()]


def test_lines_are_stored_with_evaluations_and_at_the_end():
    path = "fake://bucket/run.jsonl"
    writer = tj.JsonLines(path).open(0)
    writer.write(Record("train", 1, 0.5, {"loss": 2.0}))
    assert path not in store.FILES
    writer.write(Record("eval", 1, 0.5, {"loss": 1.0}))
    assert [x["kind"] for x in lines_of(path)] == ["train", "eval"]
    writer.write(Record("train", 2, 0.5, {"loss": 0.5}))
    writer.close()
    assert [x["step"] for x in lines_of(path)] == [1, 1, 2]


def test_a_stored_file_of_steps_done_again_has_each_once(light, tmp_path):
    path, same = "fake://bucket/run.jsonl", tmp_path / "run.jsonl"
    for out in (path, same):
        writers, saving = [tj.JsonLines(out)], tj.Checkpointer(f"{out}-saved", every=2)
        state, _ = train(light, saving, 4, writers=writers)
        train(light, None, 3, state=state, writers=writers)
        train(light, saving, 6, writers=writers)
    stored, local = lines_of(path), [*map(json.loads, same.read_text().splitlines())]
    assert [x["step"] for x in stored] == [1, 2, 3, 4, 5, 6]
    assert [x["metrics"] for x in stored] == [x["metrics"] for x in local]
    with pytest.raises(ValueError, match="holds an earlier run up to step 6"):
        train(light, None, 1, writers=[tj.JsonLines(path)])


def test_storing_takes_a_tenth_of_the_time_at_most(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow:
        stored = []

        def write_bytes(self, data):
            self.stored.append(data)
            now[0] += 3

    file = StoredFile(Slow(), b"a", flush_s=10)
    for at in (9, 10, 42, 44, math.inf):
        now[0] = at
        file.write(b"b")
    assert [len(data) for data in Slow.stored] == [3, 5, 6]


def test_curves_are_stored():
    writer = tj.TensorBoard("fake://bucket/logs").open(0)
    writer.write(Record("train", 1, 1.0, {"x": 1.0}))
    assert store.FILES == {}
    writer.write(Record("eval", 1, 1.0, {"x": 2.0}))
    [path] = epath.Path("fake://bucket/logs").iterdir()
    assert "/events.out.tfevents." in str(path)
    assert [x[2] for x in events_of(path)] == [{}, {}, {"train/x": 1}, {"eval/x": 2}]
    writer.write(Record("train", 2, 1.0, {"x": 3.0}))
    writer.close()
    assert len(events_of(path)) == 5
    with pytest.raises(ValueError, match="'fake://bucket/logs' holds event files"):
        tj.TensorBoard("fake://bucket/logs").open(0)
    tj.TensorBoard("fake://bucket/logs").open(2).close()


# Sweeps


def test_a_sweep_goes_on_from_a_store(monkeypatch):
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch) ** 2, tower.weight)

    def build(rate):
        step = tj.build_train_step(loss_fn, optax.sgd(rate), tj.OneDevice())
        return step, step.init(np.float32(0))

    def swept(rates):
        data = [np.full(4, 2.0, np.float32)] * 3
        options = {"results": path, "progress": False}
        return tj.sweep(build, {"rate": rates}, data, **options)

    path = "fake://bucket/sweep.jsonl"
    first = swept([0.1, 0.2])
    assert [x["config"] for x in lines_of(path)] == [{"rate": 0.1}, {"rate": 0.2}]
    store.FILES[path] += b'{"config": {"ra'  # torn, by another program
    all_of_them = swept([0.1, 0.2, 0.3])
    assert [x["config"]["rate"] for x in lines_of(path)] == [0.1, 0.2, 0.3]
    jax.tree.map(
        np.testing.assert_array_equal,
        [member.metrics for member in first.members],
        [member.metrics for member in all_of_them.members[:2]],
    )
