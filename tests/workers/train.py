"""Training runs, each told as one JSON line: run alone, or by several processes.

python tests/workers/train.py '[{"input": "global"}, {"placement": "MIRRORED"}]'
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

ROWS, BATCH = 101, 24  # 101 = 4 * 24 + 5: a ragged end, which 8 towers share unevenly

CLIP = optax.clip_by_global_norm(1.0)
CODED = tj.collectives.Compressed(bits=4, above_bytes=128)  # w alone
OPTIMIZERS = {"adam": optax.chain(CLIP, optax.adam(1e-2)), "sgd": optax.sgd(0.02)}


def options_of(given):
    defaults = {"devices": None, "local": "scan", "input": "global"}
    defaults |= {"steps_per_call": 1, "micro_batches": 1}
    defaults |= {"epochs": 3, "optimizer": "adam", "dtype": "float32", "every": 0}
    defaults |= {"coded": False, "counted": False, "noisy": False}
    return defaults | given


def data():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 6)).astype(np.float32)
    y = np.tanh(x @ numbers.normal(size=(6, 3))).astype(np.float32)
    weight = numbers.uniform(0.05, 1, ROWS).astype(np.float32)
    return {"x": x, "y": y, "weight": weight, "id": np.arange(ROWS)}


def loss_of(dtype, noisy, alone):
    def loss_fn(params, batch, tower):
        x, w, v = (a.astype(dtype) for a in (batch["x"], params["w"], params["v"]))
        hidden = jnp.tanh(x @ w)
        if noisy:  # a draw compiles long
            hidden += 0.1 * (jax.random.key_data(tower.rng)[0] / 2.0**32)
        errors = (hidden @ v).astype(jnp.float32) - batch["y"]
        losses = (errors**2).sum(-1)
        return tj.TowerOutput(
            loss=tj.Weighted.mean(losses, tower.weight * batch["weight"]),
            metrics={}
            if alone
            else {"mae": tj.Weighted.mean(abs(errors).sum(-1), tower.weight)},
            local={"seen": tower.local["seen"] + tower.weight.sum()},
        )

    return loss_fn


def input_of(kind, strategy, micro_batches, epochs):
    """The same examples in the same order, fed in different ways."""

    def own_part(context):
        # Process p's rows of each global batch, of which the last is ragged.
        towers, here = context.num_towers, context.towers_here
        first = context.process_index * here
        for batch in tj.batches(data(), BATCH, epochs=epochs):
            each = -(-BATCH // (towers * micro_batches)) * micro_batches
            rows = slice(first * each, (first + here) * each)
            yield jax.tree.map(lambda x, rows=rows: x[rows], batch)

    if kind == "raw":
        return tj.batches(data(), BATCH, epochs=epochs)
    if kind == "own":
        return strategy.distribute_dataset(own_part, micro_batches=micro_batches)
    batches = tj.batches(data(), BATCH, epochs=epochs)
    return strategy.distribute_dataset(batches, micro_batches=micro_batches)


def digest(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


def counted(state, epochs):
    ids, weights = data()["id"], data()["weight"]
    return tj.metrics.check_examples(state, ids, weights=weights, epochs=epochs)


def train(options):
    strategy = tj.Mirrored(
        options["devices"],
        towers=8,
        local=options["local"],
        cross_tower_ops=CODED if options["coded"] else tj.PinnedTree(),
    )
    parts, alone = options["micro_batches"], options["every"]
    counts = {"example_ids": lambda batch: (batch["id"], batch["weight"])}
    counts = counts if options["counted"] else {}
    step = tj.build_train_step(
        loss_of(options["dtype"], options["noisy"], alone),
        OPTIMIZERS[options["optimizer"]],
        strategy,
        remainder="pad",
        micro_batches=parts,
        statistics=tj.TowerStatistics() if options["coded"] else None,
        sync=tj.sync.DiLoCo(alone, fragments=2) if alone else tj.sync.EveryStep(),
        **counts,
    )
    numbers = np.random.default_rng(1 + jax.process_index())  # the first one's counts
    params = {"w": numbers.normal(size=(6, 8)), "v": numbers.normal(size=(8, 3))}
    params = jax.tree.map(np.float32, params)
    local = {"seen": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}
    state = step.init(params, local=local, rng=jax.random.key(jax.process_index()))
    batches = input_of(options["input"], strategy, parts, options["epochs"])
    calls = options["steps_per_call"]
    state, history = tj.run(step, state, batches, steps_per_call=calls, progress=False)
    return {
        "devices": strategy.placement.num_devices,
        "should_checkpoint": strategy.should_checkpoint,
        "between_graph": strategy.between_graph,
        "steps": int(state.step),
        "examples": history.summary.examples,
        "counted": options["counted"] and str(counted(state, options["epochs"])),
        "loss": np.nan_to_num(history.metrics["loss"]).tolist(),
        "mae": [] if alone else history.metrics["mae"].tolist(),
        "told": {
            name: float(np.mean(x))
            for name, x in history.metrics.items()
            if "/" in name
        },
        "params": np.asarray(state.params["w"]).ravel().tolist(),
        "seen": float(tj.towers.read_local(state.local)["seen"]),
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
    return estimator.train(given) if "placement" in given else train(options_of(given))


if __name__ == "__main__":
    tj.Mirrored().configure()  # by what the launcher set, if it did
    for given in json.loads(sys.argv[1]):
        place = {"process": jax.process_index(), "processes": jax.process_count()}
        os.write(1, (json.dumps(place | told(given)) + "\n").encode())
