"""Several processes, one job: how they start, speak, fail and end together."""

import contextlib
import io
import os
import pathlib
import re
import signal
import socket
import sys
import time

import forked
import pytest
from checkout import ROOT
from test_going_on import children

import towerjax as tj
from towerjax.__main__ import main
from towerjax.mesh.cluster import launcher as of_launcher
from towerjax.mesh.cluster.group import (
    End,
    Timeouts,
    _Job,
    _process_group,
    _Worker,
    write,
)
from towerjax.mesh.cluster.launcher import RestartPlan, _collect_signals

launch = tj.cluster.launch
PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]
INDEX = "import os, sys, time, signal; i = os.environ['TOWERJAX_PROCESS_ID'];"


def child(program):
    return [*PYTHON, INDEX + program]


def is_alive(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may have collected it


def wait_until(is_so, timeout_s=120.0):
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def assert_ended(pids):
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_job_says_whose_each_line_is_and_leaves_nothing_behind(capfd, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    names = (
        "TOWERJAX_COORDINATOR TOWERJAX_NUM_PROCESSES TOWERJAX_PROCESS_ID"
        " JAX_NUM_CPU_DEVICES JAX_PLATFORMS PYTHONUNBUFFERED MINE"
    )
    program = (
        f"print(*(os.environ[name] for name in {names.split()}));"
        "print('err', i, file=sys.stderr); print('x', end='')"
    )
    port = forked.free_port()

    def state():
        handlers = [signal.getsignal(n) for n in (2, 15, 1, 10, 12)]
        return sorted(os.listdir("/proc/self/fd")), handlers

    before = state()
    options = {"devices_per_process": 4, "env": {"MINE": "mine"}}
    assert launch(child(program), processes=3, port=port, **options) == 0
    assert state() == before
    out, err = capfd.readouterr()
    environs = [f"[{i}] 127.0.0.1:{port} 3 {i} 4 cpu 1 mine" for i in range(3)]
    assert sorted(out.splitlines()) == sorted([*environs, "[0] x", "[1] x", "[2] x"])
    assert out.endswith("\n")
    assert sorted(err.splitlines()) == [f"[{i}] err {i}" for i in range(3)]


@pytest.mark.slow
def test_no_line_is_torn_and_none_is_lost(capfd):
    program = (
        "\nfor n in range(400):\n"
        "    for part in (b'<%d ' % n, b'a' * 700, b' \\xff>\\n'): os.write(1, part)"
    )
    assert launch(child(program), processes=3) == 0
    sys.stdout.flush()
    out = capfd.readouterr().out
    for i in range(3):
        lines = [x for x in out.splitlines() if x.startswith(f"[{i}] ")]
        numbers = [re.fullmatch(rf"\[{i}\] <(\d+) a{{700}} .>", x)[1] for x in lines]
        assert numbers == [str(n) for n in range(400)]


def test_the_first_that_fails_gives_the_code_and_ends_the_others(capfd):
    program = "\nif i == '1': sys.exit(7)\ntime.sleep(60)"
    began = time.monotonic()
    assert launch(child(program), processes=3) == 7
    assert time.monotonic() - began < 40
    why = r"process 1 exited with code 7 after \d\.\d s; stopping the other 2\n"
    assert re.fullmatch(f"towerjax launch: {why}", capfd.readouterr().err)


def test_the_others_of_a_recoverable_job_go_on(capfd):
    """Processes 1 and 2 end in two ways; the job has the code of process 0."""
    program = (
        "\nassert os.environ['TOWERJAX_RECOVERABLE'] == '1'"
        "\nif i == '1': os.kill(os.getpid(), signal.SIGKILL)"
        "\nif i == '2': sys.exit(4)"
        "\ntime.sleep(1)"
    )
    options = {"processes": 3, "recoverable": True, "restarts": 0}
    assert launch(child(program), **options) == 0
    told = capfd.readouterr().err
    for ending in ("1 was killed by signal 9", "2 exited with code 4"):
        assert re.search(f"process {ending} .*; the others go on: [12]", told)
    program += "\nif i == '0': sys.exit(7)\ntime.sleep(60)"
    assert launch(child(program), processes=3, recoverable=True) == 7


def test_a_killed_process_is_named(capfd):
    program = "\nif i == '0': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    assert launch(child(program), processes=2) == 128 + 9
    why = r"process 0 was killed by signal 9 \(SIGKILL\) after \d\.\d s; stopping the o"
    assert re.search(why, capfd.readouterr().err)


def test_the_last_words_come_before_the_news_of_the_end(capfd):
    program = "print('why', file=sys.stderr, end=''); sys.exit(3)"
    environ = {**os.environ, "TOWERJAX_PROCESS_ID": "0"}
    with _process_group() as group:
        worker = _Worker(0, child(program), environ, group)
        wait_until(lambda: not is_alive(worker.popen.pid))
        assert _Job(group, [worker], Timeouts(1, 1), []).run().code == 3
    words, news = capfd.readouterr().err.splitlines()
    assert words == "[0] why"
    assert re.fullmatch(r"towerjax launch: process 0 exited with code 3 after .*", news)


@pytest.mark.slow
def test_what_holds_sigterm_back_is_killed_after_the_grace(capfd):
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: print('no'));"
        "print('ready')\nif i == '1': time.sleep(.3); sys.exit(5)\n"
        "while True: time.sleep(1)"
    )
    began = time.monotonic()
    assert launch(child(program), processes=2, grace_s=0.5) == 5
    assert 0.8 < time.monotonic() - began < 40
    out, err = capfd.readouterr()
    assert "[0] no\n" in out
    assert "still running: 0; ended with SIGKILL\n" in err


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("code", [0, 1])
def test_what_a_process_started_ends_with_it(code, capfd):
    began = time.monotonic()
    command = ["sh", "-c", f"sleep 60 & echo pid $!; exit {code}"]
    assert launch(command, processes=2) == code
    assert time.monotonic() - began < 40
    assert_ended(re.findall(r"pid (\d+)", capfd.readouterr().out))


@pytest.mark.parametrize("given", [(["tr\0ue"], {}), (["true"], {"N": "a\0"})])
def test_a_null_byte_is_refused(given):
    command, env = given
    with pytest.raises(ValueError, match="contains a null byte"):
        launch(command, processes=1, env=env)


def test_a_program_that_is_not_there_is_code_127(capfd):
    assert launch(["no-such-program", "x"], processes=2) == 127
    says = "towerjax launch: there is no program 'no-such-program'; write its path"
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("arguments, says", [
    ({"command": "true"}, "command='true' must be a list of a program and its arg"),
    ({"command": []}, r"command=\[\] must be a list"),
    ({"processes": 0}, "processes=0 must be a whole number >= 1"),
    ({"processes": True}, "processes=True must be a whole number >= 1"),
    ({"devices_per_process": 0}, "devices_per_process=0 must be a whole number"),
    ({"grace_s": -1}, "grace_s=-1 must be a number of seconds >= 0"),
    ({"grace_s": float("inf")}, "grace_s=inf must be a number of seconds"),
    ({"restarts": -1}, "restarts=-1 must be a whole number >= 0"),
    ({"hang_timeout_s": -1}, "hang_timeout_s=-1 must be a number of seconds >= 0"),
    ({"step_timeout_s": -1}, "step_timeout_s=-1 must be a number of seconds >= 0"),
    ({"towers": 0}, "towers=0 must be a whole number >= 1"),
    ({"towers": 5, "processes": 2}, "towers=5 cannot be divided among 2 processes."),
    ({"devices_per_process": 1, "env": {"JAX_PLATFORMS": "cuda,cpu"}},
        "devices_per_process=1 counts CPU devices, but JAX_PLATFORMS is 'cuda,cpu'"),
    ({"env": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}},
        "SLURM_STEP_NUM_TASKS=2 .* but towerjax launch starts all processes of its"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        launch(**{"command": ["true"], "processes": 1, **arguments})


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port} is in use. Choose another"):
            launch(["true"], processes=1, port=port)


def test_the_shell_command_does_what_the_function_does(capfd):
    job = ["--processes", "2", "--grace-seconds", "1", "--", *child("sys.exit(9)")]
    assert main(["launch", *job]) == 9
    assert main(["launch", "--processes", "0", "--", "true"]) == 2
    assert "towerjax launch: processes=0 must be" in capfd.readouterr().err
    for arguments, code in ((["launch", "--help"], 0), ([], 2), (["lunch"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    assert "towerjax launch --processes 2 --devices" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        main(["launch", "-n", "4", "--", "true"])
    assert "there is no -n: write --processes 4; see" in capfd.readouterr().err


# The first child tells the launcher, which is this process, once all have come so far.
ASKED = """
import pathlib
folder, number = pathlib.Path({folder!r}), {number}
def asked(n, _):
    (folder / f"{{i}} got {{n}}").touch()
    if n == number: sys.exit(0)
for n in (number, 10): signal.signal(n, asked)
(folder / f"{{i}} is ready").touch()
for word, n in (("is ready", 10), ("got 10", number)):
    while i == "0" and len([*folder.glob("* " + word)]) < 2: time.sleep(.01)
    if i == "0": os.kill(os.getppid(), n)
while True: time.sleep(.05)
"""


def test_what_is_no_text_goes_to_any_stream():
    text = io.StringIO()
    raw = io.BytesIO()
    for target in (text, of_raw := io.TextIOWrapper(raw)):
        write(target, b"a\xff")
    assert text.getvalue() == "a\ufffd" and of_raw.buffer.getvalue() == b"a\xff"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(number, tmp_path, capfd):
    program = ASKED.format(folder=str(tmp_path), number=number.value)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup one is ignored
    try:
        assert launch(child(program), processes=2) == 0
    finally:
        signal.signal(number, before)
    told = {path.name for path in tmp_path.iterdir()}
    words = ("is ready", "got 10", f"got {number:d}")
    assert told == {f"{i} {word}" for i in range(2) for word in words}
    err = capfd.readouterr().err
    assert f"{number.name} passed on to 2 running; SIGKILL follows after 5 s" in err


def test_signals_are_collected_unless_ignored_and_then_handled_as_before():
    term = signal.SIGTERM
    hup = signal.SIGHUP
    own = {term: lambda *_: None, hup: signal.SIG_IGN}
    before = {number: signal.signal(number, how) for number, how in own.items()}
    try:
        with _collect_signals() as arrived:
            signal.raise_signal(term)
            signal.raise_signal(hup)
        assert arrived == [term]
        assert {number: signal.getsignal(number) for number in own} == own
    finally:
        for number, how in before.items():
            signal.signal(number, how)


def launched(pipe, options):
    """``launch`` in a process of its own, which prints into a pipe."""
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    pipe.close()
    sys.exit(launch(**options))


@contextlib.contextmanager
def launcher(command, **options):
    reading, writing = forked.context().Pipe(duplex=False)
    options |= {"command": command, "processes": 2}
    process = forked.process(launched, writing, options)
    process.start()
    writing.close()
    try:
        with open(os.dup(reading.fileno())) as output:
            reading.close()
            yield process, output
    finally:
        process.kill()
        process.join()


def read_pids(output, count):
    """The numbers that the children print on lines of their own."""
    found = []
    while len(found) < count:
        line = output.readline()
        assert line, found
        found += [int(pid) for pid in re.findall(r"pid (\d+)", line)]
    return found


@pytest.mark.slow
def test_before_each_process_did_a_step_none_is_told_to_hang(capfd):
    """As while they compile."""
    assert launch(child("time.sleep(1)"), processes=2, step_timeout_s=0.1) == 0
    assert "began no step" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_second_signal_does_not_wait():
    program = "signal.signal(15, signal.SIG_IGN); print('pid', os.getpid());"
    with launcher(child(program + "time.sleep(60)"), grace_s=50) as (job, output):
        pids = read_pids(output, 2)
        job.terminate()
        assert "SIGTERM passed on to 2 running" in output.readline()
        assert all(is_alive(pid) for pid in pids)
        job.terminate()
        job.join(5)
        assert job.exitcode == 128 + 15
    assert_ended(pids)


@pytest.mark.slow
def test_nobody_outlives_a_launcher_that_is_killed():
    command = ["sh", "-c", "sleep 300 & echo pid $!; echo pid $$; wait"]
    with launcher(command) as (job, output):
        pids = read_pids(output, 4)
        assert all(is_alive(pid) for pid in pids)
        job.kill()
        assert_ended(pids)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_job_which_is_not_started_again():
    command = ["sh", "-c", "sleep 300 & echo pid $!; yes"]
    with launcher(command, restarts=5) as (job, output):
        pids = read_pids(output, 2)
        output.close()
        job.join(10)
        assert job.exitcode in (1, 128 + 13)
    assert_ended(pids)


def test_the_launcher_names_jax_nowhere():
    package = ROOT / "towerjax"
    paths = [package / "tools/cli.py", *(package / "mesh/cluster").glob("*.py")]
    imports = re.compile(r"^ *(import|from) jax", re.MULTILINE)
    assert [x.stem for x in paths if imports.search(x.read_text())] == ["start"]


# Which processes go on, and who is lost.


def test_as_many_go_on_as_are_left_and_divide_the_towers():
    whole = RestartPlan(processes=6, towers=12, restarts=9)
    one = whole.after(End(137, lost=1))
    two = one.after(End(137, lost=1))  # 4 of 4 places that are left
    assert [plan.count for plan in (whole, one, two)] == [6, 4, 4]
    assert [one.restarts, two.restarts] == [8, 7]
    three = two.after(End(137, lost=1))
    none = whole.after(End(137, lost=6))
    assert [three.count, none.count] == [3, 1]
    assert whole.after(End(75)).count == 6  # each saved and ended by itself
    assert RestartPlan(6, 6, 9, lost=1).count == 3
    assert RestartPlan(6, None, 9).after(End(137, lost=6)).count == 6


@pytest.mark.parametrize("end, left, code", [
    (End(0), None, 0),
    (End(3), None, 3),
    (End(75), 1, 75),
    (End(137, lost=1), 1, 75),
    (End(1, lost=1), 1, 75),  # another failed since one was lost
    (End(75, ended_by=15), None, 75),
    (End(143, ended_by=15), None, 143),
    (End(1, ended_by=2), None, 130),
    (End(0, ended_by=15), None, 0),
])  # fmt: skip
def test_what_an_end_leads_to(end, left, code):
    plan = RestartPlan(2, restarts=2)
    after = plan.after(end)
    assert (after and after.restarts) == left
    assert plan.code(end) == code
    assert RestartPlan(2, restarts=0).after(end) is None
    if end.lost:
        assert RestartPlan(2).code(end) == end.code


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("first, code, lost", [
    ("os.kill(os.getpid(), 9)", 137, 1),
    ("os.abort()", 134, 1),
    ("sys.exit(3)", 3, 0),
])  # fmt: skip
def test_those_whom_jax_aborts_since_one_ended_are_not_lost(
    first, code, lost, tmp_path
):
    """In the same moment or later: three of four abort, as JAX does to survivors."""
    program = f"""
signal.signal(15, signal.SIG_IGN)
os.symlink(f"/proc/{{os.getpid()}}/stat", {str(tmp_path)!r} + "/" + me)
while len(os.listdir({str(tmp_path)!r})) < 4: time.sleep(.01)  # until all are there
if me == "0": {first}
try:
    while ") Z " not in open({str(tmp_path / "0")!r}).read(): time.sleep(.01)
except OSError: pass  # the launcher has collected it
time.sleep(.1 * (int(me) - 1))
os.abort()"""
    ends = []
    after = RestartPlan.after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RestartPlan, "after", lambda *args: ends.append(args[1]) or after(*args)
        )
        children(program, processes=4, restarts=0, grace_s=5)
    assert [(end.code, end.lost) for end in ends] == [(code, lost)]


@pytest.mark.slow
def test_who_waits_for_a_lost_one_is_not_waited_for_and_not_lost_itself(
    capfd, monkeypatch
):
    monkeypatch.setattr(of_launcher, "_LOSS_GRACE_S", 2)
    waits = "signal.signal(15, signal.SIG_IGN); time.sleep(0.2);"
    killed = "os.kill(os.getpid(), 9) if me == '1' else time.sleep(60)"
    options = {"restarts": 0, "grace_s": 60, "hang_timeout_s": 1.5}
    began = time.monotonic()
    assert children(waits + killed, **options) == 75
    assert 2 < time.monotonic() - began < 50
    assert "still running: 0; ended with SIGKILL" in capfd.readouterr().err
