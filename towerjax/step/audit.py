"""The audit: run the towers of a step as two and as one, and compare what is merged."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.sparse_rows import is_rows, splits_entries
from towerjax.data import feed
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.mesh.transfer import copy_to_host, place
from towerjax.metrics.state import compute, has_value
from towerjax.metrics.weighted import Means
from towerjax.proof.equation import Site, open_jaxpr, sub_jaxprs, user_line
from towerjax.step.comparison import (
    AuditReport,
    Compared,
    Finding,
    Leaves,
    SplitError,
    judge,
)
from towerjax.step.programs import refuse_unread_weight
from towerjax.step.prove import prove
from towerjax.step.returned import is_typed, key_name, without_padding
from towerjax.step.state import STATE_LAYOUT, TrainState, split_state
from towerjax.step.trace import trace
from towerjax.towers.row_free_keys import row_free_key
from towerjax.towers.strategies import Strategy, on_one_group
from towerjax.towers.variables import TowerLocal, read_local
from towerjax.types import PerTower, PyTree, Reduction, Rows, Whole, named_leaves
from towerjax.types.leaves import is_key, listed, map_parts

DRAWS = 0x45A319E6, 0xD413A7C2
"""Two draws of every element: one that a dropout keeps, and one that it drops."""


class Towers:
    """The passes of a step on so many towers of one device; their merged values.

    Each tower function is called once a tower: micro-batches are towers in turn. Rows
    are padded to so many that ``calls`` share, at least to ``rows``.
    """

    def __init__(
        self, engine: Any, strategy: Strategy, towers: int, *, calls: int, rows: int
    ) -> None:
        alike = on_one_group(strategy, towers)
        self.rows, self._placement = rows, alike.placement
        self._placer = Placer(self._placement, remainder="pad", calls=calls)
        self._placer.expect([rows])
        self._engine = engine.on(alike)
        # A few runs of few rows: what XLA would gain by optimising, it takes to do so.
        options: Any = {"xla_backend_optimization_level": 0}
        on_cpus = self._placement.platform == "cpu"
        how: Any = {"compiler_options": options if on_cpus else None}
        self._fn = jax.jit(self._merge_all, **how)
        self.lints: dict[str, None] = {}
        self.jaxpr: Any = None
        self._proof: Any = None

    def __call__(
        self, state: TrainState, rows: PyTree, order: np.ndarray | None = None
    ) -> Leaves:
        """What is merged of these rows, by leaf; ``Rows`` without their ``order``."""
        state = place(state, self._placement, STATE_LAYOUT, state.params)
        donated, kept = split_state(state)
        placed = self._placer.place(rows)
        args = (donated, kept, *placed.args)
        # What the proof warns of, it warns of in the step itself, too.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with jax.default_matmul_precision("highest"):
                if self.jaxpr is None:
                    self.jaxpr = self._fn.trace(*args).jaxpr.jaxpr
                merged = self._fn(*args)
        self.lints |= dict.fromkeys(str(warning.message) for warning in caught)
        refuse_unread_weight(placed, self._proof)
        return _leaves_of(merged, placed, order)

    def _merge_all(self, *args: PyTree) -> list[PyTree]:
        """What is merged by each pass, in a trace, which proves it."""
        traced = trace(self._engine.merging(), args)
        self._proof = prove(traced)
        return traced(*args)


def run_audit(
    engine: Any,
    strategy: Strategy,
    state: TrainState,
    batch: PyTree,
    *,
    parts: int,
    pads: bool,
) -> AuditReport:
    """Compare two towers with one tower of the rows of both, on one device.

    The rows are the batch's first, for each of the two so many as a tower function is
    called with, in one of ``parts`` calls. Where batches may be padded, they are
    compared once more with half as many for the second, and with more padding on the
    one tower: what counts padding differs.
    """
    rows = _on_host(batch)
    total = len(feed.batches(rows, 1))
    each, split = min(-(-total // parts), total // 2), strategy.placement.row_parts
    each -= 0 if pads else each % split  # what is dropped is not padded
    if not each:
        raise ValueError(
            f"The audit compares two towers, and the batch has {total} rows, too few"
            f" for both. Give {2 * split}."
        )
    padded = each + -each % split
    of_one = Towers(engine, strategy, 1, calls=1, rows=(3 if pads else 2) * padded)
    of_two = Towers(engine, strategy, 2, calls=2, rows=2 * padded)
    second = ("unevenly", each + each // 2) if pads else ("evenly", 2 * each)
    splits = [("evenly", 2 * each), second]

    def runs(of_one: Towers = of_one, **draws: Any) -> Iterator[Compared]:
        for (name, count), word in zip(splits, DRAWS, strict=True):
            given = next(iter(feed.batches(rows, count)))
            key = row_free_key(word, **draws)
            alone, both = (of_towers(state, number, key) for number in (1, 2))
            want, near = of_one(alone, given), of_one(rounded(alone), given)
            yield Compared(2, name, of_two(both, given), want, near)

    try:
        return judge([*runs()], of_one.jaxpr, 2 * each)
    except SplitError as error:
        without = {_FROM_SHARED: runs(shared=False)}
        if pads:
            as_two = Towers(engine, strategy, 1, calls=1, rows=2 * padded)
            without[_OF_PADDING] = runs(as_two)
        told, left = _advise_by_runs(error.findings, of_one.jaxpr, without)
        told += [*_advise_by_numbers(left), *of_two.lints]
        told += _advise_by_lines(of_one.jaxpr, of_one.rows)
        raise SplitError(error.findings, [*told, _INSTEAD]) from None


def _on_host(batch: PyTree) -> PyTree:
    """The examples of a batch, as they were before they were placed."""
    if not isinstance(batch, PlacedBatch):
        return batch
    arrays, _, held = jax.tree.map(copy_to_host, batch.args)
    if splits_entries(arrays):
        raise ValueError(
            "The audit of a placed batch with sparse leaves, whose entries are split."
            " Give the batch as it was before, step.audit(state, batch)."
        )
    is_example = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)
    arrays = jax.tree.map(lambda x: x[is_example], arrays)
    values = iter(held)
    return map_parts(Whole, lambda _: Whole(next(values)), arrays)


def of_towers(state: TrainState, number: int, key: jax.Array) -> TrainState:
    """The state of its first two towers, or of one tower in their place."""

    def of(variable: TowerLocal) -> TowerLocal:
        def rows(x: Any) -> Any:
            x = copy_to_host(x)
            return x[np.minimum(np.arange(2), len(x) - 1)]

        two = jax.tree.map(rows, variable.value)
        if number == 2:
            return dataclasses.replace(variable, value=two)
        if variable.reduction is Reduction.NONE:
            as_one = jax.tree.map(lambda x: x[:1], two)
        else:
            both = dataclasses.replace(variable, value=jax.tree.map(jnp.asarray, two))
            as_one = jax.tree.map(lambda x: x[None], read_local(both))
        return dataclasses.replace(variable, value=as_one)

    local = map_parts(TowerLocal, of, state.local)
    return dataclasses.replace(state, local=local, rng=key)


def rounded(state: TrainState) -> TrainState:
    """The state with its parameters changed in their last bit, to and fro."""

    def near(x: Any) -> Any:
        x = copy_to_host(x)
        if not np.issubdtype(x.dtype, np.inexact) or x.dtype.itemsize < 4:
            return x
        signs = 1 - 2 * (np.arange(x.size).reshape(x.shape) % 2)
        return (x * (1 + np.finfo(x.dtype).eps * signs)).astype(x.dtype)

    return dataclasses.replace(state, params=jax.tree.map(near, state.params))


def _leaves_of(
    merged: Sequence[PyTree], placed: PlacedBatch, order: np.ndarray | None
) -> Leaves:
    """What each pass merged, by leaf name, on the host."""
    leaves: Leaves = {}
    sort = slice(None) if order is None else np.argsort(order)

    def in_order(rows: Rows) -> PyTree:
        return jax.tree.map(lambda x: x[sort], without_padding(rows, placed))

    for number, tree in enumerate(merged, 1):
        prefix = f"pass {number}: " if len(merged) > 1 else ""
        tree = map_parts(Rows, in_order, tree)
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_one)
        for path, leaf in pairs:
            first = key_name(path[0]) if path else "result"
            root = "gradient" if first == "grads" else first
            name = prefix + root + jax.tree_util.keystr(path[1:])
            named = named_leaves(name, _value_of(leaf), is_leaf=lambda x: x is None)
            leaves |= {each: as_reals(x) for each, x in named}
    return leaves


def _is_one(x: Any) -> bool:
    return is_typed(x) or isinstance(x, Means)


def _value_of(leaf: Any) -> PyTree:
    """The leaf as one value; None where each tower has its own."""
    is_own = isinstance(leaf, TowerLocal) and leaf.reduction is Reduction.NONE
    if is_own or isinstance(leaf, PerTower) or getattr(leaf, "counts_towers", False):
        return None
    if isinstance(leaf, TowerLocal):
        leaf = read_local(leaf)
    elif has_value(leaf) or isinstance(leaf, Means):
        leaf = compute(leaf)
    dense = lambda x: x.to_dense() if is_rows(x) else x  # noqa: E731
    return jax.tree.map(dense, leaf, is_leaf=is_rows)


def as_reals(x: Any) -> np.ndarray | None:
    """The array in float64; real and imaginary parts stacked; None of a key or None."""
    if x is None or is_key(x):
        return None
    x = np.asarray(x)
    return np.asarray(np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x, float)


_INSTEAD = (
    "Return sums with their weights, tj.Weighted.mean(values, tower.weight), and"
    " tj.metrics. What a row needs of all rows, take over all towers, with"
    " tower.all_gather and tower.reduce, or from an earlier pass of tj.build_step; what"
    " is made of a gradient, such as its norm, make in the update, of the merged one."
)
# What runs along a dim, or orders it: of rows it is another for each tower's own.
_ALONG = {
    "sort": "sorts",
    "top_k": "takes the largest of",
    "approx_top_k": "takes the largest of",
    "rev": "reverses",
    "scan": "goes through",
    "argsort": "sorts",
    "argmax": "takes the largest of",
    "argmin": "takes the smallest of",
    "reduce_max": "takes the largest of",
    "reduce_min": "takes the smallest of",
}
_ALONG |= dict.fromkeys(
    ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "accumulates"
)


_FROM_SHARED = (
    "rows draw from tower.shared_rng, of which all towers draw the same. Draw what rows"
    " have of their own from tower.rng."
)
_OF_PADDING = (
    "padded rows count, of which the one tower has more. Divide sums of rows by the sum"
    " of tower.weight, and not by a number of rows, as .mean() does."
)


def _advise_by_runs(
    findings: Sequence[Finding], jaxpr: Any, without: dict[str, Iterator[Compared]]
) -> tuple[list[str], list[Finding]]:
    """The causes without which leaves are the same; the findings that have none."""
    told, left = [], [*findings]
    for cause, runs in without.items():
        differ = set[str]()
        try:
            judge([*runs], jaxpr, examples=0)  # whose report nobody reads
        except SplitError as other:
            differ = {finding.leaf for finding in other.findings}
        if mended := sorted({x.leaf for x in findings} - differ):
            told.append(f"{listed(mended)}: {cause}")
            left = [x for x in left if x.leaf in differ]
    return told, left


def _advise_by_numbers(findings: Sequence[Finding]) -> list[str]:
    told = []
    for factor, text in {
        0.5: "half of it on two towers, as of a sum whose weight is no sum: return"
        " tj.Weighted(sum, weight) with the weights of the same rows, or tj.Sum(x)"
        " for a total",
        2.0: "twice as much on two towers, as of a mean that is added: return it as"
        " tj.Weighted(sum, weight), and divide gradients once, grads.value after the"
        " merge",
    }.items():
        names = [x.leaf for x in findings if _is_times(x, factor)]
        told += [f"{listed(names)}: {text}."] if names else []
    if findings and all(x.split == "unevenly" for x in findings):
        told.append(
            "Where towers have as many rows each they agree: a mean of each tower's"
            " mean counts a tower of few rows as much as one of many."
        )
    return told


def _is_times(finding: Finding, factor: float) -> bool:
    expected = factor * finding.one_tower
    return abs(finding.value - expected) <= 1e-4 * abs(expected) > 0


def _advise_by_lines(jaxpr: Any, rows: int) -> list[str]:
    """The lines that may depend on which rows a tower has, and in which order."""
    lines: dict[str, None] = {}
    for site in _sites(jaxpr):
        name = site[0].primitive.name
        if name in _ALONG and _size_along(site[0]) == rows and (at := user_line(site)):
            lines[f"{at} {_ALONG[name]} a tower's own rows ({name})."] = None
    return [*lines][:3]


def _sites(jaxpr: Any, outer: Site | None = None) -> Iterator[Site]:
    """All equations, each with those around it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        site = (eqn, outer)
        yield site
        for inner in sub_jaxprs(eqn):
            yield from _sites(inner, site)


def _size_along(eqn: Any) -> int | None:
    """The size of the dim that an equation goes along."""
    params, shape = eqn.params, getattr(eqn.invars[0].aval, "shape", ())
    if "length" in params:
        return params["length"]
    axes = [params.get(x) for x in ("axis", "dimension", "axes", "dimensions")]
    given = next((x for x in axes if x is not None), -1)
    axis = given[0] if isinstance(given, tuple) else given
    return shape[axis] if shape else None
