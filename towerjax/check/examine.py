"""`Examined`: prove, compile, audit and report on a step, and find what failed."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from towerjax.check.audit.advice import crosses_rows
from towerjax.check.audit.audit import run_audit
from towerjax.check.audit.comparison import (
    AuditReport,
    NotAudited,
    SplitError,
)
from towerjax.check.audit.kept import (
    ASKED,
    is_wanted,
    keep,
    noting_its_audit,
    program_hash,
    refuse_unasked,
    told_not_audited,
    verdict_on,
)
from towerjax.check.equality.of_step import equality_of, line_of_own_devices
from towerjax.check.equality.told import LEAVE_OUT, NotProved, StepEquality, told_of
from towerjax.check.equality.traced_passes import StepToProve
from towerjax.check.report.report import StepReport, report_on, time_program
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import with_shared
from towerjax.mesh.transfer import place, readable
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
from towerjax.types import Layout, PyTree, Whole
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
    audit_s: float  # the seconds that proofs of equality and audits took
    audit_note: str  # what nobody has been told of it yet
    is_to_be_audited: bool
    unproved: dict[str, str] | None = None  # by its first call; None before
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
        """The proof that towers stay the same, and equal one, without any device.

        Args:
          params: Arrays or ``jax.ShapeDtypeStruct``; or a whole state of such.
          batch: A global batch, arrays or shapes ``[B, ...]``.
          opt_state: As for `init`, arrays or shapes; a train step makes it.
          local: Tower-local variables, as for ``init``, arrays or shapes.
          extra: As for `init`, arrays or shapes.

        Returns:
          The ``Proof``, with the collectives of the step; ``proof.unproved`` says of
          each merged leaf that is not proved equal to one tower why it is not.

        Raises:
          ReplicationError: A result depends on the tower, or a collective could
            hang; names leaf and line.
          SplitError: A leaf is proved to depend on how the batch is split, unless the
            step was built with ``audit=False``.
          ValueError: The batch is malformed, or does not divide.

        Example:
          >>> import jax.numpy as jnp, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params * batch["x"], tower.weight)
          >>> strategy = tj.Mirrored(towers=4096)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
          >>> spec = jax.ShapeDtypeStruct((8192,), jnp.float32)
          >>> proof = step.check(jax.ShapeDtypeStruct((), jnp.float32), {"x": spec})
          >>> proof, proof.unproved
          (Proof(collectives: psum of 16 bytes; equal to one tower), {})
        """
        state = params
        if not isinstance(state, TrainState):
            state = self.shapes(state, opt_state=opt_state, local=local, extra=extra)
        state = self.policy.as_state(state)
        traced = trace(self.engine, (*split_state(state), *self._placer.shapes(batch)))
        for traced_pass in traced.passes:
            traced_pass.towers.rehearse()
        proof = prove(traced)
        args = self._placer.shapes(batch)
        equality = self._equality(state, args, traced, proof.unmasked)
        if self.num_parts > 1 and self.options.audit is not False:
            equality.refuse()
        return dataclasses.replace(proof, unproved=equality.unproved)

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
            state = self.start(state)
            placed = self.place_batch(batch)
            kind = self.policy.kind(state)
            audit = functools.partial(self.prove_or_audit, state, placed)
            return self.programs.program(split_state(state), placed, kind, audit)
        state = state if isinstance(state, TrainState) else self.shapes(state)
        state = self.policy.as_state(state)
        rows, *others = self._placer.shapes(batch)
        full_rows = None
        if self.programs.leaves_out_weights and not self._placer.may_pad:
            full_rows = jax.tree.leaves(rows)[0].shape[0] // placement.num_towers
        self.prove_alone(state, (rows, *others), "its devices are absent")
        args = (*split_state(state), rows, *others)
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
            program = self.program(state, batch)
            return report_on(program, placement, self.unproved)
        placed = send_shared(self.place_batch(batch))
        program = self.program(state, placed)
        state = self.start(state)
        copied = place(state, placement, state_layout(self.strategy), state.params)
        verdict = [self.verdicts.none] * program.engine.gives_verdict
        others = *placed.args, *verdict
        timing = time_program(program, copied, others, timed_calls)
        report = report_on(program, placement, self.unproved)
        return dataclasses.replace(report, timing=timing)

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
        return self._audit(state, batch)

    def _audit(self, state: TrainState, batch: PyTree, **options: Any) -> AuditReport:
        """The report of an audit with options of `run_audit`, which is kept."""
        start = time.perf_counter()
        engine, state = self.policy.audited(self.engine, self.start(state))
        try:
            # Of what only the audit makes, and judges: what is not finite, too.
            with jax.transfer_guard("allow"), jax.debug_nans(False):
                state = jax.tree.map(readable, state)
                how = {"parts": self.num_parts, "pads": self._placer.may_pad}
                how |= options
                report = run_audit(engine, self.strategy, state, batch, **how)
        finally:
            took = time.perf_counter() - start
            self.audit_s += took
        self.audit_report = report
        self.audit_note = f"audited in {took:.1f} s: {report}"
        self.is_to_be_audited = False
        return report

    def prove_or_audit(
        self, state: TrainState, batch: PlacedBatch, traced: Traced | None = None
    ) -> None:
        """Prove a step equal to one tower before its first call, if it is to be.

        What is refuted is refused; what is not proved is audited, and said in a line.
        """
        if not self._is_to_be_proved():
            return
        if traced is None:
            traced = trace(self.engine, (*split_state(state), *batch.args))
        is_split = self.num_parts > 1 or crosses_rows(traced, batch.rows)
        if is_split or ASKED.get().audit:
            sample = functools.partial(self._sample, state, batch, traced)
            self._prove(state, batch.args, traced, sample)

    def prove_alone(
        self, state: TrainState, args: tuple[PyTree, ...], why: str
    ) -> None:
        """Prove a step equal to one tower, if it is to be, where nothing can run."""
        if self._is_to_be_proved() and self.num_parts > 1:
            traced = trace(self.engine, (*split_state(state), *args))
            self._prove(state, args, traced, lambda _: f"Not audited: {why}")

    def _is_to_be_proved(self) -> bool:
        return self.is_to_be_audited and is_wanted(self.options.audit) is not False

    def _prove(
        self,
        state: TrainState,
        args: tuple[PyTree, ...],
        traced: Traced,
        sample: Callable[[StepEquality], str],
    ) -> None:
        """Prove a step equal to one tower; say what is not proved, and a sample of it.

        Raises:
          SplitError: A leaf is proved to depend on the split, or differs in the sample.
          NotProved: A leaf is not proved, and a proof is asked for.
        """
        unmasked = lambda: prove(traced).unmasked()  # noqa: E731
        equality = self._equality(state, args, traced, unmasked)
        equality.refuse()
        self.audit_s += equality.seconds
        notes = [f"{equality}, in {equality.seconds:.1f} s"]
        if equality.unproved:
            self.audit_note = ""
            sampled = sample(equality)
            if is_wanted(self.options.audit):
                raise NotProved(equality.unproved, sampled)
            warn(told_of(equality.unproved, f"{sampled}. {LEAVE_OUT}"))
            notes += [self.audit_note] if self.audit_note else []
        self.audit_note = "; ".join(notes)
        self.unproved = equality.unproved
        self.is_to_be_audited = False

    def _equality(
        self,
        state: TrainState,
        args: tuple[PyTree, ...],
        traced: Traced,
        unmasked: Callable[[], list[str]],
    ) -> StepEquality:
        """What is proved of the leaves that the step merges, of shapes or arrays.

        A padded batch is refused if ``unmasked`` names anything; then full ones are to
        be proved.
        """
        rows, _, shared = args
        with jax.transfer_guard("allow"):  # of constants, which are looked at
            engine, state = self.policy.audited(self.engine, state)
            step = StepToProve(
                engine,
                self.strategy,
                state,
                with_shared(rows, [Whole(x) for x in shared]),
                jax.tree.leaves(rows)[0].shape[0] // self.num_parts,
                padded=self._placer.may_pad,
            )
            equality = equality_of(step)
            if step.padded and equality.unproved and unmasked():
                equality = equality_of(dataclasses.replace(step, padded=False))
        return equality.not_of_own_devices(line_of_own_devices(traced))

    def _sample(
        self,
        state: TrainState,
        batch: PlacedBatch,
        traced: Traced,
        equality: StepEquality,
    ) -> str:
        """What an audit says of the leaves that are not proved.

        Where towers have variables of their own, a difference is told. Elsewhere it is
        raised.
        """
        how = {"parts": self.num_parts, "pads": self._placer.may_pad}
        program = program_hash(traced, **how)
        self.audit_report = verdict_on(program)
        try:
            if self.audit_report is not None:
                self.audit_note = f"audited before: {self.audit_report}"
            else:
                devices = self.strategy.placement.devices_each
                refuse_unasked(traced, state.params, devices)
                with noting_its_audit():
                    how = {"gradients": False, "leaves": equality.is_open}
                    keep(program, self._audit(state, batch, **how))
        except NotAudited as error:
            return told_not_audited(error)
        except SplitError as error:
            if not jax.tree.leaves(state.local):
                raise
            return f"{error}\nOr each tower's own statistics are meant"
        report = str(self.audit_report).replace("\nnote: ", "; ")
        return f"A sample agreed: {report}"

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
        state = self.start(state)
        placed = send_shared(self.place_batch(batch))
        number = step_number(state) + 1 if number is None else number
        before = np.asarray(number - 1).astype(np.int32)
        at = place(before, placement, Layout.MIRRORED)
        donated_kept = split_state(dataclasses.replace(state, step=at))
        locator = dataclasses.replace(self.programs, engine=self.engine.flagging())
        program = locator.program(donated_kept, placed)
        (flags,) = locator(program, donated_kept, placed)
        places = [place for x in jax.device_get(flags) for place in x.places(number)]
        return tuple(dict.fromkeys(places))  # each pass has the parameters
