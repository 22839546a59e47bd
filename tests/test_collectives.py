"""Cross-tower ops agree with the plain sum: dtypes, shapes, order, odd towers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.collectives.packing import Sums
from towerjax.mesh.placement import Placement
from towerjax.towers.executors import jit_on_devices, over_devices
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


def summed(ops, values, towers, devices, executor="shard_map"):
    names = tuple(f"cpu:{i}" for i in range(devices))
    placement = Placement(names, towers, local="vmap", executor=executor)
    axes = placement.axes

    def device_fn(rows):
        if not ops.needs_every_tower:
            rows = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), rows)
        sums = ops.sum_over_towers(rows, axes)
        assert isinstance(sums, Sums)
        return sums.tree(), sums.finite(3)

    layouts, out = (Layout.PER_TOWER,), (Layout.MIRRORED, Layout.MIRRORED)
    fn = over_devices(device_fn, placement, layouts, out)
    return jit_on_devices(fn, placement, layouts, out, donate=False)(values)


@pytest.mark.pairwise
@pytest.mark.few_fast(2)
@pytest.mark.parametrize("ops", OPS, ids=repr)
@pytest.mark.parametrize(
    ("towers", "devices"), [(1, 1), (3, 3), (3, 1), (6, 2), (5, 5), (8, 4), (8, 8)]
)
def test_each_op_is_the_plain_sum(ops, towers, devices):
    values = tree(towers)
    got, finite = summed(ops, values, towers, devices)
    # Small whole numbers: every order of adding gives the same bits in every dtype.
    expected = jax.tree.map(lambda x: x.astype(np.float64).sum(0), values)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b, start in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), jax.tree.leaves(values),
        strict=True,
    ):  # fmt: skip
        assert a.dtype == start.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a, np.float64), b)
    assert bool(finite)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("ops", OPS, ids=repr)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_finite_looks_at_the_first_leaves_alone(ops, devices, bad):
    for name, expected in (("a", False), ("b", False), ("c", True)):
        values = {k: np.ones((4, 3), np.float32) for k in ("a", "b", "c")}
        values[name][2, 1] = bad
        names = tuple(f"cpu:{i}" for i in range(devices))
        placement = Placement(names, 4, local="vmap", executor="shard_map")

        def device_fn(rows, axes=placement.axes):
            if not ops.needs_every_tower:
                rows = jax.tree.map(functools.partial(jnp.sum, axis=0), rows)
            return ops.sum_over_towers(rows, axes).finite(2)

        layouts = (Layout.PER_TOWER,)
        fn = over_devices(device_fn, placement, layouts, Layout.MIRRORED)
        run = jit_on_devices(fn, placement, layouts, Layout.MIRRORED, donate=False)
        assert bool(run(values)) is expected


def test_a_negative_threshold_is_refused():
    with pytest.raises(
        ValueError, match="pack_below_bytes=-1 must be a whole number >= 0"
    ):
        tj.AllReduce(pack_below_bytes=-1)


@pytest.mark.slow
def test_every_device_holds_the_same_sum():
    for ops in OPS:
        got, _ = summed(ops, tree(8), 8, 8)
        for leaf in jax.tree.leaves(got):
            first, *others = (np.asarray(s.data) for s in leaf.addressable_shards)
            for other in others:
                np.testing.assert_array_equal(first, other)
