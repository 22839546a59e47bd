"""call_for_each_tower: trace a function for all towers, prove it, and compile it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.placement import (
    DEVICE_AXIS,
    Placement,
    TowerAxes,
    place,
    place_rows,
    wait_on_cpus,
)
from towerjax.proof.analysis import analyse
from towerjax.proof.findings import prove_mirrored, refuse_draws
from towerjax.towers.cross_tower.constant import Constant
from towerjax.towers.cross_tower.values import unpad_batches
from towerjax.towers.executors import (
    TracedCall,
    closed_over_kinds,
    in_tower_fn,
    is_inside_tower,
    over_devices,
    run_traced,
    trace_one_tower,
)
from towerjax.towers.fields import StrategyFields
from towerjax.towers.merge import as_native, is_mergeable, stack_towers
from towerjax.towers.tower import Tower, tower_of
from towerjax.towers.tower_axis import over_local_towers
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, label
from towerjax.types import Layout, PerTower, PyTree, named_leaves
from towerjax.types.leaves import has_tracers, is_traced
from towerjax.types.options import check_takes

_IN_LAYOUTS = (Layout.PER_TOWER, Layout.MIRRORED)
_ASSIGN = """Write tower.assign(v, x), or tower.assign_add, which reduce x as the
variable says; assign in tower.merge_call; or create it with tower_local=True."""
# Kinds of array leaves: a row a tower; free to differ; else a mirrored variable's name.
_ROWS, _FREE = "rows", "free"


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class _Outputs(TracedCall):
    """What a compiled call returns besides arrays; a pytree node without leaves."""

    treedef: Any
    constants: tuple[Any, ...]
    kinds: tuple[str, ...]
    mirrored: tuple[bool, ...]

    def tree(self, arrays: list[Any]) -> PyTree:
        """The function's tree of results, from its arrays."""
        wrapped = iter(
            x if mirrored or kind == _ROWS else PerTower(x)
            for x, mirrored, kind in zip(arrays, self.mirrored, self.kinds, strict=True)
        )
        leaves = [next(wrapped) if c is None else c[0] for c in self.constants]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The key of the jit cache: a function, its placement, its arguments' structure."""

    strategy: StrategyFields
    placement: Placement
    fn: Callable[..., PyTree]
    treedef: Any
    kinds: tuple[str, ...]
    constants: tuple[Constant, ...]

    def device_fn(
        self, axes: TowerAxes, rows: list[Any], arrays: list[Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Run a device's towers: array outputs ``[k, ...]``, and the other outputs."""
        others = []

        def tower_fn(tower_id: jax.Array, row: list[Any]) -> tuple[PyTree, PyTree]:
            tower = tower_of(self.strategy, axes, tower_id)
            out, *kept = _split_outputs(self._call_fn(tower, row[1:], arrays))
            others[:] = kept
            return (), out

        out = over_local_towers(tower_fn, axes, rows, stack_sums=False)[1]
        return out, tuple(others)

    def _call_fn(self, tower: Tower, rows: list[Any], arrays: list[Any]) -> PyTree:
        constants = [constant.value for constant in self.constants]
        pools = {_ROWS: iter(rows), _FREE: iter(arrays), "": iter(constants)}
        leaves = [next(pools[kind]) for kind in self.kinds]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        check_takes("fn(tower, *args)", self.fn, tower, *args, **kwargs)
        with in_tower_fn():
            return self.fn(tower, *args, **kwargs)

    def prove(self, rows: list[Any], arrays: list[Any]) -> _Outputs:
        """Find the outputs that are mirrored; raise where one must be and is not."""
        axes, others = self.placement.abstract_axes, []

        def trace_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
            out, kept = self.device_fn(axes, rows, arrays)
            others[:] = kept
            return out

        # Values that the function closes over are constants, the same on all towers.
        values = (rows, arrays)
        jaxpr, _ = trace_one_tower(trace_fn, axes, _IN_LAYOUTS, values)
        if _is_pmap(self.placement):
            _refuse_tracers(jaxpr.consts)
        names = ["argument"] * len(jax.tree.leaves(rows)) + [None] * len(arrays)

        def of_more_towers() -> Any:
            more = dataclasses.replace(axes, num_devices=2 * axes.num_towers)
            fn = functools.partial(self.device_fn, more)
            size = axes.num_towers
            return trace_one_tower(fn, more, _IN_LAYOUTS, values, args_of=size)[0]

        sizes = {DEVICE_AXIS: axes.num_towers}
        found = analyse(jaxpr, names, sizes, of_more_towers=of_more_towers)
        treedef, constants, kinds = others
        refuse_draws(found, shared=self.placement.shares_devices)
        variables = [k if k not in (_ROWS, _FREE) else None for k in kinds]
        prove_mirrored(found, variables, advice=_ASSIGN)
        mirrored = [
            dependence is None and kind != _ROWS
            for dependence, kind in zip(found.outputs, kinds, strict=True)
        ]
        traced = self, closed_over_kinds(jaxpr)
        return _Outputs(*traced, treedef, constants, kinds, tuple(mirrored))


# Kept, since the unused first argument sets the device of a call without others.
@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _run(call: _Call, rows: list[Any], arrays: list[Any]) -> tuple[list[Any], _Outputs]:
    """Prove and run a call, once compiled for each `_Call`; arrays, and the rest."""
    outputs = call.prove(rows, arrays)
    layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in outputs.mirrored]

    def device_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
        out, _ = call.device_fn(call.placement.axes, rows, arrays)
        return [x[0] if m else x for x, m in zip(out, outputs.mirrored, strict=True)]

    run = over_devices(device_fn, call.placement, _IN_LAYOUTS, layouts)
    return run(rows, arrays), outputs


class CallMethods(StrategyFields):
    """The method of strategies that calls a function on every tower."""

    def call_for_each_tower(
        self,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        run_concurrently: bool = True,
        **kwargs: PyTree,
    ) -> PyTree:
        """What ``fn(tower, *args, **kwargs)`` returns on every tower.

        Compiled once for each function and structure of arguments, and kept, with what
        the function closes over, until ``jax.clear_caches()``. So reuse the function:
        a new lambda is compiled anew. As under ``jax.jit``, what it closes
        over is read once, in the first trace; pass variables as arguments. A Python
        number is a part of the program, so each value compiles a program that is kept:
        pass a number that changes as ``np.float32(lr)``. Works inside ``jax.jit``,
        ``jax.grad`` and ``lax.scan``.

        Args:
          fn: The tower function; may use ``tower.merge_call`` and the like.
          *args: Each tower gets its row of ``PerTower`` leaves and of an element of
            `distribute_dataset`, its copy of a tower-local variable, and all of other
            values.
          run_concurrently: Always True: all towers are one program. To see values,
            write ``jax.debug.print("{}", x)`` in ``fn``.
          **kwargs: As ``args``.

        Returns:
          ``fn``'s tree: bare where the same on every tower, else ``PerTower``;
          variables as such.

        Raises:
          ValueError: A ``PerTower`` argument has not one row a tower, or a batch is
            padded; ``fn`` has no hash, or is called again and closes over arrays that
            a strategy has placed; ``run_concurrently`` is not True.
          ReplicationError: Not every tower would reach a collective, or a mirrored
            variable comes back that is not the same on every tower.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> own = tj.PerTower(jnp.array([1, 5]))
          >>> def tower_fn(tower, x):
          ...     return x + tower.reduce(tj.Reduction.SUM, x)
          >>> strategy.call_for_each_tower(tower_fn, own)
          PerTower(values=Array([ 7, 11], dtype=int32))
        """
        if run_concurrently is not True:
            raise ValueError(
                f"call_for_each_tower: run_concurrently={run_concurrently!r}, but all"
                " towers are one program, with the same results in any order. Leave it"
                ' out; to see values, write jax.debug.print("{}", x) in the function.'
            )
        _check_hash(fn)
        placement = self.placement
        if is_inside_tower():
            _refuse_nested_pmap(placement)
            placement = dataclasses.replace(placement, devices=placement.devices[:1])
        given = as_native("fn's arguments", unpad_batches((args, kwargs)))
        leaves, treedef = jax.tree.flatten(given, is_leaf=_is_rows)
        found = _kinds_of(given, lambda x: is_variable(x) or _is_rows(x))
        kinds = tuple(kind if kind in (_ROWS, "") else _FREE for kind in found)

        def of_kind(kind: str) -> list[Any]:
            return [x for x, k in zip(leaves, kinds, strict=True) if k == kind]

        call = _Call(
            self, placement, fn, treedef, kinds, tuple(map(Constant, of_kind("")))
        )
        rows, traced = _own_rows(of_kind(_ROWS), placement.num_towers), is_traced(())
        rows = [_place_arg(x, placement, Layout.PER_TOWER, traced) for x in rows]
        arrays = of_kind(_FREE)
        arrays = [_place_arg(x, placement, Layout.MIRRORED, traced) for x in arrays]
        out, outputs = run_traced(_run, placement, call, rows, arrays)
        return outputs.tree(wait_on_cpus(out))


def _own_rows(values: list[Any], num_towers: int) -> list[Any]:
    """Stack each argument that differs from tower to tower to leaves ``[T, ...]``."""
    rows = [x if _is_rows(x) else PerTower(x) for x in values]
    # pmap needs at least one argument with a row a tower, and jit one on the strategy's
    # device: the first, unused.
    first = np.arange(num_towers, dtype=np.int32)
    return [first, *(stack_towers(x, num_towers, "A PerTower argument") for x in rows)]


def _refuse_nested_pmap(placement: Placement) -> None:
    if _is_pmap(placement):
        raise ValueError(
            "call_for_each_tower in a merge function: executor='pmap' does not nest."
            " Leave out executor='pmap'."
        )


def _check_hash(fn: Any) -> None:
    try:
        hash(fn)
    except TypeError:
        raise ValueError(
            f"call_for_each_tower: fn is a {type(fn).__name__} without a hash, so a"
            " compiled call of it could not be known again. Pass a function that calls"
            " it: def tower_fn(tower, *args): return fn(tower, *args)."
        ) from None


def _is_pmap(placement: Placement) -> bool:
    return placement.executor == "pmap" and placement.num_devices > 1


def _refuse_tracers(consts: list[Any]) -> None:
    # JAX would silently give each device a part of such a value.
    if has_tracers(consts):
        raise ValueError(
            "call_for_each_tower: fn closes over a value of the jit, grad or scan"
            " around it, which executor='pmap' cannot take. Pass it as an argument of"
            " fn, or leave out executor='pmap'."
        )


def _is_rows(x: Any) -> bool:
    return isinstance(x, PerTower)


def _kinds_of(tree: PyTree, stops: Any = is_variable) -> Iterator[str]:
    """The kind of each leaf in tree order; "" for a leaf that is no array."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stops):
        if isinstance(node, TowerLocal):
            yield from (_ROWS for _ in jax.tree.leaves(node))
        elif isinstance(node, PerTower):
            yield _ROWS
        elif isinstance(node, MirroredVar):
            root = f"{label(node)}, the result{jax.tree_util.keystr(path)},"
            yield from (name for name, _ in named_leaves(root, node.value))
        else:
            yield _FREE if is_mergeable(node) else ""


def _split_outputs(out: PyTree) -> tuple[list[Any], Any, tuple, tuple]:
    """Arrays; treedef, constants (None in place of arrays), kinds of the arrays."""
    leaves, treedef = jax.tree.flatten(out)
    kinds = list(_kinds_of(out))
    constants = [None if kind else (x,) for x, kind in zip(leaves, kinds, strict=True)]
    arrays = [jnp.asarray(x) for x, kind in zip(leaves, kinds, strict=True) if kind]
    return arrays, treedef, tuple(constants), tuple(filter(None, kinds))


def _place_arg(x: Any, placement: Placement, layout: Layout, traced: bool) -> Any:
    """Place an argument on the strategy's devices, unless JAX is tracing."""
    if traced or has_tracers(x):
        return jax.tree.map(jnp.asarray, x)
    if placement.num_processes > 1 and layout is Layout.MIRRORED:
        return place(x, placement, layout)  # the first process's value, on all
    return place_rows(x, placement, layout)
