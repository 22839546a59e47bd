"""Tabulate what a device holds and sends per step, over numbers of devices.

The output is a table of bytes, for 1 to 8 devices: with the whole state on each device,
and with the optimizer's state sharded.

    python examples/memory_table.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((jnp.tanh(batch @ params) ** 2).sum(-1), tower.weight)


print("devices  state                  held    sent")
for number in (1, 2, 4, 8):
    for state in ("mirrored", "sharded_optimizer"):
        devices = [f"cpu:{i}" for i in range(number)]  # or tj.Absent("h200", number)
        strategy = tj.Mirrored(devices, state=state)
        step = tj.build_train_step(loss_fn, optax.adam(1e-3), strategy)
        params = np.ones((256, 256), np.float32)
        batch = np.ones((64 * number, 256))
        found = step.report(step.init(params), batch.astype(np.float32))
        held = found.memory.arguments - found.memory.by_kind["batch"]
        print(f"{number:7}  {state:17} {held:9,} {found.bytes_sent:7,}")
