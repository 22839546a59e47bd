"""Where do values lie? Fetch, select, regroup."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower import regroup
from towerjax.towers.cross_tower.assign import check_mirrored
from towerjax.towers.cross_tower.values import opened, send
from towerjax.towers.tower_local import read_variables
from towerjax.types import PyTree


class WhereaboutsMethods:
    """What every strategy can do with where values lie."""

    placement: Placement

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
