"""A step of scenic: vision."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

import functools

import jax
import jax.numpy as jnp
import optax

from tests.foreign.adapt import Devices, Made, images
from towerjax.testing import copies, parts


def scenic(devices: Devices, masked: int = 3) -> Made:
    """A step of a classifier that masks padding rows."""
    from ml_collections import ConfigDict
    from scenic.projects.baselines import fully_connected
    from scenic.train_lib import classification_trainer, train_utils

    image, label = images()
    config = ConfigDict({"hid_sizes": (8,), "model": {"hid_sizes": (8,)}})
    meta = {"num_classes": 10, "target_is_onehot": False}
    model = fully_connected.FullyConnectedClassificationModel(config, meta)
    net = model.flax_model
    sgd = optax.sgd(0.1)
    params = net.init(jax.random.key(0), image, train=False)["params"]
    state = train_utils.TrainState(
        tx=sgd,
        opt_state=sgd.init(params),
        params=params,
        global_step=jnp.array(0),
        rng=jax.random.PRNGKey(0),
    )
    step = functools.partial(
        classification_trainer.train_step,
        flax_model=net,
        loss_fn=model.loss_function,
        lr_fn=lambda step: 0.1 * step,
        metrics_fn=model.get_metrics_fn("train"),
        config=config,
    )
    mask = jnp.ones(8).at[8 - masked :].set(0)
    batch = {"inputs": image, "label": label, "batch_mask": mask}
    batch = parts(batch, devices)
    new_state = lambda state, batch: step(state, batch)[0]  # noqa: E731
    return jax.pmap(new_state, axis_name="batch"), (copies(state, devices), batch)
