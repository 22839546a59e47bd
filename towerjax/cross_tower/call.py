"""What does a function return on every tower? Traced for all, proved, compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.analysis import analyse, body_of_shard_map
from towerjax.cross_tower.values import as_per_tower, is_per_tower
from towerjax.executors import (
    jit_on_devices,
    over_devices,
    over_local_towers,
    trace_one_tower,
)
from towerjax.merge import is_mergeable, stacked_rows
from towerjax.placement import Placement, TowerAxes, place
from towerjax.proof import prove_mirrored
from towerjax.tower import Tower, TowerInputs
from towerjax.types import Layout, PerTower, PyTree


class _TowerCall:
    """One call of a function on every tower: what it is given and what it returned.

    Values that are no arrays do not pass through JAX: they are kept beside.
    """

    def __init__(self, strategy: Any, fn: Callable[..., PyTree], args: PyTree) -> None:
        self.strategy, self.fn = strategy, fn
        leaves, self.treedef = jax.tree.flatten(args, is_leaf=is_per_tower)
        self.kinds = [
            "rows" if is_per_tower(x) else "array" if is_mergeable(x) else "constant"
            for x in leaves
        ]
        self.constants = [
            x for x, kind in zip(leaves, self.kinds, strict=True) if kind == "constant"
        ]
        # pmap wants at least one argument of the towers' own: the first, not used.
        self.rows = [jnp.arange(strategy.num_towers)]
        self.rows += [
            stacked_rows(as_per_tower(x), strategy.num_towers, "A PerTower argument")
            for x in leaves
            if is_per_tower(x)
        ]
        self.arrays = [jnp.asarray(x) for x in leaves if is_mergeable(x)]
        self.out_treedef: Any = None
        self.out_constants: list[Any] = []

    def device_fn(self, axes: TowerAxes, rows: list[Any], arrays: list[Any]) -> Any:
        """All towers of a device: the array outputs, leaves ``[k, ...]``."""
        none = jnp.int32(0)
        inputs = TowerInputs(self.strategy, axes, none, jax.random.key(0))

        def tower_fn(tower_id: jax.Array, row: list[Any]) -> tuple[PyTree, PyTree]:
            tower = inputs.tower(tower_id, None, none, 0)
            return (), self._call(tower, row[1:], arrays)

        return over_local_towers(tower_fn, axes, rows, stack_sums=False)[1]

    def _call(self, tower: Tower, rows: list[Any], arrays: list[Any]) -> list[Any]:
        pools = {
            "rows": iter(rows),
            "array": iter(arrays),
            "constant": iter(self.constants),
        }
        leaves = [next(pools[kind]) for kind in self.kinds]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        out = self.fn(tower, *args, **kwargs)
        leaves, self.out_treedef = jax.tree.flatten(out)
        traced = [is_mergeable(x) for x in leaves]
        self.out_constants = [
            None if t else (x,) for t, x in zip(traced, leaves, strict=True)
        ]
        return [x for t, x in zip(traced, leaves, strict=True) if t]

    def result(self, arrays: list[Any]) -> PyTree:
        """The function's own tree of results."""
        pool = iter(arrays)
        leaves = [next(pool) if c is None else c[0] for c in self.out_constants]
        return jax.tree.unflatten(self.out_treedef, leaves)


def call_for_each_tower(
    strategy: Any, fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """What ``fn(tower, *args, **kwargs)`` returns on every tower.

    Compiles at each call: for looking at towers and for tests, not for a loop.

    Args:
      strategy: Which towers, where.
      fn: The tower function; may use ``tower.merge_call`` and the like.
      *args: Each ``PerTower`` leaf is replaced by the tower's own row; other
        leaves are the same on all towers.
      **kwargs: As ``args``.

    Returns:
      ``fn``'s tree. An array that is the same on every tower, by proof, is
      returned bare; another as ``PerTower``; what is no array as it is.

    Raises:
      ValueError: A ``PerTower`` argument has another number of rows than there
        are towers; a collective stands where not every tower would reach it.
    """
    placement: Placement = strategy.placement
    call = _TowerCall(strategy, fn, (args, kwargs))
    in_layouts = (Layout.PER_TOWER, Layout.MIRRORED)
    values = (call.rows, call.arrays)

    def on(axes: TowerAxes, mirrored: list[bool]) -> Callable[..., Any]:
        def device_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
            out = call.device_fn(axes, rows, arrays)
            return [x[0] if m else x for x, m in zip(out, mirrored, strict=True)]

        return device_fn

    def trace_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
        return call.device_fn(placement.abstract_axes, rows, arrays)

    jaxpr, _ = trace_one_tower(
        trace_fn, placement.abstract_axes, in_layouts, Layout.PER_TOWER, values
    )
    body, per_tower = body_of_shard_map(jaxpr), len(jax.tree.leaves(call.rows))
    # Arrays that the function closes over come first, the same on all towers.
    closed_over = len(body.invars) - per_tower - len(call.arrays)
    names = [None] * closed_over + ["argument"] * per_tower + [None] * len(call.arrays)
    found = analyse(body, names, placement.abstract_axes.names)
    prove_mirrored(found, [None] * len(found.outputs))
    mirrored = [dependence is None for dependence in found.outputs]
    out_layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in mirrored]
    global_fn = over_devices(
        on(placement.axes, mirrored), placement, in_layouts, out_layouts
    )
    run = jit_on_devices(global_fn, placement, in_layouts, out_layouts, donate=False)
    out = run(*place(values, placement, in_layouts))
    return call.result(
        [x if m else PerTower(x) for x, m in zip(out, mirrored, strict=True)]
    )
