"""Tools around training: reports, plans, benchmarks, audits, sweeps, the commands."""

from towerjax.step.report.step_report import SideBySide as SideBySide
from towerjax.step.report.step_report import StepReport as StepReport
from towerjax.step.report.step_report import report_of as report_of
from towerjax.tools import bench as bench
from towerjax.tools import testing as testing
from towerjax.tools.plans import Plan as Plan
from towerjax.tools.plans import PlanRow as PlanRow
from towerjax.tools.plans import plan as plan
from towerjax.tools.sweep.result import Member as Member
from towerjax.tools.sweep.result import Sweep as Sweep
