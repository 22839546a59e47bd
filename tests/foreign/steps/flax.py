"""Steps of the examples of Flax."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

import functools

import jax
import jax.numpy as jnp
import optax

from tests.foreign.adapt import Devices, Made, images
from towerjax.testing import copies, parts, placed


def imagenet(devices: Devices) -> Made:
    """A step of a ResNet of one block, with BatchNorm."""
    import models
    import train
    from ml_collections import ConfigDict

    kind = functools.partial(
        models.ResNet, stage_sizes=[1], block_cls=models.ResNetBlock, num_filters=4
    )
    net = train.create_model(model_cls=kind, half_precision=False)
    config = ConfigDict({"half_precision": False, "momentum": 0.9})
    rate = lambda step: 0.1  # noqa: E731
    state = train.create_train_state(jax.random.key(0), config, net, 8, rate)
    step = functools.partial(train.train_step, learning_rate_fn=rate)
    batch = parts(dict(zip(("image", "label"), images(), strict=True)), devices)
    return jax.pmap(step, axis_name="batch"), (copies(state, devices), batch)


def lm1b(devices: Devices) -> Made:
    """A step of a language model on rows of unequal lengths, by jit with shardings."""
    import models
    import train
    from flax.training.train_state import TrainState

    sizes = dict.fromkeys(("emb_dim", "qkv_dim", "mlp_dim", "max_len"), 16)
    config = models.TransformerConfig(
        16, 16, num_heads=2, num_layers=1, dropout_rate=0.1, **sizes
    )
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 1, 16)
    tokens *= jnp.arange(16) < 2 * jnp.arange(1, 9)[:, None]
    net = models.TransformerLM(config)
    params = jax.jit(net.init)(jax.random.key(1), tokens)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))
    step = jax.jit(train.train_step, static_argnums=(2, 3, 4))
    how = config, lambda step: 0.1, 0.0, jax.random.key(2)
    batch = placed({"inputs": tokens}, devices, "data")
    return lambda state, batch: step(state, batch, *how), (
        placed(state, devices),
        batch,
    )
