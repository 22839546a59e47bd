"""Which line of the user's made an equation? Found in its traceback."""

import sysconfig
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax.extend.core import JaxprEqn

Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation and the site of the one around it, or None."""

_PACKAGE = Path(__file__).parents[1]
_JAX = f"{Path(jax.__file__).parent}/"
_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{_PACKAGE}/")


def line_of(site: Site | None) -> str:
    """The innermost line of the user's; library code inside jit has no such frame."""
    while site is not None:
        eqn, site = site
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not is_library(frame.file_name):
                path = Path(frame.file_name)
                return shown(path, frame.line_num, frame.function_name)
    return ""


def is_library(file: str) -> bool:
    """Is it a file of Python's, of an installed package or of towerjax itself?"""
    library = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(library) or file.startswith(_LIBRARY)


def is_ours(eqn: JaxprEqn) -> bool:
    """Was it towerjax that called JAX for it, or nobody whom it tells?"""
    traceback = eqn.source_info.traceback
    files = [x.file_name for x in traceback.frames] if traceback is not None else []
    callers = [file for file in files if not file.startswith(_JAX)]
    return not callers or callers[0].startswith(f"{_PACKAGE}/")


def shown(path: Path, line: int, function: str) -> str:
    """A line of code as people call it."""
    below = path.is_relative_to(Path.cwd())
    path = path.relative_to(Path.cwd() if below else path.parent.parent)
    inside = f" ({function.split('<locals>.')[-1]})" if function else ""
    return f"{path}:{line}{inside}"
