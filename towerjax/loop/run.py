"""The loop: batches in, steps dispatched, metrics kept, evaluated now and then."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence

from towerjax.data.feed import anew
from towerjax.data.ledger import Ledger
from towerjax.loop.checkpoint.saver import Checkpointer
from towerjax.loop.evaluate import Batches, EvaluationStep, check_batches
from towerjax.loop.history import History
from towerjax.loop.options import (
    Evaluation,
    Hook,
    LoopOptions,
    WithState,
    check_hooks,
)
from towerjax.loop.progress import Progress, choose_display
from towerjax.loop.records import Writer, check_writers, opened
from towerjax.loop.running import Loop
from towerjax.loop.saving import Saving
from towerjax.loop.stopping import Best, EarlyStopping
from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import require_same
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.state import TrainState, step_number
from towerjax.types import PyTree
from towerjax.types.options import check_does


def run(
    step: CompiledStep,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int | None = None,
    evaluate: EvaluationStep | None = None,
    eval_batches: Batches | None = None,
    eval_every: int | None = None,
    eval_params: Callable[[TrainState], PyTree] | None = None,
    early_stopping: EarlyStopping | None = None,
    best: Best | None = None,
    steps_per_call: int = 1,
    prefetch: int = 2,
    in_flight: int = 2,
    checkpointer: Checkpointer | None = None,
    progress: bool | None = None,
    hooks: Sequence[Hook | WithState] = (),
    writers: Sequence[Writer] = (),
) -> tuple[TrainState, History]:
    """The state after the steps, and the history of every one of them.

    Batches are placed by a thread while the devices work, and calls are dispatched
    without waiting for their results, up to ``in_flight`` of them. Step numbers
    count the steps that the state has done, so that they go on where a restored
    state stopped.

    Args:
      step: As `build_train_step` returns it.
      state: Where to start; donated, unless the step was built otherwise.
      batches: Global batches, e.g. of `batches`, or a `DistributedDataset`; may be
        endless with ``steps``. No more than ``steps`` are taken (a distributed data
        set takes some in advance from its source).
      steps: How many steps to do; None goes to the end of the data.
      evaluate: As `build_eval_step` returns it, or another `EvaluationStep`.
      eval_batches: The data to evaluate on, all of it each time: something that can
        be gone through again, such as `batches` gives, or a function that returns an
        iterable.
      eval_every: Evaluate after each step whose number is a multiple of this, and
        at the end; None only at the end. With several steps a call, after the call
        that reaches the multiple.
      eval_params: ``state -> parameters or state``: what is evaluated instead, such as
        averaged parameters that the state keeps, in its place in the state, or another
        state. What ``best`` and checkpoints keep is the state.
      early_stopping: Ends the run when evaluations stop getting better.
      best: Keeps the state of the best evaluation, as ``history.best``.
      steps_per_call: ``K`` optimizer steps in one program, for small models whose
        steps are shorter than a call; a shorter last call needs no other program.
      prefetch: How many placed batches may wait; 0 places them in line.
      in_flight: How many calls may run without being waited for.
      checkpointer: Saves the run, and lets it go on from the newest checkpoint:
        ``steps`` counts from the state that is passed, and what is left is done. At
        SIGTERM the run is saved and ends with ``SystemExit(checkpointer.exit_code)``;
        see ``docs/checkpoints.md``.
      progress: None shows a bar on a terminal and in a notebook, else plain lines;
        True is always a bar, False is silence.
      hooks: Each called as ``hook(step number, metrics)`` with host values, for every
        step in order, once its metrics are there: some calls later. A
        `towerjax.loop.WithState` sees the state, too, every so many steps.
      writers: Such as `JsonLines`; each is given every step and every evaluation.
        Of several processes that share the towers the first one writes.

    Returns:
      ``(state, history)``.

    Raises:
      ValueError: An option is wrong, a batch is malformed, there is no batch, or
        there are fewer than ``steps``; the evaluation lacks a metric that is named.
      NonFiniteError: With ``on_nonfinite="raise"``: a loss or gradient was not
        finite. That step changed nothing; steps then in flight are done. Says which
        tower and leaf, if the step can ``locate``: its batch is run once more.
      CheckpointError: Checkpoints cannot be written, or the newest is damaged or of
        another model: before the first step.
      DesyncError: The step has a check, and devices' copies of the state differed.

    Any exception on the way (also of the loader, a hook, a writer, or Ctrl-C) carries
    what there is: ``run(step, error.state, error.batches, ...)`` goes on as if nothing
    had been, and ``error.history`` is what the run saw. Writers have every step of that
    history, and are closed. See ``docs/all_or_nothing.md``.

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
    check_does(
        "step", step, "strategy start place_batch dispatch", "tj.build_train_step(...)"
    )
    numbers = (steps, eval_every, steps_per_call, prefetch, in_flight)
    options = LoopOptions(*numbers, hooks=check_hooks(hooks))
    held_out = anew("eval_batches", eval_batches, "every evaluation needs all of it")
    evaluation = Evaluation(
        evaluate, held_out, eval_every, early_stopping, best, eval_params
    )
    writers = check_writers(writers)
    placement = step.strategy.placement
    state = step.start(state)
    check_batches("batches", batches)
    _check_checkpointer(checkpointer, evaluation)
    _require_same_length(placement, batches, options, evaluation, step_number(state))
    ledger = Ledger(batches, copies=steps_per_call > 1)
    loop = None
    try:
        with contextlib.ExitStack() as stack:
            saving, exit_code = None, None
            if checkpointer is not None:
                saving = Saving(checkpointer, step, state, ledger, stack)
                state, options = saving.resume(state, options)
                if placement.num_processes == 1:
                    exit_code = checkpointer.exit_code
            start = step_number(state)
            shown = Progress(choose_display(progress), start, options.steps)
            parts = options, evaluation, shown, ledger, exit_code
            loop = Loop(step, state, *parts)
            with contextlib.closing(shown), loop.guard.installed():
                loop.writers = opened(writers, start, placement)
                loop.go_on(saving)
                loop.run()
        return loop.state, loop.history()
    except BaseException as error:
        if loop is not None:
            loop.hand_over(error)
        raise


def _check_checkpointer(
    checkpointer: Checkpointer | None, evaluation: Evaluation
) -> None:
    if checkpointer is None:
        return
    if not isinstance(checkpointer, Checkpointer):
        raise ValueError(
            f"checkpointer={checkpointer!r} must be None or a tj.Checkpointer(folder)."
        )
    if evaluation.best is not None:
        raise ValueError(
            f"best={evaluation.best} keeps a state in memory, which a resumed run has"
            " no more. Let the checkpoints keep it:"
            f" tj.Checkpointer(..., best={evaluation.best.metric!r}), and afterwards"
            " checkpointer.restore(step, state, number=checkpointer.best_step)."
        )
    if checkpointer.best is not None and evaluation.step is None:
        raise ValueError(
            f"Checkpointer(best={checkpointer.best!r}) without anything to evaluate:"
            " pass evaluate and eval_batches."
        )


def _require_same_length(
    placement: Placement,
    batches: Iterable[PyTree],
    options: LoopOptions,
    evaluation: Evaluation,
    start: int,
) -> None:
    """Raise, on every process, unless all of them will do the same steps."""
    if placement.num_processes == 1:
        return
    length = operator.length_hint(batches, -1)
    known = length if length >= 0 else "no known number of"
    text = f"steps={options.steps}, {known} batches, from step {start}"
    for name in ("every", "early_stopping", "best"):
        if getattr(evaluation, name) is not None:
            text += f", {name}={getattr(evaluation, name)}"
    require_same(
        "How long tj.run goes", text, "Give every process the same steps and batches."
    )
