"""The cause of a difference that an audit found, and one remedy."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from towerjax.check.audit.kept import program_hash
from towerjax.check.audit.later_batches import AFTER_A_STEP
from towerjax.check.audit.run_towers import Towers
from towerjax.check.audit.two_towers import Audit
from towerjax.check.equality.of_step import (
    StepToProve,
    advice_on_bare_loss,
    equalities_of,
)
from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import Site, all_sites, user_line
from towerjax.prover.comparison import Finding, SplitError
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.leaf_name import LeafPart, leaf_of, part_of
from towerjax.step.run.trace import Traced
from towerjax.towers.row_free_keys import KEY_NAME
from towerjax.towers.variables import TowerLocal
from towerjax.types import PyTree, Reduction
from towerjax.types.refusals import listed

# These primitives combine the elements along a dim, or sort them. Along the dim of
# rows, the result depends on which rows a tower has.
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

_OF_DRAWS = (Reason.DRAWS_OF_NO_ROW, Reason.SAME_DRAWS)

_TRANSPOSED = "transpose"  # in the name stack of an equation of a backward pass


class Advice(NamedTuple):
    """The reason why leaves differ, and what to write instead."""

    cause: str
    remedy: str


_FOR_BATCH_NORM = "For batch norm use TowerBatchNorm, of towerjax.layers.batch_norm."
_BY_SHARED_KEY = Advice(
    "rows draw from tower.shared_rng, with which all towers draw the same numbers",
    "Draw the random numbers of rows from tower.rng.",
)
_BY_OWN_KEY = Advice(
    "rows draw from a key that the function makes, with which all towers draw the same"
    " numbers",
    "Draw from tower.rng.",
)
_BY_PADDING = Advice(
    "padded rows count, and the one tower has more of them",
    "Divide sums over rows by the sum of tower.weight, not by the number of rows as"
    " .mean() does.",
)
_BY_ANOTHER_TRACE = Advice(
    "the function gives a different program when it is traced again: it reads a number"
    " of np.random, a counter or another Python variable",
    "Draw from tower.rng, count with tower.step, and pass values that change in the"
    " batch, as tj.Whole(x).",
)
_BY_UNEVEN_ROWS = Advice(
    "towers agree if they have equally many rows, so it may be a mean of each tower's"
    " mean, in which a tower of few rows counts as much as one of many",
    "Return the sum with its weight, tj.Weighted.mean(values, tower.weight).",
)
_BY_OWN_GRADIENT = Advice(
    "the loss is the same, so a function of a tower's own gradient (a clip, a norm, a"
    " sign, the rule of a jax.custom_vjp) is added up",
    "Apply that function to the merged gradient, in the update:"
    " optax.chain(optax.clip_by_global_norm(1.0), ...), or update_fn of tj.build_step.",
)
_BY_FIRST_TOWER = Advice(
    "it keeps what the first tower computed from its own rows (ONLY_FIRST_TOWER)",
    "Compute it from all rows, with tower.mean(x, tower.weight, axis=0) for the mean"
    " row, or use tj.Reduction.MEAN. If each tower's own value is meant, use"
    " tj.Reduction.NONE.",
)
_BY_DRIFT = Advice(
    "it reads a tower-local variable, which differs between towers after one step",
    "Compute the variable from all rows, with tower.mean, or in a layer that takes"
    " cross_replica_axis=tower.axis_names, and keep it in extra=. What only an"
    " evaluation reads may be tower-local.",
)
_BY_CROSSED_ROWS = Advice(
    "rows of shape [b] meet rows of shape [b, 1], which makes [b, b]",
    "Give both the same shape, with values[:, 0] or targets[:, None].",
)
_BY_DEVICES = Advice(
    "a tower of several devices gives another value than one device",
    "In a jax.shard_map over a tower's own axes, add up each device's values exactly"
    " once, with lax.psum, and divide afterwards.",
)
_BY_OWN_ROWS = Advice(
    "it is computed from the rows of one tower alone, or from tower.id or"
    " tower.num_towers",
    "If a row needs a value of all rows, compute it over all towers, with"
    " tower.mean(x, tower.weight, axis=0), the mean row of an array (without axis=0 it"
    " is one number), tower.all_gather or tower.reduce, or in an earlier pass of"
    " tj.build_step. Return sums with their weights, tj.Weighted.mean(values,"
    " tower.weight). If each tower's own value is meant, return tj.PerTower(x)."
    f" {_FOR_BATCH_NORM}",
)
_BY_OWN_MEAN = Advice(
    "it is computed from a mean over the rows of one tower",
    "Take the mean over the rows of all towers, tower.mean(x, tower.weight), or with"
    " axis=0 the mean row; or compute each row's value and return"
    f" tj.Weighted.mean(values, tower.weight). {_FOR_BATCH_NORM}",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What an audit found, and the program in which its cause is looked for.

    Attributes:
      audit: The audit that found the leaves.
      findings: The leaves that differ.
      sites: The equations of one tower's program.
    """

    audit: Audit
    findings: Sequence[Finding]
    sites: list[Site]

    @property
    def names(self) -> list[str]:
        """The names of the leaves that differ."""
        return [x.leaf for x in self.findings]

    @functools.cached_property
    def equalities(self) -> list[Equality]:
        """The proof's results for the rows of the audit."""
        step = self.audit.step
        return equalities_of(
            StepToProve(
                step.plan,
                step.strategy,
                step.state,
                step.batch,
                rows=self.audit.tower_rows,
                padded=self.audit.pads,
            )
        )

    @functools.cached_property
    def unproved(self) -> Sequence[Equality]:
        """The proof's results for leaves at which it stopped.

        A first call knows this. Otherwise the rows of the audit are proved.
        """
        unknown = [x for x in self.equalities if x.says is Says.UNKNOWN]
        return self.audit.step.unproved or unknown

    def without(self, one_tower: Towers, **draws: Any) -> list[str]:
        """Run one tower in another way, and list the leaves that then agree.

        ``one_tower`` is that tower, and ``draws`` are changes of its rows' random
        draws.
        """
        return self.audit.without(self.findings, one_tower, **draws)


class Explained(NamedTuple):
    """The leaves that one cause explains, with the advice for them."""

    leaves: list[str]
    advice: Advice


def advise(audit: Audit, error: SplitError) -> SplitError:
    """Explain an audit's `SplitError` by its cause, and name a remedy.

    The cause is the first of `_CAUSES` that explains any of the leaves.
    """
    sites = _sites_of(audit.one_tower.trace(audit.from_batch.first))
    case = Case(audit, error.findings, sites)
    leaves, advice = next(filter(None, (cause(case) for cause in _CAUSES)))
    is_of_all = len(leaves) == len(error.findings)
    text = f"{listed(leaves)}: {advice.cause}"
    text = advice.cause[:1].upper() + advice.cause[1:] if is_of_all else text
    said = _said_of_bare_loss(case, leaves, advice)
    if audit.step.strategy.num_towers == 1:
        said += [
            "This step has one tower; the audit gave its rows to two, which is how its"
            " micro-batches, or a later run on two towers, would split them."
        ]
    return SplitError(error.findings, [f"{text}.", *said, advice.remedy])


def _said_of_bare_loss(case: Case, leaves: Sequence[str], advice: Advice) -> list[str]:
    """Hint at ``loss_reduction=`` if a bare loss differs.

    A gradient that differs counts as well, because it has the error of its loss.
    """
    passes = case.audit.step.plan.passes.each
    said = [x.loss_reduction for x in passes if x.loss_reduction is not None]
    is_of_loss = any(part_of(x) is not LeafPart.OTHER for x in leaves)
    is_told = "loss_reduction=" in advice.remedy
    return [advice_on_bare_loss(said[0])] if said and is_of_loss and not is_told else []


def _crossed(case: Case) -> Explained | None:
    """Name an equation that combines each row with all rows, by a slip of shapes."""
    crossed = [*crossed_rows(case.sites, case.audit.one_tower.rows)]
    advice = _with_lines(_BY_CROSSED_ROWS, crossed)
    return Explained(case.names, advice) if crossed else None


def _traced_anew(case: Case) -> Explained | None:
    """Explain the leaves by a function that gives another program when traced again."""
    audit = case.audit
    traced = audit.one_tower.trace(audit.from_batch.first)
    again = audit.new_tower(narrow=audit.is_narrow).trace(audit.from_batch.first)
    if program_hash(traced) == program_hash(again):
        return None
    pairs = zip(case.sites, _sites_of(again), strict=False)
    parted = (x for x, y in pairs if _numbers_of(x) != _numbers_of(y))
    first = itertools.islice(parted, 1)
    return Explained(case.names, _with_lines(_BY_ANOTHER_TRACE, first))


def _refuted(case: Case) -> Explained | None:
    """Explain the leaves that the proof refutes, because they are off by a factor.

    A gradient is off by the factor of its loss.
    """
    known = dict[str, Advice]()
    refuted = _refuted_in(case)
    for name in case.names:
        follows = part_of(name) is LeafPart.GRADIENT and not case.audit.is_own
        for x in refuted:
            leaf = leaf_of(x.leaf)
            if leaf.part is LeafPart.LOSS if follows else leaf_of(name).holds(leaf):
                known.setdefault(name, Advice(x.why, x.advice))
    if not known:
        return None
    first, *_ = known.values()
    return Explained([x for x, advice in known.items() if advice == first], first)


def _refuted_in(case: Case) -> list[Equality]:
    """List the proof's results for the leaves that it refutes."""
    return [x for x in case.equalities if x.says is Says.REFUTED]


def _of_several_devices(case: Case) -> Explained | None:
    """Explain the leaves that agree if the one tower, too, has several devices."""
    if not case.audit.is_narrow:
        return None
    mended = case.without(case.audit.new_tower())
    return Explained(mended, _BY_DEVICES) if mended else None


def _of_a_shared_key(case: Case) -> Explained | None:
    """Explain the leaves that agree if towers get no random key that all share."""
    if not _stopped_at_draws(case):
        return None
    mended = case.without(case.audit.one_tower, shared=False)
    advice = _with_lines(_BY_SHARED_KEY, _draws_in(case))
    return Explained(mended, advice) if mended else None


def _of_an_own_key(case: Case) -> Explained | None:
    """Explain the leaves by a random key that the tower function makes by itself."""
    draws = [x for x in _draws_in(case) if KEY_NAME not in str(x[0].invars[0].aval)]
    advice = _with_lines(_BY_OWN_KEY, draws)
    leaves = _stopped_at_draws(case) if any(map(user_line, draws)) else []
    return Explained(leaves, advice) if leaves else None


def _stopped_at_draws(case: Case) -> list[str]:
    """List the leaves whose proof stopped at a draw that belongs to no row.

    No other draw is blamed: a key that differs from row to row may be made anywhere.
    """
    found = {name: _stop_of(case, name) for name in case.names}
    return [name for name, x in found.items() if x and x.reason in _OF_DRAWS]


def _draws_in(case: Case) -> list[Site]:
    """List the equations of the tower's program that draw random numbers."""
    return [x for x in case.sites if x[0].primitive.name == "random_bits"]


def _of_padding(case: Case) -> Explained | None:
    """Explain the leaves that agree if the one tower has no more padding than two."""
    if not case.audit.pads:
        return None
    # This one tower has as much padding as the two towers have together.
    mended = case.without(case.audit.towers(1))
    if not mended:
        return None
    stop = next(filter(None, (_stop_of(case, x) for x in mended)), None)
    cause = f"{_BY_PADDING.cause}: {stop.why}" if stop else _BY_PADDING.cause
    return Explained(mended, _BY_PADDING._replace(cause=cause))


def _stop_of(case: Case, leaf: str) -> Equality | None:
    """Find the result with which the proof stopped for a leaf; None if it did not."""
    asked = leaf_of(leaf)
    stops = [x for x in case.unproved if asked.holds(leaf_of(x.leaf))]
    if asked.part is LeafPart.GRADIENT:
        stops += [x for x in case.unproved if part_of(x.leaf) is LeafPart.LOSS]
    return stops[0] if stops else None


def _of_the_proof(case: Case) -> Explained | None:
    """Explain the leaves by the place at which the proof stopped, and its reason.

    A gradient follows from the loss, so it has the reason of the loss.
    """
    known = {leaf: stop for leaf in case.names if (stop := _stop_of(case, leaf))}
    if not known:
        return None
    first, *_ = known.values()
    leaves = [leaf for leaf, stop in known.items() if stop.why == first.why]
    is_mean = first.reason is Reason.MEAN_OF_OWN_ROWS
    advice = _BY_OWN_MEAN if is_mean else _BY_OWN_ROWS
    return Explained(leaves, advice._replace(cause=f"the proof stopped: {first.why}"))


def _of_a_first_call(case: Case) -> Explained | None:
    """Explain the leaves by the proof that a first call has made of the whole batch."""
    return _of_the_proof(case) if case.audit.step.unproved else None


def _of_own_gradients(case: Case) -> Explained | None:
    """Explain the leaves if gradients differ, or values made of them, but no loss."""
    parts = [part_of(x) for x in case.names]
    is_made_of_it = case.audit.is_own or LeafPart.GRADIENT in parts
    has_gradients = any(
        _TRANSPOSED in str(x[0].source_info.name_stack) for x in case.sites
    )
    is_it = is_made_of_it and has_gradients and LeafPart.LOSS not in parts
    return Explained(case.names, _BY_OWN_GRADIENT) if is_it else None


def _of_drift(case: Case) -> Explained | None:
    """Explain the leaves that agree until towers have changed their variables."""
    is_it = all(x.split == AFTER_A_STEP for x in case.findings)
    return Explained(case.names, _BY_DRIFT) if is_it else None


def _of_uneven_rows(case: Case) -> Explained | None:
    """Explain the leaves that differ only if one tower has fewer rows than another."""
    is_it = all(x.split == "unevenly" for x in case.findings)
    return Explained(case.names, _BY_UNEVEN_ROWS) if is_it else None


def _along_rows(case: Case) -> Explained | None:
    """Explain the leaves by an operation along a tower's rows, such as a sort."""
    lines = _lines_along(case.sites, case.audit.one_tower.rows)
    advice = _BY_OWN_ROWS._replace(cause=lines)
    return Explained(case.names, advice) if lines else None


def _of_the_first_tower(case: Case) -> Explained | None:
    """Explain variables whose value for all towers is read from the first tower."""
    local = _of_first_tower(case.audit.one_tower.state.local)
    leaves = [x for x in case.names if x in local]
    return Explained(leaves, _BY_FIRST_TOWER) if leaves else None


def _of_own_rows(case: Case) -> Explained:
    """Explain any leaf by a general remark: it may depend on a tower's rows alone."""
    return Explained(case.names, _BY_OWN_ROWS)


_CAUSES: tuple[Callable[[Case], Explained | None], ...] = (
    _crossed,
    _traced_anew,
    _refuted,
    _of_several_devices,
    _of_drift,
    _of_a_shared_key,
    _of_an_own_key,
    _of_padding,
    _of_a_first_call,
    _of_own_gradients,
    _of_uneven_rows,
    _along_rows,
    _of_the_first_tower,
    _of_the_proof,
    _of_own_rows,  # the last, because it explains any leaf
)


def _numbers_of(site: Site) -> tuple[str, list[Any]]:
    """Read the primitive of an equation, and the literal numbers in it."""
    literals = [x.val for x in site[0].invars if isinstance(x, Literal)]
    numbers = [np.asarray(x).item() for x in literals if np.ndim(x) == 0]
    return site[0].primitive.name, numbers


def _with_lines(advice: Advice, sites: Iterable[Site]) -> Advice:
    """Add the lines of these sites to the cause."""
    lines = dict.fromkeys(filter(None, map(user_line, sites)))
    at = f", at {listed(lines)}" if lines else ""
    return advice._replace(cause=advice.cause + at)


def _of_first_tower(local: PyTree) -> list[str]:
    """Name the variables that are read from the first tower alone."""

    def is_one(x: Any) -> bool:
        return isinstance(x, TowerLocal)

    pairs = jax.tree_util.tree_leaves_with_path(local, is_leaf=is_one)
    return [
        f"local{jax.tree_util.keystr(path)}"
        for path, x in pairs
        if is_one(x) and x.reduction is Reduction.ONLY_FIRST_TOWER
    ]


def _lines_along(sites: Sequence[Site], rows: int) -> str:
    """List the lines whose results may depend on a tower's rows, or their order.

    ``rows`` is the number of the tower's rows, by which their dim is recognized.
    """
    lines: dict[str, None] = {}
    for site in sites:
        name = site[0].primitive.name
        if name in _ALONG and _size_along(site[0]) == rows and (at := user_line(site)):
            lines[f"it {_ALONG[name]} a tower's own rows ({name}), at {at}"] = None
    return "; ".join([*lines][:3])


def crosses_rows(traced: Traced, rows: int) -> bool:
    """Look for values ``[b]`` that meet some of ``[b, 1]`` by accident.

    The result then has an element for each pair of rows.
    """
    return any(crossed_rows(_sites_of(traced), rows))


def crossed_rows(sites: Sequence[Site], rows: int) -> Iterator[Site]:
    """Yield equations in which each row meets all rows: ``[b]`` meets ``[b, 1]``.

    If both operands are made from one ``[b]``, as in ``x[:, None] - x[None]``, this is
    intended, and the equation is left out.
    """
    shaped = [
        x for x, _ in sites if x.primitive.name in ("broadcast_in_dim", "reshape")
    ]
    of_rows = {x.outvars[0] for x in shaped if _shape_of(x.invars[0]) == (rows,)}
    for site in sites:
        operands = {_shape_of(x): x for x in site[0].invars if isinstance(x, Var)}
        across = operands.get((1, rows))
        along = operands.get((rows, 1))
        if across in of_rows and along is not None and along not in of_rows:
            if site[0].primitive in PLAIN:
                yield site


def _sites_of(traced: Traced) -> list[Site]:
    jaxprs = [x.towers.jaxpr for x in traced.passes]
    return [site for jaxpr in jaxprs for site in all_sites(jaxpr, plain=True)]


def _shape_of(x: Any) -> tuple[int, ...] | None:
    return getattr(x.aval, "shape", None)


def _size_along(eqn: JaxprEqn) -> int | None:
    """Find the size of the dim along which an equation combines or sorts."""
    params = eqn.params
    shape = _shape_of(eqn.invars[0])
    if "length" in params:
        return params["length"]
    axes = [params.get(x) for x in ("axis", "dimension", "axes", "dimensions")]
    named = next((x for x in axes if x is not None), -1)
    axis = named[0] if isinstance(named, tuple) else named
    return shape[axis] if shape else None
