"""Inner programs: with the operands they are said to have, they give the results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from towerjax.jaxprs.flow import forwarded_inputs, inner_programs
from towerjax.jaxprs.interpreter import Interpreter

X = np.float32([[2.0, 1.0], [0.5, 3.0]])
Y = np.float32([5.0, 7.0])


@jax.custom_jvp
def with_rule(x, y):
    return x @ y


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[1]))


def one_trip_of_scan(x, y):
    def trip(carry, row):
        return carry * row.sum() + x.sum(), carry + row

    return lax.scan(trip, y, x[:1])


def one_trip_of_while(x, y):
    def body(carry):
        number, value = carry
        return number + 1, value @ x

    return lax.while_loop(lambda carry: carry[0] < y[0] - 4, body, (0, y))


def solved(x, y):
    inverse = jnp.linalg.inv(x)  # an operand of the solver alone

    def solve(_, right):
        return inverse @ right

    def solve_transposed(_, right):
        return inverse.T @ right

    return lax.custom_linear_solve(lambda v: x @ v, y, solve, solve_transposed)


# JAX's name for a checkpoint differs by version, and with JAX_REMAT3.
CHECKPOINTS = ("checkpoint", "remat2", "RematTraced")
PROGRAMS = {
    "jit": jax.jit(lambda x, y: (y @ x, x.sum())),
    "checkpoint": jax.checkpoint(lambda x, y: jnp.sin(y) @ x),
    "custom_jvp_call": with_rule,
    "cond": lambda x, y: lax.cond(y[0] > 4, lambda a, b: b @ a, lambda a, b: b, x, y),
    "scan": one_trip_of_scan,
    "while": one_trip_of_while,
    "custom_linear_solve": solved,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_inner_program_gives_the_equations_results(name):
    traced = jax.make_jaxpr(PROGRAMS[name])(X, Y)
    walk = Interpreter(traced.jaxpr, traced.consts, [X, Y])
    names = CHECKPOINTS if name == "checkpoint" else (name,)
    for eqn in traced.jaxpr.eqns:
        walk.evaluate(eqn)
        if not {eqn.primitive.name, type(eqn.params.get("_prim")).__name__}.isdisjoint(
            names
        ):
            break
    else:
        raise AssertionError(f"no equation of {name} in {traced}")
    ran = inner_programs(eqn)[-1 if name == "while" else name == "cond"]
    operands = [walk.read(x) for x in ran.operands]
    if name == "scan":  # the trip's rows
        operands = [
            value[0] if jnp.shape(value) != var.aval.shape else value
            for value, var in zip(operands, ran.jaxpr.invars, strict=True)
        ]
    consts = getattr(eqn.params.get("jaxpr"), "consts", ())
    found = jax.core.eval_jaxpr(ran.jaxpr, consts, *operands)
    for value, var in zip(found, ran.results, strict=True):
        expected = walk.read(var)
        np.testing.assert_array_equal(jnp.reshape(value, expected.shape), expected)


def test_a_loop_carries_its_results():
    for fn, number in ((one_trip_of_scan, 0), (one_trip_of_while, -1)):
        eqn = jax.make_jaxpr(fn)(X, Y).jaxpr.eqns[-1]
        inner = inner_programs(eqn)[number]
        carried = [x for x in inner.carried if x is not None]
        names = list(inner.results[: len(carried)])
        assert carried == names and carried


def test_inputs_of_a_reducer_are_no_operands():
    program = jax.make_jaxpr(
        lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0, 1))
    )(X)
    [inner] = inner_programs(program.jaxpr.eqns[-1])
    assert set(inner.operands) == set(inner.results) == {None}


def test_only_what_no_trip_changes_is_forwarded():
    def fn(x, y):
        _, rows = lax.scan(lambda carry, row: (carry + 1, (carry, row)), y, x)
        return *rows, jax.jit(lambda a, b: (b, a + 1))(x, y)

    program = jax.make_jaxpr(fn)(X, Y).jaxpr
    assert forwarded_inputs(program, ["x", "y"]) == [None, "x", "y", None]
