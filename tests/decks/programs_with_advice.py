"""Programs that are not proved for a known reason, and the same with advice followed.

The first ones give other results for other numbers, except where a class says that they
are right. The second are proved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from on_devices import ALL, SPLIT, W, X, mapped

KEY = jax.random.key(3)
EXPERTS, WORDS = 8, 16
DRAW = np.random.default_rng(7)
OF_EXPERTS = DRAW.normal(size=(EXPERTS, 3, 3)).astype(np.float32)
ROUTER = DRAW.normal(size=(3, EXPERTS)).astype(np.float32)
TOKENS = DRAW.normal(size=(2, 8, 3)).astype(np.float32)
TABLE = DRAW.normal(size=(WORDS, 3)).astype(np.float32)
IDS = DRAW.integers(WORDS, size=5).astype(np.int32)
FOR_EACH = (ALL, SPLIT, SPLIT)  # the specs of a key, or of keys, for each device


def gradient(w, x):
    return jax.grad(lambda w: ((x @ w - 1) ** 2).sum())(w)


def clipped(total):
    return optax.clip_by_global_norm(1.0).update(total, optax.EmptyState())[0]


def masked(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def logsumexp(x, largest, total):
    largest = largest(lax.stop_gradient(x.max()))
    return jnp.log(total(jnp.exp(x - largest).sum())) + largest


def over_i(op):
    return lambda x: op(x, "i")


def scanned(n, body, *arrays):
    """Add up what ``body`` makes of the rows of each micro-batch."""
    parts = [x.reshape(n, -1, *x.shape[1:]) for x in arrays]
    shape = jax.eval_shape(body, *[x[0] for x in parts])
    start = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(lambda sum, rows: (sum + body(*rows), None), start, parts)[0]


def of_experts(devices, there, back, product, kept=lambda chosen: chosen):
    """Send each token to its expert's device by ``there``, and ``back``."""

    def step(experts, router, x):
        gates = jax.nn.softmax(x @ router)
        chosen = kept(jax.nn.one_hot(gates.argmax(-1), EXPERTS))
        sent = there(jnp.einsum("be,bd->ebd", chosen, x))
        own = back(jnp.tanh(jnp.einsum(product, sent, experts)))
        return lax.psum((jnp.einsum("be,ebd->bd", gates * chosen, own) ** 2).sum(), "i")

    specs = SPLIT, ALL, SPLIT
    return mapped(devices, step, OF_EXPERTS, ROUTER, X, ins=specs)


def dealt(split, joined, tiled=True):
    return lambda x: lax.all_to_all(x, "i", split, joined, tiled=tiled)


def of_own_words(devices, look_up):
    """Look up ids in a table of which each device has some words, and add up."""

    def step(table, ids):
        return lax.psum(look_up(table, ids, len(table)), "i")

    return mapped(devices, step, TABLE, IDS, ins=(SPLIT, ALL))


def first_word(count):
    return lax.axis_index("i") * count


def by_one_hot(table, ids, count):
    return jax.nn.one_hot(ids - first_word(count), count) @ table


class OnDevices:
    """For each: the words of the reason and of the advice; a program, with and without.

    ``is_cured`` tells whether the advice is followed.
    """

    def a_clipped_sum(devices, is_cured):
        """square of a sum over a device's rows | clip, or take a norm, afterwards"""

        def step(w, x):
            total = gradient(w, x)
            return (
                clipped(lax.psum(total, "i"))
                if is_cured
                else lax.psum(clipped(total), "i")
            )

        return mapped(devices, step, W, X)

    def a_mean_of_means(devices, is_cured):
        """compared with a mean over a device's own rows | Take jax.lax.pmean of it"""

        def step(w, x):
            mean = (x @ w).mean()
            mean = lax.pmean(mean, "i") if is_cured else mean
            return lax.psum((x @ w > mean).sum(), "i")

        return mapped(devices, step, W, X)

    def a_logsumexp(devices, is_cured):
        """is_finite of a maximum over a device's rows | add up the exponentials"""

        def step(w, x):
            if is_cured:
                return logsumexp(x @ w, over_i(lax.pmax), over_i(lax.psum))
            return lax.psum(jax.nn.logsumexp(x @ w), "i")

        return mapped(devices, step, W, X)

    def a_key_of_each(devices, is_cured):
        """random_split makes an array with one entry per device | a key for each row"""

        def step(w, x, keys):
            if is_cured:
                return lax.psum((jax.vmap(masked)(keys, x) @ w).sum(), "i")
            return lax.psum((masked(keys[0], x) @ w).sum(), "i")

        fn, _ = mapped(devices, step, W, X, KEY, ins=FOR_EACH)

        def split(w, x, key):
            return fn(w, x, jax.random.split(key, len(x) if is_cured else len(devices)))

        return split, (W, X, KEY)

    def a_key_of_its_number(devices, is_cured):
        """a key of a replicated value and axis_index | jax.random.split(key, rows)"""

        def step(w, x, keys):
            if is_cured:
                return lax.psum((jax.vmap(masked)(keys, x) @ w).sum(), "i")
            key = jax.random.fold_in(keys, lax.axis_index("i"))
            return lax.psum((masked(key, x) @ w).sum(), "i")

        keys = jax.random.split(KEY, len(X)) if is_cured else KEY
        ins = (ALL, SPLIT, SPLIT if is_cured else ALL)
        return mapped(devices, step, W, X, keys, ins=ins)

    def one_key(devices, is_cured):
        """all devices draw the same numbers for their rows | a key for each row"""

        def step(w, x, keys):
            x = jax.vmap(masked)(keys, x) if is_cured else masked(keys, x)
            return lax.psum((x @ w).sum(), "i")

        keys = jax.random.split(KEY, len(X)) if is_cured else KEY
        ins = (ALL, SPLIT, SPLIT if is_cured else ALL)
        return mapped(devices, step, W, X, keys, ins=ins)

    def rows_that_meet(devices, is_cured):
        """an array has several dims of rows | jax.lax.all_gather(rows, axis, tiled"""

        def step(w, x):
            own = x * w[None]
            others = lax.all_gather(own, "i", tiled=True) if is_cured else own
            return lax.psum(jnp.exp(own @ others.T).sum(), "i")

        return mapped(devices, step, W, X)

    def a_size_for_each_number(devices, is_cured):
        """a size that is no number of rows depends on | Give the array one size for"""

        def step(w, x):
            return jnp.ones(4 if is_cured else len(devices) + 1) * w.sum()

        return mapped(devices, step, W, X)

    def arguments_for_each_number(devices, is_cured):
        """args[1] is a different array for another | Let make give the same"""

        def step(w, x):
            return lax.psum((x @ w).sum(), "i")

        return mapped(devices, step, W, X if is_cured else X + len(devices))

    def a_capacity_of_each(devices, is_cured):
        """cumsum along a device's rows | jax.lax.all_gather(rows, axis, tiled=True)"""

        def kept(chosen):
            own = jnp.cumsum(chosen, 0)
            if is_cured:
                places = jnp.cumsum(lax.all_gather(chosen, "i", tiled=True), 0)
                first = first_word(len(chosen)), 0
                own = lax.dynamic_slice(places, first, chosen.shape)
            return jnp.where(own <= 1, chosen, 0)

        how = dealt(0, 1), dealt(1, 0), "ebd,edf->ebf"
        return of_experts(devices, *how, kept)


class RightOnDevices:
    """The same, of programs that are right in both forms."""

    def a_dim_of_devices(devices, is_cured):
        """an array has several dims of rows | (there). Use no dim of devices"""
        if is_cured:
            return of_experts(devices, dealt(0, 1), dealt(1, 0), "ebd,edf->ebf")
        size = len(devices)

        def there(x):
            return dealt(0, 0, False)(x.reshape(size, -1, *x.shape[1:]))

        def back(x):
            return dealt(0, 0, False)(x).reshape(-1, *x.shape[2:])

        return of_experts(devices, there, back, "jebd,edf->jebf")

    def experts_of_all_devices(devices, is_cured):
        """no rule for all_to_all of a device's rows | joins rows along dim 1"""
        if is_cured:
            return of_experts(devices, dealt(0, 1), dealt(1, 0), "ebd,edf->ebf")
        size = len(devices)

        def there(x):
            return dealt(0, 0)(x).reshape(size, -1, *x.shape[1:])

        def back(x):
            return dealt(0, 0)(x.reshape(-1, *x.shape[2:]))

        return of_experts(devices, there, back, "jebd,edf->jebf")

    def tokens_of_all_rows_in_a_dim(devices, is_cured):
        """no rule for all_to_all of a device's rows | reshape no dim that is split"""

        def step(experts, router, x):
            given = x if is_cured else x.reshape(-1, 3)
            gates = jax.nn.softmax(given @ router)
            chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
            sent = jnp.einsum("...e,...d->e...d", chosen, given)
            place = sent.ndim - 2
            sent = dealt(0, place)(sent)
            own = dealt(place, 0)(jnp.einsum("e...d,edf->e...f", sent, experts))
            out = jnp.einsum("...e,e...d->...d", gates * chosen, own).reshape(x.shape)
            return lax.psum(((out - x) ** 2).sum(), "i")

        ins = SPLIT, ALL, P(None, "i")
        return mapped(devices, step, OF_EXPERTS, ROUTER, TOKENS, ins=ins)

    def words_at_clipped_places(devices, is_cured):
        """from a device's first row compared with | take v = jax.nn.one_hot(ids"""

        def look_up(table, ids, count):
            own = ids - first_word(count)
            is_own = (own >= 0) & (own < count)
            found = table[jnp.clip(own, 0, count - 1)]
            return jnp.where(is_own[:, None], found, 0)

        return of_own_words(devices, by_one_hot if is_cured else look_up)

    def words_of_a_range(devices, is_cured):
        """compared with the number of a device's first row | and write v @ table"""

        def look_up(table, ids, count):
            start = first_word(count)
            is_other = (ids < start) | (ids >= start + count)
            found = table[jnp.where(is_other, 0, ids - start)]
            return jnp.where(is_other[:, None], 0, found)

        return of_own_words(devices, by_one_hot if is_cured else look_up)


class OfMicroBatches:
    """The same of numbers of micro-batches."""

    def a_clipped_sum(n, is_cured):
        """square of a sum over a micro-batch's rows | Clip it, or take its norm"""

        def step(w, x):
            if is_cured:
                return clipped(scanned(n, lambda x: gradient(w, x), x))
            return scanned(n, lambda x: clipped(gradient(w, x)), x)

        return step, (W, X)

    def a_penalty_of_each(n, is_cured):
        """a micro-batch's rows added to a replicated value | after the loop"""

        def step(w, x):
            if is_cured:
                return scanned(n, lambda x: gradient(w, x), x) + w
            return scanned(n, lambda x: gradient(w, x) + w, x)

        return step, (W, X)

    def a_mean_of_means(n, is_cured):
        """compared with a mean over a micro-batch's own rows | divide after the loop"""

        def step(w, x):
            mean = scanned(n, lambda x: (x @ w).sum(), x) / len(x)

            def above(x):
                return (x @ w > (mean if is_cured else (x @ w).mean())).sum()

            return scanned(n, above, x)

        return step, (W, X)

    def a_logsumexp(n, is_cured):
        """is_finite of a maximum over a micro-batch's rows | the logarithm after the"""

        def step(w, x):
            if is_cured:
                return jnp.log(scanned(n, lambda x: jnp.exp(x @ w).sum(), x))
            return scanned(n, lambda x: jax.nn.logsumexp(x @ w), x)

        return step, (W, X)

    def a_largest_of_each(n, is_cured):
        """a maximum over a micro-batch's rows | Carry the largest with jnp.maximum"""

        def step(w, x):
            parts = x.reshape(n, -1, 3)
            if not is_cured:
                return scanned(n, lambda x: (x @ w).max() ** 2, x)

            def body(largest, x):
                return jnp.maximum(largest, (x @ w).max()), None

            return lax.scan(body, -jnp.inf, parts)[0] ** 2

        return step, (W, X)

    def a_key_of_each(n, is_cured):
        """random_split makes an array with one entry per micro- | a key for each row"""

        def step(w, x, key):
            keys = jax.random.split(key, len(x) if is_cured else n)

            def body(keys, x):
                x = jax.vmap(masked)(keys, x) if is_cured else masked(keys[0], x)
                return gradient(w, x)

            return scanned(n, body, keys, x)

        return step, (W, X, KEY)

    def a_key_of_its_number(n, is_cured):
        """a key of a replicated value and the number of a micro- | cut like the rows"""

        def step(w, x, key):
            if is_cured:
                keys = jax.random.split(key, len(x))
                mask = jax.vmap(masked)
                return scanned(n, lambda k, x: gradient(w, mask(k, x)), keys, x)
            parts = jnp.asarray(x).reshape(n, -1, 3)

            def body(i, sum):
                own = jax.random.fold_in(key, i)
                return sum + gradient(w, masked(own, parts[i]))

            return lax.fori_loop(0, n, body, jnp.zeros(w.shape))

        return step, (W, X, KEY)

    def one_key(n, is_cured):
        """all micro-batches draw the same numbers for their rows | a key for each"""

        def step(w, x, key):
            if is_cured:
                keys = jax.random.split(key, len(x))
                mask = jax.vmap(masked)
                return scanned(n, lambda k, x: gradient(w, mask(k, x)), keys, x)
            return scanned(n, lambda x: gradient(w, masked(key, x)), x)

        return step, (W, X, KEY)

    def noise_of_each(n, is_cured):
        """random_split of the sum of the rows so far | once, after the loop"""

        def step(w, x, key):
            def body(carry, x):
                sum, key = carry
                if is_cured:
                    return (sum + gradient(w, x), key), None
                key, own = jax.random.split(key)
                noise = jax.random.normal(own, w.shape)
                return (sum + gradient(w, x) + noise, key), None

            start = jnp.zeros(w.shape), key
            total, _ = lax.scan(body, start, x.reshape(n, -1, 3))[0]
            return total + jax.random.normal(key, w.shape) if is_cured else total

        return step, (W, X, KEY)

    def a_running_mean(n, is_cured):
        """the sum of the rows so far | do all else once, after the loop"""

        def step(w, x):
            def body(carry, x):
                new = gradient(w, x)
                return carry + new if is_cured else 0.5 * carry + 0.5 * new, None

            total = lax.scan(body, jnp.zeros(w.shape), x.reshape(n, -1, 3))[0]
            return total / len(x)

        return step, (W, X)

    def a_mean_so_far(n, is_cured):
        """the number of a micro-batch added to a repl | add up, and divide after"""

        def step(w, x):
            def body(i, mean):
                new = gradient(w, jnp.asarray(x).reshape(n, -1, 3)[i])
                weight = 1 / (i + 1)
                so_far = mean * (1 - weight) + new * weight
                return mean + new if is_cured else so_far

            total = lax.fori_loop(0, n, body, jnp.zeros(w.shape))
            return total / len(x) if is_cured else total

        return step, (W, X)

    def rows_by_arithmetic(n, is_cured):
        """the number of a micro-batch | x.reshape(n, -1, *x.shape[1:])[i]"""

        def step(w, x):
            def body(i, sum):
                own = jnp.asarray(x)[i + jnp.arange(len(x) // n)]
                rows = jnp.asarray(x).reshape(n, -1, 3)[i] if is_cured else own
                return sum + gradient(w, rows)

            return lax.fori_loop(0, n, body, jnp.zeros(w.shape))

        return step, (W, X)

    def a_size_for_each_number(n, is_cured):
        """a size that is no number of rows depends on | Give the array one size for"""

        def step(w, x):
            return jnp.ones(4 if is_cured else n + 1) * w.sum()

        return step, (W, X)

    def arguments_for_each_number(n, is_cured):
        """args[1] is a different array for another | Let make give the same"""

        def step(w, x):
            return scanned(n, lambda x: gradient(w, x), x)

        return step, (W, X if is_cured else X + n)

    def rows_that_meet(n, is_cured):
        """an array has several dims of rows | for all rows, before the loop"""

        def step(w, x):
            all_rows = x * w[None]

            def body(x):
                own = x * w[None]
                return jnp.exp(own @ (all_rows if is_cured else own).T).sum()

            return scanned(n, body, x)

        return step, (W, X)


def words_of(case):
    why, _, advice = case.__doc__.partition(" | ")
    return why, advice
