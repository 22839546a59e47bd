"""`run`, the training loop: check its arguments, assemble its parts, hand errors on."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from towerjax.data.feed import Batches, as_reusable
from towerjax.data.stream import check_batches
from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.loop.evaluate import AnyBatches, EvaluationStep, count_in_words
from towerjax.loop.history import History
from towerjax.loop.loop import Loop
from towerjax.loop.options import Hook, RunOptions, WithState, check_hooks
from towerjax.loop.stopping import EarlyStopping, Point, Watch, rules_of
from towerjax.loop.writers import Writer, check_writers
from towerjax.mesh.interrupt import InterruptGuard
from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import require_same
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
    progress: bool | Sequence[str] | None = None,
    per_second: Sequence[str] = (),
    peak_flops: float | None = None,
    hooks: Sequence[Hook | WithState] = (),
    writers: Sequence[Writer] = (),
) -> tuple[TrainState, History]:
    """Train for a number of steps; return the last state and the history.

    A thread places batches while the devices work, and up to ``in_flight`` calls are
    dispatched without waiting for their results. Step numbers are those of the state.

    Args:
      step: What `build_train_step` returns.
      state: The state to start from; donated, unless the step was built otherwise.
      batches: Global batches, e.g. of `batches`, or a `DistributedDataset`; may be
        endless with ``steps``. No more than ``steps`` are taken (a distributed data
        set takes some in advance from its source).
      steps: How many steps to do; None runs to the end of the data.
      evaluate: What `build_eval_step` returns, or another `EvaluationStep`.
      eval_batches: The data of each evaluation: an iterable that can be iterated
        again, such as `batches` returns, or a function that returns an iterable.
      eval_every: Evaluate after each step whose number is a multiple of this, and
        at the end; None only at the end.
      eval_params: ``state -> parameters or state``: what to evaluate instead of the
        state, such as averaged parameters in it. Checkpoints keep the run's state.
      early_stopping: Ends the run when evaluations stop improving; of several, the
        first that does.
      prefetch: How many placed batches may wait; 0 places them without a thread.
      in_flight: How many dispatched calls may run before one is waited for.
      checkpointer: Saves the run, and resumes it from the newest checkpoint:
        ``steps`` counts from the state that is passed. See
        <https://github.com/towerjax/towerjax/blob/main/docs/checkpoints.md>.
      audit: Whether the step is audited before its first call; None: as it was built.
        Its audit result is kept in the checkpointer's folder, too.
      progress: None shows a bar on a terminal and in a notebook, else a plain line now
        and then, both on stderr; True always shows a bar, False nothing. Names of
        metrics, ``["accuracy"]``, are shown as by None, beside the loss.
      per_second: Names of metrics that count what a step read, such as ``["tokens"]``
        of ``tj.Sum(weight.sum())``: history and writers have how many a second.
      peak_flops: FLOP/s of one device, of which the history's ``mfu`` is the part that
        is used; None takes that of bfloat16 from a table of devices, if it is there.
      hooks: Each is called as ``hook(step number, metrics)`` with host values, for
        every step in order, some calls later; a `towerjax.loop.WithState` is given
        the state, too, every so many steps.
      writers: Such as `JsonLines`; each is given every step and every evaluation, on
        process 0.

    Returns:
      ``(state, history)``.

    Raises:
      ValueError: An option is wrong, a batch is malformed, there is no batch, or
        there are fewer than ``steps``; the evaluation lacks a metric that is named.
      SplitError: The audit found what depends on how the batch is split over towers.
      NonFiniteError: With ``on_nonfinite="raise"``: a loss or gradient was not
        finite. That step changed nothing; steps then in flight are done. Names the
        tower and leaf, if the step can ``locate``: its batch is run once more.
      CheckpointError: Checkpoints cannot be written, or the newest is damaged or of
        another model. Raised before the first step.
      DesyncError: At a checkpoint, which is not written: devices' copies differed.

    Any exception during the run (also Ctrl-C) has ``error.state``, ``error.batches``
    and ``error.history``: ``run(step, error.state, error.batches, ...)`` continues as
    if it had not been raised. See
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
        progress=progress,
        per_second=check_list("per_second", per_second),
        peak_flops=peak_flops,
        hooks=check_hooks(hooks),
        writers=check_writers(writers),
    )
    state = step.start(state)
    check_batches("batches", batches)
    _require_same_work(step.strategy.placement, batches, options, step_number(state))
    if isinstance(batches, Batches):  # which may be at a smaller last one
        step.placer.expect([batches.most_rows])
    point = Point(state, Watch(rules_of(options.early_stopping)))
    # Of several processes JAX is sent SIGTERM, and all end after the same step.
    saving = options.checkpointer
    is_one = step.strategy.placement.num_processes == 1
    guard = InterruptGuard(saving.exit_code if saving and is_one else None)
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
    """Raise, on every process, unless all processes will make the same calls."""
    if placement.num_processes == 1:
        return
    names = ("steps", "eval_every", "early_stopping")
    given = {name: getattr(options, name) for name in names}
    given["evaluate"] = options.evaluate is not None
    given["eval_params"] = options.eval_params is not None
    if (saving := options.checkpointer) is not None:  # `Saving` compares the folder
        given["checkpointer"] = dataclasses.replace(saving, directory="...")
    given["WithState.every"] = [hook.every for hook in options.with_state]
    work = ", ".join(f"{name}={x}" for name, x in given.items() if x)
    require_same(
        "What tj.run does",
        f"{work}, of {count_in_words(batches)}, from step {start}",
        "Give every process the same steps, batches and options.",
    )
