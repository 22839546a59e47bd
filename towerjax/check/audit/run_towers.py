"""Run a step's passes on several towers of one device, and return what they merge."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.sparse_rows import is_rows
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.mesh.private_jax import least_effort
from towerjax.mesh.transfer import copy_to_host, place
from towerjax.metrics.state import compute, has_value
from towerjax.metrics.weighted import Means
from towerjax.prover.comparison import (
    Compared,
    Leaves,
    NotAudited,
    as_reals,
    nonfinite_loss,
    refuse_random,
    rounded,
    rounding_of,
    rounding_of_dtypes,
)
from towerjax.prover.leaf_name import LeafName, LeafPart
from towerjax.step.passes.accumulators import is_typed
from towerjax.step.plan import Passes, Plan
from towerjax.step.run.masks import refuse_unmasked
from towerjax.step.run.trace import Traced, trace
from towerjax.step.state.train_state import STATE_LAYOUT, TrainState, split_state
from towerjax.towers.row_free_keys import row_free_key
from towerjax.towers.strategies import Strategy, on_one_group
from towerjax.towers.variables import TowerLocal, read_local
from towerjax.types import PerTower, PyTree, Reduction, Rows
from towerjax.types.trees import is_key, map_parts

DRAWS = 0x45A319E6, 0xD413A7C2
"""Numbers to make draws from: dropout keeps all by the first, none by the second."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowsToRun:
    """Rows to run, and the number (``word``) from which all random draws are made."""

    name: str
    rows: PyTree
    word: int = DRAWS[0]
    order: np.ndarray | None = None  # the index in the batch of each row
    shared: bool = True  # whether there is a key that all towers share
    step: int | None = None  # the step's number, if it is not the state's
    moves: bool = False  # whether the state's parameters are moved at random
    # Whether each tower has the variables that these rows give it in a step before.
    drifts: bool = False
    is_short: bool = False  # whether there are padding rows
    # Whether the audit made the rows. A loss of one tower that is not finite is then
    # no error: the split is left out.
    is_made: bool = False


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merged value of each leaf, with tolerances for the rounding of some sums."""

    values: Leaves
    rtols: dict[str, float]


class Towers:
    """The passes of a step on ``number`` towers of one device.

    The tower function is called once per tower, and a tower's micro-batches are run as
    towers. Rows are padded to a number that all towers share evenly, at least to
    ``rows``. ``passes`` are used in place of the plan's passes. If a tower of the step
    has several devices, a tower here has all of them, or with ``narrow`` only one.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        number: int,
        state: TrainState,
        *,
        rows: int,
        passes: Passes | None = None,
        narrow: bool = False,
    ) -> None:
        on_group = on_one_group(strategy, number, narrow=narrow)
        self.number = number
        self.rows = rows
        # With ``passes`` only a loss is run. Its program is small and compiles fast, so
        # the compiler may take more effort.
        self._effort = 0 if passes is None else 1
        self._placement = on_group.placement
        self._placer = Placer(self._placement, remainder="pad", calls=number)
        self._placer.expect([rows])
        plan = dataclasses.replace(plan, passes=passes or plan.passes)
        self._plan = plan.towers_on(on_group).merging()
        of_towers = dataclasses.replace(state, local=_local_of(state.local, number))
        self.state = place(of_towers, self._placement, STATE_LAYOUT, state.params)
        self._known: dict[RowsToRun, Merged] = {}
        self.traced: Traced | None = None
        self._was_repeated = False

    def trace(self, split: RowsToRun) -> Traced:
        """Trace the passes, in the first call only."""
        if self.traced is None:
            if why := self._plan.passes.why_not_audited:
                raise NotAudited(why)
            with jax.default_matmul_precision("highest"):
                self.traced = trace(self._plan, self._args(split, self.state)[0])
            self.rtol = rounding_of(x.towers.jaxpr for x in self.traced.passes)
            options = least_effort(self._placement.platform, self._effort)
            self._fn = jax.jit(self.traced, compiler_options=options)
        return self.traced

    def __call__(self, split: RowsToRun) -> Merged:
        """Give the merged results for these rows; each split is run only once."""
        if split not in self._known:
            self._known[split] = self.run(split)
        return self._known[split]

    def run(self, split: RowsToRun, params: PyTree = None) -> Merged:
        """Run these rows, with ``params`` if given, and merge the results."""
        merged, placed = self._merged(split, params)
        return _leaves_of(merged, placed, split.order)

    def _merged(
        self, split: RowsToRun, params: PyTree
    ) -> tuple[Sequence[PyTree], PlacedBatch]:
        """Run these rows: what each pass merges, and the rows as placed."""
        self.trace(split)
        args, placed = self._args(split, self._state_for(split, params))
        with jax.default_matmul_precision("highest"):
            return jax.device_get(self._fn(*args)), placed

    def nearby(self, split: RowsToRun) -> list[Leaves]:
        """Run inputs whose rounding errors were changed.

        The results show how much rounding matters. Raise if a run with the same inputs
        differs.
        """
        if not self._was_repeated:
            refuse_random(self.run(split).values, self(split).values)
            self._was_repeated = True
        params = self._params_for(split)
        near = []
        for step in (1, -1, 2):
            by = step * self.rtol / 8 if self.rtol > 1e-4 else step * 2.0**-23
            again = functools.partial(rounded, by=by, least_bytes=2)
            rows = dataclasses.replace(split, rows=again(split.rows, only_broken=True))
            near.append(self.run(rows, again(params)).values)
        return near

    def prove(self, split: RowsToRun) -> None:
        """Raise for what a step on these towers refuses, or if a sum has padding."""
        placed = self._args(split, self.state)[1]
        traced = self.trace(split)
        if placed.padded:
            refuse_unmasked(placed.num_examples, traced.proof.unmasked())

    def _params_for(self, split: RowsToRun) -> PyTree:
        """Copy to the host the parameters with which these rows are run."""
        params = jax.tree.map(copy_to_host, self.state.params)
        return _moved(params) if split.moves else params

    def _state_for(self, split: RowsToRun, params: PyTree) -> TrainState:
        """Make the state with which these rows are run."""
        state = self.state
        if split.step is not None:
            step = np.asarray(split.step, state.step.dtype)
            step = place(step, self._placement, STATE_LAYOUT.step)
            state = dataclasses.replace(state, step=step)
        if params is None and split.moves:
            params = self._params_for(split)
        if params is not None:
            state = dataclasses.replace(
                state,
                params=place(params, self._placement, STATE_LAYOUT.params, params),
            )
        if split.drifts:
            before = dataclasses.replace(split, drifts=False)
            [*_, merged] = self._merged(before, params)[0]
            after = dataclasses.replace(state, local=merged["local"])
            state = place(after, self._placement, STATE_LAYOUT, state.params)
        return state

    def _args(
        self, split: RowsToRun, state: TrainState
    ) -> tuple[tuple[PyTree, ...], PlacedBatch]:
        key = row_free_key(split.word, shared=split.shared)
        placed = self._placer.place(split.rows)
        keyed = dataclasses.replace(state, rng=key)
        return (*split_state(keyed), *placed.args), placed


def compare(
    one_tower: Towers,
    several: Sequence[Towers],
    splits: Sequence[tuple[RowsToRun, RowsToRun]],
) -> Iterator[Compared]:
    """Yield the results of one tower and of several towers for pairs of splits.

    One tower runs the first split of a pair, and the others run the second. Rows that
    the audit made are left out if the loss of one tower is not finite.
    """
    for alone, together in splits:
        whole = one_tower(alone)
        if loss := nonfinite_loss(whole.values):
            if alone.is_made:
                continue
            raise NotAudited(loss)
        near = functools.cache(functools.partial(one_tower.nearby, alone))
        for towers in several:
            got = towers(together).values
            yield Compared(
                towers.number, together.name, got, whole.values, near, whole.rtols
            )


def _local_of(local: PyTree, number: int) -> PyTree:
    """Give ``number`` towers the step's tower-local variables.

    Several towers get the variables of the first towers. One tower gets the value that
    two towers' variables are read as.
    """

    def of(variable: TowerLocal) -> TowerLocal:
        def rows(x: Any) -> Any:
            x = copy_to_host(x)
            return x[np.minimum(np.arange(max(number, 2)), len(x) - 1)]

        value = jax.tree.map(rows, variable.value)
        if number > 1:
            return dataclasses.replace(variable, value=value)
        if variable.reduction is Reduction.NONE:
            as_one = jax.tree.map(lambda x: x[:1], value)
        else:
            both = dataclasses.replace(variable, value=jax.tree.map(jnp.asarray, value))
            as_one = jax.tree.map(lambda x: x[None], read_local(both))
        return dataclasses.replace(variable, value=as_one)

    return map_parts(TowerLocal, of, local)


def _moved(tree: PyTree) -> PyTree:
    """Add random numbers to parameters, of about a fifth of their size.

    Parameters that are 0 move, too.
    """
    draw = np.random.default_rng(0)

    def elsewhere(x: Any) -> Any:
        if is_key(x) or not jnp.issubdtype(np.asarray(x).dtype, jnp.floating):
            return x
        x = np.asarray(x)
        wide = np.asarray(x, np.float32)
        size = float(np.abs(wide).mean()) if x.size else 0.0
        by = 2 * draw.random(x.shape, np.float32) - 1
        return (wide + (0.2 * size if size > 1e-3 else 0.1) * by).astype(x.dtype)

    return jax.tree.map(elsewhere, tree)


def _leaves_of(
    merged: Sequence[PyTree], placed: PlacedBatch, order: np.ndarray | None
) -> Merged:
    """Name the merged results of all passes by leaf; rows in the batch's order."""
    leaves = Leaves()
    rtols = dict[str, float]()
    places = np.flatnonzero((np.arange(placed.rows) < placed.counts[:, None]).ravel())
    places = places if order is None else places[np.argsort(order)]

    def in_order(rows: Rows) -> PyTree:
        return jax.tree.map(lambda x: x[places], rows.value)

    for number, tree in enumerate(merged, 1):
        tree = map_parts(Rows, in_order, tree)

        def is_one(x: Any) -> bool:
            return is_typed(x) or isinstance(x, Means)

        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one)
        for path, leaf in pairs:
            name = LeafName.at(path)
            name = name.in_pass(number) if len(merged) > 1 else name
            values = _reals(name, _value_of(leaf))
            leaves |= values
            if name.part is not LeafPart.GRADIENT:
                rtols |= dict.fromkeys(values, _rounding_of_sums(leaf))
    return Merged(leaves, rtols)


def _rounding_of_sums(leaf: Any) -> float:
    """Find the tolerance for the rounding of a merged sum by the leaf's dtype."""
    dtypes = {str(getattr(x, "dtype", None)) for x in jax.tree.leaves(leaf)}
    return rounding_of_dtypes(dtypes)


def _value_of(leaf: Any) -> PyTree:
    """Read the leaf as one value; None if each tower has a value of its own."""
    is_own = isinstance(leaf, TowerLocal) and leaf.reduction is Reduction.NONE
    if is_own or isinstance(leaf, PerTower) or getattr(leaf, "counts_towers", False):
        return None
    if isinstance(leaf, TowerLocal):
        return read_local(jax.tree.map(jnp.asarray, leaf))
    return compute(leaf) if has_value(leaf) or isinstance(leaf, Means) else leaf


def _reals(name: LeafName, value: PyTree) -> Leaves:
    """Name the leaves of a value, as dense real arrays."""

    def dense(x: Any) -> Any:
        return x.to_dense() if is_rows(x) else x

    value = jax.tree.map(dense, value, is_leaf=is_rows)
    pairs = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: x is None)
    return {name.within(path): as_reals(x) for path, x in pairs}
