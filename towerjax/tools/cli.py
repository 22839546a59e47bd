"""The commands of ``towerjax``; the docstring of each is its help."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.tools import shell
from towerjax.tools.shell import FAULT, OK, option
from towerjax.tools.sweep.bench import bench as bench_all
from towerjax.tools.testing import SplitError
from towerjax.towers.strategies import Mirrored
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    parser = shell.Parser(
        prog="towerjax",
        description="Replicated training with JAX. Arguments of a command:"
        " towerjax command --help",
    )
    version = f"towerjax {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised"
    )
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    for run, options in _COMMANDS.items():
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
        found = step.audit(state, batch)
    except SplitError as error:
        findings = [dataclasses.asdict(finding) for finding in error.findings]
        shell.show(str(error), {"same": False, "findings": findings}, json)
        return FAULT
    shell.show(str(found), {"same": True, **dataclasses.asdict(found)}, json)
    return OK


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
    found = step.report(state, batch, timed_calls=timed_calls)
    shell.show(str(found), dataclasses.asdict(found), json)
    return OK


def _made(make_step: str, *strategy: Mirrored) -> tuple[Any, Any, Any]:
    """What a named function returns, checked."""
    found = shell.call_named(make_step, *strategy)
    is_made = isinstance(found, tuple) and len(found) == 3
    if not is_made or not hasattr(found[0], "audit"):
        raise ValueError(
            f"{make_step} must be a function that returns (step, state, batch)."
        )
    return found


def _devices_of(text: str) -> Absent:
    """The absent devices of ``"h200:8"``, or of a TPU topology, ``"v5e:2x4"``."""
    if Absent.is_topology(text):
        return Absent(text)
    target, _, number = text.rpartition(":")
    if not (target and number.isdecimal()):
        name = target or text
        raise ValueError(f"--on {text!r} says not how many; write --on {name}:8.")
    return Absent(target, int(number))


def bench(
    build: str,
    grid: Sequence[str],
    out: str,
    peer: Sequence[str] = (),
    quiet: bool = False,
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
    lists = shell.read_toml(*grid)
    if wrong := [text for text in peer if "=" not in text]:
        raise ValueError(f"--peer {wrong[0]}: write --peer name=module:function.")
    peers = dict(text.split("=", 1) for text in peer)
    options["progress"] = False if quiet or json else None
    found = bench_all(build, lists, peers=peers, results=out, **options)
    shell.show(str(found), {"results": found.records}, json)
    return FAULT if any(x["status"] == "failed" for x in found.records) else OK


_JSON = option("--json", True, "print one JSON object")
_COMMANDS = {
    launch: (
        option("--processes", int, "how many", required=True),
        option("--devices-per-process", int, "CPU devices of each; default: JAX's"),
        option("--port", int, "where process 0 listens; default: a free one"),
        option("--restarts", int, "restart after so many losses of a process"),
        option("--towers", int, "the program's, which the devices left must divide"),
        option("--grace-seconds", float, "SIGTERM to SIGKILL (default: 5)", "grace_s"),
        option("--hang-timeout", float, "seconds of no sign of life", "hang_timeout_s"),
        option("--step-timeout", float, "seconds without a step", "step_timeout_s"),
        option("--regrow-seconds", float, "to try the lost again (60)", "regrow_s"),
        option("command", str, "after --, with its arguments", nargs="+"),
    ),
    audit: (option("make_step", str, "module:function"), _JSON),
    report: (
        option("make_step", str, "module:function"),
        option("--timed-calls", int, "time so many calls (default: none)"),
        option("--on", str, "devices that are not here: h200:8, a100:64, v5e:2x4 ..."),
        _JSON,
    ),
    bench: (
        option("build", str, "module:function"),
        option("grid", str, "a TOML file, or lines of one: 'towers=[1, 2]'", nargs="+"),
        option("--out", str, "a file of results, as JSON lines", required=True),
        option("--peer", str, "name=module:function, timed too", action="append"),
        option("--rounds", int, "at least 6 (11)"),
        option("--seconds-per-round", float, "of each contender (0.25)"),
        option("--retry-failed", True, "time again what failed before"),
        option("--timeout", float, "seconds (1800)", "timeout_s"),
        option("--quiet", True, "no progress"),
        _JSON,
    ),
}
