"""Functions of a tower that depend on the split, one for each rule of the proof.

Each is ``(params, rows, tower) -> leaf``, for rows ``x`` of ``[b, 3]`` and ``y`` of
``[b]``, and is right except for what its name says.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from layouts import cases

import towerjax as tj

F = 3
BY_INDEX = {"mode": "clip", "wrap_negative_indices": False}


def total(x, t):
    """A sum over the rows that are no padding."""
    weight = t.weight.reshape((-1,) + (1,) * (x.ndim - 1))
    return tj.Sum((x * weight).sum())


def psum(x, t):
    return lax.psum(x, t.axis_names)


class Split:
    # Copies and parts.

    def copy_counted_by_each_tower(p, b, t):
        return tj.Sum(p["b"])

    def sum_over_towers_of_a_copy(p, b, t):
        return psum(p["b"], t)

    def part_beside_a_copy(p, b, t):
        return tj.Sum(b["y"] @ t.weight + p["b"])

    def parts_of_two_powers(p, b, t):
        return tj.Sum(b["y"] @ t.weight + t.num_towers * (b["y"] @ t.weight))

    def copies_of_two_powers(p, b, t):
        return jnp.maximum(t.num_towers * p["b"], jnp.abs(p["w"][0]))

    def function_of_a_part(p, b, t):
        return tj.Sum(jnp.tanh(b["y"] @ t.weight))

    def function_of_a_power(p, b, t):
        return jnp.sin(t.num_towers * p["b"]) / t.num_towers

    def part_times_a_part(p, b, t):
        return tj.Sum((b["y"] @ t.weight) * (b["x"][:, 0] @ t.weight))

    def part_divided_by_a_power(p, b, t):
        return tj.Sum(b["y"] @ t.weight * t.num_towers / (1 / t.num_towers))

    def part_as_whole_numbers(p, b, t):
        return tj.Sum((b["y"] @ t.weight).astype(jnp.int32))

    def choice_by_a_part(p, b, t):
        return tj.Sum(jnp.where(b["y"] @ t.weight > 0, b["y"] @ t.weight, 0.0))

    def branch_by_a_part(p, b, t):
        part = b["y"] @ t.weight
        return tj.Sum(lax.cond(part > 0.0, jnp.negative, lambda x: 0.5 * x, part))

    def branch_by_the_largest(p, b, t):
        part = b["y"] @ t.weight
        is_large = (b["y"] > 1.0).any()
        return tj.Sum(lax.cond(is_large, jnp.negative, lambda x: x, part))

    def choice_by_the_largest(p, b, t):
        return total(jnp.where((b["y"] > 1.0).any(), b["y"], 0.0), t)

    def constant_of_the_towers(p, b, t):
        return p["b"] * (0.3 + 0.05 * t.num_towers**2)

    def other_value_for_one_tower(p, b, t):
        return tj.Sum((b["y"] if t.num_towers == 1 else b["x"][:, 0]) @ t.weight)

    def largest_of_the_smallest(p, b, t):
        return lax.pmax(b["y"].min(), t.axis_names)

    def sum_of_the_largest(p, b, t):
        return tj.Sum(b["y"].max())

    def number_of_the_tower(p, b, t):
        return total(b["y"] * t.id, t)

    def sum_over_a_group_of_towers(p, b, t):
        pairs = [[i] for i in range(t.num_towers)]
        return lax.psum(b["y"] @ t.weight, t.axis_names, axis_index_groups=pairs)

    # Rows that meet rows.

    def sorted_rows(p, b, t):
        return total(jnp.sort(b["y"]) * b["x"][:, 0], t)

    def sums_along_rows(p, b, t):
        return total(jnp.cumsum(b["y"] * t.weight), t)

    def reversed_blocks_of_rows(p, b, t):
        both = jnp.concatenate([b["y"], 2 * b["y"]])[::-1]
        beside = jnp.concatenate([b["x"][:, 0], b["x"][:, 0]])
        return tj.Sum((both * beside).sum())

    def reversed_rows(p, b, t):
        return total(b["y"][::-1] * b["x"][:, 0], t)

    def row_of_another(p, b, t):
        return total(jnp.roll(b["y"], 1) * b["x"][:, 0], t)

    def first_row(p, b, t):
        return tj.Sum(b["y"][:1].sum())

    def rows_without_the_first(p, b, t):
        both = jnp.concatenate([b["y"], b["x"][:, 0]])
        return total(both[t.rows // 2 : t.rows + t.rows // 2], t)

    def products_of_rows(p, b, t):
        return total((b["x"] @ b["x"].T).sum(1), t)

    def largest_rows(p, b, t):
        return tj.Sum(lax.top_k(b["y"], 2)[0].sum())

    def views_in_another_order(p, b, t):
        both = jnp.concatenate([b["x"], 2 * b["x"]])
        mixed = both.reshape(-1, 2, F) * both.reshape(2, -1, F).swapaxes(0, 1)
        return total(mixed.sum((1, 2)), t)

    def groups_of_rows(p, b, t):
        groups = b["y"].reshape(2, -1) * jnp.array([[1.0], [3.0]])
        return tj.Sum(groups.sum())

    def largest_of_groups(p, b, t):
        return tj.Sum((b["y"] * t.weight).reshape(2, -1).max(0).sum())

    def window_of_rows(p, b, t):
        args = b["x"] * t.weight[:, None], -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"
        return tj.Sum(lax.reduce_window(*args).sum())

    def convolution_of_rows(p, b, t):
        kernel = jnp.ones((1, 1, 3))
        y = (b["y"] * t.weight)[None, None]
        return tj.Sum((lax.conv(y, kernel, (1,), "SAME") ** 2).sum())

    def rows_by_others_numbers(p, b, t):
        other = jnp.abs(b["y"]).astype(int)
        return total(b["x"].at[other].get(**BY_INDEX).sum(1) * b["y"], t)

    def rows_written_to_others(p, b, t):
        other = jnp.abs(b["y"]).astype(int)
        return total(b["x"].at[other].set(b["x"], **BY_INDEX).sum(1), t)

    def table_by_own_numbers(p, b, t):
        number = jnp.arange(t.rows)
        return total(p["w"].at[number].get(**BY_INDEX) * b["y"], t)

    def looked_up_by_own_numbers(p, b, t):
        return total(tj.sparse.take(p["w"], jnp.arange(t.rows)) * b["y"], t)

    def numbers_of_own_rows(p, b, t):
        return total(b["y"] * jnp.arange(t.rows), t)

    def numbers_from_the_towers_number(p, b, t):
        return total(b["y"] * (t.id * 2 + jnp.arange(t.rows)), t)

    def count_of_own_rows(p, b, t):
        return p["b"] * jnp.ones(t.rows).sum()

    def twice_the_number_of_a_tower(p, b, t):
        number = (jnp.arange(t.num_towers) * 2)[t.id]
        return total(b["y"] * jnp.sin(number * t.rows + jnp.arange(t.rows)), t)

    def the_negative_number_of_a_tower(p, b, t):
        number = (-jnp.arange(t.num_towers))[t.id]
        return total(b["y"] * jnp.sin(number * t.rows + jnp.arange(t.rows)), t)

    # Draws.

    def draws_of_a_shared_key(p, b, t):
        return total(b["y"] * jax.random.uniform(t.shared_rng, (t.rows,)), t)

    def one_draw_of_a_tower(p, b, t):
        return tj.Sum(b["y"] @ t.weight * jax.random.uniform(t.rng))

    def keys_of_a_shared_key(p, b, t):
        keys = jax.random.split(t.shared_rng, t.rows)
        return total(b["y"] * jax.vmap(jax.random.uniform)(keys), t)

    # Padding.

    def padding_in_a_sum(p, b, t):
        return tj.Sum(b["y"].sum())

    def padding_that_a_function_fills(p, b, t):
        return tj.Sum(jnp.exp(b["y"] * t.weight).sum())

    def padding_in_a_product(p, b, t):
        return tj.Sum(b["y"] @ b["x"][:, 0])

    def padding_in_a_loop(p, b, t):
        return tj.Sum(lax.scan(lambda c, y: (c + y, None), 0.0, b["y"])[0])

    def padding_in_a_table(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        return tj.Sum(jnp.zeros(F).at[label].add(b["y"]))

    def number_of_rows_with_padding(p, b, t):
        return tj.Weighted(b["y"] @ t.weight, t.rows)

    def padding_that_a_gather_fills(p, b, t):
        at = jnp.abs(b["y"]).astype(int) + 2
        masked = (b["x"] * t.weight[:, None])[:, :, None]
        fill = {"mode": "fill", "fill_value": 7.0}
        read = jax.vmap(lambda x, i: x.at[i].get(**fill, wrap_negative_indices=False))
        return tj.Sum(read(masked[:, :, 0], at).sum())

    # Means over own rows, and guards.

    def mean_of_means(p, b, t):
        flag = (b["y"] > 0) * t.weight
        return tj.Weighted(b["y"] @ flag / jnp.maximum(flag.sum(), 1), 1.0)

    def mean_by_a_count_that_may_be_none(p, b, t):
        flag = (b["y"] > 0) * t.weight
        return tj.Sum(b["y"] @ flag / flag.sum() * flag.sum())

    def mean_times_another_count(p, b, t):
        flag = (b["y"] > 0) * t.weight
        other = (b["x"][:, 0] > 0) * t.weight
        count = flag.sum()
        mean = jnp.where(count > 0, b["y"] @ flag / jnp.maximum(count, 1), 0.0)
        return tj.Sum(mean * other.sum())

    def mean_times_a_count_by_other_numbers(p, b, t):
        @jax.jit
        def weigh(w):
            return jnp.abs(b["x"] @ w) @ t.weight

        return tj.Sum(b["y"] @ t.weight / weigh(p["w"]) * weigh(p["k"][0]))

    def sum_if_any_of_another_flag(p, b, t):
        @jax.jit
        def flag(w):
            return (b["x"] @ w > 1.3) * t.weight

        count = flag(p["w"]).sum()
        other = b["y"] @ flag(p["k"][0])
        return tj.Sum(jnp.where(count > 0, other, 0.0))

    def stopped_mean_times_its_count(p, b, t):
        weight = (b["x"] @ p["w"]) ** 2 * t.weight
        part = b["y"] @ weight
        count = weight.sum()
        return tj.Sum(lax.stop_gradient(part / count) * count)

    def sum_of_all_if_any_is_flagged(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        return tj.Sum(jnp.where(flag.sum() > 0, b["y"] @ t.weight, 0.0))

    def sum_of_all_by_a_guarded_count(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        count = flag.sum()
        return tj.Sum(b["y"] @ t.weight / jnp.maximum(count, 1) * count)

    def count_of_at_least_two(p, b, t):
        flag = (b["y"] > 0) * t.weight
        return tj.Sum(b["y"] @ flag / jnp.maximum(flag.sum(), 2.0) * flag.sum())

    # Zeros that are none, and integers that do not fit.

    def all_of_no_flags(p, b, t):
        return tj.Sum(jnp.zeros((t.rows, 0), bool).all(1).max() * 1.0)

    def product_of_no_numbers(p, b, t):
        return tj.Sum(jnp.zeros(0).prod())

    def zero_times_a_mean_of_no_rows(p, b, t):
        flag = (b["y"] > 0.3) * t.weight
        mean = b["y"] @ flag / flag.sum()
        return tj.Sum(total(b["y"], t).value + 0.0 * mean)

    def zero_by_a_count_of_no_rows(p, b, t):
        flag = (b["y"] > 0.3) * t.weight
        return tj.Sum(total(b["y"], t).value + jnp.zeros(()) / flag.sum())

    def padding_times_its_logarithm(p, b, t):
        return tj.Sum((b["y"] * t.weight + t.weight * jnp.log(t.weight)).sum())

    def padding_in_a_product_with_its_logarithm(p, b, t):
        return tj.Sum(b["y"] @ t.weight + jnp.log(t.weight) @ t.weight)

    def padding_by_what_is_0_there(p, b, t):
        return tj.Sum((b["y"] * t.weight / (1 - (1 - t.weight))).sum())

    def product_of_sums_in_a_byte(p, b, t):
        own = (40 * b["x"] * t.weight[:, None]).astype(jnp.int8).sum(0, dtype=jnp.int8)
        ones = jnp.ones(F, jnp.int8)
        return tj.Sum(jnp.matmul(own, ones, preferred_element_type=jnp.int32) * 1.0)

    # Loops over rows.

    def smallest_of_the_largest_of_chunks(p, b, t):
        smaller = lambda c, y: (jnp.minimum(c, y.max()), None)  # noqa: E731
        smallest, _ = lax.scan(smaller, 9.0, b["y"].reshape(2, -1))
        return lax.pmin(lax.stop_gradient(smallest), t.axis_names)

    def largest_in_a_loop_that_is_added_to(p, b, t):
        larger = lambda c, y: (jnp.maximum(c, y) + y, None)  # noqa: E731
        largest, _ = lax.scan(larger, 0.0, b["y"])
        return lax.pmax(lax.stop_gradient(largest), t.axis_names)

    def largest_run_of_rows(p, b, t):
        longer = lambda c, y: (jnp.maximum(c + y, y), None)  # noqa: E731
        largest, _ = lax.scan(longer, 0.0, b["y"])
        return lax.pmax(lax.stop_gradient(largest), t.axis_names)

    def padding_that_is_largest_in_a_loop(p, b, t):
        larger = lambda c, y: (jnp.maximum(c, y), None)  # noqa: E731
        largest, _ = lax.scan(larger, -jnp.inf, b["y"])
        return lax.pmax(lax.stop_gradient(largest), t.axis_names)

    def number_of_trips(p, b, t):
        count, _ = lax.scan(lambda c, y: (c + 1, y), 0, b["y"])
        return count * p["b"]

    def sum_of_another_carry(p, b, t):
        swap = lambda c, y: ((c[1] + y, c[0]), None)  # noqa: E731
        return tj.Sum(lax.scan(swap, (0.0, 0.0), b["y"] * t.weight)[0][0])

    def sum_that_decays(p, b, t):
        body = lambda c, y: (0.9 * c + y, None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, b["y"] * t.weight)[0])

    def sum_that_is_doubled(p, b, t):
        body = lambda c, y: (c + c + y, None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, b["y"] * t.weight)[0])

    def sum_that_is_taken_off(p, b, t):
        body = lambda c, y: (y - c, None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, b["y"] * t.weight)[0])

    def sum_that_starts_anew(p, b, t):
        body = lambda c, y: (jnp.where(p["b"] * y > 0, 0.0, c + y), None)  # noqa: E731
        return tj.Sum(lax.scan(body, 0.0, b["y"] * t.weight)[0])

    def sum_that_is_turned(p, b, t):
        x = b["x"] * t.weight[:, None]
        turn = lambda c, x: (c.T + jnp.outer(x, x[::-1]), None)  # noqa: E731
        return tj.Sum(lax.scan(turn, jnp.zeros((F, F)), x)[0])

    def sums_so_far(p, b, t):
        body = lambda c, y: (c + y, c + y)  # noqa: E731
        return total(lax.scan(body, 0.0, b["y"])[1] * b["x"][:, 0], t)

    def sum_from_a_number(p, b, t):
        body = lambda c, y: (c + y, None)  # noqa: E731
        return tj.Sum(lax.scan(body, p["b"], b["y"] * t.weight)[0])

    def array_read_at_another_row(p, b, t):
        def body(i, every):
            return every.at[i].set(b["y"][i] + every[(i + 1) % t.rows])

        return total(lax.fori_loop(0, t.rows, body, b["y"]) * b["x"][:, 0], t)

    def numbers_of_a_loop(p, b, t):
        body = lambda c, y: (c + 1, c * y)  # noqa: E731
        return total(lax.scan(body, 0, b["y"])[1], t)

    # What looks linear, or like rows, and is not.

    def one_key_for_rows_of_a_label(p, b, t):
        label = jnp.abs(b["y"]).astype(int)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(t.rng, label)
        return total(b["y"] * jax.vmap(jax.random.uniform)(keys), t)

    def one_key_of_a_tower_for_all_its_rows(p, b, t):
        keys = jnp.broadcast_to(t.shared_rng, (t.rows,))
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, t.id)
        return total(b["y"] * jax.vmap(jax.random.uniform)(keys), t)

    def product_of_flags(p, b, t):
        return tj.Sum(jnp.dot(b["y"] > 0, t.weight > 0).astype(float))

    def bits_of_all_rows(p, b, t):
        number = jnp.abs(4 * b["y"]).astype(int) * (t.weight > 0)
        return lax.pmax(lax.reduce_or(number, (0,)), t.axis_names)

    def function_of_an_element_of_a_part(p, b, t):
        return tj.Sum((t.weight @ b["x"]).at[jnp.array([0, 1])].apply(jnp.exp))

    def number_beyond_a_part(p, b, t):
        at = jnp.array([0, F + 2])
        fill = {"mode": "fill", "fill_value": 7.0}
        return tj.Sum((t.weight @ b["x"]).at[at].get(**fill))

    def number_beyond_a_power(p, b, t):
        label = jnp.abs(4 * b["y"]).astype(int)
        power = t.num_towers * p["w"]
        fill = {"mode": "fill", "fill_value": 7.0}
        return total(power.at[label].get(**fill) / t.num_towers, t)

    def value_of_the_shape_of_rows(p, b, t):
        return p["b"] * jnp.ones(t.rows)

    def zeros_of_the_shape_of_rows(p, b, t):
        return tj.Sum(jnp.zeros(t.rows))

    def numbers_of_rows_in_few_bits(p, b, t):
        number = jnp.arange(t.rows).astype(jnp.int8)
        return total(b["x"].at[number, 0].get(**BY_INDEX), t)

    def numbers_of_rows_counted_in_few_bits(p, b, t):
        number = jnp.arange(t.rows, dtype=jnp.int8)
        return total(b["x"].at[number, 0].get(**BY_INDEX), t)

    def stopped_mean_in_a_function_with_a_rule(p, b, t):
        @jax.custom_jvp
        def fn(part):
            mean = b["x"][:, 0] @ t.weight / (jnp.abs(b["y"]) @ t.weight)
            return lax.stop_gradient(mean) * part

        fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
        return tj.Sum(fn(b["y"] @ t.weight))

    def padding_divided_by_padding(p, b, t):
        masked = jnp.abs(b["x"][:, 0]) * t.weight
        return tj.Sum((b["y"] * t.weight / masked).sum())

    def padding_left_by_padding(p, b, t):
        masked = jnp.abs(b["x"][:, 0]) * t.weight
        return tj.Sum(lax.rem(b["y"] * t.weight, masked).sum())

    def padding_under_a_root(p, b, t):
        return tj.Sum(jnp.sqrt(jnp.abs(b["x"] @ p["w"]) * t.weight).sum())

    def padding_written_over_zeros(p, b, t):
        def body(i, carry):
            every, so_far = carry
            new = every.at[i].set(b["y"][i])
            every = jnp.where(b["x"][i, 0] > -9, new, every)
            return every, so_far + every[i]

        start = b["y"] * t.weight, 0.0
        return tj.Sum(lax.fori_loop(0, t.rows, body, start)[1])

    def sums_of_largest(p, b, t):
        best = b["x"].max(0)
        other = b["y"].max()
        return lax.pmax(best.at[0].add(other), t.axis_names)

    def sum_of_all_rows_in_a_byte(p, b, t):
        number = (60 + jnp.abs(b["y"])).astype(jnp.int8) * (t.weight > 0)
        return tj.Sum(jnp.sum(number, dtype=jnp.int8).astype(int))

    def count_of_own_rows_in_a_byte(p, b, t):
        count = jnp.sum(jnp.full(t.rows, 40, jnp.uint8), dtype=jnp.uint8)
        return p["b"] * t.num_towers * count.astype(float)

    def sum_of_all_rows_without_a_sign(p, b, t):
        number = (4e8 * jnp.abs(b["y"])).astype(jnp.uint32) * (t.weight > 0)
        return tj.Sum(number.sum().astype(float))

    def sum_if_any_is_counted_in_a_byte(p, b, t):
        flag = (jnp.arange(99.0)[None] + b["y"][:, None] > 0) & (t.weight > 0)[:, None]
        count = jnp.sum(flag, dtype=jnp.int8)
        return tj.Sum(jnp.where(count > 0, (b["y"][:, None] * flag).sum(), 0.0))

    # Functions that another one is given.

    def function_that_reduces_is_another(p, b, t):
        number = float(t.num_towers == 1)
        add = lambda x, y: jnp.sin(x + y + number)  # noqa: E731
        return total(lax.reduce(b["x"], 0.0, add, (1,)), t)

    def function_of_windows_is_another(p, b, t):
        add = lambda x, y: jnp.sin(x * t.num_towers + y)  # noqa: E731
        windows = lax.reduce_window(b["x"], 0.0, add, (1, 2), (1, 1), "SAME")
        return total(windows, t)

    # Other loops, and calls.

    def carry_that_becomes_a_function_of_a_part(p, b, t):
        body = lambda c, _: (jnp.tanh(c), None)  # noqa: E731
        return tj.Sum(lax.scan(body, b["y"] @ t.weight, None, length=2)[0])

    def loop_until_a_part_is_large(p, b, t):
        start = jnp.abs(b["y"]) @ t.weight
        return tj.Sum(lax.while_loop(lambda c: c < 30.0, lambda c: 2 * c, start))

    def trips_of_all_rows(p, b, t):
        test = lambda c: (c[1] > 0.1).any()  # noqa: E731
        body = lambda c: (c[0] + 1.0, 0.5 * c[1])  # noqa: E731
        return lax.while_loop(test, body, (0.0, jnp.abs(b["y"])))[0]

    def derivative_of_its_own_for_a_function_of_jax(p, b, t):
        sine = jax.custom_jvp(jnp.sin)

        @sine.defjvp
        def _(primals, tangents):
            by_all = tangents[0] * jnp.abs(primals[0]).mean()
            return jnp.sin(primals[0]), by_all

        return tj.Weighted.mean(sine(b["x"] @ p["w"]) * b["y"], t.weight)

    def derivative_of_its_own_for_relu(p, b, t):
        relu = jax.custom_jvp(jax.nn.relu)

        @relu.defjvp
        def _(primals, tangents):
            by_all = tangents[0] * jnp.abs(primals[0]).mean()
            return jnp.maximum(primals[0], 0.0), by_all

        return tj.Weighted.mean(relu(b["x"] @ p["w"]) * b["y"], t.weight)

    def derivative_of_its_own_for_what_is_called_relu(p, b, t):
        relu = jax.custom_jvp(functools.wraps(jax.nn.relu)(lambda x: jnp.maximum(x, 0)))

        @relu.defjvp
        def _(primals, tangents):
            by_all = tangents[0] * jnp.abs(primals[0]).mean()
            return jnp.maximum(primals[0], 0.0), by_all

        return tj.Weighted.mean(relu(b["x"] @ p["w"]) * b["y"], t.weight)

    def derivative_of_its_own_by_functions_of_jax(p, b, t):
        sine = jax.custom_jvp(jnp.sin)
        sine.defjvp(functools.partial(jax.jvp, jax.nn.softmax))
        return tj.Weighted.mean(sine(b["x"] @ p["w"]) * b["y"], t.weight)

    def derivative_of_its_own(p, b, t):
        return tj.Weighted.mean(_by_the_mean(b["x"] @ p["w"]) * b["y"], t.weight)


@jax.custom_vjp
def _by_the_mean(x):
    return x


_by_the_mean.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.abs(g).mean(),))


class Together:
    """Right ones like these, which are proved, with padding and without."""

    def sum_to_the_power_of_one(p, b, t):
        return tj.Sum(lax.integer_pow(total(b["y"], t).value, 1))

    def elements_that_are_not_written(p, b, t):
        start = lax.empty((2,), b["y"].dtype).at[:].set(1.0)
        return tj.Sum(total(b["y"], t).value * start.sum())

    def copy_shared_by_the_towers(p, b, t):
        return tj.Sum(b["y"] @ t.weight + p["b"] / t.num_towers)

    def mean_over_towers_of_a_copy(p, b, t):
        return psum(p["b"], t) / t.num_towers

    def function_of_a_sum_over_towers(p, b, t):
        return total(b["y"] * jnp.tanh(psum(b["y"] @ t.weight, t)), t)

    def powers_that_take_each_other_off(p, b, t):
        return jnp.sqrt(jnp.square(t.num_towers * p["b"])) / t.num_towers

    def choice_by_all(p, b, t):
        count = psum(t.weight.sum(), t)
        return tj.Sum(jnp.where(count > 3, b["y"] @ t.weight, 0.0))

    def branch_by_all(p, b, t):
        count = psum(t.weight.sum(), t)
        part = b["y"] @ t.weight
        return tj.Sum(lax.cond(count > 3, lambda x: 2 * x, lambda x: x, part))

    def rows_as_they_are(p, b, t):
        return tj.Rows(jnp.tanh(b["x"] @ p["k"]))

    def largest_flag_of_all(p, b, t):
        return lax.pmax(((b["y"] > 0.5) & (t.weight > 0)).any(), t.axis_names)

    def own_value_of_all_of_them(p, b, t):
        every = lax.all_gather(b["y"] @ t.weight, t.axis_names)
        return tj.Sum(lax.dynamic_index_in_dim(every, t.id, keepdims=False))

    def sum_of_gathered_parts(p, b, t):
        return lax.all_gather(b["y"] @ t.weight, t.axis_names).sum(0)

    def mean_of_all_rows(p, b, t):
        centred = b["y"] - t.mean(b["y"], t.weight)
        return total(centred**2, t)

    def sorted_features(p, b, t):
        first = jnp.sort(b["x"], axis=1)[:, ::-1] * jnp.cumsum(b["x"], axis=1)
        best, at = lax.top_k(b["x"], 2)
        return total(first.sum(1) + best.sum(1) * at[:, 0], t)

    def views_and_back(p, b, t):
        both = jnp.tanh(jnp.concatenate([b["x"], 2 * b["x"]]) @ p["k"])
        first, second = jnp.split(both, 2)
        views = both.reshape(2, -1, F).sum(0)
        return total((first * second + both[: t.rows] + views).sum(1), t)

    def flat_and_back(p, b, t):
        flat = jnp.tanh(b["x"].reshape(-1))
        weight = jnp.repeat(t.weight, F)
        return tj.Weighted.mean(flat, weight)

    def gathered_by_own_number(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        number = jnp.arange(t.rows)
        chosen = b["x"][number, label] + p["w"][label]
        chosen += jnp.take_along_axis(b["x"], label[:, None], axis=1)[:, 0]
        chosen += b["x"].at[number, label].add(1.0).sum(1)
        return total(chosen, t)

    def looked_up_in_a_table(p, b, t):
        ids = jnp.abs(b["y"]).astype(int) % F
        return total(tj.sparse.take(p["k"], ids).sum(1) * b["y"], t)

    def added_to_a_table(p, b, t):
        label = jnp.abs(b["y"]).astype(int) % F
        sums = jax.ops.segment_sum(b["y"] * t.weight, label, F)
        return tj.Sum(sums + jnp.zeros(F).at[label].add(t.weight))

    def convolved_images(p, b, t):
        image = b["x"][:, None] * jnp.ones((1, 2, 1))
        kernel = jnp.ones((4, 2, 2)) * p["b"]
        out = lax.conv(image, kernel, (1,), "SAME")
        pooled = lax.reduce_window(out, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 1), "SAME")
        return total(pooled.sum((1, 2)), t)

    def products(p, b, t):
        moments = (b["x"] * t.weight[:, None]).T @ b["x"]
        own = jnp.einsum("nf,fg,ng->n", b["x"], p["k"], b["x"])
        return tj.Sum(moments + (own * t.weight).sum() / F)

    def transformed(p, b, t):
        return total(jnp.abs(jnp.fft.fft(b["x"], axis=1)).sum(1), t)

    def scanned_features(p, b, t):
        sums = lax.associative_scan(jnp.add, b["x"], axis=1)
        return total(sums.sum(1), t)

    def solved(p, b, t):
        a = jnp.eye(F) * 4 + 0.1 * p["k"]
        moments = b["x"][:, :, None] * b["x"][:, None] + jnp.eye(F)[None]
        own = jnp.linalg.solve(moments, b["x"][..., None])[..., 0]
        return total((jnp.linalg.solve(a, b["x"].T).T + own).sum(1), t)

    def draws_of_each_row(p, b, t):
        first, second = jax.random.split(t.rng)
        x = b["y"] * jax.random.uniform(first, (t.rows,))
        keys = jax.random.split(second, t.rows)
        x = x + jax.vmap(jax.random.normal)(keys)
        return total(x * jax.random.uniform(t.shared_rng), t)

    def masked_by_a_flag(p, b, t):
        flag = (b["y"] > 0) * t.weight
        count = flag.sum()
        mean = jnp.where(count > 0, b["y"] @ flag / jnp.maximum(count, 1), 0.0)
        return tj.Weighted(mean * count, count)

    def mean_beside_a_copy(p, b, t):
        flag = (b["y"] > 0) * t.weight
        count = flag.sum()
        mean = b["x"][:, 0] @ flag / jnp.maximum(count, 1) + p["b"]
        return tj.Weighted(mean * count, count)

    def sum_if_any_is_flagged(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        return tj.Sum(jnp.where(flag.sum() == 0, 0.0, jnp.tanh(b["y"] * flag).sum()))

    def sums_in_a_loop(p, b, t):
        def body(carry, row):
            x, weight = row
            loss = jnp.tanh(x @ p["w"])
            total, large = carry
            more = jnp.where(loss > 0, large + loss * weight, large)
            return (total + loss * weight, more), loss

        start = 0.0, (b["y"] @ t.weight)
        (first, large), losses = lax.scan(body, start, (b["x"], t.weight))
        return tj.Sum(first + large + losses @ t.weight)

    def rows_in_a_loop_by_number(p, b, t):
        def body(i, every):
            return every.at[i].set(jnp.tanh(b["x"][i] @ p["w"]) + every[i])

        every = lax.fori_loop(0, t.rows, body, b["y"])
        return total(every + lax.map(lambda x: jnp.sort(x)[0], b["x"]), t)

    def loops_over_time(p, b, t):
        def body(carry, x):
            return jnp.tanh(carry + x), carry

        last, each = lax.scan(jax.checkpoint(body), b["y"], b["x"].T)
        return total(last + each.sum(0), t)

    def loops_of_parts(p, b, t):
        part = b["y"] @ t.weight

        def ends(c):
            return c[0] < 5 * jnp.abs(p["b"])

        half = lax.fori_loop(0, 3, lambda i, c: 0.5 * c + p["b"] * part, part)
        return tj.Sum(
            lax.while_loop(ends, lambda c: (c[0] + 1, 2 * c[1]), (0.0, half))[1]
        )

    def trips_of_each_row(p, b, t):
        def root(x):
            test = lambda c: jnp.abs(c[1]) > 0.3  # noqa: E731
            return lax.while_loop(test, lambda c: (c[0] + 1, 0.5 * c[1]), (0, x))[0]

        return total(jax.vmap(root)(b["y"]) * b["y"], t)

    def derivatives_in_a_tower(p, b, t):
        loss = lambda w: (jnp.tanh(b["x"] @ w) * t.weight).sum()  # noqa: E731
        each = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"])))(b["x"])
        return tj.Sum(jax.grad(loss)(p["w"]) + t.weight @ each)

    def derivative_of_its_own(p, b, t):
        return tj.Weighted.mean(_by_half(b["x"] @ p["w"]) * b["y"], t.weight)

    def in_short_floats(p, b, t):
        return total((b["y"].astype(jnp.bfloat16) * jnp.bfloat16(0)).astype("f"), t)


@jax.custom_vjp
def _by_half(x):
    return x


_by_half.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


class TogetherUnpadded:
    """Right ones where towers have no padding."""

    def largest_of_chunks(p, b, t):
        larger = lambda c, y: (jnp.maximum(c, y.max()), None)  # noqa: E731
        largest, _ = lax.scan(larger, -jnp.inf, b["y"].reshape(2, -1))
        return lax.pmax(lax.stop_gradient(largest), t.axis_names)

    def smallest_in_a_loop(p, b, t):
        smaller = lambda c, y: (jnp.minimum(c, y), None)  # noqa: E731
        smallest, _ = lax.scan(smaller, p["b"], b["y"])
        return lax.pmin(lax.stop_gradient(smallest), t.axis_names)

    def mean_by_the_number_of_trips(p, b, t):
        count, _ = lax.scan(lambda c, y: (c + 1, y), 0, b["y"])
        return tj.Sum((b["y"] * count).sum() / (count * 1.0))

    def numbers_of_all_rows(p, b, t):
        return tj.Sum(b["y"] @ jnp.tanh(1.0 * (t.id * t.rows + jnp.arange(t.rows))))

    def mean_by_the_number_of_rows(p, b, t):
        return tj.Weighted(b["y"].mean() * t.rows, t.rows)

    def rows_of_all_towers(p, b, t):
        every = t.all_gather(b["x"], axis=0)
        return tj.Sum(jax.nn.logsumexp(b["x"] @ every.T, axis=1).sum())

    def rows_of_what_is_added_up(p, b, t):
        every = t.all_gather(b["y"], axis=0)
        shared = jnp.tanh(every) * b["y"].sum()
        own = lax.psum_scatter(shared, t.axis_names, tiled=True)
        return tj.Rows(own)

    def largest_of_all(p, b, t):
        return tj.Sum((b["y"] / lax.pmax(jnp.abs(b["y"]).max(), t.axis_names)).sum())

    def groups_of_rows_added_up(p, b, t):
        return tj.Sum(-2 * b["y"].reshape(2, -1).sum(0).sum())

    def neighbours(p, b, t):
        first, second = b["y"].reshape(-1, 2).T
        return tj.Sum((first * second).sum())


TOGETHER = cases(Together)
TOGETHER_UNPADDED = cases(TogetherUnpadded)
SPLIT = cases(Split)
