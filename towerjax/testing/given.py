"""Make arguments for a number of devices: copies, rows, and placed arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from towerjax.mesh.devices import Device
from towerjax.prover.programs.traced import NUMBER_TYPES
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary


@api_boundary
def copies(tree: PyTree, devices: Sequence[Device]) -> PyTree:
    """Make a copy for each device, as a program of `jax.pmap` takes its state.

    Args:
      tree: Arrays of any shapes. Other leaves, as of an Equinox module, stay.
      devices: The devices, ``D`` of them.

    Returns:
      Arrays ``[D, ...]``, a copy on each device, like `flax.jax_utils.replicate`.

    Example:
      >>> import jax, numpy as np
      >>> copies({"w": np.ones(3)}, jax.devices()[:1])["w"].shape
      (1, 3)
    """
    number = len(devices)
    stacked = _of_arrays(lambda x: jnp.stack([x] * number), tree)
    return placed(stacked, devices, "i")


@api_boundary
def parts(tree: PyTree, devices: Sequence[Device]) -> PyTree:
    """Split rows over devices, as a program of `jax.pmap` takes its batch.

    Args:
      tree: Arrays ``[B, ...]``, where ``D`` divides ``B``.
      devices: The devices, ``D`` of them.

    Returns:
      Arrays ``[D, B / D, ...]``.

    Raises:
      ValueError: The rows of an array cannot be shared evenly.

    Example:
      >>> import numpy as np
      >>> parts(np.arange(6), jax.devices()[:1]).tolist()
      [[0, 1, 2, 3, 4, 5]]
    """
    number = len(devices)

    def of_rows(x: Any) -> Any:
        if not np.ndim(x) or len(x) % number:
            raise ValueError(
                f"An array of shape {np.shape(x)} has no rows that {number} devices can"
                " share evenly. Give a batch size that each number of devices divides."
            )
        return x.reshape(number, -1, *x.shape[1:])

    return _of_arrays(of_rows, tree)


@api_boundary
def placed(tree: PyTree, devices: Sequence[Device], *spec: str) -> PyTree:
    """Place arrays on devices, replicated or split over an axis of the devices.

    Args:
      tree: Arrays of any shapes.
      devices: The devices, ``D`` of them.
      *spec: The name of the axis over which dim 0 is split; without it arrays are
        replicated.

    Returns:
      The placed arrays, with which `jax.jit` computes on all these devices.

    Example:
      >>> import numpy as np
      >>> len(placed(np.ones(3), jax.devices()[:1]).sharding.device_set)
      1
    """
    mesh = Mesh([*devices], spec or ("i",))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return _of_arrays(lambda x: jax.device_put(x, sharding), tree)


def _of_arrays(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Apply ``fn`` to the arrays and numbers of a tree, and to no other leaf."""
    return jax.tree.map(lambda x: fn(x) if isinstance(x, NUMBER_TYPES) else x, tree)
