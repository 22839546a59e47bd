"""The nouns in which a proof tells its reasons: towers, devices or micro-batches.

A rule writes a reason with fields in the places of nouns, such as ``{its} rows``.
Whoever shows the reason knows whether two programs differ in their number of towers or
of something else, and fills in the nouns.
"""

from typing import NamedTuple


class Nouns(NamedTuple):
    """The nouns for what two compared programs have different numbers of: towers, say.

    Attributes:
      one: The singular, such as "tower".
      many: The plural, such as "towers".
      its: The possessive, such as "the tower's".
      number: The index of one of them, such as "tower.id".
    """

    one: str
    many: str
    its: str
    number: str

    def told(self, reason: str) -> str:
        """Fill these nouns into the fields of a reason."""
        for field, noun in self._asdict().items():
            reason = reason.replace(f"{{{field}}}", noun)
        return reason


NOUNS_OF_TOWERS = Nouns("tower", "towers", "the tower's", "tower.id")
