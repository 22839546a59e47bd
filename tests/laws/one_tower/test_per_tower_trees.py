"""Towers' values that are trees: tuples of them, with rows of arrays among them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

R = tj.Reduction


@pytest.mark.slow
def test_results_of_map_that_are_trees_are_reduced():
    strategy = mirrored(4, 2)
    elements = [1.0, 2.0, 3.0, 4.0]
    results = strategy.map(lambda e: {"x": e, "y": [e * np.ones(2)]}, elements)
    total = strategy.reduce(R.SUM, results)
    assert total["x"].tolist() == [10.0] and total["y"][0].tolist() == [[10.0, 10.0]]


def test_what_has_no_elements_is_reduced_in_a_tower():
    def tower_fn(tower, x):
        return [tower.reduce(r, x) for r in (R.SUM, R.MEAN, R.ONLY_FIRST_TOWER)]

    shared = np.zeros((0, 3), np.int8)
    own = tj.PerTower(np.zeros((2, 0, 3), np.int8))
    for x in (shared, own):
        out = mirrored(2).call_for_each_tower(tower_fn, x)
        assert [(x.shape, str(x.dtype)) for x in out] == [
            ((0, 3), dtype) for dtype in ("int32", "float32", "int8")
        ]


@pytest.mark.slow
def test_rows_and_saved_values_in_another_byte_order():
    swapped = np.array([[1, 2]], ">f4")
    rows = tj.sparse.IndexedRows(swapped, np.array([1], ">i4"), (2, 2))
    assert rows.to_dense().tolist() == [[0, 0], [1, 2]]
    strategy = mirrored(1)
    v = strategy.create_var("v", np.zeros((1, 2), np.float32))
    out = tj.towers.restored_values(strategy, v, swapped)
    assert out.value.tolist() == [[1, 2]]


@pytest.mark.slow
def test_rows_without_columns_are_reduced_and_joined():
    rows = tj.sparse.IndexedRows(np.ones((2, 2, 0)), np.array([[0, 1], [1, 0]]), (3, 0))
    strategy = mirrored(2)
    total = strategy.reduce(R.SUM, tj.PerTower(rows))
    joined = strategy.call_for_each_tower(
        lambda tower, rows: tower.all_gather(rows, axis=0), tj.PerTower(rows)
    )
    assert (total.values.shape, joined.values.shape) == ((4, 0), (4, 0))
    assert joined.indices.tolist() == [0, 1, 4, 3]


@pytest.mark.slow
def test_small_floats_are_rounded_once_and_small_indices_reach_their_rows():
    dtypes = (jnp.bfloat16, np.float16)
    floats = [
        tj.sparse.IndexedRows(np.ones(5000, dtype), np.zeros(5000, np.int32), (2,))
        for dtype in dtypes
    ]
    indices = [
        tj.sparse.IndexedRows(np.ones(2), np.array([1, 99], dtype), (N,))
        for N, dtype in ((100, "int8"), (200, "uint8"), (70000, "int16"))
    ]
    to_dense = jax.jit(lambda all_rows: [rows.to_dense() for rows in all_rows])
    outs = [*map(np.asarray, to_dense(floats + indices))]
    for dtype, out in zip(dtypes, outs[:2], strict=True):
        assert out.dtype == dtype and out[0] == np.asarray(5000, dtype)
    for out in outs[2:]:
        assert out.sum() == 2.0 and out[99] == 1.0


class Moments(NamedTuple):
    count: Any
    mean: Any


@pytest.mark.parametrize("tree", [lambda a, b: [a, b], Moments])
def test_a_list_and_a_named_tuple_are_trees_whatever_their_length(tree):
    a = np.float32([1, 3])
    b = np.float32([39, 3])
    strategy = mirrored(2)
    value = tj.PerTower(tree(a, b))
    out = strategy.reduce(R.SUM, value)
    assert type(out) is type(value.values) and [*map(float, out)] == [4, 42]
    assert strategy.unwrap(value) == [tree(1, 39), tree(3, 3)]
    assert strategy.select_tower(value, 1) == tree(3, 3)
    own = strategy.call_for_each_tower(lambda tower, x: 100 * x[0] + x[1], value)
    assert own.values.tolist() == [139, 303]


def test_a_tuple_that_a_tower_local_variable_holds_is_a_tree():
    strategy = mirrored(2)
    variable = tj.TowerLocal((np.float32([1, 3]), np.float32([39, 3])), R.SUM)
    assert [*map(float, strategy.reduce(R.SUM, variable))] == [4, 42]
    assert [*map(float, strategy.read_var(variable))] == [4, 42]
    assert strategy.unwrap(variable) == [(1, 39), (3, 3)]


def test_a_tower_local_variable_without_arrays_has_a_value_a_tower():
    strategy = mirrored(4, 2)
    state = strategy.create_var("s", (), reduction=R.SUM, tower_local=True)
    assert strategy.unwrap(state) == [()] * 4
    assert strategy.reduce(R.SUM, state) == () == strategy.select_tower(state, 3).value
