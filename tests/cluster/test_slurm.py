"""The docs' recipes for Slurm, run by one of two nodes on this machine."""

import os
import re
import shlex
import signal

import forked
import programs
import pytest
import slurm
from programs import ASKED, STEPS, TRAIN, bits, page

pytestmark = [
    pytest.mark.slow,
    ASKED,
    pytest.mark.skipif(
        bool(slurm.MISSING), reason=f"no Slurm is here: {', '.join(slurm.MISSING)}"
    ),
]


def command():
    """The line of the page that starts one process on each of two machines."""
    (line,) = re.findall(r"^srun .*train\.py$", page("several_processes.md"), re.M)
    return shlex.split(line)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    with slurm.started(tmp_path_factory.mktemp("slurm")) as found:
        found.environ |= programs.of_two_devices(found.folder / "bin", slurm.PATH)
        yield found


@pytest.fixture
def cluster(daemons):
    yield daemons
    daemons.end_all()


def test_two_tasks_find_each_other_and_print_what_the_page_shows(cluster, tmp_path):
    text = page("several_processes.md")
    found = r"^```python run launch\n(.*?)^```\n\n```text\n8( .*?)^```$"
    program, output = re.search(found, text, re.M | re.S).groups()
    (tmp_path / "train.py").write_text(program)
    told = cluster.told(*command()[:-1], str(tmp_path / "train.py"))
    assert told.splitlines()[-1] == f"4{output}".strip()


def test_two_tasks_have_the_bits_of_one_process(cluster, tmp_path, bits):
    told = cluster.told(*command()[:-1], TRAIN, str(tmp_path), str(STEPS))
    found = re.findall(r"^(\d of 2) bits (\w+)$", told, re.M)
    assert sorted(found) == [("0 of 2", bits), ("1 of 2", bits)]
    assert told.count(" by a cluster that JAX detected pid ") == 2, told


def test_on_sigterm_all_save_after_the_same_step_and_end_with_75(cluster, tmp_path):
    running, output = cluster.start(
        *command()[:-1], TRAIN, str(tmp_path), str(STEPS), WAIT_S="0.5"
    )
    try:
        slurm.wait_until(
            "step 5", lambda: " step 5" in output.read_text(), why=output.read_text
        )
        cluster.told("scancel", "--signal=TERM", *cluster.jobs())
        assert running.wait(slurm.PATIENCE_S) == 75
    finally:
        running.kill()
    text = output.read_text()
    steps = [re.findall(rf"^{i} of 2 step (\d+)$", text, re.M) for i in (0, 1)]
    assert steps[0] == steps[1]
    last = int(steps[0][-1])
    assert last < STEPS and (tmp_path / f"{last}").exists(), text


def script(tmp_path, way):
    """The page's batch script, by its launcher on one machine or by its line for two.

    Two devices a task, and our program in place of the user's.
    """
    text = page("how_to/restarts.md").split("### Slurm")[1]
    block = re.search(r"^```bash\n(.*?)^```$", text, re.M | re.S)[1]
    several = re.search(r"write `([^`]*)` in place of the launcher", text)[1]
    if way == "launcher":
        assert "--devices-per-process 4" in block
        block = block.replace("--devices-per-process 4", "--devices-per-process 2")
    else:
        assert "--nodes=1 " in block
        block = block.replace("--nodes=1 ", "--nodes=2 ")
        block = re.sub(
            r"srun .*? train\.py", " ".join(several.split()), block, flags=re.S
        )
    path = tmp_path / "job.sh"
    path.write_text(block.replace("train.py", f"{TRAIN} {tmp_path}/saved {STEPS}"))
    return str(path)


def submitted(cluster, tmp_path, path, *options, wait_s="0.5"):
    """The job's number and its output, which steps of both tasks have reached."""
    output = tmp_path / "output"
    options = (f"--output={output}", *options)
    told = cluster.told("sbatch", "--parsable", *options, path, WAIT_S=wait_s)

    def text():
        return output.read_text() if output.exists() else ""

    def has_begun():
        return {"0", "1"} <= {*re.findall(r"(\d) of 2 step 5$", text(), re.M)}

    slurm.wait_until("step 5", has_begun, lambda: text() or cluster.log())
    return told.strip(), output


def steps_of_runs(cluster, job, output, bits):
    """The steps of each process, the first run's and the second's, which has ended."""

    def has_ended():
        return cluster.state(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")

    slurm.wait_until("the end", has_ended, output.read_text)
    text = output.read_text()
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), text
    ended = sorted(re.findall(r"(\d) of 2 bits (\w+)$", text, re.M))
    assert ended == [("0", bits), ("1", bits)], text
    for i in "01":
        runs = re.split(rf"{i} of 2 by .*", text)[1:]
        found = [re.findall(rf"{i} of 2 step (\d+)$", run, re.M) for run in runs]
        first, second = ([int(n) for n in numbers] for numbers in found)
        assert first == [*range(1, len(first) + 1)] and len(first) >= 5, text
        assert second == [*range(second[0], STEPS + 1)], text
        yield len(first), second[0]


@pytest.mark.parametrize("way", ["launcher", "two machines"])
def test_after_sigterm_the_job_is_requeued_and_goes_on(cluster, tmp_path, bits, way):
    job, output = submitted(cluster, tmp_path, script(tmp_path, way))
    cluster.told("scancel", "--signal=TERM", job)
    for last, first in steps_of_runs(cluster, job, output, bits):
        assert first == last + 1


def test_after_a_killed_process_the_job_is_requeued_and_goes_on(
    cluster, tmp_path, bits
):
    job, output = submitted(cluster, tmp_path, script(tmp_path, "two machines"))
    pid = re.search(r"^1 of 2 by .* pid (\d+) on 4$", output.read_text(), re.M)[1]
    os.kill(int(pid), signal.SIGKILL)
    for last, first in steps_of_runs(cluster, job, output, bits):
        assert 1 < first <= last + 1 and first % 2  # every second step is saved


def test_two_steps_of_one_allocation_are_two_jobs(cluster, tmp_path, bits):
    """By a port for each, as the page says."""
    line = shlex.join([*command()[:-1], TRAIN])
    line = line.replace("srun ", "srun --exact ")  # each has its own CPUs
    lines = ["#!/bin/bash"]
    for i in range(2):
        port = programs.on_loopback(forked.free_port())
        lines.append("".join(f"{x}={value} " for x, value in port.items()))
        lines[-1] += f"{line} {tmp_path}/{i} {STEPS} &"
    path = tmp_path / "job.sh"
    path.write_text("\n".join([*lines, "wait -n && wait -n"]))
    options = "--wait", "--nodes=2", "--exclusive", f"--output={tmp_path}/output"
    done, _ = cluster.start("sbatch", *options, str(path))
    assert done.wait(slurm.PATIENCE_S) == 0
    text = (tmp_path / "output").read_text()
    assert re.findall(r"^\d of 2 bits (\w+)$", text, re.M) == [bits] * 4, text
