"""`Audit`: two towers and one tower of a step, and their results for the same rows."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from towerjax.check.audit.kept import too_large
from towerjax.check.audit.later_batches import Splits
from towerjax.check.audit.run_towers import RowsToRun, Towers, compare
from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.comparison import (
    RAISED_ON_OTHER_ROWS,
    AuditReport,
    Compared,
    Finding,
    NotAudited,
    SplitError,
    join_reports,
    judge,
)
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.equality.walk.own_derivatives import has_own_derivatives
from towerjax.prover.leaf_name import LeafPart, part_of
from towerjax.prover.replication.findings import ReplicationError
from towerjax.step.plan import Passes, Plan
from towerjax.step.run.trace import Traced
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree

_FOLLOWS = "only the loss was run, because the gradients follow from it"


@dataclasses.dataclass(frozen=True, eq=False)
class StepToAudit:
    """The parts of a step that an audit needs.

    Attributes:
      plan: The plan, whose passes are run.
      strategy: The strategy of the step's towers.
      state: A state.
      batch: A batch, on the host.
      gradients: Whether gradients are run even if they follow from the loss.
      leaves: A function of a leaf's name: whether it is compared. None compares all.
      unproved: The proof's results for leaves that it does not prove.
    """

    plan: Plan
    strategy: Strategy
    state: TrainState
    batch: PyTree
    gradients: bool = True
    leaves: Callable[[str], bool] | None = None
    unproved: Sequence[Equality] = ()


class Audit:
    """An audit of a step, with ``tower_rows`` rows for each of two towers."""

    def __init__(self, step: StepToAudit, tower_rows: int, *, pads: bool) -> None:
        passes = step.plan.passes
        state = step.state
        self.is_own = not passes.is_of_one_loss  # whether more than a loss is merged
        if not self.is_own:  # only a loss is run, which reads no state of the optimizer
            state = dataclasses.replace(state, opt_state=())
        self.step = step
        self.tower_rows = tower_rows
        self.pads = pads
        self._state = state
        self.from_batch = Splits(step.batch, tower_rows)
        self._passes: Passes | None = None  # passes to run in place of the step's own
        if not (self.is_own or step.gradients):
            self._passes = passes.changed(differentiates=False)

        def fits() -> bool:
            return too_large(state.params, 1) is None

        placement = step.strategy.placement
        is_wide = placement.devices_each > 1
        self.is_narrow = is_wide and placement.processes.call_on_first(fits)
        self._trace()

    def towers(self, number: int, **fields: Any) -> Towers:
        """Put the step's passes on ``number`` towers of one device."""
        fields = {"rows": 2 * self.tower_rows, "passes": self._passes} | fields
        return Towers(self.step.plan, self.step.strategy, number, self._state, **fields)

    def new_tower(self, *, narrow: bool = False) -> Towers:
        """Put the passes on one tower with more padding than two towers have.

        If batches are not padded, there is no padding.
        """
        rows = (3 if self.pads else 2) * self.tower_rows
        return self.towers(1, rows=rows, narrow=narrow)

    def _trace(self) -> None:
        """Trace two towers and one; only the loss, if the gradient follows from it."""
        self.one_tower, traced = self._traced_one_tower()
        if self._passes is not None and not _gradient_follows(traced):
            self._passes = None
            self.one_tower, traced = self._traced_one_tower()
        self.two_towers = self.towers(2)
        self._traced(self.two_towers)
        bodies = [x.towers.jaxpr for x in traced.passes]
        names = {x.primitive.name for body in bodies for x in all_eqns(body)}
        draws = any(name.startswith("random_") for name in names)
        drifts = self.step.plan.keeps_local and bool(jax.tree.leaves(self._state.local))
        self.splits = self.from_batch.all(pads=self.pads, draws=draws, drifts=drifts)

    def _traced_one_tower(self) -> tuple[Towers, Traced]:
        """Trace the passes on one tower, if possible on one device."""
        if self.is_narrow:
            one_tower = self.new_tower(narrow=True)
            try:
                return one_tower, self._traced(one_tower)
            except NotAudited:
                self.is_narrow = False  # the function may need all devices of a tower
        one_tower = self.new_tower()
        return one_tower, self._traced(one_tower)

    def _traced(self, towers: Towers) -> Traced:
        """Trace these towers; raise `NotAudited` if that fails."""
        try:
            return towers.trace(self.from_batch.first)
        except (NotAudited, ReplicationError):
            raise
        except RAISED_ON_OTHER_ROWS as error:
            lines = str(error).splitlines() or [""]
            fault = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
            refused = NotAudited(
                f"its function, traced for other rows and keys, raises {fault}"
            )
            for note in getattr(error, "__notes__", ()):
                refused.add_note(note)
            raise refused from error

    def unpadded(self) -> "Audit":
        """Make an audit with the same two towers that runs full batches only."""
        other = copy.copy(self)
        other.pads = False
        other.splits = [x for x in self.splits if not x.is_short]
        other.one_tower, _ = other._traced_one_tower()
        return other

    def unmasked(self) -> list[str]:
        """Name the leaves that include padding, as nothing masks it."""
        if not self.pads:
            return []
        return self.one_tower.trace(self.from_batch.first).proof.unmasked()

    def run(self) -> AuditReport:
        """Run and compare all splits; raise at the first where a leaf differs."""
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
        """Yield the results for each split, on two towers and on one."""
        return compare(self.one_tower, [self.two_towers], [(x, x) for x in splits])

    def judge(self, runs: Sequence[Compared]) -> AuditReport:
        """Judge compared runs; raise if a leaf differs."""
        return judge(runs, 2 * self.tower_rows, self.one_tower.rtol, self.step.leaves)

    def without(
        self, findings: Sequence[Finding], one_tower: Towers, **draws: Any
    ) -> list[str]:
        """Run one tower in another way, and list the leaves that then agree.

        ``findings`` are leaves that differ. ``one_tower`` replaces the one tower, and
        ``draws`` are changes of the rows' random draws.
        """
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
    """Decide whether the gradient is exactly the derivative of the loss.

    It is not if the user wrote a derivative as a custom_jvp or custom_vjp, if a
    `stop_gradient` leaves one out, or if a user's `shard_map` adds up values of a
    tower's devices.
    """
    bodies = [x.towers.jaxpr for x in traced.passes]
    if any(has_own_derivatives(body) for body in bodies):
        return False
    eqns = [eqn for body in bodies for eqn in all_eqns(body)]
    names = {eqn.primitive.name for eqn in eqns}
    return not ("shard_map" in names or any(map(_leaves_gradient_out, eqns)))


def _leaves_gradient_out(eqn: JaxprEqn) -> bool:
    """Decide whether an equation is a `stop_gradient` that the user wrote."""
    if eqn.primitive.name != "stop_gradient":
        return False
    traceback = eqn.source_info.traceback
    frames = [*traceback.frames] if traceback is not None else []
    files = [x.file_name for x in frames]
    called = [i for i, x in enumerate(frames, 1) if x.function_name == "stop_gradient"]
    callers = files[called[0] :] if called else []
    return not callers or not callers[0].startswith(str(Path(jax.__file__).parent))


def _rounding_decides(report: AuditReport) -> str | None:
    """Note that most gradients are no more than rounding errors.

    Such a note ends an audit. The result is None if this is not so.
    """
    gradients = [x for x in report.compared if part_of(x) is LeafPart.GRADIENT]
    decided = [x for x in report.by_rounding if part_of(x) is LeafPart.GRADIENT]
    if 2 * len(decided) <= len(gradients):
        return None
    return (
        f"rounding decides {len(decided)} of {len(gradients)} gradients, so that no"
        " further split was compared"
    )
