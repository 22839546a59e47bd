"""What a process that runs tests has: eight CPU devices, and fixtures of all rooms."""

import gc
import os
import re
import sys

import jax
import pytest
import quickly
import suite

# Before JAX looks for devices, as programs do.
from towerjax.__main__ import main

# Where bytecode is not kept, each process compiles anew all that it imports of ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_filtering", "off")  # tests may look at all frames
quickly.compiled()
# The models of tests are small, and are split all the same.
suite.shards_from(1)


# Files that compare bits throughout, with other processes too, or look at programs.
OPTIMIZED = "absent bench compiled going_on processes report same_bits"
OPTIMIZED = {f"test_{name}" for name in OPTIMIZED.split()}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Programs are compiled as a user's are where bits are told, or they are read.

    Before the test's fixtures, of which those of a module come first.
    """
    is_optimized = re.search("bits|hash|in_place", item.name) is not None
    is_optimized |= item.module.__name__.rpartition(".")[2] in OPTIMIZED
    quickly.compiled(not is_optimized)


@pytest.fixture
def compiled():
    """The names of what is compiled for the devices, from here on."""
    names = []

    def listen(name, seconds, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def users_shards():
    """Small leaves stay whole, as users have it."""
    suite.shards_from(suite.LEAST_SHARD)
    yield
    suite.shards_from(1)


@pytest.fixture
def shell(request, tmp_path, monkeypatch, capsys):
    """`towerjax` beside the test file's ``PROGRAM``: its code, output and errors."""
    (tmp_path / "of_user.py").write_text(request.module.PROGRAM)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        path = list(sys.path)
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        assert sys.path == path
        return code, *capsys.readouterr()

    yield run
    sys.modules.pop("of_user", None)


def pytest_collection_finish():
    """What is imported stays: looking through it again and again takes a twentieth."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)
