"""Towers on CPU devices, and the layouts on which laws of a step are tried."""

import pytest

import towerjax as tj

# Towers, devices, local, micro-batches: the first has all in one.
LAYOUTS = [(4, 2, "scan", 3)] + [
    pytest.param(*layout, marks=pytest.mark.slow)
    for layout in [(4, 4, "vmap", 1), (4, 2, "vmap", 3), (1, 1, "vmap", 1)]
]
layouts = pytest.mark.parametrize(("T", "D", "local", "A"), LAYOUTS)


def names(count):
    return tuple(f"cpu:{i}" for i in range(count))


def mirrored(towers, devices=1, local="vmap", **options):
    return tj.Mirrored(names(devices), towers=towers, local=local, **options)
