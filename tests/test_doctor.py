"""The doctor: what it sees of a machine, and what it tests."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import lax

from towerjax.collectives import AllReduce
from towerjax.mesh.cluster import Cluster, start
from towerjax.tools import doctor as command
from towerjax.tools.cli import main
from towerjax.tools.doctor import (
    check_op,
    ops_for,
    tower_rows,
    wrong_sums,
)

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def doctor(monkeypatch, capsys):
    # JAX is in use here; a command joins a job before that.
    alone = Cluster(0, 1, None, "of the test")
    monkeypatch.setattr(start._process, "cluster", alone)

    def run(*arguments):
        code = main(["doctor", "--mebibytes", "1", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_all_devices_and_ops_are_right(doctor):
    code, out, error = doctor("--json")
    found = json.loads(out)
    assert code == 0 and found["well"] and not error
    assert [x["name"] for x in found["devices"]] == [f"cpu:{i}" for i in range(8)]
    assert [x["name"].partition("(")[0] for x in found["ops"]] == [
        "AllReduce",
        "Packed",
        "PinnedTree",
        "ReduceToOneDevice",
        "Hierarchical",
    ]
    assert all(x["gigabytes_per_second"] > 0 for x in found["ops"])
    assert not any(x["wrong"] for x in found["ops"] + found["devices"])
    assert found["machine"]["versions"]["jax"].count(".") >= 2


@dataclasses.dataclass(frozen=True)
class Forgets:
    """Leaves one tower's part out, and on one device adds something to the rest."""

    tower: int
    needs_every_tower: bool = False

    def sum_over_towers(self, tree, axes):
        index = lax.axis_index(axes.names[0])
        kept = tree * (index != self.tower).astype(tree.dtype)
        sums = AllReduce().sum_over_towers(kept, axes)
        late = (index == 2).astype(tree.dtype)
        return dataclasses.replace(
            sums, buffers=[x.at[-1].add(late) for x in sums.buffers]
        )


@pytest.mark.slow
def test_a_broken_op_is_told_with_device_and_tower(doctor, monkeypatch):
    names = tuple(f"cpu:{i}" for i in range(4))
    wrong = check_op(Forgets(tower=3), names, 400).wrong
    assert [sentence[:5] for sentence in wrong] == list(names)
    assert all("has 0 of tower 3's part, which is 4" in x for x in wrong)
    wrong = check_op(Forgets(tower=9), names, 400).wrong
    assert len(wrong) == 1 and "cpu:2 has " in wrong[0]
    assert "of sum 99" in wrong[0] and "of 100 sums 1 differ" in wrong[0]
    monkeypatch.setattr(command, "ops_for", lambda count: (Forgets(tower=5),))
    code, out, _ = doctor()
    assert code == 1 and "wrong: Forgets(tower=5" in out
    assert "has 0 of tower 5's part, which is 6" in out
    assert "8 wrong. Leave a device that is wrong alone out" in out


@pytest.mark.parametrize("devices", [1, 3])
def test_any_number_of_devices(devices):
    names = tuple(f"cpu:{i}" for i in range(devices))
    result = check_op(ops_for(devices)[-1], names, 44)
    assert not result.wrong and len(ops_for(devices)) == 5
    assert (result.gigabytes_per_second is None) == (devices == 1)


def test_the_sums_are_exact_and_every_one_is_looked_at():
    rows = tower_rows(5, 20)
    sums = rows.astype(np.float64).sum(0)
    assert sums[:5].tolist() == [1, 2, 3, 4, 5]
    assert len({row[5:].tobytes() for row in rows}) == 5  # distinct
    assert wrong_sums("cpu:0", sums, sums, 5) == []
    for place in range(20):
        for bad in (np.nan, sums[place] + 1):
            got = sums.copy()
            got[place] = bad
            assert len(wrong_sums("cpu:0", got, sums, 5)) == 1


def test_a_device_that_answers_wrongly_is_named(doctor, monkeypatch):
    real = jax.device_put

    def put(x, device=None, **options):
        if device == jax.devices()[6] and getattr(x, "dtype", None) == np.int32:
            x = x + 1
        return real(x, device, **options)

    monkeypatch.setattr(command.jax, "device_put", put)
    monkeypatch.setattr(command, "ops_for", lambda count: ())
    code, out, _ = doctor()
    assert code == 1 and "1 wrong." in out
    assert "cpu:6: gives back other numbers than it was given." in out


@pytest.mark.slow
def test_a_platform_that_does_not_start_is_told():
    done = subprocess.run(
        [sys.executable, "-m", "towerjax", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not done.stdout
    assert "towerjax doctor: JAX has no devices: " in done.stderr
    assert "Unset JAX_PLATFORMS, which is 'cuda'" in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("none"), AssertionError()])
def test_a_backend_without_devices_is_told(doctor, monkeypatch, error):
    def devices():
        raise error

    monkeypatch.setattr(command.jax, "devices", devices)
    code, out, told = doctor()
    assert code == 2 and not out
    why = str(error) or "it knows none of the platforms"
    assert f"JAX has no devices: {why}. Unset JAX_PLATFORMS" in told


def test_wrong_arguments_are_refused(doctor):
    code, out, error = doctor("--mebibytes", "0")
    assert code == 2 and not out
    assert error == "towerjax doctor: --mebibytes=0 must be a whole number >= 1.\n"
