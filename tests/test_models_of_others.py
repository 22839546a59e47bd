"""Models that a step takes as ``jit(value_and_grad(loss))`` on one device does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import towerjax as tj

ONE_DEVICE = {
    "one": lambda: tj.OneDevice("cpu:0"),
    "four towers": lambda: tj.Mirrored(["cpu:0"], towers=4),
    "in turn": lambda: tj.Mirrored(["cpu:0"], towers=2, local="scan"),
}
SEVERAL_DEVICES = {
    "two devices": lambda: tj.Mirrored(["cpu:0", "cpu:1"], towers=4),
    "by pmap": lambda: tj.Mirrored(["cpu:0", "cpu:1"], executor="pmap"),
}
PLACES = ONE_DEVICE | SEVERAL_DEVICES


def data():
    rng = np.random.default_rng(3)
    params = {"w": rng.normal(size=3), "b": rng.normal(size=3)}
    x, weights = rng.normal(size=(8, 3)), rng.uniform(0.2, 2, size=8)
    return jax.tree.map(np.float32, (params, {"x": x, "weights": weights}))


def expected_of(losses_fn, params, batch):
    """The weighted mean and its gradient, as one device makes them."""

    @jax.jit
    @jax.value_and_grad
    def expected(params):
        losses, weights = losses_fn(params, batch["x"]), batch["weights"]
        return (losses * weights).sum() / weights.sum()

    return jax.device_get(expected(params))


@functools.cache
def expected_of_data(losses_fn):
    return expected_of(losses_fn, *data())


def check_step(losses_fn, strategy, params, batch, expected):
    """A step with SGD is the weighted mean's gradient, as one device makes it."""

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(
            losses_fn(params, batch["x"]), tower.weight * batch["weights"]
        )

    step = tj.build_train_step(loss_fn, optax.sgd(0.5), strategy)
    state, metrics = step(step.init(params), batch)
    loss, grads = expected
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    jax.tree.map(
        lambda before, after, g: np.testing.assert_allclose(
            (before - np.asarray(after)) / 0.5, g, rtol=1e-3, atol=1e-5
        ),
        params,
        state.params,
        grads,
    )


def compares_types(params, x):
    """As Equinox's closure conversion: a function of types, called with values."""

    def fn(params, x):
        return jnp.tanh(x * params["w"] + params["b"]).sum()

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def losses(row):
        converted = jax.make_jaxpr(fn)(*jax.tree.map(shape, (params, row)))
        given = [jax.typeof(leaf) for leaf in jax.tree.leaves((params, row))]
        assert converted.in_avals == given, "different dynamic arguments"
        (out,) = jax.core.eval_jaxpr(
            converted.jaxpr, converted.consts, *jax.tree.leaves((params, row))
        )
        return out**2

    return jax.vmap(losses)(x)


def sharded_by_itself(params, x):
    """A model that says where its activations are, on a mesh of its own."""
    devices = np.array(jax.devices()[:1])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    h = jax.lax.with_sharding_constraint(jnp.tanh(x * params["w"][None]), sharding)
    return ((h + params["b"][None]) ** 2).sum(axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, model",
    [(name, compares_types) for name in ONE_DEVICE]
    + [("four towers", sharded_by_itself)],
)
def test_one_device_takes_what_jit_takes(name, model):
    check_step(model, ONE_DEVICE[name](), *data(), expected_of_data(model))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", SEVERAL_DEVICES)
def test_types_are_those_of_one_device_on_several(name):
    expected = expected_of_data(compares_types)
    check_step(compares_types, SEVERAL_DEVICES[name](), *data(), expected)


def test_a_check_takes_what_jit_takes():
    params, batch = data()

    def loss_fn(params, batch, tower):
        losses = compares_types(params, batch["x"])
        worst = losses.max()
        return tj.TowerOutput(tj.Weighted.mean(losses, tower.weight), {"worst": worst})

    strategy = tj.Mirrored(["cpu:0"], towers=4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    with pytest.raises(tj.ReplicationError, match=r"metrics\['worst'\] depends on bat"):
        step.check(params, batch)


def of_lineax(operator, w):
    lineax = pytest.importorskip("lineax")
    shape = jax.ShapeDtypeStruct(w.shape, w.dtype)
    tags = lineax.positive_semidefinite_tag
    matrix = lineax.FunctionLinearOperator(operator, shape, tags)
    return lineax.linear_solve(matrix, w, lineax.CG(rtol=1e-6, atol=1e-6)).value


def of_jax(operator, w):
    return jax.scipy.sparse.linalg.bicgstab(operator, w, tol=1e-7)[0]


SOLVE = {
    "jax bicgstab": of_jax,
    "lineax CG": of_lineax,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "solver, name", [("jax bicgstab", "two devices"), ("lineax CG", "four towers")]
)
def test_solvers_of_an_operator_of_all_towers(solver, name):
    params, batch = data()

    def loss_fn(params, batch, tower):
        weights = tower.weight * batch["weights"]
        mean = lambda v: tower.reduce(tj.Reduction.MEAN, v)  # noqa: E731

        def operator(v):
            rows = weights * (batch["x"] @ mean(v))
            return mean(v + params["b"] ** 2 * v + rows @ batch["x"])

        z = mean(SOLVE[solver](operator, params["w"]))
        return tj.Weighted.mean((batch["x"] @ z - 1) ** 2, weights)

    @jax.jit
    @jax.value_and_grad
    def expected(params):
        rows = batch["x"].T * batch["weights"] @ batch["x"] / num_towers
        z = jnp.linalg.solve(jnp.diag(1 + params["b"] ** 2) + rows, params["w"])
        return jnp.average((batch["x"] @ z - 1) ** 2, weights=batch["weights"])

    strategy, num_towers = PLACES[name](), 4
    step = tj.build_train_step(loss_fn, optax.sgd(0.5), strategy)
    with jax.numpy_rank_promotion("allow"):
        state, metrics = step(step.init(params), batch)
    loss, grads = expected(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for key, grad in grads.items():
        after = params[key] - 0.5 * grad
        np.testing.assert_allclose(state.params[key], after, rtol=1e-5, atol=1e-5)
