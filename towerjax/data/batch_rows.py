"""Split a global batch over towers: checks, padding, row counts and row weights."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.sparse_rows import is_sparse
from towerjax.mesh.private_jax import DeviceArray
from towerjax.types import PyTree, Whole
from towerjax.types.options import check_choice
from towerjax.types.refusals import (
    a_type,
    differences,
    few,
    listed,
    problem_of_rows,
    refuse_unheld,
    together,
)
from towerjax.types.trees import (
    key_data,
    map_parts,
    named_leaves,
    parts_of,
    put_parts,
    refuse_unsortable,
    sorted_keys,
)
from towerjax.types.version import page

Remainder: TypeAlias = Literal["pad", "drop", "error"]
"""What becomes of a batch that the towers cannot share evenly."""


def check_remainder(remainder: str) -> None:
    """Raise unless ``remainder`` is a known rule for uneven batches."""
    check_choice("remainder", remainder, get_args(Remainder))


@dataclasses.dataclass(frozen=True)
class Signature:
    """The tree, shapes and dtypes of a batch; one program serves one signature."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]  # (shape, dtype) of each leaf

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.leaves))

    def __hash__(self) -> int:
        """Give the hash, computed once: every step looks up a program by it."""
        return self._hash


def batch_signature(rows: PyTree, replicated: list[PyTree] | None = None) -> Signature:
    """Sign a tree, or a batch that `without_replicated` split."""
    batch = with_replicated(rows, replicated) if replicated else rows
    leaves, treedef = jax.tree.flatten(batch)
    return Signature(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def fingerprint_of(batch: PyTree) -> str:
    """Write a batch's tree, shapes and a hash of its values as text.

    Processes compare this text, to find that their batches differ.
    """
    leaves, treedef = jax.tree.flatten(batch)
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.asarray(key_data(leaf)).tobytes())
    kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return f"{treedef} of {kinds}, contents {digest.hexdigest()[:12]}"


def without_replicated(batch: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Empty the `Whole` leaves of a batch; return it, and what they held."""
    with sorted_keys("batch", batch):
        held = [x.value for x in parts_of(Whole, batch)]
    return map_parts(Whole, lambda _: Whole(None), batch), held


def with_replicated(rows: PyTree, held: list[PyTree]) -> PyTree:
    """Put the values of `Whole` leaves back, the inverse of `without_replicated`."""
    return put_parts(Whole, rows, held)


def count_examples(batch: PyTree, *, shapes: bool = False) -> int:
    """Count the examples ``B``; raise unless all leaves have ``B`` rows."""
    leaves = named_leaves("batch", batch)
    if not leaves:
        raise ValueError(
            f"The batch holds no arrays: {batch!r}. If towers draw their examples"
            " themselves, pass row numbers, {'row': np.arange(64)}."
        )
    problems = [(name, problem_of_rows(x, shapes=shapes)) for name, x in leaves]
    if bad := together((name, problem) for name, problem in problems if problem):
        raise ValueError(
            "Every leaf of a batch must be an array of numbers with one row per"
            f" example, but {listed(bad)}. Wrap lists in np.asarray, and values that"
            " are the same for all rows in tj.Whole(...)."
            + " A state comes first: step(state, batch)."
            * hasattr(batch, "opt_state")
        )
    first = {leaf.shape[0]: name for name, leaf in reversed(leaves)}
    if len(first) > 1:
        sizes = few(f"{name}: {size}" for size, name in reversed(first.items()))
        raise ValueError(
            "All leaves of a batch must have the same number of examples in dim 0, but"
            f" got {', '.join(sizes)}. Wrap a leaf that every tower needs whole in"
            " tj.Whole(...). Pad other leaves, as in "
            + page("how_to/uneven_data", "Graphs and other ragged examples")
        )
    (size,) = first
    if size == 0:
        name, leaf = leaves[0]
        raise ValueError(
            f"The batch is empty: {name} has shape {leaf.shape}. Pass at least one"
            " example."
        )
    return size


def refuse_other_than_rows(rows: PyTree, root: str = "batch") -> None:
    """Raise if a leaf is sparse or `Whole`, for callers that accept dense rows only."""

    def is_replicated(x: Any) -> bool:
        return isinstance(x, Whole) and x.value is not None

    leaves = named_leaves(root, rows, lambda x: is_sparse(x) or is_replicated(x))
    whole = "has no rows to split or join here. Pass its value as an argument."
    sparse = (
        "whose entries would be taken for examples here; only a call of a step takes"
        " sparse leaves. Make it dense: x.todense(), or x.to_dense() of IndexedRows."
    )
    for is_other, rule in ((is_replicated, f"which {whole}"), (is_sparse, sparse)):
        bad = [f"{n} is {a_type(x)}" for n, x in leaves if is_other(x)]
        if bad:
            raise ValueError(f"{listed(bad)}, {rule}")


def may_wrap(batch: PyTree) -> bool:
    """Look for integers of the host that are wider than 32 bits.

    Devices hold 32 bits, so that such an integer may wrap around.
    """
    leaves = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)]
    return any(x.dtype.kind in "iu" and x.dtype.itemsize > 4 for x in leaves)


def refuse_wrapping(batch: PyTree) -> None:
    """Raise if an integer would overflow when it is placed on the devices."""
    if may_wrap(batch):  # only then, because naming all leaves is slow
        refuse_unheld("batch", batch)


class Shares(NamedTuple):
    """The towers and micro-batches that share the rows of a batch evenly."""

    towers: int
    micro_batches: int
    devices: int  # the number of devices over which a tower's rows are split

    def __str__(self) -> str:
        """Describe the shares, as in ``"4 towers of 3 micro-batches"``."""
        parts = [f"{self.towers} tower{'s' * (self.towers > 1)}"]
        parts += [f"of {self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"on {self.devices} devices along rows="] * (self.devices > 1)
        return " ".join(parts)


def fit_batch(
    batch: PyTree,
    shared_by: Shares,
    remainder: Remainder,
    *,
    full_size: int = 0,
    may_drop_all: bool = False,
) -> tuple[PyTree, int]:
    """Cut or pad the batch so that its rows can be shared evenly.

    ``full_size`` is a larger number of rows to pad to. Returns the batch, and how many
    of its rows are examples.
    """
    size = count_examples(batch)
    shares = math.prod(shared_by)
    if size < shares and remainder == "drop" and may_drop_all:
        return batch, 0
    refuse_wrapping(batch)
    over = size % shares
    if remainder == "pad":
        return resize(batch, max(size + -size % shares, full_size)), size
    if over and remainder == "error":
        name = named_leaves("batch", batch)[0][0]
        raise ValueError(
            f"{name} has {size} examples, which {shared_by} cannot share evenly. Use a"
            f" multiple of {shares}, or write remainder='pad' (rows of weight 0) or"
            " remainder='drop'."
        )
    if size < shares:
        raise ValueError(
            f"remainder='drop' leaves nothing of a batch of {size} examples for"
            f" {shared_by}. Use remainder='pad'."
        )
    return resize(batch, size - over), size - over


def resize(batch: PyTree, rows: int) -> PyTree:
    """Cut a batch to ``rows`` rows, or pad it to them with its last row."""

    def resize_leaf(x: Any) -> Any:
        missing = rows - x.shape[0]
        library = jnp if isinstance(x, jax.Array) else np
        if missing <= 0:
            return _rows(x, 0, rows) if missing else x
        # Padding repeats the last row, because a row of zeros may give NaN in a loss.
        # Zeros are used only if the array has no row.
        last = _rows(x, x.shape[0] - 1, x.shape[0]) if x.shape[0] else None
        last = library.zeros((1, *x.shape[1:]), x.dtype) if last is None else last
        return library.concatenate([x, library.repeat(last, missing, axis=0)])

    return jax.tree.map(resize_leaf, batch)


def _rows(x: Any, start: int, stop: int) -> Any:
    """Take ``x[start:stop]``, without sending the bounds to the device of ``x``."""
    is_jax = isinstance(x, jax.Array)
    return lax.slice_in_dim(x, start, stop) if is_jax else x[start:stop]


def split_rows(batch: PyTree, num_towers: int) -> PyTree:
    """Split rows over towers: ``[B, ...]`` becomes ``[T, b, ...]``."""
    # The size is given, not -1: JAX cannot infer the number of rows of an array without
    # elements.
    return jax.tree.map(
        lambda x: x.reshape(num_towers, x.shape[0] // num_towers, *x.shape[1:]), batch
    )


def concat_rows(rows: PyTree) -> PyTree:
    """Join the rows of all towers, which is the inverse of `split_rows`."""
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), rows
    )


def explain_change(expected: Signature, got: Signature) -> str:
    """List as text the leaves in which two signatures differ."""
    leaves_got, wanted = (
        x.treedef.unflatten(jax.ShapeDtypeStruct(*leaf) for leaf in x.leaves)
        for x in (got, expected)
    )
    return "\n".join(f"  * {line}" for line in differences("batch", leaves_got, wanted))


def refuse_unlike(signatures: Sequence[Signature]) -> None:
    """Raise if batches that are to be stacked have different signatures."""
    for other in (x for x in signatures if x != signatures[0]):
        raise ValueError(
            "A call of several steps needs batches of the same shapes and dtypes, but"
            f" one differs:\n{explain_change(signatures[0], other)}\nGive all batches"
            " the same shapes and dtypes, or write iterations=1."
        )


def counts_of_towers(num_valid: int, rows: int, num_towers: int) -> np.ndarray:
    """Count the examples of each tower, ``[T]``; padding rows come last."""
    left = num_valid - rows * np.arange(num_towers)
    return np.clip(left, 0, rows).astype(np.int32)


def row_weights(
    num_valid: jax.Array, first_row: Any, rows: int, of_rows: int | None = None
) -> jax.Array:
    """Weight the rows: 1 for an example, 0 for padding.

    ``num_valid``, the number of examples, is ``()`` or ``[T, 1]``. The rows are
    numbered from ``first_row`` on, and rows with a number below ``num_valid`` are
    examples.
    """
    # Functions of lax are used, because JAX traces each function of jnp as a function
    # of its own, which makes a step's first call slower.
    shape = (*num_valid.shape[:-1], rows)
    here = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    here = lax.add(here, lax.convert_element_type(first_row, jnp.int32))
    num_valid = lax.broadcast_in_dim(num_valid, shape, range(num_valid.ndim))
    is_valid = lax.lt(here, num_valid)
    if of_rows is not None:  # XLA sees that all weights are 1
        is_valid = lax.bitwise_or(is_valid, lax.ge(num_valid, jnp.int32(of_rows)))
    return lax.convert_element_type(is_valid, jnp.float32)


def flatten_with_key(batch: PyTree) -> tuple[list[Any], Any, Any]:
    """Flatten a batch to its leaves, structure, and a key of its checks.

    Two batches with one key pass the same checks. The key is None if a leaf is not a
    plain array.
    """
    try:
        leaves, treedef = jax.tree.flatten(batch)
    except ValueError:
        refuse_unsortable("batch", batch)
        raise
    key: list[Any] = [jax.config.read("jax_enable_x64"), treedef]
    for x in leaves:
        if type(x) is np.ndarray:
            key += x.shape, x.dtype
        elif type(x) is DeviceArray and not x.is_deleted():
            key += x.shape, x.dtype, x.sharding
        else:
            return leaves, treedef, None
    return leaves, treedef, tuple(key)


def is_list_of_examples(batch: PyTree) -> bool:
    """Return whether a batch is a list of several trees with the same leaves."""
    if not isinstance(batch, list) or len(batch) < 2:
        return False
    kinds = {
        (jax.tree.structure(x), *(np.shape(leaf) for leaf in jax.tree.leaves(x)))
        for x in batch
    }
    return len(kinds) == 1
