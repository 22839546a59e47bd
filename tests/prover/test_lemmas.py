"""Each rule of the proof of equality holds, and accepts what no other rule accepts.

That it holds is seen of values that have the kinds of its operands.
"""

import functools
import importlib
import inspect
import itertools
import pkgutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import lemmas
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from lemma_cases import CASES
from lemmas import AXIS, Draw, N, shape_on, told, with_flags
from meanings import ALL_KINDS, holds

from towerjax.prover.equality import kinds as kinds_room
from towerjax.prover.equality import loops as loops_room
from towerjax.prover.equality import one_tower as one_tower  # registers all rules
from towerjax.prover.equality import rules as rules_room
from towerjax.prover.equality.kinds import kinds, stacked
from towerjax.prover.equality.kinds.equation_pair import Scope, Sizes
from towerjax.prover.equality.kinds.kinds import (
    SIZE,
    Copy,
    FirstRow,
    FromFirstRow,
    Kind,
    Part,
    Unknown,
    Zero,
    copy,
    part,
    rows,
)
from towerjax.prover.equality.rules import elementwise
from towerjax.prover.equality.rules.rules import (
    OF_ONE_TOWER,
    RULES,
    SPECIAL,
    Registered,
)
from towerjax.prover.equality.walk.walk import Walk

# Rules whose operands cannot be drawn, and why.
OTHER_NAMES = """
    closed_call core_call custom_lin custom_vjp_call_jaxpr eval_jaxpr pjit remat remat2
    remat3 composite custom_vmap_call call_hi_primitive
""".split()  # they call a program as `jit`, `checkpoint` and `custom_vjp_call` do
AS_IT_IS = """
    copy_p device_put layout_constraint pcast preduced pvary random_clone reshard
    sharding_constraint
""".split()  # places and types: the same rule as `copy`, with the same values
OF_KEYS = """
    random_bits random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap
""".split()  # a key of a tower has no values to compare; see `test_meanings`
OF_DEVICES = ["shard_map"]  # needs devices; see `test_equal_on_devices`
OF_ONE_PROGRAM = ["platform_index"]  # of exported programs
OF_LIBRARY = ["towerjax_take"]  # see `test_sparse`
RENAMED = ["all_gather_invariant", "psum_invariant", "psum_scatter"]  # of `shard_map`
NOT_DRAWN = {*OTHER_NAMES, *AS_IT_IS, *OF_KEYS, *OF_DEVICES, *OF_ONE_PROGRAM}
# Its result is one of several that are right, and another for the same matrix.
SEVERAL_RIGHT = ["schur", "eig"]
NOT_DRAWN |= {*OF_LIBRARY, *RENAMED, *SEVERAL_RIGHT}
# Rules of what a loop does in a trip; the lemmas of `scan` hold its loops.
OF_TRIPS = """
    _sum_so_far _largest_so_far _slice_of_buffer _update_of_buffer
    _gathered_row _written_to_row _sum_of_groups _update_of_slots _written_to_slot
""".split()
# Primitives that JAX has by another name where a lemma calls them, or inside others.
INSIDE_OTHERS = """
    checkpoint expand_dims geqrf random_gamma_grad
""".split()
# Not in each JAX; they have no lemma there.
OF_SOME_VERSIONS = {"one_minus_square", "log2", "stack", "unstack", "tile", "add_any"}


def test_every_rule_has_a_lemma():
    assert RULES.keys() == CASES.keys() | NOT_DRAWN
    assert not CASES.keys() & NOT_DRAWN


def held(name, worlds, *, each_in=1, every=1):
    """The tally of a primitive's lemmas, each held in some of the worlds in turn."""
    tally = lemmas.Tally()
    for number, each in enumerate(CASES[name][::every]):
        for i in range(each_in):
            lemmas.hold(each, worlds[(number + i) % len(worlds)], number, tally)
    return tally


@pytest.mark.parametrize("name", ["mul"])
def test_what_a_rule_says_holds(name):
    tally = held(name, ["1 and 3, padded"], every=7)
    assert tally.held
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))


def is_from_first_row(lemma):
    """Whether an operand counts from a tower's first row, or is to do so."""
    kinds = {type(x) for each in lemma.kinds or () for x in each or ()}
    return FromFirstRow in kinds or kinds == {Copy, Zero, FirstRow}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", ["lt", "all_to_all", "eq", "sub"])
def test_what_is_said_of_dealt_rows_and_of_places_among_rows_holds(name):
    tally = lemmas.Tally()
    for lemma in CASES[name]:
        if name == "all_to_all" or is_from_first_row(lemma):
            for world in ("1 and 3", "2 and 4"):
                lemmas.hold(lemma, world, 0, tally)
    assert bool(tally.held) is (name != "lt")
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))


def test_a_reshape_that_changes_one_program_alone_holds():
    """``[2, b/2]`` to ``[b/2, 2]`` is no change where b is 4, and one where it is 6."""
    tally = lemmas.Tally()
    for lemma in CASES["reshape"]:
        if (lemma.shapes, lemma.dtypes) == (((2, (N, 1, 2)),), (jnp.int8,)):
            lemmas.hold(lemma, "2 and 4, padded", 0, tally)
    assert tally.held
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))


def test_the_number_of_padded_rows_is_not_known_in_micro_batches():
    """It may be that of a micro-batch, or of all of a tower's micro-batches."""
    assert Sizes((2, 4), (4, 2), True).numbers_of(SIZE) == (4, 2)
    assert Sizes((2, 4), (4, 2), True, (2, 2)).numbers_of(SIZE) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_a_rule_says_holds_in_all_worlds(name, monkeypatch):
    """And each of the primitive's rules has said something."""
    answered = set()
    ask = Registered.ask

    def noted(self, pair):
        found = ask(self, pair)
        if not all(isinstance(x, Unknown) for x in found):
            answered.add((pair.name, self))
        return found

    monkeypatch.setattr(Registered, "ask", noted)
    tally = held(name, [*lemmas.WORLDS], each_in=3)
    assert tally.held or name in OF_SOME_VERSIONS
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))
    silent = {x.rule.__name__ for x in RULES[name] if (name, x) not in answered}
    known = name in OF_SOME_VERSIONS or name in INSIDE_OTHERS
    assert known or silent <= {*OF_TRIPS}


# What is stated beside the rules.

# A function that names a kind, or changes one, states a fact of a value. Those of these
# modules are entered elsewhere: devices have `test_what_is_said_of_a_place_holds` and
# `test_equal_on_devices`, micro-batches `test_micro_batches_proved`.
OF_OTHERS = {"maps", "mesh_axes", "within", "micro_batches"}
STATES = {"replace", "times_tower"}
for name, x in (vars(kinds) | vars(stacked)).items():
    is_of_kinds = getattr(x, "__module__", "") in (kinds.__name__, stacked.__name__)
    makes_one = inspect.isfunction(x) and is_of_kinds
    if makes_one or isinstance(x, Kind) or (inspect.isclass(x) and issubclass(x, Kind)):
        STATES.add(name)


def states_a_fact(function):
    """Whether a function's code names a kind, or a function that makes one."""
    return not STATES.isdisjoint(function.__code__.co_names)


def functions_of(module):
    """The functions and methods that a module defines."""
    for x in vars(module).values():
        if getattr(x, "__module__", None) == module.__name__:
            members = vars(x).values() if isinstance(x, type) else [x]
            yield from (y for y in members if inspect.isfunction(y))


def stated_beside_the_rules():
    """The names of the functions that state a fact and are no rules, by their code."""
    of_rules = {x.rule.__code__ for each in RULES.values() for x in each}
    found = {}
    for room in (kinds_room, loops_room, rules_room):
        for info in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            module = importlib.import_module(info.name)
            for x in functions_of(module):
                is_here = info.name.rpartition(".")[2] not in OF_OTHERS
                if is_here and x.__code__ not in of_rules and states_a_fact(x):
                    found[x.__code__] = f"{info.name}:{x.__qualname__}"
    return found


def entered_by(walk, codes):
    """Which of these codes a walk of a lemma enters; none if it says nothing."""
    entered = set()

    def note(frame, event, arg):
        if frame.f_code in codes:
            entered.add(frame.f_code)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        said = walk()
    finally:
        sys.settrace(before)
    return set() if all(isinstance(x, Unknown) for x in said) else entered


def test_functions_that_state_facts_are_found():
    names = {x.rpartition(":")[2] for x in stated_beside_the_rules().values()}
    assert {"joined", "_over_rows", "Chunks.stacked", "size_of_rows"} <= names
    assert "_sum_so_far" not in names  # a rule


@pytest.mark.slow
def test_each_function_that_states_a_fact_is_entered_by_a_lemma():
    missing = stated_beside_the_rules()
    worlds = [*lemmas.WORLDS]
    numbered = [x for each in CASES.values() for x in enumerate(each)]
    np.random.default_rng(0).shuffle(numbered)  # so that few are enough
    for number, lemma in numbered:
        for walk in lemmas.walks_of(lemma, worlds[number % len(worlds)], number):
            for code in entered_by(walk, missing.keys()):
                del missing[code]
        if not missing:
            break
    assert not missing.values(), [*missing.values()]


# Which rule an equation gets.


def kinds_at(registered, place):
    """The kinds that a rule accepts for an operand."""
    is_first = place < len(registered.operands)
    accepted = registered.operands[place] if is_first else registered.every
    return {x for x in ALL_KINDS if accepted is not None and issubclass(x, accepted)}


def accept_the_same(first, second):
    """Whether there are kinds of operands that two rules accept."""
    counts = [len(x.operands) for x in (first, second)]
    for count in range(max(counts) + 2):
        places = range(count)
        if any(count < n for n in counts):
            continue
        if all(kinds_at(first, i) & kinds_at(second, i) for i in places):
            return True
    return False


def test_no_two_rules_accept_the_same_kinds():
    same = [
        (name, first.rule.__name__, second.rule.__name__)
        for name, rules in RULES.items()
        for first, second in itertools.combinations(rules, 2)
        if accept_the_same(first, second)
    ]
    assert not same


def test_two_rules_of_the_same_kinds_are_seen():
    sums = Registered(print, (Part, Part | Copy))
    assert accept_the_same(sums, Registered(print, (Part, Copy)))
    assert accept_the_same(sums, Registered(print, (), Kind))
    assert not accept_the_same(sums, Registered(print, (Copy, Part)))
    assert not accept_the_same(sums, Registered(print, (Part,)))


def test_each_kind_but_unknown_is_of_one_tower_or_special():
    of_array = {x for x in ALL_KINDS if issubclass(x, OF_ONE_TOWER | SPECIAL)}
    assert of_array == ALL_KINDS - {Unknown}
    assert not any(
        issubclass(x, OF_ONE_TOWER) and issubclass(x, SPECIAL) for x in ALL_KINDS
    )


def programs_for(fn, *shapes):
    """One tower's program for one tower of 8 rows, and for two of 4."""
    return [
        jax.make_jaxpr(functools.partial(fn, rows))(
            *[jax.ShapeDtypeStruct(x(rows), np.float32) for x in shapes]
        )
        for rows in (8, 4)
    ]


def kind_of(programs, *ins):
    """The kind of the one result of two programs."""
    walk = Walk(Sizes((1, 2), (8, 4)), ["towers"], has_keys=True)
    [found] = walk.closed(*programs, ins)
    return found


def test_a_rule_that_commutes_gets_its_operands_in_order():
    """A sum of rows so far is the first or the second operand."""

    def total(rows, y):
        return lax.scan(lambda c, y: (y + c, None), 0.0, y)[0]

    found = kind_of(programs_for(total, lambda n: (n,)), rows())
    assert isinstance(found, Part) and not found.power


def test_a_rule_takes_no_other_number_of_operands():
    with_one = Registered(print, (Part,))
    assert with_one.fits(SimpleNamespace(ins=[part()]))
    assert not with_one.fits(SimpleNamespace(ins=[part(), part()]))
    assert not with_one.fits(SimpleNamespace(ins=[]))
    with_copies = with_one._replace(every=Copy)
    assert with_copies.fits(SimpleNamespace(ins=[part(), copy()]))
    assert not with_copies.fits(SimpleNamespace(ins=[part(), part()]))


def test_a_row_is_one_in_both_programs():
    """Where the first has one row a tower, all its rows are one, and several later."""

    def fill(rows, x):
        def body(carry, _):
            i, buffer = carry
            row = lax.dynamic_index_in_dim(x, i, keepdims=True)
            buffer = lax.dynamic_update_slice(buffer, jnp.zeros_like(x), (i,))
            return (i + 1, lax.dynamic_update_slice(buffer, row, (i,))), None

        return lax.scan(body, (0, jnp.zeros_like(x)), None, length=rows)[0][1]

    shape = [jax.ShapeDtypeStruct((n,), np.float32) for n in (1, 2)]
    programs = [jax.make_jaxpr(functools.partial(fill, x.shape[0]))(x) for x in shape]
    walk = Walk(Sizes((2, 1), (1, 2)), ["towers"], has_keys=True)
    [found] = walk.closed(*programs, [rows()])
    assert isinstance(found, Unknown)


def test_a_module_that_is_loaded_again_has_the_same_rules():
    before = {name: len(rules) for name, rules in RULES.items()}
    kept = dict(RULES)
    try:
        importlib.reload(elementwise)
        assert {name: len(rules) for name, rules in RULES.items()} == before
        assert RULES["mul"] != kept["mul"]
    finally:
        RULES.update(kept)


# Collectives that also act over a still axis, which has the same size in both programs.
# A kind describes the values of the devices of one place, so it must hold for each.

PLACES = "places"
COUNT = 2
BOTH = (PLACES, AXIS)
OTHER_WAY = (AXIS, PLACES)
RING = [(i, (i + 1) % COUNT) for i in range(COUNT)]
SHAPES = ((N, 2), (N,), (2,), (), (2, N), (24,))


def gathered(x, axes, dim=0, tiled=True):
    return lax.all_gather(x, axes, axis=dim, tiled=tiled)


def dealt(x, split, joined):
    return lax.all_to_all(x, PLACES, split, joined, tiled=True)


# A function of one device's value; the shapes that it takes are tried.
FUNCTIONS = {
    "psum": lambda x: lax.psum(x, PLACES),
    "pmax": lambda x: lax.pmax(x, PLACES),
    "pmin": lambda x: lax.pmin(x, PLACES),
    "ppermute": lambda x: lax.ppermute(x, PLACES, RING),
    "all_gather": lambda x: gathered(x, PLACES),
    "all_gather along dim 1": lambda x: gathered(x, PLACES, 1),
    "all_gather, not tiled": lambda x: gathered(x, PLACES, tiled=False),
    "all_to_all": lambda x: lax.all_to_all(x, PLACES, 0, 0, tiled=True),
    "all_to_all from dim 1": lambda x: dealt(x, 0, 1),
    "all_to_all from dim 0": lambda x: dealt(x, 1, 0),
    "all_to_all there and back": lambda x: dealt(dealt(x, 0, 1), 1, 0),
    "psum_scatter": lambda x: lax.psum_scatter(x, PLACES, tiled=True),
    "psum_scatter along dim 1": lambda x: lax.psum_scatter(
        x, PLACES, scatter_dimension=1, tiled=True
    ),
    "axis_index": lambda x: x * (lax.axis_index(PLACES) + 1).astype(x.dtype),
    "psum of both": lambda x: lax.psum(x, BOTH),
    "psum of both, the other way": lambda x: lax.psum(x, OTHER_WAY),
    "pmax of both": lambda x: lax.pmax(x, BOTH),
    "pmin of both": lambda x: lax.pmin(x, OTHER_WAY),
    "all_gather of both": lambda x: gathered(x, BOTH),
    "all_gather of both, the other way": lambda x: gathered(x, OTHER_WAY),
    "all_gather of both along dim 1": lambda x: gathered(x, BOTH, 1),
    "all_gather of both, not tiled": lambda x: gathered(x, BOTH, tiled=False),
    "psum_scatter of both": lambda x: lax.psum_scatter(x, BOTH, tiled=True),
    "psum_scatter, the other way": lambda x: lax.psum_scatter(x, OTHER_WAY, tiled=True),
    "axis_index of both": lambda x: x * (lax.axis_index(BOTH) + 1).astype(x.dtype),
}
# Those of which nothing is said, whatever the operand is.
NOTHING_IS_SAID = {
    "all_gather of both, the other way",
    "all_gather of both, not tiled",
    "psum_scatter, the other way",
    "axis_index of both",
}


def programs_of(fn, template, dtype, world):
    found = []
    for side in world.sides:
        arg = jax.ShapeDtypeStruct(shape_on(side, template), dtype)
        sizes = [(PLACES, COUNT), (AXIS, side.towers)]
        found.append(jax.make_jaxpr(fn, axis_env=sizes)(arg))
    return found


def runner(closed, side):
    """The function of the values of all devices, ``[places, T, ...]``."""
    each = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
    devices = np.array(jax.devices()[: COUNT * side.towers]).reshape(COUNT, -1)

    def own(x):
        [found] = each(x[0, 0])
        return found[None, None]

    mesh = Mesh(devices, BOTH)
    specs = {"in_specs": PartitionSpec(*BOTH), "out_specs": PartitionSpec(*BOTH)}
    return jax.jit(jax.shard_map(own, mesh=mesh, check_vma=False, **specs))


def of_template(fn, template, dtype, world, seed):
    """What is said of each kind, and whether it holds for each place."""
    try:
        programs = programs_of(fn, template, dtype, world)
    except (ValueError, TypeError, IndexError, AssertionError, lemmas.NotThereError):
        return  # the function takes no such shape
    towers, rows = zip(*[(x.towers, x.rows) for x in world.sides], strict=True)
    sizes = Sizes(towers, rows, world.padded)
    shapes = [shape_on(side, template) for side in world.sides]
    scope = Scope(within=frozenset([PLACES]))
    runs = [runner(*x) for x in zip(programs, world.sides, strict=True)]
    for number, known in enumerate(lemmas.kinds_for(template, np.dtype(dtype), world)):
        walk = Walk(sizes, [AXIS], has_keys=True)
        [said] = walk.closed(*programs, [known], scope)
        if isinstance(said, Unknown):
            continue
        places = [
            Draw(world, [seed, number, place]).values(known, shapes, dtype)
            for place in range(COUNT)
        ]
        sides = zip(runs, zip(*places, strict=True), strict=True)
        results = [np.asarray(run(np.stack(x))) for run, x in sides]
        for place in range(COUNT):
            values = [x[place] for x in results]
            yield told(known), told(said), holds(said, values, world)


def found_of(name, worlds):
    """All that is said of a function in some worlds."""
    found = []
    for seed, world in enumerate(worlds):
        drawn = with_flags(lemmas.WORLDS[world], seed)
        for template, dtype in itertools.product(SHAPES, (np.float32, np.int32)):
            found += of_template(FUNCTIONS[name], template, dtype, drawn, seed)
    return found


def assert_held(name, found):
    broken = [x for x in found if x[2] is False]
    assert not broken, broken[:5]
    assert any(x[2] for x in found) is (name not in NOTHING_IS_SAID)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_of_a_place_holds(name):
    assert_held(name, found_of(name, ["2 and 4"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_of_a_place_holds_in_other_worlds(name):
    assert_held(name, found_of(name, ["1 and 3", "1 and 2, padded"]))
