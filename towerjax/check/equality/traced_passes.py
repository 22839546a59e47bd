"""The programs that a proof compares: the step's own, and one tower's on its batch.

The step's own program is the one that runs: a tower's, with that tower's rows. The
other is traced once more, for one tower that has all examples of the batch. A
micro-batch counts as a tower, because a step runs the same program for each.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from towerjax.check.comparison import GRADIENT
from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.data.batch_rows import without_replicated
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.tower_axis import TowerPrograms, over_local_towers
from towerjax.metrics.weighted import Means, Weighted
from towerjax.proof.equal.one_tower import Given, Merge, MergedLeaf, TowerProgram
from towerjax.step.passes.on_device import over_towers
from towerjax.step.passes.one_pass import Pass
from towerjax.step.passes.traced_tower import Arguments, TracedTower, call_tower
from towerjax.step.plan import Passes, Plan
from towerjax.step.state.accumulators import (
    ADDED,
    CARRIED,
    JOINED,
    MERGED,
    PER_TOWER,
    ROWS,
    SAME,
    SHOWN,
    Returned,
    key_name,
    put_sums,
)
from towerjax.step.state.train_state import TrainState
from towerjax.towers.executors import trace_one_tower
from towerjax.towers.strategies import Strategy, on_one_group
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PerTower, PyTree, Reduction, Rows, Sum
from towerjax.types.trees import key_data, map_parts, parts_of, shapes_of


class NotTracedError(Exception):
    """A tower function raised an error for the rows of a split."""

    def __init__(self, split: "RowSplit", error: Exception) -> None:
        [first, *_] = f"{type(error).__name__}: {error}".splitlines()
        towers = "one tower" if split.towers == 1 else f"{split.towers} towers"
        super().__init__(
            f"its function, traced for {towers} of {split.rows} rows, raises {first}"
        )


@dataclasses.dataclass(frozen=True)
class StepToProve:
    """The parts of a step that a proof of equality needs.

    Attributes:
      plan: The plan, whose passes are proved.
      strategy: Where its towers are.
      state: A state, or shapes.
      batch: A batch, or shapes.
      rows: The number of rows of a tower in one call.
      examples: The number of examples in the batch; None if it has no padding.
      padded: Whether batches may be padded.
      programs: For each pass the programs of the step's towers that were traced
        already, which are not traced again.
    """

    plan: Plan
    strategy: Strategy
    state: TrainState
    batch: PyTree
    rows: int
    examples: int | None = None
    padded: bool = False
    programs: Sequence[TowerPrograms] = ()


@dataclasses.dataclass(frozen=True)
class PassToProve:
    """A pass, traced for several numbers of towers."""

    programs: list[TowerProgram]
    inputs: list[Given]
    outputs: list[MergedLeaf]
    axes: list[str]
    in_micro_batches: bool  # whether a tower has several micro-batches
    has_same_leaves: bool  # whether the leaves are the same for all numbers of towers
    loss_reduction: Reduction | None = None  # what a bare loss means


class RowSplit(NamedTuple):
    """A split of rows over towers, and of a tower's rows into micro-batches."""

    towers: int
    rows: int  # of each tower, or of each micro-batch
    micro_batches: int = 1

    @property
    def number(self) -> int:
        """The number of micro-batches of all towers."""
        return self.towers * self.micro_batches


def splits_of(step: StepToProve, micro_batches: int) -> list[RowSplit]:
    """Return the splits whose programs are compared, each with the one before.

    One is the step's own, and one is a single tower with all examples of the batch. If
    batches may be padded, the step's own is also compared with one tower of a number of
    rows that is no power of the number of towers, so that a count of rows is never
    taken for one. A step of one tower without micro-batches is compared with two
    towers of as many rows.
    """
    of_step = RowSplit(step.strategy.num_towers, step.rows, micro_batches)
    if of_step.number == 1:
        of_step = RowSplit(2, step.rows)
    row_shards = step.strategy.placement.row_shards
    total = of_step.number * of_step.rows
    examples = total if step.examples is None else step.examples
    one_tower = RowSplit(1, examples + -examples % row_shards)
    if not step.padded:
        return [one_tower, of_step]
    # Multiples of a tower's rows, which functions that view rows in groups accept.
    counts = [
        count * of_step.rows
        for count in range(2, of_step.number + 6)
        if not _is_power(count, of_step.number)
    ]
    padded, *more = [RowSplit(1, x) for x in counts if x != one_tower.rows]
    if one_tower.rows != of_step.rows:
        return [padded, of_step, one_tower]
    # Rows would have the size of other dims. Towers of more rows stand between.
    larger = of_step._replace(rows=2 * of_step.rows)
    if larger.rows == padded.rows:
        padded = more[0]
    return [of_step, padded, larger, one_tower]


def _is_power(count: int, towers: int) -> bool:
    """Whether a number is a power of the number of towers that a proof tries."""
    power = 2 * math.log(count, towers)
    return abs(power - round(power)) < 1e-9


def traced_passes(step: StepToProve, passes: Passes) -> list[PassToProve]:
    """Trace each pass for the splits that are compared.

    Args:
      step: The step.
      passes: The passes to trace.

    Returns:
      A `PassToProve` for each pass that merges anything.

    Raises:
      NotTracedError: A tower function raised an error for these rows.
    """
    several = max(x.micro_batches for x in passes.each)
    takes_gradient = any(x.differentiates and x.trained for x in passes.each)
    in_micro_batches = several > 1 and not takes_gradient
    columns = []
    splits = splits_of(step, several if in_micro_batches else 1)
    for split in splits:
        plan = dataclasses.replace(step.plan, passes=passes)
        of_split = plan.towers_on(on_one_group(step.strategy, split.towers)).passes
        of_split = of_split.changed(micro_batches=split.micro_batches)
        is_own = split.rows == step.rows and split.number > 1
        # An exact step computes its weights without the number of a tower's rows, by
        # another equation than one tower, which is no exact step. The programs of a
        # tower of several devices name its mesh.
        is_own &= not step.strategy.exact and step.strategy.placement.devices_each == 1
        known = step.programs if is_own else ()
        traced = _trace_passes(of_split, step, split, in_micro_batches, known)
        columns.append([*traced])
    found = []
    for each in zip(*columns, strict=True):
        programs, inputs, outputs, axes, bare = zip(*each, strict=True)
        if not any(outputs):
            continue  # it merges nothing
        has_same_leaves = all(x == outputs[0] for x in outputs)
        given = [*programs], inputs[0], outputs[0], axes[0]
        found.append(PassToProve(*given, several > 1, has_same_leaves, bare[0]))
    return found


def _trace_passes(
    passes: Passes,
    step: StepToProve,
    split: RowSplit,
    in_micro_batches: bool,
    known: Sequence[TowerPrograms],
) -> Iterator[tuple[Any, ...]]:
    """The parts of a `PassToProve` for one split, pass after pass.

    They are a program, its inputs, its outputs, the names of the axes, and the meaning
    of a bare loss.
    """
    number = split.towers
    rows = split.rows

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = (rows * number, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    def of_local(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype)

    own, replicated = without_replicated(step.batch)
    counts = jax.ShapeDtypeStruct((number,), jnp.int32)
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    replicated = jax.tree.map(
        lambda x: x if is_shape(x) else jnp.asarray(x), replicated
    )
    replicated = shapes_of(replicated)
    state = map_parts(
        TowerLocal,
        lambda variable: jax.tree.map(of_local, variable),
        shapes_of(step.state),
    )
    given = state, jax.tree.map(of_all, own), counts, replicated
    merged = list[PyTree]()
    kinds = list[PyTree]()
    for at, pass_ in enumerate(passes.in_turn(merged)):
        before = (passes.given(merged),) if merged else ()
        later = jax.tree.leaves(passes.given(kinds)) if kinds else []
        args = *given, shapes_of(before)
        programs = known[at] if known else {}
        try:
            closed, tree = _trace_tower(pass_, args, in_micro_batches, programs)
        except Exception as error:
            raise NotTracedError(split, error) from error
        program = TowerProgram(closed, split.number, rows, split.micro_batches)
        axes = [DEVICE_AXIS, pass_.strategy.placement.axis_name]
        inputs = [*_inputs_of(step, pass_, own, replicated), *later]
        # The next micro-batch reads what one leaves in a variable.
        variables = [] if in_micro_batches else _variables_of(step, inputs)
        inputs += [Given.MICRO_BATCH] if in_micro_batches else []
        outputs = _leaves_of_tower(tree, variables)
        if pass_.merges_sums:
            outputs = _gradients_as_means(outputs, pass_.loss, tree.get(pass_.loss))
        if pass_.loss_reduction is Reduction.SUM:
            outputs = _losses_as_sums(outputs, pass_.loss)
        yield program, inputs, outputs, axes, pass_.loss_reduction
        merged.append(_as_given_later(tree, split))
        kinds.append(_kinds_given_later(tree))


def _trace_tower(
    pass_: Pass,
    args: tuple[PyTree, ...],
    in_micro_batches: bool,
    programs: TowerPrograms,
) -> tuple[ClosedJaxpr, PyTree]:
    """The program of one tower, and the `Returned` values that it gives, as shapes.

    With ``in_micro_batches`` it is that of one micro-batch, and takes its number.
    """
    axes = pass_.strategy.placement.abstract_axes
    layouts = *pass_.ins.values(), Layout.MIRRORED
    index = jax.ShapeDtypeStruct((), jnp.int32) if in_micro_batches else None

    def first(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)

    def on_device(*args: PyTree) -> PyTree:
        *given, index = args
        arguments = Arguments.of(pass_, axes, *given)
        if in_micro_batches:
            run = functools.partial(call_tower, pass_, axes)
            towers = run, axes, arguments.own, index, *arguments.replicated
            sums, (tree, _) = over_local_towers(*towers, stack_sums=False)
            return put_sums(first(tree), sums)
        tower = TracedTower.of(pass_, axes, programs, arguments)
        sums, (tree, _) = over_towers(tower)
        is_stacked = pass_.strategy.cross_tower_ops.needs_every_tower
        is_stacked = is_stacked and not tower.losses_can_be_added()
        return put_sums(first(tree), first(sums) if is_stacked else sums)

    with jax.default_matmul_precision("highest"):
        return trace_one_tower(on_device, axes, layouts, (*args, index))


def _inputs_of(
    step: StepToProve, pass_: Pass, own: PyTree, replicated: PyTree
) -> list[Given]:
    """The kinds of the inputs of a tower's program, without results of earlier passes.

    An evaluation reads the mean of the towers' variables, which is what one tower has.
    """
    is_local = lambda x: isinstance(x, TowerLocal)  # noqa: E731
    inputs = []
    for x in jax.tree.leaves(step.state, is_leaf=is_local):
        is_read_as_one = pass_.reads_local and is_local(x)
        is_read_as_one &= getattr(x, "reduction", None) is Reduction.MEAN
        is_own = is_local(x) and not is_read_as_one
        kind = Given.PER_TOWER if is_own else Given.REPLICATED
        inputs += [kind] * len(jax.tree.leaves(x))
    of_rows = Given.PER_TOWER if parts_of(IndexedRows, own) else Given.ROWS
    inputs += [of_rows] * len(jax.tree.leaves(own)) + [Given.VALID]
    return inputs + [Given.REPLICATED] * len(jax.tree.leaves(replicated))


def _variables_of(step: StepToProve, inputs: Sequence[Given]) -> list[int | None]:
    """The input that each tower-local variable, which a tower returns, becomes.

    It is None if one tower starts with another value than the others. The list is empty
    unless the step is a train step that is not extended, whose next variables these
    are.
    """
    if not step.plan.keeps_local:
        return []
    places = [i for i, x in enumerate(inputs) if x is Given.PER_TOWER]
    values = jax.tree.leaves(step.state.local)
    pairs = zip(places, values, strict=False)
    return [i if _is_one_for_all(x) else None for i, x in pairs]


def _is_one_for_all(value: Any) -> bool:
    """Whether all towers have the same value; for shapes this is assumed."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return True
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return False
    rows = np.asarray(key_data(value))
    return bool((rows == rows[:1]).all())


# The fields of `Sum` and `Weighted` that have a tree.
_HELD_IN = jax.tree_util.GetAttrKey("value"), jax.tree_util.GetAttrKey("sum")
_MERGES = {
    ADDED: Merge.SUM,
    SHOWN: Merge.SUM,
    SAME: Merge.REPLICATED,
    ROWS: Merge.ROWS,
    JOINED: Merge.TABLE_ROWS,
    MERGED: Merge.OTHER,
    PER_TOWER: Merge.PER_TOWER,
}


_REPLICATED = ADDED, SHOWN, SAME, ROWS  # values that do not depend on the split


def _leaves_of_tower(tree: PyTree, variables: Sequence[int | None]) -> list[MergedLeaf]:
    """The leaves that a tower returns, in the order of its program's results."""
    becomes = iter(variables)
    is_one = lambda x: isinstance(x, Returned | PerTower)  # noqa: E731
    leaves: list[MergedLeaf] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one):
        first = key_name(path[0]) if path else "result"
        root = GRADIENT if first == "grads" else first
        # The type that holds the gradients is not part of their names.
        is_held = root == GRADIENT and path[1:2] and path[1] in _HELD_IN
        name = root + jax.tree_util.keystr(path[2 if is_held else 1 :])
        if isinstance(x, PerTower):
            count = len(jax.tree.leaves(x))
            leaves += [MergedLeaf(name, Merge.PER_TOWER)] * count
        elif x.how is CARRIED:
            count = len(jax.tree.leaves(x))
            leaves += [
                dataclasses.replace(each, becomes=next(becomes, None))
                for each in [MergedLeaf(name, Merge.PER_TOWER)] * count
            ]
        else:
            leaves += _leaves_of_returned(name, x.value, _MERGES[x.how], len(leaves))
    return leaves


def _gradients_as_means(
    leaves: list[MergedLeaf], loss: str, losses: PyTree
) -> list[MergedLeaf]:
    """Return the leaves with sums of gradients divided by the weight of their loss.

    The gradient of a sum of several means is already divided. The gradients of a list
    of losses have the order of the losses.
    """
    suffixes = [f"[{i}]" for i in range(len(losses))] if type(losses) is list else [""]
    merged = [*leaves]
    for suffix in suffixes:
        weights = [
            x.weight
            for x in leaves
            if x.name.startswith(loss + suffix) and x.merge is Merge.MEAN
        ]
        for i, leaf in enumerate(leaves):
            is_sum = leaf.merge is Merge.SUM
            if is_sum and len(weights) == 1 and leaf.name.startswith(GRADIENT + suffix):
                how = {"merge": Merge.MEAN, "weight": weights[0]}
                merged[i] = dataclasses.replace(leaf, **how)
    return merged


def _losses_as_sums(leaves: list[MergedLeaf], loss: str) -> list[MergedLeaf]:
    """Return the leaves with losses and gradients that are added and not divided."""
    roots = "loss", loss, GRADIENT
    return [
        dataclasses.replace(x, merge=Merge.SUM, weight=None)
        if x.name.startswith(roots) and x.merge is Merge.MEAN
        else x
        for x in leaves
    ]


def _leaves_of_returned(
    name: str, value: PyTree, merge: Merge, start: int
) -> list[MergedLeaf]:
    """The leaves of one value, with the weights of means and the indices of tables."""
    is_one = lambda x: isinstance(x, Weighted | IndexedRows)  # noqa: E731
    leaves: list[MergedLeaf] = []
    if getattr(value, "counts_towers", False):  # it depends on towers by design
        merge = Merge.PER_TOWER
    if isinstance(value, Sum | Rows):
        value = value.value
    if merge is Merge.OTHER and (merges := _merges_of_state(value)):
        flat = jax.tree_util.tree_leaves_with_path(value)
        return [
            MergedLeaf(name + jax.tree_util.keystr(path), how, state=name)
            for (path, _), how in zip(flat, merges, strict=True)
        ]
    pairs = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_one)
    for path, x in pairs:
        within = name + jax.tree_util.keystr(path)
        if isinstance(x, IndexedRows):  # its values, then its indices
            at = start + len(leaves) + 1
            leaves.append(MergedLeaf(within, merge, indices=at))
            leaves.append(MergedLeaf(f"indices of {within}", Merge.PER_TOWER))
            continue
        if not isinstance(x, Weighted):
            is_penalty = isinstance(value, Means)
            leaves.append(MergedLeaf(within, Merge.REPLICATED if is_penalty else merge))
            continue
        flat = jax.tree_util.tree_leaves_with_path(x)
        weight = start + len(leaves) + len(flat) - 1  # the weight is the last field
        leaves += [
            MergedLeaf(within + jax.tree_util.keystr(at[1:]), Merge.MEAN, weight)
            for at, _ in flat[:-1]
        ]
        leaves.append(MergedLeaf(f"weight of {within}", Merge.PER_TOWER))
    return leaves


def _merges_of_state(state: PyTree) -> list[Merge]:
    """How a metric state merges each of its leaves; empty if that is not known."""
    number = len(jax.tree.leaves(state))
    merge = lambda one, other: one.merge(other)  # noqa: E731
    jaxpr = jax.make_jaxpr(merge)(state, state).jaxpr
    makers = {x.outvars[0]: x for x in jaxpr.eqns if len(x.outvars) == 1}
    found = []
    for i, out in enumerate(jaxpr.outvars[:number]):
        maker = None if isinstance(out, Literal) else makers.get(out)
        pair = {jaxpr.invars[i], jaxpr.invars[number + i]}
        if maker is None or {*maker.invars} != pair:
            return []
        found.append(_BY_PRIMITIVE.get(maker.primitive.name, Merge.OTHER))
    return found


_BY_PRIMITIVE = {"add": Merge.SUM, "max": Merge.MAXIMUM, "min": Merge.MINIMUM}


def _as_given_later(tree: PyTree, split: RowSplit) -> PyTree:
    """The shapes of the merged results, which the next pass is given."""

    def of(x: Returned) -> PyTree:
        if x.how in (*_REPLICATED, MERGED) and x.how is not ROWS:
            return x.value
        is_joined = x.how in (ROWS, JOINED)

        def of_all(s: Any) -> jax.ShapeDtypeStruct:
            if is_joined:
                shape = s.shape[0] * split.number, *s.shape[1:]
                return jax.ShapeDtypeStruct(shape, s.dtype)
            return jax.ShapeDtypeStruct((split.towers, *s.shape), s.dtype)

        return jax.tree.map(of_all, x.value)

    return map_parts(Returned, of, tree)


def _kinds_given_later(tree: PyTree) -> PyTree:
    """The kinds of the merged results, which the next pass is given."""

    def of(x: Returned) -> PyTree:
        # The rows of a table are in the towers' order, which depends on the split.
        kind = Given.REPLICATED if x.how in _REPLICATED else Given.PER_TOWER
        return jax.tree.map(lambda _: kind, x.value)

    return map_parts(Returned, of, tree)
