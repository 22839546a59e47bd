"""Count the FLOPs of a program's products: with loops, and without recomputation."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.jaxprs.params import (
    is_hidden,
    manual_axes,
    open_jaxpr,
    sub_jaxprs,
    trace_hidden,
)
from towerjax.jaxprs.primitives import IDENTITIES, PLAIN, REDUCTIONS
from towerjax.jaxprs.sites import Site, user_line


@dataclasses.dataclass(frozen=True)
class Flops:
    """The products of one run of a program, in FLOPs; other operations are ignored.

    Attributes:
      products: The FLOPs of dot products and convolutions: a multiplication and an
        addition for each pair of numbers. They are called the model's FLOPs.
      recomputed: The FLOPs of products that `jax.checkpoint` computes once more; they
        are not in ``products``.
      uncounted: The operations that are not counted, or not fully, each with its line
        of code.
    """

    products: int
    recomputed: int
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.products + other.products,
            self.recomputed + other.recomputed,
            tuple(dict.fromkeys(self.uncounted + other.uncounted)),
        )

    def times(self, count: int) -> "Flops":
        """Count ``count`` runs of the program."""
        return dataclasses.replace(
            self,
            products=self.products * count,
            recomputed=self.recomputed * count,
        )


NO_FLOPS = Flops(0, 0)


def count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> Flops:
    """Count the FLOPs of a program's dot products and convolutions.

    The largest branch of a ``cond`` counts. The number of trips of a ``while`` is
    unknown, so its body counts once. A ``shard_map`` counts on all its devices.
    Operations that no result needs are left out.

    Args:
      jaxpr: The result of ``jax.make_jaxpr(fn)(*args)``, or ``.jaxpr`` of a traced
        ``jax.jit``.

    Returns:
      The `Flops`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def fn(x):
      ...     return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=10)[0]
      >>> count_flops(jax.make_jaxpr(fn)(jnp.ones((4, 4)))).products
      1280

    Source:
      That recomputation is left out of a model's FLOPs: Chowdhery et al. (2022),
      "PaLM: Scaling Language Modeling with Pathways", appendix B,
      https://arxiv.org/abs/2204.02311.
    """
    body = open_jaxpr(jaxpr)
    return _count(body, [True] * len(body.outvars), False, None)


# JAX puts operations that `jax.checkpoint` computes once more into this name scope.
_REMATTED = "rematted_computation"


def _count(
    jaxpr: Jaxpr, used: Sequence[bool], is_again: bool, outer: Site | None
) -> Flops:
    """Count the products that a jaxpr needs for its results that are marked ``used``.

    ``is_again`` tells whether `jax.checkpoint` computes them once more.
    """
    total = NO_FLOPS
    results = [x for x, is_used in zip(jaxpr.outvars, used, strict=True) if is_used]
    wanted = {x for x in results if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        flags = [x in wanted for x in eqn.outvars]
        if any(flags) or eqn.effects:
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
            scopes = eqn.source_info.name_stack.stack
            again = is_again or any(x.name == _REMATTED for x in scopes)
            total += _of_site((eqn, outer), flags, again)
    return total


def _of_site(site: Site, used: Sequence[bool], is_again: bool) -> Flops:
    eqn, _ = site
    name = eqn.primitive.name
    if (products := _PRODUCTS.get(name)) is not None:
        count = products(eqn)
        return Flops(0, count) if is_again else Flops(count, 0)
    if eqn.primitive in PLAIN or name in _FREE:
        return NO_FLOPS
    inner = [*sub_jaxprs(eqn)]
    if not inner and is_hidden(eqn):
        hidden = trace_hidden(eqn, {})
        inner = [] if hidden is None else [open_jaxpr(hidden)]
    if not inner:
        return Flops(0, 0, (_told(site, "is not counted"),))
    return _of_inner(site, inner, used, is_again)


def _of_inner(
    site: Site, inner: list[Jaxpr], used: Sequence[bool], is_again: bool
) -> Flops:
    """Count the products of an equation's inner programs, times their trips."""
    eqn, _ = site
    name = eqn.primitive.name
    trips = _trips(eqn)
    counts = []
    for body in inner:
        is_call = trips == 1 and len(body.outvars) == len(used)
        flags = used if is_call else [True] * len(body.outvars)
        counts.append(_count(body, flags, is_again, site))
    if name == "cond":
        return max(counts, key=lambda x: x.products + x.recomputed)
    total = sum(counts, NO_FLOPS)
    if trips is None:
        return total + Flops(0, 0, (_told(site, "counts as one trip"),))
    return total.times(trips)


def _trips(eqn: JaxprEqn) -> int | None:
    """Count how often the inner programs of an equation run; None if unknown."""
    name = eqn.primitive.name
    params = eqn.params
    if name == "while":
        return None
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        sizes = dict(params["mesh"].shape)
        return math.prod(sizes[axis] for axis in manual_axes(eqn))
    if name == "xla_pmap":
        return params["global_axis_size"]
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        return math.prod(grid) if all(isinstance(x, int) for x in grid) else None
    return 1


def _told(site: Site, says: str) -> str:
    line = user_line(site)
    return f"{site[0].primitive.name} {says}" + (f", {line}" if line else "")


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _size(var: Any) -> int:
    return math.prod(_shape(var))


def _of_dot(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted)


def _of_ragged_dot(eqn: JaxprEqn) -> int:
    """Count the FLOPs of a `ragged_dot`: each row times the matrix of its group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    other = {*contracted, *batch, *numbers.rhs_group_dimensions}
    shape = _shape(eqn.invars[1])
    free = math.prod(n for i, n in enumerate(shape) if i not in other)
    return 2 * _size(eqn.invars[0]) * free


def _of_conv(eqn: JaxprEqn) -> int:
    """Count the FLOPs of a convolution: two for each pair of numbers it multiplies.

    Pairs of a number of the kernel with padding are left out.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    image, kernel = map(_shape, eqn.invars[:2])
    out = _shape(eqn.outvars[0])
    batch, features, *dims = numbers.out_spec
    pairs = 1
    for dim, (at, of, stride, padding, hole, step) in enumerate(
        zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ):
        first = np.arange(out[dims[dim]])[:, None] * stride
        place = first + np.arange(kernel[of])[None, :] * step - padding[0]
        is_inside = (place >= 0) & (place <= (image[at] - 1) * hole)
        pairs *= int((is_inside & (place % hole == 0)).sum())
    return 2 * out[batch] * out[features] * kernel[numbers.rhs_spec[1]] * pairs


_PRODUCTS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_ragged_dot,
    "conv_general_dilated": _of_conv,
}
# These primitives compute no products. A primitive that is neither here nor has a rule
# is reported as not counted.
_FREE_NAMES = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 lgamma log log1p log2 logistic pow rsqrt sin sinh sqrt tan tanh
    cumlogsumexp bessel_i0e bessel_i1e igamma igammac igamma_grad_a polygamma
    random_gamma_grad regularized_incomplete_beta zeta
    add_any eq_to integer_pow le_to lt_to mul_add one_minus_square
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reduce_xor reduce_window reduce_window_max reduce_window_min
    reduce_window_sum select_and_gather_add select_and_scatter_add sort
    scatter-add scatter-max scatter-min scatter-mul scatter-sub
    scatter_add scatter_max scatter_min scatter_mul scatter_sub
    bitcast_convert_type broadcast_in_dim concatenate copy_p dynamic_slice
    dynamic_update_slice empty gather iota pad reshape rev scatter slice split squeeze
    stack unstack
    stop_gradient transpose real imag complex
    get swap addupdate ref new_ref freeze ref_get ref_set empty2
    all_to_all ppermute axis_index reduce_scatter psum_scatter pgather
    debug_callback debug_print inspect_sharding create_token mesh_cast reshard
    layout_constraint
    random_bits random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap random_clone threefry2x32 rng_bit_generator rng_uniform
"""
_FREE = frozenset([*_FREE_NAMES.split(), *IDENTITIES, *REDUCTIONS])
