"""How do reduced gradients become the next parameters? Through optax, once."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax

from towerjax.types import PyTree, named_leaves


def apply_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """The next parameters and optimizer state.

    The optimizer sees the full reduced gradient, so that clipping by global norm,
    layer-wise scaling and schedules mean what they mean on one device.

    Args:
      optimizer: Any optax transformation; one that takes ``value`` gets the loss.
      grads: Like ``params``, of the global loss.
      opt_state: The optimizer's state.
      params: The parameters.
      loss: ``()``, the global loss.

    Returns:
      ``(params, opt_state)``.
    """
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def keep_unless(accepted: jax.Array, after: PyTree, before: PyTree) -> PyTree:
    """``after`` where the step is accepted, else ``before``, leaf by leaf.

    Args:
      accepted: ``()`` bool, one verdict for all towers.
      after: The next value.
      before: The present one, of the same shapes and dtypes.

    Returns:
      One of the two.
    """
    return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, before)


def check_like(root: str, before: PyTree, after: PyTree, culprit: str) -> None:
    """Raise unless a part of the next state has the shapes and dtypes of this one.

    A step whose state changes its type compiles again at every call.

    Args:
      root: What the part is called.
      before: The part of the present state; only shapes are read.
      after: The part of the next state.
      culprit: What to look at.

    Raises:
      ValueError: Trees, shapes or dtypes differ; names every such leaf.
    """

    def types(tree: PyTree) -> dict[str, Any]:
        return {
            name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(root, tree)
        }

    was, now = types(before), types(after)
    bad = [
        f"{name} was {was.get(name, 'absent')} and becomes {now.get(name, 'absent')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
    if bad:
        raise ValueError(
            "The step would change the type of its state, and so compile anew each"
            " time: " + "; ".join(bad) + f". Look at {culprit}."
        )


class NonFiniteError(FloatingPointError):
    """The loss or a gradient of a step was NaN or infinite, on some tower.

    The step left parameters, optimizer state and local variables as they were.

    Attributes:
      step: Which step, counted from 0.
    """

    def __init__(self, step: int) -> None:
        """Say which step it was."""
        super().__init__(
            f"The loss or a gradient of step {step} was not finite. That step changed"
            " neither parameters nor optimizer state. Lower the learning rate, clip"
            " gradients, or look at the batch; on_nonfinite='skip' goes on without"
            " such batches, 'ignore' updates all the same."
        )
        self.step = step


class Verdicts:
    """Verdicts of steps that are still running, looked at some steps later.

    Looking at each at once would stall the devices at every step.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[jax.Array] = collections.deque()

    def add(self, verdict: jax.Array) -> None:
        """Note a verdict; now and then look at the old ones.

        Args:
          verdict: ``()`` int32, the step's number if it was refused, else -1.

        Raises:
          NonFiniteError: A step was refused.
        """
        self._pending.append(verdict)
        if len(self._pending) >= 16:
            self.settle()

    def settle(self) -> None:
        """Look at all verdicts, waiting for them.

        Raises:
          NonFiniteError: A step was refused; the first one is named.
        """
        verdicts = jax.device_get(list(self._pending))
        self._pending.clear()
        for verdict in verdicts:
            if verdict >= 0:
                raise NonFiniteError(int(verdict))
