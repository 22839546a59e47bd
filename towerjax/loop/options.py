"""What may be asked of the loop? Its options, and whether they fit together."""

import dataclasses
from collections.abc import Iterator

from towerjax.input import feed
from towerjax.loop.evaluate import Batches
from towerjax.loop.steps import EvaluationStep
from towerjax.loop.stopping import Best, EarlyStopping


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How the loop goes; see `run`. A resumed run may be at its end (``may_end``)."""

    steps: int | None
    eval_every: int | None
    steps_per_call: int
    prefetch: int
    in_flight: int
    keep_every: int | None = None
    may_end: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("steps", "eval_every", "keep_every"):
            lowest = 0 if name == "steps" and self.may_end else 1
            if getattr(self, name) is not None:
                feed.check_whole(name, getattr(self, name), lowest)
        feed.check_whole("steps_per_call", self.steps_per_call, 1)
        feed.check_whole("prefetch", self.prefetch, 0)
        feed.check_whole("in_flight", self.in_flight, 1)
        if self.eval_every is not None and self.eval_every % self.steps_per_call:
            raise ValueError(
                f"eval_every={self.eval_every} must be a multiple of steps_per_call="
                f"{self.steps_per_call}: there is no state between the steps of a call."
            )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What to evaluate, on what, and what follows from it; see `run`."""

    step: EvaluationStep | None
    batches: Batches | None
    every: int | None
    early_stopping: EarlyStopping | None
    best: Best | None

    def __post_init__(self) -> None:
        """Check that they fit together."""
        if (self.step is None) != (self.batches is None):
            raise ValueError(
                "evaluate and eval_batches belong together, but only"
                f" {'evaluate' if self.batches is None else 'eval_batches'} was given."
            )
        if isinstance(self.batches, Iterator):
            raise ValueError(
                f"eval_batches is a {type(self.batches).__name__}, which can be gone"
                " through only once, but every evaluation needs all of it. Pass a list"
                " of batches, or a function that gives them anew:"
                " eval_batches=lambda: tj.batches(data, batch_size)."
            )
        self._check_kinds()
        if self.step is None:
            self._refuse_without_evaluation()
        if self.early_stopping is not None and self.every is None:
            raise ValueError(
                "early_stopping without eval_every would never stop anything: there is"
                " one evaluation, at the end. Say eval_every=n."
            )

    def _check_kinds(self) -> None:
        for name, kind in (("early_stopping", EarlyStopping), ("best", Best)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                more = ", patience=3" if kind is EarlyStopping else ""
                raise ValueError(
                    f"{name}={value!r} must be None or a tj.{kind.__name__}, such as"
                    f" tj.{kind.__name__}('loss'{more})."
                )

    def _refuse_without_evaluation(self) -> None:
        for name in ("every", "early_stopping", "best"):
            value = getattr(self, name)
            if value is not None:
                name = "eval_every" if name == "every" else name
                raise ValueError(
                    f"{name}={value} without anything to evaluate: pass evaluate and"
                    " eval_batches."
                )
