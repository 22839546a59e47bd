"""Runs of a recoverable job: some are refused, one reads Grain's elastic batches.

python tests/workers/recoverable.py FOLDER CASE

``refused`` writes the errors of process 0. In ``elastic`` process 1 of three kills
itself after step 7; process 0 writes its losses, and the contexts of its function. In
``sharded`` process 2 kills itself after step 10. In ``told_to_end`` it gets SIGTERM
after step 5, and process 0 writes which steps a run does that ends. In ``fails`` a hook
of process 1 raises.
"""

import json
import os
import pathlib
import signal
import sys

import grain.python as grain
import numpy as np
import optax
from grain.experimental import ElasticIterator

import towerjax as tj

TOWERS = 6
STEPS = 12


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)


def strategy(**options):
    ops = tj.PinnedTree()
    return tj.Mirrored(towers=TOWERS, tower_loop="scan", cross_tower_ops=ops, **options)


def started(**options):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy(**options))
    return step, step.init(np.ones(256, np.float32))


def error_of(step, state, batches, **options):
    try:
        tj.run(step, state, batches, steps=1, progress=False, **options)
    except ValueError as error:
        return str(error)


def refused(folder, me):
    rows = np.zeros((TOWERS, 256), np.float32)
    step, state = started()
    own = step.strategy.distribute_dataset(lambda context: [rows[: len(rows) // 3]])

    class Evaluation:
        def place_batch(self, batch):
            return batch

        def __call__(self, state, batch):
            return {}

    errors = [
        error_of(step, state, (rows for _ in range(9))),
        error_of(step, state, own),
        error_of(*started(state="sharded"), [rows]),
        error_of(step, state, [rows], evaluate=Evaluation(), eval_batches=[rows]),
    ]
    if me == 0:
        (folder / "told").write_text(json.dumps(errors))


def elastic(folder, me):
    numbers = grain.MapDataset.source(range(96)).shuffle(seed=0)
    contexts = []

    def make(context):
        contexts.append([context.process_index, context.num_processes])
        shard = grain.ShardOptions(context.process_index, context.num_processes)
        rows = numbers.map(lambda x: np.full(256, x, np.float32))
        return ElasticIterator(rows.repeat(), 2 * TOWERS, shard)

    def note(number, metrics):
        if (number, me) == (7, 1) and folder.name == "killed":
            os.kill(os.getpid(), 9)

    step, state = started()
    batches = step.strategy.distribute_dataset(make)
    options = {"steps": STEPS, "hooks": [note], "copy_every": 3, "progress": False}
    state, history = tj.run(step, state, batches, **options)
    if me == 0:
        loss = history.metrics["loss"].tolist()
        told = {"loss": loss, "params": np.asarray(state.params).tolist()}
        (folder / "told").write_text(json.dumps(told | {"contexts": contexts}))


def sharded(folder, me):
    def note(number, metrics):
        if (number, me) == (10, 2) and folder.name == "killed":
            os.kill(os.getpid(), 9)

    step, state = started(state="sharded")
    rows = np.random.default_rng(0).normal(size=(96, 256)).astype(np.float32)
    batches = tj.batches(rows, 2 * TOWERS, epochs=2, seed=0)
    saving = tj.Checkpointer(folder / "saved", every=4)
    log = tj.JsonLines(folder / "run.jsonl")
    options = {"checkpointer": saving, "writers": [log], "hooks": [note]}
    state, history = tj.run(step, state, batches, **options, progress=False)
    params = np.asarray(tj.towers.saved_values(state.params)).tolist()
    if me == 0:
        told = {"loss": history.metrics["loss"].tolist(), "params": params}
        (folder / "told").write_text(json.dumps(told))


def told_to_end(folder, me):
    def note(number, metrics):
        if me == 2 and number == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    step, state = started()
    batches = tj.batches(np.ones((96, 256), np.float32), 2 * TOWERS, epochs=None)
    saving = tj.Checkpointer(folder / "saved")
    options = {"checkpointer": saving, "hooks": [note], "progress": False}
    _, history = tj.run(step, state, batches, steps=2000, **options)
    if me == 0:
        (folder / "told").write_text(json.dumps(history.steps.tolist()))


def fails(folder, me):
    def note(number, metrics):
        if (number, me) == (5, 1):
            raise ValueError("the loss is a fish")

    step, state = started()
    rows = np.ones((TOWERS, 256), np.float32)
    tj.run(step, state, [rows] * 50, hooks=[note], progress=False)


if __name__ == "__main__":
    me = tj.cluster.initialize(collective_timeout_s=10).process_id
    case = globals()[sys.argv[2]]
    case(pathlib.Path(sys.argv[1]), me)
