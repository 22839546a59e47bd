"""Random programs over two axes: what is proved for growing meshes runs alike."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import towerjax as tj

NAMES = ("dp", "mp")
SHAPES = (16, 8)
DRAW = np.random.default_rng(0)
ARGS = tuple(DRAW.uniform(0.2, 1.3, SHAPES).astype(np.float32) for _ in range(2))
AXES = ("dp", "mp", ("dp", "mp"), ("mp", "dp"))
P = PartitionSpec
SPECS = (
    *(P(), P("dp"), P("mp"), P(None, "mp"), P("dp", "mp"), P("mp", "dp")),
    *(P(("dp", "mp")), P(("mp", "dp")), P(None, ("dp", "mp"))),
)
# The number of devices of each axis, one mesh after another.
GROWING = (
    ((1, 1), (2, 1), (2, 2)),
    ((1, 1), (1, 2), (2, 2)),
    ((1, 2), (2, 2), (4, 2)),
    ((2, 1), (2, 2), (2, 4)),
)
# By which specs an array leaves one map, and enters another.
HELD = (P(("dp", "mp")), P(("mp", "dp")), P("dp", "mp"), P(None, ("dp", "mp")), P("dp"))
NUMBERS = (1, 2, 4)


def ring(axis, back):
    size = lax.axis_size(axis)
    step = size - 1 if back else 1
    return [(i, (i + step) % size) for i in range(size)]


# Each draws numbers, and then makes an array from two others.
WITHIN = (
    lambda rng, x, y: jnp.tanh(x),
    lambda rng, x, y: x * y,
    lambda rng, x, y: x + 0.5 * y,
    lambda rng, x, y: x * 3,
    lambda rng, x, y: jnp.where(x > 0.6, x, y),
    lambda rng, x, y: jax.nn.softmax(x, axis=int(rng.integers(2))),
    lambda rng, x, y: jnp.cumsum(x, axis=int(rng.integers(2))),
    lambda rng, x, y: jnp.flip(x, axis=int(rng.integers(2))),
    lambda rng, x, y: x / (1 + x.sum(int(rng.integers(2)), keepdims=True)),
    lambda rng, x, y: x - x.mean(int(rng.integers(2)), keepdims=True),
    lambda rng, x, y: x.sum(int(rng.integers(2)), keepdims=True) * y,
    lambda rng, x, y: x @ y.T @ y,
)


def of_axes(rng):
    return AXES[int(rng.integers(len(AXES)))]


def of_one_axis(rng):
    return NAMES[int(rng.integers(2))]


MEETINGS = (
    lambda rng, x, y: lax.psum(x, of_axes(rng)),
    lambda rng, x, y: lax.psum(x, of_axes(rng)),
    lambda rng, x, y: (
        lax.psum(x.sum(int(rng.integers(2)), keepdims=True), of_axes(rng)) * y
    ),
    lambda rng, x, y: lax.psum(x.sum(), of_axes(rng)) * y,
    lambda rng, x, y: y / (1 + lax.psum((x * x).sum(), of_axes(rng))),
    lambda rng, x, y: lax.pmean(x, of_axes(rng)),
    lambda rng, x, y: (
        lax.pmax(x.max(int(rng.integers(2)), keepdims=True), of_axes(rng)) + y
    ),
    lambda rng, x, y: lax.all_gather(
        x, of_axes(rng), axis=int(rng.integers(2)), tiled=True
    ),
    lambda rng, x, y: lax.psum_scatter(
        x, of_axes(rng), scatter_dimension=int(rng.integers(2)), tiled=True
    ),
    lambda rng, x, y: lax.ppermute(
        x, axis := of_one_axis(rng), ring(axis, rng.random() < 0.5)
    ),
    lambda rng, x, y: lax.all_to_all(
        x, of_one_axis(rng), int(rng.integers(2)), int(rng.integers(2)), tiled=True
    ),
    lambda rng, x, y: x * (lax.axis_index(of_axes(rng)) + 1),
    lambda rng, x, y: x * lax.axis_size(of_axes(rng)),
)


def random_program(seed):
    """A function of two arrays, with its specs."""
    rng = np.random.default_rng(seed)
    specs = tuple(SPECS[i] for i in rng.integers(len(SPECS), size=2))
    is_total = rng.random() < 0.6
    out = P() if is_total else SPECS[int(rng.integers(len(SPECS)))]
    number = int(rng.integers(2, 5))

    def fn(*args):
        rng = np.random.default_rng([seed, 1])
        found = list(args)
        for _ in range(number):
            kinds = WITHIN if rng.random() < 0.5 else MEETINGS
            x, y = (found[int(i)] for i in rng.integers(len(found), size=2))
            found.append(kinds[int(rng.integers(len(kinds)))](rng, x, y))
        if not is_total:
            return found[-1]
        axes = of_axes(rng)
        place = jnp.arange(1.0, found[-1].shape[0] + 1)[:, None]
        total = found[-1] if rng.random() < 0.7 else found[-1] * place
        return lax.psum(total.sum(), axes) if rng.random() < 0.9 else total.sum()

    return fn, specs, out


def gradient_of(mapped):
    """The gradient, taken outside of the map, of a sum of the map's results."""

    def total(*args):
        found = mapped(*args)
        weights = jnp.cos(jnp.arange(found.size)).reshape(found.shape)
        return (found * weights).sum()

    return jax.grad(total, argnums=(0, 1))


def in_two_maps(seed, specs, how):
    """A map of random equations, and another of its result and of the arguments."""
    rng = np.random.default_rng([seed, 2])
    leaves = HELD[int(rng.integers(len(HELD)))]
    enters = leaves if rng.random() < 0.7 else HELD[int(rng.integers(len(HELD)))]
    counts = rng.integers(1, 4, size=2)
    is_sum, is_moved = rng.random(2) < (0.4, 0.1)
    over = of_axes(rng)

    def steps(key, found, count):
        rng = np.random.default_rng([seed, key])
        for _ in range(count):
            kinds = WITHIN if rng.random() < 0.5 else MEETINGS
            x, y = (found[int(i)] for i in rng.integers(len(found), size=2))
            found.append(kinds[int(rng.integers(len(kinds)))](rng, x, y))
        return found[-1]

    def first(*args):
        found = steps(3, [*args], counts[0])
        return found.sum(0, keepdims=True) if is_sum else found

    def second(held, *args):
        found = steps(4, [*args, held], counts[1])
        return lax.psum((found * held).sum(), over)

    def fn(*args):
        held = jax.shard_map(first, in_specs=specs, out_specs=leaves, **how)(*args)
        held = jnp.roll(held, 1, 0) if is_moved else held
        ins = (enters, *specs)
        return jax.shard_map(second, in_specs=ins, out_specs=P(), **how)(held, *args)

    return fn


def maker(seed, growing, form="map"):
    fn, specs, out = random_program(seed)

    def make(devices):
        shape = growing[NUMBERS.index(len(devices))]
        found = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        how = {"mesh": Mesh(found, NAMES), "check_vma": False}
        if form == "two maps":
            return in_two_maps(seed, specs, how), ARGS
        mapped = jax.shard_map(fn, in_specs=specs, out_specs=out, **how)
        return (mapped if form == "map" else gradient_of(mapped)), ARGS

    return make


def answer_of(make):
    """Whether a program is proved; None if it has no such shapes or is refused."""
    try:
        for number in NUMBERS:
            fn, args = make(jax.devices()[:number])
            jax.eval_shape(fn, *args)
    except (TypeError, ValueError, AssertionError, ZeroDivisionError, IndexError):
        return None
    except NotImplementedError:  # `pmax` has no derivative
        return None
    try:
        return tj.testing.prove(make, devices=NUMBERS).unproved == {}
    except tj.ReplicationError:
        return False


def is_the_same(make):
    with jax.enable_x64(True):  # so that terms that cancel are not taken for others
        programs = [make(jax.devices()[:number])[0] for number in NUMBERS]
        args = [x.astype(np.float64) for x in ARGS]
        one, *others = [jax.tree.leaves(jax.jit(fn)(*args)) for fn in programs]
    pairs = [(x, y) for other in others for x, y in zip(other, one, strict=True)]
    return all(np.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in pairs)


def tally_of(seeds, form="map"):
    """How often programs are proved and the same, and which are proved and are not."""
    tally = collections.Counter()
    wrong = []
    for seed in seeds:
        make = maker(seed, GROWING[seed % len(GROWING)], form)
        is_proved = answer_of(make)
        if is_proved is None:
            tally["no program"] += 1
        elif not is_proved:
            tally["not proved"] += 1
        elif is_the_same(make):
            tally["proved"] += 1
        else:
            wrong.append(seed)
    return tally, wrong


@pytest.mark.slow
def test_no_random_program_is_wrongly_proved():
    tally, wrong = tally_of(range(40))
    assert not wrong
    assert tally["proved"] >= 1 and tally["not proved"] >= 8, tally


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1400, 100))
def test_no_random_program_of_many_is_wrongly_proved(start):
    tally, wrong = tally_of(range(start, start + 100))
    assert not wrong
    assert tally["proved"] >= 3, tally


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gradient", "two maps"])
def test_no_random_program_of_two_maps_is_wrongly_proved(form):
    """The gradient of a map runs a second map, of what the first has left."""
    tally, wrong = tally_of(range(200), form)
    assert not wrong
    assert tally["proved"] >= 1, tally
