"""What would one tower of one device have computed? The step to compare with."""

import dataclasses
from typing import TypeVar

from towerjax.data.placer import Placer
from towerjax.estimator.replicate import ReplicatedModel
from towerjax.step.train import TrainStep
from towerjax.towers.strategies import OneDevice, Strategy

StepOrModel = TypeVar("StepOrModel", TrainStep, ReplicatedModel)


def one_tower(step: StepOrModel) -> StepOrModel:
    """The same step, or the same model, on one tower of the first device.

    The loss function, the optimizer and all options are those of the step, but that
    micro-batches are folded into one pass and that states are not donated. Batches
    are padded and cut as the step's are, so that both see the same examples.

    Args:
      step: What `build_train_step` or `replicate_model_fn` returned.

    Returns:
      A step of its own, with its own ``init``; compare with `assert_same`. Its
      ``tower.rng`` is tower 0's, so losses with random draws of their own differ.

    Raises:
      ValueError: It is neither, or a model with ``remainder="drop"`` on several
        towers, which drops by their number.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> strategy = tj.Mirrored(towers=4)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
      >>> batch, ends = np.arange(8, dtype=np.float32), []
      >>> for s in (step, tj.testing.one_tower(step)):
      ...     state, metrics = s(s.init(np.float32(0)), batch)
      ...     ends.append((state, metrics))
      >>> tj.testing.assert_same(*ends)
    """
    if isinstance(step, ReplicatedModel):
        options = dataclasses.replace(step.options, donate=False)
        if options.remainder == "drop" and step.strategy.num_towers > 1:
            raise ValueError(
                "one_tower of a model with remainder='drop': how many rows are dropped"
                f" depends on its {step.strategy.num_towers} towers. Build the model"
                " with remainder='pad', or with 'error' and whole batches."
            )
        return ReplicatedModel(step.model_fn, _one_device(step.strategy), options)
    if not isinstance(step, TrainStep):
        raise ValueError(
            f"one_tower got a {type(step).__name__}. Pass what tj.build_train_step or"
            " tj.estimator.replicate_model_fn returned."
        )
    return _OneTowerStep(step)


class _OneTowerStep(TrainStep):
    """A `TrainStep` on one tower, for the batches of a step on several."""

    def __init__(self, step: TrainStep) -> None:
        strategy = _one_device(step.strategy)
        options = dataclasses.replace(step.options, micro_batches=1, donate=False)
        super().__init__(step.training, strategy, options)
        self._placer = Placer(
            strategy.placement,
            shares=step.strategy.num_towers * step.options.micro_batches,
            remainder=options.remainder,
        )


def _one_device(strategy: Strategy) -> OneDevice:
    return OneDevice(strategy.placement.devices[0])
