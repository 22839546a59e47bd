"""Train a model, evaluate it and predict with it, over whole data sets."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax

from towerjax.data.feed import as_reusable
from towerjax.estimator.arguments import not_none
from towerjax.estimator.data import Data, Epochs
from towerjax.estimator.replicate import MAKE_MODEL, ReplicatedModel
from towerjax.loop.evaluate import evaluate as evaluate_batches
from towerjax.loop.evaluate import outputs_on_host
from towerjax.loop.history import History
from towerjax.loop.options import Hook, WithState, check_hooks
from towerjax.loop.run import run
from towerjax.step.state import TrainState
from towerjax.types import PyTree, named_leaves
from towerjax.types.options import check_methods, check_whole

_OF_STEP = ("micro_batches", "on_nonfinite", "guard", "donate", "check")


def train_and_evaluate(
    model: ReplicatedModel,
    train_data: Data,
    eval_data: Data | None = None,
    *,
    variables: TrainState,
    steps: int | None = None,
    epochs: int | None = None,
    hooks: Sequence[Hook | WithState] = (),
    params: Any = None,
    config: Any = None,
    **options: Any,
) -> tuple[TrainState, History]:
    """Train a model, with evaluations; the variables after training and its history.

    Without ``steps`` and ``epochs`` one pass over the data. For ``steps`` the data is
    repeated if it can be; with both, whichever ends first. Step numbers continue from
    ``variables.step``; each call starts from the beginning of the data.

    Args:
      model: As `replicate_model_fn` returns it, or another object with its
        ``train_step`` and ``eval_step``.
      train_data: Batches ``(features, labels)``; a batch that is no tuple of two is
        features. An iterable, or a function that returns one, called once an epoch.
      eval_data: The same; each evaluation uses all of it.
      variables: The variables to start from; donated where they are on the devices
        already, else copied.
      steps: The number of steps.
      epochs: The number of passes.
      hooks: As in `run`; called after those of the model.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.
      **options: ``micro_batches``, ``on_nonfinite``, ``guard``, ``donate`` and
        ``check``, as in the model's ``train_step``; others as in `run`, such as
        ``eval_every``, ``best``, ``writers``. A ``checkpointer`` counts batches, so a
        function of data must return the same batches in a restarted job.

    Returns:
      ``(variables, history)``.

    Raises:
      ValueError: An option is wrong, or data is malformed, ends too early, or cannot
        be repeated where an option needs that.
      NonFiniteError: A loss was not finite.

    An exception carries ``error.state`` and ``error.batches``, to continue with as
    ``variables`` and ``train_data``, and ``error.history``.

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

    Source: "TensorFlow Estimators", 2017, https://doi.org/10.1145/3097983.3098171.
    """
    check_methods("model", model, "train_step", MAKE_MODEL)
    hooks = check_hooks(hooks)
    passes = 1 if epochs is None else epochs
    if epochs is None and steps is not None and not hasattr(train_data, "__next__"):
        passes = None
    train_epochs = Epochs("train_data", train_data, passes, most=steps)
    given = not_none(params=params, config=config)
    if eval_data is not None:
        why = "every evaluation needs all of it"
        again = as_reusable("eval_data", eval_data, why)
        options["eval_batches"] = Epochs("eval_data", again)
        options["evaluate"] = model.eval_step(**given)
    of_step = {name: options.pop(name) for name in _OF_STEP if name in options}
    step = model.train_step(**given, **of_step)

    def model_hooks(number: int, metrics: dict[str, Any]) -> None:
        for hook in step.hooks:
            hook(number, metrics)

    return run(
        step,
        variables,
        train_epochs,
        steps=steps if epochs is None else None,
        hooks=(model_hooks, *hooks),
        **options,
    )


def evaluate(
    model: ReplicatedModel,
    variables: PyTree,
    data: Data,
    *,
    prefetch: int = 2,
    in_flight: int = 2,
    params: Any = None,
    config: Any = None,
) -> dict[str, Any]:
    """The model's loss and metrics over a whole data set, for any batch size.

    States merge over batches in float64 on the host and are computed once. A scalar
    loss, which has no denominator, is averaged over batches.

    Args:
      model: As `replicate_model_fn` returns it.
      variables: As the model takes them; kept.
      data: Batches ``(features, labels)``, or a function that returns them.
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many evaluations may be dispatched before one is waited for.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.

    Returns:
      ``{"loss": ..., name: value}``, as ``tj.evaluate`` returns them.

    Raises:
      ValueError: There are no batches, or one is malformed.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def model_fn(w, features, labels, mode, tower):
      ...     loss = tj.Weighted.mean((w * features - labels) ** 2, tower.weight)
      ...     return tj.estimator.ModelSpec(mode, loss=loss)
      >>> two = tj.Mirrored(towers=2)
      >>> model = tj.estimator.replicate_model_fn(model_fn, devices=two)
      >>> x = np.array([1, 2, 3], np.float32)
      >>> round(evaluate(model, np.float32(2), [(x, x)])["loss"], 4)
      4.6667
    """
    check_methods("model", model, "eval_step", MAKE_MODEL)
    step = model.eval_step(**not_none(params=params, config=config))
    return evaluate_batches(
        step, variables, Epochs("data", data), prefetch=prefetch, in_flight=in_flight
    )


def predict(
    model: ReplicatedModel,
    variables: PyTree,
    data: Data,
    *,
    per_example: bool = False,
    prefetch: int = 2,
    in_flight: int = 2,
    params: Any = None,
    config: Any = None,
) -> Iterator[Any]:
    """The model's predictions for each batch, or each example, in order.

    Lazy: endless data gives endless predictions; up to ``prefetch + in_flight`` batches
    are taken for the first one. When the data raises, all earlier predictions come
    first. Closing the iterator closes what it opened.

    Args:
      model: As `replicate_model_fn` returns it.
      variables: As the model takes them; kept.
      data: Batches of features, or ``(features, labels)``, whose labels are left out;
        or a function that returns them.
      per_example: Whether to yield one example's predictions at a time.
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many predictions may be dispatched before one is waited for.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.

    Returns:
      An iterator of NumPy arrays, ``[B, ...]`` of a batch, ``[...]`` of an example.

    Raises:
      ValueError: An option is wrong; from the iterator: the variables or a batch are
        malformed, or ``per_example`` finds unequal numbers of rows.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def model_fn(w, features, labels, mode):
      ...     return tj.estimator.ModelSpec(mode, predictions={"twice": w * features})
      >>> two = tj.Mirrored(towers=2)
      >>> model = tj.estimator.replicate_model_fn(model_fn, devices=two)
      >>> data = tj.batches(np.arange(5, dtype=np.float32), 4)
      >>> [batch["twice"].tolist() for batch in predict(model, np.float32(2), data)]
      [[0.0, 2.0, 4.0, 6.0], [8.0]]
    """
    check_methods("model", model, "predict_step", MAKE_MODEL)
    check_whole("in_flight", in_flight, 1)
    batches = Epochs("data", data, with_labels=False)
    step = model.predict_step(**not_none(params=params, config=config))
    outputs = outputs_on_host(step, variables, batches, prefetch, in_flight)
    return _examples(outputs) if per_example else outputs


def _examples(outputs: Generator[Any, None, None]) -> Generator[Any, None, None]:
    with contextlib.closing(outputs):
        for output in outputs:
            sizes = {name: len(x) for name, x in named_leaves("predictions", output)}
            if len({*sizes.values()}) > 1:
                raise ValueError(
                    f"per_example=True yields a row of each prediction, but rows are"
                    f" {sizes}. Give what an example has several of a dim of its own,"
                    " [b, n, ...]."
                )
            for row in range(next(iter(sizes.values()))):
                yield jax.tree.map(lambda x, row=row: x[row], output)
