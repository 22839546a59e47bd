"""Looked at, never needed: report, bench, audit, sweeps, the command line."""

from towerjax.step.report.step_report import SideBySide as SideBySide
from towerjax.step.report.step_report import StepReport as StepReport
from towerjax.step.report.step_report import report_of as report_of
from towerjax.tools import bench as bench
from towerjax.tools import testing as testing
from towerjax.tools.report.plan import Plan as Plan
from towerjax.tools.report.plan import PlanRow as PlanRow
from towerjax.tools.report.plan import plan as plan
from towerjax.tools.sweep.result import Member as Member
from towerjax.tools.sweep.result import Sweep as Sweep
