"""Compare arguments that are no arrays by what they hold, for the jit cache's key."""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

# Types whose values do not change, or only in what a traced function closes over.
_LASTING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_LASTING += (np.ufunc,)
# Types whose values each use changes, which no attribute shows.
_USED_UP = (Iterator, np.random.Generator, np.random.RandomState)
_SCALARS = (bool, int, float, complex, str, bytes, np.number)


class Constant:
    """An argument that is no array, as a part of the jit cache's key.

    A value that `key_of` refuses equals no other, so that each call is traced.
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
    """A key of what a value holds now: equal keys make the same program.

    The keys of 1, 1.0 and True differ. Raises TypeError where nothing identifies the
    value.
    """
    kind: Any = type(value)
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is an array")
    if isinstance(value, _USED_UP):
        raise TypeError(f"{name} is a {kind.__name__}, which each use changes")
    if isinstance(value, (*_SCALARS, Mapping, list, tuple, set, frozenset)):
        more = getattr(value, "__dict__", None)  # attributes of a subclass
        return kind, _item_keys(name, value), key_of(name, more) if more else None
    if isinstance(value, types.MethodType):
        return kind, value.__func__, key_of(name, value.__self__)
    if isinstance(value, functools.partial):
        return kind, *(
            key_of(name, x) for x in (value.func, value.args, value.keywords)
        )
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_record and kind.__dataclass_params__.frozen:
        # Not by its own ==, which may ignore some fields.
        return kind, *(key_of(f"{name}.{x}", getattr(value, x)) for x in _attrs(value))
    is_plain = kind.__hash__ is object.__hash__ and not isinstance(value, _LASTING)
    if is_record or is_plain:  # it may change and still hash the same
        # By its class's own state, which may leave out attributes, and by all of them.
        getters = dict.fromkeys((kind.__getstate__, object.__getstate__))
        held = [get(value) for get in getters]
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


def _item_keys(name: str, value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, Mapping):
        return tuple((k, key_of(f"{name}[{k!r}]", v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(key_of(name, x) for x in value)
    return tuple(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))


def _attrs(record: Any) -> list[str]:
    """The fields of a frozen dataclass, and its other attributes but for caches."""
    fields = [field.name for field in dataclasses.fields(record)]

    def is_other(name: str) -> bool:
        found = getattr(type(record), name, None)
        return name not in fields and not isinstance(found, functools.cached_property)

    return fields + list(filter(is_other, getattr(record, "__dict__", ())))
