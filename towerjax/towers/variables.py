"""Variables, a value with a name and a reduction: MirroredVar and TowerLocal."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from towerjax.collectives.reduce import reduced_dtype
from towerjax.proof.scale import SUMMED_FOR_A_VARIABLE
from towerjax.types import PerTower, PyTree, Reduction, leaf_name
from towerjax.types.leaves import (
    listed,
    map_parts,
    native,
    parts_of,
    problem_of,
    promote_dtypes,
)


@dataclasses.dataclass(frozen=True)
class Variable:
    """The fields of variables: a value, a reduction and a name."""

    value: PyTree
    reduction: Reduction = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(default="", metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            raise ValueError(
                f"{type(self).__name__}.reduction is {self.reduction!r}; write"
                " tj.Reduction.MEAN, SUM, ONLY_FIRST_TOWER or NONE."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerLocal(Variable):
    """A tower-local variable: one copy a tower, aggregated only when read.

    Batch-norm statistics and metric accumulators are such variables. In the local
    state of a step a tower sees them, and returns them, without this wrapper:
    ``tower.local`` and ``TowerOutput(local=...)`` are plain values.

    Attributes:
      value: For ``step.init``, and inside a tower function: one tower's value, a
        pytree. In a ``TrainState`` and from ``strategy.create_var``: leaves
        ``[T, ...]``, split over the devices.
      reduction: How it is read as one value; NONE when it never is.
      name: Its name in error messages.

    Raises:
      ValueError: ``reduction`` is not a `Reduction`.

    Example:
      >>> TowerLocal({"mean": np.zeros(3)}, Reduction.MEAN).reduction
      Reduction.MEAN
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MirroredVar(Variable):
    """A mirrored variable: one value, the same on every tower, with a name.

    A tower changes it with ``tower.assign`` and the like, which return the new
    variable; so does ``strategy.assign`` across towers.

    Attributes:
      value: A pytree of arrays.
      reduction: How the values that towers assign become one; NONE when only
        ``strategy.assign`` and ``strategy.update`` change it.
      name: Its name in error messages.

    Raises:
      ValueError: ``reduction`` is not a `Reduction`.

    Example:
      >>> MirroredVar(np.float32(1), Reduction.MEAN, name="scale").name
      'scale'
    """

    reduction: Reduction = dataclasses.field(
        default=Reduction.NONE, metadata={"static": True}
    )


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a variable."""
    return isinstance(x, Variable)


def is_per_tower(x: Any) -> bool:
    """Whether ``x`` holds one value a tower."""
    return isinstance(x, PerTower | TowerLocal)


def label(variable: Variable) -> str:
    """The name of a variable in error messages."""
    kind = "variable" if isinstance(variable, MirroredVar) else "tower-local variable"
    return f"{kind} {variable.name!r}" if variable.name else f"a {kind} without a name"


def _dtypes_to_fit(variable: Variable, dtype: Any, *, reads: bool) -> tuple[Any, ...]:
    """The dtypes that a value may be of, the preferred one first."""
    adds = reads and variable.reduction in (Reduction.SUM, Reduction.MEAN)
    if not adds or jnp.issubdtype(dtype, jax.dtypes.extended):
        return (dtype,)
    read = reduced_dtype(variable.reduction, dtype)
    return (read, dtype) if variable.reduction is Reduction.SUM else (dtype, read)


def fit(variable: Variable, value: PyTree, *, reads: bool = False) -> PyTree:
    """Cast the value to the variable's dtypes; raise where it does not fit.

    With ``reads`` it is what a tower-local variable ``[T, ...]`` shall read as, of its
    own dtype or that of its reduction.
    """
    old = variable.value
    if jax.tree.structure(value) != jax.tree.structure(old):
        raise ValueError(
            f"The value for {label(variable)} is {jax.tree.structure(value)}, but the"
            f" variable holds {jax.tree.structure(old)}. Pass the same structure, the"
            " new value itself, as a function for strategy.update returns it, and rows"
            " of a table as rows.add_to(variable.value)."
        )
    problems = []
    dtypes = functools.partial(_dtypes_to_fit, variable, reads=reads)

    def one(path: tuple[Any, ...], new: Any, leaf: Any) -> Any:
        leaf, problem = jax.eval_shape(jnp.asarray, leaf), problem_of(new)
        new = native(new)
        shape = leaf.shape[1:] if reads else leaf.shape
        if problem is not None:
            problem = f"is {problem}"
        elif np.shape(new) != shape:
            problem = f"has shape {np.shape(new)}, expected {shape}"
        elif held := [d for d in dtypes(leaf.dtype) if _holds(d, new)]:
            try:
                return jnp.asarray(new, held[0])
            except OverflowError:
                problem = f"is {new}, which {held[0]} cannot hold"
        else:
            problem = f"is {jnp.result_type(new)}, which {leaf.dtype} cannot hold"
        problems.append(f"{leaf_name('value', path)} {problem}")

    fitted = jax.tree_util.tree_map_with_path(one, value, old)
    if problems:
        closed = isinstance(variable, TowerLocal) and not reads
        raise ValueError(
            f"The value does not fit {label(variable)}: {listed(problems)}. Cast or"
            " reshape it, or create the variable as the value is."
            + " A tower sees its own copy of a variable that is passed to it as an"
            " argument, and all towers' copies of one that it closes over." * closed
        )
    return fitted


def _holds(dtype: Any, value: Any) -> bool:
    given = jnp.result_type(value)
    if given == dtype:
        return True
    extended = [jnp.issubdtype(x, jax.dtypes.extended) for x in (dtype, given)]
    return not any(extended) and promote_dtypes(dtype, value) == dtype


def plain(value: PyTree) -> PyTree:
    """Replace each variable in the tree by its value."""
    return map_parts(Variable, lambda x: x.value, value)


def assign_in_tower(
    tower: Any,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> Any:
    """Assign to a variable in a tower: the new variable."""
    check_variable(variable, "tower.assign")
    new = fit(variable, plain(value))
    if isinstance(variable, MirroredVar):
        if variable.reduction is Reduction.NONE:
            raise ValueError(
                f"{label(variable)} has Reduction.NONE: you must specify an aggregation"
                ". Create it with reduction=tj.Reduction.MEAN (or SUM,"
                " ONLY_FIRST_TOWER), or meet first: tower.merge_call(lambda strategy,"
                " x: strategy.assign(variable, strategy.reduce(tj.Reduction.MEAN, x)),"
                " x)."
            )
        if variable.reduction is Reduction.SUM:
            _refuse_sum_of_constants(tower, variable, plain(value))
            mark = functools.partial(checkpoint_name, name=SUMMED_FOR_A_VARIABLE)
            new = jax.tree.map(mark, new)
        new = fit(variable, tower.reduce(variable.reduction, new))
    new = jax.tree.map(combine, variable.value, new)
    return dataclasses.replace(variable, value=new)


def _refuse_sum_of_constants(tower: Any, variable: Variable, value: PyTree) -> None:
    for x in jax.tree.leaves(value):
        if not isinstance(x, jax.Array) and np.any(x) and tower.num_towers > 1:
            shown = x if np.ndim(x) == 0 else f"of shape {np.shape(x)}"
            raise ValueError(
                f"A constant value {shown} cannot be reduced with the given aggregation"
                f" Reduction.SUM of {label(variable)}: it is the same on all"
                f" {tower.num_towers} towers. Create the variable with MEAN or"
                " ONLY_FIRST_TOWER, and assign the value itself."
            )


def refuse_per_tower(values: PyTree, what: str) -> None:
    """Raise when a value differs from tower to tower."""
    if found := parts_of(PerTower | TowerLocal, values):
        raise ValueError(
            f"{what}: Expected value to be mirrored across towers, got a"
            f" {type(found[0]).__name__}. Reduce it first, with strategy.reduce or"
            " strategy.read_var, or assign in a tower, with tower.assign."
        )


def check_variable(variable: Any, what: str) -> None:
    """Raise unless ``variable`` is one."""
    if not is_variable(variable):
        raise ValueError(
            f"{what}: got {type(variable).__name__}, expected a tj.towers.MirroredVar"
            " or a tj.TowerLocal. Make one with strategy.create_var(name, initial)."
        )
