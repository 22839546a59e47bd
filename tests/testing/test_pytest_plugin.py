"""The pytest plugin, in sessions of its own: ``@pytest.mark.same(...)``."""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

import pytest_towerjax

ROOT = pathlib.Path(__file__).parent.parent.parent
TESTS = """
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import Mesh, PartitionSpec as P

X = np.arange(1, 9, dtype=np.float32)

@pytest.fixture
def w():
    return np.float32(2)

def made(devices, reduce, w):
    specs = {"mesh": Mesh(devices, "i"), "in_specs": (P(), P("i")), "out_specs": P()}
    fn = lambda w, x: reduce(w * x.mean(), "i")
    return jax.jit(jax.shard_map(fn, **specs, check_vma=False)), (w, X)

@pytest.mark.same(devices=(1, 2, 4))
def test_right(devices, w):
    return made(devices, jax.lax.pmean, w)

@pytest.mark.same(devices=(1, 2))
def test_wrong(devices, w):
    return made(devices, jax.lax.psum, w)

@pytest.mark.same(micro_batches=(1, 2), rtol=1e-6)
def test_parts(micro_batches):
    parts = np.split(X, micro_batches)
    return lambda w: w * sum(x.mean() for x in parts), [np.float32(2)]

@pytest.mark.same(micro_batches=(1, 2))
def test_without_its_number(w):
    return None

def test_plain():
    assert jax.device_count() == 4
"""


def session(folder, *options, plugin=("-p", "pytest_towerjax"), **variables):
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    known = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        known.pop(name, None)
    known |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *plugin, *options],
        cwd=folder,
        env=known,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_marked_tests_are_compared(tmp_path):
    out = session(tmp_path, "--towerjax-devices", "4", "--strict-markers")
    assert "PASSED test_it.py::test_right[1-2-4]" in out
    assert "PASSED test_it.py::test_plain" in out
    for failed in ("wrong[1-2]", "parts[1-2]", "without_its_number"):
        assert f"FAILED test_it.py::test_{failed}" in out
    at = 1 + TESTS.splitlines().index('    fn = lambda w, x: reduce(w * x.mean(), "i")')
    assert "result: D times what it is on one device" in out  # proved, and not run
    assert f"test_it.py:{at}" in out and "result is 18" not in out
    assert "result: n times what it is with one micro-batch" in out
    assert "test_without_its_number(w) must take micro_batches" in out
    assert "Traceback" not in out and "During handling" not in out


@pytest.mark.slow
def test_a_marked_test_names_the_flag_where_the_plugin_is_off(tmp_path):
    out = session(tmp_path, "--strict-markers", "-k", "not plain", plugin=())
    assert out.count("SKIPPED") == 4 and "FAILED" not in out
    assert out.count("is marked same(...): run pytest --towerjax.") >= 4
    assert "fixture" not in out and "typo" not in out


@pytest.mark.slow
def test_it_is_off_until_asked_and_brings_no_jax():
    program = "import sys, pytest_towerjax as p; print(*[x for x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert "pytest_towerjax" in done.stdout.split()
    assert not {"jax", "towerjax", "numpy"} & {*done.stdout.split()}


class Options:
    def __init__(self, towerjax=False, plugins=()):
        self.towerjax = towerjax
        self.plugins = plugins


def test_a_mark_names_one_number():
    def read(*args, **kwargs):
        return pytest_towerjax._read(SimpleNamespace(args=args, kwargs=kwargs))

    assert read(devices=(1, 2), rtol=0.1) == ("devices", (1, 2), 0.1)
    for args, kwargs in [((1,), {}), ((), {}), ((), {"a": (1, 2), "b": (1, 2)})]:
        with pytest.raises(pytest.UsageError, match="or one other number by its name"):
            read(*args, **kwargs)


def test_who_asks_for_it():
    assert not pytest_towerjax._is_on(Options(plugins=None))
    assert not pytest_towerjax._is_on(Options(plugins=["xdist"]))
    assert pytest_towerjax._is_on(Options(plugins=["pytest_towerjax"]))
    assert pytest_towerjax._is_on(Options(towerjax=True))
