"""Run a program on parts of its parameters: gathered where it uses them.

The program is that of one device, traced with whole parameters and proved. Evaluated
here, a parameter stays in its part, a shard, until an equation really needs it: a cast
to fewer bits is done before it is sent, a scan gathers one layer at a time, what is
computed again is gathered again. A sum over the devices that is to leave in parts is
scattered where its addends are made. So no device holds all parameters at once, nor a
whole gradient, and no model is written for it.

The idea is ZeRO-3 of Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", https://arxiv.org/abs/1910.02054, and FSDP of Zhao
et al. (2023), https://arxiv.org/abs/2304.11277; that a traced program is rewritten, in
place of a model that is wrapped, is ours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from towerjax.mesh.placement import DEVICE_AXIS
from towerjax.proof import tags
from towerjax.proof.equation import loop_sizes, named_axes, open_jaxpr, scopes_of
from towerjax.proof.interpreter import Interpreter, eqn_context, evaluate_eqn
from towerjax.towers.lowering.parts import (
    Shard,
    Shards,
    Uniform,
    as_shards,
    elementwise,
    is_elementwise,
    is_uniform,
    on_parts,
    part_on_device,
    scatter,
    take_part,
    whole,
    with_barrier,
)
from towerjax.towers.lowering.sums import SumSites, are_zeros

_COPIES = ("name", "copy", "optimization_barrier")
_ENTERED = ("jit", "checkpoint", "remat2", "closed_call", "core_call", "custom_lin")


def on_shards(program: Any, shards: Shards, *leaves: jax.Array) -> list[jax.Array]:
    """The results of a device's program, of which ``leaves`` are the arguments.

    Some arguments are parts, and some results leave as parts. Inside a device function.
    """
    args = as_shards(leaves, shards.given, exact=shards.exact)
    pairs = zip(args, shards.taken, strict=True)
    args = [x if at is None else take_part(x, at) for x, at in pairs]
    body = _Body(open_jaxpr(program), shards, {}, dict(enumerate(shards.wanted)))
    out = body.run(args, program.consts)
    return [
        whole(x) if at is None else part_on_device(x, at)
        for x, at in zip(out, shards.wanted, strict=True)
    ]


class _Body:
    """A jaxpr, and where its sums over devices are scattered.

    ``sums``: of its results those that are addends of a sum over devices, and are to
    leave as parts of this sum, with their dims. ``wanted``: those that are the same on
    all devices and are to leave as parts. ``carried``: arguments that are parts of such
    a sum so far.
    """

    def __init__(
        self,
        body: Jaxpr,
        how: Shards,
        sums: dict[int, int],
        wanted: dict[int, int | None] | None = None,
        carried: dict[int, int] | None = None,
    ) -> None:
        self.body, self._how = body, how
        # Addends, with the dims along which they are scattered once they are made.
        self._sites = SumSites(body, passes=_is_copy, opens=self._may_scatter_inside)
        self._sites.sums |= {body.invars[i]: dim for i, dim in (carried or {}).items()}
        self._summed: dict[Any, int] = {}  # results of an all-reduce
        # What an update returns, one device stores and reads again, where it is part of
        # another value. Computed anew of whole values, it would be fused otherwise.
        outs = body.outvars if how.alike and wanted is not None else ()
        self._stored = {x for x in outs if isinstance(x, Var)}
        self._results = sums
        for number, dim in sums.items():
            self._sites.follow(body.outvars[number], dim)
        for number, at in (wanted or {}).items():
            self._want(body.outvars[number], at)

    def _want(self, value: Any, dim: int | None) -> None:
        """Scatter a result that is a sum over all devices."""
        if dim is None or (eqn := self._sites.maker(value)) is None:
            return
        if eqn.primitive.name in ("name", "copy"):
            self._want(eqn.invars[0], dim)
        elif _is_all_reduce(eqn):
            self._summed[value] = dim
            self._sites.follow(eqn.invars[eqn.outvars.index(value)], dim)

    def _may_scatter_inside(self, eqn: JaxprEqn, number: int, dim: int) -> bool:
        """Whether an equation's inner program can scatter this result."""
        if eqn.primitive.name == "scan":
            is_carry = number < loop_sizes(eqn)[1]
            return number in self._sites.carried(eqn) if is_carry else dim > 0
        return eqn.primitive.name in _ENTERED and _inner(eqn) is not None

    def run(self, args: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        """The results, some of them `Shard`."""
        body, sites = self.body, self._sites
        walk = Interpreter(body, consts, args)

        def part(var: Any, dim: int) -> Shard:
            x = walk.read(var)
            return x if var in sites.sums and isinstance(x, Shard) else scatter(x, dim)

        for eqn in body.eqns:
            operands = [walk.read(x) for x in eqn.invars]
            with eqn_context(eqn):
                if _is_all_reduce(eqn) and self._summed.keys() & {*eqn.outvars}:
                    out = self._all_reduce(eqn, operands, part)
                elif eqn.outvars[:1] and eqn.outvars[0] in sites.added:
                    dim = sites.sums[eqn.outvars[0]]
                    parts = [part(x, dim).part for x in eqn.invars]
                    out = [Shard(evaluate_eqn(eqn, parts)[0], dim)]
                else:
                    out = self._evaluate(eqn, operands)
                inside = sites.opened.get(id(eqn), {})
                for i, (var, x) in enumerate(zip(eqn.outvars, out, strict=True)):
                    dim = sites.sums.get(var)
                    is_part = var in sites.added or i in inside
                    if var in self._stored and isinstance(x, Shard):
                        x = x.of(x.part)
                    walk.values[var] = x if dim is None or is_part else scatter(x, dim)
        results = [walk.read(x) for x in body.outvars]
        for number, dim in self._results.items():
            results[number] = part(body.outvars[number], dim)
        return results

    def _all_reduce(
        self, eqn: JaxprEqn, operands: list[Any], part: Callable[[Any, int], Shard]
    ) -> list[Any]:
        """Scattered results, and the others in one all-reduce."""
        out: list[Any] = [None] * len(operands)
        rest = []
        for i, (var, x) in enumerate(zip(eqn.outvars, eqn.invars, strict=True)):
            if (dim := self._summed.get(var)) is None:
                rest.append(i)
            else:
                out[i] = part(x, dim)
        if rest:
            sums = evaluate_eqn(eqn, [whole(operands[i]) for i in rest])
            for i, x in zip(rest, sums, strict=True):
                out[i] = x
        return out

    def _evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """An equation that gathers what it needs, just before it runs."""
        sums = self._sites.opened.get(id(eqn), {})
        has_shards = any(isinstance(x, Shard) for x in operands)
        by_elements = self._how.alike and is_elementwise(eqn)
        if self._how.alike and is_uniform(eqn):
            return [Uniform(whole(operands[0]), eqn.params["shape"])]
        if not by_elements:
            operands = [x.whole if isinstance(x, Uniform) else x for x in operands]
        if not (has_shards or sums):
            return evaluate_eqn(eqn, [whole(x) for x in operands])
        if eqn.primitive.name == "scan":
            return self._scan(eqn, operands, sums)
        if eqn.primitive.name == "while" and is_of_towers(eqn):
            return _loop_of_towers(eqn, self._how, operands)
        if eqn.primitive.name in _ENTERED and (inner := _inner(eqn)) is not None:
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                # Else XLA would keep what the forward pass has gathered.
                operands = with_barrier(operands)
            body = _Body(open_jaxpr(inner), self._how, sums)
            return body.run(operands, getattr(inner, "consts", ()))
        kept = (elementwise if by_elements else on_parts)(eqn, operands)
        return evaluate_eqn(eqn, [whole(x) for x in operands]) if kept is None else kept

    def _scan(
        self, eqn: JaxprEqn, operands: list[Any], sums: dict[int, int]
    ) -> list[Any]:
        """A scan that gathers the rows of its ``xs`` in each step."""
        params, (num_consts, carries) = eqn.params, loop_sizes(eqn)
        consts, rest = operands[:num_consts], operands[num_consts:]
        first, xs = rest[:carries], rest[carries:]
        if not is_of_towers(eqn):
            consts = [whole(x) for x in consts]  # else each step would gather them
        xs = [whole(x) if isinstance(x, Shard) and x.dim == 0 else x for x in xs]
        at = [x.dim - 1 if isinstance(x, Shard) else None for x in xs]
        inner = {i: dim - (i >= carries) for i, dim in sums.items()}
        carried = {num_consts + i: dim for i, dim in sums.items() if i < carries}
        program = params["jaxpr"]
        body = _Body(open_jaxpr(program), self._how, inner, carried=carried)
        inits = [
            self._first_part(eqn.invars[num_consts + i], x, sums[i])
            if i in sums
            else whole(x)
            for i, x in enumerate(first)
        ]
        dims = [sums.get(i) for i in range(carries)] + at

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            given = as_shards([*carry, *rows], dims, exact=self._how.exact)
            held = [x.fresh() if isinstance(x, Shard) else x for x in consts]
            out = body.run([*held, *given], getattr(program, "consts", ()))
            new = [x.part if i in inner else whole(x) for i, x in enumerate(out)]
            return new[:carries], new[carries:]

        carry, ys = lax.scan(
            step,
            inits,
            [x.part if isinstance(x, Shard) else x for x in xs],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        out = [*carry, *ys]
        return [Shard(x, sums[i]) if i in sums else x for i, x in enumerate(out)]

    def _first_part(self, var: Any, x: Any, dim: int) -> jax.Array:
        """This device's part of what a scan begins to add to."""
        if not are_zeros(self._sites.maker(var)):
            return scatter(x, dim).part
        shape = list(x.shape)
        shape[dim] //= lax.axis_size(DEVICE_AXIS)
        return jnp.zeros(shape, x.dtype)


def _loop_of_towers(eqn: JaxprEqn, how: Shards, operands: list[Any]) -> list[Any]:
    """A loop that gathers its constants in each round."""
    params, at = eqn.params, eqn.params["cond_nconsts"]
    until = at + params["body_nconsts"]
    of_cond = [whole(x) for x in operands[:at]]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    program = _Body(open_jaxpr(body), how, {})

    def again(carry: list[Any]) -> Any:
        consts = getattr(cond, "consts", ())
        return jax.core.eval_jaxpr(open_jaxpr(cond), consts, *of_cond, *carry)[0]

    def step(carry: list[Any]) -> list[Any]:
        held = [x.fresh() if isinstance(x, Shard) else x for x in operands[at:until]]
        out = program.run([*held, *carry], getattr(body, "consts", ()))
        return [whole(x) for x in out]

    return lax.while_loop(again, step, [whole(x) for x in operands[until:]])


def _is_copy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _COPIES and len(eqn.invars) == 1


def _is_all_reduce(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("psum", "psum_invariant"):
        return False
    groups = eqn.params.get("axis_index_groups")
    return named_axes(eqn) == (DEVICE_AXIS,) and groups is None


def is_of_towers(eqn: JaxprEqn) -> bool:
    """Whether a loop runs a device's towers, or a tower's micro-batches, in turn."""
    return tags.IN_TURN in scopes_of((eqn, None))


def _inner(eqn: JaxprEqn) -> Any:
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
