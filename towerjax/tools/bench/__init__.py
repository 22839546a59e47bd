"""Benchmarks: sweeps of trials, timed in turns with hand-written JAX."""

from towerjax.tools.bench.models import Model as Model
from towerjax.tools.bench.protocol import Grid as Grid
from towerjax.tools.bench.protocol import TimingProtocol as TimingProtocol
from towerjax.tools.bench.protocol import Trial as Trial
from towerjax.tools.bench.protocol import read_toml as read_toml
from towerjax.tools.bench.results import Comparison as Comparison
from towerjax.tools.bench.results import Result as Result
from towerjax.tools.bench.results import compare as compare
from towerjax.tools.bench.results import read_results as read_results
from towerjax.tools.bench.sweep import sweep as sweep
