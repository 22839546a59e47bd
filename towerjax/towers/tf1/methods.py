"""The methods of every strategy: functions whose first argument is the strategy."""

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.data.shard import Remainder
from towerjax.mesh.cluster.spec import parse_spec
from towerjax.mesh.cluster.start import initialize
from towerjax.towers.fields import StrategyFields
from towerjax.towers.tf1 import assign as assigning
from towerjax.towers.tf1 import call, steps, values
from towerjax.towers.tf1 import reduce as reducing
from towerjax.types import PerTower, short_repr
from towerjax.types.door import doors
from towerjax.types.missing import explain_missing
from towerjax.types.version import page

_TYPED = "distribute_dataset", "reduce", "unwrap", "worker_devices"
"""What users of ours type, too, of TensorFlow's names."""


@doors
class StrategyMethods(StrategyFields):
    """What strategies do with all towers' values outside of a step; all of it pure.

    A value is a pytree, of which ``PerTower`` leaves and ``TowerLocal`` variables hold
    one value a tower, and all else is one that all towers share. Refused, by a
    ``ValueError``, are another number of towers than the strategy's, a value of each
    tower where one is needed, what no device holds, and devices that are not there. Of
    several processes the first one's shared values are used.
    """

    call_for_each_tower = call.call_for_each_tower
    run_steps_on_dataset = steps.run_steps_on_dataset
    reduce = reducing.reduce_values
    batch_reduce = reducing.batch_reduce
    map = reducing.map_elements
    broadcast = values.broadcast
    unwrap = values.unwrap
    select_tower = values.select_tower
    regroup = values.regroup
    fetch = values.fetch
    create_var = assigning.create_var
    assign = assigning.assign
    assign_add = assigning.assign_add
    assign_sub = assigning.assign_sub
    update = assigning.update_var
    read_var = assigning.read_var

    __repr__ = short_repr
    if not TYPE_CHECKING:
        __getattr__ = explain_missing(
            f"What to write for each name of TensorFlow: {page('mirrored_strategy')}"
        )

    def __dir__(self) -> list[str]:
        """What TAB shows: TensorFlow's names are left out, and stay attributes."""
        hidden = vars(StrategyMethods).keys() - {"call_for_each_tower", *_TYPED}
        return [name for name in super().__dir__() if name not in hidden]

    def __getstate__(self) -> dict[str, Any]:
        """The options alone, since the devices of a placement do not pickle."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore
        return {name: getattr(self, name) for name in names}

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower alone."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that the towers run on, in tower order."""
        return self.placement.devices

    parameter_devices = worker_devices  # each holds all parameters

    @property
    def worker_device_index(self) -> PerTower:
        """Each tower's id as a per-tower value."""
        return PerTower(jnp.arange(self.num_towers))

    @property
    def between_graph(self) -> bool:
        """Whether each of several processes builds and runs the program."""
        return self.placement.num_processes > 1

    @property
    def should_init(self) -> bool:
        """Whether this is the first process, which does what a job does once."""
        return jax.process_index() == 0

    should_checkpoint = should_save_summary = should_init

    def configure(
        self,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> Self:
        """Join a job of several processes, and return this strategy for its devices.

        As ``tj.cluster.initialize()``, before JAX is used, of a cluster
        ``{"chief": [...], "worker": ["host:port", ...]}`` and this process's task in
        it, ``"worker"`` and its index; None reads the environment.
        """
        if cluster_spec is task_type is task_id is None:
            initialize()
        else:
            named = parse_spec(cluster_spec, task_type, task_id)
            initialize(named.coordinator, named.num_processes, named.process_id)
        return copy.copy(self)  # without the cached placement

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
          source: An iterable of batches or a loader (Grain, ``tf.data``, PyTorch), or a
            function of no arguments that returns one: each of several processes reads
            all of it, and places its own towers' part. A function of one argument, an
            `InputContext`, returns the process's own part.
          split: ``"batch"``: an element is a global batch and is split over the
            towers. ``"elements"``: each tower gets an element of its own, so that a
            step takes ``T`` of them (what ``MirroredStrategy`` did).
          remainder: What happens where towers cannot share rows evenly, and where
            elements or processes run out: ``"pad"`` with rows of weight 0, ``"drop"``
            or ``"error"``.
          micro_batches: That of the step, which must divide a tower's rows too.

        Returns:
          A `DistributedDataset`.

        Raises:
          ValueError: ``source`` cannot be iterated, or an option is wrong.

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
