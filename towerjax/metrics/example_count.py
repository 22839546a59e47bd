"""Count which examples were seen, in sums from which wrong ids can be decoded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types import Portable, PyTree
from towerjax.types.options import check_whole

ExampleIds: TypeAlias = Callable[[PyTree], Any]
"""``batch -> ids`` or ``(ids, weights)``, of the rows of a tower's batch."""

TABLES, CELLS = 3, 32
# A count; the id in four words and the weight's bits in two, of 16 bits each, so that
# the sum over a repeated example can be divided; a 64-bit hash in two.
WORDS = 9


def count_on_host(ids: Any, weights: Any) -> np.ndarray:
    """The cells of a data set, made by NumPy."""
    low, high = _halves(_check_ids(np.asarray(ids)))
    bits = _weight_bits(weights, low)
    is_example = (bits << 1) != 0  # a weight of 0.0 or -0.0 is none
    words, index = (np.stack(x)[:, is_example] for x in _words(low, high, bits))
    cells = np.zeros((TABLES, CELLS, WORDS), np.uint32)
    for table in range(TABLES):
        np.add.at(cells[table], index[table], words.T)
    return cells


def count_rows(example_ids: ExampleIds, rows: PyTree, weight: jax.Array) -> jax.Array:
    """The cells of a tower's rows, made inside a compiled step."""
    given = example_ids(rows)
    ids, weights = given if isinstance(given, tuple) else (given, None)
    low, high = _halves(_check_ids(ids))
    if low.shape != weight.shape:
        raise ValueError(
            f"example_ids gave {low.shape[0]} ids for a tower's {weight.shape[0]} rows."
        )
    bits = _weight_bits(weights, low)
    words, index = _words(low, high, bits)
    is_example = (weight > 0) & ((bits << 1) != 0)
    words = jnp.where(is_example[:, None], jnp.stack(list(words), axis=1), 0)
    index = jnp.stack([row + CELLS * table for table, row in enumerate(index)])
    cells = jnp.zeros((TABLES * CELLS, WORDS), jnp.uint32)
    cells = cells.at[index.reshape(-1)].add(
        jnp.tile(words, (TABLES, 1)), mode="promise_in_bounds"
    )
    return cells.reshape(TABLES, CELLS, WORDS)


def as_addends(cells: jax.Array, num_towers: int) -> jax.Array:
    """The cells as float32 parts, which the gradients' all-reduce adds exactly."""
    bits = _part_bits(num_towers)
    parts = [(cells >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
    return jnp.stack(parts).astype(jnp.float32)


def from_sums(sums: jax.Array, num_towers: int) -> jax.Array:
    """The cells of all towers, from the sums of their `as_addends`."""
    bits, whole = _part_bits(num_towers), sums.astype(jnp.uint32)
    parts = [part << (bits * i) for i, part in enumerate(whole)]
    return functools.reduce(jnp.add, parts)


def _part_bits(num_towers: int) -> int:
    return 24 - (num_towers - 1).bit_length()  # float32 holds integers up to 2**24


def _check_ids(ids: Any) -> Any:
    if not hasattr(ids, "dtype"):
        raise ValueError(f"ids are a {type(ids).__name__}, not an array of integers.")
    if ids.dtype.kind in "iu" and ids.ndim == 1:
        return ids
    if ids.dtype == np.uint32 and ids.ndim == 2 and ids.shape[1] == 2:
        return ids
    raise ValueError(
        f"ids are {ids.dtype}{list(ids.shape)}, but an id is one integer, [B]; of 64"
        " bits two, [B, 2]: ids.astype(np.int64).view(np.uint32).reshape(-1, 2)."
    )


def _halves(ids: Any) -> tuple[Any, Any]:
    """The low and the high 32 bits of each id."""
    if ids.ndim == 2:
        return ids[:, 0], ids[:, 1]
    ids = ids.astype(np.int32) if ids.dtype.itemsize < 4 else ids
    # In two shifts, because 32-bit integers cannot be shifted by 32.
    return ids.astype(np.uint32), (ids >> 31 >> 1).astype(np.uint32)


def _weight_bits(weights: Any, like: Any) -> Any:
    if weights is None:
        return like * np.uint32(0) + np.float32(1).view(np.uint32)
    if np.shape(weights) != like.shape:
        raise ValueError(
            f"weights are {list(np.shape(weights))}, but ids {list(like.shape)}."
        )
    if isinstance(like, np.ndarray):
        return np.asarray(weights, np.float32).view(np.uint32)
    return jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.uint32)


def _words(low: Any, high: Any, bits: Any) -> tuple[Any, Any]:
    """uint32: the 9 words ``[n]`` that examples add, and their 3 cells ``[n]``."""
    first = low * np.uint32(0) + np.uint32(0x9E3779B9)
    for part in (low, high, bits):
        first = _mix(first ^ part)
    second = first + np.uint32(0x85EBCA6B)
    for part in (bits, high, low):
        second = _mix(second + part)
    parts = [half for x in (low, high, bits) for half in (x & 0xFFFF, x >> 16)]
    where = _mix(second ^ np.uint32(0xC2B2AE35))
    index = [(where >> (8 * table)) & (CELLS - 1) for table in range(TABLES)]
    return [low * np.uint32(0) + np.uint32(1), *parts, first, second], index


def _mix(x: Any) -> Any:
    """A hash of a uint32: Chris Wellons' "lowbias32", 2018."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def decode_cells(cells: np.ndarray) -> tuple[dict[tuple[int, float], int], np.ndarray]:
    """``{(id, weight): times}``, decoded from cells, and what is left of the cells."""
    cells, found, progressed = cells.copy(), {}, True
    while progressed:
        progressed = False
        for table, cell in np.argwhere(cells.any(axis=-1)):
            decoded = _decode_cell(cells[table, cell])
            if decoded is None:
                continue
            times, key, words, index = decoded
            for other in range(TABLES):
                cells[other, index[other]] -= words
            found[key] = found.get(key, 0) + times
            progressed = True
    return {key: times for key, times in found.items() if times}, cells


def _decode_cell(sums: np.ndarray) -> tuple[int, tuple[int, float], Any, Any] | None:
    """``(times, (id, weight), words, index)`` if a cell holds one example only."""
    times, *parts = (int(x) for x in sums[:7].astype(np.int32))
    if times == 0 or any(part % times for part in parts):
        return None
    halves = [part // times for part in parts]
    if not all(0 <= half < 1 << 16 for half in halves):
        return None
    low, high, bits = (
        np.array([a | b << 16], np.uint32)
        for a, b in zip(halves[::2], halves[1::2], strict=True)
    )
    words, index = map(np.stack, _words(low, high, bits))
    added = words[:, 0] * np.array(times, np.int64).astype(np.uint32)
    if (added != sums).any():
        return None
    id = int(np.array([low[0], high[0]]).view(np.int64)[0])
    return times, (id, float(bits.view(np.float32)[0])), added, index[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExampleCount:
    """How often each example was seen: 3.5 KB of sums, for any number of examples.

    Each pair of an id and a weight adds its words to one cell in each of three tables,
    modulo ``2**32``: exact in any order. From the difference of two counts the ids of
    some 40 dropped or repeated examples can be decoded.

    Attributes:
      cells: ``[3, 32, 9]`` uint32.

    Example:
      >>> seen = ExampleCount.of([4, 2, 2]) + ExampleCount.of([1])
      >>> print(seen.compare(ExampleCount.of([1, 2, 3, 4])))
      4 examples were seen and 4 expected: example 3 dropped, example 2 seen 1 time more

    Source: Michael Goodrich and Michael Mitzenmacher, "Invertible Bloom Lookup Tables",
    2011, https://arxiv.org/abs/1101.2245.
    """

    cells: Any

    @classmethod
    def none(cls) -> "ExampleCount":
        """The count of no examples."""
        return cls(np.zeros((TABLES, CELLS, WORDS), np.uint32))

    @classmethod
    def of(cls, ids: Any, weights: Any = None) -> "ExampleCount":
        """The count of one pass through a data set, made on the host.

        Args:
          ids: ``[N]`` integers of up to 64 bits, or ``[N, 2]`` uint32, low half first.
          weights: ``[N]`` float32; None is 1 for each. Weight 0 is no example.

        Returns:
          The count, which may be added to others and multiplied by a number of epochs.

        Raises:
          ValueError: ``ids`` are no such integers, or ``weights`` has another length.

        Example:
          >>> hex((ExampleCount.of(range(100)) * 2).fingerprint)
          '0x197070dca86394ae'
        """
        return cls(count_on_host(ids, weights))

    def __add__(self, other: "ExampleCount") -> "ExampleCount":
        """The count of both."""
        return ExampleCount(self.cells + other.cells)

    def __mul__(self, times: int) -> "ExampleCount":
        """The count of so many passes through the same data, such as epochs."""
        check_whole("times", times, 0)
        return ExampleCount(np.asarray(self.cells) * np.uint32(times))

    __rmul__ = __mul__

    @property
    def total(self) -> int:
        """The number of examples, modulo ``2**32``."""
        return int(self._sum(0))

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash, the same whenever the same ids and weights were seen."""
        return int(self._sum(7)) | int(self._sum(8)) << 32

    def _sum(self, word: int) -> np.uint32:
        return np.asarray(self.cells)[0, :, word].sum(dtype=np.uint32)

    def compare(self, expected: "ExampleCount") -> "ExampleReport":
        """The examples that were seen too often or too rarely.

        Args:
          expected: Such as ``ExampleCount.of(ids) * epochs``.

        Returns:
          The `ExampleReport`.
        """
        left = np.asarray(self.cells) - np.asarray(expected.cells)
        found, left = decode_cells(left)
        return ExampleReport(
            seen=self.total,
            expected=expected.total,
            dropped=tuple((*key, -n) for key, n in sorted(found.items()) if n < 0),
            repeated=tuple((*key, n) for key, n in sorted(found.items()) if n > 0),
            others=int(np.abs(left[..., 0].astype(np.int32)).sum(axis=1).max())
            or int(left.any()),
        )


@dataclasses.dataclass(frozen=True)
class ExampleReport:
    """The difference between the examples seen and those expected; ``print`` shows it.

    Attributes:
      seen: How many examples were seen.
      expected: How many were expected.
      dropped: ``(id, weight, times)`` of each that was seen too rarely.
      repeated: ``(id, weight, times)`` of each that was seen too often.
      others: A lower bound on further differences, whose ids cannot be decoded.

    Example:
      >>> ExampleCount.of([7]).compare(ExampleCount.of([7])).is_same
      True
    """

    seen: int
    expected: int
    dropped: tuple[tuple[int, float, int], ...]
    repeated: tuple[tuple[int, float, int], ...]
    others: int

    @property
    def is_same(self) -> bool:
        """Whether each example was seen as often as expected."""
        return not (self.dropped or self.repeated or self.others)

    def __str__(self) -> str:
        """Both numbers, and every difference by the example's id."""
        found = [
            _named(id, weight) + " dropped" + f" {_times(n)}" * (n > 1)
            for id, weight, n in self.dropped
        ]
        found += [
            f"{_named(id, weight)} seen {_times(n)} more"
            for id, weight, n in self.repeated
        ]
        if self.others:
            more = " more" if found else ""
            found.append(f"at least {self.others}{more}, too many to be listed")
        text = f"{self.seen} examples were seen and {self.expected} expected"
        return f"{text}: {', '.join(found) or 'each as often as expected'}"


def _named(id: int, weight: float) -> str:
    return f"example {id}" + ("" if weight == 1 else f" of weight {weight:g}")


def _times(number: int) -> str:
    return "1 time" if number == 1 else f"{number} times"


class ExamplesError(Portable, ValueError):
    """Examples were dropped or repeated.

    Attributes:
      report: The `ExampleReport`.
    """

    def __init__(self, text: str, report: ExampleReport) -> None:
        super().__init__(text)
        self.report = report


def check_examples(
    state: Any, ids: Any, *, weights: Any = None, epochs: int = 1
) -> ExampleReport:
    """Raise unless each example was seen once an epoch.

    Args:
      state: A ``TrainState`` of a step that was built with ``example_ids``, or its
        ``seen``.
      ids: ``[N]`` integers, every example's id; or an `ExampleCount` for anything
        other than whole epochs.
      weights: ``[N]`` float32, where ``example_ids`` gives weights.
      epochs: The number of passes through the data.

    Returns:
      The `ExampleReport`, with the number of examples.

    Raises:
      ExamplesError: Some were dropped or repeated; the message names their ids.
      ValueError: The state counts no examples.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch["x"]) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2),
      ...     remainder="pad", example_ids=lambda batch: batch["id"])
      >>> data = {"x": np.ones(9, np.float32), "id": np.arange(9)}
      >>> batches = tj.batches(data, 4, epochs=3, seed=0)
      >>> state, _ = tj.run(step, step.init(jnp.float32(0)), batches, progress=False)
      >>> print(check_examples(state, data["id"], epochs=3))
      27 examples were seen and 27 expected: each as often as expected
    """
    check_whole("epochs", epochs, 0)
    seen = getattr(state, "seen", state)
    if not isinstance(seen, ExampleCount):
        raise ValueError(
            f"The state counts no examples (seen is {type(seen).__name__}). Build the"
            ' step with example_ids=lambda batch: batch["id"].'
        )
    expected = ids if isinstance(ids, ExampleCount) else ExampleCount.of(ids, weights)
    report = seen.compare(expected * epochs)
    if report.is_same:
        return report
    times = f"{epochs} epoch{'s' if epochs != 1 else ''}"
    raise ExamplesError(f"After {times} {report}.", report)
