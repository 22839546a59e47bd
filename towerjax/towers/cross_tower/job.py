"""What does a strategy know of its job: its processes, their input, several steps?"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import Remainder, row_weights, rows_of_towers, with_shared
from towerjax.mesh.cluster.start import initialize
from towerjax.mesh.placement import Placement, place
from towerjax.towers.executors import Traced, closed_over, is_inside_tower
from towerjax.towers.merge import stacked_rows
from towerjax.towers.tower import Tower
from towerjax.towers.variables import is_per_tower
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.leaves import (
    changes,
    has_tracers,
    listed,
    map_parts,
    problem_of,
    shown,
)
from towerjax.types.options import check_takes, check_whole


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Kept(Traced):
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
        """The strategy's own, in which a tower may set outputs of this context."""

        def tower_fn(tower: Tower, *args: PyTree, **kwargs: PyTree) -> PyTree:
            self._tower, self._of_towers = tower, {}
            try:
                out = fn(tower, *args, **kwargs)
                return out, {name: x for name, (_, x) in self._of_towers.items()}
            finally:
                self._tower = None

        out, own = self.strategy.call_for_each_tower(tower_fn, *args, **kwargs)
        reductions = {name: x for name, (x, _) in self._of_towers.items()}
        self._of_towers = {}
        for name, reduction in reductions.items():
            self.set_last_step_output(name, own[name], reduction)
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
          ValueError: NONE in a tower function, or one of the strategy's own call; the
            output is no array.
        """
        for leaf in jax.tree.leaves(output):
            if problem_of(leaf):
                raise ValueError(
                    f"set_last_step_output({name!r}) got {shown(leaf)}, which a"
                    " compiled step cannot hand out. Write"
                    f" set_non_tensor_output({name!r}, ...)."
                )
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
        self._of_towers[name] = reduction, output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Hand out something that is no array; noted while the steps are traced.

        Args:
          name: Its name in ``non_tensor_outputs``.
          output: Anything. From a tower function it arrives as a list with one
            entry, since all towers are one trace.

        Raises:
          ValueError: An array that the steps compute, which has no value yet.
        """
        if has_tracers(output):
            raise ValueError(
                f"set_non_tensor_output({name!r}) got an array that the steps compute,"
                " which has no value while they are traced. Write"
                f" set_last_step_output({name!r}, ...)."
            )
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
    num_towers, values = steps.strategy.num_towers, {}
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
        check_takes("fn(ctx, carry, *inputs)", steps.fn, ctx, carry, *inputs)
        carry = _like(carry, _stacked(steps.fn(ctx, carry, *inputs), num_towers))
        values.update(ctx.non_tensor_outputs)
        return carry, ctx.last_step_outputs

    jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(0, carry)
    kept = _Kept(steps, closed_over(jaxpr), values)
    empty = jax.tree.map(jnp.zeros_like, shapes[1])
    carry, outputs = lax.fori_loop(
        0, count, lambda i, done: one(i, done[0]), (carry, empty)
    )
    # As it was placed, so that the next call is no other program.
    shardings = jax.tree.map(steps.strategy.placement.sharding, _layouts(carry))
    return lax.with_sharding_constraint(carry, shardings), outputs, kept


def _layouts(tree: PyTree) -> PyTree:
    """Where each array lies: a value that each tower has of its own is split."""

    def layout(node: Any) -> PyTree:
        one = Layout.PER_TOWER if is_per_tower(node) else Layout.MIRRORED
        return jax.tree.map(lambda _: one, node)

    return jax.tree.map(layout, tree, is_leaf=is_per_tower)


def _stacked(carry: PyTree, num_towers: int) -> PyTree:
    """The carry with each tower's values side by side, also where they came apart."""

    def stack(x: PerTower) -> PerTower:
        return PerTower(stacked_rows(x, num_towers, "A PerTower of the carry"))

    return map_parts(PerTower, stack, carry)


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


class JobMethods:
    """What every strategy can say about its processes, and do with their input."""

    placement: Placement
    prefetch_on_device: int

    @property
    def between_graph(self) -> bool:
        """Does each of several processes build and run the program by itself?"""
        return self.placement.num_processes > 1

    @property
    def should_init(self) -> bool:
        """Is this the process whose initial values all start with? The first is."""
        return jax.process_index() == 0

    @property
    def should_checkpoint(self) -> bool:
        """Is this the process that writes what the job writes once?"""
        return jax.process_index() == 0

    @property
    def should_save_summary(self) -> bool:
        """Is this the process that writes summaries for all?"""
        return jax.process_index() == 0

    def configure(
        self,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> Self:
        """This strategy in a job of several processes, which this one joins.

        The same as ``tj.cluster.initialize(cluster_spec=...)`` before the strategy is
        used. Nothing else changes: which cross-tower op is used, the strategy says.

        Args:
          cluster_spec: ``{"chief": [...], "worker": ["host:port", ...]}``; None takes
            what the environment says.
          task_type: ``"chief"`` or ``"worker"``: the list in which this process is.
          task_id: Its place there, from 0.

        Returns:
          An equal strategy, of all the processes' devices.

        Raises:
          ValueError: The cluster is wrong or incomplete; says how.
          RuntimeError: JAX was used before.
        """
        initialize(cluster_spec=cluster_spec, task_type=task_type, task_id=task_id)
        return copy.copy(self)  # without what was looked up before

    def distribute_dataset(
        self,
        source: Any,
        *,
        split: Split = "batch",
        remainder: Remainder = "pad",
        micro_batches: int = 1,
    ) -> DistributedDataset:
        """A data set as placed batches, one a step, for steps and ``tj.run``.

        Order is kept. ``prefetch_on_device`` of them are placed in advance.

        Args:
          source: An iterable of batches or a loader (Grain, ``tf.data``, PyTorch),
            or a function of no arguments that returns one: of several processes each
            goes through it and places its own towers' part. A function of one
            argument, a `InputContext`, returns the process's own part.
          split: ``"batch"``: an element is a global batch and is split over the
            towers. ``"elements"``: each tower gets an element of its own, so that a
            step takes ``T`` of them (what ``MirroredStrategy`` did).
          remainder: What happens where towers cannot share rows evenly, and where
            elements or processes run out: ``"pad"`` with rows of weight 0, ``"drop"``
            or ``"error"``.
          micro_batches: As the step has it: what else must divide a tower's rows.

        Returns:
          A `DistributedDataset`.

        Raises:
          ValueError: ``source`` is nothing to go through, or an option is wrong.

        Example:
          >>> import numpy as np, towerjax as tj
          >>> strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
          >>> batches = [np.arange(4), np.arange(4, 7)]
          >>> for placed in strategy.distribute_dataset(batches):
          ...     print(placed.arrays.tolist(), placed.counts.tolist())
          [0, 1, 2, 3] [2, 2]
          [4, 5, 6, 6] [2, 1]
        """
        options = InputOptions(split, remainder, micro_batches, self.prefetch_on_device)
        return DistributedDataset(self.placement, source, options)

    def run_steps_on_dataset(
        self,
        fn: Callable[..., PyTree],
        iterator: Iterator[PlacedBatch],
        iterations: int = 1,
        initial: PyTree = None,
    ) -> MultiStepContext:
        """Several steps of a function of one's own, in one program.

        Args:
          fn: ``(ctx, carry, *inputs) -> carry``, in cross-tower view.
          iterator: ``iter(strategy.distribute_dataset(...))``.
          iterations: ``K``, how many of its batches to take.
          initial: The carry of the first step, or None.

        Returns:
          A `MultiStepContext`: ``final``, ``last_step_outputs``,
          ``non_tensor_outputs``, ``iterations``.

        Example:
          >>> import jax.numpy as jnp, numpy as np, towerjax as tj
          >>> strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
          >>> def step(ctx, total, x):
          ...     sums = ctx.call_for_each_tower(lambda tower, x: x.sum(), x)
          ...     ctx.set_last_step_output("sum", sums, tj.Reduction.SUM)
          ...     return total + strategy.reduce(tj.Reduction.SUM, sums)
          >>> data = iter(strategy.distribute_dataset([np.arange(4.0), np.ones(4)]))
          >>> ctx = strategy.run_steps_on_dataset(step, data, 2, jnp.float32(0))
          >>> float(ctx.final), float(ctx.last_step_outputs["sum"])
          (10.0, 4.0)
        """
        check_whole("iterations", iterations, 1)
        batches = list(itertools.islice(_checked(iterator), iterations))
        if any(batch.num_steps is not None for batch in batches):
            raise ValueError(
                "run_steps_on_dataset takes batches of one step, and no stacked ones."
                " Write iter(strategy.distribute_dataset(...))."
            )
        if not batches:
            raise ValueError(
                "run_steps_on_dataset: the iterator has no batch left. Make it anew,"
                " iter(strategy.distribute_dataset(...))."
            )
        towers = self.placement.num_towers
        placer = Placer(self.placement, shares=towers, remainder="error")
        *arrays, count = placer.place_several(batches, iterations).args
        carry = _placed(_stacked(initial, towers), self.placement)
        steps = _Steps(self, fn, batches[0].bare)
        carry, outputs, kept = _run(steps, carry, arrays, count)
        kept.refuse_again(steps)
        ctx = MultiStepContext(self)
        ctx.final, ctx.last_step_outputs = jax.block_until_ready((carry, outputs))
        ctx.non_tensor_outputs = dict(kept.values)
        ctx.iterations = len(batches)
        return ctx
