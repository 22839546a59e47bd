"""A pass: what towers compute once, and what is made of it. Nothing runs here."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax

from towerjax.collectives.reduce import all_gather_rows
from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.lowering.sharded_values import Shards, shards_of
from towerjax.lowering.shards import on_shards
from towerjax.mesh.placement import TowerAxes
from towerjax.step.passes.added import Added
from towerjax.step.passes.derivative import Zeros
from towerjax.step.state.accumulators import (
    PerTowerValue,
    is_per_tower_value,
    layouts_of,
    parts_of_tower,
    values_of,
)
from towerjax.step.state.faults import flag_leaves, join_flags
from towerjax.step.state.train_state import STATE_LAYOUT
from towerjax.towers.on_towers import OnTowers
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree, Reduction
from towerjax.types.trees import map_parts

Guarded: TypeAlias = tuple[Added, list[IndexedRows]]
"""What a step adds up: the sums, and rows of tables."""


class Look(Protocol):
    """What a pass looks at, on each tower and where all is merged."""

    def at_tower(self, tree: PyTree) -> PyTree:
        """What one tower says of the `Returned` that it has."""

    def at_all(
        self, own: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> PyTree:
        """The result, of what each tower said."""


class FiniteSums:
    """Whether all that is added up but metrics is finite, rows of tables included."""

    def at_tower(self, tree: PyTree) -> None:
        """Nothing: what is not finite shows in the sum."""

    def at_all(
        self, own: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> jax.Array:
        """``()`` bool."""
        added, rows = guarded
        return added.are_finite(rows)


class TowersFlags:
    """`Flags` of what is not finite on each tower, before any sum."""

    def at_tower(self, tree: PyTree) -> PyTree:
        """Those of what the tower returns."""
        return flag_leaves(parts_of_tower(values_of(tree)))

    def at_all(
        self, own: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> PyTree:
        """Those of all towers, and of the parameters."""
        flag = lambda x: flag_leaves([("parameter", "params", x)])  # noqa: E731
        replicated = on_shards(flag, params, replicated=True)
        return all_gather_rows(join_flags(replicated, own), axes)


TowerFn: TypeAlias = Callable[..., PyTree]
"""``(state, rows, tower) -> tree`` of one tower, merged by the types of its leaves.

A later pass is given ``merged``, of the pass before, as a last argument. The function
of a pass with ``trained`` is given these values as a first one.
"""


class PerTowerArgs(NamedTuple):
    """What one tower has of its own, or each of several, stacked."""

    rows: PyTree
    num_valid: jax.Array
    local: PyTree  # its variables
    zeros: Zeros = ()  # what is added to the rows that it looks up


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """Runs all towers once, and merges what they return by its type."""

    tower_fn: TowerFn
    strategy: Strategy
    micro_batches: int = 1  # parts of a tower's rows, one after another
    # Whether towers see local variables reduced: such a pass evaluates, and what it
    # merges is returned and not computed with.
    reads_local: bool = False
    looks_at: Look | None = None  # what it returns beside what is merged
    # Whether bare and local results are a state that the user's function made. Padding
    # must not count in that state, and that of a single tower needs no proof.
    of_state: bool = False
    # Whether Rows are used later, padding included: then one leaf must be a weight.
    rows_used_later: bool = False
    advice: str | None = None  # for the error about a bare value that differs
    # ``(state, *merged) -> values``, by which the pass differentiates the loss that
    # towers return; the gradient is merged as ``grads``.
    trained: Callable[..., PyTree] | None = None
    # Where towers return what is differentiated. There may be a list of losses; then
    # ``trained`` gives a list too, of the values that each depends on.
    loss: str = "loss"
    # Whether gradients are merged as sums, which an update divides by a loss's weight.
    merges_sums: bool = False
    differentiates: bool = True  # False: the loss of such a pass alone
    loss_reduction: Reduction | None = None  # as a user says it, for errors

    # By its name, a prefix tree of layouts for each argument, a global value: merged
    # is a tuple, of the result of the pass before, if any.
    ins: ClassVar[dict[str, PyTree]] = {
        "state": STATE_LAYOUT,
        **BATCH_LAYOUT,
        "merged": Layout.MIRRORED,
    }

    def shards(self, args: PyTree, out: tuple[PyTree, PyTree]) -> Shards | None:
        """Which parameters, and sums of their shapes, devices hold in shards."""
        place = self.strategy.placement
        if self.strategy.state != "sharded" or place.num_devices == 1:
            return None
        whole = Layout.MIRRORED
        split = Layout.SHARDED
        state, *rest = jax.tree.map(lambda x: whole, args)
        ours = jax.tree.map(lambda x: split, state.params)
        shapes = {x.shape for x in jax.tree.leaves(args[0].params)}
        if exact := self.strategy.exact:
            shapes = set()  # their sums are whole
        # What an earlier pass has merged lies as it was left.
        *rest, merged = rest
        of_merged = lambda x: split if x.shape in shapes else whole  # noqa: E731
        merged = jax.tree.map(of_merged, args[-1])
        given = dataclasses.replace(state, params=ours), *rest, merged

        def of_result(x: Any) -> Layout:
            return whole if is_per_tower_value(x) or x.shape not in shapes else split

        wanted = jax.tree.map(of_result, out[0], is_leaf=is_per_tower_value)
        wanted = wanted, jax.tree.map(lambda x: whole, out[1])
        params = args[0].params
        return shards_of(
            place, (args, given), (out, wanted), params=params, exact=exact
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPass:
    """A pass: one tower's program, which is what all towers run."""

    pass_: Pass
    args: tuple[PyTree, ...]  # the shapes of its arguments, as global values
    towers: OnTowers

    @functools.cached_property
    def layouts(self) -> tuple[PyTree, PyTree]:
        """A prefix tree of the layouts of what it merges and looks at."""
        return layouts_of(self.towers.out)

    @property
    def out(self) -> tuple[PyTree, PyTree]:
        """The shapes of what it merged and looked at, as global values."""
        count = self.pass_.strategy.placement.num_towers

        def of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype)

        return map_parts(
            PerTowerValue, lambda own: jax.tree.map(of, own), self.towers.out
        )

    def run(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """The results, of and as global values."""
        shards = self.pass_.shards(args, self.towers.out)
        return self.towers.run(self.layouts, args, shards=shards)
