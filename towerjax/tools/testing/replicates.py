"""Does a loss function give the same on any number of towers? The audit."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.collectives.sparse_rows import is_rows
from towerjax.data.shard import count_examples
from towerjax.step.compiled_step import StepOptions
from towerjax.step.state import TrainState
from towerjax.tools.testing.audited import Audited, Deal, Values, dealt, splits_of
from towerjax.tools.testing.causes import Experiments, largest_gap
from towerjax.tools.testing.findings import AuditReport, Finding, SplitError
from towerjax.types import LossFn, PyTree, Reduction
from towerjax.types.options import check_whole

_FEWEST = 4
# As a jaxpr writes the dtypes: eight times the distance of neighbours.
_RTOL = {"f16[": 8 * 2.0**-10, "bf16[": 8 * 2.0**-7}


def assert_replicates(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    towers: Sequence[int] = (1, 2, 3, 4, 8),
    *,
    local: PyTree = None,
    rng: jax.Array | str | None = None,
    rtol: float | None = None,
    loss_reduction: Reduction | None = None,
    padding: bool = True,
) -> AuditReport:
    """Raise if loss, gradient, metrics or local state depend on the number of towers.

    One batch is split in several ways: in order, permuted, unevenly, with padded rows.
    The towers run on one device, so none but one is needed; what they give, merged as
    a train step merges it, is compared with one tower that has all rows. Of what
    differs the cause is looked for by experiments with parts of the batch: give
    different examples, and unequal weights where the loss takes weights.

    Args:
      loss_fn: As for `build_train_step`.
      params: Floating arrays.
      batch: Arrays ``[B, ...]``, ``B >= 4``; 12 rows or more tell causes apart well.
      towers: The numbers of towers ``T`` to compare with one.
      local: Tower-local variables: a pytree of ``TowerLocal``, each leaf one tower's.
      rng: The key that ``tower.rng`` is made of; None is ``jax.random.key(0)``. What
        changes with it is reported, because towers have keys of their own; with
        ``"ignore"`` such leaves are left out, and the report names them.
      rtol: The largest difference, in parts of a leaf's largest value or of the
        towers' parts it was added from; None is 1e-4, and more where the loss
        function computes in 16 bits.
      loss_reduction: As for `build_train_step`.
      padding: Compare with padded rows and uneven splits too? False is for losses
        that are only trained with ``remainder="error"`` or ``"drop"``.

    Returns:
      An `AuditReport` of what was compared.

    Raises:
      SplitError: An ``AssertionError``: which leaf depends on the split, by how much,
        at which ``T``, and why; its ``findings`` say the same as data.
      ValueError: An argument is not one that there is, the batch is malformed, a
        value on one tower is not finite, nothing is left to compare, or ``T`` does
        not divide the batch and ``padding`` is False.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> batch = {"x": np.arange(12, dtype=np.float32)}
      >>> def good(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch["x"]) ** 2, tower.weight)
      >>> assert_replicates(good, np.float32(1), batch).compared
      ('gradient', 'loss')
      >>> def bad(w, batch, tower):
      ...     return tj.Weighted(good(w, batch, tower).value, 1.0)
      >>> try:
      ...     assert_replicates(bad, np.float32(1), batch)
      ... except tj.testing.SplitError as error:
      ...     [finding.causes for finding in error.findings]
      [('mean_of_means',), ('mean_of_means',)]
    """
    _check_options(loss_reduction, rtol, rng)
    examples = _checked_batch(batch, towers, padding)
    key = None if isinstance(rng, str) else rng
    state = TrainState.create(params, optax.identity(), local=local, rng=key)
    local, key = jax.tree.map(jnp.asarray, state.local), state.rng
    audited = Audited(loss_fn, loss_reduction, state.params, batch, local)
    with _exact_products():
        if rtol is None:
            rtol = _rtol_of(audited, examples, key)
        return _audit(
            audited, examples, key, towers, rtol, isinstance(rng, str), padding
        )


def _audit(
    audited: Audited,
    examples: int,
    key: jax.Array,
    towers: Sequence[int],
    rtol: float,
    ignore_random: bool,
    padding: bool,
) -> AuditReport:
    one = audited.run(dealt("one tower", [range(examples)]), key)
    _refuse_nonfinite(one)
    runs = [
        (deal, audited.run(deal, key))
        for num_towers in towers
        for deal in splits_of(examples, num_towers, padding=padding)
    ]
    sizes = {
        name: max(values.sizes[name] for values in (one, *(v for _, v in runs)))
        for name in one.leaves
    }
    sizes = _floored(sizes)
    allowed = {name: rtol * size for name, size in sizes.items()}
    experiments = Experiments(audited, examples, key, allowed)
    random = experiments.random_leaves() if ignore_random else frozenset()
    compared = tuple(sorted(one.leaves.keys() - random))
    if not compared:
        raise ValueError(
            "rng='ignore' leaves nothing to compare: every leaf changes with tower.rng."
            " Switch the random part off for the audit, for instance with"
            " deterministic=True, or draw from keys that lie in the batch."
        )
    worst = {name: _worst(name, one, runs) for name in compared}
    bad = [name for name in compared if _is_bad(name, worst[name], runs, allowed)]
    if bad:
        raise SplitError(
            [_finding(name, one, worst[name], sizes[name], experiments) for name in bad]
        )
    relative = {n: worst[n][2] / sizes[n] if sizes[n] else 0.0 for n in compared}
    largest = max(relative, key=lambda name: relative[name])
    left_out = (*sorted(random), *audited.left_out())
    return AuditReport(
        towers=tuple(towers),
        examples=examples,
        splits=len(runs),
        compared=compared,
        not_compared=left_out,
        largest=relative[largest],
        largest_leaf=largest,
    )


Run = tuple[Deal, Values]


def _floored(sizes: dict[str, float]) -> dict[str, float]:
    """The sizes that rounding is measured by.

    A gradient that is 0 but for rounding is as inexact as the others, not as itself.
    """
    gradients = [size for name, size in sizes.items() if name.startswith("gradient")]
    least = 0.01 * max(gradients)
    return {
        name: max(size, least) if name.startswith("gradient") else size
        for name, size in sizes.items()
    }


def _worst(name: str, one: Values, runs: list[Run]) -> tuple[Deal, Values, float]:
    def score(run: Run) -> tuple[bool, float]:
        values = run[1]
        gap = largest_gap(values.leaves[name], one.leaves[name])
        return name in values.unequal, gap

    deal, values = max(runs, key=score)
    return deal, values, score((deal, values))[1]


def _is_bad(
    name: str,
    worst: tuple[Deal, Values, float],
    runs: list[Run],
    allowed: dict[str, float],
) -> bool:
    return worst[2] > allowed[name] or any(name in x.unequal for _, x in runs)


def _finding(
    name: str,
    one: Values,
    worst: tuple[Deal, Values, float],
    size: float,
    experiments: Experiments,
) -> Finding:
    deal, values, gap = worst
    got, want = values.leaves[name], one.leaves[name]
    if got.shape == want.shape and got.size:
        with np.errstate(invalid="ignore"):
            gaps = np.nan_to_num(np.abs(got - want), nan=np.inf)
        at = np.unravel_index(np.argmax(gaps), got.shape)
        got, want = got[at], want[at]
    else:
        got = want = np.nan
    causes, evidence = experiments.causes(name)
    return Finding(
        leaf=name,
        causes=causes,
        evidence=evidence,
        towers=deal.num_towers,
        split=deal.name,
        value=float(got),
        one_tower=float(want),
        difference=gap,
        relative=gap / size if size else np.inf,
    )


def _check_options(reduction: Any, rtol: Any, rng: Any) -> None:
    StepOptions(reduction, 1, "pad", "raise", "loss", False, 1)
    if rtol is not None and not rtol >= 0:
        raise ValueError(f"rtol={rtol!r} must be >= 0, or None.")
    if isinstance(rng, str) and rng != "ignore":
        raise ValueError(
            f"rng={rng!r} must be a key, such as jax.random.key(0), None or 'ignore'."
        )


def _checked_batch(batch: PyTree, towers: Sequence[int], padding: bool) -> int:
    if any(is_rows(x) for x in jax.tree.leaves(batch, is_leaf=is_rows)):
        raise ValueError(
            "The audit takes rows of the batch apart, which it cannot do with"
            " IndexedRows. Give the batch as plain arrays."
        )
    examples = count_examples(batch)
    if examples < _FEWEST:
        raise ValueError(
            f"The batch has {examples} examples; the audit needs {_FEWEST} or more,"
            " and 12 to tell causes apart well."
        )
    towers = tuple(towers)
    if not towers:
        raise ValueError(f"towers={towers!r} must be whole numbers >= 1, at least one.")
    for i, number in enumerate(towers):
        check_whole(f"towers[{i}]", number)
    uneven = [n for n in towers if examples % n]
    if uneven and not padding:
        raise ValueError(
            f"padding=False, but towers={uneven} do not divide the {examples} examples."
            " Leave them out, or give a batch that all of them divide."
        )
    return examples


def _refuse_nonfinite(one: Values) -> None:
    bad = [name for name, x in one.leaves.items() if not np.isfinite(x).all()]
    bad = [name for name in bad if name.startswith(("loss", "gradient"))]
    if bad:
        raise ValueError(
            f"On one tower {', '.join(bad)} is not finite, so there is nothing to"
            " compare with. Give parameters and a batch whose loss is finite."
        )


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Products in full precision, so that rounding is not taken for a difference."""
    with jax.default_matmul_precision("highest"):
        yield


def _rtol_of(audited: Audited, examples: int, key: jax.Array) -> float:
    text = audited.traced(dealt("", [range(examples)]), key)
    found = [rtol for name, rtol in _RTOL.items() if f":{name}" in text]
    return max([1e-4, *found])
