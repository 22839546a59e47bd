"""The share of the devices' peak that a step reaches, for loops of your own."""

from typing import Any

from towerjax.mesh.peaks import peak_flops_of_all
from towerjax.step.step import Step
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_methods, check_number, refuse_option


@api_boundary
def mfu(
    step: Step[Any],
    state: PyTree,
    batch: PyTree,
    step_s: float,
    *,
    peak_flops: float | None = None,
) -> float | None:
    """Compute the model FLOPs utilization of a step that takes ``step_s`` seconds.

    The FLOPs are the dot products and convolutions of the step on all devices, as
    `count_flops` counts them. `run` has the same number as
    ``history.summary.rates["mfu"]``.

    Args:
      step: The step, of any builder.
      state: A state of the step, which is not donated.
      batch: A batch of the size that was timed.
      step_s: The seconds of one step, > 0. Wait for the devices before you stop the
        clock: ``step.settle()``, or ``jax.block_until_ready(state)``.
      peak_flops: The peak FLOP/s of one device. None takes the bfloat16 peak from a
        table of known devices.

    Returns:
      The share, such as 0.4. None if ``peak_flops`` is None and the table does not have
      the device, as with CPUs.

    Raises:
      ValueError: ``step_s`` or ``peak_flops`` is not a number > 0.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean(batch @ w, tower.weight)
      >>> strategy = tj.Mirrored(["cpu:0", "cpu:1"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
      >>> state = step.init(np.zeros(100, np.float32))
      >>> batch = np.ones((500, 100), np.float32)  # 4 * 500 * 100 FLOPs a step
      >>> round(mfu(step, state, batch, 0.5, peak_flops=1e6), 6)
      0.2
    """
    check_methods("step", step, "strategy program", "tj.build_train_step(...)")
    _check_positive("step_s", step_s, "a number of seconds > 0")
    if peak_flops is not None:
        _check_positive("peak_flops", peak_flops, "the FLOP/s of one device, > 0")
    peak = peak_flops_of_all(step.strategy.placement, peak_flops)
    if peak is None:
        return None
    return step.program(state, batch).flops.products / step_s / peak


def _check_positive(name: str, value: Any, form: str) -> None:
    check_number(name, value, form)
    if not value > 0:
        refuse_option(name, value, form)
