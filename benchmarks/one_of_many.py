"""Run one device's part of a program for many GPUs on the only GPU that is here.

`benchmarks.sharded`'s GPT is compiled for so many GPUs of which one is here, and run:
collectives return at once and send nothing, so the numbers mean nothing and the time is
that of computation. What the device holds is real, and is compared with the plan.

Run: ``python -m benchmarks.one_of_many [--layers 32] [--width 4096] [--devices 8]
[--state sharded] [--calls 5]``
"""

import argparse
import json
import math
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import towerjax as tj
from benchmarks.sharded import LENGTH, ROWS, loss_fn, shapes
from towerjax.mesh.private_jax import read_arguments
from towerjax.step.compile import Program, compile_step
from towerjax.step.state import split_state
from towerjax.types import PyTree


def program_of(params: PyTree, devices: int, state: Any) -> tuple[Program, Any]:
    """The step's program for all the devices, and their placement."""
    strategy = tj.Mirrored(state=state)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    batch = jax.ShapeDtypeStruct((ROWS * devices, LENGTH), jnp.int32)
    args = (*split_state(step.shapes(params)), *step._placer.shapes(batch))
    # The other processes are not there to be asked what they compile.
    with mock.patch.object(jax, "process_count", lambda: 1):
        return compile_step(step.engine, strategy.placement, args), strategy.placement


def inputs(compiled: Any, placement: Any) -> PyTree:
    """Zeros of which this process's devices hold their parts."""
    leaves, treedef = jax.tree.flatten(compiled.args_info[0])
    shardings = jax.tree.leaves(compiled.input_shardings)
    layouts = dict(zip(read_arguments(compiled), shardings, strict=True))
    whole = jax.sharding.NamedSharding(placement.mesh, jax.sharding.PartitionSpec())

    def zeros(shape: Any, dtype: Any, sharding: Any) -> jax.Array:
        own, part = placement.mesh.local_devices, sharding.shard_shape(shape)
        each = [jax.device_put(jnp.zeros(part, dtype), x) for x in own]
        return jax.make_array_from_single_device_arrays(shape, sharding, each)

    def argument(number: int, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(zeros((*leaf.shape, 2), jnp.uint32, whole))
        return zeros(leaf.shape, leaf.dtype, layouts.get(number, whole))

    return jax.tree.unflatten(treedef, [argument(i, x) for i, x in enumerate(leaves)])


def main() -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--state", default="sharded")
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_mock_gpu_topology", f"1x{options.devices}x1")
    jax.config.update("jax_num_cpu_devices", options.devices)  # where no GPU is here
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    params = shapes(options.layers, options.width)
    program, placement = program_of(params, options.devices, options.state)
    first, *rest = inputs(program.call, placement)
    times = []
    for _ in range(options.calls + 1):
        start = time.perf_counter()
        first, *results = program.call(first, *rest)
        jax.block_until_ready((first, results))
        times.append(time.perf_counter() - start)
    plan = program.call.memory_analysis()
    held = jax.local_devices()[0].memory_stats() or {}
    row = {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        "state": options.state,
        "device": jax.local_devices()[0].device_kind,
        "devices": [len(jax.local_devices()), jax.device_count()],
        "planned_peak": plan.peak_memory_in_bytes,
        "planned_arguments": plan.argument_size_in_bytes,
        "peak": held.get("peak_bytes_in_use"),
        "compile_s": program.seconds,
        "step_s": sorted(times[1:])[options.calls // 2],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
