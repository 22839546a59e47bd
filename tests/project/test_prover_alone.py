"""The prover, and the check of any program, know no towers: they work without them."""

import pathlib
import subprocess
import sys

import towerjax as tj

ROOT = pathlib.Path(tj.__file__).parent

ALONE = '''
"""Prove and refute a program, with nothing of towerjax but what reads programs."""

import importlib.abc
import re
import sys
import types

ROOT = sys.argv[1]
READS = r"towerjax\\.(types|jaxprs|mesh|proof|check(\\.programs|\\.comparison|$))\\b"


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("towerjax.") and not re.match(READS, name):
            raise ImportError(f"{name} is blocked")


package = types.ModuleType("towerjax")  # whose __init__ would import all
package.__path__ = [ROOT]
package.__file__ = f"{ROOT}/__init__.py"
sys.modules["towerjax"] = package
sys.meta_path.insert(0, Blocked())

import jax

jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jax import lax

import towerjax.proof.equal.one_tower
from towerjax.check.programs.programs import prove
from towerjax.check.programs.same import same_on_devices
from towerjax.proof.findings import ReplicationError


def made_with(collective):
    def make(devices):
        mesh = jax.sharding.Mesh(devices, "i")
        specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}

        def fn(x):
            return collective(x.mean(), "i")

        return jax.shard_map(fn, mesh=mesh, **specs), [np.arange(8.0)]

    return make


for devices in ((1, 2), (1, 4), (1, 2, 4)):
    report = prove(made_with(lax.pmean), devices=devices)
    print(report.same, [x.says for x in report.equal], report.unproved)
print(same_on_devices(made_with(lax.pmean), (1, 2)))
try:
    prove(made_with(lax.psum), devices=(1, 2, 4))
except ReplicationError as error:
    print(error)
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("towerjax.")}
print(*sorted(rooms))
'''


def test_the_prover_works_without_towers(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    command = [sys.executable, "-W", "error", str(path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    *proved, compared, note, refuted, leaf, rooms = done.stdout.splitlines()
    assert proved == ["1 ['proved'] {}"] * 3
    assert compared.startswith("1 value is the same on 2 devices as on one")
    assert note.startswith("note: only scalars were compared")
    assert refuted == "Results of the program depend on the number of devices:"
    assert "D times what it is on one device" in leaf and "alone.py:" in leaf
    assert rooms == "check jaxprs mesh proof types"
