"""Prove a step's passes equal to those of one tower: trace them, and ask the proof.

Nothing is compiled or run. Each pass is traced for several numbers of towers of one
batch; of a loss the gradient is left out where no rule of the user's says what a
derivative is.
"""

import dataclasses
import time
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr

from towerjax.check.audit.comparison import GRADIENT, RAISED_ON_OTHER_ROWS
from towerjax.check.equality.told import WHOLE_STEP, StepEquality
from towerjax.check.equality.traced_passes import (
    NOT_OF_A_SYMBOL,
    PassToProve,
    StepToProve,
    traced_passes,
)
from towerjax.collectives.ops import AllReduce, PinnedTree
from towerjax.jaxprs.equation import all_eqns, all_sites, named_axes, user_line
from towerjax.proof.equal.one_tower import (
    Equality,
    Merge,
    MergedLeaf,
    equal_to_one_tower,
    has_own_derivatives,
    worst_of,
)
from towerjax.step.plan import Plan
from towerjax.step.run.trace import Traced
from towerjax.types import Reduction


def equality_of(step: StepToProve) -> StepEquality:
    """What is proved of all leaves that a step's passes merge, and what it took."""
    start = time.perf_counter()
    leaves = tuple(equalities_of(step))
    return StepEquality(leaves, time.perf_counter() - start)


def equalities_of(step: StepToProve) -> list[Equality]:
    """What is proved of each leaf that a step's passes merge.

    Args:
      step: The step.

    Returns:
      An answer for each leaf; one for the whole step where it cannot be traced for
      other numbers of rows. What is proved with a symbol for the rows of a tower holds
      for any number of them; else it is proved for numbers that the step may have.
    """
    if why := _why_not_traced(step):
        return _of_whole_step(why)
    try:
        found = _equalities(step, of_symbol=True)
    except NOT_OF_A_SYMBOL:
        found = []
    if found and all(x.says == "proved" for x in found):
        return found
    try:
        of_numbers = _equalities(step, of_symbol=False)
    except RAISED_ON_OTHER_ROWS as error:
        why = f"with other rows it raises {type(error).__name__}: {error}"
        return found or _of_whole_step(why.splitlines()[0])
    proved = {x.leaf: x for x in found if x.says == "proved"}
    merged = [proved.get(x.leaf, x) for x in of_numbers]
    return merged or _of_whole_step(
        "its towers merge nothing: each has what it returns"
    )


def _of_whole_step(why: str) -> list[Equality]:
    """Nothing is known of any leaf."""
    return [Equality(WHOLE_STEP, "unknown", why)]


def _why_not_traced(step: StepToProve) -> str:
    """Why nothing is traced of a step; "" if something is."""
    if not step.plan.passes.each:
        return "each call of it runs several steps"
    ops = step.strategy.cross_tower_ops
    if not isinstance(ops, AllReduce | PinnedTree):
        return f"its sums over towers are those of {type(ops).__name__}"
    return step.plan.passes.why_not_proved


def _equalities(step: StepToProve, *, of_symbol: bool) -> list[Equality]:
    whole = step.plan.passes
    found = list[Equality]()
    if whole.is_of_one_loss:
        alone = whole.changed(differentiates=False)
        traced = traced_passes(step, alone, of_symbol=of_symbol)
        found = _of_passes(traced, step)
        programs = [x for each in traced for x in each.programs]
        if not any(has_own_derivatives(x.jaxpr) for x in programs):
            return found
    traced = traced_passes(step, whole, of_symbol=of_symbol)
    return worst_of(found + _of_passes(traced, step))


def line_of_own_devices(traced: Traced) -> str:
    """Where a tower's own devices compute in a `shard_map`; "" if they do not."""
    sites = [site for x in traced.passes for site in all_sites(x.towers.jaxpr)]
    lines = [user_line(x) for x in sites if x[0].primitive.name == "shard_map"]
    return f"at {lines[0]}" if lines else ""


def _of_passes(traced: Sequence[PassToProve], step: StepToProve) -> list[Equality]:
    """The answers for all passes; those for a later one hold if those before it do."""
    found = []
    for number, each in enumerate(traced, 1):
        if why := _why_not_walked(each):
            equalities = [
                Equality(x.name, "unknown", why)
                for x in each.outputs
                if x.merge is not Merge.PER_TOWER
            ]
        else:
            equalities = _asked(each, each.outputs, step)
            read = "" if number < len(traced) else _read_in_parts(step.plan)
            equalities = _with_sums(equalities, each, step, read)
            equalities = [_with_reduction(x, each) for x in equalities]
        prefix = f"pass {number}: " if len(traced) > 1 else ""
        found += [dataclasses.replace(x, leaf=prefix + x.leaf) for x in equalities]
        if number < len(traced) and any(x.says != "proved" for x in equalities):
            rest = [f"pass {i}" for i in range(number + 1, len(traced) + 1)]
            why = f"what pass {number} merges is not proved"
            return found + [Equality(name, "unknown", why) for name in rest]
    return found


def _asked(
    each: PassToProve, outputs: Sequence[MergedLeaf], step: StepToProve
) -> list[Equality]:
    given = each.programs, each.inputs, outputs
    return equal_to_one_tower(*given, axes=each.axes, padded=step.padded)


_BARE = {
    Reduction.SUM: "adds up what towers return: return a sum over a tower's rows",
    Reduction.MEAN: "averages what towers return: return a mean over a tower's rows",
}
_OR_A_MEAN = (
    ", or tj.Weighted.mean(losses, tower.weight), which needs no loss_reduction."
)


def advice_on_bare_loss(how: Reduction) -> str:
    """What a bare loss has to be, of which ``loss_reduction=how`` was said."""
    return f"loss_reduction=tj.{how} {_BARE[how]}{_OR_A_MEAN}"


def _with_reduction(equality: Equality, each: PassToProve) -> Equality:
    """A refusal of a bare loss, with what its user said that it is."""
    how = each.loss_reduction
    is_loss = equality.leaf.startswith(("loss", GRADIENT))
    if how is None or not is_loss or equality.says != "refuted":
        return equality
    return dataclasses.replace(equality, advice=advice_on_bare_loss(how))


_READ_IN_PARTS = (
    "its value is the same, and its sum and its weight, which may be read alone, are"
    " not: return tj.Weighted.mean(values, tower.weight)"
)


def _read_in_parts(plan: Plan) -> str | None:
    """How names begin of means whose sum may be read alone; None: of no mean."""
    if not plan.accepts:
        return None
    return "extra" if plan.keeps_local else ""  # update_extra is given that


def _with_sums(
    found: Sequence[Equality], each: PassToProve, step: StepToProve, read: str | None
) -> list[Equality]:
    """The answers, where of means so named sum and weight have to be the same, too."""
    leaves = each.outputs
    pairs = [
        (x.name, leaves[x.weight].name)
        for x in leaves
        if x.weight is not None and read is not None and x.name.startswith(read)
    ]
    parts = {name for pair in pairs for name in pair}
    if not parts:
        return [*found]
    merges = [Merge.SUM if x.name in parts else Merge.PER_TOWER for x in leaves]
    alone = [MergedLeaf(x.name, how) for x, how in zip(leaves, merges, strict=True)]
    same = {x.leaf for x in _asked(each, alone, step) if x.says == "proved"}
    odd = {pair[0] for pair in pairs if not same.issuperset(pair)}
    return [
        Equality(x.leaf, "unknown", _READ_IN_PARTS)
        if x.leaf in odd and x.says == "proved"
        else x
        for x in found
    ]


def _why_not_walked(each: PassToProve) -> str:
    """Why nothing can be said of a pass; "" if something can."""
    if not each.has_same_leaves:
        return "towers return other leaves for another number of towers"
    if each.in_micro_batches and any(_meets(x.jaxpr, each.axes) for x in each.programs):
        return "towers meet, of the rows of one micro-batch each"
    return ""


def _meets(jaxpr: ClosedJaxpr, axes: Sequence[str]) -> bool:
    """Whether towers communicate."""
    calls = [x for x in all_eqns(jaxpr) if x.primitive.name != "axis_index"]
    return any({*named_axes(x)} & {*axes} for x in calls)
