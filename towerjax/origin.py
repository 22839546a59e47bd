"""Which line of the user's made an equation? Found in its traceback."""

import sysconfig
from pathlib import Path
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation and the site of the one around it, or None."""

_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{Path(__file__).parent}/")


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
            path, function = Path(frame.file_name), frame.function_name
            library = {"site-packages", "dist-packages"}.intersection(path.parts)
            if not library and not frame.file_name.startswith(_LIBRARY):
                below = path.is_relative_to(Path.cwd())
                path = path.relative_to(Path.cwd() if below else path.parent.parent)
                return f"{path}:{frame.line_num} ({function.split('<locals>.')[-1]})"
    return ""
