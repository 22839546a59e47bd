"""``replicate_model_fn``: run a model function on all devices."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from towerjax.data.batch_rows import Remainder
from towerjax.data.placer import Placer
from towerjax.mesh.transfer import place
from towerjax.step.plan import StepOptions
from towerjax.step.state.train_state import state_layout
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
from towerjax.towers.strategies import Strategy
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
    """A model function on all towers: called as the function itself is called.

    Made by `replicate_model_fn`. Each mode compiles at its first call.
    """

    def __init__(
        self, model_fn: ModelFn, strategy: Strategy, options: ModelOptions
    ) -> None:
        self.model_fn = model_fn
        self.strategy = strategy
        self.options = options
        # Each mode pads to batch sizes of its own.
        remainder = options.step.remainder
        self._placers = {
            mode: Placer(strategy.placement, remainder=remainder) for mode in Mode
        }
        self._steps: dict[Hashable, Step] = {}

    def __repr__(self) -> str:
        name = getattr(self.model_fn.fn, "__name__", self.model_fn.fn)
        return f"ReplicatedModel({name}, {self.strategy!r})"

    def init(self, variables: PyTree) -> PyTree:
        """Copy the variables to the devices where the model's calls expect them.

        With several processes, all start from the values of process 0.

        Args:
          variables: Any pytree of arrays, such as a `TrainState`; a ``TowerLocal`` in
            it holds one tower's value, of which each tower gets a copy.

        Returns:
          The variables; a ``TowerLocal`` has leaves ``[T, ...]``.

        Raises:
          ValueError: A device is not on this machine.
        """
        refuse_unheld("variables", variables)
        placement = self.strategy.placement
        state = as_state(variables)
        local = stack_local(state.local, placement.num_towers)
        state = dataclasses.replace(state, local=local)
        layouts = state_layout(self.strategy)
        placed = as_variables(place(state, placement, layouts, state.params))
        return store(placed, placement, self.options.variable_placement)

    def __call__(
        self,
        variables: PyTree,
        features: PyTree,
        labels: PyTree = None,
        mode: Mode = Mode.TRAIN,
        params: Any = None,
        config: Any = None,
    ) -> ModelSpec:
        """Call the model function on the global batch.

        Args:
          variables: As `init` or the last call's ``train_op`` gave them; or a pytree of
            arrays without tower-local variables, which is copied to the devices.
          features: Arrays ``[B, ...]``, or a tree of them; also ``IndexedRows``.
          labels: The same, or None.
          mode: The mode.
          params: Hyperparameters, if the model function has the parameter ``params``.
          config: Anything else, if it has the parameter ``config``.

        Returns:
          A `ModelSpec` of global values: ``loss`` of the kind that the model function
          returned, ``train_op`` the next variables, ``eval_metrics`` merged over
          towers, ``predictions`` and ``export_outputs`` of the ``B`` examples in order.

        Raises:
          ValueError: The batch, the variables or what the model function returned is
            malformed.
          ReplicationError: Variables are not the same on all towers, as those updated
            by an optimizer that is not wrapped.
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
        """The train step, for ``tj.run``: ``(state, batch) -> (state, metrics)``.

        Args:
          params: As for a call.
          config: As for a call.
          **options: ``micro_batches``, ``on_nonfinite``, ``guard``, ``donate`` and
            ``audit``, as for ``tj.build_train_step``; gradients are reduced once.

        Returns:
          A `tj.step` for ``{"features": ..., "labels": ...}``; cached.

        Raises:
          ValueError: An option is wrong, or the model function does not take it.
        """
        known = vars(self.options.step)
        for name in options.keys() - known:
            text = f"train_step() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{text}; it takes {', '.join(known)}.")
        of_step = dataclasses.replace(self.options.step, **{"donate": True, **options})
        wanted = "loss", "train_op", "eval_metrics"
        return self._step(Mode.TRAIN, wanted, of_step, params=params, config=config)

    def eval_step(self, *, params: Any = None, config: Any = None) -> EvalStep:
        """The evaluation step, for ``tj.evaluate``; arguments are as for a call.

        Returns:
          ``(variables, batch) -> {"loss": ..., name: metric state}``, for batches
          ``{"features": ..., "labels": ...}``.
        """
        wanted = "loss", "eval_metrics"
        return self._step(Mode.EVAL, wanted, params=params, config=config)

    def predict_step(self, *, params: Any = None, config: Any = None) -> Step[Any]:
        """The prediction step; arguments are as for a call.

        Returns:
          ``(variables, batch) -> {name: rows}``, for batches ``{"features": ...}``.
        """
        wanted = ("predictions",)
        return self._step(Mode.PREDICT, wanted, params=params, config=config)

    def on_one_tower(self, strategy: Strategy) -> "ReplicatedModel":
        """The same model on one tower, for ``tj.testing.one_tower``.

        Args:
          strategy: One of one tower.

        Returns:
          A new model, which donates nothing.

        Raises:
          ValueError: The model drops rows by the number of its towers.
        """
        calls = dataclasses.replace(self.options.step, donate=False)
        if calls.remainder == "drop" and self.strategy.num_towers > 1:
            raise ValueError(
                "one_tower of a model with remainder='drop': what is dropped depends on"
                f" its {self.strategy.num_towers} towers. Build it with 'pad'."
            )
        options = dataclasses.replace(self.options, step=calls)
        return ReplicatedModel(self.model_fn, strategy, options)

    def _step(
        self,
        mode: Mode,
        wanted: tuple[str, ...],
        of_step: StepOptions | None = None,
        **given: Any,
    ) -> Step[Any]:
        """The step of a mode, or with options of a step the train step; cached."""
        key = mode, wanted, of_step, static_keys(given)
        if key not in self._steps:
            for name, value in given.items():
                if value is not None and name not in self.model_fn.accepts:
                    raise ValueError(
                        f"{name} was given, but model_fn has no parameter {name!r}. Add"
                        f" {name}=None to its signature, or leave {name} out."
                    )
            given = copy.deepcopy(given)  # the caller's may change before a later trace
            tower_fn = ModelTower(self.model_fn, self.options, mode, wanted, given)
            if of_step:
                step = model_train_step(tower_fn, self.strategy, of_step)
            else:
                step = model_step(tower_fn, self.strategy, self._placers[mode])
            self._steps[key] = step
        return self._steps[key]


@api_boundary
def replicate_model_fn(
    model_fn: Callable[..., ModelSpec],
    loss_reduction: LossReduction = LossReduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Strategy | Sequence[Any] | None = None,
    *,
    variable_placement: VariablePlacement = VariablePlacement.MIRRORED,
    remainder: Remainder = "pad",
    compat: Compat | None = None,
    donate: bool = False,
    max_programs: int | None = None,
    audit: bool | None = None,
) -> ReplicatedModel:
    """Replicate a model function: it is called as before, with the global batch.

    Each tower calls the model function on its own rows, and the results are merged: the
    loss by ``loss_reduction``, the variables by the one update of each
    ``TowerOptimizer``, metrics by their ``merge``, outputs joined row by row.

    Args:
      model_fn: ``(variables, features, labels, mode, params=None, config=None,
        tower=None) -> ModelSpec``, pure, written for one device. The last three are
        passed only if its signature has them.
      loss_reduction: How the towers' losses are reduced. The default is exact over the
        global batch and needs a ``Weighted`` loss.
      devices: A strategy; or a list of devices, with a tower each; None takes all.
      variable_placement: Where variables are kept between two calls.
      remainder: For a batch that ``T`` does not divide: ``"pad"`` with rows of weight
        0, ``"drop"`` the last rows, or ``"error"``.
      compat: ``"tf1"`` gives the original's numbers: every reduction but SUM divides
        the towers' losses by the number of towers, and classes are stacked.
      donate: Whether ``train_op`` may reuse the buffers of ``variables``.
      max_programs: How many batch signatures may compile for each mode; None: 8.
      audit: As for ``tj.build_train_step``, of the first call of each mode.

    Returns:
      A `ReplicatedModel`.

    Raises:
      ValueError: An option is unknown, or the signature of ``model_fn`` is not that of
        a model function.

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
    if isinstance(devices, Strategy):
        strategy = devices
    else:
        strategy = MirroredStrategy(devices=devices)
    if strategy.state != "mirrored" and variable_placement.value != "mirrored":
        raise ValueError(
            f"state={strategy.state!r} and variable_placement={variable_placement!r}"
            " both say where variables wait. Leave one of them out."
        )
    return ReplicatedModel(ModelFn.of(model_fn), strategy, options)
