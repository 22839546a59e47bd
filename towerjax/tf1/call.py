"""`call_for_each_tower`: a function of a tower, called for all towers."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj
from towerjax.tf1.meets import bound, bound_here
from towerjax.tf1.values import AnyStrategy
from towerjax.towers import values
from towerjax.towers.on_towers import call_on_towers
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, label
from towerjax.types import Layout, PerTower, PyTree
from towerjax.types.options import check_callable, check_flag, check_takes
from towerjax.types.refusals import a_type
from towerjax.types.trees import map_parts, named_leaves

_ASSIGN = """Write tower.assign(v, x), or tower.assign_add, which reduce x as the
variable says; assign in tower.merge_call; or create it with tower_local=True."""
# The two kinds of array arguments: with a row for each tower, or one value that every
# tower gets whole.
_ROWS = "rows"
_WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A marker that is bound as long as `call_for_each_tower` traces a function."""


_CALL = _Call()


def is_in_call() -> bool:
    """Return whether a function of `call_for_each_tower` is being traced."""
    return bound_here(_Call) is not None


@dataclasses.dataclass(frozen=True)
class _TowerFn:
    """A function with the structure of its arguments, as `call_on_towers` calls it."""

    fn: Callable[..., PyTree]
    treedef: Any
    kinds: tuple[Any, ...]  # the kind of each argument, or a `Constant`

    def __call__(
        self, tower: tj.Tower, rows: list[jax.Array], arrays: list[jax.Array]
    ) -> tuple[list[jax.Array], list[Any], Any]:
        """Call the function for one tower, and take its result apart.

        Return the arrays of the result; for each array what `call_on_towers` requires
        of it; and the rest, which is the structure of the result and the kind of each
        leaf.
        """
        pools = {_ROWS: iter(rows), _WHOLE: iter(arrays)}
        all_args = [next(pools[x]) if x in pools else x.value for x in self.kinds]
        args, kwargs = jax.tree.unflatten(self.treedef, all_args)
        check_takes("fn(tower, *args)", self.fn, tower, *args, **kwargs)
        with bound(_CALL):
            out = self.fn(tower, *args, **kwargs)
        kinds = [*_kinds_of(out)]
        pairs = [*zip(jax.tree.leaves(out), kinds, strict=True)]
        constants = [
            jnp.asarray(x) for x, kind in pairs if not isinstance(kind, Constant)
        ]
        wanted = [kind for kind in kinds if not isinstance(kind, Constant)]
        return constants, wanted, (jax.tree.structure(out), kinds)


def call_for_each_tower(
    self: AnyStrategy,
    fn: Callable[..., PyTree],
    /,
    *args: PyTree,
    run_concurrently: bool = True,
    **kwargs: PyTree,
) -> PyTree:
    """Call ``fn(tower, *args, **kwargs)`` on every tower.

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
    hash(fn)  # an object without a hash raises here, and not inside jit
    native = values.as_native("fn's arguments", values.unpad_batches((args, kwargs)))
    native = map_parts(TowerLocal, values.copies_by_leaf, native)
    leaves, treedef = jax.tree.flatten(
        native, is_leaf=lambda x: isinstance(x, PerTower)
    )
    rows = []
    arrays = []
    kinds = []
    for x in leaves:
        if isinstance(x, PerTower):
            stacked = values.stack_towers(x, self.num_towers, "a PerTower argument")
            rows.append(stacked)
            kinds.append(_ROWS)
        elif values.is_mergeable(x):
            arrays.append(x)
            kinds.append(_WHOLE)
        else:
            kinds.append(Constant(x))
    tower_fn = _TowerFn(fn, treedef, tuple(kinds))
    results, mirrored, rest = call_on_towers(
        self, tower_fn, rows, arrays, advice=_ASSIGN
    )
    return _tree_of(results, mirrored, *rest)


def _tree_of(
    arrays: list[jax.Array], mirrored: list[bool], treedef: Any, kinds: list[Any]
) -> PyTree:
    """Rebuild the tree that the function returned from its arrays.

    ``mirrored`` tells for each array whether it is the same on all towers.
    """
    pairs = zip(arrays, mirrored, strict=True)

    def result(kind: Any) -> Any:
        if isinstance(kind, Constant):
            return kind.value
        x, is_mirrored = next(pairs)
        return x if is_mirrored or kind is Layout.PER_TOWER else PerTower(x)

    return jax.tree.unflatten(treedef, map(result, kinds))


def _kinds_of(out: PyTree) -> Iterator[Any]:
    """Yield the kind of each leaf of ``out``, in tree order.

    The kind of an array is what `call_on_towers` requires of it: ``Layout.PER_TOWER``,
    the name of a mirrored variable for errors, or None. A leaf that is not an array is
    a `Constant`.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(out, is_leaf=is_variable):
        if isinstance(node, TowerLocal):
            yield from (Layout.PER_TOWER for _ in jax.tree.leaves(node))
        elif isinstance(node, MirroredVar):
            root = f"{label(node)}, the result{jax.tree_util.keystr(path)},"
            yield from (name for name, _ in named_leaves(root, node.value))
        else:
            yield None if values.is_mergeable(node) else Constant(node)


class Constant:
    """An argument that is not an array, as part of the jit cache's key."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._key: Any = key_of("", value)
        # A key that equals no other, so that each call is traced anew.
        except TypeError:
            self._key = object()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Constant) and self._key == other._key


def key_of(name: str, value: Any) -> Any:
    """Make the cache key of a value that is compiled into a program.

    Values with equal keys share one program, like static arguments of ``jax.jit``. The
    key of a container is made of the keys of its items. Raise a TypeError for a value
    without a hash.
    """
    kind = type(value)
    if isinstance(value, Mapping):
        return kind, tuple((k, key_of(f"{name}[{k!r}]", x)) for k, x in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(key_of(name, x) for x in value)
    if isinstance(value, float | complex | np.number):
        return kind, repr(value)  # 0.0 differs from -0.0; NaN equals NaN
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is an array")
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} is {a_type(value)}, which has no hash") from None
    return kind, value
