"""What one map hands to another: no program is proved that uses it in a wrong way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import towerjax as tj

NUMBERS = (1, 2, 4)
BOTH = ("dp", "mp")
GROWING = {
    "one axis": {1: (1, 1), 2: (2, 1), 4: (4, 1)},
    "both axes": {1: (1, 1), 2: (2, 1), 4: (2, 2)},
    "rows alone": {1: (1, 2), 2: (2, 2), 4: (4, 2)},
    "the second alone": {1: (2, 1), 2: (2, 2), 4: (2, 4)},
}
DRAW = np.random.default_rng(0)
W = DRAW.normal(size=(4, 3)).astype(np.float32)
X = DRAW.normal(size=(16, 4)).astype(np.float32)
X[:4, 1] = -1  # a device has no row with this flag
ALL = P(BOTH)


def mapped(mesh, fn, ins, out):
    how = {"mesh": mesh, "in_specs": ins, "out_specs": out, "check_vma": False}
    return jax.shard_map(fn, **how)


def ring(axis, by=1):
    size = lax.axis_size(axis)
    return [(i, (i + by) % size) for i in range(size)]


def own_sums(mesh, w, x):
    """Sums over a device's own rows; devices of ``mp`` have the same."""
    return mapped(mesh, lambda w, x: (x @ w).sum(0), (P(), P("dp")), ALL)(w, x)


def own_rows(mesh, w, x):
    """Each device's own rows, one array after another."""
    return mapped(mesh, lambda w, x: (x @ w)[None], (P(), P("dp")), ALL)(w, x)


def with_own_rows(mesh, rows, x, spec=ALL, shift=None):
    def total(rows, x):
        if shift is not None:
            rows = lax.ppermute(rows, "dp", ring("dp", shift))
        return of_all((rows[0].sum(1) * x[:, 0]).sum())

    return mapped(mesh, total, (spec, P("dp")), P())(rows, x)


def of_all(x):
    """The sum over rows of a value that devices of ``mp`` share."""
    return lax.pmean(lax.psum(x, "dp"), "mp")


def by_all(mesh, fn, *arrays, spec=ALL):
    return mapped(mesh, fn, (spec,) * len(arrays), P())(*arrays)


class Right:
    """Programs that hand values from one map to another as derivatives do."""

    def sums(mesh, w, x):
        return by_all(mesh, lambda own: of_all(own.sum()), own_sums(mesh, w, x))

    def rows(mesh, w, x):
        return with_own_rows(mesh, own_rows(mesh, w, x), x)

    def largest(mesh, w, x):
        own = mapped(mesh, lambda x: x.max(0), P("dp"), ALL)(x)
        return by_all(mesh, lambda own: lax.pmax(own.max(), BOTH), own)

    def numbers(mesh, w, x):
        def first(x):
            return lax.axis_index("dp") * len(x) + jnp.arange(len(x))

        def total(number, x, w):
            values = lax.all_gather(x @ w, "dp", tiled=True)[number]
            return of_all((values * x[:, :1]).sum())

        number = mapped(mesh, first, P("dp"), ALL)(x)
        return mapped(mesh, total, (ALL, P("dp"), P()), P())(number, x, w)


class Wrong:
    """Programs whose result depends on the mesh."""

    def sums_of_all_on_each(mesh, w, x):
        own = own_sums(mesh, w, x)
        return by_all(mesh, lambda own: of_all(own.sum()), own, spec=P())

    def squares_of_own_sums(mesh, w, x):
        own = own_sums(mesh, w, x)
        return by_all(mesh, lambda own: of_all((own**2).sum()), own)

    def sums_added_twice(mesh, w, x):
        def twice(own):
            return lax.psum(of_all(own.sum()), "dp")

        return by_all(mesh, twice, own_sums(mesh, w, x))

    def rows_rolled(mesh, w, x):
        return with_own_rows(mesh, jnp.roll(own_rows(mesh, w, x), 1, 0), x)

    def rows_reversed(mesh, w, x):
        return with_own_rows(mesh, own_rows(mesh, w, x)[::-1], x)

    def rows_passed_on(mesh, w, x):
        return with_own_rows(mesh, own_rows(mesh, w, x), x, shift=1)

    def rows_passed_on_before(mesh, w, x):
        def own(w, x):
            return lax.ppermute(x @ w, "dp", ring("dp"))[None]

        rows = mapped(mesh, own, (P(), P("dp")), ALL)(w, x)
        return with_own_rows(mesh, rows, x)

    def rows_in_two_orders(mesh, w, x):
        """Each map's order is the first that it has; these are two orders."""

        def passed(by):
            def own(x):
                return lax.ppermute(x, "dp", ring("dp", by))

            return mapped(mesh, own, P("dp"), ALL)(x)

        def total(one, two):
            return of_all((one * two**2).sum())

        return by_all(mesh, total, passed(1), passed(3))

    def rows_in_two_sorted_orders(mesh, w, x):
        def order_by(column):
            return mapped(mesh, lambda x: jnp.argsort(x[:, column]), P("dp"), ALL)(x)

        def total(one, two, x):
            return of_all((x[one, 2] * x[two, 3]).sum())

        specs = ALL, ALL, P("dp")
        return mapped(mesh, total, specs, P())(order_by(0), order_by(1), x)

    def counts_of_another_flag(mesh, w, x):
        """Each map's flag is the first that it has; these are two flags."""

        def flag(x):
            return (x[:, 0] > 0).astype(x.dtype)

        def count(x):
            return (x[:, 1] > 0).astype(x.dtype).sum()[None]

        def total(flag, count, x):
            own = (flag * x[:, 2]).sum() / jnp.maximum(count[0], 1)
            return of_all(own * count[0])

        flags = mapped(mesh, flag, P("dp"), ALL)(x)
        counts = mapped(mesh, count, P("dp"), ALL)(x)
        return mapped(mesh, total, (ALL, ALL, P("dp")), P())(flags, counts, x)

    def own_number_as_a_weight(mesh, w, x):
        def number(w):
            return lax.axis_index("dp")[None] * jnp.ones(1, int)

        def total(number, x):
            return of_all((x * number[0]).sum())

        own = mapped(mesh, number, P(), ALL)(w)
        return mapped(mesh, total, (ALL, P("dp")), P())(own, x)

    def summed_outside(mesh, w, x):
        return (own_sums(mesh, w, x) ** 2).sum()

    def scanned_outside(mesh, w, x):
        return lax.scan(lambda c, v: (0.9 * c + v, None), 0.0, own_sums(mesh, w, x))[0]

    def first_entries(mesh, w, x):
        own = own_sums(mesh, w, x)
        chosen = jnp.where(jnp.arange(len(own)) < 3, own, 0)
        return by_all(mesh, lambda own: of_all(own.sum()), chosen)

    def largest_added(mesh, w, x):
        own = mapped(mesh, lambda x: x.max(0), P("dp"), ALL)(x)
        return by_all(mesh, lambda own: of_all(own.sum()), own)


def named(deck):
    return {name: fn for name, fn in vars(deck).items() if not name.startswith("_")}


def maker(fn, shapes):
    def make(devices):
        shape = shapes[len(devices)]
        found = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = Mesh(found, BOTH)
        return jax.jit(lambda w, x: fn(mesh, w, x)), (W, X)

    return make


def is_proved(make):
    try:
        return tj.testing.prove(make, devices=NUMBERS).unproved == {}
    except tj.ReplicationError:
        return False


def results(make):
    programs = [make(jax.devices()[:number]) for number in NUMBERS]
    return [np.asarray(fn(*args)) for fn, args in programs]


@pytest.mark.slow
@pytest.mark.parametrize("name", named(Right))
def test_what_each_device_keeps_is_proved(name):
    make = maker(named(Right)[name], GROWING["one axis"])
    assert is_proved(make)
    first, *others = results(make)
    assert all(np.allclose(x, first, rtol=1e-4) for x in others)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("growing", ["one axis", "both axes", "rows alone"])
@pytest.mark.parametrize("name", named(Wrong))
def test_no_other_use_is_proved(name, growing):
    assert not is_proved(maker(named(Wrong)[name], GROWING[growing]))


@pytest.mark.slow
@pytest.mark.parametrize("name", named(Wrong))
def test_each_other_use_depends_on_the_devices(name):
    first, *others = results(maker(named(Wrong)[name], GROWING["one axis"]))
    assert not all(np.allclose(x, first, rtol=1e-3) for x in others)


def in_another_order(mesh, w, x):
    """Rows over both axes leave by one order of the axes and enter by another."""

    def total(rows, x):
        return lax.psum((rows.sum(1) * x[:, 0]).sum(), BOTH)

    rows = mapped(mesh, lambda w, x: x @ w, (P(), ALL), ALL)(w, x)
    return mapped(mesh, total, (P(("mp", "dp")), ALL), P())(rows, x)


def number_among_all(mesh, w, x):
    """A device's number among all is used as that among the devices of ``mp``."""

    def total(number, x):
        sums = lax.all_gather(x.sum(0), "mp")
        own = lax.dynamic_index_in_dim(sums, number[0], keepdims=False)
        return lax.psum(own, BOTH)

    def number(x):
        return lax.axis_index(BOTH)[None]

    return mapped(mesh, total, (ALL, ALL), P())(mapped(mesh, number, ALL, ALL)(x), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "growing"),
    [(in_another_order, "both axes"), (number_among_all, "the second alone")],
)
def test_axes_together_are_not_one_of_them(fn, growing):
    make = maker(fn, GROWING[growing])
    assert not is_proved(make)
    first, *others = results(make)
    assert not all(np.allclose(x, first, rtol=1e-3) for x in others)
