"""Prove that the results of any JAX program do not depend on some number.

The number is that of its devices, or of its micro-batches. The program is traced for
several such numbers, and each two traces are walked side by side; see
`towerjax.prover.equality`. Nothing is compiled or run.

Reasons use the noun for what is counted; see `towerjax.prover.equality.answers.nouns`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from towerjax.jaxprs.flow import is_ref
from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.equality.answers.causes import Causes
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.kinds.equation_pair import (
    ProgramsDifferError,
    Sizes,
    failed,
)
from towerjax.prover.equality.kinds.joined import Joined
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Kind,
    TowerRows,
    Unknown,
    Zero,
    copy,
)
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.kinds.stacked import Stacked
from towerjax.prover.equality.one_tower import Equality, line_of_result, worst_of
from towerjax.prover.equality.walk.walk import Walk
from towerjax.prover.programs.traced import (
    ARRAY_TYPES,
    TracedProgram,
    is_iterator,
    state_places,
    traced_arrays,
)
from towerjax.prover.programs.words import Words
from towerjax.types.refusals import listed
from towerjax.types.trees import key_data, named_leaves


class MadeProgram(NamedTuple):
    """A program that was made for some number of devices or micro-batches.

    Attributes:
      traced: Its trace.
      args: The arguments that it was traced with.
      unseen: The names of values that it changes in place, where the trace does not
        show the change.
      splits_draws: Its random draws that depend on the number of shards.
    """

    traced: TracedProgram
    args: Sequence[Any]
    unseen: Sequence[str] = ()
    splits_draws: Sequence[str] = ()


def equal_for_all(programs: Mapping[int, MadeProgram], words: Words) -> list[Equality]:
    """Prove for each result that it is the same for all of these numbers.

    Args:
      programs: The program for each number, with the same global arguments.
      words: The words for what is counted.

    Returns:
      The proof's answer for each numeric result: the worst of all numbers. Each number
      is compared with the one before it, and if that does not answer, with the first.
    """
    answers = list[Equality]()
    first, *others = sorted(programs)
    before = first
    for number in others:
        found = _of_pair({x: programs[x] for x in (before, number)}, words)
        if before != first and any(x.says is Says.UNKNOWN for x in found):
            again = _of_pair({x: programs[x] for x in (first, number)}, words)
            known = {x.leaf: x for x in again if x.says is not Says.UNKNOWN}
            unknown = {x.leaf for x in found if x.says is Says.UNKNOWN}
            found = [known.get(x.leaf, x) if x.leaf in unknown else x for x in found]
        answers += found
        before = number
    return worst_of(answers)


def _of_pair(programs: Mapping[int, MadeProgram], words: Words) -> list[Equality]:
    """Prove the results for a pair of numbers."""
    first, second = programs.values()
    leaves = _named_results(first)
    try:
        _refuse_unlike(first, second)
        of_results = _said_of_results(programs, words)
    except ProgramsDifferError as error:
        why = words.of_unknown(str(error), error.reason, None)
        of_results = [(Says.UNKNOWN, why)] * len(leaves)
    except Exception as error:  # A fault of the proof must not end a user's check.
        of_results = [(Says.UNKNOWN, failed(error))] * len(leaves)
    advice = _advice_of_meshes(programs)
    if advice:
        of_results = [
            (says, f"{why}; {advice}" if says is Says.UNKNOWN else why)
            for says, why in of_results
        ]
    return [
        Equality(name, says, words.nouns.told(why))
        for (name, x), (says, why) in zip(leaves, of_results, strict=True)
        if isinstance(x, jax.ShapeDtypeStruct)
    ]


def _advice_of_meshes(programs: Mapping[int, MadeProgram]) -> str:
    """Say which meshes to list if several axes grow at once; "" if one axis does.

    Axes that grow at once are proved only if they act as one.
    """
    meshes = [_first_mesh(x.traced.jaxpr) for x in programs.values()]
    first, second = [x or {} for x in meshes]
    if [*first] != [*second]:
        return ""
    sizes = [*first.values()]
    steps = [tuple(sizes)]
    for i, name in enumerate(first):
        if second[name] != sizes[i]:
            sizes[i] = second[name]
            steps.append(tuple(sizes))
    if len(steps) < 3 or any(second[x] < size for x, size in first.items()):
        return ""
    return f"list the meshes as {', '.join(map(str, steps))}, so that one axis grows"


def _first_mesh(jaxpr: ClosedJaxpr) -> Mapping[str, int] | None:
    """Find the sizes of the mesh axes of a program's first map, or None."""
    maps = (x for x in all_eqns(jaxpr) if x.primitive.name == "shard_map")
    return next((x.params["mesh"].shape for x in maps), None)


def _refuse_unlike(first: MadeProgram, second: MadeProgram) -> None:
    """Raise if two programs differ in arguments or results, or have side effects."""
    results = [[name for name, _ in _named_results(x)] for x in (first, second)]
    arrays = [[*traced_arrays(x.args)] for x in (first, second)]
    if odd := {*arrays[0]} ^ {*arrays[1]}:
        why = f"{listed(sorted(odd))} is an array for some numbers of {{many}} only"
        raise ProgramsDifferError(why, Reason.OTHER_ARGUMENTS)
    if odd := {*results[0]} ^ {*results[1]}:
        why = f"{listed(sorted(odd))} is returned for some numbers of {{many}} only"
        raise ProgramsDifferError(why)
    if results[0] != results[1] or arrays[0] != arrays[1]:
        raise ProgramsDifferError(
            "arguments or results have another order for another number of {many}"
        )
    for program in (first, second):
        jaxpr = program.traced.jaxpr.jaxpr
        if any(map(is_ref, (*jaxpr.constvars, *jaxpr.invars))):
            raise ProgramsDifferError(
                "the function takes a Ref, which it may write, and the proof does not"
                " follow writes"
            )
        if program.unseen:
            raise ProgramsDifferError(
                f"it changes {listed(program.unseen)} in place, which the proof does"
                " not follow"
            )
        numbers = [name for name, x in _of_states(program) if _is_python_number(x)]
        if numbers:
            raise ProgramsDifferError(
                f"{listed(numbers)} comes back as a result but is a Python number, of"
                " which the trace has only one value. Pass an array"
            )
        for why in program.splits_draws:
            raise ProgramsDifferError(why)


def _named_results(program: MadeProgram) -> list[tuple[str, Any]]:
    """Name the values that a program returns or changes in place."""
    returned = named_leaves("result", program.traced.out, is_iterator)
    return [*returned, *program.traced.changed.items()]


def _of_states(program: MadeProgram) -> list[tuple[str, Any]]:
    """List the leaves of arguments that come back as results, with their names."""
    places = state_places(program.args, program.traced.out)
    trees = [(f"args[{i}]", program.args[i]) for i in places]
    return [x for name, tree in trees for x in named_leaves(name, tree, is_iterator)]


def _is_python_number(x: Any) -> bool:
    return isinstance(x, int | float | complex) and not isinstance(x, ARRAY_TYPES)


def _said_of_results(
    programs: Mapping[int, MadeProgram], words: Words
) -> list[tuple[Says, str]]:
    """Answer for each value that the program returns, and say why."""
    towers: Any = tuple(programs)
    first, second = programs.values()
    walk = Walk(Sizes(towers, towers[::-1]), (), has_keys=False)
    jaxprs = first.traced.jaxpr, second.traced.jaxpr
    one = traced_arrays(first.args)
    two = traced_arrays(second.args)
    ins = [_argument(walk, name, one[name], two[name]) for name in one]
    found = walk.closed(*jaxprs, ins)
    kinds = [x.outside if isinstance(x, Joined) else x for x in found]
    avals = zip(*[x.out_avals for x in jaxprs], strict=True)
    causes = Causes(walk.kinds, jaxprs[0])
    answers = []
    for number, (value, both) in enumerate(zip(kinds, avals, strict=True)):
        says, why = _said_of_result(walk.sizes, value, *both)
        if says is Says.REFUTED:
            why = words.of_power(value.power, causes.of_power(number))
        elif isinstance(value, Unknown):
            why = words.of_unknown(why, value.reason, causes.of_unknown(number))
        elif says is Says.UNKNOWN:
            line = line_of_result(jaxprs[0], number)
            why += f", made at {line}" if line else ""
        answers.append((says, why))
    return answers


def _argument(walk: Walk, name: str, first: Any, second: Any) -> Kind:
    """Compare an argument of both programs: replicated, or all devices' values.

    ``first`` and ``second`` are the argument in the two programs.
    """
    why = f"{name} is a different array for another number of {{many}}"
    unknown = Unknown(why=why, reason=Reason.OTHER_ARGUMENTS)
    try:
        walk.sizes.axes(first, second)
    except ProgramsDifferError:
        why = f"{why}: {first.shape}, {second.shape}"
        raise ProgramsDifferError(why, Reason.OTHER_ARGUMENTS) from None
    if first.dtype != second.dtype:
        return unknown
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in (first, second)):
        return copy() if first.shape == second.shape else unknown
    if not all(getattr(x, "is_fully_addressable", True) for x in (first, second)):
        return unknown
    a, b = [np.asarray(key_data(x)) for x in (first, second)]
    if a.shape == b.shape:
        value = walk.constant(a, b)
        # An argument that is larger for more devices is another input for each number
        # of devices. That is no mistake, so what depends on it is not refuted.
        is_same = not isinstance(value, Unknown) and not value.power
        return _any_value(value) if is_same else unknown
    if (len(a), len(b)) != walk.sizes.towers:
        return unknown
    if a.shape[1:] == b.shape[1:]:
        value = walk.constant(a[0], b[0])
        are_copies = all((x == x[:1]).all() for x in (a, b))
        if isinstance(value, Unknown) or value.power or not are_copies:
            return Unknown(why=f"each {{one}} is given a different {name}")
        return Stacked(_any_value(value).power, of=Copy)
    rows = [x.reshape(-1, *x.shape[2:]) for x in (a, b)]
    if rows[0].shape == rows[1].shape and np.array_equal(rows[0], rows[1]):
        return Stacked(of=TowerRows)
    return unknown


def _any_value(value: Kind) -> Kind:
    """Drop a value's number, because another call may have another one."""
    return copy() if isinstance(value, Zero) else copy(value.power)


def _said_of_result(
    sizes: Sizes, value: Kind, first: Any, second: Any
) -> tuple[Says, str]:
    """Answer for a value that the program returns, and say why.

    ``first`` and ``second`` are the value's types in the two programs.
    """
    if isinstance(value, Unknown):
        return Says.UNKNOWN, value.why
    try:
        own_rows, stacked = sizes.axes(first, second)
    except ProgramsDifferError as error:
        return Says.UNKNOWN, str(error)
    is_stacked = stacked == 0 and (first.shape[0], second.shape[0]) == sizes.towers
    if isinstance(value, Stacked):
        wanted = {None: Copy, 1: TowerRows}.get(own_rows)
        fits = is_stacked and value.of is wanted
        if not fits:
            return Says.UNKNOWN, f"each {{one}} returns {value.of.name} of its own"
    elif isinstance(value, Zero):
        fits = own_rows is None and (stacked is None or is_stacked)
    else:
        fits = isinstance(value, Copy) and (own_rows, stacked) == (None, None)
    if not fits:
        return Says.UNKNOWN, "its shape depends on the number of {many}"
    is_power = not isinstance(value, Zero) and bool(value.power)
    return (Says.REFUTED, "") if is_power else (Says.PROVED, "")
