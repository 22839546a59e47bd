"""What does a loss function give on towers that were dealt these rows?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.collectives.sparse_rows import num_rows
from towerjax.metrics.state import compute, is_metric, merged_rows
from towerjax.metrics.weighted import Means, UnknownWeights, Weighted
from towerjax.step.state import TrainState
from towerjax.step.train import Training
from towerjax.towers.local_towers import over_local_towers
from towerjax.towers.outputs import as_tower_output
from towerjax.towers.strategies import Mirrored
from towerjax.towers.tower import Tower, TowerInputs
from towerjax.towers.tower_local import is_local, local_values, with_local_values
from towerjax.towers.variables import TowerLocal
from towerjax.types import LossFn, PyTree, Reduction, TowerOutput, named_leaves
from towerjax.types.leaves import is_key


@dataclasses.dataclass(frozen=True, eq=False)
class Deal:
    """Which row of the batch each row of a tower is.

    Attributes:
      name: What reports call it.
      index: ``[T, b]`` int, rows of the batch.
      counts: ``[T]`` int32, how many of a tower's rows are examples; they come first.
    """

    name: str
    index: np.ndarray
    counts: np.ndarray

    @property
    def num_towers(self) -> int:
        """``T``."""
        return len(self.counts)


def dealt(name: str, hands: Sequence[Any], rows: int | None = None) -> Deal:
    """Rows dealt to towers, each padded with its last row."""
    rows = max(len(hand) for hand in hands) if rows is None else rows
    last = next(hand[-1] for hand in reversed(hands) if len(hand))
    index = np.full((len(hands), rows), last)
    for row, hand in zip(index, hands, strict=True):
        row[: len(hand)] = hand
        row[len(hand) :] = hand[-1] if len(hand) else last
    return Deal(name, index, np.array([len(hand) for hand in hands], np.int32))


def splits_of(examples: int, num_towers: int, *, padding: bool) -> list[Deal]:
    """The splits that are compared with one tower, all of the same shape."""
    order = np.arange(examples)
    shuffled = np.random.default_rng(0).permutation(examples)
    if not padding:
        return [
            dealt(name, np.split(rows, num_towers))
            for name, rows in (("in order", order), ("permuted", shuffled))
        ]
    rows = -(-examples // num_towers) + 1
    full = [shuffled[i * rows : (i + 1) * rows] for i in range(num_towers)]
    return [
        dealt("in order, padded", np.array_split(order, num_towers), rows),
        dealt("permuted, uneven, padded", full, rows),
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What towers gave, each leaf as one value.

    Attributes:
      leaves: Name -> array.
      sizes: Name -> the size that rounding is measured by: of the largest value, or
        of the parts that were added.
      unequal: Names of plain metrics that are not the same on all towers.
      parts: What the towers gave, leaves ``[T, ...]``.
    """

    leaves: dict[str, np.ndarray]
    sizes: dict[str, float]
    unequal: frozenset[str]
    parts: PyTree


class Audited:
    """A loss function with a batch and parameters, run on any number of towers.

    One program for each number of towers and of rows, on the default device.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        reduction: Reduction | None,
        params: PyTree,
        batch: PyTree,
        local: PyTree,
    ) -> None:
        self.loss_fn, self.reduction = loss_fn, reduction
        self.params, self.batch, self.local = params, batch, local
        self._programs: dict[int, Any] = {}
        self._finish = jax.jit(self._finished)

    def run(
        self,
        deal: Deal,
        key: jax.Array,
        *,
        scale: float = 1.0,
        local: PyTree = None,
    ) -> Values:
        """What the towers of a split give."""
        local = self.local if local is None else local
        args = self._arguments(deal, key, scale, local)
        return self._read_off(*self._program(deal.num_towers)(*args))

    def traced(self, deal: Deal, key: jax.Array) -> str:
        """The traced program of a split, which names every dtype."""
        args = self._arguments(deal, key, 1.0, self.local)
        return str(self._program(deal.num_towers).trace(*args).jaxpr)

    def _arguments(
        self, deal: Deal, key: jax.Array, scale: float, local: PyTree
    ) -> tuple[Any, ...]:
        rows = jax.tree.map(lambda x: x[deal.index], self.batch)
        copies = jax.tree.map(
            lambda x: jnp.stack([x] * deal.num_towers), local_values(local)
        )
        return self.params, rows, deal.counts, copies, key, np.float32(scale)

    def _program(self, num_towers: int) -> Any:
        if num_towers not in self._programs:
            on_towers = self._on_towers(num_towers)

            def program(*args: PyTree) -> PyTree:
                parts = on_towers(*args)
                return parts, self._finished(parts)

            self._programs[num_towers] = jax.jit(program)
        return self._programs[num_towers]

    def merged(self, values: Sequence[Values]) -> Values:
        """What the parts would give as towers of their own, of any number of rows."""
        parts = [value.parts for value in values]
        stacked = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
        return self._read_off(stacked, self._finish(stacked))

    def _read_off(self, parts: PyTree, finished: PyTree) -> Values:
        """The towers' parts, leaves ``[T, ...]``, with each leaf as one value."""
        named, sizes = jax.device_get(finished)
        leaves, size_of, unequal = {}, {}, set()
        for root, tree in named.items():
            for name, x in named_leaves(root, tree):
                leaves[name] = np.asarray(x, np.float64)
        for root, tree in sizes.items():
            size_of |= {name: float(x) for name, x in named_leaves(root, tree)}
        for name, plain in _plain(parts[2]).items():
            rows = np.asarray(jax.device_get(plain), np.float64)
            label = f"metrics[{name!r}]"
            size_of[label] = float(np.abs(rows).max(initial=0))
            if not np.allclose(rows, rows[:1], rtol=1e-5, atol=0, equal_nan=True):
                unequal.add(label)
        for name, x, size in self._read(parts[3]):
            leaves[name], size_of[name] = x, size
        for name, x in leaves.items():
            own = float(np.abs(x[np.isfinite(x)]).max(initial=0))
            size_of[name] = max(own, np.nan_to_num(size_of.get(name, 0.0)))
        return Values(leaves, size_of, frozenset(unequal), parts)

    def _on_towers(self, num_towers: int) -> Callable[..., PyTree]:
        strategy = Mirrored(devices=(jax.local_devices()[0],), towers=num_towers)
        axes = strategy.placement.axes

        def run(
            params: PyTree,
            rows: PyTree,
            counts: jax.Array,
            local: PyTree,
            key: jax.Array,
            scale: jax.Array,
        ) -> PyTree:
            number, variables = jnp.int32(0), self.local
            inputs = TowerInputs(strategy, axes, number, key)
            training = Training(self._scaled(scale), optax.identity())

            def tower_fn(tower_id: jax.Array, own: Any) -> tuple[PyTree, PyTree]:
                rows, num_valid, local = own
                tower = inputs.tower(tower_id, local, num_valid, num_rows(rows))
                local = with_local_values(variables, local)
                state = TrainState(number, params, (), local, key)
                out = training.tower(state, rows, tower)
                local = local_values(out["local"])
                return (out["grads"].sum, out["loss"], out["metrics"], local), ()

            own = (rows, counts, local)
            return over_local_towers(tower_fn, axes, own, stack_sums=True)[0]

        return run

    def _scaled(self, scale: jax.Array) -> LossFn:
        def scaled(params: PyTree, rows: PyTree, tower: Tower) -> TowerOutput:
            out = as_tower_output(self.loss_fn(params, rows, tower), self.reduction)
            if isinstance(out.loss, Means):
                raise UnknownWeights
            total = out.loss.sum * scale.astype(out.loss.sum.dtype)
            return dataclasses.replace(out, loss=Weighted(total, out.loss.weight))

        return scaled

    def _finished(self, parts: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
        grads, total, metrics, _ = parts
        weight = total.weight.sum()
        if self.reduction is Reduction.SUM:
            weight = jnp.ones_like(weight)
        inverse = Weighted(1.0, weight).value
        states = {name: x for name, x in metrics.items() if is_metric(x)}
        named = {
            "loss": total.sum.sum() * inverse,
            "gradient": jax.tree.map(lambda g: g.sum(axis=0) * inverse, grads),
            "metrics": {name: compute(merged_rows(x)) for name, x in states.items()}
            | {name: x[0] for name, x in _plain(metrics).items()},
        }

        def size(x: Any) -> jax.Array:
            return jnp.max(jnp.abs(x).sum(axis=0), initial=0.0)

        def size_of_mean(x: Weighted) -> jax.Array:
            weight = jnp.asarray(x.weight).sum(axis=0)
            return jnp.max(Weighted(jnp.abs(x.sum).sum(axis=0), weight).value)

        sizes = {
            "loss": size(total.sum) * inverse,
            "gradient": jax.tree.map(lambda g: size(g) * inverse, grads),
            "metrics": {
                name: size_of_mean(x)
                for name, x in states.items()
                if isinstance(x, Weighted)
            },
        }
        return named, sizes

    def _read(self, values: PyTree) -> list[tuple[str, np.ndarray, float]]:
        """Each local leaf that has one value: its name, its value, its size."""
        found = []
        for path, variable in _variables(with_local_values(self.local, values)):
            for name, x in named_leaves(path, variable.value):
                if not is_compared(variable, x):
                    continue
                rows = np.asarray(jax.device_get(x), np.float64)
                size = np.abs(rows).max(initial=0)
                if variable.reduction is Reduction.ONLY_FIRST_TOWER:
                    found.append((name, rows[0], size))
                elif variable.reduction is Reduction.MEAN:
                    found.append((name, rows.mean(axis=0), size))
                else:
                    found.append((name, rows.sum(axis=0), size * len(rows)))
        return found

    def reductions(self) -> dict[str, Reduction]:
        """Of each local leaf how it is read."""
        return {
            name: variable.reduction
            for path, variable in _variables(self.local)
            for name, _ in named_leaves(path, variable.value)
        }

    def left_out(self) -> tuple[str, ...]:
        """Names of the local leaves that have no one value to compare."""
        return tuple(
            name
            for path, variable in _variables(self.local)
            for name, x in named_leaves(path, variable.value)
            if not is_compared(variable, x)
        )


def _variables(local: PyTree) -> list[tuple[str, TowerLocal]]:
    return named_leaves("local", local, is_leaf=is_local)


def is_compared(variable: TowerLocal, leaf: Any) -> bool:
    """Is a leaf of a tower-local variable a number that is read as one value?"""
    return variable.reduction is not Reduction.NONE and not is_key(leaf)


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in metrics.items() if not is_metric(x)}
