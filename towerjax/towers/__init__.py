"""Towers: strategies, the tower that a function sees, variables, and executors."""

from towerjax.data.distribute import DistributedDataset as DistributedDataset
from towerjax.data.stream import InputContext as InputContext
from towerjax.towers.saved import restored_values as restored_values
from towerjax.towers.saved import saved_values as saved_values
from towerjax.towers.variables import MirroredVar as MirroredVar
from towerjax.towers.variables import read_local as read_local
from towerjax.types import Layout as Layout
