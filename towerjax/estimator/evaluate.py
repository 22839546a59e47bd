"""How good is a model on a whole data set?"""

from typing import Any

from towerjax.estimator.arguments import where_given
from towerjax.estimator.data import Data, Passes
from towerjax.estimator.replicate import ReplicatedModel
from towerjax.estimator.train import check_model
from towerjax.loop.evaluate import evaluate as over_batches
from towerjax.types import PyTree


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
    """The model's loss and metrics over a whole data set, however it is cut.

    States merge over batches in float64 on the host and are computed once. A scalar
    loss, which says nothing of what it is divided by, is the mean over batches.

    Args:
      model: As `replicate_model_fn` returns it.
      variables: As the model takes them; kept.
      data: Batches ``(features, labels)``, or a function that returns them.
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many evaluations may run without being waited for.
      params: Hyperparameters, where the model function asks for them.
      config: What else it asks for.

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
    check_model("evaluate", model, "eval_step")
    given = where_given(params=params, config=config)
    return over_batches(
        model.eval_step(**given),
        variables,
        Passes("data", data),
        prefetch=prefetch,
        in_flight=in_flight,
    )
