"""An array in which a map has joined values of its devices, as a kind.

A derivative that is taken outside of a map runs two maps: one computes the value, the
other the gradient. What the second needs of the first leaves the first as an array that
is split over the devices. Read by the same spec on the same mesh, it gives each device
its own value again.
"""

import dataclasses
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from towerjax.jaxprs.params import axes_of_dims
from towerjax.prover.equality.kinds.kinds import Kind, Unknown

_NOT_SPLIT = (None,)


class Places(NamedTuple):
    """Where a map's array has each device's value: its spec, and its two meshes.

    Attributes:
      spec: For each dim, the mesh axes over which it is split.
      meshes: The axes and their sizes, in order, in each of the two programs.
    """

    spec: tuple[tuple[Any, ...], ...]
    meshes: tuple[Any, Any]


def places_of(eqns: Any, spec: PartitionSpec) -> Places:
    """Find the places of an array by its spec in a `shard_map` of both programs."""
    dims = axes_of_dims(spec)
    while dims and dims[-1] == _NOT_SPLIT:
        dims.pop()
    first, second = [tuple(eqn.params["mesh"].shape.items()) for eqn in eqns]
    return Places(tuple(dims), (first, second))


@dataclasses.dataclass(frozen=True)
class Joined(Kind):
    """An array that has the values of all devices of a map.

    A map alone may read it, by the same ``places``: each device then has its own value.
    ``values`` has, for each reading of the meshes, the kind of a device's value. For
    all else, nothing is known of it: it is ``outside``, which has the reason.
    """

    name = "the values of all devices of a shard_map"
    places: Places = dataclasses.field(kw_only=True)
    values: tuple[tuple[Any, Kind], ...] = dataclasses.field(kw_only=True)
    outside: Unknown = dataclasses.field(kw_only=True)
