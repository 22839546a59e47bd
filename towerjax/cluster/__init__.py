"""Several processes as one job: start them, join them, end them together."""

from towerjax.cluster.launcher import launch as launch
from towerjax.cluster.spec import Cluster as Cluster
from towerjax.cluster.spec import parse_spec as parse_spec
from towerjax.cluster.start import initialize as initialize
from towerjax.cluster.start import is_chief as is_chief
from towerjax.cluster.start import shutdown as shutdown
