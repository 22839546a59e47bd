"""How do the towers of one device run? Together by vmap, or one after another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.placement import LOCAL_AXIS, TowerAxes
from towerjax.towers.one_axis import first_tower_of_device, on_these_devices
from towerjax.types import PyTree


def over_local_towers(
    tower_fn: Callable[..., tuple[PyTree, PyTree]],
    axes: TowerAxes,
    per_tower: PyTree,
    *common: PyTree,
    stack_sums: bool,
    number: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """``tower_fn(tower_id, own, *common)`` for each tower of this device.

    Where ``axes.traced`` keeps programs, ``tower_fn`` is a function of these alone.
    """
    on_devices = on_these_devices(tower_fn, axes)

    def of_tower(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
        return on_devices(tower_id, own, *common)

    first = first_tower_of_device(axes)
    if axes.num_local == 1 and not (axes.in_turn and stack_sums):
        # A vmap of one would still turn convolutions into grouped ones.
        sums, kept = of_tower(first, jax.tree.map(lambda x: x[0], per_tower))
        kept = jax.tree.map(lambda x: jnp.asarray(x)[None], kept)
        return (jax.tree.map(lambda x: x[None], sums) if stack_sums else sums), kept
    ids = first + jnp.arange(axes.num_local, dtype=jnp.int32)
    if not axes.in_turn:
        leaves, treedef = jax.tree.flatten(per_tower)

        def of_leaves(tower_id: jax.Array, leaves: list[Any]) -> tuple[PyTree, PyTree]:
            return of_tower(tower_id, jax.tree.unflatten(treedef, leaves))

        # Leaves alone: vmap changes the shape that a BCOO says it has.
        sums, kept = jax.vmap(of_leaves, axis_name=LOCAL_AXIS)(ids, leaves)
        return (sums if stack_sums else jax.tree.map(_add_rows, sums)), kept
    if stack_sums:
        if axes.num_local == 1 and axes.platform == "cpu":
            number = ids[0] if number is None else number
            return _map_of_one(of_tower, ids, per_tower, number)
        return lax.map(lambda row: _alone(of_tower, *row), (ids, per_tower))
    return _running_sum(of_tower, ids, per_tower)


def as_one_of_several(fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
    """``fn(value)``, computed with a dim before: as a state has one tower's value.

    What is updated in another shape than the state's XLA:CPU copies, at every step.
    """
    out = jax.vmap(fn)(jax.tree.map(lambda x: x[None], value))
    return jax.tree.map(lambda x: x[0], out)


def _alone(tower_fn: Callable[..., PyTree], tower_id: jax.Array, row: PyTree) -> PyTree:
    """One tower's program, fused with nothing that depends on how many are here."""
    tower_id, row = lax.optimization_barrier((tower_id, row))
    return lax.optimization_barrier(tower_fn(tower_id, row))


def _map_of_one(
    tower_fn: Callable[..., PyTree],
    ids: jax.Array,
    per_tower: PyTree,
    number: jax.Array,
) -> PyTree:
    """``lax.map`` over one tower, compiled as it would be over several.

    XLA:CPU drops a loop of one trip, and barriers before it fuses; then a tower's
    sums are added in another order than in a loop, and bits depend on ``D``. So the
    number of trips is one that the compiler cannot know, and rows are a part of more.
    """
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    shapes = jax.eval_shape(tower_fn, *row)
    zeros = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), shapes)
    count = 1 + jnp.minimum(number, 0)
    rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), (ids, per_tower))

    def body(i: jax.Array, done: PyTree) -> PyTree:
        out = _alone(tower_fn, *jax.tree.map(lambda x: x[i], rows))
        return jax.tree.map(lambda all_of_them, x: all_of_them.at[i].set(x), done, out)

    return lax.fori_loop(0, count, body, zeros)


def _add_rows(x: jax.Array) -> jax.Array:
    # A sum over what a product has made XLA:CPU fuses with it, and then makes both
    # element by element: 2 to 5 times slower than additions.
    return add_pairwise(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x.sum(axis=0)


def _running_sum(
    tower_fn: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    ids: jax.Array,
    per_tower: PyTree,
) -> tuple[PyTree, PyTree]:
    """One tower after another, holding one tower's sums at a time."""
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tower_fn, *row)[0]
    )

    def body(total: PyTree, row: PyTree) -> tuple[PyTree, PyTree]:
        sums, kept = tower_fn(*row)
        return jax.tree.map(jnp.add, total, sums), kept

    return lax.scan(body, zeros, (ids, per_tower))
