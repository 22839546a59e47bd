"""Steps and states to which the tests of bad input give something wrong."""

import functools

import numpy as np
import optax

import towerjax as tj

TWO = ("cpu:0", "cpu:1")
SGD = optax.sgd(0.01)
SUM = tj.Reduction.SUM
S = tj.Mirrored(TWO)


def on_one(towers, **options):
    return tj.Mirrored(TWO[:1], towers=towers, **options)


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)


def metric_fn(params, batch, tower):
    return {"loss": loss_fn(params, batch, tower)}


def good(rows=4):
    rng = np.random.default_rng(rows)
    return {"x": rng.normal(size=(rows, 3)).astype(np.float32)}


def start(**more):
    return {"w": np.array([1.0, 2.0, 3.0], np.float32), **more}


def build(fn=loss_fn, strategy=S, optimizer=SGD, **options):
    return tj.build_train_step(fn, optimizer, strategy, **options)


@functools.cache
def used():
    """A step that is compiled for `good`, and a state."""
    step = build()
    return step, step(step.init(start()), good())[0]


def check(fn=loss_fn, strategy=S, batch=None, **options):
    """A call of ``check`` of a train step."""
    batch = good() if batch is None else batch
    return lambda: build(fn, strategy, **options).check(start(), batch)


def loss(p):
    return tj.Weighted(p["w"].sum(), 1.0)


FOUR = tj.Mirrored(TWO, towers=4)


def evaluate(*args):
    return tj.build_eval_step(metric_fn, S)(*args)


def measure(batches):
    return lambda: tj.evaluate(tj.build_eval_step(metric_fn, S), start(), batches)
