"""The nouns in which reasons are told: of towers, or of what else is counted."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple


class Nouns(NamedTuple):
    """The nouns for what two programs have different numbers of.

    Attributes:
      one: One of them.
      many: Several of them.
      its: What belongs to one of them.
      number: The number of one among them.
    """

    one: str
    many: str
    its: str
    number: str


_OF_TOWERS = Nouns("tower", "towers", "the tower's", "tower.id")

# Rules that know nothing but kinds write reasons, too; so no argument holds the nouns.
_NOUNS = contextvars.ContextVar("nouns", default=_OF_TOWERS)


def nouns() -> Nouns:
    """Return the nouns for reasons that are written here."""
    return _NOUNS.get()


@contextlib.contextmanager
def telling_of(names: Nouns) -> Iterator[None]:
    """Let reasons be written in these nouns, from here on."""
    token = _NOUNS.set(names)
    try:
        yield
    finally:
        _NOUNS.reset(token)
