"""Why does a leaf depend on the split? Experiments, from the surest to the weakest.

Nothing is guessed from names. ``A``, ``B`` and ``C`` are disjoint parts of the batch of
equal numbers of rows, and ``v(AB)`` is a leaf's value on one tower that has both.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.tools.testing.audited import Audited, Values, dealt
from towerjax.types import PyTree, Reduction
from towerjax.types.leaves import is_key

_TINY_SCALE = (
    2.0**-20
)  # a power of two: it changes no bit of a gradient but its exponent
_PARTS = {"A": 0, "B": 1, "C": 2}


def differs(got: np.ndarray, want: np.ndarray, allowed: float) -> bool:
    """Is an element of ``got`` not what it should be?"""
    return largest_gap(got, want) > allowed


def largest_gap(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of two arrays; infinite where only one is not finite."""
    if got.shape != want.shape:
        return np.inf
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(got - want))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class Experiments:
    """Runs of one audited loss function, each made when it is first asked for.

    Attributes:
      audited: The loss function with its batch.
      examples: ``B``, at least 4.
      key: The key of all runs but one.
      allowed: Name -> the largest difference that rounding may make.
    """

    audited: Audited
    examples: int
    key: jax.Array
    allowed: Mapping[str, float]

    def causes(self, leaf: str) -> tuple[tuple[str, ...], str]:
        """Why a leaf that depends on the split does so."""
        for experiment in (
            self._random,
            self._of_one_tower,
            self._initial,
            self._exchanged,
            self._reordered,
            self._clipped,
            self._scaled_by_towers,
        ):
            found = experiment(leaf)
            if found is not None:
                return (found[0],), found[1]
        found = [x for x in (self._joined(leaf), self._padded(leaf)) if x is not None]
        if not found:
            return ("unknown",), ""
        names = tuple(name for name, _ in found)
        return names, "; ".join(text for _, text in found if text)

    def _rows(self, letters: str) -> list[int]:
        each = max(1, self.examples // 4)
        return [_PARTS[x] * each + i for x in letters for i in range(each)]

    @functools.cached_property
    def _cache(self) -> dict[tuple[str, ...], Values]:
        return {}

    def _run(self, *towers: str) -> Values:
        """What towers with these parts give, one tower a word."""
        if towers not in self._cache:
            deal = dealt("", [self._rows(letters) for letters in towers])
            self._cache[towers] = self.audited.run(deal, self.key)
        return self._cache[towers]

    def _value(self, leaf: str, *towers: str) -> np.ndarray:
        return self._run(*towers).leaves[leaf]

    def _same(self, leaf: str, got: np.ndarray, want: np.ndarray) -> bool:
        size = max(np.abs(x[np.isfinite(x)]).max(initial=0) for x in (got, want))
        return not differs(got, want, max(self.allowed[leaf], 1e-4 * size))

    def random_leaves(self) -> frozenset[str]:
        """The leaves that on one tower change with the key."""
        deal = dealt("", [range(self.examples)])
        first, second = (
            self.audited.run(deal, key).leaves
            for key in (self.key, jax.random.fold_in(self.key, 1))
        )
        return frozenset(
            name for name in first if not self._same(name, second[name], first[name])
        )

    @functools.cached_property
    def _is_random(self) -> frozenset[str]:
        return self.random_leaves()

    def _random(self, leaf: str) -> tuple[str, str] | None:
        return ("rng", "") if leaf in self._is_random else None

    def _of_one_tower(self, leaf: str) -> tuple[str, str] | None:
        reduction = self.audited.reductions().get(leaf)
        if reduction is Reduction.ONLY_FIRST_TOWER:
            values = self._value(leaf, "A", "B"), self._value(leaf, "A", "C")
            if self._same(leaf, *values):
                return "first_tower", ""
        if leaf in self._run("A", "B").unequal:
            return "per_tower", ""
        return None

    def _initial(self, leaf: str) -> tuple[str, str] | None:
        if self.audited.reductions().get(leaf) is not Reduction.SUM:
            return None
        zeros = jax.tree.map(_zeros, self.audited.local)
        two, one = (
            self.audited.run(
                dealt("", [self._rows(x) for x in towers]), self.key, local=zeros
            ).leaves[leaf]
            for towers in (("A", "B"), ("AB",))
        )
        started = self._value(leaf, "A", "B"), self._value(leaf, "AB")
        if self._same(leaf, two, one) and not self._same(leaf, *started):
            return "initial", ""
        return None

    def _exchanged(self, leaf: str) -> tuple[str, str] | None:
        first, second = self._value(leaf, "A", "B"), self._value(leaf, "B", "A")
        return None if self._same(leaf, first, second) else ("tower_id", "")

    def _reordered(self, leaf: str) -> tuple[str, str] | None:
        first, second = self._value(leaf, "AB"), self._value(leaf, "BA")
        return None if self._same(leaf, first, second) else ("row_order", "")

    def _scaled_by_towers(self, leaf: str) -> tuple[str, str] | None:
        for name, power in (("sum", 1), ("divided", -1)):
            if all(
                np.any(self._value(leaf, "A" * n))
                and self._same(
                    leaf,
                    self._value(leaf, *"A" * n) / float(n) ** power,
                    self._value(leaf, "A" * n),
                )
                for n in (2, 3)
            ):
                ratio = ("2 and 3", "1/2 and 1/3")[power < 0]
                return (
                    name,
                    f"2 and 3 towers of the same rows give {ratio} times as much",
                )
        return None

    def _clipped(self, leaf: str) -> tuple[str, str] | None:
        if not leaf.startswith("gradient") or not self._fails_evenly(leaf):
            return None
        deal = dealt("", [self._rows("A")])
        small = self.audited.run(deal, self.key, scale=_TINY_SCALE)
        own, small = _gradient(self._run("A")), _gradient(small) / _TINY_SCALE
        lengths = np.linalg.norm(own), np.linalg.norm(small)
        if 0 < min(lengths) and np.linalg.norm(own - small) > 1e-3 * max(lengths):
            cosine = float(own @ small / (lengths[0] * lengths[1]))
            way = "the same direction" if cosine > 0.9999 else "another direction"
            return "clipping", (
                "a tower's gradient is not proportional to its loss's scale: with a"
                f" tiny one it has {way} (cosine {cosine:.4f}) and the norm"
                f" {lengths[1]:.4g} instead of {lengths[0]:.4g}"
            )
        norms = [np.linalg.norm(_gradient(self._run(x))) for x in "ABC"]
        if min(norms) > 0 and np.ptp(norms) < 1e-4 * max(norms):
            text = f"every part of the batch has a gradient of norm {norms[0]:.4g}"
            return "clipping", text
        return None

    def _fails_evenly(self, leaf: str) -> bool:
        """Is it another on two or three equal towers without padding?"""
        return any(
            not self._same(
                leaf, self._value(leaf, *letters), self._value(leaf, letters)
            )
            for letters in ("AB", "ABC")
        )

    def _joined(self, leaf: str) -> tuple[str, str] | None:
        """A mean of means, or rows that depend on each other?"""
        weights = self._weights_of_parts(leaf)
        if weights is not None:
            parts = (self._run("A"), self._run("BC")), (self._run("A"), self._run("B"))
            whole = self._value(leaf, "ABC"), self._value(leaf, "AB")
            for values, want in zip(parts, whole, strict=True):
                if not self._same(leaf, self.audited.merged(values).leaves[leaf], want):
                    shown = " : ".join(f"{x:.3g}" for x in weights)
                    return "mean_of_means", (
                        "joined rows have the mean of their parts' values, weighted as"
                        f" {shown} for three parts; the towers' values are merged"
                        " otherwise"
                    )
            return None
        if not self._fails_evenly(leaf):
            return None
        if all(
            self._same(leaf, self._value(leaf, x * 2), self._value(leaf, x))
            for x in ("A", "B")
        ):
            return "batch_statistics", ""
        return "contrastive", ""

    def _weights_of_parts(self, leaf: str) -> tuple[float, float, float] | None:
        """The weights of A, B and C, if ``v`` is a mean; ``v(BC), v(ABC)`` check it."""
        a, b, c = (self._value(leaf, x).ravel() for x in "ABC")
        ab, ac, bc, abc = (
            self._value(leaf, x).ravel() for x in ("AB", "AC", "BC", "ABC")
        )
        # v(AB) (1 + w) = v(A) + w v(B), by least squares over the leaf's elements.
        w_b, w_c = _ratio(ab - a, b - ab), _ratio(ac - a, c - ac)
        if w_b is None or w_c is None:
            return None
        w_b, w_c = max(w_b, 1e-6), max(w_c, 1e-6)
        tries = (
            (ab, (a + w_b * b) / (1 + w_b)),
            (ac, (a + w_c * c) / (1 + w_c)),
            (bc, (w_b * b + w_c * c) / (w_b + w_c)),
            (abc, (a + w_b * b + w_c * c) / (1 + w_b + w_c)),
        )
        spread = max(np.abs(x - y).max(initial=0) for x, y in ((a, b), (b, c), (a, c)))
        allowed = 4 * self.allowed[leaf] + 1e-3 * spread
        if any(differs(got, want, allowed) for got, want in tries):
            return None
        return 1.0, w_b, w_c

    def _padded(self, leaf: str) -> tuple[str, str] | None:
        rows = self._rows("AB")
        values = [
            self.audited.run(dealt("", [rows], len(rows) + extra), self.key).leaves[
                leaf
            ]
            for extra in (1, 2)
        ]
        if all(self._same(leaf, x, self._value(leaf, "AB")) for x in values):
            return None
        return "padding", ""


def _zeros(x: PyTree) -> PyTree:
    return x if is_key(x) else jnp.zeros_like(x)


def _gradient(values: Values) -> np.ndarray:
    leaves = [x.ravel() for name, x in values.leaves.items() if name[:8] == "gradient"]
    return np.concatenate(leaves)


def _ratio(above: np.ndarray, below: np.ndarray) -> float | None:
    square = float(below @ below)
    return float(above @ below) / square if square > 0 else None
