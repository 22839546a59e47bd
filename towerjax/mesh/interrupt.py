"""When may a signal strike? Not while a donated state has no successor yet."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Terminated(SystemExit):
    """SIGTERM ended a run that saves itself."""


class InterruptGuard:
    """``with guard:`` lets signals wait until the block is done.

    A step takes over the buffers of the state it is given. An interrupt between the
    call and the assignment of its result would lose both states.
    """

    def __init__(self, exit_code: int | None = None) -> None:
        self._exit_code = exit_code
        self._previous: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._inside = self._looking = 0
        self._raised = self._over = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for the length of a block, in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._previous = self._found()
        for number in self._previous:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, previous in self._previous.items():
                signal.signal(number, previous)
            self._previous = {}
            if signal.SIGTERM in self._waiting:  # an exception came before it
                signal.raise_signal(signal.SIGTERM)

    def _found(self) -> dict[int, Any]:
        previous = signal.getsignal(signal.SIGINT)
        found: dict[int, Any] = {signal.SIGINT: previous} if callable(previous) else {}
        if self._exit_code is not None:
            # None is a handler of another language, such as JAX's own.
            found[signal.SIGTERM] = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        return found

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and self._raised:
            return  # a second one would end what saves after the first
        busy = self._must_wait(number)
        # A second Ctrl-C is from someone who does not want to wait.
        first = number not in self._waiting
        if busy and (first or number == signal.SIGTERM):
            self._waiting += [number] if first else []
        else:
            self._strike(number, frame)

    def _must_wait(self, number: int) -> bool:
        late = number == signal.SIGTERM and (self._looking or self._over)
        return bool(self._inside or late)

    def finish(self) -> None:
        """The run has ended: SIGTERM waits until all is put away, and is as before."""
        self._over = True

    def _strike(self, number: int, frame: Any = None) -> None:
        if number != signal.SIGTERM:
            self._previous[number](number, frame)
        else:
            self._raised = True
            raise Terminated(self._exit_code)

    def check(self) -> None:
        """Raise what was raised before and lost: in a destructor nobody hears it."""
        if self._raised:
            raise Terminated(self._exit_code)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Let SIGTERM wait, and Ctrl-C not: results are looked at, hooks called."""
        self._looking += 1
        try:
            yield
        finally:
            self._looking -= 1
        self._release()

    def __enter__(self) -> None:
        self._inside += 1

    def __exit__(self, *_: Any) -> None:
        self._inside -= 1
        self._release()

    def _release(self) -> None:
        for number in list(self._waiting):
            if self._must_wait(number):
                continue
            self._waiting.remove(number)
            self._strike(number)
