"""How fast are N towers? Sweeps of trials, timed in turns with hand-written JAX."""

from towerjax.bench.compare import Comparison as Comparison
from towerjax.bench.compare import compare as compare
from towerjax.bench.grid import Grid as Grid
from towerjax.bench.grid import Trial as Trial
from towerjax.bench.grid import read_toml as read_toml
from towerjax.bench.model import Model as Model
from towerjax.bench.protocol import TimingProtocol as TimingProtocol
from towerjax.bench.report import write_report as write_report
from towerjax.bench.results import Result as Result
from towerjax.bench.results import read_results as read_results
from towerjax.bench.sweep import sweep as sweep
