"""Find the per-tower values that the update of a step reads.

The proof cannot decide about these. An update runs once, on what the towers merged. One
tower has one value where several towers have several, so a state that is computed from
them depends on the split.
"""

import jax
from jax.extend.core import Literal

from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.sites import user_line
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.one_tower import Equality
from towerjax.step.run.trace import Traced
from towerjax.types import PerTower, PyTree

UPDATE = "update"
"""The name that stands for all that an update computes, in place of leaves' names."""


def per_tower_values_read(traced: Traced) -> list[Equality]:
    """Report an unknown result if the next state depends on a `tj.PerTower`.

    Tower-local variables may depend on it, because each tower has its own. So may the
    state of a step whose towers train alone, each with a gradient of its own.
    """
    if not traced.plan.accepts or traced.plan.by_tower:
        return []
    passes = iter(traced.passes)
    merged = traced.plan.passes.run(lambda *_: next(passes).out, traced.args)
    program = traced.finish.jaxpr
    pairs = jax.tree_util.tree_leaves_with_path(merged, is_leaf=_is_per_tower)
    variables = iter(program.invars)
    per_tower = {}
    for path, x in pairs:
        of_value = [next(variables) for _ in jax.tree.leaves(x)]
        if _is_per_tower(x):
            per_tower |= dict.fromkeys(of_value, jax.tree_util.keystr(path[-1:]))
    is_state = jax.tree.leaves(_of_state(traced.shapes))
    results = [
        v for v, is_kept in zip(program.outvars, is_state, strict=True) if is_kept
    ]
    if not per_tower:
        return []
    reads = [(v, eqn) for eqn in needed_eqns(program.eqns, results) for v in eqn.invars]
    for v, eqn in [*reads, *[(v, None) for v in results]]:
        if not isinstance(v, Literal) and v in per_tower:
            line = user_line((eqn, None)) if eqn is not None else ""
            at = f", at {line}" if line else ""
            name = per_tower[v]
            why = f"it reads {name}, which each tower has a value of its own of{at}"
            return [Equality(UPDATE, Says.UNKNOWN, why)]
    return []


def _is_per_tower(x: PyTree) -> bool:
    return isinstance(x, PerTower)


def _of_state(shapes: PyTree) -> PyTree:
    """Mark the results of an update that belong to the next state.

    The mark is False for tower-local variables, which may differ between towers.
    """
    accepted, donated, (now, metrics, refused) = shapes
    of_donated = {
        name: jax.tree.map(lambda _, name=name: name != "local", x)
        for name, x in donated.items()
    }
    of_now = jax.tree.map(lambda _: True, now)
    no = jax.tree.map(lambda _: False, (accepted, metrics, refused))
    return no[0], of_donated, (of_now, *no[1:])
