"""A program that is written with another's equations computes what it did before.

It is, because values of one number have the same elements, in order.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from towerjax.jaxprs.interpreter import evaluate_eqn
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.walk.aligned import aligned
from towerjax.prover.equality.walk.numbered import Numbered

SIZES = Sizes((1, 4), (4, 1))
AT = np.array([[0, 2, 1], [1, 1, 0], [2, 0, 0], [0, 1, 2]], np.int32)

# Functions of rows [n, 3, 3], indices [n, 3] and a matrix [3, 3].
SAME = {
    "a product of matrices": lambda x, at, w: x @ x,
    "a product with one more": lambda x, at, w: jnp.matmul(w[None], x),
    "with a transposed matrix": lambda x, at, w: x @ jnp.swapaxes(x, 1, 2),
    "of vectors": lambda x, at, w: x[:, :1] @ x[:, :, :1],
    "a lookup": lambda x, at, w: jnp.take_along_axis(x, at[..., None], 1),
    "another lookup": lambda x, at, w: jnp.take_along_axis(x, at[:, None], 2),
    "rows of a table": lambda x, at, w: w[at],
    "repeated": lambda x, at, w: x + jnp.broadcast_to(w, x.shape),
    "repeated from one": lambda x, at, w: x + jnp.broadcast_to(w[None], x.shape),
    "a number": lambda x, at, w: x * len(x),
    "a mean": lambda x, at, w: x - x.mean(0, keepdims=True),
    "divided": lambda x, at, w: x / 4 if len(x) == 4 else x,
    "divided twice": lambda x, at, w: x / 4 / 4 if len(x) == 4 else x,
    "in a call": lambda x, at, w: jax.jit(jnp.matmul)(x, x) @ x,
    "in a loop": lambda x, at, w: lax.fori_loop(0, 2, lambda _, y: y @ x, x),
    "a determinant": lambda x, at, w: jnp.linalg.slogdet(x @ x)[1],
    "in turn": lambda x, at, w: jnp.swapaxes(x, 0, 1).reshape(len(x), 3, 3),
}


def read_twice(x, at, w):
    ref = jax.new_ref(w)
    reads = [ref[...], ref[...]]
    ref[...] = w + 1
    return x @ x + reads[0] - 2 * reads[1]


def read_again(x, at, w):
    ref = jax.new_ref(w)
    before = ref[...]
    ref[...] = w + 1
    return x @ x + before - 2 * ref[...]


MORE = {
    "read twice": read_twice,
    "read again": read_again,
    "sorted": lambda x, at, w: lax.sort(x @ x, dimension=1),
    "sorted along another dim": lambda x, at, w: lax.sort(x @ x, dimension=2),
    "an element of each": lambda x, at, w: jnp.take_along_axis(x[0], at[:1].T, 1),
    "the first": lambda x, at, w: x[0],
    "of the first": lambda x, at, w: x @ x[:1],
    "squeezed": lambda x, at, w: jnp.squeeze(x),
    "flat": lambda x, at, w: x.reshape(-1, 3) @ w,
    "transposed": lambda x, at, w: x.transpose(0, 2, 1),
    "transposed with more": lambda x, at, w: jnp.squeeze(x).T,
    "the other way": lambda x, at, w: jnp.swapaxes(x, 1, 2) @ x,
    "added": lambda x, at, w: (x + x) @ x,
}
ANY = SAME | MORE


@functools.cache
def traced(name, rows):
    shapes = [((rows, 3, 3), np.float32), ((rows, 3), np.int32), ((3, 3), np.float32)]
    given = [jax.ShapeDtypeStruct(*x) for x in shapes]
    with jax.numpy_rank_promotion("allow"):
        return jax.make_jaxpr(ANY[name])(*given)


def inputs(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3, 3)).astype(np.float32)
    return x, AT[:rows], rng.normal(size=(3, 3)).astype(np.float32)


def run(program, args):
    """Run a list of equations, one after another."""
    values = dict(zip(program.inputs, args, strict=True))
    for eqn in program.eqns:
        ins = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        for x, value in zip(eqn.outvars, evaluate_eqn(eqn, ins), strict=True):
            assert value.shape == x.aval.shape and value.dtype == x.aval.dtype
            values[x] = value
    return [x.val if isinstance(x, Literal) else values[x] for x in program.results]


def written(several, single):
    """Align a function of four rows with one of one row; None if that fails."""
    programs = traced(several, 4).jaxpr, traced(single, 1).jaxpr
    try:
        return aligned(*programs, SIZES)
    except ProgramsDifferError:
        return None


def check(several, single, pair):
    """Both programs have pairs of equations, and compute what the functions do."""
    for name, rows, program in zip((several, single), (4, 1), pair, strict=True):
        args = inputs(rows)
        [found] = run(program, args)
        with jax.numpy_rank_promotion("allow"):
            wanted = ANY[name](*args)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    names = [[x.primitive for x in program.eqns] for program in pair]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_function_of_one_row_pairs_with_itself(name):
    pair = written(name, name)
    assert pair is not None
    check(name, name, pair)


@pytest.mark.slow
@pytest.mark.parametrize("single", ANY)
@pytest.mark.parametrize("several", ANY)
def test_what_is_written_is_the_same_function(several, single):
    pair = written(several, single)
    if pair is not None:
        check(several, single, pair)


def test_what_is_read_again_is_not_read_twice():
    assert written("read again", "read twice") is None
    check("read again", "read again", written("read again", "read again"))


def test_an_equation_with_other_params_is_no_pair():
    assert written("sorted", "sorted along another dim") is None
    check("sorted", "sorted", written("sorted", "sorted"))


# Numbers of the values of random programs.

SHAPES = [(2,), (2, 2), (2, 3), (2, 2, 2)]
INDICES = [np.array([1, 7], np.int32), np.array([[0, 1], [1, 1]], np.int32)]


class Draw:
    """What a random program draws."""

    def __init__(self, seed, inputs):
        self.rng = np.random.default_rng(seed)
        self.pool = [x for x in inputs if x.dtype == np.float32]
        self.indices = [x for x in inputs if x.dtype == np.int32]
        self.adds_ones = False

    def below(self, number):
        return int(self.rng.integers(number))

    def of(self, choices):
        return choices[self.below(len(choices))]

    def value(self, rank=None):
        x = self.of([x for x in self.pool if rank in (None, x.ndim)])
        if self.adds_ones and rank is None:
            x = x.reshape([n for n in x.shape if n != 1])
            x = jnp.expand_dims(x, self.some(range(x.ndim)))
        return x

    def order(self, number):
        return [*map(int, self.rng.permutation(number))]

    def some(self, choices):
        return [x for x in choices if self.below(2)]


def reshaped(d):
    x = d.value()
    sizes = [*x.shape, *[1] * d.below(2)]
    dims = d.order(x.ndim) if d.below(2) else None
    return lax.reshape(x, [sizes[i] for i in d.order(len(sizes))], dims)


def squeezed(d):
    x = d.value()
    return lax.squeeze(x, d.some([i for i, n in enumerate(x.shape) if n == 1]))


def repeated(d):
    x = d.value()
    places = sorted(d.order(x.ndim + 1)[: x.ndim])
    shape = [d.of((1, 2)) for _ in range(x.ndim + 1)]
    for i, n in zip(places, x.shape, strict=True):
        shape[i] = n
    return lax.broadcast_in_dim(x, shape, places)


def transposed(d):
    x = d.value()
    return lax.transpose(x, d.order(x.ndim))


def reduced(d):
    x = d.value()
    return d.of((jnp.sum, jnp.max, jnp.prod))(x, axis=tuple(d.some(range(x.ndim))))


def divided(d):
    return d.value() / d.of((1.0, 2.0))


def by_element(d):
    return d.of((jnp.sin, jnp.negative, jnp.square))(d.value())


def of_two(d):
    x = d.value()
    y = d.value(x.ndim)
    return d.of((jnp.multiply, jnp.subtract, jnp.maximum))(x, y)


def product(d):
    x = d.value()
    y = d.value()
    left = d.order(x.ndim)
    right = d.order(y.ndim)
    pairs = [
        (i, k)
        for i, k in zip(left, right, strict=False)
        if x.shape[i] == y.shape[k] and d.below(3)
    ]
    added = d.some(pairs)
    apart = [both for both in pairs if both not in added]
    dims = [tuple(zip(*both, strict=True)) or ((), ()) for both in (added, apart)]
    return lax.dot_general(x, y, tuple(dims))


def looked_up(d):
    """Look up along one dim; another may be a batch, others are slices."""
    x = d.value()
    at = d.of(d.indices)
    along = d.below(x.ndim)
    rest = [i for i in range(x.ndim) if i != along]
    fitting = [
        (i, k) for i in rest for k in range(at.ndim) if x.shape[i] == at.shape[k]
    ]
    batched = [d.of(fitting)] if fitting and d.below(2) else []
    slices = [i for i in rest if i not in dict(batched)]
    places = sorted(d.order(at.ndim + len(slices))[: len(slices)])
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(places),
        collapsed_slice_dims=(along,),
        start_index_map=(along,),
        operand_batching_dims=tuple(i for i, _ in batched),
        start_indices_batching_dims=tuple(k for _, k in batched),
    )
    sizes = [d.of((1, n)) if i in slices else 1 for i, n in enumerate(x.shape)]
    mode = d.of(("clip", "fill"))
    return lax.gather(x, lax.expand_dims(at, [at.ndim]), dims, sizes, mode=mode)


OPERATIONS = (reshaped, squeezed, repeated, transposed, reduced, divided, by_element)
OPERATIONS += (of_two, product, looked_up)


def program_of(seed, operations=OPERATIONS, length=20, *, deep=True):
    """A random program, which returns all its values.

    If it is not ``deep``, operands are inputs, with dims of size 1 added or removed.
    """

    def program(*inputs):
        d = Draw(seed, inputs)
        d.adds_ones = not deep
        made = []
        while len(made) < length:
            try:
                x = d.of(operations)(d)
            except (TypeError, ValueError):
                continue  # the values do not fit together
            if x.ndim and x.ndim < 5:
                made.append(x)
                d.pool += [x] if deep else []
        return made

    return program


def values_by_number(program, inputs):
    """The elements of each value of a program, and the primitive, by its number."""
    with jax.disable_jit():  # the equations of all calls are the program's own
        jaxpr = jax.make_jaxpr(program)(*inputs).jaxpr
    numbered = Numbered(jaxpr.invars, jaxpr.eqns)

    def run(*inputs):
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            ins = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            values |= zip(eqn.outvars, evaluate_eqn(eqn, ins), strict=True)
        return [values[x] for eqn in jaxpr.eqns for x in eqn.outvars]

    made = [(eqn, x) for eqn in jaxpr.eqns for x in eqn.outvars]
    found = collections.defaultdict(list)
    for (eqn, x), value in zip(made, jax.jit(run)(*inputs), strict=True):
        found[numbered.number(x)].append((eqn.primitive.name, np.squeeze(value)))
    return found


def inputs_of(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES] + INDICES


def unlike(found):
    """The primitives whose values have one number, and other elements."""
    return {
        name
        for (_, value), *others in found.values()
        for name, other in others
        if other.shape != value.shape
        or other.dtype != value.dtype
        or not np.allclose(other, value, rtol=1e-5, atol=1e-6, equal_nan=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_values_of_one_number_have_the_same_elements(seed):
    found = values_by_number(program_of(seed), inputs_of(seed))
    assert not unlike(found)
    assert any(len(same) > 1 for same in found.values())


@pytest.mark.few_fast(2)
@pytest.mark.parametrize(
    ("operation", "seed"),
    [(x, 0) for x in OPERATIONS] + [(looked_up, 3), (looked_up, 4)],
)
def test_results_of_one_number_have_the_same_elements(operation, seed):
    program = program_of(seed, [operation], 30, deep=False)
    found = values_by_number(program, inputs_of(seed))
    assert not unlike(found)
    assert any(len(same) > 1 for same in found.values())
