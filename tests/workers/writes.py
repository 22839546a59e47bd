"""A run of several processes that stops early, keeps the best and writes it down.

python tests/workers/writes.py FOLDER
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np
import optax

import towerjax as tj


def loss_fn(params, batch, tower):
    loss = tj.Weighted.mean((params - batch) ** 2, tower.weight)
    return tj.TowerOutput(
        loss, local={"seen": tower.local["seen"] + tower.weight.sum()}
    )


def metric_fn(params, batch, tower):
    return {"told": tj.Weighted.mean(batch, tower.weight)}


class Noted:
    """A writer that keeps what it is given, in memory."""

    def __init__(self):
        self.records = []

    def open(self, start):
        return self

    def write(self, record):
        self.records.append((record.kind, record.step))

    def close(self):
        self.records.append("closed")


class Broken:
    def open(self, start):
        raise OSError("read only")


def train(folder, keep, local):
    strategy = tj.Mirrored()
    step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy, remainder="pad")
    evaluate = tj.build_eval_step(metric_fn, strategy)
    state = step.init(np.float32(3), local=local)
    told, noted = iter([5.0, 2.0, 4.0, 3.0, 1.0]), Noted()
    options = {"evaluate": evaluate, "eval_every": 1, "progress": False}
    try:
        tj.run(step, state, [np.ones(6)], writers=[noted, Broken()], progress=False)
    except (OSError, ValueError) as error:
        refused = str(error)
    state, history = tj.run(
        step,
        state,
        [np.arange(6, dtype=np.float32) + i for i in range(9)],
        eval_batches=lambda: [np.full(6, next(told), np.float32)],
        early_stopping=tj.EarlyStopping("told", patience=2),
        best=tj.Best("told", keep=keep, restore=True),
        writers=[tj.JsonLines(folder / f"{keep}.jsonl"), noted],
        **options,
    )
    best = tj.towers.read_local(history.best.state.local) if keep == "devices" else None
    return {
        "refused": refused,
        "stopped": history.stopped,
        "loss": history.metrics["loss"].tolist(),
        "best": [history.best.step, history.best.value],
        "best_seen": best and float(best["seen"]),
        "host": isinstance(history.best.state.params, np.ndarray),
        "restored": [int(state.step), float(tj.towers.read_local(state.local)["seen"])],
        "noted": noted.records,
    }


def differing_patience(me):
    strategy = tj.Mirrored()
    step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy)
    state = step.init(np.float32(3), local={"seen": seen()})
    evaluate = tj.build_eval_step(metric_fn, strategy)
    data = [np.ones(4, np.float32)]
    early = tj.EarlyStopping("told", patience=1 + me)
    options = {"evaluate": evaluate, "eval_batches": data, "eval_every": 1}
    try:
        tj.run(step, state, data, early_stopping=early, progress=False, **options)
    except ValueError as error:
        return str(error)


def seen():
    return tj.TowerLocal(np.float32(0), tj.Reduction.SUM)


if __name__ == "__main__":
    tj.cluster.initialize()
    folder, me = pathlib.Path(sys.argv[1]), jax.process_index()
    told = {"process": me}
    for keep in ("devices", "host"):
        told[keep] = train(folder, keep, {"seen": seen()})
    told["differs"] = differing_patience(me)
    os.write(1, (json.dumps(told) + "\n").encode())
