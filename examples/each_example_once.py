"""Count in the state how often a run trained on each example.

The output is True for data whose 50 ids all occur: each was seen in each of 3 epochs.
For data in which one id is missing and another occurs twice, both are named.

    python examples/each_example_once.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

N = 50
x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
data = {"x": x, "id": np.arange(N)}


def loss_fn(params, batch, tower):
    losses = ((params - batch["x"]) ** 2).sum(-1)
    is_example = (tower.weight > 0).astype(jnp.float32)
    counts = jnp.zeros(N).at[batch["id"]].add(is_example)
    return tj.TowerOutput(tj.Weighted.mean(losses, tower.weight), extra=tj.Sum(counts))


step = tj.build_train_step(
    loss_fn,
    optax.sgd(0.1),
    tj.Mirrored(towers=8),
    remainder="pad",
    update_extra=lambda state, merged: state.extra + merged.value,
)


def counts_of(ids):
    state = step.init(np.zeros(3, np.float32), extra=np.zeros(N, np.float32))
    batches = tj.batches({**data, "id": ids}, 16, epochs=3, seed=0)
    return np.asarray(tj.run(step, state, batches, progress=False)[0].extra)


print((counts_of(data["id"]) == 3).all())

wrong = np.where(data["id"] == 49, 4, data["id"])  # 49 is missing, 4 there twice
counts = counts_of(wrong)
for i in np.flatnonzero(counts != 3):
    print(f"example {i} was seen {counts[i]:.0f} times, not 3")
