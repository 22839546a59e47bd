"""Find values that are not finite: the error, and which towers have such values."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.packing import all_finite
from towerjax.types import PyTree
from towerjax.types.refusals import Portable, listed
from towerjax.types.trees import is_deleted, named_leaves, readable_leaves

StepPart: TypeAlias = Literal["parameter", "loss", "gradient", "metric", "value"]
NotFinite: TypeAlias = Literal["NaN", "infinity", "NaN and infinity"]
NamedPart: TypeAlias = tuple[StepPart, str, PyTree]
"""``(part, root, tree)``: what a tree is, the name it begins with, and the tree.

Such as ``("gradient", "params", grads)``.
"""

KINDS: dict[int, NotFinite] = {1: "NaN", 2: "infinity", 3: "NaN and infinity"}
"""The meaning of each flag that is not 0."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A leaf of one tower that was not finite, before any reduction."""

    step: int  # counted from 1, as in History and hooks
    tower: int
    leaf: str  # such as "params/Dense_2/kernel"
    part: StepPart  # "parameter": it was not finite before the step
    kind: NotFinite


class NonFiniteError(Portable, FloatingPointError):
    """The loss or a gradient of a step was NaN or infinite; the step changed nothing.

    If towers train alone, only the tower with such a value left its step out. At the
    end of a run it also tells that the last update made such parameters.

    Attributes:
      step: The number of the step, counted from 1, as in history and hooks.
      locations: A `Location` for each tower and leaf, or empty if not known.
        ``step.locate(state, batch, number=error.step)`` then finds them.
    """

    def __init__(
        self,
        step: int,
        locations: Sequence[Location] = (),
        *,
        guard: str = "gradients",
        by_tower: bool = False,
        updated: Sequence[str] = (),
    ) -> None:
        looked_at = "loss" if guard == "loss" else "loss or a gradient"
        text = f"The {looked_at} of step {step} was not finite, so it changed nothing."
        if by_tower:
            text = (
                f"A tower's {looked_at.replace(' a ', ' ')} was not finite in step"
                f" {step}. That tower left the step out, and the others trained. It is"
                " reported now, because the towers were merged since then."
            )
        where = f" Found: {locations_text(locations)}." if locations else ""
        advice = (
            "Lower the learning rate, clip gradients, or look at the batch: an integer"
            " label that is not a class makes a loss NaN. on_nonfinite='skip' leaves"
            " such batches out, and 'ignore' updates with them."
        )
        if any(location.part == "parameter" for location in locations):
            advice = (
                "Such a parameter came with an earlier step: go on from a state before"
                " that, such as the newest checkpoint."
            )
        if guard == "loss":
            advice += " With guard='loss' no step looks at its gradients."
        if updated:
            text = f"Parameters are not finite after step {step}: {listed(updated)}."
            seen = "loss was" if guard == "loss" else "loss and gradients were"
            advice = (
                f"The step's {seen} finite, so its update made them. Lower the learning"
                " rate, look for a schedule that divides by 0, or go on from a state"
                " before that, such as the newest checkpoint."
            )
        super().__init__(f"{text}{where} {advice}")
        self.step = step
        self.locations = tuple(locations)


def integers_text(batch: PyTree) -> str:
    """Write the range of each integer leaf of a batch as text.

    Such leaves may be labels, and a label out of range makes a loss NaN.
    """
    named = [
        (name, x)
        for name, x in named_leaves("batch", batch)
        if jnp.issubdtype(x.dtype, jnp.integer) and x.size
    ]
    limits = jax.device_get(_limits([x for _, x in named]))
    pairs = zip(named, limits, strict=True)
    return listed(f"{name} is from {low} to {high}" for (name, _), (low, high) in pairs)


@jax.jit
def _limits(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [(x.min(), x.max()) for x in arrays]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flags:
    """For each leaf a flag: 0 if it is finite, or else a code for what it holds.

    With several towers there is a row of flags for each tower.
    """

    table: jax.Array  # [M] or [T, M] uint8: 0, or a key of KINDS
    names: tuple[tuple[StepPart, str], ...] = dataclasses.field(
        metadata={"static": True}
    )

    def locations(self, step: int) -> list[Location]:
        """List a `Location` for each flag set; the table must be on the host."""
        return [
            Location(step, int(tower), name, part, KINDS[int(self.table[tower, i])])
            for tower, i in np.argwhere(self.table)
            for part, name in [self.names[i]]
        ]


def flag_leaves(parts: Sequence[NamedPart]) -> Flags:
    """Flag one tower's leaves: 1 for a NaN, 2 for infinity, 3 for both."""

    def flag(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.uint8(0)
        has_nan = jnp.isnan(x).any().astype(jnp.uint8)
        return has_nan + 2 * jnp.isinf(x).any().astype(jnp.uint8)

    named: list[NamedPart] = [
        (part, name, jnp.asarray(leaf))
        for part, root, tree in parts
        for name, leaf in readable_leaves(root, tree)
    ]
    table = jnp.array([flag(x) for _, _, x in named], jnp.uint8)
    return Flags(table, tuple((part, name) for part, name, _ in named))


def nonfinite_leaves(root: str, tree: PyTree) -> list[str]:
    """Name a tree's leaves that hold NaN or infinity.

    On CPUs NumPy looks, because a program takes longer to compile than that.
    """
    named = readable_leaves(root, tree)
    if all(map(_is_at_hand, jax.tree.leaves(tree))):
        return [name for name, x in named if not _is_finite(x)]
    if jax.device_get(_all_finite(tree)):
        return []
    return [name for name, x in named if not jax.device_get(_all_finite(x))]


def _is_at_hand(x: jax.Array) -> bool:
    """Return whether all of an array is in the memory of this machine's CPUs."""
    is_on_cpus = all(device.platform == "cpu" for device in x.devices())
    return x.is_fully_addressable and is_on_cpus


def _is_finite(x: jax.Array) -> bool:
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return not is_inexact or bool(np.isfinite(np.asarray(x)).all())


_all_finite = jax.jit(all_finite)


def explain_params(error: NonFiniteError, state: PyTree) -> None:
    """Add a note that names the parameters which were not finite before the step."""
    params = getattr(state, "params", None)
    leaves = jax.tree.leaves(params)
    if any(is_deleted(x) or not x.is_fully_addressable for x in leaves):
        return
    if names := nonfinite_leaves("params", params):
        error.add_note(
            f"The parameters were not finite before this step: {listed(names)}. Look at"
            " where they come from."
        )


def join_flags(replicated: Flags, per_tower: Flags) -> Flags:
    """Join the flags of replicated leaves with those of each tower's leaves."""
    rows = jnp.broadcast_to(
        replicated.table, (per_tower.table.shape[0], *replicated.table.shape)
    )
    table = jnp.concatenate([rows, per_tower.table], axis=1)
    return Flags(table, replicated.names + per_tower.names)


def towers_text(towers: Sequence[int]) -> str:
    """Name the towers as text, such as ``"towers 0, 2-5"``."""
    runs: list[list[int]] = []
    for tower in towers:
        if runs and tower == runs[-1][-1] + 1:
            runs[-1][1:] = [tower]
        else:
            runs.append([tower])
    texts = ["-".join(map(str, run)) for run in runs]
    return ("tower " if len(towers) == 1 else "towers ") + ", ".join(texts)


def locations_text(locations: Sequence[Location]) -> str:
    """Write locations as text; several towers with one leaf are one entry."""
    towers: dict[Location, list[int]] = {}
    for location in locations:
        towers.setdefault(dataclasses.replace(location, tower=0), []).append(
            location.tower
        )
    before = ", which came with an earlier step"
    texts = [
        f"{towers_text(ids)}, {x.leaf}, step {x.step}: {x.kind} in the {x.part}"
        f"{before * (x.part == 'parameter')}"
        for x, ids in towers.items()
    ]
    return listed(texts)
