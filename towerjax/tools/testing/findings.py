"""What did an audit find? A report when all is well, findings when it is not."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """One leaf that depends on how the batch was split.

    Attributes:
      leaf: Its name, such as ``gradient['w']``.
      towers: ``T`` where the difference is largest.
      split: Which split that was.
      value: The element that differs most, on ``T`` towers.
      one_tower: The same element on one tower.
      difference: The largest difference.
      relative: The same in parts of the leaf's largest value.
    """

    leaf: str
    towers: int
    split: str
    value: float
    one_tower: float
    difference: float
    relative: float

    def __str__(self) -> str:
        """One line for a person."""
        return (
            f"{self.leaf} is {self.value:.6g} on {self.towers} towers ({self.split})"
            f" and {self.one_tower:.6g} on one: they differ by {self.difference:.3g}"
            f" ({self.relative:.2%} of its size)"
        )


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What was compared, and that it was the same.

    Attributes:
      towers: The numbers of towers.
      examples: ``B``.
      splits: How many splits were compared with one tower.
      compared: Names of the leaves.
      not_compared: Names of the leaves that were left out: random ones with
        ``rng="ignore"``, keys, and local variables without one value.
      largest: The largest difference, in parts of its leaf's largest value.
      largest_leaf: Which leaf that was.
    """

    towers: tuple[int, ...]
    examples: int
    splits: int
    compared: tuple[str, ...]
    not_compared: tuple[str, ...]
    largest: float
    largest_leaf: str

    def __str__(self) -> str:
        """One line for a person."""
        towers = ", ".join(str(n) for n in self.towers)
        left_out = f"; not compared: {', '.join(self.not_compared)}"
        return (
            f"{len(self.compared)} leaves are the same on {towers} towers"
            f" ({self.splits} splits of {self.examples} examples), the largest"
            f" difference {self.largest:.1e} of {self.largest_leaf}"
            + (left_out if self.not_compared else "")
        )


class SplitError(AssertionError):
    """Something depends on how the batch was split over towers.

    Attributes:
      findings: One `Finding` a leaf.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__(
            f"{len(self.findings)} leaves depend on how the batch is split over"
            " towers:\n"
            + "\n".join(f"  * {finding}" for finding in self.findings)
            + "\nReturn sums with weights: tj.Weighted.mean(values, tower.weight) and"
            " tj.metrics. Compare rows and take statistics over all towers, with"
            " tower.all_gather and tower.reduce. Clip in the optimizer. Draw from keys"
            " that lie in the batch, or say rng='ignore'."
        )

    def __reduce__(self) -> Any:
        """Made again of its findings, in another process."""
        return type(self), (self.findings,)
