"""Two steps of one state: two updates of a critic for one update of an actor.

As in TD3 or a WGAN. Each step trains one part of the parameters, and keeps the other.

    python examples/two_updates.py
"""

from typing import Any

import jax
import numpy as np
import optax

import towerjax as tj

TARGET = np.array([1, 2, 3], np.float32)  # what is to be done, which nobody knows
optimizer = optax.sgd(0.1)
strategy = tj.Mirrored(towers=4)


def critic_loss(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
    # How well is an action paid that is near the actor's?
    x = batch["x"]
    action = x @ params["actor"] + jax.random.normal(tower.rng, x.shape[:1])
    off = action - x @ params["critic"]
    paid = -((action - x @ TARGET) ** 2)
    return tj.Weighted.mean(abs(-(off**2) - paid), tower.weight)


def actor_loss(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
    off = batch["x"] @ (params["actor"] - params["critic"])
    return tj.Weighted.mean(off**2, tower.weight)


def step_of(name: str, loss_fn: Any) -> Any:
    """Train one of the two, in a state that has both."""

    def update_fn(state: Any, merged: Any) -> Any:
        grads = merged["grads"].value[name]
        updates, kept = optimizer.update(grads, state.opt_state[name])
        own = optax.apply_updates(state.params[name], updates)
        opt_state = {**state.opt_state, name: kept}
        after = state.replace(params={**state.params, name: own}, opt_state=opt_state)
        return after, {"loss": merged["loss"]}

    trainable = {"actor": name == "actor", "critic": name == "critic"}
    return tj.build_step(tj.of_loss(loss_fn, trainable=trainable), update_fn, strategy)


critic = step_of("critic", critic_loss)
actor = step_of("actor", actor_loss)
params = {name: np.zeros(3, np.float32) for name in ("actor", "critic")}
opt_state = {name: optimizer.init(own) for name, own in params.items()}
state = critic.init(params, opt_state=opt_state)
x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
for batch in tj.batches({"x": x}, 16, epochs=100, seed=0):
    for _ in range(2):
        state, _ = critic(state, batch)
    state, metrics = actor(state, batch)
print(int(state.step), np.asarray(state.params["actor"]).round(1))
