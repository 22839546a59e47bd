"""Time the programs of `benchmarks.absent` on the devices of this machine.

Steps of towerjax and the hand-written step go in turns. The table also shows the most
memory that a device held, beside what the compiler had planned. `on_a_gpu.sh` runs this
with the other GPU scripts.

Run: ``python -m benchmarks.on_a_gpu [--programs mlp cnn] [--calls 20]``
"""

import operator
from typing import Any

import jax
import numpy as np

import towerjax as tj
from benchmarks.absent import PROGRAMS, Program, hand_written
from benchmarks.harness import Rounds, begin, options_of, parser_of, turns
from towerjax.check.report.report import time_calls
from towerjax.mesh.transfer import place, place_rows
from towerjax.types import Layout, PyTree

COLUMNS = {
    "program": "",
    "device": "",
    "devices": "",
    "hand-written ms": ".3f",
    "towerjax ms": ".3f",
    "ratio": ".2f",
    "planned peak": ",",
    "peak of the process": ",",
}


def _values(shapes: PyTree, high: int) -> PyTree:
    """Draw random values of these shapes; integers are below ``high``."""
    draw = np.random.default_rng(0)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(x.dtype, np.integer):
            return draw.integers(high, size=x.shape).astype(x.dtype)
        return (0.02 * draw.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.map(one, shapes)


def measure(program: Program, calls: int, rounds: int) -> tuple[Any, ...]:
    """Time both steps in turns, ``calls`` calls a round; return the values of a row."""
    strategy = tj.Mirrored()
    placement = strategy.placement
    step, params, batch = program.make_step(strategy)
    params = _values(params, 10)
    batch = _values(batch, 10)
    rows = place_rows(batch, placement, Layout.PER_TOWER)
    hand = hand_written(program, placement)
    opt_state = program.optimizer.init(params)
    placed = step.place_batch(batch)

    def by_hand(state: Any) -> tuple[Any, Any]:
        params, opt_state, loss = hand(*state, rows)
        return (params, opt_state), loss

    def turn_of_hand() -> float:
        state = place((params, opt_state), placement, Layout.MIRRORED)
        return time_calls(by_hand, state, calls).step_s

    def turn_of_ours() -> float:
        state = step.init(params)
        return time_calls(lambda state: step(state, placed), state, calls).step_s

    contenders = (turn_of_hand, turn_of_ours)
    times = Rounds(turns(contenders, operator.call, rounds=rounds, warm=0))
    report = step.report(step.init(params), placed)
    device = placement.jax_devices[0]
    stats = device.memory_stats() or {}
    return (
        device.device_kind,
        placement.num_devices,
        *(1e3 * seconds for seconds in times.medians()),
        times.ratio(1, 0),
        report.memory.peak,
        stats.get("peak_bytes_in_use"),
    )


def main() -> None:
    """Print a row for each program."""
    parser = parser_of(__doc__)
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(parser, programs=["mlp"], calls=2, rounds=1)
    table = begin(f"{options.rounds} rounds", COLUMNS, options)
    for name in options.programs:
        table.row(name, *measure(PROGRAMS[name], options.calls, options.rounds))


if __name__ == "__main__":
    main()
