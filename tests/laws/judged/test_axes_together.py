"""Meshes of two axes that always act together are one axis of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import towerjax as tj

NUMBERS = (1, 2, 4)
BOTH = ("dp", "cp")
W = np.float32([0.5])
X = np.arange(1, 9, dtype=np.float32)[:, None]
SHAPES = {
    "one after the other": {1: (1, 1), 2: (2, 1), 4: (2, 2)},
    "the other first": {1: (1, 1), 2: (1, 2), 4: (2, 2)},
    "each alone": {1: (1, 1), 2: (1, 2), 4: (4, 1)},
}


def sums(w, x):
    mask = (x[:, 0] % 3 > 0).astype(jnp.float32)
    return ((x @ w) ** 2 * mask).sum(), mask.sum()


class Right:
    def of_sums(w, x):
        total, weight = sums(w, x)
        return lax.psum(total, BOTH) / lax.psum(weight, BOTH)

    def of_gradients(w, x):
        grads = jax.grad(lambda w: sums(w, x)[0])(w)
        return lax.psum(grads, BOTH) / lax.psum(sums(w, x)[1], BOTH)

    def of_gathered_rows(w, x):
        rows = lax.all_gather(x[:, 0], BOTH, tiled=True)
        return (rows * jnp.arange(8.0)).sum() * w[0]

    def of_equal_means(w, x):
        return lax.pmean(((x @ w) ** 2).mean(), BOTH)

    def of_the_largest(w, x):
        return lax.pmax((x @ w).max(), BOTH)


class Wrong:
    def of_means(w, x):  # verl-project/verl#5993
        total, weight = sums(w, x)
        return lax.pmean(total / weight, BOTH)

    def added_over_one_axis(w, x):
        total, weight = sums(w, x)
        total = lax.psum(total, BOTH)
        return total / lax.pmax(lax.psum(weight, "dp"), "cp")

    def averaged_over_one_axis(w, x):  # pytorch/torchtitan#4054
        grads = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
        return lax.psum(lax.pmean(grads, "cp"), "dp") / 8

    def counted_too_often(w, x):
        total = lax.psum(((x @ w) ** 2).sum(), BOTH)
        return lax.psum(total, "cp")

    def gathered_in_another_order(w, x):
        rows = lax.all_gather(x[:, 0], ("cp", "dp"), tiled=True)
        return (rows * jnp.arange(8.0)).sum() * w[0]


def maker(fn, shapes, split=BOTH):
    def make(devices):
        mesh = Mesh(np.array(devices).reshape(shapes[len(devices)]), BOTH)
        specs = {"in_specs": (PartitionSpec(), PartitionSpec(split))}
        specs["out_specs"] = PartitionSpec()
        mapped = jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)
        return jax.jit(mapped), (W, X)

    return make


def functions(deck):
    return {name: fn for name, fn in vars(deck).items() if not name.startswith("_")}


def unproved(make):
    try:
        return tj.testing.prove(make, devices=NUMBERS).unproved
    except tj.ReplicationError as error:
        return {"result": str(error)}


@pytest.mark.slow
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", functions(Right))
def test_what_acts_over_both_axes_is_proved(name, shapes):
    make = maker(functions(Right)[name], SHAPES[shapes])
    assert unproved(make) == {}
    assert tj.testing.same_on_devices(make, devices=NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", functions(Wrong))
def test_what_depends_on_the_mesh_is_not(name):
    make = maker(functions(Wrong)[name], SHAPES["one after the other"])
    assert unproved(make)
    if name != "gathered_in_another_order":  # which JAX 0.12 refuses
        with pytest.raises(tj.testing.SplitError):
            tj.testing.same_on_devices(make, devices=NUMBERS)


def test_rows_in_another_order_than_the_meshs_are_not_proved():
    shapes = SHAPES["one after the other"]
    make = maker(functions(Right)["of_sums"], shapes, split=("cp", "dp"))
    assert "must come last among the axes of its dim" in unproved(make)["result"]
