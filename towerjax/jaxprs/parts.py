"""Split a program into parts, each of which ends at equations of one primitive."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var

from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.interpreter import Interpreter


class Parts:
    """A program in parts that run one after another; between two, values are supplied.

    A part ends at equations of the primitives ``ends``, whose results a later part is
    given. Equations of ``marks`` are identities: they mark values, and are passed
    through.

    Attributes:
      eqns: The program's equations, except those at which a part ends.
    """

    def __init__(
        self, program: ClosedJaxpr, ends: Collection[Primitive], marks: Primitive
    ) -> None:
        self.program = program
        self.eqns: list[JaxprEqn] = []
        self._marks = marks
        self._first_known: dict[Var, int] = {}  # the first part that knows a value
        self._ends: list[tuple[JaxprEqn, int]] = []  # each with the part it ends
        self._kinds: dict[int, Primitive] = {}  # all ends of a part have one
        self._marked: dict[Var, Any] = {}
        for eqn in program.jaxpr.eqns:
            self._place(eqn, ends)

    def _place(self, eqn: JaxprEqn, ends: Collection[Primitive]) -> None:
        """Note an equation, and the first part that knows its results."""
        number = self.first_knowing(eqn.invars)
        kind = eqn.primitive
        if kind in ends:
            while self._kinds.setdefault(number, kind) is not kind:
                number += 1  # this part ends with equations of another primitive
            self._ends.append((eqn, number))
            number += 1
        else:
            self.eqns.append(eqn)
        if kind is self._marks:
            self._marked.update(zip(eqn.outvars, eqn.invars, strict=True))
        self._first_known.update(dict.fromkeys(eqn.outvars, number))

    @property
    def last(self) -> int:
        """The last part that ends at an equation; -1 if none does."""
        return max((number for _, number in self._ends), default=-1)

    def first_knowing(self, values: Iterable[Any]) -> int:
        """Return the first part that knows all of these values."""
        numbers = [
            self._first_known.get(x, 0) for x in values if not isinstance(x, Literal)
        ]
        return max(numbers, default=0)

    def ends_of(self, number: int | None) -> list[JaxprEqn]:
        """Return the equations at which a part ends, in order."""
        return [eqn for eqn, part in self._ends if part == number]

    def kind_of(self, number: int) -> Primitive | None:
        """Return the primitive at which a part ends; None if it ends the program."""
        return self._kinds.get(number)

    def source(self, marked: Var) -> Any:
        """Return the value that a mark was put on."""
        return self._marked[marked]

    def interpreter(self, inputs: Sequence[Any]) -> Interpreter:
        """Return an interpreter that knows the program's inputs, and nothing else."""
        return Interpreter(self.program.jaxpr, self.program.consts, inputs)

    def evaluate(
        self, walk: Interpreter, wanted: Iterable[Any], shown: Iterable[JaxprEqn] = ()
    ) -> None:
        """Evaluate what ``wanted`` values need and ``walk`` does not know yet.

        Of the equations ``shown``, which have effects, those not known are evaluated.
        """
        unknown = [x for x in self.eqns if walk.values.keys().isdisjoint(x.outvars)]
        for eqn in needed_eqns(unknown, wanted, always=shown):
            if eqn.primitive is not self._marks:
                walk.evaluate(eqn)
                continue
            for var, source in zip(eqn.outvars, eqn.invars, strict=True):
                walk.values[var] = walk.read(source)
