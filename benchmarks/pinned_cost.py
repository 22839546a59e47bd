"""Measure PinnedTree against AllReduce, by paired runs in one process.

Three ways to train the same model from the same batch, in turns: ``PinnedTree`` and
``AllReduce`` with ``tower_loop="scan"``, which differ in how sums travel alone, and
``AllReduce`` with ``tower_loop="vmap"``, the default.

Run: ``python -m benchmarks.pinned_cost [--rounds 7]``
"""

import argparse
import dataclasses

import jax
import numpy as np

from benchmarks import options_of
from benchmarks.overhead import MODELS, Model
from benchmarks.trials import by_towerjax
from towerjax.check.report.hlo import collectives_of, parse
from towerjax.collectives import AllReduce, PinnedTree
from towerjax.sweeps.turns import in_turns
from towerjax.towers.strategies import Mirrored


def bytes_sent(program: str) -> int:
    """What a device sends in a step, when collectives go round a ring."""
    return sum(found.sent * found.trips for found in collectives_of(parse(program)))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      step_ms: A step of each contender, medians of the rounds, in milliseconds.
      of_sum: ``PinnedTree`` over ``AllReduce``, both in turn: quartiles of the
        rounds' ratios, the median in the middle.
      of_all: ``PinnedTree`` in turn over ``AllReduce`` under ``"vmap"``: the same.
      sent: Bytes that a device sends, by ``PinnedTree`` and by ``AllReduce``.
    """

    step_ms: tuple[float, ...]
    of_sum: tuple[float, ...]
    of_all: tuple[float, ...]
    sent: tuple[int, int]


def measure(
    model: Model, towers: int, num_devices: int, *, rounds: int, steps: int
) -> Row:
    """The three in turns, in this process."""
    devices = tuple(f"{jax.default_backend()}:{i}" for i in range(num_devices))
    pinned = Mirrored(
        devices, towers=towers, tower_loop="scan", cross_tower_ops=PinnedTree()
    )
    in_turn = dataclasses.replace(pinned, cross_tower_ops=AllReduce())
    ways = (pinned, in_turn, dataclasses.replace(in_turn, tower_loop="vmap"))
    contenders = [by_towerjax(model.work(), strategy) for strategy in ways]
    sent = [bytes_sent(one.program) for one in contenders[:2]]
    runs = [one.run for one in contenders]
    in_turns(runs, rounds=1, calls=steps)  # warm
    seconds = in_turns(runs, rounds=rounds, calls=steps, trim=0.1)[:, :, 0]

    def quartiles(other: int) -> tuple[float, ...]:
        ratios = seconds[:, 0] / seconds[:, other]
        return tuple(float(x) for x in np.quantile(ratios, (0.25, 0.5, 0.75)))

    step_ms = tuple(float(x) for x in np.median(seconds, axis=0) * 1e3)
    return Row(step_ms, quartiles(1), quartiles(2), (sent[0], sent[1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--towers", type=int, default=8)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    options = options_of(
        parser, rounds=2, steps=2, towers=4, devices=[2], models=["tiny"]
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rounds = options.rounds
    steps = options.steps
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {options.towers} towers,")
    print(f"{rounds} rounds of {steps} steps; milliseconds, and median (quartiles)\n")
    print(f"{'model':>10} {'D':>2} {'pinned':>8} {'scan':>8} {'vmap':>8}", end=" ")
    print(f"{'pinned / scan':>18} {'pinned / vmap':>18} {'bytes sent':>21}")
    for model in [x for x in MODELS if x.name in options.models]:
        for number in options.devices:
            row = measure(model, options.towers, number, rounds=rounds, steps=steps)
            print(f"{model.name:>10} {number:>2}", end=" ")
            print(*(f"{x:8.3f}" for x in row.step_ms), end=" ")
            for low, middle, high in (row.of_sum, row.of_all):
                print(f"{middle:5.2f} ({low:.2f}-{high:.2f})".rjust(18), end=" ")
            print(f"{row.sent[0]:>10,} {row.sent[1]:>10,}", flush=True)


if __name__ == "__main__":
    main()
