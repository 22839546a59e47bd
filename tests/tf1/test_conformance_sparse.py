"""What the original promises of sums of dense and row-sparse values, in numbers."""

import numpy as np
import pytest
from conformance_table import Table, assert_equal

import towerjax as tj

TABLE = Table("rmf.sum", {})
R = tj.Reduction


def towers_of(case):
    return len(case["input"].get("values", "ab"))


def rows_of(given, num_rows):
    values = np.array(given["values"], np.float32)
    indices = np.array(given["indices"], np.int32)
    return tj.sparse.IndexedRows(values, indices, (num_rows, *values.shape[1:]))


@TABLE.checks("rmf.sum.scalars")
def check_scalars(case, strategy):
    values = np.array(case["input"]["values"], np.float32)
    assert_equal(strategy.reduce(R.SUM, tj.PerTower(values)), case)


@TABLE.checks("rmf.sum.sparse", "rmf.sum.sparse.2d", "rmf.sum.sparse.partial_overlap")
def check_sparse(case, strategy):
    """Outside, inside of towers, and as an update of zeros by optax."""
    expected = case["expected"]["dense"]
    towers = [rows_of(case["input"][name], len(expected)) for name in "ab"]
    given = tj.PerTower(tuple(towers))
    outside = strategy.reduce(R.SUM, given)
    inside = strategy.call_for_each_tower(
        lambda tower, x: tower.reduce(R.SUM, x), given
    )
    for out in (outside, inside):
        assert isinstance(out, tj.sparse.IndexedRows) and out.indices.tolist() == [
            i for rows in towers for i in rows.indices
        ]
        assert_equal(out.to_dense(), case, expected)
        assert_equal(np.zeros(np.shape(expected), np.float32) + out, case, expected)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)
