"""What holds for any batch, mask, number of towers and devices, dtype and tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import (
    assert_same_bits,
    few,
    seeds,
    towers_values,
    trees,
)
from hypothesis import given
from hypothesis import strategies as st
from layouts import with_verbs as mirrored

import towerjax as tj

pytestmark = pytest.mark.slow
R = tj.Reduction
kinds = st.sampled_from(["ones", "plain", "spread"])


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
