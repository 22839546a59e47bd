"""The doctor: what it sees of a machine, what it tests, and what it advises."""

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
    advice_on,
    check_op,
    ops_for,
    this_machine,
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
    assert not any(x["is_wrong"] for x in found["advice"])


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
    assert "has 0 of tower 5's part, which is 6" in out and "8 wrong." in out


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


def devices(platform, count, kind="H200"):
    info = {"kind": kind, "process": 0, "memory_bytes": None}
    return [{"name": f"{platform}:{i}", **info} for i in range(count)]


GOOD = {
    **this_machine(),
    "devices": devices("gpu", 8),
    "cores": 64,
    "shared_memory_bytes": 8 << 30,
    "nvidia": True,
    "environment": {},
    "options": {"jax_threefry_partitionable": True},
}
NO_GPU = {"nvidia": False, "devices": devices("cpu", 1, "cpu")}
TWO_KINDS = {"devices": devices("gpu", 1) + devices("gpu", 1, "A100")}


@pytest.mark.parametrize(
    ("change", "is_wrong", "what", "fix"),
    [
        ({"devices": [], "problem": "none"}, True, "no devices: none", "pip install"),
        ({"devices": devices("cpu", 8)}, True, "computes on the CPU", "jax[cuda13]"),
        # One who says JAX_PLATFORMS=cpu may mean it.
        (
            {"devices": devices("cpu", 8), "environment": {"JAX_PLATFORMS": "cpu"}},
            False,
            "computes on the CPU",
            "Unset JAX_PLATFORMS",
        ),
        (NO_GPU, False, "one CPU", "CPU_DEVICES=8"),
        (
            {"devices": devices("cpu", 8), "nvidia": False, "cores": 2},
            False,
            "8 CPU devices share 2 processors",
            "as many devices as",
        ),
        (TWO_KINDS, False, "A100, H200", "of one kind"),
        ({"shared_memory_bytes": 64 << 20}, True, "/dev/shm has 64 MiB", "--shm-size"),
        ({"options": {"jax_disable_jit": True}}, True, "jax_disable_jit", "Unset"),
        ({"options": {"jax_threefry_partitionable": False}}, True, "draws", "Unset"),
    ],
)
def test_each_trap_is_told(change, is_wrong, what, fix):
    assert advice_on(GOOD) == []
    [advice] = advice_on({**GOOD, **change})
    assert advice.is_wrong == is_wrong
    assert what in advice.what and fix in advice.fix
    assert str(advice).startswith("wrong: " if is_wrong else "note: ")


def test_what_is_wrong_comes_first_and_one_gpu_needs_no_shared_memory():
    ill = {**GOOD, **TWO_KINDS, "options": {"jax_disable_jit": True}}
    assert [one.is_wrong for one in advice_on(ill)] == [True, False]
    alone = {**GOOD, "devices": devices("gpu", 1), "shared_memory_bytes": 1}
    assert advice_on(alone) == []


def test_a_slow_device_is_told():
    results = [command.Probe(f"gpu:{i}", (), 1.0, 20.0) for i in range(4)]
    assert command._failures(results, []) == []
    results[2] = dataclasses.replace(results[2], gigabytes_per_second=3.0)
    [advice] = command._failures(results, [])
    assert "gpu:2 receives 3.0 GB/s, the others 20.0" in advice.what


def test_without_devices_it_still_answers(doctor, monkeypatch):
    ill = {**GOOD, "devices": [], "problem": "Unknown backend: 'cuda'"}
    monkeypatch.setattr(command, "this_machine", lambda: ill)
    code, out, _ = doctor("--json")
    assert code == 1 and json.loads(out)["ops"] == []
    assert "Unknown backend" in json.loads(out)["advice"][0]["what"]


@pytest.mark.slow
def test_a_platform_that_does_not_start_is_told():
    done = subprocess.run(
        [sys.executable, "-m", "towerjax", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["devices"]
    [advice] = [x for x in found["advice"] if x["is_wrong"]]
    assert advice["what"].startswith("JAX has no devices: ")
    assert "Unset JAX_PLATFORMS, which is 'cuda'" in advice["fix"]


@pytest.mark.parametrize("error", [RuntimeError("none"), AssertionError()])
def test_a_backend_without_devices_has_a_problem(monkeypatch, error):
    def devices():
        raise error

    monkeypatch.setattr(command.jax, "devices", devices)
    found = this_machine()
    assert found["devices"] == []
    assert found["problem"] == (
        str(error) or "it could start no platform of those told."
    )


def test_wrong_arguments_are_refused(doctor):
    code, out, error = doctor("--mebibytes", "0")
    assert code == 2 and not out
    assert error == "towerjax doctor: --mebibytes=0 must be a whole number >= 1.\n"
