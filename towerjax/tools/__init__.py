"""Looked at, never needed: report, bench, audit, the command line."""

from towerjax.step.report.step_report import StepReport as StepReport
from towerjax.tools import bench as bench
from towerjax.tools import testing as testing
from towerjax.tools.report.hardware import Hardware as Hardware
from towerjax.tools.report.hardware import Link as Link
from towerjax.tools.report.measured import measure_hardware as measure_hardware
from towerjax.tools.report.plan import plan as plan
from towerjax.tools.report.plan_report import Plan as Plan
from towerjax.tools.report.plan_report import PlanRow as PlanRow
