"""Values of the programs of two numbers of towers, beside what the walk says of them.

The programs run on one batch under ``vmap``, and keep each value that the walk has a
kind for. A wrong rule is seen at the equation that it judged, not where a result
happens to show it.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from meanings import World, holds, world_of

from towerjax.jaxprs.interpreter import evaluate_eqn
from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.sites import user_line
from towerjax.prover.equality import one_tower
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.kinds.kinds import (
    Unknown,
)
from towerjax.prover.equality.one_tower import Given
from towerjax.prover.equality.walk.walk import Walk

CALLS = set(
    """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr""".split()
)
# Draws of a tower's own key are others on other towers.
DRAWS = {"random_bits", "random_gamma", "random_fold_in", "random_split"}


class Recording(Walk):
    """A walk that counts the visits to each program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.visits: collections.Counter[int] = collections.Counter()

    def _run(self, first: Any, second: Any, ins: Any, scope: Any) -> Any:
        self.visits[id(open_jaxpr(first))] += 1
        return super()._run(first, second, ins, scope)


@dataclasses.dataclass
class Odd:
    """A value that has not the kind that the walk says."""

    primitive: str
    said: str
    line: str


def program_inside(eqn):
    """The program that an equation calls with its own operands, or None."""
    if eqn.primitive.name not in CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None and len(open_jaxpr(inner).invars) == len(eqn.invars):
            return inner
    return None


def walk_of(programs, inputs, axes, padded):
    """The walk of two programs, or None if they differ."""
    first, second = programs
    sizes = Sizes((first.towers, second.towers), (first.rows, second.rows), padded)
    walk = Recording(sizes, axes, has_keys=True)
    ins = one_tower.kinds_of_inputs(inputs, sizes)
    try:
        walk.closed(first.jaxpr, second.jaxpr, ins)
    except ProgramsDifferError:
        return None
    return walk


def variables(closed, walk):
    """The variables that the walk has a kind for, in the order of `run_all`.

    They are (the equation, the variable, its kind or None, whether it is drawn).
    """
    found = []

    def visit(closed, drawn):
        jaxpr = open_jaxpr(closed)
        drawn = {v for v, is_drawn in zip(jaxpr.invars, drawn, strict=True) if is_drawn}
        kinds = walk.kinds.get(id(jaxpr), {})
        kinds = kinds if walk.visits[id(jaxpr)] == 1 else {}
        for eqn in jaxpr.eqns:
            of_ins = [not isinstance(v, Literal) and v in drawn for v in eqn.invars]
            inner = program_inside(eqn)
            if inner is not None:
                of_outs = visit(inner, of_ins)
            else:
                of_outs = [any(of_ins) or eqn.primitive.name in DRAWS] * len(
                    eqn.outvars
                )
            for v, is_drawn in zip(eqn.outvars, of_outs, strict=True):
                drawn |= {v} if is_drawn else set()
                found.append((eqn, v, kinds.get(v), is_drawn))
        return [not isinstance(v, Literal) and v in drawn for v in jaxpr.outvars]

    visit(closed, [False] * len(open_jaxpr(closed).invars))
    return found


def run_all(closed, args):
    """All values of a program, in the order of `variables`."""
    found = []

    def run(closed, args):
        jaxpr = open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(x):
            return x.val if isinstance(x, Literal) else env[x]

        for eqn in jaxpr.eqns:
            ins = [read(x) for x in eqn.invars]
            inner = program_inside(eqn)
            outs = evaluate_eqn(eqn, ins) if inner is None else run(inner, ins)
            for v, x in zip(eqn.outvars, outs, strict=True):
                env[v] = x
                found.append(x)
        return [read(x) for x in jaxpr.outvars]

    run(closed, args)
    return found


def counts_of(total, towers, rows):
    """The examples of each tower of one batch; the first towers have one more."""
    counts = np.full(towers, total // towers)
    counts[: total % towers] += 1
    assert (counts <= rows).all()
    return tuple(map(int, counts))


def world_of_programs(programs, padded):
    """A batch for two programs that fits in the rows of both."""
    towers = [x.towers for x in programs]
    rows = [x.rows for x in programs]
    if not padded:
        return world_of(towers, rows)
    total = min(t * n for t, n in zip(towers, rows, strict=True)) - 1
    pairs = zip(towers, rows, strict=True)
    counts = tuple(counts_of(total, *x) for x in pairs)
    return world_of(towers, rows, counts)


def numbers_for(rng, shape, dtype):
    """Numbers that examples or parameters may have."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(0, 2, shape).astype(dtype)
    x = rng.normal(size=shape)
    return x.astype(dtype)


def arguments(programs, inputs, world, seed):
    """The arguments of both programs: one batch, and the same for all towers."""
    rng = np.random.default_rng(seed)
    avals = zip(*[x.jaxpr.in_avals for x in programs], strict=True)
    found = [[], []]
    for given, (first, second) in zip(inputs, avals, strict=True):
        if jnp.issubdtype(first.dtype, jax.dtypes.prng_key):
            each = [jax.random.key(0)] * 2
        elif given is Given.ROWS:
            each = _rows(rng, world, (first, second))
        elif given is Given.VALID:
            each = [_per_tower(x.counts, first) for x in world.sides]
        elif given is Given.TOWER_ID:
            each = [_per_tower(range(x.towers), first) for x in world.sides]
        else:
            each = [numbers_for(rng, first.shape, first.dtype)] * 2
        found[0].append(each[0])
        found[1].append(each[1])
    return found


def _per_tower(numbers, aval):
    """A number of each tower, in the shape that it has on one."""
    return np.array(numbers, aval.dtype).reshape(-1, *[1] * len(aval.shape))


def _rows(rng, world, avals):
    """The rows of one batch on both sides; padding is as examples are."""
    total = sum(world.sides[0].counts)
    batch = numbers_for(rng, (total, *avals[0].shape[1:]), avals[0].dtype)
    found = []
    for side, aval in zip(world.sides, avals, strict=True):
        own = numbers_for(rng, (side.towers, *aval.shape), aval.dtype)
        ends = np.cumsum(side.counts)
        for t, (end, count) in enumerate(zip(ends, side.counts, strict=True)):
            own[t, :count] = batch[end - count : end]
        found.append(own)
    return found


OWN = (Given.ROWS, Given.VALID, Given.TOWER_ID)


def held_values(programs, inputs, axes, padded, seed=0):
    """How many values have the kinds that the walk says, and those that have not.

    ``programs`` are two `TowerProgram` with numbers for rows. Returns None if they
    differ, or if a tower has a value that is not drawn here.
    """
    if Given.PER_TOWER in inputs or Given.MICRO_BATCH in inputs:
        return None
    walk = walk_of(programs, inputs, axes, padded)
    if walk is None:
        return None
    world = world_of_programs(programs, padded)
    args = arguments(programs, inputs, world, seed)
    runs = []
    for program, side, own in zip(programs, world.sides, args, strict=True):
        run = functools.partial(_run_on_towers, program.jaxpr, side, inputs, axes)
        runs.append(jax.device_get(jax.jit(run)(own)))
    told = [variables(x.jaxpr, walk) for x in programs]
    return _compared(told, runs, world)


def _run_on_towers(closed, side, inputs, axes, args):
    """All values of all towers ``[T, ...]``; other axes have one device."""
    of_towers, *others = axes

    def of_tower(*args):
        before = tuple(range(len(others)))
        return of_one(*[jnp.expand_dims(x, before) for x in args])

    def of_one(*args):
        return run_all(closed, args)

    for axis in others:
        of_one = jax.vmap(of_one, axis_name=axis, axis_size=1)
    in_axes = [0 if x in OWN else None for x in inputs]
    mapped = jax.vmap(of_tower, in_axes, axis_name=of_towers, axis_size=side.towers)
    found = mapped(*args)
    return [x.reshape(x.shape[:1] + x.shape[1 + len(others) :]) for x in found]


def _is_nan(x):
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(np.isnan(x).all())


def _compared(told, runs, world: World):
    counts: collections.Counter[Any] = collections.Counter()
    odd: list[Odd] = []
    for (eqn, v, known, drawn), (_, w, _, _), x, y in zip(*told, *runs, strict=True):
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        if known is None or drawn or is_key or isinstance(known, Unknown):
            continue
        if len(v.aval.shape) != len(w.aval.shape):
            continue
        if _is_nan(x) and _is_nan(y):  # 0 times it is no zero
            continue
        held = holds(known, (x, y), world, 1e-6)
        counts[type(known).__name__, held] += 1
        if held is False:
            odd.append(Odd(eqn.primitive.name, str(known), user_line((eqn, None))))
    return counts, odd
