"""What leaves a map and enters another: its kind holds for each device's own value."""

import itertools

import jax
import jax.numpy as jnp
import lemmas
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lemmas import Draw, N, shape_on, told, with_flags
from meanings import holds

from towerjax.prover.equality import one_tower as one_tower  # registers all rules
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.kinds.joined import Joined, Places
from towerjax.prover.equality.kinds.kinds import Copy, Unknown, copy, part, rows
from towerjax.prover.equality.loops.mesh_axes import MeshAxes
from towerjax.prover.equality.walk.walk import Walk

PLACES = "places"  # an axis of the same size in both programs
TOWERS = "towers"
COUNT = 2
BOTH = (PLACES, TOWERS)
OTHER_WAY = (TOWERS, PLACES)
# One device's value: its shape and its dtype.
SHAPES = (((N, 2), "float32"), ((N,), "int32"), ((2, N), "float32"), ((24,), "float32"))
# By which spec an array leaves the first map, and by which it enters the second.
OUT = (P(BOTH), P(OTHER_WAY), P(PLACES, TOWERS), P(TOWERS, PLACES), P(None, BOTH))
OUT += (P(TOWERS), P(None, TOWERS))
SPECS = [*itertools.product(OUT, OUT)]


def in_two_maps(side, out, enters, kept=lambda x: x):
    """A program of two maps that only pass on each device's own value.

    ``kept`` is what happens to the array between both maps.
    """
    devices = np.array(jax.devices()[: COUNT * side.towers]).reshape(COUNT, -1)
    how = {"mesh": Mesh(devices, BOTH), "check_vma": False}

    def same(x):
        return x

    first = jax.shard_map(same, in_specs=P(BOTH), out_specs=out, **how)
    second = jax.shard_map(same, in_specs=enters, out_specs=P(BOTH), **how)
    return lambda x: second(kept(first(x)))


def of_specs(out, enters, world, seed, kept=lambda x: x):
    """What is said of a device's own value at the end, and whether it holds."""
    towers, own_rows = zip(*[(x.towers, x.rows) for x in world.sides], strict=True)
    axes = MeshAxes((TOWERS,), towers, frozenset(), frozenset([PLACES]))
    meshes = tuple([((PLACES, COUNT), (TOWERS, number)) for number in towers])
    places = Places((BOTH,), meshes)
    for template, dtype in SHAPES:
        shapes = [shape_on(side, template) for side in world.sides]
        runs = [jax.jit(in_two_maps(x, out, enters, kept)) for x in world.sides]
        args = [
            jax.ShapeDtypeStruct((COUNT * side.towers * shape[0], *shape[1:]), dtype)
            for side, shape in zip(world.sides, shapes, strict=True)
        ]
        try:
            programs = [jax.make_jaxpr(fn)(x) for fn, x in zip(runs, args, strict=True)]
        except ValueError:
            continue  # a dim cannot be split so
        kinds = lemmas.kinds_for(template, np.dtype(dtype), world)
        for number, known in enumerate(kinds):
            values = [((axes, own_rows), known)]
            given = Joined(
                places=places, values=tuple(values), outside=Unknown(why="nothing")
            )
            walk = Walk(Sizes(towers, towers[::-1]), (), has_keys=False)
            try:
                [end] = walk.closed(*programs, [given])
            except ProgramsDifferError:
                continue
            values = dict(end.values) if isinstance(end, Joined) else {}
            if (axes, own_rows) not in values:
                continue
            said = values[axes, own_rows]
            # Where a spec leaves the places out, all places have the same value.
            of_places = [number] * COUNT if PLACES not in str(out) else [*range(COUNT)]
            drawn = [
                Draw(world, [seed, place]).values(known, shapes, dtype)
                for place in of_places
            ]
            sides = zip(runs, zip(*drawn, strict=True), strict=True)
            results = []
            for run, own in sides:
                joined = np.concatenate([x for of_place in own for x in of_place])
                found = np.split(np.asarray(run(joined)), COUNT * len(own[0]))
                results.append(np.array(found).reshape(COUNT, -1, *found[0].shape))
            for place in range(COUNT):
                value = [x[place] for x in results]
                yield told(known), told(said), holds(said, value, world)


def found_of(specs, world="2 and 4", **kept):
    drawn = with_flags(lemmas.WORLDS[world], 0)
    return [*of_specs(*specs, drawn, 0, **kept)]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_what_is_said_of_a_device_in_the_second_map_holds(specs):
    """By one spec something is said; by two, only what holds of the array itself."""
    found = found_of(specs)
    assert not [x for x in found if x[2] is False]
    assert any(x[2] for x in found) or specs[0] != specs[1]


@pytest.mark.slow
@pytest.mark.parametrize("spec", OUT, ids=str)
def test_what_is_said_holds_in_another_world(spec):
    found = found_of((spec, spec), "1 and 3")
    assert not [x for x in found if x[2] is False]
    assert any(x[2] for x in found)


BETWEEN = {
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "reversed": lambda x: x[::-1],
    "sorted": lambda x: jnp.sort(x, 0),
    "negative": lambda x: -x,
    "added": lambda x: x + x.sum(),
    "chosen": lambda x: jnp.where(x > 0, x, 0),
    "scanned": lambda x: lax.scan(lambda c, v: (c, v + c), 0 * x[0], x)[1],
    "moved by a scan": lambda x: lax.scan(lambda c, v: (v, c), 0 * x[-1], x)[1],
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda _, x: x[::-1], x),
    "in a branch": lambda x: lax.cond(x.sum() > 0, jnp.negative, jnp.abs, x),
}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_nothing_is_said_of_what_changes_between_both_maps(name):
    world = with_flags(lemmas.WORLDS["2 and 4"], 0)
    spec = P(BOTH)
    assert not [*of_specs(spec, spec, world, 0, kept=BETWEEN[name])]


def test_an_array_that_leaves_out_some_towers_has_not_all_values():
    """One axis of the towers is not named, and each device has a value of its own."""

    def program(size):
        devices = np.array(jax.devices()[: size**2]).reshape(size, size)
        how = {"mesh": Mesh(devices, ("a", "b")), "check_vma": False}
        both = P(("a", "b"))

        def own(x):
            return x.sum(0)

        first = jax.shard_map(own, in_specs=both, out_specs=P("a"), **how)
        second = jax.shard_map(
            lambda x: lax.psum(x, ("a", "b")), in_specs=P("a"), out_specs=P(), **how
        )
        return jax.make_jaxpr(lambda x: second(first(x)))(np.ones((8, 2), np.float32))

    walk = Walk(Sizes((1, 4), (4, 1)), (), has_keys=False)
    [found] = walk.closed(program(1), program(2), [copy()])
    assert isinstance(found, Unknown)


def test_an_array_of_a_size_that_fits_no_kind_is_unknown():
    """Also one that a call holds, which no equation inside of it makes."""

    def call(size):
        held = jax.make_jaxpr(lambda: np.ones(size, np.float32))()
        closed = jax.make_jaxpr(jax.jit(lambda: jnp.zeros(size)))()
        [eqn] = closed.jaxpr.eqns
        eqn = eqn.replace(params=eqn.params | {"jaxpr": held})
        return closed.replace(jaxpr=closed.jaxpr.replace(eqns=[eqn]))

    walk = Walk(Sizes((1, 2), (8, 4)), (), has_keys=False)
    [found] = walk.closed(call(3), call(5), [])
    assert isinstance(found, Unknown)
    [found] = walk.closed(call(3), call(3), [])
    assert isinstance(found, Copy)


def kind_of(first, second, *ins):
    """What a walk of two functions of numbers says, for 1 and 2 towers."""
    shapes = [jax.ShapeDtypeStruct((), np.float32)] * len(ins)
    programs = [jax.make_jaxpr(fn)(*shapes) for fn in (first, second)]
    walk = Walk(Sizes((1, 2), (8, 4)), ["towers"], has_keys=False)
    [found] = walk.closed(*programs, ins)
    return found


# What one device and two compute of numbers, and the power of D that is in the result.
DIVIDED = {
    "by the devices": (lambda x: x * 3, lambda x: x / 2 * 3, -1),
    "at the end": (lambda x: x * 3, lambda x: x * 3 / 2, -1),
    "twice": (lambda x: x * 3, lambda x: x / 2 / 2 * 3, -2),
    "before another": (lambda x: x / 4 * 3, lambda x: x / 4 / 2 * 3, -1),
    "in one of two": (lambda x: x * jnp.abs(x), lambda x: x / 2 * jnp.abs(x), -1),
    "in both": (lambda x: x * x, lambda x: (y := x / 2) * y, -2),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_division_that_one_device_leaves_out_divides_by_one(name):
    first, second, power = DIVIDED[name]
    found = kind_of(first, second, copy())
    assert found == copy(power)
    for x in (0.3, -2.0):
        assert second(x) == pytest.approx(first(x) * 2.0**power)


UNLIKE = {
    "by another number": (lambda x: x * 3, lambda x: x / 5 * 3),
    "in a function": (lambda x: jnp.sin(x), lambda x: jnp.sin(x / 2)),
    "added to itself": (lambda x: x + x, lambda x: x / 2 + x),
    "by a value": (lambda x: x * 3, lambda x: x / x * 3),
    "a product": (lambda x: x * 3, lambda x: x * 2 * 3),
    "an addition": (lambda x: x * 3, lambda x: (x + 1) * 3),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_nothing_is_said_of_another_equation_that_is_left_out(name):
    first, second = UNLIKE[name]
    try:
        found = kind_of(first, second, copy())
    except ProgramsDifferError:
        return
    assert isinstance(found, Unknown)


def test_parts_and_rows_are_divided_too():
    def same(x):
        return x

    def halved(x):
        return x / 2

    assert kind_of(same, halved, part()).power == -1
    assert isinstance(kind_of(same, halved, rows()), Unknown)
