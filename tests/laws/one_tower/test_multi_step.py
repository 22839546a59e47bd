"""run_steps_on_dataset: the same numbers as steps one by one, in one program."""

from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

R = tj.Reduction
X = np.arange(1, 8, dtype=np.float32)  # 7 rows, which no towers share evenly


def descend(ctx, w, x):
    """One step of gradient descent on the mean of (w x - 1)^2 over all examples."""

    def tower_fn(tower, w, x, weight):
        loss = tj.Weighted.mean((w * x - 1) ** 2, weight)
        ctx.set_last_step_output("examples", weight.sum(), R.SUM)
        return jax.grad(lambda w: (weight * (w * x - 1) ** 2).sum())(w), loss

    grads, losses = ctx.call_for_each_tower(tower_fn, w, x, ctx.weight)
    loss = ctx.strategy.reduce(R.SUM, losses)
    ctx.set_last_step_output("loss", loss.value)
    ctx.set_last_step_output("grads", grads)
    return w - 0.01 * ctx.strategy.reduce(R.SUM, grads) / loss.weight


def by_numpy(steps):
    w = 0.0
    x = X.astype(np.float64)
    for _ in range(steps):
        before = w
        w = w - 0.01 * (2 * (w * x - 1) * x).mean()
    return w, ((before * x - 1) ** 2).mean()


def feed(strategy, batches):
    return iter(strategy.distribute_dataset([X] * batches))


@pytest.mark.parametrize("T, D, executor", [(2, 2, "pmap"), (4, 2, "shard_map")])
@pytest.mark.slow
def test_several_steps_are_the_steps_one_by_one(T, D, executor):
    strategy = mirrored(T, D, executor=executor)
    ctx = strategy.run_steps_on_dataset(descend, feed(strategy, 5), 5, jnp.float32(0))
    w, loss = by_numpy(5)
    outputs = ctx.last_step_outputs
    np.testing.assert_allclose(ctx.final, w, rtol=5 * 8 * 2**-23)
    np.testing.assert_allclose(outputs["loss"], loss, rtol=5 * 16 * 2**-23)
    assert (ctx.iterations, float(outputs["examples"])) == (5, 7.0)
    assert outputs["grads"].values.shape == (T,)
    assert len({float(g) for g in outputs["grads"].values}) == T


@pytest.mark.slow
def test_the_last_call_takes_what_is_left_and_is_no_other_program():
    traces = []

    def step(ctx, w, x):
        traces.append(1)
        return descend(ctx, w, x)

    strategy = mirrored(4, 2)
    w = jnp.float32(0)
    done = []
    data = feed(strategy, 7)
    for _ in range(3):
        ctx = strategy.run_steps_on_dataset(step, data, 3, w)
        w = ctx.final
        done = [*done, ctx.iterations]
    assert done == [3, 3, 1]
    np.testing.assert_allclose(w, by_numpy(7)[0], rtol=7 * 8 * 2**-23)
    assert len(traces) == 2  # once for the shapes of the outputs, once for the loop
    with pytest.raises(ValueError, match="the iterator has no batch left"):
        strategy.run_steps_on_dataset(step, data, 3, w)


@pytest.mark.slow
def test_variables_are_carried():
    strategy = mirrored(3, 3)
    total = strategy.create_var("total", np.float32(0), reduction=R.SUM)
    seen = strategy.create_var("seen", np.float32(0), reduction=R.SUM, tower_local=True)

    def step(ctx, carry, x):
        def tower_fn(tower, total, seen, x, weight):
            total = tower.assign_add(total, (weight * x).sum())
            return total, tower.assign_add(seen, weight.sum())

        return ctx.call_for_each_tower(tower_fn, *carry, x, ctx.weight)

    ctx = strategy.run_steps_on_dataset(step, feed(strategy, 4), 4, (total, seen))
    total, seen = ctx.final
    assert float(strategy.read_var(total)) == 4 * X.sum()
    assert seen.value.tolist() == [12, 12, 4]
    assert {x.data.shape for x in seen.value.addressable_shards} == {(1,)}
    assert float(strategy.read_var(seen)) == 28


@pytest.mark.slow
def test_towers_values_that_come_apart_are_carried():
    strategy = mirrored(2)

    def step(ctx, sums, x):
        own = ctx.call_for_each_tower(lambda tower, s, x: s + x.sum(), sums, x)
        return tj.PerTower(tuple(strategy.unwrap(own)))

    def run(carry):
        feed = iter(strategy.distribute_dataset([np.arange(4, dtype=np.float32)] * 3))
        return strategy.run_steps_on_dataset(step, feed, 3, carry)

    ctx = run(tj.PerTower((np.float32(1), np.float32(2))))
    assert ctx.final.values.tolist() == [4, 17]
    with pytest.raises(ValueError, match=r"PerTower of the carry has shape \(3,\)"):
        run(tj.PerTower(np.zeros(3)))


def test_elements_arrive_as_they_are_and_tuples_part_by_part():
    strategy = mirrored(2)

    def step(ctx, total, n, square):
        assert n.values.shape == square.values.shape == (2,)
        return total + strategy.reduce(R.SUM, n) + strategy.reduce(R.SUM, square)

    pairs = [(i, i * i) for i in range(6)]
    data = iter(strategy.distribute_dataset(pairs, split="elements"))
    ctx = strategy.run_steps_on_dataset(step, data, 5, jnp.int32(0))
    assert (int(ctx.final), ctx.iterations) == (15 + 55, 3)


@pytest.mark.slow
def test_outputs_that_are_no_arrays():
    strategy = mirrored(2, tower_loop="scan")

    def step(ctx, carry, x):
        def tower_fn(tower):
            ctx.set_non_tensor_output("foo", "bar")
            ctx.set_last_step_output("first", 3.0 + tower.id, R.ONLY_FIRST_TOWER)
            ctx.set_last_step_output("mean", 3.0 + tower.id, R.MEAN)

        ctx.call_for_each_tower(tower_fn)
        ctx.set_non_tensor_output("where", {"a": [1]})
        ctx.set_last_step_output("again", 1)
        ctx.set_last_step_output("again", 2)

    for _ in range(2):  # the second call finds the compiled program
        ctx = strategy.run_steps_on_dataset(step, feed(strategy, 2), 2)
        assert ctx.non_tensor_outputs == {"foo": ["bar"], "where": {"a": [1]}}
        outputs = {name: float(x) for name, x in ctx.last_step_outputs.items()}
        assert outputs == {"first": 3.0, "mean": 3.5, "again": 2.0}
    assert ctx.final is None


def test_of_containers_the_one_that_changed_is_told():
    """Not the whole tree, whose text may fill a page."""
    strategy = mirrored(2)
    zero = jnp.float32(0)
    initial = {"a": (zero, [zero]), "b": {"c": zero, "d": [zero]}}

    def step(ctx, carry, x):
        return {**carry, "b": OrderedDict(carry["b"])}

    text = (
        r"a container is .*OrderedDict.*, expected PyTreeDef\({'c': \*, 'd': \[\*\]}\)"
    )
    with pytest.raises(ValueError, match=text):
        strategy.run_steps_on_dataset(step, feed(strategy, 1), 1, initial)
    first, again = (namedtuple("Carry", "x")(zero) for _ in range(2))  # a cell, twice
    with pytest.raises(ValueError, match="Carry.*, a class that was defined anew"):
        strategy.run_steps_on_dataset(lambda *_: again, feed(strategy, 1), 1, first)


def in_towers(say, of_context=True):
    """A step whose towers say something of their context, themselves and rows."""

    def step(ctx, carry, x):
        caller = ctx if of_context else ctx.strategy
        caller.call_for_each_tower(lambda tower, x: say(ctx, tower, x), x)

    return step


def across(say):
    return lambda ctx, carry, x: say(ctx, None, x)


def sum_of_ids(ctx, tower, x):
    ctx.set_last_step_output("v", tower.id, R.SUM)


def no_array(ctx, tower, x):
    ctx.set_last_step_output("v", {"k": "bar"}, R.MEAN)


# fmt: off
# A step, what else it is called with, and what is said.
REFUSED = [
    (in_towers(lambda ctx, tower, x: ctx.set_last_step_output("v", tower.id)), {},
        r"set_last_step_output\('v'\) in a tower fun"),
    (in_towers(sum_of_ids, of_context=False), {},
        r"'v'\) cannot be called in a tower .* ctx.call_for_each_tower"),
    *[(where(no_array), {}, r"'bar' .* Write set_non_tensor_output\('v', ")
        for where in (in_towers, across)],
    *[(where(lambda ctx, tower, x: ctx.set_non_tensor_output("v", [x])), {},
        r"has no value yet. Write set_last_step_output\('v', ")
        for where in (in_towers, across)],
    (lambda ctx, w, x: (w, w), {}, "a step returned a carry of another"),
    (lambda ctx, x: x, {}, r"Write def fn\(ctx, carry, \*inputs\)"),
    *[(descend, {"iterator": made},
        f"needs an iterator of placed batches, so .* but got {kind}. Write")
        for made, kind in [([X], "a list"), (iter([X]), "an ndarray")]],
    *[(descend, {"iterations": n}, "iterations=.* must be a whole number >= 1")
        for n in (0, 1.5)],
]
# fmt: on


@pytest.mark.parametrize("step, options, text", REFUSED)
def test_what_steps_cannot_do_is_refused(step, options, text):
    strategy = mirrored(2)
    given = {"iterator": feed(strategy, 1), "iterations": 1, **options}
    with pytest.raises(ValueError, match=text):
        strategy.run_steps_on_dataset(step, *given.values(), jnp.float32(0))
