"""How a step treats its batch and its loss."""

import dataclasses
from typing import get_args

from towerjax.data.shard import Remainder, check_remainder
from towerjax.step.next_state import Guard, OnNonfinite
from towerjax.types import short_repr
from towerjax.types.options import cast_ints, check_choice, check_flag, check_whole


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a step treats its batch and its loss; see `build_train_step`."""

    micro_batches: int = 1
    remainder: Remainder = "error"
    on_nonfinite: OnNonfinite = "raise"
    guard: Guard = "loss"
    donate: bool = True
    max_programs: int | None = 1
    audit: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_remainder(self.remainder)
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_choice("guard", self.guard, get_args(Guard))
        check_whole("micro_batches", self.micro_batches)
        check_whole("max_programs", self.max_programs, or_none=True)
        check_flag("donate", self.donate)
        check_flag("audit", self.audit)
        cast_ints(self)
