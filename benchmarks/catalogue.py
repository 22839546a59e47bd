"""The small models and optimizers that the scripts train."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from towerjax.types import PyTree

Losses = Callable[[PyTree, PyTree, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train, and the batches that it gets.

    Attributes:
      losses: ``(params, batch, tower) -> [b]``, each example's loss.
      shapes: Parameter -> shape; the values are random.
      inputs: Shape of one example's ``x``.
      classes: Labels and ids are below this; 0 for a real ``y``.
      rows: Rows of a tower.
      statistics: Features of the running statistics that a tower keeps; 0 is none.
    """

    losses: Losses
    shapes: dict[str, tuple[int, ...]]
    inputs: tuple[int, ...] = (8, 8, 4)
    classes: int = 0
    rows: int = 6
    statistics: int = 0

    def params(self) -> PyTree:
        """Return random parameters, scaled by the number of their inputs."""
        rng = np.random.default_rng(1)

        def one(shape: tuple[int, ...]) -> np.ndarray:
            scale = np.prod(shape[:-1], dtype=float) ** -0.5
            return (rng.normal(size=shape) * scale).astype(np.float32)

        return {name: one(shape) for name, shape in self.shapes.items()}

    def batch(self, rows: int, step: int) -> PyTree:
        """Return a step's global batch: ``x``, ``y`` and the weights of its rows."""
        rng = np.random.default_rng(100 + step)
        x = rng.normal(size=(rows, *self.inputs)).astype(np.float32)
        y = rng.normal(size=rows).astype(np.float32)
        if self.classes:
            y = rng.integers(0, self.classes, rows).astype(np.int32)
        weight = rng.uniform(0.05, 1, rows).astype(np.float32)
        return {"x": x, "y": y, "weight": weight}


def _squared(prediction: jax.Array, batch: PyTree) -> jax.Array:
    return (prediction - batch["y"]) ** 2


def _labelled(logits: jax.Array, batch: PyTree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape((x.shape[0], -1))


def _linear(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    return _squared(batch["x"] @ p["w"], batch)


def _mlp(p: PyTree, batch: PyTree, tower: Any, dtype: Any = jnp.float32) -> jax.Array:
    p, x = jax.tree.map(lambda v: v.astype(dtype), (p, _flat(batch["x"])))
    x = jnp.tanh(x @ p["u"] + p["a"][None])
    x = x * jax.random.bernoulli(tower.rng, 0.8, x.shape)
    x = jax.nn.gelu(x @ p["v"] + p["b"][None])
    return _labelled((x @ p["w"]).astype(jnp.float32), batch)


def _convolved(
    p: PyTree, batch: PyTree, tower: Any, groups: int = 1, dtype: Any = jnp.float32
) -> jax.Array:
    p, x = jax.tree.map(lambda v: v.astype(dtype), (p, batch["x"]))
    dims = ("NHWC", "HWIO", "NHWC")
    for name in ("u", "v"):
        x = lax.conv_general_dilated(
            x, p[name], (1, 1), "SAME", dimension_numbers=dims,
            feature_group_count=groups,
        )  # fmt: skip
        x = jax.nn.relu(x)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _labelled((x.mean((1, 2)) @ p["w"]).astype(jnp.float32), batch)


def _batch_norm(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        batch["x"], p["u"], (1, 1), "SAME", dimension_numbers=dims
    )
    weight = tower.weight[:, None, None, None]
    total = jnp.maximum(weight.sum(), 1) * x.shape[1] * x.shape[2]
    mean = (x * weight).sum((0, 1, 2), keepdims=True) / total
    var = ((x - mean) ** 2 * weight).sum((0, 1, 2), keepdims=True) / total
    x = (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"][None, None]
    return _labelled(jax.nn.relu(x).mean((1, 2)) @ p["w"], batch)


def _attention(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhe->bshe", batch["x"], p[name]) for name in "qkv")
    scores = jnp.einsum("bshe,bthe->bhst", q, k) / q.shape[-1] ** 0.5
    x = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v)
    x = x.reshape(x.shape[:2] + (-1,)) + batch["x"]
    x = jax.nn.standardize(x, axis=-1) * p["scale"][None]
    return _labelled(jax.nn.silu(x).mean(1) @ p["w"], batch)


def _lstm(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    def cell(carry: PyTree, x: jax.Array) -> PyTree:
        hidden, memory = carry
        gates = x @ p["u"] + hidden @ p["v"] + p["b"][None]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

    zeros = jnp.zeros((batch["x"].shape[0], p["v"].shape[0]))
    (hidden, _), _ = lax.scan(cell, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return _labelled(hidden @ p["w"], batch)


def _embedded(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    ids = (jnp.abs(batch["x"]) * 5).astype(jnp.int32)  # many equal ids below 25
    return _labelled(p["table"][ids].mean(1) @ p["w"], batch)


def _fourier(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    x = jnp.fft.rfft(batch["x"] @ p["u"], axis=1)
    return _labelled(jnp.abs(x).mean(1) @ p["w"], batch)


def _sorted(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    x = _flat(batch["x"]) @ p["u"]
    best, _ = lax.top_k(x, 4)
    x = jnp.concatenate([jnp.sort(x, axis=-1), jnp.cumsum(best, axis=-1)], axis=-1)
    return _labelled(x @ p["w"], batch)


def _solved(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    gram = p["u"] @ p["u"].T + jnp.eye(p["u"].shape[0])
    x = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram), True), batch["x"].T)
    q, _ = jnp.linalg.qr(p["v"])
    return _labelled(x.T @ q, batch)


def _remat(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    return jax.checkpoint(functools.partial(_mlp, tower=tower))(p, batch)


def _square(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ p["u"])
    return _squared((x @ p["v"]).mean(-1) * 30, batch)


@jax.jit
def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    return x / by


def _called_twice(p: PyTree, batch: PyTree, tower: Any) -> jax.Array:
    x = batch["x"] @ p["w"]
    by = 1.3 + (x**2).sum(-1, keepdims=True)
    target = batch["y"][:, None]
    return (_divided(x, by) * target + jnp.tanh(_divided(x, by))).sum(-1)


_MLP = {"u": (256, 32), "a": (32,), "v": (32, 24), "b": (24,), "w": (24, 10)}
_LSTM = {"u": (4, 48), "v": (12, 48), "b": (48,), "w": (12, 10)}
_HEADS = {"q": (8, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4), "scale": (1, 8), "w": (8, 10)}


def _conv(channels: int, groups: int = 1) -> dict[str, tuple[int, ...]]:
    u = (3, 3, 4 // groups, channels)
    return {"u": u, "v": (3, 3, channels // groups, channels), "w": (channels, 10)}


MODELS: dict[str, Model] = {
    "linear": Model(_linear, {"w": (16,)}, (16,)),
    "mlp, dropout": Model(_mlp, _MLP, classes=10),
    "mlp in bfloat16": Model(
        functools.partial(_mlp, dtype=jnp.bfloat16), _MLP, classes=10
    ),
    "mlp, remat": Model(_remat, _MLP, classes=10),
    "1000 classes": Model(_mlp, {**_MLP, "w": (24, 1000)}, classes=1000),
    "conv 8": Model(_convolved, _conv(8), classes=10),
    "conv 32": Model(_convolved, _conv(32), classes=10),
    "conv 8 in bfloat16": Model(
        functools.partial(_convolved, dtype=jnp.bfloat16), _conv(8), classes=10
    ),
    "conv 64": Model(_convolved, _conv(64), (5, 5, 4), classes=10, rows=3),
    "depthwise conv": Model(
        functools.partial(_convolved, groups=4), _conv(8, 4), classes=10
    ),
    "function called twice": Model(_called_twice, {"w": (9, 7)}, (9,)),
    "batch norm": Model(
        _batch_norm, {"u": (3, 3, 4, 8), "scale": (1, 8), "w": (8, 10)}, classes=10
    ),
    "attention": Model(_attention, _HEADS, (12, 8), 10),
    "lstm": Model(_lstm, _LSTM, (7, 4), 10),
    "embedding": Model(_embedded, {"table": (25, 8), "w": (8, 10)}, (9,), 10),
    "fft": Model(_fourier, {"u": (4, 8), "w": (8, 10)}, (16, 4), 10),
    "sort, top_k": Model(_sorted, {"u": (256, 24), "w": (28, 10)}, classes=10),
    "cholesky, qr": Model(_solved, {"u": (12, 12), "v": (12, 10)}, (12,), 10),
    "matrix 512": Model(_square, {"u": (512, 512), "v": (512, 512)}, (512,), rows=128),
    "matrix 1024": Model(
        _square, {"u": (1024, 1024), "v": (1024, 1024)}, (1024,), rows=512
    ),
}

_CLIP = optax.clip_by_global_norm(0.5)

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "clip, adam": optax.chain(_CLIP, optax.adam(1e-2)),
    "adamw, cosine": optax.adamw(optax.cosine_decay_schedule(1e-2, 100)),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-2),
    "MultiSteps": optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=3
    ).gradient_transformation(),
    "mechanize": optax.contrib.mechanize(optax.adam(1e-2)),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "prodigy": optax.contrib.prodigy(1.0),
    "dadapt": optax.contrib.dadapt_adamw(1.0),
    "ademamix": optax.contrib.ademamix(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2, cooldown=1)
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, 100)
    ),
}
