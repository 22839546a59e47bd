"""`Saving`: save and resume one run, in a folder that it has locked."""

import concurrent.futures
import contextlib
import dataclasses
import math
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from towerjax.data.stream import Source
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.manager import join_counts, open_manager, quiet_orbax
from towerjax.loop.checkpoint.programs import ProgramsOfRun
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.checkpoint.resume import go_on, record_of
from towerjax.loop.direction import sign_of
from towerjax.loop.stopping import Point, value_of
from towerjax.loop.writers import as_json
from towerjax.mesh import live
from towerjax.mesh.interrupt import Terminated
from towerjax.mesh.processes import is_preempted
from towerjax.step.state.desync import check_mirrored
from towerjax.step.state.nonfinite import nonfinite_leaves
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step
from towerjax.types.refusals import listed


class Saving:
    """Saves and resumes one run; ``options`` is its `Checkpointer`.

    ``stack`` closes its files and its lock.
    """

    def __init__(
        self,
        options: Any,
        step: Step,
        state: TrainState,
        source: Source,
        stack: contextlib.ExitStack,
        *,
        alone: bool = False,
    ) -> None:
        self.options = options
        self._step = step
        self._source = source
        self.directory = str(options.path)
        self.is_alone = alone
        self.processes = step.strategy.placement.processes
        self._refuse_what_cannot_be_saved()
        record.check_names(state)
        needed = sum(x.nbytes for x in jax.tree.leaves(record.arrays_of(state)))
        # The first process, which locks the folder, replaces this by a real check.
        self._check_lock: Callable[[], None] = lambda: None

        def lock() -> None:
            held = folder.lock(options.path, needed)
            self._check_lock = stack.enter_context(held)

        self.processes.call_on_first(lock)
        self.processes.require_same(
            "The process that has locked the folder of the checkpoints",
            folder.owner(options.path),
            f"Here it is {self.directory!r}. Name a folder that all processes see.",
        )
        stack.enter_context(quiet_orbax())
        self._open_files()
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
        # Whether the last checkpoint was found in the folder, with the number of the
        # state that was given. Its values may be those of another run.
        self._is_found = False
        self.is_resumed = False
        self.note = ""  # a text for the user, or "" if there is nothing to say
        # Texts on what has changed since the resumed checkpoint.
        self.differs: list[str] = []
        # The record of the resumed checkpoint.
        self._from: CheckpointRecord | None = None
        self._programs = ProgramsOfRun(step)
        costs = self.processes.call_on_first(
            lambda: [*record.costs_of(options).items()]
        )
        self._best, self._lowest = min(
            costs, key=lambda pair: pair[1], default=(None, math.inf)
        )

    def _open_files(self) -> None:
        """Open the folder in the processes that write checkpoints."""
        numbers = self.processes.numbers
        # If the first process writes alone, no other one can make it wait.
        self._writers = numbers[:1] if self.is_alone else numbers
        here = jax.process_index()
        self._writes = here in (self._writers or [here])
        self._files: Any = None
        name = None
        if live.is_recoverable() and len(self._writers) > 1:
            join_counts(self.processes)
            name = self.processes.call_on_first(lambda: uuid.uuid4().hex)
        if self._writes:
            path = self.options.path
            self._files = open_manager(path, self._seal, self, self._writers, name)

    def _close(self) -> None:
        if self._writes:
            with contextlib.suppress(Exception):  # `wait` raises it
                self._files.close()

    def _refuse_what_cannot_be_saved(self) -> None:
        if len(live.numbers_left()) > 1 and not (
            self.processes.are_several or self.is_alone
        ):
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

    def resume(
        self, point: Point, *, or_equal: bool = False, is_again: bool = False
    ) -> None:
        """Restore the newest checkpoint if it is later than the state in ``point``.

        With ``or_equal`` one of the same step is restored, too. ``is_again`` says that
        this run has written the checkpoints, before it lost a process.
        """
        start = point.number
        newest = self.processes.call_on_first(
            lambda: max(self.options.steps, default=-1)
        )
        if newest < 0:
            return
        saved = self.options.record(newest)
        if newest >= start:
            self._last = saved
        if newest < start or newest == start and not or_equal:
            where = self.options.path / str(newest)
            record.check_same_model(saved.leaves, point.state, where)
            self._is_found = newest == start and not is_again
            if self._is_found and self._is_elsewhere(saved):
                self.note = (
                    f"begins at step {start} with batches that are not where those of"
                    " its checkpoint were; from an earlier state, a run moves them"
                )
            return
        state = self.options.restore(self._step, point.state, number=newest)
        go_on(self._step, point, self._source, state, saved, self.options.batches)
        self.is_resumed = True
        self.differs = record.what_was_other(saved, self._step.strategy)
        self._from = saved

    def compare_programs(self) -> str:
        """Tell how the programs differ from those before the checkpoint.

        The text is "" from the second call on. It is also "" if something else has
        changed on which programs depend, such as the strategy.
        """
        saved = self._from
        self._from = None
        if saved is None or self.differs:
            return ""
        return self._programs.other_than(saved.programs)

    def _is_elsewhere(self, saved: CheckpointRecord) -> bool:
        """Look whether the batches tell another position than the saved one."""
        if self.options.batches != "cursor" or saved.batches["cursor"] is None:
            return False
        here = record.encode_cursor(self._source.last.cursor)
        return here is not None and here != saved.batches["cursor"]

    def is_best(self, number: int, values: Mapping[str, Any]) -> bool:
        """Decide whether an evaluation is better than all before, to be saved."""
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
        self,
        point: Point,
        evaluation: Mapping[str, Any] = types.MappingProxyType({}),
        copy: TrainState | None = None,
    ) -> None:
        """Begin to save, unless this step and its evaluation are already saved.

        Raises if devices' copies of the state differ, or if parameters are not finite,
        because no run can go on from such a state; or if the folder has other values of
        this step. Once this returns, a step may donate the buffers. ``copy`` is the
        state on the host, if the first process writes alone.
        """
        state = point.state
        number = point.number
        is_new = number != self._last.step
        if self._is_found and not is_new:
            self._refuse_others_values(point)
        self._is_found = False
        new = self._record(point, record.real_scalars(evaluation))
        if not is_new:
            new = _joined(self._last, new)
            if new == self._last:
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
        self.processes.call_on_first(self._check_lock)
        self._last = new
        if not self._writes:
            return
        with self._explaining(number):
            if is_new:
                from orbax.checkpoint.args import StandardSave

                arrays = record.arrays_of(state if copy is None else copy)
                # In a job of several processes, Orbax refuses arrays of one of them.
                if jax.process_count() > 1 and len(self._writers) == 1:
                    arrays = jax.tree.map(np.asarray, arrays)
                self._files.save(number, args=StandardSave(arrays), force=True)
                self._written = self._thread.submit(self._finish)
            else:  # only the record changes
                self._replace_record(self.options.path / str(number))

    def _record(
        self, point: Point, evaluation: Mapping[str, float]
    ) -> CheckpointRecord:
        """Record a state; raise unless the record can be read back."""
        new = dataclasses.replace(
            record_of(self._step, point, self._source),
            evaluation=evaluation,
            programs=self._programs.hashes() or self._last.programs,
        )
        record.check_readable(new)
        return new

    def _refuse_others_values(self, point: Point) -> None:
        """Raise unless the folder's checkpoint of this step has the state's bits."""
        number = point.number
        saved = self.options.restore(self._step, point.state, number=number)
        if names := record.other_leaves(point.state, saved):
            raise CheckpointError(
                f"{self.directory!r} has a checkpoint of step {number} with other"
                f" values than this state of step {number}: {listed(names)}. Begin with"
                " that checkpoint, state = checkpointer.resume(step, state, batches),"
                " or name another folder."
            )

    def _finish(self) -> None:
        """Wait until the checkpoint is committed, and delete those that it replaces."""
        self._files.wait_until_finished()
        if self.processes.is_first:
            folder.empty_deleted(self.options.path)

    def _seal(self) -> None:
        """Write a checkpoint's table; Orbax's thread calls this before it commits."""
        (where,) = folder.unfinished(self.options.path)
        folder.seal(where, as_json(dataclasses.asdict(self._last)))

    def _replace_record(self, where: epath.Path) -> None:
        if self.processes.is_first:
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
        """Choose which checkpoints to keep; Orbax asks when it saves another."""
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
            if self.processes.is_first:
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
        """Raise on all processes if one of several got SIGTERM."""
        if self.processes.are_several and is_preempted(number):
            raise Terminated(self.options.exit_code)


def _joined(saved: CheckpointRecord, new: CheckpointRecord) -> CheckpointRecord:
    """Join the records of a step that is saved again, with all that is known.

    What the new record leaves out stays: an evaluation, a rule's values, a cursor.
    """
    stopping = {name: {**x} for name, x in saved.stopping.items()}
    for name, values in new.stopping.items():
        stopping[name] = {**stopping.get(name, {}), **values}
    is_moved = new.batches["cursor"] is not None
    is_evaluated = bool(new.evaluation)
    return dataclasses.replace(
        saved,
        batches=new.batches if is_moved else saved.batches,
        evaluation=new.evaluation if is_evaluated else saved.evaluation,
        evaluation_due=saved.evaluation_due and not is_evaluated,
        stopping=stopping,
    )
