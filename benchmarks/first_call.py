"""Measure the first call of a step against hand-written JAX, with all its parts.

A first call traces, lowers, compiles and runs once, and towerjax also proves the step.
The hand-written step is ``jax.jit`` of ``value_and_grad`` and an optax update, with a
donated state and, on several devices, a sharded batch. ``shard_map`` is the same step
with ``pmean(gradients)``, and ``unproved`` is that of towerjax with ``audit=False``.
Contenders go in turns, each after ``jax.clear_caches()``, so that nothing is compiled
for one of them before. A first round, which imports and registers, is not counted. With
``--cached`` it fills JAX's compilation cache, from which the others read programs, as
the second start of a training does.

Figures are CPU seconds of all threads, as medians over rounds. The columns of ratios
are medians of the rounds' ratios: the call's CPU seconds over those of each other way,
and its wall time over that of ``jit``. Parts are given for ``jit`` and for towerjax.

Run: ``python -m benchmarks.first_call [--models mlp lstm] [--devices 1] [--cached]``
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from jax import lax

from benchmarks.harness import (
    Rounds,
    begin,
    devices_of,
    options_of,
    parser_of,
    turns,
)
from benchmarks.models import Model
from benchmarks.networks import NETWORKS
from towerjax.check import first_call
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.make.train import build_train_step
from towerjax.mesh.placement import Placement
from towerjax.metrics.weighted import Weighted
from towerjax.step.step import TrainStep
from towerjax.towers import on_towers
from towerjax.towers.strategies import Mirrored
from towerjax.types import PyTree

PARTS = ("trace", "proof", "lower", "compile")
OF_TOWERJAX = ("unproved", "towerjax")
FIGURES = ("first", "wall", *PARTS, "init")
COLUMNS = {
    "model": "",
    "D": "",
    "jit s": ".2f",
    "towerjax s": ".2f",
    "over jit": ".2f",
    "over shard_map": ".2f",
    "over unproved": ".2f",
    "wall": ".2f",
    **dict.fromkeys((*PARTS, "init"), ".2f"),
}


@contextlib.contextmanager
def split_times() -> Iterator[dict[str, float]]:
    """Yield a dict that gets the CPU seconds of proof, lowering and compiling."""
    spent: dict[str, float] = dict.fromkeys(PARTS[1:], 0.0)
    inside: list[str] = []

    def timed(owner: Any, name: str, part: str) -> Any:
        fn = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            if inside:
                return fn(*args, **named)
            inside.append(part)
            start = time.process_time()
            try:
                return fn(*args, **named)
            finally:
                spent[part] += time.process_time() - start
                inside.clear()

        return mock.patch.object(owner, name, run)

    with contextlib.ExitStack() as stack:
        stack.enter_context(timed(jax.stages.Traced, "lower", "lower"))
        stack.enter_context(timed(jax.stages.Lowered, "compile", "compile"))
        stack.enter_context(timed(on_towers, "analyse", "proof"))
        stack.enter_context(timed(first_call, "equality_of_step", "proof"))
        yield spent


_ALL_ALIKE = jax.P()
_BY_ROWS = jax.P(DEVICE_AXIS)


def _mesh_of(placement: Placement) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(placement.jax_devices), DEVICE_AXIS)


def jitted_by_hand(model: Model, optimizer: Any, placement: Placement, way: str) -> Any:
    """Return the jitted step as people write it.

    The module's docstring describes each ``way``.
    """
    is_mapped = way == "shard_map" and placement.num_devices > 1

    def step(state: Any, batch: PyTree) -> Any:
        params, opt_state = state

        def loss_fn(params: PyTree) -> jax.Array:
            return model.losses(params, batch).mean()

        found = jax.value_and_grad(loss_fn)(params)
        loss, grads = lax.pmean(found, DEVICE_AXIS) if is_mapped else found
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    mapped = jax.shard_map(
        step,
        mesh=_mesh_of(placement),
        in_specs=(_ALL_ALIKE, _BY_ROWS),
        out_specs=(_ALL_ALIKE, _ALL_ALIKE),
        check_vma=False,
    )
    return jax.jit(mapped if is_mapped else step, donate_argnums=0)


def by_hand(model: Model, optimizer: Any, strategy: Mirrored, way: str) -> Any:
    """Return ``(init, first)`` of the step as people write it."""
    placement = strategy.placement
    jitted = jitted_by_hand(model, optimizer, placement, way)
    mesh = _mesh_of(placement)

    def put(tree: PyTree, spec: Any) -> PyTree:
        where = jax.sharding.NamedSharding(mesh, spec)
        return jax.device_put(tree, where if placement.num_devices > 1 else None)

    def init(params: PyTree) -> Any:
        return put((params, optimizer.init(params)), _ALL_ALIKE)

    def first(state: Any, batch: PyTree) -> Any:
        batch = put(batch, _BY_ROWS)
        compiled = jitted.trace(state, batch).lower().compile()
        return compiled(state, batch)

    return init, first


def built(
    model: Model, optimizer: Any, strategy: Mirrored, **options: Any
) -> TrainStep:
    """Return the same step, built by towerjax with these options."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    return build_train_step(loss_fn, optimizer, strategy, **options)


def by_towerjax(model: Model, optimizer: Any, strategy: Mirrored, way: str) -> Any:
    """Return ``(init, first)`` of the step that towerjax builds."""
    audit = False if way == "unproved" else None
    step = built(model, optimizer, strategy, audit=audit)
    return step.init, step


def measure(name: str, way: str, strategy: Mirrored) -> dict[str, float]:
    """Measure ``init`` and the first call, in CPU seconds.

    The figures also hold the parts of the first call and the wall time.
    """
    make_model, make_optimizer = NETWORKS[name]
    model = make_model()
    optimizer = make_optimizer()
    params = model.init(0)
    batch = model.make_batch(1, 16)
    jax.clear_caches()
    make = by_towerjax if way in OF_TOWERJAX else by_hand
    init, first = make(model, optimizer, strategy, way)
    start = time.process_time()
    state = jax.block_until_ready(init(params))
    began = time.process_time()
    wall = time.perf_counter()
    with split_times() as spent:
        jax.block_until_ready(first(state, batch))
    total = time.process_time() - began
    found: dict[str, float] = {**spent, "init": began - start, "first": total}
    found["trace"] = total - sum(spent.values())
    return found | {"wall": time.perf_counter() - wall}


def compare(name: str, num_devices: int, rounds: int) -> tuple[Any, ...]:
    """Return the numbers of a row: each way is timed in turns, in this process."""
    strategy = Mirrored(devices_of(num_devices))
    by_hand = ("jit", "shard_map") if num_devices > 1 else ("jit",)
    ways = [*by_hand, *OF_TOWERJAX]

    def turn(way: str) -> list[float]:
        found = measure(name, way, strategy)
        return [found[figure] for figure in FIGURES]

    seconds = turns(ways, turn, rounds=rounds)
    of = {figure: Rounds(seconds[..., i]) for i, figure in enumerate(FIGURES)}
    jit = 0
    ours = len(ways) - 1
    unproved = ours - 1

    def both(figure: str) -> tuple[float, float]:
        medians = of[figure].medians()
        return medians[jit], medians[ours]

    return (
        *both("first"),
        of["first"].ratio(ours, jit),
        of["first"].ratio(ours, 1) if num_devices > 1 else None,
        of["first"].ratio(ours, unproved),
        of["wall"].ratio(ours, jit),
        *map(both, (*PARTS, "init")),
    )


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=[""], help="parts of their names"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cached", action="store_true", help="measure second starts")
    options = options_of(
        parser, models=["mlp, 2 layers, sgd", "cnn"], devices=[2], rounds=1
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    with tempfile.TemporaryDirectory() as folder:
        if options.cached:
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        _tabulate(options)


def _tabulate(options: argparse.Namespace) -> None:
    table = begin(f"{options.rounds} rounds", COLUMNS, options)
    for name in NETWORKS:
        if any(part in name for part in options.models):
            for num_devices in options.devices:
                found = compare(name, num_devices, options.rounds)
                table.row(name, num_devices, *found)


if __name__ == "__main__":
    main()
