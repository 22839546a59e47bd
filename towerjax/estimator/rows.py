"""How do the towers' output rows become one batch's? Joined in order, padding cut."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import end_to_end, refuse_other_than_rows
from towerjax.estimator.spec import ClassificationOutput
from towerjax.step.returned import without_padding
from towerjax.types import PerTower, PyTree, Rows, named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Several:
    """An output of several rows for each of the batch's: ``Rows`` ``[b, n, ...]``."""

    rows: Any


def typed_rows(
    name: str, outputs: PyTree, rows: int, *, stacked_classes: bool
) -> PyTree:
    """One tower's outputs, whose types say what becomes of them.

    Of classes that are stacked each tower keeps its own.
    """
    refuse_other_than_rows(outputs, name)
    outputs = jax.tree.map(jnp.asarray, dict(outputs))
    if stacked_classes:
        outputs = jax.tree.map(_with_own_classes, outputs, is_leaf=_is_classification)
    bad = [
        f"{leaf} has shape {jnp.shape(x)}"
        for leaf, x in named_leaves(name, outputs, is_leaf=_is_per_tower)
        if not _is_per_tower(x) and (not x.shape or not len(x) or len(x) % rows)
    ]
    if bad:
        raise ValueError(
            f"The towers' outputs are joined row by row, so each leaf has {rows} rows"
            f" (or a multiple) for a tower's {rows} rows, but {'; '.join(bad)}."
        )

    def one(x: Any) -> Any:
        if _is_per_tower(x):
            return x
        several = len(x) != rows
        shape = (rows, len(x) // rows, *x.shape[1:])
        return Several(Rows(x.reshape(shape))) if several else Rows(x)

    return jax.tree.map(one, outputs, is_leaf=_is_per_tower)


def joined_rows(outputs: PyTree, batch: PlacedBatch) -> PyTree:
    """The outputs of the examples alone, bare."""

    def one(x: Any) -> Any:
        if isinstance(x, Several):
            return end_to_end(x.rows)
        return x.values if _is_per_tower(x) else x

    return jax.tree.map(
        one,
        without_padding(outputs, batch),
        is_leaf=lambda x: isinstance(x, Several | PerTower),
    )


def _with_own_classes(x: Any) -> Any:
    if not _is_classification(x) or x.classes is None or isinstance(x.classes, tuple):
        return x
    return dataclasses.replace(x, classes=jax.tree.map(PerTower, x.classes))


def _is_classification(x: Any) -> bool:
    return isinstance(x, ClassificationOutput)


def _is_per_tower(x: Any) -> bool:
    return isinstance(x, PerTower)
