"""The methods of every strategy: what it does with the towers' values and batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from towerjax.data.batch_rows import Remainder
from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.towers.reduce import reduce_values
from towerjax.towers.values import StrategyFields, unwrap
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
    """The methods of every strategy: pure functions of all towers' values.

    They are called outside of a step. A value is a pytree: its ``PerTower`` leaves and
    ``TowerLocal`` variables hold one value per tower, and its other leaves are
    replicated. With several processes, the first process's replicated values are used.
    Each method raises a ``ValueError`` for a value with another number of towers than
    the strategy, for a per-tower value where one value is needed, for a dtype that no
    device holds, and for devices that are not there.
    """

    reduce = reduce_values
    unwrap = unwrap

    __repr__ = short_repr

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone, since the devices of a placement do not pickle."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _class_like(cls, plain: _Class) -> _Class:
        """Return the class for strategies that are made from this one."""
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
        """The data set as placed batches, one per step, for steps and ``tj.run``.

        The order is kept. ``prefetch_on_device`` batches are placed in advance.

        Args:
          source: An iterable of batches, a loader (Grain, ``tf.data``, PyTorch), or a
            function without arguments that returns one. Then every process reads all of
            it and places the rows of its own towers. Or a function of an
            `InputContext`, which returns the batches of its own process alone.
          split: ``"batch"`` splits each element, a global batch, over the towers.
            ``"elements"`` gives each tower an element of its own, so that a step takes
            ``T`` elements, as TensorFlow's ``MirroredStrategy`` did.
          remainder: What to do with rows that the towers cannot share evenly, and when
            elements or a process's batches run out: ``"pad"`` with rows of weight 0,
            ``"drop"`` them, or raise an ``"error"``.
          micro_batches: The step's own number, which must divide a tower's rows, too.

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
