"""An actor and a critic: two losses, two optimizers, one step.

python examples/actor_critic.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

OPTIMIZERS = {"actor": optax.adam(0.03), "critic": optax.sgd(0.2)}
BEST = np.array([2, 0, 1, 3])  # the arm that pays, in each of four rooms


def tower_fn(state, batch, tower):
    room, params = batch["room"], state.params
    arm = jax.random.categorical(tower.rng, params["actor"][room])
    paid = (arm == jnp.asarray(BEST)[room]).astype(jnp.float32)

    def critic_loss(values, batch, tower):
        return tj.Weighted.mean((values[room] - paid) ** 2, tower.weight)

    def actor_loss(logits, batch, tower):
        advantage = paid - params["critic"][room]
        chosen = jax.nn.log_softmax(logits[room])[jnp.arange(len(arm)), arm]
        return tj.Weighted.mean(-advantage * chosen, tower.weight)

    _, actor = tj.value_and_grad(actor_loss)(params["actor"], batch, tower)
    loss, critic = tj.value_and_grad(critic_loss)(params["critic"], batch, tower)
    metrics = {"loss": loss, "reward": tj.Weighted.mean(paid, tower.weight)}
    return {"metrics": metrics, "grads": {"actor": actor, "critic": critic}}


def update_fn(state, merged):
    params, opt_state = {}, {}
    for name, optimizer in OPTIMIZERS.items():
        grads, own = merged["grads"][name].value, state.params[name]
        updates, opt_state[name] = optimizer.update(grads, state.opt_state[name], own)
        params[name] = optax.apply_updates(own, updates)
    after = dataclasses.replace(state, params=params, opt_state=opt_state)
    return after, merged["metrics"]


step = tj.build_step(tower_fn, update_fn, tj.Mirrored(towers=4), remainder="pad")
params = {"actor": np.zeros((4, 4), np.float32), "critic": np.zeros(4, np.float32)}
opt_state = {name: OPTIMIZERS[name].init(params[name]) for name in params}
state = step.init(params, opt_state=opt_state)
batches = [{"room": np.arange(66) % 4}] * 300
state, history = tj.run(step, state, batches, progress=False)
rewards = history.metrics["reward"]
print(f"reward {rewards[0]:.1f}, after {len(rewards)} steps {rewards[-1]:.1f}")
