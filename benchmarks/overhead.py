"""Measure towerjax against hand-written JAX, by paired runs in one process.

The hand-written step is ``jit(shard_map(...))`` with ``pmean(gradients)``, as people
write it; both steps train the same model from the same batch, in turns: one placed
before (``step.place_batch``), one of arrays that lie on the devices, and one of NumPy
arrays, which both copy to the devices at each step. A step's time is that of a loop
that waits for the loss of 8 steps before; ``awaited`` and ``call`` are of steps that
are each waited for.

Run: ``python -m benchmarks.overhead [--small]``
"""

import argparse
import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

from benchmarks import options_of
from benchmarks.models import mlp
from benchmarks.trials import Contender, Work, by_hand, by_towerjax
from towerjax.sweeps.turns import in_turns, take_turns
from towerjax.towers.strategies import Mirrored


@dataclasses.dataclass(frozen=True)
class Model:
    """A multi-layer perceptron to measure with.

    Attributes:
      name: For the table.
      layers: How many layers; each has two leaves.
      width: Features of every layer.
      batch: Examples in the global batch.
      bound: The ratio of step times that is promised, on several devices.
    """

    name: str
    layers: int
    width: int
    batch: int
    bound: float

    def work(self) -> Work:
        """A step of Adam."""
        model = mlp(np.float32, layers=self.layers, width=self.width)
        batch = model.make_batch(1, self.batch)
        return Work(model, model.init(0), batch, optimizer=optax.adam(1e-3))


MODELS = (
    Model("tiny", layers=2, width=32, batch=256, bound=1.03),
    Model("50 leaves", layers=25, width=16, batch=256, bound=0.5),
    Model("medium", layers=4, width=384, batch=512, bound=1.03),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: towerjax over hand-written, medians of paired rounds.

    Attributes:
      model: Its name.
      devices: ``D``.
      step_ms: A hand-written step, and towerjax's, in milliseconds, in a loop.
      step_ratio: The median of the rounds' ratios of step time, in a loop.
      arrays_ratio: The same of a batch of arrays on the devices.
      numpy_ratio: The same of a batch of NumPy arrays.
      awaited_ratio: The same of placed batches, each step waited for.
      dispatch_ratio: The same for the time until the call returns.
      compile_ratio: The same for compile time.
      bound: The promised ``step_ratio``.
    """

    model: str
    devices: int
    step_ms: tuple[float, float]
    step_ratio: float
    arrays_ratio: float
    numpy_ratio: float
    awaited_ratio: float
    dispatch_ratio: float
    compile_ratio: float
    bound: float


def compare(model: Model, num_devices: int, *, rounds: int, steps: int) -> Row:
    """Both steps in turns, in this process."""
    platform = jax.default_backend()
    names = tuple(f"{platform}:{i}" for i in range(num_devices))
    strategy = Mirrored(devices=names)
    _compile_both(model, strategy)  # JAX's own caches are warm for neither or both
    pairs = [_compile_both(model, strategy) for _ in range(3)]
    compile_ratio = np.median([b.compile_seconds / a.compile_seconds for a, b in pairs])
    hand, ours = pair = pairs[-1]
    runs = [x.run for x in pair]
    awaited = in_turns(runs, rounds=1, calls=steps)  # warm
    awaited = in_turns(runs, rounds=rounds, calls=steps, trim=0.1)
    awaited_ratio, dispatch_ratio = np.median(awaited[:, 1] / awaited[:, 0], axis=0)
    kinds = (hand.batch, ours.batch), (hand.batch,) * 2, (model.work().batch,) * 2
    times = []
    for hand.batch, ours.batch in kinds:
        in_a_loop(pair, rounds=1, calls=steps)  # warm
        times.append(in_a_loop(pair, rounds=rounds, calls=steps))
    step, arrays, numpy = (np.median(each[:, 1] / each[:, 0]) for each in times)
    milliseconds = np.median(times[0], axis=0) * 1e3
    return Row(
        model.name,
        num_devices,
        (float(milliseconds[0]), float(milliseconds[1])),
        float(step),
        float(arrays),
        float(numpy),
        float(awaited_ratio),
        float(dispatch_ratio),
        float(compile_ratio),
        model.bound if num_devices > 1 else 1.03,
    )


def in_a_loop(
    contenders: Sequence[Contender], *, rounds: int, calls: int, ahead: int = 8
) -> np.ndarray:
    """Seconds of a step of each contender in each round, ``[rounds, contenders]``.

    The loop is that of a user who lets so many steps run ahead of the loss that is
    read; a last wait for the parameters counts too.
    """

    def turn(contender: Contender) -> float:
        losses: collections.deque[jax.Array] = collections.deque()
        start = time.perf_counter()
        for _ in range(calls):
            params, loss = contender.run()
            losses.append(loss)
            if len(losses) > ahead:
                losses.popleft().block_until_ready()
        jax.block_until_ready(params)
        return (time.perf_counter() - start) / calls

    return take_turns(contenders, rounds, turn)


def _compile_both(model: Model, strategy: Mirrored) -> tuple[Contender, Contender]:
    work = model.work()
    return by_hand(work, strategy.placement), by_towerjax(work, strategy)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    options = options_of(parser, rounds=5, steps=10, devices=[2])
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rounds = options.rounds
    steps = options.steps
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {rounds} paired rounds")
    print(f"{'model':>10} {'D':>2} {'hand ms':>8} {'ours ms':>8}", end=" ")
    print(f"{'step':>6} {'bound':>6} {'arrays':>6} {'NumPy':>6}", end=" ")
    print(f"{'awaited':>7} {'call':>6} {'compile':>7}")
    for model in MODELS:
        for num_devices in options.devices:
            row = compare(model, num_devices, rounds=rounds, steps=steps)
            print(f"{row.model:>10} {row.devices:>2}", end=" ")
            print(f"{row.step_ms[0]:8.3f} {row.step_ms[1]:8.3f}", end=" ")
            print(f"{row.step_ratio:6.2f} {row.bound:6.2f}", end=" ")
            print(f"{row.arrays_ratio:6.2f} {row.numpy_ratio:6.2f}", end=" ")
            print(f"{row.awaited_ratio:7.2f} {row.dispatch_ratio:6.2f}", end=" ")
            print(f"{row.compile_ratio:7.2f}", flush=True)


if __name__ == "__main__":
    main()
