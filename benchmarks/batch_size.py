"""Measure which batch size pays: the noise scale, and the steps and rows needed.

A linear classifier of 10 classes learns noisy labels from 20 numbers. For each batch
size it trains at several learning rates until the loss on all rows is small enough. The
rate that needs the fewest steps counts. ``examples/noise_scale.py`` reports the noise
scale at the end.

Run: ``python -m benchmarks.batch_size [docs/evidence/batch_size.svg]``
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.harness import begin, options_of, parser_of
from examples.noise_scale import noise_scale, with_statistics
from towerjax import Mirrored, Weighted, build_train_step
from towerjax.types import PyTree

SIZES = [2**i for i in range(3, 12)]
RATES = np.geomspace(0.0125, 3.2, 9)
ROWS = 4096
STEPS = 3000
ENOUGH = 1.74
SHOWN = 256
BLUE = "#2f6db5"
COLUMNS = {"rows a step": ",", "steps": ",", "rows": ","}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" role="img"
     font-family="system-ui, sans-serif" font-size="13" text-anchor="middle"
     fill="#7f7f7f">
  <title>Steps and rows that batches of each size need</title>
  <desc>To reach one loss, larger batches need fewer steps, up to the noise scale, and
  more rows beyond it.</desc>
  <style>
    polyline, path { fill: none; stroke-width: 2px; } .end { text-anchor: end; }
    .at { stroke: #7f7f7f; stroke-dasharray: 4 3; }
  </style>
  <text x="380" y="18">needed, by rows a step; both axes logarithmic</text>
"""


def data() -> dict[str, jax.Array]:
    """Return rows, and labels of which many are wrong."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 20))
    logits = 0.3 * x @ rng.normal(size=(20, 10)) + rng.gumbel(size=(ROWS, 10))
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(logits.argmax(-1))}


def losses_of(params: PyTree, batch: PyTree) -> jax.Array:
    """Return the cross entropy of each row."""
    logits = batch["x"] @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
    """Return the loss of one tower."""
    return Weighted.mean(losses_of(params, batch), tower.weight)


def learning(size: int) -> Any:
    """Return a function of a learning rate that trains with this batch size.

    It returns the losses of all rows, the noises and the signals, ``[STEPS]`` each.
    """
    rows = data()
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    strategy = Mirrored([f"{jax.default_backend()}:0"], towers=8)
    step = build_train_step(
        loss_fn, optimizer, strategy, extend=with_statistics, audit=False
    )
    start = step.init(np.zeros((20, 10), np.float32))

    def one(state: Any, key: jax.Array) -> Any:
        at = jax.random.randint(key, (size,), 0, ROWS)
        state, told = step.fn(state, jax.tree.map(lambda x: x[at], rows))
        whole = losses_of(state.params, rows).mean()
        return state, (whole, told["gradient/noise"], told["gradient/signal"])

    @jax.jit
    def run(rate: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(0), STEPS)
        return lax.scan(one, optax.tree.set(start, learning_rate=rate), keys)[1]

    return run


def best_of(size: int) -> tuple[int, float]:
    """Return the fewest steps to a loss that is small enough, and the noise scale."""
    run = learning(size)
    found = []
    for rate in RATES:
        losses, noise, signal = jax.device_get(run(jnp.float32(rate)))
        # Losses are averaged, because one may be small enough by chance.
        smooth = np.convolve(losses, np.ones(5) / 5, "valid")
        if (smooth < ENOUGH).any():
            told = {"gradient/noise": noise, "gradient/signal": signal}
            number = int((smooth < ENOUGH).argmax()) + 5
            scales = noise_scale(told, smoothing=0.98)
            found.append((number, float(scales[number - 1])))
    return min(found)


def main() -> None:
    """Print the table, and draw it if a file is named."""
    parser = parser_of(__doc__)
    parser.add_argument("svg", nargs="?")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = options_of(parser, sizes=[256])
    steps = []
    scales = {}
    table = begin(f"to a loss of {ENOUGH}", COLUMNS, options)
    for size in options.sizes:
        number, scale = best_of(size)
        steps.append(number)
        scales[size] = scale
        table.row(size, number, size * number)
    table.note(f"noise scale, at the end of {SHOWN} rows a step: {scales[SHOWN]:.0f}")
    if options.svg:
        draw(options.svg, steps, scales[SHOWN])


def draw(path: str, steps: list[int], scale: float) -> None:
    """Draw the steps and rows that batches of each size need, as an svg."""
    across = [80 + 72 * i for i in range(len(SIZES))]
    rows = [size * number for size, number in zip(SIZES, steps, strict=True)]
    at = 80 + 72 * np.log2(scale / SIZES[0])
    text = HEAD + f'<path class="at" d="M{at:.0f} 30V262"/>\n'
    text += f'<text x="{at - 8:.0f}" y="44" class="end">noise scale</text>\n'
    for name, values, color in (("steps", steps, BLUE), ("rows", rows, "#b5622f")):
        # Both curves start at one point. A factor of 10 is 45 units high.
        down = [146 - 45 * np.log10(x / values[0]) for x in values]
        line = " ".join(f"{x},{y:.0f}" for x, y in zip(across, down, strict=True))
        text += f'<polyline points="{line}" stroke="{color}"/>\n'
        above = -10 if name == "rows" else 20
        for x, y, value in zip(across, down, values, strict=True):
            text += f'<text x="{x}" y="{y + above:.0f}" fill="{color}">{value:,}'
            text += f" {name}</text>\n" if x == across[0] else "</text>\n"
    for x, size in zip(across, SIZES, strict=True):
        text += f'<text x="{x}" y="280">{size:,}</text>\n'
    pathlib.Path(path).write_text(text + "</svg>\n")


if __name__ == "__main__":
    main()
