"""Fixtures of this room."""

import shutil

import checkpoint_model as model
import pytest
from runs import metric_fn, step_with
from saved_runs import bits_of_run, train

import towerjax as tj


@pytest.fixture(scope="module")
def train_step():
    return step_with()


@pytest.fixture(scope="module")
def eval_step():
    return tj.build_eval_step(metric_fn, tj.Mirrored(), max_programs=4)


@pytest.fixture(scope="module")
def step():
    return model.build(2)


@pytest.fixture(scope="module")
def light():
    """A step that compiles in a moment."""
    return model.build_light()


@pytest.fixture(scope="module")
def light_bits(light):
    return bits_of_run(light)[0]


@pytest.fixture(scope="module")
def three(step, tmp_path_factory):
    """A folder with checkpoints of the steps 2, 3 and 4; no test changes it."""
    path = tmp_path_factory.mktemp("three")
    train(step, tj.Checkpointer(path, every=1), steps=4)
    return path


@pytest.fixture
def copied(three, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(three, tmp_path / "copied")
