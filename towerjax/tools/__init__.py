"""Tools around training: reports, benchmarks, audits, sweeps, the commands."""

from towerjax.step.report import StepReport as StepReport
from towerjax.step.report import report_of as report_of
from towerjax.tools import bench as bench
from towerjax.tools import testing as testing
from towerjax.tools.sweep.result import Member as Member
from towerjax.tools.sweep.result import Sweep as Sweep
