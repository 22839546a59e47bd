"""Update some rows of a table by an optimizer that sees only these rows."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from towerjax.collectives.sparse_rows import (
    IndexedRows,
    is_rows,
    set_rows,
    sum_duplicates,
)
from towerjax.proof.equation import all_eqns
from towerjax.types import PyTree, named_leaves

Owners = Sequence[int | None]
"""For each leaf of an optimizer's state, the index of the table whose rows it has."""


@dataclasses.dataclass(frozen=True)
class RowWise:
    """An optimizer whose parameters and gradients are lists of a tree's leaves."""

    optimizer: optax.GradientTransformationExtraArgs
    treedef: Any  # of the parameters
    names: tuple[str, ...]  # of its leaves, for errors
    extra_args: Mapping[str, Any]

    def owners(
        self, params: Sequence[Any], tables: Sequence[int], opt_state: PyTree
    ) -> Owners:
        """For each leaf of the state, the table whose rows it has, or None.

        A leaf has a table's rows if its shape changes when the table is a row longer,
        by ``eval_shape``, which also works for ``masked``, ``partition`` and the like.
        """
        structs = [_struct(x) for x in params]
        expected = self._state_of(structs)
        got = [(name, np.shape(x)) for name, x in named_leaves("opt_state", opt_state)]
        if got != expected:
            differing = sorted({*map(str, got)} ^ {*map(str, expected)})
            raise ValueError(
                "opt_state is not what optimizer.init(params) gives:"
                f" {', '.join(differing[:4]) or 'the order of leaves'} differ."
            )
        owners: list[int | None] = [None] * len(expected)
        for table in tables:
            shape, dtype = structs[table].shape, structs[table].dtype
            longer = list(structs)
            longer[table] = jax.ShapeDtypeStruct((shape[0] + 1, *shape[1:]), dtype)
            pairs = zip(expected, self._state_of(longer), strict=True)
            for i, ((name, old), (_, new)) in enumerate(pairs):
                if old != new and old != shape:
                    raise ValueError(
                        f"{self.names[table]} is of rows, but the optimizer keeps"
                        f" {name} for it, whose shape is not the parameter's, {shape}."
                        " Give a dense gradient: leave the leaf out of `sparse`, or use"
                        " rows.to_dense()."
                    )
                owners[i] = table if old != new else owners[i]
        return owners

    def program(self, params: Sequence[Any]) -> tuple[list[str], set[int]]:
        """The primitives of one update, which is traced, and its whole numbers."""
        tree = self.treedef.unflatten(map(_struct, params))
        update = functools.partial(self.optimizer.update, **self.extra_args)
        state = jax.eval_shape(self.optimizer.init, tree)
        closed = jax.make_jaxpr(update)(tree, state, tree)
        eqns = list(all_eqns(closed.jaxpr))
        atoms = [x.val for eqn in eqns for x in eqn.invars if isinstance(x, Literal)]
        numbers = {int(x) for x in (*atoms, *closed.consts) if _is_integer(x)}
        return [eqn.primitive.name for eqn in eqns], numbers

    def _state_of(self, params: list[Any]) -> list[tuple[str, tuple[int, ...]]]:
        state = jax.eval_shape(self.optimizer.init, self.treedef.unflatten(params))
        return [(name, tuple(x.shape)) for name, x in named_leaves("opt_state", state)]

    def update_dense(
        self, grads: Sequence[Any], opt_state: PyTree, params: Sequence[Any]
    ) -> tuple[list[Any], PyTree]:
        """The optimizer's own update."""
        trees = self.treedef.unflatten(grads), opt_state, self.treedef.unflatten(params)
        updates, state = self.optimizer.update(*trees, **self.extra_args)
        return self.treedef.flatten_up_to(updates), state

    def update(
        self,
        grads: Sequence[Any],
        opt_state: PyTree,
        params: Sequence[Any],
        owners: Owners,
    ) -> tuple[list[Any], PyTree]:
        """One update; where ``grads`` has rows, the optimizer sees only those rows."""
        indices, inner_grads = {}, list(grads)
        for i, grad in enumerate(grads):
            if is_rows(grad):
                values, size = jnp.asarray(grad.values), grad.dense_shape[0]
                summed, indices[i] = sum_duplicates(values, grad.indices, size)
                inner_grads[i] = summed.astype(values.dtype)

        def rows_of(x: Any, table: int | None) -> Any:
            if table not in indices:
                return x
            return jnp.asarray(x).at[indices[table]].get(mode="fill", fill_value=0)

        def scatter(x: Any, rows: Any, table: int | None) -> Any:
            if table not in indices:
                return rows
            return set_rows(jnp.asarray(x), indices[table], rows)

        state, state_def = jax.tree.flatten(opt_state)
        updates, new_state = self.update_dense(
            inner_grads,
            state_def.unflatten(map(rows_of, state, owners)),
            list(map(rows_of, params, range(len(params)))),
        )
        new_state = map(scatter, state, jax.tree.leaves(new_state), owners)
        for i, rows in indices.items():
            updates[i] = _as_rows(updates[i], rows, np.shape(params[i]))
        return updates, state_def.unflatten(new_state)


def _is_integer(x: Any) -> bool:
    dtype = jnp.result_type(x)
    is_real = any(jnp.issubdtype(dtype, k) for k in (jnp.integer, jnp.floating))
    return is_real and np.ndim(x) == 0 and float(x).is_integer()


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))


def _as_rows(
    values: jax.Array, indices: jax.Array, shape: tuple[int, ...]
) -> IndexedRows:
    """Rows to apply; a padding row becomes zeros, at an index that exists."""
    exist = indices < shape[0]
    mask = exist.reshape(exist.shape + (1,) * (values.ndim - 1))
    values = jnp.where(mask, values, jnp.zeros((), values.dtype))
    return IndexedRows(values, jnp.where(exist, indices, indices[:1]), shape)
