"""How does a program run as by itself, without its imports' seconds? In a fork.

A server has imported what programs import, and started no JAX backend; it forks a
process for each.
"""

import functools
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import warnings
from multiprocessing import forkserver

import pytest

PRELOAD = "numpy jax optax flax.linen flax.nnx towerjax".split()


@functools.cache
def server(devices):
    """The context of the server, whose JAX has so many CPU devices."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, __name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
        forkserver.ensure_running()
    return context


def in_child(output, run, *args):
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    run(*args)


def program(path):
    os.chdir(os.path.dirname(path))
    sys.argv, sys.path[0] = [path], os.path.dirname(path)
    warnings.simplefilter("error")
    runpy.run_path(path, run_name="__main__")


def told(run, *args, timeout_s=120):
    """What it prints to call a function in a process of its own; fails as it does."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = server(8).Process(target=in_child, args=(output.name, run, *args))
        process.start()
        process.join(timeout_s)
        is_over = process.exitcode is not None
        process.kill()
        text = output.read()
        assert is_over and process.exitcode == 0, text
        return text


def printed(path):
    """What a program prints."""
    return told(program, str(path))


def called(run, *args, **kwargs):
    """What a function returns."""
    with tempfile.NamedTemporaryFile("rb") as result:
        told(keep, result.name, run, args, kwargs)
        return pickle.load(result)


def keep(path, run, args, kwargs):
    with open(path, "wb") as file:
        pickle.dump(run(*args, **kwargs), file)
