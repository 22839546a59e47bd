"""Which parameters are trained, and what an optimizer needs besides gradients."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.types import PyTree, named_leaves, readable_leaves
from towerjax.types.leaves import changes, few, listed

Trainable: TypeAlias = Callable[[str, Any], bool] | PyTree
"""``(name, leaf) -> bool``, or a tree of bool that is a prefix of ``params``."""

_SAY_TRAINABLE = "Say trainable=lambda name, leaf: ... (or a tree of bool)"
OF_MODELS = "Put it into tj.TrainState.create(..., extra=...), and read tower.extra,"
"""What to do with a fixed leaf where no ``trainable`` is taken."""


def trainable_flags(
    params: PyTree, trainable: Trainable | None, *, advice: str = _SAY_TRAINABLE
) -> PyTree:
    """For each leaf, whether it is trained; raises if such a leaf has no gradient."""
    shapes = jax.tree.map(_shape_of, params)
    readable = readable_leaves("", shapes)
    if trainable is None:
        # A float of 8 bits must be named as fixed, so it is not left out here.
        flags = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, np.inexact), shapes)
    elif callable(trainable):
        chosen = [bool(trainable(name, x)) for name, x in readable]
        flags = jax.tree.unflatten(jax.tree.structure(params), chosen)
    else:
        flags = _broadcast_flags(trainable, params)
    named, chosen = named_leaves("params", shapes), jax.tree.leaves(flags)
    if trainable is not None and not any(chosen):
        raise ValueError(
            "trainable=... chooses none of the params, so that nothing would train."
            f" Their names are {', '.join(few([repr(x) for x, _ in readable]))}."
        )
    if any(chosen):
        named = [pair for pair, yes in zip(named, chosen, strict=True) if yes]
    bad = [f"{name} is {x.dtype}" for name, x in named if not _has_gradient(x.dtype)]
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


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))


def _has_gradient(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1


_LINE_SEARCH = (
    "A line search evaluates the loss function (value_fn) several times in one update."
    " Write optax.lbfgs(learning_rate, linesearch=None), or another optimizer"
)
_NEEDS = {
    "ScaleByZoomLinesearchState": _LINE_SEARCH,
    "ScaleByBacktrackingLinesearchState": _LINE_SEARCH,
    "HutchinsonState": (
        "sophia differentiates the loss function (obj_fn). Give it a"
        " hessian_diagonal_fn that does not, or write another optimizer"
    ),
    "SAMState": "Write sam(..., opaque_mode=False), which needs no grad_fn",
    "LookaheadState": (
        "Write params=optax.LookaheadParams.init_synced(params), read params.fast in"
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
                " of each example, but the optimizer gets one, of the whole batch:"
                " nothing would be private. Clip in a step of your own, and give this"
                " one the optimizer without it."
            )
        try:
            try:
                return inner.update(updates, state, params, **extra_args)
            except TypeError as error:
                # Only a call shows what an update wrapped in others takes.
                if "unexpected keyword argument 'value'" not in str(error):
                    raise
            extra_args.pop("value")
            return inner.update(updates, state, params, **extra_args)
        except (AttributeError, TypeError, ValueError) as error:
            if kinds.isdisjoint(_NEEDS):
                raise
            needs = next(_NEEDS[kind] for kind in _NEEDS if kind in kinds)
            raise ValueError(
                "The optimizer needs more than gradients, parameters and value=loss:"
                f" {error} {needs}."
            ) from error

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def may_need_more(opt_state: Any) -> bool:
    """Whether `pass_loss` may refuse the update of an optimizer with this state."""
    return not _state_types(opt_state).isdisjoint({*_NEEDS, _OF_EXAMPLES})


def check_updates(updates: PyTree, params: PyTree) -> None:
    """Raise unless the updates have the shapes of the parameters."""
    shapes = jax.tree.map(
        lambda u, p: jax.ShapeDtypeStruct(jnp.shape(u), p.dtype), updates, params
    )
    if found := changes("params", params, shapes):
        raise ValueError(
            f"The optimizer's updates have not the parameters' shapes: {listed(found)}."
            " Return an update of the shape of each parameter."
        )


def _state_types(state: Any) -> set[str]:
    """The names of the types of a state's nodes."""
    kinds: set[str] = set()
    jax.tree.flatten(state, is_leaf=lambda x: bool(kinds.add(type(x).__name__)))
    return kinds
