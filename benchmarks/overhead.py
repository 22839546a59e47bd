"""Measure towerjax against hand-written JAX, by paired runs in one process.

The hand-written step is ``jit(shard_map(...))`` with ``pmean(gradients)``, as people
write it. Both steps train the same model in turns, from three forms of the same batch:
placed before (``step.place_batch``), arrays that lie on the devices, and NumPy arrays,
which both copy to the devices at each step.

A step's time is that of a loop that waits for the loss of 8 steps before. ``awaited``
and ``call`` are of steps that are each waited for. ``call`` is how many microseconds
later a call of towerjax returns. ``guarded`` is the ratio for another hand-written
step, which changes nothing if the loss or a gradient is not finite, as towerjax does.
``bound`` is the ratio of step times that is promised.

Run: ``python -m benchmarks.overhead [--small]``
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from benchmarks.harness import (
    Rounds,
    awaited_calls,
    begin,
    devices_of,
    options_of,
    parser_of,
    turns,
)
from benchmarks.models import mlp
from benchmarks.steps import Contender, Work, by_hand, by_towerjax
from towerjax.towers.strategies import Mirrored

HAND = 0  # the contenders, in the order of their turns
OURS = 1
GUARDED = 2
AHEAD = 8  # steps that run ahead of the loss that is read
COLUMNS = {
    "model": "",
    "D": "",
    "hand-written ms": ".3f",
    "towerjax ms": ".3f",
    "step": ".2f",
    "guarded": ".2f",
    "bound": ".2f",
    "device arrays": ".2f",
    "NumPy arrays": ".2f",
    "awaited": ".2f",
    "call": "+.0f",
    "compile": ".2f",
}


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
        """Return a step of Adam on this model."""
        model = mlp(np.float32, layers=self.layers, width=self.width)
        batch = model.make_batch(1, self.batch)
        return Work(model, model.init(0), batch, optimizer=optax.adam(1e-3))


MODELS = (
    Model("2 layers of 32", layers=2, width=32, batch=256, bound=1.03),
    Model("25 layers of 16", layers=25, width=16, batch=256, bound=0.5),
    Model("4 layers of 384", layers=4, width=384, batch=512, bound=1.03),
)


def compare(
    model: Model, num_devices: int, *, rounds: int, steps: int
) -> tuple[float, ...]:
    """Time the steps in turns, in this process; return the numbers of a row."""
    strategy = Mirrored(devices_of(num_devices))
    compiled, pair = compiled_in_turns(model, strategy)
    hand, ours = pair
    guarded = by_hand(model.work(), strategy.placement, "guarded")
    runs = [hand.run, ours.run]
    awaited, returned = awaited_calls(runs, rounds=rounds, calls=steps)
    how = {"rounds": rounds, "calls": steps}
    all_placed = (hand.batch, ours.batch, guarded.batch)
    placed = in_a_loop((*pair, guarded), all_placed, **how)
    arrays = in_a_loop(pair, (hand.batch,) * 2, **how)
    of_numpy = in_a_loop(pair, (model.work().batch,) * 2, **how)
    bound = model.bound if num_devices > 1 else 1.03
    longer = returned.seconds[:, OURS] - returned.seconds[:, HAND]
    return (
        *(1e3 * seconds for seconds in placed.medians()[:GUARDED]),
        placed.ratio(OURS, HAND),
        placed.ratio(GUARDED, HAND),
        bound,
        *(x.ratio(OURS, HAND) for x in (arrays, of_numpy, awaited)),
        1e6 * float(np.median(longer)),
        compiled.ratio(OURS, HAND),
    )


def compiled_in_turns(
    model: Model, strategy: Mirrored
) -> tuple[Rounds, tuple[Contender, Contender]]:
    """Return the seconds of compiling in three rounds, and the last two steps.

    A round before these fills JAX's own caches for both.
    """
    last: dict[Callable[[], Contender], Contender] = {}

    def hand() -> Contender:
        return by_hand(model.work(), strategy.placement)

    def ours() -> Contender:
        return by_towerjax(model.work(), strategy)

    def turn(make: Callable[[], Contender]) -> float:
        last[make] = make()
        return last[make].compile_seconds

    seconds = Rounds(turns([hand, ours], turn, rounds=3))
    return seconds, (last[hand], last[ours])


def in_a_loop(
    contenders: Sequence[Contender], batches: Sequence, *, rounds: int, calls: int
) -> Rounds:
    """Return the seconds of a step of each contender in a loop, with its own batch.

    The loop is that of a user who lets `AHEAD` steps run ahead of the loss that is
    read. A last wait for the parameters counts, too.
    """
    for contender, batch in zip(contenders, batches, strict=True):
        contender.batch = batch

    def turn(contender: Contender) -> float:
        losses: collections.deque[jax.Array] = collections.deque()
        start = time.perf_counter()
        for _ in range(calls):
            params, loss = contender.run()
            losses.append(loss)
            if len(losses) > AHEAD:
                losses.popleft().block_until_ready()
        jax.block_until_ready(params)
        return (time.perf_counter() - start) / calls

    return Rounds(turns(contenders, turn, rounds=rounds))


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    options = options_of(parser, rounds=5, steps=10, devices=[2])
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    how = {"rounds": options.rounds, "steps": options.steps}
    table = begin(f"{options.rounds} paired rounds", COLUMNS, options)
    for model in MODELS:
        for num_devices in options.devices:
            found = compare(model, num_devices, **how)
            table.row(model.name, num_devices, *found)


if __name__ == "__main__":
    main()
