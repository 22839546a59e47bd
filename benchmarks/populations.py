"""Measure many trainings: together, one after another, and by ``tj.sweep``.

Members differ in seeds and learning rates. First ten steps of eight, compiled before:
by ``vmap``, ``lax.map``, one after another. Then whole trainings and their compiling: a
step built for each, one step whose state holds the rate, and ``tj.sweep``.

Run: ``python -m benchmarks.populations [--members 8] [--devices 2] [--trainings 18]``
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import options_of
from benchmarks.models import mlp
from towerjax import Mirrored, Weighted, build_train_step, run, sweep
from towerjax.sweeps.turns import in_turns
from towerjax.types import PyTree

MODELS = {"2 layers of 32": (2, 32), "25 layers of 16": (25, 16), "4 of 512": (4, 512)}
STEPS = 10
ROWS = 64
TRAINED = 200


@dataclasses.dataclass
class Way:
    """A way to train all members, timed as it stands: states in, states out."""

    train: Callable[[PyTree, PyTree], Any]
    members: PyTree
    batches: PyTree

    def run(self) -> Any:
        """All members, ten steps on."""
        return self.train(self.members, self.batches)


def ways(layers: int, width: int, members: int, devices: int) -> dict[str, Way]:
    """The three, of one model; each is compiled at its first call."""
    model = mlp(np.float32, layers=layers, width=width)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    strategy = Mirrored([f"{jax.default_backend()}:{i}" for i in range(devices)])
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
    """``(build, batches)`` of a training, as `tj.sweep` takes them."""
    model = mlp(np.float32, layers=layers, width=width)
    strategy = Mirrored([f"{jax.default_backend()}:{i}" for i in range(devices)])
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
    """A step of its own for each training."""
    for config in grid:
        step, state = build(**config)
        run(step, state, batches, progress=False)


def one_injected(build: Any, batches: Any, grid: list[dict[str, Any]]) -> None:
    """One step, whose state is given each rate."""
    step, _ = build(**grid[0])
    for config in grid:
        state = optax.tree.set(build(**config)[1], learning_rate=config["rate"])
        run(step, step.place(state), batches, progress=False)


def whole_trainings(name: str, devices: int, grid: list[dict[str, Any]]) -> None:
    """Print a row: seconds of all trainings, by each way."""
    layers, width = MODELS[name]
    plain, batches = training(layers, width, devices, injected=False)
    injected, _ = training(layers, width, devices, injected=True)
    ways: list[Callable[[], Any]] = [
        lambda: each_built(plain, batches, grid),
        lambda: one_injected(injected, batches, grid),
    ]
    for order in ("in_turn", "together"):
        options: Any = {"order": order, "progress": False}
        ways.append(functools.partial(sweep, plain, grid, batches, **options))
    print(f"{name:>16} {devices:2}", end=" ")
    for way in ways:
        jax.clear_caches()
        start = time.perf_counter()
        way()
        print(f"{time.perf_counter() - start:9.1f} s", end=" ", flush=True)
    print()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--trainings", type=int, default=18)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    options = options_of(
        parser, members=2, devices=[1], rounds=1, trainings=2, models=["2 layers of 32"]
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    print(f"JAX {jax.__version__}, {options.members} members, {STEPS} steps of {ROWS}")
    print(f"{'model':>16}  D {'one after another':>18} {'lax.map':>9} {'vmap':>9}")
    for name in options.models if options.rounds else ():
        layers, width = MODELS[name]
        for devices in options.devices:
            found = ways(layers, width, options.members, devices)
            contenders = [x.run for x in found.values()]
            in_turns(contenders, rounds=1, calls=2)  # compile
            table = in_turns(contenders, rounds=options.rounds, calls=3)[:, :, 0]
            first = np.median(table[:, 0]) * 1e3
            ratios = np.median(table[:, :1] / table, axis=0)
            print(f"{name:>16} {devices:2} {first:15.1f} ms", end=" ")
            print(f"{ratios[1]:8.2f}x {ratios[2]:8.2f}x", flush=True)
    rates = np.geomspace(1e-4, 1e-2, options.trainings).tolist()
    grid = [{"rate": rate, "seed": seed} for seed, rate in enumerate(rates)]
    print(f"{len(grid)} trainings of {TRAINED} steps, compiling included")
    print(f"{'model':>16}  D  each built    injected     in_turn    together")
    for name in options.models:
        for devices in options.devices:
            whole_trainings(name, devices, grid)


if __name__ == "__main__":
    main()
