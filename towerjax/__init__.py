"""Write one tower; run it on 1 or 1,000 devices and get the same numbers."""

from towerjax.collectives import AllReduce as AllReduce
from towerjax.collectives import CrossTowerOps as CrossTowerOps
from towerjax.collectives import PinnedTree as PinnedTree
from towerjax.inference import build_eval_step as build_eval_step
from towerjax.inference import build_predict_step as build_predict_step
from towerjax.input.feed import batches as batches
from towerjax.loop.evaluate import evaluate_all as evaluate_all
from towerjax.loop.history import History as History
from towerjax.loop.history import RunSummary as RunSummary
from towerjax.loop.run import run as run
from towerjax.proof import ReplicationError as ReplicationError
from towerjax.state import TrainState as TrainState
from towerjax.step import build_train_step as build_train_step
from towerjax.strategies import Mirrored as Mirrored
from towerjax.strategies import OneDevice as OneDevice
from towerjax.tower import Tower as Tower
from towerjax.tower_local import read_local as read_local
from towerjax.types import Layout as Layout
from towerjax.types import PerTower as PerTower
from towerjax.types import Reduction as Reduction
from towerjax.types import TowerOutput as TowerOutput
from towerjax.types import Weighted as Weighted
from towerjax.update import NonFiniteError as NonFiniteError
from towerjax.variables import MirroredVar as MirroredVar
from towerjax.variables import TowerLocal as TowerLocal
from towerjax.version import __version__ as __version__
