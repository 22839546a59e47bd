"""Steps timed in turns with peers, each configuration in a process of its own."""

import importlib
import json
import os
import pathlib
import re
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.monitoring import get_event_listeners

import towerjax as tj
from benchmarks.first_call import built
from benchmarks.models import MODELS, mlp
from benchmarks.networks import conv_net
from benchmarks.peers.trials import Trial, strategy_of
from benchmarks.steps import LEARNING_RATE, MOMENTUM
from towerjax.loop.checkpoint.record import library_versions
from towerjax.loop.files import read_lines
from towerjax.sweeps import bench as of_bench
from towerjax.sweeps import turns
from towerjax.sweeps.bench import Timings, describe_machine, recorded
from towerjax.sweeps.grid import RecordFile
from towerjax.sweeps.turns import Interval, calls_in, in_turns, interval_of_median
from towerjax.tools import cli
from towerjax.tools.cli import main, read_toml

QUICK = {"rounds": 6, "seconds_per_round": 0.001}

# Turns.


def test_the_interval_is_the_textbooks():
    """Ranks of the 95 % interval, from tables of the sign test."""
    ranks = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 50: 18}
    for count, rank in ranks.items():
        values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
        found = interval_of_median(values)
        assert found == Interval((count + 1) / 2, rank, count + 1 - rank), count


def test_contenders_have_their_turns():
    log = []
    runs = [lambda: log.append("a"), lambda: log.append("b")]
    table = in_turns(runs, rounds=3, calls=2)
    assert "".join(log) == "aabb" + "bbaa" + "aabb"
    assert table.shape == (3, 2, 2) and (table[..., 0] >= table[..., 1]).all()


def test_a_call_is_awaited(monkeypatch):
    seconds = iter([0.0, 1.0, 3.0])
    awaited = []
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(turns.jax, "block_until_ready", awaited.append)
    table = in_turns([lambda: "result"], rounds=1, calls=1)
    assert table.tolist() == [[[3.0, 1.0]]] and awaited == ["result"]


def test_extremes_are_dropped(monkeypatch):
    times = np.array([[5.0, 1.0], [1000.0, 2.0], [6.0, 0.0], [1.0, 999.0], [7.0, 3.0]])
    for trim, expected in ((0.2, [6.0, 2.0]), (0.1, times.mean(axis=0).tolist())):
        calls = iter(times)
        monkeypatch.setattr(turns, "_time_call", lambda _: next(calls))  # noqa: B023
        found = in_turns([None], rounds=1, calls=5, trim=trim)
        assert found[0, 0].tolist() == expected


def test_calls_of_a_round_fill_its_time():
    log = []
    assert calls_in(0.0, [lambda: log.append("a")]) == 1 and len(log) == 3
    assert calls_in(1e9, [lambda: log.append("a")]) == 1000


# Workers.

MINE = """
import jax, jax.numpy as jnp, numpy as np, optax, towerjax as tj

def build(towers, batch, rate=0.125):
    print("said on the standard output")
    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((w - batch) ** 2, tower.weight)
    step = tj.build_train_step(loss_fn, optax.sgd(rate), tj.Mirrored(towers=towers))
    return step, step.init(np.float32(1)), np.arange(batch, dtype=np.float32)

def by_hand(towers, batch, rate=0.125):
    @jax.jit
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: ((w - batch) ** 2).mean())(w)
        return w - rate * grad, loss
    return step, jnp.float32(1), jnp.arange(batch, dtype=jnp.float32)

def other(towers, batch):
    return by_hand(towers, batch, rate=0.25)

def by_itself(towers, batch):
    return {"rounds_s": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "examples": batch}

def unwritten(towers, batch):
    raise NotImplementedError("one tower is written")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with ``mine.py``; workers run in it, with a cache of its own."""
    root = str(pathlib.Path(tj.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_a_sweep_is_timed_once_and_goes_on(here, capfd):
    peers = {"hand": "mine:by_hand"}
    grid = {"towers": [1, 2], "batch": [8]}
    build = importlib.import_module("mine").build
    options = {"peers": peers, "results": here / "r.jsonl", **QUICK}
    found = tj.tools.bench(build, grid, **options)
    assert [record["status"] for record in found.records] == ["ok", "ok"], found
    for towers, row in zip((1, 2), found.rows(), strict=True):
        assert list(row) == [
            *("towers", "batch", "ms", "ms low", "ms high", "returns", "returns low"),
            *("returns high", "examples/s", "over hand", "over hand low"),
            "over hand high",
        ]
        assert row["towers"] == towers and row["returns"] <= row["ms"]
        assert 0 < row["over hand low"] <= row["over hand"] <= row["over hand high"]
        assert row["examples/s"] == pytest.approx(8e3 / row["ms"], rel=0.01, abs=1)
    # By SGD on mean((w - x)**2) from 1, of the rows 0 to 7.
    w = 1.0
    losses = []
    for _ in range(3):
        losses.append(((w - np.arange(8.0)) ** 2).mean())
        w -= 0.125 * 2 * (w - 3.5)
    for record in found.records:
        np.testing.assert_allclose(record["losses"], losses, rtol=1e-6)
        assert record["machine"] == describe_machine() and record["device"] == "cpu"
        assert len(record["rounds_s"]) == 6 and record["versions"] == library_versions()
        assert record["from_cache"] is False and record["first_call_s"] > 0
    printed = "".join(capfd.readouterr())
    second = r"configuration 2/2  towers=2, batch=8  0:0\d:\d\d left"
    assert re.search(second, printed) and "said on" not in printed
    # The same again: nothing runs, and the file stays as it is, but for a torn line.
    written = (here / "r.jsonl").read_bytes()
    (here / "r.jsonl").write_bytes(written + written[:30])
    again = tj.tools.bench("mine:build", grid, progress=False, **options)
    assert again == found == Timings.read(here / "r.jsonl")
    assert (here / "r.jsonl").read_bytes() == written
    with pytest.raises(ValueError, match="r.jsonl' holds results with the work"):
        tj.tools.bench("mine:build", grid, results=here / "r.jsonl")
    assert all(str(row["examples/s"]) in str(found) for row in found.rows())


PROGRAMS = {  # what the last record says: the program of a worker
    "was ended by SIGABRT. Last it said: it": "os.write(2, b'it\\xff'); os.abort()",
    "ended with exit code 1. Last it said: gone": "sys.exit('gone')",
    "took longer than 0.1 s and was ended": "time.sleep(60)",
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("why", PROGRAMS)
def test_a_worker_that_dies_or_hangs_is_a_failure(here, capfd, monkeypatch, why):
    program = f"import os, sys, time; {PROGRAMS[why]}"
    monkeypatch.setattr(of_bench, "_WORKER", (sys.executable, "-c", program))
    options = {"timeout_s": 0.1 if "longer" in why else 600.0, "results": "a/b/r.jsonl"}
    for _ in range(2):  # what failed is not run again unasked
        found = tj.tools.bench("mine:build", {"towers": [1, 2]}, **options)
        assert [record["status"] for record in found.records] == ["failed"] * 2
        assert found.rows()[0]["error"].startswith(why)
        again = (sys.executable, "-c", "raise SystemExit('again')")
        monkeypatch.setattr(of_bench, "_WORKER", again)
    assert "towers=2: failed: " in capfd.readouterr().err
    options |= {"retry_failed": True, "timeout_s": 600.0}
    found = tj.tools.bench("mine:build", {"towers": [1, 2]}, **options)
    assert all("again" in record["error"] for record in found.records)


def job(build, peers=(), **config):
    builders = {"": build, **dict.fromkeys(peers)}
    builders |= {name: f"mine:{name}" for name in peers}
    config = {"towers": 2, "batch": 8, **config}
    return {"builders": builders, "config": config, "rtol": 1e-4, **QUICK}


@pytest.mark.slow
def test_a_recorded_job_leaves_no_listener_in_jax(here):
    before = get_event_listeners()
    found = recorded(job("mine:by_hand"))
    assert found["status"] == "ok" and found["first_call_s"] > 0
    assert found["from_cache"] in (True, False)
    assert get_event_listeners() == before


@pytest.mark.slow
def test_other_work_is_not_compared(here):
    found = recorded(job("mine:by_hand", ["other"]))
    assert (
        found["status"] == "failed" and "other has the first losses" in found["error"]
    )
    assert recorded({**job("mine:by_hand", ["other"]), "rtol": None})["status"] == "ok"


@pytest.mark.parametrize("build, status, text", [
    ("mine:unwritten", "not available", "one tower is written"),
    ("mine:nobody", "mistyped", "has no attribute 'nobody'"),
    ("no_such_package:build", "not available", "no_such_package"),
    ("mine", "mistyped", "not of the form module:name"),
])  # fmt: skip
def test_what_became_of_a_configuration_is_a_record(here, build, status, text):
    found = recorded(job(build))
    assert found["status"] == status and text in found["error"], found


def test_what_times_itself_is_taken_as_it_is(here):
    found = {"config": {"towers": 2}, **recorded(job("mine:by_itself"))}
    (row,) = Timings((found,)).rows()
    assert row["ms"] == 3500 and (row["ms low"], row["ms high"]) == (1000, 6000)
    assert row["examples/s"] == round(8 / 3.5)


def test_ratios_are_of_the_same_round():
    own = np.stack([[2, 4, 6, 8, 10, 12], [1] * 6], axis=-1)
    found = of_bench._figures({"": own, "hand": own / 2})["figures"]
    assert found["step_s"] == {"median": 7.0, "low": 2.0, "high": 12.0}
    assert found["over hand"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["return_s"]["median"] == 1


def test_what_a_worker_sees_of_the_environment():
    found = of_bench.worker_environ({"XDG_CACHE_HOME": "c", "A": "1"}, {"towers": 4})
    assert found["JAX_NUM_CPU_DEVICES"] == "4" and found["A"] == "1"
    folder = os.path.join("c", "towerjax", "bench")
    assert found["JAX_COMPILATION_CACHE_DIR"] == folder
    assert "JAX_PLATFORMS" not in found
    assert int(found["MALLOC_TRIM_THRESHOLD_"]) > 2**30  # memory is kept
    own = {"JAX_COMPILATION_CACHE_DIR": "mine", "MALLOC_TOP_PAD_": "7"}
    kept = of_bench.worker_environ(own, {"towers": 4, "devices": 2})
    assert own.items() <= kept.items() and kept["JAX_NUM_CPU_DEVICES"] == "2"
    assert "JAX_NUM_CPU_DEVICES" not in of_bench.worker_environ({}, {"batch": 8})


@pytest.mark.parametrize("options, text", [
    ({"rounds": 5}, "rounds=5 must be a whole number >= 6"),
    ({"seconds_per_round": "1"}, "seconds_per_round='1' must be seconds >= 0"),
    ({"grid": {}}, "grid must be"),
    ({"build": lambda: 0}, "must be importable by other processes. Write it"),
])  # fmt: skip
def test_what_cannot_be_timed_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        tj.tools.bench(**{"build": "mine:build", "grid": {"towers": [1]}, **options})


@pytest.mark.slow
def test_a_name_that_is_mistyped_is_no_result(here):
    file = here / "times.jsonl"
    with pytest.raises(ValueError, match="mine:nobody.*has no attribute 'nobody'"):
        tj.tools.bench("mine:nobody", {"towers": [1]}, results=file, progress=False)
    assert not list(read_lines(file, "config", "a sweep"))


# The command. All are done before, so that no worker starts.


def written(path, seconds):
    """A file of a step time for each number of towers; None is a failure."""
    work = {"builders": {"": "mine:build"}, **QUICK, "rtol": 1e-4}
    about = {"machine": describe_machine(), "versions": library_versions()}
    file = RecordFile(path, about | {"work": work})
    for towers, median in seconds.items():
        record = {"config": {"towers": towers}, "status": "failed", "error": "a\nb"}
        if median is not None:
            step = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
            figures = {"step_s": step, "return_s": step}
            record |= {"status": "ok", "figures": figures, "examples": 64}
        file.add(record)
    return str(path)


def test_forged_times_are_refused_in_words_and_texts_are_printable(tmp_path):
    path = written(tmp_path / "new.jsonl", {1: 0.002})
    good = json.loads(pathlib.Path(path).read_text())
    step = {"median": "x", "low": 1, "high": 2}
    changes = [{"figures": x} for x in (3, {"step_s": 1}, {"step_s": step})]
    changes += [{"config": 3}, {"status": 3}, {"examples": "x"}]
    for change in changes:
        pathlib.Path(path).write_text(json.dumps({**good, **change}) + "\n")
        with pytest.raises(ValueError, match="Line 1 of .* is not a line of a sweep"):
            Timings.read(path)
    failed = {"config": {"towers": "\x1b[1m"}, "status": "failed", "error": "\x1b[2J"}
    pathlib.Path(path).write_text(json.dumps(failed) + "\n")
    shown = str(Timings.read(path))
    assert r"\x1b[2J" in shown and r"\x1b[1m" in shown and "\x1b" not in shown


def test_the_command_shows_what_was_done_before(tmp_path, capsys):
    new = written(tmp_path / "new.jsonl", {1: 0.002, 2: 0.004})
    (tmp_path / "grid.toml").write_text("towers = [7]\n")
    timing = ["--rounds", "6", "--seconds-per-round", "0.001"]
    given = ["bench", "mine:build", str(tmp_path / "grid.toml"), "towers=[1, 2]"]
    given += timing
    assert main([*given, "--out", new]) == 0
    printed = "".join(capsys.readouterr())
    assert "2 of 2 configurations were done before" in printed
    assert "4 [3.6, 4.4]" in printed and "16000" in printed
    assert main([*given, "--out", new, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [x["config"]["towers"] for x in found["results"]] == [1, 2]
    failed = written(tmp_path / "failed.jsonl", {1: 0.002, 2: None})
    assert main([*given, "--out", failed, "--quiet"]) == 1
    assert "failed  a b" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, code, text", [
    (["towers=[1, 2"], 2, "towers=[1, 2: "),
    (["towers=1"], 2, "grid['towers']=1 must be a list"),
    *[(["towers=[1]", "--peer", x], 2, f"--peer {x}: write --peer name=")
      for x in ("mine", "a=b=c")],
    (["no.toml"], 126, "no.toml"),
])  # fmt: skip
def test_wrong_arguments_end_the_command(tmp_path, capsys, arguments, code, text):
    out = str(tmp_path / "r.jsonl")
    assert main(["bench", "mine:build", *arguments, "--out", out]) == code
    assert text in capsys.readouterr().err and not pathlib.Path(out).exists()


def test_peers_of_the_command_are_those_of_bench(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "bench_all", lambda *_, **x: seen.append(x) or Timings(()))
    arguments = ["towers=[1]", "--out", "r.jsonl", "--peer", "a=m:f", "--peer", "b=m:g"]
    main(["bench", "mine:build", *arguments])
    assert seen[0]["peers"] == {"a": "m:f", "b": "m:g"}


def test_later_lines_of_toml_count(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('towers = [1]\nmodel = ["mlp"]\n')
    found = read_toml(str(path), "towers=[2]")
    assert found == {"towers": [2], "model": ["mlp"]}


# The steps of this repository's own benchmarks.


@pytest.mark.slow
def test_the_convolutions_whose_first_call_is_timed_are_the_same_on_any_towers():
    model = conv_net(1, (4,))
    step = built(model, optax.sgd(0.1), tj.Mirrored(towers=4))
    with jax.numpy_rank_promotion("allow"):
        report = step.audit(step.init(model.init(0)), model.make_batch(1, 16))
    assert "loss" in report.compared and not report.not_compared


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_loss_for_each_example(name):
    """Of its own: in another order the losses are the same."""
    models = {x: MODELS[name](jnp.dtype(x)) for x in ("float32", "bfloat16")}
    model = models["float32"]
    params = model.init(0)
    batch = model.make_batch(1, 3)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    tj.testing.assert_same(model.make_batch(1, 3), batch)
    for other in models.values():
        losses = jax.eval_shape(other.losses, params, batch)
        assert losses.shape == (3,) and losses.dtype == jnp.float32
    if name == "transformer":  # attention is within an example; this compiles long
        return
    both = jax.tree.map(lambda x: np.concatenate([x, x[:0:-1]]), batch)
    whole = np.asarray(jax.jit(model.losses)(params, both))
    np.testing.assert_allclose(whole[[1, 2]], whole[[4, 3]], rtol=1e-5)
    assert len(set(whole.tolist())) >= 3


def small(dtype):
    """Two layers of 5."""
    return mlp(dtype, layers=2, width=5)


def expected_losses(seed, batch_size, steps):
    """SGD with momentum on `small`, in NumPy float64."""
    model = small(np.float32)
    params = jax.tree.map(np.float64, model.init(seed))
    batch = jax.tree.map(np.float64, model.make_batch(seed + 1, batch_size))
    trace = jax.tree.map(np.zeros_like, params)
    losses = []
    for _ in range(steps):
        activations = [batch["x"]]
        for layer in params:
            activations.append(np.tanh(activations[-1] @ layer["w"] + layer["b"]))
        error = activations[-1] - batch["y"]
        losses.append((error**2).mean())
        back = 2 * error / error.size
        grads = []
        for layer, x, y in zip(
            params[::-1], activations[-2::-1], activations[:0:-1], strict=True
        ):
            back = back * (1 - y**2)
            grads.append({"w": x.T @ back, "b": back.sum(axis=0)})
            back = back @ layer["w"].T
        trace = jax.tree.map(lambda m, g: MOMENTUM * m + g, trace, grads[::-1])
        params = jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, trace)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"towers": 2, "micro_batches": 3, "cross_tower_ops": "PinnedTree"},
    {"towers": 2, "by": "pmap"},
    {"towers": 3, "by": "jit"},
], ids=str)  # fmt: skip
def test_the_benchmarks_train_what_they_say(monkeypatch, config):
    monkeypatch.setitem(MODELS, "small", small)
    builders = {
        "": "benchmarks.peers.trials:build",
        "hand": "benchmarks.peers.trials:build_by_hand",
    }
    config = {"model": "small", "batch": 12, **config}
    work = {"builders": builders, "config": config, "rtol": 1e-4, **QUICK}
    record = recorded(work)
    assert record["status"] == "ok", record
    np.testing.assert_allclose(record["losses"], expected_losses(0, 12, 3), rtol=1e-5)
    assert {"step_s", "return_s", "over hand"} == record["figures"].keys()


def test_a_trial_names_its_strategy():
    trial = Trial("mlp", 12, strategy="one_device")
    assert strategy_of(trial) == tj.OneDevice("cpu:0")
    trial = Trial("mlp", 12, strategy="mirrored_scan", towers=4, devices=2)
    expected = tj.Mirrored(("cpu:0", "cpu:1"), towers=4, tower_loop="scan")
    assert strategy_of(trial) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras", "tensorflow", "torch"])
def test_peers_train_the_same_or_say_what_they_lack(name):
    """Their first losses are compared where they are measured."""
    config = {"model": "mlp", "batch": 16, "by": name, "towers": 2, "devices": 2}
    work = {
        "builders": {"": "benchmarks.peers.trials:build"},
        "config": config,
        **QUICK,
    }
    record = forked.called(recorded, work)
    if record["status"] == "not available":
        assert "No module named" in record["error"]
    else:
        assert record["status"] == "ok" and len(record["losses"]) == 3, record
