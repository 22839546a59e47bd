"""The constants of a program, literals and arrays that it closes over; their kinds."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.prover.equality.kinds.equation_pair import Sizes
from towerjax.prover.equality.kinds.kinds import (
    SIZE,
    ZERO,
    InPadding,
    Kind,
    NumberPair,
    Unknown,
    copy,
)

POWERS = [Fraction(x) for x in "0 1 -1 2 -2 1/2 -1/2 3 -3".split()]
"""The exponents p that are tried if two constants may differ by a factor T^p."""


def kind_of_constant(sizes: Sizes, first: Any, second: Any) -> Kind:
    """Compare a constant of two programs: replicated, or off by a power of T.

    A constant is a literal, or an array that a program closes over.

    ``first`` and ``second`` are the constant in the two programs.
    """
    if isinstance(first, Tracer) or isinstance(second, Tracer):
        # The constant is traced by a program around the step, so its number is unknown.
        why = "the program closes over other values for another number of {many}"
        return copy() if first is second else Unknown(why=why)
    if jnp.issubdtype(getattr(first, "dtype", np.float32), jax.dtypes.prng_key):
        first = jax.random.key_data(first)
        second = jax.random.key_data(second)
    a = _as_numbers(first)
    b = _as_numbers(second)
    if a is None or b is None:
        return Unknown(why="a constant is no number")
    if a.shape != b.shape:
        if not (_is_filled(a) and _is_filled(b)):
            return Unknown(
                why="a constant has an element for each row of a {one}",
            )
        a = a.flat[0]
        b = b.flat[0]
    if not np.any(a) and not np.any(b):
        return ZERO
    is_number = np.ndim(a) == 0
    if is_number and a.item() != b.item():
        if (a.item(), b.item()) == sizes.rows:
            return size_of_rows(sizes)
        if sizes.are_of_tower(a.item(), b.item()):
            return SIZE
    is_real = is_number and a.dtype.kind != "c"
    is_finite = bool(np.isfinite(a).all())
    level = InPadding.AS_EXAMPLE if is_finite else InPadding.ANY
    if np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
        return copy(0, a.item() if is_real else None).replace(in_padding=level)
    power = _power_between(sizes, a, b)
    if power is None:
        why = "a constant depends on the number of {many}"
        return Unknown(why=why)
    numbers = NumberPair(a.item(), b.item()) if is_real else None
    return copy(power, numbers).replace(in_padding=level)


def size_of_rows(sizes: Sizes) -> Kind:
    """The number of a tower's rows is B / T; with padding it is a `Size`."""
    if sizes.padded:
        return SIZE
    return copy(-1, NumberPair(*sizes.rows))


def _power_between(sizes: Sizes, a: Any, b: Any) -> Fraction | None:
    """Find p if two constants differ by the factor T^p; None if they do not."""
    ratio = sizes.towers[1] / sizes.towers[0]
    for power in POWERS:
        factor = ratio ** float(power)
        if a.dtype.kind in "fc":
            rtol = min(1e-6, 16 * float(np.finfo(a.dtype).eps))
            with np.errstate(over="ignore"):  # the largest number may be a constant
                is_power = np.allclose(b, a * factor, rtol=rtol, atol=0)
        else:
            is_power = np.array_equal(b.astype(float), a.astype(float) * factor)
        if is_power:
            return power
    return None


def _as_numbers(x: Any) -> np.ndarray | None:
    x = np.asarray(x)
    if x.dtype.kind == "V" and jnp.issubdtype(x.dtype, jnp.number):
        # NumPy calls bfloat16 and int4 void, and cannot compare their values.
        return x.astype(float)
    return x if x.dtype.kind in "biufc" else None


def _is_filled(x: np.ndarray) -> bool:
    """Return whether all elements of an array are equal."""
    return bool(x.size) and bool((x == x.flat[0]).all())
