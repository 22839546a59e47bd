"""``towerjax`` from a shell: training, help, exit codes, errors of one sentence."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import towerjax as tj
from towerjax.loop.records import as_json
from towerjax.mesh.cluster import Cluster, start
from towerjax.tools.cli import main
from towerjax.tools.shell import show

ROOT = pathlib.Path(__file__).parent.parent
MODULE = """
import numpy as np, optax
import towerjax as tj

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = X @ np.float32([1, 2, 3])
SEEN = []

def loss_fn(params, batch, tower):
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)

def training(strategy, learning_rate=0.1, batch_size=8, kind="plain"):
    SEEN.append((strategy, learning_rate, kind))
    step = tj.build_train_step(loss_fn, optax.sgd(learning_rate), strategy)
    data = {"x": X, "y": Y * np.float32(np.inf if kind == "bad" else 1)}
    batches = tj.batches(data, batch_size, epochs=None)
    state = step.init(np.zeros(3, np.float32))
    return {"step": step, "state": state, "batches": batches, "steps": 4}

def not_all(strategy):
    return {"step": None}

def too_much(strategy):
    return {**training(strategy), "learning_rate": 3}

def broken(strategy):
    return training(strategy, batch_size="eight")

def interrupted(strategy):
    def batches():
        raise KeyboardInterrupt
        yield

    return {**training(strategy), "batches": batches()}

value = 3
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    # JAX is in use here; a command joins a job before that.
    alone = Cluster(0, 1, None, "of the test")
    monkeypatch.setattr(start._process, "cluster", alone)

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    yield run
    sys.modules.pop("of_user", None)


def by_hand(steps, learning_rate):
    """Losses and parameters of plain gradient descent in NumPy float64."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    y = x @ np.float32([1, 2, 3])
    x, y, w, losses = x.astype(float), y.astype(float), np.zeros(3), []
    for i in range(steps):
        rows = np.arange(i * 8, i * 8 + 8) % 24
        errors = x[rows] @ w - y[rows]
        losses.append((errors**2).mean())
        w = w - learning_rate * 2 * x[rows].T @ errors / 8
    return losses, w


@pytest.mark.slow
def test_train_is_plain_gradient_descent(shell, tmp_path):
    flags = "--towers 4 --devices 2 --steps 5 --log runs/a.jsonl --json".split()
    code, out, error = shell("train", "of_user:training", *flags)
    assert code == 0 and not error
    found = json.loads(out)
    losses, _ = by_hand(5, 0.1)
    assert found["done"] and found["step"] == 5 and losses[4] < losses[0]
    assert found["metrics"]["loss"] == pytest.approx(losses[4], rel=1e-5)
    assert (found["summary"]["towers"], found["summary"]["devices"]) == (4, 2)
    lines = (tmp_path / "runs/a.jsonl").read_text().splitlines()
    logged = [json.loads(line)["metrics"]["loss"] for line in lines]
    np.testing.assert_allclose(logged, losses, rtol=1e-5)

    code, out, error = shell("train", "of_user:training", *flags)
    assert code == 2 and "holds an earlier run up to step 5" in error and not out
    assert shell("train", "of_user:training", *flags, "--replace")[0] == 0
    assert len((tmp_path / "runs/a.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
def test_train_goes_on_from_its_folder_on_other_devices(shell, tmp_path):
    flags = "--checkpoint saved --log runs/a.jsonl --json --towers 4".split()
    for number, devices, own in ((3, "4", ["--every", "2"]), (5, "2", [])):
        own += ["--steps", str(number), "--devices", devices]
        code, out, error = shell("train", "of_user:training", *flags, *own)
        assert code == 0 and not error and json.loads(out)["step"] == number
    lines = (tmp_path / "runs/a.jsonl").read_text().splitlines()
    logged = [json.loads(line)["metrics"]["loss"] for line in lines]
    np.testing.assert_allclose(logged, by_hand(5, 0.1)[0], rtol=1e-5)
    assert json.loads(out)["summary"]["steps"] == 2
    assert {2, 3, 5} <= set(tj.Checkpointer("saved").steps)


def test_train_gives_the_function_what_is_set(shell):
    given = "--set learning_rate=0.25 --set kind=other --devices cpu:3 --local scan"
    given += " --cross-tower-ops Packed(num_packs=2)"
    code, out, _ = shell("train", "of_user:training", *given.split())
    assert code == 0
    assert "step 4/4" in out and "4 steps, 32 examples on 1 towers, 1 devices" in out
    [(strategy, learning_rate, kind)] = sys.modules["of_user"].SEEN
    assert (learning_rate, kind) == (0.25, "other")
    assert (strategy.devices, strategy.local) == (("cpu:3",), "scan")
    assert strategy.cross_tower_ops == tj.collectives.Packed(num_packs=2)


@pytest.mark.slow
def test_train_says_what_ended_it(shell):
    flags = ("--set", "kind=bad", "--devices", "1", "--json")
    code, out, error = shell("train", "of_user:training", *flags)
    found = json.loads(out)
    assert code == 1 and not found["done"]
    assert "of step 0 was not finite" in found["error"]
    assert found["metrics"]["loss"] in ("NaN", "Infinity")
    assert error == f"towerjax train: {found['error']}\n"
    code, out, again = shell("train", "of_user:training", *flags[:-1])
    assert code == 1 and again == error and found["error"] not in out


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("is no function: 3", ["of_user:value"]),
        ("has no 'nothing'", ["of_user:nothing"]),
        ("name its module: of_user:training.", ["of_user.py:training"]),
        ("of_user:training, started in ../src.", ["../src/of_user.py:training"]),
        ("with step, state, batches", ["of_user:not_all"]),
        ("returned learning_rate, which tj.run does not", ["of_user:too_much"]),
        ("cannot be called with", ["of_user:training", "--set", "lr=3"]),
        ("not of the form name=value", ["of_user:training", "--set", "3"]),
        ("of --log; name it", ["of_user:training", "--replace"]),
        ("of --checkpoint; name it", ["of_user:training", "--every", "3"]),
        ("but there are", ["of_user:training", "--devices", "0"]),
        ("not a device name", ["of_user:training", "--devices", "gpu"]),
        ("multiple of the 2", "of_user:training --devices 2 --towers 3".split()),
        ("expected one argument", ["of_user:training", "--steps"]),
        ("invalid int value: 'x'", ["of_user:training", "--steps", "x"]),
        ("unrecognized arguments: --speed", ["of_user:training", "--speed", "9"]),
    ],
)  # fmt: skip
def test_train_refuses_in_one_line(shell, said, arguments):
    code, out, error = shell("train", *arguments)
    assert code == 2 and not out
    assert said in error and error.startswith("towerjax") and error.count("\n") == 1


def test_an_error_of_the_users_own_is_not_hidden(shell):
    with pytest.raises(Exception, match="eight"):
        shell("--traceback", "train", "of_user:broken", "--devices", "1")


def test_ctrl_c_has_its_own_code(shell):
    code, _, error = shell("train", "of_user:interrupted", "--devices", "1")
    assert code == 130 and error == "towerjax train: interrupted\n"


def test_every_command_has_help_with_an_example(shell):
    code, out, _ = shell("--help")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
    assert {"train", "doctor", "launch", "audit"} <= set(names)
    for name in set(names) - {"command", "-h,", "--version", "--traceback"}:
        code, out, _ = shell(name, "--help")
        assert code == 0 and f"example:\n  towerjax {name} " in f"{out} ", name
    for name in "train doctor plan report bench audit launch".split():
        assert "exit code: 0 if" in " ".join(shell(name, "--help")[1].split())
    assert shell("--version")[1].startswith("towerjax 0.")
    assert shell()[0] == 2 and shell("fly")[0] == 2


def test_what_is_not_finite_is_json_too(capsys):
    text = json.dumps(as_json({"a": (1.5, np.inf, [-np.inf]), "b": None, "c": np.nan}))
    options = argparse.Namespace(json=True)
    show(options, "for a person", {"a": np.nan})
    assert json.loads(capsys.readouterr().out) == {"a": "NaN"}
    assert text == '{"a": [1.5, "Infinity", ["-Infinity"]], "b": null, "c": "NaN"}'


@pytest.mark.slow
def test_train_from_a_shell_alone_and_as_a_job(tmp_path):
    (tmp_path / "of_user.py").write_text(
        MODULE.replace(
            "tj.batches(data, batch_size, epochs=None)",
            "strategy.distribute_dataset(tj.batches(data, batch_size, epochs=None))",
        )
    )
    train = [sys.executable, "-m", "towerjax", "train", "of_user:training", "--json"]
    job = [sys.executable, "-m", "towerjax", "launch", "--processes", "2"]
    job += ["--devices-per-process", "2", "--"]
    environ = {x: v for x, v in os.environ.items() if not x.startswith(("XLA_", "JAX"))}
    environ |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    losses = []
    train += ["--local", "scan", "--cross-tower-ops", "PinnedTree()"]
    first, rest = ["--steps", "2"], ["--checkpoint", "saved"]
    alone, as_job = [*train, "--devices", "4"], [*job, *train]
    for command in (alone, as_job, [*as_job, *first, *rest], [*alone, *rest]):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
        assert not [line for line in lines if line.startswith("[1] {")]
        found = json.loads("\n".join(lines[lines.index("{") : lines.index("}") + 1]))
        assert found["summary"]["devices"] == 4
        assert found["step"] == (2 if "2" in command[-3:-1] else 4)
        losses.append(found["metrics"]["loss"])
    assert losses[0] == pytest.approx(by_hand(4, 0.1)[0][3], rel=1e-5)
    # The same bits by one process, by two, and by one that goes on after two.
    assert losses[1] == losses[0] == losses[3] != losses[2]


def test_a_job_says_how_many_devices_there_are(shell, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    code, _, error = shell("train", "of_user:training", "--devices", "2")
    assert code == 2 and "a job of 2 processes" in error
