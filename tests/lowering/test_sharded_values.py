"""Programs on parts of their parameters: where they communicate, and their numbers."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from towerjax.jaxprs import flops, tags
from towerjax.jaxprs.primitives import ELEMENTWISE, IDENTITIES, PLAIN
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering import scatters
from towerjax.lowering.sharded_values import (
    Shard,
    Shards,
    Targets,
    elementwise,
    is_elementwise,
)
from towerjax.lowering.shards import on_shards
from towerjax.lowering.xla import inline_and_merge
from towerjax.prover.equality import one_tower  # noqa: F401 - it registers all rules
from towerjax.prover.equality.rules.rules import RULES

D = 2


class Row(NamedTuple):
    program: Callable[..., Any]  # of whole parameters and a device's rows
    expected: str  # each time that it communicates on parts
    given: int = 0  # the dim of the parameters' parts
    wanted: int = 0  # that of the first result's
    exact: bool = False
    replicated: bool = False  # as in an update: rows are the same on all devices


def summed(x):
    return lax.psum(x, DEVICE_AXIS)


def rows_of(w, x):
    """A scan over a parameter's rows, of which no result is a part."""
    return lax.scan(lambda carry, row: (carry * 2 + row, None), x[0], w)[0]


def closed_over(w, x):
    """A scan that uses a parameter in each step."""
    return lax.scan(lambda carry, row: (w @ carry + row, None), x[0], x)[0]


def in_turn(fn):
    def run(*args):
        with jax.named_scope(tags.IN_TURN):
            return fn(*args)

    return run


def looped(w, x):
    """A loop of which condition and body use a parameter."""
    go_on = lambda carry: carry[0] < jnp.abs(w).sum()  # noqa: E731
    body = lambda carry: (carry[0] + 20, w @ carry[1] + 1)  # noqa: E731
    return lax.while_loop(go_on, body, (jnp.float32(0), x[0]))[1]


def recomputed(w, x):
    """The gradient of a function that is computed again for it."""
    loss = jax.checkpoint(lambda w: ((x @ (w * w)) ** 2).sum())
    return summed(jax.grad(loss)(w))


PROGRAMS = {
    "given": Row(lambda w, x: w, ""),
    "no sum": Row(lambda w, x: w @ w, "gather"),
    # Parameters are gathered before a scan, and a row of them in each step.
    "xs": Row(lambda w, x: (w, rows_of(w, x)), "gather"),
    "xs along 1": Row(lambda w, x: (w, rows_of(w, x)), "scan gather", 1, 1),
    "const": Row(lambda w, x: (w, closed_over(w, x)), "gather"),
    # Micro-batches and a device's towers gather in their own steps.
    "const in turn": Row(in_turn(lambda w, x: (w, closed_over(w, x))), "scan gather"),
    "loop in turn": Row(in_turn(lambda w, x: (w, looped(w, x))),
        "gather, while gather"),
    "loop": Row(lambda w, x: (w, looped(w, x)), "gather"),
    "recomputed": Row(recomputed, "barrier, 2 gather, psum"),
    "exact": Row(lambda w, x: w @ w, "gather, layout", exact=True),
    "exact, xs": Row(lambda w, x: (w, rows_of(w, x)), "scan gather, scan layout", 1, 1,
        exact=True),
    # Of parts alone a part is made, unless the bits are to be those of one device.
    "flipped": Row(lambda w, x: w.T, "", 0, 1),
    "flipped exactly": Row(lambda w, x: w.T, "gather, layout", 0, 1, exact=True),
    # An update computes its own part, of what is given as parts and of what is whole.
    "sgd": Row(lambda w, g: w - 2 * g, "", replicated=True),
    "of all": Row(lambda w, g: w * (g**2).sum(), "", replicated=True),
    "flipped rows": Row(lambda w, g: w - g.T, "gather", replicated=True),
    "of all parameters": Row(lambda w, g: w * (w**2).sum(), "gather", replicated=True),
    "one number": Row(lambda w, g: w + jnp.full((4, 4), g[0, 0]), "", replicated=True),
    "one number, whole": Row(lambda w, g: (w, jnp.full((4, 4), g[0, 0]) @ g), "",
        replicated=True),
    "along another": Row(lambda w, g: w + w.T, "2 gather", replicated=True),
    "half": Row(lambda w, g: (w.astype(jnp.bfloat16) * w).astype(w.dtype), "",
        replicated=True),
    "result is read": Row(lambda w, g: (lambda new: (new, (new**2).sum()))(w - g),
        "gather", replicated=True),
    "scan of an update":
        Row(lambda w, g: lax.scan(lambda c, _: (c - w, c.sum()), g, length=2)[0],
        "gather", replicated=True),
}  # fmt: skip
KINDS = {
    "psum": "psum", "psum_invariant": "psum", "reduce_scatter": "scatter",
    "all_gather": "gather", "optimization_barrier": "barrier",
    "layout_constraint": "layout",
}  # fmt: skip


def communicates(jaxpr):
    for eqn in jaxpr.eqns:
        if kind := KINDS.get(eqn.primitive.name):
            is_half = eqn.invars[0].aval.dtype == jnp.bfloat16
            yield "half " * is_half + kind
        name = {"remat2": "again", "checkpoint": "again"}.get(eqn.primitive.name)
        for inner in jaxprs_in_params(eqn.params):
            for kind in communicates(inner):
                yield f"{name or eqn.primitive.name} {kind}"


def times(jaxpr):
    """Each way that a program communicates, and how often it says so."""
    counts = sorted(Counter(communicates(jaxpr)).items())
    return ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in counts)


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_communicates_where_it_must(name):
    program, expected, given, wanted, exact, replicated = PROGRAMS[name]
    rng = np.random.default_rng(0)
    env = [(DEVICE_AXIS, D)]
    w = rng.integers(-2, 3, (4, 4))
    x = rng.integers(-2, 3, (D, 4, 4))
    w = w.astype(np.float32)
    x = x.astype(np.float32)
    x = np.stack([x[0]] * D) if replicated else x
    _, out = jax.make_jaxpr(program, axis_env=env, return_shape=True)(w, x[0])
    leaves, made = jax.tree.flatten(out)
    dims = (
        (given, None),
        (None, 0 if replicated else None),
        (wanted, *[None] * (len(leaves) - 1)),
    )
    args = jax.tree.structure((w, x))
    shards = Shards(args, dims[0], dims[1], made, dims[2], exact)
    run = shards.around(partial(on_shards, program, replicated=replicated))
    parts = np.stack(np.split(w, D, given))
    jaxpr = jax.make_jaxpr(run, axis_env=env)(parts[0], x[0])
    assert times(jaxpr.jaxpr) == expected

    @jax.jit
    def both(parts, w, x):
        found = jax.vmap(run, axis_name=DEVICE_AXIS)(parts, x)
        of_whole = jax.vmap(program, (None, 0), axis_name=DEVICE_AXIS, axis_size=D)
        return jax.tree.leaves(found), jax.tree.leaves(of_whole(w, x))

    (first, *rest), (want, *others) = both(parts, w, x)
    want = np.broadcast_to(want, (D, 4, 4))[0]
    np.testing.assert_array_equal(np.concatenate(first, wanted), want)
    for x, y in zip(rest, others, strict=True):
        np.testing.assert_array_equal(x, y)


class Loss(NamedTuple):
    fn: Callable[..., Any]  # of parameters [4, 4, 4] and a device's rows
    expected: str  # each time that its derivative communicates
    dim: int = 1  # along which the parameters are split
    is_alone: bool = True  # whether their gradient is sent alone


def layer(h, w):
    return jnp.tanh(h @ w), None


def layers(w, x, of_layer=layer, **how):
    return lax.scan(of_layer, x, w, **how)[0].sum()


def scan(of_layer):
    return partial(layers, of_layer=of_layer)


def once(of_layer):
    return lambda w, x: of_layer(x, w[0])[0].sum()


def half(w):
    return w.astype(jnp.bfloat16)


def of_half(h, w):
    return jnp.tanh(h @ half(w).astype(jnp.float32)), None


def of_both(h, w):
    """A layer that is computed again in part."""
    again = jax.checkpoint(lambda h: jnp.tanh(h @ w.T))
    return again(layer(h, w)[0]), None


def of_factor(h, w):
    """A layer that uses what is computed of parameters alone."""
    return jnp.tanh(h @ (w * w)), None


def of_one(h, w):
    """A layer with parameters that no step of a scan has of its own."""
    return lax.scan(lambda h, _: layer(h, w), h, length=3)[0], None


def by_rule(h, w):
    """A layer with a derivative of its own."""
    ruled = jax.custom_vjp(lambda h, w: h @ w)
    last = lambda kept, g: (g @ kept[1].T, kept[0].T @ g)  # noqa: E731
    ruled.defvjp(lambda h, w: (h @ w, (h, w)), last)
    return jnp.tanh(ruled(h, w)), None


def branch(h, w):
    return lax.cond(h[0, 0] > 0, layer, lambda h, w: layer(2 * h, w), h, w)


def written_out(w, x):
    again = jax.checkpoint(layer)
    return again(again(x, w[0])[0], w[1])[0].sum()


AGAIN = jax.checkpoint(layer)
SAVED = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)
TWICE = "2 scan gather, scan scatter"
LOSSES = {
    "once": Loss(once(layer), "gather, scatter"),
    "twice": Loss(lambda w, x: once(layer)(w, x) * once(layer)(w, 2 * x),
        "2 gather, 2 scatter"),
    "cast": Loss(once(of_half), "half gather, scatter"),
    "turned": Loss(lambda w, x: once(layer)(w.T, x), "gather, scatter"),
    "rule": Loss(once(by_rule), "gather, scatter"),
    "branch": Loss(once(branch), "gather, scatter"),
    "not alone": Loss(once(layer), "gather", is_alone=False),
    "an element": Loss(lambda w, x: x.sum() * w[0, 0, 0], "gather, scatter"),
    "constant": Loss(once(of_one), "gather, scatter"),
    "written out": Loss(written_out, "2 again gather, 2 again scatter, 2 gather"),
    # What a step has gathered is gathered again, and not kept for all steps.
    "scan": Loss(layers, TWICE),
    "scan, not alone": Loss(layers, "2 scan gather", is_alone=False),
    "scan along 0": Loss(layers, "gather, scatter", 0),
    "scan along 2": Loss(layers, TWICE, 2),
    "reversed": Loss(partial(layers, reverse=True), TWICE),
    "jit": Loss(jax.jit(layers), TWICE),
    "of parameters": Loss(scan(of_factor), TWICE),
    "scan of casts": Loss(scan(of_half), "2 scan half gather, scan scatter"),
    "cast before": Loss(lambda w, x: layers(half(w), half(x)).astype(jnp.float32),
        "2 scan half gather, scan scatter"),
    "again": Loss(scan(AGAIN),
        "scan again gather, scan again scatter, scan gather"),
    "again, saved": Loss(scan(SAVED),
        "scan again gather, scan again scatter, scan gather"),
    "again in part": Loss(scan(of_both),
        "scan again gather, scan again scatter, 3 scan gather, scan scatter"),
}  # fmt: skip


def gradient(loss, w, x):
    """The gradient on a device, of its part of the parameters."""
    targets = Targets.of(Shard(w, loss.dim), lambda number, x: loss.is_alone)
    of = lambda values: on_shards(loss.fn, targets.put(values), x)  # noqa: E731
    return targets.gradients(jax.grad(of)(targets.values))


def of_a_device(loss):
    return lambda w, x: jax.tree.leaves(gradient(loss, w, x))[0]


@pytest.fixture(scope="module")
def drawn():
    """Parameters ``[4, 4, 4]``, and each device's rows."""
    rng = np.random.default_rng(0)
    shapes = (4, 4, 4), (D, 4, 4)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.fixture(scope="module")
def derivatives(drawn):
    """By name the devices' gradients, in parts and whole; one program of them all."""
    w, x = drawn
    parts = {name: np.stack(np.split(w, D, x.dim)) for name, x in LOSSES.items()}

    @jax.jit
    def of_all(parts, w, x):
        found = {}
        for name, loss in LOSSES.items():
            run = jax.vmap(of_a_device(loss), axis_name=DEVICE_AXIS)
            whole = jax.vmap(jax.grad(loss.fn), (None, 0))
            found[name] = run(parts[name], x), whole(w, x)
        return found

    return jax.device_get(of_all(parts, w, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_derivative_communicates_where_it_must(name, drawn, derivatives):
    loss = LOSSES[name]
    w, x = drawn
    env = [(DEVICE_AXIS, D)]
    part = np.split(w, D, loss.dim)[0]
    jaxpr = jax.make_jaxpr(of_a_device(loss), axis_env=env)(part, x[0])
    found, each = derivatives[name]
    if loss.is_alone:
        found = np.concatenate(found, loss.dim)
        each = each.sum(0)
    np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-5)
    assert times(jaxpr.jaxpr) == loss.expected


def read(g):
    return g, g.sum()


OWN = {
    "once": (jax.grad(once(layer)), 1, "gather, scatter"),
    "scan": (jax.grad(layers), 1, TWICE),
    "scan along 0": (jax.grad(layers), 0, "gather, scatter"),
    "jit": (jax.jit(jax.grad(layers)), 2, TWICE),
    "again": (jax.grad(scan(AGAIN)), 1, f"scan barrier, {TWICE}"),
    "read": (lambda w, x: read(jax.grad(layers)(w, x)), 1, "2 scan gather, scatter"),
}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", OWN)
def test_an_own_gradient_is_scattered_where_it_must(name):
    """A gradient that a tower takes itself, and of which a step needs the sum."""
    fn, dim, expected = OWN[name]
    rng = np.random.default_rng(0)
    env = [(DEVICE_AXIS, D)]
    w = rng.normal(size=(4, 4, 4))
    x = rng.normal(size=(D, 4, 4))
    parts = np.stack(np.split(w, D, dim))

    def run(w, x):
        found = on_shards(fn, Shard(w, dim), x, sums=lambda out: [dim])
        return jax.tree.leaves(found)[0]

    jaxpr = jax.make_jaxpr(run, axis_env=env)(parts[0], x[0])
    assert times(jaxpr.jaxpr) == expected

    @jax.jit
    def both(parts, w, x):
        found = jax.vmap(run, axis_name=DEVICE_AXIS)(parts, x)
        return found, jax.tree.leaves(jax.vmap(fn, (None, 0))(w, x))[0].sum(0)

    found, want = both(parts, w, x)
    np.testing.assert_allclose(np.concatenate(found, dim), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_what_is_cast_are_added_in_the_bits_of_the_parameter():
    loss = Loss(lambda w, x: (half(w[0]) * half(x)).sum().astype(jnp.float32), "")
    w = jnp.zeros((D, 4, 2, 4))
    each = jnp.array([256.0, 1.0])
    x = jnp.broadcast_to(each[:, None, None], (D, 4, 4))
    run = lambda w, x: gradient(loss, w, x).data  # noqa: E731
    found = jax.vmap(run, axis_name=DEVICE_AXIS)(w, x)
    np.testing.assert_array_equal(found[:, 0], 257)  # in bfloat16 it is 256


def test_what_is_not_written_to_stays_as_it_is():
    def fn(x):
        return lax.scan(lambda c, row: (c + row, jnp.sort(row)), x[0], x)

    program = jax.make_jaxpr(fn)(jnp.ones((4, 3)))
    assert scatters.hold_indexed(program, None) is program


@pytest.mark.slow
def test_calls_are_inlined_and_equal_operations_of_a_computation_merged():
    divided = jax.jit(lambda x, by: jnp.sort(x) / by)

    def fn(x):
        twice = divided(x, x.sum()) * divided(x, x.sum()) + jnp.arange(8.0)
        # A loop has numbers of its own, equal to those before it.
        each = jax.lax.map(lambda row: divided(row, 2.0) + jnp.arange(8.0), x[None])
        return twice + each[0] + jnp.arange(8.0) + jax.lax.cond(x[0] > 0, hard, soft, x)

    hard = jax.jit(jnp.sin)
    soft = jax.jit(lambda x: jnp.sin(x) / jnp.sin(x))
    lowered = jax.jit(fn).lower(jnp.arange(8.0))
    x = np.arange(8, dtype=np.float32)
    inline_and_merge(lowered)
    text = lowered.as_text()
    assert "call @" not in text and text.count("func.func") == 1
    expected = {"divide": 3, "sort": 2, "add across": 1, "iota": 2, "sine": 2}
    names = re.findall(r"stablehlo\.(\w+(?: across)?)", text)
    assert {name: names.count(name) for name in expected} == expected
    np.testing.assert_allclose(lowered.compile()(x), fn(x), rtol=1e-6)


@pytest.mark.slow
def test_a_division_by_what_is_spread_is_a_product_with_its_inverse():
    """Of a number, a column, a row, and of what was spread before; of floats alone."""

    def fn(x, column, number):
        rows = jnp.broadcast_to(jnp.broadcast_to(number, (4,))[None], x.shape)
        each = jax.lax.map(lambda row: row / column[:, 0], x.T)
        half = x.astype(jnp.bfloat16) / number.astype(jnp.bfloat16)
        counts = jax.lax.div((x * 8).astype(int), jnp.full((3, 4), number).astype(int))
        turned = (x + 1j) / (column * 1j)
        return x / number, x / column, x / rows, each, half, counts, turned

    rng = np.random.default_rng(0)
    args = [np.float32(rng.uniform(1, 2, shape)) for shape in ((3, 4), (3, 1), ())]
    lowered = jax.jit(fn).lower(*args)
    inline_and_merge(lowered)
    for found, expected in zip(
        lowered.compile()(*args), jax.jit(fn)(*args), strict=True
    ):
        assert found.dtype == expected.dtype
        rtol = 2.0**-7 if found.dtype == jnp.bfloat16 else 1e-6
        found, expected = (np.asarray(x, "complex64") for x in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=rtol)
    text = lowered.as_text()
    spread = set(re.findall(r"(%\w+) = stablehlo.broadcast_in_dim", text))
    divisions = re.findall(r"stablehlo.divide %\w+, (%\w+) : tensor<(.*)>", text)
    by_spread = [kind for by, kind in divisions if by in spread]
    assert by_spread and all("i32" in x or "complex" in x for x in by_spread)
    assert len(divisions) > len(by_spread)  # one for each array that was spread


# What is known of a primitive stands once, and the lists beside it agree with it.

# No public name of JAX has it, so that nothing is known of its arithmetic.
OF_NEWER = {"mulhi"}


def test_the_proof_has_a_rule_for_each_elementwise_primitive():
    assert ELEMENTWISE <= RULES.keys()


def test_arithmetic_knows_each_of_them():
    plain = {x.name for x in PLAIN}
    assert ELEMENTWISE <= flops._FREE | plain | OF_NEWER


def test_none_is_an_identity():
    assert not ELEMENTWISE & {*IDENTITIES} - {
        "reduce_precision",
        "convert_element_type",
    }


@pytest.mark.parametrize("name", ["erfc", "lgamma", "sinh", "atan2", "tan"])
def test_values_that_are_shards_stay_so_through_them(name):
    fn = getattr(jax.lax, name)
    operands = [jnp.ones(4)] * (2 if name == "atan2" else 1)
    [eqn] = jax.make_jaxpr(fn)(*operands).eqns
    shards = [Shard(x[:2], 0) for x in operands]
    assert is_elementwise(eqn)
    [found] = elementwise(eqn, shards)
    assert isinstance(found, Shard) and found.dim == 0
    np.testing.assert_array_equal(found.data, fn(*[x[:2] for x in operands]))
