"""A model trained, evaluated and used: alone or by several processes."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

# 101 = 4 * 24 + 5: a ragged end, which 8 towers share unevenly
ROWS = 101
BATCH = 24


def data():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 6)).astype(np.float32)
    ids = numbers.integers(0, 40, ROWS).astype(np.int32)
    y = np.tanh(x @ numbers.normal(size=(6, 3))).argmax(-1)
    return {"x": x, "id": ids}, y


def model_of(options, optimizer):
    def model_fn(state, features, labels, mode, tower):
        def scores_of(params):
            hidden = jnp.tanh(features["x"] @ params["w"])
            rows = tj.sparse.take(params["table"], features["id"])
            return (hidden + rows) @ params["v"]

        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(
                mode, predictions={"scores": scores_of(state.params)}
            )

        def loss_fn(params):
            scores = scores_of(params)
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
            return tj.Weighted.mean(losses, tower.weight), scores

        if mode is tj.estimator.Mode.EVAL:
            loss, scores = loss_fn(state.params)
            found = tj.metrics.accuracy(labels, scores.argmax(-1), tower.weight)
            return tj.estimator.ModelSpec(
                mode, loss=loss, eval_metrics={"accuracy": found}
            )
        (loss, _), after = optimizer.minimize(loss_fn, state, has_aux=True)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    strategy = tj.Mirrored(towers=8, tower_loop="scan", cross_tower_ops=tj.PinnedTree())
    placement = tj.estimator.VariablePlacement[options["placement"]]
    return tj.estimator.replicate_model_fn(
        model_fn,
        devices=strategy,
        variable_placement=placement,
        audit=False,  # the last batch has one example, which no proof covers
    )


def train(options):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.5, momentum=0.9), lazy=True)
    model = model_of(options, optimizer)
    numbers = np.random.default_rng(1)
    shapes = {"w": (6, 5), "v": (5, 3), "table": (40, 5)}
    params = {
        name: numbers.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    state, history = tj.estimator.train_and_evaluate(
        model,
        lambda: tj.batches(data(), BATCH),
        lambda: tj.batches(data(), 50),
        variables=tj.TrainState.create(params, optimizer),
        epochs=3,
        progress=False,
    )
    scores = [
        out["scores"] for out in tj.estimator.predict(model, state, lambda: [data()[0]])
    ]
    kept = jax.tree.leaves(state.params)
    digest = hashlib.sha256()
    for leaf in [*kept, *map(np.asarray, scores)]:
        digest.update(np.asarray(leaf).tobytes())
    return {
        "bits": digest.hexdigest(),
        "losses": history.metrics["loss"].tolist(),
        "evaluation": history.final,
        "rows": sum(len(rows) for rows in scores),
        "copies": [len(leaf.sharding.device_set) for leaf in kept],
    }
