"""Towers on CPU devices, and the layouts on which laws of a step are tried."""

import pytest

import towerjax as tj

# Towers, devices, local, micro-batches. All other layouts are tried by test_one_tower.
LAYOUTS = [(4, 2, "scan", 3)]
layouts = pytest.mark.parametrize(("T", "D", "local", "A"), LAYOUTS)


def names(count):
    return tuple(f"cpu:{i}" for i in range(count))


def mirrored(towers, devices=1, local="vmap", **options):
    return tj.Mirrored(names(devices), towers=towers, local=local, **options)


def cases(cls):
    """The functions that a class holds together, by name."""
    return {name: fn for name, fn in vars(cls).items() if callable(fn)}
