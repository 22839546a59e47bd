"""Towers on CPU devices, and rows of unequal weights."""

import numpy as np

import towerjax as tj


def names(count):
    return tuple(f"cpu:{i}" for i in range(count))


def mirrored(towers, devices=1, tower_loop="vmap", **options):
    return tj.Mirrored(names(devices), towers=towers, tower_loop=tower_loop, **options)


def with_verbs(*args, **options):
    """The same, with TensorFlow's verbs."""
    return tj.tf1.with_verbs(mirrored(*args, **options))


def cases(cls):
    """The functions that a class holds together, by name."""
    return {name: fn for name, fn in vars(cls).items() if callable(fn)}


def rows(count, *width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, *width)).astype(np.float32)


def data(size=24, seed=0, features=5):
    """Examples of unequal weights, of one number each."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, features)).astype(np.float32),
        "y": rng.normal(size=size).astype(np.float32),
        "weight": rng.uniform(0.05, 1, size=size).astype(np.float32),
    }
