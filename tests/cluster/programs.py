"""What schedulers are to run, as the pages say it, and in which environment."""

import os
import pathlib
import re
import sys

import forked
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = str(pathlib.Path(__file__).parent / "train.py")
STEPS = 12
ASKED = pytest.mark.skipif(
    "TOWERJAX_SCHEDULERS" not in os.environ,
    reason="schedulers are started where TOWERJAX_SCHEDULERS=1 asks for it",
)


@pytest.fixture(scope="session")
def bits(tmp_path_factory):
    """Those of a run by one process that nothing disturbs."""
    told = forked.printed(TRAIN, str(tmp_path_factory.mktemp("alone")), f"{STEPS}")
    return re.findall(r" bits (\w+)$", told, re.M)[0]


def page(name):
    return (ROOT / "docs" / name).read_text()


def on_loopback(port):
    """Variables by which JAX's coordinator listens there, wherever it is found."""
    bound = f"127.0.0.1:{port}"
    return {"JAX_COORDINATOR_PORT": f"{port}", "JAX_COORDINATOR_BIND_ADDRESS": bound}


def of_two_devices(folder, path=os.environ["PATH"]):
    """Variables by which `python` and `towerjax`, put there, are ours."""
    for name, module in (("python", ""), ("towerjax", "-m towerjax ")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{path}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        **on_loopback(forked.free_port()),
    }
