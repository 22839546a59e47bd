"""Which values that are no arrays make the same program? A key for each."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# Nobody changes what is of these types, or only as what a traced function closes over.
_LASTING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_LASTING += (np.ufunc,)


class Constant:
    """An argument that is no array, as a part of the jit cache's key.

    What has no key is new at each call.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._key: Any = key_of("", value)
        except (TypeError, RecursionError):
            self._key = object()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Constant) and self._key == other._key


def key_of(name: str, value: Any) -> tuple[Any, ...]:
    """What is equal for values that make the same program: what they hold now.

    1, 1.0 and True are equal and yet other values. Raises TypeError where nothing tells
    what the value is.
    """
    kind = type(value)
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is an array")
    if isinstance(value, bool | int | float | complex | np.number):
        return kind, repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, Mapping):
        parts = [(k, key_of(f"{name}[{k!r}]", v)) for k, v in value.items()]
        return kind, tuple(parts)
    if isinstance(value, list | tuple):
        return kind, *(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(key_of(name, x) for x in value)
    if isinstance(value, types.MethodType):
        return kind, value.__func__, key_of(name, value.__self__)
    if isinstance(value, functools.partial):
        return kind, *(
            key_of(name, x) for x in (value.func, value.args, value.keywords)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not by its own ==, for which some fields may not count.
        fields = [field.name for field in dataclasses.fields(value)]
        return kind, *(key_of(f"{name}.{x}", getattr(value, x)) for x in fields)
    if kind.__hash__ is object.__hash__ and not _is_lasting(value):
        held = object.__getstate__(value)  # it may change and still hash the same
        if held is not None:
            return kind, key_of(name, held)
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} is a {kind.__name__} without a hash") from error
    return kind, value


def _is_lasting(value: Any) -> bool:
    return isinstance(value, _LASTING) or hasattr(value, "__wrapped__")
