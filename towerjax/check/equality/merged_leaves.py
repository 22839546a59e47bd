"""How the leaves that a tower returns are merged, for a proof of equality."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.metrics.weighted import Means, Weighted
from towerjax.prover.equality.one_tower import Given, Merge, MergedLeaf
from towerjax.prover.leaf_name import GRADIENT, LeafName, LeafPart, leaf_of, part_of
from towerjax.step.passes.accumulators import (
    ADDED,
    CARRIED,
    JOINED,
    MERGED,
    PER_TOWER,
    ROWS,
    SAME,
    SHOWN,
    Returned,
)
from towerjax.step.passes.one_pass import Pass
from towerjax.types import PerTower, PyTree, Reduction, Rows, Sum
from towerjax.types.trees import map_parts

_MERGES = {
    ADDED: Merge.SUM,
    SHOWN: Merge.SUM,
    SAME: Merge.REPLICATED,
    ROWS: Merge.ROWS,
    JOINED: Merge.TABLE_ROWS,
    MERGED: Merge.OTHER,
    PER_TOWER: Merge.PER_TOWER,
}
_REPLICATED = ADDED, SHOWN, SAME, ROWS  # values merged so do not depend on the split
_BY_PRIMITIVE = {"add": Merge.SUM, "max": Merge.MAXIMUM, "min": Merge.MINIMUM}


def leaves_of_tower(
    pass_: Pass, tree: PyTree, variables: Sequence[int | None]
) -> list[MergedLeaf]:
    """List the leaves that a tower returns, in the order of its program.

    Args:
      pass_: The pass that merges them.
      tree: What the tower returns, as `Returned` values.
      variables: For each tower-local variable the index of the input that it becomes in
        the next step, or None.
    """
    leaves = _leaves_of(tree, variables, pass_.loss)
    if pass_.merges_sums:
        leaves = _gradients_as_means(leaves, pass_.loss, tree.get(pass_.loss))
    if pass_.loss_reduction is Reduction.SUM:
        leaves = _losses_as_sums(leaves)
    return leaves


def _leaves_of(
    tree: PyTree, variables: Sequence[int | None], loss: str
) -> list[MergedLeaf]:
    """List the leaves of a tower's results, each with the merge of its type.

    ``loss`` is the key of the pass's loss.
    """
    becomes = iter(variables)

    def is_one(x: Any) -> bool:
        return isinstance(x, Returned | PerTower)

    leaves: list[MergedLeaf] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one):
        name = LeafName.at(path, loss)
        if isinstance(x, PerTower):
            count = len(jax.tree.leaves(x))
            leaves += [MergedLeaf(name, Merge.PER_TOWER)] * count
        elif x.rule is CARRIED:
            count = len(jax.tree.leaves(x))
            leaves += [
                dataclasses.replace(leaf, becomes=next(becomes, None))
                for leaf in [MergedLeaf(name, Merge.PER_TOWER)] * count
            ]
        else:
            leaves += _leaves_of_returned(name, x.value, _MERGES[x.rule], len(leaves))
    return leaves


def _gradients_as_means(
    leaves: list[MergedLeaf], loss: str, losses: PyTree
) -> list[MergedLeaf]:
    """Mark gradients as means that the weight of their loss divides.

    A tower returns the gradient of a sum. For a sum of several means it is divided
    already. The gradients of a list of losses have the order of the losses.
    """
    places: list[tuple[Any, ...]] = [()]
    if type(losses) is list:
        places = [(jax.tree_util.SequenceKey(i),) for i in range(len(losses))]
    merged = [*leaves]
    for place in places:
        of_loss = [x for x in leaves if leaf_of(x.name).is_at(loss, *place)]
        weights = [x.weight for x in of_loss if x.merge is Merge.MEAN]
        for i, leaf in enumerate(leaves):
            is_gradient = leaf_of(leaf.name).is_at(GRADIENT, *place)
            if is_gradient and leaf.merge is Merge.SUM and len(weights) == 1:
                merged[i] = dataclasses.replace(
                    leaf, merge=Merge.MEAN, weight=weights[0]
                )
    return merged


def _losses_as_sums(leaves: list[MergedLeaf]) -> list[MergedLeaf]:
    """Mark losses and gradients as sums that are not divided."""
    return [
        dataclasses.replace(x, merge=Merge.SUM, weight=None)
        if part_of(x.name) is not LeafPart.OTHER and x.merge is Merge.MEAN
        else x
        for x in leaves
    ]


def _leaves_of_returned(
    name: LeafName, value: PyTree, merge: Merge, start: int
) -> list[MergedLeaf]:
    """List the leaves of one value, with weights of means and indices of tables.

    ``start`` is the index of its first leaf among the program's results.
    """

    def is_one(x: Any) -> bool:
        return isinstance(x, Weighted | IndexedRows)

    leaves: list[MergedLeaf] = []
    if getattr(value, "counts_towers", False):  # a value that depends on T by intention
        merge = Merge.PER_TOWER
    if isinstance(value, Sum | Rows):
        value = value.value
    if merge is Merge.OTHER and (merges := _merges_of_state(value)):
        flat = jax.tree_util.tree_leaves_with_path(value)
        return [
            MergedLeaf(name.within(path), merge, state=name)
            for (path, _), merge in zip(flat, merges, strict=True)
        ]
    pairs = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_one)
    for path, x in pairs:
        within = name.within(path)
        if isinstance(x, IndexedRows):  # two leaves: values and indices
            at = start + len(leaves) + 1
            leaves.append(MergedLeaf(within, merge, indices=at))
            leaves.append(MergedLeaf(f"indices of {within}", Merge.PER_TOWER))
            continue
        if not isinstance(x, Weighted):
            is_penalty = isinstance(value, Means)
            leaves.append(MergedLeaf(within, Merge.REPLICATED if is_penalty else merge))
            continue
        flat = jax.tree_util.tree_leaves_with_path(x)
        weight = start + len(leaves) + len(flat) - 1  # its last leaf is the weight
        leaves += [
            MergedLeaf(within.within(at[1:]), Merge.MEAN, weight) for at, _ in flat[:-1]
        ]
        leaves.append(MergedLeaf(f"weight of {within}", Merge.PER_TOWER))
    return leaves


def _merges_of_state(state: PyTree) -> list[Merge]:
    """Find how a metric state merges each of its leaves; empty if unknown."""
    number = len(jax.tree.leaves(state))
    jaxpr = jax.make_jaxpr(type(state).merge)(state, state).jaxpr
    makers = {x.outvars[0]: x for x in jaxpr.eqns if len(x.outvars) == 1}
    merges = []
    for i, out in enumerate(jaxpr.outvars[:number]):
        maker = None if isinstance(out, Literal) else makers.get(out)
        pair = {jaxpr.invars[i], jaxpr.invars[number + i]}
        if maker is None or {*maker.invars} != pair:
            return []
        merges.append(_BY_PRIMITIVE.get(maker.primitive.name, Merge.OTHER))
    return merges


def shapes_given_later(tree: PyTree, towers: int, micro_batches: int) -> PyTree:
    """Find the shapes of a pass's merged results, as later passes get them."""

    def of(x: Returned) -> PyTree:
        if x.rule in (*_REPLICATED, MERGED) and x.rule is not ROWS:
            return x.value
        is_joined = x.rule in (ROWS, JOINED)

        def of_all(s: Any) -> jax.ShapeDtypeStruct:
            if is_joined:
                shape = s.shape[0] * towers * micro_batches, *s.shape[1:]
                return jax.ShapeDtypeStruct(shape, s.dtype)
            return jax.ShapeDtypeStruct((towers, *s.shape), s.dtype)

        return jax.tree.map(of_all, x.value)

    return map_parts(Returned, of, tree)


def kinds_given_later(tree: PyTree) -> PyTree:
    """Tell of each merged result whether later passes get it replicated."""

    def of(x: Returned) -> PyTree:
        # Merged rows of a table come in the order of the towers, and so depend on how
        # the batch is split: they are not among _REPLICATED.
        kind = Given.REPLICATED if x.rule in _REPLICATED else Given.PER_TOWER
        return jax.tree.map(lambda _: kind, x.value)

    return map_parts(Returned, of, tree)
