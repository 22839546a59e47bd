"""Matrices that an optimizer needs whole are updated by their owner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.contrib import by_owner

LAYERS = 8
WIDTH = 16


def start():
    rng = np.random.default_rng(0)
    sizes = {"up": (LAYERS, WIDTH, 3 * WIDTH), "down": (LAYERS, 3 * WIDTH, WIDTH)}
    draws = {n: np.float32(rng.normal(size=x) / 4) for n, x in sizes.items()}
    scale = np.linspace(1, 2, WIDTH, dtype=np.float32)
    return {"layers": draws, "scale": scale}


def rows(seed=1):
    return np.random.default_rng(seed).normal(size=(24, WIDTH)).astype(np.float32)


def loss_fn(params, batch, tower):
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    out, _ = jax.lax.scan(layer, batch * params["scale"][None], params["layers"])
    return tj.Weighted.mean((out**2).mean(-1), batch[:, 0] ** 2 * tower.weight)


def is_stack(name, x):
    return name.startswith("layers/")


def muon():
    def dims(params):
        numbers = optax.contrib.MuonDimensionNumbers
        matrix = numbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(lambda x: matrix if x.ndim == 3 else None, params)

    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=dims)


OPTIMIZERS = {
    "muon": muon,
    "adamw": lambda: optax.adamw(0.01),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0, 9), momentum=0.9),
}


@functools.cache
def trained(name, state, owned, devices=4):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(devices)], towers=8, state=state)
    optimizer = OPTIMIZERS[name]()
    if owned:
        optimizer = by_owner(optimizer, strategy, is_stack)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    done = step.init(start())
    for seed in range(3):
        done, _ = step(done, rows(seed))
    return step, done


@pytest.mark.slow
@pytest.mark.parametrize("name, state", [
    ("muon", "sharded"), ("muon", "mirrored"), ("adamw", "sharded_optimizer"),
    ("momentum", "sharded"),
])  # fmt: skip
def test_the_numbers_are_those_of_the_optimizer(name, state):
    _, found = trained(name, state, True)
    _, wanted = trained(name, "mirrored", False, 1)
    pairs = [(found.params, wanted.params), (found.opt_state, wanted.opt_state)]
    for a, b in pairs:
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_each_device_computes_its_own_matrices():
    def figures(owned, devices=4, state="sharded"):
        step, state = trained("muon", state, owned, devices)
        call = step.program(state, rows()).call
        found = step.report(state, rows()).collectives
        count = sum(x.trips for x in found if x.opcode == "all-reduce")
        return call.cost_analysis()["flops"], count

    (flops, sums) = figures(True)
    (split, more) = figures(False)
    one, _ = figures(False, 1, "mirrored")  # on one device all of it
    assert flops < 1.15 * one / 4 and split > 1.3 * one / 4
    # The loss with its weight and the scale; the clipped norm.
    assert sums <= 3 < more


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("optimizer", [
    optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    optax.lamb(0.1),
    optax.adafactor(0.1, min_dim_size_to_factor=4),
], ids=["clipped", "lamb", "adafactor"])  # fmt: skip
@pytest.mark.parametrize("alone", [True, False])
def test_one_number_of_a_whole_stack_is_refused(optimizer, alone):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    step = tj.build_train_step(
        loss_fn if not alone else lambda p, b, t: loss_fn({**p, "scale": b[0]}, b, t),
        by_owner(optimizer, strategy, is_stack),
        strategy,
    )
    params = {"layers": start()["layers"]} if alone else start()
    with pytest.raises(ValueError, match=r"one number from all of \['layers'\]\['"):
        step.check(params, rows())


@pytest.mark.parametrize(
    ("shape", "fitting"), [((), 1), ((4,), 4), ((8, 4), 4), ((6, 2, 3), 2)]
)
def test_what_is_no_stack_for_the_devices_is_refused(shape, fitting):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    optimizer = by_owner(optax.sgd(0.1), strategy, is_stack)
    params = start()
    params["layers"]["none"] = np.ones(shape, np.float32)
    text = rf"that layers/none of shape {[*shape]} is a stack .* or take {fitting} dev"
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        jax.eval_shape(optimizer.update, params, optimizer.init(params), params)


@pytest.mark.slow
def test_what_an_optimizer_keeps_for_each_matrix_goes_with_it():
    """Adafactor's means of rows and columns, without its mean of a whole leaf."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)], state="sharded")
    found = []
    for optimizer in (factored, by_owner(factored, strategy, is_stack)):
        step = tj.build_train_step(
            loss_fn, optax.chain(optimizer, optax.sgd(0.01)), strategy
        )
        state = step.init(start())
        for seed in range(2):
            state, _ = step(state, rows(seed))
        found.append(jax.tree.leaves((state.params, state.opt_state)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=1e-6)


def update(strategy, updates, owned):
    optimizer = by_owner(optax.sgd(0.1), strategy, owned)
    return optimizer.update(updates, optax.EmptyState(), updates)


@pytest.mark.parametrize("call, text", [
    (lambda s: by_owner(optax.sgd(0.1), is_stack, s), "Write by_owner"),
    (lambda s: by_owner(optax.sgd(0.1), tj.Mirrored(within={"model": 2}), is_stack),
        "within= splits them"),
    (lambda s: update(s, start(), lambda name, x: True),
        r"scale of shape \[16\] is a stack"),
    (lambda s: update(s, {"layers": {"x": np.zeros((6, 2, 2))}}, is_stack),
        r"layers/x of shape \[6, 2, 2\] .* the 4 devices divide.*take 2 devices"),
])  # fmt: skip
def test_what_cannot_be_dealt_out_is_refused(call, text):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    with pytest.raises(ValueError, match=text):
        call(strategy)
