"""Published bugs in a few lines of JAX, wrong and right, over the rows of devices.

Each program is a function of the parameters and of a device's rows. `BUGS` has what
`tj.testing.prove` and `tj.testing.same_on_devices` ask for.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

w = jnp.ones(1)
rows = jnp.arange(8.0)[:, None]


def on_devices(fn, devices, **how):
    """The parameters on all devices, and to each its rows."""
    mesh, specs = Mesh(np.array(devices), "i"), {"in_specs": (P(), P("i"))}
    return jax.jit(jax.shard_map(fn, mesh=mesh, out_specs=P(), **specs, **how))


def flag(w, x):
    return lax.cond(x.sum() > 10, lambda: True, lambda: False)


def flag_of_all(w, x):
    return lax.cond(lax.psum(x.sum(), "i") > 10, lambda: True, lambda: False)


def update_mean(mean, x):
    return 0.9 * mean + 0.1 * x.mean(0)


def update_mean_of_all(mean, x):
    return 0.9 * mean + 0.1 * lax.pmean(x.mean(0), "i")


def new_damping(damping, x):
    ratio = x.mean() / 4
    return lax.cond(ratio < 0.75, lambda: damping * 2, lambda: damping / 2)


def new_damping_by_all(damping, x):
    ratio = lax.pmean(x.mean(), "i") / 4
    return lax.cond(ratio < 0.75, lambda: damping * 2, lambda: damping / 2)


def moving_average(average, x):
    return 0.9 * average + 0.1 * (x**2).mean()


def moving_average_of_all(average, x):
    return 0.9 * average + 0.1 * lax.pmean((x**2).mean(), "i")


def loss_of_two(params, x):
    return ((x @ params["w"] + params["b"] - 1.0) ** 2).mean()


def step(w, x):
    grads = jax.grad(loss_of_two)({"w": w, "b": w[0]}, x)
    return w - 0.1 * (lax.pmean(grads["w"], "i") + grads["b"])


def step_of_all(w, x):
    grads = lax.pmean(jax.grad(loss_of_two)({"w": w, "b": w[0]}, x), "i")
    return w - 0.1 * (grads["w"] + grads["b"])


def guarded(w, x):
    own = jax.grad(lambda w: (jnp.log(x @ w)).mean())(w)  # a row of 0
    mean = lax.pmean(jnp.nan_to_num(own, posinf=0.0, neginf=0.0), "i")
    return jnp.where(jnp.isfinite(own).all(), w - mean, w)


def guarded_by_all(w, x):
    own = jax.grad(lambda w: (jnp.log(x @ w)).mean())(w)
    mean = lax.pmean(own, "i")
    return jnp.where(jnp.isfinite(mean).all(), w - mean, w)


def gradient(w, x):
    return lax.psum(jax.grad(lambda w: (x @ w).sum())(w), "i")


def gradient_once(w, x):
    return jax.grad(lambda w: (x @ w).sum())(w)


def weighed(w, x):
    mask = x[:, 0] % 3 > 0
    return ((x @ w) ** 2 * mask).sum(), mask.sum()


def mean_of_means(w, x):
    total, weight = weighed(w, x)
    return lax.pmean(total / weight, "i")


def mean(w, x):
    total, weight = lax.psum(weighed(w, x), "i")
    return total / weight


def clip(gradient):
    return gradient * jnp.minimum(1.0, 20.0 / jnp.linalg.norm(gradient))


def own_gradient(w, x):
    return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def clipped_before(w, x):
    return lax.pmean(clip(own_gradient(w, x)), "i")


def clipped_after(w, x):
    return clip(lax.pmean(own_gradient(w, x), "i"))


def policy_loss(w, x, advantage):
    return lax.pmean((advantage[:, None] * x @ w).mean(), "i")


def by_device(w, x):
    gain = x[:, 0] ** 2
    return policy_loss(w, x, (gain - gain.mean()) / (gain.std() + 1e-8))


def by_all(w, x):
    gain = x[:, 0] ** 2
    mean, square = lax.pmean((gain.mean(), (gain**2).mean()), "i")
    return policy_loss(w, x, (gain - mean) / (jnp.sqrt(square - mean**2) + 1e-8))


def gradient_of_errors(w, x):
    return jax.grad(lambda w: ((x @ w - 3) ** 2).mean())(w)


def norm_before(w, x):
    return lax.pmean(jnp.linalg.norm(gradient_of_errors(w, x)), "i")


def norm_after(w, x):
    return jnp.linalg.norm(lax.pmean(gradient_of_errors(w, x), "i"))


def noisy(w, x, noise):
    return lax.pmean((((x[:, 0] + noise) * w) ** 2).mean(), "i")


def one_noise(w, x):
    return noisy(w, x, jax.random.normal(jax.random.key(0), x.shape[:1]))


def noise_of_rows(w, x):
    number = lax.axis_index("i") * len(x) + jnp.arange(len(x))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(number)
    return noisy(w, x, jax.vmap(jax.random.normal)(keys))


def normalize(w, x):
    how = {"use_running_average": False, "use_bias": False, "use_scale": False}
    norm = nn.BatchNorm(axis_name="i", **how)
    state = {"batch_stats": {"mean": 0 * w, "var": w}}
    out, _ = norm.apply(state, x * w[0], mask=x % 3 > 0, mutable="batch_stats")
    return lax.pmax(out.max(), "i")


def normalize_by_all(w, x):
    x, mask = x * w[0], x % 3 > 0
    total, number = lax.psum(((x * mask).sum(), mask.sum()), "i")
    variance = lax.psum((mask * (x - total / number) ** 2).sum(), "i") / number
    return lax.pmax(((x - total / number) / jnp.sqrt(variance + 1e-5)).max(), "i")


def accuracy(w, x, mask):
    return lax.pmean((x @ w > 3).mean(), "i")


def accuracy_of_rows(w, x, mask):
    right, number = lax.psum((((x @ w > 3) * mask).sum(), mask.sum()), "i")
    return right / number


def of_seven_rows(fn, devices):
    more, mesh = -7 % len(devices), Mesh(devices, "i")
    filled = jnp.concatenate([rows[:7], rows[:more]]), jnp.arange(7 + more) < 7
    how = {"in_specs": (P(), P("i"), P("i")), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(fn, mesh=mesh, **how)), (w, *filled)


def accumulated(w, x):
    grads = jax.vmap(gradient_of_errors, in_axes=(None, 0))(w, x.reshape(-1, 2, 1))
    return lax.pmean(grads.sum(0), "i")


def accumulated_mean(w, x):
    grads = jax.vmap(gradient_of_errors, in_axes=(None, 0))(w, x.reshape(-1, 2, 1))
    return lax.pmean(grads.mean(0), "i")


def own_negatives(w, x):
    z = jnp.sin(x * w[0])
    return lax.pmean(-jnp.diag(nn.log_softmax(z @ z.T)).mean(), "i")


def all_negatives(w, x):
    z = jnp.sin(x * w[0])
    others = lax.all_gather(z, "i", tiled=True)
    at = lax.axis_index("i") * len(z) + jnp.arange(len(z))
    logits = nn.log_softmax(z @ others.T)
    return lax.pmean(-jnp.take_along_axis(logits, at[:, None], 1).mean(), "i")


def weighed_by_segment(w, x):
    segments = 1 + x[:, 0] // 4
    total, weight = lax.psum((((x @ w) * segments).sum(), segments.sum()), "i")
    return total / weight


def weighed_by_token(w, x):
    total, weight = lax.psum(((x @ w).sum(), len(x)), "i")
    return total / weight


def over_rows(fn):
    return lambda devices: (
        jax.jit(on_devices(fn, devices, check_vma=False)),
        (w, rows),
    )


def by_default(fn):
    return lambda devices: (on_devices(fn, devices), (w, rows))


def of_seven(fn):
    return lambda devices: of_seven_rows(fn, devices)


# The wrong program and the right one, by the name of the wrong one.
PAIRS = {
    by_default: [(flag, flag_of_all), (gradient, gradient_once)],
    over_rows: [
        (update_mean, update_mean_of_all),
        (new_damping, new_damping_by_all),
        (moving_average, moving_average_of_all),
        (step, step_of_all),
        (guarded, guarded_by_all),
        (mean_of_means, mean),
        (clipped_before, clipped_after),
        (by_device, by_all),
        (norm_before, norm_after),
        (one_noise, noise_of_rows),
        (normalize, normalize_by_all),
        (accumulated, accumulated_mean),
        (own_negatives, all_negatives),
        (weighed_by_segment, weighed_by_token),
    ],
    of_seven: [(accuracy, accuracy_of_rows)],
}
BUGS = {
    pair[0].__name__: [made(fn) for fn in pair]
    for made, pairs in PAIRS.items()
    for pair in pairs
}
