"""The noise scale of a gradient while a training goes on, and how far towers differ.

Each micro-batch of each tower has a mean gradient ``g`` over its rows, with the weight
``w`` of these rows. A mean over ``w`` rows has the variance of one row divided by
``w``. So the gradients of ``n`` micro-batches show the noise of one row, by an analysis
of variance without bias (McCandlish et al., 2018, https://arxiv.org/abs/1812.06162,
appendix A.1; here for any weights). ``G`` is the mean gradient of the whole batch, with
the weight ``W``:

    noise = (sum w |g|^2 - W |G|^2) / (n - 1)    trace of one row's covariance
    signal = |G|^2 - noise / W                   square of the true gradient's norm

The step adds up ``w |g|^2`` and ``n`` beside the gradient.

python examples/noise_scale.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

ratio = tj.metrics.ratio


class Parts(tj.metrics.Additive):
    """Sums over the micro-batches of all towers."""

    counts_towers = True  # by design: an audit leaves it out

    squares: jax.Array  # w |g|^2
    number: jax.Array  # of micro-batches that have weight

    def compute(self):
        """Return the mean of w |g|^2."""
        return ratio(self.squares, self.number)


def dot(x, y):
    """Return the inner product of two trees."""
    products = jax.tree.map(lambda x, y: (x * y.conj()).real.sum(), x, y)
    return jnp.asarray(sum(jax.tree.leaves(products)))


def of_tower(loss, grads):
    """Return the leaves that a tower returns beside its loss and gradient."""
    square = dot(grads.sum, grads.sum)
    counts = jnp.asarray(grads.weight != 0, square.dtype)
    own = {"loss": loss, "grads": grads}
    return {
        "parts": Parts(ratio(square, grads.weight), counts),
        "own": tj.PerTower(own),  # these stay on the towers' devices
    }


def metrics_of(merged, grads):
    """Return the metrics of a step from the merged `of_tower` and the gradient."""
    parts = merged["parts"]
    total = grads.sum
    weight = grads.weight
    square = dot(total, total)
    large = ratio(square, weight)
    noise = (parts.squares - large) / jnp.maximum(parts.number - 1, 1)
    noise = jnp.where(parts.number > 1, noise, jnp.nan)  # one does not show it
    loss, own = (merged["own"].values[name] for name in ("loss", "grads"))
    norms = jnp.sqrt(jax.vmap(lambda x: dot(x, x))(own.sum))
    cosines = ratio(jax.vmap(lambda x: dot(x, total))(own.sum), norms)
    return {
        "gradient/norm": ratio(jnp.sqrt(square), weight),
        "gradient/noise": noise,
        "gradient/signal": ratio(large - noise, weight),
        "towers/loss": tj.PerTower(loss.value),
        "towers/norm": tj.PerTower(ratio(norms, own.weight)),
        "towers/cosine": tj.PerTower(ratio(cosines, jnp.sqrt(square))),
    }


def with_statistics(fns):
    """For ``build_train_step(..., extend=)``: its functions, whose metrics are more."""

    def tower_fn(*args):
        out = fns.tower(*args)
        return {**out, "statistics": of_tower(out["loss"], out["grads"])}

    def update_fn(state, merged):
        state, metrics = fns.update(state, merged)
        return state, metrics | metrics_of(merged["statistics"], merged["grads"])

    return fns._replace(tower=tower_fn, update=update_fn)


def noise_scale(metrics, smoothing=0.99):
    """Return ``noise / signal`` after each step, both averaged over the steps before.

    ``smoothing`` is the decay of the averages: 0 takes each step alone, 1 all alike.
    """
    names = "gradient/noise", "gradient/signal"
    totals = [np.zeros(2)]
    for row in np.stack([np.asarray(metrics[name], float) for name in names], axis=1):
        known = np.isfinite(row).all()  # a step that was refused is left out
        totals.append(smoothing * totals[-1] + row if known else totals[-1])
    noise, signal = np.array(totals[1:]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return noise / signal


def loss_fn(params, batch, tower):
    """Return the squared error of a linear model."""
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def main():
    """Fit noisy data: while the error falls, larger batches begin to pay."""
    jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(16384, 32)).astype(np.float32)}
    data["y"] = (data["x"] @ rng.normal(size=32)).astype(np.float32)
    data["y"] += rng.normal(size=16384).astype(np.float32)
    step = tj.build_train_step(
        loss_fn, optax.sgd(0.02), tj.Mirrored(towers=8), extend=with_statistics
    )
    state = step.init(np.zeros(32, np.float32))
    batches = tj.batches(data, 64)
    state, history = tj.run(step, state, batches, progress=False)
    scale = noise_scale(history.metrics, smoothing=0.9)
    for number in (0, 31, 63, 127, 255):
        print(f"step {number + 1:3}: {scale[number]:6.0f} rows")
    print(history.metrics["towers/cosine"][0].round(2))


if __name__ == "__main__":
    main()
