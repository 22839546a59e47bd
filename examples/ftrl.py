"""Train a sparse linear model with Ftrl, TensorFlow's ``FtrlOptimizer``, in optax.

Only two of eight features matter. The output is the absolute values of the weights: the
other six are exactly 0.

    python examples/ftrl.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj


def ftrl(lr, l1=0.0, l2=0.0, start=0.1):
    def init(params):
        accum = jax.tree.map(lambda w: jnp.full_like(w, start), params)
        return {"accum": accum, "linear": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        before = state["accum"]
        last = state["linear"]
        accum = jax.tree.map(lambda n, g: n + g**2, before, updates)

        def next_linear(z, g, w, old, new):
            return z + g - (jnp.sqrt(new) - jnp.sqrt(old)) / lr * w

        def change(w, z, n):
            far = jnp.sign(z) * jnp.maximum(jnp.abs(z) - l1, 0)
            return -w - far / (jnp.sqrt(n) / lr + 2 * l2)

        linear = jax.tree.map(next_linear, last, updates, params, before, accum)
        updates = jax.tree.map(change, params, linear, accum)
        return updates, {"accum": accum, "linear": linear}

    return optax.GradientTransformation(init, update)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    data = {"x": x, "y": x @ np.array([2, -1, *6 * [0]], np.float32)}
    step = tj.build_train_step(loss_fn, ftrl(0.5, l1=0.1), tj.Mirrored(towers=4))
    state = step.init(np.zeros(8, np.float32))
    batches = tj.batches(data, 32, epochs=50, seed=0)
    state, _ = tj.run(step, state, batches, progress=False)
    print("weights", np.abs(np.asarray(state.params)).round(2))


if __name__ == "__main__":
    main()
