"""Programs on parts of their parameters: where they communicate, and their numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as named
from jax.extend.core import jaxprs_in_params

from towerjax.mesh.placement import DEVICE_AXIS
from towerjax.proof import tags
from towerjax.towers.lowering.parts import Shards
from towerjax.towers.lowering.shards import on_shards

D = 2


class Row(NamedTuple):
    program: Callable[..., Any]  # of whole parameters and a device's rows
    expected: str  # each time that it communicates on parts
    given: int = 0  # the dim of the parameters' parts
    wanted: int = 0  # that of the first result's
    exact: bool = False
    alike: bool = False  # as in an update: rows are the same on all devices


def summed(x):
    return lax.psum(x, DEVICE_AXIS)


def product(x):
    return x.T @ x


NUMBERS = np.arange(16, dtype=np.float32).reshape(4, 4)  # that programs close over


def scanned(x, start=0):
    """The product, added up row by row."""
    first = jnp.full((4, 4), start, jnp.float32)
    return lax.scan(lambda carry, row: (carry + jnp.outer(row, row), None), first, x)[0]


def read_twice(g):
    return summed(g), summed((g**2).sum())


def read_after(g):
    g = summed(g)
    return g, g.sum()


def scan_of_reads(x):
    """A carry that each step reads."""
    step = lambda carry, row: (carry + jnp.outer(row, carry[0]), None)  # noqa: E731
    return lax.scan(step, jnp.ones((4, 4)), x)[0]


def stacked(x, **options):
    """Rows that a scan makes of those so far."""
    step = lambda carry, row: (2 * carry + row, carry - row)  # noqa: E731
    return lax.scan(step, x[0], x, **options)[1]


def repeated(x):
    """A scan of no rows."""
    step = lambda carry, _: (carry + product(x), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((4, 4)), length=3)[0]


def rows_of(w, x):
    """A scan over a parameter's rows, of which no result is a part."""
    return lax.scan(lambda carry, row: (carry * 2 + row, None), x[0], w)[0]


def closed_over(w, x):
    """A scan that uses a parameter in each step."""
    return lax.scan(lambda carry, row: (w @ carry + row, None), x[0], x)[0]


def in_turn(fn):
    def run(*args):
        with jax.named_scope(tags.IN_TURN):
            return fn(*args)

    return run


def looped(w, x):
    """A loop of which condition and body use a parameter."""
    go_on = lambda carry: carry[0] < jnp.abs(w).sum()  # noqa: E731
    body = lambda carry: (carry[0] + 20, w @ carry[1] + 1)  # noqa: E731
    return lax.while_loop(go_on, body, (jnp.float32(0), x[0]))[1]


def recomputed(w, x):
    """The gradient of a function that is computed again for it."""
    loss = jax.checkpoint(lambda w: ((x @ (w * w)) ** 2).sum())
    return summed(jax.grad(loss)(w))


PROGRAMS = {
    "made": Row(lambda w, x: summed(product(x)), "scatter"),
    "named": Row(lambda w, x: named(summed(named(product(x), "a")), "b"), "scatter"),
    "scan": Row(lambda w, x: summed(scanned(x)), "scan scatter"),
    "scan, named": Row(lambda w, x: summed(named(scanned(x), "a")), "scan scatter"),
    "closed over": Row(lambda w, x: summed(product(x) * jnp.array(NUMBERS)), "scatter"),
    "jit": Row(lambda w, x: summed(jax.jit(product)(x)), "scatter"),
    "scan in jit": Row(lambda w, x: summed(jax.jit(scanned)(x)), "scan scatter"),
    # A sum is scattered once, but where an addend is better scattered inside.
    "two": Row(lambda w, x: summed(product(x) + product(2 * x)), "scatter"),
    "with jit": Row(lambda w, x: summed(product(x) + jax.jit(product)(x)),
        "scatter, scatter"),
    "with scan": Row(lambda w, x: summed(product(x) + scanned(x)),
        "scan scatter, scatter"),
    "nested": Row(lambda w, x: summed(product(x) + (product(2 * x) + scanned(x))),
        "scan scatter, scatter, scatter"),
    # What else is read than by the sum is needed whole.
    "read": Row(lambda w, x: read_twice(scanned(x)), "psum, scatter"),
    "twice": Row(lambda w, x: (lambda g: summed(g + g))(scanned(x)), "scatter"),
    "read after": Row(lambda w, x: read_after(scanned(x)), "gather, scan scatter"),
    "one of two": Row(lambda w, x: summed((product(x), x.sum(0))), "psum, scatter"),
    "given": Row(lambda w, x: w, ""),
    "no sum": Row(lambda w, x: w @ w, "gather"),
    # A scan scatters what it only adds to, and begins with parts.
    "from one": Row(lambda w, x: summed(scanned(x, 1)), "scan scatter, scatter"),
    "carry is read": Row(lambda w, x: summed(scan_of_reads(x)), "scatter"),
    "no rows": Row(lambda w, x: summed(repeated(x)), "scan scatter"),
    "stacked": Row(lambda w, x: summed(stacked(x)), "scatter"),
    "stacked along 1": Row(lambda w, x: summed(stacked(x)), "scan scatter", wanted=1),
    "reversed": Row(lambda w, x: summed(stacked(x, reverse=True)), "scan scatter",
        wanted=1),
    "unrolled": Row(lambda w, x: summed(stacked(x, unroll=2)), "scan scatter by 2",
        wanted=1),
    # Parameters are gathered before a scan, and a row of them in each step.
    "xs": Row(lambda w, x: (w, rows_of(w, x)), "gather"),
    "xs along 1": Row(lambda w, x: (w, rows_of(w, x)), "scan gather", 1, 1),
    "const": Row(lambda w, x: (w, closed_over(w, x)), "gather"),
    # Micro-batches and a device's towers gather in their own steps.
    "const in turn": Row(in_turn(lambda w, x: (w, closed_over(w, x))), "scan gather"),
    "loop in turn": Row(in_turn(lambda w, x: (w, looped(w, x))),
        "gather, while gather"),
    "loop": Row(lambda w, x: (w, looped(w, x)), "gather"),
    "recomputed": Row(recomputed, "barrier, gather, gather, scatter"),
    "exact": Row(lambda w, x: w @ w, "gather, layout", exact=True),
    "exact, xs": Row(lambda w, x: (w, rows_of(w, x)), "scan gather, scan layout", 1, 1,
        exact=True),
    # Of parts alone a part is made, unless the bits are to be those of one device.
    "flipped": Row(lambda w, x: w.T, "", 0, 1),
    "flipped exactly": Row(lambda w, x: w.T, "gather, layout", 0, 1, exact=True),
    # An update computes its own part, of what is given as parts and of what is whole.
    "sgd": Row(lambda w, g: w - 2 * g, "", alike=True),
    "of all": Row(lambda w, g: w * (g**2).sum(), "", alike=True),
    "flipped rows": Row(lambda w, g: w - g.T, "gather", alike=True),
    "of all parameters": Row(lambda w, g: w * (w**2).sum(), "gather", alike=True),
    "one number": Row(lambda w, g: w + jnp.full((4, 4), g[0, 0]), "", alike=True),
    "one number, whole": Row(lambda w, g: (w, jnp.full((4, 4), g[0, 0]) @ g), "",
        alike=True),
    "along another": Row(lambda w, g: w + w.T, "gather, gather", alike=True),
    "half": Row(lambda w, g: (w.astype(jnp.bfloat16) * w).astype(w.dtype), "",
        alike=True),
    "result is read": Row(lambda w, g: (lambda new: (new, (new**2).sum()))(w - g),
        "gather", alike=True),
    "scan of an update":
        Row(lambda w, g: lax.scan(lambda c, _: (c - w, c.sum()), g, length=2)[0],
        "gather", alike=True),
}  # fmt: skip
KINDS = {
    "psum": "psum", "psum_invariant": "psum", "reduce_scatter": "scatter",
    "all_gather": "gather", "optimization_barrier": "barrier",
    "layout_constraint": "layout",
}  # fmt: skip


def communicates(jaxpr):
    for eqn in jaxpr.eqns:
        if kind := KINDS.get(eqn.primitive.name):
            yield kind
        times = eqn.params.get("unroll", 1)
        by = "" if times == 1 else f" by {times}"
        for inner in jaxprs_in_params(eqn.params):
            for kind in communicates(inner):
                yield f"{eqn.primitive.name} {kind}{by}"


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_communicates_where_it_must(name):
    program, expected, given, wanted, exact, alike = PROGRAMS[name]
    rng, env = np.random.default_rng(0), [(DEVICE_AXIS, D)]
    w, x = rng.integers(-2, 3, (4, 4)), rng.integers(-2, 3, (D, 4, 4))
    w, x = w.astype(np.float32), x.astype(np.float32)
    x = np.stack([x[0]] * D) if alike else x
    whole, out = jax.make_jaxpr(program, axis_env=env, return_shape=True)(w, x[0])
    leaves, made = jax.tree.flatten(out)
    dims = (
        (given, None),
        (None, 0 if alike else None),
        (wanted, *[None] * (len(leaves) - 1)),
    )
    args = jax.tree.structure((w, x))
    shards = Shards(args, dims[0], dims[1], made, dims[2], exact, alike)

    def run(*args):
        return on_shards(whole, shards, *args)

    parts = np.stack(np.split(w, D, given))
    jaxpr = jax.make_jaxpr(run, axis_env=env)(parts[0], x[0])
    assert ", ".join(sorted(communicates(jaxpr.jaxpr))) == expected
    first, *rest = jax.vmap(run, axis_name=DEVICE_AXIS)(parts, x)
    of_whole = jax.vmap(program, (None, 0), axis_name=DEVICE_AXIS, axis_size=D)
    want, *others = jax.tree.leaves(of_whole(w, x))
    want = np.broadcast_to(want, (D, 4, 4))[0]
    np.testing.assert_array_equal(np.concatenate(first, wanted), want)
    for x, y in zip(rest, others, strict=True):
        np.testing.assert_array_equal(x, y)
