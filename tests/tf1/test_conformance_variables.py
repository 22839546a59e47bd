"""What the original promises of variables and of values outside a step, in numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_table import Table

import towerjax as tj

WITHOUT_MEANING = {
    "values.regroup.wrap_mirrored": "a mirrored value is one value: what differs from"
    " tower to tower is PerTower, and nothing relabels it",
    "var.cross_thread_name": "a variable has one name on all towers: two names are"
    " refused, as in var.name_mismatch_error; no rule drops a suffix",
    "var.is_initialized": "no variable without a value: create_var makes both at once",
}
TABLE = Table(
    "var local mirrored values assign assign_add assign_sub update ckpt ema creator"
    " ctor ps",
    WITHOUT_MEANING,
)
R = tj.Reduction


def towers_of(case):
    given = case["input"]
    if case["id"].startswith("ema."):
        return int(case["id"].split(".")[-1])
    return given.get("n", given.get("towers", 2))


def components(strategy, variable):
    """Each tower's copy, as its device holds it."""
    if isinstance(variable, tj.TowerLocal):
        return variable.value.tolist()
    shards = [shard.data for shard in variable.value.addressable_shards]
    assert len(shards) == len(strategy.worker_devices)
    per_device = strategy.num_towers // len(shards)
    return [x.tolist() for x in shards for _ in range(per_device)]


def refused(case, call, *, text=None, error=ValueError):
    """The call raises, with what the case says of the message."""
    with pytest.raises(error) as raised:
        call()
    for part in [text] if text else case["expected"]["message_has"]:
        assert part in str(raised.value)


# Variables.


@TABLE.checks("var.single_creation")
def check_single_creation(case, strategy):
    def tower_fn(tower):
        v = tj.towers.MirroredVar(jnp.float32(1.0), name="foo")
        return tower.merge_call(lambda strategy, v: v, v)

    v = strategy.call_for_each_tower(tower_fn)
    assert isinstance(v, tj.towers.MirroredVar) and v.name == case["expected"]["name"]
    assert components(strategy, v) == [1.0, 1.0]


@TABLE.checks("var.same_canonical")
def check_same_canonical(case, strategy):
    names = case["input"]["names"]

    def tower_fn(tower):
        return [tj.towers.MirroredVar(jnp.ones(()), name=name) for name in names]

    out = strategy.call_for_each_tower(tower_fn)
    assert [v.name for v in out] == case["expected"]["names"]
    assert len(out) == case["expected"]["count"]


@TABLE.checks("var.name_mismatch_error")
def check_name_mismatch(case, strategy):
    made = [tj.towers.MirroredVar(1.0, name=name) for name in ("foo", "bar")]
    refused(
        case,
        lambda: strategy.regroup(made),
        text="has several names, reductions or values",
    )


@TABLE.checks("var.error.sync_invalid")
def check_sync_invalid(case, strategy):
    refused(case, lambda: strategy.create_var("v", 1.0, tower_local="Invalid"))


@TABLE.checks("var.only_first")
def check_only_first(case, strategy):
    first = R.ONLY_FIRST_TOWER
    v0 = strategy.create_var("v0", 2.0, reduction=first, tower_local=True)
    v1 = strategy.create_var("v1", 3.0, reduction=first)

    def add(tower, v0, v1, by0, by1):
        i = tower.id + 1
        return tower.assign_add(v0, by0 * i), tower.assign_add(v1, by1 * i)

    def check(expected):
        assert components(strategy, v0) == expected["v0"]
        assert components(strategy, v1) == expected["v1"]
        assert float(strategy.read_var(v0)) == expected["read_v0"]
        assert float(strategy.read_var(v1)) == expected["read_v1"]

    check(case["expected"]["initial"])
    v0, v1 = strategy.call_for_each_tower(add, v0, v1, 5, 7)
    check(case["expected"]["after1"])
    v0, v1 = strategy.call_for_each_tower(add, v0, v1, 11, 13)
    check(case["expected"]["after2"])


@TABLE.checks("var.tower_local")
def check_tower_local(case, strategy):
    v_sum = strategy.create_var("v_sum", 1.0, reduction=R.SUM, tower_local=True)
    v_mean = strategy.create_var("v_mean", 4.0, reduction=R.MEAN, tower_local=True)

    def tower_fn(tower, v_sum, v_mean):
        return (
            tower.assign_add(v_sum, 2.0 + tower.id),
            tower.assign(v_mean, 6.0 * tower.id),
        )

    expected = case["expected"]
    out = strategy.call_for_each_tower(tower_fn, v_sum, v_mean)
    for v, name in zip(out, ("v_sum", "v_mean"), strict=True):
        assert components(strategy, v) == expected[f"{name}_components"]
        assert float(strategy.read_var(v)) == expected[f"read_{name}"]


@TABLE.checks("var.tower_local.update")
def check_tower_local_update(case, strategy):
    v = strategy.create_var("v", 1.0, reduction=R.SUM, tower_local=True)
    for name in ("before", "after"):
        expected = case["expected"][name]
        assert components(strategy, v) == [expected["component0"]] * 2
        assert float(strategy.read_var(v)) == expected["read"]
        v = strategy.update(v, lambda old, value: value, 5.0)


@TABLE.checks("local.assign.cross.mean", "local.assign.cross.sum")
def check_local_assign_cross(case, strategy):
    reduction = R.MEAN if case["id"].endswith("mean") else R.SUM
    v = strategy.create_var("v", 1.0, reduction=reduction, tower_local=True)
    expected = case["expected"]
    assert float(strategy.read_var(v)) == expected["read_before"]
    v = strategy.assign(v, 6.0)
    assert float(strategy.read_var(v)) == expected["read_after"]
    assert components(strategy, v) == expected["components_after"]


@TABLE.checks("assign.cross", "assign_sub.cross")
def check_assign_cross(case, strategy):
    method = case["id"].split(".")[0]
    initial = re.search(r"init ([\d.]+)", case["setup"])
    v = strategy.create_var("v", float(initial[1]))
    new = getattr(strategy, method)(v, case["input"]["value"])
    assert float(new.value) == case["expected"]["returned"]
    assert components(strategy, new) == case["expected"]["components"]


@TABLE.checks("assign_add.cross.no_read")
def check_assign_add_cross(case, strategy):
    v = strategy.assign_add(strategy.create_var("v", 1.0), 6.0)
    assert float(v.value) == 7.0
    v = strategy.assign_add(v, 2.0)
    assert components(strategy, v) == case["expected"]["components"]


@TABLE.checks("assign.tower.mean", "assign_add.tower.mean", "assign_sub.tower.mean")
def check_assign_in_tower(case, strategy):
    method = case["id"].split(".")[0]
    initial = float(re.search(r"init ([\d.]+)", case["setup"])[1])
    v = strategy.create_var("v", initial, reduction=R.MEAN)
    values = tj.PerTower(np.float32(case["input"]["values"]))
    new = strategy.call_for_each_tower(
        lambda tower, v, x: getattr(tower, method)(v, x), v, values
    )
    assert float(strategy.read_var(new)) == case["expected"]["read"]
    assert components(strategy, new) == [case["expected"]["read"]] * 2


@TABLE.checks("assign.error.sum_of_plain")
def check_sum_of_plain(case, strategy):
    v = strategy.create_var("v", 1.0, reduction=R.SUM)
    [text] = case["expected"]["message_has"]
    text = text.replace("non-DistributedValues", "constant")  # our word for it
    refused(
        case,
        lambda: strategy.call_for_each_tower(lambda tower, v: tower.assign(v, 5.0), v),
        text=text,
    )


@TABLE.checks("update.error.per_device_arg")
def check_update_error(case, strategy):
    v = strategy.create_var("v", 1.0)
    refused(case, lambda: strategy.update(v, lambda x, y: y, tj.PerTower(np.ones(2))))


@TABLE.checks("ps.chain")
def check_ps_chain(case, strategy):
    a = strategy.create_var("a", 1.0)
    b = strategy.create_var("b", 2.0)
    x, y, z = (
        strategy.create_var(name, value, reduction=R.SUM)
        for name, value in (("x", 10.0), ("y", 20.0), ("z", 10.0))
    )

    def tower_fn(tower, a, b, x, y, z):
        c = a.value + b.value
        x = tower.assign_add(x, c)
        y = tower.assign_add(y, x)
        z = tower.assign_add(z, y)
        return y, z, z.value + c

    y, z, f = strategy.call_for_each_tower(tower_fn, a, b, x, y, z)
    actual = {"y": float(y.value), "z": float(z.value), "f": float(f)}
    assert actual == case["expected"]


@TABLE.checks(*[id for id in TABLE.cases if id.startswith("ema.")])
def check_moving_average(case, strategy):
    decay = case["input"]["decay"]
    debias = ".debias." in case["id"]
    initial = np.zeros(2) if debias else np.array([10.0, 11.0])
    average = strategy.create_var("average", initial, reduction=R.MEAN)
    count = strategy.create_var("count", 0, reduction=R.ONLY_FIRST_TOWER)
    own = [[1.0 + i, 2.0 - i] for i in range(strategy.num_towers)]

    def tower_fn(tower, average, count, value):
        average = tower.assign_sub(average, (1 - decay) * (average.value - value))
        count = tower.assign_add(count, 1)
        scale = 1 - decay**count.value if debias else 1.0
        return average.value / scale

    out = strategy.call_for_each_tower(
        tower_fn, average, count, tj.PerTower(np.float32(own))
    )  # bare: proved the same on all
    np.testing.assert_allclose(out, case["expected"], rtol=case["tol"])


@TABLE.checks("creator.thread_local")
def check_creators(case, strategy):
    def tower_fn(tower, outer):
        def own(name):
            return f"{outer(name)}:thread", tower.id

        tower.merge_call(lambda strategy: None)
        return own("v")

    word, ids = strategy.call_for_each_tower(tower_fn, lambda name: "main_thread")
    made = [f"{word}_{tower}" for tower in strategy.unwrap(ids)]
    assert made == case["expected"]


@TABLE.checks("ctor.error.both")
def check_constructor(case, strategy):
    for options in (
        dict(devices=("gpu:0",), num_gpus=1),
        dict(num_gpus=1, num_gpus_per_worker=1),
    ):
        refused(case, lambda o=options: tj.Mirrored(**o), text="num_gpus")


# Saved and restored.


def local(strategy, reduction, values):
    v = strategy.create_var("v", 0.0, reduction=reduction, tower_local=True)
    return strategy.call_for_each_tower(
        lambda tower, v, x: tower.assign(v, x), v, tj.PerTower(np.float32(values))
    )


@TABLE.checks(*[id for id in TABLE.cases if id.startswith("ckpt.local.")])
def check_saved_local(case, strategy):
    given = case["input"]
    expected = case["expected"]
    reduction = R.SUM if ".sum." in case["id"] else R.MEAN
    v = local(strategy, reduction, given["components_at_save"])
    saved = jax.tree.map(np.array, tj.towers.saved_values({"v": v}))
    if "saved" in expected:
        assert float(saved["v"]) == expected["saved"]
    if "after" in expected:
        like = {"v": np.float32(given["before_restore"])}
        restored = tj.towers.restored_values(tj.OneDevice("cpu:0"), like, saved)
        assert float(restored["v"]) == expected["after"]
        return
    like = {"v": local(strategy, reduction, given["before_restore"])}
    restored = tj.towers.restored_values(strategy, like, saved)["v"]
    assert components(strategy, restored) == expected["components_after"]


@TABLE.checks("ckpt.mirrored.to_mirrored", "ckpt.normal.to_mirrored")
def check_saved_mirrored(case, strategy):
    given = case["input"]
    # The original saves its first copy; here the copies cannot differ.
    value = np.float32(given.get("saved", given.get("components_at_save", [0])[0]))
    v = strategy.create_var("v", value)
    tree = {"v": v if "components_at_save" in given else value}
    saved = jax.tree.map(np.array, tj.towers.saved_values(tree))
    like = {"v": strategy.create_var("v", given["before_restore"][0])}
    restored = tj.towers.restored_values(strategy, like, saved)["v"]
    assert components(strategy, restored) == case["expected"]["components_after"]


# Values that differ from tower to tower.


@TABLE.checks("values.get")
def check_get(case, strategy):
    value = tj.PerTower((1, 2))
    assert strategy.select_tower(value, 1) == case["expected"]["gpu:0"]

    def tower_fn(tower, own):
        return tower.merge_call(lambda strategy, v: strategy.unwrap(v)[0], own)

    current = strategy.call_for_each_tower(tower_fn, value)
    assert int(current) == case["expected"]["<current>"]


@TABLE.checks("values.delegate.operators")
def check_operators(case, strategy):
    expressions = case["input"]["expressions"]
    expected = case["expected"]["results"]
    value = tj.PerTower((7, 8))
    for expression, result in zip(expressions, expected, strict=True):
        # A tower's value is the value itself: nothing stands between.
        actual = eval(expression, {"v": strategy.select_tower(value, 0)})
        assert actual == result, expression
    traced = {
        e: r for e, r in zip(expressions, expected, strict=True) if e != "pow(v,3,10)"
    }
    out = strategy.call_for_each_tower(
        lambda tower, v: [eval(expression, {"v": v}) for expression in traced], value
    )
    first = [np.asarray(x.values)[0].item() for x in out]
    assert first == pytest.approx(list(traced.values()), rel=1e-6)


@TABLE.checks("values.delegate.getitem_error")
def check_getitem(case, strategy):
    v = strategy.select_tower(tj.PerTower((7, 8)), 0)
    for container in (v, tj.PerTower((7, 8)), strategy.create_var("v", 7)):
        refused(
            case,
            lambda c=container: eval(case["input"]["expression"], {"v": c}),
            text="not subscriptable",
            error=TypeError,
        )


@TABLE.checks("values.is_tensor_like")
def check_is_tensor_like(case, strategy):
    def is_tensor_like(value):
        return all(isinstance(x, jax.Array) for x in jax.tree.leaves(value))

    assert is_tensor_like(tj.PerTower((jnp.ones(1), jnp.ones(2)))) == case["expected"]
    assert not is_tensor_like(tj.PerTower((jnp.ones(1), "word")))
    assert jax.jit(lambda v: v)(tj.PerTower((jnp.ones(1), jnp.ones(2))))


@TABLE.checks("values.regroup.nested")
def check_regroup_nested(case, strategy):
    def as_nest(x):  # the file's outermost list is a tuple
        return (x[0], x[1], x[2])

    nests = [as_nest(case["input"][f"tower{t}"]) for t in range(2)]
    grouped = strategy.regroup(nests)
    assert isinstance(grouped, tuple) and isinstance(grouped[1], list)
    for path, values in case["expected"]["leaves"].items():
        path = re.sub(r"\.(\w)", r"['\1']", path)
        leaf = eval(f"grouped{path}", {"grouped": grouped})
        assert leaf == tj.PerTower(tuple(values))
    assert [strategy.select_tower(grouped, t) for t in range(2)] == nests
    v = strategy.create_var("v", 1.0)
    refused(
        case,
        lambda: strategy.update(v, lambda x, nest: x, grouped),
        text="Expected value to be mirrored across towers",
    )


class Foo:
    pass


@TABLE.checks("values.regroup.same_object")
def check_regroup_same_object(case, strategy):
    foo = Foo()
    first, second = strategy.regroup([("a", foo), ("b", foo)])
    assert first == tj.PerTower(("a", "b")) and second is foo


@TABLE.checks("values.regroup.mirrored_container")
def check_regroup_of_a_variable(case, strategy):
    v = strategy.create_var("v", 1.0)
    parts = [strategy.select_tower(v, t) for t in range(2)]
    assert (strategy.regroup(parts) is v) == case["expected"]["is_same_container"]


@TABLE.checks("mirrored.regroup.error_len")
def check_regroup_error(case, strategy):
    nests = [case["input"][f"tower{t}"] for t in range(2)]
    refused(
        case,
        lambda: strategy.regroup(nests),
        text="nests holds PyTreeDef([]) of tower 0 and PyTreeDef([*]) of tower 1",
    )


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)
