"""Typed reasons why a kind is unknown, beside the text that a person reads."""

import enum


class Reason(enum.Enum):
    """The causes of an unknown kind for which some advice is known.

    The text of a reason names lines and kinds. Advice is chosen by this value alone.
    """

    DRAWS_OF_NO_ROW = "one's own key draws numbers that belong to no row"
    SAME_DRAWS = "the rows of each get the same draws, or the same keys"
    OWN_DRAWS = "each has a key of its own, which stands for no row"
    PER_TOWER = "a value is each tower's own"
    MEAN_OF_OWN_ROWS = "a mean over one's own rows is used"
    SUM_OF_OWN_ROWS = "a sum over one's own rows is used before all are added up"
    EXTREME_OF_OWN_ROWS = "a maximum or minimum of one's own rows is used"
    SUM_SO_FAR = "a loop uses the sum of its trips so far"
    OWN_NUMBER = "one's own number, or that of a row, is computed with"
    ROWS_MEET_ROWS = "one's own rows meet each other"
    DEALT_BY_NUMBER = "rows are dealt out along a dim with an entry for each"
    OTHER_SIZES = "sizes differ in another way than numbers of rows"
    OTHER_ARGUMENTS = "the programs are given other arguments"


class ReasonedError(Exception):
    """No kind is known, for a reason in words and, if one fits, a typed one."""

    def __init__(self, why: str, reason: Reason | None = None) -> None:
        super().__init__(why)
        self.reason = reason


class NotOfOneKindError(ReasonedError):
    """No rule gives a kind to values of these kinds; the text says why."""


class ProgramsDifferError(ReasonedError):
    """The two programs differ in more than their numbers of rows and towers."""
