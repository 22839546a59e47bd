"""Random functions of a tower, what is proved of them, and what they give when run."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from one_tower_programs import (
    NUMBERS,
    TOWER_AXIS,
    equalities,
    has_own_rules,
    leaves_of,
    program_of,
    rows_of,
    run_on_towers,
)

import towerjax as tj

# features, steps of time
F = 3
STEPS = 2
EXAMPLES = 17  # of a padded batch
FULL = 48  # of one that is not, so that four towers may exchange theirs
ELEMENTWISE = {
    "tanh": jnp.tanh,
    "negative": jnp.negative,
    "abs": jnp.abs,
    "square": jnp.square,
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "reciprocal": lambda x: 1 / (1 + x**2),
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "double": lambda x: 2.0 * x,
    "one_more": lambda x: x + 1.0,
    "one_less": lambda x: 1.0 - x,
    "clipped": lambda x: jnp.clip(x, -0.5, 0.7),
    "positive": lambda x: (x > 0).astype(x.dtype),
    "to_integers": lambda x: (3 * x).astype(jnp.int32).astype(x.dtype),
    "stopped": lax.stop_gradient,
    "short": lambda x: x.astype(jnp.float32).astype(x.dtype),
    "complex": lambda x: jnp.real((x + 0j) * (1 + 2j)),
    "log": lambda x: jnp.log1p(jnp.abs(x)),
    "sine": jnp.sin,
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "in_jit": jax.jit(lambda x: x * 0.5),
    "in_remat": jax.checkpoint(lambda x: jnp.sin(x) * 0.5),
    "in_rule": lambda x: jax.nn.silu(x),
}
BINARY = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "divide": lambda x, y: x / (jnp.abs(y) + 0.5),
    "divide_as_is": lambda x, y: x / y,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "where_first": lambda x, y: jnp.where(x > 0.1, x, y),
    "where_larger": lambda x, y: jnp.where(x > y, 1.0, y),
    "where_any": lambda x, y: jnp.where(x > 0, y, 0.0),
    "where_none": lambda x, y: jnp.where(x == 0, 0.0, y),
    "power": lambda x, y: jnp.abs(x) ** jnp.tanh(y),
    "ratio_of_guarded": lambda x, y: x / jnp.maximum(y, 1.0),
    "ratio_if_any": lambda x, y: jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0),
    "angle": jnp.arctan2,
    "remainder": lambda x, y: jnp.fmod(x, jnp.abs(y) + 0.5),
    "both": lambda x, y: ((x > 0) & (y > 0)).astype(x.dtype),
    "either": lambda x, y: ((x > 0) | (y > 0.2)).astype(x.dtype),
}
REDUCED = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "product": lambda x, axis: jnp.prod(jnp.tanh(x), axis=axis),
    "any": lambda x, axis: jnp.any(x > 0.3, axis=axis).astype(x.dtype),
    "all": lambda x, axis: jnp.all(x > -2.0, axis=axis).astype(x.dtype),
    "largest_at": lambda x, axis: jnp.argmax(x, axis=axis).astype(x.dtype),
    "logsumexp": jax.nn.logsumexp,
}
ALONG = {
    "cumsum": jnp.cumsum,
    "cummax": lambda x, axis: lax.cummax(x, axis),
    "sort": jnp.sort,
    "argsort": lambda x, axis: jnp.argsort(x, axis=axis).astype(x.dtype),
    "flip": jnp.flip,
    "softmax": jax.nn.softmax,
    "roll": lambda x, axis: jnp.roll(x, 1, axis),
    "fft": lambda x, axis: jnp.real(jnp.fft.fft(x, axis=axis)),
    "scanned": lambda x, axis: lax.associative_scan(operator.add, x, axis=axis),
    "window": lambda x, axis: jnp.stack([x, jnp.roll(x, 1, axis)]).max(0),
}
MEETINGS = {
    "psum": lambda x: lax.psum(x, TOWER_AXIS),
    "pmean": lambda x: lax.pmean(x, TOWER_AXIS),
    "pmax": lambda x: lax.pmax(lax.stop_gradient(x), TOWER_AXIS),
    "pmin": lambda x: lax.pmin(lax.stop_gradient(x), TOWER_AXIS),
    "gathered_sum": lambda x: lax.all_gather(x, TOWER_AXIS).sum(0),
    "gathered_max": lambda x: lax.all_gather(lax.stop_gradient(x), TOWER_AXIS).max(0),
}


class Draw:
    """What a program draws; the same for any number of towers."""

    def __init__(self, seed, tower, pool):
        self.rng = np.random.default_rng(seed)
        self.tower = tower
        self.pool = pool

    def below(self, number):
        return int(self.rng.integers(number))

    def of(self, *choices):
        return choices[self.below(len(choices))]

    def value(self, *shapes):
        """A value of one of these shapes; later ones are likelier."""
        found = [x for name in shapes or self.pool for x in self.pool[name]]
        return found[
            len(found) - 1 - min(self.below(len(found)), self.below(len(found)))
        ]

    def named(self, table):
        return table[sorted(table)[self.below(len(table))]]


def of_each(d):
    return d.named(ELEMENTWISE)(d.value())


def of_two(d):
    x = d.value()
    same = [y for values in d.pool.values() for y in values if y.shape == x.shape]
    y = same[d.below(len(same))]
    return d.named(BINARY)(*d.of((x, y), (y, x)))


def with_a_number(d):
    return d.named(BINARY)(*_together(d.value(), d.value("number")))


def with_features(d):
    return d.named(BINARY)(*_together(d.value("rows of features"), d.value("features")))


def with_rows(d):
    x = d.value("rows of features")
    y = d.value("rows")
    return d.named(BINARY)(x, jnp.broadcast_to(y[:, None], x.shape))


def _together(x, y):
    return x, jnp.broadcast_to(y, x.shape)


def reduced(d):
    x = d.value("features", "rows", "rows of features", "rows of steps", "matrix")
    return d.named(REDUCED)(x, axis=d.below(x.ndim))


def reduced_at_once(d):
    return d.of(jnp.sum, jnp.mean, jnp.max)(d.value())


def along(d):
    x = d.value("features", "rows", "rows of features", "rows of steps", "matrix")
    return d.named(ALONG)(x, axis=d.below(x.ndim))


def met(d):
    x = d.value("number", "number", "features", "features", "rows of features")
    return d.named(MEETINGS)(x)


def gathered_rows(d):
    x = d.value("rows of features")
    y = d.value("rows of features")
    every = d.tower.all_gather(y, axis=0)
    return d.of(lambda: x @ every.T @ every, lambda: (x @ every.T).max(1))()


def scattered_rows(d):
    size = d.tower.rows * d.tower.num_towers
    every = jnp.zeros(size).at[: d.tower.rows].set(d.value("rows"))
    x = d.of(every, jnp.ones(size) * d.value("number"))
    return lax.psum_scatter(x, TOWER_AXIS, tiled=True)


def own_mean(d):
    values = d.value("rows")
    weight = d.value("rows")
    return d.tower.mean(values, jnp.abs(weight))


def own_mean_of_examples(d):
    return d.tower.mean(d.value("rows"), d.tower.weight)


def reduced_over_towers(d):
    how = d.of(tj.Reduction.SUM, tj.Reduction.MEAN, tj.Reduction.ONLY_FIRST_TOWER)
    return d.tower.reduce(how, d.value("number", "features"))


def masked(d):
    x = d.value("rows", "rows of features")
    weight = d.tower.weight.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return d.of(lambda: x * weight, lambda: jnp.where(weight > 0, x, 0.0))()


def function_of_masked(d):
    """What is 0 in padding may be no more, and some of it counts."""
    x = masked(d)
    y = d.value("rows")
    how = d.of(jnp.exp, jnp.cos, jax.nn.sigmoid, jnp.tanh, jnp.square, jnp.sqrt)
    how = d.of(how, lambda x: x + 1, lambda x: x == 0, lambda x: jnp.maximum(x, 0.1))
    new = how(jnp.abs(x)).astype(x.dtype)
    if x.ndim == 1:
        new = d.of(new, jnp.where(new > 0.1, new, y), jnp.where(y > 0, new, y), new * y)
    return d.of(new.sum(0), new)


def masked_sum(d):
    x = d.value("rows", "rows of features")
    return d.tower.weight.astype(x.dtype) @ x


def sum_of_flagged(d):
    flag = (d.value("rows") > d.of(0.0, 1.3, 2.2)) * d.tower.weight
    flag = flag.astype(jnp.float64)
    x = d.value("rows") @ d.of(flag, flag, d.tower.weight * 1.0)
    count = flag.sum()
    mean = d.of(
        lambda: x / jnp.maximum(count, d.of(1, 1, 2)),
        lambda: jnp.where(count > 0, x / jnp.maximum(count, 1), 0.0),
        lambda: jnp.where(count > 0, x, 0.0),
        lambda: x / count,
        lambda: jnp.where(count == 0, 0.0, x / jnp.where(count == 0, 1.0, count)),
    )()
    return d.of(
        lambda: mean * count,
        lambda: mean * count,
        lambda: mean,
        lambda: mean + d.value("number"),
        lambda: (mean + params_number(d)) * count,
    )()


def params_number(d):
    """A number that all towers share."""
    return d.pool["number"][0]


def quotient_and_back(d):
    x = d.value("number")
    y = d.value("number")
    z = d.value("number")
    return d.of(x / y * y, x / y * z, (x / y + z) * y, lax.stop_gradient(x / y) * y)


def counts(d):
    return d.of(
        jnp.float64(d.tower.rows),
        jnp.float64(d.tower.num_towers),
        d.tower.weight.astype(jnp.float64).sum(),
        d.tower.id.astype(jnp.float64),
        jnp.ones(d.tower.rows).sum(),
    )


def scaled(d):
    """By powers of the number of towers."""
    x = d.value("number", "features", "rows")
    towers = d.tower.num_towers
    power = 1.0 * d.of(towers, 1 / towers, towers**2, towers**0.5, 2.0)
    other = 1.0 * d.of(towers, 1 / towers)
    return d.of(
        x * power,
        x / power,
        x * power / other,
        x * power / other,
        x * (power * d.value("number")),
        x + power,
    )


def of_numbers(d):
    """What is made of two numbers, or of two vectors."""
    shape = d.of("number", "features")
    x = d.value(shape)
    y = d.value(shape)
    return d.of(x + y, x - y, x * y, x / y, jnp.maximum(x, y), x * y, x.astype(int) + y)


def other_program(d):
    """Another value for one number of towers than for the others."""
    shape = d.of("number", "features", "rows", "rows of features")
    x = d.value(shape)
    y = d.value(shape)
    is_one = d.tower.num_towers == 1
    first, second = (x, y) if is_one else (y, x)
    return d.of(
        lambda: jnp.tanh(first) + 0.5 * jnp.tanh(second),
        lambda: first * 2.0,
        lambda: jnp.where(first > 0, second, 0.0),
    )()


@jax.jit
def _weighed(x, y, w):
    weight = jnp.abs(x @ w)
    return weight.sum(), y @ weight, (x @ w > 0.3).astype(x.dtype)


def called_twice(d):
    """One program for two values of the same kind."""
    x = d.value("rows of features")
    y = d.value("rows")
    weight = d.tower.weight
    x = x * weight[:, None]
    y = y * weight
    first = _weighed(x, y, d.value("features"))
    other = _weighed(x, y, d.value("features"))
    flag = first[2] * weight
    other_flag = other[2] * weight
    return d.of(
        first[1] / first[0] * other[0],
        first[1] / first[0] * first[0],
        jnp.where(flag.sum() > 0, y @ other_flag, 0.0),
        jnp.where(flag.sum() > 0, y @ flag, 0.0),
        y @ flag / jnp.maximum(flag.sum(), 1.0) * other_flag.sum(),
        y @ other_flag / jnp.maximum(flag.sum(), 1.0) * flag.sum(),
        y @ flag / jnp.maximum(flag.sum(), d.of(1.0, 2.0)) * flag.sum(),
    )


def views(d):
    """Rows that are joined with rows, in one order and in another."""
    x = d.value("rows")
    y = d.value("rows")
    n = d.tower.rows
    joined = jnp.concatenate([x, y])
    mixed = jnp.stack([x, y], 1).reshape(-1)
    other = jnp.concatenate([y, x])
    both = d.of(joined, mixed) * d.of(joined, mixed, other, jnp.repeat(x, 2))
    return d.of(
        lambda: both.reshape(2, n).sum(0),
        lambda: both.reshape(n, 2).sum(1),
        lambda: both.sum(),
        lambda: both[:n],
        lambda: both[n // 2 : n + n // 2],
    )()


def row_numbers(d):
    rows = jnp.arange(d.tower.rows)
    first = d.of(0, d.tower.id * d.tower.rows, d.tower.id * 2, d.tower.rows)
    return (first + rows).astype(jnp.float64)


def products(d):
    x = d.value("rows of features")
    y = d.value("rows of features")
    return d.of(
        lambda: x.T @ y,
        lambda: x @ y.T @ y,
        lambda: x @ d.value("matrix"),
        lambda: jnp.einsum("nf,nf->n", x, y),
        lambda: jnp.einsum("nf,nf->f", x, y),
        lambda: jnp.einsum("nf,mf->n", x, y),
        lambda: x @ d.value("features"),
        lambda: d.value("rows") @ y,
        lambda: d.value("rows") @ d.value("rows"),
        lambda: jnp.outer(d.value("features"), d.value("features")),
        lambda: d.value("matrix") @ d.value("features"),
    )()


def convolved(d):
    x = d.value("rows of features")
    kernel = d.value("features")
    window = kernel[None, None]
    return d.of(
        lambda: lax.conv(x[:, None], window, (1,), "SAME")[:, 0],
        lambda: lax.conv(x.T[:, None], window, (1,), "SAME")[:, 0].T,
        lambda: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
        lambda: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
        lambda: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"),
    )()


def laid_otherwise(d):
    x = d.value("rows of features")
    y = d.value("rows of features")
    n = d.tower.rows
    v = d.value("rows")
    return d.of(
        lambda: jnp.concatenate([x, y]).reshape(2, n, F).sum(0),
        lambda: jnp.concatenate([x, y]).reshape(n, 2, F).sum(1),
        lambda: jnp.concatenate([x, y])[:n],
        lambda: jnp.concatenate([x, y])[n:] * 2.0,
        lambda: jnp.split(jnp.concatenate([x, y]), 2)[d.below(2)],
        lambda: jnp.concatenate([y, x])[1 : n + 1],
        lambda: jnp.tanh(x.reshape(-1)).reshape(n, F),
        lambda: x.T.reshape(n, F),
        lambda: jnp.tanh(x.T.reshape(-1)).reshape(F, n).T,
        lambda: v.reshape(2, -1).sum(0).sum(),
        lambda: v.reshape(-1, 3).sum(1).sum(),
        lambda: v.reshape(2, -1).sum(1)[d.below(2)],
        lambda: (v.reshape(2, -1) * 0.5).max(0).sum(),
        lambda: (v.reshape(2, -1) * jnp.array([[1.0], [2.0]])).sum(),
        lambda: (v.reshape(2, -1) + v.reshape(-1, 2).T).sum(),
        lambda: jnp.broadcast_to(v[:, None], (n, F)).reshape(F, n).T,
        lambda: jnp.repeat(v, F).reshape(n, F),
        lambda: jnp.tile(v, F).reshape(n, F),
        lambda: jnp.stack([v, v * 2, x[:, 0]], axis=1),
        lambda: jnp.pad(x[:, 1:], ((0, 0), (1, 0))),
        lambda: jnp.pad(x[1:], ((1, 0), (0, 0))),
        lambda: x[:, ::-1],
        lambda: x[::-1],
        lambda: x[:1].sum(0),
        lambda: x[: n // 2].sum(0),
        lambda: jnp.broadcast_to(d.value("features"), (n, F)).reshape(F, n).T,
        lambda: jnp.broadcast_to(d.value("features")[:, None], (F, n)).sum(0),
    )()


def indexed(d):
    x = d.value("rows of features")
    label = jnp.abs(d.value("rows")).astype(int) % F
    n = d.tower.rows
    numbers = jnp.arange(d.tower.rows)
    other = d.of(label, (numbers + 1) % n, numbers[::-1], label + d.tower.id)
    table = d.value("features")
    return d.of(
        lambda: x[numbers, label],
        lambda: x[other],
        lambda: table[label],
        lambda: table[d.of(numbers % F, d.tower.id % F, label)],
        lambda: jnp.take_along_axis(x, label[:, None], axis=1)[:, 0],
        lambda: jax.nn.one_hot(label, F) * table,
        lambda: jnp.zeros(F).at[label].add(d.value("rows")),
        lambda: jnp.zeros(F).at[label].set(d.value("rows")),
        lambda: jnp.zeros(F).at[label].max(d.value("rows")),
        lambda: table.at[label].add(d.value("rows") * d.tower.weight),
        lambda: jax.ops.segment_sum(x, label, F),
        lambda: x.at[numbers, label].add(d.value("rows")),
        lambda: x.at[other].set(x),
        lambda: x.at[:, 1].set(d.value("rows")),
        lambda: x.at[0].set(table),
        lambda: lax.dynamic_index_in_dim(x, label[0], 1, keepdims=False),
        lambda: lax.dynamic_index_in_dim(x, d.of(0, label[0]), 0, keepdims=False),
        lambda: lax.dynamic_update_slice(x, d.value("rows")[:, None], (0, 1)),
        lambda: lax.top_k(x, 2)[0].sum(1),
        lambda: lax.top_k(d.value("rows"), 2)[0].sum(),
    )()


BY_INDEX = {"mode": "clip", "wrap_negative_indices": False}


def by_index(d):
    """Elements by indices as they are."""
    x = d.value("rows of features")
    y = d.value("rows")
    n = d.tower.rows
    numbers = jnp.arange(n)
    label = d.of(numbers, numbers, jnp.abs(y).astype(int) % F, jnp.zeros(n, int) + 1)
    table = d.value("features")
    fill = {"mode": "fill", "fill_value": d.of(0.0, 7.0)}
    fill |= {"wrap_negative_indices": False}
    return d.of(
        lambda: x.at[label].get(**BY_INDEX),
        lambda: table.at[label].get(**BY_INDEX),
        lambda: x.at[label].set(x * 2, **BY_INDEX),
        lambda: x.at[label, 1].add(y, **BY_INDEX),
        lambda: (x * 0).at[label].add(x, **BY_INDEX),
        lambda: table.at[label].add(y * d.tower.weight, **BY_INDEX),
        lambda: (
            jax.vmap(lambda x, i: x.at[i + 1].get(**fill))(masked(d) + 0 * x, label)
            if x.ndim == 2
            else x
        ),
        lambda: tj.sparse.take(table, label),
    )()


def branched(d):
    x = d.value()
    test = d.value("number")
    return d.of(
        lambda: lax.cond(test > 0.1, jnp.tanh, lambda x: x * 2, x),
        lambda: lax.cond(test > 0.1, jnp.zeros_like, lambda x: x, x),
        lambda: lax.switch(test.astype(int) % 2, [lambda x: x, jnp.sin], x),
        lambda: lax.cond((d.value("rows") > 1.0).any(), jnp.tanh, lambda x: x, x),
        lambda: lax.cond(test > 0.1, jnp.sum, lambda x: x.max() * 0.5, x),
    )()


def looped(d):
    x = d.value("rows of features")
    y = d.value("rows")
    number = d.value("number")
    table = d.value("features")
    w = d.value("matrix")

    def over_time(carry, column):
        carry = jnp.tanh(carry + column * number)
        return carry, carry * 0.5

    def until(carry):
        i, x = carry
        return i + 1, jnp.tanh(x) + x.mean(0) * d.of(0.0, 0.0, 0.1)

    ends = d.of(lambda i: i < 3, lambda i: i < jnp.abs(number) % 3)

    def trips(until):
        test = lambda c: until(jnp.abs(c[1]) > 0.3)  # noqa: E731
        return lax.while_loop(test, lambda c: (c[0] + 1.0, c[1] * 0.5), (0.0, y))[0]

    start = d.of(y, y * 0, table.sum() + y)
    return d.of(
        lambda: lax.scan(over_time, start, x.T)[0],
        lambda: lax.scan(over_time, start, x.T)[1].sum(0),
        lambda: lax.scan(lambda c, _: (c @ w * 0.3, c.sum(0)), x, None, length=2)[0],
        lambda: lax.while_loop(lambda c: ends(c[0]), until, (0.0, x))[1],
        lambda: lax.fori_loop(0, 3, lambda i, c: c + number * x[:, i % F], y),
        lambda: jax.vmap(_newton)(y),
        lambda: trips(jnp.any),
        lambda: trips(jnp.all),
        lambda: lax.fori_loop(0, 2, lambda i, c: (c[1], c[0] * 0.5), (table, x.sum(0)))[
            0
        ],
        lambda: lax.scan(lambda c, v: (c + v, c), number, table)[0],
    )()


def _newton(x):
    """The number of trips depends on the row."""
    step = lambda c: (c[0] + 1, c[1] * 0.5)  # noqa: E731
    return lax.while_loop(lambda c: jnp.abs(c[1]) > 0.3, step, (0, x))[1]


def _masked_or_not(d):
    x = d.value("rows of features")
    return d.of(x, x * d.tower.weight[:, None], x * d.tower.weight[:, None])


def carried_over_rows(d):
    """Two carries of a loop over rows, and what it keeps."""
    x = _masked_or_not(d)
    number = d.value("number")
    table = d.value("features")

    def body(carry, row):
        total, other = carry
        loss = jnp.tanh(row @ table)
        new = d.of(
            lambda: (total + loss, other),
            lambda: (total + loss, other + row.sum()),
            lambda: (total - loss, other),
            lambda: (loss - total, other),
            lambda: (total + loss + loss, other - 1.0),
            lambda: (total + total * 0.1 + loss, other),
            lambda: (other + loss, total),
            lambda: (jnp.where(loss > 0, total + loss, total), other),
            lambda: (jnp.where(loss > 0, total + loss, 0.0), other),
            lambda: (jnp.maximum(total, loss), other),
            lambda: (total + number, other),
            lambda: (total * 0.5 + loss, other),
            lambda: (loss, other),
            lambda: (total + loss * (other > 0), other + loss),
        )()
        return new, d.of(
            lambda: loss, lambda: new[0], lambda: total, lambda: 1.0 + 0 * loss
        )()

    start = d.of((0.0, 0.0), (number, 0.0))
    out = lax.scan(body, start, x, reverse=d.of(False, False, True))
    return d.of(out[0][0], out[0][0], out[0][1], out[1])


def summed_over_rows(d):
    """One carry of a loop over rows, and what it keeps."""
    x = _masked_or_not(d)
    number = d.value("number")
    table = d.value("features")

    def body(carry, row):
        loss = row @ table
        new = d.of(
            lambda: carry + loss,
            lambda: carry + loss,
            lambda: carry - loss,
            lambda: loss - carry,
            lambda: carry + carry + loss,
            lambda: jnp.where(loss > 0, carry + loss, carry),
            lambda: jnp.where(loss > 0, 0.0, carry + loss),
            lambda: jnp.where(loss > 0, carry + loss, 0.0),
            lambda: jnp.where(carry > 0, carry + loss, carry),
        )()
        return new, d.of(new, carry, loss)

    last, kept = lax.scan(body, d.of(0.0, params_number(d), number), x)
    return d.of(last, last, kept)


def filled_over_rows(d):
    """A loop by the numbers of rows, that adds up and fills an array."""
    x = d.value("rows of features")
    y = d.value("rows")
    table = d.value("features")
    n = d.tower.rows
    weight = d.tower.weight

    def body(i, carry):
        total, every = carry
        loss = jnp.tanh(x[i] @ table) * weight[i]
        at = d.of(i, i, i, (i + 1) % n, 0)
        new = d.of(loss, loss, total, loss + every[i], loss + every[at])
        return total + loss * y[i], every.at[at].set(new)

    return lax.fori_loop(0, n, body, (0.0, d.of(jnp.zeros(n), y)))[d.below(2)]


def other_loops_over_rows(d):
    x = _masked_or_not(d)
    y = d.value("rows")

    def matrix(carry, row):
        more = jnp.outer(row, row[::-1])
        return d.of(
            carry + more, carry.T + more, carry + more, carry @ carry.T + more
        ), None

    chunks = (x * d.tower.weight[:, None]).reshape(2, -1, F)
    add = lambda c, v: (c + d.of(jnp.sin(v).sum(), v.max()), v * 2)  # noqa: E731
    return d.of(
        lambda: lax.map(lambda row: jnp.tanh(row).sum(), x),
        lambda: lax.scan(matrix, jnp.zeros((F, F)), x)[0],
        lambda: lax.scan(lambda c, v: (c + 1, c * v), 0, y)[1],
        lambda: lax.scan(add, 0.0, chunks)[0],
        lambda: lax.scan(add, 0.0, chunks)[1].reshape(x.shape),
    )()


def of_extremes(d):
    """What is made of the largest, or smallest, of a tower."""
    x, y = lax.stop_gradient((d.value("rows of features"), d.value("rows")))
    most = x.max(0)
    least = x.min(0)
    one = y.max()
    made = d.of(
        lambda: most.at[0].add(one),
        lambda: most.at[0].set(one),
        lambda: most.at[0].max(one),
        lambda: jnp.maximum(most, d.of(one, params_number(d))),
        lambda: jnp.minimum(most, d.of(one, least)),
        lambda: jnp.stack([one, least[0], most[1]]),
        lambda: most + d.of(0.0, 1.0) * one,
    )()
    meet = d.of(lax.pmax, lax.pmax, lax.pmin)
    return meet(lax.stop_gradient(made), TOWER_AXIS)


def reduced_by_a_function(d):
    x = d.value("rows of features")
    number = d.of(1, d.tower.num_towers)
    add = lambda x, y: jnp.sin(x * number + y)  # noqa: E731
    zero = jnp.zeros((), x.dtype)
    x = lax.stop_gradient(x)
    return d.of(
        lambda: lax.reduce(x, zero, add, (d.of(1, 1, 0),)),
        lambda: lax.reduce_window(x, zero, add, (1, 2), (1, 1), "SAME"),
    )()


def in_few_bits(d):
    kind = d.of(jnp.int8, jnp.uint8, jnp.int32, jnp.uint32)
    number = (40 * jnp.abs(d.value("rows"))).astype(kind) * (d.tower.weight > 0)
    total = jnp.sum(number, dtype=kind)
    return d.of(total, total, jnp.maximum(total, 3)).astype(jnp.float64)


def with_a_rule(d):
    """Functions that say what their derivatives are."""
    fn = jax.custom_jvp(d.of(jnp.sin, jax.nn.relu.__wrapped__, lambda x: x * 2.0))
    slope = d.of(lambda x: 2.0, lambda x: jnp.abs(x).mean(), jnp.cos)

    @fn.defjvp
    def _(primals, tangents):
        return fn(*primals), tangents[0] * slope(*primals)

    return fn(d.value("rows", "rows of features", "number"))


def over_chunks(d):
    """Loops over chunks of rows, and groups of rows."""
    x = d.value("rows of features")
    y = d.value("rows")
    number = d.value("number")
    w = d.value("features")
    key = d.tower.rng
    at = d.tower.axis_names
    weight = d.tower.weight.astype(x.dtype)
    weight = d.of(weight, weight, weight * 0 + 1)
    masked_rows = y * d.of(weight, y * 0 + 1)

    def body(carry, chunk):
        total, other = carry
        x, y, weight, place = chunk
        losses = jnp.tanh(x @ w + d.of(0.0, params_number(d), number))
        part = d.of(losses @ weight, losses.sum(), (y * weight).sum())
        new = d.of(
            lambda: (total + part, other),
            lambda: (total + part, other + y @ weight),
            lambda: (total + part, other + number),
            lambda: (total - part, other),
            lambda: (part - total, other),
            lambda: (part, other),
            lambda: (total + jnp.tanh(part), other),
            lambda: (total + part * place, other),
            lambda: (total + part * other, other + 1.0),
            lambda: (0.5 * total + part, other),
            lambda: (total + lax.psum(part, at), other),
            lambda: (jnp.where(params_number(d) > 0, total + part, total), other),
            lambda: (jnp.where(part > 0, total + part, total), other),
            lambda: (total + (y * jax.random.uniform(key, y.shape)).sum(), other),
            lambda: (total + part / jnp.maximum(weight.sum(), 1.0), other),
        )()
        kept = d.of(losses, losses, part, losses * place, y - y.mean(), new[0])
        return new, kept

    def chunks(x):
        groups = x.reshape(2, -1, *x.shape[1:])
        return d.of(groups, groups, groups, groups[::-1])

    places = jnp.arange(2.0)
    given = chunks(x), chunks(masked_rows), chunks(weight), places
    start = d.of((0.0, 0.0), (number, 0.0), (0.0, 1.0))
    groups = masked_rows.reshape(2, -1)
    other = (y * weight).reshape(2, -1)
    run = jax.checkpoint(body)
    return d.of(
        lambda: lax.scan(body, start, given)[0][0],
        lambda: lax.scan(run, start, given)[0][0],
        lambda: lax.scan(body, start, given, reverse=True)[0][1],
        lambda: lax.scan(body, start, given)[1].reshape(-1),
        lambda: lax.scan(body, start, given)[1].T.reshape(-1),
        lambda: (lax.scan(body, start, given)[1].reshape(-1) * weight).sum(),
        lambda: lax.scan(body, start, given)[1].sum(),
        lambda: jnp.tanh(groups * other).sum(),
        lambda: (jnp.sin(groups) * d.of(other, groups.T.reshape(2, -1))).sum(),
        lambda: (groups.T @ other).sum(),
        lambda: jnp.where(groups > 0, other, 0.0).sum(),
        lambda: groups.sum(d.below(2)).sum(),
        lambda: jnp.abs(groups.sum(d.below(2))).sum(),
    )()


def repeated_or_written(d):
    """Rows that are repeated, and elements that are the larger of two."""
    x = d.value("rows of features")
    y = d.value("rows")
    n = d.tower.rows
    label = jnp.abs(y).astype(int) % F
    table = d.value("features")
    numbers = jnp.arange(n)
    number = d.value("number")
    other = d.of(label, numbers, numbers[::-1])
    at = d.tower.axis_names
    return d.of(
        lambda: jnp.tile(x, (2, 1)).reshape(2, n, F).sum(0),
        lambda: jnp.tile(x, (2, 1)).reshape(n, 2, F).sum(1),
        lambda: jnp.tile(table[None], (n, 1)),
        lambda: jnp.tile(number[None], n).sum(),
        lambda: jnp.tile(x, (1, 2))[:, 1 : F + 1],
        lambda: x.at[numbers, label].max(y),
        lambda: x.at[other].min(x * 2),
        lambda: x.at[numbers, label].multiply(d.of(y, number), unique_indices=True),
        lambda: lax.pmax(jnp.full(F, -9.0).at[label].max(lax.stop_gradient(y)), at),
        lambda: lax.pmin(lax.stop_gradient(table.at[label].min(y)), at),
        lambda: jnp.full(F, -9.0).at[label].max(y),
        lambda: jax.vmap(lambda x, i: x.at[i].max(0.1))(x, label),
    )()


def chosen_by_any(d):
    """What is chosen by whether a tower has a flagged row."""
    limit = d.of(0.0, 1.3, 2.2)
    weight = d.tower.weight
    flag = (d.value("rows") > limit) * d.of(weight, weight, weight * 0 + 1)
    flag = flag.astype(jnp.float64)
    x = d.value("rows") @ d.of(flag, flag, weight * 1.0)
    count = flag.sum()
    test = d.of(count > 0, count == 0, flag.any(), ~(flag > 0).any(), count >= 1)
    first, second = d.of(
        (x, 0.0), (0.0, x), (x, 1.0), (count, x), (x, d.value("number"))
    )
    first = jnp.float64(first)
    second = jnp.float64(second)
    found = d.of(
        lambda: jnp.where(test, first, second),
        lambda: lax.cond(test, lambda: first, lambda: second),
        lambda: lax.pmax(test, d.tower.axis_names).astype(jnp.float64),
        lambda: lax.pmin(test, d.tower.axis_names).astype(jnp.float64),
        lambda: test.astype(jnp.float64),
    )()
    return d.of(found, found * count, x / jnp.where(test, count, 1.0) * count)


def _masked_rows(d):
    y = d.value("rows")
    weight = d.tower.weight.astype(y.dtype)
    return y * d.of(weight, weight, weight, weight * 0 + 1)


def reordered(d):
    """Rows in another order, two orders, and what may be beside them."""
    x = _masked_rows(d)
    y = _masked_rows(d)
    z = d.value("rows of features") * d.tower.weight[:, None]
    n = d.tower.rows
    key = d.of(d.tower.rng, d.tower.shared_rng)
    order = d.of(
        lambda: jnp.argsort(x),
        lambda: jnp.argsort(d.value("rows")),
        lambda: jax.random.permutation(key, n),
        lambda: jnp.argsort(jnp.arange(n)),
        lambda: jnp.arange(n),
    )()
    number = d.value("number")
    both = lax.sort((x, y), num_keys=1)
    made = d.of(
        lambda: jnp.sort(x),
        lambda: x[::-1],
        lambda: z[::-1, ::-1],
        lambda: x[order],
        lambda: z[order],
        lambda: jnp.tanh(z[order]) * x[order][:, None],
        lambda: jnp.tanh(x[order]) * y[order],
        lambda: both[0] * both[1],
        lambda: both[0] * jnp.sort(y),
        lambda: jnp.sort(x) * y,
        lambda: jnp.sort(x)[order] * x[order],
        lambda: jnp.sort(x[order]) * y[order],
        lambda: jnp.sort(x[::-1]) * x[::-1],
        lambda: lax.sort((x[order], y[order]), num_keys=1)[1] * y[order],
        lambda: jnp.sort(z, axis=0),
        lambda: jax.random.permutation(key, x),
        lambda: x[order[::-1]],
        lambda: x[order] * order,
        lambda: jnp.sort(x) * d.of(number, 2.0, d.tower.weight),
        lambda: jnp.sort(x)[: n // 2],
        lambda: jnp.where(jnp.sort(x) > 0.3, jnp.sort(x), number),
    )()
    made = d.of(lambda: made, lambda: made * number, lambda: jnp.tanh(made))()
    return d.of(
        lambda: made.sum(),
        lambda: made.sum(0),
        lambda: made,
        lambda: made.reshape(2, -1).sum(0).sum(),
        lambda: made.sum(-1),
        lambda: jnp.abs(made.reshape(2, -1).sum(1)).sum(),
        lambda: made.max(),
    )()


def passed_on(d):
    """Values that go to another tower."""
    axis = d.tower.axis_names[0]
    count = d.tower.num_towers
    perm = d.of(
        [(i, (i + 1) % count) for i in range(count)],
        [(i, count - 1 - i) for i in range(count)],
        [(i, i) for i in range(count)],
    )
    x = d.of(
        lambda: d.value(),
        lambda: _masked_rows(d),
        lambda: d.value("number"),
        lambda: _masked_rows(d) * (d.value("rows") > 1.3),
    )()

    def exchanged():
        is_even = x.ndim and x.shape[0] % count == 0
        return lax.all_to_all(x, axis, 0, 0, tiled=True) if is_even else x

    other = d.of(lambda: lax.ppermute(x, axis, perm), exchanged)()
    flag = (d.value("rows") > 1.3) * d.tower.weight
    part = other.sum(0) if other.ndim else other
    return d.of(
        lambda: other,
        lambda: other.sum(),
        lambda: (other**2).sum(),
        lambda: other * x,
        lambda: other + d.value("number"),
        lambda: jnp.where(flag.sum() > 0, part, 0.0),
        lambda: part / jnp.maximum(flag.sum(), 1) * flag.sum(),
        lambda: lax.pmax(lax.stop_gradient(other), axis),
        lambda: lax.psum(other, axis),
    )()


def extremes_of_masked(d):
    """Largest and smallest values that a mask keeps."""
    x = d.value("rows", "rows of features")
    weight = d.tower.weight.reshape((-1,) + (1,) * (x.ndim - 1))
    flag = d.of(weight > 0, weight > 0, weight == 0, (x > 0.2) & (weight > 0), x > 0)
    low = d.of(-jnp.inf, -jnp.inf, jnp.inf, -9.0, 0.0)
    x = jnp.where(flag, x, low)
    x = d.of(
        lambda: x,
        lambda: x,
        lambda: -x,
        lambda: jnp.exp(x),
        lambda: x * d.of(1.0, 2.0, 0.5),
        lambda: x.astype(jnp.float32).astype(x.dtype),
        lambda: jnp.maximum(x, d.of(-1.0, 0.3)),
        lambda: jnp.where(d.value("number") > 0, x, x + 1),
        lambda: x[::-1],
    )()
    reduce = d.of(jnp.max, jnp.max, jnp.min, jnp.argmax)
    found = d.of(
        lambda: reduce(x), lambda: reduce(x.max(-1, keepdims=True)), lambda: x.max(0)
    )()
    found = lax.stop_gradient(found.astype(jnp.float64))
    found = jnp.where(jnp.isfinite(found), found, 77.0)
    return d.of(
        lambda: lax.pmax(found, d.tower.axis_names),
        lambda: lax.pmin(found, d.tower.axis_names),
        lambda: found,
    )()


def solved(d):
    a = jnp.eye(F) * 3 + 0.1 * d.value("matrix")
    x = d.value("rows of features")
    return d.of(
        lambda: jnp.linalg.solve(a, d.value("features")),
        lambda: jnp.linalg.solve(a, x.T).T,
        lambda: jnp.linalg.inv(jnp.eye(F) + x.T @ x) @ d.value("features"),
        lambda: jnp.linalg.cholesky(jnp.eye(F) + a @ a.T).sum(0),
    )()


def derived(d):
    x = d.value("rows of features")
    w = d.value("features")
    y = d.value("rows")
    return d.of(
        lambda: jax.grad(lambda w: (jnp.tanh(x @ w) * y).sum())(w),
        lambda: jax.grad(lambda w: jnp.tanh(x @ w).mean() ** 2)(w),
        lambda: jax.grad(lambda x: (jnp.tanh(x @ w) * y).sum())(x),
        lambda: jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w)), (None, 0))(w, x),
        lambda: jax.jvp(lambda w: jnp.tanh(x @ w), (w,), (w * 2,))[1],
    )()


def drawn(d):
    n = d.tower.rows
    x = d.value("rows")
    key = d.of(
        d.tower.rng, d.tower.rng, jax.random.split(d.tower.rng)[0], d.tower.shared_rng
    )
    return d.of(
        lambda: jax.random.uniform(key, (n,)) * x,
        lambda: jax.random.bernoulli(key, 0.5, (n, F)).astype(x.dtype),
        lambda: jax.random.normal(d.tower.shared_rng, (F,)),
        lambda: jax.vmap(jax.random.uniform)(jax.random.split(key, n)) * x,
        lambda: jax.random.normal(key, (F,)) * d.value("features"),
        lambda: jax.random.uniform(key),
    )()


OPERATIONS = [of_each, of_each, of_two, of_two, of_two, with_a_number, with_features]
OPERATIONS += [with_rows, reduced, reduced, reduced_at_once, along, met, met, masked]
OPERATIONS += [gathered_rows, scattered_rows, own_mean, own_mean_of_examples, counts]
OPERATIONS += [reduced_over_towers, masked_sum, sum_of_flagged, quotient_and_back]
OPERATIONS += [row_numbers, products, products, convolved, laid_otherwise, indexed]
OPERATIONS += [laid_otherwise, indexed, branched, looped, carried_over_rows, solved]
OPERATIONS += [derived, drawn, scaled, of_numbers, of_numbers, other_program]
OPERATIONS += [called_twice, views, function_of_masked, by_index, summed_over_rows]
OPERATIONS += [filled_over_rows, other_loops_over_rows, of_extremes, in_few_bits]
OPERATIONS += [reduced_by_a_function, with_a_rule]
OPERATIONS += [over_chunks, repeated_or_written, chosen_by_any]
OPERATIONS += [reordered, passed_on, extremes_of_masked]
"""What a program is made of; what stands twice is likelier."""


def shape_name(x, rows):
    """The name of the shapes that an array is among, or None."""
    names = {(): "number", (F,): "features", (rows,): "rows", (F, F): "matrix"}
    names |= {(rows, F): "rows of features", (rows, STEPS): "rows of steps"}
    return names.get(x.shape)


def start_pool(params, batch, tower):
    """The first values: of each shape copies, rows, sums and extremes of own rows."""
    x = batch["x"]
    y = batch["y"]
    weight = tower.weight.astype(x.dtype)
    return {
        "number": [
            params["b"],
            params["w"][0],
            (y * weight).sum(),
            (x[:, 0] ** 2 * weight).sum(),
            ((x @ params["w"]) ** 2 * weight).sum(),
        ],
        "features": [
            lax.stop_gradient(x.max(0)),
            weight @ x,
            params["w"],
            params["k"][0],
        ],
        "rows": [y, (x * params["w"]).sum(1), weight],
        "rows of features": [x, x * params["w"]],
        "rows of steps": [x[:, :STEPS]],
        "matrix": [params["k"], (x * weight[:, None]).T @ x],
    }


def function_of(seed, operations=OPERATIONS, length=6):
    """A random function of a tower: its leaves, and how each is merged."""

    def fn(params, batch, tower):
        pool = start_pool(params, batch, tower)
        d = Draw(seed, tower, pool)
        made = []
        for number in range(1 + d.below(length)):
            d.rng = np.random.default_rng([seed, number])
            operation = operations[d.below(len(operations))]
            try:
                with jax.numpy_rank_promotion("allow"):
                    new = jnp.asarray(operation(d))
            except (TypeError, ValueError, ZeroDivisionError):
                continue  # it does not fit
            name = shape_name(new, tower.rows)
            if name is not None and jnp.issubdtype(new.dtype, jnp.floating):
                pool[name].append(new)
                made.append(new)
        return leaves_of(d, made[-4:] or [params["b"]], batch, tower)

    return fn


def params_and_batch(rows, seed=0):
    """Parameters, and a batch of so many rows."""
    draw = np.random.default_rng(seed)
    params = {
        "w": draw.normal(size=F),
        "k": draw.normal(size=(F, F)),
        "b": np.array(0.7),
    }
    return params, {"x": draw.normal(size=(rows, F)), "y": draw.normal(size=rows)}


def split_batch(batch, towers, rows, padded):
    """The batch of each tower ``[T, b, ...]``, padded with garbage, and the counts."""
    total = len(batch["y"])
    counts = np.full(towers, total // towers)
    counts[: total % towers] += 1
    if not padded:
        assert (counts == rows).all()
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    draw = np.random.default_rng(towers)

    def of(x):
        own = draw.normal(size=(towers, rows, *x.shape[1:])) * 3
        for t, (start, count) in enumerate(zip(starts, counts, strict=True)):
            own[t, :count] = x[start : start + count]
        return own

    return {key: of(x) for key, x in batch.items()}, counts.astype(np.int32)


@functools.cache
def rows_to_run(towers, padded):
    """The rows of a tower that is run: few of them, so that it is fast."""
    return {1: 18, 2: 12, 4: 12}[towers] if padded else FULL // towers


def judged(fn, *, padded=False, looks_at=("proved",)):
    """What is said of each leaf, and whether it and its derivative are equal."""
    params, traced = params_and_batch(rows_of(1, padded))
    said = equalities(fn, params, traced, padded=padded)
    program, _, leaves = program_of(fn, params, traced, 1, rows_of(1, padded))
    follows = not has_own_rules(program)
    named = {leaf.name: i for i, leaf in enumerate(leaves)}
    said = [x for x in said if x.says in looks_at]
    if not said:
        return []
    params, batch = params_and_batch(EXAMPLES if padded else FULL)
    results = []
    for towers in NUMBERS:
        rows = rows_to_run(towers, padded)
        given = split_batch(batch, towers, rows, padded)
        own, counts = given
        wanted = [named[x.leaf] for x in said]
        seen = []
        found = run_on_towers(fn, params, own, towers, rows, counts, wanted, seen)
        if [x.name for x in seen] != [x.name for x in leaves]:
            return []  # an operation fits so many rows alone: it is another function
        results.append(found)
    values = [are_same([v[i] for v, _ in results]) for i in range(len(said))]
    slopes = [are_same([g[i] for _, g in results]) for i in range(len(said))]
    # Where a rule says what a derivative is, it does not follow.
    slopes = slopes if follows else [None] * len(said)
    return [*zip(said, values, slopes, strict=True)]


def are_same(trees):
    """Whether all are the same but for rounding; None where they are not finite."""
    leaves = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in trees]
    if not all(np.isfinite(x).all() for x in leaves[0]):
        return None
    for others in leaves[1:]:
        for x, y in zip(leaves[0], others, strict=True):
            # What is 0 but for rounding, of numbers near 1, is 0.
            scale = 1e-2 + np.abs(x).max(initial=0)
            if x.shape != y.shape or not np.allclose(
                x, y, rtol=1e-6, atol=1e-7 * scale
            ):
                return False
    return True
