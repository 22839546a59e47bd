"""Train with DP-SGD: each example's gradient is clipped, and noise is added once.

It trains on one device and on 8 towers. The output is the loss and the weights of each,
which are the same, because the noise is drawn from the state's key.

    python examples/private.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(2000, 3)).astype(np.float32)}
data["y"] = (data["x"] @ np.array([1, -2, 3], np.float32) > 0).astype(np.float32)
CLIP = 0.5
NOISE = 1.1
optimizer = optax.sgd(1.0, momentum=0.9)


def loss_of_one(params, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ params, y)


def tower_fn(state, batch, tower):
    of_each = jax.vmap(jax.value_and_grad(loss_of_one), (None, 0, 0))
    losses, grads = of_each(state.params, batch["x"], batch["y"])
    norms = jnp.linalg.norm(grads, axis=1)
    scale = tower.weight * jnp.minimum(1, CLIP / norms)  # padding counts 0
    return {
        "loss": tj.Weighted.mean(losses, tower.weight),
        "clipped": tj.Weighted(scale @ grads, jnp.sum(tower.weight)),
    }


def update_fn(state, merged):
    clipped = merged["clipped"]
    key = jax.random.fold_in(state.rng, state.step)
    noise = NOISE * CLIP * jax.random.normal(key, clipped.sum.shape)
    grads = (clipped.sum + noise) / clipped.weight
    return tj.apply_gradients(optimizer, state, grads), {"loss": merged["loss"]}


params = np.zeros(3, np.float32)  # for trees: optax.tree.norm, .random_like
for strategy in (tj.OneDevice(), tj.Mirrored(towers=8, tower_loop="scan")):
    step = tj.build_step(tower_fn, update_fn, strategy, micro_batches=2)
    state = step.init(params, opt_state=optimizer.init(params), rng=jax.random.key(1))
    batches = tj.batches(data, 400, epochs=4, seed=0)
    state, history = tj.run(step, state, batches, progress=False)
    w = [f"{x:.2f}" for x in np.asarray(state.params)]
    print(f"loss {history.metrics['loss'][-1]:.4f}, w", *w)
