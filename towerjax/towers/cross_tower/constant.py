"""Is an argument that is no array the one that a program was made for?"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

# Nobody changes what is of these types, or only as what a traced function closes over.
_LASTING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_LASTING += (np.ufunc,)
# Each use changes them, which no attribute tells.
_USED_UP = (Iterator, np.random.Generator, np.random.RandomState)
_PLAIN = (bool, int, float, complex, str, bytes, np.number)


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
    kind: Any = type(value)
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is an array")
    if isinstance(value, _USED_UP):
        raise TypeError(f"{name} is a {kind.__name__}, which each use changes")
    if isinstance(value, (*_PLAIN, Mapping, list, tuple, set, frozenset)):
        more = getattr(value, "__dict__", None)  # what a class of one's own holds
        return kind, _inside(name, value), key_of(name, more) if more else None
    if isinstance(value, types.MethodType):
        return kind, value.__func__, key_of(name, value.__self__)
    if isinstance(value, functools.partial):
        return kind, *(
            key_of(name, x) for x in (value.func, value.args, value.keywords)
        )
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_record and kind.__dataclass_params__.frozen:
        # Not by its own ==, for which some fields may not count.
        return kind, *(key_of(f"{name}.{x}", getattr(value, x)) for x in _names(value))
    is_plain = kind.__hash__ is object.__hash__ and not isinstance(value, _LASTING)
    if is_record or is_plain:  # it may change and still hash the same
        # By its class's account, which may leave out attributes, and by these.
        accounts = dict.fromkeys((kind.__getstate__, object.__getstate__))
        held = [account(value) for account in accounts]
        # A jitted function is more than its attributes.
        itself = value if hasattr(value, "__wrapped__") else None
        if is_record or any(x is not None for x in held):
            return kind, itself, key_of(name, held)
    try:
        if kind.__hash__ is not None:
            hash(value)
            return kind, value
        held = kind.__reduce_ex__(value, 2), object.__getstate__(value)
    except TypeError as error:
        raise TypeError(f"{name} is a {kind.__name__} without a hash") from error
    return kind, key_of(name, held)


def _inside(name: str, value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, Mapping):
        return tuple((k, key_of(f"{name}[{k!r}]", v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(key_of(name, x) for x in value)
    return tuple(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))


def _names(record: Any) -> list[str]:
    """The fields of a frozen record, and what else it was made with."""
    fields = [field.name for field in dataclasses.fields(record)]

    def is_made(name: str) -> bool:
        found = getattr(type(record), name, None)  # a cache is made of the rest
        return name not in fields and not isinstance(found, functools.cached_property)

    return fields + list(filter(is_made, getattr(record, "__dict__", ())))
