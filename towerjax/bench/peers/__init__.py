"""Who else trains the same model from the same batch? Keras, TensorFlow, PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any

_RUNNERS = {
    "keras": "towerjax.bench.peers.keras_parallel",
    "tensorflow": "towerjax.bench.peers.tensorflow_mirrored",
    "torch": "towerjax.bench.peers.torch_ddp",
}


def runner(peer: str) -> tuple[Callable[..., dict[str, Any]], str]:
    """What measures the trials of a peer, in a process of its own.

    Args:
      peer: ``keras``, ``tensorflow`` or ``torch``, which is installed.

    Returns:
      ``(run, device)``: ``(trial, timing) -> figures``, and a device's name.
    """
    module = importlib.import_module(_RUNNERS[peer])
    return module.run, module.device()
