"""Where is one in a distributed data set? In a pass, which some sources can resume."""

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

from towerjax.data.placer import PlacedBatch

Stream: TypeAlias = Generator[tuple[PlacedBatch, Any], None, None]


class Pass(Iterator[PlacedBatch]):
    """One time through a data set; a thread of its own places batches in advance."""

    def __init__(self, begin: Callable[[int], Stream]) -> None:
        self._begin, self._stream = begin, begin(0)
        self._after: Any = None

    def __next__(self) -> PlacedBatch:
        """The next batch, on its devices."""
        placed, self._after = next(self._stream)
        return placed

    def close(self) -> None:
        """End the thread."""
        self._stream.close()


class ResumablePass(Pass):
    """A pass that says where it is, and can be told: its source can."""

    def __init__(self, begin: Callable[[int], Stream], elements: Any) -> None:
        super().__init__(begin)
        self._elements = elements
        self._after = {"elements": elements.get_state(), "rows": 0}

    def get_state(self) -> dict[str, Any]:
        """The source's place after the last batch, and how many rows towers have."""
        return self._after

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if set(state) != {"elements", "rows"}:
            raise ValueError(
                f"A place in a distributed data set has 'elements' and 'rows', but got"
                f" {sorted(state)}. Pass the batches that it was taken from."
            )
        self._stream.close()
        self._elements.set_state(state["elements"])
        self._after, self._stream = state, self._begin(state["rows"])
