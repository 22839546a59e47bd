"""Sharded parameters, gathered where they are used: numbers, memory, what is sent."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WIDTH = 16
LAYERS = 3
ROWS = 45
ALONE = tj.AllReduce(pack_below_bytes=0)  # else leaves as small as these are packed
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def towers(number, devices, tower_loop="vmap", ops=ALONE, state="sharded"):
    names = tuple(f"cpu:{i}" for i in range(devices))
    return tj.Mirrored(
        names, towers=number, tower_loop=tower_loop, cross_tower_ops=ops, state=state
    )


OF_NORMS = {
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def each_with(first, second):
    """The layers train with one of them, and all else with the other."""
    names = dict.fromkeys(("in", "tied", "out", "scale"), second)
    return optax.partition(OF_NORMS, {"layers": first, **names})


OPTIMIZERS = {
    "clipped adam": CLIPPED,
    "lamb": each_with("lamb", "adafactor"),
    "adafactor": each_with("adafactor", "lamb"),
}


def draw(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])


def start(width=WIDTH, tied=24, layers=LAYERS):
    layers = {"w": draw(layers, width, width, seed=0), "b": draw(layers, width, seed=1)}
    more = {"in": draw(8, width, seed=2), "tied": draw(width, tied, seed=3)}
    more |= {"out": draw(width, 8, seed=4), "scale": np.float64(1.3)}
    return {"layers": layers, **more}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, ROWS, 8))
    return {"x": x, "y": y, "weight": rng.uniform(0.1, 2, ROWS)}


def layer(h, p):
    return jnp.tanh(h @ p["w"] + p["b"][None]), None


def recomputed(p, x):
    return lax.scan(jax.checkpoint(layer), x, p["layers"])[0]


def layer_of(p, i):
    return jax.tree.map(lambda v: v[i], p["layers"])


def unrolled(p, x):
    for i in range(LAYERS):
        x, _ = layer(x, layer_of(p, i))
    return x


def cast(p, x):
    half = jax.tree.map(lambda v: v.astype(jnp.float32), p)
    return recomputed(half, x.astype(jnp.float32)).astype(x.dtype)


def loss_by(hidden):
    def loss_fn(params, rows, tower):
        h = hidden(params, rows["x"] @ params["in"])
        h = h @ params["tied"] @ params["tied"].T @ params["out"]  # used twice
        losses = ((h - rows["y"]) ** 2).sum(-1) * params["scale"]
        return tj.Weighted.mean(losses, tower.weight * rows["weight"])

    return loss_fn


HIDDEN = {"recomputed": recomputed, "unrolled": unrolled}


@pytest.mark.slow
def test_narrow_floats_are_sent_where_the_loss_casts():
    step = tj.build_train_step(
        loss_by(lambda p, x: cast(p, x)), CLIPPED, towers(4, 4), remainder="pad"
    )
    with jax.enable_x64(True):
        text = step.program(step.init(start()), batch()).call.as_text()
    row = rf"f32\[1,{WIDTH},{WIDTH}\]|f32\[{WIDTH},{WIDTH}\]"
    gathers = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    assert any(re.match(row, x) for x in gathers), gathers
    assert not any(x.startswith(f"f64[{LAYERS},{WIDTH},{WIDTH}") for x in gathers)


@functools.cache
def pinned(hidden, optimizer, devices, state):
    """A step whose parts are large enough to be split, and its bits after three."""
    strategy = towers(8, devices, "scan", tj.PinnedTree(), state)
    return tj.build_train_step(
        loss_by(HIDDEN[hidden]), OPTIMIZERS[optimizer], strategy, remainder="pad"
    )


def go_on(step, state, seeds):
    for seed in seeds:
        state, metrics = step(state, jax.tree.map(np.float32, batch(seed)))
    step.settle()
    return state, np.asarray(metrics["loss"]).tobytes()


def bits(state):
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [np.asarray(x).tobytes() for x in leaves]


WIDE = jax.tree.map(np.float32, start(64, tied=1024))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "optimizer"),
    [("recomputed", "clipped adam"), ("recomputed", "lamb"), ("unrolled", "adafactor")],
)
def test_pinned_parts_have_the_bits_of_one_device(hidden, optimizer):
    found = {}
    layouts = [(1, "mirrored"), (4, "sharded")]
    if optimizer == "clipped adam":
        layouts += [(8, "sharded")]
    for devices, state in layouts:
        step = pinned(hidden, optimizer, devices, state)
        first = step.init(WIDE)
        if state == "sharded":
            part = first.params["layers"]["w"].addressable_shards[0].data
            assert part.size * devices == LAYERS * 64 * 64
        after, loss = go_on(step, first, range(3))
        found[devices, state] = [*bits(after), loss]
    first = found.pop((1, "mirrored"))
    assert [where for where, x in found.items() if x != first] == []


@pytest.mark.slow
def test_the_parts_that_users_have_have_the_bits_of_one_device(users_shards):
    test_pinned_parts_have_the_bits_of_one_device("recomputed", "clipped adam")
    state = pinned("recomputed", "clipped adam", 8, "sharded").init(WIDE)
    scale = state.params["scale"].addressable_shards
    assert all(x.data.shape == () for x in scale)  # it stays whole


@pytest.mark.slow
def test_pinned_parts_go_on_elsewhere_to_the_same_bits():
    one = pinned("recomputed", "clipped adam", 1, "mirrored")
    expected, _ = go_on(one, one.init(WIDE), range(4))
    step = pinned("recomputed", "clipped adam", 4, "sharded")
    state, _ = go_on(step, step.init(WIDE), range(1))
    layouts = [(8, "sharded"), (1, "mirrored"), (4, "sharded")]
    for seed, (devices, kind) in enumerate(layouts, 1):
        step = pinned("recomputed", "clipped adam", devices, kind)
        state, _ = go_on(step, step.place(jax.device_get(state)), [seed])
    assert bits(state) == bits(expected)


@pytest.mark.slow
def test_a_map_in_an_update_of_pinned_parts_is_refused_by_check():
    def tower(state, rows, tower):
        def loss_fn(w, rows, tower):
            return tj.Weighted.mean((rows["x"] @ w).sum(-1), tower.weight)

        loss, grads = tj.value_and_grad(loss_fn)(state.params, rows, tower)
        return {"loss": loss, "grads": grads}

    def update(state, merged):
        mesh = jax.make_mesh((4,), ("own",), (jax.sharding.AxisType.Auto,))
        specs = {"mesh": mesh, "in_specs": P(), "out_specs": P()}
        double = jax.shard_map(lambda x: 2 * x, **specs)
        loss = double(merged["loss"].value)
        params = state.params - merged["grads"].value
        return dataclasses.replace(state, params=params), {"loss": loss}

    w = np.zeros((8, 64), np.float32)
    rows = {"x": np.zeros((8, 8), np.float32)}
    strategy = towers(4, 4, "scan", tj.PinnedTree())
    step = tj.build_step(tower, update, strategy)
    message = r"shard_map at .*test_shards.py.*Leave it out, or use state='mirrored'"
    with pytest.raises(ValueError, match=message):
        step.check(w, rows)


@pytest.mark.slow
def test_pinned_parts_lie_together_or_are_whole():
    strategy = towers(8, 8, "scan", tj.PinnedTree())
    step = tj.build_train_step(loss_by(recomputed), CLIPPED, strategy, remainder="pad")
    params = step.init(WIDE).params
    split = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if not x.is_fully_replicated
    }
    assert split.keys() == {"layers/w", "tied"}
    assert split["tied"].addressable_shards[0].data.shape == (64, 128)


def collectives(text, kind):
    """The shapes of a kind's results, and whether each stands in the main program."""
    entry = text.index("\nENTRY ")
    found = re.finditer(rf"= \(?(\S+?\]).*? {kind}(?:-start)?\(", text)
    return [(x[1], x.start() > entry) for x in found]


@pytest.mark.slow
@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
def test_a_layer_is_gathered_and_scattered_in_the_loop_alone(tower_loop):
    step = tj.build_train_step(
        loss_by(recomputed), CLIPPED, towers(8, 4, tower_loop), remainder="pad"
    )
    state = step.init(start())
    text = step.program(state, batch()).call.as_text()
    size = LAYERS * WIDTH * WIDTH
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        for shape, _ in collectives(text, kind):
            numbers = re.findall(r"\d+", shape.partition("[")[2])
            assert np.prod([int(n) for n in numbers]) < size, (kind, shape)
    weights = [shape for shape, _ in collectives(text, "all-gather")]
    assert any(f"{WIDTH},{WIDTH}]" in x for x in weights), weights
    scattered = [is_main for shape, is_main in collectives(text, "reduce-scatter")]
    assert scattered and not all(scattered), scattered


@pytest.mark.slow
def test_a_deep_model_needs_the_memory_of_its_parts():
    rows = jax.tree.map(np.float32, batch())
    held = {}
    params = jax.tree.map(np.float32, start(128, layers=24))
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    for state in ("mirrored", "sharded"):
        strategy = tj.Mirrored(towers=8, state=state)
        options = {"remainder": "pad"}
        step = tj.build_train_step(loss_by(recomputed), CLIPPED, strategy, **options)
        memory = step.program(step.init(params), rows).call.memory_analysis()
        found = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        held[state] = found / whole
    assert held["mirrored"] > 4, held
    assert held["sharded"] < 0.7, held


@pytest.mark.slow
def test_no_large_gradient_is_gathered_for_what_packs_small_ones():
    def loss_fn(params, rows, tower):
        h, _ = lax.scan(jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None)),
                        rows["x"] @ params["in"], params["a"])  # fmt: skip
        return tj.Weighted.mean((h - params["z"][None]).sum(-1), tower.weight)

    shapes = {"a": (8, 256, 256), "in": (8, 256), "z": (256,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    step = tj.build_train_step(
        loss_fn, optax.adam(1e-3), towers(8, 8, ops=tj.AllReduce())
    )
    rows = {"x": np.zeros((32, 8), np.float32)}
    text = step.program(step.init(params), rows).call.as_text()
    gathered = [shape for shape, _ in collectives(text, "all-gather")]
    assert gathered and not any("[8,256,256]" in x for x in gathered), gathered


@pytest.mark.slow
def test_small_gradients_of_parts_are_packed():
    step = tj.build_train_step(
        loss_by(recomputed), CLIPPED, towers(4, 4, ops=tj.AllReduce()), remainder="pad"
    )
    text = step.program(step.init(start()), batch()).call.as_text()
    assert not collectives(text, "reduce-scatter")


@pytest.mark.slow
def test_every_device_refuses_for_a_part_of_one():
    def loss_fn(w, rows, tower):
        return tj.Weighted.mean(rows @ jnp.sqrt(w).sum(1), tower.weight)

    w = np.ones((8, 64), np.float32)
    rows = np.ones((8, 8), np.float32)
    w[-1, -1] = 0  # of the last device, where the gradient is infinite
    step = tj.build_train_step(
        loss_fn, optax.sgd(0.1), towers(4, 4), on_nonfinite="skip", audit=False
    )
    state, _ = step(step.init(w), rows)
    np.testing.assert_array_equal(jax.device_get(state.params), w)


@pytest.mark.slow
def test_a_sweep_of_parts_has_the_numbers():
    def swept(strategy):
        def build(rate):
            step = tj.build_train_step(
                loss_by(recomputed), optax.adam(rate), strategy, remainder="pad"
            )
            return step, step.init(start())

        grid = {"rate": [0.1, 0.01]}
        data = [batch(seed) for seed in range(3)]
        found = tj.sweep(build, grid, data, order="together", progress=False)
        return [row["loss"] for row in found.rows()]

    with jax.enable_x64(True):
        expected = swept(tj.Mirrored(("cpu:0",), towers=1))
        np.testing.assert_allclose(swept(towers(4, 4)), expected, rtol=1e-9)
