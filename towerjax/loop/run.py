"""`run`, the training loop: check its arguments, and put its parts together."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from towerjax.data.feed import Batches
from towerjax.data.stream import as_reusable, check_batches
from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.loop.evaluate import AnyBatches, EvaluationStep, count_in_words
from towerjax.loop.history import History
from towerjax.loop.loop import Loop
from towerjax.loop.options import Hook, RunOptions, WithState, check_hooks
from towerjax.loop.recovery import Recovery, on_devices_left
from towerjax.loop.stopping import EarlyStopping, Point, Watch, rules_of
from towerjax.loop.writers import Writer, check_writers
from towerjax.mesh import live
from towerjax.mesh.interrupt import InterruptGuard
from towerjax.mesh.placement import Placement
from towerjax.step.state.train_state import TrainState, step_number
from towerjax.step.step import Step
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_list, check_methods


@api_boundary
def run(
    step: Step,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int | None = None,
    evaluate: EvaluationStep | None = None,
    eval_batches: AnyBatches | None = None,
    eval_every: int | None = None,
    eval_params: Callable[[TrainState], PyTree] | None = None,
    early_stopping: EarlyStopping | Sequence[EarlyStopping] | None = None,
    prefetch: int = 2,
    in_flight: int = 2,
    checkpointer: Checkpointer | None = None,
    audit: bool | None = None,
    replay_every: int | None = None,
    progress: bool | Sequence[str] | None = None,
    per_second: Sequence[str] = (),
    peak_flops: float | None = None,
    hooks: Sequence[Hook | WithState] = (),
    writers: Sequence[Writer] = (),
    copy_every: int | None = None,
) -> tuple[TrainState, History]:
    """Train for a number of steps; return the last state and the history.

    A thread places batches while the devices compute. Up to ``in_flight`` calls are
    dispatched before the run waits for a result. Step numbers count all steps that the
    state has done.

    Args:
      step: The result of `build_train_step`.
      state: The state to start from. It is donated, unless the step has
        ``donate=False``.
      batches: Global batches, as `batches` makes them, or a `DistributedDataset`. They
        may be endless if ``steps`` is given. At most ``steps`` batches are taken,
        though a distributed data set reads its source in advance.
      steps: How many steps to do; None runs until the data ends.
      evaluate: The result of `build_eval_step`, or another `EvaluationStep`.
      eval_batches: The data of each evaluation. It is an iterable that can be iterated
        again, such as the result of `batches`, or a function that returns an iterable.
      eval_every: Evaluate after each step whose number is a multiple of this, and at
        the end. None evaluates only at the end.
      eval_params: A function ``state -> parameters or state`` that returns what to
        evaluate instead of the state, such as averaged parameters. Checkpoints keep the
        run's state.
      early_stopping: An `EarlyStopping`, which ends the run when evaluations stop
        improving. If it is a list, any rule in it ends the run.
      prefetch: How many placed batches may wait; 0 places them without a thread.
      in_flight: How many calls may be dispatched before the run waits for one.
      checkpointer: Saves the run, and resumes it from the newest checkpoint. ``steps``
        still counts from the given state. See
        <https://github.com/towerjax/towerjax/blob/main/docs/checkpoints.md>.
      audit: Replaces the step's option ``audit`` for the first call; None keeps the
        step's option. The result of an audit is also saved in the checkpointer's
        folder.
      replay_every: Before each step whose number is a multiple of this, run its towers
        on neighbouring devices, too, and compare all bits; see `towerjax.tools.replay`.
        It costs two gradients, and one compilation in a run. See
        <https://github.com/towerjax/towerjax/blob/main/docs/how_to/lost_and_lying_devices.md>.
      progress: None shows a bar on a terminal and in a notebook, and otherwise a plain
        line now and then, on stderr. True always shows a bar, False nothing. A list of
        names of metrics, such as ``["accuracy"]``, acts like None and shows these
        metrics beside the loss.
      per_second: Names of metrics that count things, such as ``["tokens"]`` for a
        ``tj.Sum(weight.sum())``. History and writers get their rates per second.
      peak_flops: The peak FLOP/s of one device, for the history's ``mfu``. None takes
        the bfloat16 peak from a table of known devices.
      hooks: Functions ``hook(step number, metrics)`` with metrics on the host. They are
        called for every step in order, some steps later. A `towerjax.loop.WithState`
        also gets the state, at steps that you choose.
      writers: Writers such as `JsonLines`. Each gets every step and every evaluation,
        on process 0.
      copy_every: In a job that `tj.cluster.initialize` made ``recoverable``, copy the
        state to the hosts after each step whose number is a multiple of this. If a
        process is lost, the others go on from the last copy. None copies as often as
        takes 1 % of the time.

    Returns:
      ``(state, history)``.

    Raises:
      ValueError: An option is wrong; a batch is malformed; there are no batches, or
        fewer than ``steps``; or the evaluation lacks a metric that an option names.
      SplitError: The loss or a metric depends on how the batch is split over towers.
      NonFiniteError: A loss or gradient was not finite, and the step has
        ``on_nonfinite="raise"``. That step changed nothing. Later steps that were
        already dispatched are done. The error names the tower and the leaf; to find
        them, the batch is run once more.
      CheckpointError: Checkpoints cannot be written, or the newest one is damaged or
        belongs to another model. Raised before the first step where possible.
      CorruptionError: With ``replay_every``, devices gave different bits. The step is
        not run, and nothing is saved.
      DesyncError: The devices' copies of the state differed at a checkpoint. The
        checkpoint is not written.

    Any exception during the run, also Ctrl-C, has ``error.state``, ``error.batches``
    and ``error.history``. ``run(step, error.state, error.batches, ...)`` continues as
    if nothing had been raised. See
    <https://github.com/towerjax/towerjax/blob/main/docs/all_or_nothing.md>.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.25), tj.Mirrored(towers=2))
      >>> data = tj.batches(np.full(64, 2.0, np.float32), 8, epochs=None)
      >>> state = step.init(jnp.float32(0))
      >>> state, history = run(step, state, data, steps=3, progress=False)
      >>> float(state.params), history.metrics["loss"].tolist()
      (1.75, [4.0, 1.0, 0.25])
    """
    methods = "strategy start place_batch dispatch" + " audit" * (audit is True)
    check_methods("step", step, methods, "tj.build_train_step(...)")
    step = step.trained if isinstance(step, Step) else step
    why = "every evaluation needs all of it"
    options = RunOptions(
        steps=steps,
        evaluate=evaluate,
        eval_batches=as_reusable("eval_batches", eval_batches, why),
        eval_every=eval_every,
        eval_params=eval_params,
        early_stopping=early_stopping,
        prefetch=prefetch,
        in_flight=in_flight,
        checkpointer=checkpointer,
        audit=audit,
        replay_every=replay_every,
        progress=progress,
        per_second=check_list("per_second", per_second),
        peak_flops=peak_flops,
        hooks=check_hooks(hooks),
        writers=check_writers(writers),
        copy_every=copy_every,
    )
    if live.is_recoverable() and isinstance(step, Step):
        step, options, batches = on_devices_left(step, options, batches)
    state = step.start(state)
    check_batches("batches", batches)
    _require_same_work(step.strategy.placement, batches, options, step_number(state))
    # A resumed run may begin with the smaller last batch.
    if isinstance(batches, Batches):
        step.placer.expect([batches.most_rows])
    point = Point(state, Watch(rules_of(options.early_stopping)))
    # With several processes, JAX handles SIGTERM and lets all of them stop after the
    # same step. So our own handler is installed for one process only.
    saving = options.checkpointer
    is_one = step.strategy.placement.num_processes == 1
    recovers = live.is_recoverable() and not is_one
    handles = saving is not None and (is_one or recovers)
    guard = InterruptGuard(saving.exit_code if saving and handles else None)
    if recovers:
        recovery = Recovery(step, options, batches, point, guard)
        guard.call(recovery.run, lambda error: recovery.loop.attach_results(error))
        return recovery.loop.point.state, recovery.loop.history()
    loop = Loop(step, options, point, batches, guard)

    def run_all() -> tuple[TrainState, History]:
        with contextlib.ExitStack() as stack:
            loop.begin(stack)
            loop.run()
        return point.state, loop.history()

    return guard.call(run_all, loop.attach_results)


def _require_same_work(
    placement: Placement, batches: Iterable[PyTree], options: RunOptions, start: int
) -> None:
    """Raise on every process unless all processes will call the step equally often."""
    if placement.num_processes == 1:
        return
    names = ("steps", "eval_every", "early_stopping", "replay_every")
    shared = {name: getattr(options, name) for name in names}
    shared["evaluate"] = options.evaluate is not None
    shared["eval_params"] = options.eval_params is not None
    # `Saving` checks that the folder is the same.
    if (saving := options.checkpointer) is not None:
        shared["checkpointer"] = dataclasses.replace(saving, directory="...")
    shared["WithState.every"] = [hook.every for hook in options.with_state]
    work = ", ".join(f"{name}={x}" for name, x in shared.items() if x)
    placement.processes.require_same(
        "The work of tj.run",
        f"{work}, of {count_in_words(batches)}, from step {start}",
        "Give every process the same steps, batches and options.",
    )
