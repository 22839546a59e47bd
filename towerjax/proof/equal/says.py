"""What a proof says of a value: proved, unknown or refuted."""

import enum


class Says(enum.StrEnum):
    """The three answers, the worst last."""

    PROVED = "proved"
    UNKNOWN = "unknown"
    REFUTED = "refuted"
