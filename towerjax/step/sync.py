"""When towers synchronise: at every step, or after several local steps."""

import dataclasses
from typing import TypeAlias

import optax

from towerjax.types import short_repr
from towerjax.types.options import cast_ints, check_methods, check_whole

__all__ = ["DiLoCo", "EveryStep", "LocalSGD"]


@dataclasses.dataclass(frozen=True)
class EveryStep:
    """Towers add up their gradients at every step: the default.

    ``T`` towers are one tower, to rounding.

    Example:
      >>> EveryStep()
      EveryStep()
    """


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Each tower trains ``every`` steps alone; then all take their mean.

    Sends ``1 / every`` of the bytes. It is `DiLoCo` with ``outer=optax.sgd(1.0)``.

    Attributes:
      every: ``H``: after this many steps the towers' parameters are averaged.

    Raises:
      ValueError: ``every`` is not a whole number >= 1.

    Source:
      Stich (2019), "Local SGD Converges Fast and Communicates Little",
      https://arxiv.org/abs/1805.09767; Lin et al. (2020), "Don't Use Large
      Mini-Batches, Use Local SGD", https://arxiv.org/abs/1808.07217. Means by weight:
      McMahan et al. (2017), https://arxiv.org/abs/1602.05629.

    Example:
      >>> LocalSGD(every=8)
      LocalSGD(every=8)
    """

    every: int

    def __post_init__(self) -> None:
        check_whole("LocalSGD.every", self.every)

    @property
    def rounds(self) -> "DiLoCo":
        """The same as a `DiLoCo`."""
        return DiLoCo(self.every, optax.sgd(1.0))


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Each tower trains ``every`` steps alone; an outer optimizer applies their mean.

    The outer gradient is ``sum_t w_t (theta - theta_t) / sum_t w_t`` with the outer
    parameters ``theta``, a tower's own ``theta_t`` and the weight ``w_t`` that its
    losses had since it was last sent.

    Attributes:
      every: ``H``: after this many steps a parameter is sent again.
      outer: Any optax transformation; its state is mirrored, one for each fragment.
      fragments: ``P``: the leaves are split into so many parts alike in size, of which
        one is sent every ``H / P`` steps, in turn.
      overlap: ``tau``: a tower takes the result of the outer update so many steps after
        it has sent, and trains alone in between.
      keep: ``alpha``: what a tower keeps of its own when it takes the outer parameters,
        ``alpha theta_t + (1 - alpha) theta``: the paper blends where steps overlap.

    Raises:
      ValueError: A number is out of its range, ``fragments`` does not divide ``every``,
        or ``outer`` is no optax transformation.

    Source:
      Douillard et al. (2023), "DiLoCo: Distributed Low-Communication Training of
      Language Models", https://arxiv.org/abs/2311.08105; fragments and overlap:
      Douillard et al. (2025), "Streaming DiLoCo with Overlapping Communication",
      https://arxiv.org/abs/2501.18512.

    Example:
      >>> DiLoCo(every=8, fragments=2)
      DiLoCo(every=8, fragments=2)
    """

    every: int
    outer: optax.GradientTransformation = optax.sgd(0.7, momentum=0.9, nesterov=True)
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_whole("DiLoCo.every", self.every)
        check_methods("DiLoCo.outer", self.outer, "init update", "optax.sgd(0.7)")
        check_whole("DiLoCo.fragments", self.fragments)
        if self.every % self.fragments:
            raise ValueError(
                f"DiLoCo.fragments={self.fragments} parts are sent in turn, each every"
                f" {self.every} steps, so fragments must divide every. Say"
                f" every={self.fragments * -(-self.every // self.fragments)}."
            )
        check_whole("DiLoCo.overlap", self.overlap, 0, self.every - 1)
        cast_ints(self)
        is_number = isinstance(self.keep, int | float)
        if not is_number or not 0 <= self.keep < 1:
            raise ValueError(f"DiLoCo.keep={self.keep!r} must be a number in [0, 1).")

    @property
    def rounds(self) -> "DiLoCo":
        """This `DiLoCo` itself, as for `LocalSGD`."""
        return self


Sync: TypeAlias = EveryStep | LocalSGD | DiLoCo
"""When towers synchronise."""

EVERY_STEP = EveryStep()
"""The default of a train step."""


def check_sync(sync: object) -> None:
    """Raise unless ``sync`` is a `Sync`."""
    if not isinstance(sync, EveryStep | LocalSGD | DiLoCo):
        raise ValueError(
            f"sync={sync!r} must be tj.sync.EveryStep(), tj.sync.LocalSGD(every=8) or"
            " tj.sync.DiLoCo(every=8)."
        )
