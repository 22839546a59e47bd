"""Any JAX program: what its maps over devices call the same is proved, or refused."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import cases

import towerjax as tj

W = np.ones(3, np.float32)
X = np.ones((8, 3), np.float32)
SHARED = P()
SPLIT = P("i")


def mapped(fn, mesh=None, ins=(SHARED, SPLIT), out=SHARED, **options):
    mesh = Mesh(np.array(jax.devices()[:4]), "i") if mesh is None else mesh
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=out, **options)


by_hand = functools.partial(mapped, check_vma=False)


def abstract(*sizes):
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(sizes, ("i", "j")[: len(sizes)], axis_types=types)


def loss(w, x):
    return ((x @ w) ** 2).mean()


# Programs (w, x) of which devices do not have the same, made at "# here".


class Wrong:
    def forgotten(w, x):
        own = lambda w, x: jax.grad(loss)(w, x) + x.sum()  # here  # noqa: E731
        return by_hand(own)(w, x)

    def chosen_by_a_cond(w, x):  # which check_vma=True accepts
        def own(w, x):
            big = x.sum() > 2
            return lax.cond(big, lambda: True, lambda: False)  # here

        return mapped(own)(w, x)

    def hanging(w, x):
        def own(w, x):
            total = lambda: lax.psum(w, "i")  # here  # noqa: E731
            return lax.pmax(lax.cond(x.sum() > 2, total, lambda: w), "i")

        return by_hand(own)(w, x)

    def in_a_scan_and_jit(w, x):
        def turn(w, _):
            own = jax.jit(lambda w, x: w * x.sum())  # here
            return by_hand(own)(w, x), None

        return lax.scan(turn, w, None, length=2)[0]

    def a_carry_that_drifts(w, x):
        def own(w, x):
            return lax.fori_loop(0, 3, lambda _, w: w + x.mean(0), w)  # here

        return by_hand(own)(w, x)

    def a_while_of_ones_own(w, x):
        def own(w, x):
            return lax.while_loop(lambda w: w[0] < x[0, 0], lambda w: w + 1, w)  # here

        return by_hand(own)(w, x)

    def pmapped(w, x):
        own = lambda w, x: w * x.sum()  # here  # noqa: E731
        how = {"axis_name": "i", "in_axes": (None, 0), "out_axes": None}
        return jax.pmap(own, **how)(w, x.reshape(4, 2, 3))

    def over_one_of_two_axes(w, x):
        mesh = abstract(16, 8)
        own = lambda w, x: lax.psum(w * x.sum(), "i")  # here  # noqa: E731
        ins = (SHARED, P(None, "j"))
        x = jnp.zeros((8, 8))
        return by_hand(own, mesh, ins)(w, x)

    def within_another_map(w, x):
        mesh = abstract(4, 2)
        inner = lambda w: w * lax.axis_index("j")  # here  # noqa: E731

        def outer(w, x):
            specs = {"in_specs": SHARED, "out_specs": SHARED, "check_vma": False}
            return jax.shard_map(inner, axis_names={"j"}, **specs)(lax.psum(w, "i"))

        return by_hand(outer, mesh, axis_names={"i"})(w, x)

    def backward_by_device(w, x):
        @jax.custom_vjp
        def same(w):
            return w

        own = lambda _, g: (g * (1.0 + lax.axis_index("i")),)  # noqa: E731
        same.defvjp(lambda w: (w, None), own)

        def grads(w, x):
            return jax.grad(lambda w: loss(same(w), lax.pmean(x, "i")))(w)  # here

        return by_hand(grads)(w, x)


class Right:
    def mean_of_gradients(w, x):
        return by_hand(lambda w, x: lax.pmean(jax.grad(loss)(w, x), "i"))(w, x)

    def by_jaxs_own_sums(w, x):  # check_vma=True: pvary, psum_invariant
        return mapped(lambda w, x: jax.grad(loss)(w, x) / lax.axis_size("i"))(w, x)

    def gathered(w, x):
        def all_rows(w, x):
            return lax.all_gather(x, "i").sum((0, 1)) * w

        return by_hand(all_rows)(w, x)

    def split(w, x):
        return mapped(lambda w, x: x * w[None], out=SPLIT)(w, x)

    def mean_of_a_pmap(w, x):
        step = lambda w, x: w - lax.pmean(x.mean(0), "i")  # noqa: E731
        how = {"axis_name": "i", "in_axes": (None, 0), "out_axes": None}
        return jax.pmap(step, **how)(w, x.reshape(4, 2, 3))

    def gradient_through_a_map(w, x):
        total = by_hand(lambda w, x: lax.psum(loss(w, x), "i"))
        return jax.grad(lambda w: total(w, x))(w)

    def loop_until_all_agree(w, x):
        def own(w, x):
            least = lax.pmin(x.min(), "i")
            return lax.while_loop(lambda w: w[0] < least, lambda w: w + 1, w)

        return by_hand(own)(w, x)

    def on_one_device(w, x):
        mesh = abstract(1)
        return by_hand(lambda w, x: w * x.sum(), mesh)(w, x)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", cases(Wrong))
def test_what_differs_between_devices_is_refused(name, jit):
    fn = cases(Wrong)[name]
    lines, first = inspect.getsourcelines(fn)
    [here] = [first + i for i, line in enumerate(lines) if "# here" in line]
    with pytest.raises(tj.ReplicationError) as caught:
        tj.testing.prove(jax.jit(fn) if jit else fn, W, X)
    assert f"test_prove.py:{here}" in str(caught.value)
    text = "would hang" if name == "hanging" else "drift apart: result 0 depends on "
    assert text in str(caught.value)


@pytest.mark.parametrize("name", cases(Right))
def test_what_is_the_same_is_not(name):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    report = tj.testing.prove(cases(Right)[name], *shapes)
    none_same = {"split", "on_one_device"}
    assert bool(report.same) == (name not in none_same)
    assert len(report.maps) == (name != "on_one_device") * (1 + ("through" in name))
    assert not report.unread and not report.notes and not report.copies


def cast(x, to):
    return lax.pcast(x, "i", to=to)


# What JAX itself inserts or types: what a device does, out_specs, results the same.
TYPED = {
    "unreduced": (lambda x: cast(x.sum(0), "unreduced"), P(unreduced={"i"}), 0),
    "added up": (lambda x: lax.psum(cast(x.sum(0), "unreduced"), "i"), SHARED, 1),
    "reduced": (lambda x: cast(lax.psum(x, "i"), "reduced"), P(reduced={"i"}), 1),
    "gathered": (lambda x: lax.all_gather(x, "i", to="reduced"), P(reduced={"i"}), 1),
    "scattered": (lambda x: lax.psum_scatter(x[0], "i", tiled=True), SPLIT, 0),
}


@pytest.mark.parametrize("name", TYPED)
def test_sums_and_casts_of_jax_have_rules(name):
    fn, out, same = TYPED[name]
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, SPLIT))
    report = tj.testing.prove(mapped(fn, mesh, SPLIT, out), x)
    assert report.same == same and not report.notes and len(report.maps) == 1


def test_all_findings_are_told_at_once():
    def both(w, x):
        return Wrong.forgotten(w, x), Wrong.hanging(w, x)

    with pytest.raises(tj.ReplicationError) as caught:
        tj.testing.prove(both, W, X)
    assert str(caught.value).count("\n  - ") == 2


@pytest.mark.parametrize(("sums", "text"), [
    (lax.psum, "added up as many times as there are devices, at"),
    (lax.pmean, "averaged and stays what it is .*D times the mean"),
])  # fmt: skip
def test_sums_of_what_jax_has_added_up_already_are_noted(sums, text):
    fn = mapped(lambda w, x: sums(jax.grad(loss)(w, x), "i"))
    [note] = tj.testing.prove(fn, W, X).notes
    assert "test_prove.py" in note and re.search(text, note)


def test_a_mean_of_equals_is_not_where_jax_adds_nothing_up():
    fn = by_hand(lambda w, x: lax.pmean((jnp.zeros(3), w), "i"), out=(SHARED, SHARED))
    assert not tj.testing.prove(fn, W, X).notes


def drawn(key):
    return jax.random.normal(key, (8,))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_draws_by_rbg_are_noted_where_they_may_be_split(impl):
    key = jax.random.key(0, impl=impl)
    keys = jax.random.split(key, 8)
    by_device = by_hand(
        lambda x, key: x + drawn(key).sum(), ins=(SPLIT, SHARED), out=SPLIT
    )
    by_row = jax.vmap(lambda x, key: x + drawn(key).sum())
    of_rows = by_hand(by_row, ins=(SPLIT, SPLIT), out=SPLIT)
    some = mapped(
        lambda x, key: x + drawn(key).sum(),
        Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j")),
        (SPLIT, SHARED),
        SPLIT,
        axis_names={"i"},
    )
    noted = {
        "whole": tj.testing.prove(jax.jit(drawn), key),
        "rows": tj.testing.prove(of_rows, X[:, 0], keys),
        "some": tj.testing.prove(some, X[:, 0], key),
    }
    for report in noted.values():
        assert len(report.notes) == ("rbg" in impl), report.notes
        assert all("test_prove.py" in note and "TPUs" in note for note in report.notes)
    assert not tj.testing.prove(by_device, X[:, 0], key).notes


@pytest.mark.parametrize("order", [("i", "j"), ("j", "i"), "i"])
def test_a_ppermute_in_another_order_than_the_meshs_is_noted(order):
    ring = [(0, 1), (1, 0)]
    if order != "i":
        ring = [(n, (n + 1) % 8) for n in range(8)]
    fn = by_hand(
        lambda x: lax.ppermute(x, order, ring),
        abstract(*((2, 4) if len(order) == 2 else (2,))),
        P(order),
        P(order),
    )
    notes = tj.testing.prove(fn, X[:, 0]).notes
    assert len(notes) == (order == ("j", "i"))
    assert all("test_prove.py" in note and "ppermute" in note for note in notes)


def test_a_program_without_a_map_says_so():
    report = tj.testing.prove(jax.jit(loss), W, X)
    assert report.maps == () and "no shard_map and no pmap" in str(report)


def test_what_no_jaxpr_shows_is_told():
    def fn(w, x):
        call = jax.experimental.io_callback(lambda: np.float32(1), W[0], ordered=False)
        return lax.pmean(w * call, "i")

    report = tj.testing.prove(by_hand(fn), W, X)
    assert report.same == 1 and "io_callback at " in report.unread[0]
    assert "not read: io_callback" in str(report)


def test_arguments_that_are_no_arrays_and_those_by_name():
    def fn(w, how, *, x):
        return Right.mean_of_gradients(w, x) if how == "mean" else w

    assert tj.testing.prove(fn, W, "mean", x=X).same == 1
    assert tj.testing.prove(fn, W, "none", x=X).maps == ()


def test_an_iterator_is_an_argument_too():
    def fn(w, batches):
        return Right.mean_of_gradients(w, next(batches))

    assert tj.testing.prove(fn, W, iter([X])).same == 1


# A state of which each device has a copy, as jax.pmap is given it, and what drifts.
def of_copies(reduced, counted):
    def step(state, batch, key):
        grads = {"w": jax.grad(loss)(state["w"], batch), "mean": batch.mean()}
        grads |= {name: lax.pmean(grads[name], "i") for name in reduced}
        count = lax.psum(jnp.prod(jnp.array([2, 3])), "i") if counted else 1
        state = {name: state[name] - grads[name] * count for name in grads}
        return state, grads["w"].sum(), jax.random.fold_in(key, 1)

    return jax.pmap(step, axis_name="i")


STATE = {"w": np.ones((4, 3), np.float32), "mean": np.zeros(4, np.float32)}
KEYS = jax.random.split(jax.random.key(0), 4)
BATCH = np.ones((4, 2, 3), np.float32)


@pytest.mark.parametrize("reduced", [("w", "mean"), ("mean",), ("w",), ()])
@pytest.mark.parametrize("by_shape", [False, True])
def test_a_copy_of_a_state_that_does_not_stay_one_is_noted(reduced, by_shape):
    fn = of_copies(reduced, counted=False)
    args = STATE, BATCH
    if by_shape:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    report = tj.testing.prove(fn, *args, KEYS)
    assert report.copies == len(reduced) and not report.same
    for note in report.notes:
        assert "each device is given a copy, and returns another" in note
        assert "what in_specs split at" in note and "test_prove.py" in note
        assert note.startswith(
            f"result[0][{'mean' if 'mean' not in reduced else 'w'!r}]"
        )
    assert len(report.notes) == (len(reduced) < 2)


def test_what_differs_from_device_to_device_is_no_copy():
    state = STATE | {"mean": np.arange(4, dtype=np.float32)}
    report = tj.testing.prove(of_copies(["w"], counted=False), state, BATCH, KEYS)
    assert report.copies == 1 and not report.notes


def test_a_count_of_rows_is_no_sum_of_equals():
    report = tj.testing.prove(of_copies(STATE, counted=True), STATE, BATCH, KEYS)
    assert report.copies == 2 and not report.notes


def test_settings_of_which_devices_have_the_same_are_copies():
    def step(w, x, rate, key):
        noise = jax.random.normal(key, w.shape)
        return w - rate * lax.pmean(jax.grad(loss)(w, x), "i") + noise

    fn = jax.pmap(step, axis_name="i")
    args = (STATE["w"], BATCH)
    rates = np.full(4, 0.1, np.float32)
    keys = jnp.stack([jax.random.PRNGKey(0)] * 4)
    assert tj.testing.prove(fn, *args, rates, keys).copies == 1
    assert not tj.testing.prove(fn, *args, rates, keys).notes
    notes = tj.testing.prove(fn, *args, np.arange(4) * rates, keys).notes
    assert [x.partition(",")[0] for x in notes] == [
        "result: each device is given a copy"
    ]
    assert tj.testing.prove(fn, *args, rates, KEYS).notes
