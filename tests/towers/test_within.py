"""Towers of several devices: the numbers of one device, and a part on each."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import towerjax as tj
from towerjax.tf1.estimator import Mode, ModelSpec, TowerOptimizer, replicate_model_fn

COMPILERS = importlib.metadata.entry_points(group="jax_plugins")
CPUS = [f"cpu:{i}" for i in range(8)]
SPECS = {"w1": P(None, "model"), "w2": P("model"), "b": None}
CLIP = 0.3
RATE = 0.1
ADAM = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(RATE))
constrain = jax.lax.with_sharding_constraint


def start():
    rng = np.random.default_rng(0)
    sizes = {"w1": (8, 16), "w2": (16, 8), "b": (8,)}
    return {name: rng.normal(size=size) for name, size in sizes.items()}


def rows(size=16):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, size, 8))
    return {"x": x, "y": y, "w": rng.uniform(0.05, 1, size) * (rng.random(size) < 0.7)}


def loss_by(two_layers):
    """The loss of a residual block, whose two matrices a function applies."""

    def loss_fn(params, batch, tower):
        out = batch["x"] + two_layers(params, batch["x"]) + params["b"][None]
        losses = ((out - batch["y"]) ** 2).sum(-1)
        return tj.Weighted.mean(losses, batch["w"] * tower.weight)

    return loss_fn


@loss_by
def loss_fn(params, x):
    return constrain(jnp.tanh(x @ params["w1"]), P(None, "model")) @ params["w2"]


@loss_by
def plain_loss_fn(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


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


def wide(towers, devices=None, **options):
    options = {"within": {"model": 2}, "specs": SPECS} | options
    names = None if devices is None else CPUS[:devices]
    return tj.Mirrored(names, towers=towers, **options)


def trained(step, state=None, steps=3, size=16):
    state = step.init(start()) if state is None else state
    for _ in range(steps):
        state, metrics = step(state, rows(size))
    return state, metrics


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


REPLICATED = P()


def by_hand(fn, outs=REPLICATED, ins=REPLICATED):
    specs = {"in_specs": ins, "out_specs": outs, "check_vma": False}
    return jax.shard_map(fn, axis_names={"model"}, **specs)


@loss_by
def forgotten_sum(params, x):
    fn = lambda w1, w2, x: jnp.tanh(x @ w1) @ w2  # noqa: E731  # here
    whole = by_hand(fn, ins=(P(None, "model"), P("model"), P()))
    return whole(params["w1"], params["w2"], x)


@jax.custom_vjp
def own_in_backward(x):
    return x


def _own_part(_, g):
    own = by_hand(lambda g: g * (1.0 + jax.lax.axis_index("model")))
    return (own(g),)


own_in_backward.defvjp(lambda x: (x, None), _own_part)


@loss_by
def drifting_backward(params, x):
    w2 = own_in_backward(params["w2"])  # here
    return jnp.tanh(x @ params["w1"]) @ w2


@loss_by
def some_hang(params, x):
    def fn(x):
        first = jax.lax.axis_index("model") == 0
        x = jax.lax.cond(first, lambda: jax.lax.pmean(x, "model"), lambda: x)  # here
        return jax.lax.pmean(x, "model")

    return jnp.tanh(by_hand(fn)(x) @ params["w1"]) @ params["w2"]


@loss_by
def in_a_loop(params, x):
    def turn(x, _):
        fn = lambda x: x * (1.0 + jax.lax.axis_index("model"))  # noqa: E731  # here
        return by_hand(fn)(x), None

    x = jax.lax.scan(turn, x, length=2)[0]
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


@pytest.mark.few_fast(3)
@pytest.mark.parametrize(("two_layers", "text"), [
    (forgotten_sum, "drift apart: result .* depends on what in_specs split at"),
    (drifting_backward, "drift apart: result 0 depends on axis_index at"),
    (some_hang, "would hang"),
    (in_a_loop, "drift apart: result 0 depends on axis_index at"),
])  # fmt: skip
@pytest.mark.parametrize("towers, devices", [(4, 8), (1, 2)])
def test_copies_within_a_tower_that_would_differ_are_refused(
    two_layers, text, towers, devices
):
    fn = inspect.getclosurevars(two_layers).nonlocals["two_layers"]
    lines, first = inspect.getsourcelines(fn)
    [here] = [first + i for i, line in enumerate(lines) if "# here" in line]
    with pytest.raises(tj.ReplicationError, match=text) as caught:
        checked(wide(towers, devices), two_layers)
    assert f"test_within.py:{here}" in str(caught.value)
    assert "in a tower" in str(caught.value) and "'model'" in str(caught.value)


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 13])
def test_what_counts_the_padding_of_split_rows_is_refused(size):
    def of_padding(params, batch, tower):
        mean = (batch["x"][:, 0] * tower.weight).mean()  # of a call's rows, padded
        mean = tower.reduce(tj.Reduction.MEAN, mean)
        return plain_loss_fn(params, batch, tower) + tj.penalty(mean * params["b"][0])

    strategy = wide(2, within={"data": 4}, rows="data", specs=None)
    options = {"remainder": "pad", "audit": True}
    step = tj.build_train_step(of_padding, ADAM, strategy, **options)
    with pytest.raises(tj.testing.SplitError, match="Padded rows count"):
        trained(step, size=size)


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


def checked(strategy, loss_fn=loss_fn, size=16):
    tj.build_train_step(loss_fn, ADAM, strategy).check(start(), rows(size))


def by(specs, devices=8):
    within = {"model": 2 if devices == 8 else 3}
    checked(tj.Mirrored(CPUS[:devices], within=within, specs=specs))


def member(rate):
    step = tj.build_train_step(loss_fn, optax.sgd(rate), wide(4))
    return step, step.init(start())


TOGETHER = {"order": "together", "progress": False}
REFUSED = [
    (lambda: tj.sweep(member, {"rate": [0.1, 0.2]}, [rows()] * 2, **TOGETHER),
        r"order='in_turn'\), or leave specs out"),
    (lambda: wide(4, executor="pmap"), r"within=.* cannot run under executor='pmap'"),
    (lambda: tj.Mirrored(CPUS[:3], within={"model": 2}),
        r"the 3 devices.* 3 devices, or name a multiple of 2; .*_devices', 4\)"),
    (lambda: tj.Mirrored(within={"model": 16}).placement,
        "16 devices, which does not divide the 8 .* Give towers 2 or 4 or 8 devices"),
    (lambda: tj.Mirrored(CPUS[:1], within={"model": 2}),
        r"the 1 devices\. Name a multiple of 2; on CPUs .*jax_num_cpu_devices', 2\)"),
    (lambda: wide(2, within={"model": 16}).placement,
        "a tower of 16 devices, which does not divide"),
    (lambda: wide(3, 8),
        r"towers=3 is not a multiple of the 4 groups of 2 devices.*towers=4"),
    (lambda: tj.Mirrored(within={"batch": 2}, axis_name="batch"),
        "'batch' must be a name that nothing"),
    (lambda: tj.Mirrored(within="model"), "must be a dict of axis names and sizes"),
    (lambda: tj.Mirrored(within={"model": 0}), r"within\['model'\]=0"),
    (lambda: wide(2, rows="data"), "rows='data' is not an axis.*'model'"),
    (lambda: tj.Mirrored(specs=P("x")), "there are none. Write within="),
    (lambda: tj.build_train_step(loss_fn, ADAM, tj.OneDevice(), specs=SPECS),
        r"Write tj\.Mirrored\(towers=1, within="),
    (lambda: wide(2, specs={"w1": 3}), r"specs\['w1'\] is 3\."),
    (lambda: by(P("towerjax_device")),
        r"params\['b'\]\[8\], but 'towerjax_device' is not an axis within.*'model'"),
    (lambda: by({**SPECS, "w3": P()}), "entries that match no parameter: w3"),
    (lambda: by({"w1": P()}), r"no entry for params\['b'\]"),
    (lambda: by(lambda name, x: P(None, None)),
        r"params\['b'\]\[8\], which has more entries"),
    (lambda: by(lambda name, x: "model"), r"specs= gives 'model' for params\['b'\]"),
    (lambda: by(SPECS, devices=6),
        r"w1'\]\[8, 16\], but 16, the size of dim 1, is not a multiple of the 3 .* 18"),
    (lambda: checked(wide(4, within={"data": 2}, specs=None, rows="data"),
                     plain_loss_fn, size=12),
        "12 examples, which 4 towers on 2 devices along rows= cannot share evenly"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[x[1][:30] for x in REFUSED])
def test_what_wide_towers_cannot_be_is_refused(call, text):
    with pytest.raises(ValueError, match=re.compile(text, re.S)):
        call()


def test_specs_by_a_function_of_the_name():
    def specs(name, x):
        return {"w1": P(None, "model"), "w2": P("model")}.get(name)

    strategy = wide(4, specs=specs)
    assert "specs=specs" in repr(strategy)
    assert hash(strategy) == hash(wide(4, specs=specs))
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    state = step.init(start())
    assert state.params["w2"].addressable_shards[0].data.shape == (8, 8)
    whole = tj.build_train_step(loss_fn, ADAM, wide(4, specs=None)).init(start())
    with pytest.raises(ValueError, match=r"not placed as the strategy says.*params"):
        step(whole, rows())


@pytest.mark.parametrize("within", [{}, {"other": 2}])
def test_an_axis_that_is_not_there_names_the_option(within):
    strategy = tj.Mirrored(CPUS[:2], within=within)
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    with pytest.raises((RuntimeError, ValueError), match="mesh") as told:
        step.check(start(), rows())
    assert "tj.Mirrored(within={'model': 2})" in "".join(told.value.__notes__)


def test_a_shard_map_that_is_kept_says_to_call_it_anew():
    whole = P(None, "model"), P("model"), P()

    @functools.partial(
        jax.shard_map,
        in_specs=whole, out_specs=P(), axis_names={"model"}, check_vma=False,
    )  # fmt: skip
    def kept(w1, w2, x):
        return jax.lax.psum(jnp.tanh(x @ w1) @ w2, "model")

    of_kept = loss_by(lambda params, x: kept(params["w1"], params["w2"], x))
    checked(wide(4), of_kept)
    with pytest.raises(ValueError, match="should match the mesh") as told:
        checked(wide(1, 2), of_kept)
    assert "call jax.shard_map in the tower function" in told.value.__notes__[0]
