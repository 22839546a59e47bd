"""What a sweep measures, and what is said of it; sweeps are in test_bench_sweep.

The losses of every contender are compared with SGD of momentum in NumPy float64.
"""

import dataclasses
import functools
import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.collectives.choose import parse_ops
from towerjax.tools.bench import Grid, Result, TimingProtocol, Trial, compare, protocol
from towerjax.tools.bench.models import MODELS, find_model, mlp
from towerjax.tools.bench.protocol import (
    Interval,
    calls_in,
    in_turns,
    interval_of_median,
    read_toml,
)
from towerjax.tools.bench.results import (
    Results,
    differences,
    efficiency,
    over_hand,
    read_results,
)
from towerjax.tools.bench.trials import (
    CHAIN,
    LEARNING_RATE,
    MOMENTUM,
    bare_reduction,
    check_losses,
    figures,
    run_recorded,
    run_trial,
    strategy_of,
    work_of,
)
from towerjax.tools.sweep.result import RecordFile

QUICK = TimingProtocol(rounds=6, seconds_per_round=0.001)

# Protocol.


def test_the_interval_is_the_textbooks():
    """Ranks of the 95 % interval, from tables of the sign test."""
    ranks = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 50: 18}
    for count, rank in ranks.items():
        values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
        found = interval_of_median(values)
        assert found == Interval((count + 1) / 2, rank, count + 1 - rank), count


@pytest.mark.parametrize(
    "options, text",
    [
        ({"rounds": 5}, "rounds=5 must be a whole number >= 6"),
        ({"seconds_per_round": "1"}, "seconds_per_round='1' must be seconds >= 0"),
    ],
)
def test_a_wrong_protocol_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        TimingProtocol(**options)


class Fake:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self):
        self.log.append(self.name)


def test_contenders_have_their_turns():
    log = []
    table = in_turns([Fake("a", log), Fake("b", log)], rounds=3, calls=2)
    assert "".join(log) == "aabb" + "bbaa" + "aabb"
    assert table.shape == (3, 2, 2) and (table[..., 0] >= table[..., 1]).all()


@pytest.mark.slow
def test_a_ratio_of_intervals_has_the_ends_that_can_be():
    found = Interval(6.0, 4.0, 8.0).over(Interval(2.0, 1.0, 4.0))
    assert found == Interval(3.0, 1.0, 8.0)


def test_a_call_is_awaited(monkeypatch):
    class Slow:
        def run(self):
            return "result"

    seconds, awaited = iter([0.0, 1.0, 3.0]), []
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(protocol.jax, "block_until_ready", awaited.append)
    table = in_turns([Slow()], rounds=1, calls=1)
    assert table.tolist() == [[[3.0, 1.0]]] and awaited == ["result"]


def test_extremes_are_dropped(monkeypatch):
    times = np.array([[5.0, 1.0], [1000.0, 2.0], [6.0, 0.0], [1.0, 999.0], [7.0, 3.0]])
    for trim, expected in ((0.2, [6.0, 2.0]), (0.1, times.mean(axis=0).tolist())):
        calls = iter(times)
        monkeypatch.setattr(protocol, "_time_call", lambda _: next(calls))  # noqa: B023
        found = in_turns([None], rounds=1, calls=5, trim=trim)
        assert found[0, 0].tolist() == expected


def test_calls_of_a_round_fill_its_time():
    log = []
    assert calls_in(0.0, [Fake("a", log)]) == 1 and len(log) == 3
    assert calls_in(1e9, [Fake("a", log)]) == 1000


# Grids.


def test_every_combination_is_a_trial_once():
    grid = Grid(
        ["mlp"],
        towers=[1, 2, 4],
        devices=[1, 4],
        batches_per_tower=[8],
        strategies=["mirrored", "one_device"],
        cross_tower_ops=["AllReduce()", "PinnedTree()"],
        peers=["jit"],
    )
    assert [trial.describe() for trial in grid.trials()] == [
        "mlp B=8 T=1 D=1",
        "mlp B=8 T=1 D=1 one_device",
        "mlp B=16 T=2 D=1",
        "mlp B=16 T=2 D=1 PinnedTree()",
        "mlp B=32 T=4 D=1",
        "mlp B=32 T=4 D=1 PinnedTree()",
        "mlp B=8 T=1 D=1 jit",
        "mlp B=16 T=1 D=1 jit",
        "mlp B=32 T=1 D=1 jit",
        "mlp B=32 T=4 D=4",
        "mlp B=32 T=4 D=4 PinnedTree()",
        "mlp B=32 T=4 D=4 jit",
    ]


def test_no_devices_are_one_a_tower():
    trials = Grid(("mlp", "cnn"), towers=(2, 3), batches=(6, 12)).trials()
    assert len(trials) == 8
    assert {(t.towers, t.devices) for t in trials} == {(2, 2), (3, 3)}
    assert {t.batch for t in trials} == {6, 12}


@pytest.mark.parametrize(
    "options, text",
    [
        ({}, r"needs batches=\[...\] or batches_per_tower"),
        ({"batches": 8}, r"batches=8 must be a list, \[8\]"),
        ({"models": "mlp", "batches": [8]}, r"models='mlp' must be a list"),
        ({"batches": [8], "towers": [0]}, "towers=0 must be a whole number >= 1"),
        ({"batches": [8], "towers": [3], "devices": [2]}, r"No trial.*towers=\(3,\)"),
        (
            {"batches": [8], "strategies": ["mirored"]},
            "strategy='mirored' must be one of",
        ),
        (
            {"batches": [8], "peers": ["ddp"]},
            "by='ddp' must be one of 'towerjax', 'jit'",
        ),
        ({"batches": [8], "dtypes": ["f32"]}, "dtype='f32' must be one of"),
        ({"batches": [8.5]}, "batch=8.5 must be a whole number"),
        (
            {"batches": [8], "towers": [2], "cross_tower_ops": ["Packd()"]},
            r"cross_tower_ops='Packd\(\)' is not one of AllReduce, PinnedTree",
        ),
    ],
)
def test_a_wrong_grid_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Grid(**{"models": ["mlp"], **options})


def test_ops_are_as_one_writes_them():
    assert parse_ops("Packed(num_packs=3)") == tj.collectives.Packed(num_packs=3)
    assert parse_ops("ReduceToOneDevice()") == tj.collectives.ReduceToOneDevice()
    assert parse_ops("PinnedTree") == tj.PinnedTree()
    for text in ("Packed(n=3)", "__import__('os')", "Packed(num_packs=0)", "("):
        with pytest.raises(ValueError, match="is not one of"):
            parse_ops(text)


TOML = """
models = ["mlp"]
towers = [1, 2]
batches_per_tower = [4]
cross_tower_ops = ["Packed(num_packs=2)"]
[protocol]
rounds = 7
"""


def test_a_grid_comes_from_a_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    grid, timing = read_toml(path)
    ops = ("Packed(num_packs=2)",)
    assert grid == Grid(
        ("mlp",), towers=(1, 2), batches_per_tower=(4,), cross_tower_ops=ops
    )
    assert timing == TimingProtocol(rounds=7)
    changed, timing = read_toml(path, "towers=[4]", "protocol.seconds_per_round=2")
    assert changed == dataclasses.replace(grid, towers=(4,))
    assert timing == TimingProtocol(rounds=7, seconds_per_round=2)


@pytest.mark.parametrize(
    "old, new, text",
    [
        ("towers", "tower", "grid.toml: .*unexpected keyword argument 'tower'"),
        ("rounds", "round", "unexpected keyword argument 'round'"),
        ("[protocol]", "[timing]", "unexpected keyword argument 'timing'"),
        ('models = ["mlp"]', "", "missing .* argument: 'models'"),
        ("[1, 2]", "[1, 2", "grid.toml: .*line"),
        ("7", "2", "grid.toml: rounds=2 must be"),
        ("[protocol]\nrounds = 7", "protocol = 1", "not a mapping"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, text):
    path = tmp_path / "grid.toml"
    path.write_text(TOML.replace(old, new, 1))
    with pytest.raises(ValueError, match=text):
        read_toml(path)


# Models.


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_loss_for_each_example(name):
    """Of its own: in another order the losses are the same."""
    models = {dtype: find_model(name, dtype) for dtype in ("float32", "bfloat16")}
    model = models["float32"]
    params, batch = model.init(0), model.make_batch(1, 3)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    tj.testing.assert_same(model.make_batch(1, 3), batch)
    for other in models.values():
        losses = jax.eval_shape(other.losses, params, batch)
        assert losses.shape == (3,) and losses.dtype == jnp.float32
    if name == "transformer":  # attention is within an example; this compiles long
        return
    both = jax.tree.map(lambda x: np.concatenate([x, x[:0:-1]]), batch)
    whole = np.asarray(jax.jit(model.losses)(params, both))
    np.testing.assert_allclose(whole[[1, 2]], whole[[4, 3]], rtol=1e-5)
    assert len(set(whole.tolist())) >= 3


def test_no_such_model():
    with pytest.raises(ValueError, match="'mpl' is none of mlp, cnn, transf"):
        find_model("mpl", "float32")


# Trials.


def small(dtype):
    """Two layers of 5; named by ``test_bench:small``."""
    return mlp(dtype, layers=2, width=5)


def expected_losses(seed, batch_size, steps):
    """SGD with momentum on `small`, in NumPy float64."""
    model = small(np.float32)
    params = jax.tree.map(np.float64, model.init(seed))
    batch = jax.tree.map(np.float64, model.make_batch(seed + 1, batch_size))
    trace = jax.tree.map(np.zeros_like, params)
    losses = []
    for _ in range(steps):
        activations = [batch["x"]]
        for layer in params:
            activations.append(np.tanh(activations[-1] @ layer["w"] + layer["b"]))
        error = activations[-1] - batch["y"]
        losses.append((error**2).mean())
        back, grads = 2 * error / error.size, []
        for layer, x, y in zip(
            params[::-1], activations[-2::-1], activations[:0:-1], strict=True
        ):
            back = back * (1 - y**2)
            grads.append({"w": x.T @ back, "b": back.sum(axis=0)})
            back = back @ layer["w"].T
        trace = jax.tree.map(lambda m, g: MOMENTUM * m + g, trace, grads[::-1])
        params = jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, trace)
    return losses


SMALL = functools.partial(Trial, "test_bench:small", 12)
TRIALS = [
    SMALL(towers=2, devices=2, micro_batches=3, steps_per_call=2),
    SMALL(by="pmap", towers=2, devices=2),
    SMALL(by="jit", towers=3, devices=3),
]


def test_a_trial_names_its_strategy():
    assert strategy_of(SMALL(strategy="one_device")) == tj.OneDevice("cpu:0")
    found = strategy_of(SMALL(strategy="mirrored_scan", towers=4, devices=2))
    devices = ("cpu:0", "cpu:1")
    assert found == tj.Mirrored(devices, towers=4, local="scan")
    ops = tj.collectives.Packed(num_packs=2)
    given = {"strategy": "mirrored_pmap", "cross_tower_ops": "Packed(num_packs=2)"}
    expected = tj.Mirrored(devices, towers=2, executor="pmap", cross_tower_ops=ops)
    assert strategy_of(SMALL(towers=2, devices=2, **given)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=Trial.describe)
def test_a_trial_trains_what_it_says(trial):
    record = run_trial(trial, QUICK)
    losses = record["losses"]
    expected = expected_losses(0, trial.batch, len(losses))
    assert len(losses) >= 3 and losses[2] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(record["rounds_s"]) == 6 and record["calls"] >= 1
    with_sending = trial.by == "towerjax" and trial.devices > 1
    assert ("communication" in record) == with_sending
    for name in ("step_s", "return_s", "hand_s", "over_hand"):
        assert 0 < record[name]["low"] <= record[name]["median"]
        assert record[name]["median"] <= record[name]["high"]
    assert record["return_s"]["median"] <= record["step_s"]["median"]
    json.dumps(record, allow_nan=False)


def test_what_is_not_the_same_is_not_compared():
    trial = Trial("mlp", 8, dtype="bfloat16")
    check_losses([1.0, 0.5, 0.25, 9.0], [1.02, 0.51, 0.25], trial)
    with pytest.raises(ValueError, match="not the same computation within 0.03"):
        check_losses([1.0, 0.5, 0.25], [1.0, 0.5, 0.26], trial)


def test_a_trial_that_cannot_be_says_why():
    with pytest.raises(ValueError, match="cpu:8"):
        run_trial(Trial("mlp", 9, towers=9, devices=9), QUICK)
    with pytest.raises(ValueError, match="10 examples, which"):
        run_trial(Trial("mlp", 10, towers=4, micro_batches=2), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ops", "kind"),
    [
        ("mirrored", "AllReduce()", " all-reduce("),
        ("mirrored", "PinnedTree()", " all-to-all("),
        ("mirrored_pmap", "AllReduce()", " all-reduce("),
    ],
)
def test_the_bare_reduction_sends_what_a_step_does(strategy, ops, kind):
    trial = SMALL(towers=4, devices=2, strategy=strategy, cross_tower_ops=ops)
    work = work_of(trial)
    contender = bare_reduction(work, strategy_of(trial))
    lines = contender.call.as_text().splitlines()
    assert sum(kind in line for line in lines) == CHAIN
    total, _ = contender.run()[0]
    # Each time four equal towers are added and divided by four; an op that takes the
    # towers' sum gets two devices' values.
    factor = 1.0 if ops == "PinnedTree()" else 0.5**CHAIN
    np.testing.assert_allclose(total[0]["w"], factor * work.params[0]["w"], rtol=1e-6)


def test_figures_are_of_steps_and_of_the_same_round():
    table = np.zeros((6, 3, 2))
    table[:, 0, 0] = [2, 4, 6, 8, 10, 12]  # own, calls of two steps
    table[:, 0, 1] = 1
    table[:, 1, 0] = [1, 2, 3, 4, 5, 6]
    table[:, 2, 0] = CHAIN * table[:, 0, 0] / 8
    found = figures(table, ["own", "hand", "communication"], 2)
    assert found["step_s"] == {"median": 3.5, "low": 1.0, "high": 6.0}
    assert found["hand_s"] == {"median": 1.75, "low": 0.5, "high": 3.0}
    assert found["over_hand"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["communication"]["median"] == 0.25
    assert found["return_s"]["median"] == 0.5
    assert found["rounds_s"] == [1, 2, 3, 4, 5, 6]


def by_mine(trial, timing):
    """A peer of one's own, of ``mlp`` alone."""
    if trial.model != "mlp":
        raise NotImplementedError("mlp is written")
    return {"step_s": {"median": trial.batch * timing.rounds}}


def by_missing(trial, timing):
    importlib.import_module("no_such_package")


@pytest.mark.parametrize(
    "by, model, status, text",
    [
        ("test_bench:by_mine", "mlp", "ok", None),
        ("test_bench:by_mine", "cnn", "not available", "Error: mlp is written"),
        ("test_bench:by_missing", "mlp", "not available", "no_such_package"),
        ("test_bench:by_nobody", "mlp", "failed", "ValueError: test_bench:by_nobody"),
        ("jit", "mlp", "failed", "ValueError: .*cpu:8"),
    ],
)
def test_what_became_of_a_trial_is_a_record(by, model, status, text):
    record = run_recorded(Trial(model, 9, by=by, towers=9, devices=9), QUICK)
    assert record["status"] == status and (
        text is None or re.search(text, record["error"])
    )
    assert status != "ok" or record["step_s"] == {"median": 54}


# Results.


def result(trial, median=None, **figures):
    if median is None:
        return Result(trial, "failed", {"error": "ValueError: a | b\nc"})
    step = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
    return Result(trial, "ok", {"step_s": step, **figures})


def test_a_file_goes_on(tmp_path):
    path, about = tmp_path / "new" / "r.jsonl", {"machine": {"cores": 2}}
    first, second = Trial("mlp", 8), Trial("cnn", 8)
    file = RecordFile(path, "trial", about)
    file.add({"trial": dataclasses.asdict(first), "status": "ok"})
    file.add({"trial": dataclasses.asdict(second), "status": "failed"})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])  # a line torn by a kill
    again = RecordFile(path, "trial", about)
    assert path.read_bytes() == whole
    assert again.get(dataclasses.asdict(second))["status"] == "failed"
    assert again.get(dataclasses.asdict(Trial("mlp", 9))) is None
    again.add({"trial": dataclasses.asdict(second), "status": "ok"})
    assert [r.status for r in read_results(path)] == ["ok", "ok"]
    with pytest.raises(ValueError, match=r"machine \{'cores': 2\}, .* \{'cores': 4\}"):
        RecordFile(path, "trial", {"machine": {"cores": 4}})
    path.write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="Line 1 of .*r.jsonl' is no line of a sweep"):
        RecordFile(path, "trial", about)
    assert path.read_text() == '{"kind": "train", "step": 1}\n'


def test_a_verdict_only_where_intervals_part():
    trials = [Trial("mlp", 8 * i) for i in range(1, 9)]
    pairs = [
        (result(trials[0], 1.0), result(trials[0], 1.21), "intervals overlap"),
        (result(trials[1], 1.0), result(trials[1], 1.23), "slower"),
        (result(trials[2], 1.23), result(trials[2], 1.0), "faster"),
        (result(trials[3], 1.0), result(trials[3]), "failed, and did not before"),
        (result(trials[4]), result(trials[4], 1.0), "ok, and was not before"),
        (result(trials[5]), result(trials[5]), "not ok, as before"),
        (None, result(trials[6], 1.0), "only in the new results"),
        (result(trials[7], 1.0), None, "only in the old results"),
    ]
    found = compare([p[0] for p in pairs if p[0]], [p[1] for p in pairs if p[1]])
    assert [c.verdict for c in found] == [p[2] for p in pairs]
    worse = ("slower", "failed, and did not before")
    assert [c.is_worse for c in found] == [p[2] in worse for p in pairs]
    assert found[1].ratio.median == pytest.approx(1.23)
    assert found[1].ratio.low == pytest.approx(1.23 * 0.9 / 1.1)


def test_differences_are_named():
    old = Result(Trial("mlp", 8), "ok", {"machine": {"cores": 2}, "versions": {"a": 1}})
    new = Result(Trial("mlp", 8), "ok", {"machine": {"cores": 4}, "versions": {"b": 1}})
    assert differences([old], [new]) == [
        "machine: cores 2, now 4",
        "versions: a 1, now none",
        "versions: b none, now 1",
    ]
    assert differences([old], [old]) == []


# Reports.


def test_efficiency_is_per_device_over_the_smallest():
    one = result(Trial("mlp", 64), 1.0)
    two = result(Trial("mlp", 64, towers=2, devices=2), 0.625)
    packed = Trial("mlp", 64, towers=4, devices=4, cross_tower_ops="Packed()")
    four = result(packed, 0.5)
    weak = result(Trial("cnn", 8), 1.0), result(Trial("cnn", 32, "towerjax", towers=4))
    weak_four = result(Trial("cnn", 32, towers=4, devices=4), 1.25)
    other = result(Trial("mlp", 64, towers=2, devices=2, dtype="bfloat16"), 0.1)
    results = [four, other, two, one, *weak, weak_four]
    assert efficiency(two, results).median == pytest.approx(1 / 0.625 / 2)
    assert efficiency(four, results).median == pytest.approx(1 / 0.5 / 4)
    assert efficiency(four, results).low == pytest.approx(0.5 * 0.9 / 1.1)
    assert efficiency(weak_four, results).median == pytest.approx(32 / 1.25 / 4 / 8)
    for alone in (one, other, weak[1]):
        assert efficiency(alone, results) is None


def test_a_peer_is_over_the_hand_of_its_own_kind():
    hand = {"median": 0.5, "low": 0.4, "high": 0.6}
    more = result(Trial("mlp", 8, micro_batches=2), 1.0, hand_s={**hand, "median": 9})
    ours = result(Trial("mlp", 8), 1.0, hand_s=hand, over_hand={**hand, "median": 2.5})
    peer = result(Trial("mlp", 8, by="mine:run"), 2.0)
    assert over_hand(ours, [ours]).median == 2.5
    assert over_hand(peer, [more, ours]).median == 4.0
    assert over_hand(peer, [more]) is None
    cells = [row[4] for row in Results([more, ours, peer]).tables()[0].rows]
    assert cells[1] == "2.50 [0.40, 0.60]" and cells[2] == "*4.00 [3.00, 5.50]*"
