"""Networks with batch norm, in linen and nnx, and steps that train them."""

import jax.numpy as jnp
import numpy as np

from towerjax.layers.batch_norm.linen import TowerBatchNorm as LinenNorm

IN = 4
OUT = 3
RATE = 0.5
CLOSE = dict(rtol=3e-6, atol=3e-6)
EPSILON = 1e-3
OPTIONS = dict(momentum=0.9, epsilon=EPSILON)


def batch(size, seed=0):
    rng = np.random.default_rng(seed)
    # Rows drift and weigh differently: towers' means and variances are far apart.
    x = rng.normal(size=(size, IN)) * (1 + np.arange(size)[:, None] / size) + 2
    x += np.arange(size)[:, None] / 4
    rows = {
        "x": x,
        "c": rng.normal(size=(size, OUT)),
        "weight": rng.integers(1, 4, size),
    }
    return {name: np.asarray(value, np.float32) for name, value in rows.items()}


def moments(h, weight):
    """Mean and biased variance of each feature of weighted rows, in NumPy."""
    mean = weight @ h / weight.sum()
    return mean, weight @ (h - mean) ** 2 / weight.sum()


def moved(x, tower=None, mask=None, mean=None, var=None, **options):
    """The normalised rows and the running moments after them, of a plain layer."""
    width = np.shape(x)[-1]
    mean = jnp.zeros(width) if mean is None else mean
    stats = {"mean": mean, "var": jnp.ones(width) if var is None else var}
    norm = LinenNorm(False, use_scale=False, use_bias=False, **options)
    own = {"batch_stats": stats}
    y, after = norm.apply(own, x, tower, mask=mask, mutable=["batch_stats"])
    return y, after["batch_stats"]
