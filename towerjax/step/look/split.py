"""What is proved of how a step depends on the split of its batch, and what is said."""

import dataclasses
import functools
from collections.abc import Mapping

from towerjax.proof.equal.one_tower import Equality
from towerjax.step.look.comparison import GRADIENT, Refuted, SplitError
from towerjax.types import Portable
from towerjax.types.leaves import listed

LEAVE_OUT = "audit=False leaves this line out."
NO_ROWS = "step.fn has no rows where it is traced; run step.audit before"
WHOLE_STEP = "step"
"""The name in place of leaves where a step cannot be traced for other rows."""

_GRADIENTS_OF = {"loss": GRADIENT}


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

    def beside(self, line: str) -> "StepEquality":
        """The same, but what is proved is of towers of one device each.

        ``line`` is that of a `shard_map` over a tower's own devices; "" if none.
        """
        if not line:
            return self
        why = f"a tower's own devices are not compared with one, {line}"
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

        With a loss its gradient is proved, and without it neither is.
        """
        unproved = [*self.unproved]
        unproved += [_GRADIENTS_OF[x] for x in unproved if x in _GRADIENTS_OF]
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
    reasons = [f"{listed(leaves)} ({why})" for why, leaves in leaves_of.items()]
    told = f"not proved equal to one tower: {listed(reasons)}"
    return f"{told}. {sample}" if sample else told
