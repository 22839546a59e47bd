"""Any JAX program: what is proved the same as on one device is so when it is run."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import cases
from on_devices import (
    ALL,
    DRAW,
    NUMBERS,
    SPLIT,
    W,
    X,
    Y,
    given_by,
    loss,
    mapped,
    proof_of,
)

import towerjax as tj

FEATURES = DRAW.normal(size=(8, 4)).astype(np.float32)
U = DRAW.normal(size=(4, 2)).astype(np.float32)
M = (DRAW.uniform(size=8) < 0.6).astype(np.float32)


def rows_of(devices, *arrays):
    return [x.reshape(len(devices), -1, *x.shape[1:]) for x in arrays]


def copies_of(devices, tree):
    return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)


class Right:
    def data_parallel(devices):
        def step(w, x, y):
            grads = lax.pmean(jax.grad(loss)(w, x, y), "i")
            return w - 0.1 * grads, lax.pmean(loss(w, x, y), "i")

        return mapped(devices, step, W, X, Y, out=(ALL, ALL))

    def weighted(devices):
        def step(w, x, y, m):
            total = lax.psum((m * (x @ w - y) ** 2).sum(), "i")
            return total / lax.psum(m.sum(), "i")

        return mapped(devices, step, W, X, Y, M)

    def by_jaxs_own_sums(devices):  # check_vma=True
        def step(w, x, y):
            mean = lambda w: lax.pmean(loss(w, x, y), "i")  # noqa: E731
            return jax.grad(mean)(w)

        return mapped(devices, step, W, X, Y, check_vma=True)

    def gradient_outside(devices):
        sums = lambda w, x, y: lax.psum(((x @ w - y) ** 2).sum(), "i")  # noqa: E731
        total, args = mapped(devices, sums, W, X, Y, check_vma=True)
        return jax.jit(jax.value_and_grad(total)), args

    def of_pmap(devices):
        tx = optax.adam(0.1)

        def step(state, x, y):
            w, opt = state
            grads = lax.pmean(jax.grad(loss)(w, x, y), "i")
            updates, opt = tx.update(grads, opt)
            return (optax.apply_updates(w, updates), opt), x @ w

        state = copies_of(devices, (W, tx.init(W)))
        return jax.pmap(step, "i", devices=devices), (state, *rows_of(devices, X, Y))

    def of_pmap_with_whole_parameters(devices):
        step = lambda w, x: lax.psum((x @ w).sum(), "i")  # noqa: E731
        how = {"in_axes": (None, 0), "out_axes": None, "devices": devices}
        return jax.pmap(step, "i", **how), (W, *rows_of(devices, X))

    def micro_batches_in_a_scan(devices):
        def step(w, x, y):
            parts = x.reshape(-1, 2, 3), y.reshape(-1, 2)
            add = lambda g, part: (g + jax.grad(loss)(w, *part), None)  # noqa: E731
            total, _ = lax.scan(add, jnp.zeros_like(w), parts)
            return lax.pmean(total / len(parts[0]), "i")

        return mapped(devices, step, W, X, Y)

    def scan_over_steps(devices):
        def steps(w, x, y):
            def turn(w, _):
                w = w - 0.1 * lax.pmean(jax.grad(loss)(w, x, y), "i")
                return w, lax.pmean(loss(w, x, y), "i")

            return lax.scan(turn, w, None, length=3)

        return mapped(devices, steps, W, X, Y, out=(ALL, ALL))

    def two_maps(devices):
        mean, args = mapped(devices, lambda w, x: lax.pmean(x.mean(0), "i"), W, X)
        scaled, _ = mapped(devices, lambda m, x: x * m[None], W, X, out=SPLIT)
        return jax.jit(lambda w, x: scaled(jnp.tanh(mean(w, x)), x)), args

    def sharded_state(devices):
        def step(m, x):
            grads = lax.psum_scatter(x.T @ x, "i", scatter_dimension=0, tiled=True)
            m = 0.9 * m + grads
            return m, lax.all_gather(m, "i", tiled=True).sum()

        specs = {"ins": (SPLIT, SPLIT), "out": (SPLIT, ALL)}
        return mapped(devices, step, FEATURES[:4], FEATURES, **specs)

    def split_features(devices):
        def step(u, x):
            return lax.psum(jax.nn.relu(x) @ u, "i")

        return mapped(devices, step, U, FEATURES, ins=(SPLIT, P(None, "i")))

    def numbers_of_rows(devices):
        def step(w, x):
            number = lax.axis_index("i") * len(x) + jnp.arange(len(x))
            keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))
            noise = jax.vmap(jax.random.normal)(keys(number))
            return lax.pmean((x[:, 0] + noise).mean(), "i")

        return mapped(devices, step, W, X)

    def a_sum_over_what_devices_return(devices):
        own, args = mapped(devices, lambda w, x: (x @ w).sum()[None], W, X, out=SPLIT)
        return jax.jit(lambda w, x: own(w, x).sum() / len(x)), args

    def of_flax(devices):
        """A state whose static fields are others each time that it is made."""
        model = nn.Dense(1)
        tx = optax.sgd(0.1, momentum=0.9)
        params = model.init(jax.random.key(0), X)["params"]
        how = {"apply_fn": model.apply, "params": params, "tx": tx}
        state = train_state.TrainState.create(**how)

        def step(state, x, y):
            def of(params):
                return ((state.apply_fn({"params": params}, x)[:, 0] - y) ** 2).mean()

            return state.apply_gradients(
                grads=lax.pmean(jax.grad(of)(state.params), "i")
            )

        return mapped(devices, step, state, X, Y)

    def split_by_the_program(devices):
        def step(w, x):
            return w - lax.pmean(x.mean(0), "i"), x @ w

        fn = jax.pmap(step, "i", devices=devices)

        def whole(w, x):
            copies = jnp.broadcast_to(w, (len(devices), *w.shape))
            return fn(copies, x.reshape(len(devices), -1, 3))

        return whole, (W, X)

    def an_axis_of_one_device(devices):
        def step(w, x):
            total = lax.psum(lax.psum((x * w[None]).sum(1), "j").sum(), "i")
            return total + lax.pmean(x.mean(), ("i", "j"))

        mesh = Mesh(np.array(devices)[:, None], ("i", "j"))
        specs = {"in_specs": (P("j"), P("i", "j")), "out_specs": ALL}
        fn = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
        return jax.jit(fn), (W, X)

    def by_jit_alone(devices):
        mesh = Mesh(devices, "i")
        x, y = [jax.device_put(a, NamedSharding(mesh, SPLIT)) for a in (X, Y)]
        step = jax.jit(lambda w, x, y: w - 0.1 * jax.grad(loss)(w, x, y))
        return step, (jax.device_put(W, NamedSharding(mesh, ALL)), x, y)


# What is another number by a power of D is made at "# here".


class Refuted:
    """``D times``: a factor, and its line."""

    def summed(devices):  # D times
        def step(w, x, y):
            return lax.psum(jax.grad(own)(w, x, y), "i")

        def own(w, x, y):
            return ((x @ w - y) ** 2).mean()  # here

        return mapped(devices, step, W, X, Y)

    def share(devices):  # 1/D times
        return mapped(devices, lambda w, x: lax.pmean(x.sum(), "i"), W, X)  # here

    def sum_of_a_sum(devices):  # D times
        def step(w, x):
            total = jax.grad(lambda w: (x @ w).sum())(w)
            return lax.psum(total, "i")  # here

        return mapped(devices, step, W, X, check_vma=True)

    def copies_added_up(devices):  # D times
        return mapped(devices, lambda w, x: lax.psum(w * 2, "i"), W, X)  # here

    def rate_by_devices(devices):  # D times
        rate = 0.1 * len(devices)
        return mapped(devices, lambda w, x: rate * lax.psum(x.sum(), "i"), W, X)  # here

    def number_of_devices(devices):  # D times
        return mapped(devices, lambda w, x: lax.psum(w[0] * 0 + 1, "i"), W, X)  # here

    def of_pmap(devices):  # D times
        def step(w, x, y):
            return lax.psum(jax.grad(own)(w, x, y), "i")

        def own(w, x, y):
            return ((x @ w - y) ** 2).mean()  # here

        args = copies_of(devices, W), *rows_of(devices, X, Y)
        return jax.pmap(step, "i", devices=devices), args

    def copies_added_up_by_the_host(devices):  # D times
        mean = jax.pmap(lambda x: lax.pmean(x.mean(), "i"), "i", devices=devices)
        rows = rows_of(devices, X)
        return (lambda x: mean(x).sum()), rows  # here

    def in_a_scan(devices):  # D times
        def step(w, x, y):
            def turn(g, _):
                return g + jax.grad(own)(w, x, y), None

            def own(w, x, y):
                return ((x @ w - y) ** 2).mean()  # here

            total, _ = lax.scan(turn, jnp.zeros_like(w), None, length=2)
            return lax.psum(total, "i")

        return mapped(devices, step, W, X, Y)

    def in_the_second_map(devices):  # D times
        mean, args = mapped(devices, lambda w, x: lax.pmean(x.mean(0), "i"), W, X)
        twice, _ = mapped(devices, lambda m, x: lax.psum(m, "i"), W, X)  # here
        return jax.jit(lambda w, x: twice(mean(w, x), x)), args


def joined_by_hand(devices, fn):
    own, args = mapped(devices, fn, X, ins=(SPLIT,), out=SPLIT)
    return (lambda x: own(x).reshape(-1, 3)), args


# Programs that depend on their devices, and what is told of them.
UNKNOWN = {
    "a mean of quotients": (
        lambda devices: mapped(
            devices,
            lambda w, x, m: lax.pmean((m * (x @ w)).sum() / m.sum(), "i"),
            *(W, X, M),
        ),
        r"each device divides by a sum over its own rows at \S+py:\d+ .*jax.lax.psum",
    ),
    "a gradient of a quotient": (
        lambda devices: mapped(
            devices,
            lambda w, x, m: lax.pmean(
                jax.grad(lambda w: (m * (x @ w)).sum() / m.sum())(w), "i"
            ),
            *(W, X, M),
        ),
        r"each device divides by a sum over its own rows at \S+py:\d+ .*jax.lax.psum",
    ),
    "a sum of a sum that is clipped": (
        lambda devices: mapped(
            devices,
            lambda w, x: jnp.minimum(
                lax.psum(jax.grad(lambda w: (x @ w).sum())(w), "i"), 1.0
            ),
            *(W, X),
            check_vma=True,
        ),
        r"times the number of devices .*There a value is D times .*"
        r"is added up at \S+py:\d+ ",
    ),
    "centred by a device": (
        lambda devices: mapped(
            devices, lambda w, x: x - x.mean(0)[None], W, X, out=SPLIT
        ),
        r"added to a mean over a device's own rows, at \S+py",
    ),
    "an own key": (
        lambda devices: mapped(
            devices,
            lambda w, x: (
                x
                + jax.random.normal(
                    jax.random.fold_in(jax.random.key(0), lax.axis_index("i")), x.shape
                )
            ),
            *(W, X),
            out=SPLIT,
        ),
        r"a key of a replicated value and axis_index, at \S+py",
    ),
    "keys of devices": (
        lambda devices: (
            jax.pmap(
                lambda x, key: x + jax.random.normal(key, x.shape), devices=devices
            ),
            (*rows_of(devices, X), jax.random.split(jax.random.key(0), len(devices))),
        ),
        r"each device is given a different args\[1\]",
    ),
    "own losses": (
        lambda devices: mapped(
            devices, lambda w, x: (x @ w).sum()[None], W, X, out=SPLIT
        ),
        "each device returns a sum over a device's rows of its own",
    ),
    "a device's number": (
        lambda devices: mapped(
            devices, lambda w, x: x + lax.axis_index("i"), W, X, out=SPLIT
        ),
        r"rows added to axis_index, at \S+py",
    ),
    "another batch": (
        lambda devices: mapped(devices, lambda w, x: lax.psum(x.sum(), "i"), W,
                               X[: 4 * len(devices)][:8]),
        r"args\[1\] is a different array",
    ),
    "another batch of numbers": (
        lambda devices: mapped(devices, lambda w, x: lax.psum(x.sum(), "i"), W,
                               X + np.sqrt(len(devices))),
        r"args\[1\] is a different array",
    ),
    "another number of dims": (
        lambda devices: (
            lambda x: x.reshape((8, 3, *(1,) * len(devices))),
            (X,),
        ),
        r"another number of dims for another number of devices",
    ),
    "a branch of Python": (
        lambda devices: mapped(
            devices,
            lambda w, x: lax.psum((x if len(devices) < 2 else 2 * x).sum(), "i"),
            *(W, X),
        ),
        "the program differs",
    ),
    "a loop of Python": (
        lambda devices: (lambda x: sum(x[i] for i in range(len(devices))), (X,)),
        r"the program differs between numbers of devices, at \S+py:",
    ),
    "a sum of each device": (
        lambda devices: mapped(
            devices, lambda w, x: (x @ w).sum()[None], W, X, out=SPLIT
        ),
        r"each device returns a sum over .* its own, made at \S+py:",
    ),
    "a mesh of all devices": (
        lambda devices: mapped(
            jax.devices()[:4], lambda w, x: lax.pmean(x.mean(), "i"), W, X
        ),
        "a shard_map over a mesh of {'i': 4} devices",
    ),
    "two of each device": (
        lambda devices: joined_by_hand(devices, lambda x: jnp.stack([x, 2 * x])),
        "the values of all devices in another shape",
    ),
    "rows split by columns": (
        lambda devices: (
            lambda x: jax.pmap(lambda x: x * 2, devices=devices)(
                x.reshape(len(devices), 4, -1)
            ),
            (X[:, :2],),
        ),
        "a replicated value in another shape",
    ),
    "centred by a pmap": (
        lambda devices: (
            jax.pmap(lambda x: x - x.mean(0)[None], devices=devices),
            rows_of(devices, X),
        ),
        r"added to a mean over a device's own rows, at \S+py",
    ),
    "another batch for a pmap": (
        lambda devices: (
            jax.pmap(lambda x: x.sum(1), devices=devices),
            rows_of(devices, X + np.sqrt(len(devices))),
        ),
        r"args\[0\] is a different array",
    ),
    "another one on four devices": (
        lambda devices: mapped(
            devices,
            lambda w, x: (3 if len(devices) > 2 else 1) * lax.psum(x.sum(), "i"),
            *(W, X),
        ),
        "a constant depends on the number of devices",
    ),
    "a callback": (
        lambda devices: mapped(
            devices,
            lambda w, x: jax.pure_callback(
                lambda x: x, jax.ShapeDtypeStruct((), "float32"), lax.psum(x.sum(), "i")
            ),
            *(W, X),
        ),
        "no rule for pure_callback",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(Right))
def test_what_is_the_same_as_on_one_device_is_proved(name):
    report = proof_of(cases(Right)[name])
    assert report.equal and not report.unproved, str(report)
    assert f"{len(report.equal)} of {len(report.equal)} results" in str(report)


@pytest.mark.few_fast(4)
@pytest.mark.parametrize("name", cases(Refuted))
def test_a_power_of_the_number_of_devices_is_refuted_with_its_line(name):
    make = cases(Refuted)[name]
    lines, first = inspect.getsourcelines(make)
    here = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")][-1]
    factor = re.search(r"# (1?/?D times)", lines[0])[1]
    with pytest.raises(tj.ReplicationError) as error:
        proof_of(make)
    told = str(error.value).splitlines()
    assert told[0] == "Results of the program depend on the number of devices:"
    assert f": {factor} what it is on one device: " in told[1]
    assert f"test_equal_on_devices.py:{here} " in told[1]
    is_of_a_number = "rate" in name or "host" in name
    advice = "Use one that does not" if is_of_a_number else "jax.lax.p"
    assert advice in told[1]


@pytest.mark.few_fast(4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_is_unknown_and_says_why(name):
    make, text = UNKNOWN[name]
    told = [*proof_of(make).unproved.values()]
    assert len(told) == 1
    assert re.search(text, told[0]), told


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(Right))
def test_what_is_proved_is_the_same_when_it_is_run(name):
    make = cases(Right)[name]
    one = given_by(make, 1)
    for number in NUMBERS[1:]:
        for x, y in zip(given_by(make, number), one, strict=True):
            y = y.reshape(x.shape) if x.size == y.size else np.broadcast_to(y, x.shape)
            np.testing.assert_allclose(x, y, 2e-5, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(Refuted))
def test_what_is_refuted_is_off_by_its_factor_when_it_is_run(name):
    make = cases(Refuted)[name]
    is_share = "# 1/D times" in inspect.getsource(make)
    [one] = given_by(make, 1)
    for number in NUMBERS[1:]:
        [got] = given_by(make, number)
        factor = 1 / number if is_share else number
        np.testing.assert_allclose(got, np.broadcast_to(factor * one, got.shape), 2e-5)


@pytest.mark.parametrize("asks", [False, True], ids=["traced", "asked for"])
def test_a_coefficient_of_0_hides_no_term(asks):
    """But where Python asks for the number, it is that number."""

    def make(devices):
        def step(w, x, beta):
            if asks and beta > 1:
                beta = 1.0
            fn, _ = mapped(devices, lambda w, x, b: lax.psum(b * w, "i"), W, X, 1.0,
                           ins=(ALL, SPLIT, ALL))  # fmt: skip
            return fn(w, x, beta)

        return step, (W, X, 0.0)

    if asks:
        assert not proof_of(make).unproved
    else:
        with pytest.raises(tj.ReplicationError, match="result: D times"):
            proof_of(make)


def test_an_argument_that_grows_with_devices_is_told_and_not_judged():
    def make(devices):
        rate = np.float32(0.1 * len(devices))
        return mapped(devices, lambda r, x: r * lax.psum(x.sum(), "i"), rate, X)

    [why] = proof_of(make).unproved.values()
    assert "is a different array for another number of devices" in why


def test_keys_that_unsafe_rbg_makes_of_many_are_not_proved():
    def make(devices):
        key = jax.random.key(0, impl="unsafe_rbg")
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return (lambda key: fold(key, jnp.arange(8))), (key,)

    told = str(proof_of(make).unproved)
    assert "unsafe_rbg draw at" in told and "test_equal_on_devices.py" in told


def test_shapes_are_enough_for_a_proof():
    def make(devices):
        fn, args = Right.data_parallel(devices)
        return fn, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]

    assert not proof_of(make).unproved


def test_prove_takes_a_function_that_makes_the_program():
    with pytest.raises(ValueError, match="takes no other arguments"):
        tj.testing.prove(Right.data_parallel, W, devices=NUMBERS)
    with pytest.raises(ValueError, match="cannot be traced"):
        tj.testing.prove(lambda d: (lambda x: float(x.sum()), (X,)), devices=NUMBERS)
    with pytest.raises(ValueError, match="must begin with 1 and have other numbers"):
        tj.testing.prove(Right.data_parallel, devices=(2, 4))


@pytest.mark.slow
def test_sums_of_what_is_the_same_are_notes_where_nothing_better_is_known():
    fn, args = Refuted.sum_of_a_sum(jax.devices()[:4])
    [note] = tj.testing.prove(fn, *args).notes
    assert "added up as many times as there are devices" in note

    def half(devices):
        step = lambda w, x: lax.pmean(jax.grad(loss)(w, x, x[:, 0]), "i")  # noqa: E731
        fn, args = mapped(devices, step, W, X, check_vma=True)
        return lambda w, x: fn(w, x) / len(devices), args

    assert not proof_of(half).notes and not proof_of(half).unproved
