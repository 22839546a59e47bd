"""Which arguments that are no arrays make the same program? A key for each."""

import dataclasses
import functools
import types
from typing import Any

import numpy as np

# Nobody changes what is of these types, or only as what a traced function closes over.
_LASTING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_LASTING += (np.ufunc,)


class Constant:
    """An argument that is no array, as a part of the jit cache's key.

    1, 1.0 and True are equal and yet other arguments; what has no hash, or changes
    and is hashed by its identity, is new at each call.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._key = _key_of(value)
            self._hash = hash(self._key)
        except TypeError:
            self._key, self._hash = None, 0

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        known = isinstance(other, Constant) and None not in (self._key, other._key)
        return known and bool(self._key == other._key)


def _key_of(value: Any) -> tuple[Any, ...]:
    """What is equal for values that make the same program.

    Raises TypeError where nothing tells what the value is now.
    """
    kind = type(value)
    if isinstance(value, bool | int | float | complex):
        return kind, repr(value)  # 0.0 == -0.0
    if isinstance(value, tuple):
        return kind, *map(_key_of, value)
    if isinstance(value, frozenset):
        return kind, frozenset(map(_key_of, value))
    if isinstance(value, types.MethodType):
        return kind, value.__func__, _key_of(value.__self__)
    if isinstance(value, functools.partial):
        return kind, *map(_key_of, (value.func, value.args, *value.keywords.items()))
    by_identity = kind.__hash__ is object.__hash__
    params = getattr(kind, "__dataclass_params__", None)
    if params is not None and (params.frozen or not by_identity):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return kind, value, *(_key_of(getattr(value, name)) for name in fields)
    if by_identity and not _is_lasting(value):
        raise TypeError(f"{kind.__name__} is hashed by its identity")
    return kind, value


def _is_lasting(value: Any) -> bool:
    if isinstance(value, _LASTING) or hasattr(value, "__wrapped__"):
        return True
    slots = any("__slots__" in vars(cls) for cls in type(value).__mro__)
    return not slots and not hasattr(value, "__dict__")
