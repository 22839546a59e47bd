"""How is a model function to be replicated? The options, checked."""

import dataclasses
from typing import Literal, get_args

from towerjax.estimator.losses import LossReduction, check_loss_reduction
from towerjax.estimator.whereabouts import VariablePlacement
from towerjax.shard import Remainder, check_remainder

Compat = Literal["tf1"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model function is replicated; see `replicate_model_fn`."""

    loss_reduction: LossReduction
    variable_placement: VariablePlacement
    remainder: Remainder
    compat: Compat | None
    donate: bool
    max_programs: int

    def __post_init__(self) -> None:
        """Check the options."""
        check_loss_reduction(self.loss_reduction)
        check_remainder(self.remainder)
        if not isinstance(self.variable_placement, VariablePlacement):
            raise ValueError(
                f"variable_placement={self.variable_placement!r} is none; write"
                " tj.VariablePlacement.MIRRORED, ON_ONE_DEVICE or ROUND_ROBIN."
            )
        if self.compat not in (None, *get_args(Compat)):
            raise ValueError(f"compat={self.compat!r} must be None or 'tf1'.")
        number = self.max_programs
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"max_programs={number!r} must be a whole number >= 1.")
