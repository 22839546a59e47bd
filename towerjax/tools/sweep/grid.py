"""Make the configurations of a grid, and find the names that can be traced."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.tools.sweep.record_file import key_text
from towerjax.types.leaves import held_dtype
from towerjax.types.options import is_whole

Config: TypeAlias = dict[str, Any]


def combinations(lists: Mapping[str, Iterable[Any]]) -> list[Config]:
    """Every combination of the values; those of the last name vary fastest."""
    return [
        dict(zip(lists, values, strict=True))
        for values in itertools.product(*lists.values())
    ]


def configs_of(grid: Any) -> list[Config]:
    """The configurations of a grid, checked, each once."""
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise ValueError(
                    f"grid: {name}={values!r} must be a list, [{values!r}]."
                )
        grid = combinations(grid)
    configs = [{name: _as_plain(name, x) for name, x in dict(c).items()} for c in grid]
    names = [list(config) for config in configs]
    if not configs or any(set(one) != set(names[0]) or not one for one in names):
        raise ValueError(
            "grid must be {name: [values]}, or a list of configurations that all have"
            f" the same names; it has {len(configs)}"
            + (f", the first with {names[0]}." if names else ".")
        )
    return list({key_text(config): config for config in configs}.values())


def _as_plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | jax.Array) and not value.ndim:
        value = value.item()
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(
            f"grid: {name}={value!r} is a {type(value).__name__}. Configurations are"
            " numbers, texts, bools and None, which a file of results can name: write a"
            " text, and look the rest up in build."
        )
    return value


def traced_names(configs: Sequence[Config], static: Iterable[str]) -> dict[str, Any]:
    """Name -> dtype for each name, not in ``static``, whose values are all numbers."""
    if isinstance(static, str):
        raise ValueError(f"static={static!r} must be a list: static=[{static!r}].")
    for name in (static := list(static)):
        if name not in configs[0]:
            raise ValueError(
                f"static names {name!r}, and the grid has {', '.join(configs[0])}."
            )
    columns = {name: [c[name] for c in configs] for name in configs[0]}
    return {
        name: _traced_dtype(name, values)
        for name, values in columns.items()
        if name not in static
        and all(isinstance(x, float) or is_whole(x) for x in values)
    }


def _traced_dtype(name: str, values: list[Any]) -> Any:
    """The dtype of traced numbers on devices; raise if it cannot hold one."""
    dtype = held_dtype(float if any(isinstance(x, float) for x in values) else int)
    try:
        np.array(values, dtype)
    except OverflowError as error:
        raise ValueError(
            f"grid: {name} has numbers that {dtype} does not hold: {error}. Write"
            f" smaller ones, or static=[{name!r}]."
        ) from error
    return dtype
