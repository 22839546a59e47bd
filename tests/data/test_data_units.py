"""The functions of the input, each by itself: streams, rows, what is placed."""

import contextlib
import dataclasses
import gc
import itertools
import math
import operator
import threading
import time
import traceback
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_placer
from drawn import FLOATS, INTEGERS, array, assert_same_bits, few, seeds
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.data import distribute
from towerjax.data.batch_rows import Shares, counts_of_towers, fingerprint_of, fit_batch
from towerjax.data.placer import Placer
from towerjax.data.sparse_rows import Entries
from towerjax.data.stream import Source, prefetch
from towerjax.mesh.private_jax import put

Layout = tj.towers.Layout


DEPTHS = [0, 1, 3]


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(params * batch, tower.weight)


def train_step():
    return tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored())


def feeder_threads():
    return [t for t in threading.enumerate() if t.name == "towerjax-prefetch"]


def wait_until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert condition()


@pytest.fixture(autouse=True, scope="module")
def no_iterator_of_another_file():
    gc.collect()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert feeder_threads() == []


@pytest.mark.slow
def test_a_stream_takes_no_more_than_it_gives():
    source = iter(range(10))
    assert list(Source(source).stream(str, 0, most=4)) == ["0", "1", "2", "3"]
    assert next(source) == 4
    assert next(Source(source).stream(str, 0)) == "5"
    assert next(source) == 6


@pytest.mark.parametrize(
    "data", [[1, 2], tj.batches(np.arange(4), 2)], ids=["list", "cursor"]
)
def test_a_placed_batch_that_was_used_is_not_kept(data):
    class Placed:
        pass

    source = Source(data)
    stream = source.stream(lambda group: Placed(), 0)
    placed = weakref.ref(next(stream))
    source.use(stream.get_state())
    assert placed() is None


class LoaderError(Exception):
    pass


def failing_loader(position):
    for i in range(position):
        yield np.full(8, i, np.float32)
    raise LoaderError("the disk is gone")


@pytest.mark.parametrize("depth", DEPTHS)
def test_order_is_kept(depth):
    rng = np.random.default_rng(0)

    def place(i):
        time.sleep(rng.uniform(0, 0.002))
        return i * i

    assert list(prefetch(range(40), place, depth=depth)) == [i * i for i in range(40)]


def test_loading_overlaps_with_the_consumer():
    loaded = []

    def loader():
        for i in range(10):
            loaded.append(i)
            yield i

    for i in prefetch(loader(), lambda i: i, depth=2):  # the consumer is busy with i
        wait_until(lambda i=i: len(loaded) >= min(i + 3, 10))
        assert len(loaded) >= min(i + 3, 10)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_wait(depth):
    placed = []
    with contextlib.closing(prefetch(range(9), placed.append, depth=depth)) as feed:
        next(feed)
        wait_until(lambda: len(placed) == depth + 1)
        time.sleep(0.05)
        assert len(placed) == depth + 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("position", [0, 3])
def test_an_exception_arrives_where_it_occurred(depth, position):
    feed = prefetch(failing_loader(position), lambda x: x[0], depth=depth)
    assert [next(feed) for _ in range(position)] == list(range(position))
    with pytest.raises(LoaderError, match="the disk is gone") as caught:
        next(feed)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "failing_loader" in frames
    feed = prefetch(range(5), lambda i: 1 // (position - i), depth=depth)  # of placing
    assert len([next(feed) for _ in range(position)]) == position
    with pytest.raises(ZeroDivisionError):
        next(feed)


@pytest.mark.parametrize("depth", [1, 3])
def test_stopping_early_ends_the_thread_at_once(depth):
    feed = prefetch(itertools.count(), lambda i: i, depth=depth)
    assert next(feed) == 0
    assert len(feeder_threads()) == 1
    start_s = time.perf_counter()
    feed.close()
    assert feeder_threads() == []
    assert time.perf_counter() - start_s < 4  # of the 5 s for a loader that hangs


def test_ctrl_c_while_it_starts_ends_the_thread_too(monkeypatch):
    def started(thread):
        start(thread)
        raise KeyboardInterrupt

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", started)
    with pytest.raises(KeyboardInterrupt):
        next(prefetch(itertools.count(), lambda i: i, depth=1))
    wait_until(lambda: feeder_threads() == [])


def test_an_abandoned_feed_ends_its_thread_and_one_never_begun_has_none():
    feed = prefetch(itertools.count(), lambda i: i, depth=2)
    next(feed)
    del feed
    assert feeder_threads() == []
    prefetch(itertools.count(), lambda i: i, depth=2).close()
    assert feeder_threads() == []


def test_a_feed_that_is_collected_in_its_own_thread_ends_it():
    ended = []

    def place(x):
        if x == 1:
            given.wait(5)
            feed.close()  # as the garbage collector may, in any thread
            ended.append(True)
        return x

    given = threading.Event()
    feed = prefetch(itertools.count(), place, depth=2)
    assert next(feed) == 0
    given.set()
    wait_until(lambda: feeder_threads() == [])
    assert ended


@pytest.mark.slow
def test_a_loader_that_hangs_is_told_of(monkeypatch):
    hanging = threading.Event()
    release = threading.Event()

    def loader():
        yield 0
        hanging.set()
        release.wait()

    stop = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, _: stop(self, 0.01))
    feed = prefetch(loader(), lambda i: i, depth=1)
    next(feed)
    assert hanging.wait(5.0)
    with pytest.warns(RuntimeWarning, match="still busy with one batch") as caught:
        feed.close()
    assert caught[0].filename == __file__
    release.set()
    wait_until(lambda: not feeder_threads())


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_are_placed_in_the_precision_in_which_a_run_is_called(depth):
    """``jax.enable_x64`` as a context, which threads do not see by themselves."""
    data = [np.arange(8) / 3, np.arange(8) + 2**40]
    with jax.enable_x64(True):
        placed = list(prefetch(data, train_step().place_batch, depth=depth))
    for batch, rows in zip(placed, data, strict=True):
        np.testing.assert_array_equal(batch.arrays, rows, strict=True)


# What each tower has of a batch.


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_processes_compare_of_a_batch_tells_its_values_and_its_kind():
    x = np.arange(4, dtype=np.float32)
    others = [{"x": x + 1}, {"x": x[None]}, {"x": x.view(np.int32)}, {"y": x}, [x]]
    told = [fingerprint_of(batch) for batch in ({"x": x}, *others)]
    assert len(set(told)) == len(told)
    assert fingerprint_of({"x": x.copy()}) == told[0]


def test_each_process_is_told_which_part_is_its_own(monkeypatch):
    class Peers:
        def __init__(self, *_):
            pass

        def all_gather(self, told):
            return [told, told]

    def source(context):
        asked.append(context)
        yield np.full((2, 1), context.process_index, np.float32)

    asked = []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(distribute, "Exchange", Peers)
    placement = dataclasses.replace(mirrored(4, 2).placement)
    peers = types.SimpleNamespace(numbers=(0, 1), call_on_first=lambda make: make())
    vars(placement).update(num_processes=2, processes=peers)
    options = distribute.InputOptions("batch", "error", 1, 0)
    dataset = distribute.DistributedDataset(placement, source, options)
    build = dataset._build
    dataset._place = lambda taken, rows, counts: (build(taken, rows), counts)
    (tree, counts), *none = dataset
    assert asked == [tj.towers.InputContext(1, num_processes=2, num_towers=4)]
    assert tree.tolist() == [[1.0], [1.0]] and not none
    assert counts.tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_each_tower_has_its_entries_and_padding_as_jax_pads():
    dense = np.array([[1, 0, 2], [0, 0, 0], [3, 4, 5], [0, 6, 0]], np.float32)
    entries = Entries.from_leaf("x", sparse.BCOO.fromdense(dense))
    split = entries.split(2, 2, 6, 2)
    for part in range(2):
        own = sparse.BCOO.fromdense(dense[2 * part : 2 * part + 2], nse=6)
        rows = slice(6 * part, 6 * part + 6)
        np.testing.assert_array_equal(split.data[rows], own.data)
        np.testing.assert_array_equal(split.indices[rows], own.indices)


# What is placed.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", [Layout.PER_TOWER, Layout.PER_TOWER_STEPS])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool, jnp.bfloat16])
def test_put_is_device_put(layout, dtype, shared):
    sharding = mirrored(4, 4).placement.sharding(layout)
    x = np.arange(8 * 4 * 3).reshape(8, 4, 3).astype(dtype)[:, ::-1]
    found = put(x, sharding, shared=shared)
    expected = jax.device_put(x, sharding)
    assert found.sharding == expected.sharding and found.aval == expected.aval
    for mine, theirs in zip(
        found.addressable_shards, expected.addressable_shards, strict=True
    ):
        assert (mine.device, mine.index) == (theirs.device, theirs.index)
        np.testing.assert_array_equal(mine.data, theirs.data)


@pytest.mark.slow
def test_one_device_s_rows_of_a_known_kind_are_not_placed_before_the_call(monkeypatch):
    step = test_placer.known(1)
    state, _ = step(step.init(np.float32(3.0)), test_placer.rows())
    w = float(state.params)
    batch = test_placer.rows(seed=1)
    monkeypatch.setattr("towerjax.mesh.transfer.put", None)  # what places host rows
    _, metrics = step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(np.mean((w - batch["x"]) ** 2))
    with pytest.raises(TypeError, match="NoneType"):
        step.place_batch(batch)


def test_batches_that_go_back_to_their_start_have_their_length_again():
    """Another attempt of a run counts them anew, and skips those that were used."""
    batches = tj.batches(np.arange(8), 2, epochs=2).at(1)
    source = Source(batches)
    with contextlib.closing(source.stream(lambda x: x, 0)) as stream:
        used = [next(stream) for _ in range(3)]
        source.use(stream.get_state())
    source.restart()
    again = Source(batches)
    assert operator.length_hint(again) == 7
    again.go_to(source.last)
    assert operator.length_hint(again) == 4
    assert [x.tolist() for x in used] == [[2, 3], [4, 5], [6, 7]]
    assert next(again).tolist() == [0, 1]
