"""Run a device's towers one after another, by one code for any number of devices."""

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
    """Map a function over the ``size`` towers of a device, one after another.

    The result is that of ``lax.map``. In addition, a tower is compiled to the same code
    for any ``size``. XLA removes a loop of one trip, and XLA:CPU removes barriers
    before it fuses. A tower alone would then be fused in another way than in a loop, on
    GPUs too, and its bits would depend on the number of devices. Two measures prevent
    this: the number of trips is computed from ``number``, any traced int >= 0, so that
    XLA does not see a loop of one trip; and a tower's row is a slice of two rows.
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
    """Sort the loop index ``i``, so that XLA:CPU compiles the loop op by op.

    XLA:CPU compiles a small loop as one function, which LLVM unrolls by the number of
    trips. It does not do so if the loop has an operation that such a function cannot
    have: a collective, which does not exist on one device, or a sort (openxla/xla,
    ``small_while_loop_hoisting_pass.cc``).
    """

    def least(i: Any) -> Any:
        return lax.sort(jnp.stack([i, jnp.iinfo(i.dtype).max]))[0]

    return lax.platform_dependent(i, cpu=least, default=lambda i: i)


def scan_and_add(
    tower_fn: Callable[[PyTree], tuple[PyTree, PyTree]], towers: PyTree
) -> tuple[PyTree, PyTree]:
    """Run towers in turn by a ``scan``, and add their sums as they come.

    ``tower_fn`` returns ``(sums, rest)``. Returns the added sums, and ``rest`` stacked
    over towers. The sums of only one tower are in memory at a time.
    """
    shapes = jax.eval_shape(tower_fn, jax.tree.map(lambda x: x[0], towers))
    zeros = jax.tree.map(jnp.zeros_like, shapes[0])

    def body(total: PyTree, tower: PyTree) -> tuple[PyTree, PyTree]:
        sums, per_tower = tower_fn(tower)
        return jax.tree.map(jnp.add, total, sums), per_tower

    return scan_in_turn(body, zeros, towers)


def scan_in_turn(body: Callable[..., Any], init: PyTree, xs: PyTree) -> Any:
    """Scan over towers or micro-batches, under a name by which `shards` knows the loop.

    A loop with this name gathers sharded parameters in each of its steps.
    """
    with jax.named_scope(tags.IN_TURN):
        return lax.scan(body, init, xs)
