"""Losses, data and steps of the tests of a run."""

import functools
import io
import sys

import numpy as np
import optax

import towerjax as tj

batches = tj.batches
run = tj.run
LEARNING_RATE = 0.05


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    loss = tj.Weighted.mean(errors**2, tower.weight)
    return tj.TowerOutput(
        loss, {"bias": tj.Weighted.mean(errors, tower.weight), "step": tower.step}
    )


def metric_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    return {
        "mse": tj.Weighted.mean(errors**2, tower.weight * batch["weight"]),
        "column": tj.Weighted(
            tower.weight @ batch["x"], tower.weight.sum(keepdims=True)
        ),
    }


@functools.cache
def step_with(**options):
    """A step that several tests share."""
    return build_step(**options)


def build_step(**options):
    options = {"remainder": "pad", **options}
    optimizer = optax.sgd(LEARNING_RATE)
    return tj.build_train_step(loss_fn, optimizer, tj.Mirrored(), **options)


def train(data, *, step=None, state=None, **options):
    """A silent run of a shared step, from the first state on."""
    step = step or step_with()
    state = init(step) if state is None else state
    return run(step, state, data, **{"progress": False, "audit": False} | options)


def init(step):
    return step.init(W)


def make_data(num_examples, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num_examples, 3)).astype(np.float32),
        "y": rng.normal(size=num_examples).astype(np.float32),
    }


def cut_of(num_batches):
    """Batches of 16 examples."""
    return list(batches(make_data(16 * num_batches), 16))


def shown_on(monkeypatch):
    """What stands where errors go, from here on."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def eval_data(num_examples):
    data = make_data(num_examples, seed=1)
    weight = np.random.default_rng(2).uniform(0, 3, num_examples).astype(np.float32)
    return {**data, "weight": weight}


W = {"w": np.array([0.5, -1.0, 2.0], np.float32)}
