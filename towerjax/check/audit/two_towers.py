"""Two towers and one tower of a step, and what each merges of the same rows."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from towerjax.check.audit.comparison import (
    GRADIENT,
    RAISED_ON_OTHER_ROWS,
    AuditReport,
    Compared,
    Finding,
    NotAudited,
    SplitError,
    join_reports,
    judge,
)
from towerjax.check.audit.kept import too_large
from towerjax.check.audit.later_batches import Splits
from towerjax.check.audit.run_towers import RowsToRun, Towers, compare
from towerjax.jaxprs.equation import all_eqns
from towerjax.mesh.processes import call_on_first_process
from towerjax.proof.equal.one_tower import has_own_derivatives
from towerjax.proof.findings import ReplicationError
from towerjax.step.plan import Passes, Plan
from towerjax.step.run.trace import Traced
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree

_FOLLOWS = "gradients follow from the loss, which alone was run"


@dataclasses.dataclass(frozen=True, eq=False)
class StepToAudit:
    """What an audit needs of a step.

    Attributes:
      plan: Its passes.
      strategy: Where its towers are.
      state: A state.
      batch: A batch, on the host.
      gradients: Whether gradients are run even where they follow from the loss.
      leaves: The names of the leaves that are judged; None judges all.
    """

    plan: Plan
    strategy: Strategy
    state: TrainState
    batch: PyTree
    gradients: bool = True
    leaves: Callable[[str], bool] | None = None


class Audit:
    """One audit, of ``each`` rows for either of two towers."""

    def __init__(self, step: StepToAudit, each: int, *, pads: bool) -> None:
        passes = step.plan.passes
        state = step.state
        self.is_own = not passes.is_of_one_loss  # what merges is not of a loss alone
        if not self.is_own:  # which reads no optimizer's state
            state = dataclasses.replace(state, opt_state=())
        self.step = step
        self.each = each
        self.pads = pads
        self._state = state
        self.from_batch = Splits(step.batch, each)
        self._passes: Passes | None = None  # others than the step's
        if not (self.is_own or step.gradients):
            self._passes = passes.changed(differentiates=False)
        fits = lambda: too_large(state.params, 1) is None  # noqa: E731
        is_wide = step.strategy.placement.devices_each > 1
        self.is_narrow = is_wide and call_on_first_process(fits)
        self._trace()

    def towers(self, number: int, **how: Any) -> Towers:
        """So many towers of the step."""
        given = self.step.plan, self.step.strategy, number, self._state
        how = {"rows": 2 * self.each, "passes": self._passes} | how
        return Towers(*given, **how)

    def new_tower(self, *, narrow: bool = False) -> Towers:
        """One tower; where batches may be padded, with more padding than two have."""
        return self.towers(1, rows=(3 if self.pads else 2) * self.each, narrow=narrow)

    def _trace(self) -> None:
        """Trace both numbers of towers: the loss alone, if its gradient follows."""
        self.one_tower, traced = self._traced_one_tower()
        if self._passes is not None and not _gradient_follows(traced):
            self._passes = None
            self.one_tower, traced = self._traced_one_tower()
        self.two_towers = self.towers(2)
        self._traced(self.two_towers)
        bodies = [x.towers.jaxpr for x in traced.passes]
        names = {x.primitive.name for body in bodies for x in all_eqns(body)}
        draws = any(name.startswith("random_") for name in names)
        self.splits = self.from_batch.all(pads=self.pads, draws=draws)

    def _traced_one_tower(self) -> tuple[Towers, Traced]:
        """One tower and its trace; on one device, where it can be."""
        if self.is_narrow:
            one_tower = self.new_tower(narrow=True)
            try:
                return one_tower, self._traced(one_tower)
            except NotAudited:
                self.is_narrow = False  # it may name how many devices its tower is of
        one_tower = self.new_tower()
        return one_tower, self._traced(one_tower)

    def _traced(self, towers: Towers) -> Traced:
        """These towers, traced; `NotAudited` where the function takes no such rows."""
        try:
            return towers.trace(self.from_batch.first)
        except (NotAudited, ReplicationError):
            raise
        except RAISED_ON_OTHER_ROWS as error:
            lines = str(error).splitlines() or [""]
            what = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
            refused = NotAudited(f"traced for other rows and keys it raises {what}")
            for note in getattr(error, "__notes__", ()):
                refused.add_note(note)
            raise refused from error

    def unpadded(self) -> "Audit":
        """The audit of full batches alone; what two towers gave is known."""
        other = copy.copy(self)
        other.pads = False
        other.splits = [x for x in self.splits if not x.is_short]
        other.one_tower, _ = other._traced_one_tower()
        return other

    def unmasked(self) -> list[str]:
        """What counts padded rows, since nothing in it says which ones they are."""
        if not self.pads:
            return []
        return self.one_tower.trace(self.from_batch.first).proof.unmasked()

    def run(self) -> AuditReport:
        """The report; raises at the first split of which a leaf differs."""
        reports = list[AuditReport]()
        notes = list[str]()
        for run in self.compared(self.splits):
            reports.append(self.judge([run]))
            if stopped := _rounding_decides(reports[-1]):
                notes.append(stopped)
                break
        if self._passes is not None:
            notes.append(_FOLLOWS)
        return dataclasses.replace(join_reports(reports), notes=tuple(notes))

    def compared(self, splits: Sequence[RowsToRun]) -> Iterator[Compared]:
        """The splits, on two towers and on one."""
        return compare(self.one_tower, [self.two_towers], [(x, x) for x in splits])

    def judge(self, runs: Sequence[Compared]) -> AuditReport:
        """The report of such runs; raises where a leaf differs."""
        return judge(runs, 2 * self.each, self.one_tower.rtol, self.step.leaves)

    def without(
        self, findings: Sequence[Finding], one_tower: Towers, **draws: Any
    ) -> list[str]:
        """Those of the leaves that are the same of other draws, or on other towers."""
        failed = {x.split for x in findings}
        splits = [dataclasses.replace(x, **draws) for x in self.splits]
        pairs = [(x, x) for x in splits if x.name in failed]
        names = [x.leaf for x in findings]
        try:
            self._traced(one_tower)
            runs = [*compare(one_tower, [self.two_towers], pairs)]
            if not runs:
                return []
            self.judge(runs)
        except SplitError as error:
            differ = {finding.leaf for finding in error.findings}
            return [x for x in names if x not in differ]
        except NotAudited:
            return []
        return names


def _gradient_follows(traced: Traced) -> bool:
    """Whether the gradient follows from the loss, of which it is the derivative.

    Not where a rule of the user's says what a derivative is, where one is left out, or
    where a user's `shard_map` adds up what a tower's devices have.
    """
    bodies = [x.towers.jaxpr for x in traced.passes]
    if any(has_own_derivatives(body) for body in bodies):
        return False
    eqns = [eqn for body in bodies for eqn in all_eqns(body)]
    names = {eqn.primitive.name for eqn in eqns}
    return not ("shard_map" in names or any(map(_leaves_gradient_out, eqns)))


def _leaves_gradient_out(eqn: JaxprEqn) -> bool:
    """Whether a `stop_gradient` wrote it that is not one of JAX's own functions."""
    if eqn.primitive.name != "stop_gradient":
        return False
    traceback = eqn.source_info.traceback
    frames = [*traceback.frames] if traceback is not None else []
    files = [x.file_name for x in frames]
    called = [i for i, x in enumerate(frames, 1) if x.function_name == "stop_gradient"]
    callers = files[called[0] :] if called else []
    return not callers or not callers[0].startswith(str(Path(jax.__file__).parent))


def _rounding_decides(report: AuditReport) -> str | None:
    """What to say where rounding decides most gradients, so that no more are run."""
    gradients = [x for x in report.compared if GRADIENT in x]
    decided = [x for x in report.by_rounding if GRADIENT in x]
    if 2 * len(decided) <= len(gradients):
        return None
    return (
        f"rounding decides {len(decided)} of {len(gradients)} gradients, so that no"
        " further split was compared"
    )
