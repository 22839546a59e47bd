"""What does a pass do on a device? Its towers; what they return, merged by type."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state, jaxpr_as_fun

from towerjax.collectives.base import KeepsState, sum_over_towers
from towerjax.collectives.packing import Sums
from towerjax.collectives.reduce import rows_of_all_devices
from towerjax.collectives.rows_over_towers import reduce_stacked_rows
from towerjax.collectives.sparse_rows import in_parts, num_rows
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.data.shard import end_to_end, rows_of_towers, with_shared
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.state import is_additive, is_metric, merged_rows
from towerjax.proof.analysis import depends
from towerjax.proof.found import refuse_of_parts
from towerjax.proof.scale import SUMMED_BY_STEP
from towerjax.step.amiss import flags, side_by_side
from towerjax.step.checking import Check, Findings, after, copies_on_device, findings
from towerjax.step.returned import (
    are_gradients,
    filled,
    is_typed,
    parts_of_tower,
    refuse_mixed_up,
    split,
)
from towerjax.step.state import STATE_LAYOUT, TrainState, state_layout
from towerjax.towers.executors import tower_explained
from towerjax.towers.one_axis import over_local_towers
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower, tower_of
from towerjax.towers.tower_local import (
    read_local_over_towers,
    with_local_values,
)
from towerjax.towers.variables import TowerLocal, plain
from towerjax.types import Layout, PerTower, PyTree, Reduction, Rows, Sum, names_by_key
from towerjax.types.leaves import key_data


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """All towers once, and the merge of what they return: between two global views."""

    # (state, rows, tower, *merged) -> tree, of one tower, after the pass before.
    tower_fn: Callable[..., PyTree]
    strategy: Strategy
    micro_batches: int = 1  # in how many parts a tower's rows are worked off
    reads_local: bool = False  # are its tower-local variables read over towers?
    finite: bool = False  # is it told whether all that is added is finite, but metrics?
    check: Check | None = None  # what is looked at besides
    keeps: bool = False  # may its cross-tower op sum the gradient, with a state?
    # "summed": it is made for the denominators of the means that its towers
    # differentiate, and comes to these alone; "given": `merged` ends with them.
    weights: Literal["summed", "given"] | None = None
    # Are its bare values and the tower-local ones a state that a function of the user's
    # made? On one tower it may be any, and padding must not count in it.
    of_state: bool = False
    # Do rows go on with the padded ones, so that something has to tell which these are?
    rows_go_on: bool = False
    advice: str | None = None  # where a bare value differs; None says the usual
    # (state, returned) -> tree: what a tower makes of what its micro-batches came to,
    # before that is merged. It is proved that towers do not meet in it.
    alone: Callable[[TrainState, PyTree], PyTree] | None = None

    # Name -> a prefix tree of layouts, of arguments and of results, which are a tuple.
    # The leaves of a result without a name have names of their own.
    in_layouts: ClassVar[dict[str, Any]] = {
        "state": STATE_LAYOUT,
        **BATCH_LAYOUT,
        "merged": Layout.MIRRORED,
    }
    out_layouts: ClassVar[dict[str, Any]] = {
        "": Layout.MIRRORED,
        "own": Layout.PER_TOWER,
        "finite": Layout.MIRRORED,
        "found": Layout.MIRRORED,
        "op_state": Layout.PER_TOWER,
        "told": Layout.MIRRORED,
    }

    @functools.cached_property
    def for_weights(self) -> "Pass":
        """The pass for the weights of a loss of several means alone."""
        off: Any = {"finite": False, "check": None, "keeps": False}
        return dataclasses.replace(self, weights="summed", **off)

    @functools.cached_property
    def with_weights(self) -> "Pass":
        """The pass that is given these weights."""
        return dataclasses.replace(self, weights="given")

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The pass as each device runs it."""

        def run(
            state: TrainState,
            batch: PyTree,
            num_valid: jax.Array,
            shared: list[PyTree],
            merged: PyTree,
        ) -> tuple[PyTree, PyTree, jax.Array | None, Findings | None, PyTree, PyTree]:
            copies, common = None, None
            if self.check is not None:
                layout = state_layout(self.strategy)
                copies = copies_on_device(state, self.check, axes, layout)
                if self.check.nonfinite:
                    part = ("parameter", "params", state.params)
                    common = flags([part], due=self.check.is_due(state.step))
                    num_valid = after(common.table, num_valid)
                if copies is not None:
                    num_valid = after(copies.prints, num_valid)
            towers = self._towers(axes, state, batch, num_valid, shared, merged)
            sums, (tree, folded, joined, own, flagged) = towers
            sums, op_state, told = self._summed(sums, tree, state, axes)
            added, shown, due = sums.tree()
            folded = [merged_rows(rows_of_all_devices(x, axes)) for x in folded]
            joined = [_of_all_towers(x, axes) for x in joined]
            tree = jax.tree.map(lambda x: x[0], tree)
            pools = {"added": added, "shown": shown, "folded": folded}
            tree = filled(tree, {**pools, "joined": joined})
            finite, found = None, None
            if self.finite:
                finite = sums.finite(len(jax.tree.leaves(added)))
                for x in joined:
                    finite &= jnp.isfinite(x.values).all()
            if self.check is not None:
                if common is not None:
                    flagged = side_by_side(common, flagged)
                found = findings(copies, flagged, due > 0, axes)
            own = [end_to_end(x) if isinstance(x, Rows) else x for x in own]
            return tree, own, finite, found, op_state, told

        return run

    def _summed(
        self, sums: PyTree, tree: PyTree, state: TrainState, axes: TowerAxes
    ) -> tuple[Sums, PyTree, dict[str, jax.Array]]:
        """The sums over all towers; what the op keeps of them, and tells."""
        ops = self.strategy.cross_tower_ops
        if not (self.keeps and isinstance(ops, KeepsState)):
            return sum_over_towers(ops, sums, axes), None, {}
        is_gradient = jax.tree.map(lambda _: False, sums)
        is_gradient = (are_gradients(tree, sums[0]), *is_gradient[1:])
        own = plain(state.own)
        with jax.named_scope(SUMMED_BY_STEP):
            sums, own, told = ops.sum_with_state(sums, is_gradient, own, axes)
        return sums, with_local_values(state.own, own), told

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's values in which padded rows would count, before the merge."""
        returned = dataclasses.replace(self, alone=None)
        if self.alone is not None:  # another program than that which is kept
            axes = dataclasses.replace(axes, traced=None)

        def run(*args: PyTree) -> PyTree:
            towers = returned._towers(axes, *args)
            (added, shown, _), (tree, folded, joined, own, _) = towers
            pools = {"added": added, "shown": shown, "folded": folded}
            # Which rows of a table are looked up, no weight decides.
            pools["joined"] = [x.values for x in joined]
            tree = tree if self.of_state else jax.tree.map(lambda x: None, tree)
            rows = [x for x in own if isinstance(x, Rows)]
            # The weight of some of a pass's rows tells of all.
            told = sum(jnp.sum(key_data(x) != 0) for x in jax.tree.leaves(rows))

            def kept(x: Any) -> Any:
                if isinstance(x, Rows):
                    return told if self.rows_go_on else None
                return x if isinstance(x, TowerLocal) and self.of_state else None

            return filled(tree, {**pools, "own": [kept(x) for x in own]})

        return run

    def _towers(
        self,
        axes: TowerAxes,
        state: TrainState,
        batch: PyTree,
        num_valid: jax.Array,
        shared: list[PyTree],
        merged: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """What this device's towers add up, and what each keeps, ``[k, ...]``."""
        ops, read = self.strategy.cross_tower_ops, None
        if self.reads_local:
            read = read_local_over_towers(state.local, ops, axes)

        def tower_fn(
            tower_id: jax.Array, own: PyTree, state: TrainState, *common: PyTree
        ) -> tuple[PyTree, PyTree]:
            read, shared, merged = common
            *own, mine = own
            state = dataclasses.replace(state, own=mine)
            own = (*own, read)
            tree, pools = self._tower(axes, tower_id, state, own, shared, merged)
            due, flagged = None, None
            if self.check is not None:
                # Is any device's check due? Sent along; a collective more is dear.
                due = self.check.is_due(state.step).astype(jnp.float32)
                if self.check.nonfinite:
                    flagged = flags(parts_of_tower(tree, pools), due=due > 0)
            sums = (pools["added"], pools["shown"], due)
            kept = (pools["folded"], pools["joined"], pools["own"])
            return sums, (tree, *kept, flagged)

        rows = rows_of_towers(batch, axes.num_local)
        local = plain(state.local)
        # What an op keeps is not the towers' matter.
        mine = None if self.keeps else state.own
        own = (rows, num_valid, local, mine)
        # Of a device's own size are the rows of its towers alone.
        first = with_local_values(state.local, jax.tree.map(lambda x: x[0], local))
        state = dataclasses.replace(state, local=first, own=None)
        common = (state, read, shared, merged)
        stacked, number = ops.needs_every_tower, state.step
        return over_local_towers(
            tower_fn, axes, own, *common, stack_sums=stacked, number=number
        )

    def _tower(
        self,
        axes: TowerAxes,
        tower_id: jax.Array,
        state: TrainState,
        own: PyTree,
        shared: list[PyTree],
        merged: PyTree,
    ) -> tuple[PyTree, dict[str, list[Any]]]:
        """What one tower returns, over its micro-batches."""
        rows, num_valid, local, read = own
        part = num_rows(rows) // self.micro_batches

        def of_part(
            index: Any, rows: PyTree, local: PyTree
        ) -> tuple[PyTree, dict[str, list[Any]]]:
            several = self.micro_batches > 1
            seen = local if read is None else read
            tower = tower_of(
                self.strategy,
                axes,
                tower_id,
                state,
                local=seen,
                num_valid=num_valid,
                rows=part,
                first_row=index * part if several else 0,
                micro_batch=index if several else None,
            )
            here = dataclasses.replace(
                state, local=with_local_values(state.local, seen)
            )
            rows = with_shared(rows, shared) if shared else rows
            return split(self._returned(here, rows, tower, merged), part, merged)

        if self.micro_batches == 1:
            tree, pools = of_part(0, rows, local)
        else:
            parts = in_parts(rows, self.micro_batches)
            tree, pools = _in_turn(of_part, self.micro_batches, parts, local)
            refuse_mixed_up(filled(tree, pools), state.local)
        if self.alone is None:
            return tree, pools
        here = dataclasses.replace(state, local=with_local_values(state.local, local))
        return split(self.alone(here, filled(tree, pools)), part)

    def _returned(
        self, state: TrainState, rows: PyTree, tower: Tower, merged: PyTree
    ) -> PyTree:
        """What the function returns; or the denominators that it asks for."""
        noted: list[Sum] = []
        if self.weights == "given":
            *merged, known = merged
            parts = self.micro_batches
            tower = dataclasses.replace(tower, _known=iter(known), _parts=parts)
        elif self.weights == "summed":
            trace = get_opaque_trace_state()

            def note(weights: list[Any]) -> None:
                _refuse_inside(trace)
                noted.append(Sum(weights))

            tower = dataclasses.replace(tower, _note=note)
        with tower_explained():
            out = self.tower_fn(state, rows, tower, *merged)
        if self.weights != "summed":
            return out
        # Of micro-batches the next goes on from these, and so may its weights.
        own = jax.tree.leaves(out, is_leaf=is_typed)
        return noted, [x for x in own if isinstance(x, TowerLocal)]


def _refuse_inside(trace: Any) -> None:
    """Raise where a gradient is made inside of another transformation."""
    if get_opaque_trace_state() != trace:
        raise ValueError(
            "tj.value_and_grad of a sum of several means stands inside a jit, scan,"
            " cond, vmap or jvp, where its weights cannot be seen from outside. Call it"
            " outside of them; or differentiate each mean there by itself, and add the"
            " .value of the gradients in the update."
        )


def _in_turn(
    of_part: Callable[..., Any], count: int, parts: PyTree, local: PyTree
) -> tuple[PyTree, dict[str, list[Any]]]:
    """A tower's parts one after another, traced once; what they return, by kind."""
    first = jax.tree.map(lambda x: x[0], parts)
    args = (jnp.int32(0), first, local)
    closed, shapes = jax.make_jaxpr(of_part, return_shape=True)(*args)
    treedef, run = jax.tree.structure(shapes), jaxpr_as_fun(closed)
    own = shapes[1]["own"]
    locals_ = [x for x in own if isinstance(x, TowerLocal)]
    _check_joins(own, locals_, local)
    moving = len(jax.tree.leaves(args if locals_ else args[:2]))
    others = len(closed.jaxpr.invars) - moving
    found = depends(closed, ["its rows"] * moving + [None] * others)
    refuse_of_parts(found.outputs, names_by_key(shapes[0]))

    def body(carry: PyTree, numbered: PyTree) -> tuple[PyTree, PyTree]:
        total, local = carry
        out = run(*jax.tree.leaves((numbered[0], numbered[1], local)))
        tree, pools = jax.tree.unflatten(treedef, out)
        rows = pools["joined"], [x for x in pools["own"] if isinstance(x, Rows)]
        if locals_:
            after = [x.value for x in pools["own"] if isinstance(x, TowerLocal)]
            leaves = jax.tree.leaves(after)
            local = jax.tree.unflatten(jax.tree.structure(local), leaves)
        total = jax.tree.map(jnp.add, total, _summed(pools))
        return (total, local), (tree, pools["folded"], rows)

    zeros = jax.tree.map(jnp.zeros_like, _summed(shapes[1]))
    numbered = (jnp.arange(count, dtype=jnp.int32), parts)
    (added, local), (tree, folded, kept) = lax.scan(body, (zeros, local), numbered)
    tables, rows = kept
    after = jax.tree.leaves(local) if locals_ else []
    of_kind = {
        Rows: iter(map(end_to_end, rows)),
        PerTower: iter(added[2]),
        TowerLocal: iter(jax.tree.unflatten(jax.tree.structure(locals_), after)),
    }
    own = [next(of_kind[type(x)]) for x in own]
    pools = {"added": added[0], "shown": added[1], "own": own}
    pools["folded"] = [merged_rows(x) for x in folded]
    pools["joined"] = [reduce_stacked_rows(Reduction.SUM, x, count) for x in tables]
    return jax.tree.map(lambda x: x[-1], tree), pools


def _summed(pools: dict[str, list[Any]]) -> tuple[list[Any], ...]:
    """What a tower's parts add up: what towers add too, and what each keeps."""
    own = [x for x in pools["own"] if isinstance(x, PerTower)]
    return pools["added"], pools["shown"], own


def _adds_up(x: PerTower) -> bool:
    values = jax.tree.leaves(x.values, is_leaf=is_typed)
    return all(is_metric(v) and is_additive(v) for v in values)


def _check_joins(own: list[Any], returned: list[TowerLocal], local: PyTree) -> None:
    """Raise unless parts can be joined, and each go on from the one before it."""
    if not all(_adds_up(x) for x in own if isinstance(x, PerTower)):
        raise ValueError(
            "A tower of several micro-batches returned tj.PerTower of an array, of"
            " which each part has one. Say how parts become one, such as"
            " tj.PerTower(tj.Sum(x)), or return tj.Sum, tj.Weighted or tj.Rows."
        )

    def types(tree: PyTree) -> list[Any]:
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    if returned and types(returned) != types(local):
        raise ValueError(
            "A tower of several micro-batches returned tower-local variables"
            f" {types(returned)}, but state.local holds {types(local)}. Return all of"
            " state.local, changed, so that the next part goes on from it."
        )


def _of_all_towers(rows: Any, axes: TowerAxes) -> Any:
    """The rows of a table that all towers' rows are, side by side."""
    rows = rows_of_all_devices(rows, axes)
    return reduce_stacked_rows(Reduction.SUM, rows, axes.num_towers)
