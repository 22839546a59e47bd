"""Print lines of our own to stderr, also while something takes long."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator


def print_line(text: str) -> None:
    """Print a line to stderr that begins with "towerjax:"."""
    # The line is written by one call, so that lines of other threads cannot mix with
    # it.
    print(f"towerjax: {text}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def calls_after(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call a function, in a thread, if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
