"""Whether integers hold what is said of them: asked once, of the results of all rules.

Sums over rows are assumed to fit in signed integers of 32 bits and more. Shorter ones
wrap around, on one tower as on several: a sum of them is right modulo their size. So
such a sum may be added and multiplied, but neither become another dtype nor be compared
by its size. The number of a row or tower must be held as it is.
"""

from typing import Any, TypeAlias

import jax.numpy as jnp

from towerjax.jaxprs.params import sub_jaxprs
from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import (
    Columns,
    Groups,
    Kind,
    Part,
    RowOrder,
    Size,
    SoFar,
    Stacked,
    Valid,
    is_rows_of_tower,
)
from towerjax.proof.equal.rules import NUMBER

_NUMBERS_OF_TOWER: TypeAlias = NUMBER | RowOrder | Columns | Valid | Size
_BY_SIZE = frozenset(
    """max min clamp abs sign sort top_k reduce_max reduce_min cummax cummin pmax pmin
    reduce_window_max reduce_window_min scatter-max scatter-min""".split()
)


def holds_sums(dtype: Any) -> bool:
    """Whether sums over rows are assumed to fit; shorter integers wrap around."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.issubdtype(dtype, jnp.signedinteger) and jnp.iinfo(dtype).bits >= 32
    return dtype != jnp.bool_


def why_not_held(pair: EquationPair, result: int, value: Kind) -> str:
    """The reason why a result is not what a rule says of it; "" if it is."""
    dtype = pair.out_dtype(result)
    is_number = isinstance(value, _NUMBERS_OF_TOWER) or is_rows_of_tower(value)
    if is_number and dtype.itemsize < 4:
        return f"{value} becomes {dtype.name}, which cannot hold it"
    if sub_jaxprs(pair.first):
        return ""  # asked of the equations inside
    for i, x in enumerate(pair.ins):
        # A number of towers or rows is a sum, too.
        if not (_is_sum(x) or bool(x.power)) or holds_sums(pair.dtype(i)):
            continue
        if dtype != pair.dtype(i) or pair.name in _BY_SIZE:
            return f"{x} is {pair.dtype(i).name}, which may not hold it"
    return ""


def _is_sum(x: Kind) -> bool:
    """Whether towers add a value up, or may do so."""
    if isinstance(x, Groups):
        return not x.layout.by_row
    if isinstance(x, Stacked):
        return x.of is Part
    return isinstance(x, Part | SoFar)
