"""Batch norm over towers is that of the whole masked batch, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_norms import CLOSE, EPSILON, IN, OPTIONS, OUT, RATE, batch, moments, moved
from flax import linen, nnx
from layouts import mirrored as towers

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm as LinenNorm
from towerjax.layers.batch_norm.nnx import TowerBatchNorm as NnxNorm


def start():
    rng = np.random.default_rng(7)
    params = {
        "w": rng.normal(size=(IN, OUT)),
        "scale": np.array([1.0, 2.0, 0.5]),
        "bias": np.array([0.0, 0.5, -1.0]),
    }
    return {name: value.astype(np.float32) for name, value in params.items()}


def stats_of(width=OUT):
    return {"mean": np.zeros(width, np.float32), "var": np.ones(width, np.float32)}


def apply_linen(params, stats, h, tower, mask=None, **options):
    running = None if options.get("statistics") == "frozen" else False
    norm = LinenNorm(use_running_average=running, **OPTIONS, **options)
    own = {"scale": params["scale"], "bias": params["bias"]}
    variables = {"params": own, "batch_stats": stats}
    y, updated = norm.apply(variables, h, tower, mask=mask, mutable=["batch_stats"])
    return y, updated.get("batch_stats", stats)


def apply_nnx(params, stats, h, tower, mask=None, **options):
    norm = NnxNorm(h.shape[-1], **OPTIONS, **options, rngs=nnx.Rngs(0))
    values = {"scale": params["scale"], "bias": params["bias"], **stats}
    for name, value in values.items():
        getattr(norm, name)[...] = jnp.asarray(value)
    y = norm(h, tower, mask=mask)
    return y, {"mean": norm.mean[...], "var": norm.var[...]}


APPLY = {"linen": apply_linen, "nnx": apply_nnx}


@functools.cache
def built(strategy, **options):
    """A step whose statistics are tower-local, for several tests.

    Later, smaller batches are padded to its program.
    """
    options = dict(options)
    step_options = {}
    for name in ("remainder", "micro_batches", "audit"):
        if name in options:
            step_options[name] = options.pop(name)

    def loss_fn(params, rows, tower):
        h = rows["x"] @ params["w"]
        y, stats = apply_linen(
            params, tower.local, h, tower, mask=rows["weight"], **options
        )
        losses = (jnp.tanh(y) * rows["c"]).sum(-1)
        loss = tj.Weighted.mean(losses, tower.weight * rows["weight"])
        return tj.TowerOutput(loss, local=stats)

    return tj.build_train_step(loss_fn, optax.sgd(RATE), strategy, **step_options)


def trained(strategy, batches, **options):
    options.setdefault("remainder", "pad")
    step = built(strategy, **options)
    local = tj.TowerLocal(stats_of(), tj.Reduction.MEAN)
    state = step.init(start(), local=local)
    losses = []
    for rows in batches:
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, state


# Statistics that are mirrored, of one tower, or frozen


def mirrored_metric_step(strategy, statistics):
    def loss_fn(params, rows, tower):
        h = rows["x"] @ params["w"]
        y, stats = apply_linen(params, stats_of(), h, tower, statistics=statistics)
        loss = tj.Weighted.mean((y * rows["c"]).sum(-1), tower.weight)
        return tj.TowerOutput(loss, metrics=dict(stats))

    return tj.build_train_step(loss_fn, optax.sgd(RATE), strategy)


@pytest.mark.slow
def test_synchronised_statistics_are_proved_the_same_on_all_towers():
    strategy = towers(4096, 1)
    rows = jax.eval_shape(lambda: batch(8192))
    proof = mirrored_metric_step(strategy, "synchronised").check(start(), rows)
    names = [c.primitive for c in proof.analysis.collectives]
    # Two forward, two backward, and those of the step itself.
    assert names.count("psum") >= 4
    with pytest.raises(tj.ReplicationError, match=r"metrics\['mean'\]"):
        mirrored_metric_step(strategy, "local").check(start(), rows)


@pytest.mark.slow
def test_local_statistics_are_those_of_each_tower_and_send_nothing():
    rows = batch(11)
    how = {"statistics": "local", "audit": False}  # which depend on the towers
    _, state = trained(towers(4, 2), [rows], **how)
    h = rows["x"].astype(np.float64) @ start()["w"].astype(np.float64)
    for tower in range(4):
        own = slice(tower * 3, min(tower * 3 + 3, 11))
        mean, var = moments(h[own], rows["weight"][own].astype(np.float64))
        got = {name: x[tower] for name, x in state.local.value.items()}
        np.testing.assert_allclose(got["mean"], 0.1 * mean, **CLOSE)
        np.testing.assert_allclose(got["var"], 0.9 + 0.1 * var, **CLOSE)


@pytest.mark.slow
def test_towers_that_never_meet_take_local_statistics():
    strategy = towers(4, 1, tower_loop="scan")
    rows = batch(12)
    local = tj.TowerLocal(stats_of(), tj.Reduction.MEAN)

    def check(**options):
        step = built(strategy, **options)
        step.check(jax.eval_shape(lambda p: step.init(p, local=local), start()), rows)

    with pytest.raises(ValueError, match="tower.reduce"):
        check()
    check(statistics="local")


@pytest.mark.slow
def test_an_empty_tower_keeps_its_local_statistics():
    how = {"statistics": "local", "audit": False}  # which depend on the towers
    losses, state = trained(towers(4, 2), [batch(9)], **how)
    assert np.isfinite(losses).all()
    np.testing.assert_array_equal(state.local.value["mean"][3:], np.zeros((1, OUT)))
    np.testing.assert_array_equal(state.local.value["var"][3:], np.ones((1, OUT)))
    assert (np.asarray(state.local.value["mean"][:3]) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", APPLY)
def test_frozen_statistics_normalise_and_stay(kind):
    stats = {"mean": np.float32([1, 2, 3]), "var": np.float32([4, 1, 9])}
    h = jnp.asarray(batch(5)["x"][:, :OUT])
    apply = functools.partial(APPLY[kind], statistics="frozen")
    y, after = jax.jit(lambda h: apply(start(), stats, h, None))(h)
    expected = (h - stats["mean"][None]) / np.sqrt(stats["var"] + 1e-3)[None]
    expected = expected * start()["scale"][None] + start()["bias"][None]
    np.testing.assert_allclose(y, expected, **CLOSE)
    for name, value in stats.items():
        np.testing.assert_array_equal(after[name], value)


# As Flax's own, where there is one tower and no mask


CUBE = np.random.default_rng(0).normal(1, size=(6, 5, 5)).astype(np.float32)


def rising(key, shape, dtype):
    return jnp.linspace(-1, 1, shape[0], dtype=dtype)


near = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6)
CALLS = [dict(use_scale=False, axis=1), dict(use_bias=False, momentum=0.5, epsilon=0.1)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [*CALLS, dict(dtype=jnp.bfloat16)])
def test_on_one_tower_it_is_the_layer_of_linen(options):
    x = jnp.asarray(CUBE)
    init = dict(bias_init=rising)
    ours = LinenNorm(use_running_average=False, **options, **init)
    theirs = linen.BatchNorm(use_running_average=False, **options, **init)

    @jax.jit
    def both(x):
        made = theirs.init(jax.random.key(1), x), ours.init(jax.random.key(1), x, None)
        variables = made[0]
        first = theirs.apply(variables, x, mutable=["batch_stats"])
        second = ours.apply(variables, x, None, mutable=["batch_stats"])
        merged = {**variables, **first[1]}
        own, other = (n.clone(use_running_average=True) for n in (ours, theirs))
        evaluated = own.apply(merged, x, None), other.apply(merged, x)
        return made, first, second, evaluated

    made, (y, updated), (z, moved), evaluated = both(x)
    jax.tree.map(np.testing.assert_array_equal, *made)
    assert z.dtype == y.dtype
    tolerance = dict(rtol=4e-6, atol=4e-6)
    if y.dtype != jnp.float32:
        tolerance = dict(rtol=float(jnp.finfo(y.dtype).eps), atol=4e-6)
    np.testing.assert_allclose(np.float32(z), np.float32(y), **tolerance)
    jax.tree.map(near, moved, updated)
    np.testing.assert_allclose(*map(np.float32, evaluated), **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, dtype", [(CALLS[0], jnp.float32), (CALLS[1], jnp.bfloat16)]
)
def test_on_one_tower_it_is_the_layer_of_nnx(options, dtype):
    x = jnp.asarray(CUBE, dtype)
    init = dict(bias_init=rising)
    ours = NnxNorm(5, rngs=nnx.Rngs(0), **options, **init)
    theirs = nnx.BatchNorm(5, rngs=nnx.Rngs(0), **options, **init)
    both = nnx.jit(lambda theirs, ours: (theirs(x), ours(x, None)))
    for train in (True, True, False):
        for norm in (ours, theirs):
            norm.train() if train else norm.eval()
        y, z = both(theirs, ours)
        assert z.dtype == y.dtype
        np.testing.assert_allclose(z, y, rtol=4e-6, atol=4e-6)
    mine, other = (nnx.to_pure_dict(nnx.state(n)) for n in (ours, theirs))
    assert jax.tree.structure(mine) == jax.tree.structure(other)
    jax.tree.map(near, mine, other)


def test_running_statistics_have_the_derivative_of_the_batchs():
    """By which an evaluation is differentiated through the steps before it."""
    x = batch(5)["x"]
    moves = batch(5, 1)["x"]

    @jax.jit
    def followed(x, moves):
        return jax.jvp(lambda x: moved(x, momentum=0.75)[1], (x,), (moves,))[1]

    found = followed(x, moves)
    (x, moves) = map(np.float64, (x, moves))
    np.testing.assert_allclose(found["mean"], 0.25 * moves.mean(0), **CLOSE)
    of_var = 2 * ((x - x.mean(0)) * moves).mean(0)
    np.testing.assert_allclose(found["var"], 0.25 * of_var, **CLOSE)


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_the_whole_batch():
    """A penalty on the gradient by the input, with an empty tower, in float64."""

    def penalties(x, c, norm):
        def total(x):
            return (jnp.tanh(norm(x)) * c).sum()

        return (jax.grad(total)(x) ** 2).sum(-1)

    def loss_fn(params, rows, tower):
        def norm(x):
            variables = {"params": params, "batch_stats": stats_of()}
            layer = LinenNorm(use_running_average=False, **OPTIONS)
            y, _ = layer.apply(variables, x, tower, mutable=["batch_stats"])
            return jnp.where(tower.weight[:, None] > 0, y, 0)

        x = rows["x"][:, :OUT]
        return tj.Weighted.mean(penalties(x, rows["c"], norm), tower.weight)

    def whole(params, rows):
        def norm(x):
            y = (x - x.mean(0, keepdims=True)) / jnp.sqrt(
                x.var(0, keepdims=True) + EPSILON
            )
            return y * params["scale"][None] + params["bias"][None]

        return penalties(rows["x"][:, :OUT], rows["c"], norm).mean()

    rows = batch(5)
    params = {name: start()[name] for name in ("scale", "bias")}
    with jax.enable_x64(True):
        rows, params = (
            jax.tree.map(lambda x: x.astype(np.float64), v) for v in (rows, params)
        )
        step = tj.build_train_step(
            loss_fn, optax.sgd(1.0), towers(4, 2), remainder="pad"
        )
        state, metrics = step(step.init(params), rows)
        loss, grads = jax.jit(jax.value_and_grad(whole))(params, rows)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        for name, grad in grads.items():
            assert (np.abs(grad) > 1e-3).all()
            found = params[name] - state.params[name]
            np.testing.assert_allclose(found, grad, rtol=1e-9, err_msg=name)


@pytest.mark.slow
def test_a_layer_of_nnx_has_the_attributes_of_flaxs_which_may_be_set():
    x = np.float32([[1.0, 2.0], [5.0, 4.0]])

    @jax.jit
    def called():
        ours = NnxNorm(2, rngs=nnx.Rngs(0))
        theirs = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        view = nnx.view(ours, use_running_average=True)(x, None)
        lacks = vars(theirs).keys() - vars(ours).keys()
        ours.momentum = 0.0
        ours.epsilon = 0.5
        y = ours(x, None)
        mean = ours.mean[...]
        ours.statistics = "all"
        with pytest.raises(ValueError, match="statistics='all' must be one of"):
            ours(x, None)
        assert not lacks
        return view, y, mean

    view, y, mean = called()
    np.testing.assert_allclose(view, x / np.sqrt(1 + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(y, (x - [[3.0, 3.0]]) / np.sqrt([[4.5, 1.5]]), rtol=1e-6)
    np.testing.assert_allclose(mean, [3.0, 3.0], rtol=1e-6)


@pytest.mark.slow
def test_arrays_of_numpy_and_axes_of_numpy_are_taken():
    x = np.arange(12.0).reshape(4, 3)  # float64, which JAX makes float32
    expected = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1) + 1e-5)[:, None]
    linen_norm = LinenNorm(use_running_average=False, axis=np.int64(0))

    @jax.jit
    def both():
        y, _ = linen_norm.init_with_output(jax.random.key(0), x, None)
        return y, NnxNorm(4, axis=np.int64(0), rngs=nnx.Rngs(0))(x, None)

    for found in both():
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5)


# Masks, dtypes, nothing that counts


@pytest.mark.slow
def test_a_mask_of_positions_counts_positions():
    rng = np.random.default_rng(3)
    h = rng.normal(size=(4, 6, OUT)) + np.arange(6)[:, None]
    mask = np.arange(6) < np.array([6, 1, 3, 0])[:, None]
    picked = h[mask]
    x = jnp.asarray(h, jnp.float32)

    @jax.jit
    def masked(mask):
        return apply_linen(start(), stats_of(), x, None, mask=mask)[1]

    for shaped in (mask, mask[..., None]):
        stats = masked(shaped)
        np.testing.assert_allclose(stats["mean"], 0.1 * picked.mean(0), **CLOSE)
        np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * picked.var(0), **CLOSE)
    own = rng.random((4, 6, OUT)) < 0.5
    stats = masked(own)
    expected = [h[..., i][own[..., i]].mean() for i in range(OUT)]
    np.testing.assert_allclose(stats["mean"], 0.1 * np.array(expected), **CLOSE)


@pytest.mark.slow
def test_outside_a_step_the_mask_is_the_weight():
    rows = batch(8)["x"][:, :OUT]
    mask = np.float32([1, 1, 0, 1, 0, 0, 1, 0])

    def tower_fn(tower, x, mask):
        return apply_linen(start(), stats_of(), x, tower, mask=mask)[1]["mean"]

    values = [tj.PerTower(v.reshape(4, 2, *v.shape[1:])) for v in (rows, mask)]
    expected = 0.1 * rows[mask > 0].astype(np.float64).mean(0)
    mean = tj.tf1.with_verbs(towers(4, 2)).call_for_each_tower(tower_fn, *values)
    np.testing.assert_allclose(mean, expected, **CLOSE)
    with pytest.raises(ValueError, match="tower.weight exists only in a step"):
        tj.tf1.with_verbs(towers(4, 2)).call_for_each_tower(
            lambda tower, x: tower_fn(tower, x, None), values[0]
        )


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["synchronised", "local"])
def test_where_nothing_counts_statistics_stay_and_gradients_are_zero(statistics):
    rows = batch(8)
    rows["weight"][:] = 0
    options = {} if statistics == "synchronised" else {"statistics": statistics}
    losses, state = trained(towers(4, 2), [rows], **options)  # of others' programs
    assert losses == [0.0]
    jax.tree.map(np.testing.assert_array_equal, dict(state.params), start())
    np.testing.assert_array_equal(state.local.value["mean"], np.zeros((4, OUT)))
    np.testing.assert_array_equal(state.local.value["var"], np.ones((4, OUT)))


@pytest.mark.slow
def test_where_nothing_counts_a_loss_that_masks_nothing_is_finite():
    def total(x):
        return moved(x, mask=jnp.zeros(8))[0].sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(batch(8)["x"])
    assert np.isfinite(value)
    np.testing.assert_allclose(gradient, np.full((8, IN), 1.0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 0.5, 0.125])  # the same mean, of any weight
def test_a_row_that_does_not_count_may_be_nan(weight):
    x = jnp.array([[1.0], [3.0], [jnp.nan]])
    y, after = jax.jit(moved)(x, mask=jnp.array([weight, weight, 0]))
    np.testing.assert_allclose(y[:2], [[-1.0], [1.0]], rtol=1e-4)
    np.testing.assert_allclose(after["mean"], [0.02], rtol=1e-6)
    np.testing.assert_allclose(after["var"], [1.0], rtol=1e-6)


@pytest.mark.slow
def test_a_mean_far_from_zero_loses_no_digits_of_the_variance():
    x = np.float32(3e4) + np.random.default_rng(0).normal(size=(4096, 2))
    x = x.astype(np.float32)
    _, after = jax.jit(functools.partial(moved, momentum=0.0))(x)
    np.testing.assert_allclose(after["var"], x.astype(np.float64).var(0), rtol=1e-4)


@pytest.mark.slow
def test_sixteen_bit_inputs_have_float32_statistics():
    exact = np.random.default_rng(0).normal(size=(64, OUT)) + 100
    inputs = [exact.astype(dtype) for dtype in (jnp.bfloat16, np.float16)]

    def tower_fn(tower, inputs):
        mask = jnp.ones(8)
        return [apply_linen(start(), stats_of(), x, tower, mask=mask)[1]
                for x in inputs]  # fmt: skip

    rows = tj.PerTower([x.reshape(8, 8, OUT) for x in inputs])
    found = tj.tf1.with_verbs(towers(8, 2)).call_for_each_tower(tower_fn, rows)
    for x, stats in zip(inputs, found, strict=True):
        mean = np.asarray(stats["mean"])
        x = x.astype(np.float64)
        assert mean.dtype == np.float32
        np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * x.var(0), rtol=1e-5)


# Refusals


X = np.ones((4, OUT), np.float32)


def of_nnx(x=X, tower=None, mask=None, **options):
    return NnxNorm(OUT, rngs=nnx.Rngs(0), **options)(x, tower, mask=mask)


def made_by_nnx(**options):
    return NnxNorm(OUT, rngs=nnx.Rngs(0), **options)


REFUSED = [
    *[(lambda make=make: make(statistics="global"), "statistics=.global. must be one")
      for make in (LinenNorm, made_by_nnx)],
    *[(lambda x=x: moved(X, axis=x), "axis=.* is not a dim of an input of 2")
      for x in ("x", None, (), (1, "x"), 1.0, 2)],
    *[(lambda x=x: LinenNorm(momentum=x), "momentum=.* must be a number from 0 to")
      for x in (None, -0.1, 1.5, "0.9", float("nan"))],
    (lambda: made_by_nnx(epsilon=-1), "epsilon=-1 must be a number >= 0"),
    (lambda: of_nnx(axis=(0, 1)), r"features along axis=\(0, 1\) are not"),
    (lambda: of_nnx(np.ones((4, 5))), "features along axis=-1"),
    (lambda: of_nnx(tower=False), "got False as its tower. Write norm"),
    (lambda: of_nnx(use_running_average=None), "use_running_average=None both in"),
    (lambda: of_nnx(mask=np.ones(5)), r"a mask of shape \(5,\) for x of shape"),
    (lambda: of_nnx(mask=np.float32([1, -1, 0, 0])), "must be >= 0"),
    (lambda: of_nnx(mask=[1, -1, 0, 0]), "must be >= 0, but has -1"),
    (lambda: moved(X, axis=(1, -1)), "twice"),
    (lambda: moved(X.astype(np.complex64)), "needs real numbers"),
]  # fmt: skip


@pytest.mark.few_fast(2)
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_be_honoured_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.slow
def test_arguments_of_flax_alone_are_refused():
    for make in (LinenNorm, made_by_nnx):
        with pytest.raises(TypeError, match="axis_name"):
            make(axis_name="batch")
    with pytest.raises(TypeError, match="tower"):
        made_by_nnx()(X)


def test_features_along_the_rows_are_refused_in_a_tower():
    def loss_fn(params, rows, tower):
        stats = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
        own = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
        y, _ = apply_linen(own, stats, rows["x"], tower, axis=0)
        return tj.Weighted.mean(y.sum(-1) * params, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(2, 1))
    with pytest.raises(ValueError, match="dim 0 of x must run over the tower's rows"):
        step(step.init(np.float32(1)), batch(8))


def test_under_frozen_statistics_a_loss_that_counts_padding_is_refused():
    # The others read tower.weight themselves, so that a step cannot tell.
    def loss_fn(params, rows, tower):
        h = rows["x"] @ params["w"]
        y, _ = apply_linen(params, stats_of(), h, tower, statistics="frozen")
        return tj.Weighted.mean(y.sum(-1))

    options = dict(remainder="pad")
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(4, 2), **options)
    with pytest.raises(ValueError, match="tower.weight"):
        step(step.init(start()), batch(11))
