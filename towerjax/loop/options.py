"""The options of `run`, and the checks that they fit together."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from towerjax.data.stream import check_batches
from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.loop.evaluate import AnyBatches, EvaluationStep, check_evaluate
from towerjax.loop.progress import check_progress
from towerjax.loop.stopping import EarlyStopping, rules_of
from towerjax.loop.writers import Writer
from towerjax.step.state.train_state import TrainState
from towerjax.types import PyTree
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_function,
    check_list,
    check_number,
    check_text,
    check_whole,
    refuse_option,
)


@dataclasses.dataclass(frozen=True)
class WithState:
    """A hook of `run` that gets the state every ``every`` steps.

    `run` calls ``function(step number, state, metrics)`` on every process, after each
    step whose number is a multiple of ``every``. It first waits for the dispatched
    steps, which it does not do for other hooks. The next step donates the state, so
    copy what you keep: ``jax.tree.map(jnp.copy, state.params)``.

    Attributes:
      function: The function. Its result is ignored; returning a ``TrainState`` is an
        error.
      every: The number of steps between two calls.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> def show(number, state, metrics):
      ...     print(number, state.params, metrics["loss"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.25), tj.Mirrored(towers=2))
      >>> data = [np.full(8, 2.0, np.float32)] * 4
      >>> hooks = [WithState(show, every=2)]
      >>> _ = tj.run(step, step.init(jnp.float32(0)), data, hooks=hooks, progress=False)
      2 1.5 1.0
      4 1.875 0.0625
    """

    function: Callable[[int, TrainState, dict[str, Any]], Any]
    every: int

    def __post_init__(self) -> None:
        form = "function(number, state, metrics)"
        check_function("WithState.function", self.function, form)
        check_whole("WithState.every", self.every)
        cast_ints(self)


Hook: TypeAlias = Callable[[int, dict[str, Any]], None]
"""``(step number, metrics)``, called after every step with values on the host."""


def check_hooks(hooks: Sequence[Hook | WithState]) -> tuple[Hook | WithState, ...]:
    """Make a tuple of the hooks; raise if one cannot be called."""
    hooks = check_list("hooks", hooks)
    for i, hook in enumerate(hooks):
        if not isinstance(hook, WithState):
            check_function(f"hooks[{i}]", hook, "hook(number, metrics)")
    return hooks


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `run`; see there for what they mean."""

    steps: int | None
    evaluate: EvaluationStep | None
    eval_batches: AnyBatches | None
    eval_every: int | None
    eval_params: Callable[[TrainState], PyTree] | None
    early_stopping: EarlyStopping | Sequence[EarlyStopping] | None
    prefetch: int
    in_flight: int
    checkpointer: Checkpointer | None
    audit: bool | None
    replay_every: int | None
    progress: bool | Sequence[str] | None
    per_second: tuple[str, ...]
    peak_flops: float | None
    hooks: tuple[Hook | WithState, ...]
    writers: tuple[Writer, ...]
    copy_every: int | None = None

    def __post_init__(self) -> None:
        """Check that the options fit together."""
        check_whole("steps", self.steps, or_none=True)
        check_whole("eval_every", self.eval_every, or_none=True)
        check_whole("replay_every", self.replay_every, or_none=True)
        check_whole("copy_every", self.copy_every, or_none=True)
        check_whole("prefetch", self.prefetch, 0, 2**16)
        check_whole("in_flight", self.in_flight, 1, 2**16)
        cast_ints(self)
        check_choice("audit", self.audit, (None, True, False))
        check_progress(self.progress)
        for name in self.per_second:
            check_text("per_second", name, "the name of a metric, such as 'tokens'")
        if self.peak_flops is not None:
            form = "FLOP/s of one device, a finite number > 0, such as 989e12"
            check_number("peak_flops", self.peak_flops, form)
            if not self.peak_flops > 0:
                refuse_option("peak_flops", self.peak_flops, form)
        rules_of(self.early_stopping)
        saving = self.checkpointer
        if saving is not None and not isinstance(saving, Checkpointer):
            refuse_option("checkpointer", saving, "None or a tj.Checkpointer(...)")
        self._check_evaluation()

    @property
    def with_state(self) -> list[WithState]:
        """The hooks that get the state."""
        return [hook for hook in self.hooks if isinstance(hook, WithState)]

    def _check_evaluation(self) -> None:
        if self.evaluate is not None and self.eval_batches is not None:
            check_evaluate(self.evaluate)
            check_batches("eval_batches", self.eval_batches, or_function=True)
        elif self.evaluate is not None or self.eval_batches is not None:
            option = "evaluate" if self.eval_batches is None else "eval_batches"
            raise ValueError(
                f"evaluate and eval_batches need each other, but only {option} was"
                " given. Pass both, or neither."
            )
        if self.eval_params is not None:
            check_function("eval_params", self.eval_params, "eval_params(state)")
        names = ("eval_every", "early_stopping", "eval_params")
        needing = {name: getattr(self, name) for name in names}
        needing["Checkpointer.best"] = getattr(self.checkpointer, "best", None)
        for name, value in needing.items():
            if self.evaluate is None and value is not None:
                raise ValueError(
                    f"{name}={value} needs an evaluation, and there is none. Pass"
                    " evaluate and eval_batches; to train_and_evaluate of a model pass"
                    " eval_data."
                )
        if self.early_stopping is not None and self.eval_every is None:
            raise ValueError(
                "early_stopping without eval_every would never stop the run, because"
                " the only evaluation is at the end. Write eval_every=n."
            )
