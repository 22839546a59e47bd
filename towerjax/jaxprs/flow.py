"""Tell which values an equation, or a program, needs or passes on unchanged."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from towerjax.jaxprs.params import (
    is_hidden,
    loop_sizes,
    named_axes,
    open_jaxpr,
    sub_jaxprs,
    trace_hidden,
)
from towerjax.jaxprs.sites import eqns_inside


class InnerProgram(NamedTuple):
    """A program that runs when an equation runs, and the values that both share.

    Attributes:
      jaxpr: The program; its constants are ignored here.
      operands: For each input, the operand of the equation that it gets: all of it, a
        device's shard or a row. In a loop, this is so in the first trip. None if it
        gets no operand, as in a kernel or a reducer.
      carried: For each input, the equation's result that holds it after a loop's last
        trip; None if trips do not change it.
      results: For each output, the equation's result that it becomes; None if it
        becomes none.
    """

    jaxpr: Jaxpr
    operands: tuple[Any, ...]
    carried: tuple[Any, ...]
    results: tuple[Any, ...]


def inner_programs(eqn: JaxprEqn) -> list[InnerProgram]:
    """Find the programs that run when an equation runs, and the values both share."""
    programs = sub_jaxprs(eqn)
    name = eqn.primitive.name
    if name == "while":
        return _of_while(eqn)
    if name == "scan":
        consts, number = loop_sizes(eqn)
        return [_called(eqn, programs[0], eqn.invars, consts, number)]
    if name == "cond":
        return [_called(eqn, x, eqn.invars[1:]) for x in programs]
    if name == "custom_linear_solve":
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        consts = eqn.invars[first : first + lengths.solve]
        operands = [*consts, *eqn.invars[sum(lengths) :]]
        return [_called(eqn, programs[0], operands)]
    return [
        _called(eqn, x, eqn.invars) if _is_call(eqn, x) else _unknown(x)
        for x in programs
    ]


def _of_while(eqn: JaxprEqn) -> list[InnerProgram]:
    """Take the inner programs out of a `while`: its test and its body.

    The test's output is the predicate, which is no result of the equation.
    """
    tests = eqn.params["cond_nconsts"]
    bodies = eqn.params["body_nconsts"]
    carry = eqn.invars[tests + bodies :]
    number = len(carry)
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    body = open_jaxpr(eqn.params["body_jaxpr"])
    test_operands = [*eqn.invars[:tests], *carry]
    body_operands = [*eqn.invars[tests : tests + bodies], *carry]
    of_test = _called(eqn, test, test_operands, tests, number)
    of_body = _called(eqn, body, body_operands, bodies, number)
    return [of_test._replace(results=(None,)), of_body]


def _called(
    eqn: JaxprEqn,
    program: Jaxpr,
    operands: Sequence[Any],
    num_consts: int = 0,
    num_carried: int = 0,
) -> InnerProgram:
    """Describe an inner program whose inputs are ``operands``.

    Its first ``num_consts`` inputs are the same in each trip of a loop. The next
    ``num_carried`` are a loop's carry.
    """
    carried: list[Any] = [None] * len(operands)
    carried[num_consts : num_consts + num_carried] = eqn.outvars[:num_carried]
    return InnerProgram(program, tuple(operands), tuple(carried), tuple(eqn.outvars))


def _is_call(eqn: JaxprEqn, program: Jaxpr) -> bool:
    """Return whether an inner program's inputs and outputs are the equation's.

    In a `shard_map` they are the shards of the equation's operands and results.
    """
    same_inputs = len(eqn.invars) == len(program.invars)
    same_outputs = len(eqn.outvars) == len(program.outvars)
    if not (same_inputs and same_outputs):
        return False
    if eqn.primitive.name in _MAPS:
        return True
    outside = [*eqn.invars, *eqn.outvars]
    inside = [*program.invars, *program.outvars]
    pairs = zip(outside, inside, strict=True)
    return all([_shape(x) == _shape(y) for x, y in pairs])


_MAPS = ("shard_map", "xla_pmap")


def _shape(var: Any) -> Any:
    return getattr(var.aval, "shape", None)


def _unknown(program: Jaxpr) -> InnerProgram:
    """Describe an inner program that may share no value with its equation."""
    no_inputs = (None,) * len(program.invars)
    return InnerProgram(program, no_inputs, no_inputs, (None,) * len(program.outvars))


def needed_eqns(
    eqns: Sequence[Any],
    results: Iterable[Any],
    always: Iterable[Any] = (),
) -> list[Any]:
    """Keep, in order, the equations that are needed to compute ``results``.

    Equations in ``always`` run in any case, so they and the equations that they depend
    on are needed, too.
    """
    wanted = {x for x in results if not isinstance(x, Literal)}
    runs = set(map(id, always))
    needed = []
    for eqn in reversed(eqns):
        if id(eqn) in runs or not wanted.isdisjoint(eqn.outvars):
            needed.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return needed[::-1]


_CALLS = "jit eval_jaxpr checkpoint remat2 custom_jvp_call custom_vjp_call scan".split()


def forwarded_inputs(jaxpr: Jaxpr, entries: Sequence[Any]) -> list[Any]:
    """Find, for each output that is an unchanged input, the entry of that input.

    ``entries`` has an entry for each input. The result is None for an output that the
    program computes. Calls and scans are looked into.
    """
    forwarded = dict(zip(map(id, jaxpr.invars), entries, strict=True))
    for eqn in jaxpr.eqns:
        inner = inner_programs(eqn) if eqn.primitive.name in _CALLS else []
        hidden = trace_hidden(eqn, {}) if is_hidden(eqn) else None
        # Under the flag jax_remat3, the program of a `jax.checkpoint` is in such code.
        if hidden is not None:
            inner = [_called(eqn, open_jaxpr(hidden), eqn.invars)]
        for program in inner:
            # A carry of a loop may hold another value in the next trip, so this input
            # of the inner program does not stand for the operand.
            inside = [
                forwarded.get(id(x)) if after is None else None
                for x, after in zip(program.operands, program.carried, strict=True)
            ]
            outside = forwarded_inputs(program.jaxpr, inside)
            forwarded |= zip(map(id, program.results), outside, strict=True)
    return [forwarded.get(id(x)) for x in jaxpr.outvars]


def refs(eqn: JaxprEqn) -> list[Any]:
    """Pick the operands of an equation that are Refs, which it may write."""
    kinds = [type(var.aval).__name__ for var in eqn.invars]
    return list(filter(is_ref, eqn.invars)) if _REF in kinds else []


def is_ref(var: Any) -> bool:
    """Return whether a variable is a Ref, which a program may write."""
    return type(var.aval).__name__ == _REF


_REF = "AbstractRef"


def dependents(
    body: Jaxpr,
    inputs: Iterable[Any],
    axis: str,
    ends: Collection[Any] = (),
) -> set[Any]:
    """Collect the values that depend on ``inputs`` or on the mesh axis ``axis``.

    A result of a primitive in ``ends`` is treated as independent of its operands.
    """
    depend: set[Any] = set(inputs)
    for eqn in body.eqns:
        reads_one = any([isinstance(x, Var) and x in depend for x in eqn.invars])
        if reads_one or any([axis in named_axes(x) for x in (eqn, *eqns_inside(eqn))]):
            depend.update([] if eqn.primitive in ends else [*eqn.outvars, *refs(eqn)])
    return depend


# The module and name of the function that ends a program in `equinox.error_if`.
_RAISES = ("equinox._errors", "_error.<locals>.raises")


def always_raises(program: Any) -> bool:
    """Decide whether a program only ends with an error, as a branch of `error_if`.

    Its results then need what a callback returns that always raises.
    """
    jaxpr = open_jaxpr(program)
    return any(_raises(eqn) for eqn in needed_eqns(jaxpr.eqns, jaxpr.outvars))


def _raises(eqn: JaxprEqn) -> bool:
    function = getattr(eqn.params.get("callback"), "callback_func", None)
    names = [getattr(function, x, None) for x in ("__module__", "__qualname__")]
    return eqn.primitive.name == "pure_callback" and tuple(names) == _RAISES
