"""How do towers that run one after another meet in an optimizer? In rounds.

A tower that runs alone cannot wait for the others. So each tower runs up to its meeting
and says what it brings; the sums are made; and each runs again, knowing them. What was
wanted in an earlier round is not computed again: the compiler drops what no result of a
round needs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

from towerjax.collectives import CrossTowerOps
from towerjax.collectives.base import sum_over_towers
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.proof.analysis import analyse
from towerjax.towers.local_towers import over_local_towers
from towerjax.towers.one_axis import first_tower_of_device
from towerjax.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Brought:
    """What one tower brings to a meeting.

    Attributes:
      added: Arrays of which the sum over all towers is made.
      gathered: Arrays that are laid side by side, ``[T, ...]``.
    """

    added: PyTree
    gathered: PyTree


class Meeting:
    """The meetings of one tower that runs alone: what it brings, what it is told."""

    def __init__(self, num_towers: int, outcomes: Sequence[Brought]) -> None:
        self.brought: list[Brought] = []
        self._num_towers, self._outcomes = num_towers, outcomes
        self._trace = get_opaque_trace_state()

    def meet(self, added: PyTree, gathered: PyTree) -> tuple[PyTree, PyTree]:
        """The sums and the gathered values of all towers, as far as they are known."""
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                "TowerOptimizer.update stands inside a jit, scan, cond or other"
                " transformation, where towers that run one after another"
                " (local='scan') cannot meet. Call it outside of it, or use"
                " local='vmap'."
            )
        number = len(self.brought)
        self.brought.append(Brought(added, gathered))
        if number < len(self._outcomes):
            return self._outcomes[number].added, self._outcomes[number].gathered
        return added, jax.tree.map(
            lambda x: jnp.stack([x] * self._num_towers), gathered
        )


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """A tower function with its meetings, and in which round each result is known.

    Attributes:
      tower_fn: ``(tower_id, own, meeting) -> results``.
      num_towers: ``T``.
      brought: The shapes of what is brought to each meeting.
      treedef: The tree of ``(brought, results)``.
      rounds: Of each leaf of it, the number of meetings whose outcome it depends on.
      added: Which leaves are added over towers.
    """

    tower_fn: Callable[..., PyTree]
    num_towers: int
    brought: list[Brought]
    treedef: Any
    rounds: list[int]
    added: list[bool]

    @classmethod
    def of(
        cls,
        tower_fn: Callable[..., PyTree],
        num_towers: int,
        tower_id: jax.Array,
        own: PyTree,
    ) -> "_Rounds":
        def rehearse() -> Any:
            meeting, outcomes = Meeting(num_towers, ()), []
            tower_fn(tower_id, own, meeting)
            for brought in meeting.brought:
                outcome = Meeting(num_towers, ()).meet(brought.added, brought.gathered)
                outcomes.append(Brought(*outcome))
            return meeting.brought, outcomes

        brought, outcomes = jax.eval_shape(rehearse)

        def run(outcomes: list[Brought]) -> tuple[Any, Any]:
            meeting = Meeting(num_towers, outcomes)
            results = tower_fn(tower_id, own, meeting)
            return meeting.brought, results

        jaxpr, out = jax.make_jaxpr(run, return_shape=True)(outcomes)
        rounds = [0] * len(jaxpr.jaxpr.outvars)
        for number in range(len(outcomes)):
            names = [
                "outcome" if other == number else None
                for other, outcome in enumerate(outcomes)
                for _ in jax.tree.leaves(outcome)
            ]
            for leaf, found in enumerate(analyse(jaxpr, names, ("",)).outputs):
                if found is not None:
                    rounds[leaf] = number + 1
        flags = [
            Brought(*(jax.tree.map(lambda _, f=f: f, x) for f, x in pair))
            for pair in (((True, b.added), (False, b.gathered)) for b in brought)
        ]
        added = jax.tree.leaves((flags, jax.tree.map(lambda _: False, out[1])))
        return cls(
            tower_fn, num_towers, brought, jax.tree.structure(out), rounds, added
        )

    def leaves(
        self, outcomes: list[Any], wanted: list[int], tower_id: jax.Array, own: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Wanted leaves of one tower: those that are added, and the others."""
        meeting = Meeting(self.num_towers, outcomes)
        results = self.tower_fn(tower_id, own, meeting)
        leaves = list(map(jnp.asarray, jax.tree.leaves((meeting.brought, results))))
        added = [leaves[i] for i in wanted if self.added[i]]
        return added, [leaves[i] for i in wanted if not self.added[i]]


def met_in_turn(
    tower_fn: Callable[[jax.Array, PyTree, Meeting], tuple[PyTree, PyTree]],
    ops: CrossTowerOps,
    axes: TowerAxes,
    own: PyTree,
) -> tuple[PyTree, PyTree]:
    """``tower_fn`` of each tower of this device, one after another, meetings too."""
    first, row = first_tower_of_device(axes), jax.tree.map(lambda x: x[0], own)
    rounds = _Rounds.of(lambda *a: tower_fn(*a)[0], axes.num_towers, first, row)
    leaves: list[Any] = [None] * len(rounds.rounds)
    outcomes: list[Brought] = []
    for number in range(len(rounds.brought) + 1):
        known = [i for i, of_leaf in enumerate(rounds.rounds) if of_leaf == number]
        if known:

            def in_round(tower_id: jax.Array, row: PyTree) -> Any:
                return rounds.leaves(outcomes, known, tower_id, row)  # noqa: B023

            # Local sums are made at once where the op takes them so: less memory.
            stacked = ops.needs_every_tower
            added, kept = over_local_towers(in_round, axes, own, stack_sums=stacked)
            pools = {True: iter(added), False: iter(kept)}
            for i in known:
                leaves[i] = next(pools[rounds.added[i]])
        outcomes += _outcomes(rounds, leaves, len(outcomes), ops, axes)
    _, results = jax.tree.unflatten(rounds.treedef, leaves)
    meeting = Meeting(axes.num_towers, outcomes)
    return results, tower_fn(first, row, meeting)[1]


def _outcomes(
    rounds: _Rounds,
    leaves: list[Any],
    done: int,
    ops: CrossTowerOps,
    axes: TowerAxes,
) -> list[Brought]:
    """What the next meetings come to, to which all is brought; one sum for them all."""
    pool, ready = iter(leaves), []
    for shape in rounds.brought:
        values = [next(pool) for _ in jax.tree.leaves(shape)]
        if any(x is None for x in values):
            break
        ready.append(jax.tree.unflatten(jax.tree.structure(shape), values))
    ready = ready[done:]
    if not ready:
        return []
    sums = sum_over_towers(ops, [x.added for x in ready], axes).tree()

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, DEVICE_AXIS, tiled=True) if axes.device_axis else x

    return [
        Brought(total, jax.tree.map(gather, x.gathered))
        for total, x in zip(sums, ready, strict=True)
    ]
