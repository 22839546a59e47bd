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


class SumSites:
    """Who makes each value of a program, and who reads it: a sum leads to its addends.

    Attributes:
      uses: How often each variable is an operand or a result.
    """

    def __init__(self, body: Jaxpr) -> None:
        given = [x for eqn in body.eqns for x in eqn.invars]
        self.uses = Counter([x for x in (*given, *body.outvars) if isinstance(x, Var)])
        self._makers = {x: eqn for eqn in body.eqns for x in eqn.outvars}

    def maker(self, value: Any) -> JaxprEqn | None:
        """The equation that makes a value."""
        # A literal has no hash.
        return self._makers.get(value) if isinstance(value, Var) else None

    def addend(self, value: Any) -> JaxprEqn | None:
        """The equation that makes a value which is read once, as an addend is."""
        eqn = self.maker(value)
        return None if eqn is None or self.uses[value] > 1 else eqn


def carried_sums(eqn: JaxprEqn) -> set[int]:
    """The carries of a scan that each step only adds to, and does not read."""
    body, (first, num_carry) = open_jaxpr(eqn.params["jaxpr"]), loop_sizes(eqn)
    sites, sums = SumSites(body), set()
    for number in range(num_carry):
        carry, left = body.invars[first + number], [body.outvars[number]]
        while left:
            value = left.pop()
            if value is carry and sites.uses[value] == 1:
                sums.add(number)
            elif (made := sites.addend(value)) and is_addition(made):
                left += made.invars
    return sums


def are_zeros(eqn: JaxprEqn | None) -> bool:
    """Whether an equation makes an array of zeros."""
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    return is_zero(eqn.invars[0])


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0."""
    return isinstance(value, Literal) and value.val == 0
