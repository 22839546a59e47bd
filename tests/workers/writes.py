"""A run of several processes that stops early, keeps the best and writes it down."""

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


def written(me, folder):
    strategy = tj.Mirrored()
    step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy, remainder="pad")
    evaluate = tj.build_eval_step(metric_fn, strategy)
    seen = tj.TowerLocal(np.float32(0), tj.Reduction.SUM)
    init = lambda: step.init(np.float32(3), local={"seen": seen})  # noqa: E731
    told = kept(step, evaluate, init, folder)
    return told | {"differs": differing_patience(step, evaluate, init(), me)}


def kept(step, evaluate, init, folder):
    told = iter([5.0, 2.0, 4.0, 3.0, 1.0])
    noted = Noted()
    state = init()
    try:
        tj.run(step, state, [np.ones(6)], writers=[noted, Broken()], progress=False)
    except (OSError, ValueError) as error:
        refused = str(error)
    saving = tj.Checkpointer(folder / "saved", best="told", mode="min")
    _, history = tj.run(
        step,
        state,
        [np.arange(6, dtype=np.float32) + i for i in range(9)],
        evaluate=evaluate,
        eval_batches=lambda: [np.full(6, next(told), np.float32)],
        eval_every=1,
        early_stopping=tj.EarlyStopping("told", 2, "min"),
        checkpointer=saving,
        writers=[tj.JsonLines(folder / "run.jsonl"), noted],
        progress=False,
    )
    state = saving.restore(step, init(), number=saving.best_step)
    return {
        "refused": refused,
        "stopped": history.stopped,
        "loss": history.metrics["loss"].tolist(),
        "best": saving.best_step,
        "restored": [int(state.step), float(tj.towers.read_local(state.local)["seen"])],
        "noted": noted.records,
    }


def differing_patience(step, evaluate, state, me):
    data = [np.ones(4, np.float32)]
    early = tj.EarlyStopping("told", 1 + me, "min")
    options = {"evaluate": evaluate, "eval_batches": data, "eval_every": 1}
    try:
        tj.run(step, state, data, early_stopping=early, progress=False, **options)
    except ValueError as error:
        return str(error)
