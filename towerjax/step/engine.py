"""How do passes and an update become one step? Merged values in, the next state out."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.metrics.state import compute, is_metric
from towerjax.metrics.weighted import Means, UnknownWeights, Weighted
from towerjax.proof.found import ReplicationError
from towerjax.step.checking import Check
from towerjax.step.one_pass import Pass
from towerjax.step.proving import Recipe, Run
from towerjax.step.returned import filled
from towerjax.step.state import (
    TrainState,
    split_state,
)
from towerjax.step.update import accept_or_keep, checked_like
from towerjax.towers.executors import over_members
from towerjax.towers.outputs import metric_values
from towerjax.types import Layout, PerTower, PyTree, Rows
from towerjax.types.leaves import map_parts

OnNonfinite = Literal["raise", "skip", "ignore"]
Guard = Literal["loss", "gradients"]


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A step before it is compiled: towers, pass after pass, and one update."""

    passes: tuple[Pass, ...]  # each is given what the one before it came to
    # (state, merged) -> (state, metrics), of global values.
    update_fn: Callable[[TrainState, Any], tuple[TrainState, Any]]
    on_nonfinite: OnNonfinite
    # What has to be finite: metrics["loss"], or all metrics where none has that name;
    # with "gradients" also all that towers add up.
    guard: Guard
    # Is what each pass came to handed on, in a list, and not the last one's alone?
    keeps_all: bool = False
    # Does a step change nothing whose loss counts no example?
    needs_examples: bool = True

    def step(
        self,
        run: Run,
        donated: dict[str, Any],
        kept: dict[str, Any],
        *batch: PyTree,
    ) -> tuple[Any, ...]:
        """The whole step, of global values."""
        state = TrainState(**donated, **kept)
        merged, finite, found, *summed = self.merged(run, self.passes, state, batch)
        donated, now, *told = self.updated(donated, kept, merged, finite, *summed)
        now["step"] = kept["step"] + 1
        return donated, now, *told, *(() if found is None else (found,))

    def updated(
        self,
        donated: dict[str, Any],
        kept: dict[str, Any],
        merged: PyTree,
        finite: jax.Array | None,
        op_state: PyTree = None,
        told: dict[str, jax.Array] | None = None,
    ) -> tuple[Any, dict[str, Any], dict[str, Any], jax.Array | None]:
        """The next state where it is accepted, metrics, and what tells if it was.

        That is the loss, where None is returned for it. ``op_state`` and ``told`` are
        what the cross-tower op keeps, and tells as metrics.
        """

        def judged(donated: dict[str, Any]) -> tuple[Any, Any, Any]:
            before = TrainState(**donated, **kept)
            with _said_of_update():
                updated = self.update_fn(before, merged)
            after, metrics = _checked_update(before, updated)
            after = dataclasses.replace(after, own=op_state)
            metrics = metrics | (told or {})
            values, has_examples, whole = _values(metrics)
            accepted = whole & (has_examples | (not self.needs_examples))
            if finite is not None:
                accepted, whole = accepted & finite, whole & finite
            by_loss = finite is None and "loss" in values and not values["loss"].ndim
            donated, now = split_state(after)
            accepts = accepted | (self.on_nonfinite == "ignore")
            now = {
                name: jnp.where(accepts, x, kept[name])
                for name, x in now.items()
                if x is not kept[name]
            }
            values = self._by_layout(metrics, values)
            return accepted, donated, (now, values, None if by_loss else whole)

        if self.on_nonfinite == "ignore":
            _, donated, rest = judged(donated)
        else:
            donated, rest = accept_or_keep(judged, donated)
        return donated, *rest

    def _by_layout(
        self, metrics: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The metrics that are one value, and those of which each tower has one."""
        num_towers = self.passes[0].strategy.num_towers
        parts: dict[str, dict[str, Any]] = {"one": {}, "own": {}}
        for name, x in values.items():
            is_own = isinstance(metrics[name], PerTower)
            if is_own and x.shape[:1] != (num_towers,):
                raise ValueError(
                    f"metrics[{name!r}] is tj.PerTower of shape {x.shape}, but dim 0"
                    f" runs over the {num_towers} towers. Return the array alone where"
                    " it is one value."
                )
            parts["own" if is_own else "one"][name] = x
        return parts

    def located(self, run: Run, donated: Any, kept: Any, *args: PyTree) -> tuple[Any]:
        """The towers alone, of which is told what is not finite."""
        batch, at = args[:3], args[3:]
        for i in at:
            batch = jax.tree.map(lambda x, i=i: x[i], batch)
        state = TrainState(**donated, **kept)
        values = self.merged(run, self._locating, state, batch)
        return (values[2].flags,)

    @functools.cached_property
    def _locating(self) -> tuple[Pass, ...]:
        looks = Check(every=1, desync=False)
        changes: Any = {"check": looks, "finite": False, "alone": None}
        last = dataclasses.replace(self.passes[-1], **changes)
        return (*self.passes[:-1], last)

    def merged(
        self,
        run: Run,
        passes: tuple[Pass, ...],
        state: TrainState,
        batch: tuple[PyTree, ...],
    ) -> tuple[PyTree, jax.Array | None, Any, PyTree, dict[str, jax.Array]]:
        """What the passes came to; is all finite; of the last what its check found.

        And what its cross-tower op keeps and tells.
        """
        merged: tuple[Any, ...] = ()
        whole, found, op_state, told = [], None, None, {}
        for one in passes:
            out = _come_to(run, one, state, *batch, merged)
            tree, own, finite, found, op_state, told = out
            tree = _for_what_follows(one, filled(tree, {"own": own}))
            before = merged[0] if merged else []
            merged = ([*before, tree] if self.keeps_all else tree,)
            whole += [] if finite is None else [finite]
        finite = functools.reduce(jnp.logical_and, whole) if whole else None
        return merged[0], finite, found, op_state, told


def _come_to(run: Run, one: Pass, *args: Any) -> Any:
    """What a pass comes to; of a loss of several means after one for its weights."""
    try:
        return run(one, *args)
    except UnknownWeights:
        weights, _ = run(one.for_weights, *args)[0]
        return run(one.with_weights, *args[:-1], (*args[-1], weights))


def _for_what_follows(one: Pass, tree: PyTree) -> PyTree:
    """What a pass came to; of a `PinnedTree`, what is made of it has the same bits.

    Rows that lie over devices XLA would add up in an order that depends on these, and
    beyond a barrier one program is compiled, whatever a value came from.
    """
    placement = one.strategy.placement
    if not (placement.axes.in_turn and one.strategy.cross_tower_ops.needs_every_tower):
        return tree
    mirrored = placement.sharding(Layout.MIRRORED)
    on_all = functools.partial(lax.with_sharding_constraint, shardings=mirrored)
    return lax.optimization_barrier(map_parts(Rows, on_all, tree))


_UPDATE = (
    "update_fn; a gradient is at least float32, of narrower parameters take"
    " optax.tree.cast_like(grads, state.params)"
)


def _checked_update(
    before: TrainState, updated: Any
) -> tuple[TrainState, dict[str, Any]]:
    """The next state and the metrics, once they are what a step can go on from."""
    if not (isinstance(updated, tuple) and len(updated) == 2):
        raise ValueError(
            f"update_fn returned a {type(updated).__name__}; it returns (state,"
            " metrics), such as (dataclasses.replace(state, params=...), {'loss':"
            " merged['loss']})."
        )
    after, metrics = updated
    if not isinstance(after, TrainState):
        raise ValueError(
            f"update_fn returned a {type(after).__name__} as the state. Return"
            " dataclasses.replace(state, params=..., opt_state=...)."
        )
    if not hasattr(metrics, "items"):
        raise ValueError(
            f"update_fn returned a {type(metrics).__name__} as metrics. Return a"
            " mapping of names to arrays and metric states, {} for none."
        )
    for field in dataclasses.fields(TrainState):
        was, now = getattr(before, field.name), getattr(after, field.name)
        if now is not was:
            now = checked_like(was, now, f"state.{field.name}", _UPDATE)
            after = dataclasses.replace(after, **{field.name: now})
    return after, dict(metrics)


def _values(metrics: dict[str, Any]) -> tuple[dict[str, Any], Any, jax.Array]:
    """Each metric as one value; has the loss examples; are the guarded ones finite?"""
    values = {name: _value(name, x) for name, x in metrics.items()}
    loss = metrics.get("loss")
    has_examples = jnp.bool_(True)
    terms = loss.terms if isinstance(loss, Means) else (loss,)
    terms = [term for term in terms if isinstance(term, Weighted)]
    for term in terms:
        # A sum that is not finite shows even where the weight is 0.
        values["loss"] = jnp.where(jnp.isfinite(term.sum), values["loss"], term.sum)
    if terms:  # no examples, nothing to learn
        has_examples = sum(term.weight for term in terms) != 0
    looked_at = [values["loss"]] if "loss" in values else jax.tree.leaves(values)
    finite = [
        jnp.isfinite(x).all() for x in looked_at if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    whole = functools.reduce(jnp.logical_and, finite, jnp.bool_(True))
    return values, has_examples, whole


def _value(name: str, x: Any) -> Any:
    if is_metric(x):
        return metric_values({name: x})[name]
    if isinstance(x, Means):
        x = x.value
    if isinstance(x, PerTower):
        x = over_members(compute)(x.values) if is_metric(x.values) else x.values
    if not (hasattr(x, "dtype") or isinstance(x, int | float)):
        raise ValueError(
            f"metrics[{name!r}] is a {type(x).__name__}. A metric of a step is one"
            " array or one state, tj.Sum or tj.PerTower: make one of each part, and of"
            " tj.Rows pass the .value, [B, ...], padded rows included."
        )
    return jnp.asarray(x)


@contextlib.contextmanager
def _said_of_update() -> Iterator[None]:
    """Around an update: says that towers have met before it, and what they left."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ReplicationError(
            f"The update communicates: {error}. It sees what the towers add up to,"
            " once, after they have met: leave the collective out, or return what is to"
            " be reduced from the towers, as tj.Weighted or tj.Sum."
        ) from error
    except (TypeError, ValueError) as error:
        if re.search(r"\b(Weighted|Sum|Rows|PerTower)\b", str(error)):
            error.add_note(
                "merged holds the types that towers returned; their numbers are"
                " merged[...].value, such as merged['grads'].value."
            )
        raise


def repeated_recipe(recipe: Recipe) -> Recipe:
    """Several steps in one program."""

    def steps(
        run: Run,
        donated: Any,
        kept: Any,
        *args: PyTree,
    ) -> Any:
        *batches, count = args

        def at(donated: Any, now: Any, i: Any) -> Any:
            batch = jax.tree.map(lambda x: x[i], batches)
            return recipe.fn(run, donated, {**kept, **now}, *batch)

        _, now, *shapes = jax.eval_shape(lambda: at(donated, {}, 0))
        now = {name: kept[name] for name in now}
        rows = jax.tree.map(
            lambda s: jnp.zeros((batches[1].shape[0], *s.shape), s.dtype), tuple(shapes)
        )

        def body(i: jax.Array, done: Any) -> Any:
            donated, now, rows = done
            donated, now, *results = at(donated, now, i)
            rows = jax.tree.map(
                lambda all_rows, x: all_rows.at[i].set(x), rows, tuple(results)
            )
            return donated, now, rows

        # The count is a value, not a shape: a shorter last call is no new program.
        donated, now, rows = lax.fori_loop(0, count, body, (donated, now, rows))
        return donated, now, *rows

    stacked = dict.fromkeys(("batch", "num_valid"), Layout.PER_TOWER_STEPS)
    in_layouts = {**recipe.in_layouts, **stacked, "count": Layout.MIRRORED}
    metrics = {"one": Layout.MIRRORED, "own": Layout.PER_TOWER_STEPS}
    out_layouts = {**recipe.out_layouts, "metrics": metrics}
    return dataclasses.replace(
        recipe, fn=steps, in_layouts=in_layouts, out_layouts=out_layouts
    )
