"""Which line of the user's made an equation? Found in its traceback."""

import sysconfig
from pathlib import Path
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation and the site of the one around it, or None."""

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{_PACKAGE}/")


def line_of(site: Site | None) -> str:
    """The innermost line of the user's; library code inside jit has no such frame.

    Args:
        site: the equation and those around it.

    Returns:
        Like "train.py:12 (loss_fn)"; "" where there is none.
    """
    while site is not None:
        eqn, site = site
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not is_library(frame.file_name):
                path = Path(frame.file_name)
                return shown(path, frame.line_num, frame.function_name)
    return ""


def is_library(file: str) -> bool:
    """Is it a file of Python's, of an installed package or of towerjax itself?

    Args:
        file: its path.
    """
    library = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(library) or file.startswith(_LIBRARY)


def shown(path: Path, line: int, function: str) -> str:
    """A line of code as people call it.

    Args:
        path: of the file.
        line: its number.
        function: its qualified name; may be empty.

    Returns:
        Like "train.py:12 (loss_fn)", from the current folder on.
    """
    below = path.is_relative_to(Path.cwd())
    path = path.relative_to(Path.cwd() if below else path.parent.parent)
    inside = f" ({function.split('<locals>.')[-1]})" if function else ""
    return f"{path}:{line}{inside}"
