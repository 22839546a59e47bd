"""End a process of a job at once, so that no process waits for another one.

JAX waits at the end of a process until all others come there, too.
"""

import logging
import os
import sys
import threading
import types
from typing import Any, NoReturn

from towerjax.mesh.lines import print_line

# What `end_at_once` replaced, for this process.
_before = types.SimpleNamespace(excepthook=None, exit=None)


class _NoticedExit(SystemExit):
    """A ``sys.exit`` with a failure, which ends the process if nothing catches it.

    After an uncaught exit, Python reads the exception's ``code`` from C code, with no
    Python frame on the stack. That shows that nothing has caught it. Next Python would
    call the functions of ``atexit``, in which JAX waits for other processes.
    """

    def __init__(self, status: Any, name: str) -> None:
        super().__init__(status)
        self._status = status
        self._name = name

    @property
    def code(self) -> Any:  # type: ignore[override]
        """The status that ``sys.exit`` was given.

        If no Python frame reads it, nothing has caught the exit, and the process ends
        here.
        """
        if sys._getframe().f_back is None:
            _end(f"{self._name} ends with sys.exit({self._status!r})", self._status)
        return self._status


def end_at_once(name: str) -> None:
    """End this process at an uncaught exception, or a ``sys.exit`` with a failure.

    Args:
      name: The name of the process in the line that is printed.
    """
    _before.excepthook = sys.excepthook
    _before.exit = sys.exit

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        try:
            print_line(f"{name} ends with this exception:")
            _before.excepthook(kind, error, trace)
        finally:
            end_now(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def leave(status: Any = None, /) -> NoReturn:
        # In a thread other than the main one ``sys.exit`` ends only that thread.
        is_main = threading.current_thread() is threading.main_thread()
        if status is None or status == 0 or not is_main:
            _before.exit(status)
        raise _NoticedExit(status, name)

    sys.excepthook = excepthook
    sys.exit = leave


def end_as_before() -> None:
    """Undo `end_at_once`: put back Python's own functions."""
    if _before.excepthook is not None:
        sys.excepthook = _before.excepthook
        sys.exit = _before.exit
        _before.excepthook = None


def _end(line: str, status: Any) -> NoReturn:
    is_number = isinstance(status, int)
    try:
        print_line(line)
        if not is_number:  # Python's own exit prints a status that is a text, too
            print(status, file=sys.stderr)
    finally:
        end_now(status & 0xFF if is_number else 1)


def end_now(code: int) -> NoReturn:
    """End this process, without a wait for the others."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
