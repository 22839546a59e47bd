"""The name of a merged leaf, which also tells where the leaf is in a step's results."""

import enum
from typing import Any

import jax

from towerjax.types.trees import key_name


class LeafPart(enum.Enum):
    """The part of a step's results to which a leaf belongs, in the order of errors."""

    LOSS = enum.auto()
    GRADIENT = enum.auto()
    OTHER = enum.auto()


GRADIENT = "gradient"
"""The first key of a gradient's name; in a pass's results the key is "grads"."""

_GRADIENTS = "grads"
# Gradients may be in these fields of `Sum` and `Weighted`. The name of a gradient does
# not show the field.
_HELD_IN = (jax.tree_util.GetAttrKey("value"), jax.tree_util.GetAttrKey("sum"))


class LeafName(str):
    """A leaf's name, such as ``gradient['w']``, with its part and its place.

    Attributes:
      part: The part of the results to which it belongs.
      number: The number of the pass that merges it; 0 if a step has only one.
      keys: The keys that lead to it in the results of its pass.
    """

    part: LeafPart
    number: int
    keys: tuple[Any, ...]

    def __new__(
        cls,
        name: str,
        keys: tuple[Any, ...] = (),
        *,
        part: LeafPart = LeafPart.OTHER,
        number: int = 0,
    ) -> "LeafName":
        """Create the name of a leaf; without ``keys`` it stands for a whole pass."""
        self = super().__new__(cls, name)
        self.part = part
        self.number = number
        self.keys = keys
        return self

    @classmethod
    def at(cls, path: tuple[Any, ...], loss: str = "loss") -> "LeafName":
        """Name the leaf at ``path`` of a pass's results.

        ``loss`` is the key of the pass's loss. The type that holds a gradient is not
        part of its name.
        """
        first = key_name(path[0]) if path else "result"
        rest = path[1:]
        if first == _GRADIENTS:
            rest = rest[1:] if rest[:1] and rest[0] in _HELD_IN else rest
            root = GRADIENT
            part = LeafPart.GRADIENT
        else:
            root = first
            part = LeafPart.LOSS if first in ("loss", loss) else LeafPart.OTHER
        return cls(root, (root,), part=part).within(rest)

    def within(self, path: tuple[Any, ...]) -> "LeafName":
        """Name the leaf at ``path`` inside this leaf."""
        name = self + jax.tree_util.keystr(path)
        keys = (*self.keys, *path)
        return LeafName(name, keys, part=self.part, number=self.number)

    def in_pass(self, number: int) -> "LeafName":
        """Name this leaf as one of pass ``number``, in a step that has several."""
        name = f"pass {number}: {self}"
        return LeafName(name, self.keys, part=self.part, number=number)

    def is_at(self, *keys: Any) -> bool:
        """Return whether these keys lead to the leaf, or to a tree in which it is."""
        return self.keys[: len(keys)] == keys

    def holds(self, other: "LeafName") -> bool:
        """Return whether another leaf is this leaf, or in the tree at this place."""
        return self.number in (0, other.number) and other.is_at(*self.keys)


WHOLE_STEP = LeafName("step")
"""The name that stands for all leaves of a step that cannot be traced again."""


def whole_pass(number: int) -> LeafName:
    """Make a name that stands for all leaves of a pass."""
    return LeafName(f"pass {number}", number=number)


def leaf_of(name: str) -> LeafName:
    """Turn a text into a leaf's name, if it is not one already.

    A text comes from a program that is not a step.
    """
    return name if isinstance(name, LeafName) else LeafName(name, (name,))


def part_of(name: str) -> LeafPart:
    """Tell to which part of a step's results a leaf belongs.

    It is OTHER for a leaf of a program that is not a step.
    """
    return leaf_of(name).part
