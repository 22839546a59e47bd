"""What does a function return on every tower? Traced for all, proved, compiled."""

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
    waited,
)
from towerjax.proof.analysis import analyse
from towerjax.proof.found import prove_mirrored, refuse_draws
from towerjax.towers.cross_tower.constant import Constant
from towerjax.towers.cross_tower.values import opened
from towerjax.towers.executors import (
    Traced,
    closed_over,
    is_inside_tower,
    over_devices,
    tower_explained,
    trace_one_tower,
)
from towerjax.towers.merge import held, is_mergeable, stacked_rows
from towerjax.towers.one_axis import over_local_towers
from towerjax.towers.tower import Tower, tower_of
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, named
from towerjax.types import Layout, PerTower, PyTree, named_leaves
from towerjax.types.leaves import has_tracers, is_traced
from towerjax.types.options import check_takes

_IN_LAYOUTS = (Layout.PER_TOWER, Layout.MIRRORED)
# An array leaf: each tower's own row; any tower's; a mirrored variable's, by its name.
_ROWS, _FREE = "rows", "free"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Outputs(Traced):
    """What a compiled call returns besides arrays: a pytree node without leaves."""

    treedef: Any
    constants: tuple[Any, ...]
    kinds: tuple[str, ...]
    mirrored: tuple[bool, ...]

    def tree(self, arrays: list[Any]) -> PyTree:
        """The function's own tree of results."""
        wrapped = iter(
            x if mirrored or kind == _ROWS else PerTower(x)
            for x, mirrored, kind in zip(arrays, self.mirrored, self.kinds, strict=True)
        )
        leaves = [next(wrapped) if c is None else c[0] for c in self.constants]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Which function is called where and with what structure: the jit cache's key."""

    strategy: Any
    placement: Placement
    fn: Callable[..., PyTree]
    treedef: Any
    kinds: tuple[str, ...]
    constants: tuple[Constant, ...]

    def device_fn(
        self, axes: TowerAxes, rows: list[Any], arrays: list[Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """All towers of a device: array outputs ``[k, ...]``, and the other outputs."""
        others = []

        def tower_fn(tower_id: jax.Array, row: list[Any]) -> tuple[PyTree, PyTree]:
            tower = tower_of(self.strategy, axes, tower_id)
            out, *kept = _split_outputs(self._called(tower, row[1:], arrays))
            others[:] = kept
            return (), out

        out = over_local_towers(tower_fn, axes, rows, stack_sums=False)[1]
        return out, tuple(others)

    def _called(self, tower: Tower, rows: list[Any], arrays: list[Any]) -> PyTree:
        constants = [constant.value for constant in self.constants]
        pools = {_ROWS: iter(rows), _FREE: iter(arrays), "": iter(constants)}
        leaves = [next(pools[kind]) for kind in self.kinds]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        check_takes("fn(tower, *args)", self.fn, tower, *args, **kwargs)
        with tower_explained():
            return self.fn(tower, *args, **kwargs)

    def prove(self, rows: list[Any], arrays: list[Any]) -> _Outputs:
        """Which outputs are the same on every tower; refuses what is not and must."""
        axes, others = self.placement.abstract_axes, []

        def trace_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
            out, kept = self.device_fn(axes, rows, arrays)
            others[:] = kept
            return out

        # What the function closes over are constants of it, the same on all towers.
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
        prove_mirrored(found, [k if k not in (_ROWS, _FREE) else None for k in kinds])
        mirrored = [
            dependence is None and kind != _ROWS
            for dependence, kind in zip(found.outputs, kinds, strict=True)
        ]
        traced = self, closed_over(jaxpr)
        return _Outputs(*traced, treedef, constants, kinds, tuple(mirrored))


# The unused argument says on which device a call without others runs.
@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _run(call: _Call, rows: list[Any], arrays: list[Any]) -> tuple[list[Any], _Outputs]:
    """The array outputs of a call and the rest; JAX's own cache knows it again."""
    outputs = call.prove(rows, arrays)
    layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in outputs.mirrored]

    def device_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
        out, _ = call.device_fn(call.placement.axes, rows, arrays)
        return [x[0] if m else x for x, m in zip(out, outputs.mirrored, strict=True)]

    run = over_devices(device_fn, call.placement, _IN_LAYOUTS, layouts)
    return run(rows, arrays), outputs


class CallMethods:
    """What every strategy can do with a function: call it on every tower."""

    placement: Placement

    def call_for_each_tower(
        self,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        run_concurrently: bool = True,
        **kwargs: PyTree,
    ) -> PyTree:
        """What ``fn(tower, *args, **kwargs)`` returns on every tower.

        Compiled once for each function and structure of arguments, so keep the
        function: a lambda made anew is compiled anew. As under ``jax.jit``, what it
        closes over is looked at while it is traced, the first time; variables are
        arguments. A Python number is a part of the program, so each value compiles one
        that is kept: pass a number that changes as ``np.float32(lr)``. Works inside
        ``jax.jit``, ``jax.grad`` and ``lax.scan``.

        Args:
          fn: The tower function; may use ``tower.merge_call`` and the like.
          *args: ``PerTower`` leaves and an element of `distribute_dataset` are handed
            out row by row, a tower-local variable holds the tower's copy, others go
            in whole.
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
        given = held("fn's arguments", opened((args, kwargs)))
        leaves, treedef = jax.tree.flatten(given, is_leaf=_is_rows)
        found = _kinds_of(given, lambda x: is_variable(x) or _is_rows(x))
        kinds = tuple(kind if kind in (_ROWS, "") else _FREE for kind in found)

        def of_kind(kind: str) -> list[Any]:
            return [x for x, k in zip(leaves, kinds, strict=True) if k == kind]

        call = _Call(
            self, placement, fn, treedef, kinds, tuple(map(Constant, of_kind("")))
        )
        rows, traced = _own_rows(of_kind(_ROWS), placement.num_towers), is_traced(())
        rows = [_placed(x, placement, Layout.PER_TOWER, traced) for x in rows]
        arrays = of_kind(_FREE)
        arrays = [_placed(x, placement, Layout.MIRRORED, traced) for x in arrays]
        out, outputs = _run(call, rows, arrays)
        outputs.refuse_again(call)
        return outputs.tree(waited(out))


def _own_rows(values: list[Any], num_towers: int) -> list[Any]:
    """Leaves ``[T, ...]`` of each argument that differs from tower to tower."""
    rows = [x if _is_rows(x) else PerTower(x) for x in values]
    # pmap wants at least one argument of the towers' own, and jit one that lies on
    # the strategy's device: the first, not used.
    first = np.arange(num_towers, dtype=np.int32)
    return [first, *(stacked_rows(x, num_towers, "A PerTower argument") for x in rows)]


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
    # JAX would hand each device a part of such a value, without an error.
    if has_tracers(consts):
        raise ValueError(
            "call_for_each_tower: fn closes over a value of the jit, grad or scan"
            " around it, which executor='pmap' cannot take. Pass it as an argument of"
            " fn, or leave out executor='pmap'."
        )


def _is_rows(x: Any) -> bool:
    return isinstance(x, PerTower)


def _kinds_of(tree: PyTree, stops: Any = is_variable) -> Iterator[str]:
    """The kind of each leaf in tree order; "" for what is no array."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stops):
        if isinstance(node, TowerLocal):
            yield from (_ROWS for _ in jax.tree.leaves(node))
        elif isinstance(node, PerTower):
            yield _ROWS
        elif isinstance(node, MirroredVar):
            root = f"{named(node)}, the result{jax.tree_util.keystr(path)},"
            yield from (name for name, _ in named_leaves(root, node.value))
        else:
            yield _FREE if is_mergeable(node) else ""


def _split_outputs(out: PyTree) -> tuple[list[Any], Any, tuple, tuple]:
    """Arrays; and treedef, constants (None where an array is), kinds of the arrays."""
    leaves, treedef = jax.tree.flatten(out)
    kinds = list(_kinds_of(out))
    constants = [None if kind else (x,) for x, kind in zip(leaves, kinds, strict=True)]
    arrays = [jnp.asarray(x) for x, kind in zip(leaves, kinds, strict=True) if kind]
    return arrays, treedef, tuple(constants), tuple(filter(None, kinds))


def _placed(x: Any, placement: Placement, layout: Layout, traced: bool) -> Any:
    """On the strategy's devices, but for tracers and inside a trace."""
    if traced or has_tracers(x):
        return jax.tree.map(jnp.asarray, x)
    if placement.num_processes > 1 and layout is Layout.MIRRORED:
        return place(x, placement, layout)  # the same on all: the first process's
    return place_rows(x, placement, layout)
