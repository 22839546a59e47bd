"""Run the towers of a device one after another, with the same code on any devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.jaxprs import tags
from towerjax.types import PyTree


def map_in_turn(
    tower_fn: Callable[[PyTree], PyTree], towers: PyTree, size: int, number: jax.Array
) -> PyTree:
    """``lax.map`` over the ``size`` towers of a device, compiled the same for any size.

    XLA removes a loop of one trip, and XLA:CPU removes barriers before it fuses. Then a
    tower would be fused in another way than in a loop, on GPUs too, and its bits would
    depend on ``D``. So ``number`` hides that there is one trip, and the row is a slice
    of two.
    """

    def twice(x: Any) -> Any:
        return jnp.concatenate([x, x])

    rows = towers if size > 1 else jax.tree.map(twice, towers)

    def of_tower(i: jax.Array) -> PyTree:
        row = _index_of_own_kernels(i)
        return tower_fn(jax.tree.map(lambda x: x[row], rows))

    def body(i: jax.Array, done: PyTree) -> PyTree:
        return jax.tree.map(lambda all_, x: all_.at[i].set(x), done, of_tower(i))

    with jax.named_scope(tags.IN_TURN):
        if size > 1:
            return lax.map(of_tower, jnp.arange(size))
        shapes = jax.eval_shape(of_tower, number)
        zeros = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), shapes)
        return lax.fori_loop(0, 1 + jnp.minimum(number, 0), body, zeros)


def _index_of_own_kernels(i: jax.Array) -> jax.Array:
    """The index ``i >= 0`` of a loop, from a sort, so that XLA:CPU compiles op by op.

    XLA:CPU compiles a small loop as one function, which LLVM unrolls by the number of
    trips; but not a loop with an operation that such a function cannot have. This is a
    collective, which does not exist on one device, or a sort (openxla/xla,
    ``small_while_loop_hoisting_pass.cc``).
    """

    def least(i: Any) -> Any:
        return lax.sort(jnp.stack([i, jnp.iinfo(i.dtype).max]))[0]

    return lax.platform_dependent(i, cpu=least, default=lambda i: i)


def scan_and_add(
    tower_fn: Callable[[PyTree], tuple[PyTree, PyTree]], towers: PyTree
) -> tuple[PyTree, PyTree]:
    """``(sums, kept)`` of towers in turn, which holds one tower's sums at a time."""
    shapes = jax.eval_shape(tower_fn, jax.tree.map(lambda x: x[0], towers))
    zeros = jax.tree.map(jnp.zeros_like, shapes[0])

    def body(total: PyTree, tower: PyTree) -> tuple[PyTree, PyTree]:
        sums, per_tower = tower_fn(tower)
        return jax.tree.map(jnp.add, total, sums), per_tower

    return scan_in_turn(body, zeros, towers)


def scan_in_turn(body: Callable[..., Any], init: PyTree, xs: PyTree) -> Any:
    """A scan over towers or micro-batches, in each step of which `shards` gathers."""
    with jax.named_scope(tags.IN_TURN):
        return lax.scan(body, init, xs)
