"""How many FLOPs a traced program makes, against counts by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from towerjax.step.report.flops import Flops, flops_of, pairs_along


def traced(f, *args):
    return flops_of(jax.make_jaxpr(f)(*args).jaxpr)


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0)
    return (jnp.einsum("bhqk,bkhd->bqhd", scores, v) ** 2).sum()


def test_attention_by_hand():
    b, q, k, h, d = 2, 5, 6, 3, 4
    draw = np.random.default_rng(2)
    args = [draw.normal(size=(b, n, h, d)).astype(np.float32) for n in (q, k, k)]
    both = jax.value_and_grad(attention, (0, 1, 2))
    one = 2 * b * h * q * k * d
    # Two products forward, and of each both gradients.
    assert traced(both, *args).matmul == 6 * one
    assert traced(attention, *args).matmul == 2 * one


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "stride, padding, groups, dilation",
    [((1, 1), "SAME", 1, 1), ((2, 3), ((2, 0), (1, 2)), 1, 2), ((2, 1), "VALID", 2, 1)],
)
def test_a_convolution_makes_as_much_as_each_of_its_gradients(
    stride, padding, groups, dilation
):
    def f(x, k):
        y = jax.lax.conv_general_dilated(
            x,
            k,
            stride,
            padding,
            rhs_dilation=(dilation, dilation),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return (y**2).sum()

    x, k = jnp.ones((2, 9, 8, 4)), jnp.ones((3, 2, 4 // groups, 6))
    both = jax.value_and_grad(f, (0, 1))
    forward = traced(f, x, k).matmul
    assert traced(both, x, k).matmul == 3 * forward


def test_pairs_in_a_convolution_counted_one_by_one():
    for size, stride, low, high, base, dilation in itertools.product(
        (1, 3), (1, 2), (-1, 0, 2), (0, 3), (1, 2), (1, 2)
    ):
        length, found = 5, 0
        spread = np.zeros((length - 1) * base + 1)
        spread[::base] = 1
        padded = np.pad(spread[max(-low, 0) :], (max(low, 0), high))
        start = 0
        while start + (size - 1) * dilation < len(padded):
            found += int(padded[start : start + size * dilation : dilation].sum())
            start += stride
        window = (length, size, stride, (low, high), base, dilation)
        assert pairs_along(*window) == found, window


def test_loops_and_branches_of_a_trace():
    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)  # a scan: trips are known
        big = lambda x: x @ x @ x  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, big, lambda x: x @ x, x)

    one = 2 * 4**3
    assert traced(f, jnp.ones((4, 4))).matmul == 5 * one

    def endless(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x + 1, x)

    found = traced(endless, jnp.ones((4, 4)))
    assert found.matmul == one
    assert found.notes == ("a loop of unknown trips is counted once",)
    found = traced(jnp.linalg.cholesky, jnp.ones((4, 4)))
    assert found.notes == ("cholesky is not counted",)


def test_other_arithmetic_one_for_each_element():
    def f(x, i):
        return jnp.tanh(x) * 2 + x.sum(), i + i

    found = traced(f, jnp.ones((3, 4)), jnp.arange(5))
    assert (found.matmul, found.other) == (0, 3 * 12 + 11)

    def special(x):
        return jax.scipy.special.gammaln(x), jax.scipy.special.i0e(x)

    assert traced(special, jnp.ones(5)).other == 2 * 5
    lowest = traced(lambda x, i: x.at[i].min(x[i]), jnp.ones((5, 2)), jnp.arange(3))
    assert lowest.other == 3 * 2


@pytest.mark.parametrize("name", ["reduce", "reduce_window_max"])
def test_what_is_not_counted_is_named(name):
    def f(x):
        if name == "reduce":
            return jax.lax.reduce(x, 1.0, lambda a, b: a * b + a, (0,))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "VALID")

    assert traced(f, jnp.ones(8)).notes == (f"{name} is not counted",)


def test_what_no_result_needs_is_not_counted():
    def f(x):
        jax.jit(lambda x: x @ x)(x)
        both = jax.lax.scan(lambda c, _: (c, c @ c), x, None, length=3)
        return both[0] @ x

    assert traced(f, jnp.ones((4, 4))).matmul == 2 * 4**3


def test_flops_of_a_strided_convolution_are_those_of_both_its_gradients():
    def f(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).sum()

    x, k = jnp.ones((2, 9, 8, 3)), jnp.ones((3, 3, 3, 4))
    # 9 rows, outputs at -1..1, 1..3, ..., 7..9: 13 meet; 8 columns: 0..2, .., 6..8: 11.
    by_hand = 2 * 13 * 11 * 2 * 3 * 4
    for argument in (0, 1):
        found = traced(jax.grad(lambda *a: f(*a) ** 2, argument), x, k)
        assert found.matmul == 2 * by_hand
    assert Flops(1, 2, ("a",)) + Flops(3, 4, ("a", "b")) == Flops(4, 6, ("a", "b"))
