"""Find out whether a program has a custom_jvp or custom_vjp that the user wrote.

A proof for a value holds for the derivative that JAX finds, too. A user's derivative is
another program, which has to be proved as well.
"""

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from towerjax.jaxprs.params import given_name, open_jaxpr
from towerjax.jaxprs.sites import PACKAGE, all_eqns

_WITH_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_RULE_PARAMS = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp_rule", "fwd")
_JAX_FOLDER = str(Path(jax.__file__).parent)
_FOLDERS = (_JAX_FOLDER, str(PACKAGE))


def has_own_derivatives(jaxpr: ClosedJaxpr) -> bool:
    """Look in a program for a derivative that the user wrote.

    That is a custom_jvp or custom_vjp of the user's. If there is one, the derivatives
    must be walked, too, because a proof for the value does not hold for them. The
    custom_jvp and custom_vjp functions of JAX and of towerjax are trusted, and ignored.
    """
    return any(_has_own_rule(eqn) for eqn in all_eqns(jaxpr))


def _has_own_rule(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls a function whose derivative the user wrote."""
    name = eqn.primitive.name
    if name == "custom_linear_solve":
        programs = [x for x in eqn.params["jaxprs"] if x is not None]
        return not all(_source_of(x).startswith(_JAX_FOLDER) for x in programs)
    # An equation has the param "_prim" if one of these flags of JAX is on:
    # jax_custom_jvp3, jax_custom_vjp3, jax_remat3.
    if "_prim" in eqn.params:
        high = eqn.params["_prim"]
        is_known = given_name(eqn) is not None or type(high).__name__ == "RematTraced"
        return not (is_known or _is_rule_of_jax(vars(high)))
    return name in _WITH_RULES and not _is_rule_of_jax(eqn.params)


def _is_rule_of_jax(params: Mapping[str, Any]) -> bool:
    """Decide whether JAX or towerjax defines a function and its derivative.

    ``params`` are those of the equation that calls the function.
    """
    rules = [x for key, x in params.items() if key in _RULE_PARAMS]
    files = [x.co_filename for x in _code_in(rules)]
    if not all(x.startswith(_FOLDERS) for x in files):
        return False
    program: Any = params.get("call_jaxpr") or params.get("fun_jaxpr")
    if "traced" in params:
        program = params["traced"].jaxpr
    info = getattr(open_jaxpr(program), "debug_info", None)
    name, _, source = str(getattr(info, "func_src_info", "")).partition(" at ")
    file = source.rpartition(":")[0]
    is_of_ours = file.startswith(_FOLDERS)
    modules = [x for x in sys.modules.values() if getattr(x, "__file__", 0) == file]
    kinds = (jax.custom_jvp, jax.custom_vjp)
    has_rule = any(isinstance(getattr(x, name, None), kinds) for x in modules)
    # The functions in JAX's solves.py call a solver that the user passes, so their
    # derivative is partly the user's.
    return is_of_ours and has_rule and not file.endswith("solves.py")


def _code_in(values: Sequence[Any]) -> list[CodeType]:
    """List the code objects of functions, and of all functions they hold or wrap.

    These are in closures, partials, methods and callable objects.
    """
    codes: list[CodeType] = []
    todo = [*values]
    seen = set()
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            codes.append(x.__code__)
            for cell in x.__closure__ or ():
                with contextlib.suppress(ValueError):  # from a cell that is empty
                    todo.append(cell.cell_contents)
        elif isinstance(x, tuple | list):
            todo += x
        elif isinstance(x, MethodType):
            todo.append(x.__func__)
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif callable(x) and not isinstance(x, type):
            todo.append(type(x).__call__)
        todo += [getattr(x, name) for name in ("f", "__wrapped__") if hasattr(x, name)]
    return codes


def _source_of(program: Any) -> str:
    """Find the file and line of the function from which a program was traced."""
    info = getattr(open_jaxpr(program), "debug_info", None)
    return str(getattr(info, "func_src_info", "")).partition(" at ")[2]
