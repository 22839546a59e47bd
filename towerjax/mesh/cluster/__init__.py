"""Several processes as one job: start them, join them, end them together."""

from towerjax.mesh.cluster.launcher import launch as launch
from towerjax.mesh.cluster.spec import Cluster as Cluster
from towerjax.mesh.cluster.spec import parse_spec as parse_spec
from towerjax.mesh.cluster.start import initialize as initialize
from towerjax.mesh.cluster.start import is_chief as is_chief
from towerjax.mesh.cluster.start import shutdown as shutdown
