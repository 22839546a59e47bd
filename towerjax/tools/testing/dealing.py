"""Which rows has each tower? The splits of a batch that an audit compares."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Deal:
    """Which row of the batch each row of a tower is.

    Attributes:
      name: What reports call it.
      index: ``[T, b]`` int, rows of the batch.
      counts: ``[T]`` int32, how many of a tower's rows are examples; they come first.
    """

    name: str
    index: np.ndarray
    counts: np.ndarray

    @property
    def num_towers(self) -> int:
        """``T``."""
        return len(self.counts)


def dealt(name: str, hands: Sequence[Any], rows: int | None = None) -> Deal:
    """Rows dealt to towers, each padded with its last row."""
    rows = max(len(hand) for hand in hands) if rows is None else rows
    last = next(hand[-1] for hand in reversed(hands) if len(hand))
    index = np.full((len(hands), rows), last)
    for row, hand in zip(index, hands, strict=True):
        row[: len(hand)] = hand
        row[len(hand) :] = hand[-1] if len(hand) else last
    return Deal(name, index, np.array([len(hand) for hand in hands], np.int32))


def splits_of(examples: int, num_towers: int, *, padding: bool) -> list[Deal]:
    """The splits that are compared with one tower, all of the same shape."""
    order = np.arange(examples)
    shuffled = np.random.default_rng(0).permutation(examples)
    if not padding:
        return [
            dealt(name, np.split(rows, num_towers))
            for name, rows in (("in order", order), ("permuted", shuffled))
        ]
    rows = -(-examples // num_towers) + 1
    full = [shuffled[i * rows : (i + 1) * rows] for i in range(num_towers)]
    return [
        dealt("in order, padded", np.array_split(order, num_towers), rows),
        dealt("permuted, uneven, padded", full, rows),
    ]
