"""Compare the params of an equation in two programs."""

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

# The params of an equation must be equal in both programs, except for these. Sizes
# follow from shapes, or rules check them; precision changes only rounding; and programs
# are walked themselves.
_NOT_COMPARED = frozenset(
    """shape new_sizes limit_indices start_indices slice_sizes axis_size sizes length
    sharding out_sharding precision jaxpr call_jaxpr fun_jaxpr branches jaxprs
    cond_jaxpr body_jaxpr update_jaxpr jvp_jaxpr_fun fwd_jaxpr_thunk bwd dim
    donated_invars call reps _prim""".split()
)
# These params say on which devices arrays are, which changes no number.
_PLACES = frozenset(
    """mesh in_shardings out_shardings dst_sharding ctx_mesh context_mesh devices
    srcs""".split()
)


def other_params(one: JaxprEqn, two: JaxprEqn) -> list[str]:
    """List the params that differ between an equation's two programs.

    Functions are not compared: they are derivatives, whose programs are walked, or
    params of primitives that no rule accepts.
    """
    keys = (one.params | two.params).keys() - _NOT_COMPARED - _PLACES
    return [
        key
        for key in sorted(keys)
        if not _is_same(one.params.get(key), two.params.get(key))
    ]


def _is_same(x: Any, y: Any) -> bool:
    if x is y or type(x) is not type(y):
        return x is y
    if isinstance(x, np.ndarray):
        return np.array_equal(x, y)
    return callable(x) or bool(x == y)
