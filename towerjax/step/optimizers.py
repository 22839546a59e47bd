"""What is an optimizer given? What it takes; what needs more is refused by name."""

from typing import Any

import jax
import optax

from towerjax.types import PyTree, named_leaves

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
"""What an optimizer that keeps such a state needs, and what to write instead."""

_OF_EXAMPLES = "DifferentiallyPrivateAggregateState"


def given_loss(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which gets of ``value``, the loss, what it takes."""
    inner = optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        kinds = _kinds(state)
        if _OF_EXAMPLES in kinds:
            raise ValueError(
                "differentially_private_aggregate, which dpsgd uses, clips the gradient"
                " of each example, but the optimizer gets one, of the loss of the whole"
                " batch: nothing would be private. Clip the examples' gradients in a"
                " step of your own, and give this one the optimizer without it."
            )
        try:
            return _updated(inner, updates, state, params, extra_args)
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


def _updated(
    inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, Any]:
    try:
        return inner.update(updates, state, params, **extra_args)
    except TypeError as error:
        # What an update inside of others takes is seen by trying alone.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    without = {name: x for name, x in extra_args.items() if name != "value"}
    return inner.update(updates, state, params, **without)


def may_need_more(opt_state: Any) -> bool:
    """Is this the state of an optimizer of which `given_loss` may refuse the update?"""
    return not _kinds(opt_state).isdisjoint({*_NEEDS, _OF_EXAMPLES})


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
            f"The optimizer's updates have not the parameters' shapes: {'; '.join(bad)}"
            ". Return an update of the shape of each parameter."
        )


def _kinds(state: Any) -> set[str]:
    """The names of the types of a state's nodes."""
    kinds: set[str] = set()
    jax.tree.flatten(state, is_leaf=lambda x: bool(kinds.add(type(x).__name__)))
    return kinds
