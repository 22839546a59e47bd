"""How is a batch normalised that lies on several towers? As the whole batch.

Its ``linen`` and ``nnx`` have the layers; they are imported by themselves, because
``import towerjax`` does not bring Flax.
"""
