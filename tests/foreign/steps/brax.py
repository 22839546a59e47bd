"""Steps of brax: reinforcement learning in a physics engine."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import copies, inner, parts


def ppo(devices: Devices, **options: Any) -> Made:
    """A minibatch of PPO."""
    from brax.training import gradients, types
    from brax.training.agents.ppo import losses, networks

    net = networks.make_ppo_networks(3, 2)
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=net, **options)
    sgd = optax.sgd(0.1)
    update = gradients.gradient_update_fn(loss, sgd, "i", has_aux=True)

    def step(params: Any, opt_state: Any, data: Any) -> Any:
        key = jax.random.key(0)
        return update(params, None, data, key, optimizer_state=opt_state)[1:]

    policy = net.policy_network
    value = net.value_network
    params = losses.PPONetworkParams(
        policy=policy.init(jax.random.key(0)), value=value.init(jax.random.key(1))
    )
    means = normal(8, 5, 4, seed=3)
    acted = {"raw_action": normal(8, 5, 2, seed=4), "log_prob": normal(8, 5, seed=5)}
    data = types.Transition(
        observation=normal(8, 5, 3, seed=1),
        action=acted["raw_action"],
        reward=normal(8, 5, seed=2) * (1 + jnp.arange(8.0)[:, None]),
        discount=jnp.ones((8, 5)),
        next_observation=normal(8, 5, 3, seed=6),
        extras={
            "state_extras": {"truncation": jnp.zeros((8, 5))},
            "policy_extras": {**acted, "distribution_params": means},
        },
    )
    state = copies((params, sgd.init(params)), devices)
    return jax.pmap(step, axis_name="i"), (*state, parts(data, devices))


def apg(devices: Devices, bound: float = 0.1) -> Made:
    """A minibatch of analytic policy gradients."""
    from brax.envs import base
    from brax.training.acme import running_statistics
    from brax.training.agents.apg import networks, train

    class Env:  # pushed points
        def step(self, state: Any, action: jax.Array) -> Any:
            obs = state.obs + 0.1 * action
            return state.replace(obs=obs, reward=-((obs - 1) ** 2).sum(-1))

    net = networks.make_apg_networks(2, 2)
    sgd = optax.sgd(0.1)
    define = functools.partial(inner, train.train)
    loss = define(
        "loss",
        env_step=define("env_step", env=Env()),
        make_policy=functools.partial(
            networks.make_inference_fn(net), deterministic=True
        ),
        horizon_length=4,
        action_repeat=1,
    )
    step = define(
        "minibatch_step",
        optimizer=sgd,
        loss_grad=jax.grad(loss, has_aux=True),
        clip_by_global_norm=define("clip_by_global_norm", max_gradient_norm=bound),
    )
    obs = normal(8, 2) * (1 + jnp.arange(8.0)[:, None])
    state = base.State(None, obs, jnp.zeros(8), jnp.zeros(8))
    params = net.policy_network.init(jax.random.key(0))
    of_obs = running_statistics.init_state(jax.ShapeDtypeStruct((2,), "float32"))

    def of_device(params: Any, opt_state: Any, of_obs: Any, state: Any) -> Any:
        carry = opt_state, of_obs, params, jax.random.PRNGKey(0), state
        opt_state, of_obs, params, *_ = step(carry, 0)[0]
        return params, opt_state, of_obs

    held = copies((params, sgd.init(params), of_obs), devices)
    return jax.pmap(of_device, axis_name="i"), (*held, parts(state, devices))
