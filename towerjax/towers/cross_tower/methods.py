"""What can be done with all towers' values outside a step? A strategy's methods."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower import batch, call, values
from towerjax.towers.cross_tower.variable_methods import VariableMethods
from towerjax.types import PerTower, PyTree, Reduction


class CrossTowerMethods(VariableMethods):
    """What every strategy can do with towers' values; all of it pure."""

    placement: Placement

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: devices, once looked up, do not pickle."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, options: dict[str, Any]) -> None:
        """The options, past the frozen fields."""
        self.__dict__.update(options)

    @property
    def num_towers(self) -> int:
        """``T``."""
        return self.placement.num_towers

    @property
    def is_single_tower(self) -> bool:
        """Is there one tower alone?"""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that the towers run on, in tower order."""
        return self.placement.devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold the parameters: each worker device."""
        return self.placement.devices

    @property
    def worker_device_index(self) -> PerTower:
        """Each tower's id as a per-tower value."""
        return PerTower(jnp.arange(self.num_towers))

    def call_for_each_tower(
        self,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        run_concurrently: bool = True,
        **kwargs: PyTree,
    ) -> PyTree:
        """What ``fn(tower, *args, **kwargs)`` returns on every tower.

        Compiled once for each function and structure of arguments, so keep the
        function: a lambda made anew is compiled anew. As under ``jax.jit``, what it
        closes over is looked at while it is traced, the first time. A Python number
        is a part of the program, so each value compiles one that is kept: pass a
        number that changes as ``np.float32(lr)``. Works inside ``jax.jit``,
        ``jax.grad`` and ``lax.scan``.

        Args:
          fn: The tower function; may use ``tower.merge_call`` and the like.
          *args: ``PerTower`` leaves are handed out row by row, a tower-local variable
            holds the tower's copy, others go in whole.
          run_concurrently: False runs one tower after another, each until it
            finishes or waits in a merge, with real values: for prints and pdb.
          **kwargs: As ``args``.

        Returns:
          ``fn``'s tree: bare where the same on every tower, else ``PerTower``;
          variables as such.

        Raises:
          ValueError: A ``PerTower`` argument has not one row a tower; ``fn`` has no
            hash.
          ReplicationError: Not every tower would reach a collective, or a mirrored
            variable comes back that is not the same on every tower.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> own = tj.PerTower(jnp.array([1, 5]))
          >>> def tower_fn(tower, x):
          ...     print(f"tower {tower.id} has {x}")
          ...     return x + tower.reduce(tj.Reduction.SUM, x)
          >>> strategy.call_for_each_tower(tower_fn, own, run_concurrently=False)
          tower 0 has 1
          tower 1 has 5
          PerTower(values=Array([ 7, 11], dtype=int32))
        """
        return call.call_for_each_tower(
            self, fn, args, kwargs, run_concurrently=run_concurrently
        )

    def unwrap(self, value: Any) -> list[Any]:
        """The towers' values as a list; ``[value]`` when it is one value.

        Args:
          value: ``PerTower``, ``TowerLocal`` or anything else.

        Returns:
          ``T`` values in tower order, or one.
        """
        return values.unwrap(value)

    def reduce(
        self,
        reduction: Reduction,
        value: PyTree,
        *,
        axis: int | None = None,
        destinations: Any = None,
    ) -> PyTree:
        """One value of all towers' values.

        See `towerjax.towers.cross_tower.values.reduce_values`.

        Args:
          reduction: SUM, MEAN or ONLY_FIRST_TOWER.
          value: A pytree of ``PerTower`` and of values that all towers share.
          axis: Also reduce over this dim of each tower's value.
          destinations: Where the result shall lie: a device name, a ``jax.Device``,
            several of these, or a value, for the devices where that lies.

        Returns:
          The tree with one value a leaf.
        """
        return values.reduce_values(
            self, reduction, value, axis=axis, destinations=destinations
        )

    def batch_reduce(
        self, reduction: Reduction, pairs: Sequence[tuple[PyTree, Any]]
    ) -> list[PyTree]:
        """One value of each pair's towers' values; all sums travel together.

        See `towerjax.towers.cross_tower.batch.batch_reduce_values`.

        Args:
          reduction: SUM, MEAN or ONLY_FIRST_TOWER.
          pairs: ``(value, destinations)`` each, as in ``reduce``.

        Returns:
          As many values, in the order of the pairs.
        """
        return batch.batch_reduce_values(self, reduction, pairs)

    def broadcast(self, value: PyTree, destinations: Any = None) -> PyTree:
        """A copy of one value on each of several devices.

        See `towerjax.towers.cross_tower.batch.broadcast_value`.

        Args:
          value: A pytree of arrays or numbers.
          destinations: Where to; None is all worker devices.

        Returns:
          The tree of mirrored arrays.
        """
        return batch.broadcast_value(self, value, destinations)

    def gather(self, value: PerTower, axis: int) -> PyTree:
        """All towers' values joined along a dim; sizes may differ along it alone.

        Args:
          value: ``PerTower`` of an array ``[T, ...]`` or of a tuple of arrays, or
            of trees of them.
          axis: The dim to join along.

        Returns:
          One array, or tree of them, in tower order.
        """
        return values.gather_values(self, value, axis)

    def map(
        self, fn: Callable[..., PyTree], elements: Sequence[Any], *args: PyTree
    ) -> PerTower:
        """``fn(element, *args)`` of each element, element ``j`` on tower ``j mod T``.

        Args:
          fn: A function of one element.
          elements: The elements, of one shape.
          *args: The same for all elements.

        Returns:
          ``PerTower`` of a tuple: each tower's results, stacked.
        """
        return batch.map_over_towers(self, fn, elements, *args)
