"""Accumulations: scans are proved, what is written out is run; no wrong one passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optax.microbatching import AccumulationType

import towerjax as tj

NUMBERS = (1, 2, 4)
DRAW = np.random.default_rng(0)
W = np.float32([0.3, -0.2, 0.5])
X = DRAW.normal(size=(16, 3)).astype(np.float32)
MASK = (DRAW.random(16) < 0.6).astype(np.float32)
KEY = jax.random.key(3)


def errors(w, x):
    return (x @ w) ** 2


def total_of(w, x, mask):
    return (errors(w, x) * mask).sum()


def split(n, x):
    return x.reshape(n, -1, *x.shape[1:])


def scanned(n, gradient, *arrays, start=None):
    """The sum of a function of each micro-batch, over a scan."""

    def body(total, rows):
        return jax.tree.map(jnp.add, total, gradient(*rows)), None

    parts = [split(n, x) for x in arrays]
    if start is None:
        shapes = jax.eval_shape(gradient, *[x[0] for x in parts])
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.scan(body, start, parts)[0]


def looped(n, gradient, *arrays, first=lambda i, size: i * size):
    """The same, over a ``fori_loop`` that slices the batch."""
    size = len(arrays[0]) // n

    def body(i, total):
        rows = [lax.dynamic_slice_in_dim(x, first(i, size), size) for x in arrays]
        return jax.tree.map(jnp.add, total, gradient(i, size, *rows))

    rows = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in arrays]
    shapes = jax.eval_shape(lambda *rows: gradient(0, size, *rows), *rows)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, n, body, start)


def written_out(n, gradient, *arrays):
    """The same, as a Python loop."""
    parts = [split(n, x) for x in arrays]
    total = 0.0
    for i in range(n):
        rows = gradient(i, *[x[i] for x in parts])
        total = jax.tree.map(jnp.add, total, rows) if i else rows
    return total


def kept_by_row(i, size):
    """Dropout whose key belongs to the row of the batch."""
    keys = jax.vmap(lambda row: jax.random.fold_in(KEY, row))(
        i * size + jnp.arange(size)
    )
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3,)))(keys)


def accumulated_in_turn(n, w, x, mask, divisor):
    """Micro-batch i has the rows i, i + n, ...; the carry holds the parameters, too."""

    def in_turn(a):
        return a.reshape(-1, n, *a.shape[1:]).swapaxes(0, 1)

    def body(carry, rows):
        total, grads = jax.value_and_grad(total_of)(carry["w"], *rows)
        aux = {"total": total, "weight": rows[1].sum()}
        more = {"grads": grads, **aux}
        return {**carry, **{name: carry[name] + x for name, x in more.items()}}, aux

    start = {"w": w, "grads": jnp.zeros(3), "total": 0.0, "weight": 0.0}
    carry, aux = lax.scan(body, start, (in_turn(x), in_turn(mask)), length=n)
    loss = carry["total"] / carry["weight"]
    aux = {name: x.sum(axis=0) for name, x in aux.items()}
    return loss, aux, carry["grads"] / divisor(carry)


class Right:
    """``(n, w, x, mask) -> results`` that are the same for any number n."""

    def sums_and_weights(n, w, x, mask):
        def both(x, mask):
            loss, grads = jax.value_and_grad(total_of)(w, x, mask)
            return loss, grads, mask.sum()

        loss, grads, weight = scanned(n, both, x, mask)
        return loss / weight, grads / weight

    def mean_of_equal_means(n, w, x, mask):
        gradient = jax.grad(lambda w, x: errors(w, x).mean())
        return scanned(n, lambda x: gradient(w, x), x) / n

    def added_to_a_state(n, w, x, mask):
        grads = scanned(n, lambda x, m: jax.grad(total_of)(w, x, m), x, mask, start=w)
        return grads / mask.sum()

    def then_clipped(n, w, x, mask):
        grads = scanned(n, lambda x, m: jax.grad(total_of)(w, x, m), x, mask)
        grads = grads / len(x)
        return w - 0.1 * grads / jnp.maximum(1, jnp.linalg.norm(grads))

    def slices_of_a_loop(n, w, x, mask):
        def both(i, size, x, mask):
            return jax.grad(total_of)(w, x, mask), mask.sum()

        grads, weight = looped(n, both, x, mask)
        return grads / weight

    def read_by_number(n, w, x, mask):
        parts = split(n, x), split(n, mask)

        def body(i, grads):
            rows = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in parts]
            return grads + jax.grad(total_of)(w, *rows)

        return lax.fori_loop(0, n, body, jnp.zeros(3)) / mask.sum()

    def keys_of_rows(n, w, x, mask):
        def dropped(i, size, x, mask):
            kept = kept_by_row(i, size)
            return jax.grad(total_of)(w, x * kept, mask)

        return looped(n, dropped, x, mask) / mask.sum()

    def the_largest(n, w, x, mask):
        def body(most, x):
            return jnp.maximum(most, errors(w, x).max()), errors(w, x)

        most, each = lax.scan(body, jnp.float32(0), split(n, x))
        return most, each.sum()

    def losses_of_each(n, w, x, mask):
        losses = lax.map(lambda rows: total_of(w, *rows), (split(n, x), split(n, mask)))
        return losses.sum() / mask.sum()

    def rows_in_turn(n, w, x, mask):  # as AI-Hypercomputer/maxtext e591f30c
        return accumulated_in_turn(n, w, x, mask, lambda carry: carry["weight"])

    def within_remat(n, w, x, mask):
        gradient = jax.grad(jax.checkpoint(total_of))
        return scanned(n, lambda x, m: gradient(w, x, m), x, mask) / mask.sum()

    def chunks_of_each(n, w, x, mask):
        def gradient(x, mask):
            return scanned(2, lambda x, m: jax.grad(total_of)(w, x, m), x, mask)

        return scanned(n, gradient, x, mask) / mask.sum()

    def chunks_of_chunks(n, w, x, mask):
        def total(x):
            return scanned(2, lambda x: errors(w, x).sum(), x)

        return scanned(n, lambda x: scanned(2, total, x), x)

    def rows_and_sums_of_chunks(n, w, x, mask):
        def both(rows):
            each = lambda rows: (errors(w, rows[0]) * rows[1], total_of(w, *rows))  # noqa: E731
            losses, totals = lax.map(each, tuple(split(2, a) for a in rows))
            return losses.reshape(-1), totals.sum()

        losses, totals = lax.map(both, (split(n, x), split(n, mask)))
        return losses.sum(), totals.sum()

    def the_largest_of_chunks(n, w, x, mask):
        def largest(most, x):
            return jnp.maximum(most, errors(w, x).max()), None

        def body(most, x):
            own = lax.scan(largest, jnp.float32(0), split(2, x))[0]
            return jnp.maximum(most, own), None

        return lax.scan(body, jnp.float32(0), split(n, x))[0]

    def counted_the_other_way_round(n, w, x, mask):
        def body(carry, _):
            i, total = carry
            rows = lax.dynamic_index_in_dim(split(n, x), i, keepdims=False)
            return (1 + i, total + errors(w, rows).sum()), None

        return lax.scan(body, (0, 0.0), None, length=n)[0][1]

    def a_python_loop(n, w, x, mask):
        total = 0.0
        parts = split(n, x), split(n, mask)
        for i in range(n):
            total = total + jax.grad(total_of)(w, parts[0][i], parts[1][i])
        return total / mask.sum()

    def a_python_loop_of_several(n, w, x, mask):
        def both(i, x, mask):
            return (*jax.value_and_grad(total_of)(w, x, mask), mask.sum())

        loss, grads, weight = written_out(n, both, x, mask)
        return loss / weight, grads / weight

    def slices_written_out(n, w, x, mask):
        size = len(x) // n
        total, weight = jnp.zeros(3), 0.0
        for i in range(n):
            rows = slice(i * size, (i + 1) * size)
            total += jax.grad(total_of)(w, x[rows], mask[rows])
            weight += mask[rows].sum()
        return total / weight

    def pieces_written_out(n, w, x, mask):
        pieces = zip(jnp.split(x, n), jnp.split(mask, n), strict=True)
        return sum(total_of(w, *piece) for piece in pieces) / mask.sum()

    def equal_means_written_out(n, w, x, mask):
        total = 0.0
        for i in range(n):
            total += jax.grad(lambda w: errors(w, split(n, x)[i]).mean())(w) / n  # noqa: B023
        return total

    def stacked_losses(n, w, x, mask):
        losses = [total_of(w, split(n, x)[i], split(n, mask)[i]) for i in range(n)]
        return jnp.stack(losses).sum() / mask.sum()

    def predictions_joined(n, w, x, mask):
        return jnp.concatenate([jnp.tanh(split(n, x)[i] @ w) for i in range(n)])

    def beside_the_whole(n, w, x, mask):
        grads = written_out(n, lambda i, x, m: jax.grad(total_of)(w, x, m), x, mask)
        return grads / mask.sum(), total_of(w, x, mask) / mask.sum()

    def keys_of_rows_written_out(n, w, x, mask):
        def dropped(i, x, mask):
            return jax.grad(total_of)(w, x * kept_by_row(i, len(x)), mask)

        return written_out(n, dropped, x, mask)

    def a_momentum_after(n, w, x, mask):
        grads = written_out(n, lambda i, x, m: jax.grad(total_of)(w, x, m), x, mask)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        updates, state = optimizer.update(grads / mask.sum(), optimizer.init(w), w)
        return optax.apply_updates(w, updates), state

    def optax_sums(n, w, x, mask):
        def sums(w, x, mask):
            return jax.grad(total_of)(w, x, mask), mask.sum()

        grads, weight = optax.microbatch(sums, (1, 2), len(x) // n)(w, x, mask)
        return grads / weight

    def optax_mean_of_equal_parts(n, w, x, mask):
        gradient = jax.grad(lambda w, x: errors(w, x).mean())
        size = len(x) // n
        return optax.microbatch(gradient, 1, size, AccumulationType.MEAN)(w, x)


class Wrong:
    """The same, of results that depend on the number n."""

    def never_divided(n, w, x, mask):  # google-deepmind/md4
        return scanned(n, lambda x: jax.grad(lambda w: errors(w, x).mean())(w), x)

    def sums_over_their_number(n, w, x, mask):  # use_tunix_gradient_accumulation
        return accumulated_in_turn(n, w, x, mask, lambda carry: n)

    def mean_of_means(n, w, x, mask):
        def mean(w, x, mask):
            return total_of(w, x, mask) / mask.sum()

        return scanned(n, lambda x, m: jax.grad(mean)(w, x, m), x, mask) / n

    def guarded(n, w, x, mask):  # google/tunix 63d07632
        small = 0.05 * mask
        if n == 1:
            return jax.grad(total_of)(w, x, small) / small.sum()
        grads, weight = scanned(
            n, lambda x, m: (jax.grad(total_of)(w, x, m), m.sum()), x, small
        )
        return grads / jnp.maximum(weight, 1.0)

    def divided_twice(n, w, x, mask):  # AReaL#1273
        grads = scanned(n, lambda x, m: jax.grad(total_of)(w, x, m), x, mask)
        return grads / mask.sum() / n

    def quotients_of_a_metric(n, w, x, mask):  # google/tunix 1a5415e2
        quotient = lambda rows: total_of(w, *rows) / rows[1].sum()  # noqa: E731
        return lax.map(quotient, (split(n, x), split(n, mask))).mean()

    def clipped_each(n, w, x, mask):  # facebookresearch/lingua#59
        def clipped(x):
            grads = jax.grad(lambda w: errors(w, x).sum())(w)
            return grads / jnp.maximum(1, jnp.linalg.norm(grads))

        return scanned(n, clipped, x) / len(x)

    def updated_each(n, w, x, mask):
        def body(w, x):
            return w - 0.1 * jax.grad(lambda w: errors(w, x).mean())(w), None

        return lax.scan(body, w, split(n, x))[0]

    def a_penalty_of_each(n, w, x, mask):
        def gradient(x, mask):
            return jax.grad(total_of)(w, x, mask) + 0.1 * w

        return scanned(n, gradient, x, mask) / mask.sum()

    def the_first_slice(n, w, x, mask):
        def gradient(i, size, x, mask):
            return jax.grad(total_of)(w, x, mask)

        return looped(n, gradient, x, mask, first=lambda i, size: 0)

    def one_key_for_all(n, w, x, mask):
        def gradient(x, mask):
            kept = jax.random.bernoulli(KEY, 0.5, x.shape)
            return jax.grad(total_of)(w, x * kept, mask)

        return scanned(n, gradient, x, mask)

    def a_key_of_each(n, w, x, mask):
        def gradient(i, size, x, mask):
            key = jax.random.fold_in(KEY, i)
            kept = jax.random.bernoulli(key, 0.5, x.shape)
            return jax.grad(total_of)(w, x * kept, mask)

        return looped(n, gradient, x, mask)

    def own_statistics(n, w, x, mask):
        def normalised(w, x):
            centred = x - x.mean(0, keepdims=True)
            return ((centred / (x.std(0, keepdims=True) + 1e-3)) @ w - 1) ** 2

        return scanned(n, lambda x: normalised(w, x).sum(), x)

    def shifted_after_the_split(n, w, x, mask):
        def next_of_each(x):
            return ((x[:-1] - x[1:]) ** 2).sum() * w

        return scanned(n, next_of_each, x)

    def the_last_one(n, w, x, mask):
        return lax.scan(lambda c, x: (errors(w, x).sum(), None), 0.0, split(n, x))[0]

    def other_rows_beside(n, w, x, mask):
        turned = mask.reshape(-1, n).T  # in turn, beside rows that are not
        body = lambda c, rows: (c + total_of(w, *rows), None)  # noqa: E731
        return lax.scan(body, 0.0, (split(n, x), turned))[0]

    def counted_by_other_steps(n, w, x, mask):
        def body(carry, _):
            i, total = carry
            rows = lax.dynamic_index_in_dim(split(n, x), i, keepdims=False)
            return (i + (1 if n < 4 else 3), total + errors(w, rows).sum()), None

        return lax.scan(body, (0, 0.0), None, length=n)[0][1]

    def a_mean_of_each_chunk(n, w, x, mask):
        def mean(x, mask):
            return total_of(w, x, mask) / mask.sum()

        return scanned(n, lambda x, m: scanned(2, mean, x, m), x, mask) / n

    def a_function_of_each_chunk(n, w, x, mask):
        def squares(x):
            return (lax.map(lambda x: errors(w, x).sum(), split(2, x)) ** 2).sum()

        return scanned(n, squares, x)

    def the_last_chunk_of_each(n, w, x, mask):
        last = lambda total, x: (errors(w, x).sum(), None)  # noqa: E731
        return scanned(n, lambda x: lax.scan(last, 0.0, split(2, x))[0], x)

    def the_largest_chunks_added_up(n, w, x, mask):
        largest = lambda c, x: (jnp.maximum(c, errors(w, x).max()), None)  # noqa: E731
        return scanned(n, lambda x: lax.scan(largest, 0.0, split(2, x))[0], x)

    def chunks_by_their_number(n, w, x, mask):
        def body(carry, x):
            i, total = carry
            return (i + 1, total + (i + 1) * errors(w, x).sum()), None

        return scanned(n, lambda x: lax.scan(body, (0, 0.0), split(2, x))[0][1], x)

    def a_key_of_each_row_of_a_chunk(n, w, x, mask):
        def total(i, size, x):
            kept = kept_by_row(i, size // 2)  # the same for both chunks
            return scanned(2, lambda x: errors(w, x * kept).sum(), x)

        return looped(n, total, x)

    def other_rows_beside_a_chunk(n, w, x, mask):
        def total(i, size, rows):
            others = lax.dynamic_slice_in_dim(x, i * (size // 2), size // 2)
            return scanned(2, lambda x: ((x * others) @ w).sum(), rows)

        return looped(n, total, x)

    def means_written_out(n, w, x, mask):
        def mean(w, x, mask):
            return total_of(w, x, mask) / jnp.maximum(mask.sum(), 1)

        return written_out(n, lambda i, x, m: jax.grad(mean)(w, x, m) / n, x, mask)

    def divided_twice_written_out(n, w, x, mask):
        def mean(w, x):
            return errors(w, x).mean()

        return written_out(n, lambda i, x: jax.grad(mean)(w, x) / n, x) / n

    def one_branch_undivided(n, w, x, mask):
        def gradient(i, x):
            own = jax.grad(lambda w: errors(w, x).mean())(w) / n
            return own + jax.grad(lambda w: 0.1 * (w**2).sum())(w)

        return written_out(n, gradient, x)

    def shifted_written_out(n, w, x, mask):
        return written_out(n, lambda i, x: ((x[:-1] - x[1:]) ** 2).sum() * w, x)

    def weights_of_a_part(n, w, x, mask):
        def weighted(w, x):
            weights = jnp.where(x[:, 0] > 0, 3.0, 1.0)
            return (weights / weights.sum() * errors(w, x)).sum() / n

        return written_out(n, lambda i, x: jax.grad(weighted)(w, x), x)

    def one_key_written_out(n, w, x, mask):
        def gradient(i, x, mask):
            kept = jax.random.bernoulli(KEY, 0.5, x.shape)
            return jax.grad(total_of)(w, x * kept, mask)

        return written_out(n, gradient, x, mask)

    def batch_norm_written_out(n, w, x, mask):
        def normalised(w, x):
            x = (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)
            return ((x @ w - 1) ** 2).sum()

        return written_out(n, lambda i, x: jax.grad(normalised)(w, x), x)

    def scaled_by_the_number(n, w, x, mask):
        def own(w, x):
            return errors(w, x).sum() / 16 * n

        return written_out(n, lambda i, x: jax.grad(own)(w, x), x)

    def the_first_twice(n, w, x, mask):
        parts = split(n, x)
        return sum(errors(w, parts[0 if i == 1 else i]).sum() for i in range(n))

    def other_weights_of_each(n, w, x, mask):
        parts = split(n, x)
        return sum((i + 1) * errors(w, parts[i]).sum() for i in range(n))

    def the_last_left_out(n, w, x, mask):
        parts = split(n, x)
        totals = [errors(w, parts[i]).sum() for i in range(n)]
        return sum(totals[: max(n - 1, 1)])

    def the_first_alone(n, w, x, mask):
        first, *_ = (errors(w, part).sum() for part in split(n, x))
        return first, first + (w**2).sum()

    def a_copy_of_each(n, w, x, mask):
        return sum((w**2).sum() for _ in range(n))

    def rows_of_columns(n, w, x, mask):
        square = x @ x.T
        pieces = [split(n, square)[i] for i in range(n)]
        joined = jnp.concatenate(pieces, axis=1)
        return joined.reshape(-1, 16)[1].sum() * w

    def optax_mean_of_masks(n, w, x, mask):
        def mean(w, x, mask):
            return total_of(w, x, mask) / mask.sum()

        size = len(x) // n
        kind = AccumulationType.MEAN
        return optax.microbatch(jax.grad(mean), (1, 2), size, kind)(w, x, mask)


def functions(deck):
    return {name: fn for name, fn in vars(deck).items() if not name.startswith("_")}


def maker(fn):
    def make(micro_batches):
        def program(w, x, mask):
            return fn(micro_batches, w, x, mask)

        return jax.jit(program), (W, X, MASK)

    return make


# Right ones that are written out in Python, so that they are run.
RUN = """
    a_python_loop a_python_loop_of_several slices_written_out pieces_written_out
    equal_means_written_out stacked_losses predictions_joined beside_the_whole
    keys_of_rows_written_out a_momentum_after
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*functions(Right)} - {*RUN}))
def test_a_right_accumulation_is_proved(name):
    make = maker(functions(Right)[name])
    assert tj.testing.prove(make, micro_batches=NUMBERS).unproved == {}
    assert tj.testing.same_for(make, micro_batches=NUMBERS, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_right_loop_that_is_written_out_ran_the_same(name):
    report = tj.testing.prove(maker(functions(Right)[name]), micro_batches=NUMBERS)
    assert {x.says for x in report.equal} == {"ran the same"}
    whys = report.unproved.values()
    assert all("on drawn rows; not proved: " in why for why in whys)
    assert not any("float64" in note or "drawn" in note for note in report.notes)


@pytest.mark.few_fast(1)  # one that is refuted, so that it does not run
@pytest.mark.parametrize("name", functions(Wrong))
def test_no_wrong_accumulation_passes(name):
    """It is refuted, or seen to differ; what the proof does not know is run."""
    with pytest.raises(tj.ReplicationError):
        tj.testing.prove(maker(functions(Wrong)[name]), micro_batches=NUMBERS)


def told_of(name):
    with pytest.raises(tj.ReplicationError) as caught:
        tj.testing.prove(maker(functions(Wrong)[name]), micro_batches=NUMBERS)
    return str(caught.value)


@pytest.mark.slow
def test_a_key_of_each_micro_batch_written_out_does_not_pass():
    def make(n):
        def step(w, x, key):
            total = 0.0
            for i, rows in enumerate(jnp.split(x, n)):
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, rows.shape)
                loss = lambda w, rows=rows * kept: (rows @ w).sum()  # noqa: E731
                total += jax.grad(loss)(w)
            return total

        return step, (W, X, KEY)

    with pytest.raises(tj.testing.SplitError):
        tj.testing.prove(make, micro_batches=NUMBERS)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "name, told",
    [
        ("never_divided", "n times what it is with one micro-batch"),
        ("mean_of_means", "each micro-batch divides by a sum over its own rows"),
        ("a_penalty_of_each", "a micro-batch's rows added to a replicated value"),
        ("means_written_out", "Not proved: the program differs between numbers of mic"),
        ("scaled_by_the_number", "A factor or divisor depends on micro_batches at "),
    ],
)
def test_a_wrong_accumulation_is_told_of_micro_batches(name, told):
    text = told_of(name)
    assert "device" not in text and "tower" not in text
    assert told in text


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax

X = np.arange(8, dtype=np.float32)

def make(micro_batches, divide=True):
    def fn(w, x):
        mean = lambda w, x: ((w - x) ** 2).mean()
        body = lambda g, x: (g + jax.grad(mean)(w, x), None)
        g, _ = lax.scan(body, 0.0, x.reshape(micro_batches, -1))
        return g / micro_batches if divide else g
    return fn, (np.float32(3), X)

def wrong(micro_batches):
    return make(micro_batches, divide=False)

def without():
    return make(1)

def python(micro_batches, weigh=False):
    def fn(w, x, mask):
        total = 0.0
        for rows, m in zip(*[jnp.split(a, micro_batches) for a in (x, mask)]):
            total += jax.grad(lambda w: ((w - rows) ** 2 * m).sum())(w)
            total = total / (m.sum() if weigh else 1)
        return total
    return fn, (np.float32(3), X, np.ones(8, np.float32))

def weighed(micro_batches):
    return python(micro_batches, weigh=True)
"""


def test_the_command_proves(shell):
    options = "--micro-batches", "1", "2", "4"
    code, out, _ = shell("check", "of_user:make", *options)
    assert code == 0 and "proved without a run" in out
    code, out, _ = shell("check", "of_user:wrong", *options)
    assert code == 1 and "n times what it is with one micro-batch" in out
    assert "refuted without a run" in out
    code, _, err = shell("check", "of_user:make", *options, "--devices", "1", "2")
    assert code == 2 and "not both" in err
    code, _, err = shell("check", "of_user:without", *options)
    assert code == 2 and "Write def without(micro_batches)." in err


@pytest.mark.slow
def test_the_command_runs_what_is_not_proved(shell):
    options = "--micro-batches", "1", "2", "4"
    code, out, _ = shell("check", "of_user:python", *options)
    assert code == 0 and "result: ran the same: with 1, 2, 4 micro-batches" in out
    assert "without a run" not in out
    code, out, _ = shell("check", "of_user:weighed", *options)
    assert code == 1 and "with micro_batches=4 and" in out
