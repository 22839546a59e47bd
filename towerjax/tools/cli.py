"""The commands of ``towerjax``; the docstring of each is its help."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import os
import pathlib
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any, NoReturn

from towerjax.check.equality.told import told_of
from towerjax.loop.writers import as_json
from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.mesh.devices import want_cpu_devices
from towerjax.prover.comparison import SplitError
from towerjax.prover.programs.processes import ProgramDied
from towerjax.prover.programs.words import OF_DEVICES, OF_MICRO_BATCHES
from towerjax.step.step import Step
from towerjax.sweeps.bench import bench as bench_all
from towerjax.sweeps.bench import resolve
from towerjax.tools.checked import SCREEN, check_program
from towerjax.tools.faults import (
    annotations,
    read_baseline,
    split_meant,
    told_of_faults,
    write_baseline,
)
from towerjax.towers.strategies import Mirrored
from towerjax.types.options import check_takes
from towerjax.types.refusals import types_of
from towerjax.types.version import __version__

OK = 0
FAULT = 1  # the command ran, and found a fault or a failed run
USAGE = 2  # wrong arguments, or an invalid value; nothing was done
NOT_STARTED = 126  # the system refused a file or a program
INTERRUPTED = 128 + 2  # Ctrl-C, as if SIGINT had ended the process
# The output's reader is gone; the code is as if SIGPIPE had ended this.
CLOSED = 128 + 13


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the error as one sentence, and end the process with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


class Instead(argparse.Action):
    """An option of other launchers, whose error names our option for the same thing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print which option to use, and end the process with code 2."""
        parser.error(f"there is no {option_string}: write {self.const} {values}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    about = "Data-parallel training with JAX. Help for one: towerjax command --help"
    parser = Parser(prog="towerjax", description=about)
    version = __version__
    parser.add_argument("--version", action="version", version=f"towerjax {version}")
    where = "show the Python traceback of an error"
    parser.add_argument("--traceback", action="store_true", help=where)
    commands = parser.add_subparsers(dest="name", metavar="command")
    for run, options in _OPTIONS.items():
        text = inspect.getdoc(run) or ""
        command = commands.add_parser(
            run.__name__,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        for name, kind, help_text, *more in options:
            flag = {"action": "store_const", "const": kind}
            keywords: Any = {"type": kind} if callable(kind) else flag
            name, _, dest = name.partition("=")
            keywords |= {"dest": dest} if dest else {}
            command.add_argument(name, help=help_text, **keywords, **dict(*more))
        command.set_defaults(run=run)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [*parser._option_string_actions, *_names_of_options(options.name)]
        near = difflib.get_close_matches(unknown[0], known, 1)
        remedy = f"; write {near[0]}" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
    if options.name is None:
        parser.error(f"name a command: {', '.join(x.__name__ for x in _OPTIONS)}")
    return run_parsed(options)


def _names_of_options(command: str | None) -> list[str]:
    """List the options of a command."""
    named = {run.__name__: options for run, options in _OPTIONS.items()}
    names = [option[0].partition("=")[0] for option in named.get(command or "", ())]
    return [name for name in names if name.startswith("--")]


def _seconds(text: str) -> float:
    """Read a number of seconds; refuse one that is not above 0."""
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds > 0")


def run_parsed(options: argparse.Namespace) -> int:
    """Run a parsed command, and return its exit code.

    The command can import modules of the current folder, as with ``python -m``. A
    ``ValueError`` is a mistake of the user, and an ``OSError`` a refusal of the system.
    Both are printed without a traceback, unless ``options.traceback`` asks for it.
    """
    arguments = vars(options)
    name, run, traceback = (arguments.pop(x) for x in ("name", "run", "traceback"))
    sys.path.insert(0, "")
    try:
        return run(**arguments)
    except BrokenPipeError:
        # The reader of the output is gone. Python would flush into the closed pipe at
        # its exit, so the output is sent to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        print(f"towerjax {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if traceback:
            raise
        print(f"towerjax {name}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ValueError) else NOT_STARTED
    finally:
        sys.path.remove("")


def show(result: Any, fields: Mapping[str, Any], in_json: bool, code: int = OK) -> int:
    """Print a result, as text or as one JSON object; return the code."""
    text = dumps(as_json(fields), indent=2, allow_nan=False) if in_json else result
    print(text, flush=True)
    return code


def read_toml(*sources: str) -> dict[str, Any]:
    """Read the keys of TOML files, and of lines such as ``"towers=[1, 2]"``.

    Later sources replace keys of earlier ones.
    """
    settings: dict[str, Any] = {}
    for source in sources:
        text = source if "=" in source else pathlib.Path(source).read_text()
        try:
            settings |= tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            name, _, values = source.partition("=")
            remedy = f". Write '{name}=[{values}]'" if source == text else ""
            raise ValueError(f"{source}: {error}{remedy}") from error
    return settings


def launch(**options: Any) -> int:
    """Run a command in several local processes that form one job.

    If a process fails, the others are ended. The exit code of the job is that of the
    first process that failed.

    Example:
      towerjax launch --processes 2 --devices-per-process 4 -- python train.py

    train.py calls towerjax.cluster.initialize() before it uses JAX.

      towerjax launch --processes 2 --restarts 5 --hang-timeout 60 -- python train.py

    exit code: 0 if all processes returned 0; 75 if the job should be started again;
    otherwise that of the first process that failed.
    """
    return launch_processes(**options)


def audit(make_step: str, json: bool = False) -> int:
    """Check that a step is the same on any number of towers.

    First the step is proved, without a run. Then two towers and one tower are run on
    rows of the batch, and their merged results are compared.

    Example:
      towerjax audit train:make_step

    where make_step() returns (step, state, batch).

    exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
    arguments.
    """
    step, state, batch = _made(make_step)
    try:
        unproved = dict(step.check(state, batch).unproved)
        outcome = step.audit(state, batch)
    except SplitError as error:
        findings = list(map(dataclasses.asdict, error.findings))
        return show(error, {"same": False, "findings": findings}, json, FAULT)
    text = told_of(unproved) if unproved else "proved equal to one tower"
    fields = {"same": True, "unproved": unproved, **dataclasses.asdict(outcome)}
    return show(f"{text}\n{outcome}", fields, json)


def check(
    make: str,
    devices: Sequence[int] | None = None,
    rtol: float | None = None,
    *,
    micro_batches: Sequence[int] | None = None,
    json: bool = False,
    always_run: bool = False,
    timeout_s: float | None = None,
    github: bool = False,
    baseline: str | None = None,
    new_baseline: str | None = None,
) -> int:
    """Check a JAX program on several numbers of devices.

    First the program is proved, without a run. Outputs that shard_map or pmap declare
    replicated must be the same on all devices. Each result must be the same as on one
    device. If the proof does not answer for a result, the program is run on each number
    of devices. Then its results are compared, and the values that it changes in place.

    Example:
      towerjax check train:make --devices 1 2 4

    where make(devices) is given a list of devices and returns (fn, args).

      towerjax check train:main --github --baseline meant.json

    where main() is the script's own function. A function without arguments is run in a
    new process for each number of devices, and what it returns is compared.

      towerjax check train:make --micro-batches 1 2 4

    where make(micro_batches) returns (fn, args) of a program that accumulates a
    gradient over so many micro-batches of one batch.

    exit code: 0 if nothing depends on the number; 1 if something does that
    is not in the baseline, or the program died or took too long; 2 for wrong arguments.
    """
    if json and github:
        raise ValueError("--json and --github both print on stdout: pass one of them.")
    if None not in (devices, micro_batches):
        raise ValueError("Pass --devices or --micro-batches, not both.")
    words = OF_DEVICES if micro_batches is None else OF_MICRO_BATCHES
    numbers = micro_batches or devices or (1, 2, 4)
    if words is OF_DEVICES:
        want_cpu_devices(max(numbers))
    maker = resolve(make, "train:make")
    if isinstance(maker, Step):
        module = make.partition(":")[0]
        raise ValueError(
            f"{make} is a step. Write towerjax audit {module}:make_step, and there"
            " def make_step(): return step, step.init(params), batch."
        )
    _require_function(make, maker)
    entries = read_baseline(baseline, make) if baseline is not None else []
    form = f"{make.rpartition(':')[2]}({words.option})"
    try:
        options = {"words": words, "always_run": always_run, "timeout_s": timeout_s}
        looked = check_program(maker, form, numbers, rtol, **options)
    except ProgramDied as error:
        print(f"towerjax check: {error}", file=sys.stderr)
        return FAULT
    if new_baseline is not None:
        write_baseline(new_baseline, make, looked.faults)
        entries = read_baseline(new_baseline, make)
    faults, meant, left = split_meant(looked.faults, entries)
    texts = [*looked.texts, *told_of_faults(faults, words)]
    texts += [f"meant: {x.text}" for x in meant]
    texts += [f"note: in the baseline, but no longer found: {x['text']}" for x in left]
    texts = ["\n".join(x.splitlines()[:SCREEN]) for x in texts]
    texts += annotations(faults) if github else []
    outcome = {
        "same": not looked.faults,
        "findings": [dataclasses.asdict(x) for x in faults],
        "meant": [dataclasses.asdict(x) for x in meant],
        "notes": looked.notes,
    }
    code = FAULT if faults else OK
    return show("\n".join(texts), outcome | looked.fields, json, code)


def report(
    make_step: str, on: str | None = None, timed_calls: int = 0, json: bool = False
) -> int:
    """Show what a compiled step sends, holds and waits for.

    Example:
      towerjax report train:make_step --timed-calls 10

    where make_step() returns (step, state, batch).

      towerjax report train:make_step --on h200:8

    where make_step(strategy) returns (step, params, batch). Only their shapes are used.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    strategy = (Mirrored(devices=_devices_of(on)),) if on else ()
    step, state, batch = _made(make_step, *strategy)
    figures = step.report(state, batch, timed_calls=timed_calls)
    return show(figures, dataclasses.asdict(figures), json)


def _made(make_step: str, *strategy: Mirrored) -> tuple[Any, Any, Any]:
    """Call the function that ``make_step`` names; check and return its results.

    They are a step and the step's two arguments.
    """
    function = resolve(make_step, "train:make_step")
    if isinstance(function, Step):
        raise ValueError(
            f"{make_step} is a step. Name a function that returns it with its"
            " arguments: def make_step(): return step, step.init(params), batch."
        )
    _require_function(make_step, function)
    form = f"{make_step.rpartition(':')[2]}({'strategy' if strategy else ''})"
    check_takes(form, function, *strategy)
    for x in strategy:  # raises here if the compiler is not installed
        if isinstance(x.devices, Absent):
            x.devices.jax_devices()
    match returned := function(*strategy):
        case (step, state, batch) if hasattr(step, "audit"):
            return step, state, batch
    second = "params" if strategy else "state"
    raise ValueError(
        f"{form} must return (step, {second}, batch), a step of towerjax and its"
        f" arguments, but it returned {types_of(returned)}."
    )


def _require_function(name: str, x: Any) -> None:
    """Raise unless the object of that name is a function of a user's module."""
    if not callable(x):
        raise ValueError(f"{name} is not a function: {x!r:.80}.")
    if inspect.isbuiltin(x):
        raise ValueError(
            f"{name} is a function of Python's own. Name one of your file."
        )


def _devices_of(text: str) -> Absent:
    """Read a text that names absent devices.

    Such a text is ``"h200:8"``, or a topology of TPUs, ``"v5e:2x4"``.
    """
    text = text.lower()
    target, _, number = text.rpartition(":")
    if Absent.is_topology(text):
        return Absent(text)
    if not (target and number.isdecimal()):
        remedy = f"write --on {target or text}:8"
        raise ValueError(f"--on {text!r} does not say how many devices; {remedy}.")
    return Absent(target, int(number))


def bench(
    build: str,
    grid: Sequence[str],
    *,
    peer: Sequence[str] = (),
    json: bool = False,
    **options: Any,
) -> int:
    """Time a grid of steps, in turns with peers.

    A peer is another implementation to compare with, such as a hand-written step.

    Example:
      towerjax bench mine:build 'towers=[1, 2]' 'batch=[64]' --out a.jsonl
      towerjax bench mine:build grid.toml --peer hand=mine:by_hand --out a.jsonl

    where build(towers=..., batch=...) returns (call, state, batch); call may be a step.
    grid.toml has one list for each argument of build, as on the first line above.
    Configurations that are in the file of --out are not timed again.

    exit code: 0 if all were timed, 1 if one failed, 2 for wrong arguments.
    """
    if wrong := [text for text in peer if text.count("=") != 1]:
        raise ValueError(f"--peer {wrong[0]}: write --peer name=module:function.")
    options["peers"] = dict(text.split("=") for text in peer)
    options |= {"progress": False} if json else {}
    timings = bench_all(build, read_toml(*grid), **options)
    code = FAULT if "failed" in [x["status"] for x in timings.records] else OK
    return show(timings, {"results": timings.records}, json, code)


_STEP = ("make_step", str, "module:function")
_JSON = ("--json", True, "print one JSON object")
_NEEDED = {"required": True}
_SEVERAL = {"nargs": "+"}
# Each option is ``(name, type, help)``, and perhaps a dict of more arguments. An option
# ``--name=dest`` is passed to the function as ``dest``. A flag has its value in place
# of a type. An option that the user leaves out is not passed.
_OPTIONS: dict[Callable[..., int], tuple[Any, ...]] = {
    launch: (
        ("--processes", int, "how many processes", _NEEDED),
        ("-n", int, argparse.SUPPRESS, {"action": Instead, "const": "--processes"}),
        ("--devices-per-process", int, "CPU devices of each process (JAX's default)"),
        ("--port", int, "the port of process 0 (a free one)"),
        ("--restarts", int, "how often to restart after a lost process"),
        ("--towers", int, "towers of the program: continue without lost processes"),
        ("--recoverable", True, "the others go on when a process is lost"),
        ("--grace-seconds=grace_s", float, "seconds from SIGTERM to SIGKILL (5)"),
        ("--hang-timeout=hang_timeout_s", float, "seconds without a sign of life"),
        ("--step-timeout=step_timeout_s", float, "seconds without a step"),
        ("command", str, "after --: the program and its arguments", _SEVERAL),
    ),
    report: (
        _STEP,
        ("--timed-calls", int, "how many calls to time (0)"),
        ("--on", str, "absent devices to compile for: h200:8, a100:64, v5e:2x4"),
        _JSON,
    ),
    bench: (
        ("build", str, "module:function"),
        ("grid", str, "a TOML file, or lines of one: 'towers=[1, 2]'", _SEVERAL),
        ("--out=results", str, "the file for results, as JSON lines", _NEEDED),
        ("--peer", str, "name=module:function to time as well", {"action": "append"}),
        ("--rounds", int, "rounds of timing, at least 6 (11)"),
        ("--seconds-per-round", _seconds, "seconds for each step or peer (0.25)"),
        ("--retry-failed", True, "time configurations again that failed before"),
        ("--timeout=timeout_s", _seconds, "seconds for one configuration (1800)"),
        ("--quiet=progress", False, "print no progress"),
        _JSON,
    ),
    audit: (_STEP, _JSON),
    check: (
        ("make", str, "module:function"),
        ("--devices", int, "numbers of devices (1 2 4)", {"nargs": "+"}),
        (
            "--micro-batches",
            int,
            "numbers of micro-batches, in place of devices",
            {"nargs": "+"},
        ),
        ("--rtol", float, "permitted difference over a leaf's largest value (1e-4)"),
        ("--run=always_run", True, "run the program even if everything is proved"),
        (
            "--timeout=timeout_s",
            _seconds,
            "seconds for each run, in a process of its own",
        ),
        ("--github", True, "print each fault so that GitHub shows it in the code"),
        ("--baseline", str, "a file of intended faults, which are not reported"),
        ("--write-baseline=new_baseline", str, "write all faults there, as intended"),
        _JSON,
    ),
}
