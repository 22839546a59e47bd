"""What did an audit find? A report when all is well, findings when it is not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

CAUSES = {
    "rng": "random draws: on one tower the value changes with the key, and every tower"
    " has a key of its own. Draw from keys that lie in the batch, one an example, or"
    " say rng='ignore' to leave out what is random",
    "tower_id": "the value depends on which tower has which rows (tower.id, or one"
    " tower's value taken for all): it changes when two towers exchange their rows",
    "row_order": "the value depends on the order of the rows: it changes when the two"
    " halves of the batch change places on one tower",
    "first_tower": "Reduction.ONLY_FIRST_TOWER reads what tower 0 alone has seen; the"
    " value does not change with the other towers' rows",
    "per_tower": "a plain array must be the same on all towers, and this one is not."
    " Return a state: tj.Weighted.mean(values, tower.weight)",
    "initial": "every tower starts with a copy of the initial value, and SUM adds all"
    " of them: with zeros to start from the difference vanishes",
    "sum": "a sum where a mean was meant: T towers of the same rows give T times what"
    " one tower gives for all of them. Return tj.Weighted.mean(values, tower.weight)",
    "divided": "a total that is divided by the number of towers: T towers of the same"
    " rows give 1/T of what one tower gives for all of them. For a total use a bare"
    " scalar with loss_reduction=SUM, for a mean tj.Weighted.mean, for local SUM",
    "mean_of_means": "a mean of the towers' means: the difference vanishes when the"
    " towers are weighed as their rows are. Return tj.Weighted.mean(values, weight), or"
    " tj.Weighted(sum, weight), instead of what is already divided",
    "clipping": "the gradient is cut inside the tower, before towers are added. Clip"
    " in the optimizer, which sees the whole gradient: optax.clip_by_global_norm",
    "batch_statistics": "statistics of the tower's own rows (as of batch norm), or"
    " another function of all of them that is no mean: an example's part changes with"
    " the other rows of its tower, and not when every row comes twice. Take statistics"
    " over all towers: tower.reduce, or axis_name=tower.axis_names",
    "contrastive": "rows are compared with the other rows of their tower alone (as of"
    " a contrastive loss): an example's part changes with the other rows, also when"
    " every row comes twice. Compare with all rows: tower.all_gather or"
    " tower.merge_call",
    "padding": "padded rows count: the value of one tower changes when rows of weight"
    " 0 are added. Read tower.weight: tj.Weighted.mean(values, tower.weight)",
    "unknown": "no experiment explains it",
}
"""Cause -> what it means and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One leaf that depends on how the batch was split.

    Attributes:
      leaf: Its name, such as ``gradient['w']``.
      causes: Keys of ``CAUSES``, the likeliest first.
      evidence: What the experiments measured, in words.
      towers: ``T`` where the difference is largest.
      split: Which split that was.
      value: The element that differs most, on ``T`` towers.
      one_tower: The same element on one tower.
      difference: The largest difference.
      relative: The same in parts of the leaf's largest value.
    """

    leaf: str
    causes: tuple[str, ...]
    evidence: str
    towers: int
    split: str
    value: float
    one_tower: float
    difference: float
    relative: float

    def __str__(self) -> str:
        """Some lines for a person."""
        head = (
            f"{self.leaf} is {self.value:.6g} on {self.towers} towers ({self.split})"
            f" and {self.one_tower:.6g} on one: they differ by {self.difference:.3g}"
            f" ({self.relative:.2%} of its size)"
        )
        lines = [f"    {cause}: {CAUSES[cause]}." for cause in self.causes]
        if self.evidence:
            lines.append(f"    measured: {self.evidence}.")
        return "\n".join([head, *lines])


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
            " towers:\n" + "\n".join(f"  * {finding}" for finding in self.findings)
        )

    def __reduce__(self) -> Any:
        """Made again of its findings, in another process."""
        return type(self), (self.findings,)
