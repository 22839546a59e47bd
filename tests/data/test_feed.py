"""The input: cut into batches, placed in advance, in order, and nothing lost."""

import contextlib
import gc
import itertools
import json
import threading
import time
import traceback
import weakref

import jax
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.data.feed import batches
from towerjax.data.stream import Source, prefetch

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


# Cutting


@pytest.mark.slow
def test_a_seed_shuffles_each_epoch_anew_and_each_example_comes_once():
    data = {"x": np.arange(11) * 10, "y": np.arange(11)}
    cut = list(batches(data, 4, epochs=3, seed=5))
    assert [len(batch["y"]) for batch in cut] == [4, 4, 3] * 3
    epochs = [np.concatenate([b["y"] for b in cut[i : i + 3]]) for i in (0, 3, 6)]
    for epoch, order in enumerate(epochs):
        expected = np.random.default_rng((5, epoch)).permutation(11)
        np.testing.assert_array_equal(order, expected)
        assert sorted(order) == list(range(11))
    assert len({tuple(order) for order in epochs}) == 3
    for batch in cut:
        np.testing.assert_array_equal(batch["x"], batch["y"] * 10)


def test_numbers_of_numpy_are_numbers():
    """100 times 3 is no int8, and JSON has none of NumPy's."""
    options = {"epochs": 2, "seed": 3}
    narrow = {name: np.int8(x) for name, x in options.items()}
    ours = batches(np.arange(350), np.int8(100), **narrow)
    plain = batches(np.arange(350), 100, **options)
    assert json.dumps(ours.get_state()) == json.dumps(plain.get_state())
    assert [x.tolist() for x in ours] == [x.tolist() for x in plain]


@pytest.mark.parametrize("options", [{}, {"epochs": 3, "drop_remainder": True}])
def test_the_length_is_how_many_are_left(options):
    cut = batches(np.arange(10), 4, **options)
    left = [len(cut), *(len(cut) for _ in cut)]
    assert left == list(range(len(left)))[::-1] and left[0] in (3, 6)
    with pytest.raises(TypeError, match="never end, so they have no length"):
        len(batches(np.arange(10), 4, epochs=None))


def test_epochs_none_never_ends():
    endless = batches(np.arange(3), 2, epochs=None)
    assert [len(b) for b in itertools.islice(endless, 1000)] == [2, 1] * 500


@pytest.mark.parametrize(("arguments", "message"), [
    ({"data": {"x": np.zeros(3), "y": np.zeros(4)}}, "same number .*tj.Whole"),
    ({"data": {"x": 3.0}}, "is 3.0 of type float"),
    ({"data": {}}, "holds no arrays"),
    ({"data": np.zeros((0, 2))}, "empty"),
    ({"batch_size": 0}, "batch_size=0 must be a whole number >= 1"),
    ({"epochs": 0}, "epochs=0 must be a whole number >= 1"),
    ({"seed": -1}, "seed=-1 must be a whole number >= 0"),
    ({"batch_size": 5, "drop_remainder": True}, "leaves no batch of 4 examples"),
])  # fmt: skip
def test_bad_arguments_are_refused_at_the_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(**{"data": np.zeros(4), "batch_size": 2, **arguments})


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_go_on_anywhere(seed, drop_remainder):
    data = {"x": np.arange(11)}
    options = {"epochs": 3, "seed": seed, "drop_remainder": drop_remainder}
    whole = [b["x"].tolist() for b in batches(data, 4, **options)]
    assert len(whole) == (6 if drop_remainder else 9)
    for position in range(len(whole) + 1):
        there = batches(data, 4, **options).at(position)
        assert there.position == position
        cursor = json.loads(json.dumps(there.get_state()))
        other = batches(data, 4, **options)
        other.set_state(cursor)
        assert [b["x"].tolist() for b in there] == whole[position:]
        assert [b["x"].tolist() for b in other] == whole[position:]


def test_a_cursor_of_other_batches_is_refused():
    source = batches(np.arange(11), 4, seed=1)
    cursor = batches(np.arange(11), 2, seed=2, epochs=5).get_state()
    text = "batch_size was 2 and is 4, seed was 2 and .*batches='anew'"
    with pytest.raises(ValueError, match=text):
        source.set_state(cursor)
    for position in (-1, 4, 1.0):
        with pytest.raises(ValueError, match="position=.* must be a whole number"):
            source.at(position)
    source.set_state(batches(np.arange(11), 4, seed=1, epochs=5).get_state())


# Groups


def test_a_stream_takes_no_more_than_it_gives():
    source = iter(range(10))
    assert list(Source(source).stream(str, 0, most=4)) == ["0", "1", "2", "3"]
    assert next(source) == 4
    assert next(Source(source).stream(str, 0)) == "5"
    assert next(source) == 6


@pytest.mark.parametrize(
    "data", [[1, 2], batches(np.arange(4), 2)], ids=["list", "cursor"]
)
def test_a_placed_batch_that_was_used_is_not_kept(data):
    class Placed:
        pass

    source = Source(data)
    stream = source.stream(lambda group: Placed(), 0)
    placed = weakref.ref(next(stream))
    source.use(stream.get_state())
    assert placed() is None


# Prefetching


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
