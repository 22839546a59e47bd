"""A tower function sees one axis of all towers, wherever they lie."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.extend.core import Literal
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.jaxprs.flow import dependents
from towerjax.jaxprs.interpreter import eqn_context, evaluate_eqn
from towerjax.jaxprs.sites import user_line
from towerjax.jaxprs.tags import LOCAL_AXIS
from towerjax.lowering.tower_axis import over_local_towers


def every_collective(tower, x):
    """One of each kind of what JAX has, of a tower's ``[T, 3]``."""
    axis = tower.axis_names
    T = tower.num_towers
    pairs = [(t, (t + 1) % T) for t in range(T) if t != 1]
    groups = [[t for t in range(T) if t % 2 == odd] for odd in range(min(2, T))]

    def added(carry, _):
        return carry + lax.psum(x * carry, axis), None

    whole = {
        "psum": lax.psum(x, axis),
        "pmean": lax.pmean(x, axis),
        "pmax": jax.jit(lambda x: lax.pmax(x, axis))(x),
        "pmin": jax.vmap(lambda row: lax.pmin(row, axis))(x),
        "all_gather": lax.all_gather(x, axis),
        "dim 1": lax.all_gather(x, axis[0], axis=1),
        "tiled": lax.all_gather(x, axis, tiled=True),
        "T": lax.axis_size(axis[0]) + 0 * lax.psum(1, axis),
    }
    own = {
        "axis_index": lax.axis_index(axis),
        "ppermute": lax.ppermute(x, axis, pairs),
        "all_to_all": lax.all_to_all(x, axis, 0, 0, tiled=True),
        "psum_scatter": lax.psum_scatter(x, axis),
        "tiled scatter": lax.psum_scatter(x, axis, tiled=True),
        "in groups": lax.psum(x, axis, axis_index_groups=groups),
        "gathered in groups": lax.all_gather(x, axis, axis_index_groups=groups),
        "scan": lax.scan(added, x, None, length=2)[0],
        "cond": lax.cond(T > 0, lambda: lax.psum(x, axis), lambda: x) - x,
    }
    return whole, own


def every_collective_in_numpy(x):
    """The same of all towers' ``[T, T, 3]``: what all have, and what each has."""
    T = len(x)
    total = x.sum(0)
    once = x + (x * x).sum(0)
    whole = {
        "psum": total,
        "pmean": x.mean(0),
        "pmax": x.max(0),
        "pmin": x.min(0),
        "all_gather": x,
        "dim 1": x.swapaxes(0, 1),
        "tiled": x.reshape(T * T, 3),
        "T": T,
    }
    moved = np.roll(x, 1, axis=0) * (np.arange(T) != 2 % T)[:, None, None]
    odd = np.arange(T) % 2
    own = {
        "axis_index": np.arange(T),
        "ppermute": moved if T > 1 else x,
        "all_to_all": x.swapaxes(0, 1),
        "psum_scatter": total,
        "tiled scatter": total[:, None],
        "in groups": np.stack([x[odd == o].sum(0) for o in odd]),
        "gathered in groups": np.stack([x[odd == o] for o in odd]),
        "scan": once + (x * once).sum(0),
        "cond": total - x,
    }
    return whole, own


@pytest.mark.slow
@pytest.mark.parametrize("T, D", [(1, 1), (6, 1), (6, 2)])
def test_every_collective_is_over_all_towers(T, D):
    x = np.random.default_rng(0).normal(size=(T, T, 3))
    rows = tj.PerTower(x.astype(np.float32))
    found = mirrored(T, D).call_for_each_tower(every_collective, rows)

    for got, wanted in zip(found, every_collective_in_numpy(x), strict=True):
        for name in wanted:
            value = got[name].values if isinstance(got[name], tj.PerTower) else None
            if value is None:  # proved the same on all
                value = np.broadcast_to(got[name], np.shape(wanted[name]))
            np.testing.assert_allclose(
                value, wanted[name], rtol=2e-6, atol=2e-5, err_msg=name
            )


@jax.custom_batching.custom_vmap
def contradicted(x):
    return 2 * x


@contradicted.def_vmap
def _(axis_size, in_batched, x):
    return 3 * x, in_batched[0]


def _first(b, tower):
    first, *_ = tower.axis_names
    assert next(iter(tower.axis_names)) == tower.axis_names[0] == first
    return b - lax.pmean(b.mean(0, keepdims=True), first)


def _by_their_number(b, tower):
    if len(tower.axis_names) == 2:
        return b * b[0, 0]
    return b - lax.pmean(b.mean(0, keepdims=True), tower.axis_names)


# What a loss makes of its rows, and what NumPy makes of all rows.
OF_ROWS = {
    "first": (_first, lambda x: x - x.mean(0)),
    "by their number": (_by_their_number, lambda x: x - x.mean(0)),
    "written out": (lambda b, tower: b - lax.pmean(b.mean(0, keepdims=True), "batch"),
        lambda x: x - x.mean(0)),
    "a rule that contradicts": (lambda b, tower: contradicted(b), lambda x: 2 * x),
    "such a rule in a scan": (lambda b, tower: lax.map(contradicted, b),
        lambda x: 2 * x),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, D", [(6, 2), pytest.param(6, 1, marks=pytest.mark.slow), (1, 1)]
)
def test_a_step_is_the_same_wherever_towers_lie(T, D):
    """Each way has parameters of its own, so that one program holds them all."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(18, 3)) + np.arange(18)[:, None] / 4
    w = rng.uniform(size=18)
    params = {name: np.float32([0.5, -1, 2 + i]) for i, name in enumerate(OF_ROWS)}

    def loss_fn(params, batch, tower):
        errors = sum(
            (OF_ROWS[name][0](batch["x"], tower) @ own) ** 2
            for name, own in params.items()
        )
        return tj.Weighted((errors * batch["w"]).sum(), batch["w"].sum())

    step = tj.build_train_step(
        loss_fn, optax.sgd(0.01), mirrored(T, D, axis_name="batch")
    )
    batch = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    state, metrics = step(step.init(params), batch)

    loss = 0
    for name, own in params.items():
        # With a single tower's single name, the second way is the rows as they are.
        y = OF_ROWS[name][1](x)
        errors = y @ own.astype(np.float64)
        loss += (w @ errors**2) / w.sum()
        grads = 2 * (w * errors) @ y / w.sum()
        np.testing.assert_allclose(
            state.params[name], own - 0.01 * grads, rtol=3e-6, err_msg=name
        )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, T, D, jit",
    [("jvp", 4, 2, True), ("fwd", 4, 1, True), ("bwd", 4, 2, False)]
    + [("bwd", 1, 1, True)],
)
def test_derivatives_of_ones_own_go_through_a_call(rule, T, D, jit, batched=False):
    def added_at_next(axis, x):
        pairs = [(t, (t + 1) % T) for t in range(T)]
        return lax.psum(x, axis) + 2 * lax.ppermute(x, axis, pairs)

    def call_of(axis):
        if rule == "jvp":
            call = jax.custom_jvp(lambda x: added_at_next(axis, x))
            call.defjvp(lambda x, dx: (call(*x), added_at_next(axis, 3 * dx[0])))
            return call
        call = jax.custom_vjp(lambda x: x + 0 * lax.psum(x, axis))
        if rule == "fwd":
            fwd = lambda x: (x, added_at_next(axis, x))  # noqa: E731
            call.defvjp(fwd, lambda total, g: (total * g,))
        else:
            call.defvjp(lambda x: (x, None), lambda _, g: (added_at_next(axis, g),))
        return call

    def total(rows):
        def tower_fn(tower, x):
            call = call_of(tower.axis_names)
            out = jax.vmap(call)(x[None])[0] if batched else call(x)
            return (tower.id + 1.0) * out

        return strategy.call_for_each_tower(tower_fn, tj.PerTower(rows)).values.sum()

    strategy = mirrored(T, D)
    rows = np.arange(T) + 3.0
    counts = np.arange(T) + 1.0
    got = (jax.jit if jit else lambda f: f)(jax.grad(total))(jnp.float32(rows))
    expected = {
        "jvp": 3 * (counts.sum() + 2 * np.roll(counts, -1)),
        "fwd": counts * (rows.sum() + 2 * np.roll(rows, 1)),
        "bwd": counts.sum() + 2 * np.roll(counts, 1),
    }
    np.testing.assert_allclose(got, expected[rule], rtol=1e-6)


@pytest.mark.skipif("jax_custom_jvp3" not in jax.config.values, reason="of a later JAX")
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rule", ["jvp", "fwd", "bwd"])
def test_rules_of_the_kind_to_come_are_refused(rule, batched):
    names = "jax_custom_jvp3", "jax_custom_vjp3"
    before = {name: jax.config.values[name] for name in names}
    try:
        for name in names:
            jax.config.update(name, True)
        with pytest.raises(ValueError, match="Turn these options off"):
            test_derivatives_of_ones_own_go_through_a_call(rule, 4, 2, True, batched)
    finally:
        for name in names:
            jax.config.update(name, before[name])


# What towers of a device add up: their losses, of which one derivative is taken.

AXES = mirrored(3, 1).placement.axes


def derivative_of_sum(loss, k, w, *own):
    """That of the sum of ``loss(w, *own)`` over ``k`` towers of one device."""
    axes = mirrored(k, 1).placement.axes

    def total(w):
        one = lambda _, own, w: (loss(w, *own), ())  # noqa: E731
        return over_local_towers(one, axes, own, w, stack_sums=False)[0]

    return jax.grad(total)(w)


def sum_of_derivatives(loss, w, *own):
    """Each tower's by itself, added in NumPy."""
    rows = jax.jit(jax.vmap(jax.grad(loss), (None, *[0] * len(own))))(w, *own)
    return np.asarray(rows).sum(0)


def shapes_in(fn, *args):
    traced = jax.make_jaxpr(fn)(*args)
    return {v.aval.shape for eqn in used_eqns(traced.jaxpr) for v in eqn.outvars}


PRODUCTS = {
    "plain": lambda w, x, y: ((x @ w) * y).sum(),
    "turned": lambda w, x, y: -((w.T @ x.T) * y.T).sum(),
    "twice": lambda w, x, y: ((x @ w) * y).sum() + (2 * (x @ w) * y).sum(),
    "rows": lambda w, x, y: jnp.einsum("bi,ij,bj->b", x, w, y).sum(),
    "in heads": lambda w, x, y: (jnp.tensordot(x, w.reshape(6, 5), 1) * y).sum(),
    "used": lambda w, x, y: ((x @ w) ** 2).sum(),
    "beside others": lambda w, x, y: ((x @ w) * y).sum() + (w**2).sum(),
}


@pytest.mark.slow
def test_the_derivative_of_a_sum_of_products_is_one_product():
    k = 3
    rng = np.random.default_rng(0)
    whole = lambda *shape: rng.integers(-5, 5, shape).astype(np.float32)  # noqa: E731
    x = whole(k, 4, 6)
    y = whole(k, 4, 5)
    w = whole(6, 5)
    for name, loss in PRODUCTS.items():
        run = functools.partial(derivative_of_sum, loss, k)
        expected = sum_of_derivatives(loss, w, x, y)
        np.testing.assert_array_equal(jax.jit(run)(w, x, y), expected, name)
        assert shapes_in(run, w, x, y).isdisjoint({(k, 6, 5), (k, 5, 6)}), name


CONVOLUTIONS = {
    "plain": {"padding": "SAME"},
    "strided": {"padding": "VALID", "window_strides": (2, 1), "rhs_dilation": (1, 2)},
    "transposed": {"padding": ((1, 1), (0, 2)), "lhs_dilation": (2, 2)},
    "turned": {"padding": "SAME", "dimension_numbers": ("HWCN", "IOHW", "NCHW")},
    "of its own features": {"padding": "SAME", "feature_group_count": 2},
    "groups": {"padding": "SAME", "batch_group_count": 2},
}


def convolved(kernel, images, **options):
    turn = options.pop("dimension_numbers", ("NHWC", "HWIO", "NHWC"))
    kernel = kernel[:, :, ::2] if "feature_group_count" in options else kernel
    kernel = jnp.moveaxis(kernel, (0, 1, 2, 3), [turn[1].index(x) for x in "HWIO"])
    images = jnp.moveaxis(images, (0, 1, 2, 3), [turn[0].index(x) for x in "NHWC"])
    options = {"window_strides": (1, 1), "dimension_numbers": turn} | options
    return (lax.conv_general_dilated(images, kernel, **options) ** 2).sum()


LOOKS = {
    "indexed": lambda t, ids: t[ids],
    "taken": lambda t, ids: jnp.take(t, ids, axis=0),
    "embedded": lambda t, ids: nn.Embed(5, 3).apply({"params": {"embedding": t}}, ids),
    "of a column": lambda t, ids: t[ids, 1][:, None],
    "twice": lambda t, ids: jnp.take(t, ids, axis=0) + t[ids[::-1]] ** 2,
    "one alone": lambda t, ids: t.at[ids[:1]].get(
        unique_indices=True, indices_are_sorted=True
    ),
    "each of its own": lambda t, ids: jax.vmap(lambda row, i: row[i][None])(
        t, ids[:5] % 3
    ),
}


@pytest.mark.slow
def test_the_derivative_of_a_sum_of_convolutions_and_of_rows_is_one():
    k = 3
    rng = np.random.default_rng(0)
    images = rng.integers(-3, 4, (k, 2, 7, 6, 4)).astype(np.float32)
    ids = rng.integers(-5, 5, (k, 8)).astype(np.int32)
    rows = rng.integers(-5, 6, (k, 8, 3)).astype(np.float32)
    whole = lambda shape: rng.integers(-2, 3, shape).astype(np.float32)  # noqa: E731
    table = whole((5, 3))
    kernel = whole((3, 3, 4, 6))
    losses = {
        name: (functools.partial(convolved, **options), kernel, (images,))
        for name, options in CONVOLUTIONS.items()
    }
    for name, look in LOOKS.items():

        def of_rows(t, ids, rows, look=look):
            found = look(t, ids)
            return (found * rows[: len(found), :1]).sum()

        losses[name] = of_rows, table, (ids, rows)
    for name, (loss, w, own) in losses.items():
        run = functools.partial(derivative_of_sum, loss, k)
        expected = sum_of_derivatives(loss, w, *own)
        np.testing.assert_array_equal(jax.jit(run)(w, *own), expected, name)
        if name != "groups":  # whose rows are the groups
            assert (k, *w.shape) not in shapes_in(run, w, *own), name


def layer(x, w):
    return x @ w - x, None


def in_layers(x, w, layer=layer):
    for i in range(len(w)):
        x, _ = layer(x, w[i])
    return x


def nested(x, w):
    return lax.scan(jax.checkpoint(lambda x, w: lax.scan(layer, x, w)), x, w[:, None])[
        0
    ]


def masked(x, with_keys):
    mask = jax.random.bernoulli(with_keys[1], 0.5, x.shape)
    return layer(x, with_keys[0])[0] * mask, None


def with_keys(x, w):
    keys = jax.random.split(jax.random.key(0), len(w))
    return lax.scan(jax.checkpoint(masked), x, (w, keys))[0]


def by_hand(x, w, order):
    """In NumPy: the gradients by w, and the loss, of numbers that nothing rounds."""
    inputs = [x]
    slope = x + 1
    grad = np.zeros_like(w)
    for i in order:
        inputs.append(inputs[-1] @ w[i] - inputs[-1])
    loss = (inputs.pop() * slope).sum()
    for i in reversed(order):
        grad[i] += inputs.pop().T @ slope
        slope = slope @ w[i].T - slope
    return grad, loss


ORDERS = {"backwards": (2, 1, 0), "one for all": (0, 0, 0)}
LAYERS = {
    "with keys": with_keys,
    "jit": lambda x, w: in_layers(x, w, jax.jit(layer)),
    "jit of several": jax.jit(lambda x, w: in_layers(x, w, jax.jit(layer))),
    "checkpoint": lambda x, w: in_layers(x, w, jax.checkpoint(layer)),
    "without a barrier": lambda x, w: in_layers(
        x, w, jax.checkpoint(layer, prevent_cse=False)
    ),
    "scan": lambda x, w: lax.scan(layer, x, w)[0],
    "backwards": lambda x, w: lax.scan(layer, x, w, reverse=True, unroll=2)[0],
    "one for all": lambda x, w: lax.scan(lambda x, _: layer(x, w[0]), x, None, 3)[0],
    "nested": nested,
}


@pytest.mark.slow
def test_a_derivative_holds_no_gradient_of_each_tower_in_other_programs():
    """Each tower's gradient would be ``[k, 3, 5, 5]``, or ``[k, 5, 5]`` a layer."""
    k = 4
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (k, 6, 5)).astype(np.float32)
    w = rng.integers(-1, 2, (3, 5, 5)).astype(np.float32)
    for name, layers in LAYERS.items():

        def loss(w, x, layers=layers):
            return (layers(x, w) * (x + 1)).sum()

        run = functools.partial(derivative_of_sum, loss, k)
        compiled = jax.jit(run).lower(w, x).compile()
        found = compiled(w, x)
        text = compiled.as_text()
        assert f"f32[{k},5,5]" not in text and f"f32[{k},3,5,5]" not in text, name
        if name == "with keys":
            expected = sum_of_derivatives(loss, w, x)
        else:
            order = ORDERS.get(name, (0, 1, 2))
            each = [by_hand(rows, w, order)[0] for rows in x]
            expected = np.sum(each, axis=0)
        np.testing.assert_array_equal(found, expected, name)


def numbered(tower, x):
    """A number of the tower, made inside of the loop, of nothing that differs."""

    def body(c, _):
        c = c + lax.axis_index(tower.axis_names)
        return c, c * x.sum()

    return lax.scan(body, jnp.int32(0), None, length=3)


def kept_in_a_ref(tower, x):
    def body(c, row):
        ref = jax.new_ref(jnp.float32(0))
        ref[...] = row
        c = 2 * c + jax.freeze(ref)
        return c, c

    return lax.scan(body, jnp.float32(0), x)


def of_a_literal(tower, x):
    return lax.scan(lambda c, row: (2 * c + row, c - row), 0.0, x)


def added_to(tower, x):
    return lax.scan(lambda c, _: (c + 3, 2 * c), x[0], None, length=4)


SCANNED = [numbered, kept_in_a_ref, of_a_literal, added_to]


@pytest.mark.slow
def test_what_only_the_body_of_a_scan_makes_differ_is_each_towers():
    """All in one program, on one device, on two, and with a tower on each."""
    x = np.arange(16, dtype=np.float32)

    def tower_fn(state, batch, tower):
        found = {}
        for scanned in SCANNED:
            c, ys = scanned(tower, batch)
            made = {"sum": tj.Sum(ys.sum()), "end": tj.Sum(c), "own": tj.PerTower(c)}
            found |= {f"{scanned.__name__} {key}": x for key, x in made.items()}
        return found

    def metrics(D, T=4):
        # A sum of what towers go through in turn depends on their number.
        how = {"audit": False}
        step = tj.build_step(tower_fn, lambda s, m: (s, m), mirrored(T, D), **how)
        return step(step.init(np.float32(0)), x[: 4 * T])[1]

    alone = metrics(4)
    for scanned in SCANNED:
        assert len(set(alone[f"{scanned.__name__} own"].tolist())) == 4
    for D in (1, 2):
        jax.tree.map(np.testing.assert_array_equal, metrics(D), alone)
    of_one = metrics(1, T=1)
    for scanned in SCANNED:
        own = alone[f"{scanned.__name__} own"][0]  # of the same rows, as tower 0
        assert np.array_equal(of_one[f"{scanned.__name__} end"], own)


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 2])
def test_a_carry_that_alone_is_summed_and_only_added_to(D):
    def tower_fn(state, batch, tower):
        c, _ = lax.scan(lambda c, _: (c + state.params, None), batch[0], None, 3)
        return {"sum": tj.Sum(c)}

    step = tj.build_step(
        tower_fn,
        lambda state, merged: (state, merged),
        mirrored(4, D),
        audit=False,  # it depends on which row is a tower's first
    )
    _, metrics = step(step.init(np.float32(2)), np.arange(8, dtype=np.float32))
    assert metrics["sum"] == (0 + 2 + 4 + 6) + 4 * 3 * 2


def test_what_is_traced_again_keeps_its_names_and_line():
    def named(x):
        with jax.named_scope("layer"):
            return jnp.sin(x)

    [old] = jax.make_jaxpr(named)(1.0).jaxpr.eqns

    def again(x):
        with jax.named_scope("outer"), eqn_context(old):
            x = lax.cos(x)
        return evaluate_eqn(old, [x])[0]

    cos, sin = jax.make_jaxpr(again)(1.0).jaxpr.eqns
    assert str(cos.source_info.name_stack) == "outer/layer"
    assert str(sin.source_info.name_stack) == "layer"
    assert user_line((cos, None)) == user_line((sin, None)) == user_line((old, None))


def test_what_differs_depends_on_a_value_or_on_the_axis():
    def fn(own, same):
        number = lax.axis_index(LOCAL_AXIS).astype(jnp.float32)
        inside = jax.jit(lambda x: x + lax.psum(x, LOCAL_AXIS))
        return own + 1, 2 * same, own * same, same + number, jnp.sin(inside(same)), own

    body = jax.make_jaxpr(fn, axis_env=[(LOCAL_AXIS, 2)])(1.0, 2.0).jaxpr
    differ = dependents(body, body.invars[:1], LOCAL_AXIS)
    found = [x in differ for x in body.outvars]
    assert found == [True, False, True, True, True, True]


def cast(x, dtype=jnp.bfloat16):
    return x.astype(dtype)


def of_bits(p, batch):
    return batch @ cast(p["w"]) + cast(p["b"])


def of_bits_in_a_scan(p, batch):
    layer = lambda x, _: (x @ jnp.diag(cast(p["w"])) + cast(p["b"]), None)  # noqa: E731
    return lax.scan(layer, batch, None, length=1)[0].sum(1) - 3 * cast(p["b"])


def of_bits_in_a_jit(p, batch):
    return jax.jit(jax.checkpoint(of_bits))(p, batch)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cast", "held", "scan", "jit"])
def test_a_gradient_of_fewer_bits_is_added_up_in_32(how):
    """In bfloat16 a sum stands still at 256 ones: of 4,096 rows half would be lost."""
    model = {"scan": of_bits_in_a_scan, "jit": of_bits_in_a_jit}.get(how, of_bits)
    x = np.random.default_rng(0).uniform(size=(4096, 4)).astype(np.float32)

    def loss_fn(p, batch, tower):
        return tj.Weighted.mean(cast(model(p, cast(batch)), jnp.float32), tower.weight)

    dtype = jnp.bfloat16 if how == "held" else np.float32
    p = {"w": jnp.zeros(4, dtype), "b": jnp.zeros((), dtype)}
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)
    expected = {"w": rounded.mean(0), "b": 1.0}
    grads = []

    def update_fn(state, merged):
        return state, {"w": merged["grads"].value["w"], "b": merged["grads"].value["b"]}

    for towers, devices in (64, 1), (64, 2):
        strategy = mirrored(towers, devices)
        step = tj.build_step(tj.of_loss(loss_fn), update_fn, strategy, audit=False)
        grads.append(step(step.init(p), x)[1])
    for found in grads:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-3)
    jax.tree.map(np.testing.assert_array_equal, *grads)


def test_what_towers_round_is_rounded_by_each():
    """Rounded once, the sum would depend on how many towers share a device."""

    def one(tower_id, own):
        return (own[0].T @ own[1]).astype(jnp.float32), ()

    run = lambda *x: over_local_towers(one, AXES, x, stack_sums=False)[0]  # noqa: E731
    traced = jax.make_jaxpr(run)(*np.ones((2, 3, 4, 5), jnp.bfloat16))
    made = {str(v.aval) for eqn in used_eqns(traced.jaxpr) for v in eqn.outvars}
    assert "bfloat16[3,5,5]" in made


@pytest.mark.slow
def test_a_loop_that_looks_at_its_sum_is_each_towers_own():
    """A carry that is used, counters, what is no sum, and sums of other dtypes."""
    k = 3
    x = np.arange(1.0, 25, dtype=np.float32).reshape(3, 4, 2)

    def one(tower_id, x):
        def body(carry, x):
            number, seen, added, twice = carry
            seen = seen + seen * x[0]
            added = (x + added) + 2.0 + number.astype(x.dtype)[None]
            twice = twice + twice + x[1]
            return (number + 1, seen, added, twice), (x[0] * number, number, tower_id)

        start = (jnp.int32(1), jnp.float32(1), x[0], jnp.float32(2))
        (number, *sums), (rows, numbers, ids) = lax.scan(body, start, x)
        twice_as_many = jax.jit(lambda number: 2 * number)(number)
        return [*sums, rows, twice_as_many], (numbers, ids, number)

    run = lambda x: over_local_towers(one, AXES, x, stack_sums=False)  # noqa: E731
    sums, kept = jax.jit(jax.vmap(one))(np.arange(k), x)
    expected = [np.asarray(x).sum(0) for x in sums], kept
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(x), expected)


def used_eqns(jaxpr):
    """Those that something needs, which XLA leaves in."""
    needed = set(jaxpr.outvars)
    found = []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            found.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return found


@pytest.mark.slow
def test_a_parameter_may_be_used_more_often_than_calls_nest():
    added = jax.linear_transpose(lambda w: [w] * 1000, np.float32(0))
    tower_fn = lambda tower_id, x: (added([x] * 1000), ())  # noqa: E731
    run = lambda x: over_local_towers(tower_fn, AXES, x, stack_sums=False)  # noqa: E731
    traced = jax.make_jaxpr(run)(np.ones(3, np.float32))
    assert traced.out_avals[0].shape == ()


@pytest.mark.slow
def test_a_whole_step_is_differentiated_where_towers_meet_in_a_rule():
    def tower_fn(state, batch, tower):
        def rule(x, dx):
            return call(*x), tower.reduce(tj.Reduction.SUM, dx[0]) + 3 * dx[0]

        call = jax.custom_jvp(lambda x: x)
        call.defjvp(rule)
        return {"total": tj.Sum(call(state.params * batch).sum())}

    def total(params):
        state = dataclasses.replace(before, params=params)
        return step.fn(state, np.arange(8.0, dtype=np.float32))[1]["loss"]

    def update_fn(state, merged):
        return state, {"loss": merged["total"].value}

    step = tj.build_step(tower_fn, update_fn, mirrored(4, 2))
    before = step.init(np.float32(2))
    # Of each row 4 towers' sums and 3 times its own: 7 * (0 + 1 + ... + 7).
    assert jax.jit(jax.grad(total))(before.params) == 196
