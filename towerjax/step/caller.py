"""Call programs: check and place a state and a batch, compile once, and call."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from towerjax.data.placer import PlacedBatch, Placer
from towerjax.mesh.transfer import place, readable
from towerjax.step.audit import run_audit
from towerjax.step.comparison import AuditReport
from towerjax.step.program import Program, Runner, prepare
from towerjax.step.proving import Recipe
from towerjax.step.report import StepReport, report_on
from towerjax.step.state import TrainState, join_state, split_state
from towerjax.step.state_checks import check_like, is_usable
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.door import doors
from towerjax.types.missing import explain_missing


@doors
class Caller:
    """Calls the programs of a recipe with states and batches from anywhere.

    A kind of step says what a state is, by `start`, and by `_runner_for` whether one
    runner has the programs for all states and batches.
    """

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        placer: Placer,
        max_programs: int | None,
        *,
        engine: Any,
        audits: bool = False,
    ) -> None:
        self.strategy, self._placer, self.engine = strategy, placer, engine
        self._audits = audits and placer.shares > 1  # before the next call
        self.num_parts = placer.shares  # T A: how many calls of a tower share a batch
        self.is_audited = False
        # Not where the bits of a sum have to be those that other programs give.
        leaves_out = not strategy.cross_tower_ops.needs_every_tower
        self._runner = Runner(recipe, strategy.placement, max_programs, leaves_out)
        self._runners: dict[Any, Runner] = {}  # others, made when they are needed

    if not TYPE_CHECKING:
        __getattr__ = explain_missing()

    def __init_subclass__(cls) -> None:
        """Make the public methods of each kind of step doors."""
        doors(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy})"

    def start(self, state: Any) -> TrainState:
        """The state checked and placed; itself, if that changes nothing."""
        raise NotImplementedError

    def _runner_for(self, state: TrainState, batch: PlacedBatch) -> Runner:
        """The runner that has the programs for such a state and batch."""
        batch.refuse_several()
        return self._runner

    def _shapes_of(self, state: Any) -> TrainState:
        """The shapes of a state of absent devices, or of one with these parameters."""
        return state

    @functools.cached_property
    def _counters(self) -> PyTree:
        """The step number and the key that go with what is no state."""
        # The value is cached, so it must not be traced. A key has no explicit transfer.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            counters = (np.int32(0), jax.random.key(0))
            return place(counters, self.strategy.placement, Layout.MIRRORED)

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          A ``PlacedBatch``, which the step takes as it takes a batch.

        Raises:
          ValueError: The batch is malformed, or does not divide.
        """
        return self._placer.place(batch)

    def program(self, state: Any, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be.

        Args:
          state: The state; for absent devices its shapes, or those of parameters.
          batch: A global batch, or one placed before; for absent devices shapes.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's own text.
        """
        placement = self.strategy.placement
        if placement.absent is not None:
            first = split_state(self._shapes_of(state))
            rows, *others = self._placer.shapes(batch)
            full_rows = None
            if self._runner.leaves_out_weights and not self._placer.may_pad:
                full_rows = jax.tree.leaves(rows)[0].shape[0] // placement.num_towers
            args = (*first, rows, *others)
            recipe = self._runner.recipe
            return prepare(recipe, placement, args, full_rows=full_rows)[1]()
        state, placed = self.start(state), self.place_batch(batch)
        return self._runner_for(state, placed).program(split_state(state), placed)

    def report(self, state: Any, batch: PyTree, *, timed_calls: int = 0) -> StepReport:
        """What the compiler made of the step for such a batch.

        Args:
          state: The state; it is kept. For absent devices shapes: of parameters, or
            what ``step.shapes`` gives.
          batch: A global batch, or one placed before; for absent devices shapes.
          timed_calls: So many calls are timed, on a copy of the state, which needs
            its memory once more; 0 times none.

        Returns:
          A `StepReport`: collectives, FLOPs, memory, times.

        Raises:
          ValueError: As a step's call.
        """
        return report_on(self, state, batch, timed_calls)

    def audit(self, state: Any, batch: PyTree) -> AuditReport:
        """Run two towers and one tower of the same rows, and compare what is merged.

        On one device, with so many rows for each of the two as a tower function gets;
        where batches may be padded, once more with half as many for the second. Loss,
        gradients, metrics and every other merged value are compared; ``tower.rng``
        draws the same for all rows. Nothing is updated, and the state is kept.

        Args:
          state: As for a call.
          batch: A global batch of at least two examples, or one placed before.

        Returns:
          An `AuditReport` of what was compared.

        Raises:
          SplitError: A leaf depends on how the rows were split: names the leaf, both
            numbers, and what to write instead.
          ValueError: As a step's call.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(w, batch, tower):
          ...     return tj.Weighted(((w - batch) ** 2).sum(), 1.0)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
          >>> try:
          ...     step.audit(step.init(0.0), np.arange(4, dtype=np.float32))
          ... except tj.testing.SplitError as error:
          ...     [finding.leaf for finding in error.findings]
          ['gradient', 'loss']
        """
        state = jax.tree.map(readable, self.start(state))
        how = {"parts": self._placer.shares, "pads": self._placer.may_pad}
        report = run_audit(self.engine, self.strategy, state, batch, **how)
        self._audits, self.is_audited = False, True
        return report

    def _audit_first(self, state: Any, batch: PlacedBatch) -> None:
        """Audit before the first call, where the step was built so."""
        if self._audits:
            self.audit(state, batch)

    def _call(self, state: Any, batch: PlacedBatch) -> tuple[TrainState, Any]:
        """The state as it was given to the program, and the results."""
        self._audit_first(state, batch)
        runner = self._runner_for(state, batch)
        if batch.signature not in runner.programs or not is_usable(state):
            state = self.start(state)
        try:
            return state, runner(split_state(state), batch)
        except (RuntimeError, TypeError, ValueError):
            program = runner.programs.get(batch.signature)
            # No program was made, or the devices failed after they had taken the state.
            if program is None or not is_usable(state):
                raise
            # JAX refuses a wrong state before it runs: name the leaf and the remedy.
            placed = self.start(state)
            check_like(placed, state_taken_by(program))
            if placed is state:
                raise
            return placed, runner(split_state(placed), batch)


def state_taken_by(program: Program) -> TrainState:
    """The shapes of the state that a program was compiled for."""
    return join_state(*program.call.args_info[0][:2])
