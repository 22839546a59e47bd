"""The results of the proof that a step equals one tower, and the texts about them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from towerjax.prover.comparison import Refuted, SplitError
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.one_tower import Equality
from towerjax.prover.leaf_name import WHOLE_STEP, LeafPart, leaf_of
from towerjax.types.refusals import Portable, few, listed

LEAVE_OUT = "audit=False leaves this line out."
NO_ROWS = "step.fn is traced without rows; run step.audit before"


@dataclasses.dataclass(frozen=True)
class StepEquality:
    """The results of the proof for the leaves that a step merges.

    Attributes:
      leaves: The result for each leaf; none if each tower keeps what it returns.
      seconds: How long the proof took, in seconds.
      examples: The number of examples of the batch, if it may be padded.
    """

    leaves: tuple[Equality, ...]
    seconds: float
    examples: int | None = None

    @functools.cached_property
    def open(self) -> tuple[Equality, ...]:
        """The results for leaves that are not proved equal to one tower."""
        if not self.leaves:
            why = "its towers merge nothing, so each keeps its result"
            return (Equality(WHOLE_STEP, Says.UNKNOWN, why),)
        return tuple(x for x in self.leaves if x.says is not Says.PROVED)

    @functools.cached_property
    def unproved(self) -> dict[str, str]:
        """The reason for each leaf that is not proved equal to one tower, by name."""
        return {x.leaf: x.why for x in self.open}

    def with_leaves(self, more: Sequence[Equality]) -> "StepEquality":
        """Append the results ``more``."""
        return dataclasses.replace(self, leaves=(*self.leaves, *more))

    def not_of_own_devices(self, why: str) -> "StepEquality":
        """Make proved results unknown, for the reason ``why``.

        The reason says why a tower's own devices are not proved to give what one device
        gives. The audit then compares the leaves. If ``why`` is "", the results stay.
        """
        if not why:
            return self
        leaves = [
            dataclasses.replace(x, says=Says.UNKNOWN, why=why)
            if x.says is Says.PROVED
            else x
            for x in self.leaves
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def refuse(self) -> None:
        """Raise `SplitError` if a leaf is proved to depend on the split."""
        refuted = [x for x in self.leaves if x.says is Says.REFUTED]
        if refuted:
            findings = [Refuted(x.leaf, x.why) for x in refuted]
            advice = dict.fromkeys(x.advice for x in refuted if x.advice)
            raise SplitError(findings, advice)

    def is_open(self, leaf: str) -> bool:
        """Look whether a leaf, by the name that an audit has for it, is not proved.

        A loss of several terms has a leaf for each term. If one of them is not proved,
        the gradient is not proved either. An audit compares the values that a metric
        state computes, and the proof the fields of that state.
        """
        asked = leaf_of(leaf)
        open_leaves = [x for x in self.leaves if x.says is not Says.PROVED]
        unproved = [leaf_of(x.state or x.leaf) for x in open_leaves]
        is_gradient = asked.part is LeafPart.GRADIENT
        return any(
            x.holds(asked)
            or asked.holds(x)
            or (is_gradient and x.part is LeafPart.LOSS and x.number == asked.number)
            for x in unproved
        )

    def __str__(self) -> str:
        if not self.leaves:
            return "nothing is merged over towers"
        proved = len(self.leaves) - len(self.unproved)
        some = f"{proved} of {len(self.leaves)} leaves " if self.unproved else ""
        batch = "" if self.examples is None else f" for batches of {self.examples}"
        return f"{some}proved equal to one tower{batch}"


class NotProved(Portable, ValueError):
    """A proof was asked for, but some leaves are not proved equal to one tower.

    Attributes:
      unproved: The reason for each leaf that is not proved, by its name.
    """

    def __init__(self, unproved: Mapping[str, str], sample: str = "") -> None:
        self.unproved = dict(unproved)
        super().__init__(told_of(unproved, sample))


def told_of(unproved: Mapping[str, str], sample: str = "") -> str:
    """Write a line that lists unproved leaves, with reasons and a sample's result."""
    leaves_of: dict[str, list[str]] = {}
    for leaf, why in unproved.items():
        leaves_of.setdefault(why, []).append(leaf)
    reasons = [f"{', '.join(few(x))} ({why})" for why, x in leaves_of.items()]
    text = f"not proved equal to one tower: {listed(reasons)}"
    return f"{text}. {sample}" if sample else text
