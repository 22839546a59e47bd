"""Was each example seen once? Sums over examples, from which ids can be read back."""

import dataclasses
from typing import Any

import jax
import numpy as np

from towerjax.metrics.example_cells import (
    CELLS,
    TABLES,
    WORDS,
    count_on_host,
    read_back,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExampleCount:
    """Which examples were seen how often, in 3.5 KB: sums, of which order is gone.

    Each pair of an id and a weight adds its words to one cell in each of three tables.
    All sums are of integers modulo ``2**32``, so they are exact in any order, and two
    counts are merged by adding them. The difference of two counts gives the ids of
    some 40 dropped or repeated examples back.

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
        """No example yet."""
        return cls(np.zeros((TABLES, CELLS, WORDS), np.uint32))

    @classmethod
    def of(cls, ids: Any, weights: Any = None) -> "ExampleCount":
        """The count of a data set that is gone through once, made on the host.

        Args:
          ids: ``[N]`` integers of up to 64 bits, or ``[N, 2]`` uint32, low half first.
          weights: ``[N]`` float32; None is 1 for each. Weight 0 is no example.

        Returns:
          The count, to be added to others or multiplied by a number of epochs.

        Raises:
          ValueError: ``ids`` are no such integers, or ``weights`` not as many.

        Example:
          >>> hex((ExampleCount.of(range(100)) * 2).fingerprint)
          '0x197070dca86394ae'
        """
        return cls(count_on_host(ids, weights))

    def __add__(self, other: "ExampleCount") -> "ExampleCount":
        """Both together."""
        return ExampleCount(self.cells + other.cells)

    def __mul__(self, times: int) -> "ExampleCount":
        """So many times the same, such as epochs."""
        return ExampleCount(np.asarray(self.cells) * np.uint32(times))

    @property
    def total(self) -> int:
        """How many examples, modulo ``2**32``."""
        return int(self._sum(0))

    @property
    def fingerprint(self) -> int:
        """64 bits, the same whenever the same pairs of id and weight were seen."""
        return int(self._sum(7)) | int(self._sum(8)) << 32

    def _sum(self, word: int) -> np.uint32:
        return np.asarray(self.cells)[0, :, word].sum(dtype=np.uint32)

    def compare(self, expected: "ExampleCount") -> "ExampleReport":
        """What was seen too often and too rarely.

        Args:
          expected: Such as ``ExampleCount.of(ids) * epochs``.

        Returns:
          The `ExampleReport`.
        """
        left = np.asarray(self.cells) - np.asarray(expected.cells)
        found, left = read_back(left)
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
    """How what was seen differs from what was expected; ``print`` tells it.

    Attributes:
      seen: How many examples were seen.
      expected: How many were expected.
      dropped: ``(id, weight, times)`` of each that was seen too rarely.
      repeated: ``(id, weight, times)`` of each that was seen too often.
      others: There are at least so many more, too many to be told by their ids.

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
        """Was each example seen as often as expected?"""
        return not (self.dropped or self.repeated or self.others)

    def __str__(self) -> str:
        """Every difference, by the example's id."""
        text = f"{self.seen} examples were seen and {self.expected} expected"
        lost, found = list(self.dropped), []
        for id, weight, times in self.repeated:
            same = [x for x in lost if (x[0], x[2]) == (id, times)]
            if not same:
                found.append(f"example {id} seen {_times(times)} more")
                continue
            lost.remove(same[0])
            was = same[0][1]
            found.append(f"example {id} seen with weight {weight:g}, not {was:g}")
        gone = [
            f"example {id} dropped" + (f" {_times(times)}" if times > 1 else "")
            for id, _, times in lost
        ]
        if self.others:
            more = " more" if gone or found else ""
            found.append(f"at least {self.others}{more}, too many to be listed")
        return f"{text}: {', '.join(gone + found) or 'each as often as expected'}"


def _times(number: int) -> str:
    return "1 time" if number == 1 else f"{number} times"


class ExamplesError(ValueError):
    """Examples were dropped or repeated.

    Attributes:
      report: The `ExampleReport`.
    """

    def __init__(self, text: str, report: ExampleReport) -> None:
        """Keep the report for programs."""
        super().__init__(text)
        self.report = report


def check_examples(
    state: Any, ids: Any, *, weights: Any = None, epochs: int = 1
) -> ExampleReport:
    """The report that each example was seen once an epoch, or an error.

    Args:
      state: A ``TrainState`` of a step that was built with ``example_ids``, or its
        ``seen``.
      ids: ``[N]`` integers, every example's id; or an `ExampleCount` for anything
        else than whole epochs.
      weights: ``[N]`` float32, where ``example_ids`` gives weights.
      epochs: How often the data was gone through.

    Returns:
      The `ExampleReport`, which says how many.

    Raises:
      ExamplesError: Some were dropped or repeated; names their ids.
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
    text = f"After {epochs} epoch{'s' if epochs != 1 else ''} {report}."
    if not isinstance(ids, ExampleCount) and _is_wide(np.asarray(ids)):
        text += (
            " Some ids need 64 bits, of which arrays on devices have 32: let a batch"
            " hold them as ids.astype(np.int64).view(np.uint32).reshape(-1, 2)."
        )
    raise ExamplesError(text, report)


def _is_wide(ids: np.ndarray) -> bool:
    if ids.ndim != 1 or not ids.size:
        return False
    return int(ids.max()) >= 1 << 32 or int(ids.min()) < -(1 << 31)
