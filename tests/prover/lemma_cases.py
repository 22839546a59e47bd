"""The lemmas for each primitive that the proof of equality has a rule for."""

import functools
import warnings

import equinox.internal as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from lemmas import AXIS, FLAG, B, Lemma, N, NotThereError, T, shape_on

from towerjax.prover.equality.kinds.kinds import (
    PADDING,
    SIZE,
    ZERO,
    Count,
    FirstRow,
    Flag,
    FromFirstRow,
    IsFull,
    Mean,
    RowNumbers,
    TowerId,
    Valid,
    copy,
    part,
    rows,
)

F32 = jnp.float32
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
INTS = (jnp.int32, jnp.int8, jnp.uint8, jnp.uint32)
NUMBERS = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint8)
ALL = (*NUMBERS, jnp.bool_)
BITS = (jnp.int32, jnp.uint8, jnp.bool_)
C64 = jnp.complex64
ROWS = (N, 2)
EACH = (ROWS, (N,), (2,), ())

CASES: dict[str, list[Lemma]] = {}
"""The lemmas of each primitive."""


def lemma(name, fn, *shapes, dtypes=F32, near=(-2, 2), kinds=None):
    """Register a lemma; ``dtypes`` is one for all operands, or one for each."""
    each = dtypes if isinstance(dtypes, tuple) else (dtypes,) * len(shapes)
    CASES.setdefault(name, []).append(Lemma(fn, shapes, each, near, kinds))


def of_each_shape(names, dtypes, count=1, near=(-2, 2), of=lax, shapes=EACH):
    """Register lemmas of elementwise functions, by their names in `jax.lax`."""
    for name in names.split():
        fn = getattr(of, name, None)
        for shape in shapes:
            for dtype in dtypes:
                lemma(name, _called(fn), *[shape] * count, dtypes=dtype, near=near)


def _called(fn):
    def call(side, *xs):
        if fn is None:
            raise NotThereError
        return [fn(*xs)]

    return call


def _bound(name):
    """The primitive of a name, as a function of its operands."""
    import jax._src.lax.lax as inside

    primitive = getattr(inside, f"{name}_p", None)

    def call(side, *xs, **params):
        if primitive is None:
            raise NotThereError
        found = primitive.bind(*xs, **params)
        return [*found] if primitive.multiple_results else [found]

    return call


def _real_part(side, x):
    with warnings.catch_warnings(action="ignore"):  # it loses the imaginary part
        return [lax.convert_element_type(x, F32)]


# One element of each operand.

of_each_shape(
    """ceil cos digamma erf erf_inv erfc exp exp2 expm1 floor lgamma log1p logistic
    round sin sinh tan tanh cosh asinh atan is_finite bessel_i0e bessel_i1e""",
    (jnp.float32, jnp.bfloat16),
)
of_each_shape("acos asin atanh", (F32,), near=(-0.5, 0.5))
of_each_shape("acosh", (F32,), near=(1, 3))
of_each_shape("sqrt rsqrt log", FLOATS, near=(0.5, 4))
of_each_shape("cbrt", FLOATS)
SIGNED = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, C64)
of_each_shape("abs sign square neg", SIGNED)
of_each_shape("square", (jnp.uint8,))
of_each_shape("population_count clz", (jnp.int32, jnp.uint8))
of_each_shape("bitwise_not", BITS)
CASES["not"] = CASES.pop("bitwise_not")
of_each_shape("real imag conj", (C64,))
for y in (1, 2, 3, 0, -1):
    for dtype in (jnp.float32, jnp.int32, jnp.int8) if y >= 0 else (jnp.float32,):
        for shape in EACH:
            fn = functools.partial(lambda side, x, y: [lax.integer_pow(x, y)], y=y)
            lemma("integer_pow", fn, shape, dtypes=dtype, near=(1, 3))
for dtype in ALL:
    for shape in EACH:
        lemma("copy", _bound("copy"), shape, dtypes=dtype)
        lemma("stop_gradient", _called(lax.stop_gradient), shape, dtypes=dtype)
        lemma("optimization_barrier", lambda side, x, y: lax.optimization_barrier(
            [x, y]), shape, shape, dtypes=dtype)  # fmt: skip
        name_of = functools.partial(checkpoint_name, name="x")
        lemma("name", _called(name_of), shape, dtypes=dtype)
        for new in (*ALL, jnp.int16, jnp.float16, C64):
            to = functools.partial(lax.convert_element_type, new_dtype=new)
            lemma("convert_element_type", _called(to), shape, dtypes=dtype)
for shape in EACH:
    to = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
    lemma("reduce_precision", _called(to), shape)
    lemma("convert_element_type", _real_part, shape, dtypes=C64)
    for old, new in ((F32, jnp.int32), (jnp.int32, jnp.uint8), (jnp.int8, jnp.uint8)):
        to = functools.partial(lax.bitcast_convert_type, new_dtype=new)
        lemma("bitcast_convert_type", _called(to), shape, dtypes=old)
of_each_shape("add sub mul max min", (*NUMBERS, jnp.uint32), 2)
of_each_shape("add sub mul", (C64,), 2)
of_each_shape("div", (*FLOATS, jnp.int32, C64), 2, near=(1, 4))
of_each_shape("rem", (F32, jnp.int32), 2, near=(1, 4))
of_each_shape("pow", (F32,), 2, near=(0.5, 2))
of_each_shape("atan2 nextafter", (F32,), 2)
of_each_shape("eq ne lt le gt ge", ALL, 2)
of_each_shape("bitwise_and bitwise_or bitwise_xor", BITS, 2)
for long, short in (
    ("bitwise_and", "and"),
    ("bitwise_or", "or"),
    ("bitwise_xor", "xor"),
):
    CASES[short] = CASES.pop(long)
shifts = "shift_left shift_right_logical shift_right_arithmetic"
of_each_shape(shifts, (jnp.int32, jnp.int8), 2, near=(0, 3))
of_each_shape("igamma igammac igamma_grad_a random_gamma_grad", (F32,), 2, (0.5, 3))
of_each_shape("zeta", (F32,), 2, near=(2, 4))
of_each_shape("polygamma", (F32,), 2, near=(1, 3))
of_each_shape("mulhi", (jnp.int32, jnp.uint32), 2)
of_each_shape("complex", (F32,), 2)
for shape in EACH:
    for dtype in ALL:
        lemma("select_n", _called(lax.select_n), shape, shape, shape,
              dtypes=(jnp.bool_, dtype, dtype))  # fmt: skip
        if shape:
            lemma("select_n", _called(lax.select_n), (), shape, shape,
                  dtypes=(jnp.bool_, dtype, dtype))  # fmt: skip
    for dtype in (F32, jnp.int32, jnp.int8):
        lemma("clamp", _called(lax.clamp), shape, shape, shape, dtypes=dtype)
    lemma("regularized_incomplete_beta", _called(lax.betainc), shape, shape, shape,
          near=(0.5, 0.9))  # fmt: skip
    for dtype in NUMBERS:
        lemma(
            "add_any", lambda side, x, y: [_add_any(x, y)], shape, shape, dtypes=dtype
        )
    for name in ("eq_to", "lt_to", "le_to"):
        lemma(name, _bound(name), shape, shape)
for shape in EACH:
    lemma("one_minus_square", _bound("one_minus_square"), shape, near=(0.5, 2))
of_each_shape("log2", (F32,), near=(0.5, 2))


def _add_any(x, y):
    from jax._src.ad_util import add_jaxvals_p

    return add_jaxvals_p.bind(x, y)


# The layout of elements.

for dtype in (F32, jnp.int8, jnp.int32, jnp.bool_):
    for shape, dim in (((N, 1), 1), ((1, N), 0), ((1,), 0), ((1, 2), 0)):
        fn = functools.partial(lambda side, x, i: [lax.squeeze(x, (i,))], i=dim)
        lemma("squeeze", fn, shape, dtypes=dtype)
    for shape in EACH:
        fn = lambda side, x: [lax.expand_dims(x, (0,))]  # noqa: E731
        lemma("expand_dims", fn, shape, dtypes=dtype)
        fn = lambda side, x: [jnp.transpose(x)]  # noqa: E731
        lemma("transpose", fn, shape, dtypes=dtype)
    lemma("transpose", lambda side, x: [jnp.transpose(x, (2, 0, 1))], (2, (N, 1, 2), 3),
          dtypes=dtype)  # fmt: skip
    for shape, dims in (((), ()), ((2,), (1,)), ((N,), (0,)), ((N, 2), (0, 1))):
        fn = functools.partial(
            lambda side, x, dims: [lax.broadcast_in_dim(x, (side.rows, 2), dims)],
            dims=dims,
        )
        lemma("broadcast_in_dim", fn, shape, dtypes=dtype)
    for shape, dims in (((), ()), ((2,), (0,)), ((N,), (1,)), ((1,), (0,))):
        fn = functools.partial(
            lambda side, x, dims: [
                lax.broadcast_in_dim(x, (2, side.rows if dims == (1,) else 3), dims)
            ],
            dims=dims,
        )
        lemma("broadcast_in_dim", fn, shape, dtypes=dtype)
        fn = functools.partial(
            lambda side, x, dims: [
                lax.broadcast_in_dim(x, (side.towers, 2), tuple(i + 1 for i in dims))
            ],
            dims=dims,
        )
        if shape in ((), (2,)):
            lemma("broadcast_in_dim", fn, shape, dtypes=dtype)

RESHAPES = (
    ((N, 2), lambda n, t: (n * 2,)),
    ((N, 2), lambda n, t: (2, n)),
    ((N, 2), lambda n, t: (2 * n, 1)),
    ((N, 2), lambda n, t: (1, n, 2)),
    ((N,), lambda n, t: (n, 1)),
    ((N,), lambda n, t: (1, n)),
    ((N,), lambda n, t: (2, n // 2)),
    ((N,), lambda n, t: (n // 2, 2)),
    ((2, N), lambda n, t: (2 * n,)),
    ((2, N), lambda n, t: (n, 2)),
    (((N, 2),), lambda n, t: (2, n)),
    (((N, 2),), lambda n, t: (n, 2)),
    ((2, (N, 1, 2)), lambda n, t: (n,)),
    ((2, (N, 1, 2)), lambda n, t: (n // 2, 2)),
    ((T, N), lambda n, t: (t * n,)),
    ((T, N, 2), lambda n, t: (t * n, 2)),
    ((T, 2), lambda n, t: (t * 2,)),
    ((B, 2), lambda n, t: (t, n, 2)),
    ((B, 2), lambda n, t: (n, t, 2)),
    ((B, 2), lambda n, t: (2, t, n)),
    ((6,), lambda n, t: (3, 2)),
    ((), lambda n, t: (1,)),
    ((1, 1), lambda n, t: ()),
)
for dtype in (F32, jnp.int8, jnp.int32, jnp.bool_):
    for shape, new in RESHAPES:
        fn = functools.partial(
            lambda side, x, new: [lax.reshape(x, new(side.rows, side.towers))], new=new
        )
        lemma("reshape", fn, shape, dtypes=dtype)
    for shape, new, dims in (
        (ROWS, lambda n: (2 * n,), (1, 0)),
        (ROWS, lambda n: (n, 2), (1, 0)),
        (ROWS, lambda n: (2, n), (1, 0)),
        (ROWS, lambda n: (2, n, 1), (1, 0)),
        ((2, N), lambda n: (n, 2), (1, 0)),
        ((2, N), lambda n: (2 * n,), (1, 0)),
        ((2, N, 2), lambda n: (n, 4), (1, 2, 0)),
        ((2, (N, 1, 2), 2), lambda n: (n, 2), (1, 0, 2)),
        ((2, 3), lambda n: (3, 2), (1, 0)),
    ):

        def reshaped(side, x, new=new, dims=dims):
            return [lax.reshape(x, new(side.rows), dims)]

        lemma("reshape", reshaped, shape, dtypes=dtype)

for dtype in (F32, jnp.int32, jnp.bool_):
    for first, second, dim in (
        ((N, 2), (N, 1), 1),
        ((N, 2), (N, 2), 0),
        ((N,), ((N, 2),), 0),
        ((2, N), (1, N), 0),
        ((2,), (3,), 0),
        ((N,), (2,), 0),
        ((N, 1), (N, 1), 1),
        ((0,), (2,), 0),
        ((N, 0), (N, 2), 1),
    ):
        fn = functools.partial(
            lambda side, x, y, dim: [lax.concatenate([x, y], dim)], dim=dim
        )
        lemma("concatenate", fn, first, second, dtypes=dtype)
    for shape in EACH:
        stack = _bound("stack")
        lemma(
            "stack", lambda side, x, y: [jnp.stack([x, y])], shape, shape, dtypes=dtype
        )
    for shape, widths in (
        (ROWS, ((0, 0, 0), (1, 2, 0))),
        (ROWS, ((1, 0, 0), (0, 0, 0))),
        ((2,), ((1, 1, 1),)),
        (((N, 2), 1), ((0, 0, 0), (1, 0, 0))),
    ):
        fn = functools.partial(
            lambda side, x, y, widths: [lax.pad(x, y, widths)], widths=widths
        )
        lemma("pad", fn, shape, (), dtypes=dtype)
    for shape, cut in (
        (ROWS, lambda n, x: x[:, :1]),
        (ROWS, lambda n, x: x[: n // 2]),
        (ROWS, lambda n, x: x[1:]),
        (ROWS, lambda n, x: x[::2]),
        (((N, 2),), lambda n, x: x[:n]),
        (((N, 2),), lambda n, x: x[n:]),
        (((N, 2),), lambda n, x: x[::2]),
        ((N,), lambda n, x: x[:n]),
        ((4,), lambda n, x: x[1:3]),
        ((4,), lambda n, x: x[1::2]),
        ((12,), lambda n, x: x[:n]),
        ((T, 2), lambda n, x: x[:, :1]),
        ((T, 2), lambda n, x: x[:1]),
    ):
        fn = functools.partial(lambda side, x, cut: [cut(side.rows, x)], cut=cut)
        lemma("slice", fn, shape, dtypes=dtype)
    for shape, dims in ((ROWS, (1,)), (ROWS, (0,)), ((2,), (0,)), ((T, 2), (0,))):
        fn = functools.partial(lambda side, x, dims: [lax.rev(x, dims)], dims=dims)
        lemma("rev", fn, shape, dtypes=dtype)
    for shape, reps in ((ROWS, (2, 1)), (ROWS, (1, 2)), ((2,), (2,))):
        fn = functools.partial(lambda side, x, reps: [lax.tile(x, reps)], reps=reps)
        lemma("tile", fn, shape, dtypes=dtype)
    lemma("tile", lambda side, x: [lax.tile(x, (side.rows, 1))], (1, 2), dtypes=dtype)
    for shape, dim, parts in (
        (ROWS, 1, lambda n: (1, 1)),
        (((N, 2),), 0, lambda n: (n, n)),
        ((N,), 0, lambda n: (n // 2, n - n // 2)),
        ((4,), 0, lambda n: (1, 3)),
        ((12,), 0, lambda n: (n, 12 - n)),
    ):
        fn = functools.partial(
            lambda side, x, dim, parts: lax.split(x, parts(side.rows), axis=dim),
            dim=dim, parts=parts,
        )  # fmt: skip
        lemma("split", fn, shape, dtypes=dtype)
    for shape, dim in ((ROWS, 1), ((2, N), 0), ((2,), 0)):
        fn = functools.partial(
            lambda side, x, dim: [*jnp.unstack(x, axis=dim)], dim=dim
        )
        lemma("unstack", fn, shape, dtypes=dtype)

for dtype in (F32, jnp.int32, jnp.int8, jnp.uint8):
    fn = functools.partial(
        lambda side, dtype: [lax.iota(dtype, side.rows), lax.iota(dtype, 3)],
        dtype=dtype,
    )
    lemma("iota", fn)
    fn = functools.partial(
        lambda side, dtype: [
            lax.broadcasted_iota(dtype, (side.rows, 2), 0),
            lax.broadcasted_iota(dtype, (side.rows, 2), 1),
        ],
        dtype=dtype,
    )
    lemma("iota", fn)


for shape in EACH:
    lemma(
        "empty",
        functools.partial(
            lambda side, shape: [lax.empty(shape_on(side, shape), F32)], shape=shape
        ),
    )


def _no_number(side):
    import jax._src.lax.lax as inside

    if not hasattr(inside, "empty2"):
        raise NotThereError
    space = jax.typeof(jnp.zeros(())).memory_space
    return [inside.empty2(F32, memory_space=space)]


lemma("empty2", _no_number)

# Reductions.

REDUCED = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "reduce_or": jnp.any,
    "reduce_and": jnp.all,
    "argmax": lambda x, axis: lax.argmax(x, axis[0], jnp.int32),
    "argmin": lambda x, axis: lax.argmin(x, axis[0], jnp.int32),
}
REDUCED_SHAPES = (
    (ROWS, (0,)),
    (ROWS, (1,)),
    (ROWS, (0, 1)),
    ((N,), (0,)),
    ((2, 3), (1,)),
    ((N, 0), (1,)),
    ((N, 0), (0,)),
    ((0,), (0,)),
    ((0, N), (0,)),
    ((2, 0), (1,)),
    ((T, 2), (0,)),
    ((T, N), (0, 1)),
    ((2, (N, 1, 2)), (0,)),
    ((2, (N, 1, 2)), (1,)),
    ((2, (N, 1, 2)), (0, 1)),
)
for name in REDUCED:
    is_of_flags = name in ("reduce_or", "reduce_and")
    dtypes = (jnp.bool_,) if is_of_flags else (F32, jnp.int32, jnp.int8, jnp.bfloat16)
    for dtype in dtypes:
        for shape, dims in REDUCED_SHAPES:
            is_of_none = 0 in [shape[i] for i in dims]
            if len(dims) > 1 and name.startswith("arg"):
                continue
            if is_of_none and name.startswith("arg"):
                continue
            kind = getattr(lax, f"{name}_p", None) or name

            def reduced(side, x, name=name, dims=dims):
                import jax._src.lax.lax as inside

                if name.startswith("arg"):
                    return [REDUCED[name](x, dims)]
                primitive = getattr(inside, f"{name}_p")
                more = {"out_sharding": None} if name == "reduce_sum" else {}
                try:
                    return [primitive.bind(x, axes=dims, **more)]
                except TypeError:
                    return [primitive.bind(x, axes=dims, out_sharding=None)]

            lemma(name, reduced, shape, dtypes=dtype)
for shape, dims in ((ROWS, (0,)), (ROWS, (1,)), ((2, 3), (0,)), ((2, 0), (1,))):

    def bits(side, x, dims=dims):
        import jax._src.lax.lax as inside

        try:
            return [inside.reduce_xor_p.bind(x, axes=dims)]
        except TypeError:
            return [inside.reduce_xor_p.bind(x, axes=dims, out_sharding=None)]

    for dtype in (jnp.int32, jnp.bool_):
        lemma("reduce_xor", bits, shape, dtypes=dtype)
    by = functools.partial(
        lambda side, x, dims: [lax.reduce(x, np.float32(1), _times_and_one, dims)],
        dims=dims,
    )
    lemma("reduce", by, shape)


def _times_and_one(x, y):
    return x * y + 1


for name in "cumsum cumprod cummax cummin cumlogsumexp".split():
    for dtype in (F32,) if name == "cumlogsumexp" else (F32, jnp.int32, jnp.int8):
        for shape, dim in ((ROWS, 0), (ROWS, 1), ((2,), 0), ((0,), 0), ((N, 0), 1)):
            fn = functools.partial(
                lambda side, x, name, dim: [getattr(lax, name)(x, dim)],
                name=name, dim=dim,
            )  # fmt: skip
            lemma(name, fn, shape, dtypes=dtype)

for dtype in (F32, jnp.int32, jnp.bool_):
    for shape, dim in ((ROWS, 0), (ROWS, 1), ((N,), 0), ((3,), 0)):
        fn = functools.partial(
            lambda side, x, dim: [lax.sort(x, dimension=dim)], dim=dim
        )
        lemma("sort", fn, shape, dtypes=dtype)
        fn = functools.partial(
            lambda side, x, y, dim: lax.sort((x, y), dimension=dim, num_keys=1),
            dim=dim,
        )
        lemma("sort", fn, shape, shape, dtypes=(F32, dtype))
for shape in (ROWS, (N,), (3,), (2, N)):
    lemma("top_k", lambda side, x: lax.top_k(x, 1), shape)
    lemma("top_k", lambda side, x: lax.top_k(x, 1), shape, dtypes=jnp.int32)

# Products.

DOTS = (
    ((N, 2), (2, 3), (((1,), (0,)), ((), ()))),
    ((N, 2), (N, 3), (((0,), (0,)), ((), ()))),
    ((N,), (N,), (((0,), (0,)), ((), ()))),
    ((N, 2), (N, 2), (((1,), (1,)), ((0,), (0,)))),
    ((2,), (2,), (((0,), (0,)), ((), ()))),
    ((2, 3), (3,), (((1,), (0,)), ((), ()))),
    ((N,), (2,), (((), ()), ((), ()))),
    ((N, 0), (0, 2), (((1,), (0,)), ((), ()))),
)
for x, y, dims in DOTS:
    for dtype, wider in (
        (F32, None), (jnp.bfloat16, F32), (jnp.int8, None), (jnp.int8, jnp.int32),
        (jnp.int32, None), (jnp.bool_, None), (jnp.uint8, jnp.float32),
        (jnp.bool_, F32), (jnp.bool_, jnp.int32),
    ):  # fmt: skip
        fn = functools.partial(
            lambda side, x, y, dims, wider: [
                lax.dot_general(x, y, dims, preferred_element_type=wider)
            ],
            dims=dims, wider=wider,
        )  # fmt: skip
        lemma("dot_general", fn, x, y, dtypes=dtype)

CONVS = (
    ((N, 4, 2), (2, 2, 3), ("NWC", "WIO", "NWC"), 1),
    ((4, N, 2), (2, 2, 3), ("NWC", "WIO", "NWC"), 1),
    ((3, 4, N), (2, N, 2), ("NWC", "WIO", "NWC"), 1),
    ((3, 4, 2), (2, 2, 2), ("NWC", "WIO", "NWC"), 1),
    ((N, 4, 2), (2, 1, 2), ("NWC", "WIO", "NWC"), 2),
)
for x, y, spec, groups in CONVS:
    for dtype, wider in ((F32, None), (jnp.int8, jnp.int32), (jnp.int32, None)):
        fn = functools.partial(
            lambda side, x, y, spec, groups, wider: [
                lax.conv_general_dilated(
                    x, y, (1,), "VALID", dimension_numbers=spec,
                    feature_group_count=groups, preferred_element_type=wider,
                )
            ],
            spec=spec, groups=groups, wider=wider,
        )  # fmt: skip
        lemma("conv_general_dilated", fn, x, y, dtypes=dtype)

for name, start, by in (
    ("reduce_window_sum", 0, lax.add),
    ("reduce_window_max", -np.inf, lax.max),
    ("reduce_window_min", np.inf, lax.min),
    ("reduce_window", 1, _times_and_one),
):
    for shape, window in (((N, 4), (1, 2)), ((N, 4), (2, 1)), ((4,), (2,))):
        fn = functools.partial(
            lambda side, x, start, by, window: [
                lax.reduce_window(
                    x, np.float32(start), by, window, [1] * x.ndim, "VALID"
                )
            ],
            start=start, by=by, window=window,
        )  # fmt: skip
        lemma(name, fn, shape)


def _pooled(side, x, y, window):
    strides = [1] * x.ndim
    pool = functools.partial(
        lax.reduce_window, init_value=-np.inf, computation=lax.max,
        window_dimensions=window, window_strides=strides, padding="VALID",
    )  # fmt: skip
    out, pull = jax.vjp(pool, x)
    [tangent] = pull(jnp.broadcast_to(y, out.shape))
    return [tangent, jax.jvp(pool, (x,), (x * 2,))[1]]


for name in ("select_and_scatter_add", "select_and_gather_add"):
    for shape, window in (((N, 4), (1, 2)), ((4,), (2,))):
        fn = functools.partial(_pooled, window=window)
        lemma(name, fn, shape, ())

for shape in ((N, 4), (4, N), (4,)):
    fn = lambda side, x: [jnp.fft.fft(x)]  # noqa: E731
    lemma("fft", lambda side, x: [lax.fft(x, "fft", x.shape[-1:])], shape, dtypes=C64)
    lemma("fft", lambda side, x: [lax.fft(x, "rfft", x.shape[-1:])], shape)

# Matrices.


def _spd(x):
    eye = jnp.broadcast_to(3 * jnp.eye(2, dtype=x.dtype), x.shape)
    return x @ jnp.swapaxes(x, -1, -2) + eye


for shape in ((N, 2, 2), (2, 2), (3, 2, 2)):
    lemma("cholesky", lambda side, x: [lax.linalg.cholesky(_spd(x))], shape)
    lemma("eigh", lambda side, x: [lax.linalg.eigh(_spd(x))[1]], shape)
    lemma("lu", lambda side, x: [lax.linalg.lu(_spd(x))[0]], shape)
    lemma("qr", lambda side, x: [jnp.abs(lax.linalg.qr(_spd(x))[1])], shape)
    lemma("geqrf", lambda side, x: [jnp.abs(lax.linalg.qr(_spd(x))[1])], shape)
    lemma("householder_product", lambda side, x: [
        lax.linalg.householder_product(x, x[..., 0])], shape)  # fmt: skip
    lemma("svd", lambda side, x: [lax.linalg.svd(_spd(x), compute_uv=False)], shape)
    lemma("triangular_solve", lambda side, x, y: [
        lax.linalg.triangular_solve(_spd(x), y, left_side=True)],
        shape, shape)  # fmt: skip
    lemma("tridiagonal_solve", lambda side, x: [
        lax.linalg.tridiagonal_solve(x[..., 0] * 0, x[..., 0] + 9, x[..., 1] * 0, x)],
        shape)  # fmt: skip


def _solved(side, x, y):
    return [lax.linalg.triangular_solve(_spd(x), y, left_side=y.shape[0] == 2)]


def _solved_by_program(side, x, y):
    return [jnp.linalg.solve(_spd(x), y)]


lemma("triangular_solve", _solved, (2, 2), (2, N))
lemma("triangular_solve", _solved, (2, 2), (N, 2))
lemma("custom_linear_solve", _solved_by_program, (2, 2), (2,))
lemma("custom_linear_solve", _solved_by_program, (N, 2, 2), (N, 2, 1))

# Reads and writes by index.

for dtype in (jnp.float32, jnp.int32):  # numbers of all towers, among others
    lemma("mul", lambda side, x: [x * 2, 2 * x], (T,), dtypes=dtype)
    lemma("neg", lambda side, x: [-x], (T,), dtypes=dtype)
    lemma("gather", lambda side, x, i: [jnp.take(x, i, 0, mode="clip")], (T,), (),
          dtypes=(dtype, jnp.int32), kinds=(None, [TowerId()]))  # fmt: skip
lemma("div", lambda side, x: [x / 2.0], (T,))
I32 = jnp.int32
INDEXED = (F32, jnp.int32, jnp.int8, jnp.bool_)
for dtype in INDEXED:
    for shape, sizes in (
        (ROWS, lambda n: (n, 1)),
        (ROWS, lambda n: (1, 2)),
        ((4, 2), lambda n: (2, 2)),
        ((T, 2), lambda n: (1, 2)),
        ((T, N), lambda n: (1, n)),
    ):

        def sliced(side, x, i, j, sizes=sizes):
            return [lax.dynamic_slice(x, (i, j), sizes(side.rows))]

        lemma("dynamic_slice", sliced, shape, (), (), dtypes=(dtype, I32, I32))
    own_rows = lambda side, x, i, j: [  # noqa: E731
        lax.dynamic_slice(x, (i, j), (side.rows, 2))
    ]
    at = [ZERO, TowerId(), FirstRow()], [ZERO]
    lemma("dynamic_slice", own_rows, (B, 2), (), (), dtypes=(dtype, I32, I32),
          kinds=(None, *at))  # fmt: skip
    write_rows = lambda side, x, y, i, j: [  # noqa: E731
        lax.dynamic_update_slice(x, y, (i, j))
    ]
    lemma("dynamic_update_slice", write_rows, (B, 2), (N, 2), (), (),
          dtypes=(dtype, dtype, I32, I32), kinds=([ZERO], None, *at))  # fmt: skip
    for shape, new in ((ROWS, (N, 1)), (ROWS, (1, 2)), ((4, 2), (2, 2))):
        fn = lambda side, x, y, i, j: [  # noqa: E731
            lax.dynamic_update_slice(x, y, (i, j))
        ]
        lemma("dynamic_update_slice", fn, shape, new, (), (),
              dtypes=(dtype, dtype, I32, I32))  # fmt: skip

READS = (
    ((3, 2), (N,), lambda x, i: x[i]),
    ((3, 2), (2,), lambda x, i: x[i]),
    ((3,), (), lambda x, i: x[i]),
    ((N, 2), (N,), lambda x, i: x[i]),
    ((N,), (N,), lambda x, i: x[i]),
    ((N, 3), (N,), lambda x, i: x[jnp.arange(len(x)), i]),
    ((N, 3), (2,), lambda x, i: x[:, i]),
    ((N, 3), (N,), lambda x, i: jax.vmap(lambda x, i: x[i])(x, i)),
    ((N, 3), (N, 2), lambda x, i: jnp.take_along_axis(x, i, 1)),
    ((N, 3), (), lambda x, i: x[i]),
)
MODES = ("clip", "fill", "promise_in_bounds")
for dtype in INDEXED:
    for x, at, read in READS:
        for mode in MODES:
            fn = functools.partial(
                lambda side, x, i, read, mode: [_in_mode(read, mode)(x, i)],
                read=read, mode=mode,
            )  # fmt: skip
            lemma("gather", fn, x, at, dtypes=(dtype, I32), near=(0, 1))
    fn = lambda side, x, i: [x.at[i].get(mode="fill", fill_value=7)]  # noqa: E731
    lemma("gather", fn, (3, 2), (N,), dtypes=(dtype, I32), near=(-4, 4))
    lemma("gather", fn, (3,), (2,), dtypes=(dtype, I32), near=(-4, 4))


def _in_mode(read, mode):
    """A read with indices beyond the array treated in a mode."""
    if mode == "promise_in_bounds":
        return read
    limits = {"clip": 9, "fill": 0}
    return lambda x, i: read(x, i * 1 if limits[mode] else i)


WRITES = (
    ((3, 2), (N,), (N, 2), lambda x, i, y: (x.at[i], y)),
    ((3,), (N,), (N,), lambda x, i, y: (x.at[i], y)),
    ((3,), (2,), (2,), lambda x, i, y: (x.at[i], y)),
    ((3,), (), (), lambda x, i, y: (x.at[i], y)),
    ((N, 3), (N,), (N,), lambda x, i, y: (x.at[jnp.arange(len(x)), i], y)),
    ((N, 3), (2,), (N, 2), lambda x, i, y: (x.at[:, i], y)),
    ((N, 2), (N,), (N, 2), lambda x, i, y: (x.at[i], y)),
    ((B, 2), (N,), (N, 2), lambda x, i, y: (x.at[i], y)),
    ((3, 2), (N,), (N, 2), lambda x, i, y: (x.at[i], y)),
)
for name, method in (
    ("scatter", "set"), ("scatter-add", "add"), ("scatter-mul", "multiply"),
    ("scatter-min", "min"), ("scatter-max", "max"), ("scatter-sub", "subtract"),
):  # fmt: skip
    for dtype in INDEXED[:3]:
        for x, at, new, write in WRITES:

            def written(side, x, i, y, write=write, method=method):
                to, y = write(x, i, y)
                if not hasattr(to, method):
                    raise NotThereError
                return [getattr(to, method)(y)]

            lemma(name, written, x, at, new, dtypes=(dtype, I32, dtype), near=(0, 1))

# Collectives.

for dtype in NUMBERS:
    for shape in EACH:
        of_all = functools.partial(lax.psum, axis_name=AXIS)
        lemma("psum", _called(of_all), shape, dtypes=dtype)
for dtype in (F32, jnp.int8, jnp.int32, jnp.bool_):
    for shape in EACH:
        for name in ("pmax", "pmin"):
            of_all = functools.partial(getattr(lax, name), axis_name=AXIS)
            lemma(name, _called(of_all), shape, dtypes=dtype)
        fn = lambda side, x: [lax.all_gather(x, AXIS)]  # noqa: E731
        lemma("all_gather", fn, shape, dtypes=dtype)
        ring = lambda side, x: [  # noqa: E731
            lax.ppermute(x, AXIS, [(i, (i + 1) % side.towers)
                                   for i in range(side.towers)])
        ]  # fmt: skip
        lemma("ppermute", ring, shape, dtypes=dtype)
    for shape, dim in ((ROWS, 0), (ROWS, 1), ((2,), 0)):
        fn = functools.partial(
            lambda side, x, dim: [lax.all_gather(x, AXIS, axis=dim, tiled=True)],
            dim=dim,
        )
        lemma("all_gather", fn, shape, dtypes=dtype)

lemma("axis_index", lambda side: [lax.axis_index(AXIS)])
for shape in ((12,), (12, 2)):

    def scattered(side, x):
        if 12 % side.towers:
            raise NotThereError
        return [lax.psum_scatter(x, AXIS, tiled=True)]

    for dtype in (F32, jnp.int8):
        lemma("reduce_scatter", scattered, shape, dtypes=dtype)


def exchanged(side, x):
    if side.rows % side.towers:
        raise NotThereError
    return [lax.all_to_all(x, AXIS, 0, 0, tiled=True)]


for shape in (ROWS, (N,)):
    lemma("all_to_all", exchanged, shape)
for shape, split, joined in (
    ((12, N), 0, 1),
    ((N, 12), 1, 0),
    ((12, N), 1, 0),
    ((N, 12), 1, 1),
    ((2, N, 12), 2, 1),
    ((12, (N, 2)), 0, 1),
    ((24, 12), 0, 1),
):
    for tiled in (True, False):

        def dealt(side, x, split=split, joined=joined, tiled=tiled):
            size = x.shape[split]
            if size % side.towers if tiled else size != side.towers:
                raise NotThereError
            return [lax.all_to_all(x, AXIS, split, joined, tiled=tiled)]

        lemma("all_to_all", dealt, shape)

for name, dtype in (("any", jnp.bool_), ("all", jnp.bool_), ("max", jnp.int32)):
    for shape in EACH:
        lemma(f"unvmap_{name}", _called(getattr(eqx, f"unvmap_{name}")), shape,
              dtypes=dtype)  # fmt: skip

# Programs that run programs.


def _as_often(side, n, x):
    start = 0 * n, x
    return [
        lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), start)[1]
    ]


def _counted(bound, body, start, step=1):
    def trip(carry):
        i, c = carry
        return i + step, body(i, c)

    return [*lax.while_loop(lambda c: c[0] < bound, trip, (0, start))]


for shape in EACH:
    for dtype in (F32, jnp.int8):
        lemma("jit", _called(jax.jit(lambda x: x * 2 + x)), shape, dtypes=dtype)
        lemma("checkpoint", _called(jax.checkpoint(lambda x: x * 2 + x)), shape,
              dtypes=dtype)  # fmt: skip
    lemma("custom_jvp_call", _called(jax.nn.relu), shape)
    lemma("custom_vjp_call", lambda side, x: [_twice(x)], shape)
    lemma("cond", lambda side, p, x, y: [
        lax.cond(p, lambda x, y: x * 2, lambda x, y: y, x, y)],
        (), shape, shape, dtypes=(jnp.bool_, F32, F32))  # fmt: skip
    lemma("while", lambda side, x: [
        lax.fori_loop(0, 3, lambda i, c: c * 2, x)], shape)  # fmt: skip
    lemma("while", _as_often, (), shape, dtypes=(I32, F32))
    lemma("while", lambda side, x: _counted(3, lambda i, c: c * 2, x), shape)


@jax.custom_vjp
def _twice(x):
    return x * 2


_twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

BODIES = {
    "sums": lambda c, x: (c + x, x * 2),
    "counts": lambda c, x: (c + (x > 0), c),
    "products": lambda c, x: (c * 2, x),
    "keeps": lambda c, x: (c, x + c),
    "takes off": lambda c, x: (c - x, x),
    "sums of chosen": lambda c, x: (jnp.where(x > 0, c + x, c), x),
    "last": lambda c, x: (x, x),
    "largest": lambda c, x: (jnp.maximum(c, x), x * 2),
    "smallest": lambda c, x: (jnp.minimum(c, x), x),
    "largest, then added": lambda c, x: (jnp.maximum(c, x) + x, x),
    "largest or smallest": lambda c, x: (jnp.minimum(jnp.maximum(c, x), x), x),
}


def _scanned(side, c, x, body):
    def as_before(c, x):
        new, out = body(c, x)
        return jnp.asarray(new, c.dtype), out

    return jax.tree.leaves(lax.scan(as_before, c, x))


for body in BODIES.values():
    for shape, start in (((N,), ()), ((3,), ()), ((3, N), (N,)), ((N, 2), (2,))):
        lemma("scan", functools.partial(_scanned, body=body), start, shape)


def _filled(side, x, y):
    def body(carry, _):
        i, out = carry
        return (i + 1, out.at[i].set(x[i] * 2)), None

    return [lax.scan(body, (0, y), None, length=side.rows)[0][1]]


def _by_trip(side, x):
    def body(i, total):
        return total + lax.dynamic_index_in_dim(x, i, keepdims=False)

    return [lax.fori_loop(0, side.rows, body, jnp.zeros(x.shape[1:], x.dtype))]


def _numbered(side, x):
    def body(i, row):
        return i + 1, (i, row)

    return jax.tree.leaves(lax.scan(body, 0, x)[1])


def _in_chunks(side, x):
    if side.rows % 2:
        raise NotThereError
    chunks = x.reshape(2, side.rows // 2, *x.shape[1:])

    def body(total, chunk):
        return total + chunk.sum(0, dtype=x.dtype), (chunk * 2, chunk.sum(0))

    return jax.tree.leaves(lax.scan(body, jnp.zeros(x.shape[1:], x.dtype), chunks))


def _in_chunks_of_chunks(side, start, x):
    if side.rows % 4:
        raise NotThereError
    chunks = x.reshape(2, side.rows // 2, *x.shape[1:])

    def within(carry, piece):
        total, largest = carry
        total = total + piece.sum(0, dtype=x.dtype)
        return (total, jnp.maximum(largest, piece.max(0))), piece

    def body(carry, chunk):
        total, largest = carry
        pieces = chunk.reshape(2, side.rows // 4, *x.shape[1:])
        (own, most), rows = lax.scan(within, (jnp.zeros_like(start), start), pieces)
        return (total + own, jnp.maximum(largest, most)), rows.reshape(chunk.shape)

    return jax.tree.leaves(lax.scan(body, (jnp.zeros_like(start), start), chunks))


def _largest_in_chunks(side, start, x):
    if side.rows % 2:
        raise NotThereError
    chunks = x.reshape(2, side.rows // 2, *x.shape[1:])

    def body(carry, chunk):
        largest, smallest, count = carry
        largest = jnp.maximum(largest, chunk.max(0))
        smallest = jnp.minimum(chunk.min(0), smallest)
        return (largest, smallest, count + 1), chunk.max(0)

    return jax.tree.leaves(lax.scan(body, (start, start, 0), chunks))


lemma("scan", _largest_in_chunks, (), (N,))
lemma("scan", _largest_in_chunks, (2,), ROWS)
lemma("scan", _in_chunks_of_chunks, (), (N,))
lemma("scan", _in_chunks_of_chunks, (2,), ROWS)

for shape in ((N,), ROWS):
    for dtype in (F32, I32, jnp.int8):
        lemma("scan", _filled, shape, shape, dtypes=dtype)
        lemma("scan", _by_trip, shape, dtypes=dtype)
        lemma("scan", _numbered, shape, dtypes=dtype)
        lemma("scan", _in_chunks, shape, dtypes=dtype)


def _summed_while(side, x):
    def body(i, total):
        return total + lax.dynamic_index_in_dim(x, i, keepdims=False)

    return _counted(side.rows, body, jnp.zeros(x.shape[1:], x.dtype))


def _counted_for_all(side, x):
    """A `while` with as many trips as there are towers, or as rows in all."""
    by_tower = _counted(side.towers, lambda i, c: c * 2, x)
    return [*by_tower, *_counted(24, lambda i, c: c, x, step=side.rows)]


for shape in ((N,), ROWS):
    lemma("while", _summed_while, shape)
    lemma("while", _counted_for_all, shape)


def _each_until(side, x):
    def until(x):
        return lax.while_loop(lambda x: x < 3, lambda x: x * 2 + 1, jnp.abs(x))

    return [jax.vmap(until)(x)]


lemma("while", _each_until, (N,))

# Several equations: a flag of rows, its count, and the mean that it guards.


def _flagged(side, x, y):
    flag = (x > 0).astype(x.dtype)
    count = flag.sum()
    total = (y * flag).sum()
    guarded = jnp.maximum(count, 1)
    mean = total / guarded
    return [
        flag, count, total, guarded, mean, mean * count,
        jnp.where(count > 0, total, 0.0),
        jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0) * count,
        (count > 0), (x > 0).any(), ~(x > 0).any(),
    ]  # fmt: skip


for shape in ((N,),):
    lemma("div", _flagged, shape, shape)
    lemma("select_n", _flagged, shape, shape)


def _exact_flags(side, x, y):
    count = x.sum()
    return [
        jnp.where(count > 0, y, 0), jnp.where(count == 0, 0, y),
        lax.cond(count > 0, lambda: y, lambda: y * 0),
        y / jnp.maximum(count, 1), y / jnp.where(count > 0, count, 1),
    ]  # fmt: skip


_FLAG = rows().replace(zeros=frozenset([FLAG, PADDING]), fact=Flag(FLAG))
lemma("select_n", _exact_flags, (N,), (), kinds=([_FLAG], None))
lemma("cond", _exact_flags, (N,), (), kinds=([_FLAG], None))
lemma("div", _exact_flags, (N,), (), kinds=([_FLAG], None))

# Kinds that few operands have, so that each is tried.


def _compared(name):
    """A comparison of a primitive's two operands."""
    return _called(getattr(lax, name))


_COUNT = part().replace(zeros=frozenset([FLAG, PADDING]), fact=Count(FLAG))
_MEAN = Mean(vanishes=True, fact=Count(FLAG))
_NUMBERS = ([RowNumbers()], [Valid(), SIZE])
_PADDED_FLAG = rows().replace(zeros=frozenset([PADDING]), fact=Flag(PADDING))
for name in "eq ne lt le gt ge".split():
    lemma(name, _compared(name), (), (), kinds=([_COUNT], [ZERO, copy(number=1)]))
    lemma(name, _compared(name), (), (), kinds=([ZERO, copy(number=1)], [_COUNT]))
lemma("lt", _compared("lt"), (N,), (N,), dtypes=jnp.int32, kinds=_NUMBERS)
lemma("ge", _compared("ge"), (), (), dtypes=jnp.int32,
      kinds=([Valid(), SIZE], [SIZE]))  # fmt: skip
lemma("ge", lambda side, x: [lax.ge(np.int32(side.rows), x)], (), dtypes=jnp.int32,
      kinds=([SIZE],))  # fmt: skip
lemma("or", _called(lax.bitwise_or), (N,), (N,), dtypes=jnp.bool_,
      kinds=([_PADDED_FLAG], [IsFull()]))  # fmt: skip
lemma("or", _called(lax.bitwise_or), (N,), (N,), dtypes=jnp.bool_,
      kinds=([IsFull()], [_PADDED_FLAG]))  # fmt: skip
lemma("mul", _called(lax.mul), (), (), kinds=([_MEAN], [_COUNT]))
lemma("mul", _called(lax.mul), (), (), kinds=([_COUNT], [_MEAN]))
lemma("mul", _called(lax.mul), (), (), dtypes=jnp.int32,
      kinds=([TowerId()], [copy(number=1)]))  # fmt: skip
lemma("mul", lambda side, x: [x * side.rows], (), dtypes=jnp.int32,
      kinds=([TowerId()],))  # fmt: skip
lemma("mul", lambda side, x: [side.rows * x], (), dtypes=jnp.int32,
      kinds=([TowerId()],))  # fmt: skip
for both in ((RowNumbers(), FirstRow()), (FirstRow(), RowNumbers())):
    lemma("add", _called(lax.add), (N,), (N,), dtypes=jnp.int32,
          kinds=tuple([x] for x in both))  # fmt: skip
_COUNT = part().replace(zeros=frozenset([FLAG, PADDING]), fact=Count(FLAG))
for both in ((_COUNT, copy(number=1)), (copy(number=1), _COUNT)):
    lemma("max", _called(lax.max), (), (), dtypes=F32,
          kinds=tuple([x] for x in both))  # fmt: skip
_NUMBERS_FROM = [copy(), ZERO, copy(1)], [FirstRow()]
for dtype in (F32, jnp.int32):
    for shape in ((), (2,)):
        lemma("sub", _called(lax.sub), shape, shape, dtypes=dtype,
              kinds=_NUMBERS_FROM)  # fmt: skip
    for shape in ((N,), (2, N), (N, 2), ((N, 2),)):
        for both in ((FromFirstRow(), RowNumbers()), (RowNumbers(), FromFirstRow())):
            for name in "eq ne lt le gt ge".split():
                lemma(name, _compared(name), shape, shape, dtypes=dtype,
                      kinds=tuple([x] for x in both))  # fmt: skip
for shape in ((T, 2), (T, N)):
    lemma("mul", lambda side, x: [x * 2.0, 2.0 * x], shape)
    lemma("div", lambda side, x: [x / 2.0], shape)
    lemma("neg", lambda side, x: [-x], shape)
    lemma("gather", lambda side, x, i: [jnp.take(x, i, 0, mode="clip")], shape, (),
          dtypes=(F32, jnp.int32), kinds=(None, [TowerId()]))  # fmt: skip
