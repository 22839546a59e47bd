"""How do the towers of a device run together? By ``vmap``, and their sums at once.

The sum over towers of products of two matrices is one product, which contracts the
towers' dim too. `jax.vmap` would make ``k`` products and hold them all: of gradients
``k`` times the parameters.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from towerjax.mesh.placement import LOCAL_AXIS
from towerjax.types import PyTree

Add = Callable[[jax.Array], jax.Array]
Tail = Callable[[Sequence[jax.Array], Add], jax.Array]

# They move values or change their sign: of a sum as of each of what is added.
_MOVES = frozenset("transpose reshape squeeze broadcast_in_dim neg".split())


def together(
    of_tower: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    ids: jax.Array,
    per_tower: PyTree,
    add: Add | None,
) -> tuple[PyTree, PyTree]:
    """``(sums, kept)`` of all towers, ``[k, ...]``, or sums that ``add`` adds up."""
    leaves, treedef = jax.tree.flatten(per_tower)

    # Leaves alone: vmap changes the shape that a BCOO says it has.
    def of_leaves(tower_id: jax.Array, *leaves: jax.Array) -> Any:
        return of_tower(tower_id, jax.tree.unflatten(treedef, leaves))

    def over_towers(fn: Callable[..., Any]) -> Any:
        return jax.vmap(fn, axis_name=LOCAL_AXIS)(ids, *leaves)

    try:
        if add is None:
            return over_towers(of_leaves)
        env = [(LOCAL_AXIS, len(ids))]
        trace = jax.make_jaxpr(of_leaves, axis_env=env, return_shape=True)
        closed, shapes = trace(ids[0], *[x[0] for x in leaves])
        if LOCAL_AXIS in {getattr(effect, "name", None) for effect in closed.effects}:
            # Towers meet. Rules of derivatives, traced later, need what binds the axis.
            sums, kept = over_towers(of_leaves)
            return jax.tree.map(add, sums), kept
        (_, of_sums), (kept, of_kept) = map(jax.tree.flatten, shapes)
        cut = cut_off(closed, of_sums.num_leaves)
        out = over_towers(jaxpr_as_fun(cut.head))
    except NotImplementedError as error:
        error.add_note(
            "Towers that share a device run together, by jax.vmap, which JAX does not"
            " have of this. Let them run one after another, local='scan', or have one a"
            " device."
        )
        raise
    kept, operands = out[: len(kept)], out[len(kept) :]
    sums = [tail(operands, add) for tail in cut.tails]
    return of_sums.unflatten(sums), of_kept.unflatten(kept)


@dataclasses.dataclass(frozen=True)
class CutOff:
    """One tower's program that ends before the products that towers add up.

    Attributes:
      head: Returns what is not added up, and then operands.
      tails: Of all towers' operands, ``[k, ...]``, make the sums, one each.
    """

    head: ClosedJaxpr
    tails: list[Tail]


def cut_off(closed: ClosedJaxpr, num_sums: int) -> CutOff:
    """A program of which the first results are added over towers, cut off there."""
    body, operands = closed.jaxpr, []
    own = _of_its_own(body)
    uses = Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, Var))
    uses += Counter(x for x in body.outvars if isinstance(x, Var))
    made = {x: eqn for eqn in body.eqns for x in eqn.outvars if uses[x] == 1}

    def is_own(value: Any) -> bool:
        return isinstance(value, Var) and value in own  # a literal has no hash

    def taken(value: Any) -> int:
        operands.append(value)
        return len(operands) - 1

    def tail(value: Any) -> Tail:
        eqn = made.get(value) if isinstance(value, Var) else None
        name = eqn.primitive.name if eqn else None
        if eqn and name == "dot_general" and all(map(is_own, eqn.invars)):
            a, b = map(taken, eqn.invars)
            return lambda given, add: _product(eqn, given[a], given[b])
        if eqn and name == "add_any":
            one, other = map(tail, eqn.invars)
            return lambda given, add: one(given, add) + other(given, add)
        if eqn and name in _MOVES and len(eqn.invars) == 1:
            before = tail(eqn.invars[0])
            bind = eqn.primitive.bind
            return lambda given, add: bind(before(given, add), **eqn.params)
        i = taken(value)
        return lambda given, add: add(given[i])

    tails = [tail(value) for value in body.outvars[:num_sums]]
    head = body.replace(outvars=[*body.outvars[num_sums:], *operands])
    return CutOff(closed.replace(jaxpr=head), tails)


def _of_its_own(body: Jaxpr) -> set[Any]:
    """What depends on a tower's own values; else it would be held ``k`` times."""
    found: set[Any] = set(body.invars)
    for eqn in body.eqns:
        if any(isinstance(x, Var) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return found


def _product(eqn: JaxprEqn, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over dim 0 of products, as one that contracts it too."""
    contracted, batch = eqn.params["dimension_numbers"]
    within = tuple((0, *(dim + 1 for dim in dims)) for dims in contracted)
    beside = tuple(tuple(dim + 1 for dim in dims) for dims in batch)
    return eqn.primitive.bind(
        a, b, **eqn.params | {"dimension_numbers": (within, beside)}
    )
