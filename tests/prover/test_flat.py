"""What a flat program says of its values holds when the program runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from towerjax.prover.equality.kinds.constants import ConstValue
from towerjax.prover.equality.loops.flat import Flat

W = np.float32([0.3, -0.2, 0.5])
X = np.float32([[1.0, 2.0, -1.0], [0.5, -3.0, 2.0], [4.0, 0.1, 1.0], [0, 0, 0]])
FLAGS = np.float32([1, 1, 0, 0])


def loss(w, x, flags):
    return (jnp.tanh(x @ w) ** 2 * flags).sum() / flags.sum()


def over_calls(optimizer, of=loss, calls=4):
    def program(w, x, flags):
        state = optimizer.init(w)
        for i in range(calls):
            grads = jax.grad(of)(w, x[i:], flags[i:])  # the last ones divide 0 by 0
            updates, state = optimizer.update(grads, state, w)
            w = optax.apply_updates(w, updates)
        return w, state

    return program


def finite_loss(w, x, flags):
    return (jnp.tanh(x @ w) ** 2 * flags).mean()


def quotients(w, x, flags):
    norm = jnp.sqrt((x**2).sum(1))
    guarded = jnp.where(norm < 0.5, x.sum(1), x.sum(1) / norm * 0.5)
    other_way = jnp.where(norm < 0.5, x.sum(1) / norm, x.sum(1))
    unguarded = x.sum(1) / norm
    positive = x.sum(1) / (norm + 1e-3)
    maximum = x.sum(1) / jnp.maximum(flags.sum(), 1.0)
    roots = jnp.sqrt(x), jnp.sqrt(jnp.exp(x)), jnp.sqrt(x * x)
    powers = w**-2 * flags[:3], jnp.square(x), (x + 1) ** 3
    label = (x[:, 0] > 0).astype(jnp.int32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(x[:, :2], label)
    outside = x[4:5].sum() + jnp.take(x, 4, axis=0)
    by_count = jnp.take(x, (flags.sum() + 2).astype(int), axis=1)
    by_label = jnp.take(x, label + 3, axis=0)
    turned = 1j * x
    of_complex = (1 / (turned * turned + jnp.exp(0 * x))).real
    indexed = entropy, outside, by_count, by_label
    divided = of_complex, guarded, other_way, unguarded, positive, maximum
    return [0.0 * term + 1.0 for term in (*indexed, *divided, *roots, *powers)]


def decided(w, x, flags):
    count = jnp.zeros((), jnp.int32)
    total = jnp.zeros_like(w)
    for row in x:
        count = count + 1
        grads = lax.cond(count % 2 == 0, lambda r: r * 2, lambda r: -r, row)
        total = total + (grads - total) / count.astype(jnp.float32)
        total = jnp.where(count > 3, total, total * 0.5)
    return total, count, lax.cond(w[0] > 0, lambda: 1.0, lambda: 2.0)


def sums(w, x, flags):
    a, b, c, d = x * jnp.cos(x)
    mean = a
    for i, row in enumerate((b, c, d), 2):
        mean += (row - mean) / i
    half = -(a - b) * 0.5 + 0.25 * c
    return mean, half, mean * 3 - half, jnp.exp(mean) + a


PROGRAMS = {
    "decided": decided,
    "sums": sums,
    "quotients": quotients,
    "apply_every": over_calls(optax.chain(optax.apply_every(4), optax.sgd(0.1))),
    "adam": over_calls(optax.MultiSteps(optax.adam(0.1), 4)),
    "a finite adam": over_calls(optax.MultiSteps(optax.adam(0.1), 2), finite_loss),
    "clip": over_calls(
        optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)), 2
        ),
        finite_loss,
    ),
}


def run(flat, args):
    """Evaluate each equation of a flat program, as its operands say."""
    values = dict(zip(flat.ins, args, strict=True))

    def read(x):
        return x.value if isinstance(x, ConstValue) else values[x]

    for node in flat.nodes:
        results = node.eqn.primitive.bind(*map(read, node.ins), **node.eqn.params)
        several = node.eqn.primitive.multiple_results
        values |= zip(node.outs, results if several else [results], strict=True)
    return values, [*map(read, flat.outs)]


@functools.cache
def flat_of(name):
    """The flat program, the program, its arguments, and the values and results."""
    closed = jax.make_jaxpr(PROGRAMS[name])(W, X, FLAGS)
    flat = Flat(closed, (4, 1))
    return flat, closed, *jax.jit(lambda *args: run(flat, args))(W, X, FLAGS)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flat_program_has_the_results_of_the_program(name):
    flat, closed, _, results = flat_of(name)
    program = jax.jit(
        lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    )
    expected = program(W, X, FLAGS)
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-6, atol=0)
    assert len(flat.nodes) < 2 * len(closed.jaxpr.eqns) + 400


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_zeros_are_0_and_finite_values_are_finite(name):
    flat, _, values, _ = flat_of(name)
    for value, array in values.items():
        array = np.asarray(array)
        if value in flat.zeros:
            assert not np.any(array), value
        if flat.is_finite(value):
            assert np.isfinite(array).all(), value


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", ["sums", "decided", "a finite adam"])
def test_factors_give_the_value(name):
    flat, _, values, _ = flat_of(name)
    floats = [v for v, x in values.items() if x.shape == (3,) and v not in flat.ins]
    count = 0
    for bases in zip(floats, floats[1:], floats[2:], strict=False):
        for value, factors in flat.linear_in(bases).items():
            parts = zip(factors, bases, strict=True)
            expected = sum(f * np.float64(values[base]) for f, base in parts)
            np.testing.assert_allclose(values[value], expected, 1e-4, 1e-6)
            count += value not in bases
    assert count > 3


def test_what_may_divide_by_0_is_not_finite():
    flat, *_, results = flat_of("quotients")
    names = "entropy outside by_count by_label of_complex guarded other_way unguarded"
    names += (
        " positive maximum root root_of_exp root_of_square negative_power square power"
    )
    is_zero = [place in flat.zeros for place in zeros_of(flat)]
    told = dict(zip(names.split(), is_zero, strict=True))
    nan = {
        name for name, x in zip(told, results, strict=True) if not jnp.isfinite(x).all()
    }
    assert nan == {
        "outside",
        "by_count",
        "by_label",
        "of_complex",
        "other_way",
        "unguarded",
        "root",
    }
    unknown = {name for name, is_zero in told.items() if not is_zero}
    assert unknown == nan | {"negative_power"}


def zeros_of(flat):
    """The values that are multiplied by 0, before 1 is added."""
    made = {out: node for node in flat.nodes for out in node.outs}
    return [
        made[out].ins[0] if made[out].eqn.primitive.name == "add" else out
        for out in flat.outs
    ]
