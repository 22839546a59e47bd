"""What does ``towerjax train`` do? It runs what a function of yours describes."""

import argparse
import ast
import dataclasses
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from towerjax.collectives.written import ops_of
from towerjax.loop.checkpoint.saver import Checkpointer
from towerjax.loop.history import History
from towerjax.loop.records import JsonLines, plain
from towerjax.loop.run import run
from towerjax.mesh import cluster
from towerjax.mesh.devices import canonical_device_name
from towerjax.step.desync import DesyncError
from towerjax.step.nonfinite import NonFiniteError
from towerjax.step.state import TrainState
from towerjax.tools.named import here_importable, named
from towerjax.tools.shell import NOT_SO, OK, add_command, show
from towerjax.towers.strategies import Mirrored

_EXAMPLE = """\
example:
  towerjax train train:training --towers 8 --devices 4 --steps 300
  towerjax train train:training --set learning_rate=0.1 --log runs/log.jsonl --json
  towerjax train train:training --checkpoint runs/first --every 100

train.py has a function that takes the strategy, and what --set gives it, and returns
the arguments of tj.run by their names:

  def training(strategy, learning_rate=0.01):
      step = tj.build_train_step(loss_fn, optax.sgd(learning_rate), strategy)
      batches = tj.batches(data, 128, epochs=None)
      return dict(step=step, state=step.init(params), batches=batches, steps=1000)

exit code: 0 if all steps were done, 1 if the numbers ended the run (not finite, or
copies that differ), 2 for wrong arguments, 75 for SIGTERM and 130 for Ctrl-C, once
the checkpoint is saved.
"""


def add_train(commands: Any) -> None:
    """Add the command ``train`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "train",
        _train,
        summary="run the training that a function describes",
        description="Run the training that a function of yours describes, on any number"
        " of towers and devices. Joins the job that `towerjax launch` started.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("training", metavar="module:function")
    _add_where(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="instead of its own")
    parser.add_argument("--log", metavar="FILE", help="a JSON line for every step")
    parser.add_argument(
        "--replace", action="store_true", help="start FILE anew where there is one"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="save there, and go on from there"
    )
    parser.add_argument(
        "--every", type=int, metavar="N", help="save after so many steps, too"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the function; VALUE as in Python, else text",
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    """Which towers, on which devices."""
    parser.add_argument("--towers", type=int, metavar="T", help="default: one a device")
    parser.add_argument(
        "--devices",
        metavar="D",
        help="how many, or names, as gpu:0,gpu:1 (default: all accelerators, else the"
        " CPU; of CPUs as many are made)",
    )
    parser.add_argument(
        "--local",
        choices=("vmap", "scan"),
        default="vmap",
        help="a device's towers together or in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--cross-tower-ops",
        default="AllReduce()",
        metavar="OP",
        help="how sums travel: 'PinnedTree()', with --local scan, has the same bits on"
        " any number of devices (default: %(default)s)",
    )


def _train(options: argparse.Namespace) -> int:
    if options.replace and options.log is None:
        raise ValueError("--replace is about the file of --log; name it.")
    if options.every is not None and options.checkpoint is None:
        raise ValueError("--every is about the folder of --checkpoint; name it.")
    given = dict(_setting(text) for text in options.set)
    _make_cpu_devices(options.devices)
    cluster.initialize()
    with here_importable():
        make = named(options.training)
        strategy = Mirrored(
            devices=_devices(options.devices),
            towers=options.towers,
            local=options.local,
            cross_tower_ops=ops_of(options.cross_tower_ops),
        )
        arguments = _described(options.training, make, strategy, given)
        if options.steps is not None:
            arguments["steps"] = options.steps
        if options.log is not None:
            log = JsonLines(options.log, replace=options.replace)
            arguments["writers"] = [*arguments.get("writers", ()), log]
        if options.checkpoint is not None:
            saving = Checkpointer(options.checkpoint, every=options.every)
            arguments["checkpointer"] = saving
        if options.json:
            arguments["progress"] = False
        try:
            state, history = run(**arguments)
        except (NonFiniteError, DesyncError) as error:
            left: Any = error  # run has given it what there is
            _show(options, left.state, left.history, str(error))
            return NOT_SO
    _show(options, state, history, None)
    return OK


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"--set {text!r} is not of the form name=value, as epochs=3.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _make_cpu_devices(devices: str | None) -> None:
    """Where a number of devices is asked for, let JAX make as many of the CPU."""
    if devices is None or not devices.isdecimal():
        return
    chosen: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    is_said = "xla_force_host_platform_device_count" in flags  # JAX refuses both
    if not is_said and chosen.jax_num_cpu_devices < int(devices):
        jax.config.update("jax_num_cpu_devices", int(devices))


def _devices(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    if jax.process_count() > 1:
        raise ValueError(
            f"--devices {text!r} in a job of {jax.process_count()} processes: it has"
            " the devices of all of them. Leave it out, and tell the launcher."
        )
    if not text.isdecimal():
        return tuple(text.split(","))
    found = jax.devices()
    if not 1 <= int(text) <= len(found):
        raise ValueError(
            f"--devices {text}, but there are {len(found)} of platform"
            f" {found[0].platform}."
        )
    return tuple(canonical_device_name(device) for device in found[: int(text)])


def _described(
    name: str, make: Any, strategy: Mirrored, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of `run` that the function describes."""
    if not callable(make):
        raise ValueError(f"{name} is no function: {make!r}.")
    try:
        inspect.signature(make).bind(strategy, **given)
    except TypeError as error:
        raise ValueError(
            f"{name}{inspect.signature(make)} cannot be called with the strategy and"
            f" {dict(given)}: {error}. --set names its arguments."
        ) from error
    described = make(strategy, **given)
    known = list(inspect.signature(run).parameters)
    needed = ("step", "state", "batches")
    if not isinstance(described, Mapping) or not set(needed) <= set(described):
        has = sorted(described) if isinstance(described, Mapping) else repr(described)
        raise ValueError(
            f"{name} must return a dict with {', '.join(needed)} and what else tj.run"
            f" takes, but returned {has}."
        )
    if unknown := sorted(set(described) - set(known)):
        raise ValueError(
            f"{name} returned {', '.join(unknown)}, which tj.run does not take. It"
            f" takes {', '.join(known)}."
        )
    return dict(described)


def _show(
    options: argparse.Namespace,
    state: TrainState,
    history: History,
    failed: str | None,
) -> None:
    if jax.process_index() > 0:
        return  # one process of a job speaks for all
    last = {name: column[-1] for name, column in history.metrics.items() if len(column)}
    fields = {
        "done": failed is None,
        "step": int(state.step),
        "metrics": {name: plain(name, x) for name, x in last.items()},
        "evaluation": {name: plain(name, x) for name, x in history.final.items()},
        "skipped": list(history.skipped),
        "stopped": history.stopped,
        "summary": dataclasses.asdict(history.summary),
        "error": failed,
    }
    show(options, str(history.summary), fields)
    if failed is not None:
        sys.stderr.write(f"towerjax train: {failed}\n")
