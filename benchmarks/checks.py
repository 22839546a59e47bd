"""Measure ``step.check`` of deep transformers against a trace of the hand-written step.

A check traces a step and proves it, and compiles nothing. The other side only traces
the step of ``shard_map`` that `benchmarks.first_call` describes. Both go in turns, each
after ``jax.clear_caches()``. A first round, which imports and registers, is not
counted. Figures are CPU seconds, as medians over rounds.

Run: ``python -m benchmarks.checks [--layers 64] [--rounds 5]``
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks.first_call import built, jitted_by_hand
from benchmarks.harness import Rounds, begin, devices_of, options_of, parser_of, turns
from benchmarks.networks import attention_net
from towerjax.towers.strategies import Mirrored

COLUMNS = {"layers": "", "trace by hand, s": ".2f", "check, s": ".2f", "ratio": ".2f"}


def compare(layers: int, num_devices: int, rounds: int) -> tuple[float, ...]:
    """Return the seconds of a trace and of a check, and the ratio of the check."""
    strategy = Mirrored(devices_of(num_devices))
    model = attention_net(layers, scans=False)
    optimizer = optax.adam(1e-3)
    params = model.init(0)
    batch = model.make_batch(1, 16)
    state = params, optimizer.init(params)

    def trace() -> Any:
        step = jitted_by_hand(model, optimizer, strategy.placement, "shard_map")
        return step.trace(state, batch)

    def check() -> Any:
        return built(model, optimizer, strategy).check(params, batch)

    def turn(contender: Callable[[], Any]) -> float:
        jax.clear_caches()
        start = time.process_time()
        contender()
        return time.process_time() - start

    seconds = Rounds(turns([trace, check], turn, rounds=rounds))
    return *seconds.medians(), seconds.ratio(1, 0)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(parser, layers=[2], rounds=1)
    jax.config.update("jax_num_cpu_devices", options.devices)
    about = f"{options.devices} devices, {options.rounds} rounds"
    table = begin(about, COLUMNS, options)
    for layers in options.layers:
        table.row(layers, *compare(layers, options.devices, options.rounds))


if __name__ == "__main__":
    main()
