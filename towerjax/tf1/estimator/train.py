"""Train a model, evaluate it and predict with it, over whole data sets."""

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

import towerjax as tj
from towerjax.data.placer import PlacedBatch
from towerjax.data.stream import Source, as_reusable, check_batches, close
from towerjax.loop.evaluate import outputs_on_host
from towerjax.tf1.estimator.model_engine import hooks_of
from towerjax.tf1.estimator.model_fn import ModelHook, checked_hooks, not_none
from towerjax.tf1.estimator.replicate import MAKE_MODEL, ReplicatedModel
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_flag, check_methods, check_whole
from towerjax.types.refusals import a_type
from towerjax.types.trees import named_leaves

_OF_STEP = ("micro_batches", "on_nonfinite", "guard", "donate")
_EXHAUSTED: Any = object()

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches ``(features, labels)`` or features alone, or a function that returns them."""


def as_batch(element: Any, *, with_labels: bool = True) -> PyTree:
    """Turn ``(features, labels)`` into the dict that a model's steps take."""
    if isinstance(element, PlacedBatch):
        arrays = as_batch(element.arrays, with_labels=with_labels)
        return element.with_tree(arrays)
    is_dict = isinstance(element, Mapping) and set(element) == {"features", "labels"}
    if is_dict or (isinstance(element, list) and len(element) == 2):
        raise ValueError(
            f"A batch is {a_type(element)} of two, which may be features and labels or"
            " features alone. Pass the tuple (features, labels), or (batch, None)."
        )
    is_pair = isinstance(element, tuple) and len(element) == 2
    if not is_pair or hasattr(element, "_fields"):  # a named tuple is features
        return {"features": element}
    features, labels = element
    if labels is None or not with_labels:
        return {"features": features}
    return {"features": features, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Epochs:
    """A data set, epoch after epoch: an iterable of batches in the form of dicts.

    Each ``iter`` starts again with the first epoch.
    """

    name: str  # the name of the caller's argument
    data: Data
    epochs: int | None = 1  # None: without end
    most: int | None = None  # the largest number of batches, over all epochs
    with_labels: bool = True

    is_reproducible = True  # It is assumed that a restarted job gets the same batches.

    def __post_init__(self) -> None:
        """Check the data without taking a batch from it."""
        check_whole("epochs", self.epochs, or_none=True)
        _check_batches(self.name, self.data, or_function=True)
        if self.epochs != 1:
            epochs = "" if self.epochs is None else f"={self.epochs}"
            why = f"epochs{epochs} iterates it again"
            object.__setattr__(self, "data", as_reusable(self.name, self.data, why))

    @property
    def used_before(self) -> int:
        """The number of batches that earlier runs used, if ``data`` is their rest."""
        return getattr(self.data, "used_before", 0)

    @property
    def prefetches(self) -> bool:
        """Whether the data has its own thread that places batches in advance."""
        return bool(getattr(self.data, "prefetches", False))

    def __length_hint__(self) -> int:
        """Count the batches of one epoch, if the data knows it."""
        known = operator.length_hint(self.data, -1)
        return known if known >= 0 and self.epochs == 1 else NotImplemented

    def __iter__(self) -> Iterator[PyTree]:
        """Iterate over the batches; the iterator's ``close`` closes what it opened."""
        return _EpochsIterator(self)


class _EpochsIterator(Iterator[PyTree]):
    """An iterator over the batches of all epochs.

    It can continue after the data raised an error.
    """

    def __init__(self, source: Epochs) -> None:
        self._source = source
        self._epoch = 0
        self._left = source.most
        self._elements: Iterator[Any] | None = None  # the iterator of this epoch
        # Batches of this epoch; None after the data raised.
        self._taken: int | None = None

    def __next__(self) -> PyTree:
        """Take the next batch; begin the next epoch if one has ended."""
        source = self._source
        while self._left != 0:
            elements = self._elements
            elements = self._begin_epoch() if elements is None else elements
            taken = self._taken
            self._taken = None
            element = next(elements, _EXHAUSTED)
            if element is _EXHAUSTED:
                self._end_epoch(taken)
                continue
            self._taken = (taken or 0) + 1
            # ``_left`` is 0 until this batch is checked, so that a malformed batch ends
            # the iteration.
            left = self._left
            self._left = 0
            if not isinstance(source.data, Source):  # its batches are already dicts
                element = as_batch(element, with_labels=source.with_labels)
            self._left = None if left is None else left - 1
            return element
        self.close()
        raise StopIteration

    def _begin_epoch(self) -> Iterator[Any]:
        data: Any = self._source.data
        if callable(data) and not isinstance(data, Iterable):
            data = data()
            _check_batches(f"{self._source.name}()", data)
        self._epoch = self._epoch + 1
        self._taken = 0
        self._elements = elements = iter(data)
        return elements

    def _end_epoch(self, taken: int | None) -> None:
        self._close_elements()
        if taken == 0 and self._epoch > 1:
            raise ValueError(
                f"{self._source.name} gave no batches in epoch {self._epoch}, because"
                " it was used up before. Let the function make new batches each time."
            )
        # A generator that raised looks exhausted, but its epoch was not complete.
        if not taken or self._epoch == self._source.epochs:
            self._left = 0

    def close(self) -> None:
        """Close the iterator of this epoch, unless the caller passed it in."""
        self._left = 0
        self._close_elements()

    def _close_elements(self) -> None:
        elements = self._elements
        self._elements = None
        if elements is not self._source.data:
            close(elements)


def _check_batches(name: str, data: Any, *, or_function: bool = False) -> None:
    """Raise unless ``data`` can be iterated, or is one pair ``(features, labels)``."""
    arrays = Mapping | np.ndarray | jax.Array
    is_pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], arrays)
    check_batches(name, data[0] if is_pair else data, or_function=or_function)


@api_boundary
def train_and_evaluate(
    model: ReplicatedModel,
    train_data: Data,
    eval_data: Data | None = None,
    *,
    variables: tj.TrainState,
    steps: int | None = None,
    epochs: int | None = None,
    hooks: Sequence[ModelHook | tj.loop.WithState] = (),
    params: Any = None,
    config: Any = None,
    **options: Any,
) -> tuple[tj.TrainState, tj.History]:
    """Train a model, with evaluations; return the variables and the history.

    Without ``steps`` and ``epochs`` it makes one pass over the data. With ``steps``
    alone the data is repeated if possible. With both, training ends at whichever comes
    first. Step numbers continue from ``variables.step``. Each call starts at the
    beginning of the data.

    Args:
      model: The result of `replicate_model_fn`, or another object with a ``train_step``
        and an ``eval_step``.
      train_data: Batches ``(features, labels)``; a batch that is not a tuple of two is
        features. An iterable, or a function that returns one and is called once per
        epoch.
      eval_data: As ``train_data``; each evaluation uses all of it. The model evaluates
        it, unless ``evaluate=other.eval_step()`` names a model on other devices.
      variables: The variables to start from. They are donated if they are already on
        the devices, and otherwise copied.
      steps: The number of steps.
      epochs: The number of passes.
      hooks: As in `run`; they are called after the hooks of the model.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.
      **options: ``micro_batches``, ``on_nonfinite``, ``guard`` and ``donate``, as in
        the model's ``train_step``; and the options of `run`, such as ``eval_every`` and
        ``writers``. A ``checkpointer`` counts batches, so a function that returns data
        must return the same batches in a restarted job.

    Returns:
      ``(variables, history)``.

    Raises:
      ValueError: An option is wrong; or data is malformed, ends too early, or cannot be
        repeated although an option needs that.
      NonFiniteError: A loss or a gradient was not finite.

    Any exception has ``error.state`` and ``error.batches``, with which to continue as
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
    hooks = checked_hooks(hooks)
    passes = 1 if epochs is None else epochs
    if epochs is None and steps is not None and not hasattr(train_data, "__next__"):
        passes = None
    train_epochs = Epochs("train_data", train_data, passes, most=steps)
    passed = not_none(params=params, config=config)
    if eval_data is not None:
        why = "every evaluation needs all of it"
        again = as_reusable("eval_data", eval_data, why)
        if "eval_batches" in options:
            raise ValueError(
                "eval_data and eval_batches= exclude each other. Pass only eval_data."
            )
        options["eval_batches"] = Epochs("eval_data", again)
        options.setdefault("evaluate", model.eval_step(**passed))
    of_step = {name: options.pop(name) for name in _OF_STEP if name in options}
    if unknown := options.keys() - inspect.signature(tj.run).parameters.keys():
        raise TypeError(
            f"train_and_evaluate() got an unexpected keyword argument {min(unknown)!r}"
        )
    step = model.train_step(**passed, **of_step)

    def model_hooks(number: int, metrics: dict[str, Any]) -> None:
        for hook in hooks_of(step):
            hook(number, metrics)

    return tj.run(
        step,
        variables,
        train_epochs,
        steps=steps if epochs is None else None,
        hooks=(model_hooks, *hooks),
        **options,
    )


@api_boundary
def evaluate(
    model: ReplicatedModel,
    variables: PyTree,
    data: Data,
    *,
    prefetch: int = 2,
    params: Any = None,
    config: Any = None,
) -> dict[str, Any]:
    """Compute a model's loss and metrics over a data set, exact for any batch size.

    The states of the loss and the metrics are merged over batches in float64 on the
    host, and the values are computed once at the end. A scalar loss, which has no
    denominator, is averaged over batches.

    Args:
      model: As `replicate_model_fn` returns it.
      variables: As the model takes them; kept.
      data: Batches ``(features, labels)``, or a function that returns them.
      prefetch: How many placed batches may wait; 0 uses no thread.
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
    return tj.evaluate(step, variables, Epochs("data", data), prefetch=prefetch)


@api_boundary
def predict(
    model: ReplicatedModel,
    variables: PyTree,
    data: Data,
    *,
    per_example: bool = False,
    prefetch: int = 2,
    params: Any = None,
    config: Any = None,
) -> Iterator[Any]:
    """Predict for each batch or each example, in order.

    The iterator is lazy: endless data gives endless predictions. Up to ``prefetch + 2``
    batches are taken for the first prediction. If the data raises, all earlier
    predictions come first. Closing the iterator closes what it opened.

    Args:
      model: As `replicate_model_fn` returns it.
      variables: The model's variables, which are not donated.
      data: Batches of features, or of ``(features, labels)``, whose labels are ignored;
        or a function that returns them.
      per_example: Whether to yield one example's predictions at a time.
      prefetch: How many placed batches may wait; 0 uses no thread.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.

    Returns:
      An iterator of NumPy arrays, ``[B, ...]`` per batch or ``[...]`` per example.

    Raises:
      ValueError: An option is wrong. The iterator raises it if the variables or a batch
        are malformed, or if ``per_example`` finds unequal numbers of rows.

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
    check_whole("prefetch", prefetch, 0)
    check_flag("per_example", per_example)
    batches = Epochs("data", data, with_labels=False)
    step = model.predict_step(**not_none(params=params, config=config))
    outputs = outputs_on_host(step, variables, batches, prefetch)
    return _examples(outputs) if per_example else outputs


def _examples(outputs: Generator[Any, None, None]) -> Generator[Any, None, None]:
    with contextlib.closing(outputs):
        for output in outputs:
            sizes = {name: len(x) for name, x in named_leaves("predictions", output)}
            if len({*sizes.values()}) > 1:
                raise ValueError(
                    "per_example=True needs equally many rows in each prediction, but"
                    f" got {sizes}. Give several values per example a dim of their own,"
                    " [b, n, ...]."
                )
            for row in range(next(iter(sizes.values()))):
                yield jax.tree.map(lambda x, row=row: x[row], output)
