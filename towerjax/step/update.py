"""The optimizer's update, and selecting the old state where a step is refused."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Literal

from towerjax.proof.interpreter import Interpreter
from towerjax.step.optimizers import check_updates, pass_loss
from towerjax.types import PyTree
from towerjax.types.leaves import changes, listed


class RowUpdates:
    """Leaves of the state into which an update writes some rows alone.

    Selecting between the new and the old array needs both at once: a copy of a whole
    table for a few rows. This selects the rows that are written instead, so that XLA
    writes into the donated buffer.
    """

    def __init__(self, accepted: jax.Array, leaves: dict[Any, Any]) -> None:
        self._accepted = accepted
        self.kept = leaves  # variable -> the leaf that a refused step leaves in it

    def guard_operands(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Change the operands so that an equation writes nothing in a refused step."""
        first = eqn.invars[0] if eqn.invars else None
        if first is None or isinstance(first, Literal) or first not in self.kept:
            return operands
        name, out, leaf = eqn.primitive.name, eqn.outvars[0], self.kept[first]
        if name.startswith("scatter") and _drops(eqn):
            self.kept[out] = leaf
            # A scatter drops the index -1.
            rows = jnp.where(self._accepted, operands[1], -1)
            return [operands[0], rows, *operands[2:]]
        if name == "dynamic_update_slice":
            self.kept[out] = leaf
            array, new, *starts = operands
            old = lax.dynamic_slice(array, starts, new.shape)
            return [array, lax.select(self._accepted, new, old), *starts]
        return operands


def _drops(eqn: Any) -> bool:
    """Whether a scatter drops the index -1, and its indices can hold it."""
    indices = eqn.invars[1].aval
    drops = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    return drops and signed and indices.shape[-1] > 0


def apply_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """The next parameters and optimizer state.

    The optimizer sees the whole reduced gradient, so clipping by global norm,
    layer-wise scaling and schedules work as on one device.
    """
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    optimizer = pass_loss(optimizer)
    updates, next_state = optimizer.update(grads, opt_state, params, value=loss)
    check_updates(updates, params)
    next_params = optax.apply_updates(params, updates)
    return (
        check_types(params, next_params, "state.params", "the optimizer's updates"),
        check_types(opt_state, next_state, "state.opt_state", "the optimizer"),
    )


def accept_or_keep(
    step: Callable[[PyTree], tuple[jax.Array, PyTree, PyTree]], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """``(carry, rest)`` of ``step(carry)``; the old carry if the step is refused.

    The equations that the verdict needs run first. Each new leaf of the carry is
    selected right where it is made, and later equations use the selected value: the
    same one if the step is accepted, and unused if not. Selecting at the end would keep
    old and new leaves alive at once, a copy of the whole state at every step, and a
    ``cond`` would make the update wait for the last gradient.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(carry)
    jaxpr, before = closed.jaxpr, jax.tree.leaves(carry)
    walk = Interpreter(closed, before)
    verdict, after = jaxpr.outvars[0], jaxpr.outvars[1 : 1 + len(before)]
    first = needed_eqns(jaxpr.eqns, [verdict], lambda eqn: bool(eqn.effects))
    for eqn in first:
        walk.evaluate(eqn)
    accepted, is_first = walk.read(verdict), {id(eqn) for eqn in first}
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in is_first]
    made = {var for eqn in others for var in eqn.outvars}
    olds: dict[Any, Any] = {}
    for var, old in zip(after, before, strict=True):
        # A scalar costs no copy, and later equations may divide by the new one.
        if not isinstance(var, Literal) and var in made and jnp.ndim(old):
            olds.setdefault(var, old)
    rows = RowUpdates(accepted, dict(zip(jaxpr.invars, before, strict=True)))
    for eqn in others:
        walk.evaluate(eqn, rows.guard_operands(eqn, [walk.read(x) for x in eqn.invars]))
        for var in eqn.outvars:
            if var in olds and rows.kept.get(var) is not olds[var]:
                walk.values[var] = lax.select(accepted, walk.values[var], olds[var])
                rows.kept[var] = olds[var]

    def kept(var: Any, old: Any) -> Any:
        if not isinstance(var, Literal) and olds.get(var) is old:
            return walk.values[var]
        # A constant, an unchanged input, a value that the verdict needs, or one that
        # is two leaves.
        return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)

    leaves = [kept(*pair) for pair in zip(after, before, strict=True)]
    rest = [walk.read(var) for var in jaxpr.outvars[1 + len(before) :]]
    return (
        jax.tree.unflatten(jax.tree.structure(carry), leaves),
        jax.tree.unflatten(jax.tree.structure(shapes[2]), rest),
    )


def needed_eqns(
    eqns: Sequence[Any], results: Iterable[Any], always: Callable[[Any], bool]
) -> list[Any]:
    """The equations that results depend on, and those that always run, in order."""
    wanted, found = {x for x in results if not isinstance(x, Literal)}, []
    for eqn in reversed(eqns):
        if always(eqn) or any(out in wanted for out in eqn.outvars):
            found.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return found[::-1]


def check_types(before: PyTree, after: PyTree, root: str, culprit: str) -> PyTree:
    """Raise unless ``after`` has the types of ``before``; else without weak types."""
    if found := changes(root, before, after):
        raise ValueError(
            "The step would change the type of its state, and so compile anew each"
            f" time: {listed(found)}. Look at {culprit}."
        )
    # Drops the weak type of what was computed with Python numbers.
    after = jax.tree.map(jnp.asarray, after)
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), after)
