"""Gradients in 4 bits a number, with and without feedback of the error.

python examples/compressed.py
"""

import jax
import numpy as np
import optax

import towerjax as tj
from towerjax import contrib

jax.config.update("jax_num_cpu_devices", 4)


def loss_fn(params, batch, tower):
    sign = 1 - 2 * (tower.id % 2)  # large gradients that cancel hide small ones
    losses = 0.5 * ((params - batch) ** 2).mean(axis=-1) + 0.1 * sign * params[0]
    return tj.Weighted.mean(losses, tower.weight)


batch = np.ones((8, 512), np.float32)
for name, extend in {
    "exact": None,
    "4 bits": contrib.Compressed(bits=4, above_bytes=1024),
    "no feedback": contrib.Compressed(4, error_feedback=False, above_bytes=1024),
}.items():
    step = tj.build_train_step(
        loss_fn, optax.sgd(10.0), tj.Mirrored(towers=4), extend=extend
    )
    state = step.init(np.zeros(512, np.float32))
    sent = step.report(state, batch).bytes_sent
    # The loss is another for each tower, which an audit would not accept.
    state, history = tj.run(step, state, [batch] * 200, audit=False, progress=False)
    print(f"{sent:4} bytes, loss {history.metrics['loss'][-1]:.3f}, {name}")
print(f"error at most {history.metrics['compression/error'][0]:.2f} in the first step")
