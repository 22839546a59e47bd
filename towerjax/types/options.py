"""Checks of options, with one error text for each kind of option."""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import numbers
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types.refusals import shown

_INT32_MAX = 2**31 - 1


def refuse_option(name: str, value: Any, form: str) -> NoReturn:
    """Raise the error for an option with a wrong value."""
    raise ValueError(f"{name}={value!r:.200} must be {form}.")


def is_whole(number: Any) -> bool:
    """Return whether ``number`` is an int of Python or NumPy, and not a bool."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def is_one_real(value: Any) -> bool:
    """Return whether a value is a real number, of Python, NumPy, ml_dtypes or JAX."""
    if not jax.tree_util.all_leaves([value]):
        return False
    array = np.asarray(value)
    is_real = array.dtype.kind in "biu" or jnp.issubdtype(array.dtype, np.floating)
    return array.ndim == 0 and bool(is_real)


def check_whole(
    name: str,
    number: Any,
    lowest: int = 1,
    highest: float = _INT32_MAX,
    *,
    or_none: bool = False,
) -> None:
    """Raise unless a number is whole and within its limits.

    With ``or_none`` None is allowed, too.
    """
    if or_none and number is None:
        return
    if not is_whole(number) or not lowest <= number <= highest:
        is_large = is_whole(number) and number > highest
        limit = f"<= {highest}" if is_large else f">= {lowest}"
        refuse_option(name, number, f"a whole number {limit}")


def cast_ints(options: Any) -> None:
    """Convert a dataclass's NumPy integers to Python integers, which never overflow."""
    for name, value in vars(options).items():
        if isinstance(value, np.integer):
            object.__setattr__(options, name, int(value))


def check_wholes(name: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Make a tuple of whole numbers; raise unless there is at least one."""
    if not isinstance(numbers, Sequence | np.ndarray) or not len(numbers):
        refuse_option(name, numbers, "a list of one or more whole numbers")
    for i, number in enumerate(numbers):
        check_whole(f"{name}[{i}]", number)
    return tuple(int(number) for number in numbers)


def check_different(name: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Drop repeated numbers from a list; raise unless two or more are left."""
    different = tuple(dict.fromkeys(check_wholes(name, numbers)))
    if len(different) < 2:
        raise ValueError(f"{name}={numbers!r} must be two or more different numbers.")
    return different


def check_list(name: str, value: Any, example: str | None = None) -> tuple[Any, ...]:
    """Make a tuple of a list's items; raise for text.

    Raises for other values, too.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        example = example or f"[{value!r:.200}]"
        refuse_option(name, value, f"a list: write {name}={example}")
    return tuple(value)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise unless a value is one of the allowed ones."""
    if not any(isinstance(value, type(x)) and value == x for x in allowed):
        refuse_option(name, value, f"one of {', '.join(map(repr, allowed))}")


def check_text(name: str, value: Any, form: str) -> None:
    """Raise unless a value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        refuse_option(name, value, form)


def check_number(
    name: str, value: Any, form: str, highest: float = sys.float_info.max
) -> None:
    """Raise unless a value is a number from 0 to the highest, or a JAX array."""
    if isinstance(value, jax.Array):  # perhaps a tracer
        return
    plain = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not plain or not 0 <= float(value) <= highest:
        refuse_option(name, value, form)


def check_flag(name: str, value: Any) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool):
        refuse_option(name, value, "True or False")


@contextlib.contextmanager
def opening(name: str, path: Any) -> Iterator[None]:
    """Explain an error of opening a file in this block.

    The error then names the option with the file's path, and says why it failed.
    """
    try:
        yield
    except (OSError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name}={str(path)!r} cannot be written to: {why}. Name a file or folder"
            " that this process may write to."
        ) from error


def require(module: str, needed_by: str, extra: str) -> Any:
    """Import a module of an extra of towerjax; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{needed_by} needs the package {package}, which is not installed"
            f" ({error}). Run pip install '.[{extra}]' in a checkout of towerjax."
        ) from error


def check_function(name: str, value: Any, form: str, *, takes: bool = True) -> None:
    """Raise unless a value is a function of this form; a class is refused."""
    if not callable(value) or isinstance(value, type):
        raise ValueError(f"{name}={value!r:.200} is not a function; write def {form}.")
    if takes:
        check_takes(form, value)


def check_callable(name: str, value: Any, form: str) -> None:
    """Raise unless a value can be called, as a function or a class such as float."""
    if not isinstance(value, type):
        check_function(name, value, form, takes=False)


def check_takes(form: str, fn: Any, /, *args: Any, **kwargs: Any) -> None:
    """Raise unless ``fn`` can be called with these arguments.

    ``form`` shows the expected call in the error.
    """
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # compiled functions may have no signature
        return
    names = re.findall(r"[(,] ?(\w+)", form)
    try:
        taken = signature.bind(*(args or names), **kwargs).arguments
        if _is_in_another_order(names, [*taken]):
            raise TypeError("its arguments have another order")
    except TypeError as error:
        why, remedy = _misnamed(signature, kwargs) or (error, f"Write def {form}.")
        raise ValueError(
            f"A function with the signature {signature} cannot be called as {form}:"
            f" {why}. {remedy}"
        ) from None


def _is_in_another_order(names: Sequence[str], taken: Sequence[str]) -> bool:
    """Return whether a function takes arguments of these names in another order.

    A single letter stands for a name that begins with it: ``lambda b, p, t``.
    """
    initials = {name[0]: name for name in names}
    are_letters = all(name in initials for name in taken) and len(initials) == len(
        names
    )
    full = [initials[name] for name in taken] if are_letters else taken
    return any(x in names and names.index(x) != i for i, x in enumerate(full))


def _misnamed(
    signature: inspect.Signature, arguments: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Explain why a keyword's name is wrong, and what to write; None if none is."""
    known = signature.parameters
    for name in arguments:
        near = difflib.get_close_matches(name, known, 1)
        if name not in known and near and near[0] not in arguments:
            return (
                f"it has no argument {name!r}"
            ), f"Write {near[0]!r} in place of {name!r}."
    return None


def check_methods(name: str, value: Any, methods: str, example: str) -> None:
    """Raise unless a value is an object with these methods."""
    lacks = ", ".join(x for x in methods.split() if not hasattr(value, x))
    if lacks or isinstance(value, type):
        why = f"it has no {lacks}" if lacks else "it is a class, not an object"
        raise ValueError(
            f"{name}={shown(value)} cannot be used here: {why}. Pass {example}."
        )


def short_repr(self: Any) -> str:
    """Write the call that makes an equal object, without arguments at defaults."""
    fields = [
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    ]
    return f"{type(self).__name__}({', '.join(fields)})"
