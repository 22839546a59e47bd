"""Where is a training saved, how often, and how does it come back?"""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any, Literal, get_args

import jax

from towerjax.loop.checkpoint.folder import (
    CheckpointError,
    check_manifest,
    folder_of,
    saved_steps,
)
from towerjax.loop.checkpoint.record import (
    CheckpointRecord,
    array_files,
    check_same_model,
    restored,
)
from towerjax.loop.stopping import Mode, sign_of
from towerjax.mesh.processes import first_process_says
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.given_state import check_is_state
from towerjax.step.state import TrainState
from towerjax.types import named_leaves
from towerjax.types.leaves import listed
from towerjax.types.options import (
    check_choice,
    check_does,
    check_path,
    check_text,
    check_whole,
    is_whole,
    plain_wholes,
)

Place = Literal["cursor", "count", "anew"]
ARRAYS = "arrays"


@dataclasses.dataclass(frozen=True)
class Checkpointer:
    """Saves a training into a folder, and goes on from there after any end.

    ``run(..., checkpointer=...)`` begins with the newest checkpoint of the folder if it
    is beyond the state that was passed, and saves on the way, at the end, at SIGTERM
    and at Ctrl-C. Going on gives the bits of a run that was never stopped: the state,
    its random key, the count of examples and the place in the batches are saved. A
    checkpoint fits any number of towers and devices. See ``docs/checkpoints.md``.

    Attributes:
      directory: The folder, of this training alone; made. Of several processes all
        must see the same one.
      every: Save after each step whose number is a multiple; None saves at the end and
        when the run is stopped.
      keep: How many of the newest checkpoints stay.
      best: The name of a scalar metric of the evaluation: each evaluation that is
        better than all before it is saved, and the best one stays besides.
      mode: Is less of it better, or more? NaN never is.
      batches: How a resumed run finds its place. ``"cursor"``: the batches say and are
        told where they are, as those of `batches` and Grain; a list is counted off.
        ``"count"``: as many batches as were used are taken and dropped, which is the
        same place if they come in the same order again. ``"anew"``: it goes on with
        the first batch it is given.
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
    mode: Mode = "min"
    batches: Place = "cursor"
    exit_code: int = 75

    def __post_init__(self) -> None:
        check_path("Checkpointer.directory", self.directory, "a folder")
        check_whole("every", self.every, or_none=True)
        check_whole("keep", self.keep, 1)
        check_whole("exit_code", self.exit_code, 1, 255)
        plain_wholes(self)
        if self.best is not None:
            check_text("best", self.best, "the name of a metric, such as 'loss'")
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("batches", self.batches, get_args(Place))

    @property
    def path(self) -> pathlib.Path:
        """The directory."""
        return pathlib.Path(self.directory).absolute()

    @property
    def steps(self) -> tuple[int, ...]:
        """After which steps there are checkpoints, ascending; read anew each time."""
        return saved_steps(self.path)

    @property
    def best_step(self) -> int | None:
        """Of the checkpoints with such an evaluation, the number of the best."""
        if self.best is None:
            return None
        sign, found = sign_of(self.mode), {}
        for number in self.steps:
            values = self.record(number).evaluation
            if self.best in values:
                found[number] = sign * values[self.best]
        return min(found, key=found.__getitem__, default=None)

    def record(self, number: int) -> CheckpointRecord:
        """What a checkpoint says of itself.

        Args:
          number: After which step.

        Returns:
          The `CheckpointRecord`.

        Raises:
          CheckpointError: There is none, or it cannot be read.
        """
        return CheckpointRecord.read(self._folder(number))

    def restore(
        self, step: CompiledStep, state: TrainState, *, number: int | None = None
    ) -> TrainState:
        """The state of a checkpoint, on this step's towers and devices.

        Of several processes all call it.

        Args:
          step: The train step.
          state: One of the same model, such as ``step.init(params)``; says where each
            leaf shall lie. It is kept.
          number: After which step it was saved; None is the newest.

        Returns:
          The state.

        Raises:
          CheckpointError: There is none; a file is missing, cut or changed; or it is
            one of another model. Names files and leaves.
          ValueError: ``state`` is none, or not on devices.
        """
        check_does("step", step, "strategy start", "tj.build_train_step(...)")
        check_is_state(state)
        leaves = named_leaves("state", state)
        away = [name for name, x in leaves if not isinstance(x, jax.Array)]
        if away:
            raise ValueError(
                f"{listed(away)} lies on no device, so it does not say where the saved"
                " one shall lie. Pass step.place(state)."
            )

        def choose() -> int:
            chosen = max(self.steps, default=None) if number is None else number
            if chosen is None:
                raise CheckpointError(f"There is no checkpoint in {str(self.path)!r}.")
            where = self._folder(chosen)
            check_manifest(where)
            check_same_model(self.record(chosen).leaves, state, where)
            return chosen

        chosen = first_process_says(choose)
        arrays = folder_of(self.path, chosen) / ARRAYS
        with contextlib.closing(array_files()) as files:
            return restored(
                lambda asked: files.restore(arrays, asked),
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
        return folder_of(self.path, number)
