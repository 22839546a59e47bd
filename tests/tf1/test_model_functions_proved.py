"""By default model functions are proved equal to one tower, or refuted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

E = tj.tf1.estimator
SUM, MEAN, EXACT = (
    E.LossReduction.SUM,
    E.LossReduction.MEAN,
    E.LossReduction.SUM_BY_NONZERO_WEIGHTS,
)
PARAMS = {"w": np.float32(10.0), "b": np.float32(0.5)}
OPTIMIZER = E.TowerOptimizer(optax.sgd(0.1))


def errors_of(params, features, labels):
    return jnp.abs(features * params["w"] + params["b"] - labels)


def sum_of_all(errors, tower):
    return errors.sum()


def sum_of_examples(errors, tower):
    return errors @ tower.weight


def mean_of_all(errors, tower):
    return errors.mean()


def exact(errors, tower):
    return tj.Weighted.mean(errors, tower.weight)


def three_means(errors, tower):
    return exact(errors, tower) + 0.1 * exact(errors**2, tower) + tj.penalty(0.5)


def by_minimize(loss_of, variables):
    return OPTIMIZER.minimize(loss_of, variables)


def by_gradients(loss_of, variables):
    loss, grads = OPTIMIZER.compute_gradients(loss_of, variables.params)
    params, opt_state = OPTIMIZER.apply_gradients(
        grads, variables.opt_state, variables.params, loss=loss
    )
    after = dataclasses.replace(variables, params=params, opt_state=opt_state)
    return loss, after


def by_two_optimizers(loss_of, variables):
    """Train ``w`` and ``b`` by optimizers of their own; return the first loss."""
    params = dict(variables.params)
    opt_state = dict(variables.opt_state)
    losses = []
    for name in params:
        loss, grads = OPTIMIZER.compute_gradients(
            lambda x, name=name: loss_of({**variables.params, name: x}),
            variables.params[name],
        )
        params[name], opt_state[name] = OPTIMIZER.apply_gradients(
            grads, opt_state[name], params[name], loss=loss
        )
        losses.append(loss)
    after = dataclasses.replace(variables, params=params, opt_state=opt_state)
    return losses[0], after


def start(train):
    if train is not by_two_optimizers:
        return tj.TrainState.create(PARAMS, OPTIMIZER)
    opt_state = {name: OPTIMIZER.init(x) for name, x in PARAMS.items()}
    state = tj.TrainState.create(PARAMS, OPTIMIZER)
    return dataclasses.replace(state, opt_state=opt_state)


def model_of(loss_of, reduction, train=by_minimize, **options):
    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            return loss_of(errors_of(params, features, labels), tower)

        predictions = {"y": features * variables.params["w"]}
        if mode is E.Mode.PREDICT:
            return E.ModelSpec(mode, predictions)
        if mode is E.Mode.EVAL:
            return E.ModelSpec(mode, predictions, loss_fn(variables.params))
        loss, train_op = train(loss_fn, variables)
        return E.ModelSpec(mode, predictions, loss, train_op)

    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4)
    return E.replicate_model_fn(model_fn, reduction, strategy, **options)


def rows(count):
    draw = np.random.default_rng(count)
    return draw.normal(size=(2, count)).astype(np.float32)


RIGHT = [
    # loss, reduction, remainder, rows
    (sum_of_all, SUM, "error", 8),
    (sum_of_all, SUM, "drop", 8),
    (sum_of_examples, SUM, "pad", 8),
    (sum_of_examples, SUM, "pad", 7),
    (mean_of_all, MEAN, "error", 8),
    (exact, EXACT, "error", 8),
    (exact, EXACT, "pad", 7),
    (exact, E.LossReduction.SUM_OVER_BATCH_SIZE, "pad", 7),
]


def by_one_tower(loss_of, count):
    """The loss and the next ``w`` of one tower, in float64."""
    features, labels = np.float64(rows(count))
    residual = features * 10.0 + 0.5 - labels
    total = np.abs(residual).sum()
    slope = (np.sign(residual) * features).sum()
    size = 1 if loss_of in (sum_of_all, sum_of_examples) else count
    return total / size, 10.0 - 0.1 * slope / size


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_minimize, by_gradients, by_two_optimizers])
@pytest.mark.parametrize("loss_of, reduction, remainder, count", RIGHT)
def test_a_right_model_is_proved_and_trains_as_one_tower(
    loss_of, reduction, remainder, count, train
):
    model = model_of(loss_of, reduction, train, remainder=remainder)
    features, labels = rows(count)
    step = model.train_step()
    state = model.init(start(train))
    state, metrics = step(state, {"features": features, "labels": labels})
    assert step.unproved == {} and not step.is_audited
    loss, w = by_one_tower(loss_of, count)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", E.Mode)
@pytest.mark.parametrize("loss_of, reduction, remainder, count", RIGHT)
def test_a_right_model_is_proved_in_every_mode(
    loss_of, reduction, remainder, count, mode
):
    model = model_of(loss_of, reduction, remainder=remainder)
    features, labels = rows(count)
    variables = start(by_minimize)
    spec = model(variables, features, labels, mode)  # a warning would be an error
    loss, _ = by_one_tower(loss_of, count)
    if mode is E.Mode.PREDICT:
        np.testing.assert_allclose(spec.predictions["y"], 10 * features, rtol=1e-6)
    else:
        value = getattr(spec.loss, "value", spec.loss)
        np.testing.assert_allclose(value, loss, rtol=1e-5)


@pytest.mark.slow
def test_a_loss_of_several_means_is_proved():
    model = model_of(three_means, EXACT, remainder="pad")
    features, labels = rows(7)
    step = model.train_step()
    step(model.init(start(by_minimize)), {"features": features, "labels": labels})
    assert step.unproved == {} and not step.is_audited


WRONG = [
    # A mean over towers of sums, and a sum over towers of means.
    (sum_of_all, MEAN, "1/T times", "loss_reduction=MEAN averages .* return a mean"),
    (mean_of_all, SUM, "T times", "loss_reduction=SUM adds .* return a sum"),
]


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_minimize, by_gradients, by_two_optimizers])
@pytest.mark.parametrize("loss_of, reduction, factor, remedy", WRONG)
def test_a_reduction_that_depends_on_the_towers_is_refuted(
    loss_of, reduction, factor, remedy, train
):
    model = model_of(loss_of, reduction, train, remainder="error")
    features, labels = rows(8)
    text = (
        rf"gradient.*on T towers it is {factor}(.|\n)*loss: .*{factor}(.|\n)*{remedy}"
    )
    state = model.init(start(train))
    with pytest.raises(tj.ReplicationError, match=text):
        model.train_step()(state, {"features": features, "labels": labels})


@pytest.mark.parametrize("loss_of, reduction, factor, remedy", WRONG)
def test_an_evaluation_by_such_a_reduction_is_refuted(
    loss_of, reduction, factor, remedy
):
    model = model_of(loss_of, reduction, remainder="error")
    with pytest.raises(tj.ReplicationError, match=rf"loss: .*{factor}"):
        model(start(by_minimize), *rows(8), E.Mode.EVAL)


@pytest.mark.slow
@pytest.mark.parametrize("count", [7, 8])
def test_a_mean_of_means_is_refused_where_batches_may_be_padded(count):
    def own_mean(errors, tower):
        return exact(errors, tower).value

    model = model_of(own_mean, MEAN, remainder="pad")
    features, labels = rows(count)
    state = model.init(start(by_minimize))
    with pytest.raises(tj.ReplicationError, match="MEAN averages the towers' losses"):
        model.train_step()(state, {"features": features, "labels": labels})
