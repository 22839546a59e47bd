"""Check a loss function or a step: the same on any number of towers, and as on one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.check.audit.run_towers import DRAWS, RowsToRun, Towers, compare
from towerjax.data import feed
from towerjax.data.placer import Placer
from towerjax.loop.history import History
from towerjax.make.checked import step_of
from towerjax.make.train import build_train_step
from towerjax.prover.comparison import AuditReport, gaps, judge
from towerjax.step.step import Step
from towerjax.towers.strategies import Mirrored, Strategy, on_one_tower
from towerjax.towers.variables import read_local
from towerjax.types import LossFn, PyTree, Reduction
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_flag, check_number, check_wholes
from towerjax.types.refusals import a_type, few
from towerjax.types.trees import key_data, named_leaves


@runtime_checkable
class RunsOnOneTower(Protocol):
    """An object, such as a model, from which a copy on one tower can be made."""

    strategy: Strategy

    def on_one_tower(self, strategy: Strategy) -> Any:
        """Copy the object to a strategy of one tower."""


StepOrModel = TypeVar("StepOrModel", bound=Step | RunsOnOneTower)


@api_boundary
def assert_replicates(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    towers: Sequence[int] = (1, 2, 3, 4, 8),
    *,
    local: PyTree = None,
    extra: PyTree = None,
    rtol: float | None = None,
    loss_reduction: Reduction | None = None,
    padding: bool = True,
    permuted: bool = True,
) -> AuditReport:
    """Raise if a train step of a loss depends on the number of towers.

    It is like ``step.audit``, with the whole batch and more numbers of towers. The
    batch, in order and with permuted rows, is split over ``T`` towers on one device,
    padded so that towers have unequal numbers of rows. Loss, gradient, metrics,
    tower-local and extra state are compared with those of one tower. ``tower.rng``
    draws the same for all rows. Everything that a train step refuses is refused, too.

    Args:
      loss_fn: As for `build_train_step`.
      params: As for ``step.init``.
      batch: Arrays ``[B, ...]`` of different examples, with unequal weights if the loss
        has weights.
      towers: The numbers of towers ``T`` to compare with one tower.
      local: Tower-local variables, a pytree of ``TowerLocal`` with one tower's values.
      extra: The values that the loss reads as ``tower.extra``, as for ``step.init``.
      rtol: The largest allowed difference, divided by the leaf's largest value. A
        gradient is divided by at least 1% of the largest gradient and 0.1% of the loss.
        A difference is also allowed up to 32 times the effect of changing the
        parameters in their last bit. None is 1e-4, and more for a loss function that
        computes in 16 bits.
      loss_reduction: As for `build_train_step`.
      padding: Whether towers may have padding rows. Use False for losses that are only
        trained with ``remainder="error"``; the numbers of towers must then divide
        ``B``.
      permuted: Whether rows are also permuted. Use False for losses whose neighbouring
        rows belong together, such as pairs and groups.

    Returns:
      An `AuditReport` of the comparison.

    Raises:
      SplitError: A leaf depends on the split. The error says by how much and at which
        ``T``; its ``findings`` hold the same as data.
      ReplicationError: The errors of a train step.
      ValueError: An argument is invalid, or the loss or gradient on one tower is not
        finite.

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
      ['loss', 'gradient']
    """
    numbers = tuple(dict.fromkeys(check_wholes("towers", towers)))
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")
    check_flag("padding", padding)
    check_flag("permuted", permuted)
    examples = len(feed.batches(batch, 1))
    in_order = RowsToRun("in order", batch)
    splits = [(in_order, in_order)]
    if permuted:
        both = (batch, np.arange(examples))
        draws = DRAWS[1]
        rows, order = next(feed.batches(both, examples, seed=0))
        again = RowsToRun("in order", batch, word=draws)
        splits.append((again, RowsToRun("permuted", rows, word=draws, order=order)))

    def towers_of(number: int, rows: int) -> Towers:
        strategy = Mirrored(devices=(jax.local_devices()[0],), towers=number)
        step = build_train_step(
            loss_fn,
            optax.identity(),
            strategy,
            loss_reduction=loss_reduction,
            remainder="pad" if padding else "error",
            donate=False,
        )
        step.place_batch(batch)  # raises if these towers cannot share it
        state = step.init(params, local=local, extra=extra)
        towers = Towers(step.plan, strategy, number, state, rows=rows)
        towers.prove(in_order)
        return towers

    def rows_of(number: int) -> int:
        # Towers get unequal numbers of rows, because with equal ones even a wrong mean
        # of the towers' means is right.
        more = padding and number > 1
        return number * (examples // number + 1) if more else examples

    single = towers_of(1, examples)
    several = [towers_of(number, rows_of(number)) for number in numbers]
    runs = [*compare(single, several, splits)]
    if rtol is None:
        return judge(runs, examples, single.rtol)
    return judge([x._replace(rtols={}) for x in runs], examples, rtol)


def assert_same(
    a: PyTree, b: PyTree, rtol: float = 1e-5, *, bits: bool = False
) -> None:
    """Raise unless two trees are the same, leaf by leaf.

    An element differs if ``|a - b| > rtol * max |b|``, with the maximum over the leaf,
    because an element near 0 is only as exact as the terms of its sum. Integers and
    bools differ unless they are equal. NaN equals NaN. Tower-local and mirrored
    variables are compared by the value that they are read as, so that states of
    different numbers of towers can be compared.

    Args:
      a: A ``TrainState``, a ``History`` (of which steps and metrics count), or any tree
        of arrays.
      b: The expected tree, with the same structure, shapes and dtypes.
      rtol: The largest allowed difference, divided by the largest element of ``b``'s
        leaf.
      bits: Whether every bit must be equal. ``rtol`` is then not used.

    Raises:
      AssertionError: A leaf differs or is missing. The error names the first 8, each
        with its largest difference, its index, and the difference in ulps.
      ValueError: ``rtol`` is not a number >= 0; or a tower-local variable cannot be
        read as one value.

    Example:
      >>> assert_same({"w": np.ones(3)}, {"w": np.ones(3)}, bits=True)
      >>> assert_same({"w": np.float32(1.0)}, {"w": np.float32(1.25)})
      Traceback (most recent call last):
      ...
      AssertionError: 1 of 1 leaves differ (rtol=1e-05):
        * a['w'] is 1.0 and should be 1.25 at (): they differ by 0.25 = 2.1e+06 ulps
    """
    check_number("rtol", rtol, "a number >= 0")
    a = _read_tree(a)
    b = _read_tree(b)
    left = dict(named_leaves("a", a))
    right = dict(named_leaves("a", b))
    lines = [f"{name} is missing" for name in right if name not in left]
    lines += [f"{name} should not be there" for name in left if name not in right]
    check_flag("bits", bits)
    trees = jax.tree.structure(a), jax.tree.structure(b)
    if not lines and trees[0] != trees[1]:
        lines.append(f"the containers are {trees[0]} and should be {trees[1]}")
    for name in left:
        if name in right:
            lines += _difference(name, left[name], right[name], rtol, bits)
    if lines:
        tolerance = "bit by bit" if bits else f"rtol={rtol:g}"
        shown = "".join(f"\n  * {line}" for line in few(lines))
        count = len(left.keys() | right.keys())
        raise AssertionError(
            f"{len(lines)} of {count} leaves differ ({tolerance}):{shown}"
        )


def _read_tree(tree: PyTree) -> PyTree:
    if isinstance(tree, History):
        tree = {"steps": tree.steps, "metrics": dict(tree.metrics)}
    return read_local(tree)


def _difference(name: str, a: Any, b: Any, rtol: float, bits: bool) -> list[str]:
    """Describe how a leaf differs: a list of one text, empty if it does not."""
    a = np.asarray(key_data(a))
    b = np.asarray(key_data(b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
        return [f"{name} is {kinds[0]} and should be {kinds[1]}"]
    if a.size == 0:
        return []
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    gap = gaps(a.astype(wide), b.astype(wide))
    if bits:
        rows = [np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (a, b)]
        wrong = (rows[0] != rows[1]).any(axis=-1).reshape(a.shape)
    elif a.dtype.kind in "biu":
        wrong = a != b
    else:
        largest = np.abs(b[np.isfinite(b)].astype(wide)).max(initial=0.0)
        wrong = gap > rtol * largest
    if not wrong.any():
        return []
    at = np.unravel_index(np.argmax(np.where(wrong, gap, -1.0)), a.shape)
    place = tuple(int(i) for i in at)
    text = f"{name} is {a[at]} and should be {b[at]} at {place}: they differ"
    if np.isfinite(gap[at]):
        text += f" by {gap[at]:.3g}"
        if jnp.issubdtype(b.dtype, jnp.floating):
            info = jnp.finfo(b.dtype)
            size = max(abs(float(a[at])), abs(float(b[at])), float(info.tiny))
            # The distance of neighbouring floats of this size. ``np.spacing`` cannot
            # compute it for bfloat16.
            spacing = 2.0 ** np.floor(np.log2(size)) * float(info.eps)
            text += f" = {gap[at] / spacing:.2g} ulps"
    if a.ndim:
        text += f", and {int(wrong.sum())} of {a.size} elements do"
    return [text]


def one_tower(step: StepOrModel) -> StepOrModel:
    """Make the step, or the model, anew on one tower of the first device.

    It has the step's functions, optimizer and options, but there are no micro-batches,
    states are not donated, and ``extend=`` is left out. Batches are padded and cut as
    the step does, so that both see the same examples.

    Args:
      step: The result of `build_train_step`, `build_step` or `replicate_model_fn`.

    Returns:
      A new step with its own ``init``. Compare results with `assert_same`. Its
      ``tower.rng`` is that of tower 0, so losses with random draws differ.

    Raises:
      ValueError: ``step`` is something else, such as a model's ``train_step()``; or a
        model with ``remainder="drop"`` on several towers, whose number decides which
        rows are dropped.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> strategy = tj.Mirrored(towers=4)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
      >>> batch, ends = np.arange(8, dtype=np.float32), []
      >>> for s in (step, tj.testing.one_tower(step)):
      ...     state, metrics = s(s.init(np.float32(0)), batch)
      ...     ends.append((state, metrics))
      >>> tj.testing.assert_same(*ends)
    """
    if isinstance(step, RunsOnOneTower):
        return step.on_one_tower(on_one_tower(step.strategy))
    if not isinstance(step, Step) or step.plan.remade is None:
        raise ValueError(
            f"one_tower got {a_type(step)}, which it cannot rebuild on one tower. Pass"
            " the result of tj.build_train_step, tj.build_step or"
            " tj.estimator.replicate_model_fn."
        )
    strategy = on_one_tower(step.strategy)
    options = dataclasses.replace(step.options, micro_batches=1, donate=False)
    # One tower gets the batches of a step of several towers, so they are padded as for
    # that step.
    placer = Placer(
        strategy.placement, remainder=options.remainder, calls=step.num_calls
    )
    alone: Any = step_of(step.plan.remade(strategy, options), placer=placer)
    return alone
