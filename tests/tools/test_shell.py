"""``towerjax`` from a shell: help, exit codes, errors of one sentence."""

import pytest

PROGRAM = """
value = 3

def make_value():
    return value

def broken():
    raise ValueError("eight")

def interrupted():
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(("said", "arguments"), [
    ("is not a function: 3", ["of_user:value"]),
    ("make_value() must return (step, state, batch), ", ["of_user:make_value"]),
    ("has no attribute 'nothing'", ["of_user:nothing"]),
    ("is not of the form module:name", ["of_user.py:value"]),
    ("is not of the form module:name", ["../src/of_user:value"]),
    ("expected one argument", ["of_user:make_value", "--timed-calls"]),
    ("invalid int value: 'x'", ["of_user:make_value", "--timed-calls", "x"]),
    ("unrecognized arguments: --speed", ["of_user:make_value", "--speed", "9"]),
])  # fmt: skip
def test_commands_refuse_in_one_line(shell, said, arguments):
    code, out, error = shell("report", *arguments)
    assert code == 2 and not out
    assert said in error and error.startswith("towerjax") and error.count("\n") == 1


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
