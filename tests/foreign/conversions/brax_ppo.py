"""Train PPO of brax for some steps: `train` as it is, in its environment for tests.

Run in a checkout by `python -m tests.foreign`; ``towers`` is 0 as published.
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

# of a minibatch, on all devices
ROWS = 16
UNROLL = 5


def norm_of_one_gradient(networks: Any, devices: int, towers: int) -> float:
    """The gradient's norm of one minibatch, the same rows whatever the devices."""
    from brax.training import gradients, types  # type: ignore
    from brax.training.agents.ppo import losses  # type: ignore

    draw = np.random.default_rng(0).normal
    data = types.Transition(
        observation=draw(size=(ROWS, UNROLL, 2)),
        action=draw(size=(ROWS, UNROLL, 1)),
        reward=draw(size=(ROWS, UNROLL)) * np.arange(ROWS)[:, None],
        discount=np.ones((ROWS, UNROLL)),
        next_observation=draw(size=(ROWS, UNROLL, 2)),
        extras={
            "state_extras": {"truncation": np.zeros((ROWS, UNROLL))},
            "policy_extras": {
                "raw_action": draw(size=(ROWS, UNROLL, 1)),
                "log_prob": draw(size=(ROWS, UNROLL)),
                "distribution_params": draw(size=(ROWS, UNROLL, 2)),
            },
        },
    )
    params = losses.PPONetworkParams(
        policy=networks.policy_network.init(jax.random.key(0)),
        value=networks.value_network.init(jax.random.key(1)),
    )
    loss = functools.partial(
        losses.compute_ppo_loss, ppo_network=networks, entropy_cost=0.0
    )
    if not towers:
        grad = gradients.loss_and_pgrad(loss, "i", has_aux=True)
        parts = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), data)
        over = jax.pmap(grad, axis_name="i", in_axes=(None, None, 0, None))
        _, grads = over(params, None, parts, jax.random.key(0))
        return float(optax.global_norm(jax.tree.map(lambda x: x[0], grads)))

    def tower_fn(state: Any, batch: Any, tower: Any) -> Any:
        def loss_of(params: Any, batch: Any, tower: Any) -> Any:
            return loss(params, None, batch, tower)

        output, grads = tj.value_and_grad(loss_of)(state.params, batch, tower)
        return {"loss": output.loss, "grads": grads}

    def update_fn(state: Any, merged: Any) -> Any:
        norm = optax.global_norm(merged["grads"].value)
        return state, {"loss": merged["loss"], "norm": norm}

    step = tj.build_step(tower_fn, update_fn, tj.Mirrored(towers=towers))
    _, metrics = step(step.init(params, rng=jax.random.key(0)), data)
    return float(metrics["norm"])


def main(devices: int, towers: int) -> None:
    """Print the norms of one gradient and of the trained parameters, and the loss."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    from brax import envs  # type: ignore
    from brax.training.agents.ppo import networks, train  # type: ignore

    small = functools.partial(
        networks.make_ppo_networks,
        policy_hidden_layer_sizes=(8,),
        value_hidden_layer_sizes=(8,),
    )
    how = {"num_towers": towers} if towers else {}
    _, (_, *params), metrics = train.train(
        envs.get_environment("fast"),
        num_timesteps=4 * ROWS * UNROLL * 2,
        episode_length=20,
        num_envs=ROWS,
        batch_size=ROWS,
        unroll_length=UNROLL,
        num_minibatches=2,
        num_updates_per_batch=2,
        learning_rate=0.01,
        normalize_observations=True,
        network_factory=small,
        run_evals=False,
        **how,
    )
    norm = float(optax.global_norm(jax.tree.map(jnp.asarray, params)))
    one = norm_of_one_gradient(small(2, 1), devices, towers)
    loss = float(metrics["training/total_loss"])
    print(json.dumps({"one gradient": one, "loss": loss, "parameters": norm}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
