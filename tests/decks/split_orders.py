"""Functions of a tower that put rows in another order, or pass them to other towers.

And largest values that leave padding out. As in `split_functions`: right ones, and
wrong ones beside them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from layouts import cases
from split_functions import total

import towerjax as tj


def shift(t):
    """Each tower's value to the next one."""
    return [(i, (i + 1) % t.num_towers) for i in range(t.num_towers)]


def largest(x, t):
    return lax.pmax(lax.stop_gradient(x.max()), t.axis_names)


def by(order, x):
    return x.at[order].get(mode="clip", wrap_negative_indices=False)


class Split:
    # Rows in another order.

    def rows_in_two_orders(p, b, t):
        other = lax.sort(b["x"][:, 0] * t.weight)
        return tj.Sum((lax.sort(b["y"] * t.weight) * other).sum())

    def rows_by_an_order_through_a_network_beside_own(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        return tj.Sum((by(order, b["x"]) @ p["w"] * b["y"] * t.weight).sum())

    def elements_by_an_order_and_by_own_labels(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        label = (b["y"] > 0).astype(int)
        return tj.Sum((b["x"][order, label] * by(order, t.weight)).sum())

    def rows_by_an_order_added_up_in_turn(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        return tj.Sum(jnp.cumsum(by(order, b["x"] @ p["w"] * t.weight)).sum())

    def rows_by_one_function_in_two_orders(p, b, t):
        other = jnp.sort(b["x"][:, 0] * t.weight)
        return tj.Sum((jnp.sort(b["y"] * t.weight) * other).sum())

    def ordered_rows_beside_theirs(p, b, t):
        order = jnp.argsort(b["y"])
        return tj.Sum((by(order, b["x"][:, 0] * t.weight) * b["y"]).sum())

    def rows_by_an_order_of_an_order(p, b, t):
        order = jnp.argsort(b["y"])
        once = by(order, b["x"][:, 0] * t.weight)
        return tj.Sum((by(order, once) * once).sum())

    def columns_sorted_by_themselves(p, b, t):
        columns = jnp.sort(b["x"] * t.weight[:, None], axis=0)
        return tj.Sum(jnp.tanh(columns.sum(1)).sum())

    def places_in_an_order(p, b, t):
        return total(jnp.argsort(b["y"]) * b["x"][:, 0], t)

    def least_in_an_order(p, b, t):
        return tj.Sum(jnp.sort(b["y"] * t.weight)[:1].sum())

    def groups_in_an_order(p, b, t):
        groups = jnp.sort(b["y"] * t.weight).reshape(2, -1)
        return tj.Sum(jnp.abs(groups.sum(0)).sum())

    def sums_along_an_order(p, b, t):
        return tj.Sum(jnp.cumsum(jnp.sort(b["y"] * t.weight)).sum())

    def weights_by_place_in_an_order(p, b, t):
        place = jnp.arange(t.rows)
        return tj.Sum((jnp.sort(b["y"] * t.weight) * place).sum())

    def rows_given_back_in_an_order(p, b, t):
        return tj.Rows(b["y"][::-1])

    def chunks_in_an_order(p, b, t):
        add = lambda c, y: (c + (y * y[::-1]).sum(), y)  # noqa: E731
        chunks = jnp.sort(b["y"] * t.weight).reshape(2, -1)
        return tj.Sum(lax.scan(add, 0.0, chunks)[0])

    def padding_in_an_order(p, b, t):
        return tj.Sum(jnp.sort(b["y"]).sum())

    def padding_in_rows_by_an_order(p, b, t):
        return tj.Sum(by(jnp.argsort(b["y"]), b["x"]).sum())

    # Other towers' values.

    def rows_of_another_tower_beside_own(p, b, t):
        other = lax.ppermute(b["y"], t.axis_names[0], shift(t))
        return total(other * b["x"][:, 0], t)

    def sum_passed_on_but_for_one(p, b, t):
        perm = [(i, i + 1) for i in range(t.num_towers - 1)]
        return tj.Sum(lax.ppermute(b["y"] @ t.weight, t.axis_names[0], perm))

    def sum_of_another_tower_beside_own(p, b, t):
        own = b["y"] @ t.weight
        return tj.Sum(own * lax.ppermute(own, t.axis_names[0], shift(t)))

    def sum_of_another_tower_if_any_is_own(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        other = lax.ppermute(b["y"] * flag, t.axis_names[0], shift(t)).sum()
        return tj.Sum(jnp.where(flag.sum() > 0, other, 0.0))

    def mean_of_another_tower_times_own_count(p, b, t):
        flag = (b["y"] > 1.3) * t.weight
        count = flag.sum()
        other = lax.ppermute(b["y"] * flag, t.axis_names[0], shift(t)).sum()
        return tj.Sum(other / jnp.maximum(count, 1) * count)

    def rows_exchanged_beside_own(p, b, t):
        other = lax.all_to_all(b["y"], t.axis_names[0], 0, 0, tiled=True)
        return total(other * b["x"][:, 0], t)

    def elements_of_sums_exchanged(p, b, t):
        every = jnp.tile(t.weight @ b["x"], 4)
        return tj.Sum(lax.all_to_all(every, t.axis_names[0], 0, 0, tiled=True))

    def padding_in_rows_passed_on(p, b, t):
        return tj.Sum(lax.ppermute(b["y"], t.axis_names[0], shift(t)).sum())

    def padding_in_rows_exchanged(p, b, t):
        return tj.Sum(lax.all_to_all(b["y"], t.axis_names[0], 0, 0, tiled=True).sum())

    # Largest values.

    def padding_that_is_a_number(p, b, t):
        return largest(jnp.where(t.weight > 0, b["y"], -9.0), t)

    def padding_that_is_largest(p, b, t):
        return largest(jnp.where(t.weight > 0, b["y"], jnp.inf), t)

    def padding_that_becomes_largest(p, b, t):
        return largest(-jnp.where(t.weight > 0, b["y"], -jnp.inf), t)

    def padding_that_a_function_makes_a_number(p, b, t):
        return largest(jnp.exp(jnp.where(t.weight > 0, -(b["y"] ** 2), -jnp.inf)), t)

    def padding_that_is_chosen(p, b, t):
        return largest(jnp.where(t.weight > 0, -jnp.inf, b["y"]), t)

    def padding_that_is_least(p, b, t):
        least = jnp.where(t.weight > 0, b["y"], -jnp.inf).min()
        return lax.pmin(lax.stop_gradient(least), t.axis_names)

    def padding_of_another_mask(p, b, t):
        return largest(jnp.where(b["x"][:, 0] > 0, b["y"], -jnp.inf), t)


class Together:
    def rows_sorted(p, b, t):
        return tj.Sum((3 * jnp.sort(b["y"] * t.weight) ** 2).sum())

    def rows_by_an_order(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        y = by(order, b["y"])
        rows = by(order, b["x"] * t.weight[:, None])
        return tj.Sum(rows.sum() + (jnp.tanh(y) * by(order, t.weight)).sum())

    def elements_by_an_order(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        return tj.Sum((b["x"][order, 1] ** 2 * by(order, t.weight)).sum())

    def rows_by_an_order_through_a_network(p, b, t):
        order = jnp.argsort(b["x"][:, 0])
        h = jax.nn.softmax(by(order, b["x"]) @ p["k"], axis=-1) * p["w"][None]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1)
        h = jnp.concatenate([h.max(-1, keepdims=True), h], axis=-1)
        return tj.Sum((h.sum(-1) * by(order, t.weight)).sum())

    def rows_by_an_order_of_its_own(p, b, t):
        return tj.Sum((b["y"] * t.weight)[jnp.argsort(b["y"])].sum())

    def rows_backwards(p, b, t):
        return tj.Sum((b["x"] * t.weight[:, None])[::-1].sum())

    def rows_shuffled(p, b, t):
        order = jax.random.permutation(t.rng, t.rows)
        again = jax.random.permutation(t.shared_rng, b["y"] * t.weight)
        return tj.Sum((b["y"] * t.weight)[order].sum() + again.sum())

    def values_passed_on(p, b, t):
        other = lax.ppermute((b["y"] @ t.weight, p["b"]), t.axis_names[0], shift(t))
        return tj.Sum(other[0] * other[1])

    def rows_passed_on(p, b, t):
        other = lax.ppermute(b["x"] * t.weight[:, None], t.axis_names[0], shift(t))
        return tj.Sum((other * p["b"]).sum())

    def rows_exchanged(p, b, t):
        own = b["y"] * t.weight
        return tj.Sum(
            (lax.all_to_all(own, t.axis_names[0], 0, 0, tiled=True) ** 2).sum()
        )

    def largest_of_no_padding(p, b, t):
        masked = jnp.where(t.weight[:, None] > 0, b["x"], -jnp.inf)
        return largest(masked.max(1), t)

    def smallest_of_some_rows(p, b, t):
        is_kept = (t.weight > 0) & (b["x"][:, 0] > -9)
        least = jnp.min(b["y"], where=is_kept, initial=jnp.inf)
        return lax.pmin(lax.stop_gradient(least), t.axis_names)


TOGETHER = cases(Together)
SPLIT = cases(Split)
