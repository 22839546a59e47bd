"""Save a run between steps, write in a thread, and resume it: `Checkpointer`."""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import threading
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
from etils import epath

from towerjax.data.stream import Position, Source
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.files import absolute_path, checked_path
from towerjax.loop.point import Point
from towerjax.loop.stopping import Direction, cost_of, sign_of
from towerjax.loop.writers import as_json
from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.interrupt import Terminated
from towerjax.mesh.processes import call_on_first_process, is_preempted, require_same
from towerjax.step.faults import check_mirrored
from towerjax.step.state import TrainState
from towerjax.step.step import Step
from towerjax.types.door import doors
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_methods,
    check_text,
    check_whole,
    is_whole,
)

Resume = Literal["cursor", "count", "anew"]
# Orbax counts the saves of a process, and takes two at once for one.
_ONE_AT_ONCE = threading.Lock()


@doors
@dataclasses.dataclass(frozen=True)
class Checkpointer:
    """Saves a training into a folder, and resumes it from there.

    ``run(..., checkpointer=...)`` starts from the newest checkpoint of the folder if
    that is after the state that was passed. It saves during the run, at its end, at
    SIGTERM and at Ctrl-C. A resumed run has the bits of one that was never stopped. A
    checkpoint fits any number of towers and devices. See
    <https://github.com/towerjax/towerjax/blob/main/docs/checkpoints.md>.

    Attributes:
      directory: A folder for this training alone, local or such as
        ``"gs://bucket/run"``; made. All of several processes must see the same folder.
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
        checked_path("Checkpointer.directory", self.directory, "a folder")
        check_whole("every", self.every, or_none=True)
        check_whole("keep", self.keep, 1)
        check_whole("exit_code", self.exit_code, 1, 255)
        cast_ints(self)
        if self.best is not None:
            check_text("best", self.best, "the name of a metric, such as 'loss'")
        check_choice("mode", self.mode, get_args(Direction))
        check_choice("batches", self.batches, get_args(Resume))

    @property
    def path(self) -> epath.Path:
        """The absolute path of ``directory``."""
        return absolute_path(self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints, ascending; read from the folder each time."""
        return folder.saved_steps(self.path)

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric ``best``, or None."""
        costs = _costs(self)
        return min(costs, key=costs.__getitem__, default=None)

    def record(self, number: int) -> CheckpointRecord:
        """The record of a checkpoint.

        Args:
          number: The step after which it was saved.

        Returns:
          The `CheckpointRecord`.

        Raises:
          CheckpointError: There is none, or it cannot be read.
        """
        return CheckpointRecord.read(self._folder(number))

    def restore(
        self, step: Step, state: TrainState, *, number: int | None = None
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
        return self._restore(step, step.start(state), number)

    def _restore(self, step: Step, state: TrainState, number: Any) -> TrainState:
        """`restore`, of a state that ``step.start`` returned."""

        def choose() -> int:
            chosen = max(self.steps, default=None) if number is None else number
            if chosen is None:
                raise CheckpointError(f"There is no checkpoint in {str(self.path)!r}.")
            where = self._folder(chosen)
            folder.check_manifest(where)
            saved = CheckpointRecord.read(where)
            record.check_same_model(saved.leaves, state, where)
            return chosen

        where = folder.path_of(self.path, call_on_first_process(choose))
        leaves = CheckpointRecord.read(where).leaves
        with folder.for_orbax(where) as here:
            if here != where:
                folder.copy_files(where, here)
            arrays, placement = here / folder.ARRAYS, step.strategy.placement
            return record.restore_leaves(arrays, leaves, state, placement)

    def _folder(self, number: Any) -> epath.Path:
        if not is_whole(number) or number not in self.steps:
            raise CheckpointError(
                f"There is no checkpoint of step {number} in {str(self.path)!r}, but of"
                f" {list(self.steps)}."
            )
        return folder.path_of(self.path, number)


def _costs(options: Checkpointer) -> dict[int, float]:
    """Of each checkpoint with the metric ``best`` its step, and what `cost_of` says."""
    if options.best is None:
        return {}
    values = {n: options.record(n).evaluation.get(options.best) for n in options.steps}
    sign = sign_of(options.mode)
    return {number: sign * x for number, x in values.items() if x is not None}


class Saving:
    """Saves and resumes one run; ``stack`` closes its thread, files and lock."""

    def __init__(
        self,
        options: Checkpointer,
        step: Step,
        state: TrainState,
        source: Source,
        stack: contextlib.ExitStack,
    ) -> None:
        self.options, self._step, self._source = options, step, source
        self.directory = str(options.path)
        self._is_first = jax.process_index() == 0
        self._several = step.strategy.placement.num_processes > 1
        self._refuse_what_cannot_be_saved()
        record.check_names(state)
        needed = sum(x.nbytes for x in jax.tree.leaves(record.arrays_of(state)))
        call_on_first_process(
            lambda: stack.enter_context(folder.lock(options.path, needed))
        )
        require_same(
            "Who has locked the folder of the checkpoints",
            folder.owner(options.path),
            f"Here it is in {self.directory!r}. Name one that all processes see.",
        )
        written_to = folder.for_orbax(options.path, self._several)
        self._written_to = stack.enter_context(written_to)
        self._files = stack.enter_context(record.array_checkpointer())
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="towerjax-checkpoint"
        )
        stack.callback(self._thread.shutdown)  # called first: no write comes after it
        self._writing: concurrent.futures.Future[None] | None = None
        # The newest saved step, and its evaluation.
        self._saved: tuple[int, Mapping[str, float]] = (-1, {})
        self.is_resumed = False
        self.passed_end: int | None = None  # of a run that ends before a checkpoint
        self._lowest = call_on_first_process(
            lambda: min(_costs(options).values(), default=math.inf)
        )

    def _refuse_what_cannot_be_saved(self) -> None:
        if jax.process_count() > 1 and not self._several:
            raise CheckpointError(
                "A Checkpointer saves what all processes of a job train together, but"
                " the towers here are one process's own. Write"
                " their parameters, a plain tree, with safetensors."
            )
        is_known = self._source.has_cursor or self._source.is_reproducible
        if self.options.batches == "cursor" and not is_known:
            raise CheckpointError(
                "Checkpointer(batches='cursor') saves the position of the batches, but"
                " these have no get_state and set_state. Say batches='count' if they"
                " come in the same order each time, or 'anew'; or pass"
                " tj.batches(...) itself or a list."
            )
        record.encode_cursor(self._source.last.cursor)

    def resume(self, point: Point, steps: int | None) -> int | None:
        """Set it to the newest checkpoint if that is later; the steps that are left."""
        start = point.number
        newest = call_on_first_process(lambda: max(self.options.steps, default=-1))
        if newest < 0:
            return steps
        saved = self.options.record(newest)
        if newest >= start:
            self._saved = newest, saved.evaluation
        if newest <= start:
            where = folder.path_of(self.options.path, newest)
            record.check_same_model(saved.leaves, point.state, where)
            return steps
        left = None if steps is None else max(start + steps - newest, 0)
        if steps is not None and start + steps < newest:
            self.passed_end = start + steps
        point.state = self.options._restore(self._step, point.state, newest)
        point.number, point.is_evaluation_due = newest, saved.evaluation_due
        point.watch.restore_counts(saved.stopping)
        self._seek(saved)
        self._step.expect_batch_rows(saved.batch_rows)
        self.is_resumed = True
        return left

    def _seek(self, saved: CheckpointRecord) -> None:
        used, cursor = saved.batches["used"], saved.batches["cursor"]
        if self.options.batches == "anew":
            return
        uses_cursor = self.options.batches == "cursor" and self._source.has_cursor
        if uses_cursor and cursor is None:
            raise CheckpointError(
                "These batches have get_state and set_state, which those of the"
                f" checkpoint of step {saved.step} had not. Pass those, or say"
                f" batches='count', to skip the first {used}."
            )
        cursor = record.decode_cursor(cursor) if uses_cursor else None
        self._source.go_to(Position(used, cursor))

    def is_best(self, values: Mapping[str, Any]) -> bool:
        """Whether an evaluation is better than all before it, and to be saved."""
        if self.options.best is None:
            return False
        before, cost = self._lowest, cost_of(values, self.options, "best")
        self._lowest = cost if cost < before else before
        return cost < before

    def save(
        self, point: Point, evaluation: Mapping[str, Any] = types.MappingProxyType({})
    ) -> None:
        """Begin to save, unless this step and its evaluation, if any, are saved.

        Raise where devices' copies of the state differ: that is none to go on from.
        Once this returns a step may donate the state's buffers.
        """
        state, number = point.state, point.number
        evaluation = record.real_scalars(evaluation)
        newest, known = self._saved
        if number == newest and evaluation in ({}, known):
            return
        check_mirrored(state)
        self.wait()
        strategy, last = self._step.strategy, self._source.last
        new = CheckpointRecord(
            step=number,
            strategy=repr(strategy),
            towers=strategy.placement.num_towers,
            devices=strategy.placement.devices,
            leaves=tuple(record.leaves_of(state)),
            batches={"used": last.used, "cursor": record.encode_cursor(last.cursor)},
            batch_rows=tuple(sorted(self._step.batch_rows)),
            evaluation=evaluation,
            evaluation_due=point.is_evaluation_due,
            stopping=point.watch.counts,
            versions=record.library_versions(),
        )
        with contextlib.ExitStack() as held, self._explaining(number):
            if number != newest:  # else only the record changes
                held.enter_context(_ONE_AT_ONCE)
                path = folder.partial_path_of(self._written_to, number)
                if self._is_first:
                    folder.discard(self._written_to, number)
                self._files.save(path / folder.ARRAYS, record.arrays_of(state))
            finish = self._finish, new, number != newest, held.pop_all()
            self._writing = self._thread.submit(*finish)
        self._saved = number, evaluation

    def _finish(
        self, new: CheckpointRecord, is_new: bool, held: contextlib.ExitStack
    ) -> None:
        """In the thread: wait for the arrays, then commit the checkpoint."""
        directory, number = self.options.path, new.step
        with self._explaining(number):
            with held:
                self._files.wait_until_finished()
            if not self._is_first:
                return
            fields = as_json(dataclasses.asdict(new))
            target = folder.path_of(directory, number)
            if is_new:
                partial = folder.partial_path_of(self._written_to, number)
                record.describe_to_orbax(partial, self._files)
                folder.commit(partial, target, fields)
            else:
                table = {**folder.read_manifest(target), "record": fields}
                folder.write_table(target, table)
        steps, best = self.options.steps, self.options.best_step
        for number in steps[: -self.options.keep]:
            if number != best:
                folder.remove(directory, number)

    @contextlib.contextmanager
    def _explaining(self, number: int) -> Any:
        try:
            yield
        except Exception as error:
            if self._is_first:
                with contextlib.suppress(Exception):  # the cause is raised
                    folder.discard(self._written_to, number)
            raise CheckpointError(
                f"The checkpoint of step {number} could not be written to"
                f" {self.directory!r}; those before it are whole."
                f" {error!s:.400}"  # TensorStore's has its whole configuration
            ) from error

    def wait(self) -> None:
        """Wait until the last checkpoint is committed."""
        if self._writing is not None:
            self._writing.result()  # again where Ctrl-C ends this
            self._writing = None

    def check_preempted(self, number: int) -> None:
        """Raise on all of several processes if one of them was sent SIGTERM.

        Also report a step to the launcher.
        """
        heartbeat.notify_launcher(heartbeat.STEP)
        if self._several and is_preempted(number):
            raise Terminated(self.options.exit_code)
