"""What becomes of each type of leaf, over micro-batches, towers and devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj

ROWS = 12
X = np.arange(ROWS, 0, -1, np.float32)  # the last part has no extreme of a tower
IDS = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7])
COUNTS = np.bincount(IDS, X, 8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Largest:
    """A metric state whose merge does not add."""

    x: jax.Array

    def merge(self, other):
        return Largest(jnp.maximum(self.x, other.x))

    def compute(self):
        return self.x


def table(batch):
    return tj.sparse.IndexedRows(batch["x"][:, None], batch["id"], (8, 1))


def of_each_tower(T, fn):
    return np.stack([fn(x) for x in X.reshape(T, -1)])


# By its name: what a tower returns, and what that is after the merge, for T towers.
# fmt: off
LEAVES = {
    "sum": (lambda b, t, s: tj.Sum(b["x"].sum()), lambda T: X.sum()),
    "mean": (
        lambda b, t, s: tj.Weighted.mean(b["x"], b["x"]),
        lambda T: X @ X / X.sum(),
    ),
    "state": (lambda b, t, s: Largest(b["x"].max()), lambda T: X.max()),
    "table": (lambda b, t, s: table(b), lambda T: COUNTS[:, None]),
    "mean of a table": (
        lambda b, t, s: tj.Weighted(table(b), b["x"].sum()),
        lambda T: COUNTS[:, None] / X.sum(),
    ),
    "rows": (lambda b, t, s: tj.Rows(2 * b["x"]), lambda T: 2 * X),
    "bare": (lambda b, t, s: s.params + 1, lambda T: 3.0),
    "own sum": (
        lambda b, t, s: tj.PerTower(tj.Sum(b["x"].sum())),
        lambda T: of_each_tower(T, np.sum),
    ),
    "own states": (
        lambda b, t, s: tj.PerTower([Largest(b["x"].max()), tj.Sum(b["x"].sum())]),
        lambda T: [of_each_tower(T, np.max), of_each_tower(T, np.sum)],
    ),
    "own table": (
        lambda b, t, s: tj.PerTower(tj.Weighted(table(b), b["x"].sum())),
        lambda T: np.stack([np.bincount(ids, x, 8)[:, None] / x.sum() for ids, x in
            zip(IDS.reshape(T, -1), X.reshape(T, -1), strict=True)]),
    ),
    "variable": (
        lambda b, t, s: dataclasses.replace(
            s.local["seen"], value=s.local["seen"].value + b["x"].sum()
        ),
        lambda T: of_each_tower(T, np.sum),
    ),
}
# fmt: on


def numbers(x):
    """The value of a merged leaf."""
    if isinstance(x, tj.PerTower):
        states = jax.tree.leaves(x.values, is_leaf=tj.metrics.is_metric)
        found = [jax.vmap(lambda state: numbers(state))(state) for state in states]
        return found if isinstance(x.values, list) else found[0]
    if isinstance(x, tj.sparse.IndexedRows):
        return x.to_dense()
    if isinstance(x, tj.Weighted) and isinstance(x.sum, tj.sparse.IndexedRows):
        return x.sum.to_dense() / x.weight
    if isinstance(x, Largest):
        return x.x
    return getattr(x, "value", x)


@pytest.mark.slow
@pytest.mark.parametrize("T, D, tower_loop, parts", [
    (1, 1, "vmap", 1), (1, 1, "vmap", 3), (4, 2, "vmap", 1), (4, 2, "scan", 3),
])  # fmt: skip
def test_each_type_of_leaf_becomes_one_value(T, D, tower_loop, parts):
    def tower_fn(state, batch, tower):
        return {name: make(batch, tower, state) for name, (make, _) in LEAVES.items()}

    def update_fn(state, found):
        values = {name: numbers(x) for name, x in found.items()}
        return dataclasses.replace(state, extra=values), {"loss": jnp.float32(0)}

    devices = tuple(f"cpu:{i}" for i in range(D))
    strategy = tj.Mirrored(devices, towers=T, tower_loop=tower_loop)
    # The update keeps what each tower has, too.
    how = {"micro_batches": parts, "audit": False}
    step = tj.build_step(tower_fn, update_fn, strategy, **how)
    seen = {"seen": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}
    expected = {name: of(T) for name, (_, of) in LEAVES.items()}
    zeros = jax.tree.map(lambda x: np.zeros(np.shape(x), np.float32), expected)
    state = step.init(np.float32(2), local=seen, extra=zeros)
    state, _ = step(state, {"x": X, "id": IDS})
    for name, value in expected.items():
        got = jax.tree.map(np.asarray, state.extra[name])
        close = lambda a, b: np.testing.assert_allclose(a, b, 1e-6, err_msg=name)  # noqa
        jax.tree.map(close, got, value)
