"""The trained leaves of a state, the optimizer's update, and how a step is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from towerjax.collectives.sparse_rows import dense_shape, is_rows
from towerjax.jaxprs.equation import needed_eqns
from towerjax.jaxprs.interpreter import Interpreter
from towerjax.types import PyTree
from towerjax.types.refusals import few, listed, unlike
from towerjax.types.trees import leaf_name, named_leaves, readable_leaves

Trainable: TypeAlias = Callable[[str, Any], bool] | PyTree
"""``(name, leaf) -> bool``, or a tree of bool that is a prefix of ``params``."""

_SAY_TRAINABLE = "Say trainable=lambda name, leaf: ... (or a tree of bool)"
OF_MODELS = "Put it into tj.TrainState.create(..., extra=...), and read tower.extra,"
"""The advice for a fixed leaf, where there is no argument ``trainable``."""


def trainable_flags(
    params: PyTree, trainable: Trainable | None, *, advice: str = _SAY_TRAINABLE
) -> PyTree:
    """For each leaf, whether it is trained; raises if such a leaf has no gradient."""
    leaves, treedef = jax.tree.flatten(params)
    dtypes = list(map(jnp.result_type, leaves))
    if trainable is None:
        _refuse_statistics(params, advice)
        # A float of 8 bits must be named as fixed, so it is not left out here.
        chosen = [jnp.issubdtype(x, np.inexact) for x in dtypes]
    elif callable(trainable):
        shapes = map(jax.ShapeDtypeStruct, map(np.shape, leaves), dtypes)
        readable = readable_leaves("", treedef.unflatten(shapes))
        chosen = [bool(trainable(name, x)) for name, x in readable]
    else:
        try:
            chosen = jax.tree.leaves(jax.tree.broadcast(trainable, params))
        except ValueError as error:
            raise ValueError(
                f"trainable is not a prefix of params: {_unlike(trainable, params)}."
                " Give it the same containers and names, with True or False for a leaf"
                " or for a whole subtree."
            ) from error
    if trainable is not None and not any(chosen):
        names = [repr(name) for name, _ in readable_leaves("", params)]
        raise ValueError(
            "trainable=... chooses none of the params, so nothing would train. Their"
            f" names are {', '.join(few(names))}."
        )
    # If no leaf trains, the error below names all.
    trains = chosen if any(chosen) else [True] * len(chosen)
    wide = [jnp.issubdtype(d, jnp.inexact) and d.itemsize > 1 for d in dtypes]
    if any([yes and not fits for yes, fits in zip(trains, wide, strict=True)]):
        named = zip(named_leaves("params", params), dtypes, trains, wide, strict=True)
        bad = [f"{x[0]} is {d}" for x, d, yes, fits in named if yes and not fits]
        raise ValueError(
            "Each leaf of params that trains must be floating or complex, of 16 bits or"
            f" more, because it gets a gradient, but {listed(bad)}. {advice} where it"
            " is fixed. Cast to a narrower dtype inside the loss function."
        )
    return treedef.unflatten(chosen)


def _unlike(trainable: PyTree, params: PyTree) -> str:
    """A text that says where a tree of bool is not a prefix of the parameters."""
    flags, leaves = (
        [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (trainable, params)
    )

    def above(path: tuple[Any, ...], leaf: tuple[Any, ...]) -> bool:
        return leaf[: len(path)] == path

    unknown = [x for x in flags if not any(above(x, leaf) for leaf in leaves)]
    left_out = [x for x in leaves if not any(above(flag, x) for flag in flags)]
    texts = [f"params have no {leaf_name('', x)}" for x in unknown]
    texts += [f"{leaf_name('params', x)} is left out" for x in left_out]
    given = jax.tree.structure(trainable)
    expected = jax.tree.structure(params)
    return listed(texts or [f"it is {given}, and params are {expected}"])


def _refuse_statistics(params: PyTree, advice: str) -> None:
    """Raise if Flax's batch statistics are among the parameters that train."""
    is_linen = isinstance(params, Mapping) and {"params", "batch_stats"} <= {*params}
    if is_linen or "BatchStat" in node_types(params):
        raise ValueError(
            "params hold batch statistics, which would be trained, because all floats"
            " are. With flax.linen pass variables['params'], with nnx pass"
            " nnx.split(model, nnx.Param, ...)[1]. Pass statistics as step.init(...,"
            " local=tj.TowerLocal(stats, tj.Reduction.MEAN)), or as extra= if they are"
            f" the same on all towers. {advice} where they are fixed among params."
        )


def check_trainable(trainable: Any) -> None:
    """Raise unless the value is a function or a tree of bool."""
    leaves = jax.tree.leaves(trainable)
    if not callable(trainable) and not all(isinstance(x, bool) for x in leaves):
        raise ValueError(
            f"trainable={trainable!r} must be a function (name, leaf) -> bool, or a"
            " tree of True and False that is a prefix of params."
        )


def trained_part(params: PyTree, trainable: Trainable | None) -> PyTree:
    """The trained leaves, None for the others; ``params`` itself if all are."""
    flags = trainable_flags(params, trainable)
    if all(jax.tree.leaves(flags)):
        return params
    return jax.tree.map(lambda yes, x: x if yes else None, flags, params)


def with_trained(part: PyTree, params: PyTree) -> PyTree:
    """``params`` with the leaves of ``part``; a leaf that is None there stays."""
    return jax.tree.map(
        lambda new, old: old if new is None else new,
        part,
        params,
        is_leaf=lambda x: x is None,
    )


def node_types(tree: PyTree) -> set[str]:
    """The names of the types of a tree's nodes."""
    kinds: set[str] = set()
    jax.tree.flatten(tree, is_leaf=lambda x: bool(kinds.add(type(x).__name__)))
    return kinds


def guard_rows(
    walk: Interpreter, eqn: Any, left: dict[Any, Any], accepted: jax.Array
) -> list[Any] | None:
    """The operands with which an equation writes no rows if the step is refused.

    None, if the equation does not write rows of a leaf of the state. ``left`` has, by
    its variable, the leaf that is left there in a refused step; the equation's result
    is added to it.

    To select between the new and the old array needs both at once: a copy of a whole
    table for a few rows. Here the written rows are selected, so that XLA writes into
    the donated buffer.
    """
    first = eqn.invars[0]
    if isinstance(first, Literal) or first not in left:
        return None
    out = eqn.outvars[0]
    leaf = left[first]
    operands = [walk.read(x) for x in eqn.invars]
    name = eqn.primitive.name
    if name.startswith("scatter") and _drops(eqn):
        left[out] = leaf
        # A scatter drops the index -1.
        return [operands[0], jnp.where(accepted, operands[1], -1), *operands[2:]]
    if name == "dynamic_update_slice":
        left[out] = leaf
        array, new, *starts = operands
        old = lax.dynamic_slice(array, starts, new.shape)
        return [array, lax.select(accepted, new, old), *starts]
    return None


def _drops(eqn: Any) -> bool:
    """Whether a scatter drops the index -1, and its indices can hold it."""
    indices = eqn.invars[1].aval
    drops = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    return drops and signed and indices.shape[-1] > 0


def accept_or_keep(
    step: Callable[[PyTree], tuple[jax.Array, PyTree, PyTree]], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """``(carry, rest)`` of ``step(carry)``, with the old carry if it is refused."""
    return accept(*jax.make_jaxpr(step, return_shape=True)(carry), carry)


def accept(
    closed: ClosedJaxpr,
    out: tuple[PyTree, PyTree, PyTree],
    carry: PyTree,
    *others: PyTree,
) -> tuple[PyTree, PyTree]:
    """``(carry, rest)`` of a traced step, called with ``(carry, *others)``.

    The step returns ``(accepted, carry, rest)``, of the shapes ``out``. If it is not
    accepted, the carry is the old one. The equations that ``accepted`` needs run first.
    Each new leaf of the carry is selected right where it is made, and later equations
    use the selected value: the new one if the step is accepted; if not, what they make
    of it is unused. Selecting at the end would keep old and new leaves alive at once, a
    copy of the whole state at every step. A ``cond`` would make the update wait for the
    last gradient.
    """
    jaxpr = closed.jaxpr
    before = jax.tree.leaves(carry)
    walk = Interpreter(jaxpr, closed.consts, [*before, *jax.tree.leaves(others)])
    accepted, *results = jaxpr.outvars
    after = results[: len(before)]
    rest = results[len(before) :]
    if isinstance(accepted, Literal) and bool(accepted.val):  # nothing can be refused
        for eqn in jaxpr.eqns:
            walk.evaluate(eqn)
        leaves = [walk.read(x) for x in after]
    else:
        leaves = _evaluate_guarded(walk, jaxpr, after, before)
    return (
        jax.tree.unflatten(jax.tree.structure(carry), leaves),
        jax.tree.unflatten(jax.tree.structure(out[2]), [walk.read(x) for x in rest]),
    )


def _evaluate_guarded(
    walk: Interpreter, jaxpr: Jaxpr, after: Sequence[Any], before: Sequence[Any]
) -> list[Any]:
    """The new leaves of a carry, or the old ones if the step is refused."""
    effects = [eqn for eqn in jaxpr.eqns if eqn.effects]
    deciding = needed_eqns(jaxpr.eqns, jaxpr.outvars[:1], always=effects)
    for eqn in deciding:
        walk.evaluate(eqn)
    accepted = walk.read(jaxpr.outvars[0])
    is_deciding = {id(eqn) for eqn in deciding}
    updating = [eqn for eqn in jaxpr.eqns if id(eqn) not in is_deciding]
    made = {var for eqn in updating for var in eqn.outvars}
    # The old leaf of each variable that is selected where it is made.
    olds: dict[Any, Any] = {}
    for var, old in zip(after, before, strict=True):
        # A scalar costs no copy, and later equations may divide by the new one.
        if not isinstance(var, Literal) and var in made and jnp.ndim(old):
            olds.setdefault(var, old)
    # The old leaf that a variable holds where the step is refused.
    if_refused = dict(zip(jaxpr.invars, before, strict=False))
    for eqn in updating:
        operands = None
        name = eqn.primitive.name
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            operands = guard_rows(walk, eqn, if_refused, accepted)
        walk.evaluate(eqn, operands)
        for var in eqn.outvars:
            if var in olds and if_refused.get(var) is not olds[var]:
                walk.values[var] = lax.select(accepted, walk.values[var], olds[var])
                if_refused[var] = olds[var]

    def leaf(var: Any, old: Any) -> Any:
        if not isinstance(var, Literal) and olds.get(var) is old:
            return walk.read(var)
        # It is a constant, an unchanged input, a value that decides, or one variable
        # for two leaves: it was not selected yet.
        return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)

    return [leaf(*pair) for pair in zip(after, before, strict=True)]


def check_like_params(grads: PyTree, params: PyTree) -> None:
    """Raise unless gradients, which may be rows, form a tree like the parameters."""
    needed, given = (
        {n: str([*dense_shape(x)]) for n, x in named_leaves("grads", tree, is_rows)}
        for tree in (params, grads)
    )
    if wrong := unlike(given, needed):
        raise ValueError(
            "The gradients are not a tree like the parameters that train:"
            f" {listed(wrong)}. Pass merged['grads'] of tj.value_and_grad, or a tree"
            " like state.params."
        )
