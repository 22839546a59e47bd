"""Steps of big_vision."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any

import jax
import optax

from tests.foreign.adapt import Devices, Made, images, normal
from towerjax.testing import inner, placed


def vit_by_jit(devices: Devices, **config: Any) -> Made:
    """A step of a vision transformer by jit with shardings."""
    from big_vision import train
    from big_vision.models import vit
    from ml_collections import ConfigDict

    jax.config.update("jax_transfer_guard", "allow")  # which train.py disallows
    image, label = images()
    net = vit.Model(10, patch_size=(4, 4), width=8, depth=1, num_heads=2, mlp_dim=16)
    given: Any = ConfigDict(
        {"loss": "softmax_xent", "schedule": [(".*", {})], **config}
    )
    params = jax.jit(net.init)(jax.random.key(0), image)["params"]
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), params)
    tx = optax.chain(optax.scale_by_schedule(lambda step: 1.0), optax.sgd(0.1))
    step = inner(
        train.main,
        "update_fn",
        config=given,
        devices_flat=devices,
        model=net,
        tx=tx,
    )
    state = {"params": params, "opt": tx.init(params)}
    state, key = placed((state, jax.random.PRNGKey(0)), devices)
    batch = {"image": image, "labels": jax.nn.one_hot(label, 10)}
    return jax.jit(step), (state, key, placed(batch, devices, "data"))


def with_mixup(devices: Devices) -> Made:
    """The same with mixup among the images of each device."""
    return vit_by_jit(devices, mixup={"p": 0.2})
