"""What becomes of a state? The next one where a step is accepted, else itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Literal

from towerjax.proof.walk import Walk
from towerjax.step.optimizers import check_updates, given_loss
from towerjax.types import PyTree
from towerjax.types.leaves import changes, listed


class RowUpdates:
    """The values that are leaves of the state, but for rows that were written.

    Selecting between the new and the old array would need both at once: a copy of a
    whole table for a few rows. Where what is written is selected instead, XLA writes
    into the donated buffer.
    """

    def __init__(self, accepted: jax.Array, leaves: dict[Any, Any]) -> None:
        self._accepted = accepted
        # Which leaf a refused step leaves here; side by side with itself, in dim 0?
        self._kept = {var: (leaf, False) for var, leaf in leaves.items()}

    def keep(self, var: Any, leaf: Any) -> bool:
        """Is a value that was made of a leaf this very leaf, if nothing is accepted?"""
        kept, stacked = self._kept.get(var, (None, True))
        return kept is leaf and not stacked

    def selected(self, var: Any, leaf: Any) -> None:
        """Note that a value is a leaf, if nothing is accepted."""
        self._kept[var] = leaf, False

    def guarded(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The operands with which an equation writes nothing where it must not."""
        first = eqn.invars[0] if eqn.invars else None
        if first is None or isinstance(first, Literal) or first not in self._kept:
            return operands
        leaf, stacked = self._kept[first]
        name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0]
        if not stacked and name.startswith("scatter") and _drops(eqn):
            self._kept[out] = leaf, False
            # An index that names no row is left out.
            rows = jnp.where(self._accepted, operands[1], -1)
            return [operands[0], rows, *operands[2:]]
        if not stacked and name == "dynamic_update_slice":
            self._kept[out] = leaf, False
            array, new, *starts = operands
            old = lax.dynamic_slice(array, starts, new.shape)
            return [array, lax.select(self._accepted, new, old), *starts]
        if _stacks(name, params, leaf, stacked):
            self._kept[out] = leaf, name != "squeeze"
        return operands


def _drops(eqn: Any) -> bool:
    """Is an index that names no row left out, and can one be written?"""
    indices = eqn.invars[1].aval
    drops = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    return drops and signed and indices.shape[-1] > 0


def _stacks(name: str, params: Any, leaf: Any, stacked: bool) -> bool:
    """Is it a leaf side by side with itself, or one of these?

    So vmap hands on what all of its rows have in common.
    """
    shape, dims = leaf.shape, tuple(range(1, leaf.ndim + 1))
    if name == "broadcast_in_dim":
        same = params["shape"][1:] == shape and not stacked
        return same and params["broadcast_dimensions"] == dims
    if name == "slice":
        whole = not any(params["start_indices"][1:])
        return stacked and whole and params["limit_indices"][1:] == shape
    return name == "squeeze" and stacked and params["dimensions"] == (0,)


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
    """
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    optimizer = given_loss(optimizer)
    updates, next_state = optimizer.update(grads, opt_state, params, value=loss)
    check_updates(updates, params)
    next_params = optax.apply_updates(params, updates)
    return (
        checked_like(params, next_params, "state.params", "the optimizer's updates"),
        checked_like(opt_state, next_state, "state.opt_state", "the optimizer"),
    )


def accept_or_keep(
    step: Callable[[PyTree], tuple[jax.Array, PyTree, PyTree]], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """What ``step(carry)`` makes of the carry where it accepts it itself.

    What the verdict depends on is computed first. Each new value is selected where it
    is made, and what follows is computed from the selected one; of rows that are
    written into a table, the rows. When the step is accepted that is the same value;
    when not, nothing of what follows is used. Selecting at the end would keep a value
    and its successor alive at once, which costs a copy of the whole state at every
    step, and a branch would make the update wait for the last gradient.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(carry)
    jaxpr, before = closed.jaxpr, jax.tree.leaves(carry)
    walk = Walk(closed, before)
    verdict, after = jaxpr.outvars[0], jaxpr.outvars[1 : 1 + len(before)]
    first = needed(jaxpr.eqns, [verdict], lambda eqn: bool(eqn.effects))
    for eqn in first:
        walk.evaluate(eqn)
    accepted, is_first = walk.read(verdict), {id(eqn) for eqn in first}
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in is_first]
    made = {var for eqn in others for var in eqn.outvars}
    olds: dict[Any, Any] = {}
    for var, old in zip(after, before, strict=True):
        # A number costs no copy, and what follows may divide by a new one alone.
        if not isinstance(var, Literal) and var in made and jnp.ndim(old):
            olds.setdefault(var, old)
    rows = RowUpdates(accepted, dict(zip(jaxpr.invars, before, strict=True)))
    for eqn in others:
        walk.evaluate(eqn, rows.guarded(eqn, [walk.read(x) for x in eqn.invars]))
        for var in eqn.outvars:
            if var in olds and not rows.keep(var, olds[var]):
                walk.values[var] = lax.select(accepted, walk.values[var], olds[var])
                rows.selected(var, olds[var])

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


def needed(
    eqns: Sequence[Any], results: Iterable[Any], always: Callable[[Any], bool]
) -> list[Any]:
    """The equations on which results depend, and those to do anyway, in order."""
    wanted, found = {x for x in results if not isinstance(x, Literal)}, []
    for eqn in reversed(eqns):
        if always(eqn) or any(out in wanted for out in eqn.outvars):
            found.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return found[::-1]


def checked_like(before: PyTree, after: PyTree, root: str, culprit: str) -> PyTree:
    """``after``, once it has the shapes and dtypes of ``before``."""
    if found := changes(root, before, after):
        raise ValueError(
            "The step would change the type of its state, and so compile anew each"
            f" time: {listed(found)}. Look at {culprit}."
        )
    # Drops the weak type of what was computed with Python numbers.
    after = jax.tree.map(jnp.asarray, after)
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), after)
