"""Call a function in a process of its own, whose JAX has a given number of CPU devices.

The result is sent back in a file. Printed lines are passed on one by one.
"""

import collections
import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import pathlib
import pickle
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from towerjax.jaxprs.sites import is_library
from towerjax.mesh.devices import want_cpu_devices
from towerjax.types.boundary import api_boundary

_FORCED = r"--xla_force_host_platform_device_count=\S*"  # a flag of old programs
_LAST = 12  # how many of the last lines of a dead process its error shows
_RESULT = "result"
_POLL_S = 0.02
_DRAIN_S = 1.0  # the time to read what a process printed last
_AFTER_RESULT_S = 20.0  # how long a process may run after it wrote its result
_MAIN = "__main__"
_NOTE_OF_JAX = "For simplicity, JAX has removed"  # begins JAX's note after an error
_BEGIN = (
    "import sys; sys.path[:] = {path!r};"
    " from towerjax.prover.programs.processes import answer;"
    " answer(int(sys.argv.pop()), sys.argv.pop())"
)


class NamedFunction(NamedTuple):
    """The module, file and name by which another process finds a function."""

    module: str
    name: str
    file: str


class ProgramDied(RuntimeError):
    """A process that ran a program ended without a result.

    Attributes:
      lines: The last lines that it printed. They were also shown on stderr at once.
    """

    def __init__(self, text: str, lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.lines = tuple(lines)


class ToldError(Exception):
    """An error of another process, to be raised again where it was started."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def name_function(
    form: str, fn: Callable[..., Any], *, or_devices: bool = True
) -> NamedFunction:
    """Tell where another process finds a function; raise if it cannot find it.

    ``form`` is how the caller writes such a function. ``or_devices`` says whether the
    caller also takes a function of a list of devices.
    """
    plain = inspect.unwrap(fn)
    module = getattr(fn, "__module__", None) or ""
    name = getattr(fn, "__qualname__", "")
    code = getattr(plain, "__code__", None)
    file = code.co_filename if code else ""
    if not (module and re.fullmatch(r"\w+(\.\w+)*", name) and os.path.isfile(file)):
        raise ValueError(
            f"{form} takes no argument, so other processes must import it by its name,"
            f" but this is {fn!r:.200}. Define it with def at the top level of a file."
            + " Or let it take a list of devices of this process, make(devices)."
            * or_devices
        )
    return NamedFunction(module, name, os.path.abspath(file))


def find_function(named: NamedFunction, devices: int) -> Callable[..., Any]:
    """Import a function, and let JAX make this number of CPU devices.

    If the function's file sets another number, it is overruled.
    """
    if _is_found(named):
        module = importlib.import_module(named.module)
    else:
        module = _from_file(named)
    want_cpu_devices(devices)
    return pkgutil.resolve_name(f"{module.__name__}:{named.name}")


@contextlib.contextmanager
def forgets_modules() -> Iterator[None]:
    """Forget, at the end of the `with`, the user's modules that were imported in it.

    They are then imported anew the next time. Modules of libraries stay.
    """
    before = {*sys.modules}
    try:
        yield
    finally:
        for name in {*sys.modules} - before:
            place = _place_of(sys.modules[name])
            if place and not is_library(place):
                del sys.modules[name]


def _place_of(module: types.ModuleType) -> str:
    """Find a module's file; for a package without one, its folder; otherwise ""."""
    folders = [*getattr(module, "__path__", ())]
    return getattr(module, "__file__", None) or [*folders, ""][0]


def _is_found(named: NamedFunction) -> bool:
    """Return whether Python finds the module by its name, in the same file."""
    if named.module == _MAIN:
        return False
    try:
        spec = importlib.util.find_spec(named.module)
    except (ImportError, ValueError):
        return False
    origin = getattr(spec, "origin", None)
    return (
        bool(origin) and os.path.exists(origin) and os.path.samefile(origin, named.file)
    )


def _from_file(named: NamedFunction) -> types.ModuleType:
    name = "__mp_main__" if named.module == _MAIN else named.module
    spec = importlib.util.spec_from_file_location(name, named.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.argv[:] = [named.file]
    spec.loader.exec_module(module)
    return module


def call_in_process(
    label: str,
    devices: int,
    run: Callable[..., Any],
    /,
    *args: Any,
    is_shown: bool = True,
    timeout_s: float | None = None,
) -> Any:
    """Call a function in a process of its own, and return its result.

    Args:
      label: The name of the call in errors, and before each line that it prints.
      devices: The number of CPU devices of its JAX.
      run: A function at the top level of a module of towerjax.
      *args: Its arguments, which are pickled.
      is_shown: Whether what it prints is shown.
      timeout_s: The seconds after which the process is killed; None waits for ever.

    Raises:
      ProgramDied: The process ended without a result, or did not end in time. The error
        has its last lines.
      Exception: The error that the function raised as a `ToldError`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "call").write_bytes(pickle.dumps((run, args)))
        command = [sys.executable, "-c", _BEGIN.format(path=sys.path), name]
        shown = label if is_shown else ""
        result = folder / _RESULT
        code, last = _printed(command, devices, shown, result, timeout_s)
        if code or not result.exists():
            ending = _how_it_ended(code)
            if code is None:
                ending = f"did not end within {timeout_s:g} s, and was killed"
            raise ProgramDied(_told_of_death(label, ending, last), last)
        gave, value = pickle.loads(result.read_bytes())
    if gave == "error":
        raise value
    return value


def _environment(devices: int) -> dict[str, str]:
    """Set the environment of a process whose JAX has this number of devices.

    With it, sets have one order in all processes, so that a program has the same text
    in each.
    """
    variables = dict(os.environ)
    flags = re.sub(_FORCED, "", variables.get("XLA_FLAGS", ""))
    return (
        {"PYTHONHASHSEED": "0"}
        | variables
        | {
            "XLA_FLAGS": flags.strip(),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
    )


def _printed(
    command: list[str],
    devices: int,
    label: str,
    result: pathlib.Path,
    timeout_s: float | None,
) -> tuple[int | None, list[str]]:
    """Run a process, and return its exit code and the last lines that it printed.

    If there is a label, each line is shown after it. The exit code is None if the
    process was killed. It is killed after the timeout, and if it runs on for long
    after it wrote its ``result``. The processes that it started are killed at its end.
    It ends when this process does: it waits at a pipe that this one holds open.
    """
    last = collections.deque[str](maxlen=_LAST)
    parent, parent_end = os.pipe()
    output, output_end = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, parent_end)
        try:
            process = subprocess.Popen(
                [*command, str(parent)],
                env=_environment(devices),
                pass_fds=(parent,),
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        finally:
            os.close(parent)
            os.close(output_end)
        # Another process may hold the output open for ever, so a thread reads it.
        reader = threading.Thread(target=_show, args=(output, label, last), daemon=True)
        reader.start()
        try:
            is_ended = _wait(process, result, timeout_s)
        finally:  # also after Ctrl-C
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(_DRAIN_S)
    return process.returncode if is_ended else None, list(last)


def _show(output: int, label: str, last: collections.deque[str]) -> None:
    """Keep the last lines of a process, and show each line after the label."""
    with os.fdopen(output, errors="replace") as lines:
        for line in lines:
            last.append(line.rstrip())
            if label:
                print(f"[{label}] {line}", end="", file=sys.stderr, flush=True)


def _wait(
    process: subprocess.Popen, result: pathlib.Path, timeout_s: float | None
) -> bool:
    """Wait until a process has ended; return False if it is to be killed."""
    began = time.monotonic()
    until = math.inf if timeout_s is None else began + timeout_s
    has_result = False
    while process.poll() is None:
        time.sleep(_POLL_S)
        if time.monotonic() > until:
            return False
        if not has_result and result.exists():
            has_result = True
            until = min(until, time.monotonic() + _AFTER_RESULT_S)
    return True


def _how_it_ended(code: int | None) -> str:
    if not code:
        return "ended before it gave a result"
    ending = f"ended with exit code {code}" if code >= 0 else "was killed"
    if code < 0:
        ending += f" by {signal.Signals(-code).name}"
    return ending


def _told_of_death(label: str, ending: str, last: list[str]) -> str:
    printed = [line for line in last if _is_told(line)]
    last_line = f"The last line that it printed: {printed[-1]}" if printed else ""
    return f"The process of {label} {ending}. {last_line or 'It printed nothing.'}"


def _is_told(line: str) -> bool:
    """Return whether a line is worth showing: it has words, and is no note of JAX."""
    return bool(line.strip(" -")) and not line.startswith(_NOTE_OF_JAX)


@api_boundary
def answer(parent: int, folder: str) -> None:
    """Call the function that is stored in ``folder``, and write its result there.

    ``parent`` is a pipe that is closed when the process which waits for the result
    ends.
    """

    def end_with_parent() -> None:
        os.read(parent, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    place = pathlib.Path(folder)
    run, args = pickle.loads((place / "call").read_bytes())
    try:
        result = "value", run(*args)
    except ToldError as told:
        result = "error", told.error
    new = place / "new result"
    new.write_bytes(pickle.dumps(result))
    new.rename(place / _RESULT)
