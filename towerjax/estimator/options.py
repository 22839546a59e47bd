"""How is a model function to be replicated? The options, checked."""

import dataclasses
from typing import Any, Literal, get_args

from towerjax.data.shard import Remainder, check_remainder
from towerjax.estimator.losses import LossReduction, check_loss_reduction
from towerjax.estimator.whereabouts import VariablePlacement
from towerjax.types.options import check_choice, check_flag, check_whole

Compat = Literal["tf1"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model function is replicated; see `replicate_model_fn`."""

    loss_reduction: LossReduction
    variable_placement: VariablePlacement
    remainder: Remainder
    compat: Compat | None
    donate: bool
    max_programs: int | None

    def __post_init__(self) -> None:
        """Check the options."""
        check_loss_reduction(self.loss_reduction)
        check_remainder(self.remainder)
        if not isinstance(self.variable_placement, VariablePlacement):
            raise ValueError(
                f"variable_placement={self.variable_placement!r} is none; write"
                " tj.estimator.VariablePlacement.MIRRORED, ON_ONE_DEVICE or"
                " ROUND_ROBIN."
            )
        check_choice("compat", self.compat, (None, *get_args(Compat)))
        check_flag("donate", self.donate)
        if self.max_programs is not None:
            check_whole("max_programs", self.max_programs)

    def check_state(self, strategy: Any) -> None:
        """Raise where a strategy and these options say two things of the variables."""
        mirrored = self.variable_placement is VariablePlacement.MIRRORED
        if strategy.state != "mirrored" and not mirrored:
            raise ValueError(
                f"state={strategy.state!r} and variable_placement="
                f"{self.variable_placement!r} both say where variables wait. Leave one"
                " of them out."
            )
