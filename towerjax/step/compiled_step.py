"""A compiled step: its options, and calling it with a checked state and batch."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import jax

from towerjax.data.placer import BATCH_LAYOUT, PlacedBatch, Placer
from towerjax.data.shard import Remainder, check_remainder
from towerjax.mesh.transfer import on_every_process, place
from towerjax.step.caller import Caller
from towerjax.step.checking import Verdicts
from towerjax.step.engine import Guard, OnNonfinite, Outcome, repeated_recipe
from towerjax.step.program import Runner
from towerjax.step.proving import Recipe
from towerjax.step.state import TrainState, join_state, split_state, state_layout
from towerjax.step.state_checks import check_is_state, check_made_for, check_num_towers
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree, short_repr
from towerjax.types.options import cast_ints, check_choice, check_flag, check_whole


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a step treats its batch and its loss; see `build_train_step`."""

    micro_batches: int = 1
    remainder: Remainder = "error"
    on_nonfinite: OnNonfinite = "raise"
    guard: Guard = "loss"
    donate: bool = True
    max_programs: int | None = 1
    audit: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_remainder(self.remainder)
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_choice("guard", self.guard, get_args(Guard))
        check_whole("micro_batches", self.micro_batches)
        check_whole("max_programs", self.max_programs, or_none=True)
        check_flag("donate", self.donate)
        check_flag("audit", self.audit)
        cast_ints(self)


class CompiledStep(Caller):
    """A pure training step: ``(state, batch) -> (state, metrics)``.

    Compiled at its first call, once. Subclasses make its state.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        strategy: Strategy,
        options: StepOptions,
        *,
        engine: Any = None,
        layout: TrainState | None = None,
    ) -> None:
        self.options = options
        one, own = Layout.MIRRORED, Layout.PER_TOWER
        donated, kept = split_state(layout or state_layout(strategy))
        ins = {"state": donated, "kept": kept, **BATCH_LAYOUT}
        out = Outcome(donated, one, {"one": one, "own": own}, one)
        placer = Placer(
            strategy.placement,
            remainder=options.remainder,
            micro_batches=options.micro_batches,
        )
        recipe = Recipe(step, ins, out, donate=options.donate)
        how = {"engine": engine, "audits": options.audit}
        super().__init__(recipe, strategy, placer, options.max_programs, **how)
        self._verdicts = Verdicts(
            strategy.placement, refusals=options.on_nonfinite == "raise"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy}, {self.options})"

    def _runner_for(self, state: TrainState, batch: PlacedBatch) -> Runner:
        steps = batch.num_steps
        if steps is None:
            return self._runner
        if steps not in self._runners:
            recipe = repeated_recipe(self._runner.recipe)
            self._runners[steps] = dataclasses.replace(self._runner, recipe=recipe)
        return self._runners[steps]

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
        check_num_towers(state, self.strategy.placement.num_towers)
        layouts = state_layout(self.strategy)
        placed = place(state, self.strategy.placement, layouts, state.params)
        check_made_for(placed, self.strategy)
        return placed

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

    @property
    def batch_rows(self) -> frozenset[int]:
        """The sizes of batches so far to which smaller ones are padded."""
        return frozenset(self._placer.full_sizes.values())

    def expect_batch_rows(self, sizes: Iterable[int]) -> None:
        """Pad smaller batches as if batches of these sizes had been placed before.

        Args:
          sizes: As ``batch_rows`` of the step in another process, of any towers.
        """
        self._placer.expect(sizes)

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """The step, without looking at whether its loss was finite.

        Args:
          state: The state; donated.
          batch: A placed batch, or several stacked.

        Returns:
          ``(state, metrics, guarded)``; ``guarded`` is ``()``, the loss or a bool, and
          NaN, infinite or False when the step was refused. For stacked batches metrics
          and what is guarded are ``[K]``, of which the first so many count.
        """
        several = self.strategy.placement.num_processes > 1
        if several:  # which might each give numbers of their own: take the first's
            state = self.start(state)
        state, out = self._call(state, batch)
        own = out.metrics["own"]
        if several and own:
            own = on_every_process(own, self.strategy.placement)
        metrics = {**out.metrics["one"], **own}
        guarded = metrics["loss"] if out.finite is None else out.finite
        after = join_state(out.donated, {"rng": state.rng, **out.now})
        return after, metrics, guarded

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
          NonFiniteError: With ``on_nonfinite="raise"``, at the first call after a
            step whose loss was not finite has run (on a GPU the two that follow it
            too), at most 16 calls later; of several processes at the same call on all,
            so up to 16 later; `settle`, for the end of a loop, waits for the last. That
            step changed nothing, and ``state`` is still usable.
        """
        self._verdicts.check()
        placed = self._placer.place(batch, by_call=True)
        placed.refuse_several()
        after, metrics, guarded = self.dispatch(state, placed)
        self._verdicts.add(state.step, guarded)
        return after, metrics

    def settle(self) -> None:
        """Wait for the steps so far and read their verdicts, at the end of a loop.

        Raises:
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
        """
        self._verdicts.settle()
