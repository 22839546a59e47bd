"""Measure PinnedTree against AllReduce, by paired runs in one process.

Three ways to train the same model from the same batch go in turns: ``PinnedTree`` and
``AllReduce`` with ``tower_loop="scan"``, which differ only in how sums travel, and
``AllReduce`` with ``tower_loop="vmap"``, the default. Ratios are medians of rounds with
their quartiles. Bytes are what a device sends in a step, if collectives go round a
ring.

Run: ``python -m benchmarks.pinned_cost [--rounds 7]``
"""

import dataclasses
from typing import Any

import jax

from benchmarks.harness import (
    awaited_calls,
    begin,
    devices_of,
    options_of,
    parser_of,
)
from benchmarks.overhead import MODELS, Model
from benchmarks.steps import by_towerjax
from towerjax.check.report.hlo import collectives_of, parse
from towerjax.collectives import AllReduce, PinnedTree
from towerjax.towers.strategies import Mirrored


def between(quartiles: tuple[float, float, float]) -> str:
    """Return a median and the quartiles around it, as text."""
    low, middle, high = quartiles
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


COLUMNS = {
    "model": "",
    "D": "",
    "pinned ms": ".3f",
    "scan ms": ".3f",
    "vmap ms": ".3f",
    "pinned / scan": between,
    "pinned / vmap": between,
    "pinned sends": ",",
    "scan sends": ",",
}


def bytes_sent(program: str) -> int:
    """Return the bytes that a device sends in a step, in collectives round a ring."""
    return sum(found.sent * found.trips for found in collectives_of(parse(program)))


def measure(
    model: Model, towers: int, num_devices: int, *, rounds: int, steps: int
) -> tuple[Any, ...]:
    """Time the three ways in turns, in this process; return the values of a row."""
    pinned = Mirrored(
        devices_of(num_devices),
        towers=towers,
        tower_loop="scan",
        cross_tower_ops=PinnedTree(),
    )
    in_turn = dataclasses.replace(pinned, cross_tower_ops=AllReduce())
    ways = (pinned, in_turn, dataclasses.replace(in_turn, tower_loop="vmap"))
    contenders = [by_towerjax(model.work(), strategy) for strategy in ways]
    runs = [one.run for one in contenders]
    awaited, _ = awaited_calls(runs, rounds=rounds, calls=steps)
    sent = [bytes_sent(one.program) for one in contenders[:2]]
    ratios = [awaited.quartiles(0, other) for other in (1, 2)]
    return (*(1e3 * seconds for seconds in awaited.medians()), *ratios, *sent)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--towers", type=int, default=8)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    options = options_of(
        parser, rounds=2, steps=2, towers=4, devices=[2], models=names[:1]
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    how = {"rounds": options.rounds, "steps": options.steps}
    about = f"{options.towers} towers, {options.rounds} rounds of {options.steps} steps"
    table = begin(about, COLUMNS, options)
    for model in [x for x in MODELS if x.name in options.models]:
        for number in options.devices:
            found = measure(model, options.towers, number, **how)
            table.row(model.name, number, *found)


if __name__ == "__main__":
    main()
