"""Make the next state and the metrics from merged values, and accept or refuse them."""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from towerjax.collectives.packing import all_finite
from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.interpreter import Interpreter
from towerjax.metrics.state import compute, has_value
from towerjax.metrics.weighted import Means, Weighted
from towerjax.prover.replication.findings import ReplicationError
from towerjax.step.state.train_state import TrainState, split_state
from towerjax.towers.executors import vmap_members
from towerjax.towers.outputs import PerTowerValue
from towerjax.types import PerTower, PyTree
from towerjax.types.notes import says
from towerjax.types.refusals import a_type, check_types
from towerjax.types.trees import is_key

OnNonfinite = Literal["raise", "skip", "ignore"]
"""What to do if a guarded value is not finite."""

Guard = Literal["loss", "gradients"]
"""What must be finite: the loss alone, or every gradient, too."""

NONE = -1
"""The step flag if no step was refused; otherwise it is the refused step's number."""


class Outcome(NamedTuple):
    """The result of a training step's program; also used for the result's layouts."""

    donated: PyTree  # the donated fields of the next state, by their names
    now: PyTree  # the other fields that changed
    metrics: PyTree  # name -> its value, or the towers' values as `PerTowerValue`
    # The number of the refused step, or `NONE`. A compiled program returns the step
    # flag of the first refusal among this call and the calls before it.
    step_flag: PyTree


Update: TypeAlias = Callable[[TrainState, PyTree], tuple[PyTree, ...]]
"""``(state, merged) -> (state, metrics)``, which runs once, on global values.

An update with a guard of its own also returns whether all values were finite; or the
number of the step that it refused, or `NONE`.
"""

OtherLosses: TypeAlias = Callable[[list[PyTree]], Sequence[Weighted]]
"""A function of the merged results of all passes, which returns means to be guarded.

A step is refused if its loss or one of these means is not finite.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class NextState:
    """The part of a training step after its towers: the update, and its guard."""

    update_fn: Update
    # Picks the argument of ``update_fn`` out of the merged results of all passes.
    update_input: Callable[[list[PyTree]], PyTree]
    on_nonfinite: OnNonfinite
    # Whether a step with a loss of weight 0 is refused.
    needs_examples: bool = True
    other_losses: OtherLosses | None = None

    def __call__(
        self,
        donated: dict[str, PyTree],
        kept: dict[str, PyTree],
        merged: list[PyTree],
        finite: Sequence[jax.Array | None],
    ) -> tuple[jax.Array | bool, PyTree, PyTree]:
        """Update the state; return ``(accepted, donated, rest)`` for an `Outcome`."""
        before = TrainState(**donated, **kept)
        with _explain_errors(before):
            updated = self.update_fn(before, self.update_input(merged))
        after, metrics, *more = _check_update(before, updated)
        others = self.other_losses(merged) if self.other_losses else ()
        values, has_examples, is_fine = _evaluate_metrics(metrics, others)
        finite = [x for x in finite if x is not None]
        is_fine = functools.reduce(jnp.logical_and, finite, is_fine)
        accepted = is_fine & (has_examples | (not self.needs_examples))
        if more or self.on_nonfinite == "ignore":
            accepted = True
        donated, now = split_state(after)
        now = {
            name: jnp.where(accepted, x, kept[name])
            for name, x in now.items()
            if x is not kept[name]
        }
        now["step"] = kept["step"] + 1
        [refused] = more or [is_fine]
        if refused.dtype == bool:
            refused = jnp.where(refused, NONE, now["step"].astype(jnp.int32))
        for name, x in metrics.items():
            if isinstance(x, PerTower):
                values[name] = PerTowerValue(values[name])
        return accepted, donated, (now, values, refused)


_UPDATE = (
    "update_fn, and give step.init(params, opt_state=..., extra=...) the values that it"
    " keeps. Gradients are at least float32: for narrower parameters write"
    " optax.tree.cast_like(grads, state.params)"
)


def _check_update(before: TrainState, updated: Any) -> tuple[PyTree, ...]:
    """Check what ``update_fn`` returned: a state, metrics, and perhaps a flag."""
    parts: Any = updated if isinstance(updated, tuple) else (updated,)
    kinds = (TrainState, Mapping, jax.Array)[: max(len(parts), 2)]
    fits = len(parts) == len(kinds) and all(map(isinstance, parts, kinds))
    if not fits or any(x.shape or x.dtype not in (bool, jnp.int32) for x in parts[2:]):
        raise ValueError(
            f"update_fn returned {', '.join(type(x).__name__ for x in parts)}, but must"
            " return (state, metrics), such as (dataclasses.replace(state,"
            " params=...), {'loss': merged['loss']}). An update with a guard of its own"
            " also returns whether all values were finite, a () bool."
        )
    after, metrics, *more = parts
    for field in dataclasses.fields(TrainState):
        was = getattr(before, field.name)
        now = getattr(after, field.name)
        if now is not was:
            now = check_types(was, now, f"state.{field.name}", _UPDATE)
            after = dataclasses.replace(after, **{field.name: now})
    return after, dict(metrics), *more


def _evaluate_metrics(
    metrics: dict[str, Any], others: Sequence[Weighted]
) -> tuple[dict[str, PyTree], PyTree, jax.Array]:
    """Compute the metrics' values, and whether the guarded values are finite.

    Returns ``(values, has_examples, is_finite)``. The guarded values are the loss and
    ``others``; without a loss, all metrics and ``others``.
    """
    values = {name: _value_of_metric(name, x) for name, x in metrics.items()}
    loss = metrics.get("loss")
    has_examples = jnp.bool_(True)
    terms = loss.terms if isinstance(loss, Means) else (loss,)
    terms = [term for term in terms if isinstance(term, Weighted)]
    for term in terms:
        # The value of a mean of weight 0 is 0, which would hide a sum that is not
        # finite.
        values["loss"] = jnp.where(jnp.isfinite(term.sum), values["loss"], term.sum)
    if terms:
        guarded = [*terms, *others]
        has_examples = sum(jnp.sum(term.weight) for term in guarded) != 0
    looked_at = values["loss"] if "loss" in values else values
    return values, has_examples, all_finite((looked_at, [x.sum for x in others]))


def _value_of_metric(name: str, x: Any) -> jax.Array:
    value = compute(x) if has_value(x) else x
    if isinstance(x, PerTower):
        value = vmap_members(compute)(x.values) if has_value(x.values) else x.values
    if is_key(value) or not (hasattr(value, "dtype") or isinstance(value, int | float)):
        kind = "a random key" if is_key(value) else a_type(value)
        raise ValueError(
            f"metrics[{name!r}] is {kind}. A metric of a step is one array of numbers,"
            " or one metric state, tj.Sum or tj.PerTower of one array. Return each part"
            " as a metric of its own. For tj.Rows return its .value, [B, ...], which"
            " includes padded rows."
        )
    return jnp.asarray(value)


@contextlib.contextmanager
def _explain_errors(before: TrainState) -> Iterator[None]:
    """Add an explanation to errors of ``update_fn`` whose cause is known.

    Known causes are a collective, a merged value that is used like an array, and an
    empty ``opt_state``.
    """
    try:
        yield
    except NameError as error:
        if error.name is not None:  # Python sets it for an undefined name; JAX does not
            raise
        raise ReplicationError(
            f"The update must not communicate: {error}. It runs once, on the merged"
            " values of all towers, so leave the collective out."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        if says(error, r"\b(Weighted|Means|Sum|Rows|PerTower)\b"):
            error.add_note(
                "merged holds the types that towers returned; their numbers are"
                " merged[...].value, such as merged['grads'].value."
            )
        at = traceback.extract_tb(error.__traceback__)[-1].filename
        is_empty = isinstance(before.opt_state, tuple) and not before.opt_state
        if is_empty and "optax" in at:
            error.add_note(
                "state.opt_state is empty: begin with step.init(params,"
                " opt_state=optimizer.init(params))."
            )
        raise


def guard_rows(
    walk: Interpreter, eqn: Any, left: dict[Any, Any], accepted: jax.Array
) -> list[Any] | None:
    """Find operands with which an equation writes nothing in a refused step.

    Returns None if the equation does not write rows into a leaf of the state. ``left``
    maps a variable to the leaf that it equals after a refused step; the equation's
    result is added to it.

    A select between the new and the old array would need both at once: a copy of a
    whole table for a few rows. Here the written rows are selected, so that XLA writes
    into the donated buffer.
    """
    first = eqn.invars[0]
    if isinstance(first, core.Literal) or first not in left:
        return None
    out = eqn.outvars[0]
    leaf = left[first]
    operands = [walk.read(x) for x in eqn.invars]
    name = eqn.primitive.name
    if name.startswith("scatter") and _drops(eqn):
        left[out] = leaf
        # A scatter in this mode drops the index -1, so a refused step writes nothing.
        return [operands[0], jnp.where(accepted, operands[1], -1), *operands[2:]]
    if name == "dynamic_update_slice":
        left[out] = leaf
        array, new, *starts = operands
        old = lax.dynamic_slice(array, starts, new.shape)
        return [array, lax.select(accepted, new, old), *starts]
    return None


def _drops(eqn: Any) -> bool:
    """Return whether a scatter ignores the index -1, and has signed indices."""
    indices = eqn.invars[1].aval
    drops = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    return drops and signed and indices.shape[-1] > 0


def accept_or_keep(
    step: Callable[[PyTree], tuple[jax.Array, PyTree, PyTree]], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """Run ``step(carry)``; return the old carry in place of a new one if it is refused.

    ``step`` returns ``(accepted, carry, rest)``. Returns ``(carry, rest)``.
    """
    return accept(*jax.make_jaxpr(step, return_shape=True)(carry), carry)


def accept(
    closed: core.ClosedJaxpr,
    out: tuple[PyTree, PyTree, PyTree],
    carry: PyTree,
    *others: PyTree,
) -> tuple[PyTree, PyTree]:
    """Run a traced step on ``(carry, *others)``, and return ``(carry, rest)``.

    The step returns ``(accepted, carry, rest)``, of the shapes ``out``. If it is not
    accepted, the old carry is returned. The equations that ``accepted`` needs run
    first.

    Then each new leaf of the carry is selected right where it is made, and later
    equations use the selected value. In a refused step that is the old leaf, and the
    results of these equations are not used. Selecting at the end would keep old and new
    leaves alive at once, a copy of the whole state at every step. A ``cond`` would make
    the update wait for the last gradient.
    """
    jaxpr = closed.jaxpr
    before = jax.tree.leaves(carry)
    walk = Interpreter(jaxpr, closed.consts, [*before, *jax.tree.leaves(others)])
    accepted, *results = jaxpr.outvars
    after = results[: len(before)]
    rest = results[len(before) :]
    is_never_refused = isinstance(accepted, core.Literal) and bool(accepted.val)
    if is_never_refused:
        for eqn in jaxpr.eqns:
            walk.evaluate(eqn)
        leaves = [walk.read(x) for x in after]
    else:
        leaves = _evaluate_guarded(walk, jaxpr, after, before)
    return (
        jax.tree.unflatten(jax.tree.structure(carry), leaves),
        jax.tree.unflatten(jax.tree.structure(out[2]), [walk.read(x) for x in rest]),
    )


def _evaluate_guarded(
    walk: Interpreter, jaxpr: core.Jaxpr, after: Sequence[Any], before: Sequence[Any]
) -> list[Any]:
    """Make the new leaves of a carry; keep the old ones if the step is refused."""
    effects = [eqn for eqn in jaxpr.eqns if eqn.effects]
    deciding = needed_eqns(jaxpr.eqns, jaxpr.outvars[:1], always=effects)
    for eqn in deciding:
        walk.evaluate(eqn)
    accepted = walk.read(jaxpr.outvars[0])
    is_deciding = {id(eqn) for eqn in deciding}
    updating = [eqn for eqn in jaxpr.eqns if id(eqn) not in is_deciding]
    updated = {var for eqn in updating for var in eqn.outvars}
    # For each variable that is replaced by its old leaf in a refused step right where
    # it is made: the old leaf.
    olds: dict[Any, Any] = {}
    for var, old in zip(after, before, strict=True):
        # A scalar is left out: it costs no copy, and later equations may divide by the
        # new one.
        if not isinstance(var, core.Literal) and var in updated and jnp.ndim(old):
            olds.setdefault(var, old)
    # For each variable that is an old leaf if the step is refused: that leaf.
    if_refused = dict(zip(jaxpr.invars, before, strict=False))
    for eqn in updating:
        operands = None
        name = eqn.primitive.name
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            operands = guard_rows(walk, eqn, if_refused, accepted)
        walk.evaluate(eqn, operands)
        for var in eqn.outvars:
            if var in olds and if_refused.get(var) is not olds[var]:
                walk.values[var] = lax.select(accepted, walk.values[var], olds[var])
                if_refused[var] = olds[var]

    def leaf(var: Any, old: Any) -> Any:
        if not isinstance(var, core.Literal) and olds.get(var) is old:
            return walk.read(var)
        # No equation above selected this leaf: it is a constant, an unchanged input, a
        # value that ``accepted`` depends on, or a variable that stands for two leaves.
        return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)

    return [leaf(*pair) for pair in zip(after, before, strict=True)]
