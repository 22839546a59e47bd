"""Which parameters are trained, and what an optimizer needs besides gradients."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.types import PyTree, named_leaves, readable_leaves
from towerjax.types.leaves import listed

Trainable: TypeAlias = Callable[[str, Any], bool] | PyTree
"""``(name, leaf) -> bool``, or a tree of bool that is a prefix of ``params``."""

_SAY_TRAINABLE = "Say trainable=lambda name, leaf: ... (or a tree of bool)"
OF_MODELS = "Put it into tj.TrainState.create(..., extra=...), and read tower.extra,"
"""What to do with a fixed leaf where no ``trainable`` is taken."""


def trainable_flags(
    params: PyTree, trainable: Trainable | None, *, advice: str = _SAY_TRAINABLE
) -> PyTree:
    """For each leaf, whether it is trained; raises if such a leaf has no gradient."""
    readable = readable_leaves("", params)
    if trainable is None:
        # A float of 8 bits must be named as fixed, so it is not left out here.
        flags = jax.tree.map(lambda x: jnp.issubdtype(_dtype_at(x), np.inexact), params)
    elif callable(trainable):
        chosen = [bool(trainable(name, _param_shape(x))) for name, x in readable]
        flags = jax.tree.unflatten(jax.tree.structure(params), chosen)
    else:
        flags = _broadcast_flags(trainable, params)
    named, chosen = named_leaves("params", params), jax.tree.leaves(flags)
    if trainable is not None and not any(chosen):
        names = ", ".join([repr(name) for name, _ in readable[:8]])
        raise ValueError(
            "trainable=... chooses none of the params, so that nothing would train."
            f" Their names are {names}{' ...' * (len(readable) > 8)}."
        )
    if any(chosen):
        named = [pair for pair, yes in zip(named, chosen, strict=True) if yes]
    bad = [f"{name} is {_dtype_at(x)}" for name, x in named if not _has_gradient(x)]
    if bad:
        raise ValueError(
            "Every leaf of params that is trained gets a gradient and so is floating"
            f" or complex, of 16 bits or more, but {listed(bad)}. {advice} where it is"
            " fixed; cast inside the loss function to what is narrower."
        )
    return flags


def check_trainable(trainable: Any) -> None:
    """Raise unless it is a function, or a tree of bool."""
    leaves = jax.tree.leaves(trainable)
    if not callable(trainable) and not all(isinstance(x, bool) for x in leaves):
        raise ValueError(
            f"trainable={trainable!r} must be a function (name, leaf) -> bool, or a"
            " tree of True and False like params or its upper part."
        )


def trained_part(params: PyTree, flags: PyTree) -> PyTree:
    """The trained leaves, None for the others; ``params`` itself if all are."""
    if all(jax.tree.leaves(flags)):
        return params
    return jax.tree.map(lambda yes, x: x if yes else None, flags, params)


def with_trained(part: PyTree, params: PyTree, flags: PyTree) -> PyTree:
    """``params`` with the trained leaves replaced by those of ``part``."""
    left = iter(jax.tree.leaves(part))
    return jax.tree.map(lambda yes, x: next(left) if yes else x, flags, params)


def _broadcast_flags(trainable: PyTree, params: PyTree) -> PyTree:
    """A bool for each leaf of ``params``, from a prefix tree."""
    try:
        return jax.tree.broadcast(trainable, params)
    except ValueError as error:
        raise ValueError(
            f"trainable is not the upper part of params: {error}. Give it the same"
            " containers, and True or False for a leaf or for all below."
        ) from error


def _dtype_at(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _param_shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), _dtype_at(x))


def _has_gradient(x: Any) -> bool:
    return jnp.issubdtype(_dtype_at(x), jnp.inexact) and _dtype_at(x).itemsize > 1


_LINE_SEARCH = (
    "A line search evaluates the loss function (value_fn) several times in one update."
    " Write optax.lbfgs(learning_rate, linesearch=None), or another optimizer"
)
_NEEDS = {
    "ScaleByZoomLinesearchState": _LINE_SEARCH,
    "ScaleByBacktrackingLinesearchState": _LINE_SEARCH,
    "HutchinsonState": (
        "hutchinson_estimator_diag_hessian, which sophia uses, differentiates the loss"
        " function (obj_fn). Give sophia a hessian_diagonal_fn that does not, or write"
        " another optimizer"
    ),
    "SAMState": (
        "sam with opaque_mode=True calls the gradient function (grad_fn). Write"
        " sam(..., opaque_mode=False), for which sync_period calls of the step are one"
        " of SAM"
    ),
    "LookaheadState": (
        "lookahead takes pairs of parameters and the gradients of the fast ones alone."
        " Write params=optax.LookaheadParams.init_synced(params), read params.fast in"
        " the loss function, and hand on its part: optax.GradientTransformation("
        "lookahead.init, lambda grads, state, params: lookahead.update(grads.fast,"
        " state, params))"
    ),
}
"""By the type of its state: what an optimizer needs, and what to write instead."""

_OF_EXAMPLES = "DifferentiallyPrivateAggregateState"


def pass_loss(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Wrap the optimizer: drops ``value=loss`` if it takes none; explains its needs."""
    inner = optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        kinds = _state_types(state)
        if _OF_EXAMPLES in kinds:
            raise ValueError(
                "differentially_private_aggregate, which dpsgd uses, clips the gradient"
                " of each example, but the optimizer gets one, of the loss of the whole"
                " batch: nothing would be private. Clip the examples' gradients in a"
                " step of your own, and give this one the optimizer without it."
            )
        try:
            return _call_update(inner, updates, state, params, extra_args)
        except (AttributeError, TypeError, ValueError) as error:
            needs = [_NEEDS[kind] for kind in _NEEDS if kind in kinds]
            if not needs and "required keyword-only argument" in str(error):
                needs = ["Give it the rest in a transformation that wraps it"]
            if not needs:
                raise
            raise ValueError(
                "The optimizer needs more than gradients, parameters and value=loss:"
                f" {error} {needs[0]}."
            ) from error

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _call_update(
    inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, Any]:
    try:
        return inner.update(updates, state, params, **extra_args)
    except TypeError as error:
        # Only a call shows what an update wrapped in others takes.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    without = {name: x for name, x in extra_args.items() if name != "value"}
    return inner.update(updates, state, params, **without)


def may_need_more(opt_state: Any) -> bool:
    """Whether `pass_loss` may refuse the update of an optimizer with this state."""
    return not _state_types(opt_state).isdisjoint({*_NEEDS, _OF_EXAMPLES})


def check_updates(updates: PyTree, params: PyTree) -> None:
    """Raise unless the updates have the shapes of the parameters."""
    pairs = zip(named_leaves("params", params), jax.tree.leaves(updates), strict=False)
    bad = [
        f"{name} is {list(p.shape)} and its update {list(u.shape)}"
        for (name, p), u in pairs
        if p.shape != u.shape
    ]
    if bad:
        raise ValueError(
            f"The optimizer's updates have not the parameters' shapes: {listed(bad)}"
            ". Return an update of the shape of each parameter."
        )


def _state_types(state: Any) -> set[str]:
    """The names of the types of a state's nodes."""
    kinds: set[str] = set()
    jax.tree.flatten(state, is_leaf=lambda x: bool(kinds.add(type(x).__name__)))
    return kinds
