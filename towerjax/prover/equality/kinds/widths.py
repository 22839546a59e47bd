"""Check whether the dtype of an integer can hold what a rule says of it.

This is checked in one place, for the results of all rules. Sums over rows are assumed
to fit into signed integers of 32 bits and more. Shorter integers wrap around, on one
tower as on several, so their sums are right modulo 2^bits. Such a sum may be added and
multiplied, but it must not be converted to another dtype, or be compared by its size. A
dtype must also be wide enough for the index of a row or tower.
"""

from typing import Any, TypeAlias

import jax.numpy as jnp

from towerjax.jaxprs.params import sub_jaxprs
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    Columns,
    Groups,
    Kind,
    Part,
    RowOrder,
    Size,
    SoFar,
    Valid,
)
from towerjax.prover.equality.kinds.stacked import Stacked, Starts
from towerjax.prover.equality.rules.rules import NUMBER

_NUMBERS_OF_TOWER: TypeAlias = NUMBER | RowOrder | Columns | Valid | Size
_BY_SIZE = frozenset(
    """max min clamp abs sign sort top_k reduce_max reduce_min cummax cummin pmax pmin
    reduce_window_max reduce_window_min scatter-max scatter-min""".split()
)


def holds_sums(dtype: Any) -> bool:
    """Assume that sums over rows fit into floats and wide signed integers.

    The result is False for bools, unsigned integers, and integers of less than 32 bits.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.issubdtype(dtype, jnp.signedinteger) and jnp.iinfo(dtype).bits >= 32
    return dtype != jnp.bool_


def why_not_held(pair: EquationPair, result: int, value: Kind) -> str:
    """Tell why a dtype may not hold the value that a rule found; "" if it does."""
    dtype = pair.out_dtype(result)
    is_number = isinstance(value, _NUMBERS_OF_TOWER)
    is_number |= pair.sizes.is_rows_of_tower(value)
    is_number |= isinstance(value, Stacked) and isinstance(value.of, Starts)
    if is_number and dtype.itemsize < 4:
        return f"{value} becomes {dtype.name}, which cannot hold it"
    if sub_jaxprs(pair.first):
        return ""  # The equations of the inner programs are checked one by one.
    for i, x in enumerate(pair.ins):
        # A value with the factor T^p, such as the number of towers, grows with T, so it
        # may overflow like a sum.
        if not (_is_sum(x) or bool(x.power)) or holds_sums(pair.dtype(i)):
            continue
        if dtype != pair.dtype(i) or pair.name in _BY_SIZE:
            return f"{x} is {pair.dtype(i).name}, which may not hold it"
    return ""


def _is_sum(x: Kind) -> bool:
    """Return whether a value is, or may be, one that towers add up."""
    if isinstance(x, Groups):
        return not x.layout.by_row
    if isinstance(x, Stacked):
        return x.of is Part
    return isinstance(x, Part | SoFar)
