"""The docs' recipes for Slurm, run by one of two nodes on this machine."""

import pathlib
import re
import shlex
import sys

import forked
import pytest
import slurm

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = str(pathlib.Path(__file__).parent / "train.py")
STEPS = 12
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(slurm.MISSING), reason=f"no Slurm is here: {', '.join(slurm.MISSING)}"
    ),
]


def page(name):
    return (ROOT / "docs" / name).read_text()


def command():
    """The line of the page that starts one process on each of two machines."""
    (line,) = re.findall(r"^srun .*train\.py$", page("several_processes.md"), re.M)
    return shlex.split(line)


@pytest.fixture(scope="session")
def daemons(tmp_path_factory):
    with slurm.started(tmp_path_factory.mktemp("slurm")) as found:
        for name, module in (("python", ""), ("towerjax", "-m towerjax ")):
            path = found.folder / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            path.chmod(0o755)
        found.environ |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
        }
        yield found


@pytest.fixture
def cluster(daemons):
    yield daemons
    daemons.end_all()


@pytest.fixture(scope="session")
def bits(tmp_path_factory):
    """Those of a run by one process that nothing disturbs."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return bits_of(forked.printed(TRAIN, folder, str(STEPS)))


def bits_of(text):
    return re.findall(r" bits (\w+)$", text, re.M)[-1]


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
    (place,) = {*re.findall(r" at (\S+) pid \d+ on 4$", told, re.M)}
    assert place.startswith("127.0.0.1:6")


def test_on_sigterm_all_save_after_the_same_step_and_end_with_75(cluster, tmp_path):
    running, output = cluster.start(
        *command()[:-1], TRAIN, str(tmp_path), str(STEPS), WAIT_S="0.5"
    )
    try:
        slurm.wait_until(
            "step 5", lambda: " step 5" in output.read_text(), why=output.read_text
        )
        cluster.told("scancel", "--signal=TERM", *cluster.jobs())
        assert running.wait(60) == 75
    finally:
        running.kill()
    text = output.read_text()
    steps = [re.findall(rf"^{i} of 2 step (\d+)$", text, re.M) for i in (0, 1)]
    assert steps[0] == steps[1]
    last = int(steps[0][-1])
    assert last < STEPS and (tmp_path / f"{last}").exists(), text
