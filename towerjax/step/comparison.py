"""Compare what several towers and one tower merged, leaf by leaf."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from towerjax.proof.equation import all_eqns
from towerjax.proof.findings import ReplicationError
from towerjax.types import Portable

Leaves: TypeAlias = dict[str, np.ndarray | None]
"""Name -> what was merged there, in float64; None for what has no one value."""

# A difference counts beyond so many times what a rounding of the parameters changes.
_ROUNDINGS = 32


@dataclasses.dataclass(frozen=True)
class Finding:
    """One leaf that depends on how the batch was split.

    Attributes:
      leaf: Its name, such as ``gradient['w']``.
      towers: ``T`` where the difference is largest.
      split: The split where it is largest.
      value: The element that differs most, on ``T`` towers.
      one_tower: The same element on one tower.
      difference: The largest difference.
      relative: The largest difference over the leaf's largest value.
    """

    leaf: str
    towers: int
    split: str
    value: float
    one_tower: float
    difference: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.leaf} is {self.value:.6g} on {self.towers} towers ({self.split})"
            f" and {self.one_tower:.6g} on one: they differ by {self.difference:.3g}"
            f" ({self.relative:.2%} of its size)"
        )


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The leaves that were compared and are the same.

    Attributes:
      towers: The numbers of towers that were compared with one.
      examples: The rows that were compared.
      splits: How many runs of several towers were compared with one tower.
      compared: Names of the leaves.
      not_compared: Names of the leaves that have no one value to compare: those of
        each tower, and keys.
      largest: The largest difference over its leaf's largest value.
      largest_leaf: The leaf with that difference.
    """

    towers: tuple[int, ...]
    examples: int
    splits: int
    compared: tuple[str, ...]
    not_compared: tuple[str, ...]
    largest: float
    largest_leaf: str

    def __str__(self) -> str:
        towers = ", ".join(str(n) for n in self.towers)
        left_out = f"; not compared: {', '.join(self.not_compared)}"
        return (
            f"{len(self.compared)} values are the same on {towers} towers as on one, up"
            f" to {self.largest:.0e} of {self.largest_leaf}"
            + (left_out if self.not_compared else "")
        )


class SplitError(Portable, ReplicationError):
    """A leaf depends on how the batch was split over towers.

    Attributes:
      findings: A `Finding` for each such leaf.
    """

    def __init__(self, findings: Sequence[Finding], advice: Iterable[str] = ()) -> None:
        self.findings = tuple(findings)
        shown = "".join(f"\n  * {finding}" for finding in self.findings[:8])
        shown += "\n  * ..." * (len(self.findings) > 8)
        told = "".join(f"\n{sentence}" for sentence in advice)
        number = len(self.findings)
        depend = "leaf depends" if number == 1 else "leaves depend"
        super().__init__(
            f"{number} {depend} on how the batch is split over towers:{shown}{told}"
        )


class Compared(NamedTuple):
    """What several towers merged of a split, and what one tower did."""

    towers: int
    split: str
    got: Leaves
    want: Leaves
    rounded: Leaves  # as ``want``, of parameters that are rounded once more


def judge(
    runs: Sequence[Compared], jaxpr: Any, examples: int, rtol: float | None = None
) -> AuditReport:
    """The report of runs that are the same as on one tower; raise if one is not."""
    rtol, want = _rtol(jaxpr) if rtol is None else rtol, runs[0].want
    names = sorted(name for name, x in want.items() if x is not None)
    worst = {
        name: max((_gap_of_leaf(name, run, rtol) for run in runs), key=lambda x: x[0])
        for name in names
    }
    if bad := [finding for excess, finding in worst.values() if not excess <= 1]:
        raise SplitError(bad)
    none = Finding("none", 1, "", 0.0, 0.0, 0.0, 0.0)
    findings = [finding for _, finding in worst.values()]
    largest = max(findings, key=lambda x: x.relative, default=none)
    towers = tuple(dict.fromkeys(run.towers for run in runs))
    left_out = tuple(sorted(want.keys() - set(names)))
    compared = tuple(names), left_out, largest.relative, largest.leaf
    return AuditReport(towers, examples, len(runs), *compared)


def _gap_of_leaf(name: str, run: Compared, rtol: float) -> tuple[float, Finding]:
    """The largest difference of a leaf, and how often it has what rounding explains."""
    got, want, rounded = (x[name] for x in (run.got, run.want, run.rounded))
    assert got is not None and want is not None and rounded is not None
    at = name, run.towers, run.split
    if got.shape != want.shape:
        return np.inf, Finding(*at, np.nan, np.nan, np.inf, np.inf)
    size = max(_largest(got), _largest(want), _floor(name, run.want))
    gap, noise = gaps(got, want), gaps(rounded, want).max(initial=0.0)
    if not (gap.size and size):
        return 0.0, Finding(*at, 0.0, 0.0, 0.0, 0.0)
    i = np.unravel_index(np.argmax(gap), gap.shape)
    value, one_tower, difference = (float(x[i]) for x in (got, want, gap))
    finding = Finding(*at, value, one_tower, difference, difference / size)
    return finding.relative / max(rtol, _ROUNDINGS * noise / size), finding


def _floor(name: str, leaves: Leaves) -> float:
    """The least size of a leaf that is 0 up to the rounding of what it is made of."""
    known = {n: _largest(x) for n, x in leaves.items() if x is not None}
    least = 0.001 * known.get("loss", 0.0)
    if name.startswith("gradient"):
        others = [size for n, size in known.items() if n.startswith("gradient")]
        return max(least, 0.01 * max(others))
    return least


def gaps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The absolute differences; infinite where only one value is not finite."""
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(same, 0.0, np.abs(got - want)), nan=np.inf)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _rtol(jaxpr: Any) -> float:
    """The tolerance for rounding: eight times the epsilon of the narrowest dtype."""
    avals = [v.aval for eqn in all_eqns(jaxpr) for v in eqn.outvars]
    dtypes = {str(getattr(x, "dtype", None)) for x in avals}
    rtols = {"bfloat16": 8 * 2.0**-7, "float16": 8 * 2.0**-10}
    return next((rtol for dtype, rtol in rtols.items() if dtype in dtypes), 1e-4)
