"""When and where is a training saved? Begun between steps, finished in a thread."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax

from towerjax.loop.checkpoint import folder
from towerjax.loop.checkpoint.folder import (
    CheckpointError,
    check_manifest,
    folder_of,
    saved_steps,
    write_manifest,
)
from towerjax.loop.checkpoint.record import (
    CheckpointRecord,
    array_files,
    check_same_model,
    described,
    library_versions,
    plain_arrays,
    restored,
    scalars,
)
from towerjax.loop.stopping import Mode, sign_of
from towerjax.mesh.processes import first_process_says
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.state import TrainState
from towerjax.types.options import check_choice, check_path, check_text, check_whole

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
        """Check the options."""
        check_path("Checkpointer.directory", self.directory, "a folder")
        if self.every is not None:
            check_whole("every", self.every, 1)
        check_whole("keep", self.keep, 1)
        check_whole("exit_code", self.exit_code, 1, 255)
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
        best, name = None, self.best
        if name is None:
            return None
        sign = sign_of(self.mode)
        for number in self.steps:
            values = self.record(number).evaluation
            if name in values and (best is None or sign * values[name] < best[0]):
                best = sign * values[name], number
        return None if best is None else best[1]

    def record(self, number: int) -> CheckpointRecord:
        """What a checkpoint says of itself.

        Args:
          number: After which step.

        Returns:
          The `CheckpointRecord`.

        Raises:
          CheckpointError: There is none, or it cannot be read.
        """
        folder = self._folder(number)
        return CheckpointRecord.read(folder)

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
        """

        def choose() -> int:
            chosen = max(self.steps, default=None) if number is None else number
            if chosen is None:
                raise CheckpointError(f"There is no checkpoint in {str(self.path)!r}.")
            check_manifest(self._folder(chosen))
            check_same_model(self.record(chosen).leaves, state, self._named(chosen))
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

    def _named(self, number: int) -> str:
        return f"The checkpoint {str(folder_of(self.path, number))!r}"

    def _folder(self, number: Any) -> pathlib.Path:
        if number not in self.steps:
            raise CheckpointError(
                f"There is no checkpoint of step {number} in {str(self.path)!r}, but of"
                f" {list(self.steps)}."
            )
        return folder_of(self.path, number)


class Saver:
    """Writes the checkpoints of one run, until ``stack`` lets go of the directory."""

    def __init__(
        self,
        options: Checkpointer,
        step: CompiledStep,
        state: TrainState,
        stack: contextlib.ExitStack,
    ) -> None:
        self.options = options
        self._step, self._is_first = step, jax.process_index() == 0
        needed = sum(x.nbytes for x in plain_arrays(state).values())

        def prepare() -> None:
            folder.prepare(options.path, needed)
            stack.enter_context(folder.held(options.path))

        first_process_says(prepare)
        self._files = stack.enter_context(contextlib.closing(array_files()))
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="towerjax-checkpoint"
        )
        stack.callback(self._thread.shutdown)  # first, and then it writes no more
        self._writing: concurrent.futures.Future[None] | None = None
        self._saved: int | None = None
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def newest_after(self, state: TrainState) -> CheckpointRecord | None:
        """The newest checkpoint, if it is of a later step."""
        number = int(state.step)
        newest = first_process_says(lambda: max(self.options.steps, default=-1))
        if newest < 0:
            return None
        record = self.options.record(newest)
        where = folder.folder_of(self.options.path, newest)
        check_same_model(record.leaves, state, f"The checkpoint {str(where)!r}")
        if newest >= number:
            self._saved = newest
        return record if newest > number else None

    def saw(self, number: int, values: Mapping[str, Any]) -> bool:
        """Note an evaluation."""
        numbers, name = scalars(values), self.options.best
        self._evaluated = number, numbers
        if name is None:
            return False
        if name not in values or getattr(values[name], "ndim", 0):
            raise ValueError(
                f"Checkpointer(best={name!r}): the evaluation has no such scalar, but"
                f" {sorted(values)}."
            )
        if name not in numbers:
            return False
        self.wait()
        best = first_process_says(lambda: self.options.best_step)
        if best is None:
            return True
        before = self.options.record(best).evaluation[name]
        sign = sign_of(self.options.mode)
        return sign * numbers[name] < sign * before

    def save(
        self,
        state: TrainState,
        number: int,
        *,
        batches: Mapping[str, Any],
        batch_rows: Sequence[int] = (),
        stopping: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save a state; once this returns a step may take its buffers over."""
        if number == self._saved:
            return
        self.wait()
        at, values = self._evaluated
        placement, seen = self._step.strategy.placement, state.seen
        record = CheckpointRecord(
            step=number,
            strategy=repr(self._step.strategy),
            towers=placement.num_towers,
            devices=placement.devices,
            leaves=tuple(described(state)),
            batches=batches,
            batch_rows=tuple(sorted(batch_rows)),
            evaluation=values if at == number else {},
            stopping=stopping or {},
            fingerprint=None if seen is None else f"{seen.fingerprint:016x}",
            versions=library_versions(),
        )
        path = folder.making(self.options.path, number)
        with self._explained(number):
            if self._is_first:
                folder.begin(self.options.path, number)
            self._files.save(path / ARRAYS, plain_arrays(state))
        self._writing = self._thread.submit(self._finish, record)
        self._saved = number

    def _finish(self, record: CheckpointRecord) -> None:
        """In the thread: wait for the arrays, then let the checkpoint count."""
        directory, number = self.options.path, record.step
        with self._explained(number):
            self._files.wait_until_finished()
            if not self._is_first:
                return
            path = folder.making(directory, number)
            record.write(path)
            write_manifest(path)
            folder.commit(directory, number)
            self._remove_old()

    def _remove_old(self) -> None:
        steps, best = self.options.steps, self.options.best_step
        for number in steps[: -self.options.keep]:
            if number != best:
                folder.remove(self.options.path, number)

    @contextlib.contextmanager
    def _explained(self, number: int) -> Any:
        try:
            yield
        except Exception as error:
            self._saved = None
            path = folder.making(self.options.path, number)
            if self._is_first:
                folder.discard(path)
            why = str(error)  # TensorStore's has its whole configuration
            why = why if len(why) <= 400 else why[:400] + " ..."
            raise CheckpointError(
                f"The checkpoint of step {number} could not be written to"
                f" {str(self.options.path)!r}; those before it are whole. {why}"
            ) from error

    def wait(self) -> None:
        """Until the last checkpoint counts."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def left_of(steps: int | None, start: int, record: CheckpointRecord) -> int | None:
    """How many steps a resumed run has to do."""
    if steps is None:
        return None
    left = start + steps - record.step
    if left < 0:
        raise CheckpointError(
            f"steps={steps} from step {start} end at {start + steps}, but the newest"
            f" checkpoint is of step {record.step}. Name another folder for another"
            " training, or do more steps."
        )
    return left
