"""`Checkpointer`: save a run between steps with Orbax, and resume it."""

import contextlib
import dataclasses
import operator
import os
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from etils import epath

from towerjax.data.feed import Batches
from towerjax.data.stream import Position, Source, has_cursor
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.checkpoint.resume import Resume
from towerjax.loop.checkpoint.saving import Saving
from towerjax.loop.direction import Direction, sign_of
from towerjax.loop.files import absolute_path
from towerjax.loop.stopping import Point
from towerjax.mesh.lines import print_line
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step
from towerjax.types.boundary import api_boundaries
from towerjax.types.notes import explain_missing
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_methods,
    check_text,
    check_whole,
    is_one_real,
    is_whole,
    refuse_option,
)
from towerjax.types.refusals import a_type


@api_boundaries
@dataclasses.dataclass(frozen=True)
class Checkpointer:
    """Saves a run into a folder, and resumes it from there.

    ``run(..., checkpointer=...)`` starts from the newest checkpoint of the folder, if
    it is later than the given state. It saves during the run, at its end, at SIGTERM
    and at Ctrl-C. A resumed run has the bits of a run that was never stopped. A
    checkpoint can be restored on any number of towers and devices. See
    <https://github.com/towerjax/towerjax/blob/main/docs/checkpoints.md>.

    Attributes:
      directory: A folder for this run alone, local or like ``"gs://bucket/run"``. It is
        created. All processes of a job must see the same folder.
      every: Save after each step whose number is a multiple of this. None saves only at
        the end and when the run is stopped.
      keep: How many of the newest checkpoints to keep.
      best: The name of a scalar metric of the evaluation. A checkpoint is saved after
        each evaluation that is better than all before it, and the best one is always
        kept.
      mode: ``"min"`` if less of ``best`` is better, ``"max"`` if more is. None takes it
        from the metric's name, as `EarlyStopping` does. NaN is never better.
      batches: How a resumed run finds its position in the batches. ``"cursor"`` calls
        ``get_state`` and ``set_state`` of the batches, as `batches` and Grain have
        them; in a list it skips the used batches. ``"count"`` takes and drops as many
        batches as were used, which is right if their order is the same again.
        ``"anew"`` starts with the first batch.
      exit_code: The exit code with which SIGTERM ends a run, after saving.

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
    mode: Direction | None = None
    batches: Resume = "cursor"
    exit_code: int = 75

    if not TYPE_CHECKING:
        __getattr__ = explain_missing()

    def __post_init__(self) -> None:
        folder.check_directory("Checkpointer.directory", self.directory)
        check_whole("every", self.every, or_none=True)
        check_whole("keep", self.keep, 1)
        check_whole("exit_code", self.exit_code, 1, 255)
        cast_ints(self)
        if self.best is not None:
            check_text("best", self.best, "the name of a metric, such as 'loss'")
        sign_of("mode", self.best or "loss", self.mode)
        check_choice("batches", self.batches, get_args(Resume))

    @property
    def path(self) -> epath.Path:
        """The absolute path of ``directory``."""
        return absolute_path(self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The checkpoints' step numbers, ascending; read from the folder each time."""
        return folder.saved_steps(self.path)

    @property
    def best_step(self) -> int | None:
        """The step number of the best checkpoint by the metric ``best``, or None."""
        costs = record.costs_of(self)
        return min(costs, key=costs.__getitem__, default=None)

    def record(self, number: int) -> CheckpointRecord:
        """Read the record of a checkpoint, which describes its contents.

        Args:
          number: The number of the step after which it was saved.

        Returns:
          The `CheckpointRecord`.

        Raises:
          CheckpointError: There is no such checkpoint, or it cannot be read.
        """
        try:
            return CheckpointRecord.read(self._folder(number))
        except CheckpointError:
            self._folder(number)  # raises a better error if the checkpoint was deleted
            raise

    def restore(
        self, step: Step, state: TrainState, *, number: int | None = None
    ) -> TrainState:
        """Read the state of a checkpoint, and place it for this step's towers.

        With several processes, all of them must call it.

        Args:
          step: The train step.
          state: A state of the same model, such as ``step.init(params)``. The result
            has its shardings. It is not donated.
          number: The number of the step after which it was saved; None is the newest.

        Returns:
          The state.

        Raises:
          CheckpointError: There is no such checkpoint; a file is missing, truncated or
            changed; or it belongs to another model. The error names files and leaves.
          ValueError: ``state`` is not a ``TrainState`` of this step.

        Batches are not moved to the saved position, as `resume` and `run` do.

        A run that is training may delete a checkpoint while it is read here. If
        ``number`` is None, the checkpoint that is then the newest is read instead.
        """
        check_methods("step", step, "strategy start", "tj.build_train_step(...)")
        state = step.start(state)
        placement = step.strategy.placement

        def choose() -> int:
            chosen = max(self.steps, default=None) if number is None else number
            if chosen is None:
                raise CheckpointError(f"There is no checkpoint in {str(self.path)!r}.")
            where = self._folder(chosen)
            try:
                folder.check_files(where)
                saved = CheckpointRecord.read(where)
            except CheckpointError:
                if self._is_passed(chosen, number):
                    return choose()
                raise
            record.check_same_model(saved.leaves, state, where)
            return chosen

        chosen = placement.processes.call_on_first(choose)
        where = self.path / str(chosen)
        try:
            leaves = CheckpointRecord.read(where).leaves
            at = where / folder.ARRAYS
            return record.restore_leaves(at, leaves, state, placement)
        except CheckpointError:
            # Another run deleted the checkpoint, or saved a newer one. Several
            # processes do not try again, because perhaps not all of them would.
            if placement.num_processes == 1 and self._is_passed(chosen, number):
                return self.restore(step, state, number=number)
            raise

    def save(
        self,
        step: Step,
        state: TrainState,
        batches: Any = None,
        *,
        evaluations: Mapping[str, Mapping[int, float]] = types.MappingProxyType({}),
    ) -> None:
        """Save a state in a loop of your own, and wait until it is written.

        `run` saves by itself. With several processes, all of them must call it.

        Args:
          step: The train step. All its steps so far are waited for and checked.
          state: The state to save. It is not donated.
          batches: Batches with ``get_state`` and ``set_state``, such as those of
            `batches`, whose position is saved. None saves no position: skip the first
            ``int(state.step)`` batches after a restart.
          evaluations: For each metric its values by step number, as `EarlyStopping`
            takes them. The record keeps them as ``stopping``. A value of this step
            counts for ``best``.

        Raises:
          CheckpointError: The folder has a later checkpoint, or one of this step with
            other values; it cannot be written to; or parameters are not finite.
          DesyncError: The devices' copies of the state differ.
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
          ValueError: ``batches`` do not tell their position, or ``evaluations`` are
            not numbers by step number.
        """
        known = _by_step(evaluations)
        with self._opened(step, state, batches) as (saving, point):
            step.settle()
            number = point.number
            newest = saving.processes.call_on_first(lambda: max(self.steps, default=-1))
            if newest > number:
                raise CheckpointError(
                    f"{str(self.path)!r} has a checkpoint of step {newest}, which is"
                    f" later than this state of step {number}. Begin the loop with"
                    " state = checkpointer.resume(step, state, batches), or name"
                    " another folder."
                )
            saving.resume(point)  # reads which step is saved already
            point.watch.values = known
            now = {name: x[number] for name, x in known.items() if number in x}
            if self.best in now:
                saving.is_best(number, now)
            saving.save(point, now)
            saving.wait()

    def resume(self, step: Step, state: TrainState, batches: Any = None) -> TrainState:
        """Restore the newest checkpoint for a loop of your own, if it is not older.

        `run` resumes by itself. With several processes, all of them must call it.

        Args:
          step: The train step.
          state: The first state, ``step.init(params)``.
          batches: As they were given to `save`. They are moved to the saved position.

        Returns:
          The state of the newest checkpoint, or ``state`` if all are older. A line on
          stderr says after which step the loop goes on, and what has changed since.

        Raises:
          CheckpointError: The newest checkpoint is damaged or of another model, or it
            was saved without a position of ``batches``.
          ValueError: ``batches`` do not tell their position.

        Example:
          >>> import numpy as np, optax, tempfile, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
          >>> strategy = tj.Mirrored(towers=2)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.25), strategy)
          >>> folder = tempfile.TemporaryDirectory()
          >>> saving = Checkpointer(folder.name)
          >>> for until in (1, 2):  # the second pass is as a new process
          ...     batches = tj.batches(np.arange(8, dtype=np.float32), 4, epochs=None)
          ...     state = saving.resume(step, step.init(np.float32(0)), batches)
          ...     while int(state.step) < until:
          ...         state, metrics = step(state, next(batches))
          ...     saving.save(step, state, batches)
          >>> saving.steps, float(state.params)
          ((1, 2), 3.125)
          >>> folder.cleanup()
        """
        with self._opened(step, state, batches) as (saving, point):
            saving.resume(point, or_equal=True)
            if saving.is_resumed and saving.processes.is_first:
                texts = [f"goes on after step {point.number}, from its checkpoint"]
                if batches is None:
                    texts += [_how_to_move(self.record(point.number))]
                print_line("; ".join(texts + saving.differs))
        return point.state

    @contextlib.contextmanager
    def _opened(
        self, step: Step, state: TrainState, batches: Any
    ) -> Iterator[tuple[Saving, Point]]:
        """Open the folder for one call of `save` or `resume`, within this block."""
        check_methods("step", step, "strategy start", "tj.build_train_step(...)")
        point = Point(step.start(state))
        options = self
        if batches is None:
            batches = ()
            options = dataclasses.replace(self, batches="anew")
        elif not has_cursor(batches):
            raise ValueError(
                f"batches is {a_type(batches)}, which does not tell its position. Pass"
                " an iterator with get_state and set_state, such as tj.batches(...)."
                " Or leave it out, and skip the first int(state.step) batches after a"
                " restart."
            )
        if isinstance(batches, Batches):  # as in a run, which may begin with the last
            step.placer.expect([batches.most_rows])
        source = Source(batches)
        source.last = Position(point.number, source.last.cursor)
        with contextlib.ExitStack() as stack:
            yield Saving(options, step, point.state, source, stack), point

    def _is_passed(self, chosen: int, number: int | None) -> bool:
        """Look whether a checkpoint was deleted, or is no longer the newest.

        ``number`` is None if the caller asked for the newest; otherwise only deletion
        counts.
        """
        steps = self.steps
        return chosen not in steps or number is None and chosen != steps[-1]

    def _folder(self, number: int) -> epath.Path:
        if not is_whole(number) or number not in self.steps:
            raise CheckpointError(
                f"There is no checkpoint of step {number} in {str(self.path)!r}. It has"
                f" checkpoints of the steps {list(self.steps)}."
            )
        return self.path / str(number)


def _by_step(evaluations: Any) -> dict[str, dict[int, float]]:
    """Convert evaluations to Python's numbers; refuse what is no step or number."""
    form = "a dict of numbers by step number for each metric, {'loss': {100: 0.5}}"
    if not isinstance(evaluations, Mapping):
        refuse_option("evaluations", evaluations, form)
    for name, values in evaluations.items():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            refuse_option("evaluations", evaluations, form)
        for number, value in values.items():
            if not is_whole(number) or number < 0:
                where = f"a key of evaluations[{name!r}]"
                refuse_option(where, number, "a step number, a whole number >= 0")
            if not is_one_real(value):
                where = f"evaluations[{name!r}][{number!r}]"
                refuse_option(where, value, "one real number")
    return {
        name: {operator.index(number): float(x) for number, x in values.items()}
        for name, values in evaluations.items()
    }


def _how_to_move(saved: CheckpointRecord) -> str:
    """Say what a loop does with its batches, which `resume` did not get."""
    if saved.batches["cursor"] is None:
        return f"skip the first {saved.batches['used']} batches"
    return "to move batches to their saved position, pass resume(step, state, batches)"
