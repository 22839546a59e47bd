"""Which values of a program are sums, and where their addends are made."""

from collections import Counter
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from towerjax.proof.equation import loop_sizes, open_jaxpr


def is_addition(eqn: JaxprEqn) -> bool:
    """Whether an equation adds values of one shape, without broadcasting."""
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    is_sum = eqn.primitive.name in ("add", "add_any")
    return is_sum and all(x.shape == avals[0].shape for x in avals)


def uses_in(body: Jaxpr) -> Counter[Any]:
    """How often each variable is an operand or a result."""
    given = [x for eqn in body.eqns for x in eqn.invars]
    return Counter([x for x in (*given, *body.outvars) if isinstance(x, Var)])


def carried_sums(eqn: JaxprEqn) -> set[int]:
    """The carries of a scan that each step only adds to, and does not read."""
    body, (first, num_carry) = open_jaxpr(eqn.params["jaxpr"]), loop_sizes(eqn)
    uses, made = uses_in(body), {x: e for e in body.eqns for x in e.outvars}
    sums = set()
    for number in range(num_carry):
        carry, left = body.invars[first + number], [body.outvars[number]]
        while left:
            value = left.pop()
            if not isinstance(value, Var) or uses[value] != 1:
                continue
            if value is carry:
                sums.add(number)
            elif value in made and is_addition(made[value]):
                left += made[value].invars
    return sums


def are_zeros(eqn: JaxprEqn | None) -> bool:
    """Whether an equation makes an array of zeros."""
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    return is_zero(eqn.invars[0])


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0."""
    return isinstance(value, Literal) and value.val == 0
