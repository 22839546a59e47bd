"""What the original promises of split batches and of values from a file, in numbers."""

import itertools
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from conformance_table import Table, assert_equal, mirrored

import towerjax as tj

WITHOUT_MEANING = {
    "combine.product": "a helper of the original's own tests; here"
    " pytest.mark.parametrize makes products of options"
}
TABLE = Table("combine init_from_checkpoint rmf.split warm_start", WITHOUT_MEANING)
R = tj.Reduction


def towers_of(case):
    n = case["input"]["n"]
    return n if isinstance(n, int) else max(n)  # a list: each of its numbers


# Batches are split over towers.


def as_arrays(tree):
    """Each list of numbers is one array, ``[B]`` float32."""
    return jax.tree.map(np.float32, tree, is_leaf=lambda x: isinstance(x, list))


def shards_of(strategy, tree):
    """What each tower is given of a batch: a list of trees, ``[b]`` a leaf."""
    dataset = strategy.distribute_dataset([as_arrays(tree)], remainder="error")
    (batch,) = dataset.per_tower()
    return [strategy.select_tower(batch, t) for t in range(strategy.num_towers)]


def assert_shards(actual, case, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, map(as_arrays, expected), strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert x.shape == y.shape
            assert_equal(x, case, y)


@TABLE.checks("rmf.split.one", "rmf.split.half", "rmf.split.dict")
def check_split(case, strategy):
    given = case["input"]
    expected = case["expected"]
    shards = shards_of(strategy, (given["features"], given["labels"]))
    assert_shards([x for x, _ in shards], case, expected["feature_shards"])
    assert_shards([y for _, y in shards], case, expected["label_shards"])


@TABLE.checks("rmf.split.dict_dict")
def check_split_of_unlike_sizes(case, strategy):
    given = case["input"]
    expected = case["expected"]
    for name in ("feature", "label"):
        shards = shards_of(strategy, given[name + "s"])
        assert_shards(shards, case, expected[name + "_shards"])
    # In one batch a row of each leaf is one example, so that there they must agree.
    both = {"features": given["features"], "labels": given["labels"]}
    with pytest.raises(ValueError, match="same number of examples") as error:
        shards_of(strategy, both)
    sizes = re.findall(r"\['(\w+)'\]\['first'\]: (\d)", str(error.value))
    assert sizes == [("features", "4"), ("labels", "2")]


# Variables start from what a file holds.


def from_a_file(variables):
    """Plain arrays by name, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "saved.npz"
        np.savez(file, **jax.tree.map(np.asarray, tj.towers.saved_values(variables)))
        with np.load(file) as loaded:
            return dict(loaded)


@TABLE.checks("warm_start")
def check_warm_start(case, strategy):
    weights = np.float32(case["expected"])
    for n in case["input"]["n"]:
        strategy = mirrored(n, len(strategy.worker_devices) == 1)
        alone = tj.tf1.OneDeviceStrategy("cpu:7")
        for saver, starter in itertools.product((alone, strategy), repeat=2):
            saved = from_a_file({"v": saver.create_var("v", weights)})
            like = {"v": starter.create_var("v", np.zeros_like(weights))}
            started = tj.towers.restored_values(starter, like, saved)["v"]
            assert_equal(starter.read_var(started), case)
            copies = started.value.addressable_shards
            assert len(copies) == len(starter.worker_devices)
            for copy in copies:
                assert_equal(copy.data, case)
            assert not like["v"].value.any()  # a new variable; the old one stays


def in_a_tower(tower, v1, v2, saved):
    """Both variables set from the file where a tower runs."""
    v1 = tower.merge_call(lambda strategy, v: strategy.assign(v, saved["v1"]), v1)
    return v1, tower.assign(v2, saved["v2"])


@TABLE.checks("init_from_checkpoint")
def check_init_from_checkpoint(case, strategy):
    first = np.arange(10, dtype=np.float32).reshape(1, 10) ** 1.5
    second = np.float32(np.random.default_rng(0).normal(size=(10, 10)))
    alone = tj.tf1.OneDeviceStrategy("cpu:7")
    saved = from_a_file({"v1": alone.create_var("v1", first), "v2": second[:, ::-1]})
    for n in case["input"]["n"]:
        strategy = mirrored(n, len(strategy.worker_devices) == 1)
        v1 = strategy.create_var("v1", np.zeros((1, 10), np.float32))
        v2 = strategy.create_var(
            "v2", np.ones((10, 10), np.float32), reduction=R.MEAN, tower_local=True
        )
        restored = tj.towers.restored_values(strategy, {"v1": v1, "v2": v2}, saved)
        ways = [tuple(restored.values())]
        ways += [(strategy.assign(v1, saved["v1"]), strategy.assign(v2, saved["v2"]))]
        ways += [strategy.call_for_each_tower(in_a_tower, v1, v2, saved)]
        for new1, new2 in ways:
            assert isinstance(new1, tj.towers.MirroredVar) and isinstance(
                new2, tj.TowerLocal
            )
            equal = np.array_equal(strategy.read_var(new1), first)
            assert equal == case["expected"]["equal"]
            for x in (strategy.read_var(new2), *new2.value):
                np.testing.assert_array_equal(x, second[:, ::-1])


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)
