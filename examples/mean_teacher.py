"""Train a student on few labels, with the moving mean of its parameters as teacher.

One row in ten has a label. On all rows the student learns to agree with the
teacher. The output is the teacher's accuracy on 200 rows that were held out, 0.92.

    python examples/mean_teacher.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

rng = np.random.default_rng(0)
# two half moons
angle = rng.uniform(0, np.pi, 1200)
label = rng.integers(0, 2, 1200)
x = np.stack([np.cos(angle) + label, np.sin(angle) * (1 - 2 * label) + label / 2], 1)
data = {
    "x": np.float32(x + 0.1 * rng.normal(size=x.shape)),
    "label": np.int32(label),
    "known": np.float32(np.arange(1200) % 10 == 0),  # one label in ten
}
held_out = {name: rows[:200] for name, rows in data.items()}
data = {name: rows[200:] for name, rows in data.items()}


def logits_of(params, x):
    return jnp.tanh(x @ params["in"] + params["bias"][None]) @ params["out"]


def loss_fn(params, batch, tower):
    # Student and teacher see the rows with different noise.
    noisy = batch["x"] + 0.1 * jax.random.normal(tower.rng, (2, *batch["x"].shape))
    taught = jax.nn.softmax(logits_of(tower.extra, noisy[1]))
    logits = logits_of(params, noisy[0])
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    apart = ((jax.nn.softmax(logits) - taught) ** 2).sum(axis=1)
    labelled = tj.Weighted.mean(entropy, tower.weight * batch["known"])
    return labelled + 3.0 * tj.Weighted.mean(apart, tower.weight)


def update_extra(state, merged):  # once a step; state.params are the new ones
    return optax.incremental_update(state.params, state.extra, 0.01)


def metric_fn(params, batch, tower):
    hits = logits_of(params, batch["x"]).argmax(axis=1) == batch["label"]
    return {"accuracy": tj.Weighted.mean(hits, tower.weight)}


strategy = tj.Mirrored(towers=4)
step = tj.build_train_step(
    loss_fn, optax.adam(0.01), strategy, update_extra=update_extra
)
params = {
    "in": rng.normal(size=(2, 16)).astype(np.float32),
    "bias": rng.normal(size=16).astype(np.float32),
    "out": np.zeros((16, 2), np.float32),
}
state, history = tj.run(
    step,
    step.init(params, extra=params),
    tj.batches(data, 200, epochs=40, seed=0),
    evaluate=tj.build_eval_step(metric_fn, strategy),
    eval_batches=lambda: tj.batches(held_out, 100),
    eval_params=lambda state: state.extra,
    progress=False,
)
print(f"of 100 labels: accuracy {history.final['accuracy']:.2f}")
