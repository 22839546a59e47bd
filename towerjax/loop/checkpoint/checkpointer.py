"""`Checkpointer`: the options of checkpoints, and how a state is restored."""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any, Literal, get_args

from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.stopping import Direction, sign_of
from towerjax.mesh.processes import call_on_first_process
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.state import TrainState
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_methods,
    check_path,
    check_text,
    check_whole,
    is_whole,
)

Resume = Literal["cursor", "count", "anew"]
ARRAYS = "arrays"


@dataclasses.dataclass(frozen=True)
class Checkpointer:
    """Saves a training into a folder, and resumes it from there.

    ``run(..., checkpointer=...)`` starts from the newest checkpoint of the folder if
    that is after the state that was passed. It saves during the run, at its end, at
    SIGTERM and at Ctrl-C. A resumed run has the bits of one that was never stopped. A
    checkpoint fits any number of towers and devices. See ``docs/checkpoints.md``.

    Attributes:
      directory: A folder for this training alone; made. All of several processes must
        see the same folder.
      every: Save after each step whose number is a multiple; None saves at the end and
        when the run is stopped.
      keep: How many of the newest checkpoints are kept.
      best: The name of a scalar metric of the evaluation: each evaluation that is
        better than all before it is saved, and the best one is kept besides.
      mode: ``"min"`` if less is better, ``"max"`` if more is. NaN never is.
      batches: How a resumed run finds its position in the batches. ``"cursor"``: by
        ``get_state`` and ``set_state`` of the batches, such as those of `batches` and
        Grain; a list is skipped by count. ``"count"``: it takes and drops as many
        batches as were used, which is right if their order is the same again.
        ``"anew"``: it starts with the first batch.
      exit_code: Of the ``SystemExit`` that ends a run at SIGTERM, once it is saved.

    Example:
      >>> import numpy as np, optax, tempfile, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.25), tj.Mirrored(towers=2))
      >>> data = np.full(8, 2.0, np.float32)
      >>> def train(steps):
      ...     return tj.run(step, step.init(np.float32(0)), tj.batches(data, 4,
      ...         epochs=None), steps=steps, checkpointer=saving, progress=False)[0]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = Checkpointer(folder, every=2, keep=2)
      ...     first, after = train(5), train(7)  # the second does two steps
      ...     saving.steps, float(after.params)
      ((6, 7), 1.984375)
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3
    best: str | None = None
    mode: Direction = "min"
    batches: Resume = "cursor"
    exit_code: int = 75

    def __post_init__(self) -> None:
        check_path("Checkpointer.directory", self.directory, "a folder")
        check_whole("every", self.every, or_none=True)
        check_whole("keep", self.keep, 1)
        check_whole("exit_code", self.exit_code, 1, 255)
        cast_ints(self)
        if self.best is not None:
            check_text("best", self.best, "the name of a metric, such as 'loss'")
        check_choice("mode", self.mode, get_args(Direction))
        check_choice("batches", self.batches, get_args(Resume))

    @property
    def path(self) -> pathlib.Path:
        """The absolute path of ``directory``."""
        return pathlib.Path(self.directory).absolute()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints, ascending; read from the folder each time."""
        return folder.saved_steps(self.path)

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric ``best``, or None."""
        if self.best is None:
            return None
        sign, found = sign_of(self.mode), {}
        for number in self.steps:
            values = self.record(number).evaluation
            if self.best in values:
                found[number] = sign * values[self.best]
        return min(found, key=found.__getitem__, default=None)

    def record(self, number: int) -> record.CheckpointRecord:
        """The record of a checkpoint.

        Args:
          number: The step after which it was saved.

        Returns:
          The `CheckpointRecord`.

        Raises:
          CheckpointError: There is none, or it cannot be read.
        """
        return record.CheckpointRecord.read(self._folder(number))

    def restore(
        self, step: CompiledStep, state: TrainState, *, number: int | None = None
    ) -> TrainState:
        """The state of a checkpoint, on this step's towers and devices.

        All of several processes call it.

        Args:
          step: The train step.
          state: A state of the same model, such as ``step.init(params)``, whose
            shardings the result has. It is not donated.
          number: The step after which it was saved; None is the newest.

        Returns:
          The state.

        Raises:
          CheckpointError: There is none; a file is missing, truncated or changed; or
            it is of another model. Names files and leaves.
          ValueError: ``state`` is no ``TrainState`` of this step.
        """
        check_methods("step", step, "strategy start", "tj.build_train_step(...)")
        state = step.start(state)

        def choose() -> int:
            chosen = max(self.steps, default=None) if number is None else number
            if chosen is None:
                raise CheckpointError(f"There is no checkpoint in {str(self.path)!r}.")
            where = self._folder(chosen)
            folder.check_manifest(where)
            record.check_same_model(self.record(chosen).leaves, state, where)
            return chosen

        chosen = call_on_first_process(choose)
        arrays = folder.path_of(self.path, chosen) / ARRAYS
        with contextlib.closing(record.array_checkpointer()) as files:
            return record.restore_leaves(
                lambda shapes: files.restore(arrays, shapes),
                self.record(chosen).leaves,
                state,
                step.strategy.placement,
            )

    def _folder(self, number: Any) -> pathlib.Path:
        if not is_whole(number) or number not in self.steps:
            raise CheckpointError(
                f"There is no checkpoint of step {number} in {str(self.path)!r}, but of"
                f" {list(self.steps)}."
            )
        return folder.path_of(self.path, number)
