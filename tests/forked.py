"""Run a program in a fork, as if by itself, without the seconds of its imports.

A server has imported what programs import, and started no JAX backend; it forks a
process for each.
"""

import gc
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import warnings

import jax

PRELOAD = """
    numpy jax optax flax.linen flax.nnx towerjax matplotlib.pyplot rich sklearn.datasets
    nbformat ipykernel.inprocess.manager matplotlib_inline.backend_inline
""".split()


def context():
    """That of the server, which another user of it may have started."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*PRELOAD, __name__])
    return found


def in_child(output, run, *args):
    gc.freeze()  # looking through what the server imported takes a tenth
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    # For this process, whose JAX has begun nothing yet, and for what it starts.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    run(*args)


def program(path, folder, flags):
    os.chdir(folder)
    sys.argv, sys.path[0] = [path, *flags], os.path.dirname(path)
    warnings.simplefilter("error")
    runpy.run_path(path, run_name="__main__")


def told(run, *args, timeout_s=120):
    """What it prints to call a function in a process of its own; fails as it does."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = context().Process(target=in_child, args=(output.name, run, *args))
        process.start()
        process.join(timeout_s)
        is_over = process.exitcode is not None
        process.kill()
        text = output.read()
        assert is_over and process.exitcode == 0, text
        return text


def printed(path, *flags, folder=None):
    """What a program prints, run in its folder or another."""
    return told(program, str(path), folder or os.path.dirname(path), flags)


def called(run, *args, **kwargs):
    """What a function returns."""
    with tempfile.NamedTemporaryFile("rb") as result:
        told(keep, result.name, run, args, kwargs)
        return pickle.load(result)


def keep(path, run, args, kwargs):
    with open(path, "wb") as file:
        pickle.dump(run(*args, **kwargs), file)
