"""Measure a check every n steps: the same step with it and without, in turns.

Run: ``python -m benchmarks.checks [--small]``
"""

import argparse

import jax
import numpy as np

from benchmarks.overhead import MODELS, Model
from benchmarks.trials import by_towerjax
from towerjax.step.checking import Check
from towerjax.tools.sweep.turns import in_turns
from towerjax.towers.strategies import Mirrored

EVERY = (None, 100, 10, 1)


def step_times(model: Model, num_devices: int, *, rounds: int) -> np.ndarray:
    """Milliseconds of a step, by how often it is checked."""
    names = tuple(f"{jax.default_backend()}:{i}" for i in range(num_devices))
    strategy, work = Mirrored(devices=names), model.work()
    checks = [every and Check(every) for every in EVERY]
    contenders = [by_towerjax(work, strategy, check=check) for check in checks]
    in_turns(contenders, rounds=1, calls=100)  # warm
    # Nothing is trimmed: of 100 calls the checked one is an extreme.
    return in_turns(contenders, rounds=rounds, calls=100)[:, :, 0] * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few rounds, for CI")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rounds = 3 if options.small else 11
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {rounds} paired rounds")
    print(f"{'model':>10} {'D':>2} {'none ms':>8}", end=" ")
    print(*(f"{f'n={every}':>6}" for every in EVERY[1:]))
    for model in MODELS:
        for num_devices in options.devices:
            table = step_times(model, num_devices, rounds=rounds)
            ratios = np.median(table[:, 1:] / table[:, :1], axis=0)
            print(f"{model.name:>10} {num_devices:>2}", end=" ")
            print(f"{np.median(table[:, 0]):8.3f}", end=" ")
            print(*(f"{ratio:6.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
