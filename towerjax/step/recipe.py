"""What is a step before it is compiled? Stages of towers, and what is done between."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree

Run: TypeAlias = Callable[..., PyTree]
"""``(stage, *args) -> results``: runs a stage on all devices, of global values."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Towers at work between two meetings in the global view.

    Attributes:
      on_device: ``axes -> f(*args)``: what one device does for its towers.
      in_layouts: Argument name -> a prefix tree of layouts.
      out_layouts: Result name -> a prefix tree of layouts; results are a tuple. The
        leaves of a result without a name have names of their own.
      counted: ``axes -> f(*args)``: each device's values in which padded rows would
        count; None where there are none.
      advice: What to do where a mirrored result depends on the tower; None says the
        usual.
      proved_alone: Is a reduction missed on one tower too, where it would do nothing?
      meets: May towers meet in it? Else a collective is refused.
    """

    on_device: Callable[[TowerAxes], Callable[..., PyTree]]
    in_layouts: dict[str, PyTree]
    out_layouts: dict[str, PyTree]
    counted: Callable[[TowerAxes], Callable[..., PyTree]] | None = None
    advice: str | None = None
    proved_alone: bool = True
    meets: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A step before it is compiled.

    Attributes:
      fn: ``(run, *args) -> results``: the step in the global view, whose towers are
        stages that it gives to ``run``.
      in_layouts: Argument name -> a prefix tree of layouts.
      out_layouts: Result name -> a prefix tree of layouts; results are a tuple.
      donate: May the results take over the first argument's buffers?
    """

    fn: Callable[..., PyTree]
    in_layouts: dict[str, PyTree]
    out_layouts: dict[str, PyTree]
    donate: bool
