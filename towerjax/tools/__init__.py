"""Tools around training: reports, benchmarks, audits, sweeps, the commands."""

from towerjax.step.look.report import StepReport as StepReport
from towerjax.step.look.report import report_of as report_of
from towerjax.tools import testing as testing
from towerjax.tools.sweep.bench import Timings as Timings
from towerjax.tools.sweep.bench import bench as bench
from towerjax.tools.sweep.train import Member as Member
from towerjax.tools.sweep.train import Sweep as Sweep
