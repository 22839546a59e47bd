"""`Tower`: what a tower function can read and call while it is traced."""

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from towerjax.collectives.reduce import (
    check_joins,
    check_reduction,
    gather_over_towers,
    join_rows,
    reduce_over_towers,
    takes_first,
)
from towerjax.collectives.sparse_rows import is_rows
from towerjax.data.batch_rows import row_weights
from towerjax.jaxprs import tags
from towerjax.lowering.tower_axis import axes_in_tower
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.weighted import Weighted
from towerjax.towers.executors import in_merge_fn, in_tower_fn
from towerjax.towers.row_free_keys import ALL_TOWERS
from towerjax.towers.values import StrategyFields, is_mergeable, stack_towers
from towerjax.towers.variables import (
    TowerLocal,
    Variable,
    assign_in_tower,
    is_per_tower,
    is_variable,
    plain,
)
from towerjax.types import ArrayLike, PerTower, PyTree, Reduction
from towerjax.types.notes import explain_missing
from towerjax.types.refusals import refuse_unheld
from towerjax.types.trees import parts_of, shapes_of

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassContext:
    """What `Tower` computes its properties from: the values of a step's pass."""

    axes: TowerAxes = dataclasses.field(metadata=_STATIC)
    # These are None outside a step, where there is no step number, key or batch.
    step: jax.Array | None = None
    rng: jax.Array | None = None
    micro_batch: jax.Array | None = None
    num_valid: jax.Array | None = None
    first_row: jax.Array | int = 0
    rows: int = dataclasses.field(default=0, metadata=_STATIC)
    # The number of rows of all micro-batches together. If it is given and all rows are
    # examples, the program may leave out the weights, which are all 1.
    of_rows: int | None = dataclasses.field(default=None, metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tower:
    """What a tower function can know about its tower, and how it communicates.

    It is a pytree, so that functions under ``jax.jit`` and ``jax.checkpoint`` take it.

    Attributes:
      id: The tower's number, ``()`` int32, from 0 to ``T - 1``; traced.
      num_towers: The number of towers, ``T``; static.
      local: This tower's copy of the tower-local variables, a pytree without
        ``TowerLocal``. In evaluation and prediction it is their aggregate.
      strategy: The strategy, as ``merge_call`` gives it to its function.
      extra: The state's ``extra``: mirrored values that do not train.
      micro_batches: The number of micro-batches of the tower's rows; static.
    """

    id: jax.Array
    num_towers: int = dataclasses.field(metadata=_STATIC)
    local: PyTree
    strategy: StrategyFields = dataclasses.field(metadata=_STATIC)
    extra: PyTree
    _context: PassContext
    micro_batches: int = dataclasses.field(default=1, metadata=_STATIC)

    if not TYPE_CHECKING:
        __getattr__ = explain_missing(
            key="Write tower.rng, the key of this tower, step and micro-batch.",
            index="Write tower.id, from 0 to tower.num_towers - 1.",
            rank="Write tower.id, from 0 to tower.num_towers - 1.",
            mask="Write tower.weight, which is 1 for an example and 0 for padding.",
            rngs="Write nnx.Rngs(tower.rng), or rngs={'dropout': tower.rng} for Linen.",
            psum="Write tower.reduce(tj.Reduction.SUM, value).",
            pmean="Write tower.reduce(tj.Reduction.MEAN, value), or of all rows"
            " tower.mean(values, tower.weight).",
        )

    @property
    def step(self) -> jax.Array:
        """The number of steps before this one, ``()`` int32."""
        return _require_step(self._context.step, "step", "a counter")

    @property
    def rng(self) -> jax.Array:
        """A random key of this tower, step and micro-batch; the same on any devices."""
        context = self._context
        key = _require_step(context.rng, "rng", "a key, and fold tower.id into it")
        key = jax.random.fold_in(jax.random.fold_in(key, self.step), self.id)
        if context.micro_batch is None:
            return key
        return jax.random.fold_in(key, context.micro_batch)

    @property
    def shared_rng(self) -> jax.Array:
        """A random key of this step, the same on all towers and micro-batches."""
        key = _require_step(self._context.rng, "shared_rng", "a key")
        return jax.random.fold_in(jax.random.fold_in(key, self.step), ALL_TOWERS)

    @property
    def rows(self) -> int:
        """The number of rows ``b`` that this tower works on in this call; static."""
        _require_step(self._context.num_valid, "rows", "x.shape[0]")
        return self._context.rows

    @property
    def weight(self) -> jax.Array:
        """The rows' weights, ``[b]`` float32: 1 for an example, 0 for padding."""
        # The weights are computed at each read. So a step whose batch is padded can
        # notice that nothing reads them.
        context = self._context
        num_valid = _require_step(context.num_valid, "weight", "weights (ctx.weight)")
        return row_weights(num_valid, context.first_row, context.rows, context.of_rows)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axis name for code that communicates by itself, such as batch norm.

        Returns:
          A tuple of one name, for ``axis_name=`` and ``lax.psum``. The axis runs over
          all ``T`` towers in tower order, on any devices, even if ``T`` is 1. The
          strategy's ``axis_name`` sets the name.

        Raises:
          ValueError: Under ``tower_loop="scan"``, where towers cannot communicate.
        """
        _check_meeting(self._context.axes, "tower.axis_names")
        return (self._context.axes.tower_axis,)

    @property
    def _all_axes(self) -> TowerAxes:
        return dataclasses.replace(self._context.axes, as_one=True)

    def merge_call(
        self, merge_fn: Callable[..., PyTree], /, *values: PyTree, **named: PyTree
    ) -> PyTree:
        """Call ``merge_fn(strategy, *per_tower_values)`` with all towers' values.

        The towers' values are gathered: ``merge_fn`` sees each array of ``values`` as a
        ``PerTower``, which ``strategy.unwrap`` and ``strategy.reduce`` take. If it
        returns a ``PerTower``, each tower gets its own row of it. JAX can differentiate
        the call.

        Args:
          merge_fn: The function of all towers' values.
          *values: This tower's values, pytrees. Leaves that are not arrays must be the
            same on all towers and are passed unchanged.
          **named: More values, passed by name.

        Returns:
          The result, the same on every tower except for ``PerTower`` leaves.

        Raises:
          ValueError: Under ``tower_loop="scan"``, where towers cannot communicate.

        Example:
          >>> import towerjax as tj
          >>> def tower_fn(tower):
          ...     v = 3 + tower.id
          ...     s = tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), v)
          ...     return s + v
          >>> out = tj.tf1.MirroredStrategy(towers=2).call_for_each_tower(tower_fn)
          >>> out.values.tolist()
          [10, 11]
        """
        _check_meeting(self._context.axes, "tower.merge_call", (values, named))
        axes = self._all_axes

        def gather(leaf: Any) -> Any:
            if isinstance(leaf, TowerLocal):
                return gather_over_towers(leaf, axes)
            is_array = is_mergeable(leaf)
            return PerTower(gather_over_towers(leaf, axes)) if is_array else leaf

        def row_of(rows: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(rows, self.id, keepdims=False)

        def own_row(leaf: Any) -> Any:
            if isinstance(leaf, TowerLocal):
                return jax.tree.map(lambda x: own_row(PerTower(x)), leaf)
            if not isinstance(leaf, PerTower):
                return leaf
            name = "a PerTower that merge_fn returned"
            return jax.tree.map(row_of, stack_towers(leaf, self.num_towers, name))

        # After the gather, every tower calls the same function with the same values. So
        # no tower has to send the result, and JAX can differentiate the call.
        with jax.named_scope(tags.MERGED):
            values, named = jax.tree.map(gather, (values, named), is_leaf=is_variable)
        with in_merge_fn():
            merged = merge_fn(self.strategy, *values, **named)
        return jax.tree.map(own_row, merged, is_leaf=is_per_tower)

    def reduce(self, reduction: Reduction, value: PyTree) -> PyTree:
        """Reduce all towers' values to one value, which is the same on each tower.

        With several micro-batches each micro-batch is reduced by itself. A loss that is
        divided by a sum over the whole batch must get that sum as rows of the batch. A
        ``jax.grad`` in a tower differentiates the sum of all towers' results, so write
        ``value / tower.num_towers``. See
        <https://github.com/towerjax/towerjax/blob/main/docs/limits.md>.

        Args:
          reduction: SUM, MEAN (mean of tower values) or ONLY_FIRST_TOWER.
          value: This tower's value, a pytree of arrays, variables and ``IndexedRows``.
            Variables are read; rows of ``IndexedRows`` are gathered, never added.

        Returns:
          A tree like ``value``. The MEAN of integers is float32 (float64 for int64);
          the SUM of booleans and small integers is int32 or uint32. ONLY_FIRST_TOWER
          keeps the first tower's bits.

        Raises:
          ValueError: ``reduction`` is NONE, or the strategy has ``tower_loop="scan"``.
        """
        _check_meeting(self._context.axes, "tower.reduce", value)
        if isinstance(value, Reduction):
            raise ValueError(
                "tower.reduce: the arguments have another order. Write"
                f" tower.reduce(tj.Reduction.{value.name}, value)."
            )
        value = plain(value)
        refuse_unheld("tower.reduce: value", value)
        check_reduction(reduction, value)
        name = "tower.first" if takes_first(reduction) else tags.REDUCED
        with jax.named_scope(name):
            return reduce_over_towers(reduction, value, self.id, self._all_axes)

    def mean(
        self, values: PyTree, weight: ArrayLike, *, axis: Literal[0] | None = None
    ) -> PyTree:
        """Average over all towers' rows; the result is the same on each tower.

        ``reduce(Reduction.SUM, Weighted.mean(values, weight)).value``: see `reduce`.

        Args:
          values: This tower's values, as for ``Weighted.mean``.
          weight: Their weights, as for ``Weighted.mean``; with ``tower.weight`` padding
              does not count.
          axis: None is the mean of all elements, 0 the mean row.

        Returns:
          The mean, as ``Weighted.value`` gives it; 0 where all weights are 0.

        Example:
          >>> import towerjax as tj
          >>> x = tj.PerTower(jnp.array([[1.0, 2.0], [6.0, 9.0]]))
          >>> w = tj.PerTower(jnp.array([[1.0, 1.0], [1.0, 0.0]]))
          >>> strategy = tj.tf1.MirroredStrategy(towers=2)
          >>> float(strategy.call_for_each_tower(Tower.mean, x, w))
          3.0
        """
        _check_meeting(self._context.axes, "tower.mean", (values, weight))
        total = self.reduce(Reduction.SUM, Weighted.mean(values, weight, axis=axis))
        return total.value

    def all_gather(self, value: PyTree, *, axis: int | None = None) -> PyTree:
        """Gather all towers' values: stacked along a new dim, or joined along one.

        A compiled program has one shape for all towers. Values whose sizes differ are
        joined outside of it, ``jnp.concatenate(strategy.unwrap(x))``.

        Args:
          value: This tower's value: leaves ``[...]``, ``IndexedRows``, or variables,
            which are read.
          axis: The dim along which to join the towers' values; None stacks them along a
            new leading dim.

        Returns:
          Leaves ``[T, ...]`` in tower order, or leaves with ``T`` times the size along
          ``axis``; the same on each tower. ``IndexedRows`` of ``[N, ...]``, joined
          along dim 0, become rows of ``[T N, ...]``.

        Raises:
          ValueError: The strategy has ``tower_loop="scan"``, where towers cannot
            communicate; a leaf has no such dim; or ``axis`` is not 0 for
            ``IndexedRows``.
        """
        _check_meeting(self._context.axes, "tower.all_gather", value)
        value = plain(value)
        refuse_unheld("tower.all_gather: value", value)
        if axis is not None:
            check_joins(value, axis)
        with jax.named_scope(tags.GATHERED):
            rows = gather_over_towers(value, self._all_axes)
        if axis is None:
            return rows
        return jax.tree.map(lambda x: join_rows(x, axis), rows, is_leaf=is_rows)

    def assign(self, variable: Variable, value: PyTree) -> Variable:
        """Give a variable a new value.

        A mirrored variable takes the towers' values, reduced by its own reduction, and
        stays the same on all towers. A tower-local variable takes this tower's value.

        Args:
          variable: ``MirroredVar`` or ``TowerLocal``.
          value: This tower's value, of the variable's structure and shapes.

        Returns:
          The new variable.

        Raises:
          ValueError: The reduction of a mirrored variable is NONE; the value does not
            fit; or the reduction is SUM and the value a constant.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.tf1.MirroredStrategy(towers=2)
          >>> v = strategy.create_var("v", 1.0, reduction=tj.Reduction.MEAN)
          >>> out = strategy.call_for_each_tower(lambda tower, v: tower.assign(v,
          ...     tower.id), v)
          >>> float(out.value)
          0.5
        """
        return self._assign(variable, value, lambda old, new: new)

    def assign_add(self, variable: Variable, value: PyTree) -> Variable:
        """Add a value to a variable; it is reduced as by `assign`."""
        return self._assign(variable, value, operator.add)

    def assign_sub(self, variable: Variable, value: PyTree) -> Variable:
        """Subtract a value from a variable; it is reduced as by `assign`."""
        return self._assign(variable, value, operator.sub)

    def _assign(
        self, variable: Variable, value: PyTree, combine: Callable[..., jax.Array]
    ) -> Variable:
        count = self.num_towers
        return assign_in_tower(self.reduce, count, variable, value, combine)


def _check_meeting(axes: TowerAxes, method: str, values: PyTree = None) -> None:
    """Raise if towers cannot communicate here, or if ``values`` are of all towers."""
    if axes.in_turn:
        raise ValueError(
            f"{method} needs all towers at once, but tower_loop='scan' runs the towers"
            " of a device one after another. Use tower_loop='vmap', or return the value"
            " as tj.Weighted. If the loss needs a value of all rows, compute it in an"
            " earlier pass of tj.build_step. Results of call_for_each_tower are reduced"
            " by strategy.reduce."
        )
    if parts_of(PerTower, values):
        raise ValueError(
            f"{method} got a PerTower, which already holds all towers' values. In a"
            " merge function write strategy.reduce(tj.Reduction.MEAN, value), or"
            " strategy.unwrap(value)."
        )


def _require_step(value: Any, name: str, instead: str) -> Any:
    if value is None:
        raise ValueError(
            f"tower.{name} exists only in a step: call_for_each_tower has no batch, no"
            f" step number and no key of its own. Pass {instead} as an argument."
        )
    return value


def is_in_step(tower: Tower) -> bool:
    """Return whether the tower has a step's batch, and so ``weight`` and ``rows``."""
    return tower._context.num_valid is not None


def context_args(tower: Tower) -> tuple[TowerAxes, dict[str, Any]]:
    """Take what `tower_of` needs to copy this tower: axes and arguments."""
    context = tower._context
    return context.axes, {
        "tower_id": tower.id,
        "num_valid": context.num_valid,
        "first_row": jnp.int32(context.first_row),
        "micro_batch": context.micro_batch,
    }


def tower_of(
    strategy: StrategyFields,
    axes: TowerAxes,
    tower_id: jax.Array,
    state: Any = None,
    *,
    local: PyTree = None,
    micro_batches: int = 1,
    **context: Any,
) -> Tower:
    """Make the `Tower` for a tower function; ``state`` is None outside a step."""
    if state is not None:
        context |= {"step": state.step, "rng": state.rng}
    extra = getattr(state, "extra", None)
    pass_context = PassContext(axes, **context)
    return Tower(
        tower_id,
        axes.num_towers,
        local,
        strategy,
        extra,
        pass_context,
        micro_batches=micro_batches,
    )


def inputs_in_tower(state: Any, rows: PyTree, tower: Tower) -> tuple[Any, PyTree]:
    """Split what a tower function reads into replicated and per-tower values.

    ``state`` is a `TrainState`.
    """
    _, context = context_args(tower)
    return dataclasses.replace(state, local=None), (state.local, rows, context)


def trace_in_tower(
    fn: Callable[[Any, PyTree, Tower], PyTree],
    state: Any,
    rows: PyTree,
    tower: Tower,
    *,
    shows_state: bool,
) -> tuple[ClosedJaxpr, PyTree]:
    """Trace a call of ``fn(state, rows, tower)``, and return its program and results.

    The program's inputs are the leaves of `inputs_in_tower`, of which only shapes are
    read. Without ``shows_state`` the tower has no step number, no key and no local
    variables.
    """
    axes, _ = context_args(tower)

    def of_inputs(replicated: Any, per_tower: PyTree) -> PyTree:
        local, rows, context = per_tower
        state = dataclasses.replace(replicated, local=local)
        context = {**context, "rows": tower.rows}
        if shows_state:
            context |= {"state": state, "local": plain(local)}
        with in_tower_fn():
            return fn(state, rows, tower_of(tower.strategy, axes, **context))

    shapes = shapes_of(inputs_in_tower(state, rows, tower))
    trace = jax.make_jaxpr(of_inputs, axis_env=axes_in_tower(axes), return_shape=True)
    return trace(*shapes)


def tower_axis(tower: Tower) -> str:
    """Return the name of the axis of all towers."""
    axes, _ = context_args(tower)
    return axes.tower_axis
