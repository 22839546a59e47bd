"""Count what examples of tensor, expert and context parallel send on absent GPUs.

Each example is compiled for devices that are not here, as it stands in examples/.
Nothing runs. The collectives of one step are counted, in a tower and over towers.

Run: ``python -m benchmarks.parallel [--towers 3] [--on h200]``. It needs ``pip install
-e '.[gpu-compiler]'``.
"""

import collections
import math
import pathlib
import runpy
from typing import Any

import jax
import numpy as np
import optax

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LOSSES = {
    "tensor_parallel": [None],
    "experts": [None],
    "context_parallel": ["by_constraint", "by_ring"],
    "vocabulary": ["by_mask", "by_hand"],
}
"""The examples, each with the functions that it gives ``loss_by``, if it does."""
KINDS = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
COLUMNS = {"in a tower:": "", **dict.fromkeys(KINDS, ""), "of all towers": ""}


def report_of(name: str, part: str | None, towers: int, kind: str) -> Any:
    """Return the report on an example's compiled step."""
    given = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    loss_fn = given["loss_by"](given[part]) if part else given["loss_fn"]
    rng = np.random.default_rng(0)
    params = given["init"](rng)
    batch = given["make_batch"](rng)
    within = given["WITHIN"]
    size = math.prod(within.values())
    rows = given.get("ROWS_ALONG")
    specs = given.get("SPECS")
    devices = tj.Absent(kind, size * towers)
    strategy = tj.Mirrored(devices, within=within, rows=rows, specs=specs)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), params)
    count = size * towers
    batch = jax.tree.map(lambda x: np.resize(x, (count, *x.shape[1:])), batch)
    return step.report(shapes, batch)


def row(name: str, part: str | None, towers: int, kind: str) -> list[Any]:
    """Return the values of a row."""
    report = report_of(name, part, towers, kind)
    inside: collections.Counter[str] = collections.Counter()
    over: collections.Counter[str] = collections.Counter()
    for found in report.collectives:
        counts = over if found.num_devices == towers else inside
        counts[found.opcode] += found.trips
    assert {*inside, *over} <= {*KINDS}, (inside, over)
    of_towers = ", ".join(f"{n} {opcode}" for opcode, n in over.items())
    title = f"`{name}.py`" + (f", `{part}`" if part else "")
    return [title, *(inside[opcode] or None for opcode in KINDS), of_towers]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--towers", type=int, default=3)
    parser.add_argument("--on", default="h200")
    names = [*LOSSES]
    parser.add_argument("--examples", nargs="+", default=names, choices=names)
    options = options_of(parser, towers=2, examples=["tensor_parallel"])
    about = f"collectives of a step, {options.towers} towers of {options.on}"
    table = begin(about, COLUMNS, options)
    for name in options.examples:
        for part in LOSSES[name]:
            table.row(*row(name, part, options.towers, options.on))


if __name__ == "__main__":
    main()
