"""Functions of a tower that lay rows out anew, choose among them, or join towers' rows.

As in `split_functions`: right ones, and wrong ones beside them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from layouts import cases
from split_functions import BY_INDEX, F, psum, total

import towerjax as tj


class Split:
    # Rows that are repeated, and written among others.

    def rows_repeated_beside_others(p, b, t):
        pairs = jnp.tile(b["x"], (2, 1)).reshape(-1, 2, F)
        return total((pairs * b["x"][:, None]).sum((1, 2)), t)

    def padding_in_pairs_of_repeated_rows(p, b, t):
        first, second = jnp.tile(b["y"] * t.weight, 2).reshape(-1, 2).T
        return tj.Sum((first * second).sum())

    def count_of_repeated_rows(p, b, t):
        return jnp.tile(p["b"][None], t.rows).sum()

    def rows_after_another(p, b, t):
        x = jnp.concatenate([p["k"][:1], b["x"][:-1]])
        return total((x * b["x"]).sum(1), t)

    def rows_after_one_of_all(p, b, t):
        x = jnp.concatenate([p["k"][:1], b["x"]])
        return total(jnp.tanh(x[: t.rows] * b["x"]).sum(1), t)

    def padding_after_none(p, b, t):
        return tj.Sum(jnp.concatenate([jnp.zeros(0), b["y"]]).sum())

    def one_key_repeated_for_all_rows(p, b, t):
        keys = jnp.tile(t.rng[None], t.rows)
        return total(b["y"] * jax.vmap(jax.random.uniform)(keys), t)

    def largest_written_to_others(p, b, t):
        other = jnp.abs(b["y"]).astype(int)
        return total(b["x"].at[other].max(b["x"], **BY_INDEX).sum(1) * b["y"], t)

    def largest_in_a_table_of_a_tower(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        return jnp.full(F, -9.0).at[label].max(b["y"])

    def smallest_in_a_table_of_largest(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        least = jnp.full(F, 9.0).at[label].min(b["y"])
        return lax.pmax(least, t.axis_names)

    def padding_in_a_table_of_largest(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        return lax.pmax(jnp.full(F, -9.0).at[label].max(b["y"]), t.axis_names)

    def elements_times_a_power(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        here = (jnp.arange(t.rows), label)
        times = t.num_towers
        x = (times * b["x"]).at[here].multiply(times)
        return total(x.sum(1) / times, t)

    def element_of_a_part_times_itself(p, b, t):
        part = t.weight @ b["x"]
        return tj.Sum(part.at[0].multiply(part[1]))

    def images_in_groups(p, b, t):
        image = b["x"][:, None] * jnp.ones((1, 2, 1))
        kernel = jnp.ones((4, 2, 2)) * p["b"]
        out = lax.conv_general_dilated(image, kernel, (1,), "SAME", batch_group_count=2)
        return tj.Sum(out.sum())

    # Loops over chunks of rows.

    def chunks_by_their_number(p, b, t):
        chunks = (b["y"] * t.weight).reshape(2, -1)
        body = lambda c, x: (c + x[0].sum() * x[1], None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (chunks, jnp.arange(2.0)))[0])

    def chunks_that_decay(p, b, t):
        body = lambda c, y: (0.9 * c + y.sum(), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[0])

    def last_chunk(p, b, t):
        body = lambda c, y: (y.sum(), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[0])

    def chunks_by_a_counter(p, b, t):
        body = lambda c, y: ((c[0] + 1.0, c[1] + c[0] * y.sum()), None)  # noqa: E731
        start = (1.0, b["y"] @ t.weight)
        chunks = (b["y"] * t.weight).reshape(2, -1)
        return tj.Sum(lax.scan(body, start, chunks)[0][1])

    def function_of_a_chunks_sum(p, b, t):
        body = lambda c, y: (c + jnp.tanh(y.sum()), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[0])

    def chunks_of_all_towers(p, b, t):
        body = lambda c, y: (c + jnp.tanh(psum(y.sum(), t)), None)  # noqa: E731
        every = lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[0]
        return tj.Sum(every / t.num_towers)

    def sums_of_chunks(p, b, t):
        body = lambda c, y: (c, y.sum())  # noqa: E731
        each = lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[1]
        return tj.Sum(each * jnp.arange(2.0))

    def chunks_beside_others(p, b, t):
        other = (b["x"][:, 0] * t.weight).reshape(-1, 2).T
        body = lambda c, x: (c + (x[0] * x[1]).sum(), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (b["y"].reshape(2, -1), other))[0])

    def chunks_of_one_key(p, b, t):
        draw = lambda y: y * jax.random.uniform(t.rng, y.shape)  # noqa: E731
        body = lambda c, y: (c + draw(y).sum(), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, (b["y"] * t.weight).reshape(2, -1))[0])

    def chunks_turned_round(p, b, t):
        body = lambda c, y: (c, jnp.tanh(y))  # noqa: E731
        each = lax.scan(body, 0.0, b["y"].reshape(2, -1))[1]
        return total(each.T.reshape(-1) * b["x"][:, 0], t)

    def padding_beside_other_groups(p, b, t):
        first = b["y"] * t.weight
        other = b["x"][:, 0] * t.weight
        turned = other.reshape(-1, 2).T
        return tj.Sum((first.reshape(2, -1) * turned).sum())

    def groups_times_numbers_of_their_own(p, b, t):
        groups = (b["y"] * t.weight).reshape(2, -1)
        return tj.Sum(jnp.tanh(groups * p["w"][:2, None]).sum())

    def padding_in_groups(p, b, t):
        return tj.Sum(b["y"].reshape(2, -1).sum())

    def padding_in_chunks(p, b, t):
        body = lambda c, y: (c + y.sum(), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, b["y"].reshape(2, -1))[0])

    # Choices by whether a tower has some row.

    def first_row_by_number(p, b, t):
        return total(jnp.where(jnp.arange(t.rows) <= 0, b["y"], 0.0), t)

    def sum_if_any_by_another_flag(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        other = (b["x"][:, 0] > 1.3) * t.weight
        return tj.Sum(jnp.where(flag.any(), b["y"] @ other, 0.0))

    def branch_if_any_of_all(p, b, t):
        count = ((b["y"] > 1.3) * t.weight).sum()
        return tj.Sum(lax.cond(count > 0, lambda: b["y"] @ t.weight, lambda: 0.0))

    def count_where_there_is_none(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        count = flag.sum()
        return tj.Sum(b["y"] @ flag / jnp.where(count == 0, count, 2.0) * count)

    def branch_if_none(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        return tj.Sum(lax.cond(flag.sum() > 0, lambda: 1.0, lambda: b["y"] @ flag))

    def number_if_any_is_flagged(p, b, t):
        return tj.Sum(jnp.where(((b["y"] > 1.3) * t.weight).any(), 1.0, 0.0))

    def any_that_has_none_of_another_tower(p, b, t):
        has_none = ~((b["y"] > 1.3) * t.weight > 0).any()
        return lax.pmax(has_none, t.axis_names)


class Together:
    def rows_after_none(p, b, t):
        x = jnp.concatenate([jnp.zeros((0, F)), b["x"], p["k"][:0]])
        return total(jnp.tanh(x).sum(1), t)

    def rows_repeated(p, b, t):
        both = jnp.tanh(jnp.tile(b["x"], (2, 1)) @ p["k"]).reshape(2, -1, F)
        places = jnp.tile(p["w"][None], (t.rows, 1))
        return total((both.sum(0) * places).sum(1), t)

    def largest_of_each_row_by_label(p, b, t):
        label = jnp.abs(b["x"]).astype(int) % 2
        of_row = lambda x, at: jax.ops.segment_max(x, at, 2)  # noqa: E731
        most = jnp.maximum(jax.vmap(of_row)(b["x"], label), -9.0)
        here = jnp.arange(t.rows), jnp.abs(b["y"]).astype(int) % F
        x = b["x"].at[here].multiply(2.0).at[here].max(0.5).at[here].min(p["b"])
        return total(most.sum(1) + x.sum(1), t)

    def gradient_of_a_kernel_in_groups(p, b, t):
        image = b["x"][:, None] * jnp.ones((1, 2, 1))

        def loss(kernel):
            how = {"feature_group_count": 2}
            out = lax.conv_general_dilated(image, kernel, (1,), "SAME", **how)
            return (jnp.tanh(out).sum((1, 2)) * t.weight).sum()

        return tj.Sum(jax.grad(loss)(jnp.ones((4, 1, 2)) * p["b"]))

    def labels_of_zeros(p, b, t):
        label = jnp.zeros(t.rows, int)
        hits = (b["x"].argmax(1) == label) & (label >= 0) & ~(label < 0)
        return total(1.0 * hits, t)

    def chunks_of_rows(p, b, t):
        def body(carry, rows):
            x, weight = rows
            losses = jnp.tanh(x @ p["w"] + p["b"])
            grad = jax.grad(lambda w: jnp.tanh(x @ w) @ weight)(p["w"])
            total, so_far = carry
            return (total + losses @ weight, so_far + grad), (losses, losses @ weight)

        weight = t.weight.reshape(2, -1)
        chunks = b["x"].reshape(2, -1, F), weight
        start = 0.0, jnp.zeros(F)
        (first, grad), (losses, sums) = lax.scan(jax.checkpoint(body), start, chunks)
        again = (losses.reshape(-1) * t.weight).sum()
        groups = (b["y"] * t.weight).reshape(-1, 2).T
        masked = jnp.tanh(b["y"].reshape(2, -1) - p["b"]) * weight
        return tj.Sum(first + sums.sum() + again + groups.sum() + masked.sum() + grad)

    def branch_if_any_is_flagged(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        first = lax.cond(flag.sum() > 0, lambda: b["y"] @ flag, lambda: 0.0)
        return tj.Sum(first + jnp.where(flag.any(), jnp.tanh(b["y"] * flag).sum(), 0.0))

    def whether_all_have_none(p, b, t):
        has_none = ~((b["y"] > 1.3) * t.weight > 0).any()
        return lax.pmin(has_none, t.axis_names) * psum(t.weight.sum(), t)


class TogetherUnpadded:
    def largest_of_all_by_label(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        return lax.pmax(jnp.full(F, -9.0).at[label].max(b["y"]), t.axis_names)


TOGETHER = cases(Together)
TOGETHER_UNPADDED = cases(TogetherUnpadded)
SPLIT = cases(Split)
