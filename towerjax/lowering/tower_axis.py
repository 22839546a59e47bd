"""Lower the axis of all towers to the device axis and a device's local towers.

A tower function is traced with one axis of ``T`` towers, whatever the devices are, so
that the program that runs is the program that is proved. Each collective over that axis
is then replaced by one over the device axis and the local towers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.extend.linear_util import wrap_init
from jax.interpreters import ad, batching, mlir

from towerjax.collectives.reduce import add_rows, gather_over_towers
from towerjax.jaxprs.interpreter import Interpreter, as_call, with_programs
from towerjax.jaxprs.params import is_hidden, named_axes, open_jaxpr, trace_hidden
from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import eqns_inside, user_line
from towerjax.jaxprs.tags import DEVICE_AXIS, LOCAL_AXIS
from towerjax.lowering.in_turn import map_in_turn, scan_and_add
from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree
from towerjax.types.trees import has_tracers, parts_of, put_parts

_MULTI_AXIS = frozenset("psum pmax pmin".split())
_CUSTOM = frozenset("custom_jvp_call custom_vjp_call".split())


def first_tower_of_device(axes: TowerAxes) -> jax.Array:
    """Compute the id of the device's first tower, ``()`` int32.

    This is called in a device function.
    """
    if not axes.device_axis:
        return jnp.int32(0)
    device = lax.convert_element_type(lax.axis_index(DEVICE_AXIS), jnp.int32)
    return lax.mul(device, jnp.int32(axes.num_local))


def axes_in_tower(axes: TowerAxes) -> list[tuple[str, int]]:
    """List the name and size of each axis that is bound while a tower is traced."""
    sizes = {DEVICE_AXIS: axes.num_devices, LOCAL_AXIS: axes.num_local}
    bound = [(name, sizes[name]) for name in axes.names]
    if axes.in_turn and axes.num_towers > 1:
        # Towers that run in turn never communicate, so there is no axis over all
        # towers.
        return bound
    return [(axes.tower_axis, axes.num_towers), *bound]


TowerPrograms: TypeAlias = dict[tuple[Any, ...], tuple[ClosedJaxpr, Any]]
"""By name, number of towers and shapes: a tower's program, its results' treedef."""
_Lower: TypeAlias = Callable[[tuple[PyTree, ...]], tuple[ClosedJaxpr, Any]]


def tower_program(
    tower_fn: Callable[..., PyTree],
    axes: TowerAxes,
    programs: TowerPrograms,
    args: tuple[PyTree, ...],
    name: str,
) -> tuple[ClosedJaxpr, Any]:
    """Trace one tower's program over the axis of all towers.

    Returns the program, and the treedef of its results. It is traced once for each
    ``name`` and each set of shapes of ``args``, and stored in ``programs``.
    """
    leaves, treedef = jax.tree.flatten(args)
    kinds = [
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves
    ]
    key = (name, axes.num_towers, treedef, *[(x.shape, x.dtype) for x in kinds])
    if key in programs:
        return programs[key]
    tree: Any = None

    def of_leaves(*leaves: Any) -> list[Any]:
        nonlocal tree
        args = jax.tree.unflatten(treedef, leaves)
        out, tree = jax.tree.flatten(tower_fn(*args))
        return out

    program = jax.make_jaxpr(of_leaves, axis_env=axes_in_tower(axes))(*leaves)
    if not has_tracers(program.consts):
        programs[key] = program, tree
    return program, tree


def evaluate_program(program: ClosedJaxpr, tree: Any, args: PyTree) -> PyTree:
    """Evaluate one tower's program, and return its results as a tree."""
    leaves = jax.tree.leaves(args)
    walk = Interpreter(program.jaxpr, program.consts, leaves)
    for eqn in program.jaxpr.eqns:
        walk.evaluate(eqn)
    out = map(walk.read, program.jaxpr.outvars)
    return jax.tree.unflatten(tree, map(jnp.asarray, out))


def lowered_program(
    tower_fn: Callable[..., PyTree],
    axes: TowerAxes,
    programs: TowerPrograms,
    name: str,
    args: tuple[PyTree, ...],
) -> tuple[ClosedJaxpr, Any]:
    """Trace a tower function by `tower_program`, and lower it to the devices."""
    program, tree = tower_program(tower_fn, axes, programs, args, name)
    return _Lowering(axes).lower(program), tree


def run_lowered(
    tower_fn: Callable[..., PyTree],
    axes: TowerAxes,
    programs: TowerPrograms,
    name: str,
    *args: PyTree,
) -> PyTree:
    """Run ``tower_fn`` on all towers, by one program that is made for their devices.

    The program is traced at the first call and kept in ``programs``. Errors name it
    ``name``.
    """
    program, tree = lowered_program(tower_fn, axes, programs, name, args)
    return evaluate_program(program, tree, args)


class _Lowering:
    """Rewrites programs from the towers' axis to the axes of these devices.

    Each jaxpr is rewritten once, also if several equations call it.
    """

    def __init__(self, axes: TowerAxes) -> None:
        self.axes = axes
        # Derivative rules are traced later, where an axis may not be bound any more.
        self._env = axes_in_tower(axes)
        self._rules = {
            "jvp_jaxpr_fun": self._lower_rule,
            "fwd_jaxpr_thunk": self._lower_rule,
            # This rule is called with cotangents, which may be symbolic zeros. `_run`
            # traces only the arrays among them.
            "bwd": lambda rule, *args: self._run(rule.call_wrapped, *args),
        }
        self._done: dict[int, Any] = {}

    def lower(self, jaxpr: Any) -> Any:
        """Replace the collectives of a jaxpr, closed or not."""
        if id(jaxpr) not in self._done:
            body = open_jaxpr(jaxpr)
            eqns = [*body.eqns]
            new = jaxpr
            for i, eqn in enumerate(eqns):
                if eqn.primitive not in PLAIN:
                    eqns[i] = self._lower_eqn(eqn)
            if any([a is not b for a, b in zip(eqns, body.eqns, strict=True)]):
                new = body.replace(eqns=eqns, effects=self._new_effects(body.effects))
                new = new if body is jaxpr else jaxpr.replace(jaxpr=new)
            # The jaxpr is stored, too, so that Python cannot give its id to another
            # object.
            self._done[id(jaxpr)] = new, jaxpr
        return self._done[id(jaxpr)][0]

    def _lower_eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        """Replace the collectives of an equation, for these devices."""
        axes = named_axes(eqn)
        if self.axes.tower_axis in axes:
            return self._lower_collective(eqn)
        if not {DEVICE_AXIS, LOCAL_AXIS}.isdisjoint(axes):
            self._refuse_device_axis(eqn)
        if eqn.primitive.name == "custom_vmap_call":
            # The rule for ``vmap`` may compute something else than the call does for
            # one tower.
            return as_call(eqn, jaxpr_as_fun(self.lower(eqn.params["call"])), self._env)
        params = dict(with_programs(eqn, self.lower).params)
        if eqn.primitive.name in _CUSTOM:
            params = self._with_lowered_rules(eqn, params)
        is_changed = [params[key] is not value for key, value in eqn.params.items()]
        if any(is_changed):
            return eqn.replace(params=params, effects=self._new_effects(eqn.effects))
        return self._lower_hidden(eqn) if is_hidden(eqn) else eqn

    def _lower_collective(self, eqn: JaxprEqn) -> JaxprEqn:
        """Run a collective over these devices' axes, or emulate it.

        JAX itself reduces over several axes. Its other collectives accept one axis
        only.
        """
        has_groups = eqn.params.get("axis_index_groups") is not None
        takes_several_axes = eqn.primitive.name in _MULTI_AXIS and not has_groups
        is_of_one = takes_several_axes or self.axes.names == (DEVICE_AXIS,)
        if is_of_one and not self.axes.alone:
            return self._rename_axis(eqn)
        return as_call(eqn, lambda *x: self._emulate(eqn, x), self._env)

    def _refuse_device_axis(self, eqn: JaxprEqn) -> None:
        """Refuse a collective that names a device axis in place of the towers' axis.

        It would leave out towers where several of them share a device.
        """
        [axis, *_] = [x for x in named_axes(eqn) if x in (DEVICE_AXIS, LOCAL_AXIS)]
        instead = _ALONE if self.axes.in_turn else _TOGETHER
        raise ValueError(
            f"{user_line((eqn, None))} names the axis {axis!r}, which leaves out towers"
            f" if several share a device. {instead}"
        )

    def _with_lowered_rules(
        self, eqn: JaxprEqn, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Lower the rules of a custom derivative, too.

        ``params`` are the params of the equation, with its programs lowered.
        """
        rules = self._rules
        if eqn.primitive.name == "custom_vjp_call" and self._meets_inside(eqn):
            call = params["call_jaxpr"]
            of_each = self._with_own_results(jaxpr_as_fun(call), call.in_avals)
            params = {**params, "call_jaxpr": of_each}
            rules = {**rules, "fwd_jaxpr_thunk": self._lower_forward}
        lowered = {
            key: wrap_init(
                functools.partial(rules[key], params[key]),
                debug_info=params[key].debug_info,
            )
            for key in rules.keys() & params.keys()
        }
        return params | lowered

    def _lower_rule(self, rule: Any, *zeros: bool) -> tuple[Any, ...]:
        """Run the rule of a custom derivative, and lower the program that it returns.

        ``zeros`` tell for each argument whether its tangent is a symbolic zero.
        """
        traced = []

        def trace() -> None:
            traced.extend(rule.call_wrapped(*zeros))

        jax.make_jaxpr(trace, axis_env=self._env)()
        return self.lower(traced[0]), *traced[1:]

    def _meets_inside(self, eqn: JaxprEqn) -> bool:
        """Return whether towers under one ``vmap`` communicate inside the equation."""
        is_together = LOCAL_AXIS in self.axes.names and not self.axes.in_turn
        axis = self.axes.tower_axis
        return is_together and any(axis in named_axes(x) for x in eqns_inside(eqn))

    def _lower_forward(self, rule: Any, *zeros: bool) -> tuple[Any, ...]:
        """Lower the forward function of a `custom_vjp` in which towers communicate.

        ``zeros`` tell for each argument whether its tangent is a symbolic zero. The
        results are per tower; see `_with_own_results`.
        """
        program, consts = self._lower_rule(rule, *zeros)
        fn = functools.partial(jax.core.eval_jaxpr, program, consts)
        closed = self._with_own_results(fn, [var.aval for var in program.invars])
        return closed.jaxpr, closed.consts

    def _with_own_results(self, fn: Callable[..., Any], avals: Any) -> ClosedJaxpr:
        """Change the program of ``fn`` so that its results are per tower.

        A user's derivative rule is written for one tower's cotangent. If a device's
        towers share a result, its cotangent is already the sum of theirs, and a sum
        over towers in the rule would count it once for each tower.
        """

        def run(*args: Any) -> list[Any]:
            return [_OF_EACH.bind(x, *args) for x in fn(*args)]

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        return jax.make_jaxpr(run, axis_env=self._env)(*shapes)

    def _run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(*args)`` by its lowered program.

        ``fn`` is traced for the arrays among ``args``. Other arguments, such as
        symbolic zeros, are passed on as they are.
        """
        out = []

        def of_arrays(*arrays: Any) -> list[Any]:
            with_arrays = put_parts(jax.Array, args, arrays)
            out[:] = [fn(*with_arrays)]
            return parts_of(jax.Array, out)

        arrays = parts_of(jax.Array, args)
        traced = jax.make_jaxpr(of_arrays, axis_env=self._env)(*arrays)
        body = self.lower(traced.jaxpr)
        arrays = jax.core.eval_jaxpr(body, traced.consts, *arrays)
        return put_parts(jax.Array, out, arrays)[0]

    def _lower_hidden(self, eqn: JaxprEqn) -> JaxprEqn:
        """Replace an equation that hides a program, if that program has collectives.

        Some equations of JAX have no jaxpr in their params and compute by Python code.
        That code is traced here, and the call of its lowered program takes the
        equation's place.
        """
        sizes = {self.axes.tower_axis: self.axes.num_towers}
        program = trace_hidden(eqn, sizes)
        if program is None or self.lower(program) is program:
            return eqn
        high: Any = eqn.params.get("_prim")
        # A primitive that ``vmap`` made wraps the original one.
        while hasattr(high, "prim"):
            high = high.prim
        if type(high).__name__.startswith("Custom"):
            raise ValueError(_HIDDEN_RULE.format(line=user_line((eqn, None))))
        return as_call(eqn, jaxpr_as_fun(self.lower(program)), self._env)

    def _new_effects(self, effects: Any) -> set[Any]:
        new: set[Any] = set()
        for effect in effects:
            is_axis = getattr(effect, "name", None) == self.axes.tower_axis
            new |= {type(effect)(n) for n in self.axes.names} if is_axis else {effect}
        return new

    def _rename_axis(self, eqn: JaxprEqn) -> JaxprEqn:
        key = "axes" if "axes" in eqn.params else "axis_name"
        names_before = eqn.params[key]
        names = self.axes.names
        if isinstance(names_before, tuple):
            renamed = [
                names if x == self.axes.tower_axis else (x,) for x in names_before
            ]
            new: Any = tuple(x for part in renamed for x in part)
        else:
            [new] = names
        params = {**eqn.params, key: new}
        return eqn.replace(params=params, effects=self._new_effects(eqn.effects))

    def _emulate(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Compute a collective's results for one tower from all towers' operands."""
        axes = self.axes
        name = eqn.primitive.name
        groups = eqn.params.get("axis_index_groups")
        tower = first_tower_of_device(axes)
        if LOCAL_AXIS in axes.names:
            tower += lax.axis_index(LOCAL_AXIS).astype(jnp.int32)
        if name == "axis_index":
            return [tower]
        if axes.alone:
            rows = [jnp.broadcast_to(x, (axes.num_towers, *x.shape)) for x in operands]
        elif name == "reduce_scatter" and groups is None:
            return [self._scatter_sum(eqn, operands[0])]
        else:
            rows = gather_over_towers(list(operands), axes)
        if name == "ppermute":  # jax.vmap takes full permutations only
            return _permute(rows, tower, eqn.params["perm"])
        size = axes.num_towers
        params = dict(eqn.params)
        if groups is not None:
            rows, tower, size = _of_group(rows, tower, groups, name)
            # `rows` now has only the towers of this group
            params["axis_index_groups"] = None
        collective = functools.partial(eqn.primitive.bind, **params)
        over = {"axis_name": axes.tower_axis, "axis_size": size}
        if name == "all_gather":  # all towers of a group get the same result
            out = jax.vmap(collective, out_axes=None, **over)(*rows)
            return jax.tree.leaves(out)
        out = jax.vmap(collective, **over)(*rows)
        return [x[tower] for x in jax.tree.leaves(out)]

    def _scatter_sum(self, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        """Cut a tower's slice out of the sum over towers: ``psum_scatter``."""
        dim = eqn.params["scatter_dimension"]
        for name in self.axes.names:
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
        return x if eqn.params["tiled"] else x.squeeze(dim)


def _of_group(
    rows: Sequence[jax.Array], tower: jax.Array, groups: Sequence[Any], name: str
) -> tuple[list[jax.Array], jax.Array, int]:
    """Pick the operands of a tower's group.

    Returns ``(operands, index, size)``: the tower's index in the group, and its size.

    ``groups`` are the ``axis_index_groups`` of the collective ``name``.
    """
    if len({len(group) for group in groups}) > 1:
        raise ValueError(_UNEVEN.format(name=name, groups=groups))
    size = len(groups[0])
    # Each tower's position when the groups are joined.
    place = np.argsort(np.concatenate(groups))
    members = jnp.asarray(groups)[jnp.asarray(place // size)[tower]]
    return [x[members] for x in rows], jnp.asarray(place % size)[tower], size


def _permute(
    rows: Sequence[jax.Array], tower: jax.Array, perm: Sequence[tuple[int, int]]
) -> list[jax.Array]:
    """Take the rows that other towers send to this one; zeros if none does."""
    size = len(rows[0])
    sources = np.full(size, -1)
    for source, target in perm:
        sources[target] = source
    source = jnp.asarray(sources)[tower]
    return [jnp.where(source < 0, jnp.zeros_like(x[0]), x[source]) for x in rows]


_HIDDEN_RULE = (
    "{line}: towers communicate in a function with its own derivative, which JAX hides"
    " under jax_custom_jvp3 and jax_custom_vjp3. Turn these options off."
)
_TOGETHER = (
    "Write tower.axis_names, or a name that you give: tj.Mirrored(axis_name='batch')."
)
_ALONE = (
    "Write tower.id. With tower_loop='scan' towers run one after another, and cannot"
    " communicate."
)
_NO_VMAP = (
    "Towers that share a device run under jax.vmap, and JAX has no vmap of this. Run"
    " them one after another, with tower_loop='scan', or have one on each device."
)
_UNEVEN = (
    "{name} with axis_index_groups={groups}: groups of several sizes need a device for"
    " each tower. Make them equal, or write tower.all_gather(x) and take the rows."
)


def _of_each_in_batch(args: Any, dims: Any) -> tuple[jax.Array, int]:
    """Make the first argument per tower if any argument is.

    This is the batching rule of `_OF_EACH`.
    """
    (x, *_) = args
    (dim, *_) = dims
    if dim is not None:
        return x, dim
    pairs = zip(args, dims, strict=True)
    size = next(y.shape[at] for y, at in pairs if at is not None)
    return jnp.broadcast_to(x, (size, *x.shape)), 0


# The result of this primitive is its first argument. Under ``vmap`` the result is per
# tower if any argument is.
_OF_EACH = Primitive("towerjax_of_each")
_OF_EACH.def_impl(lambda x, *_: x)
_OF_EACH.def_abstract_eval(lambda x, *_: x)
ad.primitive_jvps[_OF_EACH] = lambda primals, tangents: (
    _OF_EACH.bind(*primals),
    ad.instantiate_zeros(tangents[0]),
)
batching.primitive_batchers[_OF_EACH] = _of_each_in_batch
mlir.register_lowering(
    _OF_EACH, mlir.lower_fun(lambda x, *_: x, multiple_results=False)
)


def over_local_towers(
    tower_fn: Callable[..., tuple[PyTree, PyTree]],
    axes: TowerAxes,
    per_tower: PyTree,
    *replicated: PyTree,
    stack_sums: bool,
    number: jax.Array | None = None,
    programs: TowerPrograms | None = None,
    name: str = "tower",
    is_lowered: bool = False,
) -> tuple[PyTree, PyTree]:
    """Run all ``k`` towers of a device, and add their sums.

    ``tower_fn(tower_id, per_tower, *replicated)`` returns ``(sums, rest)``. Returns
    ``sums`` added over the towers, or with ``stack_sums`` as rows ``[k, ...]``, and
    ``rest`` as rows.

    ``number`` is any traced int >= 0; see `map_in_turn`. ``programs`` stores the
    program under ``name``, for the next call with arguments of these shapes and as many
    towers, on any devices. ``is_lowered`` tells that ``tower_fn`` is lowered already
    and runs as it is; it is ignored if towers run together.
    """
    programs = {} if programs is None else programs
    lower = functools.partial(lowered_program, tower_fn, axes, programs, name)
    run = tower_fn
    if not is_lowered:
        run = functools.partial(run_lowered, tower_fn, axes, programs, name)
    first = first_tower_of_device(axes)
    if axes.num_local == 1 and not (axes.in_turn and stack_sums):
        # A ``vmap`` over one tower would turn convolutions into grouped ones.
        of_one = jax.tree.map(lambda x: x[0], per_tower)
        sums, of_each = run(first, of_one, *replicated)
        rows = jax.tree.map(lambda x: jnp.asarray(x)[None], of_each)
        if stack_sums:
            sums = jax.tree.map(lambda x: x[None], sums)
        return sums, rows
    numbers = first + jnp.arange(axes.num_local, dtype=jnp.int32)
    towers = numbers, per_tower
    if not axes.in_turn:
        sums, of_each = _together(lower, towers, replicated)
        return sums if stack_sums else jax.tree.map(add_rows, sums), of_each
    if not stack_sums:
        return scan_and_add(lambda tower: run(*tower, *replicated), towers)
    number = numbers[0] if number is None else number
    return map_in_turn(_isolate(lower, replicated), towers, axes.num_local, number)


def _together(
    lower: _Lower,
    towers: tuple[PyTree, ...],
    replicated: tuple[PyTree, ...],
) -> tuple[PyTree, PyTree]:
    """Run a device's towers under one ``vmap``; return their results, ``[k, ...]``."""
    program, tree = lower((*jax.tree.map(lambda x: x[0], towers), *replicated))

    def of_tower(leaves: list[jax.Array]) -> PyTree:
        return evaluate_program(program, tree, (leaves, replicated))

    try:  # vmap takes sparse arrays apart in another way, so it gets leaves
        return jax.vmap(of_tower, axis_name=LOCAL_AXIS)(jax.tree.leaves(towers))
    except NotImplementedError as error:
        where = getattr(error, "__notes__", ())
        raise ValueError(" ".join([f"{error}.", *where, _NO_VMAP])) from error
    except ValueError as error:
        if "vmap" in str(error):
            error.add_note(_NO_VMAP)
        raise


def _isolate(
    lower: _Lower,
    replicated: tuple[PyTree, ...],
) -> Callable[[tuple[PyTree, ...]], PyTree]:
    """Build the lowered function of one tower, between two barriers.

    The barriers keep XLA from fusing anything else with a tower's program. Otherwise it
    would also move values that are replicated over towers out of the loop over them,
    and on one device it would move other values than on several. Values that no tower
    uses, such as an optimizer's state, stay outside the barriers, because the loop
    would hold a copy of them.
    """

    def run(tower: tuple[PyTree, ...]) -> PyTree:
        args = (*tower, *replicated)
        program, tree = lower(args)
        leaves = jax.tree.leaves(args)
        used = _inputs_read(program)
        behind = lax.optimization_barrier([leaves[i] for i in used])
        for i, x in zip(used, behind, strict=True):
            leaves[i] = x
        return lax.optimization_barrier(evaluate_program(program, tree, leaves))

    return run


def _inputs_read(program: ClosedJaxpr) -> list[int]:
    """Find the inputs that a program reads, by index."""
    body = program.jaxpr
    reads = [x for eqn in body.eqns for x in eqn.invars] + [*body.outvars]
    variables = {x for x in reads if isinstance(x, Var)}
    return [i for i, x in enumerate(body.invars) if x in variables]
