"""How do reduced gradients become the next parameters? Through optax, once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Literal
from jax.extend.source_info_util import user_context

from towerjax.types import PyTree, named_leaves


def apply_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """The next parameters and optimizer state.

    The optimizer sees the full reduced gradient, so that clipping by global norm,
    layer-wise scaling and schedules mean what they mean on one device.

    Args:
      optimizer: Any optax transformation; one that takes ``value`` gets the loss.
      grads: Like ``params``, of the global loss.
      opt_state: The optimizer's state.
      params: The parameters.
      loss: ``()``, the global loss.

    Returns:
      ``(params, opt_state)``.

    Raises:
      ValueError: The optimizer changes the type of either.
    """
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, next_state = optimizer.update(grads, opt_state, params, value=loss)
    next_params = optax.apply_updates(params, updates)
    return (
        checked_like(params, next_params, "state.params", "the optimizer's updates"),
        checked_like(opt_state, next_state, "state.opt_state", "the optimizer"),
    )


def update_if(
    accepted: jax.Array, update: Callable[..., PyTree], carry: PyTree, *args: PyTree
) -> PyTree:
    """``update(carry, *args)`` where the step is accepted, else ``carry``.

    Each new value is selected where it is made, and what follows is computed from
    the selected one. When the step is accepted that is the same value; when not,
    nothing of what follows is used. Selecting at the end would keep a value and its
    successor alive at once, which costs a copy of the whole state at every step, and
    a branch would make the update wait for the last gradient.

    Args:
      accepted: ``()`` bool, one verdict for all towers.
      update: Makes the next carry, of the same tree, shapes and dtypes.
      carry: The present one.
      *args: What else the update reads.

    Returns:
      Like ``carry``.
    """

    def judged(carry: PyTree, *args: PyTree) -> tuple[Any, PyTree, tuple[()]]:
        return accepted, update(carry, *args), ()

    return accept_or_keep(judged, carry, *args)[0]


def accept_or_keep(
    step: Callable[..., tuple[jax.Array, PyTree, PyTree]], carry: PyTree, *args: PyTree
) -> tuple[PyTree, PyTree]:
    """What ``step(carry, *args)`` makes of the carry where it accepts it itself.

    What the verdict depends on is computed first; see `update_if` for the rest.

    Args:
      step: ``(carry, *args) -> (accepted, next carry, rest)``; ``accepted`` is ``()``
        bool, one verdict for all towers.
      carry: The present one.
      *args: What else the step reads.

    Returns:
      ``(carry, rest)``: the next carry, or the present one; ``rest`` as it is.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(carry, *args)
    jaxpr, before = closed.jaxpr, jax.tree.leaves(carry)
    walk = _Walk(closed, jax.tree.leaves((carry, *args)))
    verdict, after = jaxpr.outvars[0], jaxpr.outvars[1 : 1 + len(before)]
    first = _needed(jaxpr.eqns, verdict)
    for eqn in first:
        walk.evaluate(eqn)
    accepted, is_first = walk.read(verdict), {id(eqn) for eqn in first}
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in is_first]
    made = {var for eqn in others for var in eqn.outvars}
    olds: dict[Any, Any] = {}
    for var, old in zip(after, before, strict=True):
        if not isinstance(var, Literal) and var in made:
            olds.setdefault(var, old)
    for eqn in others:
        for var in walk.evaluate(eqn):
            if var in olds:
                walk.values[var] = lax.select(accepted, walk.values[var], olds[var])

    def kept(var: Any, old: Any) -> Any:
        if not isinstance(var, Literal) and olds.get(var) is old:
            return walk.values[var]
        # A constant, an input handed on, what the verdict needs, or a value that
        # another leaf has too.
        return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)

    leaves = [kept(*pair) for pair in zip(after, before, strict=True)]
    rest = [walk.read(var) for var in jaxpr.outvars[1 + len(before) :]]
    return (
        jax.tree.unflatten(jax.tree.structure(carry), leaves),
        jax.tree.unflatten(jax.tree.structure(shapes[2]), rest),
    )


class _Walk:
    """The values of a jaxpr that is evaluated equation by equation."""

    def __init__(self, closed: Any, inputs: list[Any]) -> None:
        self.values: dict[Any, Any] = dict(
            zip(closed.jaxpr.invars, inputs, strict=True)
        )
        self.values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(self, var: Any) -> Any:
        """The value of a variable or a literal."""
        return var.val if isinstance(var, Literal) else self.values[var]

    def evaluate(self, eqn: Any) -> list[Any]:
        """Evaluate an equation, in its line's name; the variables that it made."""
        params = eqn.primitive.get_bind_params(eqn.params)
        info = eqn.source_info
        with user_context(info.traceback, name_stack=info.name_stack):
            out = eqn.primitive.bind(*map(self.read, eqn.invars), **params)
        outs = out if eqn.primitive.multiple_results else [out]
        self.values.update(zip(eqn.outvars, outs, strict=True))
        return list(eqn.outvars)


def _needed(eqns: list[Any], var: Any) -> list[Any]:
    """The equations on which a value depends, and those with effects, in order."""
    wanted, needed = {var} if not isinstance(var, Literal) else set(), []
    for eqn in reversed(eqns):
        if eqn.effects or any(out in wanted for out in eqn.outvars):
            needed.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return needed[::-1]


def checked_like(before: PyTree, after: PyTree, root: str, culprit: str) -> PyTree:
    """``after``, once it has the shapes and dtypes of ``before``.

    A step whose state changes its type compiles again at every call.

    Args:
      before: A part of the present state.
      after: The same part of the next state.
      root: What the part is called.
      culprit: What to look at when they differ.

    Returns:
      ``after``, of strong dtypes.

    Raises:
      ValueError: Trees, shapes or dtypes differ; names every such leaf.
    """
    same_tree = jax.tree.structure(before) == jax.tree.structure(after)
    if not same_tree or _types(before) != _types(after):
        raise ValueError(_explain_types(before, after, root, culprit))
    # Drops the weak type of what was computed with Python numbers.
    after = jax.tree.map(jnp.asarray, after)
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), after)


def _types(tree: PyTree) -> list[tuple[tuple[int, ...], Any]]:
    return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]


def _explain_types(before: PyTree, after: PyTree, root: str, culprit: str) -> str:
    was, now = (
        {name: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for name, x in leaves}
        for leaves in (named_leaves(root, before), named_leaves(root, after))
    )
    bad = [
        f"{name} was {was.get(name, 'absent')} and becomes {now.get(name, 'absent')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
    return (
        "The step would change the type of its state, and so compile anew each time: "
        + ("; ".join(bad) or "its containers change")
        + f". Look at {culprit}."
    )
