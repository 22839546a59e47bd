"""Which equations write rows into an array of the state? A refusal writes none."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal


class RowUpdates:
    """The values that are leaves of the state, but for rows that were written.

    Selecting between the new and the old array would need both at once: a copy of a
    whole table for a few rows. Where what is written is selected instead, XLA writes
    into the donated buffer.
    """

    def __init__(self, accepted: jax.Array, leaves: dict[Any, Any]) -> None:
        self._accepted = accepted
        # Which leaf a refused step leaves here; side by side with itself, in dim 0?
        self._kept = {var: (leaf, False) for var, leaf in leaves.items()}

    def keep(self, var: Any, leaf: Any) -> bool:
        """Is a value that was made of a leaf this very leaf, if nothing is accepted?"""
        kept, stacked = self._kept.get(var, (None, True))
        return kept is leaf and not stacked

    def guarded(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The operands with which an equation writes nothing where it must not."""
        first = eqn.invars[0] if eqn.invars else None
        if first is None or isinstance(first, Literal) or first not in self._kept:
            return operands
        leaf, stacked = self._kept[first]
        name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0]
        if not stacked and name.startswith("scatter") and _drops(eqn):
            self._kept[out] = leaf, False
            # An index that names no row is left out.
            rows = jnp.where(self._accepted, operands[1], -1)
            return [operands[0], rows, *operands[2:]]
        if not stacked and name == "dynamic_update_slice":
            self._kept[out] = leaf, False
            array, new, *starts = operands
            old = lax.dynamic_slice(array, starts, new.shape)
            return [array, lax.select(self._accepted, new, old), *starts]
        if _stacks(name, params, leaf, stacked):
            self._kept[out] = leaf, name != "squeeze"
        return operands


def _drops(eqn: Any) -> bool:
    """Is an index that names no row left out, and can one be written?"""
    indices = eqn.invars[1].aval
    drops = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    return drops and signed and indices.shape[-1] > 0


def _stacks(name: str, params: Any, leaf: Any, stacked: bool) -> bool:
    """Is it a leaf side by side with itself, or one of these?

    So vmap hands on what all of its rows have in common.
    """
    shape, dims = leaf.shape, tuple(range(1, leaf.ndim + 1))
    if name == "broadcast_in_dim":
        same = params["shape"][1:] == shape and not stacked
        return same and params["broadcast_dimensions"] == dims
    if name == "slice":
        whole = not any(params["start_indices"][1:])
        return stacked and whole and params["limit_indices"][1:] == shape
    return name == "squeeze" and stacked and params["dimensions"] == (0,)
