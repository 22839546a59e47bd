"""What does a strategy know of its job: its processes, and their input?"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import Remainder
from towerjax.mesh.cluster.start import initialize
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower.multi_step import MultiStepContext, run_steps
from towerjax.types import PyTree


class JobMethods:
    """What every strategy can say about its processes, and do with their input."""

    placement: Placement
    prefetch_on_device: int

    @property
    def between_graph(self) -> bool:
        """Does each of several processes build and run the program by itself?"""
        return self.placement.num_processes > 1

    @property
    def should_init(self) -> bool:
        """Is this the process whose initial values all start with? The first is."""
        return jax.process_index() == 0

    @property
    def should_checkpoint(self) -> bool:
        """Is this the process that writes what the job writes once?"""
        return jax.process_index() == 0

    @property
    def should_save_summary(self) -> bool:
        """Is this the process that writes summaries for all?"""
        return jax.process_index() == 0

    def configure(
        self,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> Self:
        """This strategy in a job of several processes, which this one joins.

        The same as ``tj.cluster.initialize(cluster_spec=...)`` before the strategy is
        used. Nothing else changes: which cross-tower op is used, the strategy says.

        Args:
          cluster_spec: ``{"chief": [...], "worker": ["host:port", ...]}``; None takes
            what the environment says.
          task_type: ``"chief"`` or ``"worker"``: the list in which this process is.
          task_id: Its place there, from 0.

        Returns:
          An equal strategy, of all the processes' devices.

        Raises:
          ValueError: The cluster is wrong or incomplete; says how.
          RuntimeError: JAX was used before.
        """
        initialize(cluster_spec=cluster_spec, task_type=task_type, task_id=task_id)
        return copy.copy(self)  # without what was looked up before

    def distribute_dataset(
        self,
        source: Any,
        *,
        split: Split = "batch",
        remainder: Remainder = "pad",
        micro_batches: int = 1,
    ) -> DistributedDataset:
        """A data set as placed batches, one a step, for steps and ``tj.run``.

        Order is kept. ``prefetch_on_device`` of them are placed in advance.

        Args:
          source: An iterable of batches or a loader (Grain, ``tf.data``, PyTorch),
            or a function of no arguments that returns one: of several processes each
            goes through it and places its own towers' part. A function of one
            argument, a `InputContext`, returns the process's own part.
          split: ``"batch"``: an element is a global batch and is split over the
            towers. ``"elements"``: each tower gets an element of its own, so that a
            step takes ``T`` of them (what ``MirroredStrategy`` did).
          remainder: What happens where towers cannot share rows evenly, and where
            elements or processes run out: ``"pad"`` with rows of weight 0, ``"drop"``
            or ``"error"``.
          micro_batches: As the step has it: what else must divide a tower's rows.

        Returns:
          A `DistributedDataset`.

        Raises:
          ValueError: ``source`` is nothing to go through, or an option is wrong.

        Example:
          >>> import numpy as np, towerjax as tj
          >>> strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
          >>> batches = [np.arange(4), np.arange(4, 7)]
          >>> for placed in strategy.distribute_dataset(batches):
          ...     print(placed.arrays.tolist(), placed.counts.tolist())
          [0, 1, 2, 3] [2, 2]
          [4, 5, 6, 6] [2, 1]
        """
        options = InputOptions(split, remainder, micro_batches, self.prefetch_on_device)
        return DistributedDataset(self.placement, source, options)

    def run_steps_on_dataset(
        self,
        fn: Callable[..., PyTree],
        iterator: Iterator[PlacedBatch],
        iterations: int = 1,
        initial: PyTree = None,
    ) -> MultiStepContext:
        """Several steps of a function of one's own, in one program.

        See `towerjax.towers.cross_tower.multi_step.run_steps`.

        Args:
          fn: ``(ctx, carry, *inputs) -> carry``, in cross-tower view.
          iterator: ``iter(strategy.distribute_dataset(...))``.
          iterations: ``K``, how many of its batches to take.
          initial: The carry of the first step, or None.

        Returns:
          A `MultiStepContext`: ``final``, ``last_step_outputs``,
          ``non_tensor_outputs``, ``iterations``.

        Example:
          >>> import jax.numpy as jnp, numpy as np, towerjax as tj
          >>> strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
          >>> def step(ctx, total, x):
          ...     sums = ctx.call_for_each_tower(lambda tower, x: x.sum(), x)
          ...     ctx.set_last_step_output("sum", sums, tj.Reduction.SUM)
          ...     return total + strategy.reduce(tj.Reduction.SUM, sums)
          >>> data = iter(strategy.distribute_dataset([np.arange(4.0), np.ones(4)]))
          >>> ctx = strategy.run_steps_on_dataset(step, data, 2, jnp.float32(0))
          >>> float(ctx.final), float(ctx.last_step_outputs["sum"])
          (10.0, 4.0)
        """
        return run_steps(self, fn, iterator, iterations, initial)
