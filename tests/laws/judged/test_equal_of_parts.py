"""Any JAX program of random maps over devices: what is proved is so when it is run."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from on_devices import (
    ALL,
    DRAW,
    NUMBERS,
    SPLIT,
    W,
    X,
    Y,
    given_by,
    loss,
    mapped,
    proof_of,
)

import towerjax as tj

# What a device does with its part of a square, and for which specs of its input and its
# output that is proved: w whole, r split along rows, c along columns.
BODIES = {
    "as it is": (lambda x: x, "ww rr cc"),
    "squared": (lambda x: x * x, "ww rr cc"),
    "own sums": (lambda x: 0 * x + x.sum(), "ww"),
    "sums along a dim": (lambda x: x.sum(0, keepdims=True) + 0 * x, "ww cc"),
    "along the other": (lambda x: x.sum(1, keepdims=True) + 0 * x, "ww rr"),
    "all sums": (lambda x: 0 * x + lax.psum(x.sum(), "i"), "rr cc"),
    "a mean of sums": (lambda x: 0 * x + lax.pmean(x.sum(), "i"), "ww"),
    "a mean of means": (lambda x: 0 * x + lax.pmean(x.mean(), "i"), "ww rr cc"),
    "the largest": (
        lambda x: lax.pmax(x.max(0, keepdims=True), "i") + 0 * x, "ww rr"),
    "sums of sums along a dim": (lambda x: lax.psum(x.sum(0), "i"), "rw"),
    "sums of sums along the other": (lambda x: lax.psum(x.sum(1), "i"), "cw"),
    "gathered": (lambda x: lax.all_gather(x, "i", tiled=True), "rw"),
    "gathered along the other": (
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True), "cw"),
    "scattered": (lambda x: lax.psum_scatter(x.T @ x, "i", tiled=True), "rr"),
    "multiplied": (lambda x: lax.psum(x.T @ x, "i"), "rw"),
    "a number": (lambda x: x + lax.axis_index("i"), ""),
    "numbers": (
        lambda x: (
            x + (lax.axis_index("i") * len(x) + jnp.arange(len(x)))[:, None] * 1.0
        ), "rr"),
    "sorted": (lambda x: jnp.sort(x, 0), "ww cc"),
    "turned": (lambda x: x.T, "ww rc cr"),
    "one more dim": (lambda x: x[None], "ww wr rr rc"),
    "totals": (lambda x: x.sum()[None], "ww wr"),
    "two views": (lambda x: jnp.concatenate([x, 2 * x]), "ww cc"),
    "in another shape": (lambda x: x.reshape(-1, 2, x.shape[1]), "ww rr"),
}  # fmt: skip
SQUARE = DRAW.normal(size=(8, 8))
WAYS = {"w": P(), "r": P("i"), "c": P(None, "i")}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_what_is_proved_of_parts_is_what_specs_say_of_them(name):
    body, expected = BODIES[name]
    proved = list[str]()
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for way in map("".join, itertools.product(WAYS, WAYS)):

            def make(devices, way=way):
                given, joined = [WAYS[x] for x in way]
                return mapped(devices, body, SQUARE, ins=(given,), out=joined)

            try:
                [equal] = proof_of(make).equal
            except (tj.ReplicationError, ValueError):  # refuted, or no such program
                continue
            if equal.says == "proved":
                proved.append(way)
                [one] = given_by(make, 1)
                for number in NUMBERS[1:]:
                    [got] = given_by(make, number)
                    is_of_each = len(got) == number and got.shape[1:] == one.shape[1:]
                    joined = one.reshape(got.shape) if one.size == got.size else one
                    want = np.broadcast_to(one, got.shape) if is_of_each else joined
                    np.testing.assert_allclose(got, want, 1e-12, err_msg=way)
    assert {*proved} == {*expected.split()}


# Between maps, a program is one of all devices.
BETWEEN = [
    lambda x: x,
    jnp.tanh,
    lambda x: x.T,
    lambda x: x - x.mean(0),
    lambda x: x + x.sum(),
    lambda x: x * x.max(0),
    lambda x: x @ x.T,
    lambda x: x.reshape(-1, 8),
]


def drawn_program(draw):
    """``make`` of two maps or pmaps, one after the other, that runs on any devices."""
    stages = []

    def make(devices):
        def program(x):
            for body, ways, between in stages:
                if ways == "pmap":
                    fn = jax.pmap(body, "i", devices=devices)
                    x = fn(x.reshape(len(devices), -1, *x.shape[1:]))
                    x = x.reshape(-1, *x.shape[2:])
                else:
                    given, joined = [WAYS[way] for way in ways]
                    x = mapped(devices, body, ins=(given,), out=joined)[0](x)
                x = between(x)
            return x

        return jax.jit(program), (SQUARE,)

    while len(stages) < 2:
        body, likely = BODIES[str(draw.choice([*BODIES]))]
        ways = ["pmap", *likely.split(), "".join(draw.choice([*WAYS], 2))]
        between = BETWEEN[draw.integers(len(BETWEEN))]
        stages.append((body, str(draw.choice(ways)), between))
        try:
            every = [make(jax.devices()[:number]) for number in NUMBERS]
            shapes = [jax.eval_shape(fn, *args).shape for fn, args in every]
        except (IndexError, TypeError, ValueError, ZeroDivisionError):
            stages.pop()
            continue
        if any(len(x) != 2 or x[0] % 4 or x[1] % 4 or 0 in x for x in shapes):
            stages.pop()
    return make


@pytest.mark.slow
def test_what_is_proved_of_maps_after_one_another_is_the_same():
    says = dict.fromkeys(["proved", "refuted", "unknown"], 0)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for seed in range(60):
            make = drawn_program(np.random.default_rng(seed))
            try:
                [equal] = proof_of(make).equal
            except tj.ReplicationError:
                says["refuted"] += 1
                continue
            says[equal.says] += 1
            if equal.says == "proved":
                one, *others = [given_by(make, number)[0] for number in NUMBERS]
                for got in others:
                    np.testing.assert_allclose(got, one, 1e-9, 1e-8, err_msg=f"{seed}")
    assert says["proved"] >= 20 and says["unknown"] + says["refuted"] >= 20


# What is more than a function of its arguments.


class Counts:
    def __init__(self):
        self.total = jnp.zeros(())

    def step(self, w, x):
        self.total = self.total + x.sum()
        return (x @ w).sum()


def of_object(devices):
    return Counts().step, (W, X)


def of_a_list(devices):
    """The list has one more element in each call."""

    def step(w, history):
        history.append(w.sum())
        return w * len(history)

    return step, (W, [W[0]])


def of_one_array_twice(devices):
    """What is written to the first is not read from the second in a trace."""

    def step(state, same):
        state["w"] = 2 * state["w"]
        return same["w"].sum()

    w = jnp.array(W)
    return step, ({"w": w}, {"w": w})


def of_a_ref(devices):
    total = jax.new_ref(jnp.zeros(()))

    def step(w, x):
        total[...] = total[...] + x.sum()
        return (x @ w).sum()

    return jax.jit(step), (W, X)


def counted(devices, every):
    """Right in the first call, whose count is 0, and in no other."""
    fn, _ = mapped(devices, lambda w, x, n: lax.psum(x.sum(0), "i") * n, W, X, 1,
                   ins=(ALL, SPLIT, ALL))  # fmt: skip

    def step(state, x):
        grads = fn(state["w"], x, 1 + (len(devices) - 1) * state["count"])
        if every and state["count"] % 10 == 0:
            grads = 2 * grads
        return {"w": state["w"] - grads, "count": state["count"] + 1}

    return step, ({"w": W, "count": 0}, X)


def of_a_python_number(devices):
    return counted(devices, every=True)


@pytest.mark.parametrize(("make", "text"), [
    (of_object, r"it changes fn.self.total in place"),
    (of_a_list, r"the structure of args in place"),
    (of_one_array_twice, r"it changes args\[0\]\['w'\] in place"),
    (of_a_ref, r"the function takes a Ref"),
    (of_a_python_number, r"args\[0\]\['count'\] comes back .* is a Python number"),
], ids=["changed of an object", "a list", "twice", "a Ref", "a number of Python"],
)  # fmt: skip
def test_what_is_more_than_its_arguments_is_not_proved(make, text):
    for why in proof_of(make).unproved.values():
        assert re.search(text, why), why
    assert proof_of(make).unproved


def test_numbers_of_python_in_a_state_are_others_in_the_next_call():
    says = proof_of(functools.partial(counted, every=False)).equal
    assert [x.says for x in says] == ["proved", "unknown"]


def test_what_is_changed_in_arguments_is_a_result():
    def make(devices, means=lax.pmean):
        def own(w, x, y):
            return means(jax.grad(loss)(w, x, y), "i")

        gradient, _ = mapped(devices, own, W, X, Y)

        def step(state, x, y):
            state["g"] = gradient(state["w"], x, y)
            state["w"] = state["w"] - 0.1 * state["g"]
            return x.sum()

        return step, ({"w": W, "g": 0 * W}, X, Y)

    says = {x.leaf: x.says for x in proof_of(make).equal}
    names = "result", "args[0]['g']", "args[0]['w']"
    assert says == dict.fromkeys(names, "proved")
    with pytest.raises(tj.ReplicationError, match=r"args\[0\]\['g'\]: D times"):
        proof_of(functools.partial(make, means=lax.psum))


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_draws_that_depend_on_shards_are_not_proved(impl):
    def make(devices):
        drawn = jax.jit(lambda key: jax.random.normal(key, (8,)))
        return drawn, (jax.random.key(0, impl=impl),)

    assert bool(proof_of(make).unproved) == (impl == "rbg")


def test_arguments_may_have_other_values_than_these():
    """A momentum of 0 is no 0: in the next call it is another."""

    def make(devices):
        zeros = np.zeros(3, np.float32)
        return mapped(devices, lambda m, x: lax.psum(m, "i"), zeros, X)

    with pytest.raises(tj.ReplicationError, match="result: D times"):
        proof_of(make)
