"""What is written on the public names alone: gradients in few bits, their noise."""

from towerjax.contrib.compressed import Compressed as Compressed
from towerjax.contrib.diloco import DiLoCo as DiLoCo
from towerjax.contrib.diloco import LocalSGD as LocalSGD
from towerjax.contrib.tower_statistics import TowerStatistics as TowerStatistics
