"""A strategy's processes, its data sets, and several steps in one program."""

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
from towerjax.data.shard import Remainder, row_weights, split_rows, with_shared
from towerjax.mesh.cluster.start import initialize
from towerjax.mesh.placement import Placement, place
from towerjax.towers.cross_tower.methods import CrossTowerMethods
from towerjax.towers.executors import (
    TracedCall,
    closed_over_kinds,
    is_inside_tower,
    run_traced,
)
from towerjax.towers.merge import stack_towers
from towerjax.towers.tower import Tower
from towerjax.towers.tower_local import layouts_of
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
@dataclasses.dataclass(eq=False)
class _StaticOutputs(TracedCall):
    """Values that are no arrays, as a trace's output: a pytree node without leaves."""

    values: dict[str, Any]


class MultiStepContext:
    """The context of a step function of ``run_steps_on_dataset``, and its outputs.

    Attributes:
      strategy: The strategy that runs the steps.
      weight: ``PerTower`` ``[T, b]`` float32, inside a step: 1 where a tower's row is
        an example and 0 where it is padding.
      last_step_outputs: Name -> what the last step set; a ``PerTower`` where it was
        set without a reduction.
      non_tensor_outputs: Name -> what was set while the steps were traced.
      final: After the run: what the last step returned.
      iterations: After the run: the number of steps done.
    """

    def __init__(
        self, strategy: CrossTowerMethods, weight: PerTower | None = None
    ) -> None:
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
        """As the strategy's, but a tower function may set outputs of this context."""

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
        """Output a value of the last step; setting it again overwrites it.

        Args:
          name: Its name in ``last_step_outputs``.
          output: In a step, a ``PerTower`` or a value that all towers share; in a
            tower function under ``call_for_each_tower``, the tower's own value.
          reduction: How the towers' values become one; NONE keeps them apart, which a
            tower function cannot.

        Raises:
          ValueError: NONE in a tower function; the strategy, and not this context,
            called the tower function; the output is no array.
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
        """Output something that is no array; recorded while the steps are traced.

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
    """The key of the jit cache: a step function and its strategy."""

    strategy: CrossTowerMethods
    fn: Callable[..., PyTree]
    bare: bool


@functools.partial(jax.jit, static_argnums=0)
def _run_steps(
    steps: _Steps, carry: PyTree, arrays: list[PyTree], count: Any
) -> tuple[PyTree, dict[str, Any], _StaticOutputs]:
    """Run ``count`` steps: the carry, the last step's outputs, and other outputs."""
    num_towers, values = steps.strategy.num_towers, {}
    batches, num_valid, shared = arrays

    def one(i: Any, carry: PyTree) -> tuple[PyTree, dict[str, Any]]:
        def of_towers(x: jax.Array) -> PerTower:
            x = x[i]
            return PerTower(x if steps.bare else split_rows(x, num_towers))

        rows = jax.tree.leaves(batches)[0].shape[1] // num_towers
        weight = row_weights(num_valid[i][:, None], 0, rows)
        ctx = MultiStepContext(steps.strategy, PerTower(weight))
        batch = jax.tree.map(of_towers, batches)
        batch = with_shared(batch, jax.tree.map(lambda x: x[i], shared))
        inputs = batch if isinstance(batch, tuple) else (batch,)
        check_takes("fn(ctx, carry, *inputs)", steps.fn, ctx, carry, *inputs)
        carry = _fit_carry(carry, _stack_own(steps.fn(ctx, carry, *inputs), num_towers))
        values.update(ctx.non_tensor_outputs)
        return carry, ctx.last_step_outputs

    jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(0, carry)
    kept = _StaticOutputs(steps, closed_over_kinds(jaxpr), values)
    empty = jax.tree.map(jnp.zeros_like, shapes[1])
    carry, outputs = lax.fori_loop(
        0, count, lambda i, done: one(i, done[0]), (carry, empty)
    )
    # Placed as before, so that the next call needs no other program.
    layouts = layouts_of(carry, is_per_tower)
    shardings = steps.strategy.placement.shardings(layouts, carry)
    return lax.with_sharding_constraint(carry, shardings), outputs, kept


def _stack_own(carry: PyTree, num_towers: int) -> PyTree:
    """Stack each ``PerTower`` of the carry to leaves ``[T, ...]``."""

    def stack(x: PerTower) -> PerTower:
        return PerTower(stack_towers(x, num_towers, "A PerTower of the carry"))

    return map_parts(PerTower, stack, carry)


def _place_carry(tree: PyTree, placement: Placement) -> PyTree:
    def one(layout: Layout, x: Any) -> Any:
        sharding = placement.sharding(layout)
        there = isinstance(x, jax.Array) and x.committed and x.sharding == sharding
        return x if there else place(x, placement, layout)

    layouts = jax.tree.broadcast(layouts_of(tree, is_per_tower), tree)
    return jax.tree.map(one, layouts, tree)


def _fit_carry(before: PyTree, after: PyTree) -> PyTree:
    """Raise unless the next step can take what a step returned."""
    if found := changes("initial", before, after):
        raise ValueError(
            "run_steps_on_dataset: a step returns what the next one takes, of the same"
            f" tree, shapes and dtypes as initial, but {listed(found)}."
        )
    return jax.tree.map(jnp.asarray, after)


def _placed_batches(iterator: Any) -> Iterable[PlacedBatch]:
    if not isinstance(iterator, Iterator):
        raise ValueError(
            f"run_steps_on_dataset takes an iterator, so that the next call continues"
            f" where this one ends, but got a {type(iterator).__name__}. Write"
            " iterator = iter(strategy.distribute_dataset(...)) before the loop."
        )
    for batch in iterator:
        if not isinstance(batch, PlacedBatch):
            raise ValueError(
                f"run_steps_on_dataset takes placed batches, but the iterator gave a "
                f"{type(batch).__name__}. Write iter(strategy.distribute_dataset(...))."
            )
        yield batch


class StrategyMethods(CrossTowerMethods):
    """All methods of every strategy: here those for processes and their input."""

    @property
    def between_graph(self) -> bool:
        """Whether each of several processes builds and runs the program."""
        return self.placement.num_processes > 1

    @property
    def should_init(self) -> bool:
        """Whether all processes start with this one's initial values: the first."""
        return jax.process_index() == 0

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes what the job writes once: the first."""
        return jax.process_index() == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries for all: the first."""
        return jax.process_index() == 0

    def configure(
        self,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> Self:
        """Join a job of several processes, and return this strategy for it.

        The same as ``tj.cluster.initialize(cluster_spec=...)`` before the strategy is
        used. Nothing else changes: the strategy still has its cross-tower op.

        Args:
          cluster_spec: ``{"chief": [...], "worker": ["host:port", ...]}``; None reads
            the environment.
          task_type: ``"chief"`` or ``"worker"``: the list that names this process.
          task_id: Its index there, from 0.

        Returns:
          An equal strategy, of all the processes' devices.

        Raises:
          ValueError: The cluster is wrong or incomplete.
          RuntimeError: JAX was used before.
        """
        initialize(cluster_spec=cluster_spec, task_type=task_type, task_id=task_id)
        return copy.copy(self)  # without the cached placement

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
          source: An iterable of batches or a loader (Grain, ``tf.data``, PyTorch), or a
            function of no arguments that returns one: each of several processes reads
            all of it, and places its own towers' part. A function of one argument, an
            `InputContext`, returns the process's own part.
          split: ``"batch"``: an element is a global batch and is split over the
            towers. ``"elements"``: each tower gets an element of its own, so that a
            step takes ``T`` of them (what ``MirroredStrategy`` did).
          remainder: What happens where towers cannot share rows evenly, and where
            elements or processes run out: ``"pad"`` with rows of weight 0, ``"drop"``
            or ``"error"``.
          micro_batches: That of the step, which must divide a tower's rows too.

        Returns:
          A `DistributedDataset`.

        Raises:
          ValueError: ``source`` cannot be iterated, or an option is wrong.

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
        """Run several steps of a function in one program.

        Args:
          fn: ``(ctx, carry, *inputs) -> carry``, in cross-tower view.
          iterator: ``iter(strategy.distribute_dataset(...))``.
          iterations: ``K``, the number of batches to take.
          initial: The carry of the first step, or None.

        Returns:
          A `MultiStepContext`.

        Raises:
          ValueError: No iterator of placed batches, or ``fn`` changes the carry's type.

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
        batches = list(itertools.islice(_placed_batches(iterator), iterations))
        if not batches:
            raise ValueError(
                "run_steps_on_dataset: the iterator has no batch left. Make it anew,"
                " iter(strategy.distribute_dataset(...))."
            )
        towers = self.placement.num_towers
        placer = Placer(self.placement, remainder="error")
        *arrays, count = placer.place_several(batches, iterations).args
        carry = _place_carry(_stack_own(initial, towers), self.placement)
        given = self.placement, _Steps(self, fn, batches[0].bare), carry, arrays, count
        carry, outputs, kept = run_traced(_run_steps, *given)
        ctx = MultiStepContext(self)
        ctx.final, ctx.last_step_outputs = jax.block_until_ready((carry, outputs))
        ctx.non_tensor_outputs = dict(kept.values)
        ctx.iterations = len(batches)
        return ctx
