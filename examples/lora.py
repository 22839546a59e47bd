"""Train a product of low rank beside a frozen base in 8 bits (LoRA).

Only the adapter is trained: 48 numbers, while the base has 128. The output is the loss
and the numbers that a step sends, the size of the optimizer's state, and whether the
base is unchanged.

    python examples/lora.py
"""

import re

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)


def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)


base = draw(16, 8)  # trained elsewhere
scale = np.abs(base).max() / 127
x = draw(61, 16)
batch = {"x": x, "y": x @ (base + 0.3 * draw(16, 2) @ draw(2, 8))}
params = {
    "base": {"int8": np.round(base / scale).astype(np.int8), "scale": scale},
    "adapter": {"a": 0.1 * draw(16, 2), "b": np.zeros((2, 8), np.float32)},
}


def loss_fn(params, batch, tower):  # LoRA: adds a product of low rank
    base = params["base"]
    adapter = params["adapter"]
    whole = base["int8"] * base["scale"] + adapter["a"] @ adapter["b"]
    errors = batch["x"] @ whole - batch["y"]
    return tj.Weighted.mean((errors**2).sum(axis=1), tower.weight)


step = tj.build_train_step(
    loss_fn,
    optax.adam(0.02),
    tj.Mirrored(towers=8),
    remainder="pad",
    trainable={"base": False, "adapter": True},
)
state = step.init(params)
program = step.program(state, batch).call.as_text()
[sent] = re.findall(r"= f32\[(\d+)\].* all-reduce\(", program)
for _ in range(300):
    state, metrics = step(state, batch)
step.settle()
print(f"loss {metrics['loss']:.3f}, numbers sent: {sent}")
print("optimizer state:", sum(x.size for x in jax.tree.leaves(state.opt_state)))
print(
    state.params["base"]["int8"].dtype, (state.params["base"]["scale"] == scale).all()
)
