"""What is said of a value: proved, ran the same, unknown or refuted."""

import enum


class Says(enum.StrEnum):
    """The answers for a leaf, from the best to the worst.

    A proof says that a leaf is proved, unknown or refuted. An unknown one that was run
    and compared may have run the same, which is no proof.
    """

    PROVED = "proved"
    RAN_THE_SAME = "ran the same"
    UNKNOWN = "unknown"
    REFUTED = "refuted"
