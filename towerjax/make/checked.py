"""Make the step of a plan, with the checks of `towerjax.check`."""

from typing import Any

from towerjax.data.placer import Placer
from towerjax.step.plan import Plan
from towerjax.step.step import Step


class _LoadedWhenAsked:
    """A stand-in for `towerjax.check.questions`, which imports it at the first use.

    A step with ``audit=False`` on which no check is called never imports it.
    """

    def __getattr__(self, name: str) -> Any:
        from towerjax.check import questions

        return getattr(questions, name)


_CHECKS: Any = _LoadedWhenAsked()


def step_of(plan: Plan, *, placer: Placer | None = None) -> Step[Any]:
    """Make the step of a plan; its first call proves or audits it as the plan says."""
    return Step(plan, _CHECKS, placer=placer)
