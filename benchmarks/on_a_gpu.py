"""Time the programs of `benchmarks.absent` on the devices of this machine.

Steps of towerjax and the hand-written one, in turns, with what the device held at most
beside what the compiler had planned. `on_a_gpu.sh` runs it with the rest.

Run: ``python -m benchmarks.on_a_gpu [--programs mlp cnn] [--calls 20]``
"""

import argparse
import json
import statistics
from typing import Any

import jax
import numpy as np

import towerjax as tj
from benchmarks import options_of
from benchmarks.absent import PROGRAMS, Program, hand_written
from towerjax.check.report.report import time_calls
from towerjax.mesh.transfer import place, place_rows
from towerjax.types import Layout, PyTree


def _values(shapes: PyTree, high: int) -> PyTree:
    """Random values of these shapes; integers below ``high``."""
    draw = np.random.default_rng(0)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(x.dtype, np.integer):
            return draw.integers(high, size=x.shape).astype(x.dtype)
        return (0.02 * draw.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.map(one, shapes)


def measure(name: str, program: Program, calls: int, rounds: int) -> dict[str, Any]:
    """Both steps in turns, each round so many calls."""
    strategy = tj.Mirrored()
    placement = strategy.placement
    step, params, batch = program.make_step(strategy)
    params = _values(params, 10)
    batch = _values(batch, 10)
    rows = place_rows(batch, placement, Layout.PER_TOWER)
    hand = hand_written(program, placement)
    opt_state = program.optimizer.init(params)

    def by_hand(state: Any) -> tuple[Any, Any]:
        params, opt_state, loss = hand(*state, rows)
        return (params, opt_state), loss

    placed = step.place_batch(batch)
    times: dict[str, list[float]] = {"towerjax": [], "by hand": []}
    for _ in range(rounds):
        state = step.init(params)
        found = time_calls(lambda state: step(state, placed), state, calls)
        times["towerjax"].append(found.step_s)
        state = place((params, opt_state), placement, Layout.MIRRORED)
        times["by hand"].append(time_calls(by_hand, state, calls).step_s)
    report = step.report(step.init(params), placed)
    ratios = [a / b for a, b in zip(times["towerjax"], times["by hand"], strict=True)]
    stats = placement.jax_devices[0].memory_stats() or {}
    return {
        "program": name,
        "device": placement.jax_devices[0].device_kind,
        "devices": placement.num_devices,
        "jax": jax.__version__,
        "towerjax_s": statistics.median(times["towerjax"]),
        "by_hand_s": statistics.median(times["by hand"]),
        "ratio": statistics.median(ratios),
        "planned_peak": report.memory.peak,
        "peak_of_the_process": stats.get("peak_bytes_in_use"),
    }


def main() -> None:
    """Print one JSON object a program."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(parser, programs=["mlp"], calls=2, rounds=1)
    for name in options.programs:
        row = measure(name, PROGRAMS[name], options.calls, options.rounds)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
