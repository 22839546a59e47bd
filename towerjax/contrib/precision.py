"""Compute a loss in 16 bits, with a dynamic scale of the loss for float16."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import towerjax as tj

_Tree: TypeAlias = Any  # a pytree
DTYPES = ("bfloat16", "float16", "float32")
"""What ``compute_dtype=`` of `train_step` may be."""


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A number that multiplies the loss, so that small gradients fit into float16.

    Gradients are divided by it before the update, so it changes no result. If one of
    them is not finite, the step changes nothing but the scale, which it halves. After
    ``double_every`` finite steps in a row the scale is doubled. At a scale of 1 a step
    that is not finite is refused like any other (``on_nonfinite``).

    Attributes:
      start: The first scale, a power of two, >= 1.
      double_every: The number of finite steps after which it is doubled, >= 1.

    Example:
      >>> LossScale(start=2.0**10).double_every
      2000

    Source: Micikevicius et al., "Mixed Precision Training", 2018,
    https://arxiv.org/abs/1710.03740.
    """

    start: float = 2.0**15
    double_every: int = 2000

    def __post_init__(self) -> None:
        start = self.start
        is_number = isinstance(start, int | float) and not isinstance(start, bool)
        is_finite = is_number and math.isfinite(start) and start >= 1
        if not is_finite or math.frexp(start)[0] != 0.5:
            raise ValueError(
                f"LossScale.start={start!r} must be a power of two, >= 1, such as"
                " 2.0**15, so that dividing by it loses no digits."
            )
        every = self.double_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(
                f"LossScale.double_every={every!r} must be a whole number >= 1, such"
                " as 2000."
            )


class Scaled(NamedTuple):
    """The ``state.opt_state`` of a step with a loss scale."""

    inner: _Tree  # the optimizer's state
    scale: jax.Array  # () float32
    finite_steps: jax.Array  # () int32, the number since the scale changed


def checked_dtype(dtype: Any) -> Any:
    """Read the dtype of ``compute_dtype=``, or None; raise for any other value."""
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in DTYPES:
        raise ValueError(
            f"compute_dtype={dtype!r} must be None or one of {', '.join(DTYPES)}."
            " Parameters keep their own dtype."
        )
    return known


def checked_scale(loss_scale: Any, dtype: Any) -> LossScale | None:
    """Check ``loss_scale``; for float16 without one, take the default."""
    if loss_scale is None:
        return LossScale() if dtype == jnp.float16 else None
    if not isinstance(loss_scale, LossScale):
        raise ValueError(
            f"loss_scale={loss_scale!r} must be None or a tj.contrib.LossScale()."
        )
    return loss_scale


def computing_in(loss_fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Make the loss function cast parameters and rows to ``dtype``.

    JAX casts the gradient back to the parameters' own dtypes.
    """

    def cast(x: Any) -> Any:
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, dtype) if is_float else x

    def run(params: _Tree, batch: _Tree, tower: tj.Tower) -> Any:
        return loss_fn(jax.tree.map(cast, params), jax.tree.map(cast, batch), tower)

    return run


def keeping_scale(
    optimizer: optax.GradientTransformation, loss_scale: LossScale
) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer whose state also holds the loss scale.

    Its update leaves the scale unchanged; `scaling` changes it.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: _Tree) -> Scaled:
        scale = jnp.float32(loss_scale.start)
        return Scaled(inner.init(params), scale, jnp.int32(0))

    def update(
        updates: _Tree, state: Any, params: _Tree = None, **extra: Any
    ) -> tuple[_Tree, Scaled]:
        updates, after = inner.update(updates, state.inner, params, **extra)
        return updates, state._replace(inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def scaling(
    fns: Any, loss_fn: Callable[..., Any], loss_scale: LossScale, options: Any
) -> Any:
    """Change a train step's functions to use a loss scale.

    The loss is multiplied by the scale, and the gradient divided by it before the
    update.
    """
    trainable = options.get("trainable")

    def trains(name: str, leaf: Any) -> bool:
        if name == "scale":
            return False
        if trainable is None:
            return jnp.issubdtype(leaf.dtype, jnp.inexact)
        return trainable(name.removeprefix("params").removeprefix("/"), leaf)

    def params_of(state: tj.TrainState) -> dict[str, Any]:
        return {"params": state.params, "scale": state.opt_state.scale}

    def scaled_loss(parts: dict[str, Any], batch: _Tree, tower: tj.Tower) -> Any:
        return _times(loss_fn(parts["params"], batch, tower), parts["scale"])

    is_tree = trainable is not None and not callable(trainable)
    flags = {"params": trainable, "scale": False} if is_tree else trains
    reduction = options.get("loss_reduction")
    tower = tj.of_loss(
        scaled_loss, params_of, trainable=flags, loss_reduction=reduction
    )

    def update(state: tj.TrainState, merged: dict[str, Any]) -> tuple[Any, ...]:
        return _next_state(fns, loss_scale, state, merged)

    return fns._replace(tower=tower, update=update)


# The names of the field that holds a loss: in `tj.TowerOutput`, and in the types of
# tunix and maxtext that a step accepts, too. In a mean the sum is multiplied, not the
# weight.
_PLACES_OF_LOSS = ("loss", "primary_loss", "unreduced_sum")


def _times(out: Any, scale: jax.Array) -> Any:
    """Multiply the loss in a loss function's result by a number.

    A result of another library keeps its type, so that the step reads it as it would
    without a scale.
    """
    if isinstance(out, tj.Weighted | jax.Array):
        return out * scale
    for name in _PLACES_OF_LOSS:
        if hasattr(out, name):
            return _replaced(out, name, _times(getattr(out, name), scale))
    return out * scale


def _replaced(out: Any, name: str, value: Any) -> Any:
    """Replace one field of a copy of a dataclass or named tuple."""
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return dataclasses.replace(out, **{name: value})
    if isinstance(out, tuple) and hasattr(out, "_replace"):
        return out._replace(**{name: value})  # type: ignore[attr-defined]
    raise ValueError(
        f"loss_scale multiplies the field {name!r} of what the loss function returned,"
        f" but a {type(out).__name__} is neither a dataclass nor a named tuple. Return"
        " tj.Weighted(sum, weight), or tj.TowerOutput(loss=tj.Weighted(sum, weight),"
        " metrics={...})."
    )


def _next_state(
    fns: Any, loss_scale: LossScale, state: tj.TrainState, merged: dict[str, Any]
) -> tuple[Any, ...]:
    """Make the next state and the metrics, and tell if the step is accepted."""
    _, scale, finite_steps = state.opt_state
    grads = _unscaled(merged["grads"], scale)
    loss = merged["loss"] * (1 / scale)
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]).all()
    is_finite &= jnp.isfinite(loss.value)
    names = ("params", "opt_state", "local", "extra")

    def attempt(carry: dict[str, Any]) -> tuple[Any, ...]:
        before = dataclasses.replace(state, **carry)
        after, metrics = fns.update(before, {**merged, "grads": grads, "loss": loss})
        fields = {name: getattr(after, name) for name in names}
        return is_finite, fields, metrics

    carry = {name: getattr(state, name) for name in names}
    fields, metrics = fns.accept_or_keep(attempt, carry)
    count = finite_steps + 1
    doubles = count == loss_scale.double_every
    larger = jnp.where(doubles, 2 * scale, scale)
    next_scale = jnp.where(is_finite, larger, jnp.maximum(scale / 2, 1))
    count = jnp.where(is_finite & ~doubles, count, 0)
    fields["opt_state"] = Scaled(fields["opt_state"].inner, next_scale, count)
    if "loss_scale" in metrics:
        raise ValueError(
            "The metrics of the loss have 'loss_scale', which is the name of the scale."
            " Give the metric of the loss another name."
        )
    metrics = {**metrics, "loss_scale": scale}
    return dataclasses.replace(state, **fields), metrics, is_finite | (scale > 1)


def _unscaled(grads: Any, scale: jax.Array) -> Any:
    """Divide the merged gradient of the parameters by the scale."""
    is_weighted = isinstance(grads, tj.Weighted)
    is_dense = is_weighted or isinstance(grads, tj.Sum)
    total: Any = getattr(grads, "sum" if is_weighted else "value", ())
    leaves = jax.tree.leaves(total)
    if not is_dense or not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves):
        raise ValueError(
            "loss_scale needs one merged dense gradient, but these towers train alone,"
            " or a table has a gradient of rows. Compute in bfloat16, which needs no"
            " scale."
        )
    divided = jax.tree.map(lambda x: x / scale, total["params"])
    if is_weighted:
        return dataclasses.replace(grads, sum=divided)
    return tj.Sum(divided)
