"""Towers of several devices: the numbers of one device, and a part on each."""

import dataclasses
import functools
import hashlib
import importlib.metadata

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from wide_towers import (
    ADAM,
    CLIP,
    CPUS,
    RATE,
    SPECS,
    constrain,
    loss_by,
    loss_fn,
    plain_loss_fn,
    rows,
    start,
    trained,
    wide,
)

import towerjax as tj
from towerjax.tf1.estimator import Mode, ModelSpec, TowerOptimizer, replicate_model_fn

COMPILERS = importlib.metadata.entry_points(group="jax_plugins")


def loss_and_gradient(params, batch):
    """By hand, in NumPy."""
    x = batch["x"]
    weight = batch["w"] / batch["w"].sum()
    hidden = np.tanh(x @ params["w1"])
    errors = x + hidden @ params["w2"] + params["b"] - batch["y"]
    out = 2 * weight[:, None] * errors
    inner = out @ params["w2"].T * (1 - hidden**2)
    gradient = {"w1": x.T @ inner, "w2": hidden.T @ out, "b": out.sum(0)}
    return (weight * (errors**2).sum(-1)).sum(), gradient


@functools.cache
def expected(steps=3, size=16):
    """The loss before the last of so many steps of clipped Adam, and the parameters."""
    params = start()
    batch = rows(size)
    loss = None
    mu = {name: 0.0 * x for name, x in params.items()}
    nu = dict(mu)
    for t in range(1, steps + 1):
        loss, grads = loss_and_gradient(params, batch)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        grads = {name: g * min(1, CLIP / norm) for name, g in grads.items()}
        mu = {name: 0.9 * mu[name] + 0.1 * g for name, g in grads.items()}
        nu = {name: 0.999 * nu[name] + 0.001 * g**2 for name, g in grads.items()}
        for name in params:
            root = np.sqrt(nu[name] / (1 - 0.999**t)) + 1e-8
            move = mu[name] / (1 - 0.9**t) / root
            params[name] = params[name] - RATE * move
    return loss, params


def assert_near(found, wanted, tolerance=1e-12):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(np.asarray(a), b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["mirrored", "sharded"])
def test_each_device_holds_its_part_of_a_leaf_and_of_its_momenta(state):
    step = tj.build_train_step(loss_fn, ADAM, wide(4, state=state))
    first = jax.tree.map(np.float32, start())
    parts = 2 * (1 if state == "mirrored" else 4)
    done, _ = step(step.init(first), jax.tree.map(np.float32, rows()))
    for at in (step.init(first), done):
        adam = at.opt_state[1][0]
        for tree in (at.params, adam.mu, adam.nu):
            sizes = {k: x.addressable_shards[0].data.size for k, x in tree.items()}
            whole = 8 if state == "mirrored" else 2
            assert sizes == {"w1": 128 // parts, "w2": 128 // parts, "b": whole}


@pytest.mark.slow
def test_towers_reduce_once_and_their_devices_among_themselves():
    step = tj.build_train_step(loss_fn, ADAM, wide(4))
    state = step.init(jax.tree.map(np.float32, start()))
    batch = rows()
    found = step.report(state, jax.tree.map(np.float32, batch)).collectives
    over_towers = [x for x in found if x.num_devices == 4]
    assert [x.opcode for x in over_towers] == ["all-reduce"]
    # Half of both matrices, the rest, and the loss with its weight.
    assert over_towers[0].bytes == 4 * (128 + 8 + 2)
    assert {x.opcode for x in found if x.num_devices == 2} == {"all-reduce"}


@pytest.mark.slow
def test_rows_split_within_a_tower_halve_its_arithmetic():
    def flops(**options):
        options = {"within": {"data": 2}, "specs": None} | options
        step = tj.build_train_step(plain_loss_fn, ADAM, wide(2, 4, **options))
        state = step.init(jax.tree.map(np.float32, start()))
        batch = rows(64)
        program = step.program(state, jax.tree.map(np.float32, batch))
        return program.call.cost_analysis()["flops"]

    assert flops(rows="data") < 0.65 * flops()


FSDP = {"within": {"data": 2}, "rows": "data"}
FSDP["specs"] = {"w1": P(None, "data"), "w2": P("data"), "b": P()}


def by_shard_map(**axes):
    @loss_by
    def loss_fn(params, x):
        def layer(w1, w2, x):
            return jax.lax.psum(jnp.tanh(x @ w1) @ w2, "model")

        specs = {"in_specs": (P(None, "model"), P("model"), P()), "out_specs": P()}
        mapped = jax.shard_map(layer, check_vma=False, **specs, **axes)
        return mapped(params["w1"], params["w2"], x)

    return loss_fn


OVER_ONE = by_shard_map(axis_names={"model"})
# Not over the towers' axis, of one group of devices either.
OVER_ALL = by_shard_map()


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(("loss", "strategy"), [
    (plain_loss_fn, wide(4, **FSDP)),
    (OVER_ONE, wide(4, 8)), (OVER_ONE, wide(1, 2)),
    (OVER_ALL, wide(4, 4)), (OVER_ALL, wide(1, 2)),
], ids=["fsdp", "one 4-8", "one 1-2", "all 4-4", "all 1-2"])  # fmt: skip
def test_a_step_of_parts_and_rows_within_is_that_of_numpy(loss, strategy):
    with jax.enable_x64(True):
        step = tj.build_train_step(loss, ADAM, strategy)
        state, _ = trained(step)
        assert_near(state.params, expected()[1])
        assert state.params["w1"].addressable_shards[0].data.shape == (8, 8)
        if loss is plain_loss_fn:
            found = step.report(state, rows()).collectives
            assert len([x for x in found if x.num_devices == 4]) == 1


@pytest.mark.slow
def test_the_audit_padding_evaluation_and_prediction_of_wide_towers():
    with jax.enable_x64(True):
        options = {"remainder": "pad", "audit": True}
        step = tj.build_train_step(loss_fn, ADAM, wide(4), **options)
        state, _ = trained(step, size=13)
        assert step.unproved == {}
        params = expected(3, 13)[1]
        assert_near(state.params, params)
        loss, _ = loss_and_gradient(params, rows(13))
        measure = tj.build_eval_step(lambda *x: {"loss": loss_fn(*x)}, step.strategy)
        for given in (state, state.params, params):
            found = measure(given, rows(13))["loss"].value
            assert float(found) == pytest.approx(loss, rel=1e-12)
        predict = tj.build_predict_step(
            lambda p, batch, tower: constrain(batch["x"] @ p["w1"], P(None, "model")),
            wide(4, specs=None),
            specs=SPECS,
        )
        out = predict(state, rows(13))
        assert_near(out, rows(13)["x"] @ params["w1"])
        one = tj.testing.one_tower(step)
        assert_near(trained(one, size=13)[0].params, params)


@pytest.mark.slow
@pytest.mark.parametrize("towers, parts", [(2, 1), (1, 3)])
def test_rows_are_padded_to_the_devices_that_split_them(towers, parts):
    """13 to 16 of 2 towers, and to 24 of 3 micro-batches of one, on 4 devices each."""
    within = {"within": {"data": 4}, "rows": "data", "specs": None}
    strategy = wide(towers, 4 * towers, **within)
    options = {"remainder": "pad", "micro_batches": parts}
    with jax.enable_x64(True):
        step = tj.build_train_step(plain_loss_fn, ADAM, strategy, audit=True, **options)
        assert_near(trained(step, size=13)[0].params, expected(3, 13)[1])
        assert step.unproved == {}
        whole = -(-13 // (4 * towers * parts)) * 4 * towers * parts
        data = strategy.distribute_dataset([rows(13)] * 3, **options)
        for placed in (step.place_batch(rows(13)), next(iter(data))):
            assert (placed.rows * towers, placed.num_examples) == (whole, 13)
        state = step.init(start())
        for placed in data:
            state, _ = step(state, placed)
        assert_near(state.params, expected(3, 13)[1])
        one = tj.testing.one_tower(step)
        assert_near(trained(one, size=13)[0].params, expected(3, 13)[1])


@pytest.mark.slow
def test_the_audit_of_split_rows_pads_none_where_they_are_dropped():
    def of_rows(params, batch, tower):  # needs no tower.weight
        return tj.Weighted.mean((batch["x"] @ params).sum(-1))

    strategy = wide(2, within={"data": 4}, rows="data", specs=None)
    step = tj.build_train_step(of_rows, ADAM, strategy, remainder="drop")
    assert step.audit(step.init(start()["w1"]), rows(13)).examples == 8


def noisy_loss_fn(params, batch, tower):
    """With Gaussian noise, a factor of a factor, which compilers make one of."""
    noise = 0.3 * jax.random.normal(tower.rng, batch["x"].shape)
    return loss_fn(params, {**batch, "x": batch["x"] + noise}, tower)


def two_passes(strategy):
    def first(state, batch, tower):
        out = constrain(jnp.tanh(batch["x"] @ state.params["w1"]), P(None, "model"))
        return {"mean": tj.Weighted.mean(out @ state.params["w2"], tower.weight)}

    def second(state, batch, tower, merged):
        batch = {**batch, "x": batch["x"] - 0.3 * merged["mean"].value}
        grads = tj.value_and_grad(noisy_loss_fn)(state.params, batch, tower)[1]
        return {"grads": grads}

    def update_fn(state, merged):
        grads = merged["grads"].value
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, params=params, opt_state=opt_state)
        return new, {"norm": optax.tree.norm(grads)}

    step = tj.build_step((first, second), update_fn, strategy)
    return step, tj.build_train_step(loss_fn, ADAM, strategy).init


def one_pass(loss_fn):
    def build(strategy):
        step = tj.build_train_step(loss_fn, ADAM, strategy)
        return step, step.init

    return build


HASHED = {
    "plain": (one_pass(loss_fn), [(8, "sharded")]),
    "noise": (one_pass(noisy_loss_fn), [(4, "sharded"), (8, "mirrored")]),
    "two passes": (two_passes, [(4, "mirrored"), (8, "sharded")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HASHED)
def test_wide_towers_have_one_hash_on_any_devices(name):
    build, layouts = HASHED[name]

    def hashed(devices, state):
        options = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}
        step, init = build(wide(4, devices, state=state, **options))
        done = init(jax.tree.map(np.float32, start()))
        for _ in range(3):
            done, _ = step(done, jax.tree.map(np.float32, rows()))
        leaves = jax.tree.leaves((done.params, done.opt_state))
        data = b"".join(np.asarray(x).tobytes() for x in leaves)
        return hashlib.sha256(data).hexdigest()

    assert {hashed(*layout) for layout in layouts} == {hashed(2, "mirrored")}


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_towers(tmp_path):
    layouts = [
        tj.Mirrored(CPUS[:2], towers=4),
        wide(4),
        wide(2, 4, state="sharded"),
        tj.Mirrored(CPUS[:2], state="sharded"),
    ]
    with jax.enable_x64(True):
        for done, strategy in enumerate(layouts, 1):
            loss = loss_fn if strategy.within else plain_loss_fn
            step = tj.build_train_step(loss, ADAM, strategy)
            options = {"checkpointer": tj.Checkpointer(tmp_path), "progress": False}
            options["audit"] = False
            batches = [rows()] * 4
            state, _ = tj.run(step, step.init(start()), batches, steps=done, **options)
            assert int(state.step) == done
        assert_near(state.params, expected(4)[1])


class Net(nn.Module):
    annotated: bool = True

    @nn.compact
    def __call__(self, x):
        def init(*names):
            make = nn.initializers.lecun_normal()
            return nn.with_logical_partitioning(make, names) if self.annotated else make

        dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
        x = nn.relu(dense(16, kernel_init=init("embed", "mlp"))(x))
        if self.annotated:
            x = nn.with_logical_constraint(x, ("batch", "mlp"))
        return dense(8, kernel_init=init("mlp", "embed"))(x)


@pytest.mark.slow
def test_the_logical_annotations_of_flax_as_they_are():
    rules = [("mlp", "model"), ("embed", None), ("batch", None)]

    def of(net):
        def fn(params, batch, tower):
            with nn.logical_axis_rules(rules):
                out = net.apply({"params": params}, batch["x"])
            return tj.Weighted.mean(((out - batch["y"]) ** 2).sum(-1), batch["w"])

        return fn

    with jax.enable_x64(True):
        variables = Net().init(jax.random.key(0), rows()["x"])
        specs = nn.logical_to_mesh(nn.get_partition_spec(variables), rules)["params"]
        params = nn.unbox(variables["params"])
        plain = tj.build_train_step(of(Net(False)), ADAM, tj.OneDevice("cpu:0"))
        wanted, _ = trained(plain, plain.init(params))
        for given in (variables["params"], params):  # boxed, or not
            parts = wide(4, specs=None)
            step = tj.build_train_step(of(Net()), ADAM, parts, specs=specs)
            state, _ = trained(step, step.init(given))
            assert_near(nn.unbox(state.params), wanted.params)
            kernel = nn.unbox(state.params)["Dense_0"]["kernel"]
            assert kernel.addressable_shards[0].data.shape == (8, 8)


@pytest.mark.slow
def test_the_partition_specs_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            def init(*names):
                make = nnx.initializers.lecun_normal()
                return nnx.with_partitioning(make, names)

            dense = functools.partial(nnx.Linear, rngs=rngs, param_dtype=jnp.float64)
            self.a = dense(8, 16, kernel_init=init(None, "model"))
            self.b = dense(16, 8, kernel_init=init("model", None))

    def fn(params, batch, tower):
        model = nnx.merge(graph, params)
        out = model.b(nnx.relu(model.a(batch["x"])))
        return tj.Weighted.mean(((out - batch["y"]) ** 2).sum(-1), batch["w"])

    with jax.enable_x64(True), nnx.use_eager_sharding(False):
        graph, params = nnx.split(Model(nnx.Rngs(0)))
        states = []
        parts = wide(4, specs=nnx.get_partition_spec(params))
        for strategy in (parts, tj.Mirrored(CPUS[:2], towers=4)):
            step = tj.build_train_step(fn, ADAM, strategy)
            states.append(trained(step, step.init(params))[0])
        assert_near(states[0].params, jax.tree.leaves(states[1].params))
        kernel = states[0].params["a"]["kernel"][...]
        assert kernel.addressable_shards[0].data.shape == (8, 8)


@pytest.mark.slow
def test_a_function_of_a_key_makes_the_parts():
    def make(key):
        return {n: jax.random.normal(key, np.shape(x)) for n, x in start().items()}

    step = tj.build_train_step(loss_fn, ADAM, wide(4))
    state = step.init(make, rng=jax.random.key(3), extra={"ema": start()})
    assert_near(state.params, make(jax.random.key(3)), 1e-6)
    kept = state.params, state.opt_state[1][0].mu, state.extra["ema"]
    shapes = [x["w1"].addressable_shards[0].data.shape for x in kept]
    assert shapes == [(8, 8)] * 3


def model_of(optimizer, *sizes, **options):
    def model_fn(variables, features, labels, mode, tower):
        def of_params(params):
            return loss_fn(params, {**features, "y": labels}, tower)

        if mode is Mode.EVAL:
            loss = of_params(variables.params)
            return ModelSpec(mode, loss=loss, eval_metrics={"again": loss})
        loss, train_op = optimizer.minimize(of_params, variables)
        return ModelSpec(mode, loss=loss, train_op=train_op)

    model = replicate_model_fn(model_fn, devices=wide(*sizes, **options))
    return model, model.init(tj.TrainState.create(start(), optimizer))


@pytest.mark.slow
def test_a_model_function_of_wide_towers():
    with jax.enable_x64(True):
        model, variables = model_of(TowerOptimizer(optax.sgd(0.1)), 4)
        batch = rows(13)
        labels = batch.pop("y")
        spec = model(variables, batch, labels, Mode.TRAIN)
        loss, gradient = loss_and_gradient(start(), rows(13))
        assert float(spec.loss.value) == pytest.approx(loss, rel=1e-12)
        wanted = {n: x - 0.1 * gradient[n] for n, x in start().items()}
        assert_near(spec.train_op.params, wanted)
        kernel = spec.train_op.params["w1"]
        assert kernel.addressable_shards[0].data.shape == (8, 8)
        spec = model(spec.train_op, batch, labels, Mode.EVAL)
        loss, _ = loss_and_gradient(wanted, rows(13))
        assert float(spec.loss.value) == pytest.approx(loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 2])
@pytest.mark.parametrize("state", ["mirrored", "sharded"])
def test_a_model_function_undoes_an_update_that_is_not_finite(state, devices):
    with jax.enable_x64(True):
        model, now = model_of(TowerOptimizer(ADAM), 4, devices, state=state)
        step = model.train_step(on_nonfinite="skip")
        for number in range(4):
            batch = rows()
            labels = batch.pop("y") * (np.nan if number == 1 else 1.0)
            now, metrics = step(now, {"features": batch, "labels": labels})
            assert np.isfinite(metrics["loss"]) == (number != 1)
        loss, wanted = expected(3)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-12)
        assert_near(now.params, wanted)


@pytest.mark.slow
def test_the_verbs_of_towers_of_several_devices():
    strategy = tj.tf1.with_verbs(wide(4, specs=None))

    def fn(tower, x):
        return constrain(x * (tower.id + 1), P("model"))

    out = strategy.call_for_each_tower(fn, np.arange(4.0))
    assert [x.tolist() for x in strategy.unwrap(out)][3] == [0, 4, 8, 12]
    total = strategy.reduce(tj.Reduction.SUM, out)
    assert np.asarray(total).tolist() == [0, 10, 20, 30]

    def nested(tower, x):
        inner = strategy.call_for_each_tower(lambda inner, x: x + inner.id, x)
        return x + inner.values.sum()

    out = strategy.call_for_each_tower(nested, np.float32(1))
    assert np.asarray(out).tolist() == 11  # 1 and each of 1, 2, 3, 4


@pytest.mark.slow
def test_towers_of_devices_that_are_nowhere_are_proved():
    devices = [f"gpu:{i}" for i in range(16)]
    strategy = tj.Mirrored(devices, within={"model": 4}, specs=SPECS)
    assert strategy.num_towers == 4
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    assert len(step.check(start(), rows()).analysis.collectives) == 6

    def own(params, batch, tower):
        hidden = constrain(batch["x"] @ params["w1"], P(None, "model"))
        return tj.TowerOutput(loss_fn(params, batch, tower), extra=hidden.sum())

    step = tj.build_train_step(own, ADAM, strategy)
    with pytest.raises(tj.ReplicationError, match="extra"):
        step.check(start(), rows(), extra=np.float32(0))


@pytest.mark.slow
@pytest.mark.skipif(
    not any(x.name.startswith("xla_cuda") for x in COMPILERS),
    reason="towerjax[gpu-compiler] is not installed",
)
def test_wide_towers_of_absent_gpus_compile():
    strategy = tj.Mirrored(tj.Absent("h200", 8), within={"model": 4}, specs=SPECS)
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), start())
    report = step.report(shapes, jax.tree.map(np.float32, rows()))
    assert (report.towers, report.devices) == (2, 8)
    over_towers = [x for x in report.collectives if x.num_devices == 2]
    assert [x.opcode for x in over_towers] == ["all-reduce"]
    assert report.memory.by_kind["parameters"] == 4 * (2 * 128 // 4 + 8)
