"""Cross-tower ops agree with the plain sum: dtypes, shapes, order, odd towers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.collectives.packing import Sums
from towerjax.mesh.placement import Placement
from towerjax.towers.executors import over_devices, trace_one_tower
from towerjax.types import Layout

OPS = [
    tj.AllReduce(),
    tj.AllReduce(pack_below_bytes=0),
    tj.AllReduce(pack_below_bytes=40),
    tj.AllReduce(pack_below_bytes=1 << 30),
    tj.PinnedTree(),
]


def tree(towers):
    """Distinct values on each tower; three dtypes, scalars, empty and large leaves."""
    rng = np.random.default_rng(towers)

    def ints(*shape):
        return rng.integers(-9, 9, size=(towers, *shape))

    return {
        "z_first": ints(3, 2).astype(np.float32),
        "a_scalar": ints().astype(np.float32),
        "half": ints(5).astype(jnp.bfloat16),
        "count": ints(4).astype(np.int32),
        "large": ints(20, 1000).astype(np.float32),
        "empty": ints(0, 3).astype(np.float32),
        "list": [ints(2).astype(np.float32), ints(1, 1, 2).astype(np.int32)],
    }


@functools.cache
def of_each_op(towers, devices, num_leaves):
    """``(sums, is_finite)`` of the first leaves by each op; one program of them all."""
    names = tuple(f"cpu:{i}" for i in range(devices))
    placement = Placement(names, towers, local="vmap", executor="shard_map")

    def device_fn(rows):
        found = []
        for ops in OPS:
            given = rows
            if not ops.needs_every_tower:
                given = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), rows)
            sums = ops.sum_over_towers(given, placement.axes)
            assert isinstance(sums, Sums)
            found.append((sums.tree(), sums.are_finite(num_leaves)))
        return found

    layouts, out = (Layout.PER_TOWER,), Layout.MIRRORED
    fn = over_devices(device_fn, placement, layouts, out)
    return jax.jit(fn)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(("towers", "devices"), [(6, 2), (3, 3), (1, 1)])
def test_each_op_is_the_plain_sum(towers, devices):
    values = tree(towers)
    # Small whole numbers: every order of adding gives the same bits in every dtype.
    expected = jax.tree.map(lambda x: x.astype(np.float64).sum(0), values)
    for got, finite in of_each_op(towers, devices, 3)(values):
        assert bool(finite)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b, start in zip(
            jax.tree.leaves(got), jax.tree.leaves(expected), jax.tree.leaves(values),
            strict=True,
        ):  # fmt: skip
            assert a.dtype == start.dtype and a.shape == b.shape
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data, np.float64), b)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_finite_looks_at_the_first_leaves_alone(devices):
    for bad in (np.nan, np.inf):
        for name, expected in (("a", False), ("b", False), ("c", True)):
            values = {k: np.ones((4, 3), np.float32) for k in ("a", "b", "c")}
            values[name][2, 1] = bad
            for ops, (_, finite) in zip(
                OPS, of_each_op(4, devices, 2)(values), strict=True
            ):
                assert bool(finite) is expected, ops


@pytest.mark.parametrize("ops", [tj.PinnedTree(), tj.collectives.Packed()])
def test_a_buffer_may_hold_more_numbers_than_int32_counts(ops):
    axes = tj.Mirrored(devices=("cpu:0", "cpu:1")).placement.axes
    leaves = [jax.ShapeDtypeStruct((2, n), "f") for n in (3 << 30, 2)]

    def fn(rows):
        return ops.sum_over_towers(rows, axes).tree()

    traced, _ = trace_one_tower(fn, axes, (Layout.PER_TOWER,), (leaves,))
    assert [x.size for x in traced.out_avals] == [3 << 30, 2]
