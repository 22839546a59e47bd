"""What is the gradient of one tower? Of its loss sum, over its micro-batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.example_cells import ExampleIds, count_rows
from towerjax.outputs import (
    as_tower_output,
    check_local,
    check_metrics,
    join_micro_batches,
    widened,
)
from towerjax.sparse import num_rows
from towerjax.tower import Tower, TowerInputs, branches_explained
from towerjax.types import LossFn, PyTree, Reduction, TowerOutput, Weighted


@dataclasses.dataclass(frozen=True)
class TowerLoss:
    """The loss function and what the builder was told about it.

    Attributes:
      fn: The user's function.
      reduction: What a scalar loss means, or None.
      micro_batches: ``A``: a tower's rows are worked off in this many parts.
      example_ids: Which examples the function's rows are; None counts none.
    """

    fn: LossFn
    reduction: Reduction | None
    micro_batches: int
    example_ids: ExampleIds | None = None

    def gradient(
        self,
        params: PyTree,
        own: tuple[PyTree, jax.Array, PyTree],
        inputs: TowerInputs,
        tower_id: jax.Array,
    ) -> tuple[PyTree, Weighted, dict[str, Any], PyTree, jax.Array | None]:
        """Gradient of one tower's loss *sum*, and what else it returned.

        Micro-batches add up here; nothing is sent and nothing is divided.

        Args:
          params: The mirrored parameters.
          own: What the tower has of its own: its rows, leaves ``[b, ...]``; how many
            of them are examples, ``()`` int32; its local values.
          inputs: The step's values that all towers share.
          tower_id: ``()`` int32.

        Returns:
          ``(grads, loss, metrics, local, seen)``: gradients at least float32; the loss
          and metric states as sums; the next local values; what the examples add to
          an ``ExampleCount``, or None.
        """
        rows, num_valid, local = own
        size = num_rows(rows)
        if self.micro_batches == 1:
            tower = inputs.tower(tower_id, local, num_valid, size)
            return self._gradient_of_part(params, rows, tower)
        part = size // self.micro_batches
        parts = jax.tree.map(
            lambda x: x.reshape((self.micro_batches, part) + x.shape[1:]), rows
        )

        def body(carry: PyTree, numbered: PyTree) -> tuple[PyTree, PyTree]:
            total, local = carry
            index, rows = numbered
            tower = inputs.tower(
                tower_id,
                local,
                num_valid,
                part,
                first_row=index * part,
                micro_batch=index,
            )
            grads, *kept, local, seen = self._gradient_of_part(params, rows, tower)
            return (jax.tree.map(jnp.add, total, grads), local), (*kept, seen)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, widened(p.dtype)), params)
        indices = jnp.arange(self.micro_batches, dtype=jnp.int32)
        (grads, local), (loss, metrics, seen) = lax.scan(
            body, (zeros, local), (indices, parts)
        )
        loss, seen = jax.tree.map(lambda x: x.sum(axis=0), (loss, seen))
        return grads, loss, join_micro_batches(metrics), local, seen

    def _gradient_of_part(
        self, params: PyTree, rows: PyTree, tower: Tower
    ) -> tuple[PyTree, Weighted, dict[str, Any], PyTree, jax.Array | None]:
        def sum_of_losses(params: PyTree) -> tuple[jax.Array, TowerOutput]:
            with branches_explained():
                out = self.fn(params, rows, tower)
            out = as_tower_output(out, self.reduction)
            return out.loss.sum, out

        grads, out = jax.grad(sum_of_losses, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(widened(g.dtype)), grads)
        metrics = check_metrics(out.metrics, loss_is_free=False)
        local = tower.local if out.local is None else out.local
        local, seen = check_local(tower.local, local), None
        if self.example_ids is not None:
            seen = count_rows(self.example_ids, rows, tower.weight)
        return grads, out.loss, metrics, local, seen
