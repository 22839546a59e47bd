"""`run_audit`: run a step's towers as two and as one, and compare the results."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from towerjax.check.audit.advice import advise
from towerjax.check.audit.two_towers import Audit, StepToAudit
from towerjax.data import feed
from towerjax.data.placer import PlacedBatch
from towerjax.data.sparse_rows import SparseRows, join_entries
from towerjax.mesh.transfer import copy_to_host
from towerjax.prover.comparison import (
    AuditReport,
    NotAudited,
    SplitError,
    join_reports,
)
from towerjax.prover.equality.one_tower import Equality
from towerjax.step.plan import Plan
from towerjax.step.run.masks import refuse_unmasked
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree, Whole
from towerjax.types.trees import map_parts

_ROWS = 6  # the rows of each of two towers; more if the function refuses so few


def run_audit(
    plan: Plan,
    strategy: Strategy,
    state: TrainState,
    batch: PyTree,
    *,
    calls: int,
    pads: bool,
    gradients: bool = True,
    leaves: Callable[[str], bool] | None = None,
    unproved: Sequence[Equality] = (),
) -> AuditReport:
    """Compare two towers with one tower that has the rows of both.

    Both run on one device. If a tower has several devices, and one device can hold its
    parameters, the one tower runs on one device. Then a mistake in a `shard_map` over a
    tower's own axes shows as a difference.

    The rows are the batch's first ones. They are few, or, if the function does not
    accept so few, as many as a tower function gets in one of ``calls``; at least two.
    If it gets one row, towers of one row are compared as well, since they may run
    another program.

    If batches may be padded, one more comparison gives the second tower half as many
    rows and the one tower more padding, so that a value that includes padding differs.
    If nothing in the function masks padding, only full batches are compared, and a
    padded batch is refused.

    Without ``gradients`` only the loss is run, if its gradient follows from it. Only
    leaves for whose names ``leaves`` is true are compared. ``unproved`` says why
    the proof stopped for a leaf; an error names this as the cause.
    """
    rows = _on_host(batch)
    step = StepToAudit(plan, strategy, state, rows, gradients, leaves, unproved)
    audit = _of_fewest_rows(step, calls=calls, pads=pads)
    if unmasked := audit.unmasked():
        total = len(feed.batches(rows, 1))
        if total % (calls * strategy.placement.row_shards):
            refuse_unmasked(total, unmasked)
        audit = audit.unpadded()
    try:
        report = _run_or_advise(audit)
        if -(-len(feed.batches(rows, 1)) // calls) == 1 < audit.tower_rows:
            alone = _run_or_advise(Audit(step, 1, pads=audit.pads))
            report = join_reports([report, alone])
        return report
    except NotAudited:
        # A leaf that differs without padding is an error that says more than this one.
        if audit.pads:
            _run_or_advise(audit.unpadded())
        raise


def _run_or_advise(audit: Audit) -> AuditReport:
    """Run an audit; if a leaf differs, raise with the cause."""
    try:
        return audit.run()
    except SplitError as error:
        raise advise(audit, error) from None


def _of_fewest_rows(step: StepToAudit, *, calls: int, pads: bool) -> Audit:
    """Make the audit with the fewest rows that the tower function accepts."""
    split = step.strategy.placement.row_shards
    total = len(feed.batches(step.batch, 1))
    called_with = min(-(-total // calls), total // 2)
    # A tower's rows are split over its devices. Rows that are left over are dropped,
    # unless the step pads.
    called_with -= 0 if pads else called_with % split
    if not called_with:
        raise NotAudited(
            f"The audit needs rows for two towers, but the batch has {total}. Give at"
            f" least {2 * split} rows."
        )
    *few, most = dict.fromkeys([max(min(called_with, _ROWS), 2), called_with])
    for size in few:
        try:
            return Audit(step, size + -size % split, pads=pads)
        except NotAudited:
            pass
    return Audit(step, most + -most % split, pads=pads)


def _on_host(batch: PyTree) -> PyTree:
    """Copy the examples of a placed batch to the host."""
    if not isinstance(batch, PlacedBatch):
        return batch
    arrays, _, held = jax.tree.map(copy_to_host, batch.args)
    parts = batch.micro_batches * batch.placement.num_towers
    size = batch.rows // batch.micro_batches
    is_example = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)
    sparse, dense = SparseRows.put_aside(join_entries(arrays, size, parts))
    dense = jax.tree.map(lambda x: x[is_example], dense)
    arrays = sparse.take(np.flatnonzero(is_example), dense)
    values = iter(held)
    return map_parts(Whole, lambda _: Whole(next(values)), arrays)
