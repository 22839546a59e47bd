"""The same training by other libraries: Keras, TensorFlow and PyTorch.

Each is a peer of ``towerjax bench`` in a checkout: ``benchmarks.peers:torch``.
"""

import importlib
from typing import Any


def keras(trial: Any, timing: Any) -> dict[str, Any]:
    """Keras 3 on JAX under ``DataParallel``."""
    return _module("keras_parallel").run(trial, timing)


def tensorflow(trial: Any, timing: Any) -> dict[str, Any]:
    """TensorFlow's ``MirroredStrategy``."""
    return _module("tensorflow_mirrored").run(trial, timing)


def torch(trial: Any, timing: Any) -> dict[str, Any]:
    """PyTorch's ``DistributedDataParallel``."""
    return _module("torch_ddp").run(trial, timing)


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.peers.{name}")
