"""The results of a step's proofs and audits."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Checked:
    """The results of proof and audit for a step so far."""

    unproved: Mapping[str, str] | None = None  # leaf -> why it is not proved
    report: Any = None  # an `AuditReport`, of it or of the same program
    note: str = ""  # what nobody has been told yet
    seconds: float = 0.0  # of proofs of equality and audits
    is_done: bool = False  # the first call looks no further
