"""Check that a loss function gives the same on any number of towers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from towerjax.data import feed
from towerjax.step.state import TrainState
from towerjax.step.train import TrainStep, build_train_step
from towerjax.tools.testing.compare import gaps
from towerjax.towers.strategies import Mirrored
from towerjax.towers.variables import is_local, read_local
from towerjax.types import LossFn, Portable, PyTree, Reduction, named_leaves
from towerjax.types.door import door
from towerjax.types.leaves import is_key
from towerjax.types.options import check_choice, check_number, check_wholes


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
      towers: The numbers of towers.
      examples: ``B``.
      splits: How many splits were compared with one tower.
      compared: Names of the leaves.
      not_compared: Names of the leaves that were left out: random ones with
        ``rng="ignore"``, keys, and local variables without one value.
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
            f"{len(self.compared)} leaves are the same on {towers} towers"
            f" ({self.splits} splits of {self.examples} examples), the largest"
            f" difference {self.largest:.1e} of {self.largest_leaf}"
            + (left_out if self.not_compared else "")
        )


class SplitError(Portable, AssertionError):
    """A leaf depends on how the batch was split over towers.

    Attributes:
      findings: A `Finding` for each such leaf.
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


Leaves: TypeAlias = dict[str, np.ndarray]
"""Name -> what a step gave there."""


@door
def assert_replicates(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    towers: Sequence[int] = (1, 2, 3, 4, 8),
    *,
    local: PyTree = None,
    extra: PyTree = None,
    rng: jax.Array | str | None = None,
    rtol: float | None = None,
    loss_reduction: Reduction | None = None,
    padding: bool = True,
) -> AuditReport:
    """Raise if what a step computes from a loss depends on the number of towers.

    Train steps of ``T`` towers on one device are given the batch in order and with its
    rows permuted, padded so that towers have unequally many rows. Loss, gradient,
    metrics, tower-local and extra state are compared with those of one tower. What a
    train step refuses is refused here, too.

    Args:
      loss_fn: As for `build_train_step`.
      params: As for ``step.init``.
      batch: Arrays ``[B, ...]`` of different examples, with unequal weights where the
        loss takes weights.
      towers: The numbers of towers ``T`` to compare with one.
      local: Tower-local variables: a pytree of ``TowerLocal``, each leaf one tower's.
      extra: As for ``step.init``: what the loss reads as ``tower.extra``.
      rng: The key from which ``tower.rng`` is derived; None is ``jax.random.key(0)``.
        Leaves that depend on it differ, because each tower has its own key; with
        ``"ignore"`` such leaves are left out, and the report names them.
      rtol: The largest difference over a leaf's largest value (for gradients at
        least 1% of the largest one's, and 0.1% of the loss); None is 1e-4, and more
        where the loss function computes in 16 bits.
      loss_reduction: As for `build_train_step`.
      padding: Whether towers may have padding rows. False is for losses that are only
        trained with ``remainder="error"``, and for numbers of towers that divide ``B``.

    Returns:
      An `AuditReport` of what was compared.

    Raises:
      SplitError: An ``AssertionError``: which leaf depends on the split, by how much
        and at which ``T``; its ``findings`` hold the same as data.
      ReplicationError: As for a train step.
      ValueError: An argument is invalid, the loss or gradient on one tower is not
        finite, or nothing is left to compare.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> batch = {"x": np.arange(12, dtype=np.float32)}
      >>> def good(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch["x"]) ** 2, tower.weight)
      >>> assert_replicates(good, np.float32(1), batch, towers=(3,)).compared
      ('gradient', 'loss')
      >>> def bad(w, batch, tower):
      ...     return tj.Weighted(good(w, batch, tower).value, 1.0)
      >>> try:
      ...     assert_replicates(bad, np.float32(1), batch, towers=(3,))
      ... except tj.testing.SplitError as error:
      ...     [finding.leaf for finding in error.findings]
      ['gradient', 'loss']
    """
    towers = tuple(dict.fromkeys(check_wholes("towers", towers)))
    examples = len(feed.batches(batch, 1))
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")
    if ignores := isinstance(rng, str):
        check_choice("rng", rng, ("ignore",))
    key: Any = jax.random.key(0) if rng is None or ignores else rng

    @functools.cache
    def step_of(number: int) -> TrainStep:
        return _make_step(loss_fn, loss_reduction, number, examples if padding else 0)

    def begin(number: int, key: Any) -> TrainState:
        return step_of(number).init(params, rng=key, local=local, extra=extra)

    def run(number: int, rows: PyTree, key: Any = key) -> dict[str, Any]:
        return _outcome(*step_of(number)(begin(number, key), rows))

    permuted = next(feed.batches(batch, examples, seed=0))
    with jax.default_matmul_precision("highest"):
        found = run(1, batch)
        expected = {name: x for name, x in found.items() if x is not None}
        _refuse_nonfinite(expected)
        drawn = run(1, batch, jax.random.fold_in(key, 1)) if ignores else expected
        random = _changed(drawn, expected)
        runs = {
            (number, split): run(number, rows)
            for number in towers
            for split, rows in (("in order", batch), ("permuted", permuted))
        }
        if rtol is None:
            rtol = _rtol(step_of(1).program(begin(1, key), batch).jaxpr)
    compared = sorted(expected.keys() - random)
    left_out = (*sorted(random), *(x for x in found if x not in expected))
    findings = [_worst_finding(name, runs, expected) for name in compared]
    if bad := [finding for finding in findings if finding.relative > rtol]:
        raise SplitError(bad)
    largest = max(findings, key=lambda x: x.relative)
    of_all = (towers, examples, len(runs), tuple(compared), left_out)
    return AuditReport(*of_all, largest.relative, largest.leaf)


def _make_step(
    loss_fn: LossFn, reduction: Reduction | None, towers: int, padded: int
) -> TrainStep:
    """A step whose state keeps its gradient; ``padded`` rows are split unevenly."""
    keep_gradient: Any = lambda g, *_: (g, g)  # noqa: E731
    step = build_train_step(
        loss_fn,
        optax.GradientTransformation(lambda params: params, keep_gradient),
        Mirrored(devices=(jax.local_devices()[0],), towers=towers),
        loss_reduction=reduction,
        remainder="pad" if padded else "error",
        on_nonfinite="ignore",
        donate=False,
    )
    if padded and towers > 1:  # a mean of means is right for equal row counts
        step.expect_batch_rows([towers * (padded // towers + 1)])
    return step


def _outcome(state: TrainState, metrics: dict[str, Any]) -> dict[str, Any]:
    """Gradient, loss, metrics and other state after one step, by leaf name.

    None stands for a leaf that has no one value to compare.
    """
    found = named_leaves("gradient", state.opt_state)
    found += [("loss", metrics.pop("loss")), *named_leaves("metrics", metrics)]
    found += named_leaves("extra", state.extra)
    for name, variable in named_leaves("local", state.local, is_leaf=is_local):
        has_one = variable.reduction is not Reduction.NONE
        value = read_local(variable) if has_one else variable.value
        found += [(n, x if has_one else None) for n, x in named_leaves(name, value)]
    return {name: _as_reals(x) for name, x in found}


def _as_reals(x: Any) -> np.ndarray | None:
    """The array in float64; real and imaginary parts stacked; None of a key or None."""
    if x is None or is_key(x):
        return None
    x = np.asarray(x)
    return np.asarray(np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x, float)


def _changed(drawn: Leaves, expected: Leaves) -> set[str]:
    """The names of the leaves that another key changes."""
    random = {name for name, x in expected.items() if gaps(drawn[name], x).any()}
    if random == expected.keys():
        raise ValueError(
            "rng='ignore' leaves nothing to compare: every leaf changes with"
            " tower.rng. Switch that off, or draw from keys that lie in the batch."
        )
    return random


def _rtol(jaxpr: Any) -> float:
    """The tolerance for rounding: eight times the epsilon of the narrowest dtype."""
    text, rtols = str(jaxpr), {":bf16[": 8 * 2.0**-7, ":f16[": 8 * 2.0**-10}
    return next((rtol for dtype, rtol in rtols.items() if dtype in text), 1e-4)


def _worst_finding(
    name: str, runs: dict[tuple[int, str], Leaves], expected: Leaves
) -> Finding:
    """The largest difference of a leaf from its value on one tower, over all runs."""
    want, found = expected[name], []
    size = max(_largest(run[name]) for run in (expected, *runs.values()))
    if name.startswith("gradient"):
        # A gradient that is 0 up to rounding has the error of the others and the loss.
        others = [_largest(x) for n, x in expected.items() if n.startswith("gradient")]
        size = max(size, 0.01 * max(others), 0.001 * _largest(expected["loss"]))
    for (towers, split), run in runs.items():
        got, values = run[name], (0.0, 0.0, 0.0)
        if got.shape != want.shape:
            values = (np.nan, np.nan, np.inf)
        elif got.size:
            gap = gaps(got, want)
            at = np.unravel_index(np.argmax(gap), gap.shape)
            values = (got[at], want[at], gap[at])
        value, one_tower, difference = map(float, values)
        relative = difference / size if size else (np.inf if difference else 0.0)
        found.append(
            Finding(name, towers, split, value, one_tower, difference, relative)
        )
    return max(found, key=lambda finding: finding.difference)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _refuse_nonfinite(expected: Leaves) -> None:
    for name, x in expected.items():
        if name.startswith(("loss", "gradient")) and not np.isfinite(x).all():
            raise ValueError(
                f"On one tower {name} is not finite. Give parameters and a batch whose"
                " loss is finite."
            )
