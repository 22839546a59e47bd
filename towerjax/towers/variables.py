"""Variables (values with a name and a reduction): make, assign, stack, read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.ops import CrossTowerOps, sum_rows_over_towers
from towerjax.collectives.reduce import (
    as_addend,
    choose,
    from_total,
    multiplies,
    one_of,
    reduced_dtype,
    take_first,
    takes_first,
)
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.tower_axis import first_tower_of_device
from towerjax.mesh.placement import Placement, TowerAxes
from towerjax.mesh.processes import processes_of
from towerjax.mesh.transfer import place, wait_on_cpus
from towerjax.towers.executors import is_in_tower_fn, is_of_one_tower
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.notes import explain_missing
from towerjax.types.refusals import few, listed, problem_of, refuse_unheld
from towerjax.types.trees import (
    is_key,
    is_traced,
    key_data,
    leaf_name,
    like_key,
    map_parts,
    named_leaves,
    native,
    parts_of,
    promote_dtypes,
    put_parts,
)


@dataclasses.dataclass(frozen=True)
class Variable:
    """What all variables have: a value, a reduction and a name."""

    value: PyTree
    reduction: Reduction = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(default="", metadata={"static": True})

    if not TYPE_CHECKING:
        __getattr__ = explain_missing(
            "A variable holds a plain value: read v.value, or tj.towers.read_local(v)"
            " for all towers. To change it, assign the new variable: in a tower v ="
            " tower.assign(v, x), outside v = strategy.assign(v, x) with a"
            " tj.tf1.MirroredStrategy; likewise assign_add and assign_sub."
        )

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            raise ValueError(
                f"{type(self).__name__}.reduction is {self.reduction!r}; write"
                " tj.Reduction.MEAN, SUM, ONLY_FIRST_TOWER or NONE."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerLocal(Variable):
    """A tower-local variable: one copy per tower, aggregated only when it is read.

    Examples are batch-norm statistics and metric accumulators. A tower sees and returns
    them without this wrapper: ``tower.local`` and ``TowerOutput(local=...)`` are plain
    values.

    Attributes:
      value: For ``step.init`` and inside a tower function, one tower's value, a pytree;
        if it holds a ``PerTower``, ``step.init`` gives each tower its own. In a
        ``TrainState`` and from ``create_var``, leaves ``[T, ...]``, split over the
        devices.
      reduction: How the copies become one value when read; NONE if they never do.
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

    ``tower.assign`` in a tower, and ``assign`` of `tj.tf1.MirroredStrategy` outside,
    return the changed variable.

    Attributes:
      value: A pytree of arrays.
      reduction: How the values that towers assign become one value; NONE if only
        ``assign`` and ``update`` of the strategy change it.
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
    """Return whether ``x`` is a variable."""
    return isinstance(x, Variable)


def is_local(x: Any) -> bool:
    """Return whether ``x`` is a tower-local variable."""
    return isinstance(x, TowerLocal)


def is_never_read(x: Any) -> bool:
    """Return whether ``x`` is a tower-local variable that has no aggregate."""
    return is_local(x) and x.reduction is Reduction.NONE


def is_per_tower(x: Any) -> bool:
    """Return whether ``x`` holds one value per tower."""
    return isinstance(x, PerTower | TowerLocal)


def label(variable: Variable) -> str:
    """Name a variable for error messages."""
    kind = "variable" if isinstance(variable, MirroredVar) else "tower-local variable"
    return f"{kind} {variable.name!r}" if variable.name else f"a {kind} without a name"


def fit(variable: Variable, value: PyTree, *, reads: bool = False) -> PyTree:
    """Cast a value to the variable's dtypes; raise if it does not fit.

    With ``reads`` the variable has copies ``[T, ...]``, and ``value`` is what they are
    to reduce to. It may have the dtype of the copies or of their reduction.
    """
    old = variable.value
    if jax.tree.structure(value) != jax.tree.structure(old):
        raise ValueError(
            f"The value for {label(variable)} is {jax.tree.structure(value)}, but the"
            f" variable holds {jax.tree.structure(old)}. Pass the whole new value in"
            " the same structure. A function for strategy.update returns it so, too."
            " For rows of a table pass rows.add_to(variable.value). A list is a tree of"
            " its elements: np.array(x) makes one array."
        )
    problems = []

    def dtypes(dtype: Any) -> tuple[Any, ...]:  # the preferred one first
        is_read = reads and variable.reduction is not Reduction.NONE
        if not is_read or jnp.issubdtype(dtype, jax.dtypes.extended):
            return (dtype,)
        read = reduced_dtype(variable.reduction, dtype)
        both = dtype, read
        return choose(variable.reduction, total=both[::-1], mean=both, first=both)

    def fit_leaf(path: tuple[Any, ...], new: Any, leaf: Any) -> Any:
        leaf = jax.eval_shape(jnp.asarray, leaf)
        problem = problem_of(new)
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

    fitted = jax.tree_util.tree_map_with_path(fit_leaf, value, old)
    if problems:
        closed = isinstance(variable, TowerLocal) and not reads
        raise ValueError(
            f"The value does not fit {label(variable)}: {listed(problems)}. Cast or"
            " reshape it, or create the variable as the value is."
            + " A tower sees its own copy of a variable that is passed to it as an"
            " argument, and all towers' copies of one that it closes over." * closed
        )
    return fitted


def _replicate(value: PyTree, num_towers: int) -> PyTree:
    """Copy the value for each tower, to leaves ``[T, ...]``."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_towers, *x.shape)), value)


def _shares(x: jax.Array, num_towers: int) -> jax.Array:
    """Split a sum into shares ``[T, ...]`` that add up to it; integers stay whole."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _replicate(x / num_towers, num_towers)
    # A wider dtype is used, because a small integer may not hold the number of towers.
    x = x.astype(reduced_dtype(Reduction.SUM, x.dtype))
    towers = jnp.arange(num_towers).reshape((-1,) + (1,) * x.ndim)
    whole = x // num_towers
    rest = x % num_towers
    return whole[None] + (towers < rest[None]).astype(x.dtype)


def fit_copies(variable: Variable, value: PyTree, num_towers: int) -> PyTree:
    """Make a tower-local variable's copies ``[T, ...]`` that reduce to ``value``."""
    refuse_own_copy(variable)
    reduction = variable.reduction
    adds_up = reduction is not Reduction.NONE and multiplies(reduction)
    split = _shares if adds_up else _replicate

    def copies(x: jax.Array, old: Any) -> jax.Array:
        rows = split(x, num_towers)
        dtype = jnp.result_type(old)
        if rows.dtype == dtype:
            return rows
        cast = rows.astype(dtype)
        if is_traced((rows, cast)):
            return cast
        if (lost := (parts := np.asarray(rows))[np.asarray(cast) != parts]).size:
            raise ValueError(
                f"The value does not fit {label(variable)}: a tower's share is"
                f" {lost[0]}, which {dtype} cannot hold. Create the variable with a"
                " larger dtype."
            )
        return cast

    return jax.tree.map(copies, fit(variable, value, reads=True), variable.value)


def _holds(dtype: Any, value: Any) -> bool:
    dtype_given = jnp.result_type(value)
    if dtype_given == dtype:
        return True
    extended = [jnp.issubdtype(x, jax.dtypes.extended) for x in (dtype, dtype_given)]
    return not any(extended) and promote_dtypes(dtype, value) == dtype


def plain(value: PyTree) -> PyTree:
    """Replace each variable in the tree by its value."""
    return map_parts(Variable, lambda x: x.value, value)


def layouts_by_type(value: PyTree) -> PyTree:
    """Lay out variables and per-tower values PER_TOWER, all others MIRRORED."""
    return jax.tree.map(
        lambda x: Layout.PER_TOWER if is_per_tower(x) else Layout.MIRRORED,
        value,
        is_leaf=is_per_tower,
    )


def place_by_type(value: PyTree, placement: Placement) -> PyTree:
    """Copy the tree to the towers' devices, in the layouts of `layouts_by_type`."""
    return place(value, placement, layouts_by_type(value))


def make_local(
    value: PyTree, reduction: Reduction, name: str, placement: Placement
) -> TowerLocal:
    """Make a tower-local variable with one value on all towers, on their devices.

    In a tower function it is that tower's own copy.
    """
    if is_in_tower_fn():
        return TowerLocal(value, reduction, name)
    rows = _replicate(value, placement.num_towers)
    return place_by_type(TowerLocal(rows, reduction, name), placement)


def assign_in_tower(
    reduce: Callable[[Reduction, PyTree], PyTree],
    num_towers: int,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> Variable:
    """Assign a new value to a variable, inside a tower function.

    ``combine(old, new)`` gives the value to assign, such as their sum. ``reduce``
    reduces the towers' values of a mirrored variable.
    """
    check_variable(variable, "tower.assign")
    new = fit(variable, plain(value))
    if isinstance(variable, MirroredVar):
        if variable.reduction is Reduction.NONE:
            raise ValueError(
                f"{label(variable)} has Reduction.NONE: you must specify an aggregation"
                ". Create it with reduction=tj.Reduction.MEAN (or SUM,"
                " ONLY_FIRST_TOWER), or merge first: tower.merge_call(lambda strategy,"
                " x: strategy.assign(variable, strategy.reduce(tj.Reduction.MEAN, x)),"
                " x)."
            )
        leaves = jax.tree.leaves(plain(value))
        constants = [x for x in leaves if not isinstance(x, jax.Array) and np.any(x)]
        is_sum = multiplies(variable.reduction) and num_towers > 1
        for x in constants if is_sum else ():
            shown = x if np.ndim(x) == 0 else f"of shape {np.shape(x)}"
            raise ValueError(
                f"A constant value {shown} cannot be reduced with the given aggregation"
                f" Reduction.SUM of {label(variable)}: it is the same on all"
                f" {num_towers} towers. Create the variable with MEAN or"
                " ONLY_FIRST_TOWER, and assign the value itself."
            )
        new = fit(variable, reduce(variable.reduction, new))
    new = jax.tree.map(combine, variable.value, new)
    return dataclasses.replace(variable, value=new)


def check_variable(variable: Any, method: str) -> None:
    """Raise unless ``variable`` is a variable; ``method`` is named in the error."""
    if not is_variable(variable):
        raise ValueError(
            f"{method}: got {type(variable).__name__}, expected a tj.towers.MirroredVar"
            " or a tj.TowerLocal. Make one with strategy.create_var(name, initial)."
        )


def refuse_own_copy(variable: Variable) -> None:
    """Raise if a tower function passes the tower's own copy of a variable."""
    if is_of_one_tower(variable.value):
        raise ValueError(
            f"{label(variable)} is, in a tower function, that tower's copy alone. Read"
            " .value, change it with tower.assign, or merge first: in"
            " tower.merge_call(fn, variable) fn gets all copies."
        )


def with_local_values(local: PyTree, values: PyTree) -> PyTree:
    """Put these values in tower-local variables, the inverse of `plain`."""
    return jax.tree.map(
        lambda x, value: dataclasses.replace(x, value=value),
        local,
        values,
        is_leaf=is_local,
    )


def check_tower_local(local: PyTree) -> PyTree:
    """Raise unless all of ``local`` are tower-local variables; None becomes {}."""
    local = {} if local is None else local
    named = named_leaves("local", local, is_leaf=is_local)
    if bare := [name for name, leaf in named if not is_local(leaf)]:
        raise ValueError(
            f"{', '.join(few(bare))}: a tower-local variable must say how its copies"
            " become one value. Wrap it: tj.TowerLocal(value, tj.Reduction.MEAN)."
        )
    refuse_unheld("local", plain(local))
    return local


def read_local(local: PyTree) -> PyTree:
    """Replace each variable in a tree by its one value, outside of a step.

    Args:
      local: A ``TowerLocal`` of a ``TrainState``, or any pytree; leaves that are not
        variables do not change.

    Returns:
      The tree, with the SUM, MEAN or ONLY_FIRST_TOWER of the towers' copies.

    Raises:
      ValueError: A tower-local variable cannot be read as one value; names all of them.

    Example:
      >>> read_local(TowerLocal(jnp.array([1.0, 3.0]), Reduction.MEAN)).item()
      2.0
    """
    named = named_leaves("tree", local, is_leaf=is_variable)
    problems = []
    local_leaves = [(name, x) for name, x in named if is_local(x)]
    for name, x in local_leaves:
        refuse_own_copy(x)
        has_keys = any(map(is_key, jax.tree.leaves(x.value)))
        is_none = x.reduction is Reduction.NONE
        if is_none or (has_keys and not takes_first(x.reduction)):
            where = f"{name}: " if name != "tree" else ""
            problems.append(f"{where}{label(x)} has {x.reduction!r}")
    if problems:
        raise ValueError(
            "These tower-local variables cannot be read as one value:"
            f" {listed(problems)}. Give them SUM, MEAN or ONLY_FIRST_TOWER (random"
            " keys: ONLY_FIRST_TOWER), leave them out of the tree, or read each tower's"
            " own with strategy.unwrap."
        )
    variables = [x for _, x in local_leaves]
    with processes_of(variables).says_if_alone("tower-local values are read"):
        values = wait_on_cpus(_read_all(variables))
    return plain(put_parts(TowerLocal, local, values))


@jax.jit
def _read_all(local: PyTree) -> PyTree:
    """Read each variable as one value.

    Sums are added in pairs, so that they do not depend on the number of devices.
    """
    return jax.tree.map(lambda x: one_of(x.reduction, x.value), local, is_leaf=is_local)


def read_local_over_towers(
    local: PyTree, ops: CrossTowerOps, axes: TowerAxes
) -> PyTree:
    """Read each tower-local variable as one value, inside a device function."""
    first_tower = first_tower_of_device(axes)
    variables = parts_of(TowerLocal, local)

    def addend(x: TowerLocal) -> PyTree:
        if x.reduction is Reduction.NONE or takes_first(x.reduction):
            return None
        return jax.tree.map(functools.partial(as_addend, x.reduction), x.value)

    def of_first(x: jax.Array) -> jax.Array:
        first = key_data(x)[0]
        if axes.device_axis:
            first = take_first(first, first_tower, (DEVICE_AXIS,))
        return like_key(first, x)

    def read(variable: TowerLocal, total: PyTree) -> PyTree:
        reduction = variable.reduction
        rows = variable.value
        if reduction is Reduction.NONE:
            return None
        if takes_first(reduction):
            return jax.tree.map(of_first, rows)
        finish = functools.partial(from_total, reduction, count=axes.num_towers)
        return jax.tree.map(lambda x, row: finish(x, dtype=row.dtype), total, rows)

    rows = [addend(x) for x in variables]
    totals = sum_rows_over_towers(ops, rows, axes) if jax.tree.leaves(rows) else rows
    return put_parts(TowerLocal, local, map(read, variables, totals))
