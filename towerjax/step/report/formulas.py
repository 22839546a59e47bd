"""How many FLOPs does one operation make? The same formulas for a trace and for HLO."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of one device in one call.

    Attributes:
      matmul: Of matrix products and convolutions: a multiply-add is two.
      other: One for each element of float arithmetic, a function such as ``tanh``
        included, and one for each addition of a reduction. The compiler may make some
        twice, or none, so that this differs from before to after it.
      notes: What could not be counted, and why.
    """

    matmul: int = 0
    other: int = 0
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Both."""
        return self.matmul + self.other

    def __add__(self, more: "Flops") -> "Flops":
        """Both counts added; each note once."""
        notes = tuple(dict.fromkeys(self.notes + more.notes))
        return Flops(self.matmul + more.matmul, self.other + more.other, notes)

    def times(self, trips: int) -> "Flops":
        """So many trips of a loop."""
        return dataclasses.replace(
            self, matmul=self.matmul * trips, other=self.other * trips
        )


def sum_of(parts: Iterable[Flops]) -> Flops:
    """All added."""
    return functools.reduce(Flops.__add__, parts, Flops())


def largest(branches: Iterable[Flops]) -> Flops:
    """The branch that makes most: which one is taken, only the run knows."""
    return max(branches, key=lambda flops: flops.total, default=Flops())


def dot_flops(lhs: Sequence[int], out: Sequence[int], contracted: Sequence[int]) -> int:
    """``2 |out| K``, of which ``K`` is the product of the contracted dims."""
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)


def product_flops(lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    """Of a matrix product ``[..., M, N]`` of which only the three shapes are known.

    With ``b`` products of ``[M, K]`` and ``[K, N]``, transposed or not, ``|lhs| |rhs| =
    |out| b K^2``.
    """
    size, batch = math.prod(out), math.prod(out[:-2])
    if not size:
        return 0
    return 2 * size * math.isqrt(math.prod(lhs) * math.prod(rhs) // (size * batch))


@dataclasses.dataclass(frozen=True)
class Window:
    """How a convolution's kernel moves along one dim.

    Attributes:
      size: The kernel's size.
      stride: Of its steps.
      pad_low: How many zeros stand before the input; may be negative.
      pad_high: How many after it.
      base_dilation: The input's elements lie so far apart, with zeros between.
      dilation: The kernel's.
    """

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    base_dilation: int = 1
    dilation: int = 1

    def pairs(self, length: int) -> int:
        """How often a kernel element meets an input element, zeros not counted."""
        spread = (length - 1) * self.base_dilation + 1 if length else 0
        reach = (self.size - 1) * self.dilation + 1
        room = spread + self.pad_low + self.pad_high - reach
        steps = max(room // self.stride + 1, 0)
        starts = np.arange(steps)[:, None] * self.stride - self.pad_low
        at = starts + np.arange(self.size)[None] * self.dilation
        inside = (at >= 0) & (at < spread) & (at % self.base_dilation == 0)
        return int(inside.sum())


def conv_flops(
    lengths: Sequence[int], windows: Sequence[Window], batch: int, kernel: int
) -> int:
    """Two for each pair of an input and a kernel element that meet.

    What meets padding is not counted, so that a convolution and both its gradients
    make the same number.
    """
    pairs = [w.pairs(length) for w, length in zip(windows, lengths, strict=True)]
    return 2 * math.prod(pairs) * batch * kernel
