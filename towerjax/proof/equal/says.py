"""What a proof says of a value: proved, unknown or refuted."""

import enum


class Says(enum.StrEnum):
    """The three answers that a proof gives, the worst last."""

    PROVED = "proved"
    UNKNOWN = "unknown"
    REFUTED = "refuted"
