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
from jax.extend.core import get_opaque_trace_state

from towerjax.collectives import CrossTowerOps
from towerjax.executors import first_tower_of_device, over_local_towers
from towerjax.placement import TowerAxes
from towerjax.proof.analysis import analyse
from towerjax.types import PyTree


class Meeting:
    """The meetings of one tower that runs alone: what it brought, what it is told.

    Args:
      totals: What the first meetings came to; a later one hands back what it got.
    """

    def __init__(self, totals: Sequence[PyTree]) -> None:
        self.brought: list[PyTree] = []
        self._totals = totals
        self._trace = get_opaque_trace_state()

    def sums(self, tree: PyTree) -> PyTree:
        """The sum over all towers, as far as it is known.

        Args:
          tree: This tower's addends.

        Returns:
          A tree of the same shapes.

        Raises:
          ValueError: The tower meets inside a ``jit``, ``scan`` or ``cond`` of its own,
            where what it brings cannot be seen from outside.
        """
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                "TowerOptimizer.update stands inside a jit, scan, cond or other"
                " transformation, where towers that run one after another"
                " (local='scan') cannot meet. Call it outside of it, or use"
                " local='vmap'."
            )
        number = len(self.brought)
        self.brought.append(tree)
        return self._totals[number] if number < len(self._totals) else tree


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """A tower function with its meetings, and in which round each result is known.

    Attributes:
      tower_fn: ``(tower_id, own, meeting) -> results``.
      shapes: What is brought to each meeting.
      treedef: The tree of the results.
      rounds: Of each leaf of ``(brought, results)``, the number of meetings whose
        totals it depends on.
    """

    tower_fn: Callable[..., PyTree]
    shapes: list[PyTree]
    treedef: Any
    rounds: list[int]

    @classmethod
    def of(
        cls, tower_fn: Callable[..., PyTree], tower_id: jax.Array, own: PyTree
    ) -> "_Rounds":
        def brought() -> Any:
            meeting = Meeting(())
            tower_fn(tower_id, own, meeting)
            return meeting.brought

        shapes = jax.eval_shape(brought)

        def run(totals: Any) -> tuple[Any, Any]:
            meeting = Meeting(totals)
            return meeting.brought, tower_fn(tower_id, own, meeting)

        jaxpr, out = jax.make_jaxpr(run, return_shape=True)(shapes)
        rounds = [0] * len(jaxpr.jaxpr.outvars)
        for number, shape in enumerate(shapes):
            names = [
                "total" if other == number else None
                for other, tree in enumerate(shapes)
                for _ in jax.tree.leaves(tree)
            ]
            found = analyse(jaxpr, names, ("",)).outputs
            for leaf, dependence in enumerate(found):
                if dependence is not None:
                    rounds[leaf] = number + 1
        return cls(tower_fn, shapes, jax.tree.structure(out), rounds)

    @property
    def num_brought(self) -> int:
        """How many of the leaves are brought to meetings; they come first."""
        return len(jax.tree.leaves(self.shapes))

    def leaves(
        self, totals: list[PyTree], wanted: list[int], tower_id: jax.Array, own: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Wanted leaves of one tower: what it brings, and other results."""
        meeting = Meeting(totals)
        results = self.tower_fn(tower_id, own, meeting)
        leaves = jax.tree.leaves((meeting.brought, results))
        brought = [leaves[i] for i in wanted if i < self.num_brought]
        others = [leaves[i] for i in wanted if i >= self.num_brought]
        return brought, [jnp.asarray(x) for x in others]


def met_in_turn(
    tower_fn: Callable[[jax.Array, PyTree, Meeting], tuple[PyTree, PyTree]],
    ops: CrossTowerOps,
    axes: TowerAxes,
    own: PyTree,
) -> tuple[PyTree, PyTree]:
    """``tower_fn`` for each tower of this device, one after another, meetings included.

    Args:
      tower_fn: ``(tower_id, its values, meeting) -> (per_tower, mirrored)``.
      ops: How the sums of a meeting travel.
      axes: The axes that the towers meet over.
      own: Leaves ``[k, ...]``, row ``l`` for local tower ``l``.

    Returns:
      ``per_tower`` with leaves ``[k, ...]``; ``mirrored`` as one tower made it.
    """
    first, row = first_tower_of_device(axes), jax.tree.map(lambda x: x[0], own)
    per_tower = _Rounds.of(lambda *args: tower_fn(*args)[0], first, row)
    leaves: list[Any] = [None] * len(per_tower.rounds)
    totals: list[PyTree] = []
    for number in range(len(per_tower.shapes) + 1):
        wanted = [i for i, known in enumerate(per_tower.rounds) if known == number]
        if wanted:

            def in_round(tower_id: jax.Array, row: PyTree) -> Any:
                return per_tower.leaves(totals, wanted, tower_id, row)  # noqa: B023

            # Local sums are made at once where the op takes them so: less memory.
            stacked = ops.needs_every_tower
            found = over_local_towers(in_round, axes, own, stack_sums=stacked)
            for i, leaf in zip(wanted, [*found[0], *found[1]], strict=True):
                leaves[i] = leaf
        totals += _sums_of(per_tower, leaves, len(totals), ops, axes)
    _, results = jax.tree.unflatten(per_tower.treedef, leaves)
    return results, tower_fn(first, row, Meeting(totals))[1]


def _sums_of(
    rounds: _Rounds,
    leaves: list[Any],
    done: int,
    ops: CrossTowerOps,
    axes: TowerAxes,
) -> list[PyTree]:
    """The sums of the next meetings to which all is brought, in one collective."""
    pool = iter(leaves)
    brought = [[next(pool) for _ in jax.tree.leaves(x)] for x in rounds.shapes]
    ready = done
    while ready < len(brought) and all(x is not None for x in brought[ready]):
        ready += 1
    if ready == done:
        return []
    sums = ops.sum_over_towers(brought[done:ready], axes).tree()
    shapes = rounds.shapes[done:ready]
    return [
        jax.tree.unflatten(jax.tree.structure(shape), part)
        for shape, part in zip(shapes, sums, strict=True)
    ]
