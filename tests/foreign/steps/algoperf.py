"""A step of the benchmark of training algorithms."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any

import jax
import jax.numpy as jnp

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import placed


def algoperf(devices: Devices) -> Made:
    """A step of NAdamW on MNIST with weighted rows, by jit with shardings."""
    from algoperf.workloads.mnist.mnist_jax.workload import MnistWorkload
    from algorithms.baselines.external_tuning import jax_nadamw_full_budget as nadamw

    workload = MnistWorkload()
    tx = nadamw.nadamw(0.1)
    params, model_state = workload.init_model_fn(jax.random.key(0))
    rows = {"inputs": normal(8, 28, 28, 1), "targets": jnp.arange(8)}
    batch = placed(rows | {"weights": jnp.arange(8.0)}, devices, "data")
    state = placed((tx.init(params), params), devices)

    def step(opt_state: Any, params: Any, batch: Any) -> Any:
        how = jax.random.key(1), 1.0, 0.1, 0.0
        given = model_state, opt_state, params, batch
        return nadamw.train_step(workload, tx.update, *given, *how)

    return jax.jit(step), (*state, batch)
