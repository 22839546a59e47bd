"""Minimise a loss over all towers with L-BFGS and its line search.

The line search calls the step's function as often as it needs. The output is the loss
after 12 iterations, and whether the gradient is 0 there.

    python examples/lbfgs.py
"""

import dataclasses

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(200, 5)).astype(np.float32)}
batch["y"] = (batch["x"].sum(axis=1) + rng.normal(size=200) > 0).astype(np.float32)


def loss_fn(params, batch, tower):
    losses = optax.sigmoid_binary_cross_entropy(batch["x"] @ params, batch["y"])
    penalty = tj.penalty(0.01 * (params**2).sum())
    return tj.Weighted.mean(losses, tower.weight) + penalty


step = tj.build_train_step(loss_fn, optax.sgd(0.0), tj.Mirrored(), donate=False)
start = step.init(np.zeros(5, np.float32))
lbfgs = optax.lbfgs()
step.audit(start, batch)  # of step.fn in a program of yours, it is asked for


def value_fn(params):
    return step.fn(dataclasses.replace(start, params=params), batch)[1]["loss"]


def update(carry, _):
    params, opt_state = carry
    value, grads = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
    updates, opt_state = lbfgs.update(
        grads, opt_state, params, value=value, grad=grads, value_fn=value_fn
    )
    carry = optax.apply_updates(params, updates), opt_state
    return carry, (value, optax.tree.norm(grads))


@jax.jit
def minimized(params):
    return jax.lax.scan(update, (params, lbfgs.init(params)), length=12)


_, (values, norms) = minimized(start.params)
print(f"loss {values[-1]:.4f}, the gradient is 0: {norms[-1] < 1e-4}")
