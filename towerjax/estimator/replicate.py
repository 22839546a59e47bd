"""``replicate_model_fn``: run a model function on all devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import Remainder, batch_signature
from towerjax.estimator.arguments import (
    Compat,
    ModelFn,
    ModelOptions,
    copy_arguments,
    static_keys,
)
from towerjax.estimator.data import as_batch
from towerjax.estimator.losses import LossReduction
from towerjax.estimator.model_engine import (
    ModelEngine,
    ModelStep,
    ModelTrainStep,
    call_runner,
)
from towerjax.estimator.spec import Mode, ModelSpec, concat_outputs
from towerjax.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    init_variables,
    spread,
    store,
)
from towerjax.mesh.placement import on_every_process, place
from towerjax.step.checking import Check
from towerjax.step.compiled_step import StepOptions
from towerjax.step.engine import Guard, OnNonfinite
from towerjax.step.program import Program, Runner
from towerjax.step.state import TrainState, split_state
from towerjax.towers.strategies import Mirrored, Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.options import check_choice

MAKE_MODEL = "tj.estimator.replicate_model_fn(model_fn)"
_SPEC_PARTS = {
    Mode.TRAIN: ("loss", "train_op", "eval_metrics", "predictions", "export_outputs"),
    Mode.EVAL: ("loss", "eval_metrics", "predictions", "export_outputs"),
    Mode.PREDICT: ("predictions", "export_outputs"),
}


class ReplicatedModel:
    """A model function on all towers: called as the function itself is called.

    Made by `replicate_model_fn`. Each mode compiles at its first call.
    """

    def __init__(
        self, model_fn: ModelFn, strategy: Strategy, options: ModelOptions
    ) -> None:
        self.model_fn, self.strategy, self.options = model_fn, strategy, options
        self._runners: dict[Any, Runner] = {}
        self._placers: dict[Mode, Placer] = {}
        self._steps: dict[Any, ModelTrainStep] = {}

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
        placed = init_variables(variables, self.strategy)
        policy = self.options.variable_placement
        return store(placed, self.strategy.placement, policy)

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
            malformed, before anything is compiled.
          ReplicationError: A value that must be the same on all towers is not, such as
            variables updated by an optimizer that is not wrapped.
        """
        check_choice("mode", mode, tuple(Mode))
        batch = self.place_batch(as_batch((features, labels)), mode)
        return self.run(variables, batch, mode, _SPEC_PARTS[mode], params, config)

    def place_batch(self, batch: PyTree, mode: Mode) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers.

        Args:
          batch: ``{"features": ..., "labels": ...}``, leaves ``[B, ...]``.
          mode: The mode; each mode pads to its own batch sizes.

        Returns:
          A ``PlacedBatch``.

        Raises:
          ValueError: The batch is malformed, or does not divide.
        """
        placement = self.strategy.placement
        if isinstance(batch, PlacedBatch):
            batch.check(placement)
            return batch
        if mode not in self._placers:
            remainder = self.options.step.remainder
            self._placers[mode] = Placer(placement, remainder=remainder)
        return self._placers[mode].place(batch)

    def run(
        self,
        variables: PyTree,
        batch: PlacedBatch,
        mode: Mode,
        wanted: Sequence[str],
        params: Any = None,
        config: Any = None,
    ) -> ModelSpec:
        """Call the model function on a placed batch, for the wanted parts of the spec.

        Returns:
          A `ModelSpec`; the other parts are not computed and None.
        """
        placement, policy = self.strategy.placement, self.options.variable_placement
        given = {"params": params, "config": config}
        runner, state = self._runner(variables, mode, tuple(wanted), given)
        *after, parts, info = runner(state, batch)
        names = ("predictions", "export_outputs")
        outputs = on_every_process([parts[name] for name in names], placement)
        parts |= zip(names, concat_outputs(outputs, batch), strict=True)
        if after:
            is_state = isinstance(variables, TrainState)
            after = as_variables(TrainState(**after[0], **after[1]), is_state=is_state)
            parts["train_op"] = store(after, placement, policy)
        return ModelSpec(mode, hooks=info.hooks, **parts)

    def train_step(
        self,
        *,
        params: Any = None,
        config: Any = None,
        micro_batches: int = 1,
        on_nonfinite: OnNonfinite = "raise",
        guard: Guard = "loss",
        donate: bool = True,
        check: Check | None = None,
    ) -> ModelTrainStep:
        """The train step, for ``tj.run``: ``(state, batch) -> (state, metrics)``.

        ``params`` and ``config`` are as for a call, and all else as for
        ``tj.build_train_step``; with micro-batches optimizers meet once a step.

        Returns:
          A `ModelTrainStep` for ``{"features": ..., "labels": ...}``; cached.

        Raises:
          ValueError: An option is wrong, or the model function does not take it.
        """
        given = {"params": params, "config": config}
        options = dataclasses.replace(
            self.options.step,
            micro_batches=micro_batches,
            on_nonfinite=on_nonfinite,
            guard=guard,
            donate=donate,
            check=check,
        )
        key = static_keys(given), options
        if key not in self._steps:
            wanted = "loss", "train_op", "eval_metrics"
            engine = self._engine(Mode.TRAIN, wanted, given, options)
            self._steps[key] = ModelTrainStep(engine)
        return self._steps[key]

    def eval_step(self, *, params: Any = None, config: Any = None) -> ModelStep:
        """The evaluation step, for ``tj.evaluate``; arguments are as for a call.

        Returns:
          ``(variables, batch) -> {"loss": ..., name: metric state}``, for batches
          ``{"features": ..., "labels": ...}``.
        """
        given = {"params": params, "config": config}
        return ModelStep(self, Mode.EVAL, ("loss", "eval_metrics"), given)

    def predict_step(self, *, params: Any = None, config: Any = None) -> ModelStep:
        """The prediction step; arguments are as for a call.

        Returns:
          ``(variables, batch) -> {name: rows}``, for batches ``{"features": ...}``.
        """
        given = {"params": params, "config": config}
        return ModelStep(self, Mode.PREDICT, ("predictions",), given)

    def program(
        self,
        variables: PyTree,
        features: PyTree,
        labels: PyTree = None,
        mode: Mode = Mode.TRAIN,
        params: Any = None,
        config: Any = None,
    ) -> Program:
        """The compiled program of a call with these arguments; compiles it if need be.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's text.
        """
        check_choice("mode", mode, tuple(Mode))
        batch = self.place_batch(as_batch((features, labels)), mode)
        given = {"params": params, "config": config}
        runner, state = self._runner(variables, mode, _SPEC_PARTS[mode], given)
        return runner.program(state, batch)

    def _engine(
        self,
        mode: Mode,
        wanted: tuple[str, ...],
        given: Mapping[str, Any],
        options: StepOptions,
        *,
        is_state: bool = True,
    ) -> ModelEngine:
        self.model_fn.refuse_unaccepted(given)
        given = copy_arguments(given)  # the caller's may change before a later trace
        how = (self.model_fn, self.strategy, self.options)
        return ModelEngine(*how, mode, wanted, given, options, is_state)

    def _runner(
        self,
        variables: PyTree,
        mode: Mode,
        wanted: tuple[str, ...],
        given: Mapping[str, Any],
    ) -> tuple[Runner, tuple[Any, Any]]:
        """The runner of such a call, and the state on all devices as its argument."""
        variables = spread(variables, self.strategy, self.options.variable_placement)
        state = split_state(as_state(variables, self._counters))
        key = mode, wanted, batch_signature(variables), static_keys(given)
        if key not in self._runners:
            is_state = isinstance(variables, TrainState)
            how = (mode, wanted, given, self.options.step)
            self._runners[key] = call_runner(self._engine(*how, is_state=is_state))
        return self._runners[key], state

    @functools.cached_property
    def _counters(self) -> dict[str, Any]:
        """The step number and the key of variables that are no `TrainState`."""
        counters = {"step": np.int32(0), "rng": jax.random.key(0)}
        return place(counters, self.strategy.placement, Layout.MIRRORED)


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
) -> ReplicatedModel:
    """Replicate a model function: it is called as before, with the global batch.

    The batch is split over the towers, each calls the model function on its own rows,
    and the results are merged: the loss by ``loss_reduction``, the variables by the
    one update of each ``TowerOptimizer``, metrics by their ``merge``, outputs joined
    row by row. On one tower nothing is split, scaled or sent.

    Args:
      model_fn: ``(variables, features, labels, mode, params=None, config=None,
        tower=None) -> ModelSpec``, pure, written for one device. ``params``, ``config``
        and ``tower`` (a ``Tower``) are passed only if its signature has them; each
        tower gets its own copy of the first two. Where the caller gives none, the
        default in the signature holds.
      loss_reduction: How the towers' losses are reduced. The default is exact over the
        global batch and needs a ``Weighted`` loss.
      devices: A strategy; or a list of devices, with a tower each; None takes all.
      variable_placement: Where variables are kept between two calls.
      remainder: For a batch that ``T`` does not divide: ``"pad"`` with rows of weight
        0, ``"drop"`` the last rows, or ``"error"``. Padding is refused where it would
        count, because the loss does not read ``tower.weight``.
      compat: ``"tf1"`` gives the original's numbers: every reduction but SUM divides
        the towers' losses by the number of towers, and classes are stacked.
      donate: Whether ``train_op`` may reuse the buffers of ``variables``.
      max_programs: How many batch signatures may compile for each mode; None: 8.

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
    step = StepOptions(remainder=remainder, donate=donate, max_programs=max_programs)
    options = ModelOptions(loss_reduction, variable_placement, compat, step)
    strategy = devices if isinstance(devices, Strategy) else Mirrored(devices=devices)
    options.check_strategy(strategy)
    return ReplicatedModel(ModelFn.of(model_fn), strategy, options)
