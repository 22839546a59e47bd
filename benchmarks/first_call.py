"""Measure the first call of a step against hand-written JAX: all that it takes.

A first call traces, lowers, compiles and runs once, and towerjax proves the step
besides. The hand-written step is ``jax.jit`` of ``value_and_grad`` and an optax update,
with a donated state and, on several devices, a sharded batch; ``shard_map`` is the same
with ``pmean(gradients)``. Contenders go in turns, each after ``jax.clear_caches()``, so
that nothing is compiled for one of them before; a first round, which imports and
registers, is not counted. Figures are CPU seconds of all threads, medians over rounds,
but for the ratios' columns: these are medians of the rounds' ratios.

Run: ``python -m benchmarks.first_call [--models mlp lstm] [--devices 1] [--rounds 5]``
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks import options_of
from benchmarks.models import Model, cross_entropy, embedding, mlp, normal, transformer
from towerjax.mesh.placement import DEVICE_AXIS
from towerjax.metrics.weighted import Weighted
from towerjax.step.make.train import build_train_step
from towerjax.towers import on_towers
from towerjax.towers.strategies import Mirrored
from towerjax.types import PyTree

PARTS = ("trace", "proof", "lower", "compile")
_WIDTH = 64
_TOKENS = 16


def conv_net(blocks: int, widths: tuple[int, ...]) -> Model:
    """Residual blocks of two convolutions with instance norm, at each width."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        last = 3
        stages = []
        for width in widths:
            for _ in range(blocks):
                ins = (last, width)
                kernels = [normal(rng, (3, 3, i, width), 9 * i) for i in ins]
                norms = np.stack([np.ones(width), np.zeros(width)]).astype(np.float32)
                skip = normal(rng, (1, 1, last, width), last)
                stages.append({"kernels": kernels, "norms": [norms] * 2, "skip": skip})
                last = width
        return {"blocks": stages, "dense": normal(rng, (last, 10), last)}

    def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=dims
        )

    def normalise(x: jax.Array, norm: jax.Array) -> jax.Array:
        own = {"axis": (1, 2), "keepdims": True}  # of each image
        x = (x - x.mean(**own)) * lax.rsqrt(x.var(**own) + 1e-5)
        return x * norm[0] + norm[1]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["image"]
        for i, block in enumerate(params["blocks"]):
            stride = 2 if i and i % blocks == 0 else 1
            y = convolve(x, block["kernels"][0], stride)
            y = jax.nn.relu(normalise(y, block["norms"][0]))
            y = normalise(convolve(y, block["kernels"][1], 1), block["norms"][1])
            x = jax.nn.relu(y + convolve(x, block["skip"], stride))
        return cross_entropy(x.mean((1, 2)) @ params["dense"], batch["label"])

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        label = rng.integers(0, 10, size).astype(np.int32)
        return {"image": normal(rng, (size, 16, 16, 3), 1), "label": label}

    return Model(init, losses, make_batch)


def attention_net(layers: int, *, scans: bool) -> Model:
    """A causal transformer by hand, its layers unrolled or one after another."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        shapes = {"qkv": (_WIDTH, 3, 4, _WIDTH // 4), "out": (_WIDTH, _WIDTH)}
        shapes |= {"up": (_WIDTH, 4 * _WIDTH), "down": (4 * _WIDTH, _WIDTH)}
        each = [
            {
                **{name: normal(rng, x, x[0]) for name, x in shapes.items()},
                "scales": [np.ones(_WIDTH, np.float32) for _ in range(2)],
            }
            for _ in range(layers)
        ]
        stacked = jax.tree.map(lambda *x: np.stack(x), *each) if scans else each
        return {"embed": normal(rng, (256, _WIDTH), _WIDTH), "layers": stacked}

    def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def apply(x: jax.Array, layer: PyTree) -> jax.Array:
        y = layer_norm(x, layer["scales"][0])
        q, k, v = jnp.moveaxis(jnp.einsum("btw,wchd->btchd", y, layer["qkv"]), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(x.shape) @ layer["out"]
        y = layer_norm(x, layer["scales"][1])
        return x + jax.nn.gelu(y @ layer["up"]) @ layer["down"]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]]
        if scans:
            x, _ = lax.scan(lambda x, y: (apply(x, y), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = apply(x, layer)
        return cross_entropy(x @ params["embed"].T, tokens[:, 1:]).mean(axis=1)

    return Model(init, losses, _make_tokens)


def lstm() -> Model:
    """An LSTM language model, by ``lax.scan`` over time."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        table = normal(rng, (256, _WIDTH), _WIDTH)
        gates = normal(rng, (2 * _WIDTH, 4 * _WIDTH), 2 * _WIDTH)
        bias = np.zeros(4 * _WIDTH, np.float32)
        return {"embed": table, "gates": gates, "bias": bias}

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        xs = jnp.swapaxes(params["embed"][tokens[:, :-1]], 0, 1)

        def cell(carry: Any, x: jax.Array) -> Any:
            hidden, memory = carry
            z = jnp.concatenate([x, hidden], -1) @ params["gates"] + params["bias"]
            i, f, g, o = jnp.split(z, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros_like(xs[0])
        _, out = lax.scan(cell, (zeros, zeros), xs)
        logits = jnp.swapaxes(out, 0, 1) @ params["embed"].T
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)

    return Model(init, losses, _make_tokens)


def nnx_net() -> Model:
    """A ``flax.nnx`` classifier: embedding, three dense layers with layer norms."""
    from flax import nnx  # here: the other models do not need flax

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(256, _WIDTH, rngs=rngs)
            dense = [nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in range(3)]
            self.norms = nnx.List([nnx.LayerNorm(_WIDTH, rngs=rngs) for _ in dense])
            self.dense = nnx.List(dense)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for dense, norm in zip(self.dense, self.norms, strict=True):
                x = x + nnx.gelu(dense(norm(x)))
            return self.embed.attend(x)

    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params = jax.tree.map(np.asarray, params)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)

    return Model(lambda seed: params, losses, _make_tokens)


def _make_tokens(seed: int, size: int) -> PyTree:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, 256, (size, _TOKENS + 1)).astype(np.int32)}


_adam = functools.partial(optax.adam, 1e-3)
_sgd = functools.partial(optax.sgd, 0.1)
_momentum = functools.partial(optax.sgd, 0.1, 0.9)
MODELS: dict[str, tuple[Callable[[], Model], Callable[[], Any]]] = {
    "mlp, 2 layers, sgd": (lambda: mlp(np.float32, layers=2, width=32), _sgd),
    "mlp, 2 layers, adam": (lambda: mlp(np.float32, layers=2, width=32), _adam),
    "mlp, 25 layers, adam": (lambda: mlp(np.float32, layers=25, width=16), _adam),
    "cnn, instance norm, momentum": (lambda: conv_net(1, (16, 32)), _momentum),
    "resnet, 17 layers, momentum": (lambda: conv_net(2, (16, 32, 64, 128)), _momentum),
    "transformer, 4 layers, adam": (lambda: attention_net(4, scans=False), _adam),
    "transformer, 12 layers, adam": (lambda: attention_net(12, scans=False), _adam),
    "transformer, 12 scanned, adam": (lambda: attention_net(12, scans=True), _adam),
    "lstm, scanned, adam": (lstm, _adam),
    "embedding, sgd": (lambda: embedding(np.float32, rows=1000), _sgd),
    "linen transformer, adam": (lambda: transformer(np.float32), _adam),
    "nnx, 3 layers, adam": (nnx_net, _adam),
}


@contextlib.contextmanager
def split_times() -> Iterator[dict[str, float]]:
    """CPU seconds of the proof, of lowering and of compiling, as they are called."""
    spent: dict[str, float] = dict.fromkeys(PARTS[1:], 0.0)
    inside: list[str] = []

    def timed(owner: Any, name: str, part: str) -> Any:
        fn = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            if inside:
                return fn(*args, **named)
            inside.append(part)
            start = time.process_time()
            try:
                return fn(*args, **named)
            finally:
                spent[part] += time.process_time() - start
                inside.clear()

        return mock.patch.object(owner, name, run)

    with contextlib.ExitStack() as stack:
        stack.enter_context(timed(jax.stages.Traced, "lower", "lower"))
        stack.enter_context(timed(jax.stages.Lowered, "compile", "compile"))
        stack.enter_context(timed(on_towers, "analyse", "proof"))
        yield spent


def by_hand(model: Model, optimizer: Any, strategy: Mirrored, way: str) -> Any:
    """``(init, first)`` of the step as people write it: see the module."""
    placement = strategy.placement
    mesh = jax.sharding.Mesh(np.array(placement.jax_devices), DEVICE_AXIS)
    all_alike = jax.P()
    by_rows = jax.P(DEVICE_AXIS)
    is_mapped = way == "shard_map" and placement.num_devices > 1

    def step(state: Any, batch: PyTree) -> Any:
        params, opt_state = state

        def loss_fn(params: PyTree) -> jax.Array:
            return model.losses(params, batch).mean()

        found = jax.value_and_grad(loss_fn)(params)
        loss, grads = lax.pmean(found, DEVICE_AXIS) if is_mapped else found
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(all_alike, by_rows),
        out_specs=(all_alike, all_alike),
        check_vma=False,
    )
    jitted = jax.jit(mapped if is_mapped else step, donate_argnums=0)

    def put(tree: PyTree, spec: Any) -> PyTree:
        where = jax.sharding.NamedSharding(mesh, spec)
        return jax.device_put(tree, where if placement.num_devices > 1 else None)

    def init(params: PyTree) -> Any:
        return put((params, optimizer.init(params)), all_alike)

    def first(state: Any, batch: PyTree) -> Any:
        batch = put(batch, by_rows)
        compiled = jitted.trace(state, batch).lower().compile()
        return compiled(state, batch)

    return init, first


def by_towerjax(model: Model, optimizer: Any, strategy: Mirrored) -> Any:
    """``(init, first)`` of the same step, built by towerjax."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    step = build_train_step(loss_fn, optimizer, strategy)
    return step.init, step


def measure(name: str, way: str, strategy: Mirrored) -> dict[str, float]:
    """CPU seconds of ``init`` and of the first call, with its parts and wall time."""
    make_model, make_optimizer = MODELS[name]
    model = make_model()
    optimizer = make_optimizer()
    params = model.init(0)
    batch = model.make_batch(1, 16)
    jax.clear_caches()
    if way == "towerjax":
        init, first = by_towerjax(model, optimizer, strategy)
    else:
        init, first = by_hand(model, optimizer, strategy, way)
    start = time.process_time()
    state = jax.block_until_ready(init(params))
    began = time.process_time()
    wall = time.perf_counter()
    with split_times() as spent:
        jax.block_until_ready(first(state, batch))
    total = time.process_time() - began
    found: dict[str, float] = {**spent, "init": began - start, "first": total}
    found["trace"] = total - sum(spent.values())
    return found | {"wall": time.perf_counter() - wall}


def compare(name: str, num_devices: int, rounds: int) -> None:
    """Print a row: each way in turns, in this process."""
    names = tuple(f"{jax.default_backend()}:{i}" for i in range(num_devices))
    strategy = Mirrored(devices=names)
    ways = ["jit", "shard_map", "towerjax"] if num_devices > 1 else ["jit", "towerjax"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way in ways if i % 2 else ways[::-1]:
            one = measure(name, way, strategy)
            if i:
                found[way].append(one)

    def median(way: str, part: str) -> float:
        return float(np.median([x.get(part, 0.0) for x in found[way]]))

    def ratio(way: str, part: str) -> float:
        pairs = zip(found["towerjax"], found[way], strict=True)
        return float(np.median([ours[part] / theirs[part] for ours, theirs in pairs]))

    cells = [name, f"{num_devices}"]
    cells += [f"{median(way, 'first'):.2f}" for way in ("jit", "towerjax")]
    cells += [f"**{ratio('jit', 'first'):.2f}**"]
    cells += [f"{ratio('shard_map', 'first'):.2f}" if num_devices > 1 else "-"]
    cells += [f"{ratio('jit', 'wall'):.2f}"]
    parts = (*PARTS, "init")
    cells += [f"{median('jit', x):.2f}, {median('towerjax', x):.2f}" for x in parts]
    print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=[""], help="parts of their names"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(
        parser, models=["mlp, 2 layers, sgd", "cnn"], devices=[2], rounds=1
    )
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {options.rounds} rounds")
    columns = ["model", "D", "jit", "towerjax", "ratio", "shard_map", "wall"]
    print("|", " | ".join([*columns, *PARTS, "init"]), "|")
    print("|---" * (len(columns) + 5) + "|")
    for name in MODELS:
        if any(part in name for part in options.models):
            for num_devices in options.devices:
                compare(name, num_devices, options.rounds)


if __name__ == "__main__":
    main()
