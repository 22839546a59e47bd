"""``replicate_model_fn``: run a model function on all devices."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from towerjax.data.batch_rows import Remainder
from towerjax.step.plan import StepOptions
from towerjax.step.state.policies import StatePolicy
from towerjax.step.step import EvalStep, Step, TrainStep
from towerjax.tf1.estimator.losses import LossReduction
from towerjax.tf1.estimator.model_engine import (
    ModelTower,
    model_step,
    model_train_step,
    spec_of,
)
from towerjax.tf1.estimator.model_fn import (
    Compat,
    Mode,
    ModelFn,
    ModelOptions,
    ModelSpec,
    not_none,
    static_keys,
)
from towerjax.tf1.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    store,
)
from towerjax.tf1.strategies import MirroredStrategy
from towerjax.tf1.values import AnyStrategy
from towerjax.towers.values import stack_local
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundaries, api_boundary
from towerjax.types.refusals import refuse_unheld

MAKE_MODEL = "tj.estimator.replicate_model_fn(model_fn)"
_SPEC_PARTS = {
    Mode.TRAIN: ("loss", "train_op", "eval_metrics", "predictions", "export_outputs"),
    Mode.EVAL: ("loss", "eval_metrics", "predictions", "export_outputs"),
    Mode.PREDICT: ("predictions", "export_outputs"),
}


@api_boundaries
class ReplicatedModel:
    """A model function on all towers, which is called like the function itself.

    `replicate_model_fn` makes it. Each mode is compiled at its first call.
    """

    def __init__(
        self, model_fn: ModelFn, strategy: AnyStrategy, options: ModelOptions
    ) -> None:
        self.model_fn = model_fn
        self.strategy = strategy
        self.options = options
        self._steps: dict[Hashable, Step] = {}
        self._first: dict[Mode, Step] = {}  # the first step of each mode

    def __repr__(self) -> str:
        name = getattr(self.model_fn.fn, "__name__", self.model_fn.fn)
        return f"ReplicatedModel({name}, {self.strategy!r})"

    def init(self, variables: PyTree) -> PyTree:
        """Place the variables on the devices where the model's calls expect them.

        With several processes, all start with the values of process 0.

        Args:
          variables: Any pytree of arrays, such as a `TrainState`. A ``TowerLocal`` in
            it holds one tower's value, and each tower gets a copy.

        Returns:
          The placed variables; a ``TowerLocal`` has leaves ``[T, ...]``.

        Raises:
          ValueError: A device is not on this machine.
        """
        refuse_unheld("variables", variables)
        strategy = self.strategy
        state = as_state(variables)
        local = stack_local(state.local, strategy.num_towers)
        state = dataclasses.replace(state, local=local)
        placed = as_variables(StatePolicy(strategy).copied(state))
        return store(placed, strategy, self.options.variable_placement)

    def __call__(
        self,
        variables: PyTree,
        features: PyTree,
        labels: PyTree = None,
        mode: Mode = Mode.TRAIN,
        params: Any = None,
        config: Any = None,
    ) -> ModelSpec:
        """Run the model function on the global batch, and merge the specs.

        Args:
          variables: The result of `init`, or the ``train_op`` of the last call; or a
            pytree of arrays without tower-local variables, which is copied to the
            devices.
          features: Arrays ``[B, ...]`` or a tree of them, ``IndexedRows`` included.
          labels: As ``features``, or None.
          mode: TRAIN, EVAL or PREDICT.
          params: Hyperparameters, if the model function has the parameter ``params``.
          config: Anything else, if it has the parameter ``config``.

        Returns:
          A `ModelSpec` of global values. The ``loss`` has the type that the model
          function returned, ``train_op`` is the next variables, ``eval_metrics`` are
          merged over towers, and ``predictions`` and ``export_outputs`` have the ``B``
          examples in order.

        Raises:
          ValueError: The batch, the variables or the result of the model function is
            malformed.
          ReplicationError: Variables are not the same on all towers, for example
            because the optimizer that updates them is not wrapped.
        """
        if not isinstance(mode, Mode):
            raise ValueError(
                f"mode={mode!r:.200} must be one of {', '.join(map(repr, Mode))}. The"
                " order is model(variables, features, labels, mode, params, config)."
            )
        step = self._step(mode, _SPEC_PARTS[mode], params=params, config=config)
        batch = {"features": features, **not_none(labels=labels)}
        placed = step.place_batch(batch)
        return spec_of(step, variables, placed)

    def train_step(
        self, *, params: Any = None, config: Any = None, **options: Any
    ) -> TrainStep:
        """Build the train step ``(state, batch) -> (state, metrics)``, for ``tj.run``.

        Args:
          params: As for a call.
          config: As for a call.
          **options: ``micro_batches``, ``on_nonfinite``, ``guard``, ``donate`` and
            ``audit``, as for ``tj.build_train_step``; gradients are reduced once.

        Returns:
          A step for batches ``{"features": ..., "labels": ...}``; it is cached.

        Raises:
          ValueError: An option is wrong, or the model function does not accept it.
        """
        known = vars(self.options.step)
        for name in options.keys() - known:
            text = f"train_step() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{text}; it takes {', '.join(known)}.")
        of_step = dataclasses.replace(self.options.step, **{"donate": True, **options})
        wanted = "loss", "train_op", "eval_metrics"
        return self._step(Mode.TRAIN, wanted, of_step, params=params, config=config)

    def eval_step(self, *, params: Any = None, config: Any = None) -> EvalStep:
        """Build the evaluation step, for ``tj.evaluate``; arguments as for a call.

        Returns:
          ``(variables, batch) -> {"loss": ..., name: metric state}``, for batches
          ``{"features": ..., "labels": ...}``.
        """
        wanted = "loss", "eval_metrics"
        return self._step(Mode.EVAL, wanted, params=params, config=config)

    def predict_step(self, *, params: Any = None, config: Any = None) -> Step[Any]:
        """Build the prediction step; arguments are as for a call.

        Returns:
          ``(variables, batch) -> {name: rows}``, for batches ``{"features": ...}``.
        """
        wanted = ("predictions",)
        return self._step(Mode.PREDICT, wanted, params=params, config=config)

    def on_one_tower(self, strategy: AnyStrategy) -> "ReplicatedModel":
        """Put the model on one tower, as ``tj.testing.one_tower`` needs it.

        Args:
          strategy: A strategy of one tower.

        Returns:
          A new model, which donates nothing.

        Raises:
          ValueError: The model has ``remainder="drop"``, whose dropped rows depend on
            its towers.
        """
        calls = dataclasses.replace(self.options.step, donate=False)
        if calls.remainder == "drop" and self.strategy.num_towers > 1:
            raise ValueError(
                "one_tower cannot repeat a model with remainder='drop', because the"
                f" rows that it drops depend on its {self.strategy.num_towers} towers."
                " Build it with remainder='pad'."
            )
        options = dataclasses.replace(self.options, step=calls)
        return ReplicatedModel(self.model_fn, strategy, options)

    def _step(
        self,
        mode: Mode,
        wanted: tuple[str, ...],
        of_step: StepOptions | None = None,
        **options: Any,
    ) -> Step[Any]:
        """Build the step of a mode at first use, and store it.

        With ``of_step``, the options of a step, it is the train step.
        """
        key = mode, wanted, of_step, static_keys(options)
        if key not in self._steps:
            for name, value in options.items():
                if value is not None and name not in self.model_fn.accepts:
                    raise ValueError(
                        f"{name} was given, but model_fn has no parameter {name!r}. Add"
                        f" {name}=None to its signature, or leave {name} out."
                    )
            # The caller may change the values before a trace.
            options = copy.deepcopy(options)
            tower_fn = ModelTower(self.model_fn, self.options, mode, wanted, options)
            if of_step:
                step = model_train_step(tower_fn, self.strategy, of_step)
            else:  # all calls of a mode pad to the same sizes
                step = model_step(tower_fn, self.strategy, self._first.get(mode))
                self._first.setdefault(mode, step)
            self._steps[key] = step
        return self._steps[key]


@api_boundary
def replicate_model_fn(
    model_fn: Callable[..., ModelSpec],
    loss_reduction: LossReduction = LossReduction.SUM_BY_NONZERO_WEIGHTS,
    devices: AnyStrategy | Sequence[Any] | None = None,
    *,
    variable_placement: VariablePlacement = VariablePlacement.MIRRORED,
    remainder: Remainder = "pad",
    compat: Compat | None = None,
    donate: bool = False,
    max_programs: int | None = None,
    audit: bool | None = None,
) -> ReplicatedModel:
    """Run a model function on all towers, to be called with the global batch.

    Each tower calls the model function on its own rows, and the results are merged: the
    losses by ``loss_reduction``, metrics by their own rule, and outputs row by row.
    Each ``TowerOptimizer`` updates the variables once.

    Args:
      model_fn: A pure function, written for one device: ``(variables, features, labels,
        mode, params=None, config=None, tower=None) -> ModelSpec``. The last three
        arguments are passed only if its signature has them.
      loss_reduction: How to reduce the towers' losses. The default is exact over the
        global batch, and needs a ``Weighted`` loss.
      devices: A strategy; or a list of devices, each with one tower; None takes all
        devices.
      variable_placement: Where to keep variables between two calls.
      remainder: What to do with a batch that ``T`` does not divide: ``"pad"`` it with
        rows of weight 0, ``"drop"`` its last rows, or raise an ``"error"``.
      compat: ``"tf1"`` gives the numbers of TensorFlow 1: every reduction except SUM
        divides the towers' losses by the number of towers, and classes are stacked.
      donate: Whether ``train_op`` may reuse the buffers of ``variables``.
      max_programs: How many kinds of batch (trees, shapes, dtypes) may be compiled for
        each mode; None is 8.
      audit: As for ``tj.build_train_step``, for the first call of each mode.

    Returns:
      A `ReplicatedModel`.

    Raises:
      ValueError: An option is unknown, or ``model_fn`` does not have the signature of a
        model function.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))
      >>> def model_fn(variables, features, labels, mode, tower):
      ...     def loss_fn(w):
      ...         return tj.Weighted.mean((w * features - labels) ** 2, tower.weight)
      ...     loss, train_op = optimizer.minimize(loss_fn, variables)
      ...     return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)
      >>> model = replicate_model_fn(model_fn, devices=tj.Mirrored(towers=2))
      >>> variables = tj.TrainState.create(np.float32(0), optimizer)
      >>> x, y = np.ones(3, np.float32), np.array([1, 2, 6], np.float32)
      >>> spec = model(variables, x, y, tj.estimator.Mode.TRAIN)
      >>> round(float(spec.loss.value), 4), round(float(spec.train_op.params), 4)
      (13.6667, 0.6)

    Source:
      ``tf.contrib.estimator.replicate_model_fn`` (2018).
    """
    step = StepOptions(
        remainder=remainder, donate=donate, max_programs=max_programs, audit=audit
    )
    options = ModelOptions(loss_reduction, variable_placement, compat, step)
    if isinstance(devices, AnyStrategy):
        strategy = devices
    else:
        strategy = MirroredStrategy(devices=devices)
    if strategy.state != "mirrored" and variable_placement.value != "mirrored":
        raise ValueError(
            f"state={strategy.state!r} and variable_placement={variable_placement!r}"
            " both say where to keep variables. Leave one of them out."
        )
    return ReplicatedModel(ModelFn.of(model_fn), strategy, options)
