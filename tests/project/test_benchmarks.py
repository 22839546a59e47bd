"""The harness of the benchmarks: who goes when, which figures count, what it prints."""

import argparse
import functools
import json

import jax
import numpy as np
import pytest
from checkout import ROOT

import towerjax as tj
from benchmarks import catalogue, harness, same_bits, steps
from benchmarks.models import MODELS
from benchmarks.peers import trials

DOCS = ROOT / "docs"


def test_contenders_take_turns_and_warm_rounds_do_not_count():
    went = []

    def turn(name):
        went.append(name)
        return len(went)

    found = harness.turns("abc", turn, rounds=2)
    assert "".join(went) == "abcabccba"
    np.testing.assert_array_equal(found, [[4, 5, 6], [9, 8, 7]])


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Not that of the medians: a slow round is slow for all."""
    rounds = harness.Rounds(np.array([[1.0, 2.0], [10.0, 30.0], [4.0, 4.0]]))
    assert rounds.medians() == [4, 4] and rounds.least() == [1, 2]
    assert rounds.ratio(1, 0) == 2 and rounds.ratio(0, 1) == 0.5
    assert rounds.quartiles(1, 0) == (1.5, 2, 2.5)
    assert rounds.interval(1, 0).median == 2


def test_a_call_is_awaited_and_its_return_is_timed():
    x = np.ones(3, np.float32)
    ends, returns = harness.awaited_calls(
        [lambda: jax.numpy.asarray(x), lambda: None], rounds=2, calls=3
    )
    assert ends.seconds.shape == returns.seconds.shape == (2, 2)
    assert (returns.seconds > 0).all() and (ends.seconds >= returns.seconds).all()


def printed(capsys, *argv, **small):
    """What a table of three columns prints, by options of a command line."""
    parser = harness.parser_of("Say it.\n\nMore.")
    assert parser.description == "Say it."
    parser.add_argument("--size", type=int, default=9)
    options = harness.options_of(parser, argv, **small)
    columns = {"size": ",", "ms": ".1f", "bytes": lambda x: f"{x} B"}
    table = harness.begin("of a test", columns, options)
    table.row(1000 * options.size, (1.25, 2), 3)
    table.row(options.size, None, 4)
    table.note("all")
    return capsys.readouterr().out.splitlines()


def test_a_table_is_one_of_markdown(capsys):
    _, about, _, *lines, note = printed(capsys)
    assert about == f"JAX {jax.__version__}, cpu, of a test" and note == "all"
    assert lines == [
        "| size | ms | bytes |",
        "|---|---|---|",
        "| 9,000 | 1.2, 2.0 | 3 B |",
        "| 9 | - | 4 B |",
    ]


def test_a_row_is_a_line_of_json_with_what_was_measured(capsys):
    one, two, note = map(json.loads, printed(capsys, "--json", "--small", size=2))
    where = {"jax": jax.__version__, "platform": "cpu"}
    assert one == {**where, "size": 2000, "ms": [1.25, 2], "bytes": 3}
    assert two == {**where, "size": 2, "ms": None, "bytes": 4}
    assert note == {"note": "all"}


def test_a_row_has_a_value_for_each_column():
    table = harness.begin("", {"a": ""}, argparse.Namespace(json=True))
    with pytest.raises(ValueError, match="zip"):
        table.row(1, 2)


def test_the_pages_count_the_trainings_of_the_table():
    models = len(catalogue.MODELS)
    optimizers = len(catalogue.OPTIMIZERS)
    number = len(same_bits.cases())
    options = number - models - optimizers
    counts = f"{models} models, {optimizers} optimizers, {options} options\n"
    assert counts in (DOCS / "same_bits.md").read_text()
    assert f" {number} of {number} models, " in (DOCS / "evidence.md").read_text()


def first_steps(way, batch_of=lambda batch: batch, devices=2):
    """The state before and after a step by hand on a batch, as host arrays."""
    model = MODELS["mlp"](jax.numpy.float32)
    params = jax.tree.map(np.asarray, model.init(0))
    work = steps.Work(model, params, batch_of(model.make_batch(1, 8)))
    names = tuple(f"cpu:{number}" for number in range(devices))
    step = steps.by_hand(work, tj.Mirrored(names).placement, way)
    before = jax.tree.map(np.array, step.state)
    return before, jax.tree.map(np.array, step.run()[0])


def with_nan(batch):
    return {**batch, "x": batch["x"] * np.where(np.arange(8) == 7, np.nan, 1)[:, None]}


@pytest.mark.slow
def test_a_guarded_step_by_hand_keeps_its_state_where_a_row_is_nan():
    before, after = first_steps("guarded", with_nan)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    _, plain = first_steps("shard_map", with_nan)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(plain))


@pytest.mark.slow
def test_a_guarded_step_by_hand_is_the_plain_one_where_all_is_finite():
    before, guarded = first_steps("guarded")
    _, plain = first_steps("shard_map")
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(equal, guarded, plain)
    moved = jax.tree.map(lambda x, y: (x != y).any(), guarded, before)
    assert all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_a_trial_is_what_it_says_or_raises():
    trial = {"model": "mlp", "batch": 8}
    with pytest.raises(ValueError, match=r"shard_map, jit, .*, not 'jitt'"):
        trials.build(**trial, by="jitt")
    for name, value in (("guard", "loss"), ("strategy", "mirrored_scan")):
        with pytest.raises(ValueError, match=f"Write {name}='"):
            trials.build(**trial, by="guarded", **{name: value})
    # A peer is given the options of the step by towerjax that it is compared with.
    call, *args = trials.build_by_hand(**trial, guard="loss")
    assert np.isfinite(call(*args)[1])
