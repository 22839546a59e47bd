"""A run seen from outside: traces of its steps, and the terminal it leaves."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored

import towerjax as tj


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)


def run(data=6, **options):
    step = tj.build_train_step(loss_fn, optax.sgd(0.25), mirrored(2))
    data = [np.full(8, 2.0, np.float32)] * data
    options = {"progress": False, "audit": False} | options
    return tj.run(step, step.init(jnp.float32(0)), data, **options)


def traced(folder):
    """The numbers of the steps in the one trace of a folder."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    with warnings.catch_warnings(action="ignore"):  # its classes have no module
        data = jax.profiler.ProfileData.from_file(str(path))
        events = [
            e for plane in data.planes for line in plane.lines for e in line.events
        ]
        stats = [dict(event.stats) for event in events if event.name == "train"]
    return sorted(int(each["step_num"]) for each in stats)


@pytest.mark.slow
def test_every_step_is_named_in_a_trace(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        run()
    assert traced(tmp_path) == [1, 2, 3, 4, 5, 6]
