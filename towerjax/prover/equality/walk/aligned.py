"""Give two programs equations that pair, where JAX traced others for a dim of 1.

JAX leaves out a reshape, a broadcast or a division by 1 that changes nothing, and has
other forms of products and lookups for dims of size 1. So the program of a tower of one
row, or of one device, has other equations than that of several. Here it is written anew
with the equations of the other program. Each of them holds for its own values: it is
one of its own equations, or it follows from these by the laws in `numbered`.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.sites import user_line
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.walk.compared import other_params
from towerjax.prover.equality.walk.numbered import Numbered, has_law, shape_of


class Equations(NamedTuple):
    """The equations of a program, with its inputs and its results."""

    inputs: Sequence[Any]
    eqns: Sequence[JaxprEqn]
    results: Sequence[Any]


def aligned(first: Jaxpr, second: Jaxpr, sizes: Sizes) -> tuple[Equations, Equations]:
    """Write two programs so that their equations, and what these read, are pairs.

    Equations that no result needs are left out. JAX traces them, and drops them later.

    Args:
      first: A program.
      second: The program for other sizes.
      sizes: The sizes in which the two may differ.

    Raises:
      ProgramsDifferError: No way to pair them is found.
    """
    sides = [(len(x.constvars), len(x.invars), len(x.outvars)) for x in (first, second)]
    if sides[0] != sides[1]:
        raise ProgramsDifferError(
            "the program has other inputs or results for another number of {many}"
        )
    one = _needed(first)
    two = _needed(second)
    why = _why_unpaired(one, two)
    if not why and not any(map(other_params, one.eqns, two.eqns)):
        return one, two
    if (written := _written_as(one, two, sizes)) is not None:
        return written, two
    if (written := _written_as(two, one, sizes.swapped())) is not None:
        return one, written
    if why:
        raise ProgramsDifferError(why)
    return one, two


def _needed(program: Jaxpr) -> Equations:
    """Keep the equations that some result needs, and those with an effect."""
    has_effect = [eqn for eqn in program.eqns if eqn.effects]
    eqns = needed_eqns(program.eqns, program.outvars, always=has_effect)
    return Equations([*program.constvars, *program.invars], eqns, program.outvars)


def _why_unpaired(first: Equations, second: Equations) -> str:
    """Tell why two programs do not pair by position; "" if they do."""
    pairs = set(zip(first.inputs, second.inputs, strict=True))
    read = list[tuple[Any, Any]]()
    for one, two in itertools.zip_longest(first.eqns, second.eqns):
        if one is None or two is None or not _are_alike(one, two):
            odd: Any = one or two
            line = user_line((odd, None))
            at = f", at {line}" if line else ""
            return f"the program differs between numbers of {{many}}{at}"
        read += zip(one.invars, two.invars, strict=True)
        pairs.update(zip(one.outvars, two.outvars, strict=True))
    read += zip(first.results, second.results, strict=True)

    def is_pair(x: Any, y: Any) -> bool:
        is_number = isinstance(x, Literal), isinstance(y, Literal)
        return all(is_number) or (not any(is_number) and (x, y) in pairs)

    if all(is_pair(*both) for both in read):
        return ""
    return "the program reads other values for another number of {many}"


def _are_alike(one: JaxprEqn, two: JaxprEqn) -> bool:
    """Look whether two equations have one primitive and as many operands."""
    return one.primitive is two.primitive and len(one.invars) == len(two.invars)


def _written_as(program: Equations, like: Equations, sizes: Sizes) -> Equations | None:
    """Write a program with the equations of another; None if no way is found.

    Args:
      program: The program to write.
      like: The program whose equations are used, in their order.
      sizes: The sizes of ``program``, and those of ``like``.
    """
    numbered = Numbered(program.inputs, program.eqns)
    own = _OwnEquations(program.eqns, numbered)
    # The value of ``program`` for each variable of ``like``.
    value = dict(zip(like.inputs, program.inputs, strict=True))

    def of(x: Any) -> Any:
        return x if isinstance(x, Literal) else value[x]

    eqns = list[JaxprEqn]()
    for eqn in like.eqns:
        operands = [of(x) for x in eqn.invars]
        new = own.take(eqn, operands, sizes) or _made(eqn, operands, numbered)
        if new is None:
            return None
        eqns.append(new)
        value |= zip(eqn.outvars, new.outvars, strict=True)
    results = [numbered.first(x) for x in program.results]
    is_whole = all(map(_are_one, results, [of(x) for x in like.results]))
    has_effects = [x for x in eqns if x.effects] == own.with_effects
    if not (is_whole and has_effects):
        return None
    return Equations(program.inputs, eqns, results)


def _are_one(x: Any, y: Any) -> bool:
    """Return whether two results are one value, or are both numbers."""
    return x is y or (isinstance(x, Literal) and isinstance(y, Literal))


class _OwnEquations:
    """The equations of a program, each to be taken once.

    They are written with one variable for all values of a number and a shape.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], numbered: Numbered) -> None:
        self._left = defaultdict[Hashable, list[JaxprEqn]](list)
        self.with_effects = list[JaxprEqn]()
        for eqn in eqns:
            ins = [numbered.first(x) for x in eqn.invars]
            outs = [numbered.first(x) for x in eqn.outvars]
            same = eqn.replace(invars=ins, outvars=outs)
            self._left[_key(eqn, ins)].append(same)
            if eqn.effects:
                self.with_effects.append(same)

    def take(
        self, like: JaxprEqn, operands: Sequence[Any], sizes: Sizes
    ) -> JaxprEqn | None:
        """Take the next equation of these operands that may be a pair with ``like``."""
        left = self._left[_key(like, operands)]
        for i, eqn in enumerate(left):
            if _have_same_params(eqn, like) and _have_sizes(eqn, like, sizes):
                return left.pop(i)
        return None


def _key(eqn: JaxprEqn, operands: Sequence[Any]) -> Hashable:
    return eqn.primitive, *[None if isinstance(x, Literal) else x for x in operands]


def _have_same_params(one: JaxprEqn, two: JaxprEqn) -> bool:
    """Return whether two equations have the same params, and as many results.

    The param "perm" lists pairs of towers, so it differs.
    """
    has_others = {*other_params(one, two)} - {"perm"}
    return not has_others and len(one.outvars) == len(two.outvars)


def _have_sizes(one: JaxprEqn, two: JaxprEqn, sizes: Sizes) -> bool:
    """Return whether the results of two equations have sizes that may be pairs."""
    try:
        for x, y in zip(one.outvars, two.outvars, strict=True):
            if hasattr(x.aval, "shape"):
                sizes.axes(x.aval, y.aval)
    except ProgramsDifferError:
        return False
    return True


def _made(
    like: JaxprEqn, operands: Sequence[Any], numbered: Numbered
) -> JaxprEqn | None:
    """Make the equation of another program for ``operands``; None if no law fits it.

    Its result is the first value of its number and shape, if there is one.
    """
    ranks = [len(shape_of(x)) for x in operands]
    if not has_law(like) or ranks != [len(shape_of(x)) for x in like.invars]:
        return None
    ins, params = _left_out(like, operands)
    avals = [jax.ShapeDtypeStruct(shape_of(x), x.aval.dtype) for x in ins]

    def result(*ins: Any) -> Any:
        return like.primitive.bind(*ins, **params)

    try:
        [aval] = jax.make_jaxpr(result)(*avals).out_avals
    except (TypeError, ValueError):
        return None  # the operands do not fit together
    new = like.replace(invars=ins, outvars=[Var(aval)], params=params)
    numbered.add(new)
    return new.replace(outvars=[numbered.first(x) for x in new.outvars])


def _left_out(
    like: JaxprEqn, operands: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Choose operands and params with which an equation changes nothing.

    These are a division by 1, and the shapes of a reshape and a broadcast. Any other
    equation keeps what it has.
    """
    x, *others = operands
    params: dict[str, Any] = dict(like.params)
    shape = shape_of(x)
    name = like.primitive.name
    if name == "div" and isinstance(others[0], Literal):
        others = [Literal(np.ones_like(others[0].val), others[0].aval)]
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        params["shape"] = _with_ones(dims, shape, params["shape"])
    if name == "reshape":
        old = [i for i, n in enumerate(shape_of(like.invars[0])) if n != 1]
        new = [i for i, n in enumerate(params["new_sizes"]) if n != 1]
        if len(old) == len(new):
            kept = [shape[i] for i in old]
            params["new_sizes"] = _with_ones(new, kept, params["new_sizes"])
        else:
            params["new_sizes"] = shape
    return [x, *others], params


def _with_ones(
    dims: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """Make a shape of as many dims as ``shape``: 1, except for ``dims``."""
    known = dict(zip(dims, sizes, strict=True))
    return tuple(known.get(i, 1) for i in range(len(shape)))
