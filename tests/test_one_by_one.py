"""Towers one after another, with real values: the same results, in turn, and errors."""

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mirrored

import towerjax as tj

R = tj.Reduction
EPS = np.finfo(np.float32).eps
LAYOUTS = pytest.mark.parametrize("T, D", [(1, 1), (2, 2), (3, 1), (4, 2)])
ROWS = np.float32([1.5, -0.25, 3.0, 0.75])


def one_by_one(strategy, fn, *args, **kwargs):
    return strategy.call_for_each_tower(fn, *args, run_concurrently=False, **kwargs)


def per_tower(T):
    return tj.PerTower(ROWS[:T])


def rows(strategy, value):
    """Every tower's value; a bare one is every tower's."""
    own = strategy.unwrap(value)
    return np.stack([np.asarray(x) for x in own * (strategy.num_towers // len(own))])


# The same results as the compiled form.


def merged_sum(tower, x):
    total = tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), x)
    return {"total": total, "own": x * total + tower.id}


def merge_that_closes_over_its_tower(tower, x):
    return tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)) * x, 2 * x)


def merge_with_a_default(tower, x):
    def merge_fn(strategy, v, scale=tower.id + 1):
        return strategy.reduce(R.MEAN, v) * scale

    return tower.merge_call(merge_fn, x)


def several_meetings(tower, x):
    mean = tower.reduce(R.MEAN, x)
    gathered = tower.all_gather({"x": x, "i": tower.id})
    first = tower.reduce(R.ONLY_FIRST_TOWER, x - mean)
    counts = tower.reduce(R.SUM, {"one": 1, "even": tower.id % 2 == 0})
    return mean, gathered, first, counts, tower.reduce(R.MEAN, tower.id)


def rows_handed_back(tower, x):
    def merge_fn(strategy, v):
        own = strategy.unwrap(v)
        return tj.PerTower(tuple(own[::-1])), {"word": "w", "rows": v}

    return tower.merge_call(merge_fn, jnp.stack([x, -x]))


def key_of(tower):
    return jax.random.fold_in(jax.random.key(3), tower.id)


def random_numbers(tower, x):
    return jax.random.normal(key_of(tower), (3,)) * x


def keys(tower, x):
    return (
        jax.random.key_data(tower.reduce(R.ONLY_FIRST_TOWER, key_of(tower))),
        jax.random.key_data(tower.all_gather(key_of(tower))),
    )


def towers_called_in_a_merge(tower, x):
    def merge_fn(strategy, v):
        own = strategy.call_for_each_tower(lambda tower, y: 10 * y + tower.id, v)
        return own, strategy.reduce(R.SUM, own)

    return tower.merge_call(merge_fn, x)


FUNCTIONS = [
    merged_sum,
    merge_that_closes_over_its_tower,
    merge_with_a_default,
    several_meetings,
    rows_handed_back,
    random_numbers,
    keys,
    towers_called_in_a_merge,
]


@LAYOUTS
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.slow
def test_the_results_are_those_of_the_compiled_form(fn, T, D):
    strategy = mirrored(T, D)
    compiled = strategy.call_for_each_tower(fn, per_tower(T))
    real = one_by_one(strategy, fn, per_tower(T))
    is_leaf = lambda x: isinstance(x, tj.PerTower)  # noqa: E731
    leaves, structure = jax.tree.flatten(compiled, is_leaf=is_leaf)
    others, other_structure = jax.tree.flatten(real, is_leaf=is_leaf)
    assert structure == other_structure
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, str):
            assert one == other
            continue
        one, other = rows(strategy, one), rows(strategy, other)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=16 * EPS, atol=16 * EPS)


@LAYOUTS
def test_example_of_the_original(T, D):
    def tower_fn(tower, start):
        v = start + tower.id
        s = tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), v)
        return s + v

    out = one_by_one(mirrored(T, D), tower_fn, 3)
    ids = np.arange(T)
    assert out.values.tolist() == ((3 + ids).sum() + 3 + ids).tolist()
    if T == 2:
        assert out.values.tolist() == [10, 11]


@pytest.mark.few_fast(2)
@LAYOUTS
def test_what_all_share_comes_back_bare(T, D):
    shared = np.float32([1, 2])

    def tower_fn(tower, own, shared):
        return dict(
            shared=shared,
            total=tower.reduce(R.SUM, own),
            gathered=tower.all_gather(own),
            merged=tower.merge_call(lambda strategy, v: strategy.reduce(R.SUM, v), own),
            constants=("word", 7, None, 2.5),
            own=own,
            computed=shared * 2,
        )

    out = one_by_one(mirrored(T, D), tower_fn, per_tower(T), shared)
    bare = {name for name, x in out.items() if isinstance(x, jax.Array)}
    assert bare == {"shared", "total", "gathered", "merged"} | (
        {"computed"} if T > 1 else set()
    )
    assert out["constants"] == ("word", 7, None, 2.5)
    assert out["own"].values.tolist() == ROWS[:T].tolist()
    computed = np.asarray(jax.tree.leaves(out["computed"])[0])
    assert computed.reshape(2).tolist() == [2, 4]  # by proof, as compiled
    np.testing.assert_allclose(out["merged"], ROWS[:T].sum(), rtol=4 * EPS)


@pytest.mark.few_fast(1)
@LAYOUTS
def test_shapes_and_constants_may_differ_from_tower_to_tower(T, D):
    def tower_fn(tower, x):
        t = int(tower.id)
        return {"ragged": jnp.full(t + 1, x), "word": f"tower {t}", "n": t}

    strategy = mirrored(T, D)
    out = one_by_one(strategy, tower_fn, per_tower(T))
    ragged = [x.tolist() for x in strategy.unwrap(out["ragged"])]
    assert ragged == [[ROWS[t]] * (t + 1) for t in range(T)]
    if T > 1:
        assert out["word"] == tj.PerTower(tuple(f"tower {t}" for t in range(T)))
        assert out["n"] == tj.PerTower(tuple(range(T)))
        again = one_by_one(strategy, lambda tower, x: x.sum(), out["ragged"])
        np.testing.assert_allclose(again.values, ROWS[:T] * np.arange(1, T + 1))
    else:
        assert (out["word"], out["n"]) == ("tower 0", 0)


@LAYOUTS
def test_merged_values_may_differ_in_shape_and_in_constants(T, D):
    def merge_fn(strategy, v, word):
        assert word == "w"
        return strategy.reduce(R.MEAN, v, axis=0), strategy.gather(v, 0).shape[0]

    def tower_fn(tower):
        return tower.merge_call(merge_fn, jnp.full(int(tower.id) + 1, tower.id), "w")

    mean, count = one_by_one(mirrored(T, D), tower_fn)
    elements = np.concatenate([np.full(t + 1, t) for t in range(T)])
    assert count == len(elements)
    np.testing.assert_allclose(mean, elements.mean(), rtol=4 * EPS)


Pair = collections.namedtuple("Pair", "first second")


def test_containers_keep_their_types():
    def tower_fn(tower):
        return [Pair(tower.id, {"n": None}), (1, [])]

    out = one_by_one(mirrored(3), tower_fn)
    assert isinstance(out[0], Pair) and out[0].first.values.tolist() == [0, 1, 2]
    assert out[0].second == {"n": None} and out[1] == (1, [])


# In turn, with real values.


@pytest.mark.parametrize("D", [1, 3])
def test_one_tower_runs_at_a_time_in_the_towers_order(D, capsys):
    running, seen = [], []

    def tower_fn(tower):
        t = int(tower.id)
        for part in "abc":
            running.append(t)
            print(part, tower.id)
            seen.append((part, t, threading.active_count()))
            assert running == [t]
            running.remove(t)
            if part != "c":
                tower.reduce(R.SUM, tower.id)

    assert one_by_one(mirrored(3, D), tower_fn) is None
    order = [(part, t) for part, t, _ in seen]
    assert order == [(part, t) for part in "abc" for t in range(3)]
    assert capsys.readouterr().out.split("\n")[:4] == ["a 0", "a 1", "a 2", "b 0"]


def test_a_tower_works_on_its_own_device():
    def tower_fn(tower):
        return str(jnp.arange(3).devices())

    out = one_by_one(mirrored(4, 2), tower_fn)
    devices = [str({jax.devices("cpu")[t // 2]}) for t in range(4)]
    assert list(out.values) == devices


def test_python_control_flow_on_the_towers_id():
    def tower_fn(tower, x):
        if tower.id == 1 and x > 2:
            return x * 10
        return x

    out = one_by_one(mirrored(3, 3), tower_fn, tj.PerTower(np.array([3, 3, 3])))
    assert out.values.tolist() == [3, 30, 3]


def test_a_merge_function_without_closure_is_called_once():
    calls = []

    def merge_fn(strategy, v):
        calls.append([int(x) for x in strategy.unwrap(v)])
        return 1

    def tower_fn(tower, method):
        return tower.merge_call(method, tower.id)

    for method in (merge_fn, functools.partial(merge_fn)):
        assert one_by_one(mirrored(3), tower_fn, method) == 1
    assert calls == [[0, 1, 2]] * 2


def test_the_callers_settings_hold_in_every_tower():
    def tower_fn(tower):
        def body(x):
            return tower.reduce(R.SUM, x)

        return jax.jit(body)(jnp.float32(2)), jnp.arange(2.0).dtype.name

    with jax.disable_jit(), jax.enable_x64(True):
        total, dtype = one_by_one(mirrored(3), tower_fn)
    assert rows(mirrored(3), total).tolist() == [6, 6, 6] and dtype == "float64"


# Variables.


@pytest.mark.few_fast(1)
@LAYOUTS
def test_variables_come_in_and_go_out_as_such(T, D):
    strategy = mirrored(T, D)
    weight = strategy.create_var("w", [1.0, 2.0], reduction=R.MEAN)
    count = strategy.create_var("c", {"n": 5}, reduction=R.SUM, tower_local=True)

    def tower_fn(tower, weight, count):
        count = tower.assign_add(count, {"n": tower.id})
        return tower.assign(weight, [tower.id, weight.value[1]]), count, weight

    weight2, count2, same = one_by_one(strategy, tower_fn, weight, count)
    assert isinstance(weight2, tj.towers.MirroredVar) and isinstance(
        count2, tj.TowerLocal
    )
    assert float(weight2.value[0]) == np.arange(T).mean()
    assert [float(x) for x in same.value] == [1, 2]
    assert count2.value["n"].tolist() == [5 + t for t in range(T)]
    assert count2.value["n"].sharding == count.value["n"].sharding
    assert weight2.value[0].sharding == weight.value[0].sharding


def test_a_mirrored_variable_that_differs_is_refused():
    def tower_fn(tower, v):
        return {"v": tj.towers.MirroredVar(v.value + tower.id, name="v")}

    v = mirrored(2).create_var("v", 1)
    text = (
        r"The towers' result\['v'\] is mirrored variable 'v', but tower 1 holds anoth"
    )
    with pytest.raises(ValueError, match=text):
        one_by_one(mirrored(2), tower_fn, v)


# What goes wrong.


class OurError(Exception):
    pass


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_an_error_keeps_its_type_says_which_tower_and_stops_the_others(guilty):
    ended, before = [], threading.active_count()

    def tower_fn(tower):
        try:
            tower.reduce(R.SUM, tower.id)
            if tower.id == guilty:
                raise OurError("mine")
            tower.reduce(R.SUM, tower.id)
        finally:
            ended.append(int(tower.id))

    with pytest.raises(OurError, match=r"^mine\n") as error:
        one_by_one(mirrored(3, 3), tower_fn)
    assert error.value.__notes__ == [f"In tower {guilty} of 3, run one by one."]
    assert sorted(ended) == [0, 1, 2]  # none is left waiting
    assert threading.active_count() == before


def test_an_error_in_a_merge_function_says_where_the_towers_met():
    def fail(strategy, v):
        raise OurError("merge")

    with pytest.raises(OurError, match=r"^merge\n") as error:
        one_by_one(mirrored(2), lambda tower: tower.merge_call(fail, tower.id))
    [note] = error.value.__notes__
    assert note.startswith("In the merge that the towers reached at")
    assert "test_one_by_one.py:" in note


def meets(tower, v):
    return tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), v)


@pytest.mark.parametrize(
    "waits, text",
    [
        (
            0,
            "tower 0 waits in tower.merge_call at .*test_one_by_one.py:.*, tower 1 fin",
        ),
        (1, "tower 0 finished, tower 1 waits in tower.merge_call at .*by_one.py:"),
    ],
)
def test_different_numbers_of_merge_calls_are_refused(waits, text):
    def tower_fn(tower):
        return meets(tower, 1.0 + tower.id) if tower.id == waits else 0

    with pytest.raises(tj.ReplicationError, match=text) as error:
        one_by_one(mirrored(2, 2), tower_fn)
    assert "The towers made different numbers of merge calls" in str(error.value)


def other_merge(strategy, v):
    return strategy.reduce(R.MEAN, v)


def third_merge(strategy, v):
    return strategy.reduce(R.SUM, v)


@pytest.mark.parametrize(
    "first, second",
    [
        (meets, lambda tower, v: tower.merge_call(other_merge, v)),
        (meets, lambda tower, v: tower.reduce(R.SUM, v)),
        (
            lambda tower, v: tower.merge_call(
                jax.jit(other_merge, static_argnums=0), v
            ),
            lambda tower, v: tower.merge_call(
                jax.jit(third_merge, static_argnums=0), v
            ),
        ),
        (
            lambda tower, v: tower.reduce(R.SUM, v),
            lambda tower, v: tower.reduce(R.MEAN, v),
        ),
        (
            lambda tower, v: tower.all_gather(v),
            lambda tower, v: tower.reduce(R.MEAN, v),
        ),
    ],
)
def test_different_merges_on_different_towers_are_refused(first, second):
    def tower_fn(tower):
        return first(tower, tower.id) if tower.id == 0 else second(tower, tower.id)

    text = (
        "The towers meet in different merges: tower 0 waits in tower.* at .*, tower 1"
    )
    with pytest.raises(tj.ReplicationError, match=text):
        one_by_one(mirrored(2), tower_fn)


@pytest.mark.parametrize(
    "value, text",
    [
        (
            lambda t: {"a": [1.0] * t},
            r"tower.merge_call at .*values\[0\]\['a'\] differs in structure from tower"
            " to tower: tower 0 has a list of 0, tower 1 a list of 1",
        ),
        (
            lambda t: {f"k{t}": 1.0},
            r"tower 0 has a dict of \['k0'\], tower 1 a dict of",
        ),
        (lambda t: None if t else 1.0, "tower 0 has a leaf, float, tower 1 None"),
    ],
)
def test_merged_values_of_different_structure_are_refused(value, text):
    def tower_fn(tower):
        return tower.merge_call(lambda strategy, v: 0, value(int(tower.id)))

    with pytest.raises(ValueError, match=text):
        one_by_one(mirrored(2), tower_fn)


def test_reductions_of_different_structure_or_shape_are_refused():
    def structures(tower):
        return tower.reduce(R.SUM, {f"k{tower.id}": 1.0})

    def shapes(tower):
        return tower.reduce(R.SUM, jnp.ones(int(tower.id) + 1))

    with pytest.raises(ValueError, match="structures that differ from tower to tower"):
        one_by_one(mirrored(2), structures)
    with pytest.raises(ValueError, match=r"shapes \(1,\), \(2,\), which cannot lie"):
        one_by_one(mirrored(2), shapes)


@pytest.mark.parametrize("reduction", [R.NONE, "sum", None])
def test_no_reduction_is_refused(reduction):
    with pytest.raises(ValueError, match="SUM, MEAN or ONLY_FIRST_TOWER") as error:
        one_by_one(mirrored(2), lambda tower: tower.reduce(reduction, tower.id))
    assert error.value.__notes__ == ["In tower 0 of 2, run one by one."]
    with pytest.raises(ValueError, match="of a random key, which is no number. Use"):
        one_by_one(mirrored(2), lambda tower: tower.reduce(R.SUM, key_of(tower)))


def test_results_of_different_structure_are_refused():
    with pytest.raises(ValueError) as error:
        one_by_one(mirrored(2), lambda tower: [0] * int(tower.id))
    assert str(error.value) == (
        "The towers' result differs in structure from tower to tower: tower 0 has a"
        " list of 0, tower 1 a list of 1. Give all towers the same lists, tuples"
        " and keys."
    )


def test_axis_names_are_refused():
    with pytest.raises(ValueError, match="no axis of one program. Use tower.reduce"):
        one_by_one(mirrored(2), lambda tower: tower.axis_names)


@pytest.mark.parametrize(
    "transform, where, instead",
    [
        (jax.jit, "jit, cond or scan", r"or run under jax.disable_jit\(\)"),
        (jax.grad, "grad or vmap", "or meet outside of it"),
    ],
)
def test_a_meeting_inside_a_transformation_is_refused(transform, where, instead):
    def tower_fn(tower):
        return transform(lambda x: meets(tower, x))(1.0)

    text = f"merge_call at .*py:.* is inside {where}, where towers.*{instead}"
    with pytest.raises(ValueError, match=text):
        one_by_one(mirrored(2), tower_fn)


def test_a_meeting_inside_a_merge_function_is_refused():
    def tower_fn(tower):
        return tower.merge_call(lambda strategy, v: meets(tower, 1.0), tower.id)

    with pytest.raises(ValueError, match="outside of its tower: all towers have met"):
        one_by_one(mirrored(2), tower_fn)


def test_traced_arguments_are_refused():
    strategy = mirrored(2)

    def call(x):
        return one_by_one(strategy, lambda tower, x: x, x)

    text = (
        "run_concurrently=False shows real values, and inside jit, grad, vmap or scan"
    )
    for use in (jax.jit(call), jax.grad(call), jax.jit(lambda x: call(1.0))):
        with pytest.raises(ValueError, match=text):
            use(1.0)


@pytest.mark.parametrize("what", ["merge_call", "reduce", "all_gather"])
def test_towers_in_turn_do_not_meet_here_either(what):
    def tower_fn(tower):
        if what == "merge_call":
            return meets(tower, tower.id)
        if what == "reduce":
            return tower.reduce(R.SUM, tower.id)
        return tower.all_gather(tower.id)

    with pytest.raises(ValueError, match=f"tower.{what} needs all towers at once"):
        one_by_one(mirrored(2, local="scan"), tower_fn)


def test_what_has_not_a_row_a_tower_is_refused():
    with pytest.raises(ValueError, match="A PerTower argument has shape .* 2 towers"):
        one_by_one(mirrored(2), lambda tower, x: x, tj.PerTower(np.ones(3)))
    with pytest.raises(ValueError, match="A PerTower that merge_fn returned has shape"):
        one_by_one(
            mirrored(2),
            lambda tower: tower.merge_call(lambda strategy: tj.PerTower(np.ones(3))),
        )


def test_several_processes_are_refused():
    strategy = mirrored(2)
    vars(strategy.placement)["num_processes"] = 4  # what a cluster would say
    with pytest.raises(
        ValueError, match="in one process, but the devices are those of 4"
    ):
        one_by_one(strategy, lambda tower: 0)


@pytest.mark.parametrize("value", [None, 0, "no"])
def test_run_concurrently_is_a_bool(value):
    with pytest.raises(ValueError, match=f"run_concurrently={value!r} must be True or"):
        mirrored(2).call_for_each_tower(lambda tower: 0, run_concurrently=value)


CONCURRENTLY = pytest.mark.parametrize("concurrently", [True, False])


def summed_in_a_tower(tower, x):
    return tower.reduce(R.SUM, 2 * x)


def summed_into_a_variable(tower, x):
    return tower.assign_add(tj.towers.MirroredVar(x, R.SUM), jnp.float32(1)).value


def counted(tower, x):
    return tower.reduce(R.SUM, 1.0), 3 * tower.reduce(R.SUM, x / tower.num_towers)


@pytest.mark.few_fast(1)
@CONCURRENTLY
def test_a_sum_of_what_all_towers_share_is_refused_whichever_way_they_run(concurrently):
    strategy, x = mirrored(2, 2), np.float32(-2)

    def call(fn):
        return strategy.call_for_each_tower(fn, x, run_concurrently=concurrently)

    for fn in (summed_in_a_tower, summed_into_a_variable):
        with pytest.raises(tj.ReplicationError, match="T times too much"):
            call(fn)
    for fn in (lambda tower, x: 2 * x, lambda tower, x: jnp.float32(-4)):
        assert float(call(fn)) == -4  # one value and no PerTower, by proof
        with pytest.raises(ValueError, match="SUM of -4.0, which is the same on all 2"):
            strategy.reduce(R.SUM, call(fn))
    for given in (x, 1.0, np.float32(1)):
        with pytest.raises(ValueError, match="cannot be reduced|the same on all 2"):
            call(
                lambda tower, _, x=given: tower.assign_add(
                    tj.towers.MirroredVar(x, R.SUM), x
                )
            )
        with pytest.raises(ValueError, match="SUM of .* the same on all 2 towers"):
            call(lambda t, _, x=given: t.merge_call(lambda s: s.reduce(R.SUM, x)))
    assert [*map(float, call(counted))] == [2, -6]


@CONCURRENTLY
def test_what_is_equal_by_chance_is_a_value_a_tower(concurrently):
    strategy, rows = mirrored(2), tj.PerTower(np.float32([[1, 2], [3, 0]]))
    out = strategy.call_for_each_tower(
        lambda tower, x: (x.sum(), tower.reduce(R.SUM, x.sum())),
        rows,
        run_concurrently=concurrently,
    )
    assert out[0].values.tolist() == [3, 3] and float(out[1]) == 6
    assert float(strategy.reduce(R.SUM, out[0])) == 6


def test_what_cannot_be_compiled_is_equal_by_chance():
    def tower_fn(tower, x):
        return jnp.float32(7 if float(x) > 0 else 9)

    out = one_by_one(mirrored(2), tower_fn, np.float32(2))
    assert out.values.tolist() == [7, 7]
