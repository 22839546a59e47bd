"""A step of the examples of Haiku."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

import jax

from tests.foreign.adapt import Devices, Made, images
from towerjax.testing import copies, parts


def imagenet(devices: Devices) -> Made:
    """A step of a ResNet of four blocks, with BatchNorm."""
    import haiku as hk
    from absl import flags
    from examples.imagenet import train

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train"])
    blocks = {"bottleneck": False, "channels_per_group": (8, 8, 8, 8)}
    hk.nets.ResNet50 = lambda classes, **how: hk.nets.ResNet(
        (1, 1, 1, 1), classes, **blocks, **how
    )
    batch = dict(zip(("images", "labels"), images(32), strict=True))
    state = jax.jit(train.initial_state)(jax.random.PRNGKey(0), batch)
    return train.train_step, (copies(state, devices), parts(batch, devices))
