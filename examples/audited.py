"""Audit a loss that replicates, and one that divides by the weight too early.

The output is which results of the good loss were compared, and how many splits of the
batch were tried. Then come the results of the bad loss that differ between splits, each
with the number of towers and the split.

    python examples/audited.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

draw = np.random.default_rng(0)
batch = {
    "x": draw.normal(size=(14, 3)).astype(np.float32),
    "y": draw.normal(size=14).astype(np.float32),
}
params = {"w": jnp.ones(3)}


def good(params, batch, tower):
    losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return tj.Weighted.mean(losses, tower.weight)


def bad(params, batch, tower):  # divides too early
    return tj.Weighted(good(params, batch, tower).value, 1.0)


report = tj.testing.assert_replicates(good, params, batch, towers=(3, 8))
print(report.compared, report.splits)
try:
    tj.testing.assert_replicates(bad, params, batch, towers=(2, 8))
except tj.testing.SplitError as error:
    for finding in error.findings:
        print(finding.leaf, finding.towers, finding.split)
