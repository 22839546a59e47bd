"""Losses of public models are read from checkouts, and asked if they are proved."""

import sys

import jax
import numpy as np
import pytest

import towerjax as tj
from benchmarks import public_losses

SOURCE = """
import flax.linen as nn

def model(latents):
    return Autoencoder(latents)

class Autoencoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x, key):
        z = nn.Dense(self.latents)(x)
        return nn.Dense(x.shape[-1])(z), z, 0.1 * z
"""


@pytest.mark.slow
def test_a_loss_of_a_checkout_is_proved(tmp_path):
    folder = tmp_path / "examples" / "vae"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(SOURCE)
    loss = public_losses.vae(tmp_path)
    assert "models" not in sys.modules and str(folder) not in sys.path
    for padded in (False, True):
        assert [x.says for x in public_losses.said_of(loss, padded)] == ["proved"]


@pytest.mark.slow
def test_a_loss_that_depends_on_the_split_is_not_proved():
    def loss_fn(params, batch, tower):
        losses = (batch["x"] - tower.local) ** 2 * params
        losses = losses - losses.max()
        return tj.Weighted.mean(losses, tower.weight)

    batch = {"x": public_losses.floats()}
    loss = public_losses.Loss(loss_fn, np.float32(1.0), batch, np.float32(0.0))
    [said] = public_losses.said_of(loss, padded=False)
    assert said.says != "proved" and said.why


def test_names_of_clip_are_those_of_older_versions():
    found = public_losses.clip(np.arange(4.0), a_max=2.0)
    np.testing.assert_array_equal(found, [0.0, 1.0, 2.0, 2.0])
    assert isinstance(found, jax.Array)
