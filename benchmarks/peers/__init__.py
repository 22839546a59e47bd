"""The same training by other libraries: Keras, TensorFlow and PyTorch.

Each times itself: it is ``by`` in a grid of `benchmarks.trials.build`.
"""

import importlib
from typing import Any


def keras(trial: Any) -> dict[str, Any]:
    """Keras 3 on JAX under ``DataParallel``."""
    return _module("keras_parallel").run(trial)


def tensorflow(trial: Any) -> dict[str, Any]:
    """TensorFlow's ``MirroredStrategy``."""
    return _module("tensorflow_mirrored").run(trial)


def torch(trial: Any) -> dict[str, Any]:
    """PyTorch's ``DistributedDataParallel``."""
    return _module("torch_ddp").run(trial)


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.peers.{name}")
