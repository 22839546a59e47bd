"""Prove a step's passes equal to those of one tower: trace them, and call the proof.

Nothing is compiled or run. The step's own program is compared with the one that one
tower would run on the same batch. A loss is traced without its gradient, unless the
user wrote a derivative as a custom_jvp or custom_vjp.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from towerjax.check.equality.told import StepEquality
from towerjax.check.equality.traced_passes import (
    NotTracedError,
    PassToProve,
    StepToProve,
    traced_passes,
)
from towerjax.collectives.ops import AllReduce, PinnedTree
from towerjax.collectives.sparse_rows import is_sparse
from towerjax.jaxprs.sites import all_sites, constants_in, sites_over, user_line
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.kinds.equation_pair import failed
from towerjax.prover.equality.one_tower import (
    Equality,
    Merge,
    MergedLeaf,
    equal_to_one_tower,
    worst_of,
)
from towerjax.prover.equality.walk.own_derivatives import has_own_derivatives
from towerjax.prover.leaf_name import WHOLE_STEP, LeafPart, leaf_of, part_of, whole_pass
from towerjax.step.plan import Passes, Plan
from towerjax.step.run.trace import Traced
from towerjax.types import Reduction


def equality_of(step: StepToProve) -> StepEquality:
    """Prove all merged leaves of a step; return the results and how long it took."""
    start = time.perf_counter()
    leaves = tuple(equalities_of(step))
    seconds = time.perf_counter() - start
    return StepEquality(leaves, seconds, step.examples if step.padded else None)


def equalities_of(step: StepToProve) -> list[Equality]:
    """Prove each leaf that a step's passes merge equal to one tower's.

    Args:
      step: The step.

    Returns:
      A result for each leaf; none if each tower keeps what it returns. Or one result
      for the whole step, if it cannot be traced for one tower.
    """
    try:
        if why := _why_not_traced(step):
            return of_whole_step(why)
        return _equalities(step)
    except NotTracedError as error:
        return _of_other_rows(step) or of_whole_step(str(error))
    except Exception as error:  # A fault of the proof must not end a user's training.
        return of_whole_step(failed(error))


def _of_other_rows(step: StepToProve) -> list[Equality]:
    """Refute a step that closes over an array with an element for each row of a tower.

    It is called if the tower function raises an error for another number of rows. The
    list is empty if the step has no such array: the function may raise for another
    reason.
    """
    traced = (x for programs in step.programs for x, _ in programs.values())
    shapes = (np.shape(x) for program in traced for x in constants_in(program))
    if step.rows < 2 or not any(step.rows in x for x in shapes):
        return []
    why = (
        f"it works only for batches of {step.rows} rows; does it close over an array of"
        f" {step.rows} rows?"
    )
    advice = (
        "Make the array a leaf of the batch, so that each tower is given its own rows"
        " of it."
    )
    return [Equality(WHOLE_STEP, Says.REFUTED, why, advice)]


def of_whole_step(why: str) -> list[Equality]:
    """Give one result for all leaves of a step: unknown, with this reason."""
    return [Equality(WHOLE_STEP, Says.UNKNOWN, why)]


def _why_not_traced(step: StepToProve) -> str:
    """Tell why a step is not traced for the proof; "" if it is."""
    if not step.plan.passes.each:
        return "each call of it runs several steps"
    if any(map(is_sparse, jax.tree.leaves(step.batch, is_leaf=is_sparse))):
        return "its batch has sparse leaves, whose entries no rule counts by row"
    ops = step.strategy.cross_tower_ops
    if not isinstance(ops, AllReduce | PinnedTree):
        return f"its sums over towers are made by {type(ops).__name__}"
    return step.plan.passes.why_not_proved


def _equalities(step: StepToProve) -> list[Equality]:
    whole = step.plan.passes
    answers = list[Equality]()
    if whole.is_of_one_loss:
        alone = whole.changed(differentiates=False)
        traced, answers = _of_programs(step, alone)
        programs = [x for of_pass in traced for x in of_pass.programs]
        if not any(has_own_derivatives(x.jaxpr) for x in programs):
            return answers
    return worst_of(answers + _of_programs(step, whole)[1])


def _of_programs(
    step: StepToProve, passes: Passes
) -> tuple[list[PassToProve], list[Equality]]:
    """Trace the passes, and prove their programs."""
    traced = traced_passes(step, passes)
    return traced, _of_passes(traced, step)


def line_of_own_devices(traced: Traced) -> str:
    """Find the line of a `shard_map` over a tower's own devices; "" if none."""
    sites = [site for x in traced.passes for site in all_sites(x.towers.jaxpr)]
    lines = [user_line(x) for x in sites if x[0].primitive.name == "shard_map"]
    return f"at {lines[0]}" if lines else ""


def _of_passes(traced: Sequence[PassToProve], step: StepToProve) -> list[Equality]:
    """Prove the passes in turn, as long as earlier passes are proved.

    After a pass that is not proved, later passes are unknown, because they read its
    results.
    """
    answers = []
    for number, of_pass in enumerate(traced, 1):
        if why := _why_not_walked(of_pass):
            equalities = [
                Equality(x.name, Says.UNKNOWN, why)
                for x in of_pass.outputs
                if x.merge is not Merge.PER_TOWER
            ]
        else:
            equalities = _asked(of_pass, of_pass.outputs, step)
            is_last = number == len(traced)
            keys = _keys_read_in_parts(step.plan) if is_last else ()
            equalities = _with_sums(equalities, of_pass, step, keys)
            equalities = [_with_reduction(x, of_pass) for x in equalities]
        if len(traced) > 1:
            equalities = [_in_pass(x, number) for x in equalities]
        answers += equalities
        if number < len(traced) and any(x.says is not Says.PROVED for x in equalities):
            rest = [whole_pass(i) for i in range(number + 1, len(traced) + 1)]
            why = f"the results of pass {number} are not proved"
            return answers + [Equality(name, Says.UNKNOWN, why) for name in rest]
    return answers


def _in_pass(equality: Equality, number: int) -> Equality:
    """Add the number of the pass to the name of a result's leaf."""
    leaf = leaf_of(equality.leaf).in_pass(number)
    state = leaf_of(equality.state).in_pass(number) if equality.state else ""
    return dataclasses.replace(equality, leaf=leaf, state=state)


def _asked(
    of_pass: PassToProve, outputs: Sequence[MergedLeaf], step: StepToProve
) -> list[Equality]:
    """Prove the leaves ``outputs`` of a pass."""
    return equal_to_one_tower(
        of_pass.programs,
        of_pass.inputs,
        outputs,
        axes=of_pass.axes,
        padded=step.padded,
    )


_BARE = {
    Reduction.SUM: "adds the towers' losses up, so return a sum over a tower's rows",
    Reduction.MEAN: "averages the towers' losses, so return a mean over a tower's rows",
}
_OR_A_MEAN = (
    ", or tj.Weighted.mean(losses, tower.weight), which says what it is divided by."
)


def advice_on_bare_loss(reduction: Reduction) -> str:
    """Say what a bare loss must be for this value of ``loss_reduction=``."""
    return f"loss_reduction={reduction.name} {_BARE[reduction]}{_OR_A_MEAN}"


def _with_reduction(equality: Equality, of_pass: PassToProve) -> Equality:
    """Advise on ``loss_reduction=`` if the result refutes a bare loss."""
    reduction = of_pass.loss_reduction
    is_loss = part_of(equality.leaf) is not LeafPart.OTHER
    if reduction is None or not is_loss or equality.says is not Says.REFUTED:
        return equality
    return dataclasses.replace(equality, advice=advice_on_bare_loss(reduction))


_READ_IN_PARTS = (
    "its value is the same, but its sum and its weight, which may be read alone, are"
    " not. Return tj.Weighted.mean(values, tower.weight)"
)


def _keys_read_in_parts(plan: Plan) -> tuple[str, ...] | None:
    """List the keys of means whose sum the update may read without the weight.

    ``()`` is all means. The result is None if there are none: for an update that towers
    trace, which is given the values of means, and not their sums.
    """
    if not plan.accepts or plan.passes.hold_update:
        return None
    # In a train step, means with their sums are given to `update_extra` only: those at
    # the key "extra" of the results.
    return ("extra",) if plan.keeps_local else ()


def _with_sums(
    equalities: Sequence[Equality],
    of_pass: PassToProve,
    step: StepToProve,
    keys: tuple[str, ...] | None,
) -> list[Equality]:
    """Leave a mean at ``keys`` proved only if its sum is proved, too.

    The update may read the sum and the weight of such a mean, so these must be equal to
    one tower's, too.
    """
    leaves = of_pass.outputs
    weight_of = {
        leaf.name: leaves[leaf.weight].name
        for leaf in leaves
        if leaf.weight is not None and keys is not None
        if leaf_of(leaf.name).is_at(*keys)
    }
    if not weight_of:
        return [*equalities]
    added = {*weight_of.keys(), *weight_of.values()}
    sums = [
        MergedLeaf(leaf.name, Merge.SUM if leaf.name in added else Merge.PER_TOWER)
        for leaf in leaves
    ]
    answers = _asked(of_pass, sums, step)
    equal = {answer.leaf for answer in answers if answer.says is Says.PROVED}
    unequal = {
        mean for mean, weight in weight_of.items() if not {mean, weight} <= equal
    }
    return [
        dataclasses.replace(x, says=Says.UNKNOWN, why=_READ_IN_PARTS)
        if x.leaf in unequal and x.says is Says.PROVED
        else x
        for x in equalities
    ]


def _why_not_walked(of_pass: PassToProve) -> str:
    """Tell why the proof can say nothing about a pass; "" if it can."""
    if not of_pass.has_same_leaves:
        return "towers return different leaves for another number of towers"
    if of_pass.in_micro_batches and any(
        _meets(x.jaxpr, of_pass.axes) for x in of_pass.programs
    ):
        return "towers communicate about the rows of one micro-batch each"
    return ""


def _meets(jaxpr: ClosedJaxpr, axes: Sequence[str]) -> bool:
    """Return whether towers communicate in a program."""
    names = {eqn.primitive.name for eqn, _ in sites_over(jaxpr, axes)}
    return bool(names - {"axis_index"})
