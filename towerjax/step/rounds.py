"""Local SGD and DiLoCo: towers train alone, and synchronise inside a ``cond``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from towerjax.collectives.packing import all_finite
from towerjax.metrics.weighted import UnknownWeights, Weighted
from towerjax.step.engine import Engine, Outcome
from towerjax.step.faults import NonFiniteError, Place
from towerjax.step.one_pass import Pass
from towerjax.step.proving import Run
from towerjax.step.returned import fill_holes
from towerjax.step.state import TrainState, split_state
from towerjax.step.sync import DiLoCo
from towerjax.step.update import (
    Trainable,
    apply_update,
    trained_part,
    with_trained,
)
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower
from towerjax.towers.variables import TowerLocal, stack_local
from towerjax.towers.vmap_sums import with_leading_dim
from towerjax.types import PyTree, Reduction, Sum
from towerjax.types.leaves import widen_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """What each tower has of its own between meetings; in a state ``[T, ...]``."""

    params: PyTree  # those that are trained
    opt_state: PyTree
    weight: jax.Array  # [P], of its losses since each fragment was sent
    loss: Weighted  # the mean since towers met
    bad: jax.Array  # the first step since then that was not finite, from 1; or 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer:
    """``state.opt_state`` of a step whose towers train alone."""

    fragments: tuple[PyTree, ...]  # the outer optimizer's states
    loss: Weighted  # of all towers in the last round; of weight 0 before it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FoundAtMeeting:
    """What a meeting finds: steps of single towers that were not finite."""

    any_fault: jax.Array  # () bool
    bad: jax.Array  # [T], as in Own

    def error(self, number: int) -> Exception:
        """The error to raise, once this is on the host."""
        bad = np.asarray(self.bad)
        places = [
            Place(int(bad[t]) - 1, int(t), "loss", "loss", "NaN or infinity")
            for t in np.flatnonzero(bad)
        ]
        return NonFiniteError(number, places, alone=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """A step whose towers train alone and meet every ``sync.every`` steps."""

    one: Engine  # the step of all towers; each tower runs it as if it were alone
    sync: DiLoCo
    optimizer: optax.GradientTransformation  # each tower's
    trainable: Trainable | None

    @functools.cached_property
    def engine(self) -> Engine:
        """The local step: each tower updates its own parameters."""
        (given,) = self.one.passes
        own: Any = {"tower_fn": self._tower, "alone": self._alone, "guards_sums": False}
        local = dataclasses.replace(given, **own)
        return dataclasses.replace(self.one, passes=(local,))

    @functools.cached_property
    def meetings(self) -> tuple[Pass, ...]:
        """The pass that sends a fragment, for each fragment."""
        (given,) = self.one.passes
        return tuple(
            Pass(functools.partial(self._send, p), given.strategy)
            for p in range(self.sync.fragments)
        )

    def begin(self, part: PyTree) -> Outer:
        """The outer optimizer's state before the first step, for trained parameters."""
        fragments = [trained_part(part, flags) for flags in self._fragments(part)]
        outer = tuple(map(self.sync.outer.init, fragments))
        return Outer(outer, Weighted(jnp.zeros(()), jnp.zeros(())))

    def own(self, params: PyTree) -> TowerLocal:
        """Each tower's own before the first step."""
        part = trained_part(params, self.trainable)
        none, weight = Weighted(0.0, 0.0), jnp.zeros(self.sync.fragments)
        own = Own(part, self.optimizer.init(part), weight, none, jnp.int32(0))
        towers = self.one.passes[0].strategy.num_towers
        return stack_local(TowerLocal(own, Reduction.NONE), towers)

    def step(
        self, run: Run, donated: dict[str, Any], kept: dict[str, Any], *batch: PyTree
    ) -> Outcome:
        """The whole step, of global values."""
        state = TrainState(**donated, **kept)
        out = run(self.engine.passes[0], state, *batch, ())
        after = fill_holes(out.merged, own=out.own)
        state = dataclasses.replace(state, **after, step=state.step + 1)
        bad: Any = 0
        for p in range(self.sync.fragments):
            state, found = self._meet(run, state, batch, p)
            bad += found
        loss = state.opt_state.loss
        # Before the first meeting there is no loss of all towers.
        last_loss = jnp.where(loss.weight > 0, loss.value, jnp.nan)
        metrics = {"one": {"loss": last_loss}, "own": {}}
        donated, now = split_state(state)[0], {"step": state.step}
        fine = (bad == 0).all()
        raises = self.one.on_nonfinite == "raise"
        found = FoundAtMeeting(~fine, bad) if raises else None
        return Outcome(donated, now, metrics, fine, found)

    def on(self, strategy: Strategy) -> Engine:
        """Refuses: what an audit compares is another here, by design."""
        raise ValueError(
            "With sync= towers train alone, and are not one tower by design, so there"
            " is nothing to audit. Leave out audit=, or say sync=tj.sync.EveryStep()."
        )

    @property
    def find_flags(self) -> Callable[..., tuple[Any]]:
        """As `Engine.find_flags`, with each tower's own parameters."""
        return self.engine.find_flags

    def _tower(self, state: TrainState, rows: PyTree, tower: Tower) -> PyTree:
        """What one tower returns, given its own parameters."""
        try:
            out = self.one.passes[0].tower_fn(self._of_one(state), rows, tower)
        except UnknownWeights as error:
            error.add_note(
                "sync= lets towers go alone: return one tj.Weighted, to which"
                " tj.penalty(...) may be added."
            )
            raise
        if out["metrics"] or "extra" in out:
            raise ValueError(
                "The loss function returned TowerOutput(metrics=...) or extra=, but"
                " with sync= towers train alone and merge no such value. Return the"
                " loss and local=, and measure the rest with tj.evaluate."
            )
        return out

    def _of_one(self, state: TrainState) -> TrainState:
        """The state of a tower as if it were the only one."""
        own = state.own.value
        params, opt_state = with_trained(own.params, state.params), own.opt_state
        return dataclasses.replace(state, params=params, opt_state=opt_state, own=None)

    def _alone(self, state: TrainState, returned: dict[str, Any]) -> PyTree:
        """A tower's own next state, from its own rows."""
        own, loss, grads = state.own.value, returned["loss"], returned["grads"]
        finite = None
        if self.one.guard == "gradients":
            finite = all_finite(grads.sum)
        donated, kept = split_state(self._of_one(state))

        def updated(donated: dict[str, Any]) -> tuple[Any, ...]:
            out = self.one.update(donated, kept, returned, finite)
            return out.donated, out.metrics["one"]["loss"], out.finite

        donated, value, fine = with_leading_dim(updated, donated)
        fine = jnp.isfinite(value) if fine is None else fine
        counts = fine if self.one.on_nonfinite != "ignore" else jnp.bool_(True)
        weight = jnp.where(counts, grads.weight, 0).astype(own.weight.dtype)
        total = jnp.where(weight > 0, loss.value * weight, 0)
        merged = own.loss.merge(Weighted(total.astype(own.loss.sum.dtype), weight))
        first = jnp.where(fine | (own.bad > 0), own.bad, state.step + 1)
        part = trained_part(donated["params"], self.trainable)
        own = Own(part, donated["opt_state"], own.weight + weight, merged, first)
        return {"own": TowerLocal(own, Reduction.NONE), "local": donated["local"]}

    def _send(self, p: int, state: TrainState, rows: PyTree, tower: Tower) -> PyTree:
        """What one tower sends of a fragment: its weighted move since it was sent."""
        del rows
        own, (outer, flags) = state.own.value, self._fragment(state.params, p)
        weight = own.weight[p]

        def moved(outer: jax.Array, x: jax.Array) -> jax.Array:
            dtype = widen_dtype(x.dtype)
            return jnp.where(weight > 0, outer.astype(dtype) - x.astype(dtype), 0)

        move = jax.tree.map(moved, outer, trained_part(own.params, flags))
        move = jax.tree.map(lambda x: x * weight.astype(x.dtype), move)
        bad = jnp.zeros(tower.num_towers, jnp.int32).at[tower.id].set(own.bad)
        return {"move": Weighted(move, weight), "loss": own.loss, "bad": Sum(bad)}

    def _meet(
        self,
        run: Run,
        state: TrainState,
        batch: tuple[PyTree, ...],
        p: int,
    ) -> tuple[TrainState, jax.Array]:
        """The state after a fragment's meeting, if due; ``bad`` of each tower."""
        own, before = state.own.value, state.opt_state
        mine, flags = self._fragment(state.params, p)
        offset = (p + 1) * self.sync.every // self.sync.fragments
        is_due = (state.step - offset) % self.sync.every == 0
        # XLA copies the operands of a branch: leave out what it does not need.
        seen = dataclasses.replace(state, opt_state=(), local={})
        owned = dataclasses.replace(own, opt_state=())
        seen = dataclasses.replace(seen, own=TowerLocal(owned, Reduction.NONE))

        def meet() -> tuple[Any, ...]:
            out = run(self.meetings[p], seen, *batch, ()).merged
            move, loss = out["move"], out["loss"]
            old = (mine, before.fragments[p])
            new = apply_update(self.sync.outer, move.value, old[1], old[0], loss.value)
            new = jax.tree.map(lambda x, y: jnp.where(move.weight > 0, x, y), new, old)
            return *new, loss, out["bad"].value

        def go_on() -> tuple[Any, ...]:
            nobody = jnp.zeros(own.bad.shape, jnp.int32)
            return mine, before.fragments[p], before.loss, nobody

        mine, after, loss, bad = lax.cond(is_due, meet, go_on)
        outer = (*before.fragments[:p], after, *before.fragments[p + 1 :])
        own = _reset_counters(own, is_due, p)
        own = self._adopt(own, mine, flags, state.step - offset)
        state = dataclasses.replace(
            state,
            params=with_trained(mine, state.params),
            opt_state=Outer(outer, loss),
            own=TowerLocal(own, Reduction.NONE),
        )
        return state, bad

    def _adopt(self, own: Own, mine: PyTree, flags: PyTree, since: jax.Array) -> Own:
        """A tower's own after it takes the outer parameters, if that is due."""
        since, keep = since - self.sync.overlap, self.sync.keep
        is_due = (since >= 0) & (since % self.sync.every == 0)

        def taken(x: jax.Array, outer: jax.Array) -> jax.Array:
            new = keep * x + (1 - keep) * outer[None] if keep else outer[None]
            return jnp.where(is_due, new.astype(x.dtype), x)

        params = jax.tree.map(taken, trained_part(own.params, flags), mine)
        params = with_trained(params, own.params)
        return dataclasses.replace(own, params=params)

    def _fragment(self, params: PyTree, p: int) -> tuple[PyTree, PyTree]:
        """The parameters of a fragment, None for others; and the fragment's flags."""
        part = trained_part(params, self.trainable)
        flags = self._fragments(part)[p]
        return trained_part(part, flags), flags

    def _fragments(self, part: PyTree) -> list[PyTree]:
        """For each fragment the flags of its leaves; sizes are as equal as may be."""
        leaves, treedef = jax.tree.flatten(part)
        sizes, chosen = [0] * self.sync.fragments, [0] * len(leaves)
        if len(leaves) < len(sizes):
            raise ValueError(
                f"DiLoCo.fragments={len(sizes)} is more than the parameters that are"
                f" trained, {len(leaves)}. Use as many fragments, or fewer."
            )
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            chosen[i] = sizes.index(min(sizes))
            sizes[chosen[i]] += max(leaves[i].size, 1)
        return [treedef.unflatten([x == p for x in chosen]) for p in range(len(sizes))]


def _reset_counters(own: Own, is_due: jax.Array, p: int) -> Own:
    """A tower's own with the counters of a fragment at 0, if it was sent."""

    def reset(x: jax.Array) -> jax.Array:
        return jnp.where(is_due, jnp.zeros_like(x), x)

    weight = own.weight.at[:, p].set(reset(own.weight[:, p]))
    loss, bad = jax.tree.map(reset, (own.loss, own.bad))
    return dataclasses.replace(own, weight=weight, loss=loss, bad=bad)
