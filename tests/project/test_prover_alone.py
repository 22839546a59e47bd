"""The prover, and the check of any program, know no towers: they work without them."""

import json
import pathlib
import subprocess
import sys

import pytest

import towerjax as tj

ROOT = pathlib.Path(tj.__file__).parent

ALONE = '''
"""Prove and refute a program, with nothing of towerjax but what reads programs."""

import importlib.abc
import json
import re
import sys

import pytest
import types

ROOT = sys.argv[1]
READS = rf"towerjax\\.(types|jaxprs|mesh|prover)\\b"


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

import towerjax.prover.equality.one_tower
from towerjax.prover.programs.programs import prove
from towerjax.prover.programs.same import same_on_devices
from towerjax.prover.replication.findings import ReplicationError


def made_with(collective):
    def make(devices):
        mesh = jax.sharding.Mesh(devices, "i")
        specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}

        def fn(x):
            return collective(x.mean(), "i")

        return jax.shard_map(fn, mesh=mesh, **specs), [np.arange(8.0)]

    return make


reports = [
    prove(made_with(lax.pmean), devices=devices)
    for devices in ((1, 2), (1, 4), (1, 2, 4))
]
found = {
    "same": [x.same for x in reports],
    "says": [[y.says for y in x.equal] for x in reports],
    "compared": str(same_on_devices(made_with(lax.pmean), (1, 2))),
}
try:
    prove(made_with(lax.psum), devices=(1, 2, 4))
except ReplicationError as error:
    found["refuted"] = str(error)
names = [name for name in sys.modules if name.startswith("towerjax.")]
print(json.dumps({**found, "rooms": sorted({name.split(".")[1] for name in names})}))
'''


@pytest.mark.slow
def test_the_prover_works_without_towers(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    command = [sys.executable, "-W", "error", str(path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] == [1, 1, 1] and found["says"] == [["proved"]] * 3
    assert "1 value is the same on 2 devices as on one" in found["compared"]
    assert "depend on the number of devices" in found["refuted"]
    assert "D times what it is on one device" in found["refuted"]
    assert found["rooms"] == "jaxprs mesh prover types".split()
