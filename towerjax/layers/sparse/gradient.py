"""Differentiate by large tables: the gradient is of the rows that were looked up."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from towerjax.collectives.sparse_rows import IndexedRows, widen_indices
from towerjax.proof.equation import Site, user_line
from towerjax.proof.interpreter import Interpreter, evaluate_eqn
from towerjax.types import PyTree, leaf_name
from towerjax.types.leaves import listed


class Lookup(NamedTuple):
    """How an equation reads whole rows of a table ``[N, ...]``."""

    shape: tuple[int, ...]  # of the table
    offsets: range  # index i reads the rows i + offset
    dims: tuple[int, ...]  # the output's dims over a row's elements
    column: int | None  # which number of an index vector is the row
    clips: bool  # an index out of range is clipped; else it has no gradient

    def by_row(self, x: jax.Array) -> jax.Array:
        """An array of the output's shape as rows ``[r, ...]`` of the table."""
        x = jnp.moveaxis(x, self.dims, range(x.ndim - len(self.dims), x.ndim))
        row = self.shape[1:]
        return x.reshape((math.prod(x.shape[: x.ndim - len(row)]), *row))

    def rows(self, operands: list[Any]) -> tuple[jax.Array, jax.Array]:
        """The indices of the rows read, in the order of `by_row`, and if in range."""
        if self.column is not None:
            first = operands[0][..., self.column]
        else:
            first = jnp.asarray(operands[0] if operands else 0)
        first = widen_indices(first).reshape(-1)
        offsets = jnp.asarray(self.offsets, first.dtype)[None]
        last = self.shape[0] - 1 - max(self.offsets, default=0)
        in_range = ((first >= 0) & (first <= last)) | self.clips
        indices = jnp.clip(first, 0, last)[:, None] + offsets
        in_range = jnp.broadcast_to(in_range[:, None], indices.shape)
        return indices.reshape(-1), in_range.reshape(-1)


def lookup_of(eqn: JaxprEqn) -> Lookup | None:
    """How the equation reads whole rows of its first operand; None if it does not."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("gather", "dynamic_slice", "slice"):
        return None
    table: Any = eqn.invars[0].aval
    shape = tuple(table.shape)
    if name == "gather":
        return _gather_lookup(params, shape)
    if name == "dynamic_slice":
        rows, others = range(params["slice_sizes"][0]), params["slice_sizes"][1:]
    else:
        start, limit = params["start_indices"], params["limit_indices"]
        strides = params["strides"] or (1,) * len(shape)
        rows = range(start[0], limit[0], strides[0])
        others = map(len, map(range, start[1:], limit[1:], strides[1:]))
    if tuple(others) != shape[1:]:
        return None
    return Lookup(shape, rows, (), None, clips=True)


def _gather_lookup(params: Any, shape: tuple[int, ...]) -> Lookup | None:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    clips = params["mode"] == lax.GatherScatterMode.CLIP
    columns = numbers.start_index_map
    # CLIP makes the start of a dim that is read whole 0, whatever the index says.
    finds_rows = columns == (0,) or (clips and 0 in columns)
    keeps_rows = numbers.collapsed_slice_dims in ((0,), ())
    is_whole = tuple(sizes[1:]) == shape[1:] and not numbers.operand_batching_dims
    if not (finds_rows and keeps_rows and is_whole):
        return None
    dims = tuple(numbers.offset_dims)
    return Lookup(shape, range(sizes[0]), dims, columns.index(0), clips)


Selection: TypeAlias = Callable[[str], bool] | Collection[str] | str
"""Selects leaves: a predicate on their paths, or their paths or last names."""

# Primitives that may come before a lookup: they map each row to a row.
_ROW_BY_ROW = frozenset(("convert_element_type", "copy"))


def sparse_value_and_grad(
    fn: Callable[..., Any], sparse: Selection, *, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad(fn)``, with gradients of tables as ``IndexedRows``.

    The gradient of a table ``[N, ...]`` of which ``fn`` looks up ``r`` rows consists of
    these rows; no array of size ``N`` is made. A row that is looked up twice is in it
    twice: both are added when the gradient is applied.

    Any lookup of whole rows counts: ``table[ids]``, ``jnp.take(table, ids, axis=0)``
    in each mode, ``table[i]``, ``table[:n]``, Flax's ``Embed``, under ``jax.jit`` and
    ``jax.vmap`` too, and of a table cast to another float dtype. An id out of range is
    counted from the end, clipped or wrapped as JAX does. Where JAX gives it no
    gradient, its row is of zeros, at the index of a row that was looked up (row 0 or
    the last one where none was).

    ``fn`` is traced to a jaxpr. Each lookup in it becomes a lookup in a constant table,
    plus zeros; the derivative by these zeros is the gradient of the rows.

    Args:
      fn: A function of ``params`` and others; returns a scalar, or with ``has_aux``
        ``(scalar, aux)``.
      sparse: Selects the leaves of ``params`` that are tables: a predicate on the
        leaf's path as ``jax.tree_util.keystr`` writes it, such as
        ``"['words']['embedding']"``; or such paths, or last names, such as
        ``["embedding"]``, which select every leaf with that name. The ``.value`` of a
        box, such as Flax's variables, is no name. An empty list gives
        ``jax.value_and_grad``.
      has_aux: Whether ``fn`` returns ``(scalar, aux)``.

    Returns:
      ``(params, *args, **kwargs) -> (value, grads)``, or ``((value, aux), grads)``:
      grads are like ``params``, with an ``IndexedRows`` for each table; without rows
      where none was looked up.

    Raises:
      ValueError: When called: ``sparse`` names a leaf that is not there, or is true
        of none; a table is a scalar, or ``fn`` uses it other than by looking up rows,
        such as multiplied whole, or looks rows up inside a ``lax.scan``. The message
        names the leaf, the primitive and the line.
      TypeError: As ``jax.value_and_grad``; or a table is not of real floats.

    Example:
      >>> import numpy as np
      >>> params = {"table": np.ones((1000, 2), np.float32), "scale": np.float32(3)}
      >>> def loss(params, ids):
      ...     return (params["table"][ids] * params["scale"]).sum()
      >>> gradient = jax.jit(sparse_value_and_grad(loss, ["table"]))
      >>> value, grads = gradient(params, np.array([7]))
      >>> grads["table"].indices.tolist(), grads["table"].values.tolist()
      ([7], [[3.0, 3.0]])
      >>> float(grads["scale"])
      2.0

    Source:
      ``IndexedSlices``, the gradient of ``tf.gather`` in TensorFlow (2015).
    """

    @functools.wraps(fn)
    def value_and_grad(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        selected = _select_leaves(sparse, [path for path, _ in with_paths])
        leaves = [leaf for _, leaf in with_paths]
        tables = {
            i: _table_of(leaf_name("params", path), i, leaf)
            for i, (path, leaf) in enumerate(with_paths)
            if i in selected
        }

        def of_leaves(leaves: list[Any]) -> tuple[Any, Any]:
            out = fn(jax.tree.unflatten(treedef, leaves), *args, **kwargs)
            if not has_aux:
                return out, None
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError(
                    f"With has_aux=True fn must return (scalar, aux), not {out!r}."
                )
            return out

        out, grads = _value_and_grad(of_leaves, leaves, tables, has_aux)
        return out, jax.tree.unflatten(treedef, grads)

    return value_and_grad


class _Table(NamedTuple):  # the value of a selected leaf in the jaxpr, with its casts
    name: str
    leaf: int
    array: Any
    casts: tuple[JaxprEqn, ...] = ()


class _Read(NamedTuple):  # one lookup in the jaxpr
    leaf: int
    lookup: Lookup
    output: Any  # its shape and dtype


class _Lookups:
    """The lookups in one evaluation of the jaxpr, in order; and the zeros to add."""

    def __init__(self, zeros: list[Any] | None) -> None:
        self.zeros = zeros
        self.reads: list[_Read] = []
        self.rows: list[Any] = []

    def read(self, eqn: JaxprEqn, lookup: Lookup, operands: list[Any]) -> Any:
        table = operands[0]
        (out,) = evaluate_eqn(eqn, [table.array, *operands[1:]])
        if self.zeros is not None:
            out = _with_zero(out, self.zeros[len(self.reads)])
        self.reads.append(_Read(table.leaf, lookup, jax.typeof(out)))
        self.rows.append(lookup.rows(operands[1:]))
        return _cast_table(table._replace(array=out))


def _value_and_grad(
    fn: Callable[..., Any], leaves: list[Any], tables: dict[int, _Table], has_aux: bool
) -> tuple[Any, list[Any]]:
    kept: list[Any] = []  # of what fn returns, what is no tracer
    treedef: Any = None
    reads: list[_Read] = []

    def flat(leaves: list[Any]) -> list[Any]:
        nonlocal treedef
        outs, treedef = jax.tree.flatten(fn(leaves))
        kept[:] = [None if isinstance(x, Tracer) else x for x in outs]
        return [x for x in outs if isinstance(x, Tracer)]

    def with_kept(outs: list[Any]) -> tuple[Any, Any]:
        traced = iter(outs)
        return treedef.unflatten([next(traced) if x is None else x for x in kept])

    closed = jax.make_jaxpr(flat)(leaves)

    def run(dense: dict[int, Any], zeros: list[Any] | None) -> tuple[Any, Any]:
        lookups = _Lookups(zeros)
        inputs = [tables[i] if i in tables else dense[i] for i in range(len(leaves))]
        outs = list(map(_cast_table, _evaluate(closed, inputs, lookups, None)))
        reads[:] = lookups.reads
        return with_kept(outs)[0], (outs, lookups.rows)

    dense = {i: leaf for i, leaf in enumerate(leaves) if i not in tables}
    jax.eval_shape(functools.partial(run, zeros=None), dense)  # fills `reads`
    zeros = [jnp.zeros(x.output.shape, x.output.dtype) for x in reads]
    (value, (outs, rows)), (grads, by_lookup) = jax.value_and_grad(
        run, argnums=(0, 1), has_aux=True
    )(dense, zeros)
    for i, table in tables.items():
        found = [
            (x.lookup.by_row(cotangent), *read_rows)
            for x, cotangent, read_rows in zip(reads, by_lookup, rows, strict=True)
            if x.leaf == i
        ]
        grads[i] = _join_lookups(jnp.asarray(table.array), found)
    out = (value, with_kept(outs)[1]) if has_aux else value
    return out, [grads[i] for i in range(len(leaves))]


def _evaluate(
    closed: Any, inputs: list[Any], lookups: _Lookups, outer: Site | None
) -> list[Any]:
    walk = Interpreter(closed, inputs)
    for eqn in closed.jaxpr.eqns:
        outs = _apply(eqn, [walk.read(v) for v in eqn.invars], lookups, outer)
        walk.values.update(zip(eqn.outvars, outs, strict=True))
    return [walk.read(v) for v in closed.jaxpr.outvars]


def _apply(
    eqn: JaxprEqn, operands: list[Any], lookups: _Lookups, outer: Site | None
) -> list[Any]:
    tables = [x for x in operands if isinstance(x, _Table)]
    name = eqn.primitive.name
    if not tables:
        return evaluate_eqn(eqn, operands)
    if name == "jit":
        return _evaluate(eqn.params["jaxpr"], operands, lookups, (eqn, outer))
    if name == "stop_gradient":
        return evaluate_eqn(eqn, list(map(_cast_table, operands)))
    if len(tables) == 1 and tables[0] is operands[0]:
        out: Any = eqn.outvars[0].aval
        is_float = jnp.issubdtype(out.dtype, jnp.floating)
        if name in _ROW_BY_ROW and is_float:
            return [tables[0]._replace(casts=(*tables[0].casts, eqn))]
        if lookup := lookup_of(eqn):
            return [lookups.read(eqn, lookup, operands)]
    line = user_line((eqn, outer))
    raise ValueError(
        f"{tables[0].name} is selected by `sparse`, but {name} uses it otherwise than"
        f" by looking up whole rows{line and f', at {line}'}. Look up its rows outside"
        f" of {name}, as in table[ids]; or leave it out of `sparse`."
    )


def _cast_table(x: Any) -> Any:
    """The array of a table, cast as in the jaxpr; anything else as it is."""
    if isinstance(x, _Table):
        table, x = x, x.array
        for eqn in table.casts:
            (x,) = evaluate_eqn(eqn, [x])
    return x


@jax.custom_jvp
def _with_zero(x: jax.Array, zero: jax.Array) -> jax.Array:
    """``x``, bit for bit, whose derivative is that of ``x + zero`` by ``zero`` only."""
    del zero
    return x


@_with_zero.defjvp
def _with_zero_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def _join_lookups(table: jax.Array, found: list[tuple[jax.Array, ...]]) -> IndexedRows:
    none = jnp.zeros((0, *table.shape[1:]), table.dtype), jnp.zeros(0, jnp.int32)
    parts = zip(*(found or [(*none, jnp.zeros(0, bool))]), strict=True)
    values, indices, in_range = map(jnp.concatenate, parts)
    if in_range.size:
        mask = in_range.reshape(in_range.shape + (1,) * (values.ndim - 1))
        values = jnp.where(mask, values, jnp.zeros((), values.dtype))
        # Rows of zeros get an index that was looked up: a lazy update touches no other.
        indices = jnp.where(in_range, indices, indices[jnp.argmax(in_range)])
    return IndexedRows(values, indices, table.shape)


def _table_of(name: str, leaf: int, x: Any) -> _Table:
    dtype = jnp.asarray(x).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} is selected by `sparse`, but is {dtype}; tables are real floats."
        )
    if not jnp.ndim(x):
        raise ValueError(
            f"{name} is selected by `sparse`, but is a scalar, which has no rows. Leave"
            " it out of `sparse`."
        )
    return _Table(name, leaf, x)


def _select_leaves(sparse: Selection, paths: list[Any]) -> list[int]:
    names = [jax.tree_util.keystr(path) for path in paths]
    if callable(sparse):
        selected = [i for i, name in enumerate(names) if sparse(name)]
        missing = [] if selected else ["`sparse` is true of no leaf"]
    else:
        wanted = [sparse] if isinstance(sparse, str) else list(sparse)
        pairs = zip(names, map(_last_name, paths), strict=True)
        called = [{name, last} for name, last in pairs]
        selected = [i for i, both in enumerate(called) if both.intersection(wanted)]
        unknown = [name for name in wanted if name not in set().union(*called)]
        missing = [f"`sparse` names {name!r}, which is no leaf" for name in unknown]
    if missing:
        raise ValueError(
            f"{listed(missing)}. The leaves of params are"
            f" {', '.join(names) or 'none'}. Give a path, or its last name."
        )
    return selected


def _last_name(path: tuple[Any, ...]) -> str:
    """The last name of a path, such as ``embedding``, without a box's ``.value``."""
    if len(path) > 1 and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    if not path:
        return ""
    return jax.tree_util.keystr(path[-1:], simple=True)
