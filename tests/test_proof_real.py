"""Real programs pass the proof: none of them is refused, and all train."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import towerjax as tj

R = tj.Reduction
B, D = 8, 4
X = np.random.default_rng(0).normal(size=(B, 6, D)).astype(np.float32)
BATCH = {"x": X, "y": X.sum(axis=(1, 2)), "n": np.arange(B, dtype=np.int32) % 5}
W = {"w": np.eye(D, dtype=np.float32), "v": np.linspace(0.5, 1, D, dtype=np.float32)}

PROGRAMS = {}  # name -> a function that makes (params, loss_fn)


def mean(losses, tower):
    return tj.Weighted.mean(losses.reshape(losses.shape[0], -1).mean(1), tower.weight)


def of_rows(fn, params=W):
    """A program of ``fn(params, x) -> outputs [b, ...]``, whose square is the loss."""

    def loss_fn(params, batch, tower):
        return mean(fn(params, batch["x"]) ** 2, tower)

    PROGRAMS[fn.__name__] = lambda: (params, loss_fn)
    return fn


def program(fn):
    PROGRAMS[fn.__name__] = lambda: (W, fn)
    return fn


@of_rows
def library_attention(p, x):
    q = (x @ p["w"])[:, :, None]
    return jax.nn.dot_product_attention(q, x[:, :, None], x[:, :, None], is_causal=True)


@of_rows
def lstm_by_scan(p, x):
    def cell(carry, x):
        h, c = carry
        gates = (x + h) @ p["w"]
        c = jax.nn.sigmoid(gates) * c + jnp.tanh(gates)
        return (jax.nn.sigmoid(gates) * jnp.tanh(c), c), h

    return lax.scan(cell, (x[:, 0], x[:, 0]), x.swapaxes(0, 1))[0][0]


@of_rows
def remat_with_names(p, x):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def fn(p, x):
        hidden = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ p["w"]), "hidden")
        return hidden @ p["v"]

    return jax.checkpoint(fn, policy=policy)(p, x)


@of_rows
def scan_of_remat(p, x):
    layer = jax.checkpoint(lambda x, _: (jnp.tanh(x @ p["w"]), None))
    return lax.scan(layer, x, None, length=3)[0]


@of_rows
def while_on_own_rows(p, x):
    x = lax.stop_gradient(x)
    big = lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, x)
    return big @ p["v"]


@of_rows
def while_on_parameters(p, x):
    v = lax.stop_gradient(p["v"])
    v = lax.while_loop(lambda v: jnp.sum(v) > 1.0, lambda v: v / 2, v)
    return x @ (p["v"] + v)


@of_rows
def associative_scan(p, x):
    return lax.associative_scan(jnp.add, x @ p["w"], axis=1)


@of_rows
def linear_solve(p, x):
    return jnp.linalg.solve(p["w"] + 3 * jnp.eye(D), x.reshape(-1, D).T).T.reshape(
        x.shape
    )


@of_rows
def minimal_residuals(p, x):
    a = p["w"] @ p["w"].T + jnp.eye(D)
    return jax.scipy.sparse.linalg.gmres(lambda v: v @ a, x, restart=2, maxiter=2)[0]


@of_rows
def eigenvalues(p, x):
    values = jnp.linalg.eigvalsh(p["w"] + p["w"].T + jnp.diag(jnp.arange(4.0)))
    return x * values[None, None]


@of_rows
def singular_values(p, x):
    return jnp.linalg.svd(x @ p["w"], compute_uv=False)


@of_rows
def triangular(p, x):
    a = jnp.tril(p["w"]) + jnp.eye(D)
    return jax.scipy.linalg.solve_triangular(a, x[0].T, lower=True).T[None] * x


@of_rows
def fourier(p, x):
    return jnp.abs(jnp.fft.rfft(x @ p["w"], axis=1)) + 1e-3


@of_rows
def scatter(p, x):
    index = jnp.argmax(x, axis=-1)
    return jnp.zeros((len(x), D)).at[jnp.arange(len(x))[:, None], index].add(x @ p["v"])


@of_rows
def convolution(p, x):
    return lax.conv_general_dilated(x.swapaxes(1, 2), p["w"][:, :, None], (1,), "SAME")


@of_rows
def pooling(p, x):
    return nn.max_pool(x @ p["w"], (2,), (2,)) + nn.avg_pool(x, (2,), (2,))


@of_rows
def logsumexp(p, x):
    return jax.nn.logsumexp(x @ p["w"], axis=-1) + lax.cumlogsumexp(x @ p["v"], axis=1)


@of_rows
def second_derivative(p, x):
    return jax.vmap(jax.grad(lambda row: jnp.sum(jnp.tanh(row @ p["w"]) ** 2)))(x)


@of_rows
def forward_mode(p, x):
    return jax.jvp(lambda x: jnp.tanh(x @ p["w"]), (x,), (x,))[1]


@of_rows
def special_functions(p, x):
    y = jnp.abs(x @ p["w"]) + 1
    return jax.scipy.special.gammaln(y) + lax.erf(y) + jax.scipy.special.digamma(y)


@of_rows
def interpreted_kernel(p, x):
    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    twice = pl.pallas_call(kernel, out_shape=shape, interpret=True)
    return twice(lax.stop_gradient(x)) @ p["v"]


@of_rows
def mutable_array(p, x):
    ref = jax.new_ref(jnp.zeros(x.shape[:2]))
    ref[...] = x @ p["v"]
    return ref[...]


@program
def ctc(p, batch, tower):
    logits, labels = batch["x"] @ p["w"], batch["n"][:, None] % 3 + 1
    pads = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return mean(optax.ctc_loss(logits, pads[0], labels, pads[1]), tower)


@program
def contrastive(p, batch, tower):
    own = (batch["x"] @ p["w"]).mean(1)
    every = tower.all_gather(own, axis=0)
    first = tower.id * len(own)
    labels = first + jnp.arange(len(own))
    logits = own @ every.T
    return mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), tower)


@program
def balanced_experts(p, batch, tower):
    gates = jax.nn.softmax(batch["x"].mean(1) @ p["w"])
    share = lax.pmean(gates.mean(0), tower.axis_names)
    aux = jnp.sum(share**2)
    return mean((gates @ p["v"]) ** 2 + aux, tower)


@program
def weighted_totals(p, batch, tower):
    losses = (batch["x"] @ p["v"]).mean(1) ** 2
    total = tower.reduce(R.SUM, (losses * tower.weight).sum())
    count = tower.reduce(R.SUM, tower.weight.sum())
    metrics = {
        "mean": total / count,
        "towers": lax.psum(1, tower.axis_names),
        "ones": lax.psum(jnp.ones(2), tower.axis_names),
        "norm": tower.reduce(R.MEAN, jnp.sum(p["v"] ** 2)),
        "share": lax.psum(p["v"] / tower.num_towers, tower.axis_names),
        "divided": lax.psum(p["v"], tower.axis_names) / tower.num_towers,
        "product": lax.psum(p["v"], tower.axis_names) * (1 / tower.num_towers),
        "first": tower.reduce(R.ONLY_FIRST_TOWER, p["v"]),
        "root": jnp.sqrt(lax.pmean(jnp.sum(p["v"] ** 2), tower.axis_names)),
        "ratio": lax.psum(p["v"], tower.axis_names)
        / lax.psum(jnp.sum(p["v"]), tower.axis_names),
        "all": lax.psum(jnp.isfinite(p["v"]).all() * 1, tower.axis_names) > 3,
        "largest": lax.pmax(lax.stop_gradient(p["v"]), tower.axis_names),
    }
    return tj.TowerOutput(mean(losses, tower), metrics)


@program
def synchronised_statistics(p, batch, tower):
    y = batch["x"] @ p["w"]
    center = lax.pmean(y.mean((0, 1)), tower.axis_names)[None, None]
    spread = lax.pmean(((y - center) ** 2).mean((0, 1)), tower.axis_names)
    scale = lax.rsqrt(spread + 1e-5) * p["v"]
    return mean((y - center) * scale[None, None], tower)


@program
def shared_total_in_the_loss(p, batch, tower):
    total = lax.psum((batch["x"] @ p["v"]).sum(), tower.axis_names)
    return mean((batch["x"] @ p["v"]) ** 2 + 1e-3 * total**2, tower)


@program
def merged(p, batch, tower):
    m = (batch["x"] @ p["v"]).mean()
    total = tower.merge_call(lambda strategy, m: strategy.reduce(R.SUM, m), m)
    return mean((batch["x"] @ p["v"]) ** 2 * (1 + 0.1 * total), tower)


# Flax models: linen by init and apply, nnx by split and merge.


def drawn(shapes):
    """Values by NumPy: Flax's own take a second to compile."""
    rng = np.random.default_rng(0)

    def draw(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return rng.uniform(0.1, 0.5, x.shape).astype(x.dtype)

    return jax.tree.map(draw, shapes)


def linen(name, model, train=None, collections=()):
    """A linen model; only its parameters are trained, its statistics stay."""
    kwargs = {} if train is None else {"train": train}

    def make():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        init = functools.partial(model.init, **kwargs)
        variables = drawn(jax.eval_shape(init, keys, X[:2]))

        def loss_fn(params, batch, tower):
            rngs = {"dropout": tower.rng}
            given = {**variables, "params": params}
            out = model.apply(
                given, batch["x"], rngs=rngs, mutable=list(collections), **kwargs
            )
            return mean(out[0] ** 2, tower)

        return variables["params"], loss_fn

    PROGRAMS[name] = make


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.LayerNorm()(nn.relu(nn.Dense(8)(x)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(nn.GroupNorm(2)(x))


linen("linen_deep", Deep(), train=True, collections=["batch_stats"])
linen("linen_attention", nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=4))
linen("linen_lstm", nn.RNN(nn.OptimizedLSTMCell(4)))


def stateful(name, make):
    """An nnx model; its other variables are copied, and their changes dropped."""

    def split():
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graph, *variables = nnx.split(abstract, nnx.Param, ...)
        params, rest = jax.tree.map(jnp.asarray, drawn(variables))

        def loss_fn(params, batch, tower):
            model = nnx.merge(graph, params, rest, copy=True)
            return mean(model(batch["x"]) ** 2, tower)

        return params, loss_fn

    PROGRAMS[name] = split


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.dense(self.norm(x))))


stateful("nnx_block", Block)


def test_the_proof_calls_no_callback():
    called = []

    def loss_fn(params, batch, tower):
        jax.debug.callback(called.append, tower.id)
        return mean(batch["x"] @ params["v"], tower)

    tj.build_train_step(loss_fn, optax.sgd(1.0), tj.Mirrored(towers=4)).check(W, BATCH)
    assert not called


FAST = """lstm_by_scan linear_solve ctc interpreted_kernel weighted_totals nnx_block
shared_total_in_the_loss balanced_experts merged synchronised_statistics""".split()


# A norm of each tower's rows, and iterations whose steps depend on all of them.
MEET = "linen_deep minimal_residuals nnx_block".split()


def assert_passes(name):
    params, loss_fn = PROGRAMS[name]()
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=4))
    told = pytest.warns(UserWarning, match="Rows of a tower meet")
    with told if name in MEET else contextlib.nullcontext():
        found = step.check(params, BATCH).analysis
    assert set(found.outputs) == {None}
    assert found.hangs == () and found.repeats == () and found.collectives


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", FAST)
def test_a_real_program_passes(name):
    assert_passes(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(FAST)))
def test_every_real_program_passes(name):
    assert_passes(name)


# On one tower there is nothing to prove: four must give its numbers.
RUN = ["ctc", "linear_solve"]


@pytest.mark.slow
def test_what_passes_trains_as_one_tower():
    made = {name: PROGRAMS[name]() for name in RUN}
    params = {name: own for name, (own, _) in made.items()}

    def loss_fn(params, batch, tower):
        losses = [fn(params[name], batch, tower) for name, (_, fn) in made.items()]
        return sum(losses[1:], losses[0])

    trained = []
    for towers in (1, 4):
        strategy = tj.Mirrored([f"cpu:{i}" for i in range(towers)])
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, BATCH)
        trained.append(jax.device_get((state.params, metrics["loss"])))
    after, _ = trained[0]
    for name, own in params.items():
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[name], own)
        assert max(jax.tree.leaves(moved)) > 1e-3, name
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *trained
    )
