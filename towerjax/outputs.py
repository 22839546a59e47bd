"""What may a tower function return? Losses, metrics, rows and local values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types import PyTree, Reduction, TowerOutput, Weighted, named_leaves


def as_tower_output(out: Any, loss_reduction: Reduction | None) -> TowerOutput:
    """What a loss function returned, with its loss as a ``Weighted`` of two scalars.

    Args:
      out: ``Weighted``, ``TowerOutput``, or a scalar when ``loss_reduction`` says
        what it means.
      loss_reduction: SUM (the total over towers), MEAN (the mean of the towers'
        values) or None.

    Returns:
      A ``TowerOutput`` with a ``Weighted`` loss of weight 1 for scalars.

    Raises:
      ValueError: The loss is a bare scalar and ``loss_reduction`` is None, or the
        other way round; it is not scalar, or not floating.
    """
    out = out if isinstance(out, TowerOutput) else TowerOutput(loss=out)
    loss = out.loss
    if isinstance(loss, Weighted):
        if loss_reduction is not None:
            raise ValueError(
                f"loss_reduction={loss_reduction!r} gives a meaning to a scalar loss,"
                " but the loss function returned tj.Weighted, which has its own. Leave"
                " loss_reduction out."
            )
    elif isinstance(loss, tuple | list | dict) or loss is None:
        raise ValueError(
            f"The loss function returned a {type(loss).__name__}. Return tj.Weighted,"
            " or tj.TowerOutput(loss=tj.Weighted(...), metrics={...}, local=...)."
        )
    elif loss_reduction is None:
        raise ValueError(
            "The loss function returned a bare scalar, which does not say how towers"
            " of unequal weight share the mean. Return tj.Weighted.mean(losses,"
            " tower.weight), or pass loss_reduction=tj.Reduction.SUM (the total over"
            " towers) or tj.Reduction.MEAN (the mean of the towers' values)."
        )
    else:
        loss = Weighted(loss, 1.0)
    return dataclasses.replace(out, loss=_checked_loss(loss))


def _checked_loss(loss: Weighted) -> Weighted:
    total, weight = jnp.asarray(loss.sum), jnp.asarray(loss.weight)
    if total.shape or weight.shape:
        raise ValueError(
            f"The loss is not a scalar: sum has shape {total.shape} and weight shape"
            f" {weight.shape}. Use tj.Weighted.mean(losses, tower.weight), which adds"
            " up the examples' losses."
        )
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(
            f"The loss has dtype {total.dtype}, which has no gradient; it must be"
            " floating. Convert the losses before they are added."
        )
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return Weighted(total.astype(wide), weight.astype(wide))


def widened(dtype: Any) -> Any:
    """The dtype in which values of ``dtype`` are added: float32 or wider.

    Args:
      dtype: Any dtype.

    Returns:
      A dtype.
    """
    return jnp.promote_types(dtype, jnp.float32)


def _is_weighted(x: Any) -> bool:
    return isinstance(x, Weighted)


def _is_metric(x: Any) -> bool:
    return _is_weighted(x) or isinstance(
        x, jax.Array | np.ndarray | np.generic | int | float
    )


def check_metrics(metrics: Any, *, loss_is_free: bool) -> dict[str, Any]:
    """Metrics as a dict of float32-or-wider ``Weighted`` and plain arrays.

    Args:
      metrics: What the tower function returned.
      loss_is_free: May a metric be called ``"loss"``?

    Returns:
      The same names.

    Raises:
      ValueError: It is not a mapping of strings to ``Weighted`` or arrays, or it
        names a metric ``"loss"``.
    """
    if not hasattr(metrics, "items"):
        raise ValueError(
            f"Metrics are a mapping of name to tj.Weighted, got {metrics!r}. Return"
            " {'accuracy': tj.Weighted.mean(hits, tower.weight)}."
        )
    if "loss" in metrics and not loss_is_free:
        raise ValueError(
            "metrics['loss'] is the name of the global loss; give yours another name."
        )
    bad = [
        f"metrics[{name!r}] is a {type(metric).__name__}"
        for name, metric in metrics.items()
        if not isinstance(name, str) or not _is_metric(metric)
    ]
    if bad:
        raise ValueError(
            "Each metric is one tj.Weighted or one array, under a name that is a"
            f" string, but {'; '.join(bad)}. Give nested metrics names of their own,"
            " such as 'group/part'."
        )

    def widen(x: Any) -> Any:
        if not _is_weighted(x):
            return jnp.asarray(x)
        total, weight = jnp.asarray(x.sum), jnp.asarray(x.weight)
        wide = jnp.promote_types(widened(total.dtype), weight.dtype)
        return Weighted(total.astype(wide), weight.astype(wide))

    return {name: widen(metric) for name, metric in metrics.items()}


def split_weighted(metrics: dict[str, Any]) -> tuple[list[Weighted], dict[str, Any]]:
    """Metrics as what is added over towers, and what is mirrored already.

    Args:
      metrics: As `check_metrics` returns them.

    Returns:
      The ``Weighted`` leaves in order, and the tree with None in their places.
    """
    leaves = jax.tree.leaves(metrics, is_leaf=_is_weighted)
    mirrored = jax.tree.map(
        lambda x: None if _is_weighted(x) else x, metrics, is_leaf=_is_weighted
    )
    return [x for x in leaves if _is_weighted(x)], mirrored


def join_weighted(summed: list[Any], mirrored: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `split_weighted`.

    Args:
      summed: The ``Weighted`` leaves in order, or what became of them.
      mirrored: The tree with None in their places.

    Returns:
      The metrics.
    """
    pool = iter(summed)
    return jax.tree.map(
        lambda x: next(pool) if x is None else x, mirrored, is_leaf=lambda x: x is None
    )


def weighted_alone(metrics: dict[str, Any]) -> dict[str, Weighted]:
    """The metrics that are ``Weighted``.

    Args:
      metrics: As `join_weighted` returns them.

    Returns:
      Those names.
    """
    return {name: metric for name, metric in metrics.items() if _is_weighted(metric)}


def join_micro_batches(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of all micro-batches: sums add, of a mirrored value the last is kept.

    Args:
      metrics: Leaves ``[A, ...]``.

    Returns:
      Leaves ``[...]``.
    """
    return jax.tree.map(
        lambda x: (
            jax.tree.map(lambda y: y.sum(axis=0), x) if _is_weighted(x) else x[-1]
        ),
        metrics,
        is_leaf=_is_weighted,
    )


def check_rows(outputs: PyTree, rows: int) -> PyTree:
    """Predictions, once each leaf has one row for each of the tower's rows.

    Args:
      outputs: What the predict function returned.
      rows: ``b``.

    Returns:
      ``outputs`` as arrays.

    Raises:
      ValueError: A leaf has another leading size; names every such leaf.
    """
    bad = [
        f"{name} has shape {jnp.shape(x)}"
        for name, x in named_leaves("predictions", outputs)
        if jnp.shape(x)[:1] != (rows,)
    ]
    if bad:
        raise ValueError(
            f"Predictions are joined row by row, so each leaf has {rows} rows for a"
            f" tower's {rows} rows, but " + "; ".join(bad) + "."
        )
    if not jax.tree.leaves(outputs):
        raise ValueError(
            f"The predict function returned {outputs!r}, which holds no arrays."
        )
    return jax.tree.map(jnp.asarray, outputs)


def check_local(before: PyTree, after: PyTree) -> PyTree:
    """The next local values, once they are like the ones before.

    Args:
      before: ``tower.local``.
      after: What the loss function returned as ``local``.

    Returns:
      ``after``.

    Raises:
      ValueError: Its tree, a shape or a dtype differs; names every such leaf.
    """
    old = dict(named_leaves("local", before))
    new = dict(named_leaves("local", after))
    bad = [f"{name} is missing" for name in old.keys() - new.keys()]
    bad += [f"{name} is not in tower.local" for name in new.keys() - old.keys()]
    if not bad and jax.tree.structure(before) != jax.tree.structure(after):
        bad = [f"its containers changed to {jax.tree.structure(after)}"]
    for name in sorted(old.keys() & new.keys()):
        was, now = jnp.asarray(old[name]), jnp.asarray(new[name])
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            bad.append(
                f"{name} was {was.dtype}{list(was.shape)} and is"
                f" {now.dtype}{list(now.shape)}"
            )
    if bad:
        raise ValueError(
            "TowerOutput.local must be like tower.local, but "
            + "; ".join(sorted(bad))
            + ". Start from tower.local, or give step.init(local=...) what the loss"
            " function returns."
        )
    return after
