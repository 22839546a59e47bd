"""Meshes, Refs and hidden code of a program's own: right, or refused before a run."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import towerjax as tj

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
PARAMS = {"w": np.ones(4, np.float32)}
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"x": X, "y": np.arange(8, dtype=np.float32)}
AXIS = "towerjax_tower"


REPLICATED = P()


def on_mesh(fn, ins=REPLICATED, outs=REPLICATED, size=4, check_vma=False):
    """``fn`` on a mesh of its own, which is none of the step's."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("mine",))
    specs = {"in_specs": ins, "out_specs": outs, "check_vma": check_vma}
    return jax.shard_map(fn, mesh=mesh, **specs)


def plain(w, batch, tower):
    return batch["x"] @ w


def build(of_tower=plain, update=None, **strategy):
    def loss_fn(params, batch, tower):
        errors = of_tower(params["w"], batch, tower) - batch["y"]
        return tj.Weighted.mean(errors**2, tower.weight)

    optimizer = optax.sgd(0.1)
    if update is not None:
        change = optax.stateless(lambda updates, _: jax.tree.map(update, updates))
        optimizer = optax.chain(change, optimizer)
    strategy = tj.Mirrored(**{"devices": FOUR, **strategy})
    return tj.build_train_step(loss_fn, optimizer, strategy)


def trained(step):
    state, _ = step(step.init(PARAMS), BATCH)
    return [np.asarray(x.data) for x in state.params["w"].addressable_shards]


def one_tower(update=None):
    # A plain optimizer on one device; no part of the proof.
    grad = jax.grad(lambda w: jnp.mean((X @ w - BATCH["y"]) ** 2))(PARAMS["w"])
    return PARAMS["w"] - 0.1 * (2.0 * grad if update else grad)


def own_part(g):
    """Each device computes its quarter, and gathers."""

    def of_device(g):
        part = lax.dynamic_slice_in_dim(g, lax.axis_index("mine"), 1)
        return lax.all_gather(2.0 * part, "mine", axis=0, tiled=True)

    return on_mesh(of_device)(g)


def by_specs(g):
    return on_mesh(lambda g: 2.0 * g, P("mine"), P("mine"), check_vma=True)(g)


def by_norm(g):
    """A norm of parts, added up over devices."""

    def of_device(g):
        square = lax.psum(jnp.sum(g**2), "mine")
        return 2.0 * g * square / lax.psum(jnp.sum(g**2), "mine")

    return on_mesh(of_device, P("mine"), P("mine"))(g)


def mean_of_equals(g):
    return on_mesh(lambda g: 2.0 * lax.pmean(g, "mine"))(g)


def along_an_axis_of_one(g):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("mine", "alone"))
    specs = {"in_specs": P("alone"), "out_specs": REPLICATED, "check_vma": False}
    return jax.shard_map(lambda g: 2.0 * g, mesh=mesh, **specs)(g)


def by_pmap(g):
    return jax.pmap(lambda g: 2.0 * g)(g)


@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [own_part, by_specs, by_norm, mean_of_equals, along_an_axis_of_one, by_pmap],
)
def test_an_update_sharded_by_hand_is_that_of_one_tower(update):
    step = build(update=update)
    step.check(PARAMS, BATCH)
    for copy in trained(step):
        np.testing.assert_allclose(copy, one_tower(update), rtol=1e-5)


# Updates whose copies would differ, or be counted for each device, at "# here".


def by_device(g):
    own = on_mesh(lambda g: g * (1 + lax.axis_index("mine")))  # here
    return own(g)


def own_part_alone(g):
    of_device = lambda g: 2.0 * g[0] * jnp.ones(4)  # noqa: E731  # here
    return on_mesh(of_device, P("mine"))(g)


def added_up(g):
    return on_mesh(lambda g: lax.psum(g, "mine"))(g)  # here


def added_up_with_vma(g):
    return on_mesh(lambda g: lax.psum(g, "mine"), check_vma=True)(g)  # here


def hanging(g):
    def of_device(g):
        odd = lax.axis_index("mine") % 2 == 1
        g = lax.cond(odd, lambda: lax.pmean(g, "mine"), lambda: g)  # here
        return lax.pmax(g, "mine")

    return on_mesh(of_device)(g)


def in_a_loop(g):
    own = on_mesh(lambda g: g * (1 + lax.axis_index("mine")))  # here
    return lax.fori_loop(0, 2, lambda i, g: own(g), g)


def by_pmap_of_one(g):
    own = lambda g: g * (1 + lax.axis_index("mine"))  # noqa: E731  # here
    copies = jnp.broadcast_to(g, (4, 4))
    return jax.pmap(own, axis_name="mine", out_axes=None)(copies)


@pytest.mark.few_fast(4)
@pytest.mark.parametrize(("update", "text"), [
    (by_device, "drift apart: result 0 depends on axis_index at"),
    (own_part_alone, "drift apart: result 0 depends on what in_specs split at"),
    (added_up, "which multiplies it by their number, at"),
    (added_up_with_vma, "which multiplies it by their number, at"),
    (hanging, "would hang"),
    (in_a_loop, "drift apart: result 0 depends on axis_index at"),
    (by_pmap_of_one, "drift apart: result 0 depends on what in_specs split at"),
])  # fmt: skip
@pytest.mark.parametrize("run", [False, True])
def test_an_update_whose_copies_would_differ_is_refused(update, text, run):
    step = build(update=update)
    with pytest.raises(tj.ReplicationError) as caught:
        trained(step) if run else step.check(PARAMS, BATCH)
    lines, first = inspect.getsourcelines(update)
    [here] = [first + i for i, line in enumerate(lines) if "# here" in line]
    assert text in str(caught.value) and "'mine'" in str(caught.value)
    assert f"test_proof_meshes.py:{here}" in str(caught.value)


def test_a_step_as_a_function_is_proved_too():
    step = build(update=by_device)
    state = step.init(PARAMS)
    with pytest.raises(tj.ReplicationError, match="drift apart"):
        jax.jit(step.fn)(state, step.place_batch(BATCH))


# Code that a primitive hides, or holds in an object.


class Holder:
    def __init__(self, inside):
        self.inside = inside


def hiding(name, code):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **params: x)
    primitive.def_impl(code)
    mlir.register_lowering(primitive, mlir.lower_fun(code, multiple_results=False))
    batching.defvectorized(primitive)
    ad.primitive_jvps[primitive] = lambda x, t, **p: (primitive.bind(*x, **p), t[0])
    return primitive


SUMMING = hiding("towerjax_test_summing", lambda x, code: lax.psum(x, AXIS))
HOLDING = hiding(
    "towerjax_test_holding",
    lambda x, held: jax.core.eval_jaxpr(held.inside.jaxpr, held.inside.consts, x)[0],
)


def held(x):
    by_id = lambda x: x * (1 + lax.axis_index(AXIS))  # noqa: E731
    return HOLDING.bind(x, held=Holder(jax.make_jaxpr(by_id, axis_env=[(AXIS, 4)])(x)))


def index_map(x):
    def kernel(x, out):
        out[...] = x[...]

    own = pl.BlockSpec((1,), lambda i: ((i + lax.axis_index(AXIS)) % 4,))
    same = pl.BlockSpec((1,), lambda i: (i,))
    how = {"grid": (4,), "in_specs": [own], "out_specs": same, "interpret": True}
    return pl.pallas_call(kernel, out_shape=x, **how)(x)


def kernel_by_id(x):
    def kernel(x, out):
        out[...] = x[...] * (1 + lax.axis_index(AXIS))

    return pl.pallas_call(kernel, out_shape=x, interpret=True)(x)


def of_params(fn):
    return lambda w, batch, tower: batch["x"] @ (w + fn(lax.stop_gradient(w)))


@functools.cache
def ref():
    return jax.new_ref(jnp.ones(4))


def ragged(w, batch, tower):
    n = len(batch["y"])
    matrices = w[None, :, None] * jnp.ones((2, 4, 1))
    return lax.ragged_dot(batch["x"], matrices, jnp.array([1, n - 1], np.int32))[:, 0]


def uniform(w, batch, tower):
    noise = lax.rng_uniform(0.0, lax.stop_gradient(batch["y"][0]), batch["y"].shape)
    return batch["x"] @ w + noise


def constrained(w):
    mesh = Mesh(np.array(jax.devices()[:4]), ("mine",))
    return lax.with_sharding_constraint(w, NamedSharding(mesh, P()))


SHARED = {"devices": ["cpu:0"], "towers": 4}
TOWERS = {
    "shard_map": (of_params(lambda w: on_mesh(lambda w: w)(w)), {}),
    "shard_map, one device": (of_params(lambda w: on_mesh(lambda w: w)(w)), SHARED),
    "pmap": (of_params(lambda w: jax.pmap(lambda w: w)(w)), {}),
    "constraint": (of_params(constrained), {}),
    "held": (of_params(held), {}),
    "held, one device": (of_params(held), SHARED),
    "index map": (of_params(index_map), {}),
    "kernel, one device": (of_params(kernel_by_id), SHARED),
    "in turn, index map": (of_params(index_map), {**SHARED, "tower_loop": "scan"}),
    "in turn, kernel": (of_params(kernel_by_id), {**SHARED, "tower_loop": "scan"}),
    "ref": (of_params(lambda w: w + ref()[...]), {}),
    "ref, one device": (of_params(lambda w: w + ref()[...]), SHARED),
    "ragged, one device": (ragged, SHARED),
    "uniform, one device": (uniform, SHARED),
}
SAYS = {
    "shard_map": "A tower runs on one device, but shard_map at",
    "pmap": "A tower runs on one device, but shard_map at",
    "constraint": "A tower runs on one device, but sharding_constraint at",
    "held": "inside towerjax_test_holding",
    "index map": "inside pallas_call",
    "kernel": "names the towers' axis inside pallas_call",
    "in turn": "names the towers' axis, but tower_loop='scan'",
    "ref": "closes over a Ref, which 4 towers would",
    "ragged": r"ragged_dot_general at \S*test_proof_meshes.py.*tower_loop='scan'",
    "uniform": r"rng_uniform at \S*test_proof_meshes.py.*tower_loop='scan'",
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", TOWERS)
def test_what_towers_cannot_run_is_refused(name):
    ref()  # made outside of the step
    of_tower, strategy = TOWERS[name]
    step = build(of_tower, **strategy)
    text = SAYS[name.split(",")[0]]
    with pytest.raises(ValueError, match=text):
        step.check(PARAMS, BATCH)
    with pytest.raises(ValueError, match=text):
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize(("update", "strategy", "text"), [
    (lambda g: SUMMING.bind(g, code=print), {}, "must not communicate: towerjax_te"),
    (held, {}, "update must not communicate: axis_index at"),
    (index_map, {}, "update must not communicate"),
    (lambda g: g + ref()[...], {}, "update closes over a Ref"),
    (by_specs, SHARED, "The step has 1 device, but .* runs on 4"),
])  # fmt: skip
def test_what_an_update_cannot_run_is_refused_by_check(update, strategy, text):
    ref()  # made outside of the step
    with pytest.raises(ValueError, match=text):
        build(update=update, **strategy).check(PARAMS, BATCH)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"devices": ["cpu:0"]}, SHARED])
def test_a_mesh_of_the_one_device_runs_in_a_tower(strategy):
    alone = on_mesh(lambda w: lax.psum(0 * w, "mine"), size=1)
    step = build(of_params(alone), **strategy)
    step.check(PARAMS, BATCH)
    np.testing.assert_allclose(trained(step)[0], one_tower(), rtol=1e-5)
