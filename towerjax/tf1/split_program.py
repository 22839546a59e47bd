"""Split a tower function's program into passes, which end where towers meet.

The function is traced once, as one tower's jaxpr. A pass ends at each `MEET`, where a
sum over all towers is needed, and returns the tower's addends. A pass also
ends at each `DIFFERENTIATE`. It returns the tower's loss, and the losses are added up
and differentiated. Results that do not depend on a value of one tower are computed
once, after the last pass.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

import towerjax as tj
from towerjax.jaxprs import tags
from towerjax.jaxprs.interpreter import Interpreter, Parts
from towerjax.jaxprs.sites import scopes_of, sites_over, user_line
from towerjax.metrics.state import check_metric
from towerjax.metrics.weighted import Means
from towerjax.step.passes.accumulators import is_typed
from towerjax.tf1.meets import (
    DIFFERENTIATE,
    MEET,
    PARAMETERS,
    is_rows_of_table,
    operands_of,
    parameters_of,
)
from towerjax.towers.tower import inputs_in_tower, tower_axis, trace_in_tower
from towerjax.types import PyTree, Sum
from towerjax.types.trees import name_by_key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Later:
    """A stand-in, without leaves, for a value that is not computed in this pass."""


@jax.tree_util.register_static
class SplitProgram:
    """One tower's program, split into passes and an update that runs once after them.

    Its inputs are ``num_mirrored`` replicated leaves, ``num_local`` leaves of
    tower-local variables, and other leaves of one tower. ``axis`` is the axis of all
    towers.
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
        self._closed = closed
        self._axis = axis
        inputs = closed.jaxpr.invars
        self._local_vars = {*inputs[num_mirrored : num_mirrored + num_local]}
        self._parts = Parts(closed, (MEET, DIFFERENTIATE), PARAMETERS)
        self._own_vars = self._parts.dependents(inputs[num_mirrored:], axis)
        self._results, self._treedef = self._placed_results(tree)
        self.num_passes = self._count_passes()

    @classmethod
    def of(
        cls,
        fn: Callable[[tj.TrainState, PyTree, tj.Tower], PyTree],
        state: tj.TrainState,
        rows: PyTree,
        tower: tj.Tower,
        *,
        shows_state: bool,
    ) -> "SplitProgram":
        """Trace one tower's call of ``fn``; only the shapes of its arguments are read.

        The leaves of the result have the types by which passes merge them. Without
        ``shows_state`` the tower has no step number, no key and no local variables.
        """

        def of_tower(*args: PyTree) -> PyTree:
            out = fn(*args)
            return jax.tree_util.tree_map_with_path(
                _checked, out, is_leaf=tj.metrics.is_metric
            )

        program = trace_in_tower(of_tower, state, rows, tower, shows_state=shows_state)
        replicated, _ = inputs_in_tower(state, rows, tower)
        counts = [len(jax.tree.leaves(x)) for x in (replicated, state.local)]
        return cls(*program, *counts, axis=tower_axis(tower))

    def _placed_results(
        self, tree: PyTree
    ) -> tuple[list[tuple[PyTree, int | None]], Any]:
        """Place each result of the function in the pass that returns it.

        Returns the results as trees of variables, each with the number of its pass, and
        their structure. The number is None if the update computes the result.
        """
        outvars = self._closed.jaxpr.outvars
        of_vars = jax.tree.unflatten(jax.tree.structure(tree), outvars)
        results, treedef = jax.tree.flatten(of_vars, is_leaf=_is_one)
        placed: list[tuple[PyTree, int | None]] = []
        for result in results:
            arrays = jax.tree.leaves(result)
            is_of_towers = _is_one(result) or self._is_own(arrays)
            number = self._parts.first_knowing(arrays) if is_of_towers else None
            placed.append((result, number))
        return placed, treedef

    def _count_passes(self) -> int:
        """Count the passes, up to the last that merges or prints."""
        numbers = [0, self._parts.last]
        numbers += [number for _, number in self._results if number is not None]
        for eqn in self._parts.eqns:
            # Its effect, such as a print, needs a tower's values.
            if eqn.effects and self._is_own(eqn.invars):
                numbers.append(self._parts.first_knowing(eqn.invars))
        return max(numbers) + 1

    def trained(self, number: int) -> Callable[..., PyTree] | None:
        """Build a function that computes the parameters of a pass's losses.

        It maps ``(state, merged)`` to the parameters by which the losses are
        differentiated. Return None for a pass that does not differentiate.
        """
        if self._parts.kind_of(number) is not DIFFERENTIATE:
            return None
        meets = self._parts.ends_of(number)

        def parameters(state: tj.TrainState, merged: list[PyTree]) -> PyTree:
            merged = merged[1:]  # without the results of the tracing pass
            source = self._parts.source
            sources = [[source(x) for x in parameters_of(eqn)] for eqn in meets]
            walk = self._walk(self._inputs(state), merged)
            self._parts.evaluate(walk, [x for of_loss in sources for x in of_loss])
            values = [[*map(walk.read, of_loss)] for of_loss in sources]
            trees = [eqn.params["trained"] for eqn in meets]
            return _one_or_all([*map(jax.tree.unflatten, trees, values)])

        return parameters

    def run(
        self,
        state: tj.TrainState,
        rows: PyTree,
        tower: tj.Tower,
        merged: list[PyTree],
        trained: PyTree = None,
    ) -> dict[str, PyTree]:
        """Run one tower in a pass.

        ``merged`` has the merged results of earlier passes, and ``trained`` the
        parameters of this pass's losses. The losses' gradients are not among the
        results, because the pass itself computes them.
        """
        number = len(merged)
        inputs = jax.tree.leaves(inputs_in_tower(state, rows, tower))
        walk = self._evaluate(number, inputs, merged, trained)
        meets = self._parts.ends_of(number)
        operands = [
            jax.tree.unflatten(eqn.params["treedef"], map(walk.read, operands_of(eqn)))
            for eqn in meets
        ]
        is_of_losses = self._parts.kind_of(number) is DIFFERENTIATE
        losses = operands if is_of_losses else [loss for loss, _ in operands]
        grads = [] if is_of_losses else [_as_sums(grads) for _, grads in operands]
        results = [
            jax.tree.map(walk.read, x) if at == number else _Later()
            for x, at in self._results
        ]
        return {
            **jax.tree.unflatten(self._treedef, results),
            LOSSES: _one_or_all(losses),
            "grads": _one_or_all(grads),
        }

    def results(self, state: tj.TrainState, merged: list[PyTree]) -> dict[str, PyTree]:
        """Compute the function's results, merged over towers."""
        walk = self._evaluate(None, self._inputs(state), merged)
        of_passes = [_results_in(x) for x in merged]
        results = []
        for number, (result, at) in enumerate(self._results):
            if at is None:
                results.append(jax.tree.map(walk.read, result))
            else:
                results.append(of_passes[at][number])
        return jax.tree.unflatten(self._treedef, results)

    def line_of_met_sum(self) -> str | None:
        """Find the user's line where towers communicate in a loss, or None.

        Only losses are searched whose sum, and not mean, is differentiated.
        """
        sites = sites_over(self._closed, {self._axis})
        of_sums = [site for site in sites if tags.OF_A_SUM in scopes_of(site)]
        return user_line(of_sums[0]) if of_sums else None

    def line_of_own_parameters(self) -> str | None:
        """Find the line of a loss whose parameters differ by tower, or None."""
        for eqn in self._parts.eqns:
            if eqn.primitive is PARAMETERS and self._is_own(eqn.invars):
                return user_line((eqn, None))
        return None

    @property
    def changes_local(self) -> bool:
        """Whether towers change their own variables, in a program of several passes.

        In a pass, a micro-batch sees what the previous micro-batch changed only if that
        same pass changes it.
        """
        local = [x for x, _ in self._results if isinstance(x, tj.TowerLocal)]
        changed = {*jax.tree.leaves(local)} - self._local_vars
        return self.num_passes > 1 and bool(changed)

    def _is_own(self, arrays: Iterable[Any]) -> bool:
        return any(x in self._own_vars for x in arrays if not isinstance(x, Literal))

    def _inputs(self, state: tj.TrainState) -> list[Any]:
        """List the program's inputs: the replicated ones, and None for others."""
        leaves = jax.tree.leaves(dataclasses.replace(state, local=None))
        others = len(self._closed.jaxpr.invars) - len(leaves)
        return [*leaves, *[None] * others]

    def _walk(self, inputs: Sequence[PyTree], merged: list[PyTree]) -> Interpreter:
        """Make an interpreter that knows the merged results of earlier passes."""
        walk = self._parts.interpreter(inputs)
        for at, tree in enumerate(merged):
            meets = self._parts.ends_of(at)
            losses = tree[LOSSES]
            gradients = tree["grads"]
            if isinstance(gradients, Sum):
                gradients = gradients.value
            if len(meets) == 1:  # see `_one_or_all`
                losses = [losses]
                gradients = [gradients]
            for eqn, loss, grads in zip(meets, losses, gradients, strict=True):
                outcomes = jax.tree.leaves((loss, grads))
                walk.values.update(zip(eqn.outvars, outcomes, strict=True))
        return walk

    def _evaluate(
        self,
        number: int | None,
        inputs: Sequence[PyTree],
        merged: list[PyTree],
        trained: PyTree = None,
    ) -> Interpreter:
        """Evaluate a pass, or with None the update; return the interpreter."""
        walk = self._walk(inputs, merged)
        if trained is not None:
            meets = self._parts.ends_of(number)
            parameters = [x for eqn in meets for x in parameters_of(eqn)]
            walk.values.update(zip(parameters, jax.tree.leaves(trained), strict=True))
        shown = [x for x in self._parts.eqns if self._shows_in(number, x)]
        self._parts.evaluate(walk, self._returned_by(number), shown)
        return walk

    def _returned_by(self, number: int | None) -> list[Any]:
        """List the variables that a pass returns, or with None the update."""
        results = [x for x, at in self._results if at == number]
        operands = [operands_of(eqn) for eqn in self._parts.ends_of(number)]
        return jax.tree.leaves((results, operands))

    def _shows_in(self, number: int | None, eqn: JaxprEqn) -> bool:
        """Decide whether an equation's effect, as a print, is in this pass.

        ``number=None`` stands for the update.
        """
        last = self.num_passes if number is None else number
        return bool(eqn.effects) and self._parts.first_knowing(eqn.invars) == last


def _checked(path: tuple[Any, ...], x: Any) -> Any:
    """Check a metric state, and give it the form that passes merge.

    It is checked here, because afterwards its numbers become arrays.
    """
    return check_metric(name_by_key(path), x) if tj.metrics.is_metric(x) else x


LOSSES = "minimized"
_MEET_KEYS = (LOSSES, "grads")


def _is_one(x: Any) -> bool:
    """Return whether ``x`` is of a type that a pass merges as one result."""
    return is_typed(x) or isinstance(x, Means)


def _results_in(tree: dict[str, PyTree]) -> list[Any]:
    """Pick the function's results out of the merged values of a pass."""

    def is_result(x: Any) -> bool:
        return _is_one(x) or isinstance(x, _Later)

    results = {name: x for name, x in tree.items() if name not in _MEET_KEYS}
    return jax.tree.leaves(results, is_leaf=is_result)


def _as_sums(grads: PyTree) -> PyTree:
    """Wrap gradients in `Sum`; rows of tables stay ``IndexedRows``."""
    return jax.tree.map(
        lambda x: x if is_rows_of_table(x) else Sum(x), grads, is_leaf=is_rows_of_table
    )


def _one_or_all(items: list[Any]) -> Any:
    """Give the items, or a lone item without its list.

    Errors then name a lone item without ``[0]``.
    """
    return items[0] if len(items) == 1 else items
