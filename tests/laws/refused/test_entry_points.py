"""Public entry points, called with anything: each refuses it by name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_malformed import ANYTHING, STRATEGY, good, loss_fn, refuse, start

import towerjax as tj

ESTIMATOR = tj.estimator
SUM = tj.Reduction.SUM
RAGGED = [[1.0], [2.0, 3.0]]
SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)
NO_NUMBERS = [None, "x", b"x", {}, [None], object(), {1}, int, np.ones, RAGGED, SHAPE]
NO_NUMBERS += [np.array(["a", "b"]), np.array([{}], object), (x for x in [1.0])]
NO_FUNCTIONS = [x for x in ANYTHING if x is not int]
NO_FLAGS = [*ANYTHING, 1, np.bool_(True)]
NO_LISTS = [None, "x", b"x", -1, 1.5, float("nan"), object(), int, np.ones]
NO_DATA = [None, -1, 1.5, float("nan"), object()]
NO_TREES = ["x", b"x", object(), {1}, int, np.ones, np.array(["a", "b"])]
ODD_COUNTS = ["2", b"x", 1.5, float("nan"), True, [2], {}, object(), int, np.float32(2)]

OPTIMIZER = ESTIMATOR.TowerOptimizer(optax.sgd(0.1))
SGD = optax.sgd(0.1)
PARAMS = start()
LABELS = np.array([0, 1])
SCORES = np.array([0.2, 0.7], np.float32)
TABLE = np.ones((4, 3), np.float32)
ROW = np.ones((1, 3), np.float32)
ROWS = tj.sparse.IndexedRows(ROW, np.array([0]), (4, 3))
OF_ROWS = tj.sparse.update_with_rows
CLUSTER = {"worker": ["h:1", "h:2"]}


def model_fn(variables, features, labels, mode, tower):
    raise AssertionError("it was called")


VERBS = tj.tf1.with_verbs(STRATEGY)
MODEL = ESTIMATOR.replicate_model_fn(model_fn, devices=STRATEGY)
VARIABLES = tj.TrainState.create(PARAMS, OPTIMIZER)


@functools.cache
def step():
    return tj.build_train_step(loss_fn, SGD, STRATEGY)


@functools.cache
def state():
    return step().init(PARAMS)


def train(model=MODEL, data=(), **options):
    given = {"variables": VARIABLES, "steps": 1, "progress": False, **options}
    ESTIMATOR.train_and_evaluate(model, data, **given)


def own():
    return tj.PerTower(np.ones(2, np.float32))


def sweep(build=lambda rate: None, grid=(("rate", [0.1]),), **options):
    grid = dict(grid) if isinstance(grid, tuple) else grid
    tj.sweep(build, grid, [good()], progress=False, **options)


def launch(command=("true",), processes=1, **options):
    tj.cluster.launch(command, processes=processes, **options)


def initialize(address="h:1", processes=2, number=0, **options):
    tj.cluster.initialize(address, processes, number, **options)


def audited(params=PARAMS, batch=None, **options):
    batch = good() if batch is None else batch
    tj.testing.assert_replicates(loss_fn, params, batch, **options)


# Of each: what the error says, the call, and what it is given.
# fmt: off
CALLS = {
    "estimator: no model function": ("model_fn",
        lambda x: ESTIMATOR.replicate_model_fn(x, devices=STRATEGY), ANYTHING),
    "estimator: an option of a step that there is not": (
        "argument 'epochs'; it takes micro_batches",
        lambda x: MODEL.train_step(epochs=x), [2]),
    "train and evaluate: an option that there is not": (
        "train_and_evaluate() got an unexpected keyword argument 'hook'",
        lambda x: ESTIMATOR.train_and_evaluate(
            MODEL, [good()], variables=VARIABLES, hook=x), [2]),
    "estimator: mode": ("mode=", lambda x: MODEL(VARIABLES, LABELS, mode=x), ANYTHING),
    "estimator: features": ("batch", lambda x: MODEL(VARIABLES, x), NO_TREES),
    "estimator: micro_batches": ("micro_batches",
        lambda x: MODEL.train_step(micro_batches=x), [None, *ODD_COUNTS]),
    "optimizer": ("TowerOptimizer", ESTIMATOR.TowerOptimizer, NO_FUNCTIONS),
    "optimizer: lazy": ("lazy", lambda x: ESTIMATOR.TowerOptimizer(SGD, lazy=x),
        NO_FLAGS),
    "optimizer: loss_fn": ("loss", lambda x: OPTIMIZER.compute_gradients(x, PARAMS),
        [*NO_FUNCTIONS, lambda params, batch: 0.0]),
    "optimizer: params": ("params",
        lambda x: OPTIMIZER.compute_gradients(lambda w: w, x), NO_TREES),
    "optimizer: has_aux": ("has_aux",
        lambda x: OPTIMIZER.compute_gradients(lambda w: w, 1.0, has_aux=x), NO_FLAGS),
    "optimizer: grads": ("grads",
        lambda x: OPTIMIZER.apply_gradients(x, OPTIMIZER.init(PARAMS), PARAMS),
        ANYTHING),
    "optimizer: a state of another": ("state",
        lambda x: OPTIMIZER.apply_gradients(PARAMS, x, PARAMS), ANYTHING),
    "optimizer: no variables": ("TrainState",
        lambda x: OPTIMIZER.minimize(lambda w: w, x), ANYTHING),
    "train_and_evaluate: model": ("model", lambda x: train(x), ANYTHING),
    "train_and_evaluate: data": ("data", lambda x: train(data=x), NO_DATA),
    "train_and_evaluate: variables": ("state", lambda x: train(variables=x), ANYTHING),
    "train_and_evaluate: steps": ("steps", lambda x: train(steps=x), ODD_COUNTS),
    "predict: model": ("model", lambda x: ESTIMATOR.predict(x, VARIABLES, []),
        ANYTHING),
    "predict: per_example": ("per_example",
        lambda x: ESTIMATOR.predict(MODEL, VARIABLES, [], per_example=x), NO_FLAGS),
    "evaluate: data": ("data", lambda x: ESTIMATOR.evaluate(MODEL, VARIABLES, x),
        NO_DATA),
    "take: table": ("take: table", lambda x: tj.sparse.take(x, LABELS), NO_NUMBERS),
    "take: ids": ("take: ids", lambda x: tj.sparse.take(TABLE, x), NO_NUMBERS),
    "rows: add_to": ("add_to: array", ROWS.add_to, NO_NUMBERS),
    "rows: optimizer": ("optimizer=",
        lambda x: OF_ROWS(x, {"w": ROWS}, (), {"w": TABLE}), ANYTHING),
    "rows: grads": ("grads", lambda x: OF_ROWS(SGD, x, SGD.init(PARAMS), PARAMS),
        ANYTHING),
    "rows: params": ("grads['w']",
        lambda x: OF_ROWS(SGD, {"w": ROWS}, SGD.init(PARAMS), x), ANYTHING),
    "rows: lazy": ("lazy",
        lambda x: OF_ROWS(SGD, PARAMS, SGD.init(PARAMS), PARAMS, lazy=x), NO_FLAGS),
    "cluster_spec": ("cluster_spec", lambda x: tj.cluster.parse_spec(x, "worker", 0),
        ANYTHING),
    "cluster: a strategy of another": ("cluster_spec",
        lambda x: VERBS.configure(cluster_spec=x, task_type="worker", task_id=0),
        ANYTHING[1:]),
    "cluster: task_type": ("task", lambda x: tj.cluster.parse_spec(CLUSTER, x, 0),
        ["x", b"x", -1, 1.5, [], {}, object(), int]),
    "cluster: coordinator": ("coordinator", lambda x: initialize(x), ANYTHING[1:-1]),
    "cluster: num_processes": ("num_processes", lambda x: initialize(processes=x),
        ODD_COUNTS),
    "cluster: process_id": ("process_id", lambda x: initialize(number=x), ODD_COUNTS),
    "launch: command": ("command", lambda x: launch(x),
        [*NO_LISTS, [], {}, [None], ["true", 3]]),
    "launch: processes": ("processes", lambda x: launch(processes=x), ODD_COUNTS),
    "launch: port": ("port", lambda x: launch(port=x), [-1, 0, 2**16, *ODD_COUNTS]),
    "launch: env": ("env['N']", lambda x: launch(env={"N": x}), NO_LISTS[2:]),
    "sweep: build": ("build", lambda x: sweep(x),
        [*ANYTHING, lambda: None, lambda momentum: None]),
    "sweep: what build returns": ("build returned", lambda x: sweep(lambda rate: x),
        [None, 3, {}, [1, 2], (1,)]),
    "sweep: grid": ("grid", lambda x: sweep(grid=x), ANYTHING),
    "sweep: values": ("grid['rate']", lambda x: sweep(grid={"rate": x}), NO_LISTS),
    "sweep: results": ("results", lambda x: sweep(results=x),
        [x for x in ANYTHING[1:] if not isinstance(x, str)]),
    "assert_replicates: towers": ("towers", lambda x: audited(towers=x),
        [None, -1, 0, [], {}, "x", [None], [0], [1.5], object(), int]),
    "assert_replicates: batch": ("batch", lambda x: audited(batch=x), NO_TREES),
    "assert_same: bits": ("bits",
        lambda x: tj.testing.assert_same(TABLE, TABLE, bits=x), NO_FLAGS),
    "one_tower": ("one_tower", tj.testing.one_tower, ANYTHING),
    "mean: values": ("mean", tj.metrics.mean, NO_NUMBERS),
    "mean: merge": ("other=", tj.metrics.mean(SCORES).merge, ANYTHING),
    "ratio": ("ratio: total", lambda x: tj.metrics.ratio(x, 1.0), NO_NUMBERS),
    "ratio: weight": ("ratio: weight", lambda x: tj.metrics.ratio(1.0, x), NO_NUMBERS),
    "below: values": ("percentage_below", lambda x: tj.metrics.percentage_below(x, 0.5),
        NO_NUMBERS),
    "below: threshold": ("threshold", lambda x: tj.metrics.percentage_below(SCORES, x),
        [*NO_NUMBERS, [0.5]]),
    "specificity": ("specificity",
        lambda x: tj.metrics.sensitivity_at_specificity(LABELS, SCORES, x),
        [*NO_NUMBERS, -1, 1.5, float("nan"), [0.5]]),
    "penalty": ("tj.penalty", tj.penalty, NO_NUMBERS),
    "towers: fn": ("fn=", VERBS.call_for_each_tower, NO_FUNCTIONS),
    "map: fn": ("map: fn", lambda x: VERBS.map(x, [1.0]), NO_FUNCTIONS),
    "map": ("elements", lambda x: VERBS.map(jnp.sin, x), [*NO_LISTS, [], {}]),
    "reduce": ("reduction", lambda x: STRATEGY.reduce(x, own()), ANYTHING),
    "pairs": ("pairs", lambda x: VERBS.batch_reduce(SUM, x), [*NO_LISTS, [1]]),
    "pair": ("pairs[0]", lambda x: VERBS.batch_reduce(SUM, [x]), NO_LISTS),
    "regroup": ("regroup", VERBS.regroup, [*NO_LISTS, [], {}, [1], {1}]),
    "broadcast: to": ("device", lambda x: VERBS.broadcast(1.0, x),
        ["x", b"x", -1, 1.5, object(), int, {1}]),
    "fetch: fn": ("fn=", lambda x: VERBS.fetch(1.0, fn=x), NO_FUNCTIONS[1:]),
    "create_var": ("create_var", lambda x: VERBS.create_var("v", x),
        ["x", b"x", object(), {1}, np.array(["a"])]),
    "create_var: tower_local": ("tower_local",
        lambda x: VERBS.create_var("v", 1.0, tower_local=x), NO_FLAGS),
    "assign": ("assign", lambda x: VERBS.assign(x, 1.0), ANYTHING),
    "update": ("update", lambda x: VERBS.update(x, jnp.sin), ANYTHING),
    "update: fn": ("fn=", lambda x: VERBS.update(tj.towers.MirroredVar(1.0), x),
        NO_FUNCTIONS),
    "steps on a data set: fn": ("fn=",
        lambda x: VERBS.run_steps_on_dataset(x, iter([])), NO_FUNCTIONS),
    "steps on a data set: iterator": ("iterator",
        lambda x: VERBS.run_steps_on_dataset(lambda *_: None, x), ANYTHING),
    "init: params": ("params", lambda x: step().init(x),
        [*NO_TREES[:5], None, [], {}, [None], lambda: PARAMS, lambda rngs, x: PARAMS]),
    "init: rng": ("rng", lambda x: step().init(PARAMS, rng=x), ANYTHING[1:]),
    "init: local": ("local", lambda x: step().init(PARAMS, local=x), NO_TREES),
    "place": ("state", lambda x: step().place(x), ANYTHING),
    "start": ("state", lambda x: step().start(x), ANYTHING),
    "start: params": ("state.params",
        lambda x: step().start(dataclasses.replace(state(), params=x)), NO_TREES),
    "start: opt_state": ("state.opt_state",
        lambda x: step().start(dataclasses.replace(state(), opt_state=x)), NO_TREES),
    "place_batch": ("batch", lambda x: step().place_batch(x), NO_TREES),
    "program": ("state", lambda x: step().program(x, good()), ANYTHING),
    "report": ("state", lambda x: step().report(x, good()), ANYTHING),
    "report: timed_calls": ("timed_calls",
        lambda x: step().report(state(), good(), timed_calls=x), ODD_COUNTS),
    "audit": ("state", lambda x: step().audit(x, good()), ANYTHING),
    "check": ("params", lambda x: step().check(x, good()), NO_TREES),
    "check: batch": ("batch", lambda x: step().check(PARAMS, x), NO_TREES),
    "shapes": ("params", lambda x: step().shapes(x), NO_TREES),
    "locate": ("state", lambda x: step().locate(x, good()), ANYTHING),
    "fn": ("state", lambda x: step().fn(x, good()), ANYTHING),
}
# fmt: on


@pytest.mark.parametrize("name", CALLS)
def test_anything_is_refused_by_name(name, compiled):
    says, call, values = CALLS[name]
    state()
    del compiled[:]
    for value in values:
        refuse(functools.partial(call, value), says)
    assert not any("step" in name or "run" in name for name in compiled), compiled
