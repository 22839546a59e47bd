"""`Examined`: prove, compile, audit and report on a step, and find what failed."""

import dataclasses
import functools
import time

import jax
import numpy as np

from towerjax.data.placer import PlacedBatch, Placer
from towerjax.mesh.transfer import place, readable
from towerjax.step.look.advice import crosses_rows
from towerjax.step.look.audit import run_audit
from towerjax.step.look.audited import (
    ASKED,
    is_wanted,
    keep,
    noting_its_audit,
    program_hash,
    refuse_unasked,
    tell_not_audited,
    verdict_on,
)
from towerjax.step.look.comparison import (
    AuditReport,
    NotAudited,
    SplitError,
)
from towerjax.step.look.report import StepReport, report_on, time_program
from towerjax.step.run.compile import Program, compile_step
from towerjax.step.run.engine import Engine, StepOptions
from towerjax.step.run.policies import StatePolicy
from towerjax.step.run.programs import Programs, send_shared
from towerjax.step.run.prove import Proof, prove
from towerjax.step.run.trace import Traced, trace
from towerjax.step.run.verdicts import Verdicts
from towerjax.step.state.faults import Place
from towerjax.step.state.train_state import (
    TrainState,
    join_local,
    make_state,
    split_state,
    state_layout,
    step_number,
)
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.door import doors
from towerjax.types.leaves import native, refuse_unheld
from towerjax.types.options import check_whole
from towerjax.types.warning import warn


@doors
class Examined:
    """What one may ask of a step without running it; `Step` adds how it runs."""

    engine: Engine
    strategy: Strategy
    options: StepOptions
    policy: StatePolicy
    programs: Programs
    verdicts: Verdicts
    num_parts: int  # T A: how many tower calls share a batch
    audit_report: AuditReport | None  # of it or of the same program
    audit_s: float  # the seconds that audits took
    audit_note: str  # what nobody has been told of it yet
    is_to_be_audited: bool
    _placer: Placer

    def start(self, state: PyTree) -> TrainState:
        """The state to start a loop from: the same, checked, its numbers placed."""
        last = self.programs.last
        return self.policy.start(state, None if last is None else last.state)

    def shapes(
        self,
        params: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> TrainState:
        """The shapes of the state before the first step, without any device.

        Arguments are as for `init`, or ``jax.ShapeDtypeStruct`` in place of arrays.

        Returns:
          A ``TrainState`` of ``jax.ShapeDtypeStruct``.
        """
        given = {"params": params, "opt_state": opt_state, "local": local}
        given["extra"] = extra
        for name, tree in given.items():
            refuse_unheld(name, tree, shapes=True)
        make = functools.partial(make_state, self.strategy.num_towers)
        state = jax.eval_shape(make, **jax.tree.map(native, given))
        self.strategy.placement.specs_within((), state.params)
        made = self.policy.made(state.params)
        if jax.tree.leaves(opt_state):
            made["opt_state"] = state.opt_state
        if "local" in made:
            made["local"] = join_local(state.local, made["local"])
        return dataclasses.replace(state, **made)

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

    def check(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> Proof:
        """The proof that the step's towers stay the same, without any device.

        Args:
          params: Arrays or ``jax.ShapeDtypeStruct``; or a whole state of such.
          batch: A global batch, arrays or shapes ``[B, ...]``.
          opt_state: As for `init`, arrays or shapes; a train step makes it.
          local: Tower-local variables, as for ``init``, arrays or shapes.
          extra: As for `init`, arrays or shapes.

        Returns:
          The ``Proof``, with the collectives of the step.

        Raises:
          ReplicationError: A result depends on the tower, or a collective could
            hang; names leaf and line.
          ValueError: The batch is malformed, or does not divide.

        Example:
          >>> import jax.numpy as jnp, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params * batch["x"], tower.weight)
          >>> strategy = tj.Mirrored(towers=4096)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
          >>> spec = jax.ShapeDtypeStruct((8192,), jnp.float32)
          >>> step.check(jax.ShapeDtypeStruct((), jnp.float32), {"x": spec})
          Proof(collectives: psum of 16 bytes)
        """
        state = params
        if not isinstance(state, TrainState):
            state = self.shapes(state, opt_state=opt_state, local=local, extra=extra)
        state = self.policy.as_state(state)
        traced = trace(self.engine, (*split_state(state), *self._placer.shapes(batch)))
        for traced_pass in traced.passes:
            traced_pass.towers.rehearse()
        return prove(traced)

    def program(self, state: PyTree, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be.

        Args:
          state: The state; for absent devices its shapes, or those of parameters.
          batch: A global batch, or one placed before; for absent devices shapes.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's own text.
        """
        placement = self.strategy.placement
        if placement.absent is None:
            state, placed = self.start(state), self.place_batch(batch)
            kind = self.policy.kind(state)
            audit = functools.partial(self._audit_once, state, placed)
            return self.programs.program(split_state(state), placed, kind, audit)
        state = state if isinstance(state, TrainState) else self.shapes(state)
        first = split_state(self.policy.as_state(state))
        rows, *others = self._placer.shapes(batch)
        full_rows = None
        if self.programs.leaves_out_weights and not self._placer.may_pad:
            full_rows = jax.tree.leaves(rows)[0].shape[0] // placement.num_towers
        args = (*first, rows, *others)
        return compile_step(self.engine, placement, args, full_rows=full_rows)

    def report(
        self, state: PyTree, batch: PyTree, *, timed_calls: int = 0
    ) -> StepReport:
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
        check_whole("timed_calls", timed_calls, 0)
        placement = self.strategy.placement
        if not timed_calls:
            return report_on(self.program(state, batch), placement)
        placed = send_shared(self.place_batch(batch))
        program, state = self.program(state, placed), self.start(state)
        copied = place(state, placement, state_layout(self.strategy), state.params)
        verdict = [self.verdicts.none] * program.engine.gives_verdict
        others = *placed.args, *verdict
        timing = time_program(program, copied, others, timed_calls)
        return dataclasses.replace(report_on(program, placement), timing=timing)

    def audit(self, state: PyTree, batch: PyTree) -> AuditReport:
        """Run two towers and one tower of the same rows, and compare what is merged.

        On one device, with so many rows for each of the two as a tower function gets;
        where batches may be padded, once more with half as many for the second, and
        with more padding on the one. Loss, gradients, metrics and every other merged
        value are compared; ``tower.rng`` draws the same for all rows. Nothing is
        updated, and the state is kept.

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
          ['loss', 'gradient']
        """
        start = time.perf_counter()
        engine, state = self.policy.audited(self.engine, self.start(state))
        try:
            # Of what only the audit makes, and judges: what is not finite, too.
            with jax.transfer_guard("allow"), jax.debug_nans(False):
                state = jax.tree.map(readable, state)
                how = {"parts": self.num_parts, "pads": self._placer.may_pad}
                report = run_audit(engine, self.strategy, state, batch, **how)
        finally:
            took = time.perf_counter() - start
            self.audit_s += took
        self.audit_report = report
        self.audit_note = f"audited in {took:.1f} s: {report}"
        self.is_to_be_audited = False
        return report

    def _audit_once(
        self, state: TrainState, batch: PlacedBatch, traced: Traced
    ) -> None:
        """Audit a step once before its first call, if it is to be."""
        wanted = is_wanted(self.options.audit)
        if not self.is_to_be_audited or wanted is False:
            return
        is_split = self.num_parts > 1 or crosses_rows(traced, batch.rows)
        if not (is_split or ASKED.get().audit):
            return
        how = {"parts": self.num_parts, "pads": self._placer.may_pad}
        program = program_hash(traced, **how)
        self.audit_report = verdict_on(program)
        try:
            if self.audit_report is not None:
                self.audit_note = f"audited before: {self.audit_report}"
            else:
                if not wanted:
                    devices = self.strategy.placement.devices_each
                    refuse_unasked(traced, state.params, devices)
                with noting_its_audit():
                    keep(program, self.audit(state, batch))
        except SplitError as error:
            if wanted or not jax.tree.leaves(state.local):
                raise
            how = "Say audit=False if each tower's own statistics are meant."
            warn(f"{error}\n{how}")
        except NotAudited as error:
            tell_not_audited(error, wanted)
        self.is_to_be_audited = False

    def tell_of_trace(self) -> None:
        """Say that no audit sees a step in another program, which has no rows to run.

        Raises:
          NotAudited: An audit is wanted.
        """
        wanted = is_wanted(self.options.audit)
        if self.is_to_be_audited and self.num_parts > 1 and wanted is not False:
            why = "step.fn has no rows where it is traced. Run step.audit first"
            tell_not_audited(NotAudited(why), wanted)

    def locate(
        self, state: TrainState, batch: PyTree, *, number: int | None = None
    ) -> tuple[Place, ...]:
        """Which towers' values of a step are not finite, before any reduction.

        Runs the towers once more, in a program of its own, without an update.

        Args:
          state: The state before the step, or after it if it was refused.
          batch: The step's batch.
          number: The step's, ``error.step`` of a refused one; None is the state's next.

        Returns:
          The places, pass after pass: after one, all towers may have what one had.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
          >>> batch = {"x": np.array([1, 2, np.inf, 4], np.float32)}
          >>> [place] = step.locate(step.init({"w": 0.0}), batch)[1:]
          >>> place.tower, place.leaf, place.part, place.kind
          (1, 'params/w', 'gradient', 'infinity')
        """
        placement = self.strategy.placement
        state, placed = self.start(state), send_shared(self.place_batch(batch))
        number = step_number(state) + 1 if number is None else number
        before = np.asarray(number - 1).astype(np.int32)
        at = place(before, placement, Layout.MIRRORED)
        donated_kept = split_state(dataclasses.replace(state, step=at))
        locator = dataclasses.replace(self.programs, engine=self.engine.flagging())
        program = locator.program(donated_kept, placed)
        (flags,) = locator(program, donated_kept, placed)
        places = [place for x in jax.device_get(flags) for place in x.places(number)]
        return tuple(dict.fromkeys(places))  # each pass has the parameters
