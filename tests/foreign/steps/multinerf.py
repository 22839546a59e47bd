"""A step of multinerf: radiance fields."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any

import jax
import jax.numpy as jnp

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import copies, parts


def multinerf(devices: Devices, heavy: float = 4.0) -> Made:
    """A step on rays of unequal weights, as of a Bayer mosaic."""
    import gin
    from internal import configs, models, train_utils, utils

    sizes = {"net_depth": 1, "net_width": 8, "bottleneck_width": 4, "max_deg_point": 2}
    samples = {"num_prop_samples": 4, "num_nerf_samples": 4}
    given = ("NerfMLP", sizes), ("PropMLP", sizes), ("Model", samples)
    for kind, values in given:
        gin.parse_config([f"{kind}.{name} = {x}" for name, x in values.items()])
    config = configs.Config(randomized=False)
    rays = utils.dummy_rays(include_exposure_values=True)
    model, params = models.construct_model(jax.random.PRNGKey(0), rays, config)
    state, _ = train_utils.create_optimizer(config, params)
    step = train_utils.create_train_step(model, config)
    weights = jnp.array([heavy, heavy, heavy, 1, 1, 1, 1, 1])
    rows = {
        "origins": normal(8, 3),
        "directions": normal(8, 3, seed=1),
        "viewdirs": normal(8, 3, seed=1),
        "radii": jnp.full((8, 1), 0.01),
        "lossmult": weights[:, None],
        "near": jnp.full((8, 1), 0.1),
        "far": jnp.full((8, 1), 5.0),
    }
    rays = jax.tree.map(lambda x: jnp.repeat(x, 8, 0), rays).replace(**rows)
    batch = utils.Batch(rays=rays, rgb=jax.nn.sigmoid(normal(8, 3, seed=2)))
    keys = copies(jax.random.PRNGKey(0), devices)

    def new_state(state: Any, batch: Any, keys: Any) -> Any:
        return step(keys, state, batch, None, 0.5, 1.0)[0]

    return new_state, (copies(state, devices), parts(batch, devices), keys)
