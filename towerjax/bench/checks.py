"""What does a check every n steps cost? The same step with it and without, in turns.

Run: ``python -m towerjax.bench.checks [--small]``
"""

import argparse
import time

import jax
import numpy as np

from towerjax.bench.overhead import MODELS, Contender, Model, with_towerjax
from towerjax.checking import Check
from towerjax.strategies import Mirrored

EVERY = (None, 100, 10, 1)


def step_times(model: Model, num_devices: int, *, rounds: int) -> np.ndarray:
    """Milliseconds of a step, by how often it is checked.

    Args:
      model: What to train.
      num_devices: ``D``, one tower each.
      rounds: How often each has its turn, of 100 awaited steps.

    Returns:
      ``[rounds, 4]``: means of a round, for each of `EVERY`.
    """
    names = tuple(f"{jax.default_backend()}:{i}" for i in range(num_devices))
    contenders = [
        with_towerjax(model, Mirrored(devices=names), every and Check(every))
        for every in EVERY
    ]
    table = np.empty((rounds + 1, len(EVERY)))
    for turn in range(rounds + 1):
        order = range(len(EVERY))
        for i in reversed(order) if turn % 2 else order:
            table[turn, i] = _round_ms(contenders[i])
    return table[1:]


def _round_ms(contender: Contender, steps: int = 100) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        contender.state, loss = contender.call(contender.state, contender.batch)
        jax.block_until_ready((contender.params(contender.state), loss))
    return (time.perf_counter() - start) * 1e3 / steps


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
