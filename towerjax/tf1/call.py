"""`call_for_each_tower`: trace a function for all towers, prove it, and compile it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.lowering.tower_axis import TowerPrograms, over_local_towers
from towerjax.mesh.placement import Placement, TowerAxes
from towerjax.mesh.transfer import place, place_rows, wait_on_cpus
from towerjax.proof.findings import prove_mirrored
from towerjax.towers import executors, values
from towerjax.towers.on_towers import OnTowers
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import tower_of
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, label
from towerjax.types import Layout, PerTower, PyTree
from towerjax.types.options import check_callable, check_flag, check_takes
from towerjax.types.refusals import a_type
from towerjax.types.trees import (
    has_tracers,
    is_traced,
    map_parts,
    named_leaves,
    shapes_of,
)

_IN_LAYOUTS = (Layout.PER_TOWER, Layout.MIRRORED)
_ASSIGN = """Write tower.assign(v, x), or tower.assign_add, which reduce x as the
variable says; assign in tower.merge_call; or create it with tower_local=True."""
# Kinds of array leaves: a row per tower; free to differ; or a mirrored variable's name.
_ROWS = "rows"
_FREE = "free"


_Call: TypeAlias = tuple[
    Strategy, Placement, Callable[..., PyTree], Any, tuple[Any, ...]
]
"""The key of the jit cache: a function on towers, the structure of its arguments, and
the kind of each argument, or its value if it is a constant."""


def _on_device(
    call: _Call, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., PyTree]:
    """The function that a device runs: arrays ``[k, ...]``, and other results."""
    strategy, _, fn, treedef, kinds = call

    def tower_fn(
        tower_id: jax.Array, rows: list[jax.Array], arrays: list[jax.Array]
    ) -> tuple[PyTree, PyTree]:
        tower = tower_of(strategy, axes, tower_id)
        pools = {_ROWS: iter(rows[1:]), _FREE: iter(arrays)}
        given = [next(pools[x]) if x in pools else x.value for x in kinds]
        args, kwargs = jax.tree.unflatten(treedef, given)
        check_takes("fn(tower, *args)", fn, tower, *args, **kwargs)
        with executors.in_tower_fn():
            out = fn(tower, *args, **kwargs)
        pairs = [*zip(jax.tree.leaves(out), _kinds_of(out), strict=True)]
        made = [jnp.asarray(x) for x, kind in pairs if isinstance(kind, str)]
        known = jax.tree.structure(out), tuple(kind for _, kind in pairs)
        return (), (made, executors.Static(known))

    def run(rows: list[jax.Array], arrays: list[jax.Array]) -> PyTree:
        return over_local_towers(
            tower_fn, axes, rows, arrays, stack_sums=False, programs=programs
        )[1]

    return run


# keep_unused, because the unused first argument sets the device of a call without
# others.
@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _run(
    call: _Call, rows: list[jax.Array], arrays: list[jax.Array]
) -> tuple[list[jax.Array], executors.TracedCall]:
    """The arrays and the other results of a call, which is proved and compiled once."""
    placement = call[1]
    args = (rows, arrays)
    names = ["argument"] * len(jax.tree.leaves(rows)) + [None] * len(arrays)
    on_device = functools.partial(_on_device, call)
    towers = OnTowers(on_device, placement, _IN_LAYOUTS, shapes_of(args))
    analysis = towers.analyse(names)
    by_pmap = placement.executor == "pmap" and placement.num_devices > 1
    if by_pmap and has_tracers(towers.jaxpr.consts):
        # JAX would silently give each device a slice of such a value.
        raise ValueError(
            "fn closes over a value of the jit, grad or scan around it, which"
            " executor='pmap' cannot handle. Pass the value to fn as an argument."
        )
    treedef, leaves = towers.out[1].value
    kinds = [x for x in leaves if isinstance(x, str)]
    variables = [k if k not in (_ROWS, _FREE) else None for k in kinds]
    prove_mirrored(analysis, variables, advice=_ASSIGN)
    pairs = zip(analysis.outputs, kinds, strict=True)
    mirrored = [x is None and kind != _ROWS for x, kind in pairs]

    def finish(out: tuple[list[jax.Array], executors.Static]) -> list[jax.Array]:
        return [x[0] if m else x for x, m in zip(out[0], mirrored, strict=True)]

    layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in mirrored]
    closes_over = executors.closed_over_kinds(towers.jaxpr)
    outputs = executors.TracedCall((treedef, leaves, mirrored), call, closes_over)
    return towers.run(layouts, args, finish), outputs


def call_for_each_tower(
    self: Strategy,
    fn: Callable[..., PyTree],
    /,
    *args: PyTree,
    run_concurrently: bool = True,
    **kwargs: PyTree,
) -> PyTree:
    """The results of ``fn(tower, *args, **kwargs)`` on every tower.

    Each tower gets its row of ``PerTower`` leaves and of an element of
    `distribute_dataset`, its copy of a tower-local variable, and other values whole.
    Leaves of the result are bare if they are the same on every tower, and otherwise
    ``PerTower``. Variables come back as variables. The call works inside ``jax.jit``,
    ``jax.grad`` and ``lax.scan``.

    It is compiled once for each function and structure of arguments, and kept until
    ``jax.clear_caches()``. So reuse the function, because a new lambda is compiled
    again. As under ``jax.jit``, values that the function closes over are read once, in
    the first trace; pass variables as arguments. A Python number is part of the
    program; pass one that changes as ``np.float32(lr)``. ``run_concurrently`` changes
    nothing, as in TensorFlow's graphs.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=2)
      >>> own = tj.PerTower(jnp.array([1, 5]))
      >>> def tower_fn(tower, x):
      ...     return x + tower.reduce(tj.Reduction.SUM, x)
      >>> strategy.call_for_each_tower(tower_fn, own)
      PerTower(values=Array([ 7, 11], dtype=int32))
    """
    check_flag("run_concurrently", run_concurrently)
    check_callable("fn", fn, "fn(tower, *args)")
    hash(fn)  # raises here, and not deep inside of jit
    placement = self.placement
    if executors.is_inside_tower():
        on_first = {"devices": placement.devices[:1], "within": (), "rows": None}
        placement = dataclasses.replace(placement, **on_first, specs=None)
    given = values.as_native("fn's arguments", values.unpad_batches((args, kwargs)))
    given = map_parts(TowerLocal, values.copies_by_leaf, given)
    leaves, treedef = jax.tree.flatten(given, is_leaf=lambda x: isinstance(x, PerTower))
    # The first argument is not used. pmap needs at least one argument with a row per
    # tower, and jit one on the strategy's device.
    rows = [np.arange(placement.num_towers, dtype=np.int32)]
    arrays = []
    kinds = []
    for x in leaves:
        if isinstance(x, PerTower):
            stacked = values.stack_towers(x, self.num_towers, "a PerTower argument")
            rows.append(stacked)
            kinds.append(_ROWS)
        elif values.is_mergeable(x):
            arrays.append(x)
            kinds.append(_FREE)
        else:
            kinds.append(Constant(x))
    call = (self, placement, fn, treedef, tuple(kinds))
    traced = is_traced(())
    rows = [_place_arg(x, placement, Layout.PER_TOWER, traced) for x in rows]
    arrays = [_place_arg(x, placement, Layout.MIRRORED, traced) for x in arrays]
    out, outputs = executors.run_traced(_run, placement, call, rows, arrays)
    return _results(outputs, wait_on_cpus(out))


def _results(outputs: Any, arrays: list[Any]) -> PyTree:
    """The function's tree of results, built from its arrays."""
    treedef, leaves, mirrored = outputs
    pairs = zip(arrays, mirrored, strict=True)

    def result(leaf: Any) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        x, is_mirrored = next(pairs)
        return x if is_mirrored or leaf == _ROWS else PerTower(x)

    return jax.tree.unflatten(treedef, map(result, leaves))


def _kinds_of(out: PyTree) -> Iterator[Any]:
    """The kind of each leaf, in tree order; a leaf that is no array is a constant."""
    for path, node in jax.tree_util.tree_leaves_with_path(out, is_leaf=is_variable):
        if isinstance(node, TowerLocal):
            yield from (_ROWS for _ in jax.tree.leaves(node))
        elif isinstance(node, MirroredVar):
            root = f"{label(node)}, the result{jax.tree_util.keystr(path)},"
            yield from (name for name, _ in named_leaves(root, node.value))
        else:
            yield _FREE if values.is_mergeable(node) else Constant(node)


def _place_arg(x: Any, placement: Placement, layout: Layout, traced: bool) -> Any:
    """The argument, placed on the strategy's devices unless JAX is tracing."""
    if traced or has_tracers(x):
        return jax.tree.map(jnp.asarray, x)
    if placement.num_processes > 1 and layout is Layout.MIRRORED:
        return place(x, placement, layout)  # the first process's value, on all
    return place_rows(x, placement, layout)


class Constant:
    """An argument that is not an array, as part of the jit cache's key."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._key: Any = key_of("", value)
        except TypeError:  # equal to nothing else, so that each call is traced
            self._key = object()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Constant) and self._key == other._key


def key_of(name: str, value: Any) -> Any:
    """The key of a value that is compiled in, which compares like a static argument.

    The key of a container is made of the keys of its items. It raises a TypeError for a
    value without a hash.
    """
    kind = type(value)
    if isinstance(value, Mapping):
        return kind, tuple((k, key_of(f"{name}[{k!r}]", x)) for k, x in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(key_of(name, x) for x in value)
    if isinstance(value, float | complex | np.number):
        return kind, repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is an array")
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} is {a_type(value)}, which has no hash") from None
    return kind, value
