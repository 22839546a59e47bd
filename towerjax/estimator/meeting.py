"""Where do the towers of a model function meet? There its program is cut into passes.

The function is traced once, as one tower's program. Where an optimizer asks for what
all towers have, that program is cut: a pass of the towers ends there, and returns what
they bring. What depends on nothing of a tower's own is left to the one update after the
last pass.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive

from towerjax.collectives.sparse_rows import is_rows
from towerjax.metrics.weighted import Weighted
from towerjax.proof.equation import named_axes
from towerjax.proof.walk import Walk
from towerjax.step.returned import Hole, is_hole, is_typed
from towerjax.step.state import TrainState
from towerjax.step.update import needed
from towerjax.towers.variables import TowerLocal
from towerjax.types import PyTree, Sum

_meet = Primitive("towers_meet")
_meet.multiple_results = True


@_meet.def_abstract_eval
def _shapes_of_outcomes(
    *brought: Any, treedef: Any, copies: tuple[int, ...]
) -> list[Any]:
    del treedef
    return [
        x.update(shape=(x.shape[0] * count, *x.shape[1:])) if count else x
        for x, count in zip(brought, copies, strict=True)
    ]


def meet(loss: Weighted | None, grads: PyTree, count: int) -> tuple[Any, PyTree]:
    """All towers' losses and gradients: added up, but rows of tables side by side.

    It has no value where it stands: a `Cut` gives it one. ``count``: how many towers
    meet, each of them with every micro-batch.
    """
    leaves, treedef = jax.tree.flatten((loss, grads))
    parts = jax.tree.leaves((loss, grads), is_leaf=is_rows)
    copies = tuple(count * is_rows(x) for x in parts for _ in jax.tree.leaves(x))
    outcomes = _meet.bind(*map(jnp.asarray, leaves), treedef=treedef, copies=copies)
    return jax.tree.unflatten(treedef, outcomes)


@dataclasses.dataclass(frozen=True)
class _Result:
    """A leaf of what a tower returns, whose type says what becomes of it."""

    treedef: Any  # of its arrays
    arrays: list[Any]  # which values of the program they are
    number: int | None  # which pass returns it; None where it is no tower's own
    is_local: bool  # is it of a tower-local variable?


class Cut:
    """One tower's program as passes, and what is done once, after them.

    ``is_own`` says which inputs are a tower's own; the first ones are a state's leaves.
    """

    def __init__(self, closed: Any, tree: PyTree, is_own: Sequence[bool]) -> None:
        self._closed, eqns = closed, closed.jaxpr.eqns
        pairs = zip(closed.jaxpr.invars, is_own, strict=True)
        self._own = {var for var, own in pairs if own}
        self._met: dict[Any, int] = {}  # after how many meetings a value is known
        for eqn in eqns:
            number = self._number(eqn.invars)
            if eqn.primitive is _meet:
                number += 1
            elif _names_an_axis(eqn) or self._is_own(eqn.invars):
                self._own.update(eqn.outvars)
            self._met.update(dict.fromkeys(eqn.outvars, number))
        meetings = [eqn for eqn in eqns if eqn.primitive is _meet]
        self._work = [eqn for eqn in eqns if eqn.primitive is not _meet]
        leaves, self._treedef = jax.tree.flatten(tree, is_leaf=is_typed)
        left = iter(closed.jaxpr.outvars)
        self._results = [self._result(x, left) for x in leaves]
        numbers = [self._number(eqn.invars) for eqn in meetings]
        last = max([0, *numbers, *(x.number or 0 for x in self._results)])
        self._meetings = [
            [eqn for eqn, at in zip(meetings, numbers, strict=True) if at == number]
            for number in range(last + 1)
        ]

    @property
    def num_passes(self) -> int:
        """How often towers run: at least once."""
        return len(self._meetings)

    def towers(self, number: int, args: PyTree, merged: list[Any]) -> dict[str, Any]:
        """What one tower returns in a pass, after what the passes before came to."""
        walk = self._walk(jax.tree.leaves(args), merged)
        wanted = self._wanted(number)
        self._evaluate(walk, wanted, lambda eqn: self._number(eqn.invars) == number)
        brought = [
            jax.tree.unflatten(eqn.params["treedef"], map(walk.read, eqn.invars))
            for eqn in self._meetings[number]
        ]
        results = [
            _value(x, walk) if x.number == number else Hole("later")
            for x in self._results
        ]
        return {
            **jax.tree.unflatten(self._treedef, results),
            "minimized": _one_or_all([loss for loss, _ in brought]),
            "grads": _one_or_all([_as_sums(grads) for _, grads in brought]),
        }

    def results(self, state: TrainState, merged: list[Any]) -> dict[str, Any]:
        """All that the function returned, of all towers."""
        leaves = jax.tree.leaves(state)
        others = len(self._closed.jaxpr.invars) - len(leaves)
        walk = self._walk([*leaves, *[None] * others], merged)
        bare = [x for x in self._results if x.number is None]
        wanted = [var for x in bare for var in x.arrays]

        def is_last(eqn: Any) -> bool:
            number = self._number(eqn.invars)
            return number == self.num_passes and not self._is_own(eqn.invars)

        self._evaluate(walk, wanted, is_last)
        pools = [
            jax.tree.leaves(
                {key: x[key] for key in x if key not in _BROUGHT},
                is_leaf=lambda x: is_typed(x) or is_hole(x),
            )
            for x in merged
        ]
        results = [
            _value(x, walk) if x.number is None else pools[x.number][i]
            for i, x in enumerate(self._results)
        ]
        return jax.tree.unflatten(self._treedef, results)

    def refuse_moved(self, num_state: int) -> None:
        """Raise where a pass reads tower-local variables that another one changes.

        Of several micro-batches each goes on from the one before it, in the pass that
        changes the variables alone. ``num_state``: how many inputs are the state's.
        """
        local = self._own.intersection(self._closed.jaxpr.invars[:num_state])
        moved = {x.number for x in self._results if x.is_local and {*x.arrays} - local}
        for number in range(self.num_passes):
            wanted = self._wanted(number)
            eqns = needed(self._work, wanted, lambda eqn: False)
            read = {var for var in wanted if not isinstance(var, Literal)}
            read |= {x for e in eqns for x in e.invars if not isinstance(x, Literal)}
            if moved - {number} and read & local:
                raise ValueError(_MOVED)

    def _wanted(self, number: int) -> list[Any]:
        """What the towers return in a pass, and bring to its meetings."""
        wanted = [var for x in self._results if x.number == number for var in x.arrays]
        return wanted + [var for eqn in self._meetings[number] for var in eqn.invars]

    def _result(self, leaf: Any, left: Any) -> _Result:
        shapes, treedef = jax.tree.flatten(leaf)
        arrays = [next(left) for _ in shapes]
        is_towers = is_typed(leaf) or self._is_own(arrays)
        number = self._number(arrays) if is_towers else None
        return _Result(treedef, arrays, number, isinstance(leaf, TowerLocal))

    def _number(self, arrays: Iterable[Any]) -> int:
        known = [self._met.get(x, 0) for x in arrays if not isinstance(x, Literal)]
        return max(known, default=0)

    def _is_own(self, arrays: Iterable[Any]) -> bool:
        return any(x in self._own for x in arrays if not isinstance(x, Literal))

    def _walk(self, inputs: Sequence[Any], merged: list[Any]) -> Walk:
        """The program's values that are known: inputs, and outcomes of meetings."""
        walk = Walk(self._closed, inputs)
        for meetings, tree in zip(self._meetings, merged, strict=False):
            brought = (_all_of(meetings, tree[name]) for name in _BROUGHT)
            for eqn, loss, grads in zip(meetings, *brought, strict=True):
                outcomes = jax.tree.leaves((loss, grads))
                walk.values.update(zip(eqn.outvars, outcomes, strict=True))
        return walk

    def _evaluate(self, walk: Walk, wanted: list[Any], is_here: Any) -> None:
        """Evaluate what is wanted, and what prints or the like and is done here."""
        for eqn in needed(
            self._work, wanted, lambda eqn: bool(eqn.effects) and is_here(eqn)
        ):
            walk.evaluate(eqn)


_BROUGHT = ("minimized", "grads")
_MOVED = (
    "model_fn changes tower-local variables, and reads them both before and after an"
    " optimizer's update, where several micro-batches would not see the same change."
    " Read them before the first update alone, or say micro_batches=1."
)


def _names_an_axis(eqn: Any) -> bool:
    nested = [getattr(effect, "name", None) for effect in eqn.effects]
    return bool(named_axes(eqn)) or any(nested)


def _value(result: _Result, walk: Walk) -> Any:
    return jax.tree.unflatten(result.treedef, map(walk.read, result.arrays))


def _as_sums(grads: PyTree) -> PyTree:
    """Gradients as a tower returns them: added up, but for rows of tables."""
    return jax.tree.map(lambda x: x if is_rows(x) else Sum(x), grads, is_leaf=is_rows)


def _one_or_all(brought: list[Any]) -> Any:
    """One meeting's without a number, so that its leaves have names of their own."""
    return brought[0] if len(brought) == 1 else brought


def _all_of(meetings: list[Any], brought: Any) -> list[Any]:
    return [brought] if len(meetings) == 1 else brought
