"""How is a train step built? ``(state, batch) -> (state, metrics)``."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.checking import Check
from towerjax.compiled_step import CompiledStep, StepOptions
from towerjax.example_cells import ExampleIds
from towerjax.gradient import TowerLoss
from towerjax.nonfinite import Place
from towerjax.pipeline import (
    Guard,
    OnNonfinite,
    Pipeline,
    locating_recipe,
    one_step_recipe,
)
from towerjax.placement import place
from towerjax.program import Proof, Runner, prove_traced
from towerjax.shard import Remainder, fit_shapes
from towerjax.state import (
    TrainState,
    abstract_state,
    check_state,
    init_state,
    split_state,
)
from towerjax.strategies import Strategy
from towerjax.types import Layout, LossFn, PyTree, Reduction


class TrainStep(CompiledStep):
    """A pure training step: ``(state, batch) -> (state, metrics)``.

    Made by `build_train_step`. Compiled at its first call, once.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: StepOptions,
    ) -> None:
        recipe = one_step_recipe(pipeline, donate=options.donate, check=pipeline.check)
        counts = pipeline.loss.example_ids is not None
        super().__init__(recipe, pipeline.strategy, options, counts_examples=counts)
        self.pipeline, self.optimizer = pipeline, pipeline.optimizer
        self._locating: dict[int | None, Runner] = {}

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
        return init_state(
            params,
            self.optimizer,
            placement,
            local=local,
            rng=rng,
            counts=self.counts_examples,
        )

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
          ValueError: The batch is malformed, or does not divide.

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
        return self.check_traced(params, batch, local=local)[0]

    def check_traced(
        self, params: PyTree, batch: PyTree, *, local: PyTree = None
    ) -> tuple[Proof, Any]:
        """As `check`, with the jaxpr of one tower that was proved.

        Args:
          params: As for `check`.
          batch: As for `check`.
          local: As for `check`.

        Returns:
          The ``Proof`` and the jaxpr.

        Raises:
          ReplicationError: As `check`.
          ValueError: As `check`.
        """
        placement = self.strategy.placement
        state = abstract_state(
            params,
            self.optimizer,
            placement.num_towers,
            local,
            counts=self.counts_examples,
        )
        count = jax.ShapeDtypeStruct((placement.num_towers,), jnp.int32)
        shares = placement.num_towers * self.options.micro_batches
        shapes = fit_shapes(batch, shares, self.options.remainder)
        args = (*split_state(state), shapes, count)
        return prove_traced(self._runner.recipe, placement, args)

    def locate(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        number: int | None = None,
        index: int = 0,
    ) -> tuple[Place, ...]:
        """Which towers' values of a step are not finite, before any reduction.

        Runs the towers once more, in a program of its own: a refused step has left
        the state as it was. Nothing is updated and nothing donated.

        Args:
          state: The state before the step, or after it if it was refused.
          batch: The step's batch.
          number: Which step it was, for ``tower.step`` and ``tower.rng``; None is the
            state's.
          index: Of several batches placed together, which one.

        Returns:
          The places, tower after tower.

        Raises:
          ValueError: As a step's call.

        Example:
          >>> import numpy as np, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)
          >>> step = build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
          >>> batch = {"x": np.array([1, 2, np.inf, 4], np.float32)}
          >>> [place] = step.locate(step.init({"w": 0.0}), batch)[1:]
          >>> place.tower, place.leaf, place.part, place.kind
          (1, 'params/w', 'gradient', 'infinity')
        """
        placement = self.strategy.placement
        check_state(state, placement)
        placed = self.place_batch(batch)
        number = int(state.step) if number is None else number
        args = (np.int32(number), np.int32(index))
        at, index_at = place(args, placement, Layout.MIRRORED)
        steps = placed.num_steps
        if steps is not None:
            args = (*placed.args[:2], index_at)
            placed = dataclasses.replace(placed, args=args)
        if steps not in self._locating:
            recipe = self._runner_for(placed).recipe
            self._locating[steps] = self._run(locating_recipe(self.pipeline, recipe))
        carry, clock = split_state(dataclasses.replace(state, step=at))
        (found,) = self._locating[steps]((carry, clock), placed)
        return tuple(jax.device_get(found).places(number))


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
    check: Check | None = None,
    example_ids: ExampleIds | None = None,
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
        the statistics of Flax's batch norm, and not those of ``TowerBatchNorm``;
        see ``docs/batch_norm.md``.
      on_nonfinite: When what is guarded is not finite, on any tower: ``"raise"`` and
        ``"skip"`` leave parameters, optimizer state and local variables as they
        were, and ``"raise"`` says so; ``"ignore"`` updates all the same.
      guard: ``"loss"``, or ``"gradients"``: the loss and every gradient, which
        reads each gradient once more.
      donate: May the next state take over the state's buffers?
      max_programs: How many kinds of batch (trees, shapes, dtypes) may compile.
      check: Such as ``tj.Check(every=100)``: what the step looks at besides; None is
        nothing, and the program has nothing of it.
      example_ids: ``batch -> ids``, integers ``[b]`` of a tower's rows, or ``(ids,
        weights)``: counts each example in ``state.seen``, for `check_examples`; see
        ``docs/each_example_once.md``.

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
        check=check,
    )
    if example_ids is not None and not callable(example_ids):
        raise ValueError(
            f"example_ids={example_ids!r} must be a function of a batch, such as"
            ' lambda batch: batch["id"].'
        )
    loss = TowerLoss(loss_fn, loss_reduction, micro_batches, example_ids)
    pipeline = Pipeline(loss, optimizer, strategy, on_nonfinite, guard, check)
    return TrainStep(pipeline, options)
