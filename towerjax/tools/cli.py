"""The commands of ``towerjax``; the docstring of each is its help."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.mesh.devices import want_cpu_devices
from towerjax.proof.findings import ReplicationError
from towerjax.tools import shell
from towerjax.tools.shell import FAULT, OK
from towerjax.tools.sweep.bench import bench as bench_all
from towerjax.tools.testing import SplitError, prove, same_on_devices
from towerjax.towers.strategies import Mirrored
from towerjax.types.options import check_takes
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    about = "Replicated training with JAX. Arguments of one: towerjax command --help"
    parser, version = shell.Parser(prog="towerjax", description=about), __version__
    parser.add_argument("--version", action="version", version=f"towerjax {version}")
    where = "show where an error was raised"
    parser.add_argument("--traceback", action="store_true", help=where)
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    for run, options in _OPTIONS.items():
        shell.add_command(commands, run, options)
    return shell.run_parsed(parser.parse_args(arguments))


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

    What is merged of rows of the batch on two towers is compared with one tower.

    Example:
      towerjax audit train:make_step

    where make_step() returns (step, state, batch).

    exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
    arguments.
    """
    step, state, batch = _made(make_step)
    try:
        outcome = step.audit(state, batch)
    except SplitError as error:
        findings = list(map(dataclasses.asdict, error.findings))
        return shell.show(error, {"same": False, "findings": findings}, json, FAULT)
    return shell.show(outcome, {"same": True, **dataclasses.asdict(outcome)}, json)


def check(make: str, devices: Sequence[int] = (1, 2, 4), json: bool = False) -> int:
    """Check a JAX program on several numbers of devices.

    What its maps over devices call the same is proved, and results are compared.

    Example:
      towerjax check train:make --devices 1 2 4

    where make(devices) returns (fn, args) for so many devices.

    exit code: 0 if nothing depends on them, 1 if something does, 2 for wrong arguments.
    """
    want_cpu_devices(max(devices))
    maker = shell.resolve(make, "train:make")
    check_takes(f"{make.rpartition(':')[2]}(devices)", maker, max(devices))
    fn, args = maker(max(devices))
    told, faults = [], dict[str, Any]()
    for name, run in {
        "proof": lambda: prove(fn, *args),
        "comparison": lambda: same_on_devices(maker, devices),
    }.items():
        try:
            told.append(str(run()))
        except ReplicationError as error:
            told.append("\n".join(str(error).splitlines()[:_SCREEN]))
            faults[name] = str(error)
    outcome = {"same": not faults, "findings": faults}
    return shell.show("\n".join(told), outcome, json, FAULT if faults else OK)


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
    return shell.show(figures, dataclasses.asdict(figures), json)


def _made(make_step: str, *strategy: Mirrored) -> tuple[Any, Any, Any]:
    """What a named function returns, checked."""
    if not callable(function := shell.resolve(make_step, "train:make_step")):
        raise ValueError(f"{make_step} is no function: {function!r}.")
    form = f"{make_step.rpartition(':')[2]}({'strategy' if strategy else ''})"
    check_takes(form, function, *strategy)
    match function(*strategy):
        case (step, state, batch) if hasattr(step, "audit"):
            return step, state, batch
    raise ValueError(f"{make_step} is a function that returns (step, state, batch).")


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
    timings = bench_all(build, shell.read_toml(*grid), **options)
    code = FAULT if "failed" in [x["status"] for x in timings.records] else OK
    return shell.show(timings, {"results": timings.records}, json, code)


_SCREEN = 16  # lines of one answer
_STEP = ("make_step", str, "module:function")
_JSON = ("--json", True, "print one JSON object")
_NEEDED, _SEVERAL = {"required": True}, {"nargs": "+"}
_OPTIONS: dict[Callable[..., int], tuple[Any, ...]] = {
    launch: (
        ("--processes", int, "how many", _NEEDED),
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
        _JSON,
    ),
}
