"""Arrays and maps over devices that the tests of any JAX program share."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import towerjax as tj

DRAW = np.random.default_rng(5)
W = DRAW.normal(size=3).astype(np.float32)
X = DRAW.normal(size=(8, 3)).astype(np.float32)
Y = DRAW.normal(size=8).astype(np.float32)
ALL = P()
SPLIT = P("i")
NUMBERS = 1, 2, 4


def mapped(devices, fn, *args, ins=None, out=ALL, **how):
    """The program and its arguments, of which all devices have the first whole."""
    ins = (ALL, *[SPLIT] * (len(args) - 1)) if ins is None else ins
    how = {"check_vma": False} | how
    specs = {"mesh": Mesh(devices, "i"), "in_specs": ins, "out_specs": out}
    return jax.jit(jax.shard_map(fn, **specs, **how)), args


def loss(w, x, y):
    return ((x @ w - y) ** 2).mean()


def proof_of(make):
    return tj.testing.prove(make, devices=NUMBERS)


def given_by(make, number):
    fn, args = make(jax.devices()[:number])
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(fn(*args))]
