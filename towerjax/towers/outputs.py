"""Check the values that towers return, and mark those that stay per tower."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from towerjax.data.batch_rows import refuse_other_than_rows
from towerjax.jaxprs import tags
from towerjax.metrics.state import explain_misuse, is_metric
from towerjax.metrics.weighted import Means, Weighted
from towerjax.towers.tower import Tower, is_in_step
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PerTower, PyTree, Reduction, Rows, TowerOutput
from towerjax.types.refusals import a_type, check_like, listed
from towerjax.types.trees import (
    map_parts,
    named_leaves,
    parts_of,
    put_parts,
    widen_dtype,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTowerValue:
    """A merged value that is per tower, ``[T, ...]``; unmarked values are MIRRORED."""

    value: PyTree


is_per_tower_value: Callable[[Any], bool] = PerTowerValue.__instancecheck__
"""Whether the value is a `PerTowerValue`; asked of each leaf, without our own call."""

# Values of these types stay per tower when merged.
OF_TOWERS = Rows, PerTower, TowerLocal


def layouts_of(tree: PyTree) -> PyTree:
    """Lay out merged values: a prefix tree of their layouts."""
    return jax.tree.map(
        lambda x: Layout.PER_TOWER if is_per_tower_value(x) else Layout.MIRRORED,
        tree,
        is_leaf=is_per_tower_value,
    )


def mark_per_tower(tree: PyTree) -> PyTree:
    """Wrap each leaf that is per tower by its type in a `PerTowerValue`."""
    return map_parts(OF_TOWERS, PerTowerValue, tree)


def unmark_per_tower(
    tree: PyTree, change: Callable[[list[PyTree]], Sequence[PyTree]] = lambda x: x
) -> PyTree:
    """Replace each `PerTowerValue` in a tree by its value.

    ``change`` gets the list of these values, and returns those to put in their place.
    """
    values = [x.value for x in parts_of(PerTowerValue, tree)]
    return put_parts(PerTowerValue, tree, change(values) if values else [])


def as_ours(returned: Any) -> Any:
    """Convert another library's loss to a `Weighted` or `TowerOutput`.

    Anything else is returned unchanged. Losses of tunix and maxtext are known by their
    fields: ``WeightedMetric(unreduced_sum, denominator)`` and
    ``LossOutput(primary_loss, aux_metrics)``. An ``eps`` that guards a quotient is left
    out, because the weights of all towers are added before they divide.
    """
    if _is_weighted(returned):
        return Weighted(returned.unreduced_sum, returned.denominator)
    if hasattr(returned, "primary_loss") and hasattr(returned, "aux_metrics"):
        metrics = {name: as_ours(x) for name, x in returned.aux_metrics.items()}
        return TowerOutput(as_ours(returned.primary_loss), metrics)
    return returned


def _is_weighted(x: Any) -> bool:
    return hasattr(x, "unreduced_sum") and hasattr(x, "denominator")


def as_tower_output(
    out: Any, loss_reduction: Reduction | None, tower: Tower | None = None
) -> TowerOutput:
    """Wrap a loss function's result in a ``TowerOutput`` that can be merged.

    The loss becomes a ``Weighted`` of scalars or ``Means``. A loss of another library
    is converted by `as_ours`. A bare loss has weight 0 on a tower without examples.
    """
    out = as_ours(out)
    out = out if isinstance(out, TowerOutput) else TowerOutput(loss=out)
    loss = out.loss
    if isinstance(loss, Weighted | Means):
        if loss_reduction is not None:
            raise ValueError(
                f"loss_reduction={loss_reduction!r} is for a loss that is a bare"
                f" scalar, and the loss function returned tj.{type(loss).__name__}."
                " Leave loss_reduction out."
            )
    elif not _is_array(loss):
        raise ValueError(
            f"The loss function returned {a_type(loss)} as its loss. Return"
            " tj.Weighted, or tj.TowerOutput(loss=tj.Weighted(...), metrics={...},"
            " local=...)."
        )
    elif loss_reduction is None and not np.shape(loss):
        raise ValueError(
            "The loss function returned a bare scalar, which does not say how much each"
            " tower's value counts. Return tj.Weighted.mean(losses, tower.weight), or"
            " pass loss_reduction=tj.Reduction.SUM (the total over towers) or MEAN (the"
            " mean of the towers' values)."
        )
    elif loss_reduction is Reduction.SUM or tower is None or not is_in_step(tower):
        loss = Weighted(jnp.asarray(loss), 1.0)
    else:
        has_examples = checkpoint_name(tower.weight.max(), tags.HAS_EXAMPLES)
        loss = jnp.where(has_examples > 0, jnp.asarray(loss), jnp.zeros_like(loss))
        loss = Weighted(loss, has_examples)
    loss = _check_means(loss) if isinstance(loss, Means) else _check_loss(loss)
    return dataclasses.replace(out, loss=loss)


def _check_means(loss: Means) -> Means:
    if not loss.terms:
        raise ValueError(
            "The loss function returned tj.penalty(...) alone, to which no row"
            " contributes. Add it to a mean, tj.Weighted.mean(losses, tower.weight). If"
            " the loss comes from tower.reduce alone, return it bare and say"
            " loss_reduction=tj.Reduction.MEAN."
        )
    penalty = jnp.asarray(loss.penalty)
    if penalty.shape:
        raise ValueError(
            f"tj.penalty has shape {penalty.shape}, and must be one number. Add its"
            " elements up, jnp.sum(x)."
        )
    return Means(tuple(map(_check_loss, loss.terms)), penalty)


def _check_loss(loss: Weighted) -> Weighted:
    total = jnp.asarray(loss.sum)
    weight = jnp.asarray(loss.weight)
    if total.shape or weight.shape:
        raise ValueError(
            f"The loss is not a scalar: sum has shape {total.shape} and weight shape"
            f" {weight.shape}. Use tj.Weighted.mean(losses, tower.weight)."
        )
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(
            f"The loss has dtype {total.dtype}, which has no gradient. Return a loss of"
            " a floating dtype, such as float32."
        )
    wide = widen_dtype(total.dtype)
    total = total.astype(wide)
    weight = weight.astype(wide)
    return Weighted(total, weight)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | int | float)


def check_metrics(metrics: Any, *, trains: bool) -> dict[str, Any]:
    """Take a dict of metric states and arrays; refuse any other metrics."""
    if not hasattr(metrics, "items"):
        raise ValueError(
            f"The metrics are {metrics!r:.200}, and must be a dict of names and"
            " tj.Weighted. Return {'accuracy': tj.Weighted.mean(hits, tower.weight)}."
        )
    if "loss" in metrics and trains:
        raise ValueError(
            "metrics['loss'] is taken: the step puts the global loss there. Give your"
            " metric another name."
        )

    kinds = (Means, PerTower) if trains else Means

    def fits(metric: Any) -> bool:
        return isinstance(metric, kinds) or is_metric(metric) or _is_array(metric)

    bad = [f"{x!r} is not a string" for x in metrics if not isinstance(x, str)]
    bad += [
        f"metrics[{name!r}] is {explain_misuse(metric)}"
        for name, metric in metrics.items()
        if not fits(metric)
    ]
    if bad:
        raise ValueError(
            f"These metrics are not metric states or arrays under names: {listed(bad)}."
            " Each metric is a tj.Weighted, a tj.Sum, a state of tj.metrics, or an"
            " array. Write nested names as 'group/part'. For a result of each row use"
            " tj.build_step and tj.Rows(x)."
        )
    return dict(metrics)


def check_rows(outputs: PyTree, rows: int, *, name: str = "predictions") -> PyTree:
    """Raise unless each leaf of ``outputs`` has one row for each row of the tower."""
    refuse_other_than_rows(outputs, name)
    bad = [
        f"{leaf} has shape {jnp.shape(x)}"
        for leaf, x in named_leaves(name, outputs)
        if jnp.shape(x)[:1] != (rows,)
    ]
    if bad:
        raise ValueError(
            f"The {name} need one row for each of the tower's {rows} rows, but"
            " " + listed(bad) + "."
        )
    return jax.tree.map(jnp.asarray, outputs)


def check_local(before: PyTree, after: PyTree) -> PyTree:
    """Raise unless the next local values have the structure of the current ones."""
    advice = (
        "Start from tower.local, or give step.init(local=...) what the loss function"
        " returns."
    )
    fault = "TowerOutput.local must be like tower.local"
    check_like("local", after, before, fault, advice)
    return after
