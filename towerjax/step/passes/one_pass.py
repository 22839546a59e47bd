"""`Pass`: one run of all towers, and how their results are merged."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias

import jax

from towerjax.collectives.reduce import all_gather_rows
from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.lowering.sharded_values import Shards, is_shard, shards_of, whole
from towerjax.lowering.shards import on_shards
from towerjax.mesh.placement import TowerAxes
from towerjax.step.passes.accumulators import (
    arrays_of_tower,
    parts_of_tower,
    values_of,
)
from towerjax.step.passes.added import Added
from towerjax.step.state.desync import Bits
from towerjax.step.state.nonfinite import flag_leaves, join_flags
from towerjax.step.state.train_state import STATE_LAYOUT
from towerjax.towers.on_towers import OnTowers
from towerjax.towers.outputs import PerTowerValue, is_per_tower_value, layouts_of
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree, Reduction
from towerjax.types.trees import map_parts

Guarded: TypeAlias = tuple[Added, list[IndexedRows]]
"""The guarded sums of a step over all towers, and the rows of tables."""


class Look(Protocol):
    """What a pass reports: on each tower's results and on merged sums."""

    # Whether it needs each tower's own results, which are then not added before.
    of_each: ClassVar[bool]

    def at_tower(self, tree: PyTree) -> PyTree:
        """Report on one tower's tree of `Returned`, before any sum."""

    def at_all(
        self, per_tower: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> PyTree:
        """Report on all towers; ``per_tower`` are their single reports."""


class FiniteSums:
    """A `Look` that reports whether all sums, except metrics, are finite.

    The rows of a table's gradient are checked, too.
    """

    of_each: ClassVar[bool] = False

    def at_tower(self, tree: PyTree) -> None:
        """Look at nothing: if a tower's value is not finite, the sum shows it."""

    def at_all(
        self, per_tower: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> jax.Array:
        """Return whether the sums and rows are finite, ``()`` bool."""
        added, rows = guarded
        return added.are_finite(rows)


class TowersFlags:
    """A `Look` that finds each tower's values that are not finite, before any sum."""

    of_each: ClassVar[bool] = True

    def at_tower(self, tree: PyTree) -> PyTree:
        """Flag those values that the tower returns that are not finite."""
        return flag_leaves(parts_of_tower(values_of(tree)))

    def at_all(
        self, per_tower: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> PyTree:
        """Gather the `Flags` of all towers, together with those of the parameters."""

        def flag(x: Any) -> Any:
            return flag_leaves([("parameter", "params", x)])

        replicated = on_shards(flag, params, replicated=True)
        return all_gather_rows(join_flags(replicated, per_tower), axes)


class TowersBits:
    """A `Look` that hashes the bits of all that each tower returns, before any sum."""

    of_each: ClassVar[bool] = True

    def at_tower(self, tree: PyTree) -> Bits:
        """Take the `Bits` of the arrays that the tower returns."""
        return Bits.of(arrays_of_tower(tree))

    def at_all(
        self, per_tower: Bits, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> Bits:
        """Gather the `Bits` of all towers, with a row for each."""
        return all_gather_rows(per_tower, axes)


TowerFn: TypeAlias = Callable[..., PyTree]
"""``(state, rows, tower) -> tree`` of one tower, merged by the types of its leaves.

In a later pass the last argument is ``merged``, the result of the pass before. In a
pass with ``trained`` the first argument is the trained values.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One run of all towers, whose results are merged by their types."""

    tower_fn: TowerFn
    strategy: Strategy
    # The number of parts of a tower's rows that are computed in turn.
    micro_batches: int = 1
    # Whether towers read local variables as values reduced over all towers, as in an
    # evaluation. The merged results of such a pass are returned, and no later pass
    # computes with them.
    reads_local: bool = False
    looks_at: Look | None = None  # what is reported beside the merged results
    # Whether bare results and variables are part of a state that the user's function
    # made. The proof then also shows that padding has no effect on that state. With a
    # single tower there is nothing to prove.
    of_state: bool = False
    # Whether a later pass uses merged ``Rows``, padding included. Then one leaf of them
    # must be a weight, by which that pass can leave padding out.
    rows_used_later: bool = False
    advice: str | None = None  # ends the error about a bare value that differs
    # ``(state, *merged) -> values``: the pass differentiates the towers' loss by these
    # values, and merges the gradient under the key ``grads``.
    trained: Callable[..., PyTree] | None = None
    # The key under which towers return their loss, or a list of losses. With a list,
    # ``trained`` returns a list too: for each loss the values that it depends on.
    loss: str = "loss"
    # Whether gradients are returned as sums. The update then divides them by the loss's
    # weight.
    merges_sums: bool = False
    differentiates: bool = True  # False: the pass computes its loss only
    loss_reduction: Reduction | None = None  # as the user gave it, for errors

    # The layout of each argument, as a prefix tree, by the argument's name. Arguments
    # are global values. ``merged`` is a tuple with the result of the pass before, if
    # there is one.
    ins: ClassVar[dict[str, PyTree]] = {
        "state": STATE_LAYOUT,
        **BATCH_LAYOUT,
        "merged": Layout.MIRRORED,
    }

    @property
    def takes_gradient(self) -> bool:
        """Whether the pass differentiates its loss."""
        return self.trained is not None and self.differentiates

    @property
    def needs_each(self) -> bool:
        """Whether each tower's own results must be known before they are added."""
        ops = self.strategy.cross_tower_ops
        looks_at_each = self.looks_at is not None and self.looks_at.of_each
        return ops.needs_every_tower or looks_at_each

    def shards(self, args: PyTree, out: tuple[PyTree, PyTree]) -> Shards | None:
        """Decide which arguments and results devices hold in shards; None if none.

        With ``state="sharded"`` parameters and sums of their shapes are sharded. If
        only the optimizer's state is sharded, parameters are whole; their shards then
        only tell which sums are scattered.
        """
        placement = self.strategy.placement
        if self.strategy.state == "mirrored" or placement.num_devices == 1:
            return None
        mirrored = Layout.MIRRORED
        sharded = Layout.SHARDED
        is_exact = self.strategy.exact
        state, *of_batch, merged = args
        params = state.params
        shapes = {x.shape for x in jax.tree.leaves(params)}
        if is_exact:
            shapes = set()  # no sum is scattered

        def layout_of(x: Any) -> Layout:
            is_sharded = not is_per_tower_value(x) and x.shape in shapes
            return sharded if is_sharded else mirrored

        replicated = jax.tree.map(lambda _: mirrored, state)
        in_shards = dataclasses.replace(
            replicated, params=jax.tree.map(lambda _: sharded, params)
        )
        batch_at = jax.tree.map(lambda _: mirrored, of_batch)
        # The result of an earlier pass has the layout in which that pass returned it.
        merged_at = jax.tree.map(layout_of, merged)
        if self.strategy.state == "sharded":
            held = in_shards, *batch_at, merged_at
            used = replicated, *batch_at, mirrored
        else:
            held = replicated, *batch_at, merged_at
            used = in_shards, *batch_at, mirrored
        results, looks = out
        results_at = jax.tree.map(layout_of, results, is_leaf=is_per_tower_value)
        looks_at = jax.tree.map(lambda _: mirrored, looks)
        return shards_of(
            placement,
            (args, held),
            (out, (results_at, looks_at)),
            params=params,
            taken=used,
            exact=is_exact,
        )

    def used(self, held: PyTree) -> PyTree:
        """Make the state that towers use from the state that a device holds.

        If only the optimizer's state is sharded, a parameter's `Shard` tells how the
        sum of its gradient is scattered. Towers then get the whole parameter without a
        gather.
        """
        if self.strategy.state != "sharded_optimizer":
            return held
        params = jax.tree.map(whole, held.params, is_leaf=is_shard)
        return dataclasses.replace(held, params=params)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPass:
    """A pass that was traced: it holds one tower's program, which all towers run."""

    pass_: Pass
    args: tuple[PyTree, ...]  # the shapes of its arguments, as global values
    towers: OnTowers

    @functools.cached_property
    def layouts(self) -> tuple[PyTree, PyTree]:
        """The layouts of the merged results and of the `Look`'s report, as a pair."""
        return layouts_of(self.towers.out)

    @property
    def out(self) -> tuple[PyTree, PyTree]:
        """The shapes of the merged results and of the `Look`'s report, as a pair."""
        count = self.pass_.strategy.placement.num_towers

        def of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype)

        return map_parts(
            PerTowerValue, lambda value: jax.tree.map(of, value), self.towers.out
        )

    def run(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Run the pass; arguments and results are global values."""
        shards = self.pass_.shards(args, self.towers.out)
        return self.towers.run(self.layouts, args, shards=shards)
