"""The methods of every strategy: what it does with the towers' values and batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from towerjax.data.batch_rows import Remainder
from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.towers.fields import StrategyFields
from towerjax.towers.reduce import reduce_values
from towerjax.towers.values import unwrap
from towerjax.types.boundary import api_boundaries
from towerjax.types.notes import explain_missing
from towerjax.types.options import short_repr
from towerjax.types.version import page

_Class = TypeVar("_Class", bound=type)

METHODS_OF_TENSORFLOW = """
    assign assign_add assign_sub batch_reduce broadcast call_for_each_tower configure
    create_var fetch map read_var regroup run_steps_on_dataset select_tower update
""".split()
PROPERTIES_OF_TENSORFLOW = """
    between_graph is_single_tower parameter_devices should_checkpoint should_init
    should_save_summary worker_device_index
""".split()


_OTHERS = f"What to write for each name of TensorFlow: {page('mirrored_strategy')}"
explain_other_names = explain_missing(_OTHERS)


def explain_names_of_tensorflow(name: str) -> Callable[[Any, str], Any]:
    """A ``__getattr__`` that says which strategy of ``tj.tf1`` has such a name."""
    notes = {}
    for kind, found in (
        ("method", METHODS_OF_TENSORFLOW),
        ("property", PROPERTIES_OF_TENSORFLOW),
    ):
        for x in found:
            notes[x] = (
                f"{x} is a {kind} of tj.tf1.{name}: write"
                f" strategy = tj.tf1.{name}(...), with the same options."
            )
    return explain_missing(_OTHERS, **notes)


@api_boundaries
class StrategyMethods(StrategyFields):
    """What strategies do with all towers' values outside of a step; all of it pure.

    A value is a pytree, of which ``PerTower`` leaves and ``TowerLocal`` variables hold
    one value a tower, and all else is one that all towers share. Refused, by a
    ``ValueError``, are another number of towers than the strategy's, a value of each
    tower where one is needed, what no device holds, and devices that are not there. Of
    several processes the first one's replicated values are used.
    """

    reduce = reduce_values
    unwrap = unwrap

    __repr__ = short_repr

    def __getstate__(self) -> dict[str, Any]:
        """The options alone, since the devices of a placement do not pickle."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _class_like(cls, plain: _Class) -> _Class:
        """The class of which this strategy makes another: it has the same methods."""
        return plain

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that the towers run on, in tower order."""
        return self.placement.devices

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
