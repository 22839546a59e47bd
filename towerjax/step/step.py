"""`Step`: an engine, its programs and the verdicts on its calls."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import jax

from towerjax.check.audit.comparison import AuditReport
from towerjax.check.equality.told import NO_ROWS
from towerjax.check.examine import Examined
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.mesh.transfer import place
from towerjax.step.run.engine import Engine, StepOptions
from towerjax.step.run.policies import Read, StatePolicy
from towerjax.step.run.programs import Programs
from towerjax.step.run.verdicts import Verdicts
from towerjax.step.state.checks import (
    OF_THIS_STEP,
    OTHER_STATE,
    check_is_state,
    check_made_for,
    check_not_donated,
    check_num_towers,
    is_usable,
)
from towerjax.step.state.faults import NonFiniteError, Place
from towerjax.step.state.train_state import (
    TrainState,
    check_params,
    init_state,
    join_local,
    make_on_devices,
    split_state,
    state_layout,
)
from towerjax.towers.strategies import Strategy
from towerjax.types import Metrics, PyTree
from towerjax.types.door import door, doors
from towerjax.types.leaves import check_like
from towerjax.types.missing import explain_missing

_Result = TypeVar("_Result")


@doors
class Step(Examined, Generic[_Result]):
    """A pure step: ``(state, batch) -> (state, metrics)``.

    Made by `build_train_step` and `build_step`; those of `build_eval_step` and
    `build_predict_step` return metrics or rows alone. Compiled at its first call, once.
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        options: StepOptions,
        policy: StatePolicy,
        *,
        placer: Placer | None = None,
        remake: "Callable[..., Step[_Result]] | None" = None,
    ) -> None:
        """``remake(strategy, options, placer=...)`` makes the same step for others."""
        self.engine = engine
        self.strategy = strategy
        self.options = options
        self.policy = policy
        self.remake = remake
        placement = strategy.placement
        remainder = options.remainder
        self._placer = placer or Placer(
            placement, remainder=remainder, micro_batches=options.micro_batches
        )
        self.num_parts = self._placer.calls  # T A: how many tower calls share a batch
        # What its audit found, of it or of the same program; and the seconds of audits.
        self.audit_report: AuditReport | None = None
        self.audit_s = 0.0
        self.audit_note = ""
        self.is_to_be_audited = True
        # Not where the bits of a sum have to be those that other programs give.
        leaves_out = not strategy.cross_tower_ops.needs_every_tower
        self.programs = Programs(engine, placement, options.max_programs, leaves_out)
        raises = options.on_nonfinite == "raise"
        self.verdicts = Verdicts(placement, self.refused if raises else None)

    if not TYPE_CHECKING:
        __getattr__ = explain_missing()

    def __repr__(self) -> str:
        return f"Step({self.strategy}, {self.options})"

    @property
    def is_audited(self) -> bool:
        """Whether an audit of the step, or of the same program, has passed it."""
        return self.audit_report is not None

    @property
    def fn(self) -> Callable[[TrainState, PyTree], _Result]:
        """The step as a JAX function of global arrays, ``(state, batch)``.

        For ``jax.jit``, ``lax.scan``, ``jax.vmap`` over states and ``jax.grad``. It is
        proved where it is traced; it is audited if `audit` is called before. Nothing is
        placed or donated, and a refused step leaves the state unchanged and does not
        raise. Inside a tower function write that of a step of one device.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
          >>> batches = np.array([[1, 3], [5, 5]], np.float32)
          >>> report = step.audit(step.init(0.0), batches[0])
          >>> state, metrics = jax.lax.scan(step.fn, step.init(0.0), batches)
          >>> float(state.params), metrics["loss"].tolist()
          (5.0, [5.0, 9.0])
        """

        def fn(state: TrainState, batch: PyTree) -> _Result:
            given = self.policy.as_state(state)
            placed = self._placer.fit_traced(batch)
            self.prove_alone(given, placed.args, NO_ROWS)
            out = self.programs.trace(split_state(given), placed)
            return self.policy.result(given, out, placed)

        return door(fn)

    @jax.transfer_guard("allow")  # a call that places, which a guard cannot see
    def init(
        self,
        params: PyTree | Callable[[jax.Array], PyTree],
        *,
        opt_state: PyTree = None,
        local: PyTree = None,
        extra: PyTree = None,
        rng: jax.Array | None = None,
    ) -> TrainState:
        """The state before the first step, placed on the strategy's devices.

        Args:
          params: Arrays; copied, so that yours stay usable. Or a function of ``rng``
            that returns them: with ``state="sharded"`` each device makes its part.
          opt_state: What ``update_fn`` keeps, such as ``optimizer.init(params)``;
            copied. A train step makes it, where none is given.
          local: Tower-local variables: a pytree of ``TowerLocal`` of the value that
            each tower's copy starts with; of a ``PerTower`` in it, its own.
          extra: Mirrored values that do not train, ``state.extra``: any pytree.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``.

        Raises:
          ValueError: A leaf is of a dtype that devices do not hold, or one that is
            trained has no gradient; ``local`` says no reduction; or a device is not on
            this machine.
        """
        makes = self.trained.policy.makes
        make = makes.get("opt_state", lambda _: ())
        make = (lambda _: opt_state) if opt_state is not None else make
        made = {}
        first = params
        # A function, and not a library's model, which may be called, too.
        if hasattr(params, "__name__") or isinstance(params, functools.partial):
            made = make_on_devices(self.strategy, params, make, rng)
            params = made["params"]
            first = 0.0

            def make(_):
                return ()

        if more := makes.get("local", lambda _: {})(params):
            local = join_local(local, more)
        parts = self.strategy, first, make(check_params(first)), local
        state = init_state(*parts, like=made.get("params"), rng=rng, extra=extra)
        return dataclasses.replace(state, **made)

    @property
    def trained(self) -> "Step[_Result]":
        """The step, if it trains; raises for one that reads."""
        if isinstance(self.policy, Read):
            raise ValueError(
                "step= is one that evaluates or predicts: it has no state of its own,"
                " and does not train. Give it the state of a train step, or parameters,"
                " and to tj.run what tj.build_train_step returned, with evaluate=."
            )
        return self

    def place(self, state: TrainState) -> TrainState:
        """A copy of a state on this step's devices, e.g. one from other devices.

        Args:
          state: A ``TrainState`` of the same number of towers, or its host copy.

        Returns:
          The state, placed.

        Raises:
          ValueError: Its tower-local variables have another number of towers.
        """
        if isinstance(self.policy, Read):
            return self.start(state)
        check_is_state(state)
        check_not_donated(state)
        check_num_towers(state, self.strategy.placement.num_towers)
        layouts = state_layout(self.strategy)
        placed = place(state, self.strategy.placement, layouts, state.params)
        check_made_for(placed, self.strategy)
        return placed

    @property
    def batch_rows(self) -> frozenset[int]:
        """The sizes of batches so far to which smaller ones are padded."""
        return frozenset(self._placer.full_sizes.values())

    def expect_batch_rows(self, sizes: Iterable[int]) -> None:
        """Pad smaller batches as after ``batch_rows`` of these sizes, of any towers."""
        self._placer.expect(sizes)

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """``(state, metrics, verdict)`` of a step, without a look at the verdict.

        That is ``()`` int32: -1, or the step's number if it was refused.
        """
        before, out = self.trained.outputs(state, batch, self.verdicts.none)
        return *self.policy.result(before, out, batch), out.verdict

    def outputs(
        self, state: PyTree, batch: PlacedBatch, *verdict: jax.Array
    ) -> tuple[TrainState, PyTree]:
        """The state as it was given to the program, and the program's results."""
        policy = self.policy
        programs = self.programs
        taken = policy.take(state)
        audit = None
        state = self.start(state) if taken is None else taken
        kind = policy.kind(state)
        if programs.known(batch, kind) is None or not is_usable(state):
            state = self.start(state)
            audit = functools.partial(self.prove_or_audit, state, batch)
        first = split_state(state)
        program = programs.program(first, batch, kind, audit)
        try:
            return state, programs(program, first, batch, *verdict)
        except (RuntimeError, TypeError, ValueError):
            if not is_usable(state):  # the devices failed after they had taken it
                raise
            # JAX refuses a wrong state before it runs: name the leaf and the remedy.
            placed = self.start(state)
            check_like("state", placed, program.state, OTHER_STATE, OF_THIS_STEP)
            if placed is state:
                raise
            return placed, programs(program, split_state(placed), batch, *verdict)

    def __call__(self, state: PyTree, batch: PyTree) -> _Result:
        """The next state, and the metrics of this step.

        Args:
          state: As ``init`` or a step returned it. Donated: not usable afterwards,
            unless the step was built with ``donate=False``.
          batch: A global batch, a pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          ``(state, metrics)``: ``metrics["loss"]`` is the one global loss, and each
          metric state its value over the global batch.

        Raises:
          ValueError: A malformed batch or a state that is not this step's, before
            anything is compiled; nothing is lost.
          NonFiniteError: With ``on_nonfinite="raise"``, at most 16 calls of a state
            after a step that was refused; on CPUs at its first call after that has run,
            of several processes at the same call on all. `settle`, for the end of a
            loop, waits for the last of all states. That step changed nothing, and
            ``state`` is still usable.
        """
        at = getattr(state, "step", None)  # by which its verdict is known
        self.verdicts.check(at)
        placed = self._placer.place(batch, by_call=True)
        if not self.engine.gives_verdict:
            return self.policy.result(*self.outputs(state, placed), placed)
        line = self.verdicts.take(at)
        try:
            before, out = self.outputs(state, placed, line.verdict)
            now = {"at": out.now["step"], "verdict": out.verdict}
            line = dataclasses.replace(line, **now)
        finally:
            self.verdicts.put(line)
        return self.policy.result(before, out, placed)

    def settle(self) -> None:
        """Wait for the steps so far and read their verdicts, at the end of a loop.

        Raises:
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
        """
        self.verdicts.settle()

    def refused(self, number: int, places: Sequence[Place] = ()) -> NonFiniteError:
        """The error of a step that was refused, with the places that are known."""
        how = {"guard": self.options.guard, "by_tower": self.engine.refuses_by_tower}
        return NonFiniteError(number % 2**32, places, **how)


TrainStep: TypeAlias = Step[tuple[TrainState, Metrics]]
"""``(state, batch) -> (state, metrics)``."""

EvalStep: TypeAlias = Step[Metrics]
"""``(state, batch) -> {name: metric state}``."""
