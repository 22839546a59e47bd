"""A pass: run all towers of a device, and merge what they return by its type."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state, jaxpr_as_fun

from towerjax.collectives.ops import sum_over_towers
from towerjax.collectives.packing import Sums
from towerjax.collectives.reduce import all_gather_rows
from towerjax.collectives.sparse_rows import (
    IndexedRows,
    is_rows,
    num_rows,
    split_micro_batches,
)
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.data.shard import split_rows, with_shared
from towerjax.mesh.placement import TowerAxes
from towerjax.mesh.private_jax import inputs_read
from towerjax.proof import tags
from towerjax.proof.analysis import depends
from towerjax.proof.findings import Analysis, refuse_varying
from towerjax.step.state.accumulators import (
    CARRIED,
    JOINED,
    OWN,
    ROWS,
    SAME,
    Returned,
    is_own,
    is_typed,
    parts_of_tower,
    put_sums,
    refuse_mixed_up,
    split_returned,
    take_sums,
    values_of,
)
from towerjax.step.state.faults import flag_leaves, join_flags
from towerjax.step.state.train_state import STATE_LAYOUT, TrainState
from towerjax.towers.executors import in_tower_fn
from towerjax.towers.lowering.in_turn import scan_in_turn
from towerjax.towers.lowering.parts import Shards, shards_of
from towerjax.towers.lowering.tower_axis import TowerPrograms, over_local_towers
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Denominators, Tower, tower_of, with_context
from towerjax.towers.variables import (
    TowerLocal,
    plain,
    read_local_over_towers,
    with_local_values,
)
from towerjax.types import Layout, PerTower, PyTree, Sum, names_by_key
from towerjax.types.leaves import key_data, listed, map_parts, parts_of, put_parts
from towerjax.types.version import page
from towerjax.types.warning import warn

Guarded: TypeAlias = tuple[Sums, int, list[IndexedRows]]
"""What a step adds up: the sums, how many of them are guarded, rows of tables."""


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
        sums, number, rows = guarded
        finite = [jnp.isfinite(x.values).all() for x in rows]
        return functools.reduce(jnp.logical_and, finite, sums.are_finite(number))


class TowersFlags:
    """`Flags` of what is not finite on each tower, before any sum."""

    def at_tower(self, tree: PyTree) -> PyTree:
        """Those of what the tower returns."""
        return flag_leaves(parts_of_tower(values_of(tree)))

    def at_all(
        self, own: PyTree, params: PyTree, guarded: Guarded, axes: TowerAxes
    ) -> PyTree:
        """Those of all towers, and of the parameters."""
        common = flag_leaves([("parameter", "params", params)])
        return all_gather_rows(join_flags(common, own), axes)


TowerFn: TypeAlias = Callable[..., PyTree]
"""``(state, rows, tower) -> tree`` of one tower, merged by the types of its leaves.

A later pass is given ``merged``, of the pass before, as a last argument.
"""


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

    # By its name, a prefix tree of layouts for each argument, a global value: merged
    # is a tuple, of the result of the pass before, if any.
    ins: ClassVar[dict[str, PyTree]] = {
        "state": STATE_LAYOUT,
        **BATCH_LAYOUT,
        "merged": Layout.MIRRORED,
    }

    @functools.cached_property
    def for_weights(self) -> "Pass":
        """This pass, returning the weights of a loss of several means alone."""
        fn = functools.partial(_weights_of, self.tower_fn)
        return dataclasses.replace(self, tower_fn=fn, looks_at=None)

    @functools.cached_property
    def with_weights(self) -> "Pass":
        """This pass, given the weights as the last entry of ``merged``."""

        def tower_fn(
            state: TrainState, rows: PyTree, tower: Tower, *merged: PyTree
        ) -> PyTree:
            *before, known = merged
            tower = with_context(tower, denominators=Denominators(known=known))
            return self.tower_fn(state, rows, tower, *before)

        return dataclasses.replace(self, tower_fn=tower_fn)

    def on_device(
        self, axes: TowerAxes, programs: TowerPrograms
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """The function that each device runs: ``(merged, what it looks at)``.

        What is merged and each tower's own is `TowersOwn`.
        """

        def run(*args: PyTree) -> tuple[PyTree, PyTree]:
            own, (tree, flagged) = self._run_towers(axes, programs, args)
            sums = sum_over_towers(self.strategy.cross_tower_ops, own, axes)
            added, shown = sums.tree()
            tree = put_sums(tree, (added, shown))
            parts, seen = parts_of(Returned, tree), None
            merged = [x.how.merge(x.value, axes) for x in parts]
            if self.looks_at is not None:
                pairs = zip(parts, merged, strict=True)
                rows = [x for part, x in pairs if part.how is JOINED]
                guarded = sums, len(jax.tree.leaves(added)), rows
                seen = self.looks_at.at_all(flagged, args[0].params, guarded, axes)
            return put_parts(Returned, tree, merged), seen

        return run

    def shards(self, args: PyTree, out: tuple[PyTree, PyTree]) -> Shards | None:
        """Which parameters, and sums of their shapes, devices hold in parts."""
        place = self.strategy.placement
        if self.strategy.state != "sharded" or place.num_devices == 1:
            return None
        whole, split = Layout.MIRRORED, Layout.SHARDED
        state, *rest = jax.tree.map(lambda x: whole, args)
        ours = jax.tree.map(lambda x: split, state.params)
        given = dataclasses.replace(state, params=ours), *rest
        shapes = {x.shape for x in jax.tree.leaves(args[0].params)}
        if exact := self.strategy.cross_tower_ops.needs_every_tower:
            shapes = set()  # their sums are whole

        def of_result(x: Any) -> Layout:
            return whole if is_own(x) or x.shape not in shapes else split

        merged = jax.tree.map(of_result, out[0], is_leaf=is_own)
        wanted = merged, jax.tree.map(lambda x: whole, out[1])
        params = args[0].params
        return shards_of(
            place, (args, given), (out, wanted), params=params, exact=exact
        )

    def values_to_mask(
        self, axes: TowerAxes, programs: TowerPrograms
    ) -> Callable[..., PyTree]:
        """A function that returns the values in which padding must not count."""

        def run(*args: PyTree) -> PyTree:
            sums, (tree, _) = self._run_towers(axes, programs, args)
            tree = put_sums(tree, sums)
            rows = [x.value for x in parts_of(Returned, tree) if x.how is ROWS]
            # One leaf of Rows that is a weight masks all others.
            weighs = sum(jnp.sum(key_data(x) != 0) for x in jax.tree.leaves(rows))

            def kept(x: Returned) -> PyTree:
                if x.how is ROWS:
                    return weighs if self.rows_used_later else None
                if x.how in (SAME, CARRIED):
                    return x.value if self.of_state else None
                if x.how is OWN:
                    return None
                # A weight never decides which rows of a table are looked up.
                return x.value.values if is_rows(x.value) else x.value

            return map_parts(
                PerTower, lambda x: x.values, map_parts(Returned, kept, tree)
            )

        return run

    def reads_no_row(self, programs: TowerPrograms) -> bool:
        """Whether a loss with a gradient reads no leaf of its batch, and draws nothing.

        A draw may be all that it needs, as may a tower's own variable, or what an
        earlier pass has merged.
        """
        if not programs:  # of values that are traced, whose programs are not kept
            return False
        [(_, given, *_), (program, returned)] = next(iter(programs.items()))
        number = returned.num_leaves
        sums, (rest, _) = returned.unflatten(range(number))
        out = values_of(put_sums(rest, sums))
        if not (isinstance(out, dict) and {"loss", "grads"} <= out.keys()):
            return False
        of_loss = {*jax.tree.leaves(out["loss"])}
        are_read = inputs_read(program, [i in of_loss for i in range(number)])
        _, (rows, _, local), state, _, shared, merged = given.unflatten(are_read)
        return not any(jax.tree.leaves((rows, local, state.rng, shared, merged)))

    def _run_towers(
        self, axes: TowerAxes, programs: TowerPrograms, args: tuple[PyTree, ...]
    ) -> tuple[PyTree, PyTree]:
        """This device's sums over its towers, and each tower's own, ``[k, ...]``."""
        state, batch, num_valid, shared, merged = args
        ops, read = self.strategy.cross_tower_ops, None
        if self.reads_local:
            read = read_local_over_towers(state.local, ops, axes)

        def tower_fn(
            tower_id: jax.Array, own: PyTree, *common: PyTree
        ) -> tuple[PyTree, PyTree]:
            tree = self._run_tower(axes, tower_id, own, common)
            flagged = self.looks_at and self.looks_at.at_tower(tree)
            sums, rest = take_sums(tree)
            return sums, (rest, flagged)

        rows = split_rows(batch, axes.num_local)
        local = plain(state.local)
        own = (rows, num_valid, local)
        # Shapes of common arguments may not depend on ``D``: local values are row 0's.
        first = with_local_values(state.local, jax.tree.map(lambda x: x[0], local))
        state = dataclasses.replace(state, local=first)
        return over_local_towers(
            tower_fn,
            axes,
            own,
            state,
            read,
            shared,
            merged,
            stack_sums=ops.needs_every_tower,
            number=state.step,
            programs=programs,
        )

    def _run_tower(
        self, axes: TowerAxes, tower_id: jax.Array, own: PyTree, common: PyTree
    ) -> PyTree:
        """What one tower returns, merged over micro-batches, as `Returned`."""
        rows, num_valid, local = own
        state, read, shared, merged = common
        part, several = num_rows(rows) // self.micro_batches, self.micro_batches > 1

        def holding(values: PyTree) -> TrainState:
            local = with_local_values(state.local, values)
            return dataclasses.replace(state, local=local)

        def of_part(index: Any, rows: PyTree, local: PyTree) -> PyTree:
            seen = local if read is None else read
            # Else the tower's program may not depend on the number of devices.
            may_depend = not self.strategy.cross_tower_ops.needs_every_tower
            tower = tower_of(
                self.strategy,
                axes,
                tower_id,
                state,
                local=seen,
                micro_batches=self.micro_batches,
                rows=part,
                num_valid=num_valid,
                of_rows=part * self.micro_batches if may_depend else None,
                first_row=index * part if several else 0,
                micro_batch=index if several else None,
            )
            rows = self.strategy.placement.split_rows(rows)
            rows = with_shared(rows, shared) if shared else rows
            with in_tower_fn():
                out = self.tower_fn(holding(seen), rows, tower, *merged)
            return split_returned(out, part, merged)

        if several:
            parts = split_micro_batches(rows, self.micro_batches)
            args = self.micro_batches, parts, holding(local).local
            return _scan_micro_batches(of_part, *args)
        return of_part(0, rows, local)


def _weights_of(
    tower_fn: TowerFn, state: TrainState, rows: PyTree, tower: Tower, *merged: PyTree
) -> PyTree:
    """The denominators that a tower function's sums of means have, as sums."""
    noted, trace = list[Sum](), get_opaque_trace_state()

    def note(weights: list[Any]) -> None:
        if get_opaque_trace_state() != trace:
            raise ValueError(
                "tj.value_and_grad of a sum of several means stands inside a jit, scan,"
                " cond, vmap or jvp, so the step cannot read its weights. Call it"
                " outside, or differentiate each mean there alone, and add the .value"
                " of the gradients in the update."
            )
        noted.append(Sum(weights))

    tower = with_context(tower, denominators=Denominators(note))
    out = tower_fn(state, rows, tower, *merged)
    # The next micro-batch starts from these, and its weights may depend on them.
    kept = lambda x: x if isinstance(x, TowerLocal) else None  # noqa: E731
    return noted, jax.tree.map(kept, out, is_leaf=is_typed)


def _scan_micro_batches(
    of_part: Callable[..., PyTree], count: int, parts: PyTree, variables: PyTree
) -> PyTree:
    """The merged results of a tower's micro-batches, traced once, run by ``scan``."""
    first, local = jax.tree.map(lambda x: x[0], parts), plain(variables)
    args = (jnp.int32(0), first, local)
    closed, shapes = jax.make_jaxpr(of_part, return_shape=True)(*args)
    treedef, run = jax.tree.structure(shapes), jaxpr_as_fun(closed)
    each = parts_of(Returned, shapes)
    refuse_mixed_up(shapes, variables)
    analysis, names = _differences(closed, treedef, len(jax.tree.leaves(args[:2])))
    _check_micro_batch(analysis, names, count)
    carried = [x.value for x in each if x.how is CARRIED]
    held = jax.tree.structure(carried), jax.tree.structure(local)
    before = iter(held[0].unflatten(jax.tree.leaves(local)) if carried else [])
    starts = [x.how.start(next(before) if x.how is CARRIED else x.value) for x in each]

    def body(
        so_far: list[PyTree], numbered: PyTree
    ) -> tuple[list[PyTree], list[PyTree]]:
        variables = [c for c, x in zip(so_far, each, strict=True) if x.how is CARRIED]
        now = held[1].unflatten(jax.tree.leaves(variables)) if carried else local
        out = run(*jax.tree.leaves((*numbered, now)))
        new = parts_of(Returned, jax.tree.unflatten(treedef, out))
        pairs = [x.how.add(c, x.value) for c, x in zip(so_far, new, strict=True)]
        return [c for c, _ in pairs], [kept for _, kept in pairs]

    numbered = (jnp.arange(count, dtype=jnp.int32), parts)
    ends = zip(*scan_in_turn(body, starts, numbered), each, strict=True)
    done = [Returned(x.how.finish(c, kept), x.how) for c, kept, x in ends]
    return put_parts(Returned, shapes, done)


def _differences(
    closed: ClosedJaxpr, treedef: Any, number: int
) -> tuple[Analysis, list[str | None]]:
    """What differs between micro-batches, of which so many inputs are rows.

    And of each output the name, if it has to be the same in each.
    """
    given, labels = closed.jaxpr.invars, ["its rows"] * number
    tree = jax.tree.unflatten(treedef, closed.jaxpr.outvars)
    each = parts_of(Returned, tree)
    after = jax.tree.leaves([x for x in each if x.how is CARRIED])
    # A variable that is returned as it came in is the same in each.
    pairs = zip(given[number:], after, strict=False)
    labels += [None if old is new else "its rows" for old, new in pairs]
    analysis = depends(closed, [*labels, *[None] * (len(given) - len(labels))])
    is_bare = [x.how is SAME for x in each for _ in jax.tree.leaves(x)]
    names = zip(names_by_key(values_of(tree)), is_bare, strict=True)
    return analysis, [name if bare else None for name, bare in names]


def _check_micro_batch(
    analysis: Analysis, names: Sequence[str | None], count: int
) -> None:
    """Refuse what varies, and warn of calls that see the rows of one micro-batch."""
    refuse_varying(analysis, names)
    calls = [x for x in analysis.tower_calls if x.source and x.name in tags.TOWER_CALLS]
    if calls:
        each = dict.fromkeys(f"{x.name} at {x.line}" for x in calls)
        warn(
            f"Each of {count} micro-batches calls {listed(each)}, of its own rows, so"
            " that the numbers change with micro_batches=. What all rows are to tell,"
            " compute in an earlier pass of tj.build_step, as in"
            f" {page('how_to/several_losses', 'A function of a mean')}"
        )
