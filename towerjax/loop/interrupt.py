"""When may Ctrl-C strike? Not while a donated state has no successor yet."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class InterruptGuard:
    """``with guard:`` lets SIGINT wait until the block is done.

    A step takes over the buffers of the state it is given. An interrupt between the
    call and the assignment of its result would lose both states.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._inside = self._waiting = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT for the length of a block, in the main thread only.

        Elsewhere Python delivers no signals, and there is nothing to do.
        """
        previous = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(previous):
            yield
            return
        self._previous = previous
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, number: int, frame: Any) -> None:
        # A second Ctrl-C is from someone who does not want to wait.
        if self._inside and not self._waiting:
            self._waiting = True
        else:
            self._previous(number, frame)

    def __enter__(self) -> None:
        self._inside = True

    def __exit__(self, *_: Any) -> None:
        self._inside = False
        if self._waiting:
            self._waiting = False
            self._previous(signal.SIGINT, None)
