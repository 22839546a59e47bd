"""Sweeps by workers: what fails, what is killed, what goes on; and the command."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import sys

import forked
import pytest
from test_bench import QUICK

import towerjax as tj
from towerjax.tools.bench import Grid, TimingProtocol, Trial, read_results, sweep
from towerjax.tools.bench.results import Results
from towerjax.tools.bench.sweep import describe_machine, versions, worker_environ
from towerjax.tools.bench.trials import run_recorded
from towerjax.tools.cli import main
from towerjax.tools.sweep.result import RecordFile

of_sweep = importlib.import_module("towerjax.tools.bench.sweep")

FACTORIES = """
from towerjax.tools.bench.models import mlp

def small(dtype):
    print("said on the standard output")
    return mlp(dtype, layers=2, width=5)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with ``mine.py``; workers run in it, with a cache of its own."""
    root = str(pathlib.Path(tj.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORIES)
    return tmp_path


@pytest.mark.slow
def test_a_sweep_compiles_once_records_failures_and_goes_on(here, capfd, monkeypatch):
    grid = Grid(
        ("mine:small",),
        towers=(2,),
        devices=(1,),
        batches=(8,),
        strategies=("mirrored_scan",),
        cross_tower_ops=("AllReduce()", "Packed()"),
    )
    results = sweep(grid, here / "r.jsonl", QUICK)
    assert [result.status for result in results] == ["ok", "ok"]
    # On one device nothing travels: both ops are one program, which compiles once.
    first, second = [result.record for result in results]
    assert (first["from_cache"], second["from_cache"]) == (False, True)
    assert first["losses"] == second["losses"] and first["device"] == "cpu"
    assert first["machine"] == describe_machine() and first["versions"] == versions()
    printed = capfd.readouterr().out
    second = (
        r"trial 2/2  mine:small B=8 T=2 D=1 mirrored_scan Packed.*  0:0\d:\d\d left"
    )
    assert re.search(second, printed)
    assert "said on" not in printed and "trial 2/2  done" in printed
    # The same grid again: nothing runs, and the file stays as it is.
    written = (here / "r.jsonl").read_bytes()
    assert sweep(grid, here / "r.jsonl", QUICK, progress=False) == results
    assert (here / "r.jsonl").read_bytes() == written
    with pytest.raises(ValueError, match="r.jsonl' holds results with the timing"):
        sweep(grid, here / "r.jsonl", TimingProtocol())


PROGRAMS = {  # what the last record says: the program of a worker
    "was ended by SIGABRT. Last it said: it": "os.write(2, b'it'); os.abort()",
    "ended with exit code 1. Last it said: gone": "sys.exit('gone')",
    "took longer than 0.1 s and was ended": "time.sleep(60)",
}


@pytest.mark.parametrize("why", PROGRAMS)
def test_a_worker_that_dies_or_hangs_is_a_failure(here, capfd, monkeypatch, why):
    program = f"import os, sys, time; {PROGRAMS[why]}"
    monkeypatch.setattr(of_sweep, "_WORKER", (sys.executable, "-c", program))
    limit_s = 0.1 if "longer" in why else 60.0
    grid, options = Grid(("mlp",), batches=(8, 9)), {"trial_timeout_s": limit_s}
    for _ in range(2):  # what failed is not run again unasked
        found = sweep(grid, here / "r.jsonl", QUICK, **options)
        assert [result.status for result in found] == ["failed"] * 2
        assert found[0].record["error"].startswith(why)
        monkeypatch.setattr(of_sweep, "_WORKER", None)
    assert "B=9 T=1 D=1: failed: " in capfd.readouterr().out
    with pytest.raises(TypeError):
        sweep(grid, here / "r.jsonl", QUICK, retry_failed=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras", "tensorflow", "torch"])
def test_peers_train_the_same_or_say_what_they_lack(name):
    """Their first losses are compared where they are measured."""
    trial = Trial("mlp", 16, by=f"benchmarks.peers:{name}", towers=2, devices=2)
    record = forked.called(run_recorded, trial, QUICK)
    if record["status"] == "not available":
        assert "No module named" in record["error"]
    else:
        assert record["status"] == "ok" and len(record["losses"]) == 3, record


def test_what_a_worker_sees_of_the_environment():
    trial = Trial("mlp", 8, towers=4, devices=4)
    found = worker_environ({"XDG_CACHE_HOME": "c", "A": "1"}, trial)
    assert found["JAX_NUM_CPU_DEVICES"] == "4" and found["A"] == "1"
    folder = os.path.join("c", "towerjax", "bench")
    assert found["JAX_COMPILATION_CACHE_DIR"] == folder
    assert "JAX_PLATFORMS" not in found
    assert int(found["MALLOC_TRIM_THRESHOLD_"]) > 2**30  # memory is kept
    own = {"JAX_COMPILATION_CACHE_DIR": "mine", "MALLOC_TOP_PAD_": "7"}
    kept = worker_environ(own, trial)
    assert own.items() <= kept.items()


# The command. All trials are done before, so that no worker starts.


def about():
    return {
        "machine": describe_machine(),
        "versions": versions(),
        "timing": dataclasses.asdict(QUICK),
    }


def record(trial, seconds):
    step = {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds}
    figures = {"step_s": step, "over_hand": step, "hand_s": step}
    fields = dataclasses.asdict(trial)
    return {"trial": fields, "status": "ok", "device": "cpu", "load": 0.1, **figures}


def results_of(path, grid, seconds):
    file = RecordFile(path, "trial", about())
    for trial in grid.trials():
        file.add(record(trial, seconds * trial.towers))
    return str(path)


OPS = ("AllReduce()", "Packed(bytes_per_pack=64, max_group=2)")
GRID = Grid(
    ("mlp",), towers=(1, 2, 4), batches=(64,), peers=("jit",), cross_tower_ops=OPS
)
ARGUMENTS = [
    "bench",
    "models=['mlp']",
    f"cross_tower_ops={list(OPS)}",
    "towers=[1, 2, 4]",
    "batches=[64]",
    "peers=['jit']",
    "protocol={rounds=6, seconds_per_round=0.001}",
]


def test_results_are_a_table_in_a_notebook(tmp_path):
    grid = Grid(models=("mlp",), towers=(1, 2), batches=(8,))
    results_of(tmp_path / "r.jsonl", grid, 0.5)
    shown = Results(read_results(tmp_path / "r.jsonl"))
    assert shown == read_results(tmp_path / "r.jsonl")
    text = shown._repr_mimebundle_()["text/plain"]
    assert all(cells[1].split()[0] in text for cells in shown.tables()[0].rows)


@pytest.mark.slow
def test_the_command_shows_and_compares(tmp_path, capsys):
    new = results_of(tmp_path / "new.jsonl", GRID, 0.002)
    old = results_of(tmp_path / "old.jsonl", GRID, 0.001)
    assert main([*ARGUMENTS, "--out", new]) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 trials were done before" in printed
    assert "mlp B=64 T=4 D=4 jit" in printed and "8 [7.2, 8.8]" in printed
    assert main([*ARGUMENTS, "--out", new, "--compare", old, "--quiet"]) == 1
    assert capsys.readouterr().out.count("slower") == 8
    assert main([*ARGUMENTS, "--out", old, "--compare", new, "--quiet"]) == 0
    capsys.readouterr()
    assert main([*ARGUMENTS, "--out", new, "--compare", old, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 8
    assert found["results"] == [r.record for r in read_results(new)]
    assert [x["verdict"] for x in found["compared"]] == ["slower"] * 8
    assert found["compared"][0]["trial"] == found["results"][0]["trial"]


def test_the_command_takes_a_file_and_what_differs(tmp_path, capsys):
    grid = Grid(("mlp",), batches=(8, 16), dtypes=("bfloat16",))
    out = results_of(tmp_path / "r.jsonl", grid, 0.001)
    toml = tmp_path / "grid.toml"
    timing = "\n".join(f"{k} = {v}" for k, v in dataclasses.asdict(QUICK).items())
    toml.write_text(f'models = ["cnn"]\nbatches = [8, 16]\n[protocol]\n{timing}')
    changes = ["models=['mlp']", "dtypes=['bfloat16']", "--out", out, "--quiet"]
    assert main(["bench", str(toml), *changes]) == 0
    assert "mlp B=16 T=1 D=1 bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["models=['mlp']"], "A grid needs batches"),
        (["batches=[8]"], "'models'"),
        (["models=['mlp']", "batches=[8, 'x']"], "batch='x' must be a whole number"),
        (["models=['mlp']", "batches=[8]", "--compare=no.jsonl"], "no.jsonl"),
    ],
)
def test_wrong_arguments_end_the_command(tmp_path, capsys, arguments, text):
    out = str(tmp_path / "r.jsonl")
    code = main(["bench", *arguments, "--out", out])
    assert code in (2, 126) and text in capsys.readouterr().err
    assert not pathlib.Path(out).exists()
