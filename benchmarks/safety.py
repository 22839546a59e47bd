"""Measure what checkpoints cost: the step of a run, by how often the run saves.

The table has the least times of the rounds. The first columns are the time of a step,
in a run without saves and in runs that save every 100 or 25 steps. "First pause" and
"pause" are how long a run's first save and its second save hold the run up. "Then" is
how long the second save takes after that.

Run: ``python -m benchmarks.safety [--rounds 6]``
"""

import contextlib
import functools
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of, turns
from towerjax.data.stream import Source
from towerjax.loop.checkpoint.saving import Saving
from towerjax.loop.stopping import Point
from towerjax.step.step import Step


def _loss_fn(params: Any, batch: Any, tower: Any) -> Any:
    hidden = batch["x"]
    for name in sorted(params):
        hidden = jnp.tanh(hidden @ params[name])
    return tj.Weighted.mean((hidden**2).sum(-1), tower.weight)


def _params(layers: int, width: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    scale = width**-0.5
    return {
        f"w{i}": np.float32(scale * rng.normal(size=(width, width)))
        for i in range(layers)
    }


def _batch(rows: int, width: int) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(rows, width))
    return {"x": np.float32(x)}


SAVED = (None, 100, 25)  # the steps between two saves
SAVES_PER_ROUND = 10
COLUMNS = {
    "devices": "",
    **{f"every={every}, ms": ".2f" for every in SAVED},
    "first pause, ms": ".2f",
    "pause, ms": ".2f",
    "then, ms": ".2f",
}


def run_seconds(step: Step, every: int | None, epochs: int) -> float:
    """Return the time of a step of a run that saves every ``every`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        saving = tj.Checkpointer(folder, every=every) if every else None
        cut = tj.batches(_batch(64, 256), 64, epochs=epochs)
        state = step.init(_params(8, 256))
        _, history = tj.run(step, state, cut, checkpointer=saving, progress=False)
    return 1 / history.summary.steps_per_second


def save_seconds(step: Step) -> tuple[float, ...]:
    """Return the seconds for which a run's first and second save pause the run.

    The third value is the seconds until the second save is complete. The first save
    hashes the step's programs for the checkpoint's record.
    """
    point = Point(jax.block_until_ready(step.init(_params(8, 256))))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpointer = tj.Checkpointer(folder)
        saver = Saving(checkpointer, step, point.state, Source([]), stack)

        def pause() -> float:
            start_s = time.perf_counter()
            saver.save(point)
            return time.perf_counter() - start_s

        first_s = pause()
        saver.wait()
        point.number += 1
        second_s = pause()
        start_s = time.perf_counter()
        saver.wait()
        return first_s, second_s, time.perf_counter() - start_s


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=200)
    options = options_of(parser, rounds=1, epochs=30)
    jax.config.update("jax_num_cpu_devices", 2)
    table = begin(f"the least of {options.rounds} rounds", COLUMNS, options)
    for devices in (1, 2):
        strategy = tj.Mirrored(devices=tuple(jax.devices()[:devices]))
        step = tj.build_train_step(_loss_fn, optax.adam(1e-3), strategy)
        of_run = functools.partial(run_seconds, step, epochs=options.epochs)
        runs = turns(SAVED, of_run, rounds=options.rounds, warm=0)  # the first compiles
        # A save is short, and its time varies more, so it is timed more often.
        rounds = SAVES_PER_ROUND * options.rounds
        saves = turns([step], save_seconds, rounds=rounds, warm=0)[:, 0]
        least = [*runs.min(axis=0), *saves.min(axis=0)]
        table.row(devices, *(1e3 * float(seconds) for seconds in least))


if __name__ == "__main__":
    main()
