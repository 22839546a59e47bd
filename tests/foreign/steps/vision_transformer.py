"""Steps of vision_transformer."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

import functools

import jax
import optax

from tests.foreign.adapt import Devices, Made, images, normal
from towerjax.testing import copies, parts


def vit(devices: Devices, dropout: float = 0.0) -> Made:
    """A step of a vision transformer, with two micro-batches."""
    from ml_collections import ConfigDict
    from vit_jax import models_vit, train

    image, label = images()
    rates = {"dropout_rate": dropout, "attention_dropout_rate": 0.0}
    sizes = {"mlp_dim": 16, "num_heads": 2, "num_layers": 1}
    net = models_vit.VisionTransformer(
        num_classes=10,
        patches=ConfigDict({"size": (4, 4)}),
        transformer=sizes | rates,
        hidden_size=8,
        head_bias_init=0.1,
    )
    params = jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), image)
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), params["params"])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    update = train.make_update_fn(apply_fn=net.apply, accum_steps=2, tx=tx)
    batch = {"image": image, "label": jax.nn.one_hot(label, 10)}
    state = copies((params, tx.init(params)), devices)
    keys = copies(jax.random.PRNGKey(0), devices)
    return update, (*state, parts(batch, devices), keys)


def with_dropout(devices: Devices) -> Made:
    """The same with dropout, which each device draws itself."""
    return vit(devices, dropout=0.1)
