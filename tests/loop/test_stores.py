"""A run keeps all its files in an object store as it does on a disk."""

import json
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
from saved_runs import metrics_of, train
from test_writers import events_of, record

import towerjax as tj


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """The store is empty, and no test makes a folder of its name on this machine."""
    store.FILES.clear()
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


@pytest.fixture(scope="module")
def light():
    return model.build_light()


@pytest.fixture(scope="module")
def light_bits(light):
    return model.bits(train(light, None)[0])


class Bucket(DirFileSystem):
    """The buckets of gs://, in a folder; it keeps listings as fsspec's do."""

    protocol = "gs"

    def __init__(self, path, files):
        super().__init__(path, files)
        self.listings = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path).removeprefix("gs://").rstrip("/")

    def ls(self, path, *args, **kwargs):
        if path not in self.listings:
            self.listings[path] = super().ls(path, *args, **kwargs)
        return self.listings[path]

    def invalidate_cache(self, path=None):
        self.listings.clear()


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Makes a process's view of gs://, for its files by fsspec and TensorStore."""
    from orbax.checkpoint._src.path import gcs_utils

    cloud = tmp_path / "cloud"
    (cloud / "bucket").mkdir(parents=True)

    def in_folder(path):
        path = str(cloud / path.removeprefix("gs://"))
        return {"driver": "file", "path": path}

    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", in_folder)

    def seen():
        files = Bucket(str(cloud), LocalFileSystem(auto_mkdir=True))
        monkeypatch.setattr(backend.fsspec_backend, "fs", lambda _: files)

    seen()
    return seen


@pytest.mark.slow
def test_a_run_goes_on_from_gs(light, light_bits, cloud, monkeypatch):
    """What was not finished is deleted, and does not count."""
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)  # nothing is copied
    saving = tj.Checkpointer("gs://bucket/run", every=2, keep=2)
    train(light, saving, 3)
    (saving.path / "5" / "default").mkdir(parents=True)
    (saving.path / "5" / "default" / "_METADATA").write_text("{")
    assert saving.steps == (2, 3) and saving.record(3).batches["used"] == 3
    state, history = train(light, saving)
    assert saving.steps == (6, 8) and history.steps.tolist() == [4, 5, 6, 7, 8]
    model.assert_same_bits(state, light_bits)
    model.assert_same_bits(saving.restore(light, model.init(light)), light_bits)
    assert {path.name for path in saving.path.iterdir()} == {".lock", "6", "8"}
    with CheckpointManager("gs://bucket/run") as manager:
        assert manager.all_steps() == [6, 8]
        assert manager.restore(8)["params"] == np.asarray(light_bits.params)


@pytest.mark.slow
def test_the_best_stays_in_gs(light, cloud):
    saving = tj.Checkpointer("gs://bucket/run", keep=1, best="loss")
    train(light, saving, 4, **metrics_of([3, 1, 2, 4]))
    assert saving.steps == (2, 4) and saving.best_step == 2


def test_who_watches_gs_sees_new_checkpoints(light, cloud, monkeypatch):
    """Of another process, such as an evaluator beside a training."""
    saving = tj.Checkpointer("gs://bucket/run", every=1)
    train(light, saving, 1)
    watching = backend.fsspec_backend.fs(None)
    assert saving.steps == (1,)
    cloud()
    train(light, saving, 2)
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda _: watching)
    assert saving.steps == (1, 2)


def test_a_damaged_file_in_gs_is_named(light, cloud):
    saving = tj.Checkpointer("gs://bucket/run")
    train(light, saving, 1)
    path = saving.path / "1" / "default" / "_METADATA"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(tj.CheckpointError, match="run/1' was changed .*_METADATA has"):
        saving.restore(light, model.init(light))


def test_a_store_that_cannot_be_reached_is_named(light):
    """Here the packages that reach it are not installed."""
    path = "gs://bucket/run"
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
        tj.sweep(lambda rate: rate, {"rate": [0.1]}, [], results=path)


def lines_of(name):
    return [json.loads(line) for line in store.FILES[name].splitlines()]


def test_lines_are_stored_with_evaluations_and_at_the_end():
    path = "fake://bucket/run.jsonl"
    writer = tj.JsonLines(path).open(0)
    writer.write(record("train", 1, 0.5, {"loss": 2.0}))
    assert path not in store.FILES
    writer.write(record("eval", 1, 0.5, {"loss": 1.0}))
    assert [x["kind"] for x in lines_of(path)] == ["train", "eval"]
    writer.write(record("train", 2, 0.5, {"loss": 0.5}))
    writer.close()
    assert [x["step"] for x in lines_of(path)] == [1, 1, 2]


@pytest.mark.slow
def test_a_stored_file_of_steps_done_again_has_each_once(light, tmp_path):
    path = "fake://bucket/run.jsonl"
    same = tmp_path / "run.jsonl"
    for out in (path, same):
        kept = tmp_path / f"saved {len(str(out))}"
        writers = [tj.JsonLines(out)]
        saving = tj.Checkpointer(kept, every=2)
        state, _ = train(light, saving, 4, writers=writers)
        train(light, None, 3, state=state, writers=writers)
        train(light, saving, 6, writers=writers)
    stored = lines_of(path)
    local = [*map(json.loads, same.read_text().splitlines())]
    assert [x["step"] for x in stored] == [1, 2, 3, 4, 5, 6]
    assert [x["metrics"] for x in stored] == [x["metrics"] for x in local]
    with pytest.raises(ValueError, match="holds an earlier run up to step 6"):
        train(light, None, 1, writers=[tj.JsonLines(path)])


def test_curves_are_stored():
    writer = tj.TensorBoard("fake://bucket/logs").open(0)
    writer.write(record("train", 1, 1.0, {"x": 1.0}))
    assert store.FILES == {}
    writer.write(record("eval", 1, 1.0, {"x": 2.0}))
    [path] = epath.Path("fake://bucket/logs").iterdir()
    assert "/events.out.tfevents." in str(path)
    assert [x[2] for x in events_of(path)] == [{}, {}, {"train/x": 1}, {"eval/x": 2}]
    writer.write(record("train", 2, 1.0, {"x": 3.0}))
    writer.close()
    assert len(events_of(path)) == 5
    with pytest.raises(ValueError, match="'fake://bucket/logs' holds event files"):
        tj.TensorBoard("fake://bucket/logs").open(0)
    tj.TensorBoard("fake://bucket/logs").open(2).close()


@pytest.mark.slow
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
