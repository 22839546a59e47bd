"""The nouns in which reasons are told: of towers, or of what else is counted.

A rule writes a reason with fields in the places of nouns, such as ``{its} rows``. Who
shows the reason knows what two programs have different numbers of, and fills them in.
"""

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

    def told(self, reason: str) -> str:
        """Return a reason with these nouns in the places of its fields."""
        for field, noun in self._asdict().items():
            reason = reason.replace(f"{{{field}}}", noun)
        return reason


NOUNS_OF_TOWERS = Nouns("tower", "towers", "the tower's", "tower.id")
