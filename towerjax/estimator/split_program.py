"""Split a model function's program into passes, where its optimizers reduce gradients.

The function is traced once, as one tower's jaxpr. Each `meet` in it, where an optimizer
needs the sum over all towers, ends a pass, which returns the tower's addends. Results
that depend on no value of one tower are computed once, after the last pass.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var

from towerjax.collectives.sparse_rows import is_rows
from towerjax.metrics.weighted import Weighted
from towerjax.proof.interpreter import Interpreter
from towerjax.step.state.accumulators import is_typed
from towerjax.step.state.train_state import TrainState
from towerjax.step.state.update import needed_eqns
from towerjax.towers.lowering.dependents import dependents
from towerjax.towers.variables import TowerLocal
from towerjax.types import PyTree, Sum

_meet = Primitive("towers_meet")
_meet.multiple_results = True


@_meet.def_abstract_eval
def _summed_shapes(*operands: Any, treedef: Any, copies: tuple[int, ...]) -> list[Any]:
    del treedef
    return [
        x.update(shape=(x.shape[0] * count, *x.shape[1:])) if count else x
        for x, count in zip(operands, copies, strict=True)
    ]


def meet(loss: Weighted | None, grads: PyTree, count: int) -> tuple[Any, PyTree]:
    """Sum losses and gradients over towers; table rows are concatenated.

    Binds a primitive without an implementation: `SplitProgram` supplies its values.
    ``count``: the number of towers times that of micro-batches.
    """
    leaves, treedef = jax.tree.flatten((loss, grads))
    parts = jax.tree.leaves((loss, grads), is_leaf=is_rows)
    copies = tuple(count * is_rows(x) for x in parts for _ in jax.tree.leaves(x))
    outcomes = _meet.bind(*map(jnp.asarray, leaves), treedef=treedef, copies=copies)
    return jax.tree.unflatten(treedef, outcomes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Later:
    """Stands, without leaves, for what another pass or the update returns."""


@jax.tree_util.register_static
class SplitProgram:
    """One tower's program, split into passes and an update that runs once after them.

    Its inputs are ``num_mirrored`` leaves that all towers share, ``num_local`` leaves
    of tower-local variables, and others of one tower; ``axis`` is that of all towers.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        tree: PyTree,
        num_mirrored: int,
        num_local: int,
        *,
        axis: str,
    ) -> None:
        self._closed, eqns, given = closed, closed.jaxpr.eqns, closed.jaxpr.invars
        self._local_vars = {*given[num_mirrored : num_mirrored + num_local]}
        self._own_vars = dependents(closed.jaxpr, given[num_mirrored:], axis, _meet)
        self._known: dict[Var, int] = {}  # the first pass to know it
        self._eqns: list[JaxprEqn] = []
        self._meets: list[tuple[JaxprEqn, int]] = []  # each with its pass
        for eqn in eqns:
            number = self._pass_of(eqn.invars)
            if eqn.primitive is _meet:
                self._meets.append((eqn, number))
                number += 1
            else:
                self._eqns.append(eqn)
            self._known.update(dict.fromkeys(eqn.outvars, number))
        tree = jax.tree.unflatten(jax.tree.structure(tree), closed.jaxpr.outvars)
        leaves, self._treedef = jax.tree.flatten(tree, is_leaf=is_typed)
        results = [(x, jax.tree.leaves(x)) for x in leaves]
        # Trees of variables, each with its pass; None: the update computes it.
        self._results = [
            (x, self._pass_of(y) if is_typed(x) or self._is_own(y) else None)
            for x, y in results
        ]
        shown = [eqn.invars for eqn in self._eqns if eqn.effects]
        passes = [at or 0 for _, at in [*self._meets, *self._results]]
        passes += [self._pass_of(x) for x in shown if self._is_own(x)]
        self.num_passes = max(passes, default=0) + 1

    def run(self, args: PyTree, merged: list[PyTree]) -> dict[str, PyTree]:
        """One tower's results in a pass; ``merged`` holds those of earlier passes."""
        number = len(merged)
        walk = self._evaluate(number, jax.tree.leaves(args), merged)
        operands = [
            jax.tree.unflatten(eqn.params["treedef"], map(walk.read, eqn.invars))
            for eqn in self._meets_of(number)
        ]
        results = [
            jax.tree.map(walk.read, x) if at == number else _Later()
            for x, at in self._results
        ]
        return {
            **jax.tree.unflatten(self._treedef, results),
            "split": self,
            "minimized": _one_or_all([loss for loss, _ in operands]),
            "grads": _one_or_all([_as_sums(grads) for _, grads in operands]),
        }

    def results(self, state: TrainState, merged: list[PyTree]) -> dict[str, PyTree]:
        """The function's results, merged over towers."""
        leaves = jax.tree.leaves(dataclasses.replace(state, local=None))
        others = len(self._closed.jaxpr.invars) - len(leaves)
        walk = self._evaluate(None, [*leaves, *[None] * others], merged)
        pools = [
            jax.tree.leaves(
                {key: x[key] for key in x if key not in _MEET_KEYS},
                is_leaf=lambda x: is_typed(x) or isinstance(x, _Later),
            )
            for x in merged
        ]
        results = [
            jax.tree.map(walk.read, x) if at is None else pools[at][i]
            for i, (x, at) in enumerate(self._results)
        ]
        return jax.tree.unflatten(self._treedef, results)

    def refuse_changed_local(self) -> None:
        """Raise where towers change variables of their own in one of several passes.

        A micro-batch sees the change of the one before only in the pass that makes it.
        """
        local = [x for x, _ in self._results if isinstance(x, TowerLocal)]
        if self.num_passes > 1 and {*jax.tree.leaves(local)} - self._local_vars:
            raise ValueError(
                "model_fn changes tower-local variables and goes on after an update,"
                " which micro-batches would not see alike. Say micro_batches=1."
            )

    def _meets_of(self, number: int | None) -> list[JaxprEqn]:
        return [eqn for eqn, at in self._meets if at == number]

    def _pass_of(self, arrays: Iterable[Any]) -> int:
        known = [self._known.get(x, 0) for x in arrays if not isinstance(x, Literal)]
        return max(known, default=0)

    def _is_own(self, arrays: Iterable[Any]) -> bool:
        return any(x in self._own_vars for x in arrays if not isinstance(x, Literal))

    def _evaluate(
        self, number: int | None, inputs: Sequence[PyTree], merged: list[PyTree]
    ) -> Interpreter:
        """An interpreter that has what a pass, or for None the update, returns."""
        walk = Interpreter(self._closed.jaxpr, self._closed.consts, inputs)
        for at, tree in enumerate(merged):
            meets = self._meets_of(at)
            sums = [tree[name] for name in _MEET_KEYS]
            sums = [[x] for x in sums] if len(meets) == 1 else sums
            for eqn, loss, grads in zip(meets, *sums, strict=True):
                outcomes = jax.tree.leaves((loss, grads))
                walk.values.update(zip(eqn.outvars, outcomes, strict=True))

        def shows(eqn: JaxprEqn) -> bool:
            at = self.num_passes if number is None else number
            return bool(eqn.effects) and self._pass_of(eqn.invars) == at

        returned = jax.tree.leaves([x for x, at in self._results if at == number])
        returned += [var for eqn in self._meets_of(number) for var in eqn.invars]
        for eqn in needed_eqns(self._eqns, returned, shows):
            walk.evaluate(eqn)
        return walk


_MEET_KEYS = ("minimized", "grads")


def _as_sums(grads: PyTree) -> PyTree:
    """Gradients as `Sum` leaves; table rows, which are concatenated, as they are."""
    return jax.tree.map(lambda x: x if is_rows(x) else Sum(x), grads, is_leaf=is_rows)


def _one_or_all(items: list[Any]) -> Any:
    """The one item without its list, so that error messages name leaves without [0]."""
    return items[0] if len(items) == 1 else items
