"""``towerjax`` from a shell: help, exit codes, errors of one sentence."""

import time

import pytest

import towerjax as tj

PROGRAM = '''
value = 3

def make_value():
    return value

def broken():
    raise ValueError("eight")

def interrupted():
    raise KeyboardInterrupt

def programs(devices):
    return abs, [3]

import numpy as np, optax, towerjax as tj

def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)

step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.OneDevice())

def make(strategy):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    return step, np.float32(0), np.ones(8, np.float32)

def build(towers):
    return step

def main():
    import time
    print("hangs", flush=True)
    time.sleep(600)

def starts():
    """Returns, and leaves two processes that print nowhere else."""
    import jax, os, subprocess, time
    subprocess.Popen(["sleep", "600"])
    if not os.fork():
        time.sleep(600)
    all_devices = jax.make_mesh((jax.device_count(),), ("i",))
    rows = jax.sharding.NamedSharding(all_devices, jax.sharding.PartitionSpec("i"))
    return jax.device_put(np.arange(8.0), rows)
'''


@pytest.mark.parametrize(("said", "arguments"), [
    ("is not a function: 3", ["of_user:value"]),
    ("make_value() must return (step, state, batch), ", ["of_user:make_value"]),
    ("has no attribute 'nothing'", ["of_user:nothing"]),
    ("is not of the form module:name", ["of_user.py:value"]),
    ("is not of the form module:name", ["../src/of_user:value"]),
    ("expected one argument", ["of_user:make_value", "--timed-calls"]),
    ("invalid int value: 'x'", ["of_user:make_value", "--timed-calls", "x"]),
    ("of_user:step is a step. Name a function that returns it", ["of_user:step"]),
    ("unrecognized arguments: --speed", ["of_user:make_value", "--speed", "9"]),
])  # fmt: skip
def test_commands_refuse_in_one_line(shell, said, arguments):
    code, out, error = shell("report", *arguments)
    assert code == 2 and not out
    assert said in error and error.startswith("towerjax") and error.count("\n") == 1


@pytest.mark.parametrize(("said", "arguments"), [
    ("os:system is a function of Python's own. Name one of your file", ["os:system"]),
    ("of_user:make.__globals__ is not a function: {", ["of_user:make.__globals__"]),
    ("Write towerjax audit of_user:make_step, and there def", ["of_user:step"]),
    ("'-5' must be a number of seconds > 0", ["of_user:main", "--timeout", "-5"]),
    ("'nan' must be a number of seconds > 0", ["of_user:main", "--timeout", "nan"]),
    ("unrecognized arguments: --divices 1; write --devices", ["x:y", "--divices", "1"]),
])  # fmt: skip
def test_check_refuses_in_one_line(shell, said, arguments):
    code, out, error = shell("check", *arguments)
    assert code == 2 and not out
    assert said in error and error.startswith("towerjax") and error.count("\n") == 1


def test_without_a_command_it_says_which_there_are(shell):
    for arguments, said in (
        (("--verison",), "unrecognized arguments: --verison; write --version;"),
        ((), "name a command: launch, report, bench, audit, check;"),
    ):
        code, out, error = shell(*arguments)
        assert (code, out) == (2, "") and error.startswith(f"towerjax: {said}")


@pytest.mark.slow
def test_other_commands_say_what_to_write(shell, monkeypatch):
    _, _, error = shell("check", "of_user:programs", "--devices", "3")
    assert "devices=(1, 3), or --devices 1 3.\n" in error
    _, _, error = shell("bench", "of_user:build", "towers=1,2", "--out", "a.jsonl")
    assert error.endswith("Write 'towers=[1,2]'\n")
    code, out, _ = shell("bench", "of_user:build", "towers=[1]", "--out", "a.jsonl")
    assert code == 1 and "must return (call, state, batch), but it returned a St" in out


def test_the_missing_compiler_of_absent_devices_is_told_first(shell, monkeypatch):
    def missing(absent):
        raise ValueError(f"Compiling for {absent} needs its compiler.")

    monkeypatch.setattr(tj.Absent, "jax_devices", missing)
    for target in ("h200:8", "H200:8"):
        code, out, error = shell("report", "of_user:make", "--on", target)
        text = "Compiling for Absent(target='h200', number=8) needs its compiler."
        assert (code, out, error) == (2, "", f"towerjax report: {text}\n")


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_after_the_timeout(shell):
    code, _, error = shell(
        "check", "of_user:main", "--devices", "1", "2", "--timeout", "8"
    )
    assert code == 1
    text = "The process of 1 device did not end within 8 s, and was killed."
    assert f"towerjax check: {text} The last line that it printed: hangs\n" in error


@pytest.mark.slow
def test_what_a_program_has_started_ends_with_it(shell):
    began = time.monotonic()
    code, out, _ = shell(
        "check", "of_user:starts", "--devices", "1", "2", "--timeout", "90"
    )
    assert code == 0 and "is the same on 2 devices as on one" in out
    assert time.monotonic() - began < 60


def test_an_error_of_the_users_own_is_not_hidden(shell):
    assert shell("audit", "of_user:broken")[0] == 2
    with pytest.raises(ValueError, match="eight"):
        shell("--traceback", "audit", "of_user:broken")


def test_ctrl_c_has_its_own_code(shell):
    code, _, error = shell("audit", "of_user:interrupted")
    assert code == 130 and error == "towerjax audit: interrupted\n"


def test_every_command_has_help_with_an_example(shell):
    code, out, _ = shell("--help")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
    assert {"launch", "audit"} <= set(names)
    for name in set(names) - {"command", "-h,", "--version", "--traceback"}:
        code, out, _ = shell(name, "--help")
        assert code == 0 and f"Example:\n  towerjax {name} " in f"{out} ", name
    for name in "report bench audit check launch".split():
        assert "exit code: 0 if" in " ".join(shell(name, "--help")[1].split())
    assert shell("--version")[1].startswith("towerjax 0.")
    assert shell()[0] == 2 and shell("fly")[0] == 2


def test_a_name_of_another_form_is_told_with_one_of_the_command(shell):
    code, _, err = shell("audit", "train")
    assert code == 2 and "not of the form module:name, such as train:make_step" in err
