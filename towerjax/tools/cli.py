"""The commands of ``towerjax``; the docstring of each is its help."""

import argparse
import dataclasses
import inspect
import os
import pathlib
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any, NoReturn

from towerjax.check.equality.told import told_of
from towerjax.check.programs.programs import proved_on, refuted_in
from towerjax.check.programs.runs import UserProgram
from towerjax.check.programs.same import lists_of_devices, use_what_is_given
from towerjax.loop.writers import as_json
from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.mesh.devices import Device, want_cpu_devices
from towerjax.proof.findings import ReplicationError
from towerjax.sweeps.bench import bench as bench_all
from towerjax.sweeps.bench import resolve
from towerjax.testing import SplitError, same_on_devices
from towerjax.towers.strategies import Mirrored
from towerjax.types.leaves import types_of
from towerjax.types.options import check_takes
from towerjax.types.version import __version__

OK = 0
FAULT = 1  # the command ran, and found a fault or a failed run
USAGE = 2  # wrong arguments, or an invalid value; nothing was done
NOT_STARTED = 126  # the system refused a file or a program
INTERRUPTED = 128 + 2  # Ctrl-C, as if SIGINT had ended the process
CLOSED = 128 + 13  # the reader of the output has gone, as if SIGPIPE ended this


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


class Instead(argparse.Action):
    """An option that other launchers have: the error says which is ours."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """End the process with code 2."""
        parser.error(f"there is no {option_string}: write {self.const} {values}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    about = "Replicated training with JAX. Arguments of one: towerjax command --help"
    parser = Parser(prog="towerjax", description=about)
    version = __version__
    parser.add_argument("--version", action="version", version=f"towerjax {version}")
    where = "show where an error was raised"
    parser.add_argument("--traceback", action="store_true", help=where)
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    for run, options in _OPTIONS.items():
        text = inspect.getdoc(run) or ""
        command = commands.add_parser(
            run.__name__,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        for name, kind, what, *more in options:
            flag = {"action": "store_const", "const": kind}
            how: Any = {"type": kind} if callable(kind) else flag
            name, _, dest = name.partition("=")
            how |= {"dest": dest} if dest else {}
            command.add_argument(name, help=what, **how, **dict(*more))
        command.set_defaults(run=run)
    return run_parsed(parser.parse_args(arguments))


def run_parsed(options: argparse.Namespace) -> int:
    """Run a parsed command; return its exit code.

    It can import modules of the current folder, as with ``python -m``. A ``ValueError``
    is a mistake of the user, an ``OSError`` a refusal of the system: both are printed
    without a traceback, unless ``options.traceback``.
    """
    given = vars(options)
    name, run, traceback = (given.pop(x) for x in ("name", "run", "traceback"))
    sys.path.insert(0, "")
    try:
        return run(**given)
    except BrokenPipeError:
        # The reader has gone: Python must not flush into the closed pipe at exit.
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
    """The keys of TOML files and of lines such as ``"towers=[1, 2]"``, in order."""
    settings: dict[str, Any] = {}
    for source in sources:
        text = source if "=" in source else pathlib.Path(source).read_text()
        try:
            settings |= tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source}: {error}") from error
    return settings


def launch(**options: Any) -> int:
    """Run a command in several local processes that form one job.

    The first that fails ends the others, and its exit code is the job's.

    Example:
      towerjax launch --processes 2 --devices-per-process 4 -- python train.py

    train.py calls towerjax.cluster.initialize() before it uses JAX.

      towerjax launch --processes 2 --restarts 5 --hang-timeout 60 -- python train.py

    exit code: 0 if all processes returned 0; 75 if the job is to be started again; else
    that of the first that failed.
    """
    return launch_processes(**options)


def audit(make_step: str, json: bool = False) -> int:
    """Check that a step is the same on any number of towers.

    It is proved, and what is merged of rows of the batch on two towers is compared with
    one tower.

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
    told = told_of(unproved) if unproved else "proved equal to one tower"
    fields = {"same": True, "unproved": unproved, **dataclasses.asdict(outcome)}
    return show(f"{told}\n{outcome}", fields, json)


def check(
    make: str,
    devices: Sequence[int] = (1, 2, 4),
    rtol: float | None = None,
    json: bool = False,
    always_run: bool = False,
) -> int:
    """Check a JAX program on several numbers of devices.

    What its maps over devices call the same is proved, and that what it returns is the
    same as on one device. Where that is not proved of a result, the program is run on
    each number of devices, and what it returns and changes in place is compared.

    Example:
      towerjax check train:make --devices 1 2 4

    where make(devices) is given a list of devices and returns (fn, args).

    exit code: 0 if nothing depends on them, 1 if something does, 2 for wrong arguments.
    """
    want_cpu_devices(max(devices))
    maker = resolve(make, "train:make")
    lists = lists_of_devices(devices)
    form = f"{make.rpartition(':')[2]}(devices)"
    check_takes(form, maker, lists[max(devices)])
    looked = _Looked()
    programs = {n: UserProgram(form, maker(given)) for n, given in lists.items()}
    is_proved = _prove_program(programs, lists, looked)
    if is_proved and not always_run:
        looked.told.append("proved, and not run: --run runs it, too")
    else:
        _run_program(maker, devices, rtol, looked)
    told = looked.told
    told += ["\n".join(x.splitlines()[:_SCREEN]) for x in looked.faults.values()]
    outcome = {"same": not looked.faults, "findings": looked.faults}
    outcome |= {"notes": looked.notes} | looked.fields
    return show("\n".join(told), outcome, json, FAULT if looked.faults else OK)


@dataclasses.dataclass
class _Looked:
    """What a check has found so far: texts, faults and notes, and fields of JSON."""

    told: list[str] = dataclasses.field(default_factory=list)
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    fields: dict[str, Any] = dataclasses.field(default_factory=lambda: {"ran": False})


def _prove_program(
    programs: Mapping[int, UserProgram],
    lists: Mapping[int, Sequence[Device]],
    looked: _Looked,
) -> bool:
    """Prove what can be without a run; whether that is all."""
    try:
        proof, why = proved_on(programs)
    except ReplicationError as error:
        looked.faults["proof"] = str(error)
        return False
    if proof is None:
        looked.notes.append(f"nothing is proved: the program cannot be traced ({why})")
        looked.told.append(f"note: {looked.notes[-1]}")
        return False
    looked.told.append("\n".join(str(proof).splitlines()[:_SCREEN]))
    results = {x.leaf: {"says": x.says, "why": x.why} for x in proof.equal}
    looked.fields |= {"proved": proof.maps, "results": results}
    looked.notes += [*proof.notes, *[f"not read: {x}" for x in proof.unread]]
    if refuted := refuted_in(proof):
        looked.faults["equality"] = refuted
    is_all = bool(proof.equal) and not proof.unproved
    return is_all and use_what_is_given(programs, lists)


def _run_program(
    maker: Callable[..., Any],
    devices: Sequence[int],
    rtol: float | None,
    looked: _Looked,
) -> None:
    """Run the program, and compare."""
    looked.fields["ran"] = True
    try:
        outcome = same_on_devices(maker, devices, rtol=rtol)
    except SplitError as error:
        looked.faults["comparison"] = str(error)
        return
    looked.told.append(str(outcome))
    looked.notes += outcome.notes
    looked.fields |= {
        "compared": outcome.compared,
        "not_compared": outcome.not_compared,
    }


def report(
    make_step: str, on: str | None = None, timed_calls: int = 0, json: bool = False
) -> int:
    """Show what a compiled step sends, holds and waits for.

    Example:
      towerjax report train:make_step --timed-calls 10
      towerjax report train:make_step --on h200:8

    where make_step() returns (step, state, batch), and with --on make_step(strategy)
    returns (step, params, batch), of which only the shapes are used.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    strategy = (Mirrored(devices=_devices_of(on)),) if on else ()
    step, state, batch = _made(make_step, *strategy)
    figures = step.report(state, batch, timed_calls=timed_calls)
    return show(figures, dataclasses.asdict(figures), json)


def _made(make_step: str, *strategy: Mirrored) -> tuple[Any, Any, Any]:
    """What a named function returns, checked."""
    if not callable(function := resolve(make_step, "train:make_step")):
        raise ValueError(f"{make_step} is no function: {function!r}.")
    form = f"{make_step.rpartition(':')[2]}({'strategy' if strategy else ''})"
    check_takes(form, function, *strategy)
    match made := function(*strategy):
        case (step, state, batch) if hasattr(step, "audit"):
            return step, state, batch
    second = "params" if strategy else "state"
    raise ValueError(
        f"{form} must return (step, {second}, batch), a step of towerjax and what it is"
        f" called with, and returned {types_of(made)}."
    )


def _devices_of(text: str) -> Absent:
    """The absent devices of ``"h200:8"``, or of a TPU topology, ``"v5e:2x4"``."""
    target, _, number = text.rpartition(":")
    if Absent.is_topology(text):
        return Absent(text)
    if not (target and number.isdecimal()):
        how = f"write --on {target or text}:8"
        raise ValueError(f"--on {text!r} says not how many; {how}.")
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

    Example:
      towerjax bench mine:build 'towers=[1, 2]' 'batch=[64]' --out a.jsonl
      towerjax bench mine:build grid.toml --peer hand=mine:by_hand --out a.jsonl

    where build(towers=..., batch=...) returns (call, state, batch), a step for example,
    and grid.toml has a list for each argument of build, as the lines above.
    Configurations that --out has are not timed again.

    exit code: 0 if all were timed, 1 if one failed, 2 for wrong arguments.
    """
    if wrong := [text for text in peer if text.count("=") != 1]:
        raise ValueError(f"--peer {wrong[0]}: write --peer name=module:function.")
    options["peers"] = dict(text.split("=") for text in peer)
    options |= {"progress": False} if json else {}
    timings = bench_all(build, read_toml(*grid), **options)
    code = FAULT if "failed" in [x["status"] for x in timings.records] else OK
    return show(timings, {"results": timings.records}, json, code)


_SCREEN = 16  # lines of one answer
_STEP = ("make_step", str, "module:function")
_JSON = ("--json", True, "print one JSON object")
_NEEDED = {"required": True}
_SEVERAL = {"nargs": "+"}
# ``(name, type, text)`` and more by name; ``--name=dest`` is passed as ``dest``, and a
# flag has its value in place of a type. What is not given is not passed.
_OPTIONS: dict[Callable[..., int], tuple[Any, ...]] = {
    launch: (
        ("--processes", int, "how many", _NEEDED),
        ("-n", int, argparse.SUPPRESS, {"action": Instead, "const": "--processes"}),
        ("--devices-per-process", int, "CPU devices of each; default: JAX's"),
        ("--port", int, "where process 0 listens; default: a free one"),
        ("--restarts", int, "restart after so many losses of a process"),
        ("--towers", int, "the program's: go on without lost processes"),
        ("--grace-seconds=grace_s", float, "SIGTERM to SIGKILL (5)"),
        ("--hang-timeout=hang_timeout_s", float, "seconds of no sign of life"),
        ("--step-timeout=step_timeout_s", float, "seconds without a step"),
        ("command", str, "after --, with its arguments", _SEVERAL),
    ),
    report: (
        _STEP,
        ("--timed-calls", int, "time so many calls (default: none)"),
        ("--on", str, "devices that are not here: h200:8, a100:64, v5e:2x4 ..."),
        _JSON,
    ),
    bench: (
        ("build", str, "module:function"),
        ("grid", str, "a TOML file, or lines of one: 'towers=[1, 2]'", _SEVERAL),
        ("--out=results", str, "a file of results, as JSON lines", _NEEDED),
        ("--peer", str, "name=module:function, timed too", {"action": "append"}),
        ("--rounds", int, "at least 6 (11)"),
        ("--seconds-per-round", float, "of each contender (0.25)"),
        ("--retry-failed", True, "time again what failed before"),
        ("--timeout=timeout_s", float, "seconds (1800)"),
        ("--quiet=progress", False, "no progress"),
        _JSON,
    ),
    audit: (_STEP, _JSON),
    check: (
        ("make", str, "module:function"),
        ("--devices", int, "numbers of devices (1 2 4)", {"nargs": "+"}),
        ("--rtol", float, "the largest difference over a leaf's largest value (1e-4)"),
        ("--run=always_run", True, "run it where all is proved, too"),
        _JSON,
    ),
}
