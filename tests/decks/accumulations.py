"""Accumulations of gradients by hand: a right one, and faults of published trainers.

``parts`` is the number of micro-batches. `summed` adds up a gradient of each part.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

draw = np.random.default_rng(0)
x = draw.normal(size=(16, 3)).astype(np.float32)
y = draw.normal(size=16).astype(np.float32)
tokens = draw.normal(size=17).astype(np.float32)
mask = (np.arange(16) > 5).astype(np.float32)  # unequal in each part
W = np.array([1, 2, 3], np.float32)
BATCH = {"x": x, "y": y, "mask": mask}
key = jax.random.key(0)


def loss(w, rows):
    errors = (rows["x"] @ w - rows["y"]) ** 2
    return (errors * rows["mask"]).sum() / jnp.maximum(rows["mask"].sum(), 1)


def summed(parts, gradient, batch):
    def split(a):
        return a.reshape(parts, -1, *a.shape[1:])

    each = jax.tree.map(split, batch)
    total = 0.0
    for i in range(parts):
        total = total + gradient(jax.tree.map(operator.itemgetter(i), each), i)
    return total


def right(parts, w, batch):
    def of_sums(w, rows):
        return ((rows["x"] @ w - rows["y"]) ** 2 * rows["mask"]).sum()

    total = summed(parts, lambda rows, i: jax.grad(of_sums)(w, rows), batch)
    return total / batch["mask"].sum()


def mean_of_means(parts, w, batch):
    return summed(parts, lambda rows, i: jax.grad(loss)(w, rows) / parts, batch)


def divided_twice(parts, w, batch):
    return mean_of_means(parts, w, batch | {"mask": np.ones(16)}) / parts


def one_branch_undivided(parts, w, batch):
    def penalty(w):  # such as the balance of experts, for each part
        return 0.1 * (w**2).sum()

    def gradient(rows, i):
        return jax.grad(loss)(w, rows) / parts + jax.grad(penalty)(w)

    return summed(parts, gradient, batch | {"mask": np.ones(16)})


def shifted_after_the_split(parts, w, batch):
    def errors(w, rows):  # each token predicts the next one of its part
        return ((rows[:-1] * w[0] - rows[1:]) ** 2).sum()

    return summed(parts, lambda rows, i: jax.grad(errors)(w, rows), tokens[:16])


def weights_of_a_part(parts, w, batch):
    def weighted(w, rows):
        weights = jnp.where(rows["y"] > 0, 3.0, 1.0)  # of classes
        errors = (rows["x"] @ w - rows["y"]) ** 2
        return (weights / weights.sum() * errors).sum() / parts

    return summed(parts, lambda rows, i: jax.grad(weighted)(w, rows), batch)


def one_key_for_all(parts, w, batch):
    def dropped(w, rows):
        kept = jax.random.bernoulli(key, 0.5, rows["x"].shape)
        return ((rows["x"] * kept) @ w - rows["y"]) @ rows["mask"]

    return summed(parts, lambda rows, i: jax.grad(dropped)(w, rows), batch)


def batch_norm(parts, w, batch):
    def normalised(w, rows):
        x = rows["x"] - rows["x"].mean(0, keepdims=True)
        x = x / rows["x"].std(0, keepdims=True)
        return ((x @ w - rows["y"]) ** 2).sum()

    return summed(parts, lambda rows, i: jax.grad(normalised)(w, rows), batch)


def scaled_by_world_size(processes, w, batch):
    def own(w, rows):  # the factor undoes a mean over processes; here they are added
        errors = ((rows["x"] @ w - rows["y"]) ** 2).sum() / 16
        return errors * processes

    return summed(processes, lambda rows, i: jax.grad(own)(w, rows), batch)


RIGHT = right
WRONG = (
    mean_of_means,
    divided_twice,
    one_branch_undivided,
    shifted_after_the_split,
    weights_of_a_part,
    one_key_for_all,
    batch_norm,
    scaled_by_world_size,
)


def made(step):
    """A function of a number of micro-batches, as `tj.testing.same_for` takes it."""

    def make(number):
        return jax.jit(functools.partial(step, number)), (W, BATCH)

    return make
