"""Prove, without a run, that the towers' merged results equal those of one tower.

The proof gets one tower's program for several numbers of towers, on one global batch.
It walks the programs in pairs, side by side. The walk finds the kind of each result,
and the kind says whether the result is merged to the same value for both numbers.

A proof holds for all values of the inputs, in real arithmetic. It also holds for the
derivative, unless the user wrote the derivative as a custom_jvp or custom_vjp: each
rule here holds for derivatives, too, and none uses that two values cancel. The one
exception is a mean over a tower's rows that is multiplied by their number; see
`guards`.

Sums of integers of 32 bits and more are assumed to fit. If several rows have the
largest value, its derivative is one of several possible ones, and may depend on the
split.
"""

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from towerjax.jaxprs.flow import inner_programs
from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.sites import user_line
from towerjax.prover.equality.answers.answer import Merge as Merge
from towerjax.prover.equality.answers.answer import (
    ProvedResult,
    answer_for,
    answer_for_table_rows,
)
from towerjax.prover.equality.answers.nouns import NOUNS_OF_TOWERS
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.kinds.constants import size_of_rows
from towerjax.prover.equality.kinds.equation_pair import (
    ProgramsDifferError,
    Sizes,
    failed,
)
from towerjax.prover.equality.kinds.kinds import (
    ZERO,
    InPadding,
    Kind,
    TowerId,
    Unknown,
    Valid,
    copy,
    rows,
)
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.loops import loops, maps  # noqa: F401
from towerjax.prover.equality.rules import (  # noqa: F401
    choices,
    elementwise,
    indexing,
    meetings,
    shapes,
    sums,
)
from towerjax.prover.equality.walk.walk import kinds_of_results


class Given(enum.Enum):
    """The ways in which towers get an input of their program."""

    REPLICATED = "the same on all towers"
    ROWS = "the tower's rows of the batch, along dim 0"
    VALID = "the number of its rows without padding"
    TOWER_ID = "the number of the tower"
    PER_TOWER = "a per-tower value"
    # A micro-batch's keys and row indices start from this number. They are right from
    # any start, so the number is treated as 0.
    MICRO_BATCH = "the number of a tower's micro-batch"


class TowerProgram(NamedTuple):
    """The program of one tower, for a number of towers and of rows.

    Attributes:
      jaxpr: The closed jaxpr.
      towers: The number of towers T. Each micro-batch of a tower counts as a tower.
      rows: The number of rows of one tower or micro-batch.
      micro_batches: The number of micro-batches of a tower.
    """

    jaxpr: ClosedJaxpr
    towers: int
    rows: int
    micro_batches: int = 1


@dataclasses.dataclass(frozen=True)
class MergedLeaf:
    """A result of a tower's program, and how it is merged.

    Attributes:
      name: Its name in the answer.
      merge: How the towers' values become one.
      weight: For a MEAN, the index of the result that it is divided by.
      becomes: For a PER_TOWER, the index of the input that it becomes in the next
        step, if all towers have the same value in the first step.
      indices: For TABLE_ROWS, the index of the result that holds the rows' indices.
      state: The name of the metric state of which it is a field; "" if of none.
    """

    name: str
    merge: Merge
    weight: int | None = None
    becomes: int | None = None
    indices: int | None = None
    state: str = ""


@dataclasses.dataclass(frozen=True)
class Equality:
    """The result of the proof for one leaf.

    Attributes:
      leaf: The leaf's name.
      says: Proved, refuted or unknown; the member equals that word.
      why: The reason, with a line of the program, if the leaf is refuted or unknown.
      advice: What to write instead, if the leaf is refuted.
      state: The name of the metric state of which it is a field; "" if of none.
      reason: The typed reason, if it is unknown for one of these.
    """

    leaf: str
    says: Says
    why: str = ""
    advice: str = ""
    state: str = ""
    reason: Reason | None = None

    def __str__(self) -> str:
        return ": ".join(x for x in (self.leaf, self.says, self.why) if x)


_JOINED = (Merge.ROWS, Merge.TABLE_ROWS)
_WORSE_LAST = tuple(Says)
_AS_EXAMPLE = InPadding.AS_EXAMPLE
_OF_EACH_TOWER = Unknown(why="it depends on a per-tower value", reason=Reason.PER_TOWER)
_INPUTS = {
    Given.REPLICATED: copy(),
    Given.ROWS: rows().replace(in_padding=_AS_EXAMPLE),
    Given.TOWER_ID: TowerId(in_padding=_AS_EXAMPLE),
    Given.MICRO_BATCH: ZERO,
    Given.PER_TOWER: _OF_EACH_TOWER,
}


def equal_to_one_tower(
    programs: Sequence[TowerProgram],
    inputs: Sequence[Given],
    outputs: Sequence[MergedLeaf],
    *,
    axes: Sequence[str],
    padded: bool = False,
) -> list[Equality]:
    """Prove for each merged leaf that it is the same for all numbers of towers.

    Args:
      programs: The programs for two or more numbers of towers on one global batch.
        Each is compared with the one before.
      inputs: How towers get each input of the programs.
      outputs: The results of the programs, and how each is merged.
      axes: The names of the axis of all towers.
      padded: Whether the last rows of a tower may be padding. The numbers of rows must
        then not be proportional to the numbers of towers.

    Returns:
      One answer for each leaf that is not PER_TOWER: the worst of the answers of all
      pairs of programs.
    """
    try:
        pairs = _results_of_pairs(programs, inputs, outputs, axes, padded)
        answers = [_answers(programs[0].jaxpr, x, outputs, padded) for x in pairs]
    except Exception as error:  # A fault of the proof must not end a user's training.
        merged = [x for x in outputs if x.merge is not Merge.PER_TOWER]
        return [Equality(x.name, Says.UNKNOWN, failed(error)) for x in merged]
    return worst_of([x for of_pair in answers for x in of_pair])


def worst_of(equalities: Sequence[Equality]) -> list[Equality]:
    """Keep the worst answer for each leaf, in the order in which leaves appear."""
    worst_by_leaf: dict[str, Equality] = {}
    for equality in equalities:
        known = worst_by_leaf.get(equality.leaf)
        worst = -1 if known is None else _WORSE_LAST.index(known.says)
        if _WORSE_LAST.index(equality.says) > worst:
            worst_by_leaf[equality.leaf] = equality
    return list(worst_by_leaf.values())


def _results_of_pairs(
    programs: Sequence[TowerProgram],
    inputs: Sequence[Given],
    outputs: Sequence[MergedLeaf],
    axes: Sequence[str],
    padded: bool,
) -> list[list[ProvedResult]]:
    """Find what holds of the results of each pair of programs, in any step.

    A tower-local variable that all towers start with the same value stays replicated if
    a step keeps it so. To find out, all such variables are first taken as replicated
    before a step. Those that the step does not keep replicated are then taken as per
    tower, and this is repeated until nothing changes.
    """
    pairs = [*itertools.pairwise(programs)]
    stays = {x.becomes for x in outputs} - {None}
    while True:
        known = [Given.REPLICATED if i in stays else x for i, x in enumerate(inputs)]
        results = [_results_of_pair(pair, known, axes, padded) for pair in pairs]
        columns = zip(outputs, zip(*results, strict=True), strict=False)
        after = {
            x.becomes for x, of_pairs in columns if all(y.is_the_same for y in of_pairs)
        }
        if stays <= after:
            return results
        stays &= after


def _results_of_pair(
    pair: Sequence[TowerProgram],
    inputs: Sequence[Given],
    axes: Sequence[str],
    padded: bool,
) -> list[ProvedResult]:
    """Find what holds of the results for two numbers of towers."""
    # A program of one row is the second, as in the lemmas of the rules.
    first, second = sorted(pair, key=lambda program: program.rows == 1)
    numbers = [(x.towers, x.rows, x.micro_batches) for x in (first, second)]
    towers, rows_each, micro_batches = zip(*numbers, strict=True)
    sizes = Sizes(towers, rows_each, padded, micro_batches)
    ins = kinds_of_inputs(inputs, sizes)
    kinds = kinds_of_results((first.jaxpr, second.jaxpr), ins, sizes, axes)
    avals = zip(first.jaxpr.out_avals, second.jaxpr.out_avals, strict=True)
    return [
        ProvedResult(value, _times_rows(sizes, *both), _is_of_one_shape(sizes, *both))
        for value, both in zip(kinds, avals, strict=True)
    ]


def kinds_of_inputs(inputs: Sequence[Given], sizes: Sizes) -> list[Kind]:
    """Choose the kinds of a tower's inputs, by how towers get them."""
    numbers = Valid() if sizes.padded else size_of_rows(sizes)
    return [_INPUTS.get(x, numbers) for x in inputs]


def _answers(
    program: ClosedJaxpr,
    results: Sequence[ProvedResult],
    outputs: Sequence[MergedLeaf],
    padded: bool,
) -> list[Equality]:
    """Answer for each merged leaf, for two numbers of towers.

    ``program`` is the one whose lines the answers name.
    """
    equalities = []
    for number, (leaf, result) in enumerate(zip(outputs, results, strict=False)):
        if leaf.merge is Merge.PER_TOWER:
            continue
        if leaf.indices is not None:
            at = results[leaf.indices]
            answer = answer_for_table_rows(result.value, at, padded)
        else:
            weight = None if leaf.weight is None else results[leaf.weight].value
            has_rows = result.times_rows == 1
            answer = answer_for(leaf.merge, result.value, weight, has_rows)
        says, why, advice, has_line, reason = answer
        fits = result.is_of_one_shape or leaf.merge in _JOINED
        if says is Says.PROVED and not fits:
            says = Says.UNKNOWN
            why = "its shape depends on the split"
        if says is not Says.PROVED and not has_line:
            line = line_of_result(program, number)
            why += f", made at {line}" if line else ""
        why = NOUNS_OF_TOWERS.told(why)
        equalities.append(Equality(leaf.name, says, why, advice, leaf.state, reason))
    return equalities


def line_of_result(program: Any, number: int) -> str:
    """Find the user's line that makes the result with this index; "" if none does.

    If the equation that makes it has no line, it is the line in its inner program.
    """
    jaxpr = open_jaxpr(program)
    result = jaxpr.outvars[number]
    for maker in (x for x in jaxpr.eqns if result in x.outvars):
        if line := user_line((maker, None)):
            return line
        for inner in inner_programs(maker):
            if result in inner.results:
                return line_of_result(inner.jaxpr, inner.results.index(result))
    return ""


def _times_rows(sizes: Sizes, first: Any, second: Any) -> Fraction | None:
    """Find m if dim 0 of a result has m times a tower's rows; otherwise None."""
    if not first.shape or not second.shape:
        return None
    return sizes.times(first.shape[0], second.shape[0])


def _is_of_one_shape(sizes: Sizes, first: Any, second: Any) -> bool:
    """Return whether a result has the same shape for both numbers of towers."""
    try:
        return sizes.axes(first, second) == (None, None)
    except ProgramsDifferError:
        return False
