"""What can the analysis of a per-tower function find?"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Dependence:
    """Why a value differs: an input, "tower.id" or a primitive; and who made it.

    `line` is like "train.py:12 (loss_fn)"; "" for an input returned as it came in.
    """

    source: str
    line: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as written; XLA may merge or remove it. `bytes`: its operands'.

    `trips`: product of the lengths of the scans around it; None under a while.
    """

    primitive: str
    axes: tuple[str, ...]
    bytes: int
    trips: int | None
    line: str


@dataclasses.dataclass(frozen=True)
class Hang:
    """A collective that some towers reach and others do not: on devices, a hang."""

    primitive: str
    line: str
    control: str
    control_line: str


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A sum over towers, at `line`, of what is the same on all: `T` times too much.

    `outputs`: which outputs hold it; where there are none, `into` says what does.
    """

    line: str
    outputs: tuple[int, ...]
    into: str = ""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers, at `line`, of a key of rbg that differs from tower to tower."""

    line: str


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the walk found; `outputs[i]` is None where output i is MIRRORED."""

    outputs: tuple[Dependence | None, ...]
    hangs: tuple[Hang, ...]
    collectives: tuple[Collective, ...]
    repeats: tuple[Repeat, ...] = ()
    draws: tuple[Draw, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence["Analysis"]) -> "Analysis":
        """What was found in all of them, one after another."""
        return cls(
            tuple(x for part in parts for x in part.outputs),
            tuple(x for part in parts for x in part.hangs),
            tuple(x for part in parts for x in part.collectives),
            tuple(x for part in parts for x in part.repeats),
            tuple(x for part in parts for x in part.draws),
        )
