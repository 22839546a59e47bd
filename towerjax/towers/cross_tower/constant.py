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
_SCALARS = (bool, int, float, complex, str, bytes, np.number)
_AS_OBJECT = object.__getstate__, object.__reduce__
_HOLDERS = (Mapping, list, tuple, set, frozenset)


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
    kind = type(value)
    if isinstance(value, jax.Array | np.ndarray | Iterator):
        what = "iterator" if isinstance(value, Iterator) else "array"
        raise TypeError(f"{name} is an {what}")
    if isinstance(value, (*_SCALARS, *_HOLDERS)):
        more = getattr(value, "__dict__", None)  # attributes of a subclass
        return kind, _item_keys(name, value), key_of(name, more) if more else None
    if isinstance(value, _LASTING) or not _may_change(value):
        return kind, value
    # A jitted function is more than its attributes.
    itself = value if hasattr(value, "__wrapped__") else None
    held = [_attributes(value)]
    if itself is None and (kind.__getstate__, kind.__reduce__) != _AS_OBJECT:
        held.append(value.__reduce_ex__(2))  # may leave out attributes
    if held != [None]:
        return kind, itself, key_of(name, held)
    if kind.__hash__ is None:
        raise TypeError(f"{name} is a {kind.__name__} without a hash")
    return kind, value


def _attributes(value: Any) -> Any:
    """The attributes of an object, but for caches."""
    held: Any = object.__getstate__(value)
    if not isinstance(held, dict):
        return held
    kinds = {name: getattr(type(value), name, None) for name in held}
    cached = functools.cached_property
    return {n: x for n, x in held.items() if not isinstance(kinds[n], cached)}


def _may_change(value: Any) -> bool:
    """Whether a value may change and still be equal to what it was."""
    kind: Any = type(value)
    by_itself = dataclasses.is_dataclass(kind) or isinstance(value, types.MethodType)
    return by_itself or kind.__hash__ in (None, object.__hash__)


def _item_keys(name: str, value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, Mapping):
        return tuple((k, key_of(f"{name}[{k!r}]", v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(key_of(name, x) for x in value)
    return tuple(key_of(f"{name}[{i}]", x) for i, x in enumerate(value))
