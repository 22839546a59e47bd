"""How does a global batch become tower slices? Checks, padding, placing, weights."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.placement import Placement, place, place_rows
from towerjax.types import Layout, PyTree, named_leaves

Remainder: TypeAlias = Literal["pad", "drop", "error"]


def check_remainder(remainder: str) -> None:
    """Raise unless the rule for uneven batches is one that there is.

    Args:
      remainder: ``"pad"``, ``"drop"`` or ``"error"``.

    Raises:
      ValueError: It is another word.
    """
    if remainder not in get_args(Remainder):
        raise ValueError(
            f"remainder={remainder!r} is not one of 'pad' (rows of weight 0 fill the"
            " batch up), 'drop' (the rows over are left out), 'error'."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """What must stay the same from step to step for one program to serve them all.

    Attributes:
      treedef: The batch's tree.
      leaves: Each leaf's shape and dtype.
    """

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.leaves))

    def __hash__(self) -> int:
        """Looked up at every step, so computed once."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """The same tree of the same shapes and dtypes?"""
        return self is other or (
            isinstance(other, Signature)
            and self.treedef == other.treedef
            and self.leaves == other.leaves
        )


def batch_signature(batch: PyTree) -> Signature:
    """The signature of a batch.

    Args:
      batch: A pytree of arrays.

    Returns:
      A hashable value.
    """
    leaves, treedef = jax.tree.flatten(batch)
    return Signature(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def count_examples(batch: PyTree) -> int:
    """``B``: how many examples the batch holds, once its leaves agree on that.

    Args:
      batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

    Returns:
      The size of dim 0.

    Raises:
      ValueError: No leaves, a leaf that is not an array, a scalar leaf, leaves
        with different leading sizes, or no examples; all failing leaves at once.

    Example:
      >>> count_examples({"x": np.zeros((6, 2)), "y": np.zeros(6)})
      6
    """
    leaves = named_leaves("batch", batch)
    if not leaves:
        raise ValueError(
            f"The batch holds no arrays: {batch!r}. Pass a pytree of arrays whose"
            " dim 0 runs over examples."
        )
    bad = [
        f"{name} is {_describe(leaf)}"
        for name, leaf in leaves
        if not isinstance(leaf, np.ndarray | jax.Array)
        or leaf.ndim == 0
        or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSM")
    ]
    if bad:
        raise ValueError(
            "Every leaf of a batch is an array of numbers, dim 0 of which runs over"
            " examples, but "
            + "; ".join(bad)
            + ". Wrap lists in np.asarray, and give constants to the loss function by"
            " a closure instead of the batch."
        )
    sizes = {leaf.shape[0] for _, leaf in leaves}
    if len(sizes) > 1:
        found = ", ".join(f"{name}: {leaf.shape[0]}" for name, leaf in leaves)
        raise ValueError(
            "All leaves of a batch have the same number of examples in dim 0, but"
            f" got {found}. Split or pad them alike before the step."
        )
    size = sizes.pop()
    if size == 0:
        raise ValueError(
            f"The batch is empty: {leaves[0][0]} has shape {leaves[0][1].shape}. Skip"
            " batches without examples in the input."
        )
    return size


def _describe(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | jax.Array):
        kind = "a scalar" if leaf.ndim == 0 else "an array"
        return f"{kind} of dtype {leaf.dtype}"
    return f"{leaf!r} of type {type(leaf).__name__}"


def fit_batch(
    batch: PyTree, shares: int, remainder: Remainder, *, full_size: int | None = None
) -> tuple[PyTree, int]:
    """The batch with a number of rows that all towers can share, and its examples.

    Padding repeats the last row, so that a padded row is as harmless as a real
    one; it never counts, because its weight is 0.

    Args:
      batch: A pytree of arrays ``[B, ...]``.
      shares: Rows go to this many equal shares: ``T`` times the micro-batches.
      remainder: What to do when ``shares`` does not divide ``B``: ``"pad"``,
        ``"drop"`` or ``"error"``.
      full_size: With ``"pad"``, pad a smaller batch up to this, a multiple of
        ``shares``; None pads to the next multiple.

    Returns:
      ``(batch, num_valid)``: leaves ``[B', ...]`` with ``shares`` dividing ``B'``,
      and how many of the rows are examples.

    Raises:
      ValueError: The batch is malformed (`count_examples`), or it does not divide
        and ``remainder="error"``, or dropping leaves nothing.

    Example:
      >>> padded, num_valid = fit_batch({"x": np.arange(6)}, 4, "pad")
      >>> padded["x"].tolist(), num_valid
      ([0, 1, 2, 3, 4, 5, 5, 5], 6)
    """
    size = count_examples(batch)
    over = size % shares
    if remainder == "pad":
        target = size + (shares - over if over else 0)
        if full_size is not None and size <= full_size:
            target = full_size
        return pad_rows(batch, target), size
    if over == 0:
        return batch, size
    if remainder == "error":
        name = named_leaves("batch", batch)[0][0]
        raise ValueError(
            f"{name} has {size} examples, which {shares} towers (times micro-batches)"
            f" cannot share evenly: {size} = {size // shares} * {shares} + {over}. Use"
            f" a batch size that {shares} divides, or say remainder='pad' (rows of"
            " weight 0; use tower.weight in the loss) or remainder='drop'."
        )
    if size < shares:
        raise ValueError(
            f"remainder='drop' leaves nothing of a batch of {size} examples for"
            f" {shares} towers (times micro-batches). Use remainder='pad'."
        )
    return jax.tree.map(lambda x: x[: size - over], batch), size - over


def pad_rows(batch: PyTree, size: int) -> PyTree:
    """The batch with its last row repeated until it has ``size`` rows.

    Args:
      batch: A pytree of arrays ``[B, ...]``, ``1 <= B <= size``.
      size: The number of rows wanted.

    Returns:
      The same tree with leaves ``[size, ...]``; the same object when it fits.
    """

    def pad(x: Any) -> Any:
        missing = size - x.shape[0]
        if missing == 0:
            return x
        library = jnp if isinstance(x, jax.Array) else np
        return library.concatenate([x, library.repeat(x[-1:], missing, axis=0)])

    return jax.tree.map(pad, batch)


def explain_change(expected: Signature, got: Signature) -> str:
    """Which leaves differ between two signatures, one bullet a leaf.

    Args:
      expected: A signature as `batch_signature` gives it.
      got: Another one.

    Returns:
      A text of bullets, never empty for signatures that differ.
    """
    before, after = _signature_leaves(expected), _signature_leaves(got)
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None:
            lines.append(f"  * batch{name} is new: {new}")
        elif new is None:
            lines.append(f"  * batch{name} is missing; it was {old}")
        elif old != new:
            lines.append(f"  * batch{name} was {old} and is {new}")
    if not lines:
        lines.append(
            f"  * the containers were {expected.treedef} and are {got.treedef}"
        )
    return "\n".join(lines)


def _signature_leaves(signature: Signature) -> dict[str, str]:
    texts = [f"{dtype}{list(shape)}" for shape, dtype in signature.leaves]
    tree = jax.tree.unflatten(signature.treedef, texts)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): text for path, text in paths}


def row_weights(num_valid: jax.Array, first_row: jax.Array, rows: int) -> jax.Array:
    """Which of a tower's rows are examples.

    Args:
      num_valid: ``()`` int32, how many rows of the global batch are examples.
      first_row: ``()`` int32, where in the global batch the tower's rows start.
      rows: ``b``, how many rows the tower has.

    Returns:
      ``[b]`` float32, 1 for an example and 0 for padding.
    """
    return (first_row + jnp.arange(rows) < num_valid).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """A global batch, or several stacked ones, on the devices of its towers.

    Attributes:
      args: What a program takes of it: ``(arrays, num_valid)`` with leaves
        ``[B, ...]`` and ``()`` int32; for ``K`` steps ``(arrays, num_valid, count)``
        with ``[K, B, ...]``, ``[K]`` and ``()``.
      num_examples: How many rows of each batch are examples.
      padded: Are there rows that are none?
      signature: As `batch_signature` gives it, of ``arrays``.
    """

    args: tuple[PyTree, ...]
    num_examples: tuple[int, ...]
    padded: bool
    signature: Signature

    @property
    def arrays(self) -> PyTree:
        """The batch itself, on the devices."""
        return self.args[0]


class Placer:
    """Checks, fits and places the batches of one step.

    Args:
      placement: The step's towers and devices.
      shares: What must divide the rows: ``T`` times the micro-batches.
      remainder: What to do where it does not.
    """

    def __init__(
        self, placement: Placement, *, shares: int, remainder: Remainder
    ) -> None:
        self.placement = placement
        self._shares: int = shares
        self._remainder: Remainder = remainder
        self._full_size: int | None = None
        self._numbers: dict[int, jax.Array] = {}
        self._signatures: dict[Signature, Signature] = {}

    def place(self, batch: PyTree) -> PlacedBatch:
        """One batch for one step.

        A smaller batch than one before is padded up to it, under
        ``remainder="pad"``, so that it needs no program of its own.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          The `PlacedBatch`.

        Raises:
          ValueError: As `fit_batch`.
        """
        batch, num_valid = self._fit(batch)
        arrays = place_rows(batch, self.placement, Layout.PER_TOWER)
        padded = num_valid < jax.tree.leaves(arrays)[0].shape[0]
        args = (arrays, self._number(num_valid))
        return PlacedBatch(args, (num_valid,), padded, self._signature(arrays))

    def place_several(self, batches: Sequence[PyTree], steps: int) -> PlacedBatch:
        """Up to ``steps`` batches stacked, for one call of that many steps.

        Args:
          batches: One to ``steps`` batches, NumPy or JAX.
          steps: ``K``; missing batches are filled in and never worked on.

        Returns:
          The `PlacedBatch`.

        Raises:
          ValueError: As `fit_batch`; or the batches are not alike.
        """
        fitted = [self._fit(batch) for batch in batches]
        rows, counts = [batch for batch, _ in fitted], [count for _, count in fitted]
        first = batch_signature(rows[0])
        for batch in rows[1:]:
            if batch_signature(batch) != first:
                raise ValueError(
                    "steps_per_call stacks batches of one kind, but one changed:\n"
                    + explain_change(first, batch_signature(batch))
                    + "\nMake all batches alike, or use steps_per_call=1."
                )
        rows += [rows[-1]] * (steps - len(rows))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        arrays = place_rows(stacked, self.placement, Layout.PER_TOWER_STEPS)
        full = jax.tree.leaves(arrays)[0].shape[1]
        num_valid = np.array(counts + [0] * (steps - len(counts)), np.int32)
        num_valid = place(num_valid, self.placement, Layout.MIRRORED)
        args = (arrays, num_valid, self._number(len(counts)))
        padded = min(counts) < full
        return PlacedBatch(args, tuple(counts), padded, self._signature(arrays))

    def _fit(self, batch: PyTree) -> tuple[PyTree, int]:
        batch, num_valid = fit_batch(
            batch, self._shares, self._remainder, full_size=self._full_size
        )
        size = jax.tree.leaves(batch)[0].shape[0]
        self._full_size = max(size, self._full_size or 0)
        return batch, num_valid

    def _signature(self, arrays: PyTree) -> Signature:
        """The one object for all batches of a kind, so that look-ups are short."""
        signature = batch_signature(arrays)
        return self._signatures.setdefault(signature, signature)

    def _number(self, number: int) -> jax.Array:
        """The number as a mirrored scalar; the few that occur are placed once."""
        if number not in self._numbers:
            if len(self._numbers) > 64:
                self._numbers.clear()
            self._numbers[number] = place(
                np.int32(number), self.placement, Layout.MIRRORED
            )
        return self._numbers[number]
