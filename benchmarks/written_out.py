"""Report what each device needs if a model's layers are written out, not scanned.

Layers are recomputed, and a device holds its shard of the state. Four forms of a stack
of layers are compiled for devices that are not here, or for CPU devices (``--on cpu``),
beside the scanned form. The question is whether the compiler keeps what was gathered.
Nothing runs.

Run: ``python -m benchmarks.written_out [--on h100] [--layers 16] [--width 16384]
[--devices 8] [--forms written lora] [--states sharded]``. It needs ``pip install -e
'.[gpu-compiler]'``. With ``--on cpu`` a ``--width`` of 256 suffices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of
from towerjax.types import PyTree

# The rows of a tower and of a micro-batch, and the rank of an adapter.
ROWS = 16
RANK = 8
FORMS = {
    "scanned": "scanned",
    "written": "written out",
    "micro": "written out, 4 micro-batches",
    "transposed": "written out, a backward pass of its own that transposes",
    "lora": "written out, a frozen base with adapters",
}

COLUMNS = {
    "layers": "",
    "state=": "",
    "temporaries": ".2f",
    "sent": ".2f",
    "gathers": "",
}


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return a matrix product, which has a custom derivative."""
    return x @ w


def _backward(kept: tuple[jax.Array, jax.Array], of_out: jax.Array) -> Any:
    x, w = kept
    return of_out @ w.T, x.T @ of_out


product.defvjp(lambda x, w: (x @ w, (x, w)), _backward)


def shapes(form: str, layers: int, width: int) -> PyTree:
    """Return the parameters' shapes."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def layer(*lead: int) -> PyTree:
        return {"up": of(*lead, width, 4 * width), "down": of(*lead, 4 * width, width)}

    if form == "scanned":
        return layer(layers)
    each = tuple(layer() for _ in range(layers))
    adapter = {"a": of(width, RANK), "b": of(RANK, 4 * width)}
    return {"base": each, "adapters": (adapter,) * layers} if form == "lora" else each


def loss_of(form: str) -> Any:
    """Return the loss of a stack of residual layers, in one of its forms."""
    times = product if form == "transposed" else jnp.matmul

    @jax.checkpoint
    def layer(x: jax.Array, p: PyTree) -> jax.Array:
        return x + times(jnp.tanh(times(x, p["up"])), p["down"])

    @jax.checkpoint
    def adapted(x: jax.Array, p: PyTree, adapter: PyTree) -> jax.Array:
        hidden = x @ p["up"] + x @ adapter["a"] @ adapter["b"]
        return x + jnp.tanh(hidden) @ p["down"]

    def loss_fn(params: PyTree, x: jax.Array, tower: Any) -> tj.Weighted:
        if form == "scanned":
            x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params)
        elif form == "lora":
            for p, adapter in zip(params["base"], params["adapters"], strict=True):
                x = adapted(x, p, adapter)
        else:
            for p in params:
                x = layer(x, p)
        return tj.Weighted.mean((x**2).sum(-1), tower.weight)

    return loss_fn


def report_of(form: str, params: PyTree, devices: Any, state: Any) -> Any:
    """Report on a compiled step."""
    strategy = tj.Mirrored(devices=devices, state=state)
    count = 4 if form == "micro" else 1
    how: Any = (
        {"trainable": {"base": False, "adapters": True}} if form == "lora" else {}
    )
    step = tj.build_train_step(
        loss_of(form), optax.sgd(0.1), strategy, micro_batches=count, **how
    )
    width = min(jax.tree.leaves(params)[-1].shape[-2:])
    rows = jnp.zeros((ROWS * count * strategy.num_towers, width))
    if strategy.placement.absent is None:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return step.report(step.init(zeros), rows)
    return step.report(params, rows)


def main() -> None:
    """Print the table: a device's bytes over those of all parameters."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=16384)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--on", default="h100")
    parser.add_argument("--states", nargs="+", default=["sharded"])
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    options = options_of(
        parser, on="cpu", width=64, layers=2, devices=2, forms=["scanned", "written"]
    )
    devices: Any = [f"cpu:{i}" for i in range(options.devices)]
    if options.on == "cpu":
        jax.config.update("jax_num_cpu_devices", options.devices)
    else:
        devices = tj.Absent(options.on, options.devices)
    about = f"{options.devices} {options.on}, bytes over those of all parameters"
    table = begin(about, COLUMNS, options)
    for form in options.forms:
        params = shapes(form, options.layers, options.width)
        whole = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        for state in options.states:
            found = report_of(form, params, devices, state)
            held = found.memory.by_kind["temporaries"] / whole
            sent = found.bytes_sent / whole
            all_ = found.collectives
            gathers = sum(x.trips for x in all_ if x.opcode == "all-gather")
            cells = FORMS[form], f'`"{state}"`', held, sent, gathers
            table.row(*cells)


if __name__ == "__main__":
    main()
