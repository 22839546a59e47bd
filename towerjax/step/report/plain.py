"""How does a report become JSON, and a report again? By its fields' types."""

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

_Report = TypeVar("_Report")


def as_json(report: Any) -> str:
    """One JSON object."""
    return json.dumps(dataclasses.asdict(report), indent=2, allow_nan=False)


def from_json(kind: type[_Report], text: str) -> _Report:
    """What `as_json` was given."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is no JSON: {error}.") from None
    return _made(kind, found)


def _made(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return _made_of_fields(kind, value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            pairs = zip(arguments, value, strict=True)
            return tuple(_made(one, part) for one, part in pairs)
        return tuple(_made(arguments[0], part) for part in value)
    if origin is types.UnionType:
        [inner] = [one for one in arguments if one is not type(None)]
        return None if value is None else _made(inner, value)
    return value


def _made_of_fields(kind: Any, value: Any) -> Any:
    wanted = {field.name for field in dataclasses.fields(kind)}
    got = set(value) if isinstance(value, dict) else set()
    if got != wanted:
        raise ValueError(
            f"This is not the JSON of a {kind.__name__}: missing"
            f" {sorted(wanted - got)}, unknown {sorted(got - wanted)}."
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: _made(hints[name], part) for name, part in value.items()})
