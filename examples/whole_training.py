"""A whole training: from the first step to the file that a server loads.

A Flax NNX network with dropout learns scikit-learn's digits on 8 towers. Stop it at
any time, also by ``kill -9``, and start it again: it goes on to the same bits.

    python examples/whole_training.py
"""

import json
import pathlib
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

FOLDER = pathlib.Path("runs/whole")  # all that this program writes
STEPS = 1000


class Network(nnx.Module):
    """Two dense layers with dropout: ``[b, 64]`` -> ``[b, 10]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Make the layers with their arrays."""
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        return self.logits(self.dropout(nnx.relu(self.hidden(x))))


graph, params, streams = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)


def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
    network = nnx.merge(graph, params, streams, copy=True)
    nnx.reseed(network, default=tower.rng)  # each tower and step has its own draws
    logits = network(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return tj.Weighted.mean(losses, tower.weight)


def predict(params: Any, image: jax.Array) -> jax.Array:
    network = nnx.merge(graph, params, streams, copy=True)
    network.eval()  # without dropout
    return network(image)


def metric_fn(params: Any, batch: Any, tower: tj.Tower) -> dict[str, tj.Weighted]:
    logits = predict(params, batch["image"])
    label = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return {
        "loss": tj.Weighted.mean(losses, tower.weight),
        "accuracy": tj.Weighted.mean(logits.argmax(-1) == label, tower.weight),
    }


def is_decayed(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)  # matrices, no biases


image, label = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(label))
image = (image[order] / 16).astype(np.float32)
label = label[order].astype(np.int32)
train, validation, test = [
    {"image": image[rows], "label": label[rows]}
    for rows in (slice(1200), slice(1200, 1440), slice(1440, None))
]

# Clip, then AdamW with 50 steps of warm-up and a cosine; average the parameters.
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 50, STEPS)
adamw = optax.inject_hyperparams(optax.adamw, static_args="mask")
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    adamw(schedule, weight_decay=0.01, mask=is_decayed),
)
strategy = tj.Mirrored(towers=8)
log = ("learning_rate", "gradient_norm")
step = tj.contrib.train_step(
    loss_fn, optimizer, strategy, ema=0.98, log=log, remainder="pad"
)
evaluate = tj.build_eval_step(metric_fn, strategy)

saving = tj.Checkpointer(FOLDER / "checkpoints", every=100, best="accuracy")
state, history = tj.run(
    step,
    step.init(params),
    tj.batches(train, 96, epochs=None, seed=0),
    steps=STEPS,
    evaluate=evaluate,
    eval_batches=lambda: tj.batches(validation, 96),
    eval_every=25,
    eval_params=tj.contrib.ema_params,
    early_stopping=tj.EarlyStopping("loss", patience=4),
    checkpointer=saving,  # whose folder a run that starts again continues from
    writers=[tj.TensorBoard(FOLDER / "logs"), tj.JsonLines(FOLDER / "log.jsonl")],
)
print(f"{len(history.steps)} steps here, {int(state.step)} in all")
print("it ended:", history.stopped)

# The average of the best evaluation is tested once, and saved for a server.
state = saving.restore(step, state, number=saving.best_step)
best = tj.contrib.ema_params(state)
accuracy = tj.evaluate(evaluate, best, tj.batches(test, 96))["accuracy"]
print(f"test accuracy {accuracy:.4f} ({accuracy * 357:.0f} of 357)")

best = jax.device_get(best)  # plain arrays, of no device
rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 64"), np.float32)
served = jax.export.export(jax.jit(lambda x: predict(best, x)))(rows)
(FOLDER / "served.bin").write_bytes(served.serialize())

# The file of lines has all steps, also those before a restart.
text = (FOLDER / "log.jsonl").read_text()
lines = [json.loads(line) for line in text.splitlines()]
figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
names = ("loss", "accuracy", "learning_rate")
for name, panel in zip(names, panels, strict=True):
    for kind in ("train", "eval"):
        of_kind = [x for x in lines if x["kind"] == kind and name in x["metrics"]]
        values = [x["metrics"][name] for x in of_kind]
        panel.plot([x["step"] for x in of_kind], values, label=kind)
    panel.set(xlabel="step", ylabel=name)
    panel.legend()
figure.savefig(FOLDER / "curves.png")
