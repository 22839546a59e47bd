"""What does one device do in a train step? Tower, reduce, update, next state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from towerjax.checking import Check, after, checked, gathered_rows
from towerjax.collectives.base import sum_over_towers
from towerjax.example_cells import as_addends, from_sums
from towerjax.example_count import ExampleCount
from towerjax.executors import over_local_towers
from towerjax.gradient import TowerLoss
from towerjax.metrics.over_towers import folded_over_towers
from towerjax.nonfinite import Flags, flags, side_by_side
from towerjax.outputs import metric_values, split_metrics
from towerjax.placement import TowerAxes
from towerjax.program import Recipe
from towerjax.state import CARRY_LAYOUT, CLOCK_LAYOUT
from towerjax.strategies import Strategy
from towerjax.tower import TowerInputs
from towerjax.tower_local import local_values, with_local_values
from towerjax.types import Layout, PyTree, Reduction, Weighted
from towerjax.update import apply_update, update_if

OnNonfinite = Literal["raise", "skip", "ignore"]
Guard = Literal["loss", "gradients"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A train step before it is compiled.

    Attributes:
      loss: The loss function and what is known about it.
      optimizer: Any optax transformation.
      strategy: Which towers, where, and how they reduce.
      on_nonfinite: Is a step whose ``guard`` is not finite refused?
      guard: What has to be finite.
      check: What is looked at besides; None is nothing.
    """

    loss: TowerLoss
    optimizer: optax.GradientTransformation
    strategy: Strategy
    on_nonfinite: OnNonfinite
    guard: Guard
    check: Check | None = None

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The step as each device runs it.

        Args:
          axes: The axes that the towers meet over.

        Returns:
          ``(carry, clock, batch, num_valid) -> (carry, now, metrics, finite)``;
          ``now`` is what of the clock has changed, and ``finite`` None where the loss
          alone is guarded. With a check, what `checked` asks for comes last.
        """

        def step(
            carry: dict[str, Any],
            clock: dict[str, jax.Array],
            batch: PyTree,
            num_valid: jax.Array,
        ) -> tuple[Any, ...]:
            inputs = TowerInputs(self.strategy, axes, clock["step"], clock["rng"])
            towers = self._towers(carry, batch, num_valid, inputs)
            sums, (folded, mirrored, local, flagged) = towers
            sums = sum_over_towers(self.strategy.cross_tower_ops, sums, axes)
            total, grads, states, added, due = sums.tree()
            states |= folded_over_towers(folded, axes)
            if self.loss.reduction is Reduction.SUM:
                total = Weighted(total.sum, jnp.ones_like(total.sum))
            # A sum that is not finite shows even where the weight is 0.
            loss = jnp.where(jnp.isfinite(total.sum), total.value, total.sum)
            finite = None
            if self.guard == "gradients":
                finite = sums.finite(len(jax.tree.leaves((total, grads))))
            local = with_local_values(carry["local"], local)
            accepted = jnp.isfinite(loss) if finite is None else finite
            accepted = accepted & (total.weight != 0)  # no examples, nothing to learn
            seen = _with_seen(carry["seen"], added, axes.num_towers)
            others = {"local": local, "seen": seen}
            carry = self._update(carry, grads, total, others, accepted)
            metrics = {"loss": loss, **metric_values(states)}
            metrics |= jax.tree.map(lambda x: x[0], mirrored)
            asked = () if due is None else ((flagged, due > 0),)
            return carry, {"step": clock["step"] + 1}, metrics, finite, *asked

        return step

    def _towers(
        self,
        carry: dict[str, Any],
        batch: PyTree,
        num_valid: jax.Array,
        inputs: TowerInputs,
    ) -> tuple[PyTree, PyTree]:
        """What this device's towers add up, and what each keeps, ``[k, ...]``."""
        axes = inputs.axes

        def tower_fn(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
            grads, total, metrics, local, seen = self.loss.gradient(
                carry["params"], own, inputs, tower_id
            )
            added, folded, mirrored = split_metrics(metrics)
            flagged = self._flagged((total, grads, added), inputs.step)
            # Is any device's check due? Sent along; a collective more is dear.
            due = self.check and self.check.is_due(inputs.step).astype(jnp.float32)
            if seen is not None:
                seen = as_addends(seen, axes.num_towers)
            sums = (total, grads, added, seen, due)
            return sums, (folded, mirrored, local, flagged)

        shared = None
        if self.check is not None and self.check.nonfinite:
            part = ("parameter", "params", carry["params"])
            shared = flags([part], due=self.check.is_due(inputs.step))
            num_valid = after(shared.table, num_valid)
        rows = jax.tree.map(
            lambda x: x.reshape((axes.num_local, -1) + x.shape[1:]), batch
        )
        stack_sums = self.strategy.cross_tower_ops.needs_every_tower
        own = (rows, num_valid, local_values(carry["local"]))
        sums, kept = over_local_towers(tower_fn, axes, own, stack_sums=stack_sums)
        *others, flagged = kept
        if shared is not None:
            flagged = side_by_side(shared, flagged)
        return sums, (*others, flagged)

    def _flagged(self, sums: tuple[Any, ...], number: Any) -> Flags | None:
        """What is not finite of one tower, when the check is due."""
        if self.check is None or not self.check.nonfinite:
            return None
        total, grads, added = sums
        parts = [
            ("loss", "loss", total),
            ("gradient", "params", grads),
            ("metric", "metrics", added),
        ]
        return flags(parts, due=self.check.is_due(number))

    def located(self, axes: TowerAxes) -> Callable[..., Any]:
        """The towers alone, of which is told what is not finite.

        Args:
          axes: The axes that the towers meet over.

        Returns:
          ``(carry, clock, batch, num_valid) -> (flags,)``, ``[T, M]``; with an index
          besides, of batches stacked, that one.
        """
        whole = dataclasses.replace(self, check=Check(every=1, desync=False))

        def look(
            carry: Any, clock: Any, batch: PyTree, num_valid: Any, *index: Any
        ) -> tuple[Any]:
            for i in index:
                batch, num_valid = jax.tree.map(lambda x, i=i: x[i], (batch, num_valid))
            inputs = TowerInputs(self.strategy, axes, clock["step"], clock["rng"])
            _, (*_, flagged) = whole._towers(carry, batch, num_valid, inputs)
            return (gathered_rows(flagged, axes),)

        return look

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's loss and metric states, before they are merged.

        Args:
          axes: One tower a device.

        Returns:
          ``(carry, clock, batch, num_valid) -> {"loss": ..., "metrics": ...}`` with
          leaves ``[1, ...]``.
        """

        def sums(
            carry: Any, clock: Any, batch: PyTree, num_valid: jax.Array
        ) -> dict[str, Any]:
            inputs = TowerInputs(self.strategy, axes, clock["step"], clock["rng"])
            towers = self._towers(carry, batch, num_valid, inputs)
            (total, _, added, *_), (folded, *_) = towers
            if not self.strategy.cross_tower_ops.needs_every_tower:
                total, added = jax.tree.map(lambda x: x[None], (total, added))
            return {"loss": total, "metrics": {**added, **folded}}

        return sums

    def _update(
        self,
        carry: dict[str, Any],
        grads: PyTree,
        total: Weighted,
        others: dict[str, Any],
        accepted: jax.Array,
    ) -> dict[str, Any]:
        """The next carry, or this one when the step is refused."""
        # Once and behind a barrier: XLA turns some divisions by the same scalar into
        # products with its inverse and others not, and then bits depend on D.
        scale = lax.optimization_barrier(Weighted(1.0, total.weight).value)

        def update(
            carry: dict[str, Any], grads: PyTree, scale: jax.Array, loss: jax.Array
        ) -> dict[str, Any]:
            scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            params, opt_state = apply_update(
                self.optimizer, scaled, carry["opt_state"], carry["params"], loss
            )
            return {"params": params, "opt_state": opt_state, **others}

        args = (carry, grads, scale, total.value)
        if self.on_nonfinite == "ignore":
            return update(*args)
        return update_if(accepted, update, *args)


def _with_seen(
    seen: ExampleCount | None, added: jax.Array | None, num_towers: int
) -> ExampleCount | None:
    if seen is None or added is None:
        return seen
    return seen + ExampleCount(from_sums(added, num_towers))


class OfOneStep(Protocol):
    """A train step before it is compiled, such as `Pipeline`."""

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The step as each device runs it; see `Pipeline`.

        Args:
          axes: The axes that the towers meet over.
        """
        ...

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's values in which padded rows would count; see `Pipeline`.

        Args:
          axes: One tower a device.
        """
        ...


def one_step_recipe(
    pipeline: OfOneStep, *, donate: bool, check: Check | None = None
) -> Recipe:
    """The recipe of a single step.

    Args:
      pipeline: The step.
      donate: May the next carry take over the carry's buffers?
      check: What the step looks at besides; its findings are one result more.

    Returns:
      A `Recipe`: ``(carry, clock, batch, num_valid)``.
    """
    in_layouts = {
        "state": CARRY_LAYOUT,
        "clock": CLOCK_LAYOUT,
        "batch": Layout.PER_TOWER,
        "num_valid": Layout.PER_TOWER,
    }
    out_layouts = {
        "state": CARRY_LAYOUT,
        "clock": Layout.MIRRORED,
        "metrics": Layout.MIRRORED,
        "finite": Layout.MIRRORED,
    }
    device_fn = pipeline.on_device
    if check is not None:
        out_layouts["found"] = Layout.MIRRORED
        device_fn = functools.partial(_checked_on_device, pipeline, check)
    return Recipe(
        device_fn, in_layouts, out_layouts, donate=donate, counted=pipeline.counted
    )


def _checked_on_device(
    pipeline: OfOneStep, check: Check, axes: TowerAxes
) -> Callable[..., Any]:
    return checked(pipeline.on_device(axes), check, axes)


def locating_recipe(pipeline: Pipeline, recipe: Recipe) -> Recipe:
    """The recipe that tells what of a step is not finite, and keeps the state.

    Args:
      pipeline: The step.
      recipe: Of the step, or of several: the arguments are the same, and in the place
        of their count is the index of one.

    Returns:
      A `Recipe`.
    """
    return Recipe(
        pipeline.located,
        recipe.in_layouts,
        {"flags": Layout.MIRRORED},
        donate=False,
        counted=None,
    )


def repeated_recipe(recipe: Recipe) -> Recipe:
    """Several steps in one program.

    Args:
      recipe: Of a single step.

    Returns:
      A `Recipe`: ``(carry, clock, [K, B, ...], [K, T], count)``, of which the first
      ``count`` steps are done.
    """

    def on_device(axes: TowerAxes) -> Callable[..., Any]:
        return _repeated(recipe.device_fn(axes))

    def counted(axes: TowerAxes) -> Callable[..., Any]:
        of_one_step: Any = recipe.counted

        def first_step(
            carry: Any, clock: Any, batches: PyTree, num_valid: jax.Array, count: Any
        ) -> Any:
            batch = jax.tree.map(lambda x: x[0], batches)
            return of_one_step(axes)(carry, clock, batch, num_valid[0])

        return first_step

    stacked = dict.fromkeys(("batch", "num_valid"), Layout.PER_TOWER_STEPS)
    in_layouts = {**recipe.in_layouts, **stacked}
    in_layouts["count"] = Layout.MIRRORED
    return dataclasses.replace(
        recipe, device_fn=on_device, in_layouts=in_layouts, counted=counted
    )


def _repeated(step: Callable[..., Any]) -> Callable[..., Any]:
    def steps(
        carry: Any, clock: Any, batches: PyTree, num_valid: jax.Array, count: jax.Array
    ) -> Any:
        def at(carry: Any, now: Any, i: Any) -> Any:
            batch = jax.tree.map(lambda x: x[i], batches)
            return step(carry, {**clock, **now}, batch, num_valid[i])

        _, now, *shapes = jax.eval_shape(lambda: at(carry, {}, 0))
        now = {name: clock[name] for name in now}
        kept = jax.tree.map(
            lambda s: jnp.zeros((num_valid.shape[0], *s.shape), s.dtype), tuple(shapes)
        )

        def body(i: jax.Array, done: Any) -> Any:
            carry, now, kept = done
            carry, now, *results = at(carry, now, i)
            kept = jax.tree.map(
                lambda buffer, x: buffer.at[i].set(x), kept, tuple(results)
            )
            return carry, now, kept

        # The count is a value, not a shape: a shorter last call is no new program.
        carry, now, kept = lax.fori_loop(0, count, body, (carry, now, kept))
        return carry, now, *kept

    return steps
