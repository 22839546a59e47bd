"""``TowerOptimizer``: reduce gradients over towers, then update.

Inside a model function of `replicate_model_fn` the towers are a bound axis, as JAX's
own axes are. Elsewhere there are no towers, and nothing is reduced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import towerjax as tj
from towerjax.make.train import pass_loss
from towerjax.metrics import ratio
from towerjax.metrics.weighted import Weighted
from towerjax.step.state.train_state import TrainState
from towerjax.tf1.estimator.loss_forms import (
    as_one_mean,
    check_params_of_model,
    has_denominator,
    is_sum_of_means,
    pull_back,
    sum_of_loss,
    sums_of_terms,
)
from towerjax.tf1.estimator.losses import TowersOfStep, divided, towers_here
from towerjax.tf1.meets import map_gradients
from towerjax.types import PyTree, Sum
from towerjax.types.options import check_flag, check_takes
from towerjax.types.refusals import a_type, check_like, check_types, refuse_unheld
from towerjax.types.trees import has_tracers, widen_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOptimizerState:
    """The wrapped optimizer's state."""

    inner: PyTree


class TowerOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer that reduces gradients over towers before it updates.

    Inside a model function of `replicate_model_fn` its ``update`` adds up the towers'
    gradients, divides as the loss reduction says, and passes the result to the wrapped
    optimizer. Elsewhere it only divides by the weight of a ``Weighted`` loss, if one is
    given. It can be part of ``optax.chain``; a transformation before it sees one
    tower's gradient.

    Attributes:
      optimizer: The wrapped optimizer.
      lazy: Whether only the rows that `tj.sparse.take` looked up in a table are
        updated, including their moments and weight decay.

    Example:
      >>> optimizer = TowerOptimizer(optax.sgd(0.5))
      >>> state = optimizer.init(jnp.float32(2.0))
      >>> updates, state = optimizer.update(jnp.float32(1.0), state)
      >>> float(updates)
      -0.5

    Source:
      ``TowerOptimizer`` of ``tf.contrib.estimator`` (2018).
    """

    optimizer: optax.GradientTransformationExtraArgs
    lazy: bool
    takes_rows = True  # gradients may be ``IndexedRows``

    def __new__(
        cls,
        optimizer: optax.GradientTransformation
        | Callable[[], optax.GradientTransformation],
        *,
        lazy: bool = False,
    ) -> "TowerOptimizer":
        """Wrap an optimizer, or the one that a function without arguments returns."""
        inner_optimizer = optimizer() if callable(optimizer) else optimizer
        if not isinstance(inner_optimizer, optax.GradientTransformation):
            raise ValueError(
                f"TowerOptimizer got {inner_optimizer!r}, which is not an optimizer."
                " Pass an optax transformation, a function that returns one, or"
                " optax.MultiSteps(...).gradient_transformation()."
            )
        inner = pass_loss(inner_optimizer)

        def init(params: PyTree) -> PyTree:
            return TowerOptimizerState(inner.init(params))

        def update(
            updates: PyTree,
            state: PyTree,
            params: PyTree = None,
            *,
            loss: Weighted | jax.Array | None = None,
            **extra_args: Any,
        ) -> tuple[PyTree, PyTree]:
            _check_own_state(state, init, params)
            grads, value = _reduce_gradients(updates, loss, towers_here())
            if value is not None:
                extra_args.setdefault("value", value)
            out, after = tj.sparse.update_with_rows(
                inner, grads, state.inner, params, lazy=lazy, **extra_args
            )
            return out, dataclasses.replace(state, inner=after)

        check_flag("lazy", lazy)
        self = super().__new__(cls, init, update)
        self.optimizer = inner
        self.lazy = lazy
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, bool]]:
        """Give the constructor's arguments, with which a copy is made.

        A model's ``params`` are copied, and may hold an optimizer.
        """
        return (self.optimizer,), {"lazy": self.lazy}

    def compute_gradients(
        self, loss_fn: Callable[..., PyTree], params: PyTree, *, has_aux: bool = False
    ) -> tuple[Any, PyTree]:
        """Differentiate the *sum* of a tower's loss, not reduced over towers.

        Args:
          loss_fn: A function ``params -> loss`` that returns a scalar or a
            ``Weighted``, also with ``tj.penalty`` terms; with ``has_aux`` a function
            ``params -> (loss, aux)``. It is traced, as under ``jax.jit``.
          params: Floating arrays. The gradient of a table that `tj.sparse.take` looks
            up is ``IndexedRows``.
          has_aux: Whether ``loss_fn`` returns ``(loss, aux)``.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``. Pass the loss to
          `apply_gradients`, which divides the gradient by the weight of a ``Weighted``.

        Raises:
          ValueError: The loss is neither a scalar nor a ``Weighted`` of scalars; or it
            is a sum of several means, which only `minimize` can differentiate.

        Example:
          >>> optimizer = TowerOptimizer(optax.sgd(0.5))
          >>> loss, grads = optimizer.compute_gradients(lambda w: w**2, jnp.float32(3))
          >>> float(loss), float(grads)
          (9.0, 6.0)
        """
        of_params = _checked(loss_fn, params, has_aux)
        _, pull, out = pull_back(of_params, params, _summed_loss, has_aux=has_aux)
        loss = out[0] if has_aux else out
        return out, pull(1.0, of_sum=has_denominator(loss))

    def apply_gradients(
        self,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        *,
        loss: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        """Update the parameters and the state of the optimizer.

        Args:
          grads: A tower's gradients, like ``params``.
          opt_state: The optimizer's state, from ``init`` or the last call.
          params: The parameters.
          loss: The tower's loss, whose sum has the gradient ``grads``.
          **extra_args: More arguments for the wrapped optimizer.

        Returns:
          ``(params, opt_state)``.

        Raises:
          ValueError: The errors of ``update``; or the optimizer changes a type.

        Example:
          >>> optimizer = TowerOptimizer(optax.sgd(0.5))
          >>> w = jnp.float32(3)
          >>> w, _ = optimizer.apply_gradients(jnp.float32(6), optimizer.init(w), w)
          >>> float(w)
          0.0
        """
        updates, after = self.update(grads, opt_state, params, loss=loss, **extra_args)
        next_params = optax.apply_updates(params, updates)
        return (
            check_types(params, next_params, "params", "the optimizer's updates"),
            check_types(opt_state, after, "opt_state", "the optimizer"),
        )

    def minimize(
        self,
        loss_fn: Callable[..., PyTree],
        state: TrainState,
        *,
        has_aux: bool = False,
    ) -> tuple[Any, TrainState]:
        """Take one step on ``loss_fn``; return the loss and the state after the step.

        Args:
          loss_fn: As for `compute_gradients`; its loss may be a sum of several means.
          state: A `TrainState` of this optimizer.
          has_aux: As for `compute_gradients`.

        Returns:
          ``(loss, state)``, or ``((loss, aux), state)``.

        Raises:
          ValueError: The errors of `compute_gradients` and `apply_gradients`.

        Example:
          >>> optimizer = TowerOptimizer(optax.sgd(0.5))
          >>> state = TrainState.create(jnp.float32(3), optimizer)
          >>> loss, state = optimizer.minimize(lambda w: w**2, state)
          >>> float(loss), float(state.params), int(state.step)
          (9.0, 0.0, 1)
        """
        if not isinstance(state, TrainState):
            raise ValueError(
                f"TowerOptimizer.minimize got {a_type(state)}, but needs a"
                " tj.TrainState. For other states use compute_gradients and"
                " apply_gradients."
            )
        out, grads, loss = _gradient_of_sum(loss_fn, state.params, has_aux)
        params, opt_state = self.apply_gradients(
            grads, state.opt_state, state.params, loss=loss
        )
        return out, dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state
        )


def _checked(
    loss_fn: Callable[..., PyTree], params: PyTree, has_aux: bool
) -> Callable[[PyTree], PyTree]:
    """Make ``loss_fn`` check its result; raise for wrong arguments."""
    if not callable(loss_fn):
        raise ValueError(
            f"TowerOptimizer got {a_type(loss_fn)} as the loss, but JAX differentiates"
            " functions. Write def loss_fn(params), which computes it, and"
            " optimizer.minimize(loss_fn, variables)."
        )
    if isinstance(params, TrainState):
        raise ValueError(
            "TowerOptimizer.compute_gradients got a tj.TrainState as params. Write"
            " optimizer.compute_gradients(loss_fn, variables.params)."
        )
    check_takes("loss_fn(params)", loss_fn, params)
    check_flag("has_aux", has_aux)
    refuse_unheld("params", params)
    check_params_of_model(params)

    def of_params(params: PyTree) -> PyTree:
        out = loss_fn(params)
        if isinstance(out, tuple) != has_aux:
            raise ValueError(
                f"loss_fn returned {a_type(out)}, which does not fit has_aux={has_aux}."
                " Return (loss, aux) with has_aux=True, or the loss alone with"
                " has_aux=False."
            )
        return out

    return of_params


@dataclasses.dataclass(frozen=True)
class _OfAllTowers:
    """A loss that is already reduced over towers, like the gradient beside it."""

    value: jax.Array


def _summed_loss(loss: Any) -> jax.Array:
    """Take the sum of a ``Weighted``, or a scalar loss; refuse several means."""
    return sum_of_loss(_as_one_mean(loss))


def _as_one_mean(loss: Any) -> Any:
    """Take a loss unchanged or as a ``Weighted``; refuse several means."""
    mean = as_one_mean(loss)
    if mean is None and loss is not None:
        raise ValueError(
            "compute_gradients cannot differentiate a sum of several means, because"
            " each has its own denominator over all towers. Write"
            " optimizer.minimize(loss_fn, variables), which can; or differentiate each"
            " mean by itself."
        )
    return mean


def _gradient_of_sum(
    loss_fn: Callable[..., PyTree], params: PyTree, has_aux: bool
) -> tuple[PyTree, PyTree, PyTree]:
    """Differentiate the sum of the loss, and not its mean.

    Returns ``(result of loss_fn, gradient, loss to reduce with that gradient)``.
    """
    towers = towers_here()
    if towers is not None and towers.differentiates:
        of_params = _checked(loss_fn, params, has_aux)
        out, grads, value = towers.differentiate(of_params, params, has_aux)
        return out, _cast_like(params, grads), _OfAllTowers(value)
    as_original = towers is not None and towers.compat == "tf1"
    sums_of = functools.partial(_sums_of, as_original=as_original)
    of_params = _checked(loss_fn, params, has_aux)
    sums, pull, out = pull_back(of_params, params, sums_of, has_aux=has_aux)
    loss = out[0] if has_aux else out
    if isinstance(sums, list):
        grads, value = _of_means(sums_of_terms(loss), sums, pull, towers)
        return out, grads, value
    is_of_sum = has_denominator(loss) and not as_original
    grads = pull(1.0, of_sum=is_of_sum)
    is_own_mean = as_original and isinstance(loss, Weighted)
    return out, grads, loss.value if is_own_mean else loss


def _sums_of(loss: Any, *, as_original: bool) -> PyTree:
    """Choose the number of a tower's loss that is differentiated, such as its sum.

    For a sum of several means return a list of numbers. ``as_original`` asks for what
    TensorFlow 1 differentiates: a mean and not its sum.
    """
    # In TensorFlow 1 also a tower without examples adds the shared terms of its loss.
    if is_sum_of_means(loss) and (as_original or len(loss.terms) > 1):
        sums = sums_of_terms(loss)
        return [*sums.sums, *sums.shared]
    if as_original and isinstance(loss, Weighted):
        return loss.value
    return _summed_loss(loss)


def _of_means(
    loss: Any,
    sums: list[jax.Array],
    pull: Callable[[PyTree], PyTree],
    towers: TowersOfStep | None,
) -> tuple[PyTree, PyTree]:
    """Differentiate a sum of means, and give the loss that belongs to it.

    ``loss`` is the result of `sums_of_terms`, and ``sums`` are its numbers. ``pull``
    maps a factor for each number to the gradient.
    """
    # This tower's weights divide its sums if the weights of all towers cannot be added
    # up before the derivative.
    weights = loss.weights
    parts = 1
    are_known = False
    if towers is not None and not towers.takes_scalars:
        are_known = True
        weights, parts = towers.sum_weights(loss.weights)
    factors = [ratio(jnp.ones_like(w), w) for w in weights]
    factors += [jnp.asarray(1 / parts) for _ in loss.shared]
    grads = pull(factors)
    value = sum(c * x for c, x in zip(factors, sums, strict=True))
    if towers is None or not (are_known or towers.is_alone):
        return grads, value
    return grads, Sum(Weighted(value, sum(loss.weights)))


def _cast_like(updates: PyTree, grads: PyTree) -> PyTree:
    """Cast each gradient to the dtype of the same leaf of ``updates``."""
    return map_gradients(lambda g, x: g.astype(jnp.result_type(x)), grads, updates)


def _check_own_state(
    state: PyTree, init: Callable[[PyTree], PyTree], params: PyTree
) -> None:
    """Raise unless ``state`` fits what this optimizer makes from ``params``."""
    fault = (
        "TowerOptimizer.update got the state of another optimizer, or of other params"
    )
    advice = (
        "Make the state with optimizer.init(params) or tj.TrainState.create(params,"
        " optimizer), where optimizer is this TowerOptimizer."
    )
    if not isinstance(state, TowerOptimizerState):
        raise ValueError(f"{fault}: {a_type(state)}. {advice}")
    # The shapes are checked only while a step is traced, not in each eager call. An
    # optax update itself accepts some wrong states silently.
    if has_tracers(params):
        shapes = jax.eval_shape(init, params).inner
        check_like(
            "state.inner", state.inner, shapes, fault, advice, lambda _: "a leaf"
        )


def _reduce_gradients(
    grads: PyTree, loss: Any, towers: TowersOfStep | None
) -> tuple[PyTree, jax.Array | None]:
    """Make the gradient of the loss of all towers, and that loss."""
    if isinstance(loss, _OfAllTowers):
        return grads, loss.value
    if isinstance(grads, Weighted):
        raise ValueError(
            "TowerOptimizer got a gradient of tj.value_and_grad, which is a"
            " tj.Weighted. Use optimizer.compute_gradients, or pass grads.sum with"
            " loss=loss."
        )
    loss = _as_one_mean(loss)
    if towers is None:
        if not isinstance(loss, Weighted):
            return grads, loss
        return divided(grads, loss.weight), loss.value
    if loss is None and not towers.takes_scalars:
        raise ValueError(
            f"TowerOptimizer.update needs the loss under {towers.reduction!r}, because"
            " its weight divides the gradients. Write optimizer.update(grads, state,"
            " params, loss=loss), or use minimize."
        )
    wide = map_gradients(lambda g: g.astype(widen_dtype(g.dtype)), grads)
    if towers.compat == "tf1" and isinstance(loss, Weighted) and not towers.is_alone:
        wide = divided(wide, loss.weight)
    total, summed = towers.meet(loss, wide)
    out = _cast_like(grads, divided(summed, total.weight))
    return out, None if loss is None else total.value
