"""How is a model trained and evaluated from start to end? In one call."""

from collections.abc import Callable, Sequence
from typing import Any

from towerjax.estimator.arguments import where_given
from towerjax.estimator.data import Data, Passes
from towerjax.estimator.replicate import ReplicatedModel
from towerjax.loop.checkpoint.options import Checkpointer
from towerjax.loop.history import History
from towerjax.loop.options import Hook, WithState, check_hooks
from towerjax.loop.records import Writer
from towerjax.loop.run import run
from towerjax.loop.stopping import Best, EarlyStopping
from towerjax.step.engine import OnNonfinite
from towerjax.step.state import TrainState
from towerjax.types import PyTree


def check_model(what: str, model: Any, method: str) -> None:
    """Raise unless the model has what it is used for."""
    if not hasattr(model, method):
        raise ValueError(
            f"{what}: model is a {type(model).__name__}, which has no {method}(). Make"
            " it of a model function: model ="
            " tj.estimator.replicate_model_fn(model_fn)."
        )


def check_variables(what: str, variables: Any) -> None:
    """Raise unless the variables are a ``TrainState``."""
    if not isinstance(variables, TrainState):
        raise ValueError(
            f"{what}: variables is a {type(variables).__name__}, but steps are counted,"
            " placed and resumed in a tj.TrainState. Write"
            " tj.TrainState.create(params, optimizer); a model called by itself takes"
            " any tree."
        )


def train_and_evaluate(
    model: ReplicatedModel,
    train_data: Data,
    eval_data: Data | None = None,
    *,
    variables: TrainState,
    steps: int | None = None,
    epochs: int | None = None,
    eval_every: int | None = None,
    eval_params: Callable[[TrainState], PyTree] | None = None,
    early_stopping: EarlyStopping | None = None,
    best: Best | None = None,
    writers: Sequence[Writer] = (),
    hooks: Sequence[Hook | WithState] = (),
    progress: bool | None = None,
    prefetch: int = 2,
    in_flight: int = 2,
    steps_per_call: int = 1,
    checkpointer: Checkpointer | None = None,
    on_nonfinite: OnNonfinite = "raise",
    params: Any = None,
    config: Any = None,
) -> tuple[TrainState, History]:
    """The variables after training, and the history of it.

    How long: neither ``steps`` nor ``epochs`` is one pass over the data; ``epochs``
    that many passes; ``steps`` exactly so many steps, for which data that can be
    gone through again is, as often as it takes; both whichever ends first. Step
    numbers go on from ``variables.step``; data begins anew with each call.

    Args:
      model: As `replicate_model_fn` returns it, or another that has its
        ``train_step`` and ``eval_step``.
      train_data: Batches ``(features, labels)``, of which labels may be None; what
        is not a tuple of two is features. An iterable, a function that returns
        one, called once an epoch, or a `DistributedDataset`.
      eval_data: The same, gone through whole at each evaluation.
      variables: Where to start; donated where they lie on the devices already, and
        copied from elsewhere.
      steps: How many steps to do.
      epochs: How many passes to do.
      eval_every: Evaluate after each step whose number is a multiple, and at the
        end; None only at the end.
      eval_params: As in `run`; of a model that evaluates variables, it returns those.
      early_stopping: As in `run`.
      best: As in `run`; with ``restore=True`` the best variables are returned.
      writers: As in `run`.
      hooks: As in `run`; called after those of the model.
      progress: As in `run`.
      prefetch: As in `run`.
      in_flight: As in `run`.
      steps_per_call: As in `run`.
      checkpointer: As in `run`. The place in the data is counted off: a function that
        gives it must give the same batches in another process.
      on_nonfinite: As in `build_train_step`: what a loss that is not finite does.
      params: Hyperparameters, where the model function asks for them.
      config: What else it asks for.

    Returns:
      ``(variables, history)``.

    Raises:
      ValueError: An option is wrong, or data is malformed, ends too early, or cannot
        be gone through again where that is asked for.
      NonFiniteError: A loss was not finite.

    Any exception on the way carries ``error.state`` and ``error.batches``, to go on
    with as ``variables`` and ``train_data``, and ``error.history``.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.25))
      >>> def model_fn(variables, features, labels, mode, tower):
      ...     def loss_fn(w):
      ...         return tj.Weighted.mean((w - features) ** 2, tower.weight)
      ...     loss, train_op = optimizer.minimize(loss_fn, variables)
      ...     return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)
      >>> two = tj.Mirrored(towers=2)
      >>> model = tj.estimator.replicate_model_fn(model_fn, devices=two)
      >>> data = [np.full(4, 2.0, np.float32)]
      >>> start = tj.TrainState.create(np.float32(0), optimizer)
      >>> variables, history = train_and_evaluate(
      ...     model, data, variables=start, steps=3, progress=False)
      >>> float(variables.params), history.metrics["loss"].tolist()
      (1.75, [4.0, 1.0, 0.25])

    Source: Martin Abadi et al., "TensorFlow Estimators: Managing Simplicity vs.
    Flexibility in High-Level Machine Learning Frameworks", 2017,
    https://doi.org/10.1145/3097983.3098171 (the idea of the call).
    """
    check_model("train_and_evaluate", model, "train_step")
    check_variables("train_and_evaluate", variables)
    hooks = check_hooks(hooks)
    asked = {
        "eval_every": eval_every,
        "eval_params": eval_params,
        "early_stopping": early_stopping,
        "best": best,
    }
    eval_passes = _eval_passes(eval_data, asked)
    passes = _train_passes(train_data, steps, epochs)
    given = where_given(params=params, config=config)
    refusal: dict[str, Any] = {"on_nonfinite": on_nonfinite}
    step = model.train_step(**given, **(refusal if on_nonfinite != "raise" else {}))

    def model_hooks(number: int, metrics: dict[str, Any]) -> None:
        for hook in step.hooks:
            hook(number, metrics)

    return run(
        step,
        variables,
        passes,
        steps=steps if epochs is None else None,
        evaluate=None if eval_passes is None else model.eval_step(**given),
        eval_batches=eval_passes,
        eval_every=eval_every,
        eval_params=eval_params,
        early_stopping=early_stopping,
        best=best,
        steps_per_call=steps_per_call,
        prefetch=prefetch,
        in_flight=in_flight,
        checkpointer=checkpointer,
        progress=progress,
        hooks=(model_hooks, *hooks),
        writers=writers,
    )


def _train_passes(data: Data, steps: int | None, epochs: int | None) -> Passes:
    passes = 1 if epochs is None else epochs
    if epochs is None and steps is not None and not _is_iterator(data):
        passes = None
    return Passes("train_data", data, passes, most=steps)


def _eval_passes(data: Data | None, asked: dict[str, Any]) -> Passes | None:
    if data is not None:
        if _is_iterator(data):
            raise ValueError(
                f"eval_data is a {type(data).__name__}, which can be gone through only"
                " once, but every evaluation needs all of it. Pass a list of batches,"
                " or a function that gives them anew:"
                " lambda: tj.batches((features, labels), batch_size)."
            )
        return Passes("eval_data", data)
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"{name}={value} needs eval_data, but that is None.")
    return None


def _is_iterator(data: Any) -> bool:
    return hasattr(data, "__next__")
