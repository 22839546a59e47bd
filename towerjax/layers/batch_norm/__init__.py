"""Batch norm over the whole batch, on any number of towers.

The layers are in ``linen`` and ``nnx``, which the caller imports, because ``import
towerjax`` does not import Flax.
"""
