"""Delay signals between a step's donation of a state and the assignment of the next."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")


class Terminated(SystemExit):
    """Raised by SIGTERM in a run that has a `Checkpointer`."""


class InterruptGuard:
    """A guard that delays Ctrl-C and SIGTERM to the end of a ``with guard:`` block.

    It has an effect only in a function that `call` runs. A step donates the buffers of
    its state, so an interrupt between the call and the assignment of its result would
    lose both states. SIGTERM is handled only if there is an ``exit_code``, with which
    it ends the process.

    Attributes:
      ended: Whether Ctrl-C is dropped, because the called function has ended.
    """

    def __init__(self, exit_code: int | None = None) -> None:
        self._exit_code = exit_code
        self._previous: dict[int, Any] = {}
        self._waiting: set[int] = set()
        self._inside = self._holding = 0
        self._raised = self._dropped = self.ended = False
        self._reporter = sys.unraisablehook

    def call(
        self,
        body: Callable[[], Result],
        attach: Callable[[BaseException], None] = lambda _: None,
    ) -> Result:
        """Call ``body``; ``attach`` gets the error or signal that ends it.

        After an error Ctrl-C is dropped, because it would end ``attach``. Signals are
        handled in the main thread only.
        """
        seen = 0
        # Python handles signals at calls and at jumps back, but not at assignments. So
        # the code between two calls here is not interrupted.
        try:
            try:
                self._install()
                result = body()
                self.raise_missed()
                return result
            except BaseException as error:
                self.ended = True
                seen = id(error)
                attach(error)
                raise
            finally:
                self._inside += 1
                self._put_back()
        except BaseException as error:
            # This is a Ctrl-C that came while the handlers were put back.
            if id(error) != seen:
                attach(error)
            raise

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._exit_code is not None:
            # None means that the handler was set by C code, such as JAX's own.
            previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            self._previous[signal.SIGTERM] = previous
            signal.signal(signal.SIGTERM, self._handle)
        if callable(previous := signal.getsignal(signal.SIGINT)):
            self._previous[signal.SIGINT] = previous
            reporter = self._reporter
            sys.unraisablehook = lambda x: self._note_dropped(x, reporter)
            signal.signal(signal.SIGINT, self._handle)

    def _put_back(self) -> None:
        if signal.SIGINT in self._previous:
            sys.unraisablehook = self._reporter
        try:
            for number, previous in self._previous.items():
                # SIGINT comes last: once it is back, Ctrl-C may interrupt.
                signal.signal(number, previous)
            if signal.SIGINT in self._waiting and not self.ended:
                signal.raise_signal(signal.SIGINT)
        finally:
            if signal.SIGTERM in self._waiting:  # it came after `finish` or an error
                signal.raise_signal(signal.SIGTERM)

    def _note_dropped(self, unraisable: Any, reporter: Callable[[Any], Any]) -> None:
        """Note that Python dropped a Ctrl-C, and report it as Python does.

        Python cannot raise an exception in some callbacks of C code.
        """
        # A common case is a callback of JAX:
        # https://github.com/jax-ml/jax/issues/18246.
        self._dropped |= unraisable.exc_type is KeyboardInterrupt
        reporter(unraisable)

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and self._raised:
            return  # a second SIGTERM would interrupt saving
        if number == signal.SIGINT and self.ended:
            return
        # A second Ctrl-C waits, too. If it ended a call inside of JAX, the call might
        # raise another error, and fail from then on:
        # https://github.com/jax-ml/jax/issues/9082.
        if self._must_wait(number):
            self._waiting.add(number)
        else:
            self._deliver(number, frame)

    def _must_wait(self, number: int) -> bool:
        return bool(self._inside or (number == signal.SIGTERM and self._holding))

    def finish(self) -> None:
        """Hold SIGTERM back until `call` ends, while the run saves and cleans up."""
        self._holding += 1

    def hold_sigterm(self) -> None:
        """Hold SIGTERM back for the whole run, which asks for it and ends by itself."""
        self._holding += 1

    @property
    def is_told_to_end(self) -> bool:
        """Whether a SIGTERM came that is held back."""
        return signal.SIGTERM in self._waiting

    def forget_sigterm(self) -> None:
        """Drop a SIGTERM that was held back, because the run ends by itself."""
        self._waiting.discard(signal.SIGTERM)

    def _deliver(self, number: int, frame: Any = None) -> None:
        if number != signal.SIGTERM:
            self._previous[number](number, frame)
        else:
            self._raised = True
            raise Terminated(self._exit_code)

    def raise_missed(self) -> None:
        """Raise a Ctrl-C that Python dropped, or a SIGTERM that user code caught."""
        if self._raised:
            raise Terminated(self._exit_code)
        if self._dropped:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def holding_sigterm(self) -> Iterator[None]:
        """Hold SIGTERM back, but not Ctrl-C, while results are read and hooks run."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        self._release()

    def __enter__(self) -> None:
        self._inside += 1

    def __exit__(self, *_: Any) -> None:
        self._inside -= 1
        self._release()

    def _release(self) -> None:
        for number in sorted(self._waiting):
            if not self._must_wait(number):
                self._waiting.remove(number)
                self._deliver(number)


def uninterrupted(body: Callable[[], Result]) -> Result:
    """Call ``body`` so that Ctrl-C waits for its end, and return its result."""
    guard = InterruptGuard()

    def held() -> Result:
        with guard:
            return body()

    return guard.call(held)
