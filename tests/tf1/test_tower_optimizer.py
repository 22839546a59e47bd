"""TowerOptimizer: outside of towers the wrapped one; inside it reduces first."""

import copy
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import mirrored as towers
from layouts import rows

import towerjax as tj

Kind = tj.estimator.LossReduction
SUM = Kind.SUM
INNER = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "lamb": optax.lamb(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.5)),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    ),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
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


same_bits = partial(chex.assert_trees_all_equal, strict=True)


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", INNER)
def test_outside_of_towers_it_is_the_wrapped_one(name):
    """The same program, but for the wrapper around its state."""
    inner = INNER[name]
    ours = tj.estimator.TowerOptimizer(inner)
    x = rows(4, 3)
    y = rows(4, 2, seed=1)

    def two_steps(optimizer, params):
        state = optimizer.init(params)
        for _ in range(2):
            value, grads = jax.value_and_grad(mean_of)(params, x, y)
            updates, state = optimizer.update(grads, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return params, state

    traced = jax.make_jaxpr(partial(two_steps, ours), return_shape=True)
    program, (_, state) = traced(params())
    theirs = partial(two_steps, optax.with_extra_args_support(inner))
    expected, (_, inner_state) = jax.make_jaxpr(theirs, return_shape=True)(params())
    assert str(program) == str(expected)
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner_state)


def test_it_is_a_transformation_for_optax():
    ours = tj.estimator.TowerOptimizer(optax.adam(0.1))
    assert isinstance(ours, optax.GradientTransformation)
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    init, update = ours
    assert init is ours.init and update is ours.update
    assert isinstance(
        tj.estimator.TowerOptimizer(lambda: optax.sgd(1.0)), tj.estimator.TowerOptimizer
    )


def test_copies_are_optimizers():
    weights = {"w": np.ones((2, 1), np.float32)}
    of_rows = tj.sparse.IndexedRows(weights["w"][:1], np.array([1]), (2, 1))
    ours = tj.estimator.TowerOptimizer(optax.sgd(0.1, momentum=0.5), lazy=True)
    again = copy.deepcopy(ours)
    state = jax.eval_shape(ours.init, weights)
    assert isinstance(again, tj.estimator.TowerOptimizer) and again.lazy
    made = [jax.eval_shape(x.update, {"w": of_rows}, state, weights)
            for x in (again, ours)]  # fmt: skip
    assert made[0] == made[1]


@pytest.mark.slow
def test_a_weighted_loss_outside_of_towers_divides_its_gradient():
    ours = tj.estimator.TowerOptimizer(optax.sgd(0.1))
    x = rows(4, 3)
    y = rows(4, 2, seed=1)
    state = tj.TrainState.create(params(), ours)

    def with_aux(params):
        return loss_of(params, x, y), {"norm": params["w"].sum()}

    @jax.jit
    def both(state):
        of_state = state.opt_state, state.params
        minimized = ours.minimize(with_aux, state, has_aux=True)
        plain = ours.minimize(lambda p: mean_of(p, x, y), state)
        loss, grads = ours.compute_gradients(lambda p: loss_of(p, x, y), state.params)
        updates, _ = ours.update(grads, *of_state, loss=loss)
        nothing, _ = ours.update(grads, *of_state, loss=tj.Weighted(loss.sum, 0.0))
        sums = jax.grad(lambda p: losses_of(p, x, y).sum())(state.params)
        again = optax.apply_updates(state.params, updates)
        return minimized, plain, (loss.weight, grads, again, nothing), sums

    minimized, (scalar, expected), (weight, grads, again, nothing), sums = both(state)
    (weighted, aux), after = minimized
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    close(weighted.value, scalar, rtol=1e-6)
    close(aux["norm"], params()["w"].sum())
    assert int(after.step) == int(expected.step) == 1 and float(weight) == 4
    jax.tree.map(close, after.params, expected.params)
    same_bits((grads, again), (sums, after.params))
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(nothing))


def trained(optimizers, strategy, *, steps=3):
    """Variables after steps on 12 rows of unequal weights, one set an optimizer."""

    def model_fn(variables, features, labels, mode, tower):
        weight = tower.weight * features["weight"]

        def loss_fn(params):
            return loss_of(params, features["x"], labels, weight)

        after = {}
        for name, (params, opt_state) in variables.items():
            loss = loss_fn(params)
            grads = jax.grad(lambda p: loss_fn(p).sum)(params)
            updates, opt_state = optimizers[name].update(
                grads, opt_state, params, loss=loss
            )
            after[name] = optax.apply_updates(params, updates), opt_state
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    variables = model.init(
        {name: (params(), x.init(params())) for name, x in optimizers.items()}
    )
    for number in range(steps):
        features = {"x": rows(12, 3, seed=number), "weight": weights_of_rows()}
        variables = model(variables, features, rows(12, 2, seed=7)).train_op
    return variables


def weights_of_rows():
    return np.abs(rows(12, seed=5)) * np.linspace(0.1, 1, 12, dtype="f4")


def of_one_gradient(optimizers, steps=3):
    """The same by optax alone, of the mean over all rows."""
    optimizers = {k: optax.with_extra_args_support(x) for k, x in optimizers.items()}
    weight = weights_of_rows()
    y = rows(12, 2, seed=7)

    @jax.jit
    def step(variables, x):
        after = {}
        for name, (weights, state) in variables.items():
            value, grads = jax.value_and_grad(lambda p: loss_of(p, x, y, weight).value)(
                weights
            )
            updates, state = optimizers[name].update(grads, state, weights, value=value)
            after[name] = optax.apply_updates(weights, updates), state
        return after

    variables = {name: (params(), x.init(params())) for name, x in optimizers.items()}
    for number in range(steps):
        variables = step(variables, rows(12, 3, seed=number))
    return variables


SGD = optax.sgd(0.1)
MOMENTUM = INNER["momentum"]


def around(wrap):
    """An optax transformation around a TowerOptimizer, and around the wrapped one."""
    return {
        "chain": optax.chain(optax.scale(2.0), wrap(SGD), optax.clip(0.05)),
        "bounded": wrap(optax.chain(optax.clip_by_global_norm(0.1), SGD)),
        "multi_transform": optax.multi_transform(
            {"sgd": wrap(SGD), "momentum": wrap(MOMENTUM)},
            {"w": "sgd", "b": "momentum"},
        ),
        "injected": optax.inject_hyperparams(
            lambda rate: optax.chain(wrap(optax.identity()), optax.sgd(rate))
        )(rate=0.1),
    }


@pytest.mark.slow
def test_towers_update_once_of_the_one_gradient():
    """Whatever optax wraps around it."""
    variables = trained(around(tj.estimator.TowerOptimizer), towers(3, 1))
    expected = of_one_gradient(around(lambda x: x))
    for name, (weights, _) in variables.items():
        for key, x in expected[name][0].items():
            assert np.abs(x - params()[key]).max() > 1e-3
            np.testing.assert_allclose(
                weights[key], x, rtol=2e-4, atol=2e-5, err_msg=name
            )


@pytest.mark.slow
def test_parameters_may_be_variables_of_flax():
    """Which have each attribute of what they hold, while it is merged too."""
    features = rows(4, 3)
    labels = rows(4, 2)
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
    errors = 2 * (features @ params()["w"] + params()["b"] - labels) / len(labels)
    grads = {"w": features.T @ errors, "b": errors.sum(0)}
    for name, found in pure(after).items():
        np.testing.assert_allclose(found, params()[name] - 0.1 * grads[name], rtol=1e-5)


@pytest.mark.slow
def test_what_is_each_towers_own_around_it_is_refused():
    # Outside, each tower would keep a sum of its own.
    outside = optax.MultiSteps(
        tj.estimator.TowerOptimizer(SGD), 2
    ).gradient_transformation()
    with pytest.raises(tj.ReplicationError, match="acc_grads"):
        trained({"sums": outside}, towers(2, 1))
    # Towers whose own gradient is not finite would leave the others waiting.
    outside = optax.apply_if_finite(tj.estimator.TowerOptimizer(SGD), 3)
    with pytest.raises(tj.ReplicationError, match=r"notfinite_count(?s:.)*would hang"):
        trained({"finite": outside}, towers(2, 2))


@pytest.mark.slow
def test_gradients_are_added_in_float32_and_keep_their_dtype():
    # 256 + seven times 1, of which bfloat16 holds none after 256.
    # The wrapped optimizer's momentum has the dtype of the gradients that it sees.
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(1.0, momentum=0.5))
    dtypes = [jnp.bfloat16, np.float16, np.float32]

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(weights):
            return sum((w.astype(jnp.float32) * features).sum() for w in weights)

        loss, after = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, SUM, towers(8, 4))
    start = tj.TrainState.create([np.zeros((), x) for x in dtypes], optimizer)
    after = model(start, np.array([256] + [1] * 7, np.float32)).train_op.params
    for x, dtype in zip(after, dtypes, strict=True):
        assert x.dtype == dtype and float(x) == float(np.asarray(-263, dtype))


def test_what_is_natural_and_wrong_is_named():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))
    state = tj.TrainState.create(jnp.float32(1), optimizer)
    minimize = optimizer.minimize
    gradients = optimizer.compute_gradients
    moving = lambda w: tj.Weighted(w[0] ** 2, w[0])  # noqa: E731
    for call, args, text in [
        (minimize, (tj.Weighted(1.0, 2.0), state), "a Weighted as the loss, but JAX"),
        (gradients, (lambda w: w**2, state), "got a tj.TrainState .* variables.par"),
        (gradients, (moving, np.ones(2, "f4")), "weights of the loss depend on the pa"),
        (minimize, (lambda w: w**2, {"w": 1.0}), "got a dict, but needs a tj.Train"),
        (minimize, (lambda w: (w**2, w), state), "returned a tuple.* has_aux=True"),
        (partial(minimize, has_aux=True), (lambda w: w**2, state), "has_aux=False"),
        (tj.estimator.TowerOptimizer, (optax.MultiSteps(SGD, 2),),
            r"Steps\(\.\.\.\).gradient_transformation\("),
        (tj.estimator.replicate_model_fn,
            (lambda v, features, labels, mode: None, tj.OneDevice()),
            r"Pass a strategy as devices=\.\.\."),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            call(*args)


@pytest.mark.slow
@pytest.mark.sampled
def test_rows_of_a_table_are_updated_of_the_one_gradient():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.5))
    weights = {"table": rows(7, 2, seed=1), "w": rows(2, seed=2)}
    ids = np.array([5, 0, 5, 5, 6, 0, 2, 5, 1, 6, 6], np.int32)
    weight = np.linspace(0.1, 3, 11, dtype=np.float32)
    y = rows(11, seed=3)

    def model_fn(state, features, labels, mode, tower):
        def loss_fn(params):
            rows = tj.sparse.take(params["table"], features["id"])
            scores = jnp.tanh(rows) @ params["w"]
            counts = tower.weight * features["weight"]
            return tj.Weighted.mean((scores - labels) ** 2, counts)

        loss, after = optimizer.minimize(loss_fn, state)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(model_fn, devices=towers(2, 2))
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
