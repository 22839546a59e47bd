"""Where is a value not finite? In which tower, which leaf, at which step."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.step.desync import told_towers
from towerjax.types import PyTree, readable_leaves
from towerjax.types.leaves import listed

Part: TypeAlias = tuple[str, str, PyTree]
"""What its leaves are, what they are called, and the leaves."""

KINDS = {1: "NaN", 2: "infinity", 3: "NaN and infinity"}
"""What a flag says."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A leaf that was not finite.

    Attributes:
      step: Which step, counted from 0.
      tower: On which tower.
      leaf: The leaf, ``"params/Dense_2/kernel"``.
      part: ``"parameter"`` as the step began, ``"loss"``, ``"gradient"`` or
        ``"metric"``: the tower's own, before any reduction.
      kind: ``"NaN"``, ``"infinity"`` or ``"NaN and infinity"``; where towers went
        alone, which of them is not known.
    """

    step: int
    tower: int
    leaf: str
    part: str
    kind: str


class NonFiniteError(FloatingPointError):
    """The loss, a gradient or a parameter was NaN or infinite, on some tower.

    A refused step left parameters, optimizer state and local variables as they were.
    Towers that go alone leave their own part of it out, and tell when they meet.

    Attributes:
      step: Which step, counted from 0.
      places: Where it was found, a `Place` for each tower and leaf; empty where that
        is not known, and ``step.locate(state, batch)`` tells.
      refused: Was the step refused? Else a check found what the guard passes.
      alone: Did towers go alone, and tell it at this step, when they met?
    """

    def __init__(
        self,
        step: int,
        places: Sequence[Place] = (),
        *,
        refused: bool = True,
        alone: bool = False,
    ) -> None:
        """Say which step it was, and where."""
        where = f" Found: {told_places(places)}." if places else ""
        if alone:
            text = (
                f"Before towers met at step {step}, a tower's own loss or gradient was"
                f" not finite.{where} Such a step changed nothing of that tower's and"
                " counts nothing. Lower the learning rate, clip gradients, or look at"
                " the batch; on_nonfinite='skip' goes on without a word, 'ignore'"
                " updates all the same."
            )
        elif refused:
            text = (
                f"The loss or a gradient of step {step} was not finite.{where} That"
                " step changed neither parameters nor optimizer state. Lower the"
                " learning rate, clip gradients, or look at the batch;"
                " on_nonfinite='skip' goes on without such batches, 'ignore' updates"
                " all the same."
            )
        else:
            text = (
                f"The check of step {step} found what is not finite.{where} The step's"
                " guard did not see it, so that step has updated all the same: go on"
                " from an earlier state, such as a checkpoint. guard='gradients'"
                " refuses such a step."
            )
        super().__init__(text)
        self.step, self.places = step, tuple(places)
        self.refused, self.alone = refused, alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flags:
    """What of each leaf is not finite.

    Attributes:
      table: ``[M]`` uint8, or ``[T, M]``: 0, or a key of `KINDS`.
      names: ``M`` pairs: what the leaf is, and its name.
    """

    table: jax.Array
    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})

    def places(self, step: int) -> list[Place]:
        """In words, once it is on the host."""
        return [
            Place(step, int(tower), name, part, KINDS[int(self.table[tower, i])])
            for tower, i in np.argwhere(self.table)
            for part, name in [self.names[i]]
        ]


def flags(parts: Sequence[Part], *, due: jax.Array) -> Flags:
    """What of each leaf is not finite."""

    def flag(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.uint8(0)
        has_nan = jnp.isnan(x).any().astype(jnp.uint8)
        return has_nan + 2 * jnp.isinf(x).any().astype(jnp.uint8)

    named = [
        (part, name, jnp.asarray(leaf))
        for part, root, tree in parts
        for name, leaf in readable_leaves(root, tree)
    ]
    table = lax.cond(
        due,
        lambda leaves: jnp.stack([flag(x) for x in leaves]),
        lambda leaves: jnp.zeros(len(leaves), jnp.uint8),
        [leaf for _, _, leaf in named],
    )
    return Flags(table, tuple((part, name) for part, name, _ in named))


def side_by_side(shared: Flags, own: Flags) -> Flags:
    """Flags that all local towers share, before their own."""
    rows = jnp.broadcast_to(shared.table, (own.table.shape[0], *shared.table.shape))
    table = jnp.concatenate([rows, own.table], axis=1)
    return Flags(table, shared.names + own.names)


def told_places(places: Sequence[Place]) -> str:
    """The places in words, those of several towers together."""
    towers: dict[Place, list[int]] = {}
    for place in places:
        towers.setdefault(dataclasses.replace(place, tower=0), []).append(place.tower)
    told = [
        f"{told_towers(ids)}, {x.leaf}, step {x.step}: {x.kind} in the {x.part}"
        for x, ids in towers.items()
    ]
    return listed(told)
