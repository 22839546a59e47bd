"""Work around bugs of XLA in gathers and scatters whose operand it splits."""

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from towerjax.jaxprs.interpreter import as_call, with_programs
from towerjax.jaxprs.params import open_jaxpr
from towerjax.mesh.placement import Placement


def hold_indexed(jaxpr: Any, placement: Placement | None) -> Any:
    """Change a jaxpr, closed or not, to avoid two bugs of XLA.

    Both bugs occur only in a tower of several devices.

    The first: a write to one index of a split array is a write on every device. A
    device whose shard does not contain the index writes back what it read. If XLA has
    cut this shard out of a whole array, it merges the two slices and reads from another
    place, until JAX 0.12: https://github.com/openxla/xla/issues/49121. So the operand
    of each scatter is put behind a barrier.

    The second: if the towers' axis exists, too, XLA aborts where rows of indices are
    split along one axis and the array that they index along another
    (`ExpandDeviceGroupsWithIota`, JAX 0.10 to 0.12). So with two axes within a tower
    the indexed array is split only along dims that are not indexed.
    """
    body = open_jaxpr(jaxpr)
    eqns = [_indexing(eqn, placement) for eqn in body.eqns]
    if all([a is b for a, b in zip(eqns, body.eqns, strict=True)]):
        return jaxpr
    new = body.replace(eqns=eqns)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


def _indexing(eqn: JaxprEqn, placement: Placement | None) -> JaxprEqn:
    name = eqn.primitive.name
    is_scatter = name.startswith("scatter")
    aborting = None  # the placement if XLA would abort, else None
    if placement and placement.num_devices > 1 and len(placement.within) > 1:
        aborting = placement
    if not is_scatter and not (aborting and name == "gather"):
        # Inside a user's `shard_map` the axes are manual, so XLA splits nothing there.
        inside = None if name == "shard_map" else placement
        return with_programs(eqn, functools.partial(hold_indexed, placement=inside))

    def index(operand: jax.Array, *rest: jax.Array) -> Any:
        if is_scatter:
            operand = lax.optimization_barrier(operand)
        if aborting:
            operand = lax.with_sharding_constraint(operand, _unsplit(eqn, aborting))
        return eqn.primitive.bind(operand, *rest, **eqn.params)

    return as_call(eqn, index)


def _unsplit(eqn: JaxprEqn, placement: Placement) -> PartitionSpec:
    """Choose a partition spec that splits none of the operand's indexed dims.

    If the first dim is indexed, the operand is taken to be a table, and not rows of a
    batch. Its columns are then not split along the rows' axis, but may be along the
    other axes.
    """
    numbers: Any = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape  # type: ignore
    of_scatters = "scatter_dims_to_operand_dims"
    dims = getattr(numbers, "start_index_map", getattr(numbers, of_scatters, ()))
    free = PartitionSpec.UNCONSTRAINED
    spec: list[Any] = [None if dim in dims else free for dim in range(len(shape))]
    if 0 not in dims:
        return PartitionSpec(*spec)
    columns = sorted({*range(len(shape))} - {*dims, *numbers.operand_batching_dims})
    for dim in columns:
        spec[dim] = None
    others = {name: n for name, n in placement.within if name != placement.rows}
    size = math.prod(others.values())
    if placement.rows and columns and shape[columns[-1]] % size == 0:
        spec[columns[-1]] = (*others,)
    return PartitionSpec(*spec)
