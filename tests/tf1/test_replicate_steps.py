"""A replicated model in the loops: its steps, where variables lie, what is compiled."""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from layouts import mirrored as towers
from layouts import rows

import towerjax as tj
from towerjax.tf1.estimator.replicate import _SPEC_PARTS
from towerjax.tf1.estimator.variables import variable_devices

Kind = tj.estimator.LossReduction
SUM = Kind.SUM
EXACT = Kind.SUM_BY_NONZERO_WEIGHTS
MOMENTUM = tj.estimator.TowerOptimizer(optax.sgd(0.05, momentum=0.9))
PLACEMENTS = list(tj.estimator.VariablePlacement)
WIDTH = 7  # a size that nothing else here has


def batch(size, number=0):
    x = rows(size, WIDTH, seed=number)
    y = rows(size, seed=number + 50)
    return {"features": {"x": x, "weight": np.abs(rows(size, seed=9))}, "labels": y}


def hook(step, metrics):
    return None


def model_fn(variables, features, labels, mode, tower, params=None):
    weight = tower.weight * features["weight"]
    logits = features["x"] @ variables.params["w"] + variables.params["b"]
    predictions = {"logits": logits}
    if mode is tj.estimator.Mode.PREDICT:
        return tj.estimator.ModelSpec(mode, predictions)

    def loss_fn(p):
        errors = (features["x"] @ p["w"] + p["b"] - labels) ** 2
        if params == "scalar":
            return (errors * weight).sum()
        return tj.Weighted.mean(errors, weight)

    metrics = {"mean": tj.Weighted.mean(logits, weight)}
    if mode is tj.estimator.Mode.EVAL:
        loss = loss_fn(variables.params)
        return tj.estimator.ModelSpec(mode, predictions, loss, eval_metrics=metrics)
    loss, after = MOMENTUM.minimize(loss_fn, variables)
    count = dataclasses.replace(
        variables.local["count"], value=tower.local["count"] + weight.sum()
    )
    after = dataclasses.replace(after, local={"count": count})
    return tj.estimator.ModelSpec(mode, predictions, loss, after, metrics, hooks=[hook])


def start(optimizer=MOMENTUM, **more):
    params = {"w": rows(WIDTH, seed=3), "b": np.float32(0.5)}
    count = tj.TowerLocal(np.float32(0), tj.Reduction.SUM, "count")
    return tj.TrainState.create(params, optimizer, local={"count": count}, **more)


def replicated(
    count, devices, reduction=EXACT, fn=model_fn, tower_loop="vmap", **options
):
    strategy = towers(count, devices, tower_loop=tower_loop)
    return tj.estimator.replicate_model_fn(fn, reduction, strategy, **options)


@functools.cache
def shared(count, devices, placement=PLACEMENTS[0], reduction=EXACT):
    """A model, with the programs that its steps have."""
    return replicated(count, devices, reduction, variable_placement=placement)


def numbers(state):
    """Every number of a state, the rng aside."""
    state = dataclasses.replace(state, rng=None)
    return {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def same(one, other, *, exactly=True):
    assert one.keys() == other.keys()
    for name, x in one.items():
        if exactly:
            np.testing.assert_array_equal(x, other[name], err_msg=name)
        else:
            np.testing.assert_allclose(
                x, other[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


BATCHES = [batch(8, 0), batch(8, 1), batch(5, 2), batch(8, 3)]


def by_calls(model, batches=BATCHES, reduction=EXACT):
    variables = model.init(start())
    losses = []
    means = []
    for one in batches:
        spec = model(variables, one["features"], one["labels"])
        variables = spec.train_op
        losses.append(float(spec.loss.value))
        means.append(float(spec.eval_metrics["mean"].value))
    return numbers(variables), losses, means


@functools.cache
def called(count, devices):
    return by_calls(shared(count, devices))


def test_variables_that_lie_on_all_devices_are_not_copied_again():
    model = shared(2, 2, PLACEMENTS[1])
    once = model.train_step().start(model.init(start()))
    again = model.train_step().start(once)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x is y, once, again)))


@pytest.mark.slow
def test_a_key_that_model_fn_splits_is_another_one_each_step():
    sgd = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def split_fn(variables, features, labels, mode, tower):
        key, own = jax.random.split(variables.rng)
        noise = 1 + jax.random.key_data(own)[0] % 8

        def loss_fn(p):
            return tj.Weighted.mean(features["x"] @ (p["w"] * noise), tower.weight)

        loss, after = sgd.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(
            mode, loss=loss, train_op=dataclasses.replace(after, rng=key)
        )

    w = rows(WIDTH, seed=3).astype(np.float64)
    key = jax.random.key(0)
    losses = []
    model = replicated(2, 1, fn=split_fn)
    step = model.train_step()
    state = model.init(start(sgd))
    found = []
    for one in BATCHES[:2]:
        state, metrics = step(state, one)
        found.append(metrics["loss"])
        key, own = jax.random.split(key)
        noise = 1.0 + jax.random.key_data(own).tolist()[0] % 8
        x = one["features"]["x"].astype(np.float64)
        losses.append((x @ (w * noise)).mean())
        w = w - 0.1 * x.mean(axis=0) * noise
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-4)
    assert np.array_equal(*map(jax.random.key_data, (state.rng, key)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mode"),
    [(4, 2, tj.estimator.Mode.TRAIN), (3, 1, tj.estimator.Mode.PREDICT)],
)
def test_towers_in_turn_meet_in_every_mode(count, devices, mode):
    sgd = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def always_minimizes(variables, features, labels, mode, tower):
        def loss_fn(p):
            return tj.Weighted.mean((features @ p["w"]) ** 2, tower.weight)

        loss, after = sgd.minimize(loss_fn, variables)
        predictions = {"after": features @ after.params["w"]}
        return tj.estimator.ModelSpec(mode, predictions, loss, after)

    x = rows(7, WIDTH)
    w = rows(WIDTH, seed=3)
    model = replicated(count, devices, fn=always_minimizes, tower_loop="scan")
    spec = model(model.init(start(sgd)), x, None, mode)
    after = w - 0.1 * 2 * (x * (x @ w)[:, None]).mean(axis=0)
    np.testing.assert_allclose(spec.predictions["after"], x @ after, rtol=1e-4)
    if mode is not tj.estimator.Mode.PREDICT:
        np.testing.assert_allclose(spec.loss.value, ((x @ w) ** 2).mean(), rtol=1e-5)


@pytest.mark.slow
def test_one_step_at_a_time_and_its_hooks():
    traces = []

    def fn(variables, features, labels, mode, tower):
        traces.append(mode)
        return model_fn(variables, features, labels, mode, tower)

    model = replicated(4, 2, fn=fn)  # whose hooks nobody has heard of
    step = model.train_step()
    state = model.init(start())
    evaluate = model.eval_step()
    assert step.plan.states.hooks == []
    expected, losses, _ = called(4, 2)
    for one, loss in zip(BATCHES, losses, strict=True):
        evaluate(state, one)
        state, metrics = step(state, one)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    same(numbers(state), expected, exactly=False)
    assert step.plan.states.hooks == [hook]
    # Once for the devices. The proof traces one tower of 8 examples and, as batches may
    # be padded, one of other rows; and one of 5 examples when they come.
    assert traces.count(tj.estimator.Mode.EVAL) == 3 + 1
    assert traces.count(tj.estimator.Mode.TRAIN) == 3 + 1


@pytest.mark.slow
def test_a_scalar_loss_is_averaged_over_batches():
    model = shared(2, 1, reduction=SUM)
    batches = [batch(8, 0), batch(4, 1)]
    found = tj.evaluate(model.eval_step(params="scalar"), model.init(start()), batches)
    w = np.asarray(start().params["w"], float)
    totals = [
        (b["features"]["weight"] * (b["features"]["x"] @ w + 0.5 - b["labels"]) ** 2)
        .astype(float).sum() for b in batches
    ]  # fmt: skip
    np.testing.assert_allclose(found["loss"], np.mean(totals), rtol=1e-5)


@pytest.mark.slow
def test_a_step_is_kept_for_the_examples_of_any_of_its_losses():
    def fn(variables, features, labels, mode, tower):
        losses = {}
        after = {}
        slots = {}
        for name, x in variables.params.items():
            earlier = 0 * sum(after.values())

            def loss_fn(w, name=name, earlier=earlier):
                weight = tower.weight * features[name]
                return tj.Weighted.mean((w + earlier - labels[name]) ** 2, weight)

            losses[name], grads = MOMENTUM.compute_gradients(loss_fn, x)
            after[name], slots[name] = MOMENTUM.apply_gradients(
                grads, variables.opt_state[name], x, loss=losses[name]
            )
        train_op = dataclasses.replace(variables, params=after, opt_state=slots)
        return tj.estimator.ModelSpec(mode, loss=losses["a"], train_op=train_op)

    model = replicated(2, 1, fn=fn, tower_loop="scan")  # towers in turn meet twice
    params = {"a": np.float32(1), "b": np.float32(2)}
    state = model.init(tj.TrainState.create(params, MOMENTUM))
    slots = {name: MOMENTUM.init(x) for name, x in params.items()}
    state = dataclasses.replace(state, opt_state=slots)
    step = model.train_step(on_nonfinite="skip")
    ones = np.ones(4, np.float32)
    y = np.float32([0, 1, 2, 3])

    def changed(a, b, labels):
        nonlocal state
        before = numbers(state)
        given = {"features": {"a": a * ones, "b": b * ones}, "labels": labels}
        state, _ = step(state, given)
        return [k for k, x in numbers(state).items() if (x != before[k]).any()]

    whole = {"a": y, "b": y}
    gap = {"a": y, "b": y * np.nan}
    assert ".params['b']" in changed(0, 1, whole)  # whose loss is not the spec's
    np.testing.assert_allclose(state.params["b"], 2 - 0.05 * 2 * (2 - 1.5), rtol=1e-6)
    assert changed(0, 0, whole) == changed(1, 1, gap) == [".step"]


def where(tree):
    return [sorted(d.id for d in x.devices()) for x in jax.tree.leaves(tree)]


def total_bytes(tree):
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards)


@pytest.mark.slow
def test_variables_lie_where_they_are_told():
    devices = 2
    each = total_bytes(start().params)
    everywhere = [0, 1]
    stepped = None
    for placement in PLACEMENTS:
        model = shared(4, devices, placement)
        variables = model.init(start())
        step = model.train_step()
        is_mirrored = placement is tj.estimator.VariablePlacement.MIRRORED
        for one in BATCHES:
            held = where(dataclasses.replace(variables, local=None))
            if is_mirrored:
                assert held == [everywhere] * len(held)
            elif placement is tj.estimator.VariablePlacement.ON_ONE_DEVICE:
                assert held == [[0]] * len(held)
            else:
                assert held == [[i % devices] for i in range(len(held))]
            copies = devices if is_mirrored else 1
            assert total_bytes(variables.params) == copies * each
            assert where(variables.local) == [everywhere]  # with their towers
            assert variables.local["count"].value.shape == (4,)
            if placement is PLACEMENTS[2]:
                variables = model(variables, one["features"], one["labels"]).train_op
            else:
                variables, _ = step(variables, one)
        if is_mirrored:
            stepped = numbers(variables)
        # A call and a step are different programs, whose last bits may differ.
        is_called = placement is PLACEMENTS[2]
        same(numbers(variables), called(4, devices)[0] if is_called else stepped)


@pytest.mark.slow
def test_what_is_not_kept_is_freed():
    def held():
        wide = [x for x in jax.live_arrays() if x.shape == (1237,)]
        return sum(len(x.addressable_shards) for x in wide)

    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def fn(variables, features, labels, mode, tower):
        def loss_fn(w):
            return tj.Weighted.mean(w.sum() * features, tower.weight)

        loss, after = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    assert held() == 0
    model = replicated(2, 2, fn=fn, variable_placement=PLACEMENTS[1])
    variables = model.init(tj.TrainState.create(np.ones(1237, np.float32), optimizer))
    assert held() == 1
    for _ in range(2):
        variables = model(variables, rows(8)).train_op
        assert held() == 1
    del variables


def test_a_lone_gpu_holds_the_one_copy_and_several_share_none():
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str
        id: int
        process_index: int = 0

    class Placed:
        def __init__(self, *devices):
            self.jax_devices = devices
            self.host = cpu[0]

    one = Device("gpu", 0)
    two = Device("gpu", 1)
    far = Device("gpu", 2, 1)
    cpu = jax.local_devices(backend="cpu")[:1]
    policy = tj.estimator.VariablePlacement.ON_ONE_DEVICE
    assert variable_devices(Placed(one), policy) == [one]
    assert variable_devices(Placed(one, two), policy) == cpu
    assert variable_devices(Placed(one, far), policy) == [one]
    assert variable_devices(Placed(Device("cpu", 3)), policy) == cpu
    policy = tj.estimator.VariablePlacement.ROUND_ROBIN
    assert variable_devices(Placed(one, two, far), policy) == [one, two]


# What is compiled.

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter",
               "collective-permute", "collective-broadcast")  # fmt: skip


def collectives(model, mode):
    step = model._step(mode, _SPEC_PARTS[mode], params=None, config=None)
    text = step.program(model.init(start()), batch(16)).call.as_text()
    names = "|".join(COLLECTIVES)
    return re.findall(rf" ({names})(?:-start)?\(", text), text


@pytest.mark.slow
@pytest.mark.parametrize(("ops", "towers_each", "expected"), [
    (tj.AllReduce(), 1, ["all-reduce"]),
    (tj.PinnedTree(), 1, ["all-gather", "all-to-all"]),
], ids=repr)  # fmt: skip
def test_eight_devices_send_what_one_optimizer_and_the_metrics_need(
    ops, towers_each, expected
):
    strategy = tj.Mirrored(towers=8 * towers_each, cross_tower_ops=ops)
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    # The gradients with the loss they are of, the loss, the metric: one sum of all.
    found, text = collectives(model, tj.estimator.Mode.TRAIN)
    if expected == ["all-reduce"]:
        assert found == expected
        [shapes] = re.findall(r"= (.*) all-reduce\(", text)
        numbers = sum(int(n or 1) for n in re.findall(r"f32\[(\d*)\]", shapes))
        assert numbers == WIDTH + 1 + 2 + 2 + 2
    else:
        assert sorted(found) == expected
    if expected == ["all-reduce"]:
        # The loss and the metric; and the tower-local variable's aggregate is not read.
        assert collectives(model, tj.estimator.Mode.EVAL)[0] == expected


def test_the_steps_refuse_what_the_model_does_not_ask_for():
    def fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode, loss=features.sum())

    model = replicated(1, 1, fn=fn)
    for make in (model.train_step, model.eval_step, model.predict_step):
        with pytest.raises(ValueError, match="model_fn has no parameter 'params'"):
            step = make(params={"rate": 1})
            step(np.float32(1), {"features": rows(4)})
    with pytest.raises(ValueError, match="on_nonfinite='warn' must be one of"):
        model.train_step(on_nonfinite="warn")


@pytest.mark.slow
def test_a_state_that_is_none_is_refused():
    model = shared(4, 2)
    step = model.train_step()
    with pytest.raises(
        ValueError, match="is a dict, not a tj.TrainState.* several opt"
    ):
        tj.run(step, {"w": np.ones(3)}, BATCHES, progress=False)
    state = model.init(start())
    step(state, batch(8))
    with pytest.raises(ValueError, match="donated to step 1"):
        step(state, batch(8))


@pytest.mark.slow
def test_params_reach_the_steps():
    seen = []
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def fn(variables, features, labels, mode, tower, params, config):
        seen.append((mode, params, config))
        loss, after = optimizer.minimize(
            lambda p: p["w"].sum() * features.sum(), variables
        )
        return tj.estimator.ModelSpec(mode, {"x": features}, loss, after)

    model = replicated(1, 1, fn=fn)
    given = {"params": {"rate": [1]}, "config": "c"}
    state = model.init(start(optimizer))
    one = {"features": rows(1, WIDTH)}
    model.eval_step(**given)(state, one)
    model.predict_step(**given)(state, one)
    step = model.train_step(**given)
    given["params"]["rate"].append(2)  # too late
    step(state, one)
    E, P, T = (tj.estimator.Mode[name] for name in ("EVAL", "PREDICT", "TRAIN"))
    assert seen == [(mode, {"rate": [1]}, "c") for mode in (E, P, T)]
