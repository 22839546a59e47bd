"""What work is in a traced function? FLOPs, bytes of products, and memory it needs."""

import collections
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from towerjax.proof.equation import sub_jaxprs
from towerjax.step.report.formulas import Flops, Window, conv_flops, dot_flops

_ARITHMETIC = frozenset(
    "add add_any sub mul div rem pow integer_pow neg abs sign floor ceil round exp exp2"
    " expm1 log log1p logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh"
    " acosh atanh sqrt rsqrt cbrt erf erfc erf_inv max min square clamp cumsum cumprod"
    " cummax cummin cumlogsumexp".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_prod reduce_max reduce_min".split())
_SCATTERS = frozenset("scatter-add scatter_add scatter-mul scatter_mul".split())
_COUNTED = _ARITHMETIC | _REDUCTIONS | _SCATTERS
_NOT_COUNTED = frozenset(
    "pallas_call ffi_call pure_callback io_callback fft cholesky triangular_solve lu"
    " qr householder_product eigh eig svd ragged_dot ragged_dot_general reduce_window"
    " reduce_window_sum select_and_scatter_add tridiagonal_solve schur".split()
)
# The compiler makes these where they are read, and keeps none of them.
_NEVER_STORED = frozenset("broadcast_in_dim iota".split())


@dataclasses.dataclass(frozen=True)
class Work:
    """What one tower does in one call.

    Attributes:
      flops: Counted as in the compiled program.
      by_dtype: FLOPs of products by their left operand's dtype, sorted.
      product_bytes: What products and convolutions read and write.
    """

    flops: Flops = Flops()
    by_dtype: tuple[tuple[str, int], ...] = ()
    product_bytes: int = 0

    def __add__(self, more: "Work") -> "Work":
        """Both added."""
        found: dict[str, int] = collections.Counter(dict(self.by_dtype))
        for dtype, flops in more.by_dtype:
            found[dtype] += flops
        return Work(
            self.flops + more.flops,
            tuple(sorted(found.items())),
            self.product_bytes + more.product_bytes,
        )

    def times(self, trips: int) -> "Work":
        """So many trips of a loop."""
        return Work(
            self.flops.times(trips),
            tuple((dtype, flops * trips) for dtype, flops in self.by_dtype),
            self.product_bytes * trips,
        )


def work_of(jaxpr: Jaxpr) -> Work:
    """The work of one call; loops by their trips, of a condition the largest branch."""
    total = Work()
    for eqn in jaxpr.eqns:
        total += _work_of_equation(eqn)
    return total


def _work_of_equation(eqn: JaxprEqn) -> Work:
    name = eqn.primitive.name
    if name == "dot_general":
        return _product(eqn, _dot(eqn))
    if name == "conv_general_dilated":
        return _product(eqn, _convolution(eqn))
    if name in _NOT_COUNTED:
        return Work(Flops(notes=(f"{name} is not counted",)))
    if name not in _COUNTED:
        return _work_inside(eqn)
    out: Any = eqn.outvars[0].aval
    if not _is_floating(out):
        return Work()
    if name in _ARITHMETIC:
        return Work(Flops(other=math.prod(out.shape)))
    if name in _REDUCTIONS:
        before: Any = eqn.invars[0].aval
        return Work(Flops(other=math.prod(before.shape) - math.prod(out.shape)))
    updates: Any = eqn.invars[2].aval
    return Work(Flops(other=math.prod(updates.shape)))


def _work_inside(eqn: JaxprEqn) -> Work:
    name, inner = eqn.primitive.name, sub_jaxprs(eqn)
    if not inner:
        return Work()
    if name == "cond":
        branches = [work_of(branch) for branch in inner]
        return max(branches, key=lambda work: work.flops.total)
    if name == "scan":
        return work_of(inner[0]).times(eqn.params["length"])
    if name == "while":
        one = work_of(inner[0]) + work_of(inner[1])
        if not one.flops.total:
            return one
        note = "a loop of unknown trips is counted once"
        return one + Work(Flops(notes=(note,)))
    return work_of(inner[0])


def _product(eqn: JaxprEqn, flops: int) -> Work:
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    dtype = str(avals[0].dtype)
    return Work(Flops(matmul=flops), ((dtype, flops),), sum(map(bytes_of, avals)))


def _dot(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs: Any = eqn.invars[0].aval
    out: Any = eqn.outvars[0].aval
    return dot_flops(lhs.shape, out.shape, contracted)


def _convolution(eqn: JaxprEqn) -> int:
    lhs: Any = eqn.invars[0].aval
    rhs: Any = eqn.invars[1].aval
    out: Any = eqn.outvars[0].aval
    dims = eqn.params["dimension_numbers"]
    windows = [
        Window(rhs.shape[dim], stride, low, high, base_dilation, dilation)
        for dim, stride, (low, high), base_dilation, dilation in zip(
            dims.rhs_spec[2:],
            eqn.params["window_strides"],
            eqn.params["padding"],
            eqn.params["lhs_dilation"],
            eqn.params["rhs_dilation"],
            strict=True,
        )
    ]
    features = [rhs.shape[dim] for dim in dims.rhs_spec[:2]]
    return conv_flops(
        [lhs.shape[dim] for dim in dims.lhs_spec[2:]],
        windows,
        batch=out.shape[dims.out_spec[0]],
        kernel=math.prod(features),
    )


def _is_floating(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def bytes_of(aval: Any) -> int:
    """A value's bytes; a token has none."""
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def read_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of arguments and constants that are read: jit leaves out others."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    return sum(bytes_of(v.aval) for v in inputs if v in read)


def temporary_bytes(jaxpr: Jaxpr) -> int:
    """The most that is held at once besides arguments and results: an estimate.

    Values live from where they are made to their last use, in the order of the trace.
    What is broadcast is not stored, and an operation may write over what it reads
    last. The compiler reorders and fuses, and so needs less, or pads and needs more.
    """
    last: dict[Any, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last |= {v: number for v in eqn.invars if not isinstance(v, Literal)}
    kept = set(v for v in jaxpr.outvars if not isinstance(v, Literal))
    held: dict[Any, int] = {}
    now = most = 0
    for number, eqn in enumerate(jaxpr.eqns):
        inside = max(map(temporary_bytes, sub_jaxprs(eqn)), default=0)
        dying = [v for v in held if last.get(v) == number]
        freed = sum(held.pop(v) for v in dying)
        made = {
            v: 0 if eqn.primitive.name in _NEVER_STORED else bytes_of(v.aval)
            for v in eqn.outvars
            if v in last and v not in kept
        }
        in_place = eqn.primitive.name not in ("dot_general", "conv_general_dilated")
        before = now - freed if in_place and not inside else now
        most = max(most, before + sum(made.values()) + inside)
        held |= made
        now += sum(made.values()) - freed
    return most
