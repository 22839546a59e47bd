"""Write one tower; run it on 1 or 1,000 devices and get the same numbers."""

import sys as _sys
from typing import TYPE_CHECKING

from towerjax import collectives, layers, loop, metrics, towers
from towerjax.check.replay.report import CorruptionError
from towerjax.collectives import AllReduce, PinnedTree
from towerjax.data.feed import batches
from towerjax.layers import sparse
from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.evaluate import evaluate
from towerjax.loop.history import History
from towerjax.loop.run import run
from towerjax.loop.stopping import EarlyStopping
from towerjax.loop.writers import JsonLines, TensorBoard
from towerjax.make.builders import build_eval_step, build_predict_step, build_step
from towerjax.make.gradient import value_and_grad
from towerjax.make.of_loss import of_loss
from towerjax.make.train import apply_gradients, build_train_step
from towerjax.mesh import cluster
from towerjax.mesh.absent import Absent
from towerjax.metrics.weighted import Weighted, penalty
from towerjax.prover.replication.findings import ReplicationError
from towerjax.step.state.desync import DesyncError, check_mirrored
from towerjax.step.state.nonfinite import NonFiniteError
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Mirrored, OneDevice
from towerjax.towers.tower import Tower
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, Reduction, Rows, Sum, TowerOutput, Whole
from towerjax.types import namespaces as _namespaces
from towerjax.types.version import __version__

__all__ = [
    "Absent",
    "AllReduce",
    "CheckpointError",
    "Checkpointer",
    "CorruptionError",
    "DesyncError",
    "EarlyStopping",
    "History",
    "JsonLines",
    "Mirrored",
    "NonFiniteError",
    "OneDevice",
    "PerTower",
    "PinnedTree",
    "Reduction",
    "ReplicationError",
    "Rows",
    "Sum",
    "TensorBoard",
    "Tower",
    "TowerLocal",
    "TowerOutput",
    "TrainState",
    "Weighted",
    "Whole",
    "__version__",
    "apply_gradients",
    "batches",
    "build_eval_step",
    "build_predict_step",
    "build_step",
    "build_train_step",
    "check_mirrored",
    "cluster",
    "collectives",
    "contrib",
    "estimator",
    "evaluate",
    "layers",
    "loop",
    "metrics",
    "of_loss",
    "penalty",
    "run",
    "sparse",
    "sweep",
    "testing",
    "tf1",
    "tools",
    "towers",
    "value_and_grad",
]

if TYPE_CHECKING:
    from towerjax import contrib, testing, tf1, tools
    from towerjax.sweeps.train import sweep
    from towerjax.tf1 import estimator
else:  # these take a fifth of the import, and few programs use them
    __getattr__ = _namespaces.later_in_module(
        __name__,
        contrib="towerjax.contrib",
        estimator="towerjax.tf1.estimator",
        sweep="towerjax.sweeps.train:sweep",
        testing="towerjax.testing",
        tf1="towerjax.tf1",
        tools="towerjax.tools",
    )

_sys.modules[__name__].__class__ = _namespaces.Package
for _space in (cluster, collectives, layers, loop, metrics, sparse, towers):
    _namespaces.furnish(_space)


def __dir__() -> list[str]:
    """Return the public names, without the modules of the package."""
    return __all__
