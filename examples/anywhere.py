"""One program, the same bits wherever it runs: 8 towers on any devices and processes.

    JAX_NUM_CPU_DEVICES=1 python examples/anywhere.py
    JAX_NUM_CPU_DEVICES=8 python examples/anywhere.py
    towerjax launch --processes 2 --devices-per-process 4 -- python examples/anywhere.py

Each command prints the same last line: steps, loss, accuracy and a digest of all bits.
"""

import hashlib

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import towerjax as tj


def loss_fn(params, batch, tower):
    hidden = jax.nn.relu(batch["image"] @ params["in"])
    hidden *= jax.random.bernoulli(tower.rng, 0.8, hidden.shape)  # each tower its own
    logits = hidden @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return tj.Weighted.mean(losses, tower.weight)


def count_hits(params, batch, tower):
    logits = jax.nn.relu(0.8 * batch["image"] @ params["in"]) @ params["out"]
    hits = logits.argmax(-1) == batch["label"]
    return {"accuracy": tj.Weighted.mean(hits, tower.weight)}


def main() -> None:
    job = tj.cluster.initialize()  # one process, unless a launcher says more
    image, label = load_digits(return_X_y=True)
    data = {
        "image": np.asarray(image, np.float32) / 16,
        "label": np.asarray(label, np.int32),
    }
    strategy = tj.Mirrored(towers=8, tower_loop="scan", cross_tower_ops=tj.PinnedTree())
    step = tj.build_train_step(loss_fn, optax.adam(3e-3), strategy, remainder="pad")
    numbers = np.random.default_rng(0)
    params = {"in": numbers.normal(size=(64, 64)), "out": numbers.normal(size=(64, 10))}
    state = step.init(jax.tree.map(lambda w: np.float32(w / 8), params))
    batches = strategy.distribute_dataset(tj.batches(data, 100, epochs=5, seed=0))
    state, history = tj.run(step, state, batches, progress=False)

    evaluate = tj.build_eval_step(count_hits, strategy)
    accuracy = tj.evaluate(evaluate, state, lambda: tj.batches(data, 500))
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]
    digest = hashlib.sha256(b"".join(leaves)).hexdigest()
    if tj.cluster.is_chief():  # one process prints
        print(f"{job.num_processes} processes. {history.summary}")
        loss = history.metrics["loss"][-1]
        print(
            f"{int(state.step)} steps of 8 towers, loss {loss:.4f},"
            f" accuracy {accuracy['accuracy']:.4f}, bits {digest[:16]}"
        )


if __name__ == "__main__":
    main()
