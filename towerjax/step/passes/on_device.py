"""How a device runs its towers in a pass: their micro-batches, and the derivative.

One tower's program of one micro-batch is traced once. If the towers of a device run
together, their losses are added and differentiated once. If each tower's own gradient
is needed, or towers run one after another, each loss is differentiated by itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from towerjax.collectives.ops import sum_over_towers
from towerjax.collectives.sparse_rows import num_rows
from towerjax.data.batch_rows import split_rows, with_replicated
from towerjax.lowering.dependents import rounds_shared_values
from towerjax.lowering.sharded_values import is_shard
from towerjax.lowering.shards import on_shards, shapes_of_whole
from towerjax.lowering.tower_axis import (
    TowerPrograms,
    over_local_towers,
    run_lowered,
    tower_program,
)
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.weighted import Means
from towerjax.step.passes.added import Added, dim_of_shards, sums_in_shards, targets_of
from towerjax.step.passes.derivative import (
    Ids,
    LossSums,
    OfMicroBatch,
    Zeros,
    gradient_of,
    gradients_of_terms,
)
from towerjax.step.passes.looked_up import Lookups
from towerjax.step.passes.micro_batches import (
    check_micro_batch,
    numbered_rows,
    scan_micro_batches,
)
from towerjax.step.passes.one_pass import Pass, PerTowerArgs, TowersFlags
from towerjax.step.state.accumulators import (
    ADDED,
    JOINED,
    Returned,
    as_one_tree,
    as_returned,
    put_sums,
    refuse_mixed_up,
    split_returned,
    take_sums,
    values_of,
)
from towerjax.towers.executors import in_tower_fn
from towerjax.towers.tower import tower_of
from towerjax.towers.variables import plain, read_local_over_towers, with_local_values
from towerjax.types import PyTree
from towerjax.types.trees import has_tracers, parts_of, put_parts


def on_device(
    pass_: Pass, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The function that each device runs.

    It returns ``(merged, seen)``: the merged results, and what the pass looks at. A
    merged result that stays per tower is a `PerTowerValue`.
    """

    def run(held: PyTree, *given: PyTree) -> tuple[PyTree, PyTree]:
        state = pass_.used(held)
        towers = DeviceTowers(pass_, axes, programs, state, *given)
        own, (tree, flagged) = towers.run()
        sums = Added.of(pass_.strategy.cross_tower_ops, own, held.params, axes)
        added, shown = sums.tree()
        tree = put_sums(tree, (added, shown))
        parts = parts_of(Returned, tree)
        seen = None
        merged = [x.how.merge(x.value, axes) for x in parts]
        if pass_.looks_at is not None:
            pairs = zip(parts, merged, strict=True)
            rows = [x for part, x in pairs if part.how is JOINED]
            seen = pass_.looks_at.at_all(flagged, state.params, (sums, rows), axes)
        return put_parts(Returned, tree, merged), seen

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceTowers:
    """The towers of a device in one pass, with the arguments that the device holds."""

    pass_: Pass
    axes: TowerAxes
    programs: TowerPrograms
    state: PyTree
    batch: PyTree
    num_valid: jax.Array
    replicated: PyTree
    merged: PyTree

    @functools.cached_property
    def is_added_first(self) -> bool:
        """Whether the losses of towers are added before they are differentiated."""
        if not self.takes_gradient or self.needs_each or self.axes.in_turn:
            return False
        if self.axes.num_local == 1:
            return True
        # If the losses of several towers are added first, the gradients by a value of
        # few bits are added up in these few bits.
        program, _ = self._program_of_micro_batch
        shapes = jax.tree.structure(self._micro_batch_shapes)
        tower_id, own, _, trained, *_ = shapes.unflatten(program.jaxpr.invars)
        inputs = [tower_id, *jax.tree.leaves(own)], jax.tree.leaves(trained)
        return not rounds_shared_values(program, *inputs, self.axes.tower_axis)

    @property
    def needs_each(self) -> bool:
        """Whether each tower's own results are needed, before any sum."""
        ops = self.pass_.strategy.cross_tower_ops
        return ops.needs_every_tower or isinstance(self.pass_.looks_at, TowersFlags)

    @functools.cached_property
    def takes_gradient(self) -> bool:
        """Whether the pass differentiates its loss."""
        return self.pass_.trained is not None and self.pass_.differentiates

    @functools.cached_property
    def own(self) -> PerTowerArgs:
        """Each tower's own arguments, ``[k, ...]``."""
        rows = split_rows(self.batch, self.axes.num_local)
        return PerTowerArgs(rows, self.num_valid, plain(self.state.local))

    @functools.cached_property
    def replicated_args(self) -> tuple[PyTree, ...]:
        """The arguments that are replicated over towers, the trained values first."""
        pass_ = self.pass_
        trained = None
        read = None
        if pass_.trained is not None:
            trained = on_shards(
                pass_.trained, self.state, *self.merged, replicated=True
            )
        if pass_.reads_local:
            ops = pass_.strategy.cross_tower_ops
            read = read_local_over_towers(self.state.local, ops, self.axes)
        # These shapes may not depend on ``D``, so local values are those of row 0.
        first = jax.tree.map(lambda x: x[0], plain(self.state.local))
        local = with_local_values(self.state.local, first)
        state = dataclasses.replace(self.state, local=local)
        return trained, state, read, self.replicated, self.merged

    def run(self) -> tuple[PyTree, PyTree]:
        """The sums over these towers, and their other results, ``[k, ...]``."""
        if self.pass_.micro_batches > 1:
            self._check_micro_batch()
        weights = self._weights() if self.takes_gradient else None
        if not self.is_added_first:
            return self._run_each(weights)
        args = self._call_together, self.own, self.replicated_args, weights
        own, rest = take_sums(self._of_micro_batches(*args, of_several=True))
        return own, (rest, None)

    def run_for_masks(self) -> PyTree:
        """What towers return, with the gradient of each sum of their loss, undivided.

        Denominators depend on which rows are padding, so a gradient that is divided by
        them would always seem to be masked.
        """
        if not self.takes_gradient:
            own, (tree, _) = self.run()
            return put_sums(tree, own)
        trained, *others = self.replicated_args

        def run(index: Any, rows: PyTree, local: PyTree) -> PyTree:
            own = PerTowerArgs(rows, self.num_valid, local)

            def of_micro_batch(trained: PyTree) -> PyTree:
                tree, _ = self._call_together(own, index, trained, *others)
                return tree

            tree, each = gradients_of_terms(of_micro_batch, trained, self.pass_.loss)
            return {**tree, "grads": jax.tree.map(lambda x: Returned(x, ADDED), each)}

        return self._for_micro_batches(run, self.own, of_several=True)

    def run_micro_batch(self, index: jax.Array) -> tuple[PyTree, PyTree]:
        """The sums and other values that one micro-batch returns, without a gradient.

        The rows of these towers are those of the micro-batch.
        """
        given = self._micro_batch, self.axes, self.own, index, *self.replicated_args
        sums, (rest, _) = over_local_towers(*given, stack_sums=False)
        return sums, rest

    def _weights(self) -> list[jax.Array] | None:
        """The denominators of several means, if a derivative needs them beforehand."""
        if self.is_added_first and self.pass_.micro_batches == 1:
            return None  # it knows them before it takes its one derivative
        losses = values_of(self._micro_batch_results[self.pass_.loss])
        if not any(len(x.terms) > 1 for x in parts_of(Means, losses)):
            return None
        # The same program runs once more; XLA keeps only what the weights need.
        alone = dataclasses.replace(self.pass_, differentiates=False, looks_at=None)
        own, (rest, _) = dataclasses.replace(self, pass_=alone).run()
        losses = LossSums.each(values_of(put_sums(rest, own)[self.pass_.loss]))
        return self._added([w for x in losses for w in x.denominators])

    def _added(self, values: list[jax.Array]) -> list[jax.Array]:
        """The sums of ``values`` over all towers."""
        ops = self.pass_.strategy.cross_tower_ops
        return sum_over_towers(ops, values, self.axes).tree()

    def _run_each(self, weights: list[jax.Array] | None) -> tuple[PyTree, PyTree]:
        """Like `run`, for towers that each compute all their micro-batches alone."""
        looks_at = self.pass_.looks_at

        def tower_fn(
            tower_id: jax.Array, own: PerTowerArgs, weights: Any, *replicated: PyTree
        ) -> tuple[PyTree, PyTree]:
            call = functools.partial(self._call_one, tower_id)
            tree = self._of_micro_batches(
                call, own, replicated, weights, of_several=False
            )
            flagged = looks_at and looks_at.at_tower(tree)
            sums, rest = take_sums(tree)
            return sums, (rest, flagged)

        name = "with gradient" if self.takes_gradient else "tower"
        is_whole = self._is_on_shards and not self._needs_program
        run_tower = self._lowered(tower_fn, name) if is_whole else tower_fn
        run = functools.partial(
            over_local_towers,
            run_tower,
            self.axes,
            stack_sums=self.pass_.strategy.cross_tower_ops.needs_every_tower,
            number=self.state.step,
            programs=self.programs,
            name=name,
            is_lowered=self._is_on_shards,
        )
        if not self._is_on_shards:
            run = self._on_shards(run)
        return run(self.own, weights, *self.replicated_args)

    @property
    def _needs_program(self) -> bool:
        """Whether the pass needs the traced program of one micro-batch."""
        return self.pass_.trained is not None or self.pass_.micro_batches > 1

    @functools.cached_property
    def _is_on_shards(self) -> bool:
        """Whether one tower's program runs on shards, and returns shards of its sums.

        Otherwise the program of all towers of a device runs on shards.
        """
        held = jax.tree.leaves(self.replicated_args, is_leaf=is_shard)
        is_one = self.axes.in_turn or self.axes.num_local == 1
        return is_one and not self.needs_each and any(map(is_shard, held))

    def _on_shards(self, run: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """``run(*args) -> (sums, rest)``, whose replicated arguments may be shards."""
        ops = self.pass_.strategy.cross_tower_ops
        return sums_in_shards(run, dim_of_shards(ops, self.state.params, self.axes))

    def _lowered(self, fn: Callable[..., PyTree], name: str) -> Callable[..., PyTree]:
        """The function of one tower, lowered to these devices."""
        how = fn, self.axes, self.programs, name
        return self._on_shards(functools.partial(run_lowered, *how))

    def _of_micro_batches(
        self,
        call: Callable[..., tuple[PyTree, Ids]],
        own: PerTowerArgs,
        replicated: tuple[PyTree, ...],
        weights: list[jax.Array] | None,
        *,
        of_several: bool,
    ) -> PyTree:
        """The merged results of all micro-batches, with the gradient of their loss.

        ``call(own, index, *replicated)`` computes one micro-batch, of one tower or of
        several.
        """
        trained, *others = replicated

        def run(index: Any, rows: PyTree, local: PyTree) -> PyTree:
            def of_micro_batch(trained: PyTree, zeros: Zeros) -> tuple[PyTree, Ids]:
                given = PerTowerArgs(rows, own.num_valid, local, zeros)
                return call(given, index, trained, *others)

            if self.takes_gradient:
                return self._with_gradient(of_micro_batch, trained, weights, of_several)
            tree, _ = of_micro_batch(trained, ())
            return tree

        return self._for_micro_batches(run, own, of_several=of_several)

    def _for_micro_batches(
        self, run: Callable[..., PyTree], own: PerTowerArgs, *, of_several: bool
    ) -> PyTree:
        """The merged results of ``run(index, rows, local)`` for each micro-batch."""
        if self.pass_.micro_batches == 1:
            return run(None, own.rows, own.local)
        count = self.pass_.micro_batches
        numbered = numbered_rows(own.rows, count, of_several=of_several)
        return scan_micro_batches(run, numbered, own.local, of_several=of_several)

    def _with_gradient(
        self,
        of_micro_batch: OfMicroBatch,
        trained: PyTree,
        weights: list[jax.Array] | None,
        of_several: bool,
    ) -> PyTree:
        """What one micro-batch returns, with the gradient of its loss."""
        axes = self.axes
        lookups = self._lookups
        calls = axes.num_towers
        if of_several:
            lookups = lookups.of_towers(axes.num_local)
            calls = axes.num_devices
        ops = self.pass_.strategy.cross_tower_ops
        targets = targets_of(ops, trained, axes, lookups.tables)

        def of_values(values: PyTree, zeros: Zeros) -> tuple[PyTree, Ids]:
            return of_micro_batch(targets.put(values), zeros)

        tree, gradient = gradient_of(
            of_values,
            targets.values,
            lookups,
            loss=self.pass_.loss,
            denominators=self._added if weights is None else lambda _: weights,
            share=1 / (calls * self.pass_.micro_batches),
        )
        grads = targets.gradients(gradient.grads)
        gradient = dataclasses.replace(gradient, grads=grads)
        returned = gradient.returned(as_sums=self.pass_.merges_sums)
        return {**tree, "grads": as_returned(returned)}

    def _call_together(
        self, own: PerTowerArgs, index: Any, *replicated: PyTree
    ) -> tuple[PyTree, Ids]:
        """One micro-batch of all towers of a device, with their sums added.

        Returns a tree of `Returned`, and the ids that each tower looked up.
        """
        run = functools.partial(
            over_local_towers,
            self._micro_batch_of_program,
            self.axes,
            stack_sums=False,
            programs=self.programs,
            name="micro-batch",
        )
        sums, (rest, ids) = self._on_shards(run)(own, index, *replicated)
        return put_sums(rest, sums), ids

    def _call_one(
        self, tower_id: Any, own: PerTowerArgs, index: Any, *replicated: PyTree
    ) -> tuple[PyTree, Ids]:
        """One micro-batch of one tower: a tree of `Returned`, and ids."""
        run: Callable[..., PyTree] = self._micro_batch
        if self._needs_program:
            run = self._micro_batch_of_program
            if self._is_on_shards:
                run = self._lowered(run, "micro-batch")
        sums, (rest, ids) = run(tower_id, own, index, *replicated)
        return put_sums(rest, sums), ids

    def _micro_batch_of_program(
        self, tower_id: Any, own: PerTowerArgs, *others: PyTree
    ) -> tuple[PyTree, tuple[PyTree, Ids]]:
        """The result of `_micro_batch`, computed by its traced program."""
        args = tower_id, own._replace(zeros=()), *others
        values, ids = self._lookups.evaluate(jax.tree.leaves(args), own.zeros)
        _, tree = self._program_of_micro_batch
        sums, (rest, _) = jax.tree.unflatten(tree, map(jnp.asarray, values))
        return sums, (rest, ids)

    @functools.cached_property
    def _lookups(self) -> Lookups:
        """The lookups of rows in the tower's program."""
        program, _ = self._program_of_micro_batch
        *before, trained = self._micro_batch_shapes[:4]
        trained = trained if self.takes_gradient else None
        return Lookups.of(program, len(jax.tree.leaves(before)), trained)

    @functools.cached_property
    def _micro_batch_shapes(self) -> tuple[PyTree, ...]:
        """The shapes of the arguments of `_micro_batch`."""
        own = self.own
        replicated = self.replicated_args

        def first() -> tuple[PyTree, ...]:
            tower = jax.tree.map(lambda x: x[0], own)
            index = None
            if self.pass_.micro_batches > 1:
                count = self.pass_.micro_batches
                numbered = numbered_rows(tower.rows, count, of_several=False)
                index, rows = jax.tree.map(lambda x: x[0], numbered)
                tower = tower._replace(rows=rows)
            return jnp.int32(0), tower, index, *replicated

        return shapes_of_whole(jax.eval_shape(first))

    @functools.cached_property
    def _program_of_micro_batch(self) -> tuple[ClosedJaxpr, Any]:
        """One tower's program of one micro-batch, and the treedef of its results."""
        known = self.axes, self.programs, self._micro_batch_shapes
        return tower_program(self._micro_batch, *known, "micro-batch")

    @property
    def _micro_batch_results(self) -> PyTree:
        """The shapes of what one tower returns of one micro-batch, as `Returned`."""
        program, tree = self._program_of_micro_batch
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
        return as_one_tree(tree, shapes)

    def _check_micro_batch(self) -> None:
        """Check a new program of one micro-batch: see `check_micro_batch`."""
        before = len(self.programs)
        program, tree = self._program_of_micro_batch
        _, state, *_ = self.replicated_args
        refuse_mixed_up(self._micro_batch_results, state.local)
        if len(self.programs) > before or has_tracers(program.consts):
            numbers = as_one_tree(tree, range(tree.num_leaves))
            shapes = self._micro_batch_shapes
            check_micro_batch(program, numbers, shapes, self.pass_.micro_batches)

    def _micro_batch(
        self,
        tower_id: jax.Array,
        own: PerTowerArgs,
        index: Any,
        trained: PyTree,
        state: Any,
        read: PyTree,
        replicated: PyTree,
        merged: PyTree,
    ) -> tuple[PyTree, tuple[PyTree, Ids]]:
        """What one tower returns for one micro-batch: its sums, and other `Returned`.

        The empty list stands where `_micro_batch_of_program` returns the looked-up ids.
        """
        pass_ = self.pass_
        rows = own.rows
        count = num_rows(rows)
        seen = own.local if read is None else read
        # The program of an exact strategy may not depend on the number of devices.
        may_depend = not pass_.strategy.exact
        tower = tower_of(
            pass_.strategy,
            self.axes,
            tower_id,
            state,
            local=seen,
            micro_batches=pass_.micro_batches,
            rows=count,
            num_valid=own.num_valid,
            of_rows=count * pass_.micro_batches if may_depend else None,
            first_row=0 if index is None else index * count,
            micro_batch=index,
        )
        rows = pass_.strategy.placement.split_rows(rows)
        rows = with_replicated(rows, replicated) if replicated else rows
        held = with_local_values(state.local, seen)
        given = dataclasses.replace(state, local=held), rows, tower, *merged
        given = given if pass_.trained is None else (trained, *given)
        with in_tower_fn():
            out = pass_.tower_fn(*given)
        sums, rest = take_sums(split_returned(out, count, merged))
        return sums, (rest, [])
