"""The training loop: `run`, evaluation, history, writers and checkpoints."""

from towerjax.loop.checkpoint.record import CheckpointRecord as CheckpointRecord
from towerjax.loop.history import RunSummary as RunSummary
from towerjax.loop.options import WithState as WithState
from towerjax.loop.writers import Csv as Csv
from towerjax.loop.writers import Curves as Curves
