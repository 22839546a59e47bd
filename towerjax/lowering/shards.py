"""Run a program on sharded parameters, which are gathered where it uses them.

The program is traced with whole parameters and proved. When it is evaluated here, a
parameter stays a `Shard` until an equation really needs all of it. A cast to fewer bits
is done before the parameter is sent. A scan gathers one layer at a time. What
`jax.checkpoint` computes again is gathered again.

A loss is evaluated in this way before it is differentiated. Where the loss gathers a
parameter, its derivative adds the gradient over devices and scatters it. So no device
holds all parameters at once, nor a whole gradient, and models need no change.

The idea is ZeRO-3 of Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", https://arxiv.org/abs/1910.02054, and FSDP of Zhao
et al. (2023), https://arxiv.org/abs/2304.11277. These wrap a model; we rewrite a traced
program.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from towerjax.jaxprs import tags
from towerjax.jaxprs.interpreter import Interpreter, eqn_context, evaluate_eqn
from towerjax.jaxprs.params import loop_sizes, open_jaxpr
from towerjax.jaxprs.sites import scopes_of
from towerjax.lowering.gathers import gathering_again
from towerjax.lowering.sharded_values import (
    Shard,
    Uniform,
    elementwise,
    is_elementwise,
    is_shard,
    is_uniform,
    on_each_shard,
    scatter_shard,
    whole,
    with_barrier,
)
from towerjax.types import PyTree

_CHECKPOINT = ("checkpoint", "remat2")
_ENTERED = ("jit", "closed_call", "core_call", "custom_lin", *_CHECKPOINT)


def shapes_of_whole(tree: PyTree) -> PyTree:
    """Find the shapes of a tree's leaves; a `Shard` has that of its whole value."""

    def of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(of, tree, is_leaf=is_shard)


def on_shards(
    fn: Callable[..., PyTree],
    *args: PyTree,
    replicated: bool = False,
    sums: Callable[[PyTree], list[int | None]] | None = None,
) -> PyTree:
    """Run ``fn(*args)``, where some arguments are a `Shard`, as may be some results.

    ``replicated`` tells that all values are replicated over devices, as in an update.
    Then a result that is computed from shards is a shard, too. Otherwise values are
    those of a device's own towers.

    ``sums(shapes)``, called with the shapes of the results, returns a list. It has a
    dim for each result that is added over devices and becomes a shard of this sum. It
    has None for the other results, which are then whole.
    """
    leaves, treedef = jax.tree.flatten(args, is_leaf=is_shard)
    if not any(map(is_shard, leaves)):
        return fn(*args)
    shapes = jax.tree.unflatten(treedef, shapes_of_whole(leaves))
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
    fresh = [x.fresh() if is_shard(x) else x for x in leaves]
    dims = enumerate([] if sums is None else sums(out))
    scattered = {i: dim for i, dim in dims if dim is not None}
    body = _Body(closed, replicated=replicated, is_update=replicated, sums=scattered)
    values = body.run(fresh)
    if sums is not None:
        values = [x if i in scattered else whole(x) for i, x in enumerate(values)]
    values = [x.whole if isinstance(x, Uniform) else x for x in values]
    return jax.tree.unflatten(jax.tree.structure(out), values)


class _Body:
    """A program, as a jaxpr that may be closed, which is run on shards.

    ``sums`` maps the index of a result that is added over devices to the dim along
    which the sum is scattered.
    """

    def __init__(
        self,
        program: Any,
        *,
        replicated: bool,
        is_update: bool = False,
        sums: dict[int, int] | None = None,
    ) -> None:
        self._body: Jaxpr = open_jaxpr(program)
        self._consts: Sequence[Any] = getattr(program, "consts", ())
        self._replicated = replicated
        # On one device, XLA stores each result of an update and reads the stored array
        # where other values need it. If a result were computed a second time from whole
        # arrays here, XLA would fuse that computation in another way, and the bits
        # would differ from those of one device.
        outs = self._body.outvars if is_update else ()
        self._stored = {x for x in outs if isinstance(x, Var)}
        self._sums = sums or {}
        self._inside = self._scattered_inside() if sums else {}

    def _scattered_inside(self) -> dict[int, dict[int, int]]:
        """Find, for each equation, the results that its inner program scatters.

        The keys are the equation's ``id`` and the index of a result; the value is the
        dim along which that result is scattered. A result is listed if the sum over
        devices is its only use. It may be a gradient that a tower function computes
        itself. Scattering it inside the inner program means that no device ever holds
        the whole sum.
        """
        body = self._body
        inside = dict[int, dict[int, int]]()
        every = [*body.outvars, *[x for eqn in body.eqns for x in eqn.invars]]
        reads = Counter([x for x in every if isinstance(x, Var)])
        makers = {x: (eqn, i) for eqn in body.eqns for i, x in enumerate(eqn.outvars)}
        for number, dim in self._sums.items():
            var: Any = body.outvars[number]
            if reads[var] == 1 and var in makers:
                eqn, i = makers[var]
                if _can_scatter(eqn, i, dim):
                    inside.setdefault(id(eqn), {})[i] = dim
        return inside

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Run the program; return its results, of which some may be a `Shard`."""
        walk = Interpreter(self._body, self._consts, args)
        for eqn in self._body.eqns:
            operands = [walk.read(x) for x in eqn.invars]
            with eqn_context(eqn):
                out = self._evaluate(eqn, operands)
            for var, x in zip(eqn.outvars, out, strict=True):
                is_stored = var in self._stored and is_shard(x)
                walk.values[var] = x.of(x.data) if is_stored else x
        results = [walk.read(x) for x in self._body.outvars]
        known = set[Any]()
        for eqn in self._body.eqns:
            known |= {eqn.outvars[i] for i in self._inside.get(id(eqn), {})}
        for number, dim in self._sums.items():
            if self._body.outvars[number] not in known:
                results[number] = scatter_shard(results[number], dim)
        return results

    def _evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Evaluate an equation; first gather those operands that it needs whole."""
        if self._replicated and is_uniform(eqn):
            return [Uniform(whole(operands[0]), eqn.params["shape"])]
        if self._replicated and is_elementwise(eqn):
            has_shard = any(map(is_shard, operands))
            results = elementwise(eqn, operands) if has_shard else None
            return _of_whole(eqn, operands) if results is None else results
        operands = [x.whole if isinstance(x, Uniform) else x for x in operands]
        inside = self._inside.get(id(eqn), {})
        if not inside and not any(map(is_shard, operands)):
            return evaluate_eqn(eqn, operands)
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, operands, inside)
        if name == "while" and is_of_towers(eqn):
            return self._loop_of_towers(eqn, operands)
        inner = _inner(eqn) if name in _ENTERED else None
        if inner is not None:
            return self._enter(eqn, inner, operands, inside)
        results = on_each_shard(eqn, operands)
        return _of_whole(eqn, operands) if results is None else results

    def _enter(
        self, eqn: JaxprEqn, inner: Any, operands: list[Any], inside: dict[int, int]
    ) -> list[Any]:
        """Run the program that an equation calls, and return the call's results."""
        body = _Body(inner, replicated=self._replicated, sums=inside)
        params = eqn.params
        if eqn.primitive.name not in _CHECKPOINT:
            return body.run(operands)
        if params.get("differentiated"):
            # Without a barrier XLA would store what the forward pass has gathered.
            barred = with_barrier(operands) if params["prevent_cse"] else operands
            return body.run(barred)

        def run(*operands: Any) -> list[Any]:
            return [whole(x) for x in body.run(operands)]

        policy: Any = _refusing(params["policy"])
        again = jax.checkpoint(run, policy=policy, prevent_cse=params["prevent_cse"])
        return again(*[x.fresh() if is_shard(x) else x for x in operands])

    def _scan(
        self, eqn: JaxprEqn, operands: list[Any], inside: dict[int, int]
    ) -> list[Any]:
        """Run a scan whose steps each gather their own slice of the scanned arrays.

        Only scanned arrays (``xs``) that are in shards are gathered.
        """
        params = eqn.params
        num_consts, num_carried = loop_sizes(eqn)
        first_xs = num_consts + num_carried
        consts = operands[:num_consts]
        if not is_of_towers(eqn):
            # These are gathered once here, and not in each step.
            consts = [whole(x) for x in consts]
        start = [whole(x) for x in operands[num_consts:first_xs]]
        # An operand that is split along the scanned dim, dim 0, is gathered here. Other
        # sharded operands are gathered in the scan, one row in each step.
        xs = [
            whole(x) if is_shard(x) and x.dim == 0 else x for x in operands[first_xs:]
        ]
        sharded = [i for i, x in enumerate(xs) if is_shard(x)]
        # In the scan's body a result lacks dim 0, which the scan stacks.
        sums = {i: dim - 1 for i, dim in inside.items()}
        body = _Body(params["jaxpr"], replicated=self._replicated, sums=sums)

        def run(
            shards: list[Any], consts: list[Any], carry: list[Any], others: list[Any]
        ) -> list[Any]:
            rows = list(others)
            for i, shard in zip(sharded, shards, strict=True):
                rows[i] = shard.row()
            held = [x.fresh() if is_shard(x) else x for x in consts]
            out = body.run([*held, *carry, *rows])
            return [x.data if i in inside else whole(x) for i, x in enumerate(out)]

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            shards = [rows[i] for i in sharded]
            others = [None if i in sharded else x for i, x in enumerate(rows)]
            if any(x.is_trained for x in shards):
                new = gathering_again(run, shards, consts, carry, others)
            else:
                new = run(shards, consts, carry, others)
            return new[:num_carried], new[num_carried:]

        options = {x: params[x] for x in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, start, xs, **options)
        results = enumerate([*carry, *ys])
        return [Shard(x, inside[i]) if i in inside else x for i, x in results]

    def _loop_of_towers(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Run a loop over towers; each of its steps gathers the sharded constants anew.

        So a step's gathered values are freed when it ends.
        """
        params = eqn.params
        at = eqn.params["cond_nconsts"]
        until = at + params["body_nconsts"]
        of_cond = [whole(x) for x in operands[:at]]
        goes_on = _Body(params["cond_jaxpr"], replicated=self._replicated)
        body = _Body(params["body_jaxpr"], replicated=self._replicated)

        def step(carry: list[Any]) -> list[Any]:
            held = [x.fresh() if is_shard(x) else x for x in operands[at:until]]
            return [whole(x) for x in body.run([*held, *carry])]

        first = [whole(x) for x in operands[until:]]

        def again(carry: Any) -> Any:
            return goes_on.run([*of_cond, *carry])[0]

        return lax.while_loop(again, step, first)


def _of_whole(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation on whole values; operands in shards are gathered first."""
    return evaluate_eqn(eqn, [whole(x) for x in operands])


def _can_scatter(eqn: JaxprEqn, number: int, dim: int) -> bool:
    """Decide whether an equation's inner program can scatter along ``dim``.

    A scan can do so if it stacks the result over its steps, and ``dim`` is not the
    stacked dim.
    """
    if eqn.primitive.name == "scan":
        return number >= loop_sizes(eqn)[1] and dim > 0
    is_run = eqn.primitive.name not in _CHECKPOINT or eqn.params.get("differentiated")
    is_entered = eqn.primitive.name in _ENTERED and _inner(eqn) is not None
    return is_entered and bool(is_run)


def _refusing(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Change a policy of `jax.checkpoint` so that no gathered value is saved.

    Other values are saved as ``policy`` says.
    """
    if policy is None:
        return None

    def saves(primitive: Any, *args: Any, **params: Any) -> Any:
        is_gather = primitive.name == "all_gather"
        return False if is_gather else policy(primitive, *args, **params)

    return saves


def is_of_towers(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a loop over a device's towers or micro-batches."""
    return tags.IN_TURN in scopes_of((eqn, None))


def _inner(eqn: JaxprEqn) -> Any:
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
