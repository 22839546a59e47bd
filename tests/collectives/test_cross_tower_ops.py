"""Packed, to one device, hierarchical: what they compute, send, refuse; who chooses."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import FLOATS, assert_same_bits, few, seeds, towers_values
from hypothesis import given
from hypothesis import strategies as st
from layouts import names

import towerjax as tj
from towerjax.collectives.ops import (
    pack_sizes,
    split_into_packs,
    sum_over_towers,
    sum_rows_over_towers,
)
from towerjax.collectives.packing import Packing
from towerjax.collectives.reduce import add_pairwise, add_rows, reduced_dtype
from towerjax.prover.replication.analysis import analyse
from towerjax.towers.executors import over_devices, trace_one_tower
from towerjax.towers.reduce import _reduce_all

R = tj.Reduction
Layout = tj.towers.Layout
DTYPES = (np.float32, jnp.bfloat16, np.float16, np.int32, np.complex64)
SHAPES = ((), (7,), (0, 3), (5, 1, 3), (1,), (41,))


def mirrored(towers, devices, ops, **options):
    return tj.tf1.MirroredStrategy(
        names(devices), towers=towers, cross_tower_ops=ops, **options
    )


def on_devices(device_fn, towers, devices, executor="shard_map"):
    """``device_fn(rows, axes)`` as one compiled program; its results are mirrored."""
    strategy = tj.Mirrored(names(devices), towers=towers, executor=executor)
    placement = strategy.placement
    layouts = (Layout.PER_TOWER,)
    out = Layout.MIRRORED
    fn = over_devices(
        lambda rows: device_fn(rows, placement.axes), placement, layouts, out
    )
    return jax.jit(fn)


def ops_for(devices):
    """Every kind of op, and every root and group size there can be."""
    ops = tj.collectives
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        tj.AllReduce(),
        *[tj.AllReduce(pack_below_bytes=n) for n in (0, 40, 1 << 30)],
        *[ops.Packed(), ops.Packed(num_packs=3), ops.Packed(bytes_per_pack=40)],
        ops.Packed(num_packs=60),  # more packs than a dtype has elements
        *[ops.Packed(bytes_per_pack=40, max_group=2), ops.Packed(max_group=1)],
        *[ops.ReduceToOneDevice(name) for name in (None, names(devices)[-1])],
        *[ops.Hierarchical(), *[ops.Hierarchical(n) for n in sizes]],
        tj.PinnedTree(),
    ]


@functools.cache
def of_each_op(towers, devices, executor, num_leaves):
    """Sums by each op, and whether the first leaves are finite; in one program."""
    ops = ops_for(devices)[:: 1 if executor == "shard_map" else 3]

    def device_fn(rows, axes):
        found = []
        for one in ops:
            given = rows if one.needs_every_tower else jax.tree.map(add_rows, rows)
            sums = sum_over_towers(one, given, axes)
            found.append((sums.tree(), sums.are_finite(num_leaves)))
        return found

    run = on_devices(device_fn, towers, devices, executor)
    return lambda values: zip(ops, run(values), strict=True)


def values_of(towers):
    """Distinct on each tower, of all dtypes, and numbers that lose no digit."""
    rng = np.random.default_rng(towers)
    powers = np.float32(2.0 ** np.arange(towers))

    def leaf(dtype, shape):
        x = 10 * rng.normal(size=(towers, *shape))
        if dtype is np.complex64:
            x = x + 10j * rng.normal(size=(towers, *shape))
        return x.astype(dtype)

    kinds = itertools.product(range(2), range(len(DTYPES)))
    # Pairs of five lose no digit; 256 + 1 is 256 in bfloat16.
    rounded = {"16 bits": np.where(powers == 1, 256, 1).astype(jnp.bfloat16)}
    return (rounded if towers == 5 else {}) | {
        "a first, without elements": np.zeros((towers, 0), np.float16),
        "drawn": [leaf(DTYPES[i], SHAPES[(n + i) % len(SHAPES)]) for n, i in kinds],
        "large": rng.integers(-9, 9, (towers, 20, 1000)).astype(np.float32),
        "count": rng.integers(-9, 9, (towers, 4)).astype(np.int32),
        "powers": powers,  # no tower is left out, and none is there twice
        "of one tower": np.stack([powers, np.where(powers == 1, np.nan, powers)], 1),
    }


def assert_is_the_sum(found, values):
    """Within n rounding errors of its own dtype; of whole numbers, within one."""
    assert jax.tree.structure(found) == jax.tree.structure(values)
    for x, rows in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        assert x.dtype == rows.dtype and x.shape == rows.shape[1:]
        wide = rows.astype(np.complex128 if rows.dtype == np.complex64 else float)
        if (wide == np.round(wide)).all() or np.isnan(wide).any():
            np.testing.assert_array_equal(x, wide.sum(0).astype(rows.dtype))
            continue
        allowed = len(rows) * float(jnp.finfo(rows.dtype).eps) * np.abs(wide).sum(0)
        error = np.abs(np.asarray(x).astype(wide.dtype) - wide.sum(0))
        assert (error <= allowed).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "towers, devices, executor",
    [(5, 5, "shard_map"), (1, 1, "shard_map"), (4, 4, "shard_map"), (6, 3, "pmap")],
)
def test_every_op_is_the_sum(towers, devices, executor):
    values = values_of(towers)
    for one, (sums, _) in of_each_op(towers, devices, executor, 3)(values):
        try:
            assert_is_the_sum(sums, values)
            for x in jax.tree.leaves(sums):
                first, *others = (np.asarray(s.data) for s in x.addressable_shards)
                assert all(first.tobytes() == o.tobytes() for o in others)
        except AssertionError as error:
            error.add_note(f"{one}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_finite_looks_at_the_first_leaves_alone(devices):
    for bad in (np.nan, np.inf):
        for name, expected in (("a", False), ("b", False), ("c", True)):
            values = {k: np.ones((4, 3), np.float32) for k in ("a", "b", "c")}
            values[name][2, 1] = bad
            for one, (_, finite) in of_each_op(4, devices, "shard_map", 2)(values):
                assert bool(finite) is expected, one


@pytest.mark.parametrize("ops", [tj.PinnedTree(), tj.collectives.Packed()])
def test_a_buffer_may_hold_more_numbers_than_int32_counts(ops):
    axes = tj.Mirrored(names(2)).placement.axes
    leaves = [jax.ShapeDtypeStruct((2, n), "f") for n in (3 << 30, 2)]

    def fn(rows):
        return ops.sum_over_towers(rows, axes).tree()

    traced, _ = trace_one_tower(fn, axes, (Layout.PER_TOWER,), (leaves,))
    assert [x.size for x in traced.out_avals] == [3 << 30, 2]


@pytest.mark.slow
def test_every_ops_derivative_is_the_sums():
    """Also where a sum travels as bits or codes, whose own derivative is 0."""
    values = np.float32([[1, 2], [3, 5], [7, 4], [6, 8]])
    factors = np.float32([2, 3])
    ops = ops_for(2)

    def device_fn(rows, axes):
        return tuple(sum_rows_over_towers(one, rows, axes) for one in ops)

    sums, pull = jax.vjp(on_devices(device_fn, 4, 2), values)
    for i, one in enumerate(ops):
        (slope,) = pull(type(sums)(factors * (i == k) for k in range(len(sums))))
        assert (np.asarray(slope) == factors).all(), one


@pytest.mark.slow
def test_special_values_arrive_bit_for_bit():
    devices = 5
    values = np.ones((devices, 5), np.float32)
    values[:, 0] = -0.0
    values[:, 1] = np.inf
    values[0, 2] = np.nan
    values[-1, 3] = -np.inf
    values[0, 4] = np.inf
    values[-1, 4] = -np.inf
    roots = [tj.collectives.ReduceToOneDevice(name) for name in names(devices)]

    def device_fn(rows, axes):
        return [one.sum_over_towers(rows[0], axes).tree() for one in roots]

    for sums in on_devices(device_fn, devices, devices)(values):
        for shard in sums.addressable_shards:
            zero, inf, nan, minus, both = np.asarray(shard.data)
            assert zero == 0 and np.signbit(zero)
            assert (inf, minus) == (np.inf, -np.inf)
            assert np.isnan(nan) and np.isnan(both)


@pytest.mark.parametrize("ops", ops_for(6), ids=repr)
def test_sums_are_proved_the_same_on_every_tower(ops):
    axes = tj.Mirrored(names(6), towers=12).placement.abstract_axes

    def tower_fn(x):
        # The second is alone in its dtype, and has no elements.
        leaves = [x[0], jax.lax.slice_in_dim(x, 0, 0).astype(np.float16)[0:]]
        leaves = [leaf[None] for leaf in leaves] if ops.needs_every_tower else leaves
        return ops.sum_over_towers(leaves, axes).tree()

    x = jax.ShapeDtypeStruct((12, 3), np.float32)
    jaxpr, _ = trace_one_tower(tower_fn, axes, (Layout.PER_TOWER,), (x,))
    found = analyse(jaxpr, ["x"], axes.names[0], 12)
    assert found.outputs == (None, None)


# Packs.


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "total, num_packs, sizes",
    [(10, 3, [3, 3, 4]), (3, 8, [0] * 7 + [3]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_the_last_pack_has_the_remainder(total, num_packs, sizes):
    assert pack_sizes(total, num_packs) == sizes
    parts = split_into_packs(jnp.arange(total), num_packs)
    assert [x.size for x in parts] == [n for n in sizes if n]  # none is sent empty
    assert [int(n) for x in parts for n in x] == list(range(total))


def test_ops_are_values_with_a_short_text():
    mirrored(3, 3, tj.collectives.Hierarchical())  # groups of any number of devices
    assert repr(tj.collectives.Packed(num_packs=3)) == "AllReduce(num_packs=3)"
    assert repr(tj.AllReduce()) == "AllReduce()"
    to_one = tj.collectives.ReduceToOneDevice
    grouped = tj.collectives.Hierarchical
    assert to_one("/device:CPU:1") == to_one("cpu:1")
    assert len({grouped(2), grouped(2), grouped()}) == 2


def test_groups_are_processes_unless_said_otherwise():
    axes = tj.Mirrored(names(6)).placement.axes
    three = dataclasses.replace(axes, num_processes=3)

    def sizes(ops, axes):
        def sum_of(rows, _):
            return ops.sum_over_towers(rows[0], axes).tree()

        text = jax.make_jaxpr(on_devices(sum_of, 6, 6))(np.ones((6, 4)))
        return set(re.findall(r"axis_size=(\d)", str(text)))

    assert sizes(tj.collectives.Hierarchical(), axes) == {"6"}
    assert sizes(tj.collectives.Hierarchical(), three) == {"2"}
    assert sizes(tj.collectives.Hierarchical(3), three) == {"3"}
    uneven = dataclasses.replace(axes, num_processes=4)
    with pytest.raises(ValueError, match="4 processes do not have equal numbers of t"):
        tj.collectives.Hierarchical().sum_over_towers([jnp.ones(2)], uneven)


# What they send, as compiled for eight devices.

COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def sent(ops, rows, reduction=R.SUM):
    """``(collective, its results' shapes, pairs of senders)`` in program order."""
    strategy = mirrored(8, 8, ops)
    lowered = _reduce_all.lower(rows, strategy=strategy, reduction=reduction)
    found = []
    for line in lowered.compile().as_text().splitlines():
        if match := re.search(rf"= (.*?) ({COLLECTIVES})(-start)?\(", line):
            shapes = re.findall(r"[a-z]+\d+\[[\d,]*\]", match[1])
            pairs = re.findall(r"{(\d,\d)}", line.split("source_target_pairs=")[-1])
            permutes = match[2] == "collective-permute"
            found.append((match[2], shapes, pairs if permutes else []))
    return found


ROWS = [np.ones((8, 50), np.float32), np.ones((8, 53), np.float32)]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("ops, expected", [
    (tj.AllReduce(), [("all-reduce", ["f32[103]"], [])]),
    (tj.collectives.Packed(), [("all-reduce", ["f32[103]"], [])]),
    (tj.collectives.Packed(num_packs=3),
        [("all-reduce", ["f32[34]", "f32[34]", "f32[35]"], [])]),
    (tj.collectives.Packed(num_packs=200), [("all-reduce", ["f32[103]"], [])]),
    (tj.collectives.Packed(bytes_per_pack=211),
        [("all-reduce", ["f32[50]", "f32[53]"], [])]),
    (tj.collectives.Packed(bytes_per_pack=412), [("all-reduce", ["f32[103]"], [])]),
    (tj.collectives.Packed(max_group=1), [("all-reduce", ["f32[50]", "f32[53]"], [])]),
        (
            tj.collectives.ReduceToOneDevice("cpu:6"),
            [
                ("collective-permute", ["f32[103]"], ["7,6", "1,0", "3,2", "5,4"]),
                ("collective-permute", ["f32[103]"], ["0,6", "4,2"]),
                ("collective-permute", ["f32[103]"], ["2,6"]),
                ("all-reduce", ["u32[103]"], []),
            ],
        ),
        (
            tj.collectives.Hierarchical(4),  # 103 padded to 104; a quarter goes across
            [
                ("reduce-scatter", ["f32[26]"], []),
                ("all-reduce", ["f32[26]"], []),
                ("all-gather", ["f32[104]"], []),
            ],
        ),
        (
            tj.collectives.Hierarchical(),  # one process, so nothing goes across
            [("reduce-scatter", ["f32[13]"], []), ("all-gather", ["f32[104]"], [])],
        ),
    (tj.collectives.Hierarchical(1), [("all-reduce", ["f32[103]"], [])]),
], ids=repr)  # fmt: skip
def test_what_an_op_sends(ops, expected):
    assert sent(ops, ROWS) == expected


# Outside a step.


class Counting:
    """An all-reduce that notes what it is asked to sum."""

    needs_every_tower = False

    def __init__(self):
        self.asked = []

    def sum_over_towers(self, tree, axes):
        self.asked.append([x.shape for x in jax.tree.leaves(tree)])
        return tj.AllReduce().sum_over_towers(jax.tree.map(jnp.negative, tree), axes)


@pytest.mark.slow
def test_reduce_outside_a_step_travels_by_the_strategys_op():
    ops = Counting()
    strategy = mirrored(4, 2, ops)
    value = {"a": tj.PerTower(np.arange(4)), "b": (0, tj.PerTower(np.ones((4, 3))))}
    out = strategy.reduce(R.SUM, value)
    assert (int(out["a"]), out["b"][1].tolist()) == (-6, [-4, -4, -4])
    assert ops.asked == [[(), (3,)]]  # all at once
    assert out["a"].sharding.device_set == set(jax.devices()[:2])
    strategy.reduce(R.SUM, value)
    assert len(ops.asked) == 1  # compiled once
    strategy.reduce(R.MEAN, value)
    assert len(ops.asked) == 2
    strategy.reduce(R.ONLY_FIRST_TOWER, value)
    assert len(ops.asked) == 2


@pytest.mark.slow
def test_where_jax_traces_values_travel_by_the_op_but_in_a_merge():
    ops = Counting()
    strategy = mirrored(4, 2, ops)
    rows = np.arange(4, dtype=np.float32)

    def total(rows):
        return strategy.reduce(R.SUM, tj.PerTower(rows))

    assert float(jax.jit(total)(rows)) == -6
    slope = jax.grad(lambda x: total(x**2))(jnp.asarray(rows))
    assert slope.tolist() == [0, -2, -4, -6]
    # Known values, but in a function that is being traced.
    for known in (rows, jnp.asarray(rows)):
        assert float(jax.jit(lambda known=known: total(known))()) == -6
    assert len(ops.asked) == 4
    out = strategy.call_for_each_tower(
        lambda tower: tower.merge_call(lambda s, v: s.reduce(R.SUM, v), tower.id)
    )
    assert int(out) == 6
    assert len(ops.asked) == 4


@pytest.mark.slow
def test_batch_reduce_is_one_collective_in_order():
    ops = Counting()
    strategy = mirrored(4, 4, ops)
    values = [np.full((4, n), n, np.float32) for n in (3, 1, 2)]
    pairs = [
        (tj.PerTower(values[0]), "cpu:5"),
        (tj.PerTower(values[1]), None),
        ({"x": tj.PerTower(values[2]), "same": 0}, ["cpu:1", "cpu:6"]),
    ]
    first, second, third = strategy.batch_reduce(R.SUM, pairs)
    assert ops.asked == [[(3,), (1,), (2,)]]
    assert first.tolist() == [-12] * 3 and first.devices() == {jax.devices()[5]}
    assert second.tolist() == [-4] and second.devices() == set(jax.devices()[:4])
    assert third["x"].tolist() == [-8, -8]
    assert third["x"].devices() == {jax.devices()[1], jax.devices()[6]}
    [(kind, shapes, _)] = sent(tj.AllReduce(), [np.ones((8, n), "f") for n in (3, 1)])
    assert (kind, shapes) == ("all-reduce", ["f32[4]"])


@pytest.mark.slow
def test_batch_reduce_of_means_first_towers_and_nothing():
    strategy = mirrored(4, 2, tj.collectives.Packed(num_packs=2))
    pairs = [(tj.PerTower(np.arange(4) + n), None) for n in (0, 10)]
    assert [float(x) for x in strategy.batch_reduce(R.MEAN, pairs)] == [1.5, 11.5]
    first = strategy.batch_reduce(R.ONLY_FIRST_TOWER, tuple(pairs))
    assert [int(x) for x in first] == [0, 10]
    assert strategy.batch_reduce(R.SUM, []) == []


def test_broadcast_is_a_copy_on_each_device():
    strategy = mirrored(4, 2, tj.AllReduce())
    given = jnp.float32(1.5)
    out = strategy.broadcast({"a": given, "b": np.arange(3)})
    for x, expected in ((out["a"], 1.5), (out["b"], [0, 1, 2])):
        assert x.is_fully_replicated and len(x.addressable_shards) == 2
        assert all(
            np.asarray(s.data).tolist() == expected for s in x.addressable_shards
        )
    assert strategy.broadcast(1.0, "cpu:7").devices() == {jax.devices()[7]}
    inside = strategy.call_for_each_tower(
        lambda tower: tower.merge_call(
            lambda s, v: s.broadcast(s.unwrap(v)[1]), tower.id
        )
    )
    assert int(inside) == 1


def test_destinations_are_where_a_value_lies():
    strategy = mirrored(4, 2, tj.AllReduce())
    devices = jax.devices()
    mean = tj.PerTower(np.float32([1, 2, 3, 6]))
    there = strategy.broadcast(0.0, ("cpu:6", "cpu:3"))
    split = jax.device_put(np.ones(4), strategy.placement.sharding(Layout.PER_TOWER))
    for destinations, expected in [
        ("cpu:5", {devices[5]}),
        (devices[4], {devices[4]}),
        (("/device:CPU:6", devices[5]), {devices[5], devices[6]}),
        ([devices[6]], {devices[6]}),
        (jax.device_put(1.0, devices[5]), {devices[5]}),
        (there, {devices[3], devices[6]}),
        (tj.PerTower(split), set(devices[:2])),
        (tj.TowerLocal({"a": split, "b": there}, R.SUM), {*devices[:2], devices[3],
                                                          devices[6]}),
    ]:  # fmt: skip
        out, shared = strategy.reduce(R.MEAN, (mean, 7), destinations=destinations)
        assert out.devices() == shared.devices() == expected
        assert all(float(s.data) == 3 for s in out.addressable_shards)
        assert all(int(s.data) == 7 for s in shared.addressable_shards)


# Who chooses.


def test_platform_and_processes_decide(monkeypatch):
    choose = tj.collectives.choose_cross_tower_ops
    assert choose(jax.devices()) == choose(names(8))
    assert choose(names(8)).ops == tj.AllReduce()
    assert "8 CPU devices of one process" in choose(names(8)).reason
    assert choose(["cpu:3"]).reason == "There is one device, so nothing is sent."
    absent = choose(["gpu:100", "gpu:101"])
    assert absent.ops == tj.AllReduce()
    assert absent.reason.endswith("devices. (Not on this machine: gpu:100, gpu:101.)")

    @dataclasses.dataclass
    class Device:
        process_index: int

    def owners(*indices):
        devices = [Device(i) for i in indices]
        monkeypatch.setattr(
            "towerjax.collectives.choose.platform_devices", lambda platform: devices
        )
        return choose([f"gpu:{i}" for i in range(len(indices))])

    assert owners(0, 0, 1, 1).ops == tj.collectives.Hierarchical()
    assert "2 processes have 2 GPU devices each" in owners(0, 0, 1, 1).reason
    for indices in ((0, 1, 0, 1), (0, 0, 0, 1), (0, 1), (0, 0, 1, 1, 1)):
        assert owners(*indices).ops == tj.AllReduce()
        assert "processes do not form equal groups" in owners(*indices).reason
    assert "one process, whose links are alike" in owners(0, 0).reason


# Buffers: every leaf lies in one place, and comes back.


kinds_of_leaves = st.lists(
    st.tuples(
        st.sampled_from([np.float32, jnp.bfloat16, np.int32, np.bool_]),
        st.sampled_from([(), (1,), (5,), (0, 4), (3, 2), (40,)]),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_tree_depends_on_the_number_of_towers_alone():
    rows = np.random.default_rng(0).normal(size=(12, 1000)).astype(np.float32)

    @jax.jit
    def sums(rows):
        """Of all at once, and of parts that are added up first."""
        parts = [[add_pairwise(x) for x in jnp.split(rows, n)] for n in (12, 6, 3, 4)]
        return add_pairwise(rows), [add_pairwise(jnp.stack(x)) for x in parts]

    whole, (*again, of_thirds) = jax.device_get(sums(rows))
    for one in again:  # powers of two: a device's towers are a subtree
        np.testing.assert_array_equal(whole, one)
    assert (of_thirds != whole).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32", "uint8"])
def test_the_dtype_of_a_reduction_is_numpys_in_x64(dtype):
    with jax.enable_x64(True):
        x = np.ones(4, dtype)
        for reduction, numpys in ((R.MEAN, jnp.mean), (R.SUM, jnp.sum)):
            expected = jax.eval_shape(numpys, x).dtype
            assert reduced_dtype(reduction, x.dtype) == expected
