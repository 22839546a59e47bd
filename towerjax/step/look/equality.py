"""Prove a step's passes equal to those of one tower: trace them, and ask the proof.

Nothing is compiled or run. Each pass is traced for several numbers of towers of one
batch; of a loss the gradient is left out where no rule of the user's says what a
derivative is.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.data.shard import without_shared
from towerjax.mesh.placement import DEVICE_AXIS
from towerjax.metrics.weighted import Means, Weighted
from towerjax.proof.equal.one_tower import (
    Equality,
    Given,
    Merge,
    MergedLeaf,
    TowerProgram,
    equal_to_one_tower,
    has_own_derivatives,
)
from towerjax.proof.equation import all_eqns, named_axes
from towerjax.step.look.comparison import RAISED_ON_OTHER_ROWS
from towerjax.step.run.engine import Engine, Passes
from towerjax.step.run.on_device import DeviceTowers
from towerjax.step.run.one_pass import Pass
from towerjax.step.state.accumulators import (
    ADDED,
    CARRIED,
    JOINED,
    MERGED,
    OWN,
    ROWS,
    SAME,
    SHOWN,
    Returned,
    key_name,
    put_sums,
)
from towerjax.step.state.next_state import NextState
from towerjax.step.state.train_state import TrainState
from towerjax.towers.executors import shapes_of, trace_one_tower
from towerjax.towers.strategies import Strategy, on_one_group
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, PyTree
from towerjax.types.leaves import key_data, map_parts, parts_of

NUMBERS_OF_TOWERS = (1, 2, 4)
"""Those that are compared, and besides that of the step's own towers."""

_PADDED_ROWS = {1: 5, 2: 3, 4: 1}


@dataclasses.dataclass(frozen=True)
class StepToProve:
    """What a proof of equality needs of a step.

    Attributes:
      engine: Its passes.
      strategy: Where its towers are.
      state: A state, or shapes.
      batch: A batch, or shapes.
      rows: The rows of a tower in a call.
      padded: Whether batches may be padded.
    """

    engine: Engine
    strategy: Strategy
    state: TrainState
    batch: PyTree
    rows: int
    padded: bool = False


def equalities_of(step: StepToProve) -> list[Equality]:
    """What is proved of each leaf that a step's passes merge.

    Args:
      step: The step.

    Returns:
      A verdict for each leaf; one of the whole step where it cannot be traced for other
      numbers of rows.
    """
    towers = sorted({*NUMBERS_OF_TOWERS, step.strategy.num_towers})
    try:
        return _equalities(step, towers)
    except RAISED_ON_OTHER_ROWS as error:
        why = f"with other rows it raises {type(error).__name__}: {error}"
    return [Equality("step", "unknown", why.splitlines()[0])]


def _equalities(step: StepToProve, towers: Sequence[int]) -> list[Equality]:
    whole = step.engine.passes
    if not whole.each:
        return [Equality("step", "unknown", "each call of it runs several steps")]
    if whole.is_of_one_loss:
        traced = _traced(step, whole.changed(differentiates=False), towers)
        programs = [x for each in traced for x in each.programs]
        if not any(has_own_derivatives(x.jaxpr) for x in programs):
            return _verdicts_of(traced, step)
    return _verdicts_of(_traced(step, whole, towers), step)


@dataclasses.dataclass(frozen=True)
class _TracedTowers:
    """A pass for several numbers of towers."""

    programs: list[TowerProgram]
    inputs: list[Given]
    outputs: list[MergedLeaf]
    axes: list[str]
    several: bool  # whether a tower has several micro-batches


def _verdicts_of(traced: Sequence[_TracedTowers], step: StepToProve) -> list[Equality]:
    """The verdicts of all passes; those of a later one hold if those before it do."""
    found = []
    for number, each in enumerate(traced, 1):
        if each.several and any(_meets(x.jaxpr, each.axes) for x in each.programs):
            why = "towers meet, of the rows of one micro-batch each"
            equalities = [
                Equality(x.name, "unknown", why)
                for x in each.outputs
                if x.merge is not Merge.PER_TOWER
            ]
        else:
            given = each.programs, each.inputs, each.outputs
            equalities = equal_to_one_tower(*given, axes=each.axes, padded=step.padded)
        prefix = f"pass {number}: " if len(traced) > 1 else ""
        found += [dataclasses.replace(x, leaf=prefix + x.leaf) for x in equalities]
        if number < len(traced) and any(x.says != "proved" for x in equalities):
            rest = [f"pass {i}" for i in range(number + 1, len(traced) + 1)]
            why = f"what pass {number} merges is not proved"
            return found + [Equality(name, "unknown", why) for name in rest]
    return found


def _meets(jaxpr: ClosedJaxpr, axes: Sequence[str]) -> bool:
    """Whether towers communicate."""
    calls = [x for x in all_eqns(jaxpr) if x.primitive.name != "axis_index"]
    return any({*named_axes(x)} & {*axes} for x in calls)


def _traced(
    step: StepToProve, passes: Passes, towers: Sequence[int]
) -> list[_TracedTowers]:
    """Each pass, traced for each number of towers."""
    several = [x.micro_batches > 1 for x in passes.each]
    engine = dataclasses.replace(step.engine, passes=passes)
    columns = []
    for number in towers:
        alike = on_one_group(step.strategy, number)
        rows = _rows_for(step, number, towers)
        columns.append(_trace_passes(engine.on(alike).passes, step, number, rows))
    return [
        _TracedTowers([x[0] for x in each], *each[0][1:], several=is_several)
        for each, is_several in zip(zip(*columns, strict=True), several, strict=True)
    ]


def _rows_for(step: StepToProve, number: int, towers: Sequence[int]) -> int:
    """The rows of one of so many towers.

    With padding they are in no proportion to the numbers of towers, so that nothing
    that counts them is taken for a power of that number.
    """
    each = max(step.rows, 2)
    each += -each % step.strategy.placement.row_parts
    if step.padded:
        return each * _PADDED_ROWS.get(number, 11 if number % 7 == 0 else 7)
    return each * math.lcm(*towers) // number


def _trace_passes(
    passes: Passes, step: StepToProve, number: int, rows: int
) -> list[tuple[Any, ...]]:
    """``(program, inputs, outputs, axes)`` of each pass, one after another."""

    def of_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = (rows * number, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    def of_local(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype)

    own, shared = without_shared(step.batch)
    counts = jax.ShapeDtypeStruct((number,), jnp.int32)
    shared = shapes_of(jax.tree.map(jnp.asarray, shared))
    state = map_parts(
        TowerLocal,
        lambda variable: jax.tree.map(of_local, variable),
        shapes_of(step.state),
    )
    given = state, jax.tree.map(of_all, own), counts, shared
    found, merged, later = [], (), list[Given]()
    for pass_ in passes.in_turn([]):
        closed, tree = _trace_tower(pass_, (*given, merged))
        program = TowerProgram(closed, number, rows)
        axes = [DEVICE_AXIS, pass_.strategy.placement.axis_name]
        inputs = [*_inputs_of(step, own, shared), *later]
        outputs = _leaves_of_tower(tree, _variables_of(step, inputs))
        found.append((program, inputs, outputs, axes))
        merged, later = (_as_given_later(tree, number),), _kinds_given_later(tree)
    return found


def _trace_tower(pass_: Pass, args: tuple[PyTree, ...]) -> tuple[ClosedJaxpr, PyTree]:
    """The program of one tower, and the `Returned` that it gives, as shapes."""
    axes = pass_.strategy.placement.abstract_axes

    def first(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)

    def on_device(*args: PyTree) -> PyTree:
        towers = DeviceTowers(pass_, axes, {}, *args)
        sums, (tree, _) = towers.run()
        is_stacked = pass_.strategy.cross_tower_ops.needs_every_tower
        is_stacked = is_stacked and not towers.is_added_first
        return put_sums(first(tree), first(sums) if is_stacked else sums)

    with jax.default_matmul_precision("highest"):
        return trace_one_tower(on_device, axes, (*pass_.ins.values(),), args)


def _inputs_of(step: StepToProve, own: PyTree, shared: PyTree) -> list[Given]:
    """What each input of a tower's program is, but what a pass before it merged."""
    is_local = lambda x: isinstance(x, TowerLocal)  # noqa: E731
    inputs = []
    for x in jax.tree.leaves(step.state, is_leaf=is_local):
        kind = Given.PER_TOWER if is_local(x) else Given.REPLICATED
        inputs += [kind] * len(jax.tree.leaves(x))
    of_rows = Given.PER_TOWER if parts_of(IndexedRows, own) else Given.ROWS
    inputs += [of_rows] * len(jax.tree.leaves(own)) + [Given.VALID]
    return inputs + [Given.REPLICATED] * len(jax.tree.leaves(shared))


def _variables_of(step: StepToProve, inputs: Sequence[Given]) -> list[int | None]:
    """For each tower-local variable that a tower returns, the input that it becomes.

    None where a tower starts with another value than the others; empty unless the step
    is a train step that is not extended, the next variables of which are these.
    """
    finish = step.engine.finish
    if not (isinstance(finish, NextState) and finish.keeps_local):
        return []
    places = [i for i, x in enumerate(inputs) if x is Given.PER_TOWER]
    values = jax.tree.leaves(step.state.local)
    pairs = zip(places, values, strict=False)
    return [i if _is_one_for_all(x) else None for i, x in pairs]


def _is_one_for_all(value: Any) -> bool:
    """Whether all towers have the same; of shapes it is taken to be so."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return True
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return False
    rows = np.asarray(key_data(value))
    return bool((rows == rows[:1]).all())


_MERGES = {
    ADDED: Merge.SUM,
    SHOWN: Merge.SUM,
    SAME: Merge.REPLICATED,
    ROWS: Merge.ROWS,
    JOINED: Merge.TABLE_ROWS,
    MERGED: Merge.OTHER,
    OWN: Merge.PER_TOWER,
}


_ALIKE = ADDED, SHOWN, SAME, ROWS  # what is the same however the batch is split


def _leaves_of_tower(tree: PyTree, variables: Sequence[int | None]) -> list[MergedLeaf]:
    """The leaves of what a tower returns, in the order of its program's results."""
    becomes = iter(variables)
    is_one = lambda x: isinstance(x, Returned | PerTower)  # noqa: E731
    leaves: list[MergedLeaf] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one):
        name = "/".join(map(key_name, path)) or "result"
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


def _leaves_of_returned(
    name: str, value: PyTree, merge: Merge, start: int
) -> list[MergedLeaf]:
    """The leaves of one value, with what those of means and of tables belong to."""
    is_one = lambda x: isinstance(x, Weighted | IndexedRows)  # noqa: E731
    leaves: list[MergedLeaf] = []
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


def _as_given_later(tree: PyTree, number: int) -> PyTree:
    """The shapes of what a tower's results are merged to, for the next pass."""

    def of(x: Returned) -> PyTree:
        if x.how in (*_ALIKE, MERGED) and x.how is not ROWS:
            return x.value
        is_joined = x.how in (ROWS, JOINED)

        def of_all(s: Any) -> jax.ShapeDtypeStruct:
            first = (s.shape[0] * number,) if is_joined else (number, *s.shape[:1])
            return jax.ShapeDtypeStruct((*first, *s.shape[1:]), s.dtype)

        return jax.tree.map(of_all, x.value)

    return map_parts(Returned, of, tree)


def _kinds_given_later(tree: PyTree) -> list[Given]:
    """What a tower's results are to the next pass, once they are merged."""

    def of(x: Returned) -> PyTree:
        # Of a table the rows are in the towers' order, which depends on the split.
        kind = Given.REPLICATED if x.how in _ALIKE else Given.PER_TOWER
        return jax.tree.map(lambda _: kind, x.value)

    return jax.tree.leaves(map_parts(Returned, of, tree))
