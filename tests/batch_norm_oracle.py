"""Batch norm of a whole masked batch in NumPy float64, its derivatives by hand.

The model: h = x w, y = norm(h), loss_i = sum_c tanh(y_ic) c_ic, and the global loss is
the weighted mean of the losses. Nothing here uses JAX, Flax or towerjax.
"""

import numpy as np

EPSILON, MOMENTUM = 1e-3, 0.9


def moments(h, weight):
    """Mean and biased variance of each feature; the last dim is the features'."""
    over = tuple(range(h.ndim - 1))
    weight = np.broadcast_to(
        weight.reshape(weight.shape + (1,) * (h.ndim - 1)), h.shape
    )
    total = weight.sum(over)
    mean = (weight * h).sum(over) / total
    return mean, (weight * (h - mean) ** 2).sum(over) / total


def loss_and_gradients(params, batch, weight):
    """The loss, the moments, and the gradients by the params."""
    x, c = batch["x"], batch["c"]
    h = x @ params["w"]
    mean, var = moments(h, weight)
    deviation = np.sqrt(var + EPSILON)
    normed = (h - mean) / deviation
    z = np.tanh(normed * params["scale"] + params["bias"])
    total = weight.sum()
    loss = (weight * (z * c).sum(-1)).sum() / total
    d_y = weight[:, None] * c * (1 - z**2) / total
    d_normed = d_y * params["scale"]
    # Through the normalised value itself, through the mean and through the variance.
    d_mean = d_normed.sum(0)
    d_scale = (d_normed * normed).sum(0)
    share = weight[:, None] / total
    d_h = (d_normed - share * (d_mean + normed * d_scale)) / deviation
    grads = {"w": x.T @ d_h, "scale": (d_y * normed).sum(0), "bias": d_y.sum(0)}
    return loss, (mean, var), grads


def train(params, batches, learning_rate):
    """Losses, last params and running statistics of SGD."""
    width = len(params["bias"])
    running, losses = (np.zeros(width), np.ones(width)), []
    for batch in batches:
        batch = {name: np.asarray(rows, np.float64) for name, rows in batch.items()}
        weight = batch["weight"]
        loss, stats, grads = loss_and_gradients(params, batch, weight)
        params = {k: params[k] - learning_rate * grads[k] for k in params}
        running = tuple(
            MOMENTUM * old + (1 - MOMENTUM) * new
            for old, new in zip(running, stats, strict=True)
        )
        losses.append(loss)
    return losses, params, running
