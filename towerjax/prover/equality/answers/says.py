"""What a proof says of a value: proved, unknown or refuted."""

import enum


class Says(enum.StrEnum):
    """The three answers that a proof gives for a leaf, from the best to the worst."""

    PROVED = "proved"
    UNKNOWN = "unknown"
    REFUTED = "refuted"
