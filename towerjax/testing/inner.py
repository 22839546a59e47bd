"""Take out the step of a trainer, which its ``train`` function defines inside."""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from towerjax.types.boundary import api_boundary
from towerjax.types.refusals import listed


@api_boundary
def inner(outer: Callable[..., Any], name: str, /, **closed: Any) -> Callable[..., Any]:
    """Take out a function that is defined in another one, with values that you give.

    ``outer`` is not called. The values are those of the variables of ``outer`` that the
    inner function reads. Decorators of the inner function, such as `jax.pmap`, and
    defaults of its arguments are left out.

    Args:
      outer: A Python function, decorated or not.
      name: The name of the function that is defined in it, at any depth.
      **closed: A value for each variable that the inner function reads from around it,
        by name.

    Raises:
      ValueError: No function or several functions have this name; or the names in
        ``closed`` are not those that the inner function reads.

    Example:
      >>> def train(rate):
      ...     def step(w, gradient):
      ...         return w - rate * gradient
      ...     return step(1.0, 2.0)
      >>> inner(train, "step", rate=0.5)(3.0, 2.0)
      2.0
    """
    plain: Any = inspect.unwrap(outer)
    code = getattr(plain, "__code__", None)
    codes = [x for x in _within(code) if x.co_name == name] if code else []
    if len(codes) != 1:
        raise ValueError(
            f"{len(codes)} functions named {name!r} are defined in {outer!r:.200}: name"
            " the one that is."
        )
    [found_code] = codes
    if {*closed} != {*found_code.co_freevars}:
        raise ValueError(
            f"{name} reads {listed(found_code.co_freevars) or 'nothing'} from the"
            f" function around it, but got {listed([*closed]) or 'nothing'}. Pass a"
            " value for each name that it reads."
        )
    cells = tuple(types.CellType(closed[x]) for x in found_code.co_freevars)
    return types.FunctionType(found_code, plain.__globals__, name, None, cells)


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _within(constant)
