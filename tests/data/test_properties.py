"""What holds for any batch, mask, number of towers and devices, dtype and tree."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import (
    FLOATS,
    INTEGERS,
    array,
    assert_same_bits,
    few,
    on_devices,
    seeds,
    towers_values,
    trees,
)
from hypothesis import given
from hypothesis import strategies as st
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.collectives.ops import pack_sizes, sum_rows_over_towers
from towerjax.collectives.packing import Packing
from towerjax.data.batch_rows import Shares, counts_of_towers, fingerprint_of, fit_batch
from towerjax.data.placer import Placer

pytestmark = pytest.mark.slow
R = tj.Reduction
kinds = st.sampled_from(["ones", "plain", "spread"])


def batch_of(seed, size):
    """Rows that know their number, of several dtypes and dims, in a tree."""
    rng = np.random.default_rng(seed)
    dtypes = rng.choice(np.array([*FLOATS, *INTEGERS], object), 3)
    leaves = [
        array(rng, dtype, (size, *shape), "spread")
        for dtype, shape in zip(dtypes, ((), (2,), (1, 0)), strict=True)
    ]
    number = np.arange(size, dtype=np.int32)
    return {"number": number, "rest": [leaves[0], (leaves[1], {"deep": leaves[2]})]}


@few(80)
@given(
    seeds,
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["pad", "drop", "error"]),
    st.integers(0, 5),
)
def test_a_fitted_batch_has_every_row_once_and_in_order(
    seed, size, towers, parts, remainder, times
):
    batch = batch_of(seed, size)
    shares = towers * parts
    shared_by = Shares(towers, parts, 1)
    full = times * shares
    over = size % shares
    if (remainder == "error" and over) or (remainder == "drop" and size < shares):
        with pytest.raises(ValueError, match="remainder="):
            fit_batch(batch, shared_by, remainder, full_size=full)
        return
    fitted, num_valid = fit_batch(batch, shared_by, remainder, full_size=full)
    kept = size - over if remainder == "drop" else size
    rows = math.ceil(kept / shares) * shares
    if remainder == "pad" and size <= full:
        rows = full
    # Every row of the batch, and then the last one again.
    index = np.minimum(np.arange(rows), kept - 1)
    assert num_valid == kept
    assert_same_bits(fitted, jax.tree.map(lambda x: x[index], batch))
    counts = counts_of_towers(num_valid, rows // towers, towers)
    valid = (np.arange(rows) < kept).reshape(towers, -1)
    np.testing.assert_array_equal(counts, valid.sum(1))


@few(40)
@given(
    seeds,
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (3, 3), (8, 4)]),
    st.integers(1, 3),
)
def test_placed_batches_lie_on_their_towers_padded_to_few_sizes(
    seed, sizes, grid, parts
):
    towers, devices = grid
    placement = mirrored(towers, devices).placement
    placer = Placer(placement, calls=towers * parts, remainder="pad")
    known = set()
    for size in sizes:
        batch = batch_of(seed, size)
        placed = placer.place(batch)
        larger = [n for n in known if n >= size]
        rows = min(larger, default=math.ceil(size / (towers * parts)) * towers * parts)
        known.add(rows)
        assert placed.rows * towers == rows and placed.num_examples == size
        np.testing.assert_array_equal(np.asarray(placed.args[1]), placed.counts)
        shards = placed.arrays["number"].addressable_shards
        assert [s.device.id for s in shards] == list(range(devices))
        for shard, own in zip(shards, np.split(np.arange(rows), devices), strict=True):
            expected = np.minimum(own, size - 1)
            np.testing.assert_array_equal(np.asarray(shard.data), expected)
        assert_same_bits(
            jax.tree.map(lambda x, n=size: np.asarray(x)[:n], placed.arrays), batch
        )


@few(40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.integers(1, 2),
    st.sampled_from(["batch", "elements"]),
    st.sampled_from(["pad", "drop"]),
)
def test_a_distributed_data_set_loses_no_row(sizes, grid, parts, split, remainder):
    towers, devices = grid
    if split == "elements" and remainder == "drop":
        sizes = [sizes[0] * parts] * len(sizes)  # of one size, or it is refused
    ends = np.cumsum(sizes)
    numbers = [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]
    shares = towers * parts
    if remainder == "pad":
        kept = np.concatenate(numbers)
    elif split == "batch":
        kept = np.concatenate([x[: len(x) // shares * shares] for x in numbers])
    else:
        whole = len(numbers) // towers * towers
        kept = np.concatenate([*numbers[:whole], np.zeros(0, int)])
    strategy = mirrored(towers, devices, prefetch_on_device=0)
    source = [x.astype(np.int32) for x in numbers]
    found = [np.zeros(0, int)]
    for placed in strategy.distribute_dataset(
        source, split=split, remainder=remainder, micro_batches=parts
    ):
        assert placed.rows % parts == 0
        own = np.asarray(placed.arrays).reshape(towers, placed.rows)
        found += [x[:n] for x, n in zip(own, placed.counts, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), kept)


def whole_sum(rows, dtype):
    """The sum of whole numbers modulo what the dtype holds."""
    return rows.astype(np.int64).sum(0).astype(dtype)


def check_reduced(reduction, values, found):
    assert found.keys() == values.keys()
    for name, rows in values.items():
        x = np.asarray(found[name])
        number = len(rows)
        assert x.shape == rows.shape[1:], name
        whole = rows.dtype.kind in "biu"
        if reduction is R.ONLY_FIRST_TOWER:
            assert_same_bits(x, rows[0])
        elif reduction is R.SUM and whole:
            wide = np.uint32 if rows.dtype.kind == "u" else np.int32
            assert_same_bits(x, whole_sum(rows, wide))
        else:
            assert x.dtype == (np.float32 if whole else rows.dtype), name
            wide = rows.astype(np.complex128)
            exact = wide.sum(0) / (number if reduction is R.MEAN else 1)
            # Added in float32 or wider, and then rounded once, if at all.
            limits = jnp.finfo(x.dtype)
            eps = min(float(limits.eps), float(jnp.finfo(np.float32).eps))
            allowed = (number + 2) * eps * np.abs(wide).sum(0)
            allowed += float(limits.eps) * np.abs(exact) + float(limits.tiny) * eps
            error = np.abs(x.astype(np.complex128) - exact)
            assert (error <= allowed).all(), (name, x, exact)


@pytest.mark.parametrize(
    "ops, towers, reductions",
    [(tj.AllReduce(), 4, (R.SUM, R.MEAN)), (tj.PinnedTree(), 6, (R.MEAN,))],
)
@few(4)
@given(seed=seeds, kind=kinds)
def test_every_op_reduces_as_numpy_does(ops, towers, reductions, seed, kind):
    strategy = mirrored(towers, 2, cross_tower_ops=ops)
    values = towers_values(seed, kind, towers)
    per_tower = jax.tree.map(tj.PerTower, values)
    for reduction in reductions:
        found = strategy.reduce(reduction, per_tower)
        check_reduced(reduction, values, found)
        for x in jax.tree.leaves(found):
            copies = [np.asarray(shard.data) for shard in x.addressable_shards]
            for other in copies[1:]:
                assert_same_bits(other, copies[0])


def meet(tower, value):
    """Everything that towers can do with each other's values."""

    def unchanged(strategy, rows):
        return rows

    def turned(strategy, rows):
        towers = [
            strategy.unwrap(x)[::-1] for x in jax.tree.leaves(rows, is_leaf=is_rows)
        ]
        treedef = jax.tree.structure(rows, is_leaf=is_rows)
        return jax.tree.unflatten(treedef, [tj.PerTower(tuple(x)) for x in towers])

    return {
        "reduced": {r.name: tower.reduce(r, value) for r in REDUCTIONS},
        "gathered": tower.all_gather(value),
        "merged": tower.merge_call(unchanged, value),
        "turned": tower.merge_call(turned, value),
    }


REDUCTIONS = (R.SUM, R.MEAN, R.ONLY_FIRST_TOWER)


def is_rows(x):
    return isinstance(x, tj.PerTower)


def side_by_side(x, towers):
    """Each tower's value as ``[T, ...]``, whether or not they are all the same."""
    return (
        np.stack([np.asarray(x)] * towers) if not is_rows(x) else np.asarray(x.values)
    )


@few(5)
@given(seed=seeds, kind=kinds)
def test_towers_that_meet_have_each_others_values(seed, kind):
    towers = 6
    strategy = mirrored(towers, 3, executor="pmap")
    values = towers_values(seed, kind, towers)
    out = strategy.call_for_each_tower(meet, jax.tree.map(tj.PerTower, values))
    for reduction in REDUCTIONS:
        found = out["reduced"][reduction.name]
        assert not any(is_rows(x) for x in jax.tree.leaves(found, is_leaf=is_rows))
        check_reduced(reduction, values, found)
    for name, rows in values.items():
        assert_same_bits(np.asarray(out["gathered"][name]), rows)
        assert_same_bits(side_by_side(out["merged"][name], towers), rows)
        assert_same_bits(side_by_side(out["turned"][name], towers), rows[::-1])


leaf_kinds = st.sampled_from(["own", "shared", "ragged", "text", "number", "equal"])


@few(40)
@given(trees(leaf_kinds), st.sampled_from([2, 3, 1]), seeds)
def test_what_is_regrouped_is_selected_again(tree, towers, seed):
    rng = np.random.default_rng(seed)
    shared = np.arange(3)

    def leaf(kind, tower):
        return {
            "own": rng.normal(size=2).astype(np.float32),
            "ragged": np.arange(tower + 1, dtype=np.int32),
            "shared": shared,
            "text": f"tower {tower}",
            "number": tower,
            "equal": 7,
        }[kind]

    nests = [jax.tree.map(lambda k, t=t: leaf(k, t), tree) for t in range(towers)]
    strategy = tj.tf1.MirroredStrategy(towers=towers)
    together = strategy.regroup(nests)
    for tower, nest in enumerate(nests):
        again = strategy.select_tower(together, tower)
        assert jax.tree.structure(again) == jax.tree.structure(nest)
        for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(nest), strict=True):
            arrays = np.asarray(x), np.asarray(y)
            same = type(x) is type(y) and x == y
            if isinstance(y, np.ndarray):
                same = arrays[0].tobytes() == arrays[1].tobytes()
            assert same, (x, y)
    # What differs lies side by side, what is one value stays one.
    assert jax.tree.structure(together, is_leaf=is_rows) == jax.tree.structure(tree)
    leaves = jax.tree.leaves(together, is_leaf=is_rows)
    for x, kind in zip(leaves, jax.tree.leaves(tree), strict=True):
        several = towers > 1 and kind not in ("shared", "equal")
        assert is_rows(x) == several, (kind, x)
        assert not several or len(mirrored(towers, 1).unwrap(x)) == towers


# Buffers: every leaf lies in one place, and comes back.

kinds_of_leaves = st.lists(
    st.tuples(
        st.sampled_from([np.float32, jnp.bfloat16, np.int32, np.bool_]),
        st.sampled_from([(), (1,), (5,), (0, 4), (3, 2), (40,)]),
    ),
    min_size=2,
    max_size=12,
)


@few(150)
@given(
    kinds_of_leaves,
    st.sampled_from([8, 100, 24, 0, -1, math.inf]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, math.inf]),
)
def test_leaves_share_buffers_without_gap_or_overlap(found, limit, times, most):
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in found]
    packing = Packing.of(
        leaves, unshared_above=limit, reach=times * limit, max_leaves=most
    )
    ends = [0] * packing.num_buffers
    members = [[] for _ in ends]
    for slot, leaf in zip(packing.slots, leaves, strict=True):
        assert slot.start == ends[slot.buffer] and slot.shape == leaf.shape
        ends[slot.buffer] += leaf.size
        members[slot.buffer].append(leaf)
    assert all(members)
    for group in members:
        assert len({leaf.dtype for leaf in group}) == 1 and len(group) <= most
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in group]
        assert len(group) == 1 or max(sizes) <= limit
        assert len(group) == 1 or sum(sizes) <= times * limit
    if limit == most == math.inf:
        assert packing.num_buffers == len({leaf.dtype for leaf in leaves})
    for total in (0, 1, len(leaves), 41):
        sizes = pack_sizes(total, len(leaves) + 1)
        assert sum(sizes) == total and len(sizes) == len(leaves) + 1
        assert min(sizes) >= 0 and len(set(sizes[:-1])) <= 1


@jax.jit
def packed_and_unpacked(leaves):
    out = []
    for limit, most in ((-1, 1), (24, 2), (math.inf, math.inf)):
        packing = Packing.of(leaves, unshared_above=limit, reach=limit, max_leaves=most)
        buffers = packing.pack(leaves, lead=0)
        out += [packing.unpack(buffers, "cpu"), packing.unpack(buffers, "gpu")]
    return out


@few(10)
@given(seed=seeds, kind=st.sampled_from(["spread", "special"]))
def test_what_is_packed_is_unpacked_bit_for_bit(seed, kind):
    trees = [towers_values(seed + i, kind, 5 + i) for i in range(2)]
    leaves = jax.tree.leaves(trees)
    for again in packed_and_unpacked(leaves):
        assert_same_bits(again, leaves)


def add_in_numpy(rows):
    """Neighbours, then their sums; an odd last one waits. In the dtype of the rows."""
    rows = list(rows)
    while len(rows) > 1:
        pairs = [
            np.add(a, b, dtype=a.dtype)
            for a, b in zip(rows[0::2], rows[1::2], strict=False)
        ]
        rows = pairs + rows[len(pairs) * 2 :]
    return rows[0]


@functools.cache
def pinned_sums(towers, devices):
    def device_fn(rows, axes):
        return sum_rows_over_towers(tj.PinnedTree(), rows, axes)

    return on_devices(device_fn, towers, devices)


ADDED = (*FLOATS, np.int8, np.int32, np.uint32)


@pytest.mark.parametrize("towers, devices", [(7, (1,)), (12, (4,))])
@few(10)
@given(seed=seeds, kind=st.sampled_from(["ones", "plain", "spread", "special"]))
def test_a_pinned_tree_has_the_bits_of_numpys(towers, devices, seed, kind):
    values = towers_values(seed, kind, towers, ADDED)
    with np.errstate(all="ignore"):
        expected = jax.tree.map(add_in_numpy, values)
    for number in devices:
        found = pinned_sums(towers, number)(values)
        assert_same_bits(jax.device_get(found), expected)
        for x in jax.tree.leaves(found):
            for shard in x.addressable_shards:
                assert_same_bits(np.asarray(shard.data), np.asarray(x))


def test_what_processes_compare_of_a_batch_tells_its_values_and_its_kind():
    x = np.arange(4, dtype=np.float32)
    others = [{"x": x + 1}, {"x": x[None]}, {"x": x.view(np.int32)}, {"y": x}, [x]]
    told = [fingerprint_of(batch) for batch in ({"x": x}, *others)]
    assert len(set(told)) == len(told)
    assert fingerprint_of({"x": x.copy()}) == told[0]
