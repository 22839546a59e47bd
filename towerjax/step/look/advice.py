"""The cause of what an audit found, and one remedy."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from towerjax.proof.equation import PLAIN, Site, all_sites, user_line
from towerjax.step.look.audited import program_hash
from towerjax.step.look.comparison import GRADIENT, Compared, Finding, SplitError
from towerjax.step.look.run_towers import RowsToRun, Towers
from towerjax.step.run.trace import Traced
from towerjax.towers.row_free_keys import KEY_NAME
from towerjax.towers.variables import TowerLocal
from towerjax.types import PyTree, Reduction
from towerjax.types.leaves import listed

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

_TRANSPOSED = "transpose"  # in the scope of a derivative


class Advice(NamedTuple):
    """Why leaves differ, and what to write."""

    cause: str
    remedy: str


_BY_SHARED_KEY = Advice(
    "rows draw from tower.shared_rng, of which all towers draw the same",
    "Draw what rows have of their own from tower.rng.",
)
_BY_OWN_KEY = Advice(
    "rows draw from a key of the function's own, of which all towers draw the same",
    "Draw from tower.rng.",
)
_BY_PADDING = Advice(
    "padded rows count, of which the one tower has more",
    "Divide sums of rows by the sum of tower.weight, and not by a number of rows, as"
    " .mean() does.",
)
_BY_ANOTHER_TRACE = Advice(
    "traced twice, the function gives two programs: a number of np.random, a counter or"
    " another variable of Python is in it",
    "Draw from tower.rng, count with tower.step, and give what changes with the batch,"
    " tj.Whole(x).",
)
_BY_NUMBER = Advice(
    "a factor of it is tower.num_towers",
    "Leave the number out: sums are added over towers, and divided once, by the sum of"
    " all weights.",
)
_BY_HALF = Advice(
    "half of it on two towers, as of a sum whose weight is no sum",
    "Return tj.Weighted(sum, weight) with the weights of the same rows, tj.Weighted"
    ".mean(values, tower.weight), or tj.Sum(x) for a total.",
)
_BY_TWO = Advice(
    "twice as much on two towers, as of a mean that is added",
    "Return it as tj.Weighted(sum, weight), and divide gradients once, grads.value"
    " after the merge.",
)
_BY_UNEVEN_ROWS = Advice(
    "where towers have as many rows each they agree, as of a mean of each tower's mean,"
    " which counts a tower of few rows as much as one of many",
    "Return the sum with its weight, tj.Weighted.mean(values, tower.weight).",
)
_BY_OWN_GRADIENT = Advice(
    "the loss is the same, so a function of a tower's own gradient (a clip, a norm, a"
    " sign, the rule of a jax.custom_vjp) is added up",
    "Make it in the update, of the merged gradient: optax.chain(optax.clip_by_global_"
    "norm(1.0), ...), or update_fn of tj.build_step.",
)
_BY_FIRST_TOWER = Advice(
    "it keeps what the first tower made of its own rows (ONLY_FIRST_TOWER)",
    "Make it of all rows, with tower.mean(values, tower.weight), or say"
    " tj.Reduction.MEAN; where one tower's own is meant, tj.Reduction.NONE.",
)
_BY_CROSSED_ROWS = Advice(
    "rows [b] meet rows [b, 1], which makes [b, b]",
    "Give both one shape, such as values[:, 0] or targets[:, None].",
)
_BY_DEVICES = Advice(
    "a tower of several devices says something else than one device",
    "In a jax.shard_map over a tower's own axes add up what each device has once, with"
    " lax.psum, and divide what is whole; for its own statistics say audit=False.",
)
_BY_OWN_ROWS = Advice(
    "it is made of what only the rows of one tower say, or of tower.id or"
    " tower.num_towers",
    "What a row needs of all rows, take over all towers, with tower.mean,"
    " tower.all_gather and tower.reduce, or from an earlier pass of tj.build_step; and"
    " return sums with their weights, tj.Weighted.mean(values, tower.weight). What is"
    " meant to be each tower's own is tj.PerTower(x).",
)


class Asks(Protocol):
    """An audit, of which `advise` asks more."""

    towers: Callable[..., Towers]
    one_group: Callable[[], Towers]
    one_tower: Towers
    two_towers: Towers
    each: int
    split: Callable[..., RowsToRun]
    splits: list[RowsToRun]
    is_narrow: bool
    is_own: bool
    pads: bool
    compared: Callable[[list[RowsToRun]], list[Compared]]
    without: Callable[..., list[str]]


def advise(audit: Asks, error: SplitError) -> SplitError:
    """The error of an `Audit` with the first cause that is found, and its remedy."""
    leaves, advice = next(_causes(audit, error.findings))
    is_of_all = len(leaves) == len(error.findings)
    text = f"{listed(leaves)}: {advice.cause}"
    text = advice.cause[:1].upper() + advice.cause[1:] if is_of_all else text
    return SplitError(error.findings, [f"{text}.", advice.remedy])


def _causes(
    audit: Asks, findings: Sequence[Finding]
) -> Iterator[tuple[list[str], Advice]]:
    """Leaves, and what explains them; the last explains all."""
    names = [x.leaf for x in findings]
    traced, rows = audit.one_tower.trace(audit.splits[0]), audit.one_tower.rows
    sites = _sites_of(traced)
    if crossed := [*crossed_rows(sites, rows)]:
        yield names, _with_lines(_BY_CROSSED_ROWS, crossed)
    how = {"narrow": True} if audit.is_narrow else {}
    again = audit.towers(1, rows=rows, **how).trace(audit.splits[0])
    if program_hash(traced) != program_hash(again):
        pairs = zip(sites, _sites_of(again), strict=False)
        parted = (x for x, y in pairs if _numbers_of(x) != _numbers_of(y))
        yield names, _with_lines(_BY_ANOTHER_TRACE, itertools.islice(parted, 1))
    if audit.is_narrow and (mended := audit.without(names, audit.one_group())):
        yield mended, _BY_DEVICES
    if draws := [x for x in sites if x[0].primitive.name == "random_bits"]:
        if mended := audit.without(names, audit.one_tower, shared=False):
            yield mended, _BY_SHARED_KEY
        own = [x for x in draws if KEY_NAME not in str(x[0].invars[0].aval)]
        if any(map(user_line, own)):
            yield names, _with_lines(_BY_OWN_KEY, own)
    if audit.pads:
        as_two = audit.towers(1, rows=audit.two_towers.rows)
        if mended := audit.without(names, as_two):
            yield mended, _BY_PADDING
    (run,) = audit.compared(audit.splits[:1])
    by_factor = [
        ([x for x in names if _is_times(run.got[x], factor, run.want[x])], advice)
        for factor, advice in ((0.5, _BY_HALF), (2.0, _BY_TWO))
    ]
    if any(x[0] for x in by_factor) and (sites_of_number := _of_number(audit)):
        by_number = _with_lines(_BY_NUMBER, sites_of_number)
        by_factor = [(these, by_number) for these, _ in by_factor]
    yield from [x for x in by_factor if x[0] == names]
    is_made_of_it = any(x.startswith(GRADIENT) for x in names) or audit.is_own
    has_gradients = any(_TRANSPOSED in str(x[0].source_info.name_stack) for x in sites)
    if is_made_of_it and has_gradients and not any(x.startswith("loss") for x in names):
        yield names, _BY_OWN_GRADIENT
    yield from [x for x in by_factor if x[0]]
    if all(x.split == "unevenly" for x in findings):
        yield names, _BY_UNEVEN_ROWS
    if lines := _lines_along(sites, rows):
        yield names, _BY_OWN_ROWS._replace(cause=lines)
    if these := [x for x in names if x in _of_first_tower(audit.one_tower.state.local)]:
        yield these, _BY_FIRST_TOWER
    yield names, _BY_OWN_ROWS


def _numbers_of(site: Site) -> tuple[str, list[Any]]:
    """The primitive of an equation, and the numbers that are written in it."""
    literals = [x.val for x in site[0].invars if isinstance(x, Literal)]
    numbers = [np.asarray(x).item() for x in literals if np.ndim(x) == 0]
    return site[0].primitive.name, numbers


def _of_number(audit: Asks) -> list[Site]:
    """Where each of two towers has twice the number, or half, that one alone has."""
    rows = audit.split("half", np.arange(audit.each))
    alone = audit.towers(1, rows=audit.each).trace(rows)
    found = []
    both = audit.two_towers.trace(audit.splits[0])
    for site, other in zip(_sites_of(both), _sites_of(alone), strict=False):
        (name, numbers), (of_one, expected) = _numbers_of(site), _numbers_of(other)
        if name != of_one:
            break
        pairs = zip(numbers, expected, strict=False)
        if any(x != y and x in (2 * y, y / 2) for x, y in pairs):
            found.append(site)
    return found


def _with_lines(advice: Advice, sites: Iterable[Site]) -> Advice:
    """The advice, whose cause names these lines, where they have any."""
    lines = dict.fromkeys(filter(None, map(user_line, sites)))
    at = f", at {listed(lines)}" if lines else ""
    return advice._replace(cause=advice.cause + at)


def _is_times(got: np.ndarray | None, factor: float, want: np.ndarray | None) -> bool:
    if got is None or want is None or got.shape != want.shape or not want.any():
        return False
    return np.allclose(got, factor * want, 1e-4, 0.0)


def _of_first_tower(local: PyTree) -> list[str]:
    """The names of variables that are read as the first tower's."""
    is_one = lambda x: isinstance(x, TowerLocal)  # noqa: E731
    pairs = jax.tree_util.tree_leaves_with_path(local, is_leaf=is_one)
    return [
        f"local{jax.tree_util.keystr(path)}"
        for path, x in pairs
        if is_one(x) and x.reduction is Reduction.ONLY_FIRST_TOWER
    ]


def _lines_along(sites: Sequence[Site], rows: int) -> str:
    """The lines that may depend on which rows a tower has, and in which order."""
    lines: dict[str, None] = {}
    for site in sites:
        name = site[0].primitive.name
        if name in _ALONG and _size_along(site[0]) == rows and (at := user_line(site)):
            lines[f"it {_ALONG[name]} a tower's own rows ({name}), at {at}"] = None
    return "; ".join([*lines][:3])


def crosses_rows(traced: Traced, rows: int) -> bool:
    """Whether rows of a pass meet all others without being meant to."""
    return any(crossed_rows(_sites_of(traced), rows))


def crossed_rows(sites: Sequence[Site], rows: int) -> Iterator[Site]:
    """Where each of so many rows meets all, since ``[b]`` is broadcast to ``[b, 1]``.

    Not where both are made of ``[b]``, as in ``x[:, None] - x[None]``, which is meant.
    """
    shaped = [
        x for x, _ in sites if x.primitive.name in ("broadcast_in_dim", "reshape")
    ]
    of_rows = {x.outvars[0] for x in shaped if _shape_of(x.invars[0]) == (rows,)}
    for site in sites:
        operands = {_shape_of(x): x for x in site[0].invars if isinstance(x, Var)}
        across, along = operands.get((1, rows)), operands.get((rows, 1))
        if across in of_rows and along is not None and along not in of_rows:
            if site[0].primitive in PLAIN:
                yield site


def _sites_of(traced: Traced) -> list[Site]:
    jaxprs = [x.towers.jaxpr for x in traced.passes]
    return [site for jaxpr in jaxprs for site in all_sites(jaxpr, plain=True)]


def _shape_of(x: Any) -> tuple[int, ...] | None:
    return getattr(x.aval, "shape", None)


def _size_along(eqn: JaxprEqn) -> int | None:
    """The size of the dim that an equation goes along."""
    params, shape = eqn.params, _shape_of(eqn.invars[0])
    if "length" in params:
        return params["length"]
    axes = [params.get(x) for x in ("axis", "dimension", "axes", "dimensions")]
    given = next((x for x in axes if x is not None), -1)
    axis = given[0] if isinstance(given, tuple) else given
    return shape[axis] if shape else None
