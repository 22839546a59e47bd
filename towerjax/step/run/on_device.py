"""What a device runs of a pass: its towers, their micro-batches, one derivative.

One tower's program of one micro-batch is traced once. Where the towers of a device run
together, their losses are added and differentiated. Where each tower's own gradient is
needed, or towers run one after another, the loss of each is differentiated by itself.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from towerjax.collectives.lookups import LOOKUP
from towerjax.collectives.ops import sum_over_towers
from towerjax.collectives.sparse_rows import num_rows, split_micro_batches
from towerjax.data.shard import split_rows, with_shared
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.weighted import Means
from towerjax.proof.equation import all_eqns
from towerjax.step.run.derivative import LossSums, gradient_of, gradients_of_terms
from towerjax.step.run.looked_up import Lookups
from towerjax.step.run.micro_batches import check_micro_batch, scan_micro_batches
from towerjax.step.run.one_pass import Pass, TowersFlags
from towerjax.step.state.accumulators import (
    JOINED,
    Returned,
    put_sums,
    refuse_mixed_up,
    split_returned,
    take_sums,
    values_of,
)
from towerjax.towers.executors import in_tower_fn, vmap_members
from towerjax.towers.lowering.dependents import rounds_shared_values
from towerjax.towers.lowering.tower_axis import (
    TowerPrograms,
    evaluate_program,
    over_local_towers,
    tower_program,
)
from towerjax.towers.tower import tower_of
from towerjax.towers.variables import (
    plain,
    read_local_over_towers,
    with_local_values,
)
from towerjax.types import PyTree
from towerjax.types.leaves import has_tracers, parts_of, put_parts


def on_device(
    pass_: Pass, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The function that each device runs: ``(merged, what the pass looks at)``.

    What is merged and each tower's own is `TowersOwn`.
    """

    def run(*args: PyTree) -> tuple[PyTree, PyTree]:
        own, (tree, flagged) = DeviceTowers(pass_, axes, programs, *args).run()
        sums = sum_over_towers(pass_.strategy.cross_tower_ops, own, axes)
        added, shown = sums.tree()
        tree = put_sums(tree, (added, shown))
        parts, seen = parts_of(Returned, tree), None
        merged = [x.how.merge(x.value, axes) for x in parts]
        if pass_.looks_at is not None:
            pairs = zip(parts, merged, strict=True)
            rows = [x for part, x in pairs if part.how is JOINED]
            guarded = sums, len(jax.tree.leaves(added)), rows
            seen = pass_.looks_at.at_all(flagged, args[0].params, guarded, axes)
        return put_parts(Returned, tree, merged), seen

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceTowers:
    """The towers of a device, in one pass, and its arguments there."""

    pass_: Pass
    axes: TowerAxes
    programs: TowerPrograms
    state: PyTree
    batch: PyTree
    num_valid: jax.Array
    shared: PyTree
    merged: PyTree

    @functools.cached_property
    def is_added_first(self) -> bool:
        """Whether the losses of towers are added before they are differentiated."""
        pass_ = self.pass_
        looks_at_each = isinstance(pass_.looks_at, TowersFlags)
        is_each = pass_.strategy.cross_tower_ops.needs_every_tower or looks_at_each
        if not self.takes_gradient or is_each or self.axes.in_turn:
            return False
        # Else the gradients of towers would be added up in these few bits.
        program, _ = self._program_of_part
        _, own, index, trained, *_ = self._part_shapes
        counts = [len(jax.tree.leaves(x)) for x in (own, index, trained)]
        ends = list(itertools.accumulate(counts, initial=1))
        given = program.jaxpr.invars
        inputs = given[: ends[1]], given[ends[2] : ends[3]]
        return not rounds_shared_values(program, *inputs, self.axes.tower_axis)

    @property
    def takes_gradient(self) -> bool:
        """Whether the pass differentiates its loss."""
        return self.pass_.trained is not None and self.pass_.differentiates

    @functools.cached_property
    def own(self) -> tuple[PyTree, jax.Array, PyTree]:
        """Each tower's own arguments, ``[k, ...]``: rows, their number, variables."""
        rows = split_rows(self.batch, self.axes.num_local)
        return rows, self.num_valid, plain(self.state.local)

    @functools.cached_property
    def common(self) -> tuple[PyTree, ...]:
        """What all towers share: the values that are trained, if any, and others."""
        pass_, trained, read = self.pass_, None, None
        if pass_.trained is not None:
            trained = pass_.trained(self.state, *self.merged)
        if pass_.reads_local:
            ops = pass_.strategy.cross_tower_ops
            read = read_local_over_towers(self.state.local, ops, self.axes)
        # Shapes of common arguments may not depend on ``D``: local values are row 0's.
        first = jax.tree.map(lambda x: x[0], plain(self.state.local))
        local = with_local_values(self.state.local, first)
        state = dataclasses.replace(self.state, local=local)
        return trained, state, read, self.shared, self.merged

    def run(self) -> tuple[PyTree, PyTree]:
        """The sums over these towers, and what each has of its own, ``[k, ...]``."""
        if self.pass_.micro_batches > 1:
            self._check_micro_batch()
        weights = self._weights() if self.takes_gradient else None
        if not self.is_added_first:
            return self._run_each(weights)
        tree = self._of_micro_batches(
            self._call_together, self.own, self.common, weights, of_several=True
        )
        own, rest = take_sums(tree)
        return own, (rest, None)

    def run_for_masks(self) -> tuple[PyTree, PyTree]:
        """What a micro-batch returns, and the gradient of each sum of its loss.

        Denominators depend on which rows are padding, so that a gradient that was
        divided by them would always seem to be masked.
        """
        if not self.takes_gradient:
            own, (tree, _) = self.run()
            return put_sums(tree, own), None
        (rows, num_valid, local), (trained, *others) = self.own, self.common
        index = None
        if self.pass_.micro_batches > 1:
            numbered = self._numbered(rows, of_several=True)
            index, rows = jax.tree.map(lambda x: x[0], numbered)
        own = rows, num_valid, local

        def of_part(trained: PyTree) -> PyTree:
            return self._call_together(own, index, None, trained, *others)

        return gradients_of_terms(of_part, trained, self.pass_.loss)

    def _weights(self) -> list[jax.Array] | None:
        """The denominators of several means, where they must be known beforehand."""
        runs_once = self.is_added_first and self.pass_.micro_batches == 1
        program, tree = self._program_of_part
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
        means = parts_of(Means, values_of(_joined(tree, shapes)[self.pass_.loss]))
        if runs_once or not any(len(x.terms) > 1 for x in means):
            return None
        # The same program once more, of which XLA keeps what the weights need.
        alone = dataclasses.replace(self.pass_, differentiates=False, looks_at=None)
        own, (rest, _) = dataclasses.replace(self, pass_=alone).run()
        losses = LossSums.each(values_of(put_sums(rest, own)[self.pass_.loss]))
        return self._added([w for x in losses for w in x.denominators])

    def _added(self, values: list[jax.Array]) -> list[jax.Array]:
        """The sums over all towers."""
        ops = self.pass_.strategy.cross_tower_ops
        return sum_over_towers(ops, values, self.axes).tree()

    def _run_each(self, weights: list[jax.Array] | None) -> tuple[PyTree, PyTree]:
        """As `run`, of towers that each work off their own micro-batches."""
        looks_at = self.pass_.looks_at

        def tower_fn(
            tower_id: jax.Array, own: PyTree, weights: Any, *common: PyTree
        ) -> tuple[PyTree, PyTree]:
            call = functools.partial(self._call_one, tower_id)
            tree = self._of_micro_batches(call, own, common, weights, of_several=False)
            flagged = looks_at and looks_at.at_tower(tree)
            sums, rest = take_sums(tree)
            return sums, (rest, flagged)

        return over_local_towers(
            tower_fn,
            self.axes,
            self.own,
            weights,
            *self.common,
            stack_sums=self.pass_.strategy.cross_tower_ops.needs_every_tower,
            number=self.state.step,
            programs=self.programs,
            name="with gradient" if self.takes_gradient else "tower",
        )

    def _of_micro_batches(
        self,
        call: Callable[..., PyTree],
        own: tuple[PyTree, PyTree, PyTree],
        common: tuple[PyTree, ...],
        weights: list[jax.Array] | None,
        *,
        of_several: bool,
    ) -> PyTree:
        """What all micro-batches return, merged, with the gradient of their loss.

        ``call(own, index, zeros, *common)`` is one of them, of one tower or of several;
        ``zeros``, if any, are added to the rows that are looked up.
        """
        (rows, num_valid, local), (trained, *others) = own, common

        def run(index: Any, rows: PyTree, local: PyTree) -> PyTree:
            def of_part(trained: PyTree, zeros: Any = None) -> PyTree:
                own = rows, num_valid, local
                return call(own, index, zeros, trained, *others)

            if not self.takes_gradient:
                return of_part(trained)
            return self._with_gradient(of_part, trained, weights, of_several)

        if self.pass_.micro_batches == 1:
            return run(None, rows, local)
        numbered = self._numbered(rows, of_several=of_several)
        return scan_micro_batches(run, numbered, local, of_several=of_several)

    def _with_gradient(
        self,
        of_part: Callable[..., PyTree],
        trained: PyTree,
        weights: list[jax.Array] | None,
        of_several: bool,
    ) -> PyTree:
        """What one micro-batch returns, with the gradient of its loss."""
        axes = self.axes
        as_sums = self.pass_.merges_sums
        calls = axes.num_devices if of_several else axes.num_towers
        how: dict[str, Any] = {
            "loss": self.pass_.loss,
            "denominators": self._added if weights is None else lambda _: weights,
            "share": 1 / (calls * self.pass_.micro_batches),
        }
        if (lookups := self._lookups) is None:
            tree, gradient = gradient_of(of_part, trained, **how)
            return {**tree, "grads": gradient.returned(as_sums=as_sums)}
        zeros = lookups.zeros((axes.num_local,) if of_several else ())
        given = trained, zeros
        tree, gradient = gradient_of(lambda x: of_part(*x), given, **how)
        lookups.refuse_dense(gradient.reads)
        ids, (grads, rows) = tree.pop(_LOOKED_UP), gradient.grads
        grads = lookups.gradients(grads, rows, ids, of_several=of_several)
        gradient = dataclasses.replace(gradient, grads=grads)
        return {**tree, "grads": gradient.returned(as_sums=as_sums)}

    def _numbered(self, rows: PyTree, *, of_several: bool) -> tuple[jax.Array, PyTree]:
        """The numbers of micro-batches, and their rows, ``[A, ...]``."""
        count = self.pass_.micro_batches
        split = functools.partial(split_micro_batches, parts=count)
        if of_several:  # rows are [k, b, ...]
            of_one = jax.eval_shape(split, jax.tree.map(lambda x: x[0], rows))
            leaves, treedef = jax.tree.flatten(rows)

            # Of leaves: vmap takes sparse arrays apart in another way.
            def of_tower(leaves: list[jax.Array]) -> list[jax.Array]:
                return jax.tree.leaves(split(treedef.unflatten(leaves)))

            of_towers = vmap_members(of_tower)(leaves)
            parts = jax.tree.unflatten(
                jax.tree.structure(of_one), [jnp.swapaxes(x, 0, 1) for x in of_towers]
            )
        else:
            parts = split(rows)
        return jnp.arange(count, dtype=jnp.int32), parts

    def _call_together(
        self, own: PyTree, index: Any, zeros: Any, *common: PyTree
    ) -> PyTree:
        """One micro-batch of all towers of a device, their sums added: `Returned`."""
        of_rows = zeros is not None
        sums, rest = over_local_towers(
            self._part_with_rows if of_rows else self._part,
            self.axes,
            (own, zeros) if of_rows else own,
            index,
            *common,
            stack_sums=False,
            programs=self.programs,
            name="part with rows" if of_rows else "part",
        )
        return _with_ids(sums, *rest) if of_rows else put_sums(rest, sums)

    def _call_one(
        self, tower_id: Any, own: PyTree, index: Any, zeros: Any, *common: PyTree
    ) -> PyTree:
        """One micro-batch of one tower: a tree of `Returned`."""
        args = tower_id, own, index, *common
        if zeros is not None:
            given = tower_id, (own, zeros), index, *common
            sums, rest = self._part_with_rows(*given)
            return _with_ids(sums, *rest)
        if self.pass_.trained is None and self.pass_.micro_batches == 1:
            sums, rest = self._part(*args)  # nothing else needs its program
        else:
            sums, rest = evaluate_program(*self._program_of_part, args)
        return put_sums(rest, sums)

    def _part_with_rows(
        self, tower_id: Any, given: tuple[PyTree, Any], index: Any, *common: PyTree
    ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        """As `_part`, with zeros added to what is looked up, and the ids of that."""
        own, zeros = given
        assert self._lookups is not None
        args = tower_id, own, index, *common
        out, ids = self._lookups.evaluate(jax.tree.leaves(args), zeros)
        _, tree = self._program_of_part
        sums, rest = jax.tree.unflatten(tree, map(jnp.asarray, out))
        return sums, (rest, ids)

    @functools.cached_property
    def _lookups(self) -> Lookups | None:
        """The lookups of rows in the tower's program, if any."""
        program, _ = self._program_of_part
        if not any(eqn.primitive is LOOKUP for eqn in all_eqns(program)):
            return None
        *before, trained = self._part_shapes[:4]
        return Lookups.of(program, len(jax.tree.leaves(before)), trained)

    @functools.cached_property
    def _part_shapes(self) -> tuple[PyTree, ...]:
        """The shapes of the arguments of `_part`."""
        own, common = self.own, self.common

        def first() -> tuple[PyTree, ...]:
            rows, num_valid, local = jax.tree.map(lambda x: x[0], own)
            index = None
            if self.pass_.micro_batches > 1:
                numbered = self._numbered(rows, of_several=False)
                index, rows = jax.tree.map(lambda x: x[0], numbered)
            return jnp.int32(0), (rows, num_valid, local), index, *common

        return jax.eval_shape(first)

    @functools.cached_property
    def _program_of_part(self) -> tuple[ClosedJaxpr, Any]:
        """One tower's program of one micro-batch, and the treedef of its results."""
        known = self.axes, self.programs, self._part_shapes
        return tower_program(self._part, *known, "part")

    def _check_micro_batch(self) -> None:
        """Refuse, once a program, what may not differ between micro-batches."""
        before = len(self.programs)
        program, tree = self._program_of_part
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
        refuse_mixed_up(_joined(tree, shapes), self.common[1].local)
        if len(self.programs) > before or has_tracers(program.consts):
            tower_id, (rows, num_valid, local), *others = self._part_shapes
            index, *common = others
            kinds = [("", tower_id), ("rows", rows), ("", num_valid), ("local", local)]
            kinds += [("rows", index), ("", common)]
            each = [kind for kind, x in kinds for _ in jax.tree.leaves(x)]
            numbers = _joined(tree, range(len(shapes)))
            check_micro_batch(program, numbers, each, self.pass_.micro_batches)

    def _part(
        self,
        tower_id: jax.Array,
        own: tuple[PyTree, Any, PyTree],
        index: Any,
        trained: PyTree,
        state: Any,
        read: PyTree,
        shared: PyTree,
        merged: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """What one tower returns of one micro-batch: its sums, and other `Returned`."""
        pass_, (rows, num_valid, local) = self.pass_, own
        count, seen = num_rows(rows), local if read is None else read
        # Else the tower's program may not depend on the number of devices.
        may_depend = not pass_.strategy.cross_tower_ops.needs_every_tower
        tower = tower_of(
            pass_.strategy,
            self.axes,
            tower_id,
            state,
            local=seen,
            micro_batches=pass_.micro_batches,
            rows=count,
            num_valid=num_valid,
            of_rows=count * pass_.micro_batches if may_depend else None,
            first_row=0 if index is None else index * count,
            micro_batch=index,
        )
        rows = pass_.strategy.placement.split_rows(rows)
        rows = with_shared(rows, shared) if shared else rows
        held = with_local_values(state.local, seen)
        given = dataclasses.replace(state, local=held), rows, tower, *merged
        given = given if pass_.trained is None else (trained, *given)
        with in_tower_fn():
            out = pass_.tower_fn(*given)
        return take_sums(split_returned(out, count, merged))


def _joined(treedef: Any, leaves: Sequence[Any]) -> PyTree:
    """The results of `_part` as one tree of `Returned`."""
    sums, rest = jax.tree.unflatten(treedef, leaves)
    return put_sums(rest, sums)


_LOOKED_UP = "looked up"  # the key of ids, beside what a tower function returns


def _with_ids(sums: PyTree, rest: PyTree, ids: list[jax.Array]) -> PyTree:
    """The results of `_part_with_rows` as one tree."""
    return {**put_sums(rest, sums), _LOOKED_UP: ids}
