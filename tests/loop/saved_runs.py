"""Runs that are saved, stopped and gone on with."""

import checkpoint_model as model
import numpy as np

import towerjax as tj


class Stop(Exception):
    pass


def stopping_at(number, error=Stop):
    def hook(at, _):
        if at == number:
            raise error

    return hook


def train(step, checkpointer, steps=model.STEPS, batches=None, state=None, **options):
    return tj.run(
        step,
        model.init(step) if state is None else state,
        model.batches() if batches is None else batches,
        steps=steps,
        checkpointer=checkpointer,
        progress=False,
        audit=False,  # the variables of the model are of each tower
        **options,
    )


def bits_of_run(step, steps=model.STEPS, **options):
    """The bits of a run that nothing happened to, and its losses."""
    state, history = train(step, None, steps, **options)
    return model.bits(state), history.metrics["loss"]


def metrics_of(values, eval_every=1):
    """An evaluation whose loss is the next one of the values."""
    left = iter(values)

    def metrics(state):
        return {"loss": tj.Weighted(np.float32(next(left)), np.float32(1))}

    options = {"eval_batches": [0], "eval_every": eval_every}
    return {"evaluate": model.Evaluation(metrics), **options}
