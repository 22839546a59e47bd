"""What cannot be done across towers says so, and says what to write."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.metrics.weighted import UnknownWeights
from towerjax.step.comparison import Finding, SplitError
from towerjax.step.faults import Differing, Place

R = tj.Reduction


def mirrored(T=4, D=2, **options):
    return tj.Mirrored([f"cpu:{i}" for i in range(D)], towers=T, **options)


def refuses(text):
    return pytest.raises(ValueError, match=text)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", [R.SUM, R.MEAN])
def test_random_keys_do_not_add_up(reduction):
    keys = jax.random.split(jax.random.key(0), 4)
    strategy = mirrored()
    for value in (tj.PerTower(keys), {"a": tj.PerTower(tuple(keys))}):
        with refuses("of a random key, which is no number. Use Reduction.ONLY_FIRST"):
            strategy.reduce(reduction, value)
    first = strategy.reduce(R.ONLY_FIRST_TOWER, tj.PerTower(keys))
    assert (jax.random.key_data(first) == jax.random.key_data(keys[0])).all()


def test_an_axis_is_one_dim_and_a_limit_of_bytes_an_int():
    strategy, x = mirrored(), tj.PerTower(np.ones((4, 2, 2)))
    for axis in (0.0, (0, 1), "0", True):
        with refuses("axis=.* must be an int, one dim"):
            strategy.call_for_each_tower(lambda t, x: t.all_gather(x, axis=axis), x)  # noqa: B023
    for below in ("x", None, True, 1.5, -1):
        with refuses("AllReduce.pack_below_bytes=.* must be a whole number >= 0"):
            tj.AllReduce(below)


@pytest.mark.parametrize("reduction", [R.MEAN, R.ONLY_FIRST_TOWER])
def test_what_all_share_comes_back_as_an_array_of_its_own(reduction):
    mine = np.ones(3, np.float32)
    out = mirrored().reduce(reduction, {"a": mine, "n": 3})
    mine[:] = 7
    assert isinstance(out["a"], jax.Array) and out["a"].tolist() == [1.0] * 3
    assert out["n"] == 3
    alone = tj.Mirrored(towers=1).reduce(R.SUM, mine)
    assert isinstance(alone, jax.Array)


def test_a_tower_local_variable_that_a_tower_closes_over_is_told():
    strategy = mirrored()
    v = strategy.create_var("v", 1.0, reduction=R.SUM, tower_local=True)
    with refuses(r"shape \(\), expected \(4,\).*own copy.* passed .* closes over"):
        strategy.call_for_each_tower(lambda tower: tower.assign_add(v, 1.0))
    own = strategy.call_for_each_tower(lambda tower, v: tower.assign_add(v, 1.0), v)
    assert own.value.tolist() == [2.0] * 4


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_variable_that_a_tower_closes_over_is_told(num_devices):
    """It is read once: by a function that is called again it would be an old one."""
    strategy = mirrored(2, num_devices)
    v = strategy.create_var("v", np.float32([1, 2]))
    own = tj.PerTower(np.float32([2, 3]))
    reads = [lambda tower, x: v.value, lambda tower, x: jax.jit(lambda: v.value + 0)()]
    for tower_fn in reads:
        assert strategy.call_for_each_tower(tower_fn, own).tolist() == v.value.tolist()
        v = strategy.assign_add(v, np.float32([1, 1]))
        with refuses(
            r"variable's value, .*: float32\[2\]\. .*arguments, of fn\(tower, var"
        ):
            strategy.call_for_each_tower(tower_fn, own)

    def tower_fn(tower, x, v):
        return v.value * x

    for _ in range(2):
        out = strategy.call_for_each_tower(tower_fn, own, v)
        expected = np.outer([2, 3], v.value)
        assert out.values.tolist() == expected.tolist()
        v = strategy.assign_add(v, np.float32([1, 1]))  # the next call sees it
    # What a jit around it is given is no constant.
    tower_fn = lambda w: lambda tower: w * tower.id  # noqa: E731
    own = jax.jit(lambda w: strategy.call_for_each_tower(tower_fn(w)))
    assert own(v.value).values.tolist() == [[0, 0], v.value.tolist()]


def test_a_variable_that_the_steps_of_a_loop_close_over_is_told():
    strategy = mirrored(2, 2)
    v = strategy.create_var("v", 1.0)

    def run(step, carry):
        data = iter(strategy.distribute_dataset(range(4), split="elements"))
        return strategy.run_steps_on_dataset(step, data, 2, carry).final

    def step(ctx, carry, x):
        return carry + v.value

    assert float(run(step, 0.0)) == 2.0
    with refuses(r"variable's value, .*: float32\[\]\. .*in the carry of run_steps_on"):
        run(step, 0.0)
    total, _ = run(
        lambda ctx, carry, x: (carry[0] + carry[1].value, carry[1]), (0.0, v)
    )
    assert float(total) == 2.0


@pytest.mark.slow
def test_what_a_variable_holds_and_a_value_that_is_none_of_the_kind():
    strategy = mirrored()
    v = strategy.create_var("v", np.ones(3, np.float32))
    rows = tj.sparse.IndexedRows(np.float32([5, 6]), np.array([0, 0]), (3,))
    with refuses(r"variable 'v' is .*None.*as a function for strategy\.update returns"):
        strategy.update(v, lambda x: None)
    with refuses(r"variable 'v' is .*IndexedRows.*rows\.add_to\(variable\.value\)"):
        strategy.assign_add(v, rows)
    new = strategy.assign(v, rows.add_to(v.value))
    assert new.value.tolist() == [12, 1, 1]
    new = strategy.update(v, lambda x, rows: rows.add_to(x), rows)
    assert new.value.tolist() == [12, 1, 1]

    def add_rows(tower, v):
        own = jnp.stack([tower.id, tower.id + 1])
        rows = tj.sparse.IndexedRows(own * 1.0, own, (5,))
        return tower.assign_add(v, rows.to_dense())

    v = strategy.create_var("v", np.zeros(5, np.float32), reduction=R.SUM)
    new = strategy.call_for_each_tower(add_rows, v)
    assert new.value.tolist() == [0, 2, 4, 6, 4]


def test_a_name_of_tensorflow_that_is_missing_says_what_to_write():
    strategy = mirrored()
    v, each = strategy.create_var("v", 1.0), tj.PerTower(np.ones(2, np.float32))
    local = strategy.create_var("l", 1.0, reduction=R.MEAN, tower_local=True)
    cases = [
        (lambda: strategy.scope(), "docs/mirrored_strategy.md"),
        (lambda: v.assign(2.0), r"v = strategy\.assign\(v, x\)"),
        (lambda: local.get(), r"strategy\.read_var\(v\) of all towers"),
        (lambda: each.get("cpu:0"), r"strategy\.select_tower\(x, t\)"),
        (
            lambda: strategy.update(v, lambda x, g: x.assign_sub(g), 1.0),
            r"returns the new value: lambda x, g: x - 0\.1 \* g",
        ),
    ]
    for call, text in cases:
        with pytest.raises(AttributeError, match="has no attribute") as caught:
            call()
        assert re.search(text, caught.value.__notes__[0]), text
    assert not hasattr(v, "shape") and copy.deepcopy(strategy) == strategy
    assert pickle.loads(pickle.dumps(v)) == v


def test_rows_of_a_table_do_not_stack():
    rows = tj.sparse.IndexedRows(np.ones((1, 2)), np.array([1]), (5, 2))
    with refuses("map: fn returns IndexedRows.*rows.to_dense"):
        mirrored().map(lambda x: {"rows": rows}, [1, 2])


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("T, D", [(2, 2), (4, 2), (1, 1)])
@pytest.mark.parametrize("reduction", [R.SUM, R.MEAN, R.ONLY_FIRST_TOWER])
def test_what_is_across_towers_is_refused_in_a_tower(T, D, reduction):
    strategy = mirrored(T, D)
    for x in (lambda tower: 1.0 + tower.id, lambda tower: {"x": tower.id}):
        with refuses(rf"strategy.reduce in a tower.*tower.reduce\(tj.{reduction!r}, x"):
            strategy.call_for_each_tower(
                lambda t, x=x: strategy.reduce(reduction, x(t))
            )
    with refuses(r"strategy.broadcast in a tower.*tower.reduce\(tj.Reduction.ONLY_F"):
        strategy.call_for_each_tower(lambda t: strategy.broadcast({"x": t.id}))
    with refuses(r"strategy.fetch in a tower.*Write x itself"):
        strategy.call_for_each_tower(lambda t: strategy.fetch({"x": t.id}))
    rows = np.ones(strategy.num_towers)  # own copies, which look like one a tower
    v = strategy.create_var("v", rows, reduction=R.SUM, tower_local=True)
    for method in (strategy.read_var, lambda v: strategy.assign(v, rows[0])):
        with refuses(r"'v' is the tower's own copy in a tower function: read \.value"):
            strategy.call_for_each_tower(lambda t, v, method=method: method(v), v)


def test_a_merge_function_reduces_what_it_is_given():
    strategy = mirrored()

    def merge_fn(strategy, x, v):
        total = strategy.reduce(R.SUM, x)
        return strategy.reduce(R.MEAN, total), strategy.read_var(v)

    v = strategy.create_var("v", 1.0, reduction=R.SUM, tower_local=True)
    out = strategy.call_for_each_tower(
        lambda tower, v: tower.merge_call(merge_fn, 1.0 + tower.id, v), v
    )
    assert [float(x) for x in out] == [10, 4]


PLACES = [Place(3, 1, "params/w", "gradient", "NaN")]
ERRORS = [
    tj.CheckpointError("no manifest"),
    tj.ReplicationError("loss depends on the tower"),
    tj.DesyncError(131, [Differing("cpu:5", "params/w")]),
    tj.NonFiniteError(3, PLACES),
    SplitError([Finding("loss", 2, "in order", 1.5, 1.0, 0.5, 0.5)]),
    UnknownWeights(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_copied_and_pickled_whole(error):
    error.add_note("on host 3")
    pickled = [
        pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for other in [*pickled, copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is type(error) and str(other) == str(error)
        assert vars(other) == vars(error) and other.args == error.args
