"""replicate_model_fn on T towers: NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicate_oracle as numpy_model
from oracle import CLASSES, FEATURES, close, params

import towerjax as tj

DECAY, FULL = 0.9, 24
EXECUTORS = {
    "shard_map": dict(executor="shard_map", local="vmap"),
    "pmap": dict(executor="pmap", local="vmap"),
}
# Ours, and NumPy's; the rate is large, so that a wrong scale is seen.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.5), numpy_model.Sgd(0.5), None),
    "momentum": (optax.sgd(0.5, momentum=0.8), numpy_model.Sgd(0.5, momentum=0.8),
        None),
    "clip each tower": (optax.sgd(0.5), numpy_model.Sgd(0.5, clip_tower=0.4),
        optax.clip_by_global_norm(0.4)),
}  # fmt: skip
# Each kind of reduction, as it is and as the original has it; layouts, optimizers and
# cross-tower ops take turns.
CASES = [
    ("pmap", 4, 2, "SUM", None, "clip each tower", tj.collectives.Packed(num_packs=2)),
    ("shard_map", 3, 1, "SUM_BY_NONZERO_WEIGHTS", "tf1", "momentum", None),
]  # fmt: skip


def data(num_rows, seed=0):
    """Every third weight is 0, and towers' weights are unequal."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.05, 1, size=num_rows) * np.linspace(0.2, 1, num_rows)
    weight[1::3] = 0
    features = {
        "x": rng.normal(size=(num_rows, FEATURES)).astype(np.float32),
        "weight": weight.astype(np.float32),
    }
    return features, rng.normal(size=(num_rows, CLASSES)).astype(np.float32)


def logits_of(params, x):
    return x @ params["w"] + params["b"][None]


def loss_of(reduction, params, features, labels, tower):
    losses = (jnp.tanh(logits_of(params, features["x"]) - labels) ** 2).sum(-1) / 2
    return tj.estimator.compute_weighted_loss(
        losses, features["weight"], reduction=reduction, valid=tower.weight
    )


def next_mean(mean, features, tower):
    weight = tower.weight * features["weight"]
    inputs = tj.Weighted(weight @ features["x"], weight.sum())
    after = DECAY * mean + (1 - DECAY) * inputs.value
    return jnp.where(inputs.weight > 0, after, mean)


def outputs_of(params, mean, features, labels, tower):
    """Metrics and predictions."""
    logits, rows = logits_of(params, features["x"]), features["x"].shape[0]
    predictions = {
        "logits": logits,
        "tower": jnp.full(rows, tower.id),
        "mean": jnp.broadcast_to(mean, (rows, FEATURES)),
    }
    if labels is None:
        return {"predictions": predictions}
    hits = logits.argmax(-1) == labels.argmax(-1)
    accuracy = tj.Weighted.mean(hits, tower.weight * features["weight"])
    return {"predictions": predictions, "eval_metrics": {"accuracy": accuracy}}


def state_model_fn(name, reduction):
    """Variables are a TrainState, updated by minimize where nothing stands before."""
    inner, _, before = OPTIMIZERS[name]
    optimizer = tj.estimator.TowerOptimizer(inner)
    if before is not None:
        optimizer = optax.chain(before, optimizer)

    def model_fn(variables, features, labels, mode, tower):
        mean = tower.local["mean"]
        loss_fn = functools.partial(
            loss_of, reduction, features=features, labels=labels, tower=tower
        )
        outputs = outputs_of(variables.params, mean, features, labels, tower)
        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(mode, **outputs)
        if mode is tj.estimator.Mode.EVAL:
            return tj.estimator.ModelSpec(
                mode, loss=loss_fn(variables.params), **outputs
            )
        if before is None:
            loss, after = optimizer.minimize(loss_fn, variables)
        else:
            loss, after = updated(optimizer, loss_fn, variables)
        local = variables.local["mean"]
        local = {"mean": replaced(local, next_mean(mean, features, tower))}
        return tj.estimator.ModelSpec(
            mode, loss=loss, train_op=replaced_local(after, local), **outputs
        )

    start = tj.TrainState.create(
        params(),
        optimizer,
        local={"mean": tj.TowerLocal(np.zeros(FEATURES, np.float32), MEAN)},
    )
    return model_fn, start


MEAN = tj.Reduction.MEAN


def replaced(local, value):
    return tj.TowerLocal(value, local.reduction, local.name)


def replaced_local(state, local):
    return tj.TrainState(state.step, state.params, state.opt_state, local, state.rng)


def sum_of(loss):
    return loss.sum if isinstance(loss, tj.Weighted) else loss


def updated(optimizer, loss_fn, state):
    """What minimize does, for a chain that holds a TowerOptimizer."""
    loss = loss_fn(state.params)
    grads = jax.grad(lambda p: sum_of(loss_fn(p)))(state.params)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, loss=loss
    )
    after = optax.apply_updates(state.params, updates)
    return loss, tj.TrainState(state.step, after, opt_state, state.local, state.rng)


def plain_model_fn(name, reduction):
    """Variables are a dict, with a step counter of their own."""
    inner, _, before = OPTIMIZERS[name]
    assert before is None
    optimizer = tj.estimator.TowerOptimizer(inner)

    def model_fn(variables, features, labels, mode, tower):
        weights, mean = variables["params"], variables["mean"].value
        loss_fn = functools.partial(
            loss_of, reduction, features=features, labels=labels, tower=tower
        )
        outputs = outputs_of(weights, mean, features, labels, tower)
        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(mode, **outputs)
        if mode is tj.estimator.Mode.EVAL:
            return tj.estimator.ModelSpec(mode, loss=loss_fn(weights), **outputs)
        loss, grads = optimizer.compute_gradients(loss_fn, weights)
        after, slots = optimizer.apply_gradients(
            grads, variables["slots"], weights, loss=loss
        )
        train_op = {
            "mean": replaced(variables["mean"], next_mean(mean, features, tower)),
            "params": after,
            "slots": slots,
            "step": variables["step"] + 1,
        }
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op, **outputs)

    start = {
        "mean": tj.TowerLocal(np.zeros(FEATURES, np.float32), MEAN, "mean"),
        "params": params(),
        "slots": optimizer.init(params()),
        "step": np.int32(0),
    }
    return model_fn, start


def parts_of(variables):
    """``(params, slots by name, tower-local means, steps)`` of either kind."""
    if isinstance(variables, tj.TrainState):
        slots, step = variables.opt_state, variables.step
        found = variables.params, variables.local["mean"]
    else:
        slots, step = variables["slots"], variables["step"]
        found = variables["params"], variables["mean"]
    names = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        name, key = (str(part).strip("[]'.") for part in path[-2:])
        if key in ("w", "b"):
            names.setdefault(name, {})[key] = leaf
        else:
            names[key] = leaf
    return found[0], names, found[1].value, step


def value_of(loss):
    return loss.value if isinstance(loss, tj.Weighted) else loss


def strategy_of(executor, towers, devices, ops=None):
    names = [f"cpu:{i}" for i in range(devices)]
    options = EXECUTORS[executor] | ({} if ops is None else {"cross_tower_ops": ops})
    return tj.Mirrored(devices=names, towers=towers, **options)


def check_variables(variables, model, what):
    params, slots, mean, step = parts_of(variables)
    assert int(step) == model.steps
    for name in ("w", "b"):
        close(params[name], model.params[name], f"{what}: {name}")
    for name, expected in slots.items():
        for key, x in expected.items():
            close(x, model.slots[name][key], f"{what}: {name} of {key}")
    close(mean, model.mean, f"{what}: tower-local means")


def check_predictions(predictions, model, features, rows, mean, what):
    x = features["x"].astype(np.float64)
    logits = x @ model.params["w"] + model.params["b"]
    close(predictions["logits"], logits, f"{what}: logits, in row order")
    towers = np.concatenate([np.full(len(r), t) for t, r in enumerate(rows)])
    np.testing.assert_array_equal(predictions["tower"], towers)
    expected = mean[towers] if mean.ndim == 2 else np.tile(mean, (len(x), 1))
    close(predictions["mean"], expected, f"{what}: tower-local means")


def wide(features, labels):
    batch = {**features, "y": labels}
    return {name: x.astype(np.float64) for name, x in batch.items()}


def check(
    executor, towers, devices, reduction, compat, name, *, sizes=(FULL,) * 3,
    remainder="error", model_fn=state_model_fn, ops=None, evaluates=False,
):  # fmt: skip
    kind = tj.estimator.LossReduction[reduction]
    fn, start = model_fn(name, kind)
    model = tj.estimator.replicate_model_fn(
        fn, kind, strategy_of(executor, towers, devices, ops),
        remainder=remainder, compat=compat, max_programs=2,
    )  # fmt: skip
    _, optimizer, _ = OPTIMIZERS[name]
    wide_params = {k: x.astype(np.float64) for k, x in params().items()}
    expected = numpy_model.Model(
        wide_params, np.zeros((towers, FEATURES)), optimizer.init(wide_params)
    )
    how = dict(num_towers=towers, reduction=reduction, compat=compat)
    variables, known = model.init(start), []  # sizes that batches were padded to
    for number, size in enumerate(sizes):
        features, labels = data(size, seed=number)
        spec = model(variables, features, labels, tj.estimator.Mode.TRAIN)
        variables = spec.train_op
        if not any(x >= size for x in known):
            known.append(-(-size // towers) * towers)
        shares = min(x for x in known if x >= size) if remainder == "pad" else towers
        before = expected
        expected, loss, accuracy = numpy_model.train(
            before, wide(features, labels), optimizer, DECAY, shares=shares, **how
        )
        moved = max(np.abs(expected.params["w"] - before.params["w"]).max(), 0)
        assert moved > 1e-3, "the test would prove nothing"
        close(value_of(spec.loss), loss, "loss")
        close(spec.eval_metrics["accuracy"].value, accuracy, "accuracy")
        rows = numpy_model.oracle.tower_rows(size, towers, shares)
        what = f"step {number}"
        check_predictions(spec.predictions, before, features, rows, before.mean, what)
        check_variables(variables, expected, what)
    if not evaluates:
        return
    size = sizes[-1]
    features, labels = data(size, seed=9)
    spec = model(variables, features, labels, tj.estimator.Mode.EVAL)
    shares = -(-size // towers) * towers
    loss, _, _, accuracy, rows = numpy_model.forward(
        expected, wide(features, labels), shares=shares, **how
    )
    assert spec.train_op is None
    close(value_of(spec.loss), loss, "EVAL loss")
    close(spec.eval_metrics["accuracy"].value, accuracy, "EVAL accuracy")
    mean = expected.mean.mean(0)  # the aggregate of the tower-local variable
    check_predictions(spec.predictions, expected, features, rows, mean, "EVAL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "towers", "devices", "reduction", "compat", "name", "ops"), CASES
)
def test_towers_equal_numpy(executor, towers, devices, reduction, compat, name, ops):
    check(
        executor, towers, devices, reduction, compat, name, ops=ops,
        sizes=(FULL, 19), remainder="pad",
    )  # fmt: skip


@pytest.mark.slow
def test_a_size_of_each_kind_equals_numpy():
    check(  # the first are fewer than towers
        "shard_map", 4, 2, "SUM_BY_NONZERO_WEIGHTS", None, "sgd",
        sizes=(3, FULL, 19), remainder="pad", evaluates=True,
    )  # fmt: skip


def test_rows_that_are_dropped_do_not_count():
    def model_fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode, loss=tj.Weighted.mean(features))

    model = tj.estimator.replicate_model_fn(
        model_fn, devices=strategy_of("shard_map", 4, 2), remainder="drop"
    )
    x = np.arange(19, dtype=np.float32)
    loss = model(np.float32(0), x, None, tj.estimator.Mode.EVAL).loss
    assert (float(loss.sum), float(loss.weight)) == (x[:16].sum(), 16)


@pytest.mark.slow
def test_plain_pytrees_are_variables_too():
    check(
        "shard_map", 3, 3, "SUM_OVER_BATCH_SIZE", None, "momentum",
        model_fn=plain_model_fn, sizes=(FULL, 19), remainder="pad",
    )  # fmt: skip
