"""How do numbers go into JSON? It has no NaN and no infinities; they become strings."""

import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """The value with each float that is not finite by its name, as ``float`` reads."""
    if isinstance(value, Mapping):
        return {name: as_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
