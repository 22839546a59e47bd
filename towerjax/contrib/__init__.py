"""What is written on the public names alone: gradient noise of the towers."""

from towerjax.contrib.tower_statistics import TowerStatistics as TowerStatistics
