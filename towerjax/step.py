"""The pipeline: batch, shard, tower, merge, reduce, update, next state."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from towerjax.gradient import TowerLoss
from towerjax.outputs import join_weighted, split_weighted
from towerjax.placement import TowerAxes, over_local_towers, place
from towerjax.program import Program, Proof, Recipe, Runner, prove
from towerjax.shard import PlacedBatch, Placer, Remainder, check_remainder
from towerjax.state import (
    STATE_LAYOUT,
    TrainState,
    abstract_state,
    check_state,
    init_state,
    local_values,
    with_local_values,
)
from towerjax.strategies import Strategy
from towerjax.tower import TowerInputs
from towerjax.types import (
    Layout,
    LossFn,
    PyTree,
    Reduction,
    Weighted,
)
from towerjax.update import Verdicts, apply_update, update_if

OnNonfinite = Literal["raise", "skip", "ignore"]
Guard = Literal["loss", "gradients"]


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


def _rows_of_local_towers(batch: PyTree, axes: TowerAxes) -> PyTree:
    """A device's rows ``[k * b, ...]`` as its towers' rows ``[k, b, ...]``."""
    return jax.tree.map(lambda x: x.reshape((axes.num_local, -1) + x.shape[1:]), batch)


def _train_on_device(
    loss: TowerLoss,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    on_nonfinite: OnNonfinite,
    guard: Guard,
    axes: TowerAxes,
) -> Callable[..., tuple[TrainState, dict[str, Any], jax.Array]]:
    """One train step as each device runs it: ``(state, batch, num_valid)``."""
    ops = strategy.cross_tower_ops

    def step(
        state: TrainState, batch: PyTree, num_valid: jax.Array
    ) -> tuple[TrainState, dict[str, Any], jax.Array]:
        inputs = TowerInputs(strategy, axes, state.step, state.rng, num_valid)

        def tower_fn(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
            rows, local = own
            grads, total, metrics, local = loss.gradient(
                state.params, rows, inputs, tower_id, local
            )
            summed, mirrored = split_weighted(metrics)
            return (total, grads, summed), (mirrored, local)

        own = (_rows_of_local_towers(batch, axes), local_values(state.local))
        sums, (mirrored, local) = over_local_towers(
            tower_fn, axes, own, stack_sums=ops.needs_every_tower
        )
        guarded = sums[0].sum if guard == "loss" else sums[:2]
        sums = ops.sum_over_towers(sums, axes)
        finite = sums.finite(len(jax.tree.leaves(guarded)))
        total, grads, summed = sums.tree()
        if loss.reduction is Reduction.SUM:
            total = Weighted(total.sum, jnp.ones_like(total.sum))
        # Once and behind a barrier: XLA turns some divisions by the same scalar into
        # products with its inverse and others not, and then bits depend on D.
        scale = lax.optimization_barrier(Weighted(1.0, total.weight).value)

        def update() -> tuple[PyTree, PyTree, PyTree]:
            scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            params, opt_state = apply_update(
                optimizer, scaled, state.opt_state, state.params, total.value
            )
            return params, opt_state, with_local_values(state.local, local)

        if on_nonfinite == "ignore":
            after = update()
        else:
            before = (state.params, state.opt_state, state.local)
            after = update_if(finite, update, before, axes.platform)
        metrics = join_weighted(
            [metric.value for metric in summed],
            jax.tree.map(lambda x: x[0], mirrored),
        )
        next_state = TrainState(state.step + 1, *after, state.rng)
        verdict = jnp.where(finite, -1, state.step)
        return next_state, {"loss": total.value, **metrics}, verdict

    return step


def _repeat_on_device(
    make_step: Callable[[TowerAxes], Callable[..., Any]], axes: TowerAxes
) -> Callable[..., Any]:
    """The first ``count`` of ``K`` stacked batches in one loop, on each device."""
    step = make_step(axes)

    def steps(
        state: TrainState, batches: PyTree, num_valid: jax.Array, count: jax.Array
    ) -> Any:
        def at(i: Any) -> tuple[PyTree, jax.Array]:
            return jax.tree.map(lambda x: x[i], batches), num_valid[i]

        _, *shapes = jax.eval_shape(lambda s: step(s, *at(0)), state)
        kept = jax.tree.map(
            lambda s: jnp.zeros((num_valid.shape[0], *s.shape), s.dtype), shapes
        )

        def body(i: jax.Array, carry: Any) -> Any:
            state, kept = carry
            state, *results = step(state, *at(i))
            kept = jax.tree.map(lambda buffer, x: buffer.at[i].set(x), kept, results)
            return state, kept

        # The count is a value, not a shape: a shorter last call is no new program.
        state, kept = lax.fori_loop(0, count, body, (state, kept))
        return state, *kept

    return steps


class TrainStep:
    """A pure training step: ``(state, batch) -> (state, metrics)``.

    Made by `build_train_step`. Compiled at its first call, once.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        strategy: Strategy,
        options: StepOptions,
    ) -> None:
        self.strategy, self.options, self.optimizer = strategy, options, optimizer
        loss = TowerLoss(loss_fn, options.loss_reduction, options.micro_batches)
        device_fn = functools.partial(
            _train_on_device,
            loss,
            optimizer,
            strategy,
            options.on_nonfinite,
            options.guard,
        )
        in_layouts = {
            "state": STATE_LAYOUT,
            "batch": Layout.PER_TOWER,
            "num_valid": Layout.MIRRORED,
        }
        out_layouts = {
            "state": STATE_LAYOUT,
            "metrics": Layout.MIRRORED,
            "verdict": Layout.MIRRORED,
        }
        recipe = Recipe(
            device_fn,
            in_layouts,
            out_layouts,
            donate=options.donate,
            padding_counts=True,
        )
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

    def place(self, state: TrainState) -> TrainState:
        """A copy of a state on this step's devices, e.g. one from other devices.

        Args:
          state: A ``TrainState`` of the same number of towers, or its host copy.

        Returns:
          The state, placed.

        Raises:
          ValueError: Its tower-local variables have another number of towers.
        """
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
        if isinstance(batch, PlacedBatch):
            return batch
        return self._placer.place(batch)

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
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return prove(self._runner.recipe, placement, (state, batch, count))

    def program(self, state: TrainState, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be.

        Args:
          state: The state.
          batch: A global batch, or one placed before.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's own text.
        """
        batch = self.place_batch(batch)
        return self._runner_for(batch).program(state, batch)

    def _runner_for(self, batch: PlacedBatch) -> Runner:
        if len(batch.args) == 2:
            return self._runner
        steps = batch.args[1].shape[0]
        if steps not in self._repeated:
            self._repeated[steps] = self._run(_repeated_recipe(self._runner.recipe))
        return self._repeated[steps]

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """The step and its verdict, without looking at the verdict.

        Args:
          state: The state; donated.
          batch: A placed batch, or several stacked.

        Returns:
          ``(state, metrics, verdict)``; the verdict is ``()`` int32, the number of
          the step when what is guarded was not finite, else -1. For stacked
          batches metrics and verdict are ``[K]``, of which the first so many count.
        """
        try:
            return self._runner_for(batch)(state, batch)
        except (AttributeError, TypeError, ValueError):
            # JAX refuses a wrong state before it runs; say it in our words.
            check_state(state, self.strategy.placement)
            raise

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
          ``Weighted`` metric its value over the global batch.

        Raises:
          ValueError: A malformed batch or a state that is not this step's, before
            anything is compiled; nothing is lost.
          NonFiniteError: With ``on_nonfinite="raise"``, up to 16 steps after one
            whose loss was not finite. That step changed nothing.
        """
        state, metrics, verdict = self.dispatch(state, self.place_batch(batch))
        if self.options.on_nonfinite == "raise":
            self._verdicts.add(verdict)
        return state, metrics


def _repeated_recipe(recipe: Recipe) -> Recipe:
    """Several steps in one program: ``(state, [K, B, ...], [K], count)``."""
    layouts = {**recipe.in_layouts, "batch": Layout.PER_TOWER_STEPS}
    layouts["count"] = Layout.MIRRORED
    device_fn = functools.partial(_repeat_on_device, recipe.device_fn)
    return dataclasses.replace(recipe, device_fn=device_fn, in_layouts=layouts)


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
        MEAN the mean of the towers' values. None refuses bare scalars.
      micro_batches: ``A``: each tower works its rows off in so many parts.
      remainder: For a batch that ``T * A`` does not divide: ``"pad"`` with rows of
        weight 0, ``"drop"`` the rows over, or ``"error"``.
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
    return TrainStep(loss_fn, optimizer, strategy, options)
