"""Bugs that were published and corrected in 2026, in plain JAX, wrong and right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

w = jnp.ones(1)
rows = jnp.arange(8.0)[:, None]
MEAN = optax.microbatching.AccumulationType.MEAN


def sums(w, x):
    mask = (x[:, 0] % 3 > 0).astype(jnp.float32)
    return ((x @ w) ** 2 * mask).sum(), mask.sum()


def grads_of(w, x):
    return jax.grad(lambda w: sums(w, x)[0])(w)


def over_rows(fn):  # on each number of devices
    def make(devices):
        mesh = Mesh(np.array(devices), "i")
        specs = {"in_specs": (P(), P("i")), "out_specs": P(), "check_vma": False}
        return jax.jit(jax.shard_map(fn, mesh=mesh, **specs)), (w, rows)

    return make


def averaged_too(wrong, w, x):
    grads = grads_of(w, x) / lax.psum(sums(w, x)[1], "i")
    return lax.pmean(grads, "i") if wrong else lax.psum(grads, "i")


def own_guard(wrong, w, x):
    own = sums(w, x)[1]
    weight = own if wrong else lax.psum(own, "i")
    grads = grads_of(w, x) / jnp.maximum(weight, 1)
    return lax.pmean(grads, "i") if wrong else lax.psum(grads, "i")


def summed_twice(wrong, w, x):
    correct, total = lax.psum(sums(w, x), "i")
    return (lax.psum(correct, "i") if wrong else correct) / total


def not_summed(wrong, w, x):  # x: each device's experts
    @jax.custom_vjp
    def entering(h):
        return h

    back = (lambda _, g: (g,)) if wrong else (lambda _, g: (lax.psum(g, "i"),))
    entering.defvjp(lambda h: (h, None), back)
    return jax.grad(lambda w: ((x[:, 0] * entering(w * 2.0)[0]) ** 2).sum())(w)


def validation(wrong, w, x):
    total, weight = sums(w, x)
    mean = total / lax.psum(weight, "i")
    return lax.pmean(mean, "i") if wrong else lax.psum(mean, "i")


def other_rewards(wrong):
    def make(devices):
        def fn(w, x, rewards):
            loss = rewards.reshape(-1) * (x.reshape(-1, 1) @ w)
            return lax.psum(loss.sum(), "i") / 8

        given = jnp.cos(jnp.arange(8.0))
        split = P("i") if wrong else P(None, "i")
        specs = {"in_specs": (P(), P(None, "i"), split), "out_specs": P()}
        mesh = Mesh(np.array(devices), "i")
        step = jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=False, **specs))
        return step, (w, rows.reshape(2, 4, 1), given if wrong else given.reshape(2, 4))

    return make


def filled(devices, each):  # seven rows, so many for each device
    x = np.zeros((each * len(devices), 1), np.float32)
    number = min(7, len(x))
    x[:number] = rows[:number]
    return jnp.asarray(x), (jnp.arange(len(x)) < number).astype(jnp.float32)


def of_filled(fn, each_of):
    def make(devices):
        mesh = Mesh(np.array(devices), "i")
        specs = {"in_specs": (P(), P("i"), P("i")), "out_specs": P()}
        step = jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=False, **specs))
        return step, (w, *filled(devices, each_of(len(devices))))

    return make


def mean_of(w, x, mask):
    total, weight = lax.psum(((x @ w) ** 2 @ mask, mask.sum()), "i")
    return total / weight


def mean_of_all(w, x, mask):
    return lax.pmean(jnp.sin(x @ w).mean(), "i")


def one_axis(wrong):
    def make(devices):
        def fn(w, x):
            total, weight = sums(w, x)
            weight = lax.psum(weight, "dp" if wrong else ("dp", "cp"))
            return lax.psum(total / weight, ("dp", "cp"))

        shape = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[len(devices)]
        mesh = Mesh(np.array(devices).reshape(shape), ("dp", "cp"))
        specs = {"in_specs": (P(), P(("dp", "cp"))), "out_specs": P()}
        mapped = jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)
        return jax.jit(mapped), (w, rows)

    return make


def scanned(n, fn, x):
    def body(total, x):
        return jax.tree.map(jnp.add, total, fn(x)), None

    parts = x.reshape(n, -1, 1)
    start = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, parts[0]))
    return lax.scan(body, start, parts)[0]


def md4(wrong, n, w, x):
    grads = scanned(n, lambda x: jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x)
    return grads if wrong else grads / n


def clamped(wrong, n, w, x):
    grads, weight = scanned(n, lambda x: (grads_of(w, x) / 20, sums(w, x)[1] / 20), x)
    return grads / (jnp.maximum(weight, 1.0) if wrong and n > 1 else weight)


def metric(wrong, n, w, x):
    totals, weights = lax.map(lambda x: sums(w, x), x.reshape(n, -1, 1))
    return (totals / weights).mean() if wrong else totals.sum() / weights.sum()


def divided_again(wrong, n, w, x):
    grads = scanned(n, lambda part: grads_of(w, part) / sums(w, x)[1], x)
    return grads / n if wrong else grads


def masked_mean(wrong, n, w, x):
    if wrong:
        mean = jax.grad(lambda w, x: sums(w, x)[0] / sums(w, x)[1])
        return optax.microbatch(mean, 1, 8 // n, MEAN)(w, x)
    both = optax.microbatch(lambda w, x: (grads_of(w, x), sums(w, x)[1]), 1, 8 // n)
    grads, weight = both(w, x)
    return grads / weight


def of_rows(fn):
    """The wrong and the right program of a function, on each number of devices."""
    return [over_rows(functools.partial(fn, wrong)) for wrong in (True, False)]


def of_micro_batches(fn):
    """The same, for each number of micro-batches."""

    def made(wrong):
        return lambda n: (functools.partial(fn, wrong, n), (w, rows))

    return [made(wrong) for wrong in (True, False)]


def fewest(number):
    return -(-7 // number)


def whole(number):
    return 7 // number


BUGS = {
    fn.__name__: of_rows(fn)
    for fn in (averaged_too, own_guard, summed_twice, not_summed, validation)
}
BUGS |= {fn.__name__: [fn(True), fn(False)] for fn in (other_rewards, one_axis)}
BUGS["lost_rows"] = [of_filled(mean_of, whole), of_filled(mean_of, fewest)]
BUGS["mean_of_padding"] = [of_filled(mean_of_all, fewest), of_filled(mean_of, fewest)]
OF_MICRO_BATCHES = {
    fn.__name__: of_micro_batches(fn)
    for fn in (md4, clamped, metric, divided_again, masked_mean)
}
