"""The arguments and the traced program of one tower of a device, in a pass.

The program computes the loss of one micro-batch, without a derivative. The user's
function is called once, to trace it. All that a device does in a pass evaluates this
program.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from towerjax.collectives.sparse_rows import num_rows
from towerjax.data.batch_rows import split_rows, with_replicated
from towerjax.lowering.rounded import rounds_shared_values
from towerjax.lowering.sharded_values import is_shard
from towerjax.lowering.shards import on_shards, shapes_of_whole
from towerjax.lowering.tower_axis import TowerPrograms, tower_program
from towerjax.mesh.placement import TowerAxes
from towerjax.step.passes.accumulators import (
    as_one_tree,
    refuse_mixed_up,
    split_returned,
    take_sums,
)
from towerjax.step.passes.derivative import Ids, Zeros
from towerjax.step.passes.looked_up import Lookups
from towerjax.step.passes.micro_batches import check_micro_batch, numbered_rows
from towerjax.step.passes.one_pass import Pass
from towerjax.towers.executors import in_tower_fn
from towerjax.towers.tower import tower_of
from towerjax.towers.variables import plain, read_local_over_towers, with_local_values
from towerjax.types import PyTree
from towerjax.types.trees import has_tracers

MICRO_BATCH = "micro-batch"
"""The name by which `TowerPrograms` keep the program."""


class PerTowerArgs(NamedTuple):
    """The per-tower arguments of one tower, or of several towers, stacked."""

    rows: PyTree
    num_valid: jax.Array
    local: PyTree  # the tower's variables
    zeros: Zeros = ()  # zeros to add to rows that the tower looks up


class ReplicatedArgs(NamedTuple):
    """The arguments that are the same for all towers; parameters may be shards."""

    trained: PyTree  # the values by which the loss is differentiated, or None
    state: Any  # a `TrainState`
    read: PyTree  # local variables reduced over towers, for a pass that reads these
    of_batch: PyTree  # the replicated leaves of the batch
    merged: PyTree  # ``(result of the pass before,)``; empty in a first pass


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a device's towers; ``per_tower`` has leaves ``[k, ...]``."""

    per_tower: PerTowerArgs
    replicated: ReplicatedArgs

    @classmethod
    def of(
        cls,
        pass_: Pass,
        axes: TowerAxes,
        state: Any,
        batch: PyTree,
        num_valid: jax.Array,
        of_batch: PyTree,
        merged: PyTree,
    ) -> "Arguments":
        """Make the arguments of a device's towers from what the device holds."""
        rows = split_rows(batch, axes.num_local)
        per_tower = PerTowerArgs(rows, num_valid, plain(state.local))
        trained = None
        if pass_.trained is not None:
            trained = on_shards(pass_.trained, state, *merged, replicated=True)
        read = None
        if pass_.reads_local:
            ops = pass_.strategy.cross_tower_ops
            read = read_local_over_towers(state.local, ops, axes)
        # The shapes in the state may not depend on the number of devices, so local
        # values are those of the device's first tower.
        first = jax.tree.map(lambda x: x[0], plain(state.local))
        local = with_local_values(state.local, first)
        state = dataclasses.replace(state, local=local)
        return cls(per_tower, ReplicatedArgs(trained, state, read, of_batch, merged))

    def shapes_of_micro_batch(self, micro_batches: int) -> tuple[PyTree, ...]:
        """Find the shapes of one tower's arguments for one of its micro-batches.

        They are ``(tower_id, per_tower, index, *replicated)``. A shard has the shape of
        the whole parameter.
        """

        def first() -> tuple[PyTree, ...]:
            tower = jax.tree.map(lambda x: x[0], self.per_tower)
            index = None
            if micro_batches > 1:
                numbered = numbered_rows(tower.rows, micro_batches, of_several=False)
                index, rows = jax.tree.map(lambda x: x[0], numbered)
                tower = tower._replace(rows=rows)
            return jnp.int32(0), tower, index, *self.replicated

        return shapes_of_whole(jax.eval_shape(first))


def call_tower(
    pass_: Pass,
    axes: TowerAxes,
    tower_id: jax.Array,
    per_tower: PerTowerArgs,
    index: Any,
    trained: PyTree,
    state: Any,
    read: PyTree,
    of_batch: PyTree,
    merged: PyTree,
) -> tuple[PyTree, tuple[PyTree, Ids]]:
    """Call the user's function for one micro-batch of one tower.

    ``index`` is the index of the micro-batch; None if the rows are not split.

    Returns:
      ``(sums, (rest, ids))``: the tower's sums, and its other results as `Returned`. A
      call looks nothing up, so ``ids`` is empty; `TracedTower.evaluate` fills it.
    """
    count = num_rows(per_tower.rows)
    local = per_tower.local if read is None else read
    # An exact strategy gives the same bits on any number of devices, so its program may
    # not depend on that number.
    may_depend = not pass_.strategy.exact
    tower = tower_of(
        pass_.strategy,
        axes,
        tower_id,
        state,
        local=local,
        micro_batches=pass_.micro_batches,
        rows=count,
        num_valid=per_tower.num_valid,
        of_rows=count * pass_.micro_batches if may_depend else None,
        first_row=0 if index is None else index * count,
        micro_batch=index,
    )
    rows = pass_.strategy.placement.split_rows(per_tower.rows)
    rows = with_replicated(rows, of_batch) if of_batch else rows
    state = dataclasses.replace(state, local=with_local_values(state.local, local))
    args = state, rows, tower, *merged
    if pass_.trained is not None:
        args = trained, *args
    with in_tower_fn():
        out = pass_.tower_fn(*args)
    sums, rest = take_sums(split_returned(out, count, merged))
    return sums, (rest, [])


@dataclasses.dataclass(frozen=True, eq=False)
class TracedTower:
    """One tower's micro-batch in a pass, on the devices of ``axes``.

    Attributes:
      args: The arguments of the device's towers.
      lookups: The traced program, with its lookups of rows. None if nothing is
        differentiated and there are no micro-batches: then the user's function is
        traced with what surrounds it.
      treedef: The structure of the program's results.
    """

    pass_: Pass
    axes: TowerAxes
    programs: TowerPrograms
    args: Arguments
    lookups: Lookups | None = None
    treedef: Any = None

    @classmethod
    def of(
        cls, pass_: Pass, axes: TowerAxes, programs: TowerPrograms, args: Arguments
    ) -> "TracedTower":
        """Trace the tower's program, or take it from ``programs``.

        Raises:
          ValueError: Micro-batches would return what cannot be merged over them.
        """
        if pass_.trained is None and pass_.micro_batches == 1:
            return cls(pass_, axes, programs, args)
        shapes = args.shapes_of_micro_batch(pass_.micro_batches)

        def of_tower(*args: PyTree) -> PyTree:
            return call_tower(pass_, axes, *args)

        num_known = len(programs)
        program, treedef = tower_program(of_tower, axes, programs, shapes, MICRO_BATCH)
        *before, trained = shapes[:4]
        number = len(jax.tree.leaves(before))
        lookups = Lookups.of(program, number, trained if pass_.takes_gradient else None)
        traced_tower = cls(pass_, axes, programs, args, lookups, treedef)
        if pass_.micro_batches > 1:
            refuse_mixed_up(traced_tower.returned, args.replicated.state.local)
            if len(programs) > num_known or has_tracers(program.consts):
                numbers = as_one_tree(treedef, range(treedef.num_leaves))
                check_micro_batch(program, numbers, shapes, pass_.micro_batches)
        return traced_tower

    @property
    def returned(self) -> PyTree:
        """The shapes of one tower's results for one micro-batch, as `Returned`."""
        assert self.lookups is not None
        avals = self.lookups.program.out_avals
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        return as_one_tree(self.treedef, shapes)

    @property
    def is_on_shards(self) -> bool:
        """Whether one tower's program runs on shards, and returns shards of its sums.

        Otherwise the program of all towers of a device runs on shards.
        """
        held = jax.tree.leaves(self.args.replicated, is_leaf=is_shard)
        is_one = self.axes.in_turn or self.axes.num_local == 1
        return is_one and not self.pass_.needs_each and any(map(is_shard, held))

    def losses_can_be_added(self) -> bool:
        """Decide whether towers' losses are added before they are differentiated."""
        if not self.pass_.takes_gradient or self.pass_.needs_each or self.axes.in_turn:
            return False
        if self.axes.num_local == 1:
            return True
        # If the losses of several towers are added first, the derivative adds the
        # towers' gradients in the trained value's own dtype, in which sums may be too
        # inexact (bfloat16).
        assert self.lookups is not None
        program = self.lookups.program
        shapes = self.args.shapes_of_micro_batch(self.pass_.micro_batches)
        inputs = jax.tree.structure(shapes).unflatten(program.jaxpr.invars)
        tower_id, per_tower, _, trained, *_ = inputs
        differ = [tower_id, *jax.tree.leaves(per_tower)]
        values = jax.tree.leaves(trained)
        return not rounds_shared_values(program, differ, values, self.axes.tower_axis)

    def evaluate(
        self, tower_id: Any, per_tower: PerTowerArgs, *others: PyTree
    ) -> tuple[PyTree, tuple[PyTree, Ids]]:
        """Run the tower's program; return its results and the ids that it looked up.

        The results are those of `call_tower`.
        """
        if self.lookups is None:
            return call_tower(self.pass_, self.axes, tower_id, per_tower, *others)
        args = tower_id, per_tower._replace(zeros=()), *others
        values, ids = self.lookups.evaluate(jax.tree.leaves(args), per_tower.zeros)
        out = jax.tree.unflatten(self.treedef, map(jnp.asarray, values))
        sums, (rest, _) = out
        return sums, (rest, ids)
