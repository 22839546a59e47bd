"""Checkpoints that are damaged, deleted or forged: told by name, never read."""

import errno
import json
import os
import pickle
import shutil

import checkpoint_model as model
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath
from saved_runs import train

import towerjax as tj
from towerjax.loop.checkpoint import folder


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


def files_told_of(saved):
    """The files of a checkpoint without which it is not restored."""
    unread = ("_CHECKPOINT_METADATA", "commit_success.txt")
    return [path for path in files_of(saved) if path.name not in unread]


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


DAMAGES = {
    "cut": lambda x: x[:-1],
    "longer": lambda x: x + b"x",
    "flipped": lambda x: flipped(x, len(x) * 4),
    "empty": lambda x: b"",
    "zeros": lambda x: bytes(len(x)),
}
NO_FILE = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to(path.with_name("outside")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["missing", *DAMAGES, *NO_FILE])
def test_every_file_that_is_damaged_is_named(step, copied, kind):
    """And never waited for, as a pipe is for who writes into it."""
    saving = tj.Checkpointer(copied)
    like = model.init(step)
    assert len(files_told_of(copied / "4")) > 8
    for path in files_told_of(copied / "4"):
        content = path.read_bytes()
        if kind in DAMAGES:
            path.write_bytes(DAMAGES[kind](content))
        else:
            path.unlink()
            NO_FILE.get(kind, lambda path: None)(path)
        with pytest.raises(tj.CheckpointError, match="/4' was changed after") as error:
            saving.restore(step, like)
        assert path.relative_to(copied / "4").as_posix() in str(error.value)
        path.rmdir() if kind == "folder" else path.unlink(missing_ok=True)
        path.write_bytes(content)
    saving.restore(step, like)


@pytest.mark.slow
def test_a_flipped_bit_is_told_or_harmless(tmp_path):
    """Of a large array, too, where Orbax alone reads another number."""
    step = model.build_light()
    numbers = np.random.default_rng(0)
    big = numbers.normal(size=30_000).astype(np.float32)
    state = step.init(np.float32(0), extra={"big": big})
    saving = tj.Checkpointer(tmp_path)
    state, _ = train(step, saving, 1, state=state)
    right = model.bits(state)
    record = saving.record(1)
    told = 0
    files = files_of(tmp_path / "1")
    sizes = np.array([path.stat().st_size for path in files])
    for place in numbers.choice(
        len(files), 60, p=sizes / sizes.sum() / 2 + 0.5 / len(sizes)
    ):
        content = files[place].read_bytes()
        files[place].write_bytes(flipped(content, numbers.integers(8 * len(content))))
        try:
            model.assert_same_bits(saving.restore(step, state), right)
            assert saving.record(1) == record
        except tj.CheckpointError:
            told += 1
        files[place].write_bytes(content)
    assert told > 30


@pytest.mark.slow
@pytest.mark.parametrize("name, code", [
    ("manifest.ocdbt", "ECONNRESET"), ("manifest.ocdbt", "EACCES"),
    (folder.TABLE, "EIO"), (folder.TABLE, "ESTALE"),
])  # fmt: skip
def test_what_cannot_be_read_now_is_not_called_damaged(
    step, three, monkeypatch, name, code
):
    """To whom it is called damaged deletes it."""
    kind = type(epath.Path(three))
    methods = {"open": kind.open, "read_bytes": kind.read_bytes}

    def refusing(method):
        def called(path, *args):
            if path.name == name:
                number = getattr(errno, code)
                raise OSError(number, os.strerror(number), str(path))
            return methods[method](path, *args)

        return called

    for method in methods:
        monkeypatch.setattr(kind, method, refusing(method))
    with pytest.raises(tj.CheckpointError) as error:
        tj.Checkpointer(three).restore(step, model.init(step))
    text = (
        f"/4': {os.strerror(getattr(errno, code))} ({code}). The files may be undamaged"
    )
    assert text in str(error.value) and "delete" not in str(error.value)


@pytest.mark.slow
def test_a_lock_that_was_deleted_lets_the_first_run_write_no_more(light, tmp_path):
    """For others may write there now; the lock of an ended run hinders none."""

    def second(number, _):
        if number == 1:  # before the first has written anything
            (tmp_path / ".lock").unlink()
            train(light, tj.Checkpointer(tmp_path), 1)

    saving = tj.Checkpointer(tmp_path, every=2)
    with pytest.raises(tj.CheckpointError, match=r"\.lock', .* was deleted or repl"):
        train(light, saving, 4, hooks=[second])
    assert saving.steps == (1,)
    train(light, saving, 3)
    assert saving.steps == (1, 2, 3)


@pytest.mark.parametrize("kind", NO_FILE)
def test_a_lock_that_is_no_plain_file_is_refused(light, tmp_path, kind):
    """A run writes its name into the lock, and not where a link leads."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    NO_FILE[kind](tmp_path / ".lock")
    with pytest.raises(tj.CheckpointError, match=r"/\.lock', .* is a link.* Del"):
        train(light, tj.Checkpointer(tmp_path))
    assert outside.read_text() == "mine"


@pytest.mark.slow
def test_what_others_own_is_refused_before_the_first_step(step, copied, monkeypatch):
    """A checkpoint that cannot be deleted would end the run after its first save."""

    def dispatch(*_):
        raise AssertionError("a step was done")

    own = str(copied / "2" / "default")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != own)
    monkeypatch.setattr(type(step), "dispatch", dispatch)
    text = r"deleted from '.*copied': '.*/2/default' is read-only \(EACCES\)\. Name"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, tj.Checkpointer(copied), 6)


@pytest.mark.slow
def test_a_copy_under_another_steps_name_is_refused(step, copied):
    (copied / "4").rename(copied / "9")
    saving = tj.Checkpointer(copied)
    text = "/9' was saved after step 4.* Name it '4' or"
    for call in (
        lambda: saving.record(9),
        lambda: saving.restore(step, model.init(step)),
        lambda: train(step, saving),
    ):
        with pytest.raises(tj.CheckpointError, match=text):
            call()
    (copied / "04").mkdir()  # not a name that is given
    assert saving.steps == (2, 3, 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "default/more"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_pipe_at_which_orbax_would_wait_is_refused(step, copied, name, number):
    """Of an older checkpoint, too: a manager reads all of them."""
    path = copied / str(number) / name
    saving = tj.Checkpointer(copied)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    text = f"/{number}' was changed after it was written: {name} is not a file. Rest"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, saving, 5)
    with pytest.raises(tj.CheckpointError, match=text):
        saving.restore(step, model.init(step), number=number)


def test_a_table_that_names_a_file_outside_is_refused(light, tmp_path):
    saving = tj.Checkpointer(tmp_path / "run")
    train(light, saving, 1)
    (tmp_path / "x").write_text("outside")
    table = folder.read_table(saving.path / "1")
    size_and_crc = folder._checksum(epath.Path(tmp_path / "x"))
    table["files"]["../../x"] = size_and_crc
    folder.write_table(saving.path / "1", table)
    with pytest.raises(tj.CheckpointError, match=r"\.\./x is missing, or not a file"):
        saving.restore(light, model.init(light))


# Fields of the record that a forger changes, and their new values.
FORGED = {
    "step": [None, "1", [1], {}],
    "strategy": [3, None],
    "towers": ["x", None, -1, 2**33],
    "devices": [3, [1], None],
    "leaves": [3, [], [3], [{}], [{"name": "x"}], {"a": 1}],
    "batches": [3, {}, {"used": "1", "cursor": None}, {"used": 1}],
    "batch_rows": [3, ["x"], [2**33]],
    "evaluation": [3, {"loss": "x"}, {"loss": [1]}],
    "evaluation_due": [3, "no"],
    "stopping": [3, {"loss": 1}, {"loss": {"x": 1}}],
    "versions": [3, {"jax": 1}],
    "programs": [3, {"towers": 3}, {"towers": [1]}],
    "more": [1],
}


@pytest.mark.slow
def test_a_forged_table_is_refused_in_words(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    table = folder.read_table(saving.path / "1")
    forged = [{"record": 3}, {"record": None}, {"files": 3}, {"files": {"x": [1]}}]
    forged += [
        {"record": {**table["record"], name: value}}
        for name, values in FORGED.items()
        for value in values
    ]
    for change in forged:
        folder.write_table(saving.path / "1", {**table, **change})
        with pytest.raises(tj.CheckpointError):
            saving.restore(light, model.init(light))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("given", ["list", "generator"])
def test_forged_rows_of_batches_take_no_memory(light, tmp_path, given):
    """Each next batch would be padded to two hundred million rows."""
    saving = tj.Checkpointer(tmp_path, batches="count")
    train(light, saving, 1)
    table = folder.read_table(saving.path / "1")
    table["record"]["batch_rows"] = [200_000_000]
    folder.write_table(saving.path / "1", table)
    batches = [{"y": np.ones(8, np.float32), "x": np.ones((8, 3), np.float32)}] * 2
    step = model.build_light()
    with pytest.raises(ValueError, match="padded to 200,000,000, which takes 2.98 GiB"):
        train(step, saving, 2, batches if given == "list" else iter(batches))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("cursor", [3, "x", {}, {"position": None}, {"position": -1}])
def test_a_forged_position_is_refused_in_words(light, tmp_path, cursor):
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    table = folder.read_table(saving.path / "1")
    good = table["record"]["batches"]["cursor"]
    forged = {**good, **cursor} if cursor and isinstance(cursor, dict) else cursor
    table["record"]["batches"]["cursor"] = forged
    folder.write_table(saving.path / "1", table)
    text = "is not a position|position=.* must be|belongs to other batches"
    with pytest.raises(ValueError, match=text):
        train(light, saving, 2)


ESCAPE = "\x1b]0;title\x07"


def test_what_a_foreign_checkpoint_says_is_printable(light, tmp_path, capsys):
    """A terminal would obey its escapes."""
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    table = folder.read_table(saving.path / "1")
    good = table["record"]
    name = f"state.params{ESCAPE}"
    leaves = [{**good["leaves"][0], "name": name}, *good["leaves"][1:]]
    more = {"name": name, "dtype": ESCAPE, "shape": [2], "reduction": None}
    cursor = {**good["batches"]["cursor"], "batch_size": ESCAPE}
    forged = [
        {"leaves": leaves},
        {"leaves": [*good["leaves"], more]},
        {ESCAPE: 1},
        {"evaluation": {"loss": ESCAPE}},
        {"batches": {"used": 1, "cursor": cursor}},
    ]
    for change in forged:
        record = {**good, **change}
        folder.write_table(saving.path / "1", {**table, "record": record})
        with pytest.raises(ValueError) as caught:
            saving.resume(light, model.init(light), model.batches())
        assert str(caught.value).isprintable()
    files = {**table["files"], ESCAPE: [1, 2]}
    folder.write_table(saving.path / "1", {**table, "files": files})
    with pytest.raises(tj.CheckpointError, match=r"\\x1b\]0;title\\x07 is missing"):
        saving.restore(light, model.init(light))
    record = {**good, "strategy": ESCAPE, "versions": {ESCAPE: "1", "jax": ESCAPE}}
    folder.write_table(saving.path / "1", {**table, "record": record})
    saving.resume(light, model.init(light), model.batches())
    told = capsys.readouterr().err
    assert told.count("\\x1b]0;title\\x07") == 3 and told.strip().isprintable()


@pytest.mark.slow
def test_containers_that_have_no_leaves_belong_to_the_model(tmp_path):
    """AdamW's leaves are those of Adam, but not the tuples around them."""
    saving = tj.Checkpointer(tmp_path)

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch) ** 2, tower.weight)

    def run(optimizer, steps):
        step = tj.build_train_step(loss_fn, optimizer, tj.OneDevice())
        batches = [np.ones(8, np.float32)] * steps
        options = {"checkpointer": saving, "progress": False}
        return tj.run(step, step.init(np.float32(0)), batches, **options)

    run(optax.adam(0.1), 1)
    text = (
        r"another model: .* state\['opt_state'\] is a list of 2, expected a list of 3"
    )
    with pytest.raises(tj.CheckpointError, match=text):
        run(optax.adamw(0.1), 2)


def test_chunks_larger_than_their_leaf_are_refused(light, tmp_path):
    """TensorStore would ask for their memory, and the process would end."""
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    where = saving.path / "1"
    store = {"driver": "ocdbt", "base": f"file://{where}/default/"}
    files = tensorstore.KvStore.open(store).result()
    name = "rng/.zarray"
    fields = {**json.loads(files[name]), "chunks": [2**34]}
    files.write(name, json.dumps(fields).encode()).result()
    record_of = folder.read_table(where)["record"]
    (where / folder.TABLE).unlink()
    folder.seal(where, record_of)
    text = r"rng'\] has the shape \[2\], but chunks of \[17179869184\]. Restore the"
    with pytest.raises(tj.CheckpointError, match=text):
        saving.restore(light, model.init(light))


def test_a_link_at_the_name_of_a_table_that_is_written_leads_nowhere(light, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    saving = tj.Checkpointer(tmp_path / "run")
    train(light, saving, 1)
    (tmp_path / "run" / "1" / f"{folder.TABLE}.tmp").symlink_to(outside)
    folder.write_table(saving.path / "1", folder.read_table(saving.path / "1"))
    assert outside.read_text() == "mine"
    names = [path.name for path in (saving.path / "1").iterdir()]
    assert [name for name in names if name.startswith(folder.TABLE)] == [folder.TABLE]


def test_a_file_that_has_the_name_of_a_checkpoint_is_refused(light, tmp_path):
    (tmp_path / "10").write_text("notes")
    saving = tj.Checkpointer(tmp_path)
    with pytest.raises(tj.CheckpointError, match="/10' is not a folder, but the check"):
        train(light, saving, 1)
    assert saving.steps == () and (tmp_path / "10").read_text() == "notes"


def deleted_while_read(copied, monkeypatch, name):
    """Have 4 be saved and 3 be deleted as soon as a file of 3 is read."""
    (copied / "4").rename(copied / "later")
    read = getattr(folder, name)

    def reading(path, *args):
        if (copied / "later").exists():
            (copied / "later").rename(copied / "4")
            shutil.rmtree(copied / "3")
        return read(path, *args)

    monkeypatch.setattr(folder, name, reading)


@pytest.mark.slow
def test_what_is_deleted_while_it_is_read_is_not_called_damaged(
    step, copied, monkeypatch
):
    """An evaluator reads beside a training: the newest there is then."""
    saving = tj.Checkpointer(copied, best="loss")
    like = model.init(step)
    expected = model.bits(saving.restore(step, like))
    for name in ("_checksum", "read_table"):
        shutil.copytree(copied / "4", copied / "3", dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            deleted_while_read(copied, patch, name)
            model.assert_same_bits(saving.restore(step, like), expected)
    gone = [
        lambda: saving.restore(step, like, number=3),
        lambda: saving.record(3),
    ]
    for call in gone:
        shutil.copytree(copied / "4", copied / "3")
        with monkeypatch.context() as patch:
            deleted_while_read(copied, patch, "_is_file")
            with pytest.raises(tj.CheckpointError, match=r"no checkpoint of step 3 in"):
                call()
    shutil.copytree(copied / "4", copied / "3")
    with monkeypatch.context() as patch:
        deleted_while_read(copied, patch, "_is_file")
        assert saving.best_step is None


@pytest.mark.slow
def test_a_run_moves_a_checkpoint_away_before_it_deletes_it(
    light, tmp_path, monkeypatch
):
    """So that what can be read under its number is whole."""
    deleted = []
    kind = type(epath.Path(tmp_path))
    rmtree = kind.rmtree
    monkeypatch.setattr(
        kind, "rmtree", lambda path, *args: deleted.append(path) or rmtree(path, *args)
    )
    train(light, tj.Checkpointer(tmp_path, every=1, keep=1), 4)
    assert {*deleted} == {epath.Path(tmp_path / folder.DELETED)} and len(deleted) == 3


@pytest.mark.slow
def test_what_a_killed_process_left_does_not_count(step, copied):
    for name in ("9.orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp-7"):
        (copied / name).mkdir()
    (copied / "9.orbax-checkpoint-tmp" / folder.TABLE).write_text("{")
    (copied / "notes.orbax-checkpoint-tmp").write_text("mine")
    saving = tj.Checkpointer(copied)
    assert saving.steps == (2, 3, 4)
    train(step, saving, 5)
    assert saving.steps == (3, 4, 5)
    left = [path.name for path in copied.glob("*tmp*")]
    assert left == ["notes.orbax-checkpoint-tmp"]


def test_nothing_is_pickled(light, tmp_path, monkeypatch):
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    saving.restore(light, model.init(light))
    for path in files_of(tmp_path):
        assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04"))


def test_a_checkpoint_that_orbax_did_not_merge_is_not_sealed(
    light, tmp_path, monkeypatch
):
    monkeypatch.setattr(folder, "check_directory", lambda name, directory: None)
    saving = tj.Checkpointer(tmp_path / "layers=[64,64]")
    with pytest.raises(tj.CheckpointError, match="no default/manifest.ocdbt, so noth"):
        train(light, saving, 2)
    assert saving.steps == ()
