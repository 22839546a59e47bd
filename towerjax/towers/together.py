"""How do the towers of a device run together? By ``vmap``, and their sums at once.

The sum over towers of products of two matrices is one product, which contracts the
towers' dim too. `jax.vmap` would make ``k`` products and hold them all: of gradients
``k`` times the parameters.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from towerjax.mesh.placement import LOCAL_AXIS

Operands = Sequence[jax.Array]
Add = Callable[[jax.Array], jax.Array]
Tail = Callable[[Operands, Add], jax.Array]

# They move values or change their sign: of a sum as of each of what is added.
_MOVES = frozenset("transpose reshape squeeze broadcast_in_dim neg".split())


def together(
    program: ClosedJaxpr,
    own: Sequence[jax.Array],
    common: Sequence[Any],
    num_sums: int,
    add: Add,
) -> list[jax.Array]:
    """What one tower's program returns, of all towers, ``[k, ...]``, its sums added.

    ``own`` are its first arguments, ``[k, ...]``, and the others those of all towers;
    sums are the first ``num_sums`` of its results, which ``add`` adds up.
    """
    head, tails = cut_off(program, len(own), num_sums)

    def of_tower(*own: jax.Array) -> list[jax.Array]:
        return [jnp.asarray(x) for x in jaxpr_as_fun(head)(*own, *common)]

    try:
        out = jax.vmap(of_tower, axis_name=LOCAL_AXIS)(*own)
    except NotImplementedError as error:
        error.add_note(
            "Towers that share a device run together, by jax.vmap, which JAX does not"
            " have of this. Let them run one after another, local='scan', or have one a"
            " device."
        )
        raise
    num_kept = len(program.jaxpr.outvars) - num_sums
    kept, operands = out[:num_kept], out[num_kept:]
    return [*[tail(operands, add) for tail in tails], *kept]


def cut_off(
    program: ClosedJaxpr, num_own: int, num_sums: int
) -> tuple[ClosedJaxpr, list[Tail]]:
    """The program without its sums, which returns their operands; what adds these."""
    body, operands = program.jaxpr, []
    own = _depending(body, body.invars[:num_own])
    uses = Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, Var))
    uses += Counter(x for x in body.outvars if isinstance(x, Var))
    made = {x: eqn for eqn in body.eqns for x in eqn.outvars if uses[x] == 1}

    def is_own(value: Any) -> bool:
        return isinstance(value, Var) and value in own  # a literal has no hash

    def taken(value: Any) -> int:
        operands.append(value)
        return len(operands) - 1

    def tail(value: Any) -> Tail | None:
        parts, rest, left = [], [], [value]
        while left:  # a chain of sums, as long as a parameter is often used
            value = left.pop()
            eqn = made.get(value) if isinstance(value, Var) else None
            name = eqn.primitive.name if eqn else None
            if eqn and name == "add_any":
                left += reversed(eqn.invars)
            elif eqn and name == "dot_general" and all(map(is_own, eqn.invars)):
                parts.append(partial(_product, eqn, *map(taken, eqn.invars)))
            elif eqn and name in _MOVES and (before := tail(*eqn.invars)):
                parts.append(partial(_moved, eqn, before))
            else:
                rest.append(value)
        if parts and rest:
            parts.append(partial(_rows, [taken(x) for x in rest]))
        return partial(_sum, parts) if parts else None

    sums = body.outvars[:num_sums]
    tails = [tail(value) or partial(_rows, [taken(value)]) for value in sums]
    head = body.replace(outvars=[*body.outvars[num_sums:], *operands])
    return program.replace(jaxpr=head), tails


def _depending(body: Jaxpr, given: Sequence[Var]) -> set[Any]:
    """What depends on a tower's own values; else it would be held ``k`` times."""
    found: set[Any] = set(given)
    for eqn in body.eqns:
        if any(isinstance(x, Var) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return found


def _sum(parts: list[Tail], given: Operands, add: Add) -> jax.Array:
    return reduce(operator.add, [part(given, add) for part in parts])


def _product(eqn: JaxprEqn, a: int, b: int, given: Operands, add: Add) -> jax.Array:
    """The sum over dim 0 of products, as one that contracts it too."""
    contracted, batch = eqn.params["dimension_numbers"]
    within = tuple((0, *(dim + 1 for dim in dims)) for dims in contracted)
    beside = tuple(tuple(dim + 1 for dim in dims) for dims in batch)
    params = eqn.params | {"dimension_numbers": (within, beside)}
    return eqn.primitive.bind(given[a], given[b], **params)


def _moved(eqn: JaxprEqn, before: Tail, given: Operands, add: Add) -> jax.Array:
    return eqn.primitive.bind(before(given, add), **eqn.params)


def _rows(rows: Sequence[int], given: Operands, add: Add) -> jax.Array:
    return add(reduce(operator.add, [given[i] for i in rows]))
