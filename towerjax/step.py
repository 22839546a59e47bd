"""How is a train step built and called? ``(state, batch) -> (state, metrics)``."""

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from towerjax.gradient import TowerLoss
from towerjax.input.placer import PlacedBatch, Placer
from towerjax.pipeline import (
    Guard,
    OnNonfinite,
    Pipeline,
    one_step_recipe,
    repeated_recipe,
)
from towerjax.placement import place
from towerjax.program import Program, Proof, Recipe, Runner, prove
from towerjax.shard import Remainder, check_remainder
from towerjax.state import (
    STATE_LAYOUT,
    TrainState,
    abstract_state,
    check_is_state,
    check_state,
    init_state,
    is_usable,
    split_state,
)
from towerjax.strategies import Strategy
from towerjax.types import LossFn, PyTree, Reduction
from towerjax.update import Verdicts


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a train step treats its batch and its loss; see `build_train_step`."""

    loss_reduction: Reduction | None
    micro_batches: int
    remainder: Remainder
    on_nonfinite: OnNonfinite
    guard: Guard
    donate: bool
    max_programs: int

    def __post_init__(self) -> None:
        """Check the options."""
        check_remainder(self.remainder)
        for name, allowed in (("on_nonfinite", OnNonfinite), ("guard", Guard)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {get_args(allowed)}."
                )
        allowed = (None, Reduction.SUM, Reduction.MEAN)
        if self.loss_reduction not in allowed:
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} must be Reduction.SUM or"
                " Reduction.MEAN for a scalar loss, or None for tj.Weighted."
            )
        for name in ("micro_batches", "max_programs"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number >= 1.")


class TrainStep:
    """A pure training step: ``(state, batch) -> (state, metrics)``.

    Made by `build_train_step`. Compiled at its first call, once.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: optax.GradientTransformation,
        strategy: Strategy,
        options: StepOptions,
    ) -> None:
        self.strategy, self.options, self.optimizer = strategy, options, optimizer
        self._runner = self._run(recipe)
        self._repeated: dict[int, Runner] = {}
        self._placer = Placer(
            strategy.placement,
            shares=strategy.num_towers * options.micro_batches,
            remainder=options.remainder,
        )
        self._verdicts = Verdicts()

    def _run(self, recipe: Recipe) -> Runner:
        max_programs = self.options.max_programs
        return Runner(recipe, self.strategy.placement, max_programs=max_programs)

    def init(
        self, params: PyTree, *, local: PyTree = None, rng: jax.Array | None = None
    ) -> TrainState:
        """The state before the first step, placed where the steps want it.

        Args:
          params: Floating arrays; copied, so that yours stay usable.
          local: Tower-local variables: a pytree of ``TowerLocal``.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``.

        Raises:
          ValueError: A leaf of ``params`` is not floating, ``local`` says no
            reduction, or a device is not on this machine.
        """
        placement = self.strategy.placement
        return init_state(params, self.optimizer, placement, local=local, rng=rng)

    def check_state(self, state: Any) -> None:
        """Raise unless the state was made for this step's towers and devices.

        Args:
          state: What was passed to the step.

        Raises:
          ValueError: It is no ``TrainState``, lies elsewhere, or its tower-local
            variables have another number of towers.
        """
        check_state(state, self.strategy.placement)

    def place(self, state: TrainState) -> TrainState:
        """A copy of a state on this step's devices, e.g. one from other devices.

        Args:
          state: A ``TrainState`` of the same number of towers, or its host copy.

        Returns:
          The state, placed.

        Raises:
          ValueError: Its tower-local variables have another number of towers.
        """
        check_is_state(state)
        placed = place(state, self.strategy.placement, STATE_LAYOUT)
        check_state(placed, self.strategy.placement)
        return placed

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          A ``PlacedBatch``, which the step takes as it takes a batch.

        Raises:
          ValueError: The batch is malformed, or does not divide.
        """
        if not isinstance(batch, PlacedBatch):
            return self._placer.place(batch)
        batch.check(self.strategy.placement)
        if batch.rows % self.options.micro_batches:
            raise ValueError(
                f"The placed batch gives each tower {batch.rows} rows, which"
                f" {self.options.micro_batches} micro-batches cannot share. Say"
                " micro_batches=... where it is placed, or use other batch sizes."
            )
        return batch

    def place_batches(self, batches: Sequence[PyTree], steps: int) -> PlacedBatch:
        """Up to ``steps`` batches stacked, for one call that does them all.

        Args:
          batches: One to ``steps`` batches.
          steps: ``K``, the most steps of a call; one program serves any number.

        Returns:
          A ``PlacedBatch`` for ``dispatch``.

        Raises:
          ValueError: A batch is malformed, does not divide, or is unlike the others.
        """
        return self._placer.place_several(batches, steps)

    def check(self, params: PyTree, batch: PyTree, *, local: PyTree = None) -> Proof:
        """The proof that the step's towers stay the same, without any device.

        Args:
          params: Arrays or ``jax.ShapeDtypeStruct``.
          batch: A global batch, arrays or shapes ``[B, ...]``.
          local: Tower-local variables, as for ``init``.

        Returns:
          The ``Proof``, with the collectives of the step.

        Raises:
          ReplicationError: A result depends on the tower, or a collective could
            hang; names leaf and line.

        Example:
          >>> import towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params * batch["x"], tower.weight)
          >>> strategy = tj.Mirrored(towers=4096)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
          >>> spec = jax.ShapeDtypeStruct((8192,), jnp.float32)
          >>> proof = step.check(jax.ShapeDtypeStruct((), jnp.float32), {"x": spec})
          >>> proof.analysis.collectives[0].primitive
          'psum'
        """
        placement = self.strategy.placement
        state = abstract_state(params, self.optimizer, placement.num_towers, local)
        count = jax.ShapeDtypeStruct((placement.num_towers,), jnp.int32)
        args = (*split_state(state), batch, count)
        return prove(self._runner.recipe, placement, args)

    def program(self, state: TrainState, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be.

        Args:
          state: The state.
          batch: A global batch, or one placed before.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's own text.
        """
        check_state(state, self.strategy.placement)
        batch = self.place_batch(batch)
        return self._runner_for(batch).program(split_state(state), batch)

    def _runner_for(self, batch: PlacedBatch) -> Runner:
        steps = batch.num_steps
        if steps is None:
            return self._runner
        if steps not in self._repeated:
            self._repeated[steps] = self._run(repeated_recipe(self._runner.recipe))
        return self._repeated[steps]

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """The step, without looking at whether its loss was finite.

        Args:
          state: The state; donated.
          batch: A placed batch, or several stacked.

        Returns:
          ``(state, metrics, guarded)``; ``guarded`` is ``()``, the loss or a bool,
          and NaN, infinite or False when the step was refused. For stacked batches
          metrics and ``guarded`` are ``[K]``, of which the first so many count.
        """
        runner = self._runner_for(batch)
        if batch.signature not in runner.programs or not is_usable(state):
            check_state(state, self.strategy.placement)
        try:
            carry, step, metrics, finite = runner(split_state(state), batch)
        except (TypeError, ValueError):
            # JAX refuses a wrong state before it runs; say it in our words.
            check_state(state, self.strategy.placement)
            raise
        guarded = metrics["loss"] if finite is None else finite
        return TrainState(step=step, rng=state.rng, **carry), metrics, guarded

    def __call__(
        self, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, jax.Array]]:
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
          NonFiniteError: With ``on_nonfinite="raise"``, some steps after one whose
            loss was not finite (at most 16; `settle` looks at once). That step
            changed nothing, and ``state`` is still usable.
        """
        self._verdicts.check()
        after, metrics, guarded = self.dispatch(state, self.place_batch(batch))
        if self.options.on_nonfinite == "raise":
            self._verdicts.add(state.step, guarded)
        return after, metrics

    def settle(self) -> None:
        """Wait for the steps so far and look at each: for the end of a loop.

        Raises:
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
        """
        self._verdicts.settle()


def build_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    *,
    loss_reduction: Reduction | None = None,
    micro_batches: int = 1,
    remainder: Remainder = "error",
    on_nonfinite: OnNonfinite = "raise",
    guard: Guard = "loss",
    donate: bool = True,
    max_programs: int = 1,
) -> TrainStep:
    """A step that trains one tower function on all towers.

    With the towers' losses ``s_t / w_t`` the global loss is ``sum_t s_t / sum_t
    w_t``; the step differentiates the sums, adds gradients and weights over towers
    and micro-batches in one reduction, divides once and updates once.

    Args:
      loss_fn: ``(params, batch, tower) -> Weighted | TowerOutput``, pure.
      optimizer: Any optax transformation; it sees the whole reduced gradient.
      strategy: Which towers, where, and how they reduce.
      loss_reduction: What a bare scalar loss means: SUM is the total over towers,
        MEAN the mean of the towers' values. None refuses bare scalars. A total is
        a bare scalar with SUM; ``Weighted(total, 1)`` would divide by ``T``.
      micro_batches: ``A``: each tower works its rows off in so many parts.
      remainder: For a batch that ``T * A`` does not divide: ``"pad"`` with rows of
        weight 0, ``"drop"`` the rows over, or ``"error"``. Padded rows do enter
        batch statistics: with batch norm use ``"drop"`` or ``"error"``.
      on_nonfinite: When what is guarded is not finite, on any tower: ``"raise"`` and
        ``"skip"`` leave parameters, optimizer state and local variables as they
        were, and ``"raise"`` says so; ``"ignore"`` updates all the same.
      guard: ``"loss"``, or ``"gradients"``: the loss and every gradient, which
        reads each gradient once more.
      donate: May the next state take over the state's buffers?
      max_programs: How many kinds of batch (trees, shapes, dtypes) may compile.

    Returns:
      A `TrainStep`.

    Raises:
      ValueError: An option is not one that there is.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     errors = batch["x"] * params["w"] - batch["y"]
      ...     return tj.Weighted.mean(errors**2, tower.weight)
      >>> step = build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> state = step.init({"w": 0.0})
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3.0, np.float32)}
      >>> state, metrics = step(state, batch)
      >>> float(metrics["loss"]), round(float(state.params["w"]), 6)
      (9.0, 0.6)
    """
    options = StepOptions(
        loss_reduction=loss_reduction,
        micro_batches=micro_batches,
        remainder=remainder,
        on_nonfinite=on_nonfinite,
        guard=guard,
        donate=donate,
        max_programs=max_programs,
    )
    loss = TowerLoss(loss_fn, loss_reduction, micro_batches)
    pipeline = Pipeline(loss, optimizer, strategy, on_nonfinite, guard)
    recipe = one_step_recipe(pipeline, donate=donate)
    return TrainStep(recipe, optimizer, strategy, options)
