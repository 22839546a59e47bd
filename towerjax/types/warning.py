"""Warnings that name a line of the user's program."""

import sys
import warnings

# Frames of decorators, cached properties and finalizers lie between, too.
_NOT_THE_USERS = {"towerjax", "jax", *sys.stdlib_module_names}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the user's line that called towerjax."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USERS:
            break
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)
