"""Which values of a program are sums, and where these are made: at their addends."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from towerjax.proof.equation import loop_sizes, open_jaxpr


def is_addition(eqn: JaxprEqn) -> bool:
    """Whether an equation adds values of one shape, without broadcasting."""
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    is_sum = eqn.primitive.name in ("add", "add_any")
    return is_sum and all(x.shape == avals[0].shape for x in avals)


class SumSites:
    """Where the sums of a program's results are made: they are followed to addends.

    Attributes:
      uses: How often each variable is an operand or a result.
      sums: Values of which only a sum is needed, with how each is summed.
      added: Those of them that are computed of sums.
      opened: By equation, those of its results that its inner program sums.
    """

    def __init__(
        self,
        body: Jaxpr,
        *,
        passes: Callable[[JaxprEqn], bool] = lambda eqn: False,
        is_site: Callable[[JaxprEqn], bool] = lambda eqn: False,
        opens: Callable[[JaxprEqn, int, Any], bool] = lambda eqn, number, how: False,
    ) -> None:
        """``passes``: the result for a sum is the sum of the results, as of additions.

        ``is_site``: its results are best summed where they are made; ``opens``: this
        result is, in the inner program.
        """
        given = [x for eqn in body.eqns for x in eqn.invars]
        self.uses = Counter([x for x in (*given, *body.outvars) if isinstance(x, Var)])
        self.sums: dict[Any, Any] = {}
        self.added: set[Any] = set()
        self.opened: dict[int, dict[int, Any]] = {}
        self._makers = {x: eqn for eqn in body.eqns for x in eqn.outvars}
        self._carried: dict[int, set[int]] = {}
        self._passes = lambda eqn: is_addition(eqn) or passes(eqn)
        self._is_site, self._opens = is_site, opens

    def maker(self, value: Any) -> JaxprEqn | None:
        """The equation that makes a value."""
        # A literal has no hash.
        return self._makers.get(value) if isinstance(value, Var) else None

    def addend(self, value: Any) -> JaxprEqn | None:
        """The equation that makes a value which is read once, as an addend is."""
        eqn = self.maker(value)
        return None if eqn is None or self.uses[value] > 1 else eqn

    def carried(self, eqn: JaxprEqn) -> set[int]:
        """`carried_sums`, found once."""
        if id(eqn) not in self._carried:
            self._carried[id(eqn)] = carried_sums(eqn)
        return self._carried[id(eqn)]

    def follow(self, value: Any, how: Any) -> None:
        """Sum a value, or where that gains its addends, where it is made."""
        if not isinstance(value, Var):
            return
        chain, left = list[tuple[Any, JaxprEqn]](), list[Any]([value])
        while left:  # a chain of additions, one for each use of a parameter
            x = left.pop()
            if (eqn := self.addend(x)) is not None:
                chain.append((x, eqn))
                left += reversed(eqn.invars) if self._passes(eqn) else ()
        gains, inside = set[Any](), set[Any]()
        for x, eqn in reversed(chain):
            if self._passes(eqn):
                given = [y for y in eqn.invars if isinstance(y, Var)]
                is_gain = any([y in gains or y in self.sums for y in given])
            elif is_gain := self._opens(eqn, eqn.outvars.index(x), how):
                inside.add(x)
            else:
                is_gain = self._is_site(eqn)
            if is_gain:
                gains.add(x)
        reached = {value}
        for x, eqn in chain:
            if x not in reached:
                continue
            self.sums[x] = how
            if x in inside:
                self.opened.setdefault(id(eqn), {})[eqn.outvars.index(x)] = how
            elif x in gains and self._passes(eqn):
                self.added.add(x)
                reached |= {y for y in eqn.invars if isinstance(y, Var)}


def carried_sums(eqn: JaxprEqn) -> set[int]:
    """The carries of a scan that each step only adds to, and does not read."""
    body, (first, num_carry) = open_jaxpr(eqn.params["jaxpr"]), loop_sizes(eqn)
    sites, sums = SumSites(body), set()
    for number in range(num_carry):
        carry: Any = body.invars[first + number]
        left: list[Any] = [body.outvars[number]]
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
