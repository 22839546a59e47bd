"""A step of kfac-jax: second-order optimisation."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import copies, parts


def kfac(devices: Devices) -> Made:
    """A step of K-FAC with adaptive damping."""
    import kfac_jax

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        out = jnp.tanh(x @ params["a"]) @ params["b"]
        kfac_jax.register_squared_error_loss(out, y)
        return ((out - y) ** 2).sum(1).mean()

    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=1e-3,
        use_adaptive_damping=True,
        damping_adaptation_interval=1,
        initial_damping=1.0,
        inverse_update_period=1,
        num_burnin_steps=0,
        estimation_mode="ggn_exact",
        multi_device=True,
    )
    params = {"a": normal(3, 4), "b": normal(4, 2, seed=1)}
    rows = normal(8, 3, seed=2) * (1 + jnp.arange(8.0)[:, None]), normal(8, 2, seed=3)
    how = {"learning_rate": jnp.array(0.1), "momentum": jnp.array(0.9)}
    how["rng"] = jax.random.PRNGKey(0)
    params, how = copies((params, how), devices)
    rows = parts(rows, devices)
    state = optimizer.init(params, how["rng"], rows)

    def step(params: Any, state: Any, rows: Any, how: Any) -> Any:
        # It counts rows by that.
        with mock.patch("jax.device_count", lambda: len(devices)):
            return optimizer.step(params, state, batch=rows, global_step_int=0, **how)

    return step, (params, state, rows, how)
