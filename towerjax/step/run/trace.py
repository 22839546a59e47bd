"""Trace a step: the passes of its towers and then its update, each once."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend.core import ClosedJaxpr

from towerjax.jaxprs.flops import Flops, count_flops
from towerjax.lowering.sharded_values import shards_of
from towerjax.lowering.shards import on_shards
from towerjax.lowering.tower_axis import TowerPrograms
from towerjax.step.passes.on_device import on_device
from towerjax.step.passes.one_pass import Pass, TracedPass
from towerjax.step.plan import Plan, WholeSteps
from towerjax.step.run.prove import Proof, join_proofs, prove
from towerjax.step.state.next_state import Outcome, accept
from towerjax.step.state.train_state import split_state, state_layout
from towerjax.towers.executors import Static, over_devices
from towerjax.towers.on_towers import OnTowers
from towerjax.towers.outputs import is_per_tower_value, layouts_of, unmark_per_tower
from towerjax.types import Layout, PyTree, Rows
from towerjax.types.trees import shapes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced step, which can be called as a JAX function of global values."""

    plan: Plan
    args: tuple[PyTree, ...]  # the shapes of the arguments, ``(donated, kept, *batch)``
    passes: tuple[TracedPass, ...]
    finish: ClosedJaxpr  # the plan's ``next``
    shapes: PyTree  # the shapes of the results
    of_whole_steps: Proof | None = None  # the proof of whole steps

    @functools.cached_property
    def proof(self) -> Proof:
        """The proof, made without a device, that mirrored values are replicated.

        Raises:
          ReplicationError: A value differs. Names the leaf and the line.
        """
        on_devices = self.update_on_devices
        proof = prove(self.passes, self.finish, update_on_devices=on_devices)
        steps = self.of_whole_steps
        return proof if steps is None else join_proofs([proof, steps])

    @property
    def tower_programs(self) -> list[TowerPrograms]:
        """The traced programs of each pass's towers, which a proof can use again."""
        return [x.towers.programs for x in self.passes]

    @property
    def out(self) -> PyTree:
        """The shapes of the step's results."""
        if not self.plan.accepts:
            return self.shapes
        _, donated, rest = self.shapes
        return Outcome(donated, *rest)

    @property
    def outs(self) -> PyTree:
        """The layouts of the results, as a prefix tree.

        A name in the tree stands for the layouts of the argument with that name.
        """

        def of(out: str | Layout, results: PyTree) -> PyTree:
            return layouts_of(results) if out is Layout.MIRRORED else out

        return jax.tree.map(of, self.plan.outs, self.out)

    @property
    def flops(self) -> Flops:
        """The arithmetic of a step: that of all towers, and of one update."""
        total = count_flops(self.finish)
        for of_pass in self.passes:
            towers = of_pass.pass_.strategy.placement.num_towers
            total += count_flops(of_pass.towers.jaxpr).times(towers)
        return total

    @functools.cached_property
    def update_on_devices(self) -> bool:
        """Whether each device runs the update, and not one program of global values.

        Each device runs it in two cases: if shards are updated in the order of one
        device, and if a model function, which contains the update, was traced in the
        mesh of a tower.
        """
        if not self.plan.accepts:
            return False
        strategy = self.plan.strategy
        is_of_towers = self.plan.passes.hold_update and strategy.placement.within
        return bool(is_of_towers) or self._is_exact

    @property
    def _is_exact(self) -> bool:
        """Whether a sharded state is updated with the same bits as on one device."""
        strategy = self.plan.strategy
        is_exact = strategy.state == "sharded" and strategy.exact
        return is_exact and strategy.placement.num_devices > 1

    def __call__(self, *args: PyTree) -> PyTree:
        """Run the step on ``(donated, kept, *batch)``, which are global values."""
        plan = self.plan
        passes = iter(self.passes)

        def call(pass_: Pass, results: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
            out = next(passes).run(results)
            return out if pass_.reads_local else _pinned(pass_, out)

        return self.finished(*plan.passes.run(call, args))

    def finished(self, *results: PyTree) -> PyTree:
        """Run the update on the results of the passes.

        ``results`` are ``(donated, kept, merged, reports)``; see `Passes.run`.
        """
        plan = self.plan
        if not plan.accepts:
            leaves = jax.tree.leaves(results)
            out = jax.core.eval_jaxpr(self.finish.jaxpr, self.finish.consts, *leaves)
            return jax.tree.unflatten(jax.tree.structure(self.shapes), out)
        if not self.update_on_devices:
            return self._update(*results)
        place = plan.strategy.placement
        shards = None
        if place.num_devices > 1:
            params = results[0]["params"]
            given_at, taken_at = _layouts(plan, params, results[2:])
            outs_at = jax.tree.map(lambda out: plan.ins.get(out, out), self.outs)
            shards = shards_of(
                place,
                (results, given_at),
                (self.out, outs_at),
                params=params,
                taken=taken_at,
                exact=self._is_exact,
            )
        update = functools.partial(on_shards, self._update, replicated=True)
        return over_devices(
            update,
            place,
            [Layout.MIRRORED] * len(results),
            Layout.MIRRORED,
            shards=shards,
        )(*results)

    def _update(self, *results_of_passes: PyTree) -> Outcome:
        donated, rest = accept(self.finish, self.shapes, *results_of_passes)
        return Outcome(donated, *rest)


def trace(plan: Plan, args: Sequence[PyTree]) -> Traced:
    """Trace the step for arguments of these shapes, ``(donated, kept, *batch)``."""
    shapes_of_args = shapes_of(tuple(args))
    passes = list[TracedPass]()

    def call(pass_: Pass, results: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        *of_step, before = results
        of_pass = *of_step, shapes_of(before)
        run = functools.partial(on_device, pass_)
        layouts = tuple(pass_.ins.values())
        towers = OnTowers(run, pass_.strategy.placement, layouts, of_pass)
        passes.append(TracedPass(pass_, of_pass, towers))
        return passes[-1].out

    def finish(*results: PyTree) -> tuple[PyTree, Static]:
        donated, kept, merged, looked_at = unmark_per_tower(results)
        out = plan.next(donated, kept, merged, looked_at)
        if isinstance(out, WholeSteps):
            return out.results, Static(out.proof)
        return out, Static(None)

    results = plan.passes.run(call, shapes_of_args)
    closed, out = jax.make_jaxpr(finish, return_shape=True)(*results)
    shapes, proof = out
    return Traced(plan, shapes_of_args, tuple(passes), closed, shapes, proof.value)


def _pinned(pass_: Pass, out: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Pin a pass's results, so that bits do not depend on the number of devices.

    This is done for `PinnedTree` alone. Rows are gathered first, because XLA adds up
    split rows in an order that depends on the number of devices. The barrier keeps XLA
    from fusing what follows with what came before.
    """
    strategy = pass_.strategy
    if not (strategy.placement.tower_loop == "scan" and strategy.exact):
        return out
    mirrored = strategy.placement.sharding(Layout.MIRRORED)
    on_all = functools.partial(lax.with_sharding_constraint, shardings=mirrored)

    def is_rows(x: Any) -> bool:
        return is_per_tower_value(x) and isinstance(x.value, Rows)

    merged = jax.tree.map(
        lambda x: on_all(x) if is_rows(x) else x, out[0], is_leaf=is_rows
    )
    return lax.optimization_barrier(merged), out[1]


def _layouts(
    plan: Plan, params: PyTree, results: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """Lay out an update's arguments twice: as stored, and as the update needs.

    ``results`` are the results of the passes.
    """
    mirrored = Layout.MIRRORED
    is_sharded = plan.strategy.state == "sharded"
    shapes = {x.shape for x in jax.tree.leaves(params)}

    def layouts(per_tower: Layout, like_params: Layout) -> tuple[PyTree, ...]:
        def layout_of(x: Any) -> Layout:
            if is_per_tower_value(x):
                return mirrored if isinstance(x.value, Rows) else per_tower
            return like_params if x.shape in shapes else mirrored

        return jax.tree.map(layout_of, results, is_leaf=is_per_tower_value)

    state_at = split_state(state_layout(plan.strategy))
    results_at = layouts(Layout.PER_TOWER, mirrored)
    used = layouts(mirrored, Layout.SHARDED if is_sharded else mirrored)
    return (*state_at, *results_at), (mirrored, mirrored, *used)
