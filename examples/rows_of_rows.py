"""Audit a loss that subtracts the mean of a tower's rows: it depends on the towers.

The output is the loss on 1 tower and on 4, which differ, and the first line of the
error with which the audit refuses the loss.

    python examples/rows_of_rows.py
"""

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices


def policy_loss(params, batch, tower):
    mean = batch["advantage"].mean()  # of the tower's rows
    gain = batch["x"] @ params["w"] * (batch["advantage"] - mean)
    return tj.Weighted.mean(-gain, tower.weight)


x = np.arange(8, dtype=np.float32)
batch = {"x": x[:, None], "advantage": x**2}
for towers in (1, 4):
    strategy = tj.Mirrored(towers=towers)
    step = tj.build_train_step(policy_loss, optax.sgd(0.1), strategy, audit=False)
    state = step.init({"w": np.ones(1, np.float32)})
    _, metrics = step(state, batch)
    print(towers, "towers:", metrics["loss"])
try:
    step.audit(step.init({"w": np.ones(1, np.float32)}), batch)
except tj.testing.SplitError as error:
    print(str(error).splitlines()[0])
