"""Compare the results of two runs leaf by leaf, such as of two towers and of one."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.leaf_name import LeafPart, part_of
from towerjax.prover.replication.findings import ReplicationError
from towerjax.types import PyTree
from towerjax.types.refusals import Portable, listed
from towerjax.types.trees import is_key

Leaves: TypeAlias = dict[str, np.ndarray | None]
"""The merged value of each leaf, as real numbers; None if towers differ in it."""

# A difference is an error if it is more than this many times the effect of changing the
# inputs' rounding. The key tells whether the program computes in 16 bits: there the
# inputs are rounded more coarsely, so the number is smaller.
_ROUNDINGS = {False: 32, True: 4}
# The same number for 32-bit sums of 16-bit values. Each value was rounded by up to half
# of its last bit, and the change of the rounding is up to two bits.
_ROUNDINGS_OF_SUMS = 0.5
_TOLERANCE = 1e-4
# A leaf may change by this relative amount when the same program is run twice on the
# same inputs, for example because a device adds up in another order.
_OF_RERUNS = 1e-6
_SHOWN = 3
_PLACES = "towers", "devices"  # texts say "on 2 towers", but "with 2 micro_batches"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A leaf that depends on how the batch was split.

    Attributes:
      leaf: Its name, such as ``gradient['w']``.
      towers: The number of towers ``T`` where the difference is largest.
      split: The split where the difference is largest.
      value: The value of the most different element on ``T`` towers.
      one_tower: The value of the same element on one tower.
      difference: The largest difference.
      relative: The largest difference divided by the leaf's largest value.
      of: What ``towers`` counts: "towers", "devices", or the name of another number.
    """

    leaf: str
    towers: int
    split: str
    value: float
    one_tower: float
    difference: float
    relative: float
    of: str = "towers"
    first: int = 1

    def __str__(self) -> str:
        split = f" ({self.split})" if self.split else ""
        here = _where(self.of, str(self.towers))
        there = _where_first(self.of, self.first)
        return (
            f"{self.leaf} is {self.value:.6g} {here}{split}"
            f" and {self.one_tower:.6g} {there}: they differ by {self.difference:.3g}"
            f" ({self.relative:.2%} of its size)"
        )


@dataclasses.dataclass(frozen=True)
class Refuted:
    """A leaf that is proved to depend on how the batch is split; nothing was run.

    Attributes:
      leaf: Its name.
      why: The factor by which it depends, and the line that causes it.
      of: The name of the number that it depends on: "towers" or "devices".
    """

    leaf: str
    why: str
    of: str = "towers"

    def __str__(self) -> str:
        return f"{self.leaf}: {self.why}"


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit in which all compared leaves agree.

    Attributes:
      towers: The numbers of towers that were compared with one.
      examples: The number of rows that were compared.
      splits: The number of runs of several towers that were compared with one tower.
      compared: Names of the leaves.
      not_compared: Names of the leaves without a single value to compare: per-tower
        values, keys, and values that are not finite.
      largest: The largest relative difference, measured by the leaf's largest value.
      largest_leaf: The leaf with that difference.
      by_rounding: Names of leaves that differ by more than the tolerance, but by no
        more than the rounding of the inputs explains.
      of: What ``towers`` counts: "towers", "devices", or the name of another number.
      notes: Notes on things that could not be compared.
      first: The number that the others were compared with.
    """

    towers: tuple[int, ...]
    examples: int
    splits: int
    compared: tuple[str, ...]
    not_compared: tuple[str, ...]
    largest: float
    largest_leaf: str
    by_rounding: tuple[str, ...] = ()
    of: str = "towers"
    notes: tuple[str, ...] = ()
    first: int = 1

    def __str__(self) -> str:
        here = _where(self.of, ", ".join(str(n) for n in self.towers))
        there = _where_first(self.of, self.first)
        are = "value is" if len(self.compared) == 1 else "values are"
        text = (
            f"{len(self.compared)} {are} the same {here} as {there},"
            f" up to {self.largest:.0e} of {self.largest_leaf}"
        )
        if self.not_compared:
            text += f"; not compared: {', '.join(self.not_compared)}"
        if decided := self.by_rounding:
            which = f"{len(decided)} of {len(self.compared)} values"
            which = listed(decided) if len(decided) <= _SHOWN else which
            text += f"; rounding decides {which}"
        return "\n".join([text, *[f"note: {note}" for note in self.notes]])


def _where(of: str, numbers: str) -> str:
    """Word what a program was run on or with, such as "on 4 towers"."""
    return f"on {numbers} {of}" if of in _PLACES else f"with {of}={numbers}"


def _where_first(of: str, number: int) -> str:
    return "on one" if of in _PLACES else _where(of, str(number))


RAISED_ON_OTHER_ROWS = (
    ArithmeticError,
    AssertionError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""The errors that a function may raise when it gets another number of rows."""


class NotAudited(ValueError):
    """A step could not be audited; nothing wrong was found in it."""


class SplitError(Portable, ReplicationError):
    """A leaf depends on how the batch was split over towers.

    Attributes:
      findings: A `Finding` for each such leaf, or a `Refuted` if that is proved.
      advice: Sentences about all of them: causes, lines and what to write.
    """

    def __init__(self, findings: Sequence[Any], advice: Iterable[str] = ()) -> None:
        self.findings: tuple[Any, ...] = tuple(findings)
        self.advice: tuple[str, ...] = tuple(advice)
        shown = "".join(f"\n  * {finding}" for finding in self.findings[:_SHOWN])
        shown += "\n  * ..." * (len(self.findings) > _SHOWN)
        sentences = "".join(f"\n{sentence}" for sentence in self.advice)
        number = len(self.findings)
        depend = "leaf depends" if number == 1 else "leaves depend"
        named = next((x.of for x in self.findings if x.of != "towers"), "towers")
        wholes = {
            "towers": "how the batch is split over towers",
            "devices": "the number of devices",
        }
        of = wholes.get(named, named)
        super().__init__(f"{number} {depend} on {of}:{shown}{sentences}")


class Compared(NamedTuple):
    """The merged results of several towers and of one tower, for the same rows."""

    towers: int
    split: str
    got: Leaves
    want: Leaves
    nearby: Callable[[], Sequence[Leaves]]  # results for inputs with other rounding
    rtols: Mapping[str, float] = MappingProxyType({})  # the tolerances of some leaves


def judge(
    runs: Sequence[Compared],
    examples: int,
    rtol: float,
    leaves: Callable[[str], bool] | None = None,
) -> AuditReport:
    """Report on runs that agree with one tower; raise if one does not.

    Only leaves for whose names ``leaves`` is true are compared; with None all are.
    """
    want = {n: x for n, x in runs[0].want.items() if leaves is None or leaves(n)}
    if not (names := compared_of(want)):
        names_of_all = listed(sorted(want))
        raise NotAudited(
            "nothing is merged that could be compared; these leaves are per tower:"
            f" {names_of_all}"
        )
    worst: dict[str, tuple[float, Finding]] = {}
    for run in runs:
        sizes = _sizes(run.want)
        for name in names:
            gap = _gap_of_leaf(name, run, sizes, rtol)
            worst[name] = max(worst.get(name, gap), gap, key=lambda x: x[0])
    if bad := [finding for excess, finding in worst.values() if not excess <= 1]:
        raise SplitError(sorted(bad, key=lambda x: (_rank(x.leaf), -x.relative)))
    none = Finding("none", 1, "", 0.0, 0.0, 0.0, 0.0)
    findings = [finding for _, finding in worst.values()]
    largest = max(findings, key=lambda x: x.relative, default=none)
    towers = tuple(dict.fromkeys(run.towers for run in runs))
    left_out = tuple(sorted(want.keys() - set(names)))
    rtols = {name: rtol for name in names} | {**runs[0].rtols}
    by_rounding = tuple(x.leaf for x in findings if x.relative > rtols[x.leaf])
    return AuditReport(
        towers,
        examples,
        len(runs),
        names,
        left_out,
        largest.relative,
        largest.leaf,
        by_rounding,
    )


def join_reports(reports: Sequence[AuditReport]) -> AuditReport:
    """Join several reports on the same towers and leaves into one report."""
    most = max(reports, key=lambda x: x.largest)
    by_rounding = dict.fromkeys(name for x in reports for name in x.by_rounding)
    compared = {name for x in reports for name in x.compared}
    left_out = {name for x in reports for name in x.not_compared} - compared
    return dataclasses.replace(
        most,
        splits=sum(x.splits for x in reports),
        compared=tuple(sorted(compared)),
        not_compared=tuple(sorted(left_out)),
        by_rounding=tuple(by_rounding),
    )


def compared_of(leaves: Leaves) -> tuple[str, ...]:
    """Name the leaves that have a finite value.

    A value that is not finite, such as a gradient whose scale is still too large,
    cannot be compared.
    """
    values = {name: x for name, x in leaves.items() if x is not None}
    return tuple(sorted(name for name, x in values.items() if np.isfinite(x).all()))


def _rank(leaf: str) -> int:
    return [*LeafPart].index(part_of(leaf))


def _gap_of_leaf(
    name: str, run: Compared, sizes: dict[str, float], rtol: float
) -> tuple[float, Finding]:
    """Find the largest difference of a leaf, divided by what rounding explains.

    A quotient above 1 is more than rounding explains. ``sizes`` has for each leaf the
    size by which its differences are divided.
    """
    got = run.got[name]
    want = run.want[name]
    assert got is not None and want is not None
    same = Finding(name, run.towers, run.split, 0.0, 0.0, 0.0, 0.0)
    if got.shape != want.shape:
        return np.inf, dataclasses.replace(
            same, value=np.nan, one_tower=np.nan, difference=np.inf, relative=np.inf
        )
    size = max(_largest(got), sizes[name])
    gap = gaps(got, want)
    if not gap.any():
        return 0.0, same
    at = np.unravel_index(np.argmax(gap), gap.shape)
    difference = float(gap[at])
    finding = dataclasses.replace(
        same,
        value=float(got[at]),
        one_tower=float(want[at]),
        difference=difference,
        relative=difference / size if size else np.inf,
    )
    if size == 0:  # one of the two is 0, and the other is infinite or NaN
        return np.inf, finding
    rtol_of_leaf = run.rtols.get(name, rtol)
    if finding.relative <= rtol_of_leaf:
        return finding.relative / rtol_of_leaf if rtol_of_leaf else 0.0, finding
    is_sum_of_16_bits = rtol_of_leaf < rtol
    roundings = _ROUNDINGS[rtol > _TOLERANCE]
    if is_sum_of_16_bits:
        roundings = _ROUNDINGS_OF_SUMS
    by_rounding = max(_largest_gap(x[name], want) for x in run.nearby())
    explained = roundings * by_rounding / size
    return finding.relative / max(rtol_of_leaf, explained), finding


def _largest_gap(x: np.ndarray | None, y: np.ndarray) -> float:
    return 0.0 if x is None else float(gaps(x, y).max(initial=0.0))


def refuse_random(again: Leaves, first: Leaves) -> None:
    """Raise unless two runs of a program on the same inputs gave the same results."""
    sizes = _sizes(first)
    for name in sorted(first, key=_rank):
        x = again[name]
        y = first[name]
        if x is None or y is None or not (gap := gaps(x, y)).size:
            continue
        if gap.max() > _OF_RERUNS * max(_largest(x), sizes[name]):
            i = np.unravel_index(np.argmax(gap), gap.shape)
            raise NotAudited(
                "the function is not deterministic: for the same rows and parameters"
                f" {name} is {y[i]:.6g} and then {x[i]:.6g}. Draw from tower.rng"
            )


def nonfinite_loss(leaves: Leaves) -> str | None:
    """Write an error if the loss of one tower is not finite; else None."""
    for name, x in leaves.items():
        is_loss = part_of(name) is LeafPart.LOSS
        if is_loss and x is not None and not np.isfinite(x).all():
            return (
                f"on one tower {name} is not finite. Give parameters and a batch whose"
                " loss is finite; a label that is not a class makes it NaN"
            )
    return None


def _sizes(want: Leaves) -> dict[str, float]:
    """Choose, for each leaf's name, the size by which its differences are divided.

    It is at least a share of the size of the loss or of all gradients, because a leaf
    may be nothing but their rounding errors.
    """
    known = {n: _largest(x) for n, x in want.items() if x is not None}
    parts = {n: part_of(n) for n in known}
    gradients = [size for n, size in known.items() if parts[n] is LeafPart.GRADIENT]
    least = 0.001 * known.get("loss", 0.0)
    of_gradients = max(least, 0.01 * max(gradients, default=0.0))
    return {
        n: max(size, of_gradients if parts[n] is LeafPart.GRADIENT else least)
        for n, size in known.items()
    }


def gaps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Subtract two arrays, and take the absolute differences.

    A difference is infinite if only one of the two values is finite.
    """
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(same, 0.0, np.abs(got - want)), nan=np.inf)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def rounding_of(jaxprs: Iterable[Any]) -> float:
    """Choose the tolerance for rounding in programs, by their narrowest dtype.

    For bfloat16 and float16 it is eight epsilons, otherwise a constant.
    """
    eqns = (eqn for jaxpr in jaxprs for eqn in all_eqns(jaxpr))
    avals = [v.aval for eqn in eqns for v in eqn.outvars]
    return rounding_of_dtypes({str(getattr(x, "dtype", None)) for x in avals})


def rounding_of_dtypes(dtypes: Collection[str]) -> float:
    """Choose the tolerance for the rounding in the narrowest of these dtypes."""
    rtols = {"bfloat16": 8 * 2.0**-7, "float16": 8 * 2.0**-10}
    return next((rtol for dtype, rtol in rtols.items() if dtype in dtypes), _TOLERANCE)


def rounded(
    tree: PyTree, by: float, only_broken: bool = False, *, least_bytes: int = 4
) -> PyTree:
    """Change the floats of a tree as if they were rounded once more.

    Each is multiplied by ``1 + by`` or ``1 - by``, in turn. With ``only_broken`` floats
    that are whole numbers stay, because functions compare with them. Floats of fewer
    than ``least_bytes`` bytes stay, too.
    """

    def near(x: Any) -> Any:
        if is_key(x) or not jnp.issubdtype(np.asarray(x).dtype, jnp.inexact):
            return x
        x = np.asarray(x)
        if x.dtype.itemsize < least_bytes:
            return x
        signs = 1 - 2 * (np.arange(x.size).reshape(x.shape) % 2)
        wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
        near = (wide * (1 + by * signs)).astype(x.dtype)
        return np.where(x == np.round(x), x, near) if only_broken else near

    return jax.tree.map(near, tree)


def as_reals(x: Any) -> np.ndarray | None:
    """Cast an array to float32 or float64; stack real and imaginary parts.

    The result is None for a random key and for None.
    """
    if x is None or is_key(x):
        return None
    x = np.asarray(x)
    x = np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x
    is_short = x.dtype.itemsize <= 4 and jnp.issubdtype(x.dtype, np.inexact)
    return np.asarray(x, np.float32 if is_short else np.float64)
