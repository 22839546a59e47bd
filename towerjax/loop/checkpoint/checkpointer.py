"""`Checkpointer`: save a run between steps with Orbax, and resume it."""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
from etils import epath

from towerjax.data.stream import Position, Source, has_cursor
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.manager import open_manager, quiet_orbax
from towerjax.loop.checkpoint.programs import ProgramsOfRun
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.direction import Direction, sign_of
from towerjax.loop.files import absolute_path
from towerjax.loop.stopping import Point, value_of
from towerjax.loop.writers import as_json
from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.interrupt import Terminated
from towerjax.mesh.processes import (
    call_on_first_process,
    is_preempted,
    print_line,
    require_same,
)
from towerjax.step.state.desync import check_mirrored
from towerjax.step.state.nonfinite import nonfinite_leaves
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
    is_whole,
)
from towerjax.types.refusals import a_type, listed

Resume = Literal["cursor", "count", "anew"]


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
        """Return the record of a checkpoint, which describes its contents.

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
        """Return the state of a checkpoint, placed for this step's towers and devices.

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

        chosen = call_on_first_process(choose)
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
          CheckpointError: The folder has a later checkpoint, or cannot be written to,
            or parameters are not finite.
          DesyncError: The devices' copies of the state differ.
          NonFiniteError: With ``on_nonfinite="raise"``, a step was refused.
          ValueError: ``batches`` do not tell their position.
        """
        with self._opened(step, state, batches) as (saving, point):
            step.settle()
            number = point.number
            newest = call_on_first_process(lambda: max(self.steps, default=-1))
            if newest > number:
                raise CheckpointError(
                    f"{str(self.path)!r} has a checkpoint of step {newest}, which is"
                    f" later than this state of step {number}. Begin the loop with"
                    " state = checkpointer.resume(step, state, batches), or name"
                    " another folder."
                )
            saving.resume(point)  # reads which step is saved already
            point.watch.values = {name: {**x} for name, x in evaluations.items()}
            now = {name: x[number] for name, x in evaluations.items() if number in x}
            if self.best in now:
                saving.is_best(number, now)
            saving.save(point, now)
            saving.wait()

    def resume(self, step: Step, state: TrainState, batches: Any = None) -> TrainState:
        """Restore the newest checkpoint for a loop of your own, if it is a later one.

        `run` resumes by itself. With several processes, all of them must call it.

        Args:
          step: The train step.
          state: The first state, ``step.init(params)``.
          batches: As they were given to `save`. They are moved to the saved position.

        Returns:
          The state of the newest checkpoint, or ``state`` if none is later. A line on
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
            saving.resume(point)
            if saving.is_resumed and jax.process_index() == 0:
                text = f"goes on after step {point.number}, from its checkpoint"
                print_line("; ".join([text, *saving.differs]))
        return point.state

    @contextlib.contextmanager
    def _opened(
        self, step: Step, state: TrainState, batches: Any
    ) -> Iterator[tuple["Saving", Point]]:
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
        source = Source(batches)
        source.last = Position(point.number, source.last.cursor)
        with contextlib.ExitStack() as stack:
            yield Saving(options, step, point.state, source, stack), point

    def _is_passed(self, chosen: int, number: int | None) -> bool:
        """Return whether a checkpoint was deleted, or is no longer the newest.

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


class Saving:
    """Saves and resumes one run; ``stack`` closes its files and its lock."""

    def __init__(
        self,
        options: Checkpointer,
        step: Step,
        state: TrainState,
        source: Source,
        stack: contextlib.ExitStack,
    ) -> None:
        self.options = options
        self._step = step
        self._source = source
        self.directory = str(options.path)
        self._several = step.strategy.placement.num_processes > 1
        self._refuse_what_cannot_be_saved()
        record.check_names(state)
        needed = sum(x.nbytes for x in jax.tree.leaves(record.arrays_of(state)))
        # Process 0, which locks the folder, replaces this by a real check.
        self._check_lock: Callable[[], None] = lambda: None

        def lock() -> None:
            held = folder.lock(options.path, needed)
            self._check_lock = stack.enter_context(held)

        call_on_first_process(lock)
        require_same(
            "The process that has locked the folder of the checkpoints",
            folder.owner(options.path),
            f"Here it is {self.directory!r}. Name a folder that all processes see.",
        )
        stack.enter_context(quiet_orbax())
        self._files = open_manager(options.path, self._seal, self)
        stack.callback(self._close)
        # A pool runs the thread, because Python takes a thread for ended if Ctrl-C
        # interrupts its `join`.
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        # Callbacks run last to first, so writing ends before files are closed.
        stack.callback(self._thread.shutdown)
        self._written: concurrent.futures.Future[None] | None = None
        # The checkpoint that was saved last, or is being written. At first there is
        # none.
        self._last = CheckpointRecord(-1, "", 0, (), ())
        self.is_resumed = False
        # Texts on what has changed since the resumed checkpoint.
        self.differs: list[str] = []
        # The record of the resumed checkpoint.
        self._from: CheckpointRecord | None = None
        self._programs = ProgramsOfRun(step)
        costs = call_on_first_process(lambda: [*record.costs_of(options).items()])
        self._best, self._lowest = min(
            costs, key=lambda pair: pair[1], default=(None, math.inf)
        )

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # `wait` raises it
            self._files.close()

    def _refuse_what_cannot_be_saved(self) -> None:
        if jax.process_count() > 1 and not self._several:
            raise CheckpointError(
                "A Checkpointer needs a run that all processes of a job share, but"
                " these towers belong to one process alone. Save their parameters, a"
                " plain tree, with safetensors."
            )
        is_known = self._source.has_cursor or self._source.is_reproducible
        if self.options.batches == "cursor" and not is_known:
            raise CheckpointError(
                "Checkpointer(batches='cursor') saves the position in the batches, but"
                " these have no get_state and set_state. Write batches='count' if they"
                " come in the same order each time, or 'anew'; or pass tj.batches(...)"
                " itself or a list."
            )
        record.encode_cursor(self._source.last.cursor)

    def resume(self, point: Point) -> None:
        """Restore the newest checkpoint if it is later than the state in ``point``."""
        start = point.number
        newest = call_on_first_process(lambda: max(self.options.steps, default=-1))
        if newest < 0:
            return
        saved = self.options.record(newest)
        if newest >= start:
            self._last = saved
        if newest <= start:
            where = self.options.path / str(newest)
            record.check_same_model(saved.leaves, point.state, where)
            return
        point.state = self.options.restore(self._step, point.state, number=newest)
        point.number = newest
        point.is_evaluation_due = saved.evaluation_due
        point.watch.go_on(saved.stopping)
        self._seek(saved)
        self._step.placer.expect(saved.batch_rows)
        self.is_resumed = True
        self.differs = record.what_was_other(saved, self._step.strategy)
        self._from = saved

    def compare_programs(self) -> str:
        """Return, as text, how the programs differ from those before the checkpoint.

        The text is "" from the second call on. It is also "" if something else has
        changed on which programs depend, such as the strategy.
        """
        saved = self._from
        self._from = None
        if saved is None or self.differs:
            return ""
        return self._programs.other_than(saved.programs)

    def _seek(self, saved: CheckpointRecord) -> None:
        used = saved.batches["used"]
        cursor = saved.batches["cursor"]
        if self.options.batches == "anew":
            return
        uses_cursor = self.options.batches == "cursor" and self._source.has_cursor
        if uses_cursor and cursor is None:
            raise CheckpointError(
                "These batches have get_state and set_state, but the batches of the"
                f" checkpoint of step {saved.step} did not. Pass batches like those, or"
                f" write batches='count' to skip the first {used} batches."
            )
        cursor = record.decode_cursor(cursor) if uses_cursor else None
        self._source.go_to(Position(used, cursor))

    def is_best(self, number: int, values: Mapping[str, Any]) -> bool:
        """Return whether an evaluation is better than all before, and must be saved."""
        best = self.options.best
        if best is None:
            return False
        value = value_of(values, "Checkpointer.best", best)
        cost = sign_of("mode", best, self.options.mode) * value
        if not cost < self._lowest:
            return False
        self._best = number
        self._lowest = cost
        return True

    def save(
        self, point: Point, evaluation: Mapping[str, Any] = types.MappingProxyType({})
    ) -> None:
        """Begin to save, unless this step and its evaluation are already saved.

        Raises if devices' copies of the state differ, or if parameters are not finite,
        because no run can go on from such a state. Once this returns, a step may donate
        the buffers.
        """
        state = point.state
        number = point.number
        evaluation = record.real_scalars(evaluation)
        is_new = number != self._last.step
        if not is_new and evaluation in ({}, self._last.evaluation):
            return
        check_mirrored(state)
        if names := nonfinite_leaves("params", state.params):
            steps = self.options.steps
            good = f"the last good one is of step {steps[-1]}" if steps else "none is"
            raise CheckpointError(
                f"Parameters are not finite after step {number}: {listed(names)}. They"
                f" are not saved; {good} in {self.directory!r}. Possible causes are"
                " on_nonfinite='ignore', guard='loss', or an update that overflows."
                " Lower the learning rate, or clip gradients."
            )
        self.wait()
        call_on_first_process(self._check_lock)
        strategy = self._step.strategy
        last = self._source.last
        self._last = CheckpointRecord(
            step=number,
            strategy=repr(strategy),
            towers=strategy.placement.num_towers,
            devices=strategy.placement.devices,
            leaves=tuple(record.leaves_of(state)),
            batches={"used": last.used, "cursor": record.encode_cursor(last.cursor)},
            batch_rows=tuple(sorted(self._step.placer.batch_rows)),
            evaluation=evaluation,
            evaluation_due=point.is_evaluation_due,
            stopping={name: {**x} for name, x in point.watch.values.items()},
            versions=record.library_versions(),
            programs=self._programs.hashes() or self._last.programs,
        )
        with self._explaining(number):
            if is_new:
                from orbax.checkpoint.args import StandardSave

                arrays = record.arrays_of(state)
                self._files.save(number, args=StandardSave(arrays), force=True)
                self._written = self._thread.submit(self._finish)
            else:  # only the record changes
                self._replace_record(self.options.path / str(number))

    def _finish(self) -> None:
        """Wait until the checkpoint is committed, and delete those that it replaces."""
        self._files.wait_until_finished()
        if jax.process_index() == 0:
            folder.empty_deleted(self.options.path)

    def _seal(self) -> None:
        """Write a checkpoint's table; Orbax's thread calls this before it commits."""
        (where,) = folder.unfinished(self.options.path)
        folder.seal(where, as_json(dataclasses.asdict(self._last)))

    def _replace_record(self, where: epath.Path) -> None:
        if jax.process_index() == 0:
            fields = as_json(dataclasses.asdict(self._last))
            with folder.explained("written to", where):
                table = {**folder.read_table(where), "record": fields}
                folder.write_table(where, table)
        there = self._files.all_steps()
        for number in {*there} - self._kept(there):
            self._files.delete(number)
        self._finish()

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> list[bool]:
        """Return which checkpoints to keep; Orbax calls this when it saves another."""
        numbers = self._kept([x.step for x in checkpoints])
        return [x.step in numbers for x in checkpoints]

    def _kept(self, steps: Sequence[int]) -> set[int | None]:
        return {*sorted(steps)[-self.options.keep :], self._best}

    @contextlib.contextmanager
    def _explaining(self, number: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._check_lock()  # raises if another run has taken over the folder
            # This one was written, so deleting an older one has failed.
            if number in self.options.steps:
                with folder.explained("deleted from", self.options.path):
                    raise
            if jax.process_index() == 0:
                with contextlib.suppress(Exception):  # the error below is raised
                    for path in folder.unfinished(self.options.path):
                        path.rmtree()
            raise CheckpointError(
                f"The checkpoint of step {number} could not be written to"
                f" {self.directory!r}; earlier checkpoints are complete."
                f" {error!s:.400}"  # TensorStore adds its configuration
            ) from error

    def wait(self) -> None:
        """Wait until the last checkpoint is committed."""
        with self._explaining(self._last.step):
            if self._written is not None:
                self._written.result()
            self._written = None

    def check_preempted(self, number: int) -> None:
        """Raise on all processes if one of several got SIGTERM.

        It also reports a step to the launcher.
        """
        heartbeat.notify_launcher(heartbeat.STEP)
        if self._several and is_preempted(number):
            raise Terminated(self.options.exit_code)
