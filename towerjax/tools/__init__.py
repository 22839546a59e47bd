"""Tools around training: reports, benchmarks, audits, sweeps and the commands."""

from towerjax import testing as testing
from towerjax.check.replay.replay import replay as replay
from towerjax.check.replay.report import ReplayReport as ReplayReport
from towerjax.check.replay.report import WrongBits as WrongBits
from towerjax.check.report.report import StepReport as StepReport
from towerjax.check.report.report import report_of as report_of
from towerjax.jaxprs.flops import Flops as Flops
from towerjax.jaxprs.flops import count_flops as count_flops
from towerjax.sweeps.bench import Timings as Timings
from towerjax.sweeps.bench import bench as bench
from towerjax.sweeps.train import Member as Member
from towerjax.sweeps.train import Sweep as Sweep
from towerjax.tools.mfu import mfu as mfu
