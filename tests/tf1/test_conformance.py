"""What the original's own tests and code promise, with the numbers from its file."""

import dataclasses
import functools
import importlib
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance_table import Table, assert_equal, mirrored

import towerjax as tj
from towerjax.collectives.ops import pack_sizes

WITHOUT_MEANING = {
    "min.optimizer_variables": "names of variables; parameters are a pytree",
    "scope.error.nested_other": "there is no scope that could be nested",
    "scope.op_names": "names of operations; a traced function has none",
    **dict.fromkeys(("tf2.gather.diff1", "tf2.gather.error_shape"),
        "TensorFlow 2's, gone: jnp.concatenate(strategy.unwrap(value), axis)"),
    **dict.fromkeys(
        ("tf2.reduce.axis0.2", "tf2.reduce.axis0.4", "tf2.reduce.axis0.same"),
        "TensorFlow 2's, gone: jnp.concatenate(strategy.unwrap(value)).mean(0)",
    ),
    **dict.fromkeys(("xops.choose.4", "xops.choose.self_links"),
        "decided away: no table of links; NCCL and XLA know those of a machine"),
    "tf2.zero_batch_bn": "an empty batch is refused: test_empty_batch_is_refused",
}  # fmt: skip
OWN_NUMBER = "predictions show which tower has which rows"
TABLE = Table(
    "lib merge min defun scope default reduce dist xops xutils pack tf2",
    WITHOUT_MEANING,
    dict.fromkeys(["tf2.input.global_partial", "tf2.input.partial_drop"], OWN_NUMBER),
)
FILES = sorted(pathlib.Path(__file__).parent.glob("test_conformance*.py"))
ANY = 3  # towers, where a case says "any" or nothing
TWO = (
    *("tf2.all_reduce.nest_doc", "tf2.all_reduce.sum.grad", "defun.per_device"),
    *("xops.sparse.mean", "xutils.sum.dense", "xutils.sum.sparse"),
)


def towers_of(case):
    """The case's number of towers: from its id, else from its input, else any."""
    parts = case["id"].split(".")
    number = parts[2] if parts[1] == "batchnorm" else parts[-1]
    if number.isdecimal() or case["id"] in TWO:
        return 2 if case["id"] in TWO else int(number)
    if parts[1] == "collective":
        workers, devices = number.split("x")
        return int(workers) * int(devices)
    n = case["input"].get("n", ANY) if isinstance(case["input"], dict) else ANY
    return n if isinstance(n, int) else ANY


# One strategy and what it does with values.


@TABLE.checks("lib.device_index")
def check_device_index(case, strategy):
    seen = strategy.call_for_each_tower(
        lambda tower, index: index, strategy.worker_device_index
    )
    assert [int(x) for x in strategy.unwrap(seen)] == list(range(strategy.num_towers))


@TABLE.checks("lib.map_reduce")
def check_map_reduce(case, strategy):
    given = case["input"]
    products = strategy.map(lambda x, y: x * y, given["map_over"], given["y"])
    total = jnp.concatenate(strategy.unwrap(products)).sum()
    total = strategy.broadcast(total, strategy.worker_devices[0])
    assert int(total) == case["expected"]


@TABLE.checks("default.merge_call")
def check_default_merge_call(case, strategy):
    # No hidden default strategy: the one that does nothing is written down.
    out = tj.tf1.OneDeviceStrategy("cpu:0").call_for_each_tower(
        lambda tower: tower.merge_call(lambda strategy, s: "foo_" + s, "bar")
    )
    assert out == case["expected"]


@TABLE.checks("merge.error.count_mismatch")
def check_count_mismatch(case, strategy):
    def tower_fn(tower):
        def met(v):
            return tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), v)

        return jax.lax.cond(tower.id == 0, met, lambda v: v, 1.0 + tower.id)

    # The original says so when towers have run apart; we say so before any runs.
    with pytest.raises(ValueError, match="Only some towers reach") as error:
        strategy.call_for_each_tower(tower_fn)
    assert isinstance(error.value, tj.ReplicationError)
    lines = r"all_gather at .*test_conformance.py:.*, under the cond at "
    assert re.search(lines + r".*test_conformance.py:", str(error.value))


@TABLE.checks("defun.variable", "defun.nested", "defun.per_device")
def check_compiled_inside(case, strategy):
    factors = case["input"].get("factors", [2.0] * strategy.num_towers)
    outer = jax.jit(lambda x: jax.jit(lambda x: 2.0 * x)(x) + 1.0)
    inner = jax.jit(lambda factor, x: factor * x)

    def tower_fn(tower, factor, x):
        return outer(x) if case["id"] == "defun.nested" else inner(factor, x)

    factor = tj.PerTower(np.array(factors, np.float32))
    out = strategy.call_for_each_tower(tower_fn, factor, np.float32(1.25))
    expected = np.broadcast_to(case["expected"], strategy.num_towers)
    # A mirrored result is bare, the factors' is not; here every tower's is compared.
    actual = np.broadcast_to(np.stack(strategy.unwrap(out)), expected.shape)
    assert_equal(actual, case, expected)


@TABLE.checks("reduce.plain.mean")
def check_plain_mean(case, strategy):
    value = case["input"]["value"]
    for reduction in (tj.Reduction.MEAN, tj.Reduction.ONLY_FIRST_TOWER):
        assert strategy.reduce(reduction, value) is value
        assert strategy.reduce(reduction, value) == case["expected"]


@TABLE.checks("reduce.plain.zero")
def check_plain_zero(case, strategy):
    for reduction in set(tj.Reduction) - {tj.Reduction.NONE}:
        assert strategy.reduce(reduction, case["input"]["value"]) == case["expected"]


@TABLE.checks("dist.reduce.one_tower_scalar_multi_dest")
def check_one_tower_to_several(case, strategy):
    given = case["input"]
    one = mirrored(1)
    names = [f"cpu:{i}" for i in range(given["n_destinations"])]
    out = one.reduce(tj.Reduction.SUM, given["value"], destinations=names)
    copies = [float(shard.data) for shard in out.addressable_shards]
    assert copies == case["expected"]["components"]
    assert [shard.device for shard in out.addressable_shards] == jax.devices("cpu")[:2]


@TABLE.checks("dist.reduce.to_cpu.2")
def check_reduce_to_cpu(case, strategy):
    ids = strategy.call_for_each_tower(lambda tower: tower.id)
    out = strategy.reduce(tj.Reduction.SUM, ids, destinations="cpu:0")
    assert int(out) == case["expected"]["value"]
    assert len(out.addressable_shards) == case["expected"]["n_components"]


# Cross-tower ops: how sums travel, and where to.


def strategies_with_ops(strategy):
    """One device a tower, with our counterpart of each op that the original tests."""
    every = strategy.num_towers
    strategy = mirrored(every)
    for ops in [
        tj.collectives.ReduceToOneDevice(),
        tj.collectives.ReduceToOneDevice(strategy.worker_devices[-1]),  # on the way
        tj.AllReduce(),
        tj.collectives.Packed(num_packs=1),
        tj.collectives.Hierarchical(every // 2 if every % 2 == 0 else every),
        tj.collectives.Packed(num_packs=8),
        tj.collectives.Packed(bytes_per_pack=100, max_group=10),
    ]:
        yield dataclasses.replace(strategy, cross_tower_ops=ops)


def destination_kinds(strategy, value):
    """Each kind of destinations, and the devices that it means."""
    cpus = jax.devices("cpu")
    workers = strategy.worker_devices
    everywhere = strategy.broadcast(value)
    yield everywhere, set(cpus[: len(workers)])
    yield strategy.broadcast(value, "cpu:7"), {cpus[7]}
    yield "cpu:1", {cpus[1]}
    yield ["cpu:0", "cpu:6"], {cpus[0], cpus[6]}


def assert_there(out, devices, case, expected):
    assert {shard.device for shard in out.addressable_shards} == devices
    for shard in out.addressable_shards:
        assert_equal(shard.data, case, expected)


@TABLE.checks("xops.reduce.2", "xops.reduce.3", "xops.reduce.4")
def check_reduce_with_every_op(case, strategy):
    names = ("value1", "value2")
    expected = case["expected"]
    values = [tj.PerTower(np.float32(case["input"][name])) for name in names]
    every_op = strategies_with_ops(strategy) if strategy.num_towers == 3 else ()
    for one in every_op:  # and of 2 and 4 towers in test_cross_tower_ops
        sums = one.reduce(tj.Reduction.SUM, values)
        for total, name in zip(sums, ("sum1", "sum2"), strict=True):
            assert_equal(total, case, expected[name])
    for destinations, devices in destination_kinds(strategy, 0.0):
        for kind, (value, number) in itertools.product(
            ("mean", "sum"), zip(values, "12", strict=True)
        ):
            reduction = tj.Reduction[kind.upper()]
            out = strategy.reduce(reduction, value, destinations=destinations)
            assert_there(out, devices, case, expected[kind + number])


@TABLE.checks("xops.batch_reduce.1", "xops.batch_reduce.8")
def check_batch_reduce(case, strategy):
    values = [tj.PerTower(np.float32(case["input"][f"value{i}"])) for i in (1, 2)]
    kinds = list(destination_kinds(strategy, 0.0))
    for name, expected in case["expected"].items():
        for pair in zip(kinds, kinds[1:] + kinds[:1], strict=True):
            pairs = [(v, kind[0]) for v, kind in zip(values, pair, strict=True)]
            out = strategy.batch_reduce(tj.Reduction[name.upper()], pairs)
            for x, kind, number in zip(out, pair, expected, strict=True):
                assert_there(x, kind[1], case, number)


@TABLE.checks("xops.broadcast")
def check_broadcast(case, strategy):
    value = case["input"]["value"]
    for destinations, devices in destination_kinds(strategy, 0.0):
        out = strategy.broadcast(value, destinations)
        assert_there(out, devices, case, case["expected"]["every_destination"])


@TABLE.checks("xops.collective.3x1", "xops.collective.3x2")
def check_collective(case, strategy):
    devices = len(case["input"]["value1"])
    ops = tj.collectives.Hierarchical(devices)
    one = dataclasses.replace(mirrored(strategy.num_towers), cross_tower_ops=ops)
    for kind, number in itertools.product(("mean", "sum"), ("1", "2")):
        rows = case["input"]["value" + number] * 3  # each worker holds the same
        out = one.reduce(tj.Reduction[kind.upper()], tj.PerTower(np.float32(rows)))
        assert_equal(out, case, case["expected"][kind + number])


@TABLE.checks("xops.sparse.mean")
def check_sparse_mean(case, strategy):
    given = case["input"]
    expected = case["expected"]
    towers = [
        tj.sparse.IndexedRows(
            np.float32(given[name]["values"]),
            np.array(given[name]["indices"]),
            given["shape"],
        )
        for name in ("t0", "t1")
    ]
    out = strategy.reduce(tj.Reduction.MEAN, tj.PerTower(tuple(towers)))
    assert_equal(out.values, case, expected["concat"]["values"])
    assert out.indices.tolist() == expected["concat"]["indices"]
    assert_equal(out.to_dense(), case, expected["dense"])


@TABLE.checks("xutils.sum.dense", "xutils.sum.sparse")
def check_sum_of_two(case, strategy):
    a, b = (np.float32(case["input"][name]) for name in "ab")
    if case["id"] == "xutils.sum.dense":
        assert_equal(strategy.reduce(tj.Reduction.SUM, tj.PerTower((a, b))), case)
        return
    all_rows = [tj.sparse.IndexedRows(x, np.arange(len(x)), x.shape) for x in (a, b)]
    rows = tj.PerTower(tuple(all_rows))
    out = strategy.reduce(tj.Reduction.SUM, rows)
    assert (
        isinstance(out, tj.sparse.IndexedRows) == case["expected"]["sparse_type_kept"]
    )
    assert_equal(out.to_dense(), case, case["expected"]["dense"])


@TABLE.checks("pack.concat_split.sizes")
def check_pack_sizes(case, strategy):
    sizes = [pack_sizes(**given) for given in case["input"]]
    assert sizes == case["expected"]


@TABLE.checks("pack.error.num_packs")
def check_pack_error(case, strategy):
    [text] = case["expected"]["message_has"]
    with pytest.raises(ValueError, match=text):
        tj.collectives.Packed(**case["input"])


# What came with version 2.


@TABLE.checks("tf2.run")
def check_run(case, strategy):
    out1 = strategy.call_for_each_tower(lambda tower: tower.id + 1)
    out2 = strategy.call_for_each_tower(lambda tower, x: {"a": 2 * x, "b": x * x}, out1)
    out3 = strategy.call_for_each_tower(lambda tower, a, b: a + 2 * b + 2, **out2)
    actual = jax.tree.map(
        lambda x: x.values.tolist(),
        {"out1": out1, "out2": out2, "out3": out3},
        is_leaf=lambda x: isinstance(x, tj.PerTower),
    )
    assert actual == case["expected"]


@TABLE.checks("tf2.all_reduce.nest_doc")
def check_all_reduce(case, strategy):
    first = case["input"]["replica0"]
    second = case["input"]["replica1"]
    nest = tj.PerTower(
        {name: np.float32([first[name], second[name]]) for name in first}
    )
    for name, expected in case["expected"].items():
        out = strategy.call_for_each_tower(
            lambda tower, nest, name=name: tower.reduce(tj.Reduction[name], nest), nest
        )
        outside = strategy.reduce(tj.Reduction[name], nest)
        for key, value in expected.items():
            assert_equal(out[key], case, value)  # bare: proved the same on all
            assert_equal(outside[key], case, value)


@TABLE.checks("tf2.all_reduce.sum.grad")
def check_all_reduce_gradient(case, strategy):
    def tower_fn(tower, c):
        return jax.grad(lambda x: tower.reduce(tj.Reduction.SUM, x) * c)(1.5)

    c = tj.PerTower(np.array(case["input"]["c"], np.float32))
    out = strategy.call_for_each_tower(tower_fn, c)
    towers = [out] * 2 if isinstance(out, jax.Array) else strategy.unwrap(out)
    assert_equal(towers, case)


@TABLE.checks("tf2.all_gather.grad")
def check_all_gather_gradient(case, strategy):
    def tower_fn(tower):
        def sum_of_y(x):
            gathered = jnp.moveaxis(tower.all_gather(x), 0, 1).reshape(2, -1)
            return (gathered * (tower.id + 1.0)).sum()

        return jax.grad(sum_of_y)(jnp.array([[3.0], [5.0]]))

    out = strategy.call_for_each_tower(tower_fn)
    for gradient in [out] if isinstance(out, jax.Array) else strategy.unwrap(out):
        assert_equal(gradient, case)


def rows_by_tower(strategy, batches, **kwargs):
    """Which numbers of each batch each tower sees."""
    predict = tj.build_predict_step(
        lambda params, batch, tower: (batch, jnp.full_like(batch, tower.id)),
        strategy,
        max_programs=2,
        **kwargs,
    )
    for batch in batches:
        rows, ids = map(np.asarray, predict(np.float32(0), batch))
        yield [rows[ids == t].tolist() for t in range(strategy.num_towers)]


@TABLE.checks("tf2.input.global_partial")
def check_partial_batch(case, strategy):
    data = np.arange(14, dtype=np.int32)
    how = {"remainder": "error", **TABLE.how(case)}
    steps = list(rows_by_tower(strategy, [data[:8], data[8:]], **how))
    assert steps[1] == case["expected"]["step2"]


@TABLE.checks("tf2.input.partial_drop")
def check_dropped_batch(case, strategy):
    # Batches of 4 and a last one of 1, which leaves nothing for two towers.
    data = np.arange(9, dtype=np.int32)
    batches = [data[:4], data[4:8]]
    how = {"remainder": "drop", **TABLE.how(case)}
    steps = list(rows_by_tower(strategy, batches, **how))
    assert steps == case["expected"]["steps"]
    with pytest.raises(ValueError, match="leaves nothing of a batch of 1 example"):
        list(rows_by_tower(strategy, [data[8:]], **how))


# Whole training steps. SGD throughout: its step has the scale of the gradient.


def train(strategy, loss_fn, params, batch, *, lr, steps, reduction, local=None):
    """The states after each step."""
    step = built(strategy, loss_fn, lr, reduction)
    state = step.init(params, local=local)
    states = []
    for _ in range(steps):
        state, _ = step(state, batch)
        states.append(state)
    return states


@functools.cache
def built(strategy, loss_fn, lr, reduction):
    return tj.build_train_step(
        loss_fn, optax.sgd(lr), strategy, loss_reduction=reduction, donate=False
    )


@TABLE.checks("lib.minimize_loss.2")
def check_minimize_loss(case, strategy):
    given = case["input"]
    expected = case["expected"]
    states = train(
        strategy,
        lambda w, batch, tower: ((w * batch - 1.0) ** 2).sum(),
        np.float32(given["w0"]),
        np.ones(strategy.num_towers, np.float32),
        lr=given["lr"],
        steps=given["steps"],
        reduction=tj.Reduction.SUM,
    )
    errors = np.array([given["w0"]] + [float(s.params) for s in states]) - 1.0
    assert_equal(errors[-1] + 1.0, case, expected["w10"])
    factors = errors[1:4] / errors[:3]  # later ones drown in rounding
    np.testing.assert_allclose(factors, expected["factor_per_step"], rtol=1e-4)


def squared_error(p, batch, tower):
    return ((p["w"] * batch + p["b"] - 1.0) ** 2).mean()


@TABLE.checks("min.testTrainNetwork.sgd", "min.testTrainNetworkByCallForEachTower.sgd")
def check_train_network(case, strategy):
    given = case["input"]
    states = train(
        strategy,
        squared_error,
        {"w": np.float32(1.0 + given["initial_error"]), "b": np.float32(0.0)},
        np.ones(strategy.num_towers, np.float32),
        lr=given["lr"],
        steps=given["steps"],
        reduction=tj.Reduction.MEAN,
    )
    errors = [float(s.params["w"] + s.params["b"] - 1.0) for s in states]
    assert_equal(errors, case, case["expected"]["errors"])


@TABLE.checks("min.mean_vs_sum.sum.2", "min.mean_vs_sum.mean.4")
def check_mean_vs_sum(case, strategy):
    given = case["input"]
    n = strategy.num_towers
    total = case["id"] == "min.mean_vs_sum.sum.2"

    def loss_fn(w, batch, tower):
        errors = (w * batch["x"] - batch["y"]) ** 2
        return errors.sum() if total else errors.mean()

    states = train(
        strategy,
        loss_fn,
        np.float32(given["w0"]),
        {name: np.tile(np.float32(given[name]), n) for name in ("x", "y")},
        lr=given["lr"],
        steps=1,
        reduction=tj.Reduction.SUM if total else tj.Reduction.MEAN,
    )
    assert_equal(states[0].params, case, case["expected"]["w1"])


@TABLE.checks("tf2.train.mini")
def check_train_mini(case, strategy):
    [state] = train(
        strategy,
        lambda p, batch, tower: (batch @ p["kernel"] + p["bias"][None]).sum(),
        {"kernel": np.ones((10, 1), np.float32), "bias": np.ones(1, np.float32)},
        np.ones((strategy.num_towers, 10), np.float32),
        lr=0.25,
        steps=1,
        reduction=tj.Reduction.SUM,
    )
    for name, expected in case["expected"].items():
        assert_equal(state.params[name], case, expected)


def moving_mean(params, batch, tower):
    momentum = batch["momentum"]
    x = batch["x"]
    mean = momentum * tower.local + (1 - momentum) * x.mean(axis=0)
    loss = tj.Weighted.mean(params * x, tower.weight)
    return tj.TowerOutput(loss=loss, local=mean)


@TABLE.checks(*[id for id in TABLE.cases if id.startswith("min.batchnorm.")])
def check_batchnorm(case, strategy):
    given = case["input"]
    expected = case["expected"]
    n = strategy.num_towers
    momentum = tj.Whole(np.float32(given["momentum"]))
    x = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    states = train(
        strategy,
        moving_mean,
        np.float32(1.0),
        {"x": np.concatenate([x + 100 * t for t in range(n)]), "momentum": momentum},
        lr=1e-3,
        steps=given["steps"],
        reduction=None,
        local=tj.TowerLocal(np.zeros(8, np.float32), tj.Reduction.MEAN),
    )
    means = [np.asarray(tj.towers.read_local(state.local)) for state in states]
    feature0 = [mean[0] for mean in means]
    assert_equal(feature0, case, expected["feature0_per_step"])
    assert_equal(means[-1], case, expected["all_features_after_10"])
    towers = np.asarray(states[-1].local.value)
    assert (np.diff(towers, axis=0) > 1).all()  # each tower has kept its own


REDUCTIONS = {
    "SUM": tj.Reduction.SUM,
    "MEAN": tj.Reduction.MEAN,
    "ONLY_FIRST": tj.Reduction.ONLY_FIRST_TOWER,
    "NONE": tj.Reduction.NONE,
}


def is_local(x):
    return isinstance(x, tj.TowerLocal)


def step_on_local(strategy, updates, reductions):
    """The tower-local variables, by name, after a step in which towers update them."""

    def loss_fn(w, batch, tower):
        local = {
            name: jax.tree.map(lambda x, f=update: f(tower, x), tower.local[name])
            for name, update in updates.items()
        }
        return tj.TowerOutput(tj.Weighted.mean(w * batch, tower.weight), local=local)

    local = {
        kind: tj.TowerLocal(np.float32(0), REDUCTIONS[kind]) for kind in reductions
    }
    local = dict.fromkeys(updates, local)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    batch = np.ones(strategy.num_towers, np.float32)
    return step(step.init(np.float32(1), local=local), batch)[0].local


@TABLE.checks("tf2.local.assign_matrix")
def check_local_assign(case, strategy):
    one = case["expected"]["components"]
    ways = {
        "assign": lambda tower, x: jnp.ones_like(x),
        "add": lambda tower, x: x + 1,
        "sub": lambda tower, x: x - -1,
    }
    local = step_on_local(strategy, ways, REDUCTIONS)
    for variable in jax.tree.leaves(local, is_leaf=is_local):
        assert variable.value.tolist() == [one] * strategy.num_towers
    assert len(jax.tree.leaves(local)) == len(ways) * len(REDUCTIONS)
    # Assigned from outside: what init is given is every tower's value.
    step = tj.build_train_step(lambda w, batch, tower: w, optax.sgd(1), strategy)
    for name in ("NONE", "MEAN", "ONLY_FIRST"):
        local = tj.TowerLocal(np.float32(one), REDUCTIONS[name])
        value = step.init(np.float32(0), local=local).local.value
        assert value.tolist() == [one] * strategy.num_towers


@TABLE.checks("tf2.local.read")
def check_local_read(case, strategy):
    expected = case["expected"]
    local = step_on_local(strategy, {"id": lambda tower, x: x + tower.id}, expected)
    values = tj.towers.read_local(local["id"])
    assert {name: float(x) for name, x in values.items()} == expected


# The file and this module.


@pytest.mark.slow
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)


def test_empty_batch_is_refused():
    shape = TABLE.cases["tf2.zero_batch_bn"]["input"]["input_shape"]

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(w * batch.mean(axis=(1, 2, 3)), tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2))
    state = step.init(np.float32(1))
    with pytest.raises(ValueError, match=r"empty: batch has shape \(0, 4, 4, 3\)\."):
        step(state, np.zeros(shape, np.float32))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_case_is_run_or_has_a_reason(path):
    importlib.import_module(path.stem).TABLE.check_complete()
