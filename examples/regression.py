"""Linear regression on 4 towers: the smallest whole program, easy to check.

4 towers cannot share 103 rows evenly, so one row of padding with weight 0 is added.
It does not count: gradient descent ends at NumPy's least squares solution of 103 rows.

    python examples/regression.py
"""

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

numbers = np.random.default_rng(0)
TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)
x = numbers.normal(size=(103, 3)).astype(np.float32)
y = x @ TRUE_WEIGHTS + numbers.normal(size=103).astype(np.float32)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["weights"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def main() -> None:
    strategy = tj.Mirrored(towers=4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.2), strategy, remainder="pad")
    state = step.init({"weights": np.zeros(3, np.float32)})
    batches = tj.batches({"x": x, "y": y}, batch_size=103, epochs=None)
    state, history = tj.run(step, state, batches, steps=100)

    least_squares, *_ = np.linalg.lstsq(x.astype(np.float64), y, rcond=None)
    print(history.summary)
    for name, weights in (
        ("true", TRUE_WEIGHTS),
        ("fitted", np.asarray(state.params["weights"])),
        ("least squares", least_squares),
    ):
        print(f"{name:>13}", *(f"{weight:9.5f}" for weight in weights))


if __name__ == "__main__":
    main()
