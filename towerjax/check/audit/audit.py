"""The audit: run the towers of a step as two and as one, and compare what is merged."""

from collections.abc import Callable

import jax
import numpy as np

from towerjax.check.audit.advice import advise
from towerjax.check.audit.comparison import AuditReport, NotAudited, SplitError
from towerjax.check.audit.two_towers import Audit, StepToAudit
from towerjax.collectives.sparse_rows import splits_entries
from towerjax.data import feed
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.transfer import copy_to_host
from towerjax.step.plan import Plan
from towerjax.step.run.programs import refuse_padding
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree, Whole
from towerjax.types.trees import map_parts

_ROWS = 6  # of each of two towers, where a function takes so few


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
) -> AuditReport:
    """Compare two towers with one tower of the rows of both, on one device.

    Where a tower is of several devices and one holds its parameters, too, the one tower
    is of one device: what is wrong in a `shard_map` over a tower's own axes differs.

    The rows are the batch's first: few, or where the function takes no few, as many as
    a tower function is called with, in one of ``calls``; two at least. Where
    batches may be padded, they are compared once more with half as many for the second
    tower, and with more padding on the one: what counts padding differs. Where nothing
    in the function says which rows are padding, full batches alone are compared, and a
    padded one is refused.

    Without ``gradients`` the loss alone is run, where its gradient follows from it. Of
    what is merged, only ``leaves`` of such names are judged.
    """
    rows = _on_host(batch)
    step = StepToAudit(plan, strategy, state, rows, gradients, leaves)
    audit = _of_fewest_rows(step, calls=calls, pads=pads)
    if unmasked := audit.unmasked():
        total = len(feed.batches(rows, 1))
        if total % (calls * strategy.placement.row_shards):
            refuse_padding(total, unmasked)
        audit = audit.unpadded()
    try:
        return _run_or_advise(audit)
    except NotAudited:
        if audit.pads:  # what is wrong without padding is wrong, whatever it gives
            _run_or_advise(audit.unpadded())
        raise


def _run_or_advise(audit: Audit) -> AuditReport:
    """The report; raises with the cause where a leaf differs."""
    try:
        return audit.run()
    except SplitError as error:
        raise advise(audit, error) from None


def _of_fewest_rows(step: StepToAudit, *, calls: int, pads: bool) -> Audit:
    """The audit, traced for the least number of rows that the function takes."""
    split = step.strategy.placement.row_shards
    total = len(feed.batches(step.batch, 1))
    called_with = min(-(-total // calls), total // 2)
    called_with -= 0 if pads else called_with % split  # what is dropped is not padded
    if not called_with:
        raise NotAudited(
            f"The audit compares two towers, and the batch has {total} rows, too few"
            f" for both. Give {2 * split}."
        )
    *few, most = dict.fromkeys([max(min(called_with, _ROWS), 2), called_with])
    for size in few:
        try:
            return Audit(step, size + -size % split, pads=pads)
        except NotAudited:
            pass
    return Audit(step, most + -most % split, pads=pads)


def _on_host(batch: PyTree) -> PyTree:
    """The examples of a batch, as they were before they were placed."""
    if not isinstance(batch, PlacedBatch):
        return batch
    arrays, _, held = jax.tree.map(copy_to_host, batch.args)
    if splits_entries(arrays):
        raise NotAudited(
            "The audit of a placed batch with sparse leaves, whose entries are split."
            " Give the batch as it was before, step.audit(state, batch)."
        )
    is_example = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)
    arrays = jax.tree.map(lambda x: x[is_example], arrays)
    values = iter(held)
    return map_parts(Whole, lambda _: Whole(next(values)), arrays)
