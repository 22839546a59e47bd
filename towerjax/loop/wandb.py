"""Write the metrics of a run to Weights & Biases: `WandB`."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from towerjax.loop.writers import Record, curves
from towerjax.types.options import require


@dataclasses.dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases: ``train/loss`` and ``eval/loss`` over the step number.

    Needs ``wandb``. A metric that is an array has a curve for each element, at most 64.
    Of several processes the first alone starts and ends the run of W&B. An ``id`` goes
    on with an earlier one, of which W&B ignores steps that are done again.

    Attributes:
      init: The arguments of ``wandb.init``, such as ``project``, ``config``, ``mode``.

    Example:
      >>> WandB({"project": "digits", "mode": "offline"})
      WandB(init={'project': 'digits', 'mode': 'offline'})
    """

    init: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.init, Mapping):
            raise ValueError(
                f"WandB.init={self.init!r:.200} must be the arguments of wandb.init by"
                " name, such as WandB({'project': 'digits', 'mode': 'offline'})."
            )

    def open(self, start: int) -> Any:
        """A started run; a ``ValueError`` without ``wandb``."""
        wandb = require("wandb", "WandB, other than tj.JsonLines(path),", "wandb")
        resume = {"resume": "allow"} if start and "id" in self.init else {}
        run = wandb.init(**{**resume, **self.init})

        def write(record: Record) -> None:
            run.log(curves("WandB", record), step=record.step)

        return types.SimpleNamespace(write=write, close=run.finish)
