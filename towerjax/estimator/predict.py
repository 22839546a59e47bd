"""What does a model say of data, however much of it there is?"""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import jax

from towerjax.estimator.arguments import where_given
from towerjax.estimator.data import Data, Passes
from towerjax.estimator.replicate import ReplicatedModel
from towerjax.estimator.train import check_model, check_variables
from towerjax.loop.evaluate import outputs_on_host
from towerjax.step.state import TrainState
from towerjax.types.options import check_flag, check_whole


def predict(
    model: ReplicatedModel,
    variables: TrainState,
    data: Data,
    *,
    per_example: bool = False,
    prefetch: int = 2,
    in_flight: int = 2,
    params: Any = None,
    config: Any = None,
) -> Iterator[Any]:
    """What the model predicts for each batch, or each example, in their order.

    Lazy: endless data gives endless predictions. So that the devices stay busy, up to
    ``prefetch + in_flight`` batches are taken for the first prediction. When the data
    raises, the predictions before come first. Closing the iterator stops the thread
    and closes what a function of data made.

    Args:
      model: As `replicate_model_fn` returns it, or another that has its
        ``predict_step``.
      variables: Kept.
      data: Batches of features, or ``(features, labels)``, whose labels are left
        out; a function that returns such an iterable; or a `DistributedDataset`.
      per_example: Yield one example's predictions at a time?
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many predictions may run without being waited for.
      params: Hyperparameters, where the model function asks for them.
      config: What else it asks for.

    Returns:
      An iterator of the model's predictions as NumPy arrays, ``[B, ...]`` of a
      batch, ``[...]`` of an example. Padding is gone.

    Raises:
      ValueError: At once: an option is wrong, or ``variables`` is no ``TrainState``.
        Later: a batch is malformed.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def model_fn(variables, features, labels, mode):
      ...     predictions = {"twice": variables.params * features}
      ...     return tj.estimator.ModelSpec(mode, predictions=predictions)
      >>> two = tj.Mirrored(towers=2)
      >>> model = tj.estimator.replicate_model_fn(model_fn, devices=two)
      >>> variables = tj.TrainState.create(np.float32(2), optax.sgd(0.1))
      >>> data = tj.batches(np.arange(5, dtype=np.float32), 4)
      >>> [batch["twice"].tolist() for batch in predict(model, variables, data)]
      [[0.0, 2.0, 4.0, 6.0], [8.0]]
    """
    check_model("predict", model, "predict_step")
    check_variables("predict", variables)
    check_flag("per_example", per_example)
    check_whole("prefetch", prefetch, 0)
    check_whole("in_flight", in_flight, 1)
    passes = Passes("data", data, with_labels=False)
    step = model.predict_step(**where_given(params=params, config=config))
    outputs = outputs_on_host(step, variables, passes, prefetch, in_flight)
    return _examples(outputs) if per_example else outputs


def _examples(outputs: Generator[Any, None, None]) -> Generator[Any, None, None]:
    with contextlib.closing(outputs):
        for output in outputs:
            for row in range(len(jax.tree.leaves(output)[0])):
                yield jax.tree.map(lambda x, row=row: x[row], output)
