"""How is a batch normalised that lies on several towers? As the whole batch.

``towerjax.batch_norm.linen`` and ``towerjax.batch_norm.nnx`` have the layers; they are
imported by themselves, because ``import towerjax`` does not bring Flax.
"""
