"""Tensor, expert and context parallel, a sharded vocabulary: one device's numbers."""

import functools
import importlib
import re
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkout import ROOT

import towerjax as tj

RATE = 0.3
STEPS = 3
pytestmark = pytest.mark.slow


def example(name):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


tensor = example("tensor_parallel")
experts = example("experts")
context = example("context_parallel")
vocabulary = example("vocabulary")


def mean(losses, batch):
    """Of the tokens of each row that count, all with the same weight."""
    rows = zip(losses, batch["length"], strict=True)
    return sum(row[:n].sum() for row, n in rows) / batch["length"].sum()


def normed(x, scale):
    return x * (jnp.mean(x**2, -1, keepdims=True) + 1e-6) ** -0.5 * scale[None]


def attended(q, k, v):
    """A row's heads, one after another."""
    length, heads, size = q.shape
    out = []
    for h in range(heads):
        scores = q[:, h] @ k[:, h].T / np.sqrt(size)
        scores = jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf)
        out.append(jax.nn.softmax(scores) @ v[:, h])
    return jnp.stack(out, 1)


def of_tensor(params, batch):
    def row(x):
        h = normed(x, params["scales"][0])
        q, k, v = [jnp.tensordot(h, params["qkv"][:, i], 1) for i in range(3)]
        x = x + jnp.tensordot(attended(q, k, v), params["out"], 2)
        hidden = normed(x, params["scales"][1]) @ params["up"] + params["bias"][None]
        return x + jax.nn.gelu(hidden) @ params["down"]

    out = jax.vmap(row)(batch["x"])
    return mean(((out - batch["y"]) ** 2).mean(-1), batch)


def of_context(params, batch):
    def row(x):
        x = x + params["places"]
        q, k, v = [jnp.tensordot(x, params["qkv"][:, i], 1) for i in range(3)]
        return x + jnp.tensordot(attended(q, k, v), params["out"], 2)

    out = jax.vmap(row)(batch["x"])
    return mean(((out - batch["y"]) ** 2).mean(-1), batch)


def chosen_by(probs, lengths):
    """Each token's two best experts, and whether they take it: one by one, in NumPy.

    And the share of the tokens that asks for each expert.
    """
    best = np.argsort(-probs, axis=-1, kind="stable")[..., :2]
    taken = np.zeros(best.shape, bool)
    for row, length in enumerate(lengths):
        count = np.zeros(experts.EXPERTS, int)
        for choice in range(2):
            for t in range(length):
                count[best[row, t, choice]] += 1
                is_room = count[best[row, t, choice]] <= experts.CAPACITY
                taken[row, t, choice] = is_room
    asked = [row[:n].ravel() for row, n in zip(best, lengths, strict=True)]
    asked = np.concatenate(asked)
    return best, taken, np.bincount(asked, minlength=experts.EXPERTS) / asked.size


def of_experts(params, batch, chosen):
    (best, taken, share) = chosen
    x = batch["x"]
    probs = jax.nn.softmax(x @ params["router"])
    gates = jnp.take_along_axis(probs, best, -1)
    gates = taken * gates / gates.sum(-1, keepdims=True)
    each = [
        jax.nn.gelu(x @ up) @ down
        for up, down in zip(params["up"], params["down"], strict=True)
    ]
    picked = jnp.take_along_axis(jnp.stack(each, 2), best[..., None], 2)
    out = x + (gates[..., None] * picked).sum(2)
    balance = mean(experts.EXPERTS * (probs * share[None, None]).sum(-1), batch)
    return mean(((out - batch["y"]) ** 2).mean(-1), batch) + 0.01 * balance


def of_vocabulary(params, batch):
    tokens = batch["tokens"]
    table = params["table"]
    x = jnp.tanh(table[tokens[:, :-1]] @ params["mix"])
    labels = np.eye(vocabulary.WORDS)[tokens[:, 1:]]
    labels = optax.smooth_labels(labels, vocabulary.SMOOTH)
    return mean(optax.softmax_cross_entropy(x @ table.T, labels), batch)


CASES = {
    "tensor": (tensor, tensor.loss_fn, of_tensor),
    "experts": (experts, experts.loss_fn, of_experts),
    "context by constraint": (
        context, context.loss_by(context.by_constraint), of_context),
    "context by a ring": (context, context.loss_by(context.by_ring), of_context),
    "words by a mask": (
        vocabulary, vocabulary.loss_by(vocabulary.by_mask), of_vocabulary),
    "words by hand": (
        vocabulary, vocabulary.loss_by(vocabulary.by_hand), of_vocabulary),
}  # fmt: skip
TWO = {"towers": 2}
ONE = {"towers": 1}
IN_PARTS = {"towers": 4, "state": "sharded"}  # towers that share a group of devices
# Each program on two towers, proved or audited, and in another layout.
LAYOUTS = {
    "tensor": (TWO, ONE),
    "experts": (TWO, IN_PARTS),
    "context by constraint": (TWO, ONE),
    "context by a ring": (TWO, IN_PARTS),
    "words by a mask": (TWO, IN_PARTS),
    "words by hand": (TWO, ONE),
}


def given(program):
    rng = np.random.default_rng(0)
    return program.init(rng), program.make_batch(rng)


def how(program):
    rows = getattr(program, "ROWS_ALONG", None)
    specs = getattr(program, "SPECS", None)
    return {"within": program.WITHIN, "rows": rows, "specs": specs}


@functools.cache
def by_one_device(program, loss):
    """The loss before each step of SGD, and the parameters after it."""
    params, batch = given(program)
    of = jax.jit(lambda p, *more: jax.value_and_grad(loss)(p, batch, *more))
    losses = []
    states = [params]
    for _ in range(STEPS):
        more = ()
        if program is experts:  # which tokens go where has no gradient
            probs = np.asarray(jax.nn.softmax(batch["x"] @ params["router"]))
            more = (chosen_by(probs, batch["length"]),)
            assert not more[0][1].all() or losses, "no expert is full"
        value, grads = of(params, *more)
        params = {k: np.asarray(x - RATE * grads[k]) for k, x in params.items()}
        losses = [*losses, float(value)]
        states = [*states, params]
    return losses, states


@pytest.mark.filterwarnings(r"ignore:not proved .* loss \(a shard_map over")
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_parameters_are_those_of_one_device(name, layout):
    program, loss_fn, alone = CASES[name]
    params, batch = given(program)
    with jax.enable_x64(True):
        losses, states = by_one_device(program, alone)
        strategy = tj.Mirrored(**LAYOUTS[name][layout], **how(program))
        sgd = optax.sgd(RATE)
        options = {"remainder": "pad", "audit": None if layout == 0 else False}
        step = tj.build_train_step(loss_fn, sgd, strategy, **options)
        state = step.init(params)
        for before, loss, after in zip(states, losses, states[1:], strict=False):
            old = jax.tree.map(np.asarray, jax.device_get(state.params))
            state, metrics = step(state, batch)
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-12)
            for leaf, wanted in after.items():
                found = np.asarray(state.params[leaf])
                np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
                gradient = (before[leaf] - wanted) / RATE
                moved = (old[leaf] - found) / RATE
                np.testing.assert_allclose(moved, gradient, rtol=1e-9, atol=1e-12)
        is_ring = name == "context by a ring"
        assert step.is_audited == (layout == 0 and is_ring)
        assert (step.unproved == {}) == (layout == 0 and not is_ring)


@pytest.mark.parametrize("name", ["context_parallel", "vocabulary"])
def test_both_ways_of_an_example_print_one_loss(name):
    text = forked.printed(ROOT / f"examples/{name}.py", compiled="unoptimized")
    first, second = re.findall(r"^by_\w+.* loss (\S+)$", text, re.M)
    assert first == second
