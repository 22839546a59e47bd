"""Count the FLOPs of one device in one call, from the traced program."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from towerjax.proof.equation import sub_jaxprs

_ARITHMETIC = frozenset(
    "add add_any sub mul div rem pow integer_pow neg abs sign floor ceil round exp exp2"
    " expm1 log log1p logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh"
    " acosh atanh sqrt rsqrt cbrt erf erfc erf_inv max min square clamp cumsum cumprod"
    " cummax cummin cumlogsumexp lgamma digamma polygamma zeta igamma igammac"
    " igamma_grad_a regularized_incomplete_beta bessel_i0e bessel_i1e log2"
    " one_minus_square".split()
)
_REDUCE_OPS = frozenset("reduce_sum reduce_prod reduce_max reduce_min".split())
_SCATTERS = frozenset(
    f"scatter{mark}{what}" for mark in "-_" for what in "add sub mul min max".split()
)
_COUNTED = _ARITHMETIC | _REDUCE_OPS | _SCATTERS
_NOT_COUNTED = frozenset(
    "pallas_call ffi_call pure_callback io_callback fft cholesky triangular_solve lu"
    " qr geqrf ormqr householder_product eigh eig svd symmetric_product schur"
    " tridiagonal_solve ragged_dot ragged_dot_general scaled_dot scaled_matmul"
    " scaled_matmul_wrapper dot_product_attention_fwd_wrapper"
    " dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd_wrapper"
    " dot_product_attention_fp8_bwd_wrapper polynomial reduce reduce_window"
    " reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add"
    " select_and_gather_add random_gamma".split()
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of one device in one call."""

    matmul: int = 0  # of matrix products and convolutions: a multiply-add is two
    # One for each element of float arithmetic, functions such as tanh included, and for
    # each addition of a reduction, as written: XLA may repeat or drop some.
    other: int = 0
    notes: tuple[str, ...] = ()  # what could not be counted, and why

    @property
    def total(self) -> int:
        """Both."""
        return self.matmul + self.other

    def __add__(self, more: "Flops") -> "Flops":
        """Both counts added; each note once."""
        notes = tuple(dict.fromkeys(self.notes + more.notes))
        return Flops(self.matmul + more.matmul, self.other + more.other, notes)

    def times(self, trips: int) -> "Flops":
        """The count of a loop with this body and so many trips."""
        return Flops(self.matmul * trips, self.other * trips, self.notes)


def flops_of(jaxpr: Jaxpr) -> Flops:
    """The FLOPs of one device in one call of a traced program.

    A loop counts as often as it runs, unlike in XLA's ``cost_analysis``, and once if
    its trips are unknown; a ``cond`` counts as its largest branch. Equations that no
    result needs are left out. The count is of the jaxpr, before the compiler.
    """
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _flops_inside(needed)


def _flops_inside(*jaxprs: Jaxpr) -> Flops:
    parts = (_flops_of_equation(eqn) for jaxpr in jaxprs for eqn in jaxpr.eqns)
    return functools.reduce(Flops.__add__, parts, Flops())


def _flops_of_equation(eqn: Any) -> Flops:
    name, inner = eqn.primitive.name, sub_jaxprs(eqn)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lengths = (eqn.invars[0].aval.shape[dim] for dim in contracted)
        return Flops(matmul=2 * eqn.outvars[0].aval.size * math.prod(lengths))
    if name == "conv_general_dilated":
        return Flops(matmul=_convolution_flops(eqn))
    if name in _NOT_COUNTED:
        return Flops(notes=(f"{name} is not counted",))
    if name == "cond":
        return max(map(_flops_inside, inner), key=lambda flops: flops.total)
    if name == "while":
        one = _flops_inside(*inner)
        notes = ("a loop of unknown trips is counted once",)
        return one + Flops(notes=notes) if one.total else one
    if name not in _COUNTED:
        trips = eqn.params["length"] if name == "scan" else 1
        return _flops_inside(*inner[:1]).times(trips)
    out: Any = eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return Flops()
    if name in _ARITHMETIC:
        return Flops(other=out.size)
    if name in _REDUCE_OPS:
        return Flops(other=eqn.invars[0].aval.size - out.size)
    return Flops(other=eqn.invars[2].aval.size)  # a scatter's updates


def _convolution_flops(eqn: Any) -> int:
    """Two for each product of an input element and a kernel element.

    Products with padding do not count, so a convolution and both its gradients have
    the same count.
    """
    lhs, rhs, out = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    others = [out[dims.out_spec[0]], *(rhs[i] for i in dims.rhs_spec[:2])]
    windows = zip(
        [lhs[dim] for dim in dims.lhs_spec[2:]],
        [rhs[dim] for dim in dims.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    return 2 * math.prod(others) * math.prod(pairs_along(*one) for one in windows)


def pairs_along(
    length: int,
    size: int,
    stride: int,
    padding: tuple[int, int],
    base_dilation: int,
    dilation: int,
) -> int:
    """Products of kernel and input elements along one dim, padding left out.

    Padding is before and after the input, and may be negative.
    """
    spread = (length - 1) * base_dilation + 1 if length else 0
    reach = (size - 1) * dilation + 1
    steps = max((spread + sum(padding) - reach) // stride + 1, 0)
    starts = np.arange(steps)[:, None] * stride - padding[0]
    at = starts + np.arange(size)[None] * dilation
    inside = (at >= 0) & (at < spread) & (at % base_dilation == 0)
    return int(inside.sum())
