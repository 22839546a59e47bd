"""A public door: an error that leaves it shows the user's lines, and not ours."""

import contextlib
import functools
import pathlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from towerjax.types import missing

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)
_PACKAGES = pathlib.Path(__file__).parent, pathlib.Path(jax.__file__)
_OURS = (*(f"{path.parent}/" for path in _PACKAGES), contextlib.__file__)


def door(fn: _F) -> _F:
    """The function; its errors leave out frames by ``jax_traceback_filtering``."""
    explain, tidy = missing.explain, _tidy

    def enter(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            explain(error)
            tidy(error)
            raise  # by itself it adds no frame

    # With the globals of the function, by which doctest finds it.
    parts = enter.__code__, fn.__globals__, fn.__name__, None, enter.__closure__
    return functools.wraps(fn)(types.FunctionType(*parts))  # type: ignore[return-value]


def doors(cls: _C) -> _C:
    """The class, each of whose own public methods is a `door`."""
    for name, x in vars(cls).items():
        if isinstance(x, types.FunctionType) and (name[0] != "_" or name == "__call__"):
            setattr(cls, name, door(x))
    return cls


def _tidy(error: BaseException | None) -> None:
    """Drop frames from an error's traceback, and from those of what it came from."""
    config: Any = jax.config  # whose options are not in the stub
    seen: set[int] = set()
    while error and config.jax_traceback_filtering != "off" and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _of_others(error.__traceback__)
        error = error.__cause__ or error.__context__


def _of_others(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without frames of towerjax and JAX."""
    if trace is None:
        return None
    rest = _of_others(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return rest
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
