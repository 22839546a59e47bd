"""Report what a GPT needs on each of several absent GPUs, by the layout of its state.

A GPT of scanned, recomputed layers with clipped AdamW is compiled for devices that are
not here. Its state has each layout in turn, while its loss stays the same. Nothing
runs. With ``--within 4`` a tower has four devices, over which its matrices are split.

Run: ``python -m benchmarks.sharded [--layers 32] [--width 4096] [--devices 8] [--within
1] [--states sharded mirrored] [--on h200]``. It needs ``pip install -e
'.[gpu-compiler]'``.
"""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of
from towerjax.towers.strategies import StateLayout
from towerjax.types import PyTree

HEAD = 128
WORDS = 32_000
LENGTH = 2_048
ROWS = 4  # the rows of one tower
COLUMNS = {
    "state=": "",
    "held, GB": ".1f",
    "peak, GB": ".1f",
    "sent, GB": ".1f",
    "gathers": "",
    "scatters": "",
    "exposed": "",
    "fits": "",
    "compile, s": ".0f",
}


def shapes(layers: int, width: int) -> PyTree:
    """Return the parameters' shapes."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    stacked = {
        "norm1": of(layers, width),
        "norm2": of(layers, width),
        "qkv": of(layers, width, 3 * width),
        "out": of(layers, width, width),
        "up": of(layers, width, 4 * width),
        "down": of(layers, 4 * width, width),
    }
    ends = {"embed": of(WORDS, width), "head": of(width, WORDS), "norm": of(width)}
    return {"layers": stacked, **ends}


BY_COLUMN = P(None, None, "model")
BY_LINE = P(None, "model")
SPECS = {
    "layers": {"norm1": P(), "norm2": P(), "qkv": BY_COLUMN, "out": BY_LINE}
    | {"up": BY_COLUMN, "down": BY_LINE},
    "embed": P("model"),
    "head": P(None, "model"),
    "norm": P(),
}
"""How matrices are split over the devices of a tower (Megatron-LM's way)."""


def loss_fn(params: PyTree, tokens: jax.Array, tower: Any) -> tj.Weighted:
    """Return the mean loss of each next token, computed in bfloat16."""

    def half(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        square = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
        return (
            x
            * lax.rsqrt(square + 1e-6).astype(x.dtype)
            * scale.astype(x.dtype)[None, None]
        )

    def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
        p = half(p)
        parts = jnp.split(norm(x, p["norm1"]) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], -1, HEAD) for y in parts)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

    @jax.checkpoint
    def losses(x: jax.Array, head: jax.Array, scale: jax.Array) -> jax.Array:
        logits = (norm(x, half(scale)) @ half(head)).astype(jnp.float32)[:, :-1]
        of_words = optax.softmax_cross_entropy_with_integer_labels
        return of_words(logits, tokens[:, 1:]).mean(-1)

    x = half(params["embed"])[tokens]
    # In a scan XLA merges no gather of the forward pass with one of the backward pass.
    # So `prevent_cse` is off, and a gather may overlap with other work.
    again = jax.checkpoint(layer, prevent_cse=False)
    x, _ = lax.scan(again, x, params["layers"])
    found = losses(x, params["head"], params["norm"])
    return tj.Weighted.mean(found, tower.weight)


def report_of(params: PyTree, devices: Any, state: StateLayout, within: int = 1) -> Any:
    """Report on a compiled step, with ``within`` devices in a tower."""
    how: Any = {"within": {"model": within}, "specs": SPECS} if within > 1 else {}
    strategy = tj.Mirrored(devices=devices, state=state, **how)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    towers = len(devices) // within
    rows = jax.ShapeDtypeStruct((ROWS * within * towers, LENGTH), jnp.int32)
    return step.report(params, rows)


def exposed(report: Any) -> int:
    """Count the collectives in loops for which a device only waits."""
    return sum(x.trips for x in report.collectives if x.trips > 1 and not x.beside)


def row(params: PyTree, devices: Any, state: StateLayout, within: int) -> list[Any]:
    """Return the values of a row."""
    report = report_of(params, devices, state, within)

    def count(kind: str) -> int:
        return sum(x.trips for x in report.collectives if x.opcode == kind)

    return [
        f'`"{state}"`',
        report.memory.arguments / 1e9,
        report.memory.peak / 1e9,
        report.bytes_sent / 1e9,
        count("all-gather"),
        count("reduce-scatter"),
        exposed(report),
        "yes" if report.memory.fits else "no",
        report.compile_s,
    ]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--within", type=int, default=1)
    states = get_args(StateLayout)
    parser.add_argument("--states", nargs="+", default=["sharded"], choices=states)
    parser.add_argument("--on", default="h200")
    options = options_of(parser, layers=2, width=256, devices=2)
    params = shapes(options.layers, options.width)
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    devices = tj.Absent(options.on, options.devices)
    about = f"{total / 1e9:.2f} B parameters, {options.devices} {devices.kind}"
    table = begin(about, COLUMNS, options)
    for state in options.states:
        table.row(*row(params, devices, state, options.within))


if __name__ == "__main__":
    main()
