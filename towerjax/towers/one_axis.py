"""How does a program over one axis of all towers run on the devices that there are?

A tower function sees one axis of ``T`` towers, wherever they lie, so that the program
that runs is the program that is proved. It is traced so; then each collective over that
axis becomes one over the device axis and the towers of a device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, primitives
from jax.extend.linear_util import wrap_init

from towerjax.collectives.reduce import add_pairwise, gather_over_towers
from towerjax.mesh.placement import DEVICE_AXIS, LOCAL_AXIS, TowerAxes
from towerjax.proof.equation import (
    is_hidden,
    line_of,
    named_axes,
    open_jaxpr,
    opened,
)
from towerjax.towers.together import together
from towerjax.types import PyTree
from towerjax.types.leaves import has_tracers

# JAX itself does these over several axes at once.
_REDUCTIONS = frozenset("psum pmax pmin".split())
_CUSTOM = frozenset("custom_jvp_call custom_vjp_call".split())


def first_tower_of_device(axes: TowerAxes) -> jax.Array:
    """The id of the first local tower, ``()`` int32, inside a device function."""
    if not axes.device_axis:
        return jnp.int32(0)
    return lax.axis_index(DEVICE_AXIS).astype(jnp.int32) * axes.num_local


def axes_in_tower(axes: TowerAxes) -> list[tuple[str, int]]:
    """The axes, with their sizes, that are bound where a tower function is traced."""
    sizes = {DEVICE_AXIS: axes.num_devices, LOCAL_AXIS: axes.num_local}
    bound = [(name, sizes[name]) for name in axes.names]
    if axes.in_turn and axes.num_towers > 1:
        return bound  # towers never meet: the axis is not there
    return [(axes.tower_axis, axes.num_towers), *bound]


def on_these_devices(
    tower_fn: Callable[..., PyTree], axes: TowerAxes
) -> Callable[..., PyTree]:
    """A tower function whose axis of all towers is made of those that are bound."""
    if not _meets(axes) and axes.traced is None:
        return tower_fn

    def run(*args: PyTree) -> PyTree:
        program, tree = _program_here(tower_fn, axes, args)
        leaves = jax.tree.leaves(args)
        out = jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)
        return jax.tree.unflatten(tree, map(jnp.asarray, out))

    return run


def _meets(axes: TowerAxes) -> bool:
    return axes.tower_axis in dict(axes_in_tower(axes))


def _program_here(
    tower_fn: Callable[..., PyTree], axes: TowerAxes, args: tuple[PyTree, ...]
) -> tuple[ClosedJaxpr, Any]:
    """The program of one tower on these devices, and the tree of what it returns."""
    devices = _Devices(axes)
    program, tree = devices.traced(tower_fn, *jax.tree.flatten(args))
    return devices.program(program) if _meets(axes) else program, tree


class _Devices:
    """Writes the programs of a step for some devices, each jaxpr once."""

    def __init__(self, axes: TowerAxes) -> None:
        self.axes = axes
        # Rules of derivatives are traced later, where perhaps no axis is bound.
        self._env = axes_in_tower(axes)
        self._rules = {
            "jvp_jaxpr_fun": self._jaxpr_of_rule,
            "fwd_jaxpr_thunk": self._jaxpr_of_rule,
            "bwd": self._backward,
        }
        self._done: dict[int, Any] = {}

    def traced(
        self, tower_fn: Callable[..., PyTree], leaves: list[Any], treedef: Any
    ) -> tuple[Any, Any]:
        """A tower function's program, and the tree of what it returns; traced once."""
        kinds = [jax.typeof(x) for x in leaves]
        key = (self.axes.num_towers, treedef, *[(x.shape, x.dtype) for x in kinds])
        if (known := (self.axes.traced or {}).get(key)) is not None:
            return known
        trees = []

        def of_leaves(*leaves: Any) -> list[Any]:
            out, tree = jax.tree.flatten(tower_fn(*jax.tree.unflatten(treedef, leaves)))
            trees[:] = [tree]
            return out

        traced = jax.make_jaxpr(of_leaves, axis_env=self._env)(*leaves)
        if self.axes.traced is not None and not has_tracers(traced.consts):
            self.axes.traced[key] = traced, trees[0]
        return traced, trees[0]

    def program(self, jaxpr: Any) -> Any:
        """A jaxpr, closed or not, with collectives that these devices have."""
        if id(jaxpr) not in self._done:
            body = open_jaxpr(jaxpr)
            eqns, new = [self._equation(eqn) for eqn in body.eqns], jaxpr
            if any(a is not b for a, b in zip(eqns, body.eqns, strict=True)):
                new = body.replace(eqns=eqns, effects=self._effects(body.effects))
                new = new if body is jaxpr else jaxpr.replace(jaxpr=new)
            self._done[id(jaxpr)] = new, jaxpr  # kept, so that no other has its id
        return self._done[id(jaxpr)][0]

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        if self.axes.tower_axis in named_axes(eqn):
            adds_up = eqn.primitive.name in _REDUCTIONS
            if adds_up and eqn.params.get("axis_index_groups") is None:
                return self._renamed(eqn)
            if self.axes.names == (DEVICE_AXIS,):
                return self._renamed(eqn)
            return self._called(eqn, lambda *x: self._among_all(eqn, x))
        own = {DEVICE_AXIS, LOCAL_AXIS}.intersection(named_axes(eqn))
        if own:
            raise ValueError(_OWN.format(axis=own.pop(), line=line_of((eqn, None))))
        if eqn.primitive.name == "custom_vmap_call":
            # Its rule for several towers might say another thing than for one.
            return self._called(eqn, jaxpr_as_fun(self.program(eqn.params["call"])))
        params = {key: self._param(value) for key, value in eqn.params.items()}
        if eqn.primitive.name in _CUSTOM:
            for key in self._rules.keys() & params.keys():
                new = functools.partial(self._rules[key], params[key])
                params[key] = wrap_init(new, debug_info=params[key].debug_info)
        if any(params[key] is not value for key, value in eqn.params.items()):
            return eqn.replace(params=params, effects=self._effects(eqn.effects))
        return self._unhidden(eqn) if is_hidden(eqn) else eqn

    def _param(self, value: Any) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.program(value)
        if not isinstance(value, tuple):
            return value
        parts = [self._param(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)

    def _jaxpr_of_rule(self, rule: Any, *zeros: bool) -> tuple[Any, ...]:
        """The program of a custom derivative, and what JAX wants to know with it."""
        found = []
        trace = lambda: found.extend(rule.call_wrapped(*zeros))  # noqa: E731
        jax.make_jaxpr(trace, axis_env=self._env)()
        return self.program(found[0]), *found[1:]

    def _backward(self, rule: Any, *args: Any) -> Any:
        """Custom cotangents; what stands for zeros goes in and out as it is."""
        out = []

        def of_arrays(*arrays: Any) -> list[Any]:
            out[:] = [rule.call_wrapped(*with_arrays(args, arrays))]
            return arrays_of(out)

        arrays = arrays_of(args)
        traced = jax.make_jaxpr(of_arrays, axis_env=self._env)(*arrays)
        body = self.program(traced.jaxpr)
        arrays = jax.core.eval_jaxpr(body, traced.consts, *arrays)
        return with_arrays(out, arrays)[0]

    def _unhidden(self, eqn: JaxprEqn) -> JaxprEqn:
        """Code that a primitive holds, written out where towers meet in it."""
        sizes = {self.axes.tower_axis: self.axes.num_towers}
        program = opened(eqn, sizes)
        if program is None or self.program(program) is program:
            return eqn
        return self._called(eqn, jaxpr_as_fun(self.program(program)))

    def _effects(self, effects: Any) -> set[Any]:
        new: set[Any] = set()
        for effect in effects:
            is_axis = getattr(effect, "name", None) == self.axes.tower_axis
            new |= {type(effect)(n) for n in self.axes.names} if is_axis else {effect}
        return new

    def _renamed(self, eqn: JaxprEqn) -> JaxprEqn:
        key = "axes" if "axes" in eqn.params else "axis_name"
        given, names = eqn.params[key], self.axes.names
        if isinstance(given, tuple):
            each = [names if x == self.axes.tower_axis else (x,) for x in given]
            new: Any = tuple(x for part in each for x in part)
        else:
            [new] = names
        params = {**eqn.params, key: new}
        return eqn.replace(params=params, effects=self._effects(eqn.effects))

    def _called(self, eqn: JaxprEqn, fn: Callable[..., Any]) -> JaxprEqn:
        avals: list[Any] = [v.aval for v in eqn.invars]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        closed = jax.make_jaxpr(fn, axis_env=self._env)(*shapes)
        return eqn.replace(
            primitive=primitives.closed_call_p,
            params={"call_jaxpr": closed},
            effects=closed.effects,
        )

    def _among_all(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """A collective done by each tower for itself, on what all towers have."""
        axes, params = self.axes, dict(eqn.params)
        tower = first_tower_of_device(axes)
        if LOCAL_AXIS in axes.names:
            tower += lax.axis_index(LOCAL_AXIS).astype(jnp.int32)
        if eqn.primitive.name == "axis_index":
            return [tower]
        groups = params.get("axis_index_groups")
        if eqn.primitive.name == "reduce_scatter" and groups is None:
            return [_scattered(operands[0], axes.names, params)]
        rows, size = gather_over_towers(list(operands), axes), axes.num_towers
        if eqn.primitive.name == "ppermute":  # under vmap only of all towers
            sources = np.full(size, -1)
            for source, target in params["perm"]:
                sources[target] = source
            source = jnp.asarray(sources)[tower]
            return [
                jnp.where(source < 0, jnp.zeros_like(x[0]), x[source]) for x in rows
            ]
        if groups is not None:
            if len({len(group) for group in groups}) > 1:
                raise ValueError(_UNEVEN.format(name=eqn.primitive.name, groups=groups))
            order = np.argsort(np.concatenate(groups))
            size = len(groups[0])
            group = jnp.asarray(order // size)[tower]
            rows = [x[jnp.asarray(groups)[group]] for x in rows]
            tower = jnp.asarray(order % size)[tower]
            params["axis_index_groups"] = None
        one = functools.partial(eqn.primitive.bind, **params)
        is_one = eqn.primitive.name == "all_gather" and groups is None
        over = {"axis_name": axes.tower_axis, "axis_size": size}
        out = jax.vmap(one, out_axes=None if is_one else 0, **over)(*rows)
        return [x if is_one else x[tower] for x in jax.tree.leaves(out)]


def _scattered(x: jax.Array, names: Sequence[str], params: dict[str, Any]) -> jax.Array:
    """Its sum over towers, of which each has a part: one axis after another."""
    dim = params["scatter_dimension"]
    for name in names:
        x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
    return x if params["tiled"] else x.squeeze(dim)


def arrays_of(tree: PyTree) -> list[Any]:
    """The leaves that are arrays, in tree order."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def with_arrays(tree: PyTree, arrays: Sequence[Any]) -> Any:
    """The tree with others in place of its arrays."""
    new = iter(arrays)
    return jax.tree.map(lambda x: next(new) if isinstance(x, jax.Array) else x, tree)


_OWN = (
    "{line} names the axis {axis!r}, which is not all towers where several share a"
    " device. Write tower.axis_names, or a name that you give:"
    " tj.Mirrored(axis_name='batch')."
)
_NO_VMAP = (
    "Towers that share a device run together, by jax.vmap, which JAX does not have of"
    " this. Let them run one after another, local='scan', or have one a device."
)
_UNEVEN = (
    "{name} with axis_index_groups={groups}: groups of several sizes need a device for"
    " each tower. Make them equal, or write tower.all_gather(x) and take the rows."
)


def over_local_towers(
    tower_fn: Callable[..., tuple[PyTree, PyTree]],
    axes: TowerAxes,
    per_tower: PyTree,
    *common: PyTree,
    stack_sums: bool,
    number: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """``tower_fn(tower_id, own, *common)`` for each tower of this device.

    Where ``axes.traced`` keeps programs, ``tower_fn`` is a function of these alone.
    """
    on_devices = on_these_devices(tower_fn, axes)

    def of_tower(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
        return on_devices(tower_id, own, *common)

    def alone(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
        return _alone(on_devices, tower_id, own, *common)

    first = first_tower_of_device(axes)
    if axes.num_local == 1 and not (axes.in_turn and stack_sums):
        # A vmap of one would still turn convolutions into grouped ones.
        sums, kept = of_tower(first, jax.tree.map(lambda x: x[0], per_tower))
        kept = jax.tree.map(lambda x: jnp.asarray(x)[None], kept)
        return (jax.tree.map(lambda x: x[None], sums) if stack_sums else sums), kept
    ids = first + jnp.arange(axes.num_local, dtype=jnp.int32)
    if not axes.in_turn:
        own = (ids, per_tower)
        args = (*jax.tree.map(lambda x: x[0], own), *common)
        program, tree = _program_here(tower_fn, axes, args)
        num_sums = 0 if stack_sums else tree.children()[0].num_leaves
        own, rest = jax.tree.leaves(own), jax.tree.leaves(common)
        try:
            out = together(program, own, rest, num_sums, _add_rows)
        except NotImplementedError as error:
            error.add_note(_NO_VMAP)
            raise
        return jax.tree.unflatten(tree, out)
    if stack_sums:
        if axes.num_local == 1:
            number = ids[0] if number is None else number
            return _map_of_one(alone, ids, per_tower, number)
        return lax.map(lambda row: alone(*row), (ids, per_tower))
    return _running_sum(of_tower, ids, per_tower)


def _alone(tower_fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """One tower's program, fused with nothing that depends on how many are here.

    What all towers compute alike stays in it, too: XLA would move parts of it out of
    the loop over towers, other ones on one device than on several.
    """
    return lax.optimization_barrier(tower_fn(*lax.optimization_barrier(args)))


def _map_of_one(
    tower_fn: Callable[..., PyTree],
    ids: jax.Array,
    per_tower: PyTree,
    number: jax.Array,
) -> PyTree:
    """``lax.map`` over one tower, compiled as it would be over several.

    XLA drops a loop of one trip, and XLA:CPU barriers before it fuses; then a tower is
    fused otherwise than in a loop, on GPUs too, and bits depend on ``D``. So the number
    of trips is one that the compiler cannot know, and rows are a part of more.
    """
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    shapes = jax.eval_shape(tower_fn, *row)
    zeros = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), shapes)
    count = 1 + jnp.minimum(number, 0)
    rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), (ids, per_tower))

    def body(i: jax.Array, done: PyTree) -> PyTree:
        out = tower_fn(*jax.tree.map(lambda x: x[i], rows))
        return jax.tree.map(lambda all_of_them, x: all_of_them.at[i].set(x), done, out)

    return lax.fori_loop(0, count, body, zeros)


def _add_rows(x: jax.Array) -> jax.Array:
    # A sum over what a product has made XLA:CPU fuses with it, and then makes both
    # element by element: 2 to 5 times slower than additions.
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return add_pairwise(x)
    return x.sum(axis=0, dtype=x.dtype)


def _running_sum(
    tower_fn: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    ids: jax.Array,
    per_tower: PyTree,
) -> tuple[PyTree, PyTree]:
    """One tower after another, holding one tower's sums at a time."""
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(tower_fn, *row)[0])

    def body(total: PyTree, row: PyTree) -> tuple[PyTree, PyTree]:
        sums, kept = tower_fn(*row)
        return jax.tree.map(jnp.add, total, sums), kept

    return lax.scan(body, zeros, (ids, per_tower))
