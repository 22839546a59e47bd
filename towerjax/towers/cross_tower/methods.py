"""The methods of every strategy, for all towers' values outside a step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.sparse_rows import is_rows
from towerjax.towers.cross_tower import values
from towerjax.towers.cross_tower.assign import VariableMethods
from towerjax.towers.cross_tower.call import CallMethods
from towerjax.towers.cross_tower.destinations import copy_to, of_first_process
from towerjax.towers.cross_tower.placement import PlacementMethods
from towerjax.towers.variables import any_per_tower, is_per_tower
from towerjax.types import PerTower, PyTree, Reduction, short_repr
from towerjax.types.leaves import has_tracers
from towerjax.types.tables import Table, as_html, first_rows


class CrossTowerMethods(CallMethods, VariableMethods, PlacementMethods):
    """The methods of every strategy for its towers' values; all of them pure."""

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        try:
            placement = self.placement
        except ValueError as error:  # shown even if its devices are not here
            return as_html([Table(repr(self), (str(error),), ())])
        each = placement.axes.num_local
        more = ["…"] if each > 16 else []
        rows = [
            (name, *map(str, range(i * each, (i + 1) * each)[:16]), *more)
            for i, name in enumerate(placement.devices)
        ]
        together = "one after another" if placement.local == "scan" else "together"
        last = (
            f"{placement.num_towers} towers on {placement.num_devices} devices",
            *([f"{each} on each, {together}"] if each > 1 else []),
            repr(self.cross_tower_ops),
        )
        head = ("device", "towers")
        return as_html([Table(repr(self), head, first_rows(rows), last=last)])

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

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold the parameters: each worker device."""
        return self.placement.devices

    @property
    def worker_device_index(self) -> PerTower:
        """Each tower's id as a per-tower value."""
        return PerTower(jnp.arange(self.num_towers))

    def unwrap(self, value: Any) -> list[Any]:
        """The towers' values as a list; ``[value]`` when it is one value.

        Args:
          value: ``PerTower``, ``TowerLocal``, a tree of such, or anything else.

        Returns:
          ``T`` values, or trees, in tower order, or one.
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

        Args:
          reduction: SUM, MEAN or ONLY_FIRST_TOWER.
          value: A pytree of ``PerTower`` and of values that all towers share.
          axis: Also reduce over this dim of each tower's value.
          destinations: The devices of the result: a device name, a ``jax.Device``,
            several of these, or a value that lies on them; while JAX traces, only a
            traced value, which lies on all.

        Returns:
          The tree with one value a leaf.

        Raises:
          ValueError: SUM of a value that all towers share, other towers than the
            strategy's, or destinations that are no devices.
        """
        return values.reduce_values(
            self, reduction, value, axis=axis, destinations=destinations
        )

    def batch_reduce(
        self, reduction: Reduction, pairs: Sequence[tuple[PyTree, Any]]
    ) -> list[PyTree]:
        """Reduce the towers' values of each pair; all sums are computed together.

        Args:
          reduction: SUM, MEAN or ONLY_FIRST_TOWER.
          pairs: ``(value, destinations)`` each, as in ``reduce``.

        Returns:
          As many values, in the order of the pairs.
        """
        if not isinstance(pairs, list | tuple):
            raise ValueError(
                f"batch_reduce got a {type(pairs).__name__}; give a list of pairs"
                " (value, destinations)."
            )
        for number, pair in enumerate(pairs):
            if not isinstance(pair, tuple) or len(pair) != 2:
                what = (
                    f"a tuple of {len(pair)}" if isinstance(pair, tuple) else repr(pair)
                )
                raise ValueError(
                    f"batch_reduce: pair {number} is {what}; write (value,"
                    " destinations), or (value, None) for the strategy's devices."
                )
        reduced = self.reduce(reduction, [value for value, _ in pairs])
        return [
            x if destinations is None else copy_to(x, destinations)
            for x, (_, destinations) in zip(reduced, pairs, strict=True)
        ]

    def broadcast(self, value: PyTree, destinations: Any = None) -> PyTree:
        """A copy of one value on each of several devices.

        Args:
          value: A pytree of arrays or numbers.
          destinations: The devices; None is all worker devices.

        Returns:
          The tree of mirrored arrays.
        """
        if any_per_tower(value):
            raise ValueError(
                "broadcast of a PerTower, which has a value for each tower. Make it one"
                " first, with strategy.reduce, or name a tower:"
                " strategy.unwrap(value)[0]."
            )
        if destinations is not None:
            return copy_to(value, destinations)
        if has_tracers(value):
            return value
        return copy_to(value, self.worker_devices)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """All towers' values joined along a dim; sizes may differ along it alone.

        Args:
          value: ``PerTower`` of an array ``[T, ...]`` or of a tuple of arrays, or
            of trees of them; or a tree of such.
          axis: The dim to join along.

        Returns:
          One array, or tree of them, in tower order.
        """
        return values.gather_values(self, value, axis)

    def map(
        self,
        fn: Callable[..., PyTree],
        elements: Sequence[Any],
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PerTower:
        """``fn(element, *args)`` of each element; tower ``j mod T`` gets result ``j``.

        Args:
          fn: A function of one element.
          elements: The elements, of one shape.
          *args: The same for all elements.
          **kwargs: As ``args``.

        Returns:
          ``PerTower`` of a tuple: each tower's results, stacked.
        """
        if any_per_tower((args, kwargs)):
            raise ValueError(
                "map: args are the same for all elements, but one of them is PerTower."
                " Use call_for_each_tower for values that differ from tower to tower."
            )
        if not callable(fn):
            raise ValueError(
                f"map: the function comes first, and is a {type(fn).__name__}. Write"
                " strategy.map(fn, elements, *args)."
            )
        if is_per_tower(elements):
            raise ValueError(
                "map: elements are a PerTower, of which each tower has its own. Use"
                " call_for_each_tower, or pass a list."
            )
        arrays = isinstance(elements, np.ndarray | jax.Array) and elements.ndim
        if not arrays and not isinstance(elements, Sequence):
            raise ValueError(
                f"map: elements are a {type(elements).__name__}, which does not say how"
                " many there are. Make it a list: list(elements)."
            )
        if not len(elements):
            raise ValueError("map: there are no elements.")
        given = of_first_process((elements, args, kwargs), self.placement)
        elements, args, kwargs = given
        num_towers = self.num_towers
        results = [fn(x, *args, **kwargs) for x in elements]
        by_tower = [results[t::num_towers] for t in range(num_towers)]
        return PerTower(
            tuple(
                jax.tree.map(_stack_results, *group, is_leaf=is_rows)
                for group in by_tower
                if group
            )
        )


def _stack_results(*leaves: Any) -> jax.Array:
    if is_rows(leaves[0]):
        raise ValueError(
            "map: fn returns IndexedRows, which cannot be stacked. Return"
            " rows.to_dense(), or use call_for_each_tower."
        )
    return jnp.stack([jnp.asarray(x) for x in leaves])
