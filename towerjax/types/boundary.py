"""The API boundary: errors and warnings that leave it show the user's lines."""

import contextlib
import functools
import pathlib
import sys
import types
import warnings
from collections.abc import Callable
from opcode import opmap
from typing import Any, TypeVar

import jax

from towerjax.types import notes

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)
_PACKAGES = pathlib.Path(__file__).parent, pathlib.Path(jax.__file__)
_OURS = tuple(f"{path.parent}/" for path in _PACKAGES)
_PYTHONS = f"{pathlib.Path(contextlib.__file__).parent}/"  # the standard library


def api_boundary(fn: _F) -> _F:
    """Wrap a function so that errors are explained and tracebacks are short.

    Tracebacks are filtered like those of JAX: they have only the user's frames.
    """
    explain = notes.explain
    tidy = _tidy

    def enter(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:  # Ctrl-C, too
            # A second Ctrl-C during this would replace the first error, which may hold
            # a ``state``. `contextlib.suppress` cannot be used: Ctrl-C could arrive
            # during its own call.
            try:
                explain(error, fn)
                tidy(error)
            except KeyboardInterrupt:
                pass
            raise  # a bare raise adds no frame

    # The wrapper has the globals of the function, because doctest finds it by them.
    return functools.wraps(fn)(
        types.FunctionType(
            enter.__code__, fn.__globals__, fn.__name__, None, enter.__closure__
        )
    )  # type: ignore[return-value]


def api_boundaries(cls: _C) -> _C:
    """Make each public method that a class defines an `api_boundary`."""
    for name, x in vars(cls).items():
        is_open = name[0] != "_" or name in ("__call__", "__init__")
        if isinstance(x, types.FunctionType) and is_open:
            setattr(cls, name, api_boundary(x))
    return cls


def _tidy(error: BaseException | None) -> None:
    """Remove the frames of libraries from the traceback of an error and its causes."""
    config: Any = jax.config  # Any, since JAX's stub lacks the options
    seen: set[int] = set()
    while error and config.jax_traceback_filtering != "off" and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _of_others(error.__traceback__)
        error = error.__cause__ or error.__context__


def _of_others(
    trace: types.TracebackType | None, below_ours: bool = False
) -> types.TracebackType | None:
    """Drop the frames of towerjax and JAX from a traceback.

    Frames of Python's own library that these call are left out, too.
    """
    if trace is None:
        return None
    file = trace.tb_frame.f_code.co_filename
    is_pythons = file.startswith(_PYTHONS) and "site-packages" not in file
    is_ours = file.startswith(_OURS) or (below_ours and is_pythons)
    rest = _of_others(trace.tb_next, is_ours)
    if is_ours:
        return rest
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def warn_if_dropped(call: str, advice: str) -> None:
    """Warn if the user's line calls towerjax and does not use the result.

    Python's next instruction then drops the result.
    """
    frame = sys._getframe(1)
    while frame.f_back and _package_of(frame) == "towerjax":
        frame = frame.f_back
    if _package_of(frame) in _NOT_THE_USERS:
        return
    code = frame.f_code.co_code
    after = frame.f_lasti + 2
    while code[after] == opmap["CACHE"]:
        after = after + 2
    if code[after] == opmap["POP_TOP"]:
        warn(f"The result of {call} is dropped, so nothing has changed. {advice}")


def _package_of(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


# Modules whose frames may lie between towerjax and the user's line, such as those of
# decorators, cached properties and finalizers.
_NOT_THE_USERS = {"towerjax", "jax", *sys.stdlib_module_names}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the user's line that called towerjax."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back:
        if _package_of(frame) not in _NOT_THE_USERS:
            break
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)
