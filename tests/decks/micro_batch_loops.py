"""Loops over micro-batches in many forms: `Right` ones, and `Wrong` ones beside them.

A function ``(n, w, x, mask, tokens, table) -> results`` takes the number n of
micro-batches. What a right one returns does not depend on n.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from optax.microbatching import AccumulationType

NUMBERS = (1, 2, 4)
DRAW = np.random.default_rng(0)
ARGUMENTS = (
    np.float32([0.3, -0.2, 0.5]),
    DRAW.normal(size=(16, 3)).astype(np.float32),
    (DRAW.random(16) < 0.6).astype(np.float32),
    DRAW.integers(0, 7, size=(16, 5)).astype(np.int32),
    DRAW.normal(size=(7, 3)).astype(np.float32),
)


def errors(w, x):
    return (x @ w) ** 2


def split(n, x):
    return x.reshape(n, -1, *x.shape[1:])


def in_turn(n, x):
    """Micro-batch i has the rows i, i + n, ..."""
    return x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1)


def until(ends, body, start=(0, 0.0)):
    """The sum that a `while` carries last; ``ends`` and ``body`` take the carry."""
    return lax.while_loop(ends, lambda carry: body(*carry), start)[-1]


def each_to(n, total):
    """The sum of what ``total(i)`` is, in a `while` over i from 0 to n."""
    return until(lambda c: c[0] < n, lambda i, c: (i + 1, c + total(i)))


def over_starts(starts, total):
    """The sum of what ``total(start)`` is, in a scan."""
    return lax.scan(lambda c, start: (c + total(start), None), 0.0, starts)[0]


def rows_at(x, start, size):
    return lax.dynamic_slice_in_dim(x, start, size)


def next_words(table, tokens):
    """The losses of a model of the next word, of the flat tokens."""
    logits = (table[tokens[:, :-1]] @ table.T).reshape(-1, len(table))
    labels = tokens[:, 1:].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Right:
    """These are proved."""

    def while_by_index(n, w, x, *_):
        return each_to(n, lambda i: errors(w, split(n, x)[i]).sum())

    def while_of_gradients(n, w, x, mask, *_):
        def body(i, grads, weight):
            rows, flags = [rows_at(a, i * (16 // n), 16 // n) for a in (x, mask)]
            loss = lambda w: (errors(w, rows) * flags).sum()  # noqa: E731
            return i + 1, grads + jax.grad(loss)(w), weight + flags.sum()

        start = 0, jnp.zeros(3), 0.0
        _, grads, weight = lax.while_loop(lambda c: n > c[0], lambda c: body(*c), start)
        return grads / weight

    def the_number_as_an_argument(n, w, x, *_):
        @jax.jit
        def run(number, parts):
            body = lambda i, c: c + errors(w, parts[i]).sum()  # noqa: E731
            return lax.fori_loop(0, number, body, 0.0)

        return run(n, split(n, x))

    def while_up_to_the_last_row(n, w, x, *_):
        size = len(x) // n

        def body(start, total):
            return start + size, total + errors(w, rows_at(x, start, size)).sum()

        return until(lambda c: c[0] < len(x), body)

    def the_start_and_the_number_after(n, w, x, *_):
        def body(i, start, total):
            rows = rows_at(x, start, 16 // n)
            return i + 1, start + 16 // n, total + errors(w, rows).sum()

        i, start, total = lax.while_loop(
            lambda c: c[0] < n, lambda c: body(*c), (0, 0, 0.0)
        )
        return total * start, total * i / n

    def while_over_rows(n, w, x, *_):
        def of_rows(rows):
            return until(
                lambda c: c[0] < len(rows),
                lambda i, c: (i + 1, c + errors(w, rows[i])),
            )

        return lax.map(of_rows, split(n, x)).sum()

    def while_it_passes_a_bound(n, w, *_):
        def body(i, total):
            return i + 8, total + (w**2).sum() / n

        return until(lambda c: c[0] < 7 * n, body)

    def rows_in_turn_flattened(n, w, x, *_):
        return lax.map(lambda x: (x.reshape(-1) ** 2).sum(), in_turn(n, x)).sum()

    def words_in_turn(n, w, x, mask, tokens, table):
        return jax.grad(
            lambda e: lax.map(
                lambda t: next_words(e, t).sum(), in_turn(n, tokens)
            ).sum()
        )(table)

    def optax_words(n, w, x, mask, tokens, table):
        loss = lambda table, tokens: next_words(table, tokens).mean()  # noqa: E731
        gradient = jax.value_and_grad(loss)
        mean = AccumulationType.MEAN
        return optax.microbatch(gradient, 1, 16 // n, mean)(table, tokens)

    def chunks_of_rows_in_turn(n, w, x, *_):
        def of_chunks(x):
            return lax.map(lambda x: errors(w, x).sum(), split(2, x)).sum()

        return lax.map(of_chunks, in_turn(n, x)).sum()

    def rows_in_turn_beside_rows(n, w, x, mask, *_):
        def both(x, flags):
            return errors(w, x).sum(), flags.sum()

        losses, weights = lax.map(lambda a: both(*a), (in_turn(n, x), split(n, mask)))
        return losses.sum() / weights.sum()

    def by_starts(n, w, x, mask, *_):
        size = len(x) // n

        def total(start):
            return errors(w, rows_at(x, start, size)) @ rows_at(mask, start, size)

        summed = over_starts(jnp.arange(n) * size, total)
        mapped = lax.map(total, jnp.arange(0, len(x), size))
        return summed, mapped.sum()

    def every_nth_row(n, w, x, *_):
        dealt = x.reshape(-1, n, x.shape[-1])
        total = lambda i, c: c + errors(w, dealt[:, i]).sum()  # noqa: E731
        return lax.fori_loop(0, n, total, 0.0)

    def losses_in_turn(n, w, x, *_):
        losses = lax.map(lambda x: errors(w, x), in_turn(n, x))
        return losses.sum(), losses.max(), losses.swapaxes(0, 1).reshape(-1)

    def losses_in_an_array(n, w, x, *_):
        def body(i, losses):
            return losses.at[i].set(errors(w, split(n, x)[i]).sum())

        return lax.fori_loop(0, n, body, jnp.ones(n)).sum()

    def predictions_in_an_array(n, w, x, *_):
        def body(i, both):
            rows = split(n, x)[i]
            return both[0].at[i].set(rows @ w), lax.dynamic_update_index_in_dim(
                both[1], jnp.tanh(rows), i, 0
            )

        start = jnp.zeros((n, 16 // n)), jnp.zeros((n, 16 // n, 3))
        first, second = lax.fori_loop(0, n, body, start)
        return first.reshape(-1), second.reshape(-1, 3)

    def optax_joins_rows(n, w, x, *_):
        kinds = AccumulationType.CONCAT, AccumulationType.SUM
        both = lambda x: (jnp.tanh(x * w[None]), errors(w, x).sum())  # noqa: E731
        return optax.microbatch(both, 0, 16 // n, kinds)(x)

    def optax_gradient_of_each_row(n, w, x, *_):
        loss = lambda w, x: errors(w, x).sum()  # noqa: E731
        clip = lambda grads: grads / jnp.maximum(1, jnp.linalg.norm(grads))  # noqa: E731
        options = {"microbatch_size": 16 // n, "transform_fn": clip}
        total, each = optax.microbatching.micro_grad(loss, **options)(w, x)
        return total, each.values


class Wrong:
    """These depend on the number of micro-batches."""

    def one_trip_too_few(n, w, x, *_):
        return each_to(max(n - 1, 1), lambda i: errors(w, split(n, x)[i]).sum())

    def counted_from_1(n, w, x, *_):
        def body(i, total):
            return i + 1, total + errors(w, split(n, x)[i]).sum()

        return until(lambda c: c[0] < n, body, (1, 0.0))

    def every_other(n, w, x, *_):
        def body(i, total):
            return i + 2, total + errors(w, split(n, x)[i]).sum()

        return until(lambda c: c[0] < n, body)

    def means_in_a_while(n, w, x, mask, *_):
        def mean(i):
            flags = split(n, mask)[i]
            return (errors(w, split(n, x)[i]) * flags).sum() / flags.sum() / n

        return each_to(n, mean)

    def ended_by_the_sum(n, w, x, *_):
        def body(i, total):
            return i + 1, total + errors(w, split(n, x)[i]).sum()

        return until(lambda c: (c[0] < n) & (c[1] < 1.0), body)

    def a_number_that_shrinks(n, w, x, *_):
        def body(i, bound, total):
            return i + 1, bound - 1, total + errors(w, split(n, x)[i]).sum()

        return until(lambda c: c[0] < c[1], body, (0, n, 0.0))

    def ended_by_another_count(n, w, x, *_):
        def body(i, twice, total):
            return i + 1, twice + 2, total + errors(w, split(n, x)[i]).sum()

        return until(lambda c: c[1] < n, body, (0, 0, 0.0))

    def a_copy_in_each_trip(n, w, *_):
        return each_to(n, lambda i: (w**2).sum())

    def a_trip_less(n, w, *_):
        def body(i, total):
            return i + 1, total + (w**2).sum() / n

        return until(lambda c: c[0] < n, body, (1, 0.0))

    def a_trip_more(n, w, *_):
        def body(i, total):
            return i + 2, total + (w**2).sum() / n

        return until(lambda c: c[0] < 3 * n, body)

    def the_number_of_trips(n, w, *_):
        return lax.while_loop(lambda c: c < n, lambda c: c + 1, 0) * w

    def past_the_largest_number(n, w, *_):
        """With two micro-batches the count wraps around, so there are 11 trips."""
        step = {1: 6 << 28, 2: 5 << 28, 4: 6 << 26}[n]

        def body(i, total):
            return i + step, total + (w**2).sum() / n

        return until(lambda c: c[0] < 6 << 28, body)

    def starts_from_the_second(n, w, x, *_):
        size = len(x) // n

        def body(start, total):
            return start + size, total + errors(w, rows_at(x, start, size)).sum()

        return until(lambda c: c[0] < len(x), body, (size if n > 1 else 0, 0.0))

    def starts_that_overlap(n, w, x, *_):
        def body(start, total):
            rows = rows_at(x, start, 16 // n)
            return start + (12 // n), total + errors(w, rows).sum()

        return until(lambda c: c[0] < 12, body)

    def starts_of_other_rows(n, w, x, mask, *_):
        size = len(x) // n

        def body(start, total):
            rows = rows_at(x, start, size)
            return start + size, total + errors(w, rows) @ rows_at(mask, 0, size)

        return until(lambda c: c[0] < len(x), body)

    def numbers_of_rows_in_turn(n, w, x, *_):
        dealt = in_turn(n, x)

        def body(i, total):
            number = i * (16 // n) + jnp.arange(16 // n)
            return total + errors(w, dealt[i]) @ (1.0 * number)

        return lax.fori_loop(0, n, body, 0.0)

    def rows_in_turn_by_other_rows(n, w, x, mask, *_):
        dealt = in_turn(n, x)

        def body(i, total):
            flags = rows_at(mask, i * (16 // n), 16 // n)
            return total + errors(w, dealt[i]) @ flags

        return lax.fori_loop(0, n, body, 0.0)

    def rows_in_turn_by_rows(n, w, x, mask, *_):
        product = lambda a: errors(w, a[0]) @ a[1]  # noqa: E731
        return lax.map(product, (in_turn(n, x), split(n, mask))).sum()

    def words_in_turn_by_rows_in_turn(n, w, x, mask, tokens, table):
        words = in_turn(n, tokens.reshape(-1))
        product = lambda a: a[0].reshape(-1) @ a[1]  # noqa: E731
        return lax.map(product, (1.0 * in_turn(n, tokens), 1.0 * words)).sum()

    def starts_of_half_as_many(n, w, x, *_):
        size = len(x) // n
        starts = jnp.arange(n) * (size // 2)
        return over_starts(starts, lambda i: errors(w, rows_at(x, i, size)).sum())

    def starts_squared(n, w, x, *_):
        size = len(x) // n
        starts = jnp.arange(n) * jnp.arange(n) * size
        return over_starts(starts, lambda i: errors(w, rows_at(x, i, size)).sum())

    def the_sum_of_starts(n, *_):
        return 1.0 * (jnp.arange(n) * (16 // n)).sum()

    def starts_as_weights(n, w, x, *_):
        size = len(x) // n
        return over_starts(
            jnp.arange(n) * size,
            lambda i: i * errors(w, rows_at(x, i, size)).sum(),
        )

    def starts_of_rows_in_turn(n, w, x, mask, *_):
        def body(total, both):
            rows, start = both
            own = rows_at(mask, start, 16 // n)
            return total + errors(w, rows) @ own, None

        starts = jnp.arange(n) * (16 // n)
        return lax.scan(body, 0.0, (in_turn(n, x), starts))[0]

    def written_to_the_first(n, w, x, *_):
        def body(i, losses):
            return losses.at[0].set(errors(w, split(n, x)[i]).sum())

        return lax.fori_loop(0, n, body, jnp.zeros(n)).sum()

    def written_by_some(n, w, x, *_):
        def body(i, losses):
            new = losses.at[i].set(errors(w, split(n, x)[i]).sum())
            return jnp.where(i % 2 == 0, new, losses)

        return lax.fori_loop(0, n, body, jnp.zeros(n)).sum()

    def written_by_some_branch(n, w, x, *_):
        def body(i, losses):
            new = errors(w, split(n, x)[i]).sum()
            return lax.cond(new > 1, lambda x: x.at[i].set(new), lambda x: x, losses)

        return lax.fori_loop(0, n, body, jnp.zeros(n)).sum()

    def written_in_part(n, w, x, *_):
        def body(i, out):
            new = jnp.tanh(split(n, x)[i]).sum(axis=0)[:2]
            return lax.dynamic_update_slice(out, new[None], (i, 1))

        return lax.fori_loop(0, n, body, jnp.ones((n, 3))).sum(axis=0)

    def read_while_written(n, w, x, *_):
        def body(i, losses):
            return losses.at[i].set(errors(w, split(n, x)[i]).sum() + losses.sum())

        return lax.fori_loop(0, n, body, jnp.zeros(n)).sum()

    def added_to_an_array(n, w, x, *_):
        def body(i, losses):
            return losses.at[i].add(errors(w, split(n, x)[i]).sum())

        return lax.fori_loop(0, n, body, jnp.ones(n)).sum()

    def the_largest_of_sums(n, w, x, *_):
        def body(i, losses):
            return losses.at[i].set(errors(w, split(n, x)[i]).sum())

        return lax.fori_loop(0, n, body, jnp.zeros(n)).max()

    def joined_in_turn(n, w, x, *_):
        dealt = in_turn(n, x)

        def body(i, out):
            return out.at[i].set(dealt[i] @ w)

        return lax.fori_loop(0, n, body, jnp.zeros((n, 16 // n))).reshape(-1)

    def words_joined_in_turn(n, w, x, mask, tokens, table):
        flat = lax.map(lambda t: 1.0 * t.reshape(-1), in_turn(n, tokens))
        return flat.swapaxes(0, 1).reshape(-1)

    def optax_joins_and_weighs(n, w, x, mask, *_):
        own = lambda x, mask: errors(w, x) * mask / mask.sum()  # noqa: E731
        kind = AccumulationType.CONCAT
        return optax.microbatch(own, (0, 1), 16 // n, kind)(x, mask)

    def optax_running_mean_of_masks(n, w, x, mask, *_):
        own = lambda x, mask: errors(w, x) @ mask / mask.sum()  # noqa: E731
        kind = AccumulationType.RUNNING_MEAN
        return optax.microbatch(own, (0, 1), 16 // n, kind)(x, mask)

    def means_of_rows_in_turn(n, w, x, mask, *_):
        mean = lambda a: errors(w, a[0]) @ a[1] / a[1].sum()  # noqa: E731
        return lax.map(mean, (in_turn(n, x), in_turn(n, mask))).mean()

    def neighbours_in_turn(n, w, x, *_):
        return lax.map(lambda x: errors(w, x[1:] - x[:-1]).sum(), in_turn(n, x)).sum()

    def pairs_in_turn(n, w, x, *_):
        pairs = lambda x: x.reshape(-1, 2, 3).prod(axis=1).sum()  # noqa: E731
        return lax.map(pairs, in_turn(n, x)).sum()

    def pairs_of_words_in_turn(n, w, x, mask, tokens, table):
        pairs = lambda t: (1.0 * t).reshape(-1, 10).prod(axis=1)  # noqa: E731
        return lax.map(pairs, in_turn(n, tokens)).sum()

    def pairs_of_chunks_in_turn(n, w, x, *_):
        pairs = lambda x: x.reshape(-1, 2, 3).prod(axis=1).sum()  # noqa: E731
        return lax.map(lambda x: lax.map(pairs, split(2, x)).sum(), in_turn(n, x)).sum()

    def pairs_joined_in_turn(n, w, x, *_):
        def total(rows):
            return jnp.tanh(rows.reshape(-1, 6).sum(axis=1)).sum()

        return lax.map(total, in_turn(n, x)).sum()

    def written_in_turn(n, w, x, *_):
        dealt = in_turn(n, x)

        def body(i, total):
            own = errors(w, dealt[i])
            return total + lax.dynamic_update_slice_in_dim(
                jnp.zeros(16), own, i * (16 // n), 0
            )

        return lax.fori_loop(0, n, body, jnp.zeros(16))

    def predictions_in_turn(n, w, x, *_):
        return lax.map(lambda x: x @ w, in_turn(n, x)).reshape(-1)

    def words_means_in_turn(n, w, x, mask, tokens, table):
        loss = lambda t: next_words(table, t).sum() / (t > 2).sum()  # noqa: E731
        return lax.map(loss, in_turn(n, tokens)).mean()
