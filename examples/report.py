"""Report what a compiled step sends, holds and takes, without a profiler.

The output is a line for each collective with its bytes and how often it runs, the bytes
of results that reuse the buffers of arguments, and the names of the measured times.

    python examples/report.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices


def loss_fn(params, batch, tower):
    x = jnp.tanh(batch["x"] @ params["first"])

    def layer(x, _):
        return jnp.tanh(x @ params["again"]), None

    x, _ = jax.lax.scan(layer, x, None, length=10)
    return tj.Weighted.mean((x**2).sum(-1), tower.weight)


draw = np.random.default_rng(0)
params = {
    "first": draw.normal(size=(32, 64)).astype(np.float32),
    "again": draw.normal(size=(64, 64)).astype(np.float32) / 8,
}
batch = {"x": draw.normal(size=(256, 32)).astype(np.float32)}

step = tj.build_train_step(loss_fn, optax.adam(1e-3), tj.Mirrored(), micro_batches=4)
state = step.init(params)
report = step.report(state, batch, timed_calls=5)

for found in report.collectives:
    print(f"{found.opcode} of {found.bytes:,} bytes, {found.trips} time,")
    print(f"    on {found.num_devices} devices, each of which sends {found.sent:,}")
print(f"results in arguments' buffers: {report.memory.aliased:,} bytes")
print("times:", *dataclasses.asdict(report)["timing"])
