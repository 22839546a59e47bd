"""Run a program in a fork, as if by itself, without the seconds of its imports.

A server has imported what programs import, and started no JAX backend; it forks a
process for each.
"""

import atexit
import gc
import multiprocessing
import os
import pathlib
import pickle
import re
import runpy
import socket
import sys
import tempfile
import warnings

import jax
import quickly

PRELOAD = """
    numpy jax optax flax.linen flax.nnx towerjax matplotlib.pyplot rich sklearn.datasets
    nbformat ipykernel.inprocess.manager matplotlib_inline.backend_inline
""".split()
# The emitters of code that JAX 0.10 has still take half as long as those after them.
OLDER = "--xla_cpu_use_fusion_emitters=false"
OLDER = {"XLA_FLAGS": OLDER} if jax.version.__version_info__ < (0, 11) else {}

PROVED = r"^towerjax: (?:proved|proving that the step is) equal to one tower.*\n"


# What no proof sees of an example is audited: what goes around a tower's devices, and
# how a tower finds a row that stands for ids that no table has.
_OF_DEVICES = (
    r"loss \(a shard_map over a tower's own devices, at .*: no rule for a loop"
)
_OF_TABLES = r"gradient\['table'\] \(no rule for argmax over the tower's rows\)\."
UNSEEN = {
    "context_parallel.py": _OF_DEVICES,
    "embeddings.py": _OF_TABLES,
    "train.py": _OF_TABLES,  # the model that several processes train
}


class First(list):
    """Functions that are called where a process receives them."""

    def __reduce__(self):
        return call_each, tuple(self)


def call_each(*functions):
    for function in functions:
        function()


# What each process calls before it looks up anything else: `tests.mutants` does so.
FIRST = First()


def context():
    """That of the server, which another user of it may have started."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*PRELOAD, __name__])
    return found


def process(target, *args, **options):
    """A process that is still to be started, and calls a function."""
    return context().Process(target=begin, args=(FIRST, target, args, options))


def begin(_, target, args, options):
    target(*args, **options)


def in_child(output, run, *args, devices=8, compiled="as by users", **variables):
    """Call a function; programs that tell no bits may be compiled in less time."""
    gc.freeze()  # looking through what the server imported takes a tenth
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.pop("XLA_FLAGS", None)
    # For this process, whose JAX has begun nothing yet, and for what it starts.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": f"{devices}"}
    os.environ["NPROC"] = "8"  # threads, as the page on same bits says
    os.environ |= variables | ({} if compiled == "as by users" else OLDER)
    quickly.compiled(compiled == "unoptimized")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    run(*args)


def member(output, run, *args, **options):
    """As `in_child`, a process of a job, which ends as the interpreter lets it end."""
    try:
        in_child(output, run, *args, **options)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        atexit._run_exitfuncs()


def program(path, folder, flags):
    os.chdir(folder)
    sys.argv = [path, *flags]
    sys.path[0] = os.path.dirname(path)
    warnings.simplefilter("error")
    if unseen := UNSEEN.get(os.path.basename(path)):
        warnings.filterwarnings("ignore", f"not proved equal to one tower: {unseen}")
    runpy.run_path(path, run_name="__main__")


def told(run, *args, timeout_s=1800, code=0, **options):
    """What it prints to call a function in a process of its own; fails as it does.

    Left out are lines on stderr that its steps are proved.
    """
    (text,) = _outputs([(in_child, run, args, options)], timeout_s, code)
    return re.sub(PROVED, "", text, flags=re.MULTILINE)


def free_port():
    """A port of the loopback interface where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def told_by_all(run, *args, processes=2, devices=2, timeout_s=1800, code=0):
    """What each process of a job prints that calls a function, and ends with a code."""
    variables = {
        "TOWERJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "TOWERJAX_NUM_PROCESSES": f"{processes}",
    }
    options = [
        variables | {"TOWERJAX_PROCESS_ID": f"{i}", "devices": devices}
        for i in range(processes)
    ]
    return _outputs([(member, run, args, each) for each in options], timeout_s, code)


def _outputs(calls, timeout_s, code=0):
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, f"{i}") for i in range(len(calls))]
        started = []
        for output, (target, run, args, options) in zip(outputs, calls, strict=True):
            output.touch()
            started.append(process(target, str(output), run, *args, **options))
            started[-1].start()
        for one in started:
            one.join(timeout_s)
        codes = [one.exitcode for one in started]
        for one in started:
            one.kill()
        texts = [output.read_text() for output in outputs]
        assert codes == [code] * len(codes), (codes, *texts)
        return texts


def printed(path, *flags, folder=None, **options):
    """What a program prints, run in its folder or another."""
    return told(program, str(path), folder or os.path.dirname(path), flags, **options)


def called(run, *args, options=(), **kwargs):
    """What a function returns."""
    with tempfile.NamedTemporaryFile("rb") as result:
        told(keep, result.name, run, args, kwargs, **dict(options))
        return pickle.load(result)


def keep(path, run, args, kwargs):
    with open(path, "wb") as file:
        pickle.dump(run(*args, **kwargs), file)
