"""Each example counts once: what was dropped or repeated is told by its id."""

import collections
import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.data import shard
from towerjax.metrics.example_count import (
    ExampleCount,
    as_addends,
    count_rows,
    from_sums,
)

N = 37
IDS = np.arange(N) * 7 - 20


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight * batch["weight"])


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(N, 3)).astype(np.float32),
        "y": rng.normal(size=N).astype(np.float32),
        "weight": rng.choice(np.array([0.5, 1.0, 2.0], np.float32), N),
        "id": IDS,
    }


def devices(count, towers=8, **options):
    return tj.Mirrored([f"cpu:{i}" for i in range(count)], towers=towers, **options)


def by_id(batch):
    return batch["id"]


@functools.cache
def step_of(strategy, **options):
    """A step, whose programs all tests share."""
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def build(strategy=None, **options):
    options = {"remainder": "pad", "example_ids": by_id, **options}
    step = step_of(strategy or devices(1), **options)
    return step, step.init({"w": np.array([0.5, -1.0, 2.0], np.float32)})


def same_cells(count, expected):
    np.testing.assert_array_equal(count.cells, expected.cells)


# The count by itself


def random_keys(rng, size):
    wide = rng.integers(-(2**63), 2**63 - 1, size)
    ids = np.where(rng.random(size) < 0.5, rng.integers(-5, 30, size), wide)
    return ids, rng.choice(np.array([0.25, 1.0, 1e-30], np.float32), size)


@pytest.mark.parametrize("seed", range(8))
def test_differences_are_those_of_multisets(seed):
    rng = np.random.default_rng(seed)
    ids, weights = random_keys(rng, 400)
    seen = np.concatenate([rng.permutation(np.arange(400)[8:]), [20, 20, 20, 99, 100]])
    report = ExampleCount.of(ids[seen], weights[seen]).compare(
        ExampleCount.of(ids, weights)
    )
    pairs = list(zip(ids.tolist(), weights.tolist(), strict=True))
    expected = collections.Counter(pairs)
    found = collections.Counter(pairs[row] for row in seen)
    assert sum((expected - found).values()) and sum((found - expected).values())
    assert {x[:2]: x[2] for x in report.dropped} == dict(expected - found)
    assert {x[:2]: x[2] for x in report.repeated} == dict(found - expected)
    assert (report.seen, report.expected, report.others) == (397, 400, 0)


def test_a_report_says_it_in_words():
    expected = ExampleCount.of([17, 4, 9, 9, 5], [1, 1, 1, 1, 1])
    seen = ExampleCount.of([4, 4, 4, 5], [1, 1, 1, 0.5])
    assert str(seen.compare(expected)) == (
        "4 examples were seen and 5 expected: example 5 dropped, example 9 dropped 2"
        " times, example 17 dropped, example 4 seen 2 times more, example 5 of weight"
        " 0.5 seen 1 time more"
    )
    assert str(seen.compare(seen)).endswith(": each as often as expected")


def test_too_many_to_be_listed_are_counted():
    report = ExampleCount.of(range(1000)).compare(ExampleCount.of(range(3000)))
    assert not report.is_same and report.dropped == report.repeated == ()
    assert report.others == 2000
    assert "at least 2000, too many to be listed" in str(report)
    moved = ExampleCount.of(range(1000)).compare(ExampleCount.of(range(500, 1500)))
    assert moved.seen == moved.expected and moved.others > 100


def test_a_count_has_no_order_and_adds_up():
    rng = np.random.default_rng(0)
    ids, weights = random_keys(rng, 300)
    order = rng.permutation(300)
    whole = ExampleCount.of(ids, weights)
    same_cells(ExampleCount.of(ids[order], weights[order]), whole)
    parts = [ExampleCount.of(ids[a : a + 77], weights[a : a + 77]) for a in (0, 77)]
    rest = ExampleCount.of(ids[154:], weights[154:])
    same_cells(rest + parts[1] + parts[0], whole)
    same_cells(whole * 3, whole + whole + whole)
    same_cells(ExampleCount.of([1, 2, 3], [1, 0, -0.0]), ExampleCount.of([1]))
    assert whole.fingerprint != (whole * 3).fingerprint


def test_fingerprints_of_close_data_differ():
    # Sums of ids, and of ids with weights, that are the same.
    lists: list[tuple[list[int], list[int] | None]] = [
        ([1, 4], None),
        ([2, 3], None),
        ([1, 4], [2, 1]),
        ([1, 4], [1, 2]),
    ]
    assert len({ExampleCount.of(*each).fingerprint for each in lists}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("towers", [256, 257, 2**16])
def test_sums_over_towers_are_exact_in_float32(towers):
    full = np.full((3, 32, 9), 0xFFFFFFFF, np.uint32)
    addends = np.asarray(jax.jit(as_addends, static_argnums=1)(full, towers))
    assert addends.dtype == np.float32
    assert addends.max() * towers <= 2**24
    sums = np.float32(addends.astype(np.float64) * towers)
    expected = np.uint32(0xFFFFFFFF * towers % 2**32)
    found = jax.jit(from_sums, static_argnums=1)(sums, towers)
    assert (np.asarray(found) == expected).all()


# In a step

STRATEGIES = {
    "4 towers on 2": devices(2, 4, cross_tower_ops=tj.collectives.Packed(num_packs=2)),
    "pmap scan": devices(2, 4, local="scan", executor="pmap"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_example_counts_once(name):
    micro_batches, per_call = (2, 1) if name == "pmap scan" else (1, 3)
    step, state = build(STRATEGIES[name], micro_batches=micro_batches)
    data, before = make_data(), np.asarray(state.params["w"])
    cut = tj.batches(data, 16, epochs=2, seed=1)  # two of 16 and one of 5, twice
    state, _ = tj.run(step, state, cut, steps_per_call=per_call, progress=False)
    same_cells(state.seen, ExampleCount.of(IDS) * 2)
    assert tj.metrics.check_examples(state, IDS, epochs=2).seen == 2 * N
    assert (np.asarray(state.params["w"]) != before).all()
    with pytest.raises(
        tj.metrics.ExamplesError, match="After 1 epoch 74 examples"
    ) as caught:
        tj.metrics.check_examples(state, IDS)
    assert {times for *_, times in caught.value.report.repeated} <= {1}


@pytest.mark.slow
def test_weights_are_told_apart_and_an_ignored_nan_is_seen():
    both = lambda b: (b["id"], b["weight"])  # noqa: E731
    step, state = build(example_ids=both, on_nonfinite="ignore")
    data = {**make_data(), "y": np.full(N, np.nan, np.float32)}
    state, _ = tj.run(step, state, tj.batches(data, 8), progress=False)
    tj.metrics.check_examples(state, IDS, weights=data["weight"])
    other = data["weight"].copy()
    other[3] = 7
    with pytest.raises(
        tj.metrics.ExamplesError, match=r"example 1 of weight 7 dropped, example 1"
    ):
        tj.metrics.check_examples(state, IDS, weights=other)


@pytest.mark.slow
def test_wide_ids_come_in_halves():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, N)
    halves, weight = ids.view(np.uint32).reshape(-1, 2), np.ones(N, np.float32)
    cells = jax.jit(lambda rows, w: count_rows(lambda x: x, rows, w))(halves, weight)
    same_cells(ExampleCount(cells), ExampleCount.of(ids))
    same_cells(ExampleCount.of(halves), ExampleCount.of(ids))


@pytest.mark.slow
def test_rows_over_are_told_by_their_ids():
    step, state = build(devices(1, 4), remainder="drop")
    data = {name: x[:30] for name, x in make_data().items()}
    state, _ = tj.run(step, state, tj.batches(data, 15), progress=False)
    with pytest.raises(tj.metrics.ExamplesError) as caught:
        tj.metrics.check_examples(state, data["id"])
    lost = [*range(12, 15), *range(27, 30)]
    assert [id for id, *_ in caught.value.report.dropped] == IDS[lost].tolist()
    assert caught.value.report.repeated == ()


@pytest.mark.slow
def test_a_refused_step_has_not_seen_its_examples():
    step, state = build(on_nonfinite="skip")
    data = make_data()
    data["y"][18] = np.nan
    cut = list(tj.batches(data, 8))
    cut += [cut[0], cut[0]]
    state, history = tj.run(step, state, cut, progress=False)
    assert history.skipped == (3,)
    with pytest.raises(tj.metrics.ExamplesError) as caught:
        tj.metrics.check_examples(state, IDS)
    report = caught.value.report
    assert [id for id, *_ in report.dropped] == IDS[16:24].tolist()
    assert report.repeated == tuple((int(id), 1.0, 2) for id in IDS[:8])


@pytest.mark.slow
def test_a_row_lost_on_its_way_is_named(monkeypatch):
    count = shard.counts_of_towers

    def lossy(num_valid, rows, num_towers):
        counts = count(num_valid, rows, num_towers)
        counts[5] -= 1  # the last row of tower 5 becomes padding
        return counts

    monkeypatch.setattr(shard, "counts_of_towers", lossy)
    step, state = build()
    state, _ = tj.run(step, state, [next(tj.batches(make_data(), 16))], progress=False)
    with pytest.raises(
        tj.metrics.ExamplesError, match=f"15 .* example {IDS[11]} dropped."
    ):
        tj.metrics.check_examples(state, IDS[:16])


def collectives(step, state, batch):
    text = step.program(state, batch).call.as_text()
    return len(re.findall(r" (?:all-[a-z-]+|reduce-scatter)\(", text))


@pytest.mark.slow
@pytest.mark.parametrize("ops", [tj.AllReduce(), tj.PinnedTree()], ids=str)
def test_a_count_needs_no_collective_of_its_own(ops):
    step, state = build(devices(2, 2, cross_tower_ops=ops))
    batch = next(tj.batches(make_data(), 16))
    # As many as without a count.
    assert collectives(step, state, batch) == (1 if ops == tj.AllReduce() else 2)
    cut = tj.batches(make_data(), 16, epochs=2, seed=0)
    state, _ = tj.run(step, state, cut, progress=False)
    same_cells(state.seen, ExampleCount.of(IDS) * 2)


# What is refused


@pytest.mark.parametrize(
    ("example_ids", "message"),
    [
        (lambda b: b["x"], r"ids are float32\[\d, 3\], but an id is one integer"),
        (lambda b: b["id"][:1], r"gave 1 ids for a tower's 2 rows"),
        (lambda b: (b["id"], b["x"]), r"weights are \[2, 3\], but ids \[2\]"),
        (lambda b: 3, "ids are a int, not an array"),
    ],
)
def test_what_is_no_id_is_refused(example_ids, message):
    step, state = build(example_ids=example_ids)
    with pytest.raises(ValueError, match=message):
        step(state, next(tj.batches(make_data(), 16)))


@pytest.mark.parametrize("times", [1.9, -1, True, np.float32(2)])
def test_a_number_of_epochs_is_whole(times):
    count = ExampleCount.of(IDS)
    with pytest.raises(ValueError, match="^epochs=.* must be a whole number >= 0"):
        tj.metrics.check_examples(count, IDS, epochs=times)
    for multiply in (lambda: count * times, lambda: times * count):
        with pytest.raises(ValueError, match="^times=.* must be a whole number >= 0"):
            multiply()


def test_a_count_is_multiplied_from_both_sides():
    seen = ExampleCount.of(np.tile(IDS, 3))
    for times in (3, np.int64(3)):
        for count in (times * ExampleCount.of(IDS), ExampleCount.of(IDS) * times):
            assert seen.compare(count).is_same
    assert tj.metrics.check_examples(ExampleCount.none(), IDS, epochs=0).is_same


@pytest.mark.slow
def test_a_state_that_counts_and_a_step_that_does_not_are_refused():
    counting, state = build()
    silent, other = build(example_ids=None)
    batch = next(tj.batches(make_data(), 16))
    for _ in range(2):  # the second time there is a program
        with pytest.raises(ValueError, match=r"example_ids=.*state, seen=fresh.seen"):
            counting(other, batch)
        with pytest.raises(ValueError, match=r"example_ids=.*seen=None"):
            silent(state, batch)
        empty = dataclasses.replace(other, seen=ExampleCount.none())
        state, _ = counting(counting.place(empty), batch)
        other, _ = silent(silent.place(dataclasses.replace(state, seen=None)), batch)
    with pytest.raises(ValueError, match="counts no examples"):
        tj.metrics.check_examples(other, IDS)
    with pytest.raises(ValueError, match="example_ids='id' is not a function"):
        build(example_ids="id")
    same_cells(
        ExampleCount.of(np.uint64([2**63])), ExampleCount.of(np.uint32([[0, 1 << 31]]))
    )
