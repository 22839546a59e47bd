"""Measure training that sends less: a language model's loss against bytes sent.

The model is that of ``notebooks/05_language_model.ipynb``, with its text, Python's own
standard library. 4 towers train it with each way to synchronise, with the same batches
and the same optimizer. What a tower sends is counted in the traced step.

Run: ``python -m benchmarks.synchronise [docs/evidence/synchronise.svg]``
"""

import contextlib
import io
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.harness import begin, options_of, parser_of
from towerjax import Mirrored, batches, build_eval_step, build_train_step, run
from towerjax.contrib import DiLoCo, LocalSGD

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks/05_language_model.ipynb"
TOWERS = 4
ROWS = 32
STEPS = 320
EVERY = 16
# A run of 20 rounds is too short for the papers' momentum of 0.9.
LESS = optax.sgd(0.7, momentum=0.6, nesterov=True)
WAYS: dict[str, Any] = {
    "every step": None,
    "local SGD, every 4": LocalSGD(4),
    "local SGD, every 16": LocalSGD(EVERY),
    "DiLoCo, every 16": DiLoCo(EVERY),
    "DiLoCo, momentum 0.6": DiLoCo(EVERY, LESS),
    "the same in 4 fragments": DiLoCo(EVERY, LESS, fragments=4),
}
COLUMNS = {
    "way": "",
    "kB a step": ".1f",
    "MB in all": ".1f",
    "bits per byte": ".3f",
    "seconds": ".0f",
}
COLORS = ("#2f6db5", "#d0a04c", "#b5622f", "#8f8f8f", "#3d8a5f", "#8a4f9e")
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" role="img"
     font-family="system-ui, sans-serif" font-size="13" fill="#7f7f7f">
  <title>Loss of a language model against what a tower has sent</title>
  <desc>For the same bytes, towers that meet less often reach a smaller loss; for the
  same steps, a somewhat larger one.</desc>
  <style>
    polyline { fill: none; stroke-width: 2px; }
    path { stroke: #7f7f7f; stroke-opacity: 0.3; }
    .end { text-anchor: end; } .mid { text-anchor: middle; }
  </style>
  <text x="330" y="18" class="mid">bits per byte of text that was held out, by MB that a
  tower has sent (logarithmic)</text>
"""


def model() -> dict[str, Any]:
    """Return what the notebook's first cells define: text, model and losses."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]
    until = next(i for i, x in enumerate(sources) if "def metric_fn" in x)
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for source in sources[: until + 1]:
            exec(source.replace("%matplotlib inline", ""), found)
    return found


def trained(way: Any, given: dict[str, Any], steps: int) -> tuple[float, Any]:
    """Train in one way; return a tower's bytes per step on average, and the history."""
    rates = optax.warmup_cosine_decay_schedule(0, 1e-2, 10, steps)
    strategy = Mirrored([f"{jax.default_backend()}:0"], towers=TOWERS)
    optimizer = optax.adamw(rates, b2=0.98)
    step = build_train_step(given["loss_fn"], optimizer, strategy, extend=way)
    params = given["init_params"]()
    # This step counts what towers send if each has a device of its own.
    apart = Mirrored([f"cpu:{i}" for i in range(TOWERS)])
    sending = build_train_step(given["loss_fn"], optimizer, apart, extend=way)
    rows = np.zeros((ROWS, given["LENGTH"] + 1), np.int32)
    report = sending.report(sending.init(params), rows)
    sent = sum(x.bytes * x.trips for x in report.collectives)
    _, history = run(
        step,
        step.init(params, rng=jax.random.key(1)),
        batches(given["train"], ROWS, epochs=None, seed=0),
        steps=steps,
        evaluate=build_eval_step(given["metric_fn"], strategy),
        eval_batches=lambda: batches(given["test"], 250),
        eval_every=2 * EVERY,
        progress=False,
    )
    return sent / getattr(way, "every", 1), history


def main() -> None:
    """Print the table, and draw it if a file is named."""
    parser = parser_of(__doc__)
    parser.add_argument("svg", nargs="?")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    options = options_of(parser, steps=32, ways=["every step"])
    jax.config.update("jax_num_cpu_devices", TOWERS)
    given = model()
    curves = []
    about = f"{options.steps} steps of {ROWS} rows on {TOWERS} towers"
    table = begin(about, COLUMNS, options)
    for name in options.ways:
        way = WAYS[name]
        start_s = time.perf_counter()
        sent, history = trained(way, given, options.steps)
        curve = [(n * sent / 1e6, float(x["bits"])) for n, x in history.evaluations]
        curves.append((name, curve))
        seconds = time.perf_counter() - start_s
        table.row(name, sent / 1e3, *curve[-1], seconds)
    if options.svg:
        draw(options.svg, curves)


def draw(path: str, curves: list[tuple[str, list[tuple[float, float]]]]) -> None:
    """Draw each way's curve, as an svg."""
    points = [point for _, curve in curves for point in curve]
    low, high = (f(x for x, _ in points) for f in (min, max))
    least = min(y for _, y in points) - 0.05
    most = max(y for _, y in points)

    def across(x: float) -> float:
        return 60 + 500 * np.log(x / low) / np.log(high / low)

    def down(y: float) -> float:
        return 40 + 250 * (most - y) / (most - least)

    text = HEAD
    for y in np.arange(np.ceil(least * 5) / 5, most, 0.2):
        text += f'<path d="M60 {down(y):.0f}H580"/>\n'
        text += f'<text x="52" y="{down(y) + 4:.0f}" class="end">{y:.1f}</text>\n'
    for x in 10.0 ** np.arange(np.ceil(np.log10(low)), np.log10(high)):
        text += f'<text x="{across(x):.0f}" y="312" class="mid">{x:g}</text>\n'
    ends = sorted((down(curve[-1][1]), name) for name, curve in curves)
    for (name, curve), color in zip(curves, COLORS, strict=True):
        line = " ".join(f"{across(x):.0f},{down(y):.1f}" for x, y in curve)
        text += f'<polyline points="{line}" stroke="{color}"/>\n'
        y = 60 + 20 * [n for _, n in ends].index(name)
        text += f'<text x="590" y="{y}" fill="{color}">{name}</text>\n'
    pathlib.Path(path).write_text(text + "</svg>\n")


if __name__ == "__main__":
    main()
