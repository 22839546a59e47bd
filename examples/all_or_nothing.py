"""Go on with a run after a hook has failed, from the state and batches of the error.

The hook raises an error after step 5. The output is the note that the run adds to this
error, and True: the resumed run ends with the bits of a run without an error.

    python examples/all_or_nothing.py
"""

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(50, 3)).astype(np.float32)}


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(((params - batch["x"]) ** 2).sum(-1), tower.weight)


strategy = tj.Mirrored(towers=8)
step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy, remainder="pad")


def hook(number, metrics):
    if number == 5:
        raise OSError("the disk is full")


def batches():
    return tj.batches(data, 16, epochs=3, seed=0)


state = step.init(np.zeros(3, np.float32))
try:
    state, _ = tj.run(step, state, batches(), hooks=[hook], progress=False)
except OSError as error:
    print(error.__notes__[0].split(". ")[0])
    left = vars(error)  # error.state, error.batches
    state, history = tj.run(step, left["state"], left["batches"], progress=False)

undisturbed = step.init(np.zeros(3, np.float32))
undisturbed, _ = tj.run(step, undisturbed, batches(), progress=False)
print((np.asarray(state.params) == np.asarray(undisturbed.params)).all())
