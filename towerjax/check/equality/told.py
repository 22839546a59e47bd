"""What is proved of how a step depends on the split of its batch, and what is said."""

import dataclasses
import functools
from collections.abc import Mapping

from towerjax.check.audit.comparison import GRADIENT, Refuted, SplitError
from towerjax.proof.equal.one_tower import Equality
from towerjax.types.refusals import Portable, few, listed

LEAVE_OUT = "audit=False leaves this line out."
NO_ROWS = "step.fn has no rows where it is traced; run step.audit before"
WHOLE_STEP = "step"
"""The name in place of leaves where a step cannot be traced for other rows."""


@dataclasses.dataclass(frozen=True)
class StepEquality:
    """What is proved of the leaves that a step merges.

    Attributes:
      leaves: What is said of each.
      seconds: What the proof took.
    """

    leaves: tuple[Equality, ...]
    seconds: float

    @functools.cached_property
    def unproved(self) -> dict[str, str]:
        """Why a leaf is not proved equal to one tower, by its name."""
        return {x.leaf: x.why for x in self.leaves if x.says != "proved"}

    def not_of_own_devices(self, line: str) -> "StepEquality":
        """The same, with nothing proved where a tower's own devices compute.

        No proof compares these devices with one; the audit does. ``line`` says where
        they compute; with "" all stays.
        """
        if not line:
            return self
        why = f"a shard_map over a tower's own devices, {line}"
        leaves = [
            dataclasses.replace(x, says="unknown", why=why) if x.says == "proved" else x
            for x in self.leaves
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def refuse(self) -> None:
        """Raise where a leaf is proved to depend on the split."""
        refuted = [x for x in self.leaves if x.says == "refuted"]
        if refuted:
            found = [Refuted(x.leaf, x.why) for x in refuted]
            advice = dict.fromkeys(x.advice for x in refuted if x.advice)
            raise SplitError(found, advice)

    def is_open(self, leaf: str) -> bool:
        """Whether a leaf is not proved, by the name that the audit has for it.

        A loss of several terms has a leaf for each of them. With all of them its
        gradient is proved, and without one it is not.
        """
        unproved = [*self.unproved]
        if any(x.startswith("loss") for x in unproved):
            unproved.append(GRADIENT)
        return WHOLE_STEP in unproved or any(
            x.startswith(leaf) or leaf.startswith(x) for x in unproved
        )

    def __str__(self) -> str:
        if not self.unproved:
            return "proved equal to one tower"
        proved = len(self.leaves) - len(self.unproved)
        return f"{proved} of {len(self.leaves)} leaves proved equal to one tower"


class NotProved(Portable, ValueError):
    """A step was to be proved equal to one tower, and some leaves are not.

    Attributes:
      unproved: Why each of these leaves is not proved, by its name.
    """

    def __init__(self, unproved: Mapping[str, str], sample: str = "") -> None:
        self.unproved = dict(unproved)
        super().__init__(told_of(unproved, sample))


def told_of(unproved: Mapping[str, str], sample: str = "") -> str:
    """One line: which leaves are not proved, since where, and what a sample said."""
    leaves_of: dict[str, list[str]] = {}
    for leaf, why in unproved.items():
        leaves_of.setdefault(why, []).append(leaf)
    reasons = [f"{', '.join(few(x))} ({why})" for why, x in leaves_of.items()]
    told = f"not proved equal to one tower: {listed(reasons)}"
    return f"{told}. {sample}" if sample else told
