"""The analysis of a tower's program, which two files of tests ask for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from towerjax.jaxprs.params import open_jaxpr
from towerjax.prover.replication.analysis import analyse

AXIS = "device"


def trace(tower, num_towers=2, shape=None, axes=(AXIS,)):
    """The body of `tower(w, x)`: w float32[4] MIRRORED, x float32[2, 4] per tower."""
    shape = shape or (num_towers,)
    mesh = AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    sharded = jax.shard_map(
        tower, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=False
    )
    w = jax.ShapeDtypeStruct((4,), jnp.float32)
    x = jax.ShapeDtypeStruct((2 * int(np.prod(shape)), 4), jnp.float32)
    (eqn,) = jax.make_jaxpr(sharded)(w, x).eqns
    return open_jaxpr(eqn.params["jaxpr"])


def study(tower, num_towers=2):
    return analyse(trace(tower, num_towers), [None, "batch['x']"], AXIS, num_towers)


def psum(value):
    return lax.psum(value, AXIS)
