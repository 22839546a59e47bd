"""Where do values lie, and when are they there? Colocate, fetch, group."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower import regroup
from towerjax.towers.cross_tower.assign import check_mirrored, copies, copy_like
from towerjax.towers.cross_tower.values import as_per_tower, opened, send
from towerjax.towers.merge import are_apart, stacked_rows
from towerjax.towers.one_axis import arrays_of, with_arrays
from towerjax.towers.tower_local import read_variables
from towerjax.towers.variables import is_per_tower, plain
from towerjax.types import PerTower, PyTree
from towerjax.types.leaves import is_traced


class WhereaboutsMethods:
    """What every strategy can do with where values lie, and when they are there."""

    placement: Placement

    def update_non_slot(
        self,
        devices: Any,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        """``fn(*args, **kwargs)``, called once, mirrored on the devices.

        For what belongs to no variable, such as Adam's step count.

        Args:
          devices: Device names, such as ``strategy.non_slot_devices()``.
          fn: Returns a pytree of arrays.
          *args: Values that all towers share; a mirrored variable is its value.
          **kwargs: As ``args``.

        Returns:
          ``fn``'s tree, a copy on each device.

        Raises:
          ValueError: No devices, one twice or absent; an argument differs from tower
            to tower.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> float(strategy.update_non_slot("cpu:0", lambda x: x * 0.9, 0.5))
          0.44999998807907104
        """
        check_mirrored([args, kwargs], "strategy.update_non_slot")
        if isinstance(devices, tuple | list) and not devices:
            raise ValueError(
                "strategy.update_non_slot: devices is empty; name at least one, or pass"
                " strategy.non_slot_devices()."
            )
        args, kwargs = plain((args, kwargs))
        return send(plain(fn(*args, **kwargs)), devices)

    def non_slot_devices(self, var_list: Any = None) -> tuple[str, ...]:
        """The names of the devices for what belongs to no variable: all of them.

        Args:
          var_list: Variables; on every strategy's devices alike, so not looked at.

        Returns:
          Device names.
        """
        return self.placement.devices

    def value_container(self, value: Any) -> Any:
        """The variable that a value belongs to: the value itself.

        A variable is a plain value here and its parts do not know it; the method
        exists so that code written for the original reads the same.

        Args:
          value: Anything.

        Returns:
          The same object.
        """
        return value

    def colocate_vars_with(self, value: PyTree) -> Callable[[PyTree], PyTree]:
        """A function that places new values where a value lies.

        Args:
          value: An array, ``PerTower`` or variable with arrays.

        Returns:
          ``new -> placed``: mirrored on the same devices, or, where ``value`` holds a
          value a tower, ``PerTower``, a copy a tower (of a tuple a tuple of these).

        Raises:
          ValueError: ``value`` holds no array.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", 2.5)
          >>> place = strategy.colocate_vars_with(v)
          >>> place({"slot": 0.0})["slot"].sharding == v.value.sharding
          True
        """
        arrays, num_towers = arrays_of(value), self.placement.num_towers
        if not arrays:
            raise ValueError(
                "colocate_vars_with: the value holds no jax.Array and so lies nowhere."
                " Pass a variable, or an array that strategy.create_var placed."
            )

        def mirrored(new: PyTree) -> PyTree:
            check_mirrored(new, "colocate_vars_with a mirrored value")
            return jax.tree.map(
                lambda x: copy_like(arrays[0], jnp.asarray(x)), plain(new)
            )

        def per_tower(new: PyTree) -> PyTree:
            if is_per_tower(new):
                rows = stacked_rows(as_per_tower(new), num_towers, "The PerTower value")
            else:
                rows = copies(jax.tree.map(jnp.asarray, plain(new)), num_towers)
            there = jax.tree.map(lambda x: copy_like(arrays[0], x), rows)
            return (
                jax.tree.map(PerTower, there) if are_apart(there) else PerTower(there)
            )

        return per_tower if is_per_tower(value) else mirrored

    def fetch(
        self,
        value: PyTree,
        destination: Any = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """The value, or ``fn`` of it, on one device.

        Args:
          value: What all towers share; variables are read.
          destination: A device or its name; None is this process's first CPU.
          fn: Applied where the value lies, before it is sent: send what is small.

        Returns:
          A tree of arrays.

        Raises:
          ValueError: The value differs from tower to tower; the device is none.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", [1.0, 2.0])
          >>> float(strategy.fetch(v, fn=lambda x: x[0] + x[1]))
          3.0
        """
        value = read_variables(value)
        check_mirrored(value, "strategy.fetch")
        if destination is None:
            destination = jax.local_devices(backend="cpu")[0]
        return send(value if fn is None else fn(value), destination)

    def group(self, *values: PyTree) -> PyTree:
        """The values, once all of them are computed.

        Args:
          *values: Pytrees.

        Returns:
          The tuple, or a lone value as it is. Inside jit none of them is used before
          all are there.

        Example:
          >>> import towerjax as tj
          >>> tj.Mirrored(towers=2).group(1, "two")
          (1, 'two')
        """
        if is_traced(values):
            values = with_arrays(values, lax.optimization_barrier(arrays_of(values)))
        else:
            jax.block_until_ready(values)
        return values[0] if len(values) == 1 else values

    def initialize(self) -> list[Any]:
        """An empty list: nothing has to be started.

        Returns:
          ``[]``.

        Raises:
          ValueError: A device of the strategy is not on this machine.
        """
        _ = self.placement.jax_devices
        return []

    def finalize(self) -> list[Any]:
        """An empty list, once all prints and callbacks of towers are through.

        Returns:
          ``[]``.
        """
        jax.effects_barrier()
        return []

    def select_tower(self, value: PyTree, tower: Any) -> PyTree:
        """Tower ``t``'s own tree of a tree that holds all towers' values.

        Args:
          value: A pytree with ``PerTower`` leaves and variables.
          tower: ``t``, from 0 to ``T - 1``; or the one tower's device, a
            ``jax.Device`` or a name such as ``"gpu:2"``.

        Returns:
          The tree with the tower's own values; the inverse of `regroup`.

        Raises:
          ValueError: There is no such tower, or the device has several.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> strategy.select_tower({"own": tj.PerTower(("a", "b")), "n": 3}, 1)
          {'n': 3, 'own': 'b'}
        """
        if isinstance(tower, str | jax.Device):
            tower = self.placement.tower_on(canonical_device_name(tower))
        return regroup.select_tower(opened(value), tower)

    def regroup(self, nests: Sequence[PyTree]) -> PyTree:
        """One tree of ``T`` towers' trees.

        Args:
          nests: Tower ``t``'s tree at index ``t``, all of one structure.

        Returns:
          The tree: one leaf where all towers have the same object or equal constants,
          else ``PerTower``; the inverse of `select_tower`.

        Raises:
          ValueError: Another number of trees than towers; structures differ.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> strategy.regroup([{"a": "x", "n": 3}, {"a": "y", "n": 3}])
          {'a': PerTower(values=('x', 'y')), 'n': 3}
        """
        if not isinstance(nests, Sequence):  # a dict by device, as TensorFlow had it
            raise ValueError(
                f"regroup: got a {type(nests).__name__}. Pass a list of one tree for"
                " each tower, in the order of the towers."
            )
        if len(nests) != self.placement.num_towers:
            raise ValueError(
                f"regroup: got {len(nests)} trees, but there are"
                f" {self.placement.num_towers} towers. Pass one tree for each tower."
            )
        return regroup.regroup(nests)
