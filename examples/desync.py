"""Find a bit that was flipped on one device, and a NaN that arose in one tower.

The output has the device and the parameter of the flipped bit. Then come the tower, the
leaf and the step of each NaN.

    python examples/desync.py
"""

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)


def loss_fn(params, batch, tower):
    out = batch["x"] @ params["Dense_2"]["kernel"]
    return tj.Weighted.mean((out**2).sum(-1), tower.weight)


params = {"Dense_2": {"kernel": np.ones((3, 2), np.float32)}}
strategy = tj.Mirrored(towers=8)
step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy)
state = step.init(params)


def on_device_5(kernel):  # the same array, with one bit flipped on one device
    shards = []
    for shard in kernel.addressable_shards:
        copy = np.array(shard.data)
        if shard.device.id == 5:
            copy.view(np.uint32)[0, 0] ^= 1
        shards.append(jax.device_put(copy, shard.device))
    of_shards = jax.make_array_from_single_device_arrays
    return of_shards(kernel.shape, kernel.sharding, shards)


desynced = step.init(jax.tree.map(np.asarray, params))
desynced.params["Dense_2"]["kernel"] = on_device_5(desynced.params["Dense_2"]["kernel"])
try:
    tj.check_mirrored(desynced)
except tj.DesyncError as error:
    print(*error.differing)

batch = {"x": np.ones((16, 3), np.float32)}
batch["x"][11, 0] = np.nan
try:
    tj.run(step, state, [batch], progress=False)
except tj.NonFiniteError as error:
    for at in error.locations:
        print(
            f"tower {at.tower}, {at.leaf}, step {at.step}:",
            at.part,
        )
