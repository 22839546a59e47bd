"""Training runs, each told as one JSON line: run alone, or by several processes.

python tests/workers/train.py '[{"devices": null}, {"placement": "MIRRORED"}]'
And the scenarios: '[{"scenarios": "the folder to write to"}]'
"""

import hashlib
import json
import os
import sys

import estimator
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scenarios

import towerjax as tj

EPOCHS = 3
PARTS = 3
# 101 = 4 * 24 + 5: a ragged end, which 8 towers share unevenly
ROWS = 101
BATCH = 24


def data():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 6)).astype(np.float32)
    y = np.tanh(x @ numbers.normal(size=(6, 3))).astype(np.float32)
    weight = numbers.uniform(0.05, 1, ROWS).astype(np.float32)
    return {"x": x, "y": y, "weight": weight, "id": np.arange(ROWS)}


def loss_fn(params, batch, tower):
    of_bfloat16 = batch["x"], params["w"], params["v"]
    x, w, v = (a.astype(jnp.bfloat16) for a in of_bfloat16)
    hidden = jnp.tanh(x @ w)
    # A draw compiles long.
    hidden += 0.1 * (jax.random.key_data(tower.rng)[0] / 2.0**32)
    errors = (hidden @ v).astype(jnp.float32) - batch["y"]
    losses = (errors**2).sum(-1)
    return tj.TowerOutput(
        loss=tj.Weighted.mean(losses, tower.weight * batch["weight"]),
        metrics={"mae": tj.Weighted.mean(abs(errors).sum(-1), tower.weight)},
        local={"seen": tower.local["seen"].at[batch["id"]].add(tower.weight)},
    )


def input_of(strategy):
    """Each process' part of the same examples in the same order."""

    def own_part(context):
        # Process p's rows of each global batch, of which the last is ragged.
        towers = context.num_towers
        here = towers // context.num_processes
        first = context.process_index * here
        for batch in tj.batches(data(), BATCH, epochs=EPOCHS):
            each = -(-BATCH // (towers * PARTS)) * PARTS
            rows = slice(first * each, (first + here) * each)
            yield jax.tree.map(lambda x, rows=rows: x[rows], batch)

    return strategy.distribute_dataset(own_part, micro_batches=PARTS)


def digest(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


def train(devices):
    ops = tj.PinnedTree()
    strategy = tj.Mirrored(devices, towers=8, tower_loop="scan", cross_tower_ops=ops)
    step = tj.build_train_step(
        loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        strategy,
        remainder="pad",
        micro_batches=PARTS,
    )
    numbers = np.random.default_rng(1 + jax.process_index())  # the first one's counts
    params = {"w": numbers.normal(size=(6, 8)), "v": numbers.normal(size=(8, 3))}
    params = jax.tree.map(np.float32, params)
    local = {"seen": tj.TowerLocal(np.zeros(ROWS, np.float32), tj.Reduction.SUM)}
    state = step.init(params, local=local, rng=jax.random.key(jax.process_index()))
    batches = input_of(strategy)
    # The model's run is audited.
    options = {"audit": False, "progress": False}
    state, history = tj.run(step, state, batches, **options)
    with_verbs = tj.tf1.with_verbs(strategy)
    return {
        "devices": strategy.placement.num_devices,
        "should_checkpoint": with_verbs.should_checkpoint,
        "between_graph": with_verbs.between_graph,
        "steps": int(state.step),
        "examples": history.summary.examples,
        "loss": history.metrics["loss"].tolist(),
        "params": np.asarray(state.params["w"]).ravel().tolist(),
        "seen": tj.towers.read_local(state.local)["seen"].tolist(),
        "bits": digest(
            (
                state.params,
                state.opt_state,
                jax.random.key_data(state.rng),
                *history.metrics.values(),
            )
        ),
    }


def told(given):
    if "scenarios" in given:
        return {"told": scenarios.told(given["scenarios"])}
    return estimator.train(given) if "placement" in given else train(given["devices"])


if __name__ == "__main__":
    tj.tf1.MirroredStrategy().configure()  # by what the launcher set, if it did
    for given in json.loads(sys.argv[1]):
        place = {"process": jax.process_index(), "processes": jax.process_count()}
        os.write(1, (json.dumps(place | told(given)) + "\n").encode())
