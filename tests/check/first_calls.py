"""Steps whose first call the tests of proofs and audits look at."""

import functools

import jax.numpy as jnp
import optax
from audited_losses import BATCH, PARAMS, errors

import towerjax as tj

FOUR = tj.Mirrored(("cpu:0",), towers=4)


@functools.cache
def report():
    return step_of().audit(step_of().init(PARAMS), BATCH)


def one_of(x):
    """It is 1, which no proof makes use of."""
    return jnp.sin(x.sum()) ** 2 + jnp.cos(x.sum()) ** 2


def not_proved(params, batch, tower):
    own = errors(params, batch)
    return tj.Weighted.mean(one_of(own) * own, tower.weight)


def step_of(loss_fn=not_proved, strategy=FOUR, **options):
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    return tj.build_train_step(loss_fn, optimizer, strategy, **options)


def train(step, batch=BATCH, steps=1):
    state = step.init(PARAMS)
    for _ in range(steps):
        state, _ = step(state, batch)
    return state


def scaled(factor):
    def loss_fn(params, batch, tower):
        own = errors(params, batch)
        return tj.Weighted.mean(factor * one_of(own) * own, tower.weight)

    return loss_fn


def evaluation(wrong, **options):
    def metric_fn(params, batch, tower):
        own = errors(params, batch)
        weight = 1.0 if wrong else tower.weight.sum()
        return {"error": tj.Weighted(own @ tower.weight, weight)}

    return tj.build_eval_step(metric_fn, FOUR, **options)
