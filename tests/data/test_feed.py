"""The input, cut into batches: in order, by a seed, from anywhere on."""

import itertools
import json

import numpy as np
import pytest

import towerjax as tj

batches = tj.batches


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
