"""How often a value is counted: which sums of equals are right, and which T times."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from test_analysis import AXIS, study

from towerjax.collectives.lookups import vjp
from towerjax.proof.analysis import analyse

T = 4


def psum(value):
    return lax.psum(value, AXIS)


def ref_scanned(value):
    ref = jax.new_ref(jnp.zeros(4))

    def body(_, i):
        ref[...] += value()
        return None, None

    lax.scan(body, None, jnp.arange(2))
    return ref[...]


def derivative(w, x):
    """That of a total over all towers, which a tower takes by itself."""
    return jax.grad(jax.jit(lambda w: psum(jnp.sum(w * x[0])) ** 2))(w)


def derivative_of_a_step(w, x):
    total, pull_back, _ = vjp(lambda w: (psum(jnp.sum(w * x[0])) ** 2, None), w)
    return psum(pull_back(jnp.ones_like(total)))


def divided_in_a_kernel(w, x):
    def kernel(w_ref, out_ref):
        out_ref[...] = w_ref[...] / T

    return pl.pallas_call(kernel, out_shape=w)(psum(w))


HALVES = [[0, 1], [2, 3]]
RIGHT = {
    "divided in a kernel": divided_in_a_kernel,
    "mean": lambda w, x: psum(w) / T,
    "product": lambda w, x: psum(w) * 0.25,
    "share": lambda w, x: psum(w / T),
    "batch of 12": lambda w, x: psum(w) / 12,
    "leave one out": lambda w, x: (psum(w) - w) / (T - 1),
    "ratio": lambda w, x: psum(w) / psum(w.sum()),
    "over a total of others": lambda w, x: psum(w) / psum(x.sum()),
    "inverse": lambda w, x: psum(w) * (1.0 / psum(x.sum())),
    "to a power": lambda w, x: psum(w) ** 2 / psum(w.sum()) ** 2,
    "root": lambda w, x: jnp.sqrt(psum(w)) / jnp.sqrt(psum(w.sum())),
    "normed": lambda w, x: w * lax.rsqrt(psum(w * w)),
    "of constants": lambda w, x: psum(jnp.ones(3)) + psum(2.0),
    "sign": lambda w, x: jnp.sign(psum(w)),
    "index": lambda w, x: jnp.argmax(psum(w)),
    "comparison": lambda w, x: psum(w) > 0,
    "finite": lambda w, x: jnp.isfinite(psum(w)),
    "chosen share": lambda w, x: psum(jnp.where(w > 0, w / T, 0.0)),
    "constant beside": lambda w, x: psum(w / T + 1e-6),
    "indexed share": lambda w, x: psum((w / T)[jnp.argmax(w)]),
    "mean of others twice": lambda w, x: lax.pmean(psum(x) / T, AXIS),
    "mean of a sum of others": lambda w, x: lax.pmean(psum(x), AXIS),
    "sum of others, and a mean": lambda w, x: psum(x.sum()) * psum(w) / T,
    "mean of others and of a sum": lambda w, x: (psum(x.sum()) * w + psum(w)) / T,
    "root of a sum": lambda w, x: psum(jnp.sqrt(psum(x.sum())) / T) / T**0.5,
    "share of a mean of others": lambda w, x: psum(psum(x) / T / T),
    "derivative by a step": derivative_of_a_step,
    "derivative of a share": lambda w, x: jax.grad(lambda x: psum(x.sum() / T))(x),
    "derivative of what differs": lambda w, x: psum(jax.grad(lambda w: w @ x[0])(w)),
    "share of a derivative": lambda w, x: psum(derivative(w, x) / T),
    "mean of derivatives": lambda w, x: lax.pmean(derivative(w, x), AXIS),
    "other extremes": lambda w, x: lax.pmax(w, AXIS) + lax.pmin(w, AXIS),
    "halves are no whole": lambda w, x: lax.psum(w, AXIS, axis_index_groups=HALVES),
}

WRONG = {
    "chosen constant": lambda w, x: psum(lax.cond(w[0] > 0, lambda: 1.0, lambda: 2.0)),
    "sum": lambda w, x: psum(w),
    "multiple": lambda w, x: 3.0 * psum(w) + 1.0,
    "function": lambda w, x: jnp.exp(psum(w)),
    "part": lambda w, x: psum(w)[0],
    "norm": lambda w, x: jnp.sqrt(psum(w * w)),
    "derivative": derivative,
    "derivative by rows": lambda w, x: jax.grad(lambda x: psum((x @ w).sum()))(x),
    "sum of derivatives": lambda w, x: psum(derivative(w, x)),
    "sum of a mean": lambda w, x: psum(psum(x) / T),
    "sum of a share of others": lambda w, x: psum(psum(x) / psum(x.sum())),
    "sum of a sum": lambda w, x: psum(psum(x)),
    "chosen": lambda w, x: jnp.where(w > 0, psum(w), w),
    "branch": lambda w, x: lax.cond(w[0] > 0, lambda: psum(w), lambda: w),
    "mean of a sum": lambda w, x: lax.pmean(3.5 * psum(w), AXIS),
    "growing": lambda w, x: lax.fori_loop(0, 9, lambda _, c: psum(c), w),
    "matrix": lambda w, x: jnp.outer(psum(w), w),
    "added to others": lambda w, x: lax.pmean(x + psum(w)[None], AXIS),
    "taken from others": lambda w, x: lax.pmean(x[0] - 0.3 * psum(3.0 * w), AXIS),
    "product with others": lambda w, x: psum(x[0] * psum(w)),
}


MIXED = {"added to others", "taken from others"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_sum_that_a_division_follows_is_right(name):
    assert study(RIGHT[name], T).repeats == ()


@pytest.mark.parametrize("name", WRONG)
def test_a_sum_of_equals_is_too_much(name):
    repeats = study(WRONG[name], T).repeats
    assert [x.outputs for x in repeats] == [() if name in MIXED else (0,)]
    assert "test_proof_scale.py" in repeats[0].line
    # On one tower once is enough.
    assert study(WRONG[name], 1).repeats == ()


# Which powers of T a factor may stand for: where the program is known for one T alone,
# and where it is known for another T, too.
FACTORS = {
    "T": (lambda t: float(t), (0, 1), (0, 1)),
    "1 / T": (lambda t: 1 / t, (-1, 0), (-1, 0)),
    "no T": (lambda t: 1.7, (0,), (0,)),
    "an array of T": (lambda t: np.full(2, t, np.float32), (-1, 0, 1), (-1, 0, 1)),
    "an array": (lambda t: np.full(2, 1.7, np.float32), (-1, 0, 1), (0,)),
}


class Drawn:
    """A program of positive numbers, of operations drawn by a seed.

    ``psum`` adds over towers what is the same on all; ``factor`` gives a factor by its
    name.
    """

    def __init__(self, seed, steps=9):
        rng = np.random.default_rng(seed)
        self.steps = [rng.integers(0, 99, size=3) for _ in range(steps)]
        self.products = bool(seed % 2)  # alone, so that powers are exact

    def __call__(self, values, psum, factor, numpy=np):
        values, names = [*values], [*FACTORS]
        for kind, i, j in self.steps:
            x, y = values[-1 - i % min(len(values), 4)], values[j % len(values)]
            name = names[j % len(names)]
            new = [
                lambda x=x: psum(x),
                lambda x=x: psum(x),
                lambda x=x, y=y: x * y,
                lambda x=x, y=y: x / y,
                lambda x=x, name=name: x / factor(name),
                lambda x=x, name=name: factor(name) * x,
                lambda x=x: numpy.sqrt(x),
                lambda x=x: numpy.square(x),
                lambda x=x, y=y: x / numpy.sqrt(y),
                lambda x=x: x**-2,
                lambda x=x, y=y: x + y,
                lambda x=x, y=y: 3 * x + y,
                lambda x=x: numpy.exp(-1 / x),
            ]
            values.append(new[kind % (len(new) - 3 * self.products)]())
        return values

    def growth(self, used, column):
        """Of each value, in each reading of its factors, that on 6 towers by on 3."""
        found = []
        for powers in itertools.product(*[FACTORS[name][column] for name in used]):
            pair = []
            for towers in (3.0, 6.0):
                given = iter([towers**power for power in powers])
                args = (lambda x: towers * x), (lambda _: next(given))  # noqa: B023
                pair.append(np.asarray(self([0.7, 1.3], *args)))
            found.append(pair[1] / pair[0])
        return np.stack(found)


@pytest.mark.parametrize("is_known", [False, True])
def test_drawn_programs_are_refused_where_they_are_wrong_in_each_reading(is_known):
    counts = collections.Counter()
    for seed in range(60):
        program, used, towers = Drawn(seed), [], 2 + 3 * (seed % 4 < 2)

        def tower(t, w):
            def factor(name):
                used.append(name)  # noqa: B023
                return FACTORS[name][0](t)

            return program([w, 1.3 * w], psum, factor, jnp)  # noqa: B023

        def traced(t):
            of_t = functools.partial(tower, t)  # noqa: B023
            return jax.make_jaxpr(of_t, axis_env=[(AXIS, t)])(np.ones(2, np.float32))

        jaxpr, factors = traced(towers), [*used]
        more = {"of_more_towers": lambda: traced(2 * towers)} if is_known else {}  # noqa: B023
        repeats = analyse(jaxpr, [None], AXIS, towers, **more).repeats
        assert analyse(traced(1), [None], AXIS, 1).repeats == ()
        refused = {i for x in repeats for i in x.outputs}
        growth = program.growth(factors, 1 + is_known).T
        has_shrunk = np.logical_or.accumulate((growth < 1 - 1e-9).any(axis=1))
        for i, ratios in enumerate(growth):
            if not (np.abs(np.log2(ratios)) < 7).all():
                break  # a higher power than is followed
            is_wrong = abs(ratios - 1) > 1e-9
            if program.products:
                is_wrong = ratios > 1 + 1e-9
            assert i not in refused or is_wrong.all(), (seed, i, ratios)
            # Of what shrinks, the inverse is a multiple of T that no sum has made.
            if program.products and not has_shrunk[i]:
                assert (i in refused) == is_wrong.all(), (seed, i, ratios)
            counts[program.products, i in refused] += 1
    assert min(counts.values()) > 20 and len(counts) == 4, counts


def test_a_sum_is_named_by_its_line_and_outputs():
    def tower(w, x):
        total = psum_of(w)
        return w, total * 2.0, x, jnp.tanh(total)

    def psum_of(w):
        return lax.psum(w, AXIS)

    [repeat] = study(tower, T).repeats
    assert repeat.outputs == (1, 3) and repeat.line.endswith("(psum_of)")


def test_a_loop_over_memory_is_walked():
    def tower(w, x):
        same = ref_scanned(lambda: w)
        by_id = ref_scanned(lambda: w * lax.axis_index(AXIS))
        return same, by_id, ref_scanned(lambda: lax.pmean(x[0], AXIS))

    analysis = study(tower, T)
    same, by_id, _ = analysis.outputs
    assert same is None and by_id.source == "tower.id"
    assert [c.primitive for c in analysis.collectives] == ["psum"]
