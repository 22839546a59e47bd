"""A train step with what most trainers add: an average, metrics, mixed precision."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import towerjax as tj
from towerjax.contrib import precision

_Tree: TypeAlias = Any  # a pytree

LOGGED = ("learning_rate", "gradient_norm")
"""What ``log=`` of `train_step` may name."""


class Averaged(NamedTuple):
    """The ``state.opt_state`` of a step with ``ema=``; see `ema_params`."""

    inner: _Tree  # the optimizer's state
    ema: _Tree  # the average, in float32 or wider; None for fixed parameters


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    strategy: tj.Mirrored | tj.OneDevice,
    *,
    ema: float | None = None,
    log: Sequence[str] = (),
    compute_dtype: Any = None,
    loss_scale: precision.LossScale | None = None,
    **options: Any,
):  # the result type is that of `tj.build_train_step`
    """Build a train step with an average, metrics and mixed precision.

    It is a step of `tj.build_train_step`.

    The average is in ``state.opt_state``. So checkpoints hold it, and a refused step
    leaves it unchanged. It is sharded if the optimizer's state is sharded. The average
    starts at the parameters. After each step it is ``ema * average + (1 - ema) *
    params``.

    Args:
      loss_fn: As for `tj.build_train_step`.
      optimizer: Any optax transformation. To log ``"learning_rate"``, its state must
        hold the learning rate, as with
        ``optax.inject_hyperparams(optax.adamw)(schedule)``.
      strategy: As for `tj.build_train_step`.
      ema: The decay of an exponential moving average of the trained parameters, in
        (0, 1), such as 0.999. None keeps no average. Evaluate it with
        ``tj.run(..., eval_params=tj.contrib.ema_params)``.
      log: Metrics to add: ``"learning_rate"`` is that of this step's update.
        ``"gradient_norm"`` is the Euclidean norm of the whole merged gradient, before
        any clipping, in float32.
      compute_dtype: ``"bfloat16"`` or ``"float16"`` casts the floating leaves of the
        parameters and of the batch for the loss. The state, gradients and sums stay as
        they are. Cast what must be exact back in the loss, and compute the loss itself
        in float32. None casts nothing.
      loss_scale: A `LossScale`, which multiplies the loss for the backward pass. None
        is ``LossScale()`` for float16 and none for others. The metric ``"loss_scale"``
        has the scale of each step.
      options: As for `tj.build_train_step`.

    Raises:
      ValueError: An option has an unknown value. At ``init``: the optimizer's state has
        no learning rate, or several. At the first call: the loss already has a metric
        of that name, or the gradient has ``IndexedRows``.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
      >>> step = train_step(loss_fn, optimizer, tj.Mirrored(towers=2), ema=0.5,
      ...     log=("learning_rate", "gradient_norm"))
      >>> state, metrics = step(step.init(0.0), np.full(4, 2.0, np.float32))
      >>> float(metrics["learning_rate"]), float(metrics["gradient_norm"])
      (0.25, 4.0)
      >>> float(state.params), float(ema_params(state))
      (1.0, 0.5)
    """
    log = _checked_log(log)
    dtype = precision.checked_dtype(compute_dtype)
    scale = precision.checked_scale(loss_scale, dtype)
    if ema is not None:
        optimizer = with_ema(optimizer, ema)
    if scale is not None:
        optimizer = precision.keeping_scale(optimizer, scale)
    if dtype is not None:
        loss_fn = precision.computing_in(loss_fn, dtype)
    inner = options.pop("extend", None)

    def extend(fns: Any) -> Any:
        fns = fns if inner is None else inner(fns)
        fns = _logging(fns, log) if log else fns
        return fns if scale is None else precision.scaling(fns, loss_fn, scale, options)

    if log or inner is not None or scale is not None:
        options["extend"] = extend
    return tj.build_train_step(loss_fn, optimizer, strategy, **options)


def with_ema(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer keep an exponential moving average of the parameters.

    `train_step` with ``ema=`` uses it. Use it directly for replicated models and for
    steps of your own.

    Args:
      optimizer: Any optax transformation.
      decay: The share of the average that is kept at each step, in (0, 1).

    Returns:
      The transformation. Its state is a NamedTuple: ``inner`` is the state of
      ``optimizer``, and ``ema`` is the average, whose floats have at least 32 bits.

    Raises:
      ValueError: ``decay`` is not in (0, 1), or ``optimizer`` is not an optimizer.

    Example:
      >>> optimizer = with_ema(optax.sgd(0.5), 0.9)
      >>> params = jnp.float32(1.0)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.float32(2.0), state, params)
      >>> float(updates), round(float(state.ema), 6)
      (-1.0, 0.9)

    Source:
      Polyak and Juditsky (1992), "Acceleration of Stochastic Approximation by
      Averaging", https://doi.org/10.1137/0330046; exponential: Tarvainen and Valpola
      (2017), https://arxiv.org/abs/1703.01780.
    """
    is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if not is_number or not 0 < decay < 1:
        raise ValueError(
            f"ema={decay!r} must be a number in (0, 1), such as 0.999, the share of the"
            " average that is kept at each step."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer={optimizer!r:.200} must be an optax transformation, such as"
            " optax.adam(1e-3)."
        )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: _Tree) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(_widened, params))

    def update(
        updates: _Tree, state: Any, params: _Tree = None, **extra: Any
    ) -> tuple[_Tree, Averaged]:
        updates, after = inner.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)

        def mean(old: jax.Array, x: jax.Array) -> jax.Array:
            return decay * old + (1 - decay) * x.astype(old.dtype)

        return updates, Averaged(after, jax.tree.map(mean, state.ema, new))

    return optax.GradientTransformationExtraArgs(init, update)


def ema_params(state: tj.TrainState) -> _Tree:
    """Read the averaged parameters in a state, for ``eval_params=`` of `tj.run`.

    Args:
      state: A state of a step with ``ema=``.

    Returns:
      A tree like ``state.params`` with the same dtypes. Leaves that are not trained
      have their values in ``state.params``.

    Raises:
      ValueError: The state has no average.

    Example:
      >>> import towerjax as tj
      >>> optimizer = with_ema(optax.sgd(0.5), 0.9)
      >>> float(ema_params(tj.TrainState.create(jnp.float32(3.0), optimizer)))
      3.0
    """
    averages = _found(state.opt_state, _is_averaged)
    if len(averages) != 1:
        count = len(averages) or "no"
        raise ValueError(
            f"state.opt_state has {count} averages of the parameters, but must have"
            " one. Build the step with tj.contrib.train_step(..., ema=0.999)."
        )

    def value(x: Any, average: Any) -> Any:
        return x if average is None else average.astype(x.dtype)

    return jax.tree.map(value, state.params, _filled(averages[0].ema, state.params))


def _filled(part: _Tree, whole: _Tree) -> _Tree:
    """Fill a tree like ``whole``, with None wherever ``part`` has None.

    Its other leaves are those of ``part``.
    """

    def is_none(x: Any) -> bool:
        return x is None

    leaves = jax.tree.leaves(part, is_leaf=is_none)
    # A module that was split has None where it had a function.
    structure = jax.tree.structure(whole, is_leaf=is_none)
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            "The average in state.opt_state does not have the structure of"
            " state.params. Pass a state that step.init or a call of the step returned."
        )
    return jax.tree.unflatten(structure, leaves)


def _widened(x: Any) -> jax.Array:
    """Copy ``x``; floats of fewer than 32 bits become float32."""
    x = jnp.asarray(x)
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32))


def _is_averaged(x: Any) -> bool:
    return isinstance(x, Averaged)


def _found(tree: _Tree, is_one: Callable[[Any], bool]) -> list[Any]:
    """List the parts of a tree for which ``is_one`` is true."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def _checked_log(log: Sequence[str]) -> tuple[str, ...]:
    names = (log,) if isinstance(log, str) else tuple(log)
    if unknown := [x for x in names if x not in LOGGED]:
        raise ValueError(
            f"log={log!r} names {unknown[0]!r}, and may name {', '.join(LOGGED)}. Add"
            " others with extend= of tj.build_train_step, or as metrics of the loss."
        )
    return names


def _logging(fns: Any, log: tuple[str, ...]) -> Any:
    """Add the metrics in ``log`` to the update of a train step."""

    def init(params: _Tree) -> dict[str, _Tree]:
        state = fns.init(params)
        if "learning_rate" in log:
            _learning_rate(state["opt_state"])
        return state

    def update(state: tj.TrainState, merged: _Tree) -> tuple[Any, ...]:
        after, metrics, *rest = fns.update(state, merged)
        more = {}
        if "learning_rate" in log:
            more["learning_rate"] = _learning_rate(after.opt_state)
        if "gradient_norm" in log:
            more["gradient_norm"] = _norm(merged)
        if known := more.keys() & metrics.keys():
            raise ValueError(
                f"log={log} and the metrics of the loss both have {sorted(known)}. Give"
                " the metric of the loss another name."
            )
        return after, {**metrics, **more}, *rest

    return fns._replace(init=init, update=update)


def _has_rate(x: Any) -> bool:
    hyperparams = getattr(x, "hyperparams", None)
    return isinstance(hyperparams, dict) and "learning_rate" in hyperparams


def _learning_rate(opt_state: _Tree) -> jax.Array:
    """Find the one learning rate in an optimizer's state."""
    with_rate = _found(opt_state, _has_rate)
    if len(with_rate) != 1:
        count = len(with_rate) or "no"
        raise ValueError(
            f"log='learning_rate': the optimizer's state has {count} learning rates,"
            " but must have one. Write optax.inject_hyperparams(optax.adamw)(schedule),"
            " which keeps it there. To log several, use extend= of tj.build_train_step."
        )
    return with_rate[0].hyperparams["learning_rate"]


def _norm(merged: dict[str, Any]) -> jax.Array:
    """Compute the norm of the merged gradient."""
    if isinstance(merged["grads"], tj.PerTower):
        raise ValueError(
            "log='gradient_norm' needs a merged gradient, but these towers train alone."
            " Leave it out of log=."
        )
    leaves = jax.tree.leaves(merged["grads"].value)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves):
        raise ValueError(
            "log='gradient_norm' needs a dense gradient, but a table has a gradient of"
            " rows, which may name a row twice, so their norm is not that of the"
            " gradient. Log a norm of your own with extend= of tj.build_train_step."
        )
    return optax.tree.norm([x.astype(jnp.promote_types(x.dtype, jnp.float32))
        for x in leaves])  # fmt: skip
