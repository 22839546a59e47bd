"""Several steps of a function on a data set, in one program."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import towerjax as tj
from towerjax.data.placer import PlacedBatch, split_over_towers
from towerjax.tf1.call import call_for_each_tower, is_in_call
from towerjax.tf1.values import AnyStrategy
from towerjax.towers.on_towers import TracedCall, run_traced
from towerjax.towers.values import stack_towers
from towerjax.towers.variables import layouts_by_type, place_by_type
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.options import check_callable, check_takes, check_whole
from towerjax.types.refusals import a_type, check_like, problem_of, shown
from towerjax.types.trees import has_tracers, map_parts


@dataclasses.dataclass(eq=False)
class MultiStepContext:
    """The context of a step function of ``run_steps_on_dataset``, and its outputs.

    Attributes:
      strategy: The strategy that runs the steps.
      weight: The rows' weights, inside a step, as ``PerTower`` ``[T, b]`` float32: 1
        for an example, 0 for padding.
      last_step_outputs: The outputs that the last step set, by name; a ``PerTower`` if
        it was set without a reduction.
      non_tensor_outputs: The outputs that were set while the steps were traced, by
        name.
      final: The result of the last step, after the run.
      iterations: The number of steps done, after the run.
    """

    strategy: AnyStrategy
    weight: PerTower | None = None
    last_step_outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    non_tensor_outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    final: PyTree = None
    iterations: int = 0
    # The outputs that the running tower function has set; None while none runs.
    _of_towers: dict[str, Any] | None = None

    def call_for_each_tower(
        self, fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Call ``fn`` for each tower, like the strategy's method of this name.

        In addition ``fn`` may call `set_last_step_output` of this object.
        """
        reductions = {}

        def tower_fn(tower: tj.Tower, *args: PyTree, **kwargs: PyTree) -> PyTree:
            self._of_towers = {}
            out = fn(tower, *args, **kwargs)
            of_towers = self._of_towers
            self._of_towers = None
            reductions.update({name: x for name, (x, _) in of_towers.items()})
            return out, {name: x for name, (_, x) in of_towers.items()}

        out, per_tower = call_for_each_tower(self.strategy, tower_fn, *args, **kwargs)
        for name, reduction in reductions.items():
            self.set_last_step_output(name, per_tower[name], reduction)
        return out

    def set_last_step_output(
        self, name: str, output: PyTree, reduction: Reduction = Reduction.NONE
    ) -> None:
        """Set an output of the last step; setting it again overwrites it.

        In a step, the value is a ``PerTower`` or replicated. In a tower function under
        ``call_for_each_tower`` it is the tower's own value. It then needs a
        ``reduction``, because NONE keeps the towers' values apart.
        """
        if self._of_towers is not None:
            if reduction is Reduction.NONE:
                raise ValueError(
                    f"set_last_step_output({name!r}) in a tower function needs the"
                    " reduction SUM, MEAN or ONLY_FIRST_TOWER. Give one, or return the"
                    " value and set it later."
                )
            self._of_towers[name] = reduction, output
            return
        if is_in_call():
            raise ValueError(
                f"set_last_step_output({name!r}) cannot be called in a tower function"
                " that strategy.call_for_each_tower runs. Call the function with"
                " ctx.call_for_each_tower, or set its result."
            )
        if reduction is not Reduction.NONE:
            output = self.strategy.reduce(reduction, output)
        if wrong := [x for x in jax.tree.leaves(output) if problem_of(x)]:
            raise ValueError(
                f"set_last_step_output({name!r}) got {shown(wrong[0])}, which is not an"
                f" array. Write set_non_tensor_output({name!r}, ...)."
            )
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set an output that is not an array, while the steps are traced.

        A tower function is traced once for all towers. So an output that it sets
        becomes a list with one entry.
        """
        if has_tracers(output):
            raise ValueError(
                f"set_non_tensor_output({name!r}) got an array that the steps compute,"
                f" which has no value yet. Write set_last_step_output({name!r}, ...)."
            )
        inside = self._of_towers is not None
        self.non_tensor_outputs[name] = [output] if inside else output


# The static argument of the cache: the strategy, the step function, and whether batches
# are bare (single examples per tower).
_Steps: TypeAlias = tuple[AnyStrategy, Callable[..., PyTree], bool]


@functools.partial(jax.jit, static_argnums=0)
def _run_steps(
    steps: _Steps, carry: PyTree, arrays: tuple[PyTree, ...], count: Any
) -> tuple[PyTree, dict[str, Any], TracedCall]:
    """Run ``count`` steps in one program.

    Returns the carry, the outputs of the last step, and the outputs that are not
    arrays.
    """
    strategy, fn, bare = steps
    num_towers = strategy.num_towers
    values = {}

    def step(i: Any, carry: PyTree) -> tuple[PyTree, dict[str, Any]]:
        args = jax.tree.map(lambda x: x[i], arrays)
        batch, weight = split_over_towers(args, num_towers, bare=bare)
        ctx = MultiStepContext(strategy, weight)
        inputs = batch if isinstance(batch, tuple) else (batch,)
        check_takes("fn(ctx, carry, *inputs)", fn, ctx, carry, *inputs)
        after = _stack_own(fn(ctx, carry, *inputs), num_towers)
        fault = (
            "run_steps_on_dataset: a step returned a carry of another type than it was"
            " given"
        )
        advice = "Return a carry with the tree, shapes and dtypes of initial."
        check_like("initial", after, carry, fault, advice)
        values.update(ctx.non_tensor_outputs)
        return jax.tree.map(jnp.asarray, after), ctx.last_step_outputs

    jaxpr, shapes = jax.make_jaxpr(step, return_shape=True)(0, carry)
    call_kept = TracedCall.of(values, steps, jaxpr)
    first = carry, jax.tree.map(jnp.zeros_like, shapes[1])
    carry, outputs = lax.fori_loop(0, count, lambda i, done: step(i, done[0]), first)
    # The carry leaves in the layout in which it came, so that the next call uses the
    # same program.
    shardings = strategy.placement.shardings(layouts_by_type(carry), carry)
    return lax.with_sharding_constraint(carry, shardings), outputs, call_kept


@functools.partial(jax.jit, static_argnames="strategy")
def _stack(batches: Sequence[Any], *, strategy: AnyStrategy) -> tuple[PyTree, ...]:
    """Stack the same parts of several batches to ``[steps, ...]``, on their devices."""
    layouts = Layout.PER_TOWER_STEPS, Layout.PER_TOWER_STEPS, Layout.MIRRORED
    parts = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    shardings = tuple(map(strategy.placement.sharding, layouts))
    return lax.with_sharding_constraint(parts, shardings)


def _stack_own(carry: PyTree, num_towers: int) -> PyTree:
    """Stack each ``PerTower`` of the carry to leaves ``[T, ...]``."""

    def stack(x: PerTower) -> PerTower:
        return PerTower(stack_towers(x, num_towers, "a PerTower of the carry"))

    return map_parts(PerTower, stack, carry)


def _on_devices(strategy: AnyStrategy, carry: PyTree) -> PyTree:
    """Place the carry on the strategy's devices, unless it lies there."""
    shardings = strategy.placement.shardings(layouts_by_type(carry), carry)

    def is_there(x: Any, sharding: Any) -> bool:
        return isinstance(x, jax.Array) and x.committed and x.sharding == sharding

    there = jax.tree.map(is_there, carry, shardings)
    if all(jax.tree.leaves(there)):
        return carry
    return place_by_type(carry, strategy.placement)


def run_steps_on_dataset(
    self: AnyStrategy,
    fn: Callable[..., PyTree],
    iterator: Iterator[PlacedBatch],
    iterations: int = 1,
    initial: PyTree = None,
) -> MultiStepContext:
    """Run several steps of a function in one program; return their `MultiStepContext`.

    ``fn(ctx, carry, *inputs) -> carry`` sees all towers' rows. ``iterator`` is
    ``iter(strategy.distribute_dataset(...))``, from which ``iterations`` batches are
    taken. ``initial`` is the carry of the first step.

    Example:
      >>> import jax.numpy as jnp, numpy as np, towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(devices=("cpu:0",), towers=2)
      >>> def step(ctx, total, x):
      ...     sums = ctx.call_for_each_tower(lambda tower, x: x.sum(), x)
      ...     ctx.set_last_step_output("sum", sums, tj.Reduction.SUM)
      ...     return total + strategy.reduce(tj.Reduction.SUM, sums)
      >>> data = iter(strategy.distribute_dataset([np.arange(4.0), np.ones(4)]))
      >>> ctx = strategy.run_steps_on_dataset(step, data, 2, jnp.float32(0))
      >>> float(ctx.final), float(ctx.last_step_outputs["sum"])
      (10.0, 4.0)
    """
    check_callable("fn", fn, "fn(ctx, carry, *inputs)")
    check_whole("iterations", iterations, 1)
    batches = [iterator]
    if isinstance(iterator, Iterator):
        batches = list(itertools.islice(iterator, iterations))
    if wrong := [x for x in batches if not isinstance(x, PlacedBatch)]:
        raise ValueError(
            "run_steps_on_dataset needs an iterator of placed batches, so that the next"
            f" call continues where this one ends, but got {a_type(wrong[0])}. Write"
            " iterator = iter(strategy.distribute_dataset(...)) before the loop."
        )
    if not batches:
        raise ValueError(
            "run_steps_on_dataset: the iterator has no batch left. Make a new one,"
            " iter(strategy.distribute_dataset(...))."
        )
    for batch in batches:
        batch.check_placement(self.placement)
    for batch in batches:
        batch.check_like(batches[0])
    filled = batches + batches[-1:] * (iterations - len(batches))
    arrays = _stack([batch.args for batch in filled], strategy=self)
    count = place_by_type(np.int32(len(batches)), self.placement)
    carry = _on_devices(self, _stack_own(initial, self.num_towers))
    carry, outputs, values = run_traced(
        _run_steps, self.placement, (self, fn, batches[0].bare), carry, arrays, count
    )
    ctx = MultiStepContext(self)
    ctx.final, ctx.last_step_outputs = jax.block_until_ready((carry, outputs))
    ctx.non_tensor_outputs = dict(values)
    ctx.iterations = len(batches)
    return ctx
