"""Who else trains the same model from the same batch? Keras, TensorFlow, PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any

_RUNNERS = {
    "keras": "towerjax.tools.bench.peers.keras_parallel",
    "tensorflow": "towerjax.tools.bench.peers.tensorflow_mirrored",
    "torch": "towerjax.tools.bench.peers.torch_ddp",
}


def runner(peer: str) -> tuple[Callable[..., dict[str, Any]], str]:
    """What measures the trials of a peer, in a process of its own."""
    module = importlib.import_module(_RUNNERS[peer])
    return module.run, module.device()
