"""`Step`: a plan, its compiled programs, and the step flags of its calls."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import jax

from towerjax.data.placer import PlacedBatch, Placer
from towerjax.step.plan import Plan
from towerjax.step.run.compile import Program
from towerjax.step.run.programs import Programs
from towerjax.step.run.prove import Checked, Proof
from towerjax.step.run.step_flags import Lineage, StepFlags
from towerjax.step.run.trace import Traced
from towerjax.step.state.checks import OF_THIS_STEP, OTHER_STATE, is_usable
from towerjax.step.state.first_state import first_shapes, first_state, placed_state
from towerjax.step.state.nonfinite import Location, NonFiniteError
from towerjax.step.state.policies import Read
from towerjax.step.state.train_state import TrainState, split_state
from towerjax.towers.strategies import Strategy
from towerjax.types import Metrics, PyTree
from towerjax.types.boundary import api_boundaries, api_boundary
from towerjax.types.notes import explain_missing
from towerjax.types.refusals import check_like

_Result = TypeVar("_Result")


class Checks(Protocol):
    """The functions that prove, audit and report on a step.

    A builder gives them to the step; `towerjax.check.questions` has the functions. Each
    takes the step as its first argument.
    """

    before_first: Callable[..., None]
    tell_once: Callable[..., None]
    prepare: Callable[..., Any]
    prove_traced: Callable[..., None]
    prove_step: Callable[..., Proof]
    program_of: Callable[..., Program]
    report_step: Callable[..., Any]
    audited: Callable[..., Any]
    locate_nonfinite: Callable[..., tuple[Location, ...]]


@api_boundaries
class Step(Generic[_Result]):
    """A pure step: ``(state, batch) -> (state, metrics)``.

    `build_train_step` and `build_step` return one. A step of `build_eval_step` or
    `build_predict_step` returns metrics or rows alone. It is compiled at its first
    call.
    """

    def __init__(
        self, plan: Plan, checks: Checks, *, placer: Placer | None = None
    ) -> None:
        """Make the step of a plan, with the checks that its methods call.

        ``placer`` replaces the one that the plan's options make.
        """
        self.plan = plan
        self.checks = checks
        self.strategy = strategy = plan.strategy
        self.options = options = plan.options
        placement = strategy.placement
        remainder = options.remainder
        self.placer = placer or Placer(
            placement, remainder=remainder, micro_batches=options.micro_batches
        )
        # A batch is split over T * A calls of the tower function
        self.num_calls = self.placer.calls
        self.checked = Checked()
        # Programs for full batches may leave the weights out, and then round in another
        # way. With exact sums the weights stay.
        leaves_out = not strategy.exact
        self.programs = Programs(plan, placement, options.max_programs, leaves_out)
        raises = options.on_nonfinite == "raise"
        self.step_flags = StepFlags(placement, self.refused if raises else None)

    if not TYPE_CHECKING:
        __getattr__ = explain_missing()

    def __repr__(self) -> str:
        return f"Step({self.strategy}, {self.options})"

    @property
    def is_audited(self) -> bool:
        """Whether an audit of this step, or of the same program, has passed."""
        return self.audit_report is not None

    @property
    def audit_report(self) -> Any:
        """The report of an audit of this step, or of its program; None without one."""
        return self.checked.report

    @property
    def unproved(self) -> Mapping[str, str] | None:
        """The reason for each leaf that is not proved; None before the first call."""
        checked = self.checked
        return {} if checked.unproved is None and checked.is_alone else checked.unproved

    @property
    def fn(self) -> Callable[[TrainState, PyTree], _Result]:
        """The step as a JAX function of global arrays, ``(state, batch)``.

        Use it in ``jax.jit``, ``lax.scan``, ``jax.vmap`` over states and ``jax.grad``.
        It is proved when it is traced, and audited if `audit` is called before. Nothing
        is placed or donated. A refused step leaves the state unchanged and does not
        raise. In a tower function use that of a step on one device. A state has
        integers, so take a gradient of its parameters: ``jax.grad(lambda params:
        step.fn(state.replace(params=params), batch)[1]["loss"])(state.params)``.

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
        prove = self.checks.prove_traced

        def fn(state: TrainState, batch: PyTree) -> _Result:
            checked_state = self.plan.states.as_state(state)
            placed = self.placer.fit_traced(batch)
            hook = functools.partial(prove, self, state=checked_state, batch=placed)
            out = self.programs.trace(split_state(checked_state), placed, hook)
            return self.plan.states.result(checked_state, out, placed)

        return api_boundary(fn)

    # ``init`` places arrays, which a user's transfer guard would refuse.
    @jax.transfer_guard("allow")
    def init(
        self,
        params: PyTree | Callable[[jax.Array], PyTree],
        *,
        opt_state: PyTree = None,
        local: PyTree = None,
        extra: PyTree = None,
        rng: jax.Array | None = None,
    ) -> TrainState:
        """Make the state before the first step, on the strategy's devices.

        Args:
          params: Arrays, which are copied, so that yours stay usable. Or a function of
            ``rng`` that returns them; with ``state="sharded"`` each device then makes
            its own part.
          opt_state: State that ``update_fn`` keeps, such as ``optimizer.init(params)``;
            it is copied. A train step makes it if none is given.
          local: Tower-local variables: a pytree of ``TowerLocal``, each with the first
            value of every tower's copy, or with a ``PerTower`` of their first values.
          extra: ``state.extra``, mirrored values that do not train: any pytree.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``.

        Raises:
          ValueError: A leaf has a dtype that devices cannot hold; a trained leaf has no
            gradient; ``local`` has no reduction; or a device is not on this machine.
        """
        makes = self.trained.plan.states.makes
        parts = {"opt_state": opt_state, "local": local, "extra": extra, "rng": rng}
        return first_state(self.strategy, makes, params, **parts)

    @property
    def trained(self) -> "Step[_Result]":
        """The step itself; an error is raised if the step does not train."""
        if isinstance(self.plan.states, Read):
            raise ValueError(
                "The step evaluates or predicts, so it has no state of its own and"
                " cannot train. Call it with the state of a train step, or with"
                " parameters. In tj.run pass the result of tj.build_train_step as"
                " step=, and this one as evaluate=."
            )
        return self

    def place(self, state: TrainState) -> TrainState:
        """Copy a state to this step's devices, e.g. one from other devices.

        Args:
          state: A ``TrainState`` of the same number of towers, or its host copy.

        Returns:
          The state, placed.

        Raises:
          ValueError: Its tower-local variables have another number of towers.
        """
        reads = isinstance(self.plan.states, Read)
        return self.start(state) if reads else placed_state(self.strategy, state)

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """Run a step without reading its step flag: ``(state, metrics, step_flag)``.

        The step flag is ``()`` int32: -1, or the number of the step if it was refused.
        """
        before, out = self.trained.outputs(state, batch, self.step_flags.none)
        return *self.plan.states.result(before, out, batch), out.step_flag

    def outputs(
        self, state: PyTree, batch: PlacedBatch, *step_flag: jax.Array
    ) -> tuple[TrainState, PyTree]:
        """Run the program on a batch; return the state that it took and its results."""
        policy = self.plan.states
        programs = self.programs
        taken = policy.take(state)
        hook = None
        state = self.start(state) if taken is None else taken
        kind = policy.kind(state)
        known = programs.known(batch, kind)
        if known is None or not is_usable(state):
            state = self.start(state)
            hook = functools.partial(self._before_call, state=state, batch=batch)
        elif batch.num_examples not in known.checked_for:
            self._before_call(known.traced, state, batch)
            known.checked_for.add(batch.num_examples)
        first = split_state(state)
        program = programs.program(first, batch, kind, hook)
        try:
            return state, programs(program, first, batch, *step_flag)
        except (RuntimeError, TypeError, ValueError):
            if not is_usable(state):  # the devices failed after they had taken it
                raise
            # JAX refuses a wrong state before it runs, so name the leaf and the remedy.
            placed = self.start(state)
            check_like("state", placed, program.state, OTHER_STATE, OF_THIS_STEP)
            if placed is state:
                raise
            return placed, programs(program, split_state(placed), batch, *step_flag)

    def __call__(self, state: PyTree, batch: PyTree) -> _Result:
        """Run one step: give the next state, and the metrics.

        Args:
          state: A state that ``init`` or a step returned. It is donated, so it is not
            usable afterwards, unless the step was built with ``donate=False``.
          batch: A global batch, a pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          ``(state, metrics)``: ``metrics["loss"]`` is the loss of the global batch, and
          each other metric its value over the global batch.

        Raises:
          ValueError: The batch is malformed, or the state is not of this step. It is
            raised before anything is compiled, and the state stays usable.
          NonFiniteError: With ``on_nonfinite="raise"``, an earlier step was refused. It
            is raised at most 16 calls later, on CPUs at the first call after that step
            has run, and at the same call on all of several processes. `settle`, for the
            end of a loop, waits for all steps. The refused step changed nothing, and
            ``state`` is still usable.
        """
        # `step_flags` finds a state's step flag by this array
        at = getattr(state, "step", None)
        self.step_flags.check(at, state)
        placed = self.placer.place(batch, by_call=True)
        if not self.plan.gives_step_flag:
            return self.plan.states.result(*self.outputs(state, placed), placed)
        line = self.step_flags.take(at)
        try:
            before, out = self.outputs(state, placed, line.step_flag)
            now = out.now["step"], out.step_flag
            line = Lineage(*now, asked=line.asked, calls=line.calls)
        finally:
            self.step_flags.put(line)
        return self.plan.states.result(before, out, placed)

    def on(self, strategy: Strategy) -> "Step[_Result]":
        """Put this step on other devices, for as many towers.

        Args:
          strategy: The strategy, with the step's number of towers.

        Returns:
          The step. It is compiled anew, and its proof still holds.

        Raises:
          ValueError: The step is one of a model function or of a sweep's members, which
            cannot be moved; or the strategy has another number of towers.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
          >>> moved = step.on(tj.Mirrored(devices=["cpu:0"], towers=2))
          >>> state, metrics = moved(moved.init(0.0), np.array([1, 3], np.float32))
          >>> float(state.params)
          2.0
        """
        mine = self.strategy.num_towers
        yours = strategy.num_towers
        if mine != yours:
            raise ValueError(
                f"The step has {mine} towers, but the strategy has {yours}. Give it"
                f" towers={mine}, on any devices that share them."
            )
        moved = Step(self.plan.on(strategy), self.checks)
        moved.placer.expect(self.placer.batch_rows)
        moved.checked = self.checked
        return moved

    def to_audit(self, state: TrainState) -> tuple[Plan, TrainState]:
        """Choose the plan and the state that are proved and audited for this step."""
        other = self.plan.audited
        return (self.plan, state) if other is None else other(state)

    def start(self, state: PyTree) -> TrainState:
        """Check the state that a loop starts with, and place its scalars."""
        last = self.programs.last
        return self.plan.states.start(state, None if last is None else last.state)

    def shapes(
        self,
        params: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> TrainState:
        """Find the shapes of the state before the first step, without any device.

        Arguments are as for `init`; arrays may be ``jax.ShapeDtypeStruct``.

        Returns:
          A ``TrainState`` of ``jax.ShapeDtypeStruct``.
        """
        parts = {"opt_state": opt_state, "local": local, "extra": extra}
        return first_shapes(self.strategy, self.plan.states.made, params, **parts)

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """Check a batch, pad or cut it, and place it with its towers.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          A ``PlacedBatch``, which the step accepts in place of a batch.

        Raises:
          ValueError: The batch is malformed, or its size does not divide.
        """
        return self.placer.place(batch)

    def check(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> Proof:
        """Prove, without any device, that towers stay the same and equal one tower.

        Args:
          params: Arrays or ``jax.ShapeDtypeStruct``; or a whole state of such.
          batch: A global batch, arrays or shapes ``[B, ...]``.
          opt_state: As for `init`, arrays or shapes; a train step makes it.
          local: Tower-local variables, as for ``init``, arrays or shapes.
          extra: As for `init`, arrays or shapes.

        Returns:
          The ``Proof``, with the collectives of the step. ``proof.unproved`` has a
          reason for each merged leaf that is not proved equal to one tower.

        Raises:
          ReplicationError: A result depends on the tower, or a collective could hang.
            Names the leaf and the line.
          SplitError: A leaf is proved to depend on how the batch is split, unless the
            step was built with ``audit=False``.
          ValueError: The batch is malformed, or its size does not divide.

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
        return self.checks.prove_step(self, state, batch)

    def program(self, state: PyTree, batch: PyTree) -> Program:
        """Get the compiled program for ``batch``; compile it if there is none yet.

        Args:
          state: The state; for absent devices its shapes, or those of parameters.
          batch: A global batch, or one placed before; for absent devices shapes.

        Returns:
          A ``Program``: ``.call.as_text()`` is the text of the compiler.
        """
        return self.checks.program_of(self, state, batch)

    def report(self, state: PyTree, batch: PyTree, *, timed_calls: int = 0) -> Any:
        """Report what the compiled step for such a batch sends, holds and takes.

        Args:
          state: The state, which is not donated. For absent devices shapes: of
            parameters, or the result of ``step.shapes``.
          batch: A global batch, or one placed before; for absent devices shapes.
          timed_calls: The number of calls to time, on a copy of the state, which needs
            its memory once more; 0 times none.

        Returns:
          A `StepReport`: collectives, FLOPs, memory, times.

        Raises:
          ValueError: As a step's call.
        """
        return self.checks.report_step(self, state, batch, timed_calls)

    def audit(self, state: PyTree, batch: PyTree) -> Any:
        """Compare the merged results of two towers and of one, for the same rows.

        All run on one device. The two towers get as many rows each as a tower function
        gets. If batches may be padded, they run once more with half as many rows for
        the second tower and with more padding for the one. Loss, gradients, metrics and
        every other merged value are compared; ``tower.rng`` draws the same for all
        rows. Nothing is updated, and the state is not donated.

        Args:
          state: As for a call.
          batch: A global batch of at least two examples, or one placed before.

        Returns:
          An `AuditReport` of what was compared.

        Raises:
          SplitError: A leaf depends on how the rows were split. Names the leaf, both
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
        return self.checks.audited(self, state, batch)

    def locate(
        self, state: TrainState, batch: PyTree, *, number: int | None = None
    ) -> tuple[Location, ...]:
        """Find the towers whose values in a step are not finite, before any reduction.

        The towers run once more, in a program of their own, without an update.

        Args:
          state: The state before the step, or after it if it was refused.
          batch: The step's batch.
          number: The number of the step, such as ``error.step``; None is the next step
            of the state.

        Returns:
          The locations, one pass after the other. After the first pass all towers
          may have the values of one tower.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
          >>> batch = {"x": np.array([1, 2, np.inf, 4], np.float32)}
          >>> [at] = step.locate(step.init({"w": 0.0}), batch)[1:]
          >>> at.tower, at.leaf, at.part, at.kind
          (1, 'params/w', 'gradient', 'infinity')
        """
        return self.checks.locate_nonfinite(self, state, batch, number)

    def prepare(self, state: PyTree, batch: PlacedBatch, **asked: Any) -> Any:
        """Compile and check the step for such a batch, as its first call does.

        ``asked`` are fields of `Asked`. Returns the program, the messages of proof and
        audit that the user has not seen, and the seconds that proof and audit took.
        """
        return self.checks.prepare(self, state, batch, **asked)

    def before_first(
        self, traced: Traced, state: TrainState, batch: PlacedBatch
    ) -> None:
        """Prove or audit the step before its first call with such a batch.

        Each new program is checked, and each new number of examples in a padded batch.
        """
        if self.options.audit is False:  # nothing of check/ is imported
            return
        self.checks.before_first(self, traced, state, batch)

    def _before_call(
        self, traced: Traced, state: TrainState, batch: PlacedBatch
    ) -> None:
        """Prove or audit the step before a call, and print the result if it is new."""
        self.before_first(traced, state, batch)
        if self.checked.note:
            self.checks.tell_once(self)

    def settle(self) -> None:
        """Wait for all steps so far and raise if one was refused, at the end of a loop.

        Raises:
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
        """
        self.step_flags.settle()

    def refused(
        self, number: int, locations: Sequence[Location] = ()
    ) -> NonFiniteError:
        """Make the error for a refused step, with the locations that are known."""
        options = {"guard": self.options.guard, "by_tower": self.plan.by_tower}
        return NonFiniteError(number % 2**32, locations, **options)


TrainStep: TypeAlias = Step[tuple[TrainState, Metrics]]
"""``(state, batch) -> (state, metrics)``."""

EvalStep: TypeAlias = Step[Metrics]
"""``(state, batch) -> {name: metric state}``."""
