"""Steps of one's own: passes, types of leaves and an update, on any towers."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import data, mirrored

import towerjax as tj
from towerjax.testing import SplitError

R = tj.Reduction
EPS = np.finfo(np.float32).eps


def params(seed=1):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=5).astype(np.float32), "b": np.float32(0.3)}


def loss_fn(params, batch, tower):
    errors = jnp.tanh(batch["x"] @ params["w"] + params["b"] - batch["y"])
    return tj.Weighted.mean(errors**2, batch["weight"] * tower.weight)


# The same in NumPy float64, of the whole batch.


def per_row(p, batch):
    """Losses ``[n]`` and the gradient of each, ``[n, 5]`` and ``[n]``."""
    error = np.tanh(batch["x"].astype(float) @ p["w"] + p["b"] - batch["y"])
    slope = 2 * error * (1 - error**2)
    return error**2, slope[:, None] * batch["x"], slope


def value_and_grad(p, batch):
    losses, of_w, of_b = per_row(p, batch)
    weight = batch["weight"].astype(float)
    total = weight.sum()
    grads = {"w": weight @ of_w / total, "b": weight @ of_b / total}
    return weight @ losses / total, grads


def moved(p, grads, rate):
    return {name: p[name] - rate * np.asarray(grads[name]) for name in p}


def close(actual, expected, roundings=400):
    size = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=roundings * EPS * size),
        actual,
        expected,
    )


def sgd(rate, key="grads"):
    def update_fn(state, merged):
        step = jax.tree.map(lambda g: rate * g, merged[key].value)
        after = jax.tree.map(jnp.subtract, state.params, step)
        return dataclasses.replace(state, params=after), {"loss": merged["loss"]}

    return update_fn


@pytest.mark.sampled
@pytest.mark.slow
def test_rows_of_all_towers_are_seen_by_the_next_pass():
    """The gradient of a loss over all pairs of rows, in micro-batches too.

    What a pass hands on of the one before has been merged, and is as it was.
    """

    def embed(state, batch, tower):
        rows = jnp.tanh(batch["x"] @ state.params["w"])
        total = tj.Sum((batch["y"] * tower.weight).sum())
        seen = jax.tree.map(lambda n: n + tower.weight.sum(), state.local)
        rows = tj.Rows({"z": rows, "w": tower.weight})
        return {"rows": rows, "total": total, "local": seen}

    def pairs(mine, others, weight):
        return ((mine[:, None] - others[None, :]) ** 2 * weight[None, :]).sum(1)

    def tower_fn(state, batch, tower, merged):
        others = merged["rows"].value["z"]
        weight = merged["rows"].value["w"]

        def loss(params, batch, tower):
            mine = jnp.tanh(batch["x"] @ params["w"])
            # Each pair is seen from both sides, and others are constants.
            return tj.Weighted.mean(2 * pairs(mine, others, weight), tower.weight)

        loss, grads = tj.value_and_grad(loss)(state.params, batch, tower)
        handed_on = jax.tree.map(lambda x: x, merged)  # in new containers
        return {"loss": loss, "grads": grads, **handed_on}

    def update_fn(state, merged):
        after, metrics = sgd(0.1)(state, merged)
        rows = merged["rows"].value
        counted = (rows["z"] * rows["w"]).sum()
        after = dataclasses.replace(after, local=merged["local"])
        return after, {**metrics, "total": merged["total"], "counted": counted}

    step = tj.build_step(
        (embed, tower_fn),
        update_fn,
        mirrored(4, 2, "scan"),
        micro_batches=3,
        remainder="pad",
    )
    batch = data(22)
    local = {"seen": tj.TowerLocal(np.float32(1), R.SUM)}
    state, metrics = step(step.init(params(), local=local), batch)
    x = batch["x"].astype(float)
    w = params()["w"].astype(float)
    z = np.tanh(x @ w)
    difference = z[:, None] - z[None, :]
    slope = 4 * difference.sum(1) * (1 - z**2)
    expected = moved(params(), {"w": slope @ x / 22, "b": 0.0}, 0.1)
    close(metrics["total"], batch["y"].sum())
    close(metrics["counted"], z.sum())
    np.testing.assert_array_equal(state.local["seen"].value, [7, 7, 7, 5])
    close(metrics["loss"], 2 * (difference**2).sum() / 22)
    close(state.params, expected, roundings=2000)


# The step as a JAX function


@pytest.mark.slow
def test_a_step_under_jit_fits_its_batch_as_the_step_does():
    options = {"remainder": "pad", "micro_batches": 2, "donate": False}
    strategy = mirrored(2, 1, "scan")
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
    state = step.init(params())
    batch = data(7)
    after, metrics = jax.jit(step.fn)(state, batch)
    loss, grads = value_and_grad(params(), batch)
    close(metrics["loss"], loss)
    close(after.params, moved(params(), grads, 0.1))
    placed = step.place_batch(batch)
    jax.eval_shape(step.fn, state, placed)
    assert jax.eval_shape(lambda batch: batch, placed).num_examples == 7


def test_a_placed_batch_that_is_not_the_steps_is_refused_by_the_function():
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2, 1), micro_batches=2)
    others = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2, 2))
    thirds = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2, 1))
    state = jax.eval_shape(lambda: step.init(params()))
    for placed, text in (
        (others.place_batch(data(4)), "was placed for 2 towers on cpu:0, cpu:1"),
        (thirds.place_batch(data(6)), "3 rows, which 2 micro-batches cannot share"),
    ):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(step.fn, state, placed)


@pytest.mark.slow
def test_an_update_that_forgets_the_value_is_told_of_it():
    def tower_fn(state, batch, tower):
        return tj.value_and_grad(loss_fn)(state.params, batch, tower)

    def forgets(state, merged):
        step = lambda x, g: x - 0.1 * g  # noqa: E731
        return jax.tree.map(step, state.params, merged[1]), {}

    def sums(state, merged):
        return state, {"twice": tj.Sum(merged[0].weight) * 2}

    def optimizes(state, merged):
        optimizer = optax.adam(0.1)
        return state, optimizer.update(merged[1], optimizer.init(state.params))[0]

    def casts(state, merged):
        return state, {"norm": merged[1].astype(jnp.float32)}

    def roots(state, merged):
        return state, {"root": jnp.sqrt(merged[0] + merged[0])}

    def fails(state, merged):
        return state, {"loss": merged[0].value + jnp.ones(3) + jnp.ones(2)}

    told = dict.fromkeys((forgets, sums, optimizes, casts, roots), True)
    for update_fn, noted in {**told, fails: False}.items():
        step = tj.build_step(tower_fn, update_fn, mirrored(2, 1))
        with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
            step.check(params(), data(4))
        notes = "".join(getattr(caught.value, "__notes__", []))
        assert ("merged['grads'].value" in notes) == noted, caught.value


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.scale_by_adam()])
def test_an_optimizer_state_that_init_was_not_given_is_explained(optimizer):
    def tower_fn(state, batch, tower):
        return tj.value_and_grad(loss_fn)(state.params, batch, tower)

    def update_fn(state, merged):
        return state, optimizer.update(merged[1].value, state.opt_state)[0]

    step = tj.build_step(tower_fn, update_fn, mirrored(2, 1))
    with pytest.raises((AttributeError, ValueError)) as caught:
        step.check(params(), data(4))
    assert "opt_state=optimizer.init(params)" in "".join(caught.value.__notes__)


def test_leaves_without_a_gradient_are_refused_by_name():
    def tower_fn(state, batch, tower):
        return tj.value_and_grad(loss_fn)(state.params, batch, tower)

    step = tj.build_step(tower_fn, lambda state, merged: (state, {}), mirrored(2, 1))
    whole = {**params(), "seen": np.int32(0), "rngs": {"key": jax.random.key(0)}}
    text = r"params\['rngs'\]\['key'\] is key<fry>; params\['seen'\] is int32. .*copy"
    with pytest.raises(ValueError, match=text):
        step.check(whole, data(4))
    with pytest.raises(ValueError, match="but params is int32. Pass"):
        tj.value_and_grad(lambda w: tj.Weighted(w, 1.0))(2)


def inner_mean(w, batch, tower):
    return tj.Weighted.mean((w - batch) ** 2, tower.weight)


def half_way(strategy):
    """A step from 0 to half of the mean."""
    step = tj.build_train_step(inner_mean, optax.sgd(0.25), strategy)
    start = jax.device_get(step.init(np.float32(0)))
    return lambda rows: step.fn(start, rows)[0].params


def mean_square(strategy):
    step = tj.build_eval_step(lambda *args: {"m": inner_mean(*args)}, strategy)
    return lambda rows: step.fn(np.float32(0), rows)["m"].value


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, near", [(half_way, (0.25, 1.25)), (mean_square, (0.5, 6.5))]
)
def test_a_step_in_a_tower_is_of_one_device_and_of_the_towers_rows(build, near):
    def train(strategy):
        inner = build(strategy)

        def loss(w, batch, tower):
            return tj.Weighted.mean((w * inner(batch) - batch) ** 2, tower.weight)

        # What the inner step computes depends on which rows a tower has.
        step = tj.build_train_step(loss, optax.sgd(0.5), mirrored(2, 2), audit=False)
        after, _ = step(step.init(np.float32(0)), np.arange(4, dtype=np.float32))
        return float(after.params)

    expected = np.mean(np.repeat(near, 2) * np.arange(4))
    assert np.isclose(train(mirrored(2, 1)), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"2 devices is .*devices=\('cpu:0',\), tow"):
        train(mirrored(2, 2))


@pytest.mark.slow
def test_rows_that_go_on_say_which_of_them_are_padding():
    """A threshold of all losses would count those of padded rows."""

    def step_of(rows_of):
        def first(state, batch, tower):
            return rows_of(batch["y"], tower.weight)

        def second(state, batch, tower, merged):
            return {"loss": tj.Weighted.mean(batch["y"], tower.weight)}

        def update_fn(state, merged):
            return state, {"loss": merged["loss"]}

        return tj.build_step(
            (first, second), update_fn, mirrored(2, 1), remainder="pad"
        )

    def run(step, rows):
        return jax.eval_shape(step.fn, step.init(params()), data(rows))

    told = [
        step_of(lambda y, weight: tj.Rows({"y": y, "weight": weight})),
        step_of(lambda y, weight: {"y": tj.Rows(y), "weight": tj.Rows(weight)}),
    ]
    for step in told:
        run(step, 7)
    step = step_of(lambda y, weight: {"y": tj.Rows(y), "sum": tj.Sum(weight @ y)})
    run(step, 8)
    with pytest.raises(ValueError, match=r"padded, but y does not .* tj\.Rows\({'x'"):
        run(step, 7)


def test_a_mean_of_a_towers_own_says_which_rows_are_padding():
    def tower_fn(state, batch, tower):
        return tj.PerTower({"y": tj.Weighted.mean(batch["y"]), "rows": batch["y"]})

    step = tj.build_step(tower_fn, lambda s, m: (s, {}), mirrored(2), remainder="pad")
    jax.eval_shape(step.fn, step.init(params()), data(8))
    with pytest.raises(ValueError, match=r"padded, but .*y.sum does not depend"):
        jax.eval_shape(step.fn, step.init(params()), data(7))


@pytest.mark.parametrize(("wrap", "is_told"), [(tj.PerTower, False), (dict, True)])
def test_a_factor_of_a_mean_may_be_of_a_tower_where_the_mean_is(wrap, is_told):
    def tower_fn(state, batch, tower):
        return wrap({"y": tower.id * tj.Weighted.mean(batch["y"], tower.weight)})

    step = tj.build_step(tower_fn, lambda s, m: (s, {}), mirrored(2))
    told = pytest.raises(tj.ReplicationError, match="A mean's factor")
    with told if is_told else contextlib.nullcontext():
        step.check(params(), data(8))


@pytest.mark.parametrize("moves", [False, True])
def test_a_factor_may_be_a_variable_that_no_micro_batch_changes(moves):
    def tower_fn(state, batch, tower):
        a = state.local["a"]
        b = state.local["b"]
        mean = tj.Weighted.mean(batch["y"], tower.weight)
        b = dataclasses.replace(b, value=b.value + mean.sum)
        new = {"a": b, "b": a} if moves else {"a": a, "b": b}
        return {"y": tj.PerTower(a.value * mean), "local": new}

    local = {name: tj.TowerLocal(np.float32(1), R.SUM) for name in "ab"}
    step = tj.build_step(tower_fn, lambda s, m: (s, {}), mirrored(2), micro_batches=2)
    told = pytest.raises(tj.ReplicationError, match="depend on their rows: a mean's f")
    with told if moves else contextlib.nullcontext():
        step.check(params(), data(8), local=local)


def test_an_update_may_reduce_and_is_proved_where_devices_are_missing():
    def update_fn(state, merged):
        total = strategy.reduce(R.SUM, merged["y"])
        return state, {"y": total, "loss": jnp.where(total > 0, total, 0)}

    strategy = mirrored(64, 64)
    step = tj.build_step(lambda s, b, t: {"y": tj.PerTower(t.id)}, update_fn, strategy)
    step.check(params(), data(64))


@pytest.mark.slow
def test_an_update_may_guard_itself():
    """Then its state is taken, whatever the loss, and what it says is raised."""

    def update_fn(state, merged):
        fine = merged["y"].value < 10
        metrics = {"loss": jnp.where(fine, jnp.nan, 1.0)}
        return dataclasses.replace(state, params=merged["y"].value), metrics, fine

    def tower_fn(state, batch, tower):
        return {"y": tj.Sum(batch.sum())}

    for mode in ("raise", "skip", "ignore"):
        step = tj.build_step(tower_fn, update_fn, mirrored(2, 2), on_nonfinite=mode)
        state, metrics = step(step.init(0.0), np.float32([1, 2]))
        step.settle()
        assert float(state.params) == 3 and np.isnan(metrics["loss"])
        state, metrics = step(state, np.float32([5, 6]))
        told = pytest.raises(tj.NonFiniteError, match="step 2 was not finite")
        with told if mode == "raise" else contextlib.nullcontext():
            step.settle()
        assert float(state.params) == 11 and float(metrics["loss"]) == 1


@pytest.mark.slow
def test_what_an_update_counts_is_counted_where_the_loss_counts_no_row():
    def tower_fn(state, batch, tower):
        ready = state.extra >= 1  # as of a replay buffer that is filled first
        return tj.Weighted.mean((state.params - batch) ** 2, ready * tower.weight)

    def update_fn(state, loss):
        return dataclasses.replace(state, extra=state.extra + 1), {"loss": loss}

    step = tj.build_step(tower_fn, update_fn, mirrored(2, 1))
    state = step.init(1.0, extra=0)
    losses = []
    for _ in range(2):
        state, metrics = step(state, np.float32([3, 5]))
        losses.append(float(metrics["loss"]))
    assert int(state.extra) == 2 and losses == [0, 10]


# What is refused


def refused(tower_fn, text, error=ValueError, update_fn=None, local=None, **options):
    def keep(state, merged):
        return state, {}

    step = tj.build_step(tower_fn, update_fn or keep, mirrored(2, 2), **options)
    state = step.init(params(), local=local)
    with pytest.raises(error, match=text):
        step(state, data(8))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


LOCAL = {x: tj.TowerLocal(np.float32(n), R.SUM) for n, x in enumerate("ab")}
DIFFERS = {"error": tj.ReplicationError}
MICRO = {"micro_batches": 2}


def update(*returned):
    """A step whose update returns what these make of the state and what is merged."""

    def update_fn(state, merged):
        made = tuple(x(state, merged) if callable(x) else x for x in returned)
        return made if len(made) > 1 else made[0]

    tower_fn = lambda s, b, t: {"loss": loss_fn(s.params, b, t)}  # noqa: E731
    return tower_fn, {"update_fn": update_fn}


def state_with(**changes):
    return lambda s, m: dataclasses.replace(
        s, **{name: change(s) for name, change in changes.items()}
    )


def same(state, merged):
    return state


# What a tower or an update returns, and what is said.
# fmt: off
RETURNED = {
    r"metrics\['y'\]": (lambda s, b, t: {"metrics": {"y": b["y"].sum()}}, DIFFERS),
    "their rows: y, made at": (
        lambda s, b, t: {"step": s.step, "y": t.reduce(R.MEAN, b["y"].sum())},
        DIFFERS | MICRO),
    r"a\['b'\] is 'text'": (lambda s, b, t: {"a": {"b": "text"}}, {}),
    r"\ba\b.* row": (lambda s, b, t: {"a": tj.Rows(b["y"][:1])}, {}),
    "PerTower": (lambda s, b, t: tj.PerTower(t.id), MICRO),
    r"all variables of\s+state\.local, with": (
        lambda s, b, t: tj.TowerLocal(jnp.zeros(3), R.SUM), MICRO),
    r"variables new/x, new/y, of .*, but the next micro-batch needs a, b, of": (
        lambda s, b, t: {"new": {"x": s.local["b"], "y": s.local["a"]}},
        MICRO | {"local": LOCAL}),
    "returned TrainState, but must": update(same),
    "returned dict, dict, but": update({}, {}),
    "returned TrainState, list, but": update(same, []),
    "dict, bool, but .* also returns whether": update(same, {}, True),
    r"dict, \w*Tracer, but": update(same, {}, lambda s, m: jnp.ones(2, bool)),
    r"dict, \w*, \w*, but": update(same, {}, lambda s, m: m, lambda s, m: m),
    r"state\.params\['b'\] is .*, expected float32\[\].*cast_like": update(
        state_with(params=lambda s: {**s.params, "b": jnp.zeros(3)}), {}),
    r"state\.extra\['a'\] is .*absent.* give step\.init\(.*extra=": update(
        state_with(extra=lambda s: {"a": jnp.zeros(3)}), {}),
    r"metrics\['a'\] is a dict": update(same, {"a": {"b": 1.0}}),
    r"metrics\['a'\] is a random key": update(same, lambda s, m: {"a": s.rng}),
    "must not communicate": update(
        same, lambda s, m: {"a": jax.lax.psum(m["loss"].sum, "x")}),
}
# fmt: on


@pytest.mark.few_fast(4)
@pytest.mark.parametrize("text", RETURNED)
def test_what_may_not_be_returned_is_refused_by_name(text):
    tower_fn, options = RETURNED[text]
    refused(tower_fn, text, **options)


@pytest.mark.slow
def test_the_tangent_of_a_mean_has_no_weight():
    def tower_fn(state, batch, tower):
        grads_of = tj.value_and_grad(loss_fn)
        point = (state.params,)
        (loss, grads), (_, curved) = jax.jvp(
            lambda p: grads_of(p, batch, tower), point, point
        )
        zero = jnp.zeros(())
        right = {"none": tj.Weighted(zero, zero), "loss": loss}
        right["curved"] = tj.Weighted(curved.sum, grads.weight)
        slope = jax.jvp(lambda p: loss_fn(p, batch, tower), point, point)[1]
        tangents = {"curved": curved, "slope": slope}
        return right | {name: tangents[name] for name in wrong}

    for wrong in (["curved"], ["slope"]):
        refused(tower_fn, f"{wrong[0]} is a mean whose weight is the constant 0")
    wrong = []
    step = tj.build_step(tower_fn, sgd(0.1, "curved"), mirrored(2, 2))
    step.check(params(), data(8))


@pytest.mark.slow
def test_a_derivative_of_a_mean_is_taken_of_its_sum():
    def tower_fn(state, batch, tower):
        def grads(params):
            return tj.value_and_grad(loss_fn)(params, batch, tower)[1]

        loss = loss_fn(state.params, batch, tower)
        if whole:
            return {"hessian": jax.jacfwd(grads)(state.params)}
        hessian = jax.jacfwd(lambda params: grads(params).sum)(state.params)
        return {"loss": loss, "hessian": tj.Weighted(hessian, loss.weight)}

    whole = True
    refused(tower_fn, r"hessian\.weight is a dict.*the sum alone, and return tj\.W")
    whole = False
    metrics = lambda state, m: (state, {"h": m["hessian"].value["b"]["b"]})  # noqa: E731
    step = tj.build_step(tower_fn, metrics, mirrored(2, 2))
    step.check(params(), data(8))


CHANGES = {  # of a gradient's sum and weight alike, and of what towers hold
    "clip": lambda v, grads, tower: jnp.clip(v, -1, 1),
    "sign": lambda v, grads, tower: jnp.sign(v),
    "its norm": lambda v, grads, tower: v / optax.tree.norm(grads),
}
MOVES = {
    "a mask": lambda v, grads, tower: jnp.where(tower.weight.sum() > 1, v, 0),
    "a constant": lambda v, grads, tower: 0.5 * v,
    "twice": lambda v, grads, tower: v + v,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHANGES, *MOVES])
def test_a_function_mapped_over_a_gradient_and_its_weight_is_refused(name):
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
        fn = (CHANGES | MOVES)[name]
        grads = jax.tree.map(lambda v: fn(v, grads, tower), grads)
        return {"loss": loss, "grads": grads}

    step = tj.build_step(tower_fn, sgd(0.1), mirrored(2, 2), audit=True)
    state = step.init(params())
    rows = data(8)
    if name in CHANGES:
        with pytest.raises(SplitError, match="gradient"):
            step(state, rows)
    else:
        step.audit(state, rows)


def test_a_value_that_a_tower_put_aside_is_refused():
    aside = {}

    def tower_fn(state, batch, tower):
        aside["y"] = batch["y"].sum()
        return tj.Sum(aside["y"])

    def update_fn(state, merged):
        return state, {"y": merged.value / aside["y"]}

    text = r"computed, float32\[\], is read by another.*put aside.*Return it from"
    refused(tower_fn, text, update_fn=update_fn)

    def by_a_rule(state, batch, tower):
        def loss_fn(p, scale):
            scale = scale + 1
            same = jax.custom_vjp(lambda w: w)
            same.defvjp(lambda w: (w, None), lambda _, g: (g * scale,))
            return tj.Weighted.mean(same(p["w"]).sum() * batch["y"], tower.weight)

        return tj.value_and_grad(loss_fn)(state.params, batch["y"].sum())[1]

    refused(by_a_rule, r"computed.* rule of a jax\.custom_vjp .* make it an argument")


@pytest.mark.slow
def test_what_is_not_finite_is_located_in_the_pass_where_it_began():
    def first(state, batch, tower):
        return {"mean": tj.Weighted.mean(batch["y"], tower.weight)}

    def second(state, batch, tower, merged):
        mean = tj.Weighted.mean(merged["mean"].value * batch["x"])
        return {"loss": mean, "own": tj.PerTower({"a": mean, "b": batch["y"]})}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    step = tj.build_step((first, second), update_fn, mirrored(2, 1))
    batch = data(8)
    batch["y"][5] = np.nan
    locations = step.locate(step.init(params()), batch)
    found = [(location.tower, location.leaf) for location in locations]
    assert found[:3] == [(1, "mean/sum"), (0, "loss/sum"), (0, "own/a/sum")]
    assert found[3:] == [(1, "loss/sum"), (1, "own/a/sum")]


def test_a_loss_may_be_several_means_each_of_its_own_weight():
    def tower_fn(state, batch, tower):
        weight = tower.weight
        y = batch["y"]
        of_task = jnp.stack([weight * (y > 0), weight * (y <= 0)])
        return {"loss": tj.Weighted(of_task @ y, of_task.sum(1))}

    def update_fn(state, merged):
        return state, merged

    step = tj.build_step(tower_fn, update_fn, mirrored(4, 2))
    _, metrics = jax.eval_shape(step.fn, step.shapes(params()), data(8))
    assert metrics["loss"].shape == (2,)


@pytest.mark.slow
def test_a_guard_of_gradients_looks_at_rows_of_tables():
    def tower_fn(state, batch, tower):
        rows = tj.sparse.IndexedRows(batch["y"][:, None], batch["id"], (9, 1))
        return {"grads": rows, "loss": tj.Weighted.mean(0 * batch["id"], tower.weight)}

    def update_fn(state, merged):
        ids = merged["grads"].indices
        after = state.params.at[ids].add(-merged["grads"].values)
        return dataclasses.replace(state, params=after), {"loss": merged["loss"]}

    guard = {"guard": "gradients", "on_nonfinite": "skip"}
    step = tj.build_step(tower_fn, update_fn, mirrored(4, 2), **guard)
    state = step.init(np.zeros((9, 1), np.float32))
    batch = data(8)
    batch["id"] = np.arange(8)[::-1].copy()
    state, _ = step(state, batch)
    once = -batch["y"][::-1, None]
    np.testing.assert_array_equal(state.params[:8], once)
    batch["y"][5] = np.inf
    state, _ = step(state, batch)
    np.testing.assert_array_equal(state.params[:8], once)


@pytest.mark.slow
def test_a_tower_knows_into_how_many_parts_its_rows_are_cut():
    def loss_fn(params, batch, tower):
        parts.add(tower.micro_batches)
        return tj.Weighted.mean(params * batch, tower.weight)

    for count in (1, 2):
        parts = set()
        options = {"micro_batches": count}
        step = tj.build_train_step(
            loss_fn, optax.sgd(1.0), tj.Mirrored(towers=2), **options
        )
        step.check(np.float32(1), np.ones(8, np.float32))
        assert max(parts) == count  # the proof has towers of one part, too


@pytest.mark.slow
def test_a_refused_step_keeps_the_key_that_its_update_would_change():
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    def update_fn(state, merged):
        after, metrics = sgd(0.1)(state, merged)
        return dataclasses.replace(after, rng=jax.random.split(state.rng)[1]), metrics

    step = tj.build_step(tower_fn, update_fn, mirrored(2), on_nonfinite="skip")
    state = step.init(params(), rng=jax.random.key(3))
    keys = [jax.random.key(3)]
    for y in (1.0, np.nan, 2.0):
        state, _ = step(state, {**data(8), "y": np.full(8, y, np.float32)})
        keys += [] if np.isnan(y) else [jax.random.split(keys[-1])[1]]
        assert (jax.random.key_data(state.rng) == jax.random.key_data(keys[-1])).all()
    assert int(state.step) == 3
