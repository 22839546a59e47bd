"""Check that a loss function gives the same on any number of towers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from towerjax.data import feed
from towerjax.step.build.train import build_train_step
from towerjax.step.look.comparison import AuditReport, judge
from towerjax.step.look.run_towers import DRAWS, RowsToRun, Towers, compare
from towerjax.towers.strategies import Mirrored
from towerjax.types import LossFn, PyTree, Reduction
from towerjax.types.door import door
from towerjax.types.options import check_flag, check_number, check_wholes


@door
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
    """Raise if what a step computes from a loss depends on the number of towers.

    As ``step.audit``, with the whole batch and more numbers of towers: the batch in
    order and with its rows permuted is split over ``T`` towers on one device, padded so
    that towers have unequally many rows. Loss, gradient, metrics, tower-local and extra
    state are compared with those of one tower. ``tower.rng`` draws the same for all
    rows. What a train step refuses is refused here, too.

    Args:
      loss_fn: As for `build_train_step`.
      params: As for ``step.init``.
      batch: Arrays ``[B, ...]`` of different examples, with unequal weights where the
        loss takes weights.
      towers: The numbers of towers ``T`` to compare with one.
      local: Tower-local variables: a pytree of ``TowerLocal``, each leaf one tower's.
      extra: As for ``step.init``: what the loss reads as ``tower.extra``.
      rtol: The largest difference over a leaf's largest value (for gradients at
        least 1% of the largest one's, and 0.1% of the loss), or 32 times what changing
        the parameters in their last bit changes; None is 1e-4, and more where the loss
        function computes in 16 bits.
      loss_reduction: As for `build_train_step`.
      padding: Whether towers may have padding rows. False is for losses that are only
        trained with ``remainder="error"``, and for numbers of towers that divide ``B``.
      permuted: Whether the rows are also permuted. False is for losses whose
        neighbouring rows belong together, such as pairs and groups.

    Returns:
      An `AuditReport` of what was compared.

    Raises:
      SplitError: Which leaf depends on the split, by how much and at which ``T``; its
        ``findings`` hold the same as data.
      ReplicationError: As for a train step.
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
        both, draws = (batch, np.arange(examples)), DRAWS[1]
        rows, order = next(feed.batches(both, examples, seed=0))
        again = RowsToRun("in order", batch, word=draws)
        splits.append((again, RowsToRun("permuted", rows, word=draws, order=order)))

    def towers_of(number: int, rows: int) -> Towers:
        strategy = Mirrored(devices=(jax.local_devices()[0],), towers=number)
        how: Any = {"loss_reduction": loss_reduction, "donate": False}
        how["remainder"] = "pad" if padding else "error"
        step = build_train_step(loss_fn, optax.identity(), strategy, **how)
        step.place_batch(batch)  # which refuses what these towers cannot share
        state = step.init(params, local=local, extra=extra)
        towers = Towers(step.engine, strategy, number, state, rows=rows)
        towers.prove(in_order)
        return towers

    def rows_of(number: int) -> int:
        # A mean of means is right for equal row counts.
        more = padding and number > 1
        return number * (examples // number + 1) if more else examples

    single = towers_of(1, examples)
    several = [towers_of(number, rows_of(number)) for number in numbers]
    runs = [*compare(single, several, splits)]
    return judge(runs, examples, single.rtol if rtol is None else rtol)
