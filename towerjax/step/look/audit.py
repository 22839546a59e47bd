"""The audit: run the towers of a step as two and as one, and compare what is merged."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from towerjax.collectives.sparse_rows import splits_entries
from towerjax.data import feed
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.processes import call_on_first_process
from towerjax.mesh.transfer import copy_to_host
from towerjax.proof import tags
from towerjax.proof.equation import all_eqns, all_sites, named_axes, scopes_of
from towerjax.proof.findings import ReplicationError
from towerjax.step.look.advice import advise
from towerjax.step.look.audited import too_large
from towerjax.step.look.comparison import (
    RAISED_ON_OTHER_ROWS,
    AuditReport,
    Compared,
    NotAudited,
    SplitError,
    are_additive,
    compared_of,
    judge,
)
from towerjax.step.look.run_towers import DRAWS, RowsToRun, Towers, compare
from towerjax.step.run.engine import Engine
from towerjax.step.run.programs import refuse_padding
from towerjax.step.run.prove import prove
from towerjax.step.run.trace import Traced
from towerjax.step.state.train_state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree, Whole
from towerjax.types.leaves import map_parts

_ROWS = 6  # of each of two towers, where a function takes so few
_PERMUTED = 4  # more splits: what agrees by a chance of one half, by one of 32 in all


def run_audit(
    engine: Engine,
    strategy: Strategy,
    state: TrainState,
    batch: PyTree,
    *,
    parts: int,
    pads: bool,
) -> AuditReport:
    """Compare two towers with one tower of the rows of both, on one device.

    Where a tower is of several devices and one holds its parameters, too, the one tower
    is of one device: what is wrong in a `shard_map` over a tower's own axes differs.

    The rows are the batch's first: few, or where the function takes no few, as many as
    a tower function is called with, in one of ``parts`` calls; two at least. Where
    batches may be padded, they are compared once more with half as many for the second
    tower, and with more padding on the one: what counts padding differs. What is wrong
    because nothing in it says which rows are padding is compared without any, as is
    right for full batches: a padded one is refused.
    """
    rows = _on_host(batch)
    total, split = len(feed.batches(rows, 1)), strategy.placement.row_parts
    called_with = min(-(-total // parts), total // 2)
    called_with -= 0 if pads else called_with % split  # what is dropped is not padded
    if not called_with:
        raise NotAudited(
            f"The audit compares two towers, and the batch has {total} rows, too few"
            f" for both. Give {2 * split}."
        )
    sizes = [*dict.fromkeys([max(min(called_with, _ROWS), 2), called_with])]
    for size in sizes:
        each = size + -size % split
        audit = Audit(engine, strategy, state, rows, each=each, pads=pads)
        try:
            audit.trace()
        except NotAudited:
            if size == sizes[-1]:
                raise
        else:
            break
    try:
        return audit.run()
    except (NotAudited, SplitError) as error:
        unmasked = audit.unmasked()
        if unmasked and total % (parts * split):
            refuse_padding(total, unmasked)
        if unmasked or (pads and isinstance(error, NotAudited)):
            # What is wrong without padding is wrong, whatever padding gives.
            report = run_audit(engine, strategy, state, batch, parts=parts, pads=False)
            if unmasked:
                return report
        if isinstance(error, SplitError):
            raise advise(audit, error) from None
        raise


class Audit:
    """One audit, of ``each`` rows for either of two towers."""

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        state: TrainState,
        rows: PyTree,
        *,
        each: int,
        pads: bool,
    ) -> None:
        alone = None
        if engine.passes.is_of_one_loss:  # which reads no optimizer's state
            alone = engine.passes.changed(differentiates=False)
            state = dataclasses.replace(state, opt_state=())
        self.towers = functools.partial(Towers, engine, strategy, state=state)
        self.each, self.pads, self._alone = each, pads, alone
        self.is_own = alone is None  # what merges is not of a loss alone
        self._take, self._total = feed.rows_of(rows), len(feed.batches(rows, 1))
        one_tower = functools.partial(self.towers, 1, rows=(3 if pads else 2) * each)
        self.one_group = functools.cache(one_tower)
        fits = lambda: too_large(state.params, 1) is None  # noqa: E731
        is_wide = strategy.placement.devices_each > 1
        self.is_narrow = is_wide and call_on_first_process(fits)
        self.one_tower = one_tower(narrow=True) if self.is_narrow else self.one_group()
        self.first = self.split("evenly", np.arange(2 * each))

    def split(self, name: str, at: np.ndarray, **how: Any) -> RowsToRun:
        """These rows of the batch, which go round where it has fewer."""
        at = at % self._total
        return RowsToRun(name, self._take(at), order=at, **how)

    def trace(self) -> None:
        """Trace both numbers of towers, the second without gradients if it may be."""
        try:
            traced = self._traced(self.one_tower)
        except NotAudited:  # it may name how many devices its tower is of
            if not self.is_narrow:
                raise
            self.is_narrow, self.one_tower = False, self.one_group()
            traced = self._traced(self.one_tower)
        if _needs_gradients(traced):
            self._alone = None
        self.two_towers = self.towers(2, rows=2 * self.each, passes=self._alone)
        self._traced(self.two_towers)
        bodies, self.rtol = [x.towers.jaxpr for x in traced.passes], self.one_tower.rtol
        names = {x.primitive.name for body in bodies for x in all_eqns(body)}
        self.splits = [self.first]
        if self.pads or any(name.startswith("random_") for name in names):
            count = self.each + (self.each // 2 if self.pads else self.each)
            name = "unevenly" if self.pads else "evenly"
            self.splits.append(self.split(name, np.arange(count), word=DRAWS[1]))

    def _traced(self, towers: Towers) -> Traced:
        """These towers, traced; `NotAudited` where the function takes no such rows."""
        try:
            return towers.trace(self.first)
        except (NotAudited, ReplicationError):
            raise
        except RAISED_ON_OTHER_ROWS as error:
            lines = str(error).splitlines() or [""]
            what = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
            refused = NotAudited(f"traced for other rows and keys it raises {what}")
            for note in getattr(error, "__notes__", ()):
                refused.add_note(note)
            raise refused from error

    def run(self) -> AuditReport:
        """The report; raises where a leaf differs."""
        if self._alone is not None:
            if (report := self._run_cheaply()) is not None:
                return report
            self.two_towers = self.towers(2, rows=2 * self.each)
            self._traced(self.two_towers)
        return self._judged()

    def unmasked(self) -> list[str]:
        """What counts padded rows, since nothing in it says which ones they are."""
        return prove(self.one_tower.trace(self.first)).unmasked() if self.pads else []

    def _judged(self) -> AuditReport:
        """The report of the splits, and of the first one's rows in other orders.

        One tower need not be run on those, where its values are those of the first.
        """
        runs, permuted = self.compared(self.splits), self._permuted()
        self.judge(runs)
        others = [self.two_towers.run(split).values for split in permuted]
        alike = [runs[0]._replace(split="permuted", got=x) for x in others]
        try:
            return self.judge([*runs, *alike])
        except SplitError:
            return self.judge([*runs, *self.compared(permuted)])

    def compared(self, splits: list[RowsToRun]) -> list[Compared]:
        """The splits, on two towers and on one."""
        return [*compare(self.one_tower, [self.two_towers], [(x, x) for x in splits])]

    def judge(self, runs: list[Compared]) -> AuditReport:
        """The report of such runs; raises where a leaf differs."""
        return judge(runs, 2 * self.each, self.rtol)

    def without(self, names: list[str], one_tower: Towers, **draws: Any) -> list[str]:
        """Those of the leaves that are the same of other draws, or on other towers."""
        splits = [dataclasses.replace(x, **draws) for x in self.splits]
        try:
            self._traced(one_tower)
            runs = compare(one_tower, [self.two_towers], [(x, x) for x in splits])
            self.judge([*runs])
        except SplitError as error:
            differ = {finding.leaf for finding in error.findings}
            return [x for x in names if x not in differ]
        except NotAudited:
            return []
        return names

    def _run_cheaply(self) -> AuditReport | None:
        """The report where what is merged is a sum over rows, else None.

        The loss and metrics of two towers are run, and the gradient of one: where that
        is additive over rows, the gradient of a sum of losses is the sum of gradients.
        """
        at = np.arange(self.each)
        halves = [np.concatenate([x, x]) for x in (at, at + self.each)]
        halves = [self.one_tower(self.split("half", x)).sums for x in halves]
        whole = self.one_tower(self.first)
        if not are_additive(whole.sums, halves, self.rtol):
            return None
        try:
            report = self._judged()
        except SplitError:
            return None
        names = compared_of(whole.values)
        left = tuple(sorted(whole.values.keys() - set(names)))
        return dataclasses.replace(report, compared=names, not_compared=left)

    def _permuted(self) -> list[RowsToRun]:
        """Further splits of the same rows."""
        draw = np.random.default_rng(0)
        orders = [draw.permutation(2 * self.each) for _ in range(_PERMUTED)]
        return [self.split("permuted", at) for at in orders]


def _needs_gradients(traced: Traced) -> bool:
    """Whether the gradients of two towers say what the loss of two does not.

    Where towers meet, a rule of `jax.custom_vjp` says what a derivative is, or a user's
    `shard_map` adds up what a tower's devices have.
    """
    first, *others = traced.passes
    if others:
        return True
    body = first.towers.jaxpr
    if any(
        _is_of_own_rule(x) or x.primitive.name == "shard_map" for x in all_eqns(body)
    ):
        return True
    collectives = [x for x in all_sites(body) if named_axes(x[0])]
    return any(
        site[0].primitive.name != "axis_index"
        and tags.SUMMED_BY_STEP not in scopes_of(site)
        for site in collectives
    )


def _is_of_own_rule(eqn: JaxprEqn) -> bool:
    """Whether a rule of a `jax.custom_vjp` wrote it, which has the line of its call."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return any(frame.function_name == "custom_vjp.__call__" for frame in frames)


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
