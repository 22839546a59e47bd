"""Measure what the guard costs a model of small leaves, and two ways around it.

A flag that needs all gradients makes all small updates ready at once, and XLA's CPU
executor wakes its threads for them. Steps go in turns on one CPU device, and each is
waited for.

Run: ``python -m benchmarks.small_leaves [--calls 3000] [--small]``
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks.harness import awaited_calls, begin, options_of, parser_of

LEAVES = 18
WIDTH = 16
ROWS = 8
COLUMNS = {"way": "", "least, us": ".0f", "median, us": ".0f"}
_adam = optax.adam(1e-3)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (_adam, {}),
    'guard="loss"': (_adam, {"guard": "loss"}),
    "optax.flatten": (optax.flatten(_adam), {}),
    'on_nonfinite="ignore"': (_adam, {"on_nonfinite": "ignore"}),
}
"""An optimizer and the options of a step, by name."""


def loss_fn(
    params: Mapping[str, jax.Array], batch: jax.Array, tower: tj.Tower
) -> tj.Weighted:
    """Return the mean square of the output of a chain of small layers."""
    for name in sorted(params):
        batch = jnp.tanh(batch @ params[name])
    return tj.Weighted.mean((batch**2).sum(-1), tower.weight)


def calls_of(optimizer: Any, options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that calls a step, each time on the state of the last call."""
    draw = np.random.default_rng(0)
    layers = (draw.normal(size=(LEAVES, WIDTH, WIDTH)) / 4).astype(np.float32)
    params = {f"w{i:02}": x for i, x in enumerate(layers)}
    step = tj.build_train_step(loss_fn, optimizer, tj.OneDevice(), **options)
    state = step.init(params)
    placed = step.place_batch(draw.normal(size=(ROWS, WIDTH)).astype(np.float32))

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, placed)
        return metrics

    return call


def main() -> None:
    """Print the microseconds of a call."""
    parser = parser_of(__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    options = options_of(parser, calls=20)
    calls = [calls_of(*way) for way in WAYS.values()]
    times, _ = awaited_calls(calls, rounds=options.calls, calls=1, warm=10)
    table = begin(f"{options.calls} calls in turns", COLUMNS, options)
    for name, least, median in zip(WAYS, times.least(), times.medians(), strict=True):
        table.row(name, 1e6 * least, 1e6 * median)


if __name__ == "__main__":
    main()
