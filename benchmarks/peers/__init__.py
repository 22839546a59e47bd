"""The same training by other libraries: Keras, TensorFlow and PyTorch.

Each times itself: it is ``by`` in a grid of `benchmarks.peers.trials`.
"""
