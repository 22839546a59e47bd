"""Weight rows with numbers of one's own, on 1, 2, 3 and 8 towers.

The weights are 1, 0, 2, 1 and 3. The output is the loss and the parameter after one
step for each number of towers, all the same, and the weighted mean of NumPy.

    python examples/weights.py
"""

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

batch = {
    "x": np.array([1, 2, 3, 4, 5], np.float32),
    "weight": np.array([1, 0, 2, 1, 3], np.float32),
}
rows_alone = np.average((batch["x"] - 1) ** 2, weights=batch["weight"])


def loss_fn(params, batch, tower):
    weight = batch["weight"] * tower.weight
    return tj.Weighted.mean((batch["x"] - params["m"]) ** 2, weight)


for towers in (1, 2, 3, 8):
    strategy = tj.Mirrored(towers=towers)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
    state, metrics = step(step.init({"m": np.float32(1)}), batch)
    print(f"{towers} tower(s): loss {metrics['loss']:.4f}, m {state.params['m']:.4f}")
print(f"NumPy:      loss {rows_alone:.4f}")
