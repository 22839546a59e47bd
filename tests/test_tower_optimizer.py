"""TowerOptimizer: outside of towers the wrapped one; inside it reduces first."""

import copy
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import rows

import towerjax as tj

SUM, EXACT = (
    tj.estimator.LossReduction.SUM,
    tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS,
)
INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "lamb": optax.lamb(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.5)),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    ),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "masked": optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    "if finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}


def params():
    return {"w": rows(3, 2, seed=8), "b": rows(2, seed=9)}


def losses_of(params, features, labels):
    logits = features @ params["w"] + params["b"][None]
    return ((logits - labels) ** 2).sum(-1)


def loss_of(params, features, labels, weight=None):
    return tj.Weighted.mean(losses_of(params, features, labels), weight)


def mean_of(params, features, labels):
    return losses_of(params, features, labels).mean()


same_bits = functools.partial(chex.assert_trees_all_equal, strict=True)


# Outside of towers.


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", INNER)
def test_outside_of_towers_it_is_the_wrapped_one(name):
    """The same program, but for the wrapper around its state."""
    inner = INNER[name]
    ours = tj.estimator.TowerOptimizer(inner)
    x, y = rows(4, 3), rows(4, 2, seed=1)

    def two_steps(optimizer, params):
        state = optimizer.init(params)
        for _ in range(2):
            value, grads = jax.value_and_grad(mean_of)(params, x, y)
            updates, state = optimizer.update(grads, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return params, state

    traced = jax.make_jaxpr(functools.partial(two_steps, ours), return_shape=True)
    program, (_, state) = traced(params())
    theirs = functools.partial(two_steps, optax.with_extra_args_support(inner))
    expected, (_, inner_state) = jax.make_jaxpr(theirs, return_shape=True)(params())
    assert str(program) == str(expected)
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner_state)
    assert state.towers is None


def test_it_is_a_transformation_for_optax():
    ours = tj.estimator.TowerOptimizer(optax.adam(0.1))
    assert isinstance(ours, optax.GradientTransformation)
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    init, update = ours
    assert init is ours.init and update is ours.update
    assert isinstance(
        tj.estimator.TowerOptimizer(lambda: optax.sgd(1.0)), tj.estimator.TowerOptimizer
    )
    made = []

    def factory():
        made.append(1)
        return optax.sgd(0.5)

    assert float(tj.estimator.TowerOptimizer(factory).update(
        jnp.float32(2), ours.init(jnp.float32(1)), None
    )[0]) == -1  # fmt: skip
    assert made == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "lazy"),
    [(copy.copy, False), (copy.deepcopy, False), (copy.deepcopy, True)],
)
def test_copies_are_optimizers(how, lazy):
    weights = {"w": np.ones((2, 1), np.float32)}
    of_rows = tj.sparse.IndexedRows(weights["w"][:1], np.array([1]), (2, 1))
    ours = tj.estimator.TowerOptimizer(optax.adam(0.1), lazy=lazy)
    again, state = how(ours), jax.eval_shape(ours.init, weights)
    assert isinstance(again, tj.estimator.TowerOptimizer) and again.lazy == lazy
    if not lazy:
        with pytest.raises(ValueError, match="Write lazy=True"):
            jax.eval_shape(again.update, {"w": of_rows}, state, weights)
    grads = {"w": of_rows} if lazy else weights
    programs = [jax.make_jaxpr(x.update)(grads, state, weights) for x in (again, ours)]
    assert str(programs[0]) == str(programs[1])


@pytest.mark.slow
def test_a_weighted_loss_outside_of_towers_divides_its_gradient():
    ours, x, y = (
        tj.estimator.TowerOptimizer(optax.sgd(0.1)),
        rows(4, 3),
        rows(4, 2, seed=1),
    )
    state = tj.TrainState.create(params(), ours)

    @jax.jit
    def both(state):
        weighted, after = ours.minimize(lambda p: loss_of(p, x, y), state)
        scalar, expected = ours.minimize(lambda p: mean_of(p, x, y), state)
        loss, grads = ours.compute_gradients(lambda p: loss_of(p, x, y), state.params)
        updates, _ = ours.update(grads, state.opt_state, state.params, loss=loss)
        empty = tj.Weighted(loss.sum, 0.0)
        nothing, _ = ours.update(grads, state.opt_state, state.params, loss=empty)
        sums = jax.grad(lambda p: losses_of(p, x, y).sum())(state.params)
        again = optax.apply_updates(state.params, updates)
        return weighted, after, scalar, expected, loss, grads, again, nothing, sums

    weighted, after, scalar, expected, loss, grads, again, nothing, sums = both(state)
    np.testing.assert_allclose(weighted.value, scalar, rtol=1e-6)
    assert int(after.step) == int(expected.step) == 1
    for name, value in expected.params.items():
        np.testing.assert_allclose(after.params[name], value, rtol=1e-5)
    same_bits(grads, sums)
    assert float(loss.weight) == 4
    same_bits(again, after.params)
    assert all((np.asarray(u) == 0).all() for u in jax.tree.leaves(nothing))


@pytest.mark.slow
def test_auxiliary_results_come_along():
    ours, x, y = (
        tj.estimator.TowerOptimizer(optax.sgd(0.1)),
        rows(4, 3),
        rows(4, 2, seed=1),
    )
    state = tj.TrainState.create(params(), ours)

    def loss_fn(params):
        return loss_of(params, x, y), {"norm": params["w"].sum()}

    (loss, aux), after = jax.jit(
        lambda state: ours.minimize(loss_fn, state, has_aux=True)
    )(state)
    plain, expected = jax.jit(
        lambda state: ours.minimize(lambda p: loss_fn(p)[0], state)
    )(state)
    same_bits(after.params, expected.params)
    assert float(loss.sum) == float(plain.sum)
    np.testing.assert_allclose(aux["norm"], params()["w"].sum(), rtol=1e-5)


@pytest.mark.slow
def test_it_runs_under_jit_scan_and_grad():
    ours, x, y = (
        tj.estimator.TowerOptimizer(optax.sgd(0.1)),
        rows(4, 3),
        rows(4, 2, seed=1),
    )

    @jax.jit
    def after_two(rate):
        def step(carry, _):
            grads = jax.grad(mean_of)(carry[0], x, y)
            updates, state = ours.update(grads, carry[1], carry[0])
            updates = jax.tree.map(lambda u: u * rate, updates)
            return (optax.apply_updates(carry[0], updates), state), None

        start = jax.tree.map(jnp.asarray, params())
        (last, _), _ = jax.lax.scan(step, (start, ours.init(start)), None, length=2)
        return mean_of(last, x, y)

    slope = jax.jit(jax.grad(after_two))(jnp.float32(1))
    step = 1e-2
    expected = (after_two(1 + step) - after_two(1 - step)) / (2 * step)
    np.testing.assert_allclose(slope, expected, rtol=1e-2)
    assert slope < 0


# Inside towers: the update of the one gradient, whatever optax makes of the optimizer.


def trained(optimizer, strategy, *, steps=3, reduction=EXACT, value_too=False):
    """The variables after steps on 12 rows of unequal weights, by update(loss=)."""

    def model_fn(variables, features, labels, mode, tower):
        weight = tower.weight * features["weight"]

        def loss_fn(params):
            return loss_of(params, features["x"], labels, weight)

        loss = loss_fn(variables.params)
        grads = jax.grad(lambda p: loss_fn(p).sum)(variables.params)
        updates, opt_state = optimizer.update(
            grads, variables.opt_state, variables.params, loss=loss
        )
        after = dataclasses.replace(
            variables,
            params=optax.apply_updates(variables.params, updates),
            opt_state=opt_state,
        )
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, reduction, strategy)
    variables = model.init(tj.TrainState.create(params(), optimizer))
    for number in range(steps):
        features = {
            "x": rows(12, 3, seed=number),
            "weight": np.abs(rows(12, seed=5)) * np.linspace(0.1, 1, 12, dtype="f4"),
        }
        variables = model(variables, features, rows(12, 2, seed=7)).train_op
    return variables


def of_one_gradient(optimizer, steps=3):
    """The same by optax alone, of the mean over all rows."""
    optimizer = optax.with_extra_args_support(optimizer)
    weight = np.abs(rows(12, seed=5)) * np.linspace(0.1, 1, 12, dtype="f4")
    y = rows(12, 2, seed=7)

    @jax.jit
    def step(weights, state, x):
        value, grads = jax.value_and_grad(lambda p: loss_of(p, x, y, weight).value)(
            weights
        )
        updates, state = optimizer.update(grads, state, weights, value=value)
        return optax.apply_updates(weights, updates), state

    found = params(), optimizer.init(params())
    for number in range(steps):
        found = step(*found, rows(12, 3, seed=number))
    return found


def towers(count, devices):
    return tj.Mirrored([f"cpu:{i}" for i in range(devices)], towers=count)


def check_same_update(wrapped, plain, strategy, **how):
    variables = trained(wrapped, strategy, **how)
    expected, _ = of_one_gradient(plain)
    for name in expected:
        assert np.abs(expected[name] - params()[name]).max() > 1e-3
        np.testing.assert_allclose(
            variables.params[name], expected[name], rtol=2e-4, atol=2e-5
        )
    return variables


# Of those that do nothing but arithmetic, one; on layouts in turn.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "name"),
    [
        (2, 2, "momentum"),
        (3, 1, "clip"),
        (2, 2, "plateau"),
        (3, 1, "accumulated"),
    ],
)
def test_towers_update_once_of_the_one_gradient(count, devices, name):
    check_same_update(
        tj.estimator.TowerOptimizer(INNER[name]), INNER[name], towers(count, devices)
    )


@pytest.mark.slow
def test_parameters_may_be_variables_of_flax():
    """Which have each attribute of what they hold, while it is merged too."""
    features, labels = rows(4, 3), rows(4, 2)
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def pure(state):
        return {name: value[...] for name, value in state.items()}

    def model_fn(variables, features, labels, mode, tower):
        loss, op = optimizer.minimize(
            lambda p: loss_of(pure(p), features, labels, tower.weight), variables
        )
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=op)

    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(2, 1))
    state = nnx.State({name: nnx.Param(jnp.array(x)) for name, x in params().items()})
    variables = model.init(tj.TrainState.create(state, optimizer))
    after = model(variables, features, labels).train_op.params
    grads = jax.jit(jax.grad(mean_of))(params(), features, labels)
    for name, found in pure(after).items():
        np.testing.assert_allclose(found, params()[name] - 0.1 * grads[name], rtol=1e-5)


SGD, ADAM = optax.sgd(0.1), optax.adam(0.05)


def around(wrap):
    """An optax transformation around a TowerOptimizer, and around the wrapped one."""
    return {
        "chain": optax.chain(optax.scale(2.0), wrap(SGD), optax.clip(0.05)),
        "multi_transform": optax.multi_transform(
            {"sgd": wrap(SGD), "adam": wrap(ADAM)}, {"w": "sgd", "b": "adam"}
        ),
        "injected": optax.inject_hyperparams(
            lambda rate: optax.chain(wrap(optax.identity()), optax.sgd(rate))
        )(rate=0.1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", around(lambda x: x))
def test_optax_takes_it_anywhere(name):
    variables = check_same_update(
        around(tj.estimator.TowerOptimizer)[name],
        around(lambda x: x)[name],
        towers(4, 2),
    )
    states = jax.tree.leaves(
        variables.opt_state, is_leaf=lambda x: hasattr(x, "towers")
    )
    wrapped = [x for x in states if hasattr(x, "towers")]
    assert wrapped and all(x.towers is None for x in wrapped)


@pytest.mark.slow
def test_accumulation_over_steps_goes_inside():
    # Outside, each tower would keep a sum of its own.
    outside = optax.MultiSteps(
        tj.estimator.TowerOptimizer(SGD), 2
    ).gradient_transformation()
    with pytest.raises(tj.ReplicationError, match="acc_grads"):
        trained(outside, towers(2, 2))


def test_a_verdict_on_each_towers_gradient_is_refused():
    # Outside, towers whose own gradient is not finite would leave the others waiting.
    outside = optax.apply_if_finite(tj.estimator.TowerOptimizer(SGD), 3)
    with pytest.raises(tj.ReplicationError, match=r"notfinite_count(?s:.)*would hang"):
        trained(outside, towers(2, 2))


@pytest.mark.slow
def test_clipping_inside_bounds_the_one_gradient_and_before_each_towers():
    count, devices = 4, 2
    largest, x = 0.5, rows(12, 3)
    inside = tj.estimator.TowerOptimizer(
        optax.chain(optax.clip_by_global_norm(largest), optax.sgd(1.0))
    )
    before = optax.chain(
        optax.clip_by_global_norm(largest), tj.estimator.TowerOptimizer(optax.sgd(1.0))
    )

    def moved(optimizer):
        def model_fn(variables, features, labels, mode, tower):
            grads = jax.grad(lambda w: (features @ w).sum())(variables.params)
            updates, opt_state = optimizer.update(grads, variables.opt_state)
            weights = optax.apply_updates(variables.params, updates)
            after = dataclasses.replace(variables, params=weights, opt_state=opt_state)
            loss = (features @ weights).sum()
            return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

        model = tj.estimator.replicate_model_fn(model_fn, SUM, towers(count, devices))
        start = tj.TrainState.create(np.zeros(3, np.float32), optimizer)
        return -np.asarray(model(start, x).train_op.params, np.float64)

    def clipped(g):
        return g * min(1, largest / np.linalg.norm(g))

    each = x.astype(np.float64).reshape(count, -1, 3).sum(1)
    np.testing.assert_allclose(moved(inside), clipped(each.sum(0)), rtol=1e-5)
    expected = sum(clipped(g) for g in each)
    np.testing.assert_allclose(moved(before), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_gradients_are_added_in_float32_and_keep_their_dtype(dtype):
    # 256 + seven times 1, of which bfloat16 holds none after 256.
    # The wrapped optimizer's momentum has the dtype of the gradients that it sees.
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(1.0, momentum=0.5))

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(w):
            return (w.astype(jnp.float32) * features).sum()

        loss, after = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, SUM, towers(8, 4))
    start = tj.TrainState.create(jnp.zeros((), dtype), optimizer)
    after = model(start, np.array([256] + [1] * 7, np.float32)).train_op.params
    assert after.dtype == dtype
    assert float(after) == float(jnp.asarray(-263, dtype))


def two_losses(optimizers, calls=1):
    """A generator and a critic, each with an optimizer and a loss of its own."""

    def model_fn(variables, features, labels, mode, tower):
        weights, slots = dict(variables["params"]), dict(variables["slots"])

        def made(g):
            return features @ g

        def critic_loss(c):
            losses = (made(weights["g"]) @ c) ** 2 - labels @ c
            return tj.Weighted.mean(losses, tower.weight)

        def generator_loss(g):
            return tj.Weighted.mean(-(made(g) @ weights["c"]), tower.weight)

        losses = {}
        for name, loss_fn in [("c", critic_loss), ("g", generator_loss)]:
            loss, grads = optimizers[name].compute_gradients(loss_fn, weights[name])
            weights[name], slots[name] = optimizers[name].apply_gradients(
                grads, slots[name], weights[name], loss=loss
            )
            losses[name] = loss
        return tj.estimator.ModelSpec(
            mode,
            loss=losses["g"],
            train_op={"params": weights, "slots": slots},
            eval_metrics={"critic": losses["c"]},
        )

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "local"), [(4, 2, "vmap"), (3, 1, "scan")]
)
def test_two_optimizers_and_two_losses(count, devices, local):
    optimizers = {
        "c": tj.estimator.TowerOptimizer(optax.sgd(0.1)),
        "g": tj.estimator.TowerOptimizer(optax.sgd(0.3, momentum=0.5)),
    }
    strategy = tj.Mirrored(
        [f"cpu:{i}" for i in range(devices)], towers=count, local=local
    )
    model = tj.estimator.replicate_model_fn(two_losses(optimizers), devices=strategy)
    weights = {"c": rows(2, seed=1), "g": rows(3, 2, seed=2)}
    slots = {name: optimizers[name].init(x) for name, x in weights.items()}
    variables = {"params": weights, "slots": slots}
    x, y = rows(12, 3, seed=3), rows(12, 2, seed=4)
    c, g, trace = (
        weights["c"].astype(float),
        weights["g"].astype(float),
        np.zeros((3, 2)),
    )
    for size in (12, 11, 12):
        spec = model(variables, x[:size], y[:size])
        variables = spec.train_op
        a, b = x[:size].astype(float), y[:size].astype(float)
        made = a @ g
        critic = ((made @ c) ** 2 - b @ c).mean()
        c = c - 0.1 * (2 * made * (made @ c)[:, None] - b).mean(0)
        loss = -(made @ c).mean()  # of the new critic
        trace = 0.5 * trace - np.einsum("bf,c->fc", a, c) / size
        g = g - 0.3 * trace
        np.testing.assert_allclose(spec.loss.value, loss, rtol=1e-4, atol=1e-5)
        got = spec.eval_metrics["critic"].value
        np.testing.assert_allclose(got, critic, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(variables["params"]["c"], c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(variables["params"]["g"], g, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_value_that_line_searches_see_is_the_one_loss():
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        return updates, {"value": value}

    probe = optax.GradientTransformationExtraArgs(
        lambda params: {"value": jnp.float32(0)}, update
    )
    optimizer = tj.estimator.TowerOptimizer(probe)

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(w):
            return tj.Weighted.mean(w * features, tower.weight)

        loss, after = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    x = np.array([1, 2, 3, 4, 10], np.float32)
    for count, devices in ((4, 2), (3, 1)):
        model = tj.estimator.replicate_model_fn(
            model_fn, devices=towers(count, devices)
        )
        start = tj.TrainState.create(np.float32(1), optimizer)
        after = model(start, x).train_op
        seen.append(float(after.opt_state.inner["value"]))
    np.testing.assert_allclose(seen, 4.0, rtol=1e-6)


def test_what_is_natural_and_wrong_is_named():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))
    state = tj.TrainState.create(jnp.float32(1), optimizer)
    with pytest.raises(ValueError, match="a loss of type Weighted; give it a function"):
        optimizer.minimize(tj.Weighted(1.0, 2.0), state)
    with pytest.raises(ValueError, match="variables of type dict; .* tj.TrainState"):
        optimizer.minimize(lambda w: w**2, {"w": 1.0})
    with pytest.raises(ValueError, match="returned a tuple.* has_aux=True"):
        optimizer.minimize(lambda w: (w**2, w), state)
    with pytest.raises(ValueError, match="returned a .*has_aux=False"):
        optimizer.minimize(lambda w: w**2, state, has_aux=True)
    with pytest.raises(ValueError, match=r"Steps\(\.\.\.\).gradient_transformation\("):
        tj.estimator.TowerOptimizer(optax.MultiSteps(optax.sgd(0.1), 2))
    with pytest.raises(ValueError, match=r"A strategy is devices=\.\.\."):
        tj.estimator.replicate_model_fn(
            lambda v, features, labels, mode: None, tj.OneDevice()
        )


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [None, ["table"]])
def test_rows_of_a_table_are_updated_of_the_one_gradient(sparse):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.5))
    weights = {"table": rows(7, 2, seed=1), "w": rows(2, seed=2)}
    ids = np.array([5, 0, 5, 5, 6, 0, 2, 5, 1, 6, 6], np.int32)
    weight = np.linspace(0.1, 3, 11, dtype=np.float32)
    y = rows(11, seed=3)

    def model_fn(state, features, labels, mode, tower):
        def loss_fn(params):
            scores = jnp.tanh(params["table"][features["id"]]) @ params["w"]
            counts = tower.weight * features["weight"]
            return tj.Weighted.mean((scores - labels) ** 2, counts)

        loss, after = optimizer.minimize(loss_fn, state, sparse=sparse or ())
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(4, 2))
    state = model.init(tj.TrainState.create(weights, optimizer))
    spec = model(state, {"id": ids, "weight": weight}, y, tj.estimator.Mode.TRAIN)
    after = jax.device_get(spec.train_op.params)

    table, w = (weights[name].astype(np.float64) for name in ("table", "w"))
    hidden = np.tanh(table[ids])
    slope = 2 * weight.astype(np.float64) * (hidden @ w - y) / weight.sum(dtype="f8")
    of_table = np.zeros_like(table)
    np.add.at(of_table, ids, slope[:, None] * w * (1 - hidden**2))
    np.testing.assert_allclose(after["table"], table - 0.5 * of_table, atol=1e-6)
    np.testing.assert_allclose(after["w"], w - 0.5 * slope @ hidden, atol=1e-6)
    assert np.abs(of_table[5]).min() > 1e-3
    assert not of_table[3].any() and (after["table"][3] == weights["table"][3]).all()
