"""How are several steps of one's own run in one program? run_steps_on_dataset."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.reduce import check_reduction
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import row_weights, rows_of_towers, with_shared
from towerjax.mesh.placement import Placement, place
from towerjax.towers.executors import is_inside_tower
from towerjax.towers.tower import Tower
from towerjax.towers.variables import is_per_tower
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.leaves import changes, listed
from towerjax.types.options import check_whole


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """Values that are no arrays, handed out of a trace: a node without leaves."""

    values: dict[str, Any]


class MultiStepContext:
    """What a step function of ``run_steps_on_dataset`` may say, and what came of it.

    Attributes:
      strategy: The strategy that runs the steps.
      weight: ``PerTower`` ``[T, b]`` float32, inside a step: 1 where a tower's row is
        an example and 0 where it is padding.
      last_step_outputs: Name -> what the last step set; a ``PerTower`` where it was
        set without a reduction.
      non_tensor_outputs: Name -> what was set while the steps were traced.
      final: After the run: what the last step returned.
      iterations: After the run: how many steps were done.
    """

    def __init__(self, strategy: Any, weight: PerTower | None = None) -> None:
        self.strategy, self.weight = strategy, weight
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.final: PyTree = None
        self.iterations = 0
        self._tower: Tower | None = None
        self._of_towers: dict[str, Any] = {}

    def call_for_each_tower(
        self, fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """The strategy's own, in which a tower may set outputs of this context.

        Args:
          fn: The tower function.
          *args: As for ``strategy.call_for_each_tower``.
          **kwargs: As ``args``.

        Returns:
          ``fn``'s tree.
        """

        def tower_fn(tower: Tower, *args: PyTree, **kwargs: PyTree) -> PyTree:
            self._tower, self._of_towers = tower, {}
            try:
                return fn(tower, *args, **kwargs), self._of_towers
            finally:
                self._tower = None

        out, of_towers = self.strategy.call_for_each_tower(tower_fn, *args, **kwargs)
        self.last_step_outputs |= of_towers
        return out

    def set_last_step_output(
        self, name: str, output: PyTree, reduction: Reduction = Reduction.NONE
    ) -> None:
        """Hand out a value of the last step; setting it again overwrites it.

        Args:
          name: Its name in ``last_step_outputs``.
          output: In a step, a ``PerTower`` or a value that all towers share; in a
            tower function under ``call_for_each_tower``, the tower's own value.
          reduction: How the towers' values become one; NONE hands them out as they
            are, which a tower function cannot.

        Raises:
          ValueError: NONE in a tower function, or one of the strategy's own call.
        """
        if self._tower is None:
            if is_inside_tower():
                raise ValueError(
                    f"set_last_step_output({name!r}) in a tower function that"
                    " strategy.call_for_each_tower runs. Call the function with"
                    " ctx.call_for_each_tower, or set what it returns."
                )
            if reduction is not Reduction.NONE:
                output = self.strategy.reduce(reduction, output)
            self.last_step_outputs[name] = output
            return
        if reduction is Reduction.NONE:
            raise ValueError(
                f"set_last_step_output({name!r}) in a tower function needs a reduction"
                " that makes one value of the towers'. Give SUM, MEAN or"
                " ONLY_FIRST_TOWER, or return the value and set it in the step."
            )
        check_reduction(reduction)
        self._of_towers[name] = self._tower.reduce(reduction, output)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Hand out something that is no array; noted while the steps are traced.

        Args:
          name: Its name in ``non_tensor_outputs``.
          output: Anything. From a tower function it arrives as a list with one
            entry, since all towers are one trace.
        """
        inside = self._tower is not None
        self.non_tensor_outputs[name] = [output] if inside else output


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Which steps, of which towers: the key by which JAX knows the program again."""

    strategy: Any
    fn: Callable[..., PyTree]
    bare: bool


@functools.partial(jax.jit, static_argnums=0)
def _run(
    steps: _Steps, carry: PyTree, arrays: list[PyTree], count: Any
) -> tuple[PyTree, dict[str, Any], _Kept]:
    """The carry after ``count`` steps, the last one's outputs, and what is no array."""
    num_towers, kept = steps.strategy.num_towers, _Kept({})
    batches, num_valid, shared = arrays

    def one(i: Any, carry: PyTree) -> tuple[PyTree, dict[str, Any]]:
        def of_towers(x: jax.Array) -> PerTower:
            x = x[i]
            return PerTower(x if steps.bare else rows_of_towers(x, num_towers))

        rows = jax.tree.leaves(batches)[0].shape[1] // num_towers
        weight = row_weights(num_valid[i][:, None], 0, rows)
        ctx = MultiStepContext(steps.strategy, PerTower(weight))
        batch = jax.tree.map(of_towers, batches)
        batch = with_shared(batch, jax.tree.map(lambda x: x[i], shared))
        inputs = batch if isinstance(batch, tuple) else (batch,)
        carry = _like(carry, steps.fn(ctx, carry, *inputs))
        kept.values.update(ctx.non_tensor_outputs)
        return carry, ctx.last_step_outputs

    shapes = jax.eval_shape(one, 0, carry)[1]
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    carry, outputs = lax.fori_loop(
        0, count, lambda i, done: one(i, done[0]), (carry, empty)
    )
    # As it was placed, so that the next call is no other program.
    placement: Placement = steps.strategy.placement
    shardings = jax.tree.map(placement.sharding, _layouts(carry))
    return lax.with_sharding_constraint(carry, shardings), outputs, kept


def _layouts(tree: PyTree) -> PyTree:
    """Where each array lies: a value that each tower has of its own is split."""

    def layout(node: Any) -> PyTree:
        one = Layout.PER_TOWER if is_per_tower(node) else Layout.MIRRORED
        return jax.tree.map(lambda _: one, node)

    return jax.tree.map(layout, tree, is_leaf=is_per_tower)


def _placed(tree: PyTree, placement: Placement) -> PyTree:
    def one(layout: Layout, x: Any) -> Any:
        sharding = placement.sharding(layout)
        there = isinstance(x, jax.Array) and x.committed and x.sharding == sharding
        return x if there else place(x, placement, layout)

    return jax.tree.map(one, _layouts(tree), tree)


def _like(before: PyTree, after: PyTree) -> PyTree:
    """What a step returned, once the next step can take it."""
    if found := changes("initial", before, after):
        raise ValueError(
            "run_steps_on_dataset: a step returns what the next one takes, of the same"
            f" tree, shapes and dtypes as initial, but {listed(found)}."
        )
    return jax.tree.map(jnp.asarray, after)


def run_steps(
    strategy: Any,
    fn: Callable[..., PyTree],
    iterator: Iterator[PlacedBatch],
    iterations: int,
    initial: PyTree,
) -> MultiStepContext:
    """Several steps of a function of one's own, in one program."""
    check_whole("iterations", iterations, 1)
    batches = list(itertools.islice(_checked(iterator), iterations))
    if any(batch.num_steps is not None for batch in batches):
        raise ValueError(
            "run_steps_on_dataset takes batches of one step each; the iterator gave"
            " several stacked ones. Write iter(strategy.distribute_dataset(...))."
        )
    if not batches:
        raise ValueError(
            "run_steps_on_dataset: the iterator has no batch left. Make it anew with"
            " iter(strategy.distribute_dataset(...))."
        )
    placement: Placement = strategy.placement
    placer = Placer(placement, shares=strategy.num_towers, remainder="error")
    *arrays, count = placer.place_several(batches, iterations).args
    carry = _placed(initial, placement)
    steps = _Steps(strategy, fn, batches[0].bare)
    carry, outputs, kept = _run(steps, carry, arrays, count)
    ctx = MultiStepContext(strategy)
    ctx.final, ctx.last_step_outputs = jax.block_until_ready((carry, outputs))
    ctx.non_tensor_outputs = dict(kept.values)
    ctx.iterations = len(batches)
    return ctx


def _checked(iterator: Any) -> Iterable[PlacedBatch]:
    if not isinstance(iterator, Iterator):
        raise ValueError(
            f"run_steps_on_dataset takes an iterator, so that the next call goes on"
            f" where this one ends, but got a {type(iterator).__name__}. Write"
            " iterator = iter(strategy.distribute_dataset(...)) before the loop."
        )
    for batch in iterator:
        if not isinstance(batch, PlacedBatch):
            raise ValueError(
                f"run_steps_on_dataset takes placed batches, but the iterator gave a"
                f" {type(batch).__name__}. Write"
                " iter(strategy.distribute_dataset(...))."
            )
        yield batch
