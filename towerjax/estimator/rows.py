"""How do the towers' output rows become one batch's? Joined in order, padding cut."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import end_to_end, refuse_other_than_rows
from towerjax.estimator.spec import ClassificationOutput
from towerjax.types import PyTree, named_leaves


def _is_classification(x: Any) -> bool:
    return isinstance(x, ClassificationOutput)


def _of_rows(outputs: PyTree, stacked_classes: bool) -> PyTree:
    """The outputs without those classes that are stacked."""
    if not stacked_classes:
        return outputs

    def without(x: Any) -> Any:
        return dataclasses.replace(x, classes=("",)) if _is_classification(x) else x

    return jax.tree.map(without, outputs, is_leaf=_is_classification)


def checked_rows(outputs: PyTree, rows: int, *, stacked_classes: bool) -> PyTree:
    """One tower's outputs, once each leaf has rows for each of the tower's rows."""
    for part, tree in outputs.items():
        refuse_other_than_rows(tree, part)
    of_rows = _of_rows(outputs, stacked_classes)
    bad = [
        f"{name} has shape {jnp.shape(x)}"
        for part, tree in of_rows.items()
        for name, x in named_leaves(part, tree)
        if not jnp.shape(x) or jnp.shape(x)[0] % rows or not jnp.shape(x)[0]
    ]
    if bad:
        raise ValueError(
            f"The towers' outputs are joined row by row, so each leaf has {rows} rows"
            f" (or a multiple) for a tower's {rows} rows, but {'; '.join(bad)}."
        )
    return jax.tree.map(jnp.asarray, outputs)


def joined_rows(outputs: PyTree, *, stacked_classes: bool) -> PyTree:
    """The outputs of a device's towers, end to end."""

    def one(x: Any) -> Any:
        joined = end_to_end(x)
        if stacked_classes and _is_classification(x) and x.classes is not None:
            return dataclasses.replace(joined, classes=x.classes)
        return joined

    return jax.tree.map(one, outputs, is_leaf=_is_classification)


def cut_padding(
    outputs: PyTree, batch: PlacedBatch, *, stacked_classes: bool
) -> PyTree:
    """The outputs of the examples alone."""
    if not batch.padded:
        return outputs
    # On the devices a slice would compile for every new size.
    kept = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)

    def cut(x: Any) -> Any:
        rows = np.asarray(x)
        return jnp.asarray(rows[np.repeat(kept, len(rows) // len(kept))])

    def one(x: Any) -> Any:
        if stacked_classes and _is_classification(x) and x.classes is not None:
            whole = dataclasses.replace(x, classes=("",))
            return dataclasses.replace(jax.tree.map(cut, whole), classes=x.classes)
        return jax.tree.map(cut, x)

    return jax.tree.map(one, outputs, is_leaf=_is_classification)
