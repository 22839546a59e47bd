"""`build_train_step`: a train step from a loss function and an optimizer."""

import dataclasses
import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from towerjax.collectives.sparse_rows import as_dense, dense_shape, is_rows, map_values
from towerjax.data.batch_rows import Remainder
from towerjax.make.checked import step_of
from towerjax.make.of_loss import LossPass, pass_of
from towerjax.metrics.weighted import Means, Weighted
from towerjax.step.passes.one_pass import TowerFn
from towerjax.step.plan import (
    PassesInOrder,
    Plan,
    StepOptions,
    TowersTrain,
    training_plan,
)
from towerjax.step.state.checks import check_is_state
from towerjax.step.state.next_state import Guard, OnNonfinite, Update, accept_or_keep
from towerjax.step.state.policies import StatePolicy
from towerjax.step.state.train_state import TrainState
from towerjax.step.state.trainable import (
    Trainable,
    check_like_params,
    check_trainable,
    node_types,
    trained_part,
    with_trained,
)
from towerjax.step.step import TrainStep
from towerjax.towers.strategies import Strategy, check_roles, with_specs
from towerjax.types import LossFn, PyTree, Reduction, Sum
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_choice, check_function, check_methods
from towerjax.types.refusals import check_like, check_types
from towerjax.types.trees import map_parts
from towerjax.types.version import page

UpdateExtra: TypeAlias = Callable[[TrainState, PyTree], PyTree]
"""``(state, merged) -> extra``: the next ``state.extra``."""


class StepFunctions(NamedTuple):
    """The functions that a train step is made of, as `build_step` takes them."""

    tower: TowerFn  # returns "loss", "grads" and more
    update: Update
    # ``init(params)`` returns the state's fields that the step makes: ``opt_state``,
    # and ``local``, a dict of TowerLocal with one tower's values.
    init: Callable[[PyTree], dict[str, PyTree]]
    # ``trained(params)`` returns the parameters, with None for leaves that do not
    # train.
    trained: Callable[[PyTree], PyTree]
    strategy: Strategy
    options: StepOptions
    # ``accept_or_keep(fn, carry)`` runs ``fn(carry)``, which returns ``(accepted,
    # carry, rest)``. It returns ``(carry, rest)``, with the old carry if the new one is
    # not accepted, and makes no copy of it.
    accept_or_keep: Callable[..., tuple[PyTree, PyTree]] = accept_or_keep
    # Whether each tower refuses a step for itself. Then ``update`` also returns the
    # number of the first step that a tower has refused, int32, or -1.
    refuses_by_tower: bool = False


Extend: TypeAlias = Callable[[StepFunctions], StepFunctions]
"""Changes the functions of a train step, such as ``fns._replace(tower=...)``."""


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate:
    """The update of `build_train_step`: an optimizer changes the trained parameters."""

    optimizer: optax.GradientTransformation
    trainable: Trainable | None = None
    update_extra: UpdateExtra | None = None

    def init(self, params: PyTree) -> dict[str, PyTree]:
        """Make ``{"opt_state": ...}``, the optimizer's state before any step."""
        part = trained_part(params, self.trainable)
        return {"opt_state": self.optimizer.init(part)}

    def __call__(
        self, state: TrainState, merged: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Make the next state and the metrics from the merged values."""
        loss = merged["loss"]
        grads = merged["grads"]
        after = apply_gradients(
            self.optimizer, state, grads, loss=loss, trainable=self.trainable
        )
        after = dataclasses.replace(after, local=merged["local"])
        extra = merged.get("extra")
        culprit = _EXTRA
        if self.update_extra is not None:
            extra = self.update_extra(after, extra)
            culprit = _UPDATE_EXTRA
        if "extra" in merged or self.update_extra is not None:
            extra = next_extra(state.extra, extra, culprit)
            after = dataclasses.replace(after, extra=extra)
        return after, with_loss(loss, merged["metrics"])


def with_loss(loss: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Add the loss and its terms to the user's metrics."""
    ours = {"loss": loss, **(loss.by_name() if isinstance(loss, Means) else {})}
    if both := sorted(metrics.keys() & ours.keys()):
        raise ValueError(
            f"metrics[{both[0]!r}] has the name of the loss or of a term of it. Give"
            " your metric another name."
        )
    return {**metrics, **ours}


_EXTRA = (
    "TowerOutput(extra=...): arrays, tj.Weighted and tj.Sum, in the tree of"
    " step.init(params, extra=...). For anything else pass build_train_step(...,"
    " update_extra=)"
)
_UPDATE_EXTRA = (
    "what update_extra returns: the tree of step.init(params, extra=...), of merged"
    " values such as merged['keys'].value"
)


@api_boundary
def apply_gradients(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: PyTree,
    *,
    loss: Any = None,
    trainable: Trainable | None = None,
) -> TrainState:
    """Update the parameters once by an optimizer.

    It does the update of a train step: gradients are cast to the dtypes of their
    parameters, and an update that would change a type is refused.

    Args:
      optimizer: Any optax transformation; its state is ``state.opt_state``.
      state: A state whose ``opt_state`` is ``optimizer.init(params)``.
      grads: ``merged["grads"]`` of `value_and_grad`, or a tree like ``params``.
      loss: ``merged["loss"]``, or its value, for optimizers that take ``value=loss``.
      trainable: The parameters that change, as for `build_train_step`.

    Returns:
      The state. Its ``step`` is unchanged, because the step that calls this adds 1.

    Raises:
      ValueError: ``grads`` are not a tree like the parameters, or the optimizer needs
        more arguments.

    Example:
      >>> import jax.numpy as jnp, towerjax as tj
      >>> optimizer = optax.sgd(0.5)
      >>> state = tj.TrainState.create(jnp.float32(1.0), optimizer)
      >>> grads = tj.Weighted(jnp.float32(6.0), jnp.float32(3.0))
      >>> float(apply_gradients(optimizer, state, grads).params)
      0.0
    """
    check_methods("optimizer", optimizer, "init update", "optax.sgd(0.1)")
    check_is_state(state)
    check_trainable(trainable)
    grads = _mean_gradient(grads) if isinstance(grads, Weighted | Sum) else grads
    part = trained_part(state.params, trainable)
    structure = jax.tree.structure(grads, is_leaf=is_rows)
    if structure == jax.tree.structure(state.params):

        def keep(x: Any, trained: Any) -> Any:
            return None if trained is None else x

        def is_leaf(x: Any) -> bool:
            return x is None or is_rows(x)

        grads = jax.tree.map(keep, grads, part, is_leaf=is_leaf)
    check_like_params(grads, part)
    grads = map_values(lambda g, p: g.astype(p.dtype), grads, part)
    # Only a TowerOptimizer takes a gradient that has some rows of a table, to update
    # them lazily. For other optimizers the gradient becomes a dense array.
    grads = grads if getattr(optimizer, "takes_rows", False) else as_dense(grads)
    loss = getattr(loss, "value", loss)
    opt_state = state.opt_state
    value = {} if loss is None else {"value": loss}
    updates, next_state = pass_loss(optimizer).update(grads, opt_state, part, **value)

    def shape_of(u: Any, p: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dense_shape(u), p.dtype)

    shapes = jax.tree.map(shape_of, updates, part, is_leaf=is_rows)
    fault = "The optimizer's updates do not have the shapes of the parameters"
    advice = "Return an update of the shape of each parameter."
    check_like("params", shapes, part, fault, advice)
    after = optax.apply_updates(part, updates)
    culprit = "the optimizer's updates"
    after = check_types(part, after, "state.params", culprit)
    opt_state = check_types(opt_state, next_state, "state.opt_state", "the optimizer")
    params = with_trained(after, state.params)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


_NEEDS_MORE = (
    "A step gives it gradients and parameters, and value=loss, as"
    " tj.apply_gradients(..., loss=merged['loss']) does. If it needs more, call it in"
    " the update of your own step, tj.build_step(tower_fn, update_fn, strategy), or"
    f" around step.fn: {page('optimizers')}"
)
_OF_TEXT = (
    "The optimizer was given a text in place of a number, such as '1e-3'. Write it as"
    " float(text)"
)
_OF_EXAMPLES = "DifferentiallyPrivateAggregateState"


def pass_loss(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Let the optimizer's update accept ``value=loss``.

    The argument is dropped if the wrapped optimizer does not take it.
    """
    inner = optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        if _OF_EXAMPLES in node_types(state):
            raise ValueError(
                "differentially_private_aggregate, which dpsgd uses, clips the gradient"
                " of each example, but the optimizer gets the gradient of the whole"
                " batch, so nothing would be private. Clip in a step of your own, and"
                " pass the optimizer without it."
            )
        try:
            try:
                return inner.update(updates, state, params, **extra_args)
            except TypeError as error:
                # An update that is wrapped in other functions shows only in a call
                # which arguments it takes.
                if "unexpected keyword argument 'value'" not in str(error):
                    raise
            extra_args.pop("value")
            return inner.update(updates, state, params, **extra_args)
        except (AttributeError, TypeError) as error:
            fault = f"The optimizer's update failed: {str(error).rstrip('.')}."
            raise ValueError(f"{fault} {_of_text(error) or _NEEDS_MORE}.") from error

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _of_text(error: Exception) -> str:
    """Advise if optax got a text where it computes with a number; else ""."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_optax = [x for x in frames if x.f_globals["__name__"].startswith("optax.")]
    values = [x for frame in of_optax for x in frame.f_locals.values()]
    return _OF_TEXT if any(isinstance(x, str) for x in values) else ""


def next_extra(before: PyTree, merged: PyTree, culprit: str) -> PyTree:
    """Make the next ``state.extra``: the merged values, cast to their old dtypes.

    A value that would lose digits or range by the cast is not cast. The check of types
    then refuses it, and names ``culprit``.
    """

    def cast(x: Any, old: Any) -> Any:
        loses_kind = _kind_of_number(x.dtype) > _kind_of_number(old.dtype)
        is_integer = jnp.issubdtype(old.dtype, jnp.integer)
        is_short_integer = is_integer and old.dtype.itemsize < 4
        may_wrap = is_short_integer and x.dtype.itemsize > old.dtype.itemsize
        return x if loses_kind or may_wrap else x.astype(old.dtype)

    values = map_parts(Weighted | Sum, lambda x: x.value, merged)
    if jax.tree.structure(values) == jax.tree.structure(before):
        values = jax.tree.map(cast, values, before)
    return check_types(before, values, "state.extra", culprit)


def _kind_of_number(dtype: Any) -> int:
    """Rank a dtype: 0 for booleans and integers, 1 for floats, 2 for complex."""
    kinds = (jnp.inexact, jnp.complexfloating)
    return sum(jnp.issubdtype(dtype, kind) for kind in kinds)


def _mean_gradient(grads: Weighted | Sum) -> PyTree:
    """Divide the gradient by its weight.

    A gradient that is a single array is divided in the way of a tree, so that it has
    the same bits as in a tree.
    """
    if isinstance(grads, Sum):
        return grads.value
    return dataclasses.replace(grads, sum=[grads.sum]).value[0]


def _planned(
    loss: LossPass,
    update: OptimizerUpdate,
    extend: Extend | None,
    strategy: Strategy,
    options: StepOptions,
) -> Plan:
    """Plan the step that trains with this loss and this update."""
    of_own_gradient = loss.with_own_gradient
    trained = functools.partial(trained_part, trainable=update.trainable)
    fns = StepFunctions(
        of_own_gradient, update, update.init, trained, strategy, options
    )
    makes = {"opt_state": lambda params: fns.init(params)["opt_state"]}
    if extend is not None:
        fns = extend(fns)
        makes["local"] = lambda params: fns.init(params).get("local", {})
    # If ``extend`` has replaced the tower function, its towers return gradients of
    # their own. Otherwise the pass differentiates the loss.
    tower = loss if fns.tower == of_own_gradient else fns.tower
    fields: dict[str, Any] = {"loss_reduction": loss.loss_reduction}
    fields["rows_used_later"] = update.update_extra is not None
    return training_plan(
        strategy,
        options,
        PassesInOrder((pass_of(tower, strategy, options, **fields),)),
        fns.update,
        StatePolicy(strategy, makes=makes),
        towers_train=_towers_train(fns, extend),
        remade=functools.partial(_planned, loss, update, None),
        moved=functools.partial(_planned, loss, update, extend),
    )


def _towers_train(fns: StepFunctions, extend: Extend | None) -> TowersTrain:
    if extend is None:
        return TowersTrain.TOGETHER
    return TowersTrain.ALONE if fns.refuses_by_tower else TowersTrain.AS_UPDATED


@api_boundary
def build_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    *,
    loss_reduction: Reduction | None = None,
    trainable: Trainable | None = None,
    update_extra: UpdateExtra | None = None,
    micro_batches: int = 1,
    remainder: Remainder = "error",
    on_nonfinite: OnNonfinite = "raise",
    guard: Guard = "gradients",
    donate: bool = True,
    max_programs: int = 1,
    audit: bool | None = None,
    extend: Extend | None = None,
    specs: Any = None,
) -> TrainStep:
    """Build a step that trains a loss function, written for one tower, on all towers.

    With the towers' losses ``s_t / w_t`` the global loss is ``sum_t s_t / sum_t w_t``.
    The sums are differentiated, added in one reduction and divided once.

    Args:
      loss_fn: ``(params, batch, tower) -> Weighted | TowerOutput``, pure; the loss may
        be a sum of several ``Weighted``.
      optimizer: Any optax transformation. It gets the whole reduced gradient.
      strategy: The towers, their devices, and how values are reduced over them.
      loss_reduction: The meaning of a bare scalar loss: SUM adds it over towers, MEAN
        takes the mean over the towers that have examples, None refuses it.
      trainable: The parameters that are trained: a function ``(name, leaf) -> bool``
        with names such as ``"dense/kernel"``, or a tree of bool that is a prefix of
        ``params``. None trains all floating and complex ones. Only the loss sees the
        others.
      update_extra: ``(state, merged) -> extra``, called once a step for the next
        ``state.extra``, such as a target network or a queue of ``tj.Rows``. ``state``
        has the new parameters, the old ``extra`` and this step's number. ``merged`` is
        what towers returned as ``TowerOutput(extra=...)``, merged as in `build_step`,
        or None. Without ``update_extra`` the merged values are kept.
      micro_batches: The number ``A`` of parts in which each tower's rows are processed.
        ``tower.reduce`` and ``tower.all_gather`` then see the rows of one part.
      remainder: What to do with a batch whose size ``T * A`` does not divide: ``"pad"``
        it with rows of weight 0, ``"drop"`` the remainder, or raise an ``"error"``.
        Padded rows enter the statistics of Flax's batch norm, not those of
        ``TowerBatchNorm``.
      on_nonfinite: What to do if a guarded value is not finite on any tower.
        ``"raise"`` and ``"skip"`` leave the state unchanged, and ``"raise"`` raises
        `NonFiniteError`; ``"ignore"`` updates the state all the same.
      guard: The values that must be finite: ``"gradients"`` is the loss and every
        gradient. ``"loss"`` is the loss alone, which misses a NaN in the gradient of a
        finite loss.
      donate: Whether the next state may reuse the buffers of the given state.
      max_programs: The number of kinds of batch (trees, shapes, dtypes) that may
        compile.
      audit: Whether the first call runs `audit` before it changes anything: its rows on
        two towers and on one, with an error if the results differ. None runs it once
        per program if one device can hold it, and warns if it cannot. False trains
        with each tower's own statistics.
      extend: ``fns -> fns``: changes the functions ``tower``, ``update`` and ``init``
        of the step. `towerjax.contrib` has some.
      specs: How parameters are split within towers of several devices, as for
        `Mirrored`; None takes the strategy's ``specs``.

    Returns:
      A `Step`.

    Raises:
      ValueError: An option has an unknown value, or arguments are swapped.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     errors = batch["x"] * params["w"] - batch["y"]
      ...     return tj.Weighted.mean(errors**2, tower.weight)
      >>> step = build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> state = step.init({"w": 0.0})
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3.0, np.float32)}
      >>> state, metrics = step(state, batch)
      >>> float(metrics["loss"]), round(float(state.params["w"]), 6)
      (9.0, 0.6)
    """
    check_roles(
        "build_train_step", loss_fn=loss_fn, optimizer=optimizer, strategy=strategy
    )
    check_choice(
        "loss_reduction", loss_reduction, (None, Reduction.SUM, Reduction.MEAN)
    )
    check_trainable(trainable)
    options = StepOptions(
        micro_batches, remainder, on_nonfinite, guard, donate, max_programs, audit
    )
    if extend is not None:
        check_function("extend", extend, "extend(fns)")
    if update_extra is not None:
        check_function("update_extra", update_extra, "update_extra(state, merged)")
    loss = LossPass(loss_fn, None, trainable, loss_reduction)
    update = OptimizerUpdate(optimizer, trainable, update_extra)
    return step_of(_planned(loss, update, extend, with_specs(strategy, specs), options))
