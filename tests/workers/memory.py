"""Real memory that runs out in a donated step; prints what is left of the run."""

import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj


def loss_fn(params, batch, tower):
    value = params * batch
    if batch.shape[0] > 8:  # 4 GB for each row
        far = jnp.arange(1 << 30, dtype=jnp.float32)
        value += jnp.stack([jnp.sort(jnp.sin(v + far))[7] for v in value[:2]]).sum()
    return tj.Weighted.mean(value**2, tower.weight)


def main():
    strategy = tj.OneDevice("cpu:0")
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, max_programs=2)
    small = np.ones(4, np.float32)
    large = np.ones(16, np.float32)
    state, _ = step(step.init(jnp.float32(1)), small)
    jax.block_until_ready(state)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    state = step.init(jnp.float32(1))
    try:
        tj.run(step, state, iter([small, small, large, small]), progress=False)
    except jax.errors.JaxRuntimeError as error:
        print(str(error)[:33], error.state, error.batches)


if __name__ == "__main__":
    main()
