"""Train on a contrastive loss of the whole batch, in micro-batches.

A first pass embeds all rows and gathers them. A second pass differentiates the loss of
all rows by each micro-batch's own rows (Gao et al., 2021). The output is the loss on 8
towers and whether the gradients equal those of one batch, and the loss of one batch.

    python examples/gradcache.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)


def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)


batch = {"image": draw(45, 6), "text": draw(45, 5), "row": np.arange(45)}
encoders = {"image": draw(6, 4), "text": draw(5, 4)}
params = {"encoders": encoders, "scale": np.float32(0.3)}


def embedded(encoders, batch):
    return {name: jnp.tanh(batch[name] @ encoders[name]) for name in encoders}


def contrast(rows, weight, scale):  # all rows, some are padding
    logits = jnp.exp(scale) * rows["image"] @ rows["text"].T
    every = jnp.where(weight > 0, jnp.stack([logits, logits.T]), -jnp.inf)
    losses = jax.nn.logsumexp(every, axis=2) - jnp.diag(logits)
    return (losses * weight / 2).sum() / weight.sum()


def embed(state, batch, tower):
    rows = embedded(state.params["encoders"], batch)
    return tj.Rows({"rows": rows, "row": batch["row"], "weight": tower.weight})


def differentiate(state, batch, tower, merged):
    rows = merged.value["rows"]
    weight = merged.value["weight"]
    same = merged.value["row"][None] == batch["row"][:, None]
    where = jnp.argmax(same & (weight > 0)[None], axis=1)  # own rows among all
    where = jnp.where(tower.weight > 0, where, len(weight))  # padding: out

    def loss_of(params):
        own = embedded(params["encoders"], batch)
        every = jax.tree.map(lambda all, x: all.at[where].set(x), rows, own)
        return contrast(every, weight, params["scale"])

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    count = jnp.sum(tower.weight)
    return {
        # Each micro-batch has the whole loss, so their mean is the loss.
        "loss": tj.Weighted(count * loss, count),
        "scale": tj.Weighted(count * grads["scale"], count),
        # Of the encoders' gradient it has the part through its own rows.
        "encoders": tj.Sum(grads["encoders"]),
    }


def update_fn(state, merged):
    grads = {name: merged[name].value for name in state.params}
    params = optax.apply_updates(state.params, optax.tree.scale(-1.0, grads))
    return dataclasses.replace(state, params=params), {"loss": merged["loss"]}


def of_one_batch(params):
    rows = embedded(params["encoders"], batch)
    return contrast(rows, np.ones(45, np.float32), params["scale"])


loss, gradient = jax.jit(jax.value_and_grad(of_one_batch))(params)
strategy = tj.Mirrored(towers=8, tower_loop="scan")
how = {"micro_batches": 3, "remainder": "pad"}
how |= {"audit": False}  # it is compared with one batch below
step = tj.build_step((embed, differentiate), update_fn, strategy, **how)
state, metrics = step(step.init(params), batch)
moved = jax.tree.map(lambda old, new: old - np.asarray(new), params, state.params)
near = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), moved, gradient)
print(f"8 towers: loss {metrics['loss']:.4f}, gradients equal {jax.tree.leaves(near)}")
print(f"one batch: loss {loss:.4f}")
