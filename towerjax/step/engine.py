"""The engine: run the passes of a step one after another, then update once."""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.packing import all_finite
from towerjax.metrics.state import compute, has_value
from towerjax.metrics.weighted import Means, UnknownWeights, Weighted
from towerjax.proof.findings import ReplicationError
from towerjax.step.one_pass import Pass, PassResult
from towerjax.step.proving import Recipe, Run
from towerjax.step.returned import fill_holes
from towerjax.step.state import TrainState, split_state, state_layout
from towerjax.step.update import accept_or_keep, check_types
from towerjax.towers.executors import vmap_members
from towerjax.towers.strategies import Strategy
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PerTower, PyTree, Rows
from towerjax.types.leaves import is_key, map_parts

OnNonfinite = Literal["raise", "skip", "ignore"]
Guard = Literal["loss", "gradients"]


class Outcome(NamedTuple):
    """What a step returns; or the layouts of this."""

    donated: Any  # the donated fields of the next state
    now: Any  # its other fields, those that changed
    metrics: Any  # {"one": values, "own": one value for each tower}
    finite: Any = None  # whether the guarded values were; None where the loss says so


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A step before it is compiled: passes of towers, then one update."""

    passes: tuple[Pass, ...]  # each is given the merged result of the one before
    # (state, merged) -> (state, metrics), of global values; an update that guards
    # itself also returns whether all was finite.
    update_fn: Callable[[TrainState, Any], tuple[Any, ...]]
    on_nonfinite: OnNonfinite
    # What must be finite: metrics["loss"], or all metrics where none has that name;
    # with "gradients" also all sums over towers.
    guard: Guard
    # Whether each pass, and the update, gets a list of all merged results so far, in
    # place of the last result alone.
    keeps_all: bool = False
    # Whether a step with a loss of weight 0 is refused.
    needs_examples: bool = True
    # merged -> means that guard the step besides the loss.
    other_losses: Callable[[Any], Sequence[Weighted]] | None = None

    def step(
        self, run: Run, donated: dict[str, Any], kept: dict[str, Any], *batch: PyTree
    ) -> Outcome:
        """The whole step, of global values."""
        state = TrainState(**donated, **kept)
        merged, finite, _ = self.run_passes(run, self.passes, state, batch)
        update, strategy = self.update, self.passes[0].strategy
        if strategy.state == "sharded" and strategy.cross_tower_ops.needs_every_tower:
            layouts = _layouts(strategy, state.params, merged)
            update = run.in_parts(update, state.params, *layouts)
        out = update(donated, kept, merged, finite)
        return out._replace(now={**out.now, "step": kept["step"] + 1})

    def update(
        self,
        donated: dict[str, Any],
        kept: dict[str, Any],
        merged: PyTree,
        finite: jax.Array | None,
    ) -> Outcome:
        """The next state, if it is accepted, and the metrics."""

        def attempt(donated: dict[str, Any]) -> tuple[Any, Any, Any]:
            before = TrainState(**donated, **kept)
            with _explain_errors(before):
                updated = self.update_fn(before, merged)
            after, metrics, *told = _check_update(before, updated)
            others = self.other_losses(merged) if self.other_losses else ()
            values, has_examples, is_fine = _evaluate_metrics(metrics, others)
            is_fine = is_fine if finite is None else is_fine & finite
            accepted = is_fine & (has_examples | (not self.needs_examples))
            by_loss = finite is None and "loss" in values and not values["loss"].ndim
            by_loss &= not others
            if told:
                [is_fine], accepted, by_loss = told, jnp.bool_(True), False
            donated, now = split_state(after)
            accepts = accepted | (self.on_nonfinite == "ignore")
            now = {
                name: jnp.where(accepts, x, kept[name])
                for name, x in now.items()
                if x is not kept[name]
            }
            apart: dict[str, dict[str, Any]] = {"one": {}, "own": {}}
            for name, x in values.items():
                is_own = isinstance(metrics[name], PerTower)
                apart["own" if is_own else "one"][name] = x
            return accepted, donated, (now, apart, None if by_loss else is_fine)

        if self.on_nonfinite == "ignore":
            _, donated, rest = attempt(donated)
        else:
            donated, rest = accept_or_keep(attempt, donated)
        return Outcome(donated, *rest)

    def find_flags(self, run: Run, donated: Any, kept: Any, *batch: Any) -> tuple[Any]:
        """Run the towers once more, without an update, to flag what is not finite."""
        state = TrainState(**donated, **kept)
        changes: Any = {"flags": True, "guards_sums": False}
        passes = tuple(dataclasses.replace(one, **changes) for one in self.passes)
        *_, outs = self.run_passes(run, passes, state, batch)
        return ([out.flags for out in outs],)

    def on(self, strategy: Strategy) -> "Engine":
        """The passes on other towers, without checks and without micro-batches."""
        changes: Any = {"strategy": strategy, "micro_batches": 1, "guards_sums": False}
        passes = tuple(dataclasses.replace(one, **changes) for one in self.passes)
        return dataclasses.replace(self, passes=passes)

    def merge_all(self, run: Run, donated: Any, kept: Any, *batch: Any) -> list[PyTree]:
        """What the towers of each pass return, merged, without an update."""
        state = TrainState(**donated, **kept)
        *_, outs = self.run_passes(run, self.passes, state, batch)
        return [fill_holes(out.merged, own=out.own) for out in outs]

    def run_passes(
        self,
        run: Run,
        passes: tuple[Pass, ...],
        state: TrainState,
        batch: tuple[PyTree, ...],
    ) -> tuple[PyTree, jax.Array | None, list[PassResult]]:
        """``(merged, finite, outs)``: ``outs`` are the passes' results."""
        merged: tuple[Any, ...] = ()
        outs: list[PassResult] = []
        for one in passes:
            out = _run_pass(run, one, state, *batch, merged)
            tree = _pin_result(one, fill_holes(out.merged, own=out.own))
            before = merged[0] if merged else []
            merged = ([*before, tree] if self.keeps_all else tree,)
            outs.append(out)
        finite = [out.finite for out in outs if out.finite is not None]
        is_fine = functools.reduce(jnp.logical_and, finite) if finite else None
        return merged[0], is_fine, outs


def _layouts(
    strategy: Strategy, params: PyTree, merged: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Those of `Engine.update`: what it is given, takes parts of, and returns."""
    donated, kept = split_state(state_layout(strategy))
    one, own = Layout.MIRRORED, Layout.PER_TOWER
    shapes = {x.shape for x in jax.tree.leaves(params)}

    def layouts(own: Layout, split: Layout) -> PyTree:
        def of(x: Any) -> Layout:
            if isinstance(x, PerTower | TowerLocal):
                return own
            return split if x.shape in shapes else one

        is_own = lambda x: isinstance(x, PerTower | TowerLocal)  # noqa: E731
        return jax.tree.map(of, merged, is_leaf=is_own)

    given, taken = layouts(own, one), layouts(one, Layout.SHARDED)
    out = Outcome(donated, one, {"one": one, "own": own}, one)
    return (donated, kept, given, one), (one, one, taken, one), out


def _run_pass(run: Run, one: Pass, *args: Any) -> PassResult:
    """Run a pass; for a loss of several means first a pass for its weights alone."""
    try:
        return run(one, *args)
    except UnknownWeights:
        weights, _ = run(one.for_weights, *args).merged
        return run(one.with_weights, *args[:-1], (*args[-1], weights))


def _pin_result(one: Pass, tree: PyTree) -> PyTree:
    """Constrain the result of a pass, so that with `PinnedTree` bits are the same.

    XLA would add up rows that are split over devices in an order that depends on their
    number, so rows are gathered first. The barrier keeps XLA from fusing what follows
    with what came before, which differs with the number of devices.
    """
    placement = one.strategy.placement
    if not (placement.axes.in_turn and one.strategy.cross_tower_ops.needs_every_tower):
        return tree
    mirrored = placement.sharding(Layout.MIRRORED)
    on_all = functools.partial(lax.with_sharding_constraint, shardings=mirrored)
    return lax.optimization_barrier(map_parts(Rows, on_all, tree))


_UPDATE = (
    "update_fn, and give step.init(params, opt_state=..., extra=...) what it keeps"
    " there; a gradient is at least float32, of narrower parameters take"
    " optax.tree.cast_like(grads, state.params)"
)


def _check_update(before: TrainState, updated: Any) -> tuple[Any, ...]:
    """The next state, the metrics and more that ``update_fn`` returned, checked."""
    given: Any = updated if isinstance(updated, tuple) else (updated,)
    kinds = (TrainState, Mapping, jax.Array)[: max(len(given), 2)]
    fits = len(given) == len(kinds) and all(map(isinstance, given, kinds))
    if not fits or any(x.shape or x.dtype != bool for x in given[2:]):
        raise ValueError(
            f"update_fn returned {', '.join(type(x).__name__ for x in given)}, but it"
            " returns (state, metrics), such as (dataclasses.replace(state,"
            " params=...), {'loss': merged['loss']}); an update that refuses by itself"
            " what is not finite also returns whether all was, a bool ()."
        )
    after, metrics, *told = given
    for field in dataclasses.fields(TrainState):
        was, now = getattr(before, field.name), getattr(after, field.name)
        if now is not was:
            now = check_types(was, now, f"state.{field.name}", _UPDATE)
            after = dataclasses.replace(after, **{field.name: now})
    return after, dict(metrics), *told


def join_metrics(metrics: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The user's metrics, joined with those that the step adds."""
    if both := sorted(metrics.keys() & more.keys()):
        raise ValueError(
            f"metrics[{both[0]!r}] is a name of a term of the loss; give yours another."
        )
    return metrics | more


def _evaluate_metrics(
    metrics: dict[str, Any], others: Sequence[Weighted]
) -> tuple[dict[str, Any], Any, jax.Array]:
    """Values, whether there are examples, and whether what is guarded is finite."""
    values = {name: _value_of_metric(name, x) for name, x in metrics.items()}
    loss = metrics.get("loss")
    has_examples = jnp.bool_(True)
    terms = loss.terms if isinstance(loss, Means) else (loss,)
    terms = [term for term in terms if isinstance(term, Weighted)]
    for term in terms:
        # Weight 0 gives the value 0: a sum that is not finite must still show.
        values["loss"] = jnp.where(jnp.isfinite(term.sum), values["loss"], term.sum)
    if terms:
        guarded = [*terms, *others]
        has_examples = sum(jnp.sum(term.weight) for term in guarded) != 0
    looked_at = values["loss"] if "loss" in values else values
    return values, has_examples, all_finite((looked_at, [x.sum for x in others]))


def _value_of_metric(name: str, x: Any) -> Any:
    value = compute(x) if has_value(x) else x
    if isinstance(x, PerTower):
        value = vmap_members(compute)(x.values) if has_value(x.values) else x.values
    if is_key(value) or not (hasattr(value, "dtype") or isinstance(value, int | float)):
        kind = "random key" if is_key(value) else type(value).__name__
        raise ValueError(
            f"metrics[{name!r}] is a {kind}. A metric of a step is one array of numbers"
            " or one state of one array, tj.Sum or tj.PerTower: make one of each part;"
            " of tj.Rows pass the .value, [B, ...], padded rows included."
        )
    return jnp.asarray(value)


@contextlib.contextmanager
def _explain_errors(before: TrainState) -> Iterator[None]:
    """Explain errors of ``update_fn``: a collective, a merged value, no `opt_state`."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ReplicationError(
            f"The update communicates: {error}. It runs once, of what the towers add up"
            " to: leave the collective out."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        if re.search(r"\b(Weighted|Means|Sum|Rows|PerTower)\b", str(error)):
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


def repeated_recipe(recipe: Recipe) -> Recipe:
    """A recipe that runs up to ``K`` steps in one program."""

    def steps(run: Run, donated: Any, kept: Any, *args: PyTree) -> Any:
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

        # The count is a value and not a shape, so a shorter last call compiles nothing.
        donated, now, rows = lax.fori_loop(0, count, body, (donated, now, rows))
        return Outcome(donated, now, *rows)

    stacked = dict.fromkeys(("batch", "num_valid"), Layout.PER_TOWER_STEPS)
    in_layouts = {**recipe.in_layouts, **stacked, "count": Layout.MIRRORED}
    metrics = {"one": Layout.MIRRORED, "own": Layout.PER_TOWER_STEPS}
    out_layouts = recipe.out_layouts._replace(metrics=metrics)
    return dataclasses.replace(
        recipe, fn=steps, in_layouts=in_layouts, out_layouts=out_layouts
    )
