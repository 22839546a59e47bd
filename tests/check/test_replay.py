"""Devices that run the same tower give the same bits; a third one has the vote."""

import functools

import faulty_devices as faulty
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from faulty_devices import KINDS, batch_of, begun, with_fault
from jax.sharding import PartitionSpec as P
from layouts import mirrored

import towerjax as tj
from towerjax.check.replay.replay import Replayer
from towerjax.check.replay.report import Station, vote
from towerjax.make.members import Members

FLAGS = ("update", "params/flags")  # the faulty device's own copy


def found(report):
    return {(x.part, x.leaf) for x in report.wrong} - {FLAGS}


# The vote, on tables that are made by hand.


@functools.cache
def placement(devices, towers=None):
    return tj.Mirrored(
        devices=[f"cpu:{i}" for i in range(devices)], towers=towers
    ).placement


def judged(tables, parts=("gradient",), *, exchanges=False, towers=None):
    """The report on ``tables[rotation][run]``: rows of leaves of ``parts``."""
    runs = [[np.array(run, np.uint32)[None] for run in x] for x in tables]
    devices = runs[0][0].shape[1]
    names = tuple((part, f"params/{i}") for i, part in enumerate(parts))
    station = Station(names, runs, exchanges)
    return vote([station], 7, placement(devices, towers))


def rotated_fault(devices, wrong, leaves=1, leaf=0):
    """The rows of three rotations, each run twice, if one device is wrong."""
    tables = []
    for by in range(3):
        rows = [[5] * leaves for _ in range(devices)]
        rows[(wrong - by) % devices][leaf] = 90 + by
        tables.append([rows, rows])
    return tables


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_two_devices_outvote_a_third(devices):
    for wrong in range(devices):
        report = judged(rotated_fault(devices, wrong))
        assert report.named == (f"cpu:{wrong}",)
        [bits] = report.wrong
        assert {*bits.towers} == {(wrong - by) % devices for by in range(3)}
        assert not (report.undecided or report.unstable or report.shared)
        assert f"outvote a third: cpu:{wrong} in gradient params/0" in str(report)


def test_two_wrong_devices_that_are_apart_are_both_named():
    first = rotated_fault(8, 1)
    second = rotated_fault(8, 5)
    both = [
        [np.maximum(*x) for x in zip(*pair, strict=True)]
        for pair in zip(first, second, strict=True)
    ]
    assert judged(both).named == ("cpu:1", "cpu:5")


def test_two_devices_cannot_vote():
    report = judged([[[[5], [5]]] * 2, [[[5], [6]]] * 2])
    assert not report.named and not report.agrees
    [bits] = report.undecided
    assert bits.devices == ("cpu:0", "cpu:1") and bits.towers == (1,)
    assert "One of these is wrong" in str(report)


def test_a_device_that_differs_from_itself_is_not_blamed():
    tables = rotated_fault(4, 1)
    tables[0][1] = [[5]] * 4
    tables[1][1] = [[5]] * 4
    report = judged(tables)
    assert {x.devices for x in report.unstable} == {("cpu:1",)}
    assert not report.is_deterministic
    assert "--xla_gpu_deterministic_ops=true" in str(report)


def test_programs_that_round_in_another_way_name_nobody():
    tables = [[[[by]] * 8] * 2 for by in (4, 9, 4)]
    report = judged(tables)
    assert not report.named and report.shared == ("gradient params/0",)
    assert "names no device" in str(report)


def test_an_update_that_exchanges_names_a_device_if_it_is_the_only_one():
    tables = rotated_fault(8, 3, leaves=2)
    report = judged(tables, ("update", "update"), exchanges=True)
    assert report.named == ("cpu:3",) and not report.shared
    tables[1][0][6][1] = tables[1][1][6][1] = 77  # another one's, in one rotation
    report = judged(tables, ("update", "update"), exchanges=True)
    assert not report.named and len(report.shared) == 2


def test_the_towers_of_a_device_move_together():
    assert placement(4, 8).rotated(1) == ("cpu:1", "cpu:2", "cpu:3", "cpu:0")
    within = tj.Mirrored(devices=[f"cpu:{i}" for i in range(6)], within={"model": 2})
    assert within.placement.rotated(2)[:4] == ("cpu:4", "cpu:5", "cpu:0", "cpu:1")


# The step, on devices.


def loss_fn(params, batch, tower):
    w = faulty.nudges_gradient(params["w"], jax.lax.stop_gradient(params["flags"][0]))
    return tj.Weighted.mean((batch @ w) ** 2, tower.weight)


def small(strategy, loss=loss_fn):
    step = tj.build_train_step(loss, optax.sgd(0.01), strategy, audit=False)
    params = {"w": np.arange(1, 4, dtype=np.float32), "flags": np.zeros(1, np.float32)}
    return step, step.init(params)


ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def on_device(state, device):
    flags = faulty.on_one_device(state.params["flags"], device, np.ones(1, np.float32))
    return state.replace(params={**state.params, "flags": flags})


def test_what_cannot_be_replayed_is_refused():
    step, state = small(mirrored(2, 1))
    with pytest.raises(ValueError, match="each process has one device of cpu:0"):
        tj.tools.replay(step, state, ROWS)
    evaluate = tj.build_eval_step(lambda p, b, t: {}, mirrored(2, 2))
    with pytest.raises(ValueError, match="cannot train"):
        tj.tools.replay(evaluate, state, ROWS)
    with pytest.raises(ValueError, match="but step is a function"):
        tj.tools.replay(loss_fn, state, ROWS)


@pytest.mark.slow
def test_a_step_of_a_sweep_is_refused():
    def build(numbers):
        step = tj.build_train_step(loss_fn, optax.sgd(numbers["rate"]), mirrored(2, 2))
        return step, step.init({"w": ROWS[0], "flags": np.zeros(1, np.float32)})

    numbers = {"rate": jnp.array([0.1, 0.2])}
    members = Members.of(build, numbers)
    with pytest.raises(ValueError, match="Replay the step of one member"):
        tj.tools.replay(members.step, members.begin(numbers), ROWS)


@pytest.mark.slow
def test_the_bits_of_a_healthy_step_are_the_same_and_a_faulty_device_is_named():
    step, state = small(mirrored(3, 3))
    report = tj.tools.replay(step, state, ROWS)
    assert report.agrees and report.step == 1, str(report)
    report = tj.tools.replay(step, on_device(state, 2), ROWS)
    assert report.named == ("cpu:2",)
    assert found(report) == {("gradient", "params/w")}
    step(state, ROWS)  # nothing was donated


PINNED = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}
DECK = {
    "a tower on each device": (mirrored(8, 8), 1),
    "two towers on each": (mirrored(8, 4), 3),
    "in turn, in shards, with the same bits": (
        mirrored(8, 4, state="sharded", **PINNED),
        2,
    ),
    "in shards": (mirrored(4, 4, state="sharded"), 1),
    "the optimizer in shards": (mirrored(4, 4, state="sharded_optimizer"), 1),
    "towers of two devices": (mirrored(3, 6, within={"model": 2}), 1),
    "pmap": (mirrored(4, 4, executor="pmap"), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECK)
def test_a_fault_in_each_kind_of_leaf_names_its_device(name):
    """On each device; and nothing but that leaf of that device is named."""
    strategy, micro_batches = DECK[name]
    step, state = begun(strategy, micro_batches=micro_batches, audit=False)
    replay = Replayer(step)
    batch = batch_of(48)
    assert replay(state, batch).agrees
    number = len(strategy.worker_devices)
    for i, kind in enumerate(KINDS):
        for device in range(number) if number == 8 else [i % number]:
            report = replay(with_fault(state, device, kind), batch)
            assert report.named == (f"cpu:{device}",), (kind, device, str(report))
            assert found(report) == {KINDS[kind]}, (kind, device, str(report))
            assert not (report.undecided or report.unstable or report.shared)


@pytest.mark.slow
def test_the_bits_of_a_shard_in_a_tower_of_two_devices_name_both():
    """The devices of a tower exchange values, so that one of them is wrong."""

    def split(params, batch, tower):
        flag = jax.lax.stop_gradient(params["flags"][0])
        w = faulty.nudges_gradient(params["w"], flag)
        return tj.Weighted.mean(((batch @ w) ** 2).sum(1), tower.weight)

    specs = {"w": P(None, "model"), "flags": P()}
    strategy = mirrored(3, 6, within={"model": 2}, specs=specs)
    step = tj.build_train_step(split, optax.sgd(0.01), strategy, audit=False)
    w = np.arange(30, dtype=np.float32).reshape(3, 10) / 30
    state = step.init({"w": w, "flags": np.zeros(1, np.float32)})
    assert tj.tools.replay(step, state, ROWS).agrees
    report = tj.tools.replay(step, on_device(state, 3), ROWS)
    [bits] = [x for x in report.wrong if x.part == "gradient"]
    assert bits.devices == ("cpu:2", "cpu:3") and report.named == ("cpu:3",)
    assert "cpu:2 or cpu:3 in gradient params/w" in str(report)


def meets(params, batch, tower):
    """Each tower subtracts the mean over all towers, and computes with all rows."""
    flag = jax.lax.stop_gradient(params["flags"][0])
    x = batch @ faulty.nudges_gradient(params["w"], flag) * (1 + 1e-6 * flag)
    mean = tower.reduce(tj.Reduction.MEAN, x.mean())
    others = tower.all_gather(x)
    later = jax.lax.psum_scatter(others, tower.axis_names)
    return tj.Weighted.mean((x - mean) ** 2 + 0.1 * x * later, tower.weight)


def two_means(params, batch, tower):
    """The denominators of means are added before the gradient is taken."""
    flag = jax.lax.stop_gradient(params["flags"][0])
    x = batch @ params["w"]
    weight = tower.weight * jnp.abs(batch[:, 0]) * (1 + 1e-6 * flag)
    return tj.Weighted.mean(x**2, weight) + tj.Weighted.mean(x**4, tower.weight)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [meets, two_means])
@pytest.mark.parametrize("towers", [4, 8])
def test_the_bits_of_towers_that_communicate_name_a_device(loss, towers):
    """They hear themselves in a replay, so that no fault goes to another tower."""
    step, state = small(mirrored(towers, 4), loss)
    batch = np.concatenate([ROWS, ROWS[:4] + 1])
    assert tj.tools.replay(step, state, batch).agrees
    for device in range(4):
        report = tj.tools.replay(step, on_device(state, device), batch)
        assert report.named == (f"cpu:{device}",) and not report.shared
        assert {part for part, _ in found(report)} >= {"loss"}


@pytest.mark.slow
def test_the_bits_of_a_model_function_name_a_device():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.05))

    def model_fn(variables, features, labels, mode, tower):
        def loss(params):
            return loss_fn(params, features, tower)

        loss, after = optimizer.minimize(loss, variables)
        return tj.estimator.ModelSpec(mode, {}, loss, after)

    kind = tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS
    step = tj.estimator.replicate_model_fn(model_fn, kind, mirrored(4, 4)).train_step()
    params = {"w": np.arange(1, 4, dtype=np.float32), "flags": np.zeros(1, np.float32)}
    state = step.place(tj.TrainState.create(params, optimizer))
    batch = {"features": ROWS, "labels": ROWS[:, 0]}
    assert tj.tools.replay(step, state, batch).agrees
    report = tj.tools.replay(step, on_device(state, 3), batch)
    assert report.named == ("cpu:3",)
    assert found(report) == {("gradient", "params/w")}


@pytest.mark.slow
def test_the_bits_of_towers_that_train_alone_name_a_device():
    """Their update runs towers on the strategy's devices."""
    options = {"extend": tj.contrib.LocalSGD(2), "audit": False}
    strategy = mirrored(4, 4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.01), strategy, **options)
    params = {"w": np.arange(1, 4, dtype=np.float32), "flags": np.zeros(1, np.float32)}
    state, _ = step(step.init(params), ROWS)  # the next step merges
    assert tj.tools.replay(step, state, ROWS).agrees


@pytest.mark.slow
def test_kernels_that_are_not_deterministic_are_told_from_a_fault():
    draws = np.random.default_rng(0)

    def noisy(params, batch, tower):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(lambda _: np.float32(draws.normal()), shape, batch)
        weight = tower.weight
        return tj.Weighted.mean((batch @ params["w"]) ** 2 + noise, weight)

    step, state = small(mirrored(3, 3), noisy)
    report = tj.tools.replay(step, state, ROWS)
    assert report.unstable and not report.named
    with pytest.raises(
        ValueError, match="replay_every=1 cannot be done(?s:.*)determin"
    ):
        tj.run(step, state, [ROWS], replay_every=1, progress=False)
