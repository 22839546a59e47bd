"""Steps, batches and losses that the tests of audits share."""

import numpy as np
import optax
import pytest
from audited_losses import BATCH as ROWS
from audited_losses import PARAMS as MODEL

import towerjax as tj
from towerjax.check.audit.audit import run_audit
from towerjax.testing import SplitError

SUM = tj.Reduction.SUM
MEAN = tj.Reduction.MEAN
FIRST = tj.Reduction.ONLY_FIRST_TOWER
DRAW = np.random.default_rng(5)
BATCH = {
    "x": DRAW.normal(size=(14, 3)).astype(np.float32) + 0.3,
    "y": DRAW.normal(size=14).astype(np.float32),
    "weight": DRAW.uniform(0.2, 3, size=14).astype(np.float32),
}
PARAMS = {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.25)}


def predictions(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def losses(params, batch):
    return (predictions(params, batch) - batch["y"]) ** 2


def refused(call, *args, text=None, **options):
    """The error, and what it found by leaf."""
    call = getattr(call, "audit", call)  # of a step, whatever is proved of it
    with pytest.raises(SplitError, match=text) as error:
        call(*args, **options)
    return error.value, {finding.leaf: finding for finding in error.value.findings}


def mean_loss(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight)


def train_step(loss_fn, strategy=tj.Mirrored(towers=4), **options):  # noqa: B008
    options = {"remainder": "error", "audit": True} | options
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def loss_alone(loss_fn, batch=ROWS, params=MODEL, leaves=None, **options):
    """The audit that a first call makes, of leaves that are not proved."""
    step = train_step(loss_fn, **options)
    pads = step.options.remainder == "pad"
    given = step.plan, step.strategy, step.init(params), batch
    how = {"calls": 4, "pads": pads, "gradients": False, "leaves": leaves}
    return run_audit(*given, **how)
