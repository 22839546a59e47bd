"""Walk all equations of a program, and find the user's line that made each of them."""

import functools
import sysconfig
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.jaxprs import tags
from towerjax.jaxprs.params import jaxprs_in_params, named_axes, open_jaxpr
from towerjax.jaxprs.primitives import PLAIN

Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation, and the site of the equation around it, or None."""


def all_jaxprs(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yield a jaxpr and the jaxprs inside it."""
    yield jaxpr
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in jaxprs_in_params(eqn):
            yield from all_jaxprs(inner)


def constants_in(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """Yield the arrays in a jaxpr whose numbers its text does not show in full."""
    for program in all_jaxprs(jaxpr):
        yield from getattr(program, "consts", ())
        for eqn in open_jaxpr(program).eqns:
            yield from (x.val for x in eqn.invars if isinstance(x, Literal))


def all_eqns(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Iterate over the equations of a jaxpr and of its inner jaxprs."""
    return (eqn for program in all_jaxprs(jaxpr) for eqn in open_jaxpr(program).eqns)


def eqns_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Iterate over the equations of an equation's inner jaxprs."""
    return (x for inner in jaxprs_in_params(eqn) for x in all_eqns(inner))


def all_sites(
    jaxpr: Jaxpr | ClosedJaxpr,
    *,
    enter: Callable[[JaxprEqn], bool] = lambda eqn: True,
    plain: bool = False,
    outer: "Site | None" = None,
) -> list["Site"]:
    """List the sites of all equations of a jaxpr, and of the inner jaxprs it enters.

    A site is an equation with the equations around it. ``enter(eqn)`` tells whether to
    enter the jaxprs inside an equation. If ``plain`` is true, equations of `PLAIN`
    primitives are listed, too.
    """
    sites: list[Site] = []
    for eqn in open_jaxpr(jaxpr).eqns:
        if plain or eqn.primitive not in PLAIN:
            sites.append(site := (eqn, outer))
            for inner in jaxprs_in_params(eqn) if enter(eqn) else ():
                sites += all_sites(inner, enter=enter, plain=plain, outer=site)
    return sites


PACKAGE = Path(__file__).parents[1]
"""The folder of this package."""


_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{PACKAGE}/")


def sites_over(
    jaxpr: Jaxpr | ClosedJaxpr, axes: Collection[str] | None = None
) -> list[Site]:
    """List the sites of equations that name one of the mesh axes ``axes``.

    For None it is any axis.
    """
    sites = [site for site in all_sites(jaxpr) if named_axes(site[0])]
    if axes is None:
        return sites
    return [site for site in sites if not {*axes}.isdisjoint(named_axes(site[0]))]


def outwards(site: Site | None) -> Iterator[JaxprEqn]:
    """Yield the equation of a site, and then the equations around it."""
    while site is not None:
        eqn, site = site
        yield eqn


def scopes_of(site: Site) -> list[str]:
    """List the name scopes around a site's equation, the outermost first."""
    stacks = [x.source_info.name_stack.stack for x in outwards(site)]
    return [
        (tags.TRANSPOSED if x.name == "transpose" else "")
        if type(x).__name__ == "Transform"
        else x.name
        for stack in stacks[::-1]
        for x in stack
    ]


def user_line(site: Site | None) -> str:
    """Find the innermost line of user code around an equation; "" if none."""
    for eqn in outwards(site):
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not is_library(frame.file_name):
                return format_line(frame.file_name, frame.line_num, frame.function_name)
    return ""


def is_in_mean(eqn: JaxprEqn) -> bool:
    """Return whether a sum is the one in a `jax.lax.pmean`, which then divides it."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return "pmean" in [frame.function_name for frame in frames]


@functools.cache  # A program has a frame for each line, but few files.
def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or towerjax."""
    library = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(library) or file.startswith(_LIBRARY)


def format_line(file: str, line: int, function: str) -> str:
    """Write a place in code as text, such as "train.py:12 (loss_fn)"."""
    path = Path(file)
    here = Path.cwd()
    below = path.is_relative_to(here)
    path = path.relative_to(here if below else path.parent.parent)
    inside = f" ({function.split('<locals>.')[-1]})" if function else ""
    return f"{path}:{line}{inside}"


def arrays_in(jaxpr: ClosedJaxpr) -> Iterator[jax.Array]:
    """Yield the arrays among the constants and literals of a jaxpr and inner jaxprs."""
    for program in all_jaxprs(jaxpr):
        body = open_jaxpr(program)
        yield from getattr(program, "consts", ())
        for var in [*(v for eqn in body.eqns for v in eqn.invars), *body.outvars]:
            if isinstance(var, Literal) and np.ndim(var.val):
                yield var.val
