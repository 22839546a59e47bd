"""How are variables handled across towers? The other half of a strategy's methods."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower import assign, regroup, whereabouts
from towerjax.towers.tower_local import read_variables
from towerjax.towers.variables import Variable
from towerjax.types import PyTree, Reduction


class VariableMethods:
    """What every strategy can do with variables; all of it pure."""

    placement: Placement

    def create_var(
        self,
        name: str,
        initial: PyTree | Callable[[], PyTree],
        *,
        reduction: Reduction = Reduction.NONE,
        tower_local: bool = False,
    ) -> Any:
        """A new variable on the strategy's devices.

        Args:
          name: What errors call it.
          initial: A pytree of arrays or numbers, or a function that makes one; called
            once, so that random values are the same on all towers.
          reduction: How towers' values become one: of a mirrored variable those they
            assign, of a tower-local one their copies when it is read.
          tower_local: A copy a tower instead of one mirrored value?

        Returns:
          ``MirroredVar``, or ``TowerLocal`` with leaves ``[T, ...]``.

        Raises:
          ValueError: An option is of another type, or ``initial`` holds no arrays.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 3, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> count.value.tolist(), int(strategy.read_var(count))
          ([3, 3], 6)
        """
        return assign.create_var(
            self, name, initial, reduction=reduction, tower_local=tower_local
        )

    def assign(self, variable: Variable, value: PyTree) -> Any:
        """The variable with a new value, seen across towers.

        Args:
          variable: Mirrored: takes the value. Tower-local: reads as the value
            afterwards; of a SUM each tower has its share, integers in whole parts.
          value: One value, the same for all towers.

        Returns:
          The new variable.

        Raises:
          ValueError: The value differs from tower to tower, or does not fit.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> strategy.assign(count, 7).value.tolist()
          [4, 3]
        """
        return assign.assigned(self, variable, value, None, "assign")

    def assign_add(self, variable: Variable, value: PyTree) -> Any:
        """The mirrored variable with a value added to it.

        Args:
          variable: ``MirroredVar``.
          value: One value, the same for all towers.

        Returns:
          The new variable.

        Raises:
          ValueError: As `assign`; the variable is tower-local, whose copies or sum
            could be meant.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", 1.0)
          >>> float(strategy.assign_add(v, 6).value)
          7.0
        """
        return assign.assigned(
            self, variable, value, lambda old, new: old + new, "assign_add"
        )

    def assign_sub(self, variable: Variable, value: PyTree) -> Any:
        """The mirrored variable with a value subtracted from it.

        Args:
          variable: ``MirroredVar``.
          value: One value, the same for all towers.

        Returns:
          The new variable.

        Raises:
          ValueError: As `assign_add`.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", 5.0)
          >>> float(strategy.assign_sub(v, 2).value)
          3.0
        """
        return assign.assigned(
            self, variable, value, lambda old, new: old - new, "assign_sub"
        )

    def update(
        self,
        variable: Variable,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> Any:
        """The variable after ``fn(value, *args, **kwargs)`` of each of its copies.

        Args:
          variable: Mirrored: ``fn`` is called once. Tower-local: once for each
            tower's copy.
          fn: Returns the new value, of the same structure and shapes.
          *args: Values that all towers share; a mirrored variable is its value.
          **kwargs: As ``args``.

        Returns:
          The new variable.

        Raises:
          ValueError: It is no variable, an argument differs from tower to tower, or
            the result does not fit.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 1.0, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> float(strategy.read_var(strategy.update(count, lambda x, y: y, 5.0)))
          10.0
        """
        return assign.update(self, variable, fn, args, kwargs)

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
        return whereabouts.update_non_slot(devices, fn, args, kwargs)

    def non_slot_devices(self, var_list: Any = None) -> tuple[str, ...]:
        """The names of the devices for what belongs to no variable: all of them.

        Args:
          var_list: Variables; on every strategy's devices alike, so not looked at.

        Returns:
          Device names.
        """
        return self.placement.devices

    def read_var(self, value: PyTree) -> PyTree:
        """Each variable's one value; any other value as it is.

        Args:
          value: A pytree that may hold variables.

        Returns:
          The tree: a ``MirroredVar`` is its value, a ``TowerLocal`` is read by its
          own reduction.

        Raises:
          ValueError: A tower-local variable's reduction is NONE; names it.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> float(strategy.read_var(strategy.create_var("v", 2.5)))
          2.5
        """
        return read_variables(value)

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
        return whereabouts.placer_like(value, self.placement.num_towers)

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
        return whereabouts.fetch(value, destination, fn)

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
        return whereabouts.group(values)

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
        return regroup.select_tower(value, tower)

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
        if len(nests) != self.placement.num_towers:
            raise ValueError(
                f"regroup: got {len(nests)} trees, but there are"
                f" {self.placement.num_towers} towers. Pass one tree for each tower."
            )
        return regroup.regroup(nests)
