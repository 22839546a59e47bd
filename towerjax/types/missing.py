"""Say what to write where an object has no such attribute."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """The context that adds a note to the error of a missing attribute."""
    try:
        yield
    except AttributeError as error:
        error.add_note(note)
        raise


def explain_missing(note: str) -> Callable[[Any, str], Any]:
    """A ``__getattr__`` that adds a note to the error. Hide it from type checkers."""

    def get(self: Any, name: str) -> Any:
        with noted(note):  # again: a property may have raised the error
            return object.__getattribute__(self, name)

    return get
