"""Measure many trainings: together, one after another, and by ``tj.sweep``.

Members differ in seeds and learning rates. First, ten steps of eight members are timed,
compiled before: by ``vmap``, by ``lax.map``, and one after another. Then whole
trainings are timed with their compiling: with a step built for each, with one step
whose state holds the rate, and by ``tj.sweep``.

Run: ``python -m benchmarks.populations [--members 8] [--devices 2] [--trainings 18]``
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import (
    awaited_calls,
    begin,
    devices_of,
    options_of,
    parser_of,
    turns,
)
from benchmarks.models import mlp
from towerjax import Mirrored, Weighted, build_train_step, run, sweep
from towerjax.types import PyTree

MODELS = {"2 layers of 32": (2, 32), "25 layers of 16": (25, 16), "4 of 512": (4, 512)}
STEPS = 10
ROWS = 64
TRAINED = 200
TOGETHER = {
    "model": "",
    "D": "",
    "one after another, ms": ".1f",
    "over lax.map": ".2f",
    "over vmap": ".2f",
}
WHOLE = {
    "model": "",
    "D": "",
    "each built, s": ".1f",
    "injected, s": ".1f",
    "in_turn, s": ".1f",
    "together, s": ".1f",
}


@dataclasses.dataclass
class Way:
    """A way to train all members, which maps states to states."""

    train: Callable[[PyTree, PyTree], Any]
    members: PyTree
    batches: PyTree

    def run(self) -> Any:
        """Train all members for ten steps."""
        return self.train(self.members, self.batches)


def ways(layers: int, width: int, members: int, devices: int) -> dict[str, Way]:
    """Return the three ways for one model; each is compiled at its first call."""
    model = mlp(np.float32, layers=layers, width=width)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    strategy = Mirrored(devices_of(devices))
    step = build_train_step(loss_fn, optimizer, strategy, donate=False)
    alone = []
    for seed, rate in enumerate(np.geomspace(1e-4, 1e-2, members)):
        state = step.init(model.init(seed), rng=jax.random.key(seed))
        alone.append(step.place(optax.tree.set(state, learning_rate=rate)))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    parts = [model.make_batch(seed, ROWS) for seed in range(STEPS)]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def train(state: PyTree, batches: PyTree) -> Any:
        return jax.lax.scan(step.fn, state, batches)[0].params

    one = jax.jit(train)

    def in_turn(states: list[PyTree], batches: PyTree) -> Any:
        return [one(state, batches) for state in states]

    @jax.jit
    def by_map(states: PyTree, batches: PyTree) -> Any:
        return jax.lax.map(lambda state: train(state, batches), states)

    by_vmap = jax.jit(jax.vmap(train, in_axes=(0, None)))
    return {
        "one after another": Way(in_turn, alone, batches),
        "lax.map": Way(by_map, together, batches),
        "vmap": Way(by_vmap, together, batches),
    }


def training(layers: int, width: int, devices: int, *, injected: bool) -> Any:
    """Return ``(build, batches)`` of a training, as `tj.sweep` takes them."""
    model = mlp(np.float32, layers=layers, width=width)
    strategy = Mirrored(devices_of(devices))
    params = model.init(0)

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    def build(rate: Any, seed: Any) -> Any:
        optimizer = optax.adam(rate)
        if injected:
            optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
        step = build_train_step(loss_fn, optimizer, strategy)
        return step, step.init(params, rng=jax.random.key(seed))

    return build, [model.make_batch(i, ROWS) for i in range(TRAINED)]


def each_built(build: Any, batches: Any, grid: list[dict[str, Any]]) -> None:
    """Train each configuration with a step of its own."""
    for config in grid:
        step, state = build(**config)
        run(step, state, batches, progress=False)


def one_injected(build: Any, batches: Any, grid: list[dict[str, Any]]) -> None:
    """Train all configurations with one step, whose state gets each rate."""
    step, _ = build(**grid[0])
    for config in grid:
        state = optax.tree.set(build(**config)[1], learning_rate=config["rate"])
        run(step, step.place(state), batches, progress=False)


def whole_trainings(name: str, devices: int, grid: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of all trainings by each way, with nothing compiled before."""
    layers, width = MODELS[name]
    plain, batches = training(layers, width, devices, injected=False)
    injected, _ = training(layers, width, devices, injected=True)
    ways: list[Callable[[], Any]] = [
        functools.partial(each_built, plain, batches, grid),
        functools.partial(one_injected, injected, batches, grid),
    ]
    for order in ("in_turn", "together"):
        options: Any = {"order": order, "progress": False}
        ways.append(functools.partial(sweep, plain, grid, batches, **options))

    def seconds(way: Callable[[], Any]) -> float:
        jax.clear_caches()
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    return turns(ways, seconds, rounds=1, warm=0)[0].tolist()


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--trainings", type=int, default=18)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    options = options_of(
        parser, members=2, devices=[1], rounds=1, trainings=2, models=["2 layers of 32"]
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    if options.rounds:
        about = f"{options.members} members, {STEPS} steps of {ROWS}"
        table = begin(about, TOGETHER, options)
        for name in options.models:
            for devices in options.devices:
                found = ways(*MODELS[name], options.members, devices)
                runs = [way.run for way in found.values()]
                awaited, _ = awaited_calls(runs, rounds=options.rounds, calls=3)
                ratios = [awaited.ratio(0, other) for other in (1, 2)]
                table.row(name, devices, 1e3 * awaited.medians()[0], *ratios)
    rates = np.geomspace(1e-4, 1e-2, options.trainings).tolist()
    grid = [{"rate": rate, "seed": seed} for seed, rate in enumerate(rates)]
    about = f"{len(grid)} trainings of {TRAINED} steps, compiling included"
    table = begin(about, WHOLE, options)
    for name in options.models:
        for devices in options.devices:
            table.row(name, devices, *whole_trainings(name, devices, grid))


if __name__ == "__main__":
    main()
