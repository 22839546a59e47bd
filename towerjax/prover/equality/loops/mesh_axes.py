"""The mesh axes of a `shard_map` in two programs: along which axes the towers are.

The towers are the devices along the axes that are longer in one program than in the
other. An axis that has the same size in both programs may be *still*. The positions
along a still axis are like the devices of a tower; see `within`. At each position, the
devices along the other axes are the towers, and a kind describes their values. If one
dim is split over a still axis and over the towers, the towers must be the innermost:
each position then has the same block of the dim for any number of towers.

In another reading all axes with several devices are one axis. They must then act
together: each array is split over all of them, and each collective names all of them,
in the mesh's order.
"""

import math
from typing import NamedTuple

from jax.sharding import PartitionSpec

from towerjax.jaxprs.params import axes_of_dims, manual_axes
from towerjax.prover.equality.kinds.equation_pair import EquationPair, Sizes
from towerjax.prover.equality.kinds.kinds import NotOfOneKindError
from towerjax.types.refusals import listed


class MeshAxes(NamedTuple):
    """A reading of the axes of two meshes: along which axes the towers are.

    Attributes:
      towers: The axes whose devices are the towers, in order.
      counts: The number of towers in each of the two meshes.
      alone: The axes that are not in ``towers`` and have one device.
      still: The axes that are not in ``towers`` and have several devices.
    """

    towers: tuple[str, ...]
    counts: tuple[int, int]
    alone: frozenset[str]
    still: frozenset[str]

    def has_each_tower_of(self, sizes: Sizes) -> bool:
        """Return whether an array of one entry per tower has one entry per device."""
        return self.counts == sizes.towers and not self.still

    def dim_split(self, spec: PartitionSpec) -> int | None:
        """Find the dim that a spec splits over the towers; None if it splits none.

        Raises:
          NotOfOneKindError: The spec does not fit this reading of the axes.
        """
        if spec.unreduced or spec.reduced:
            raise NotOfOneKindError(
                f"no rule for a shard_map whose spec {spec} says unreduced or reduced"
            )
        split = None
        for i, named in enumerate(axes_of_dims(spec)):
            names = tuple(x for x in named if x is not None and x not in self.alone)
            of_towers = tuple(x for x in names if x in self.towers)
            if not of_towers:
                continue
            refusal = f"no rule for {spec} in a shard_map"
            axes = listed(map(repr, self.towers))
            if of_towers != self.towers:
                raise NotOfOneKindError(
                    f"{refusal} over {axes}, which must act together"
                )
            if names[-len(of_towers) :] != of_towers:
                raise NotOfOneKindError(
                    f"{refusal}: {axes}, which alone grows with the devices, must come"
                    " last among the axes of its dim"
                )
            split = i
        return split


def only_others_grow(pair: EquationPair) -> bool:
    """Return whether two meshes differ only in axes that the `shard_map` does not map.

    The meshes are those of the two programs.
    """
    first, second = [eqn.params["mesh"].shape for eqn in (pair.first, pair.second)]
    are_same = all(first.get(x) == second.get(x) for x in manual_axes(pair.first))
    return are_same and first != second


def readings_of(pair: EquationPair) -> list[MeshAxes]:
    """Find the readings of the mesh axes of a `shard_map` in both programs.

    Along the axes of the towers, the mesh must grow from one program to the other as
    the number of towers does.

    Raises:
      NotOfOneKindError: The meshes have no such reading.
    """
    first, second = [eqn.params["mesh"].shape for eqn in (pair.first, pair.second)]
    both = {name: (size, second.get(name, 0)) for name, size in first.items()}
    together = tuple(name for name, sizes in both.items() if sizes != (1, 1))
    growing = tuple(name for name, sizes in both.items() if sizes[0] != sizes[1])
    manual = manual_axes(pair.first)
    readings = []
    for towers in dict.fromkeys((together, growing)):
        a, b = (math.prod(both[name][i] for name in towers) for i in (0, 1))
        one, other = pair.sizes.towers
        is_mesh = [*first] == [*second] and {*towers} <= manual
        if towers and is_mesh and a * other == b * one:
            others = manual - {*towers}
            alone = frozenset(name for name in others if both[name] == (1, 1))
            readings.append(MeshAxes(towers, (a, b), alone, others - alone))
    if not readings:
        raise NotOfOneKindError(
            f"no rule for a shard_map over a mesh of {dict(first)} devices, and of"
            f" {dict(second)}"
        )
    return readings
