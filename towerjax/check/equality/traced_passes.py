"""The programs that a proof compares: the step's own, and one tower's on its batch.

The step's own program is the one that runs: a tower's, with that tower's rows. The
other is traced in addition, for one tower that has all examples of the batch. A
micro-batch is treated as a tower, because a step runs the same program for each.
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
from jax.extend.core import ClosedJaxpr

from towerjax.check.equality.merged_leaves import (
    kinds_given_later,
    leaves_of_tower,
    shapes_given_later,
)
from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.data.batch_rows import without_replicated
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.tower_axis import TowerPrograms, over_local_towers
from towerjax.prover.equality.one_tower import Given, MergedLeaf, TowerProgram
from towerjax.step.passes.accumulators import put_sums
from towerjax.step.passes.on_device import over_towers
from towerjax.step.passes.one_pass import Pass
from towerjax.step.passes.traced_tower import (
    MICRO_BATCH,
    Arguments,
    TracedTower,
    call_tower,
)
from towerjax.step.plan import Passes, Plan
from towerjax.step.state.train_state import TrainState
from towerjax.towers.executors import trace_one_tower
from towerjax.towers.strategies import Strategy, on_one_group
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PyTree, Reduction
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
      strategy: The strategy, which says where its towers are.
      state: A state, or shapes.
      batch: A batch, or shapes.
      rows: The number of rows of a tower in one call.
      examples: The number of examples in the batch; None if it has no padding.
      padded: Whether batches may be padded.
      programs: For each pass, the traced programs of the step's towers. They are used
        and not traced again.
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
    """The programs of a pass, traced for several numbers of towers."""

    programs: list[TowerProgram]
    inputs: list[Given]
    outputs: list[MergedLeaf]
    axes: list[str]
    in_micro_batches: bool  # whether a tower has several micro-batches
    has_same_leaves: bool  # whether the leaves are the same for all numbers of towers
    loss_reduction: Reduction | None = None  # how a bare loss is merged over towers


class RowSplit(NamedTuple):
    """A split of rows over towers, and of a tower's rows into micro-batches."""

    towers: int
    rows: int  # the rows of each tower, or of each micro-batch
    micro_batches: int = 1

    @property
    def number(self) -> int:
        """The number of micro-batches of all towers together."""
        return self.towers * self.micro_batches


def splits_of(step: StepToProve, micro_batches: int) -> list[RowSplit]:
    """Choose the splits whose programs are compared, each with the one before.

    One is the step's own, and one is a single tower with all examples of the batch. If
    batches may be padded, the step's own is also compared with one tower of another
    number of rows. That number is no power of the number of towers, so that the proof
    does not take a count of rows for such a power. A step of one tower without
    micro-batches is compared with two towers of as many rows.
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
    # The numbers of rows are multiples of a tower's rows, because some functions
    # reshape the rows into groups of equal size.
    counts = [
        count * of_step.rows
        for count in range(2, of_step.number + 6)
        if not _is_power(count, of_step.number)
    ]
    padded, *more = [RowSplit(1, x) for x in counts if x != one_tower.rows]
    if one_tower.rows != of_step.rows:
        return [padded, of_step, one_tower]
    # The step's tower has as many rows as one tower has examples. A dim of rows then
    # has the same size in both programs, and could not be recognized. So towers of more
    # rows are put between the two.
    larger = of_step._replace(rows=2 * of_step.rows)
    if larger.rows == padded.rows:
        padded = more[0]
    return [of_step, padded, larger, one_tower]


def _is_power(count: int, towers: int) -> bool:
    """Decide whether ``count`` is a power of ``towers``; exponents may be halves.

    These are the powers that a proof tries.
    """
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
        # The programs of an exact step cannot be used: they compute weights by another
        # equation than the program of one tower, which is not exact. Nor can those of a
        # tower of several devices, because they name its mesh.
        is_own &= not step.strategy.exact and step.strategy.placement.devices_each == 1
        known = step.programs if is_own else ()
        traced = _trace_passes(of_split, step, split, in_micro_batches, known)
        columns.append([*traced])
    to_prove = []
    for of_splits in zip(*columns, strict=True):
        first = of_splits[0]
        if not any(x.outputs for x in of_splits):
            continue  # the pass merges nothing, so there is nothing to prove
        to_prove.append(
            PassToProve(
                [x.program for x in of_splits],
                first.inputs,
                first.outputs,
                first.axes,
                in_micro_batches=several > 1,
                has_same_leaves=all(x.outputs == first.outputs for x in of_splits),
                loss_reduction=first.loss_reduction,
            )
        )
    return to_prove


def one_tower_programs(
    step: StepToProve, passes: Passes, strategy: Strategy
) -> list[TowerProgram]:
    """Trace each pass for one tower with all rows of the batch.

    Args:
      step: The step.
      passes: The passes to trace.
      strategy: The strategy of one tower, with some number of devices.

    Returns:
      The program of each pass.

    Raises:
      NotTracedError: A tower function raised an error for these devices.
    """
    several = max(x.micro_batches for x in passes.each)
    total = step.strategy.num_towers * step.rows * several
    plan = dataclasses.replace(step.plan, passes=passes)
    of_one = plan.towers_on(strategy).passes.changed(micro_batches=1)
    split = RowSplit(1, total)
    return [x.program for x in _trace_passes(of_one, step, split, False, ())]


class _PassOfSplit(NamedTuple):
    """A pass that is traced for one split."""

    program: TowerProgram
    inputs: list[Given]
    outputs: list[MergedLeaf]
    axes: list[str]
    loss_reduction: Reduction | None


def _trace_passes(
    passes: Passes,
    step: StepToProve,
    split: RowSplit,
    in_micro_batches: bool,
    known: Sequence[TowerPrograms],
) -> Iterator[_PassOfSplit]:
    """Trace the passes for one split, one after another.

    ``known`` are programs of the passes that were traced before.
    """
    number = split.towers
    rows = split.rows

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = (rows * number, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    def of_local(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype)

    row_leaves, replicated = without_replicated(step.batch)
    counts = jax.ShapeDtypeStruct((number,), jnp.int32)

    def is_shape(x: Any) -> bool:
        return isinstance(x, jax.ShapeDtypeStruct)

    replicated = jax.tree.map(
        lambda x: x if is_shape(x) else jnp.asarray(x), replicated
    )
    replicated = shapes_of(replicated)
    state = map_parts(
        TowerLocal,
        lambda variable: jax.tree.map(of_local, variable),
        shapes_of(step.state),
    )
    of_step = state, jax.tree.map(of_all, row_leaves), counts, replicated
    merged = list[PyTree]()
    kinds = list[PyTree]()
    for at, pass_ in enumerate(passes.in_turn(merged)):
        before = (passes.given(merged),) if merged else ()
        later = jax.tree.leaves(passes.given(kinds)) if kinds else []
        args = *of_step, shapes_of(before)
        programs = known[at] if known else {}
        try:
            closed, tree = _trace_tower(pass_, args, in_micro_batches, programs)
        except Exception as error:
            raise NotTracedError(split, error) from error
        program = TowerProgram(closed, split.number, rows, split.micro_batches)
        axes = [DEVICE_AXIS, pass_.strategy.placement.axis_name]
        inputs = [*_inputs_of(step, pass_, row_leaves, replicated), *later]
        # In a micro-batch, tower-local variables are not the step's inputs: an earlier
        # micro-batch may have written them.
        variables = [] if in_micro_batches else _variables_of(step, inputs)
        inputs += [Given.MICRO_BATCH] if in_micro_batches else []
        outputs = leaves_of_tower(pass_, tree, variables)
        yield _PassOfSplit(program, inputs, outputs, axes, pass_.loss_reduction)
        merged.append(shapes_given_later(tree, split.towers, split.micro_batches))
        kinds.append(kinds_given_later(tree))


def _trace_tower(
    pass_: Pass,
    args: tuple[PyTree, ...],
    in_micro_batches: bool,
    programs: TowerPrograms,
) -> tuple[ClosedJaxpr, PyTree]:
    """Trace one tower's program, and return it with its results' shapes.

    The results are a tree of `Returned` values. With ``in_micro_batches`` the program
    is that of one micro-batch, and takes the micro-batch's index as an input.
    """
    axes = pass_.strategy.placement.abstract_axes
    layouts = *pass_.ins.values(), Layout.MIRRORED
    index = jax.ShapeDtypeStruct((), jnp.int32) if in_micro_batches else None
    is_loss_alone = pass_.trained is not None and not pass_.takes_gradient

    def first(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)

    def on_device(*args: PyTree) -> PyTree:
        *of_step, index = args
        arguments = Arguments.of(pass_, axes, *of_step)
        if in_micro_batches or is_loss_alone:
            # A traced program is evaluated once; `over_towers` does so twice.
            sums, (tree, _) = over_local_towers(
                functools.partial(call_tower, pass_, axes),
                axes,
                arguments.per_tower,
                index,
                *arguments.replicated,
                stack_sums=False,
                programs=None if in_micro_batches else programs,
                name=MICRO_BATCH,
            )
            return put_sums(first(tree), sums)
        tower = TracedTower.of(pass_, axes, programs, arguments)
        sums, (tree, _) = over_towers(tower)
        is_stacked = pass_.strategy.cross_tower_ops.needs_every_tower
        is_stacked = is_stacked and not tower.losses_can_be_added()
        return put_sums(first(tree), first(sums) if is_stacked else sums)

    with jax.default_matmul_precision("highest"):
        return trace_one_tower(on_device, axes, layouts, (*args, index))


def _inputs_of(
    step: StepToProve, pass_: Pass, row_leaves: PyTree, replicated: PyTree
) -> list[Given]:
    """Tell how towers get each input of a tower's program.

    Inputs that are results of earlier passes are left out. An evaluation reads the mean
    of the towers' variables, which is what one tower has.
    """

    def is_local(x: Any) -> bool:
        return isinstance(x, TowerLocal)

    inputs = []
    for x in jax.tree.leaves(step.state, is_leaf=is_local):
        is_read_as_one = pass_.reads_local and is_local(x)
        is_read_as_one &= getattr(x, "reduction", None) is Reduction.MEAN
        is_own = is_local(x) and not is_read_as_one
        kind = Given.PER_TOWER if is_own else Given.REPLICATED
        inputs += [kind] * len(jax.tree.leaves(x))
    of_rows = Given.PER_TOWER if parts_of(IndexedRows, row_leaves) else Given.ROWS
    inputs += [of_rows] * len(jax.tree.leaves(row_leaves)) + [Given.VALID]
    return inputs + [Given.REPLICATED] * len(jax.tree.leaves(replicated))


def _variables_of(step: StepToProve, inputs: Sequence[Given]) -> list[int | None]:
    """Find the input that each returned tower-local variable becomes.

    It is None if one tower starts with another value than the others. The list is empty
    if what a tower returns does not become the next variables: only in a train step
    that is not extended it does.
    """
    if not step.plan.keeps_local:
        return []
    places = [i for i, x in enumerate(inputs) if x is Given.PER_TOWER]
    values = jax.tree.leaves(step.state.local)
    pairs = zip(places, values, strict=False)
    return [i if _is_one_for_all(x) else None for i, x in pairs]


def _is_one_for_all(value: Any) -> bool:
    """Return whether all towers have the same value; for shapes this is assumed."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return True
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return False
    rows = np.asarray(key_data(value))
    return bool((rows == rows[:1]).all())
