"""How a device runs its towers in a pass: their micro-batches, and the derivative.

One tower's program of one micro-batch is traced once. If the towers of a device run
together, their losses are added and differentiated once. If each tower's own gradient
is needed, or if towers run in turn, each loss is differentiated by itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from towerjax.collectives.ops import sum_over_towers
from towerjax.lowering.tower_axis import TowerPrograms, over_local_towers, run_lowered
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.weighted import Means
from towerjax.step.passes.accumulators import (
    JOINED,
    Returned,
    as_returned,
    put_sums,
    take_sums,
    values_of,
)
from towerjax.step.passes.added import Added, dim_of_shards, sums_in_shards, targets_of
from towerjax.step.passes.derivative import Ids, LossSums, Zeros, gradient_of
from towerjax.step.passes.micro_batches import (
    MicroBatchFn,
    numbered_rows,
    scan_micro_batches,
)
from towerjax.step.passes.one_pass import Pass
from towerjax.step.passes.traced_tower import (
    MICRO_BATCH,
    Arguments,
    PerTowerArgs,
    TracedTower,
)
from towerjax.types import PyTree
from towerjax.types.trees import parts_of, put_parts

RunMicroBatch: TypeAlias = Callable[..., tuple[PyTree, Ids]]
"""``(own, index, *replicated) -> (tree, ids)``: a micro-batch, of one tower or more."""


def on_device(
    pass_: Pass, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Build the function that each device runs in a pass.

    The function returns ``(merged, seen)``: the merged results, and the report of the
    pass's `Look`. A merged result that stays per tower is a `PerTowerValue`.
    """

    def run(held: PyTree, *of_device: PyTree) -> tuple[PyTree, PyTree]:
        state = pass_.used(held)
        args = Arguments.of(pass_, axes, state, *of_device)
        tower = TracedTower.of(pass_, axes, programs, args)
        # The addends of this device's towers, the tree of their other results, with
        # leaves ``[k, ...]``, and what a look sees of each tower, ``[k, ...]`` too.
        addends, (tree, flagged) = over_towers(tower)
        sums = Added.of(pass_.strategy.cross_tower_ops, addends, held.params, axes)
        added, shown = sums.tree()
        tree = put_sums(tree, (added, shown))
        parts = parts_of(Returned, tree)
        seen = None
        merged = [x.rule.merge(x.value, axes) for x in parts]
        if pass_.looks_at is not None:
            pairs = zip(parts, merged, strict=True)
            rows = [x for part, x in pairs if part.rule is JOINED]
            seen = pass_.looks_at.at_all(flagged, state.params, (sums, rows), axes)
        return put_parts(Returned, tree, merged), seen

    return run


def over_towers(tower: TracedTower) -> tuple[PyTree, PyTree]:
    """Run all ``k`` towers of a device, with the gradient of their loss.

    Returns:
      ``(sums, (rest, flagged))``: the sums over these towers, their other results with
      leaves ``[k, ...]``, and what a look sees of each tower.
    """
    if tower.losses_can_be_added():
        return _together(tower)
    return _each_by_itself(tower, _denominators(tower))


def _together(tower: TracedTower) -> tuple[PyTree, PyTree]:
    """Add the towers' losses, and take one derivative of the sum.

    Returns what `over_towers` does, with None for what a look sees.
    """
    per_tower = tower.args.per_tower
    # Without micro-batches, the one derivative adds the denominators over towers by
    # itself, between its forward and its backward half.
    weights = None if tower.pass_.micro_batches == 1 else _denominators(tower)
    call = functools.partial(on_local_towers, tower)
    of_micro_batch = _with_gradient(
        call,
        tower,
        weights,
        per_tower.num_valid,
        tower.args.replicated,
        of_several=True,
    )
    tree = each_micro_batch(
        of_micro_batch,
        per_tower.rows,
        per_tower.local,
        tower.pass_.micro_batches,
        of_several=True,
    )
    sums, rest = take_sums(tree)
    return sums, (rest, None)


def _each_by_itself(
    tower: TracedTower, weights: list[jax.Array] | None
) -> tuple[PyTree, PyTree]:
    """Run each tower with a derivative of its own, over all of its micro-batches.

    ``weights`` are the denominators of a sum of several means, or None. Returns what
    `over_towers` does.
    """
    pass_ = tower.pass_

    def of_tower(
        tower_id: jax.Array, per_tower: PerTowerArgs, weights: Any, *replicated: PyTree
    ) -> tuple[PyTree, PyTree]:
        call = functools.partial(_on_one_tower, tower, tower_id)
        of_micro_batch = _with_gradient(
            call, tower, weights, per_tower.num_valid, replicated, of_several=False
        )
        tree = each_micro_batch(
            of_micro_batch,
            per_tower.rows,
            per_tower.local,
            pass_.micro_batches,
            of_several=False,
        )
        flagged = pass_.looks_at and pass_.looks_at.at_tower(tree)
        sums, rest = take_sums(tree)
        return sums, (rest, flagged)

    name = "with gradient" if pass_.takes_gradient else "tower"
    # Whether ``run`` as a whole is lowered to these devices. If there is a derivative,
    # only the program of a micro-batch, which the derivative contains, is lowered.
    is_whole = tower.is_on_shards and tower.lookups is None
    run = functools.partial(
        over_local_towers,
        _lowered(of_tower, tower, name) if is_whole else of_tower,
        tower.axes,
        stack_sums=pass_.strategy.cross_tower_ops.needs_every_tower,
        number=tower.args.replicated.state.step,
        programs=tower.programs,
        name=name,
        is_lowered=tower.is_on_shards,
    )
    if not tower.is_on_shards:
        run = _on_shards(run, tower)
    return run(tower.args.per_tower, weights, *tower.args.replicated)


def _denominators(tower: TracedTower) -> list[jax.Array] | None:
    """Add the denominators of several means over all towers, before any derivative.

    Returns None if the loss is not a sum of several means, or is not differentiated.
    """
    pass_ = tower.pass_
    if not pass_.takes_gradient:
        return None
    losses = values_of(tower.returned[pass_.loss])
    if not any(len(x.terms) > 1 for x in parts_of(Means, losses)):
        return None
    # The same program runs once more; XLA keeps only what the weights need.
    alone = dataclasses.replace(pass_, differentiates=False, looks_at=None)
    addends, (rest, _) = over_towers(dataclasses.replace(tower, pass_=alone))
    losses = LossSums.each(values_of(put_sums(rest, addends)[pass_.loss]))
    return _added([w for x in losses for w in x.denominators], tower)


def _added(values: list[jax.Array], tower: TracedTower) -> list[jax.Array]:
    """Add each of ``values`` over all towers."""
    if tower.axes.alone:
        return [x.sum() * tower.axes.num_devices for x in values]
    ops = tower.pass_.strategy.cross_tower_ops
    return sum_over_towers(ops, values, tower.axes).tree()


def each_micro_batch(
    of_micro_batch: MicroBatchFn,
    rows: PyTree,
    local: PyTree,
    count: int,
    *,
    of_several: bool,
) -> PyTree:
    """Run ``count`` micro-batches of these rows, and return their merged results.

    With ``of_several`` the rows are those of several towers, stacked; see
    `scan_micro_batches`.
    """
    if count == 1:
        return of_micro_batch(None, rows, local)
    numbered = numbered_rows(rows, count, of_several=of_several)
    return scan_micro_batches(of_micro_batch, numbered, local, of_several=of_several)


def _with_gradient(
    call: RunMicroBatch,
    tower: TracedTower,
    weights: list[jax.Array] | None,
    num_valid: jax.Array,
    replicated: tuple[PyTree, ...],
    *,
    of_several: bool,
) -> MicroBatchFn:
    """Build a function that runs a micro-batch, and differentiates its loss.

    With ``of_several``, ``call`` computes all towers of the device; otherwise one.
    """
    pass_ = tower.pass_
    axes = tower.axes
    trained, *others = replicated

    def without_gradient(index: Any, rows: PyTree, local: PyTree) -> PyTree:
        tree, _ = call(PerTowerArgs(rows, num_valid, local), index, trained, *others)
        return tree

    if not pass_.takes_gradient:
        return without_gradient
    assert tower.lookups is not None
    lookups = tower.lookups
    calls = axes.num_towers
    if of_several:
        lookups = lookups.of_towers(axes.num_local)
        calls = axes.num_devices

    def denominators(addends: list[jax.Array]) -> list[jax.Array]:
        return _added(addends, tower) if weights is None else weights

    def of_micro_batch(index: Any, rows: PyTree, local: PyTree) -> PyTree:
        ops = pass_.strategy.cross_tower_ops
        targets = targets_of(ops, trained, axes, lookups.tables)

        def of_values(values: PyTree, zeros: Zeros) -> tuple[PyTree, Ids]:
            per_tower = PerTowerArgs(rows, num_valid, local, zeros)
            return call(per_tower, index, targets.put(values), *others)

        tree, gradient = gradient_of(
            of_values,
            targets.values,
            lookups,
            loss=pass_.loss,
            denominators=denominators,
            share=1 / (calls * pass_.micro_batches),
        )
        grads = targets.gradients(gradient.grads)
        gradient = dataclasses.replace(gradient, grads=grads)
        returned = gradient.returned(as_sums=pass_.merges_sums)
        return {**tree, "grads": as_returned(returned)}

    return of_micro_batch


def on_local_towers(
    tower: TracedTower, per_tower: PerTowerArgs, index: Any, *replicated: PyTree
) -> tuple[PyTree, Ids]:
    """Run one micro-batch of all towers of a device, and add their sums.

    Returns a tree of `Returned`, and the ids of the rows that each tower looked up.
    """
    run = functools.partial(
        over_local_towers,
        tower.evaluate,
        tower.axes,
        stack_sums=False,
        programs=tower.programs,
        name=MICRO_BATCH,
    )
    sums, (rest, ids) = _on_shards(run, tower)(per_tower, index, *replicated)
    return put_sums(rest, sums), ids


def _on_one_tower(
    tower: TracedTower, tower_id: Any, per_tower: PerTowerArgs, *others: PyTree
) -> tuple[PyTree, Ids]:
    """Run one micro-batch of one tower; return its tree of `Returned`, and its ids.

    The ids are those of the rows that the tower looked up.
    """
    run: Callable[..., PyTree] = tower.evaluate
    if tower.is_on_shards and tower.lookups is not None:
        run = _lowered(run, tower, MICRO_BATCH)
    sums, (rest, ids) = run(tower_id, per_tower, *others)
    return put_sums(rest, sums), ids


def _on_shards(run: Callable[..., PyTree], tower: TracedTower) -> Callable[..., PyTree]:
    """Let the replicated arguments of ``run`` be shards.

    ``run(*args)`` returns ``(sums, rest)``.
    """
    ops = tower.pass_.strategy.cross_tower_ops
    params = tower.args.replicated.state.params
    return sums_in_shards(run, dim_of_shards(ops, params, tower.axes))


def _lowered(
    fn: Callable[..., PyTree], tower: TracedTower, name: str
) -> Callable[..., PyTree]:
    """Lower ``fn``, a function of one tower, to these devices."""
    lower = functools.partial(run_lowered, fn, tower.axes, tower.programs, name)
    return _on_shards(lower, tower)
