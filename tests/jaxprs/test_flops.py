"""The products of a program are counted: as XLA counts them, and by closed formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import towerjax as tj

Flops = tj.tools.Flops


def counted(fn, *args):
    return tj.tools.count_flops(jax.make_jaxpr(fn)(*args))


def ones(*shape):
    return jnp.ones(shape)


# Programs of products alone, without loops: XLA counts the same.


def layers(weights, x):
    for w in weights:
        x = x @ w
    return x


def attention(p, x):
    q, k, v = (jnp.einsum("btd,de->bte", x, w) for w in p)
    scores = jnp.einsum("btd,bsd->bts", q, k)
    return jnp.einsum("bts,bsd->btd", scores, v)


def convolved(kernel, image, **how):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(image, kernel, dimension_numbers=dims, **how)


STRIDED = functools.partial(convolved, window_strides=(2, 2), padding="SAME")
HOLES = functools.partial(convolved, window_strides=(1, 1), lhs_dilation=(1, 2),
    rhs_dilation=(2, 1), padding=((1, 0), (0, 2)), feature_group_count=2)  # fmt: skip
IMAGE = ones(2, 15, 13, 4)

PROGRAMS = {
    "dense layers": (layers, [ones(32, 32)] * 3, ones(16, 32)),
    "attention": (attention, ones(3, 16, 16), ones(3, 24, 16)),
    "a strided convolution": (STRIDED, ones(3, 3, 4, 8), IMAGE),
    "groups and holes": (HOLES, ones(3, 3, 4, 8), ones(2, 15, 13, 8)),
}


def pulled_back(fn):
    def gradient(*args):
        out, pull = jax.vjp(fn, *args)
        return pull(jnp.ones_like(out))

    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("of", [lambda fn: fn, pulled_back], ids=["value", "gradient"])
def test_programs_without_loops_have_the_flops_that_xla_counts(name, of):
    fn, *args = PROGRAMS[name]
    found = counted(of(fn), *args)
    by_xla = jax.jit(of(fn)).lower(*args).cost_analysis()["flops"]
    assert found.uncounted == () and found.recomputed == 0
    assert found.products == pytest.approx(by_xla, rel=0.01)  # it adds, too


def pooled(x):
    shape = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, shape, "VALID").sum()


def chosen(x):
    y = jnp.maximum(x * 2 + 1, x) ** 3
    return jnp.sort(jnp.where(y > x, y, x - y)).sum()


@pytest.mark.parametrize("fn", [pooled, chosen])
@pytest.mark.parametrize("of", [lambda fn: fn, jax.grad], ids=["value", "gradient"])
def test_what_multiplies_no_pairs_counts_nothing_and_is_known(fn, of):
    assert counted(of(fn), IMAGE) == Flops(0, 0)


def test_a_convolution_counts_no_padding():
    """Against a count of pairs in plain Python."""
    kernel = ones(3, 2, 4, 8)
    pairs = 0
    for row in range(8):  # stride 2 of 15 rows, SAME: one row of padding on each side
        pairs += sum(0 <= 2 * row + k - 1 < 15 for k in range(3)) * sum(
            0 <= 2 * column + k < 13 for column in range(7) for k in range(2)
        )
    assert counted(STRIDED, kernel, IMAGE).products == 2 * 2 * 8 * 4 * pairs


# What XLA counts once, or not at all.

X = ones(4, 4)
ONCE = 2 * 4 * 4 * 4


def looped(x, length=10):
    return lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=length)[0]


def mapped(x):
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("i",))
    spec = jax.sharding.PartitionSpec("i")
    run = jax.shard_map(lambda x: x.T @ x, mesh=mesh, in_specs=spec, out_specs=spec)
    return run(x)


def until(x):
    return lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)


def ragged(x):
    return lax.ragged_dot(x, ones(3, 4, 5), jnp.array([1, 0, 3], jnp.int32))


def dead(x):
    return x + jax.jit(lambda x: (x @ x, x * 2))(x)[1]


def of_two(x):
    return lax.cond(x[0, 0] > 0, lambda x: x, lambda x: x @ x @ x, x)


LOOPS = {
    "a scan": (looped, 10),
    "a scan in a scan": (lambda x: lax.scan(lambda x, _: (looped(x, 3), 0), x,
        length=5)[0], 15),
    "a map": (lambda x: lax.map(lambda row: x @ row, x), 1),
    "each device": (mapped, 1 / 4 * 4 / 4 * 4),
    "a while": (until, 1),
    "the larger branch": (of_two, 2),
    "what no result needs": (dead, 0),
    "groups of rows": (ragged, 5 / 4),
    "its derivative": (jax.grad(lambda x: (ones(4, 4) @ x).sum()), 1),
    "a rule of its own": (lambda x: jax.nn.relu(x @ x), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_loops_count_by_their_trips(name):
    fn, times = LOOPS[name]
    found = counted(fn, X)
    assert found.products == times * ONCE
    is_open = name == "a while"
    assert [x[:26] for x in found.uncounted] == ["while counts as one trip, "] * is_open
    assert not is_open or "test_flops.py" in found.uncounted[0]
    assert found.recomputed == 0


def test_what_a_derivative_computes_again_is_told_apart():
    def layer(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w), None

    def loss(x, *, again):
        weights = ones(3, 4, 4)
        body = jax.checkpoint(layer) if again else layer
        return (lax.scan(body, x, weights)[0] ** 2).sum()

    kept = counted(jax.grad(functools.partial(loss, again=False)), X)
    again = counted(jax.grad(functools.partial(loss, again=True)), X)
    assert kept.products == again.products == 2 * 3 * 2 * ONCE
    assert (kept.recomputed, again.recomputed) == (0, 3 * 2 * ONCE)


def test_foreign_code_is_named():
    def fn(x):
        return jnp.linalg.eigh(x)[1] @ x

    found = counted(fn, X)
    assert found.products == ONCE
    assert [x.split()[0] for x in found.uncounted] == ["eigh"]
    assert "test_flops.py" in found.uncounted[0]


def test_flops_are_added_and_multiplied():
    one = Flops(3, 1, ("a",))
    assert one + Flops(30, 10, ("b", "a")) == Flops(33, 11, ("a", "b"))
    assert one.times(4) == Flops(12, 4, ("a",))


# Of a step.


OPTIONS = {}, {"micro_batches": 2}, {"state": "sharded"}, {"tower_loop": "scan"}


def gpt_step(strategy, **options):
    gpt = pytest.importorskip("examples.gpt")
    step = tj.build_train_step(gpt.loss_fn, optax.adam(1e-3), strategy, **options)
    params = jax.eval_shape(gpt.init, jax.random.key(0))
    layers = {k: x for k, x in params["layers"].items() if k != "scales"}
    count = sum(x.size for x in jax.tree.leaves((layers, params["embed"])))
    return step, params, count


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gpt_does_6_n_d(options):
    """Its scanned layers, their derivative, towers and micro-batches counted.

    N parameters are multiplied, D is the number of tokens. Attention adds a little.
    """
    builds = {k: x for k, x in options.items() if k == "micro_batches"}
    others = {k: x for k, x in options.items() if k not in builds}
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), towers=4, **others)
    step, params, count = gpt_step(strategy, **builds)
    batch = {"tokens": np.zeros((16, 17), np.int32)}
    with jax.numpy_rank_promotion("allow"):  # as a user's program runs
        state = step.init(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params))
        flops = step.program(state, batch).flops
    assert flops.products == pytest.approx(6 * count * 16 * 16, rel=0.05)
    assert flops.products > 6 * count * 16 * 16
    # Of the layers' forward passes; no derivative needs the last product of each.
    assert 0.5 < flops.recomputed / (2 * count * 16 * 16) < 1
    assert flops.uncounted == ()
