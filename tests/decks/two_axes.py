"""Programs over a mesh of rows and of a second axis: right forms, and published faults.

A program is a function of one device's parts. ``dp`` splits the rows of the batch, and
``mp`` splits columns, heads, words, experts or tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

BOTH = ("dp", "mp")
WORDS = 16
EXPERTS = 4
DRAW = np.random.default_rng(0)
SHAPES = {
    "w": (8, WORDS),
    "u": (WORDS, 8),
    "experts": (EXPERTS, 8, 8),
    "scale": (8,),
    "router": (8, EXPERTS),
}
PARAMS = {
    name: DRAW.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()
}
COUNTS = DRAW.random((16, 4)) < 0.7
BATCH = {
    "x": DRAW.normal(size=(16, 4, 8)).astype(np.float32),
    "labels": DRAW.integers(WORDS, size=(16, 4)).astype(np.int32),
    "counts": COUNTS.astype(np.float32),
}
COLUMNS = P(None, "mp")
OF_PARAMS = {
    "w": COLUMNS,
    "u": P("mp"),
    "experts": P("mp"),
    "scale": P(),
    "router": P(),
}
ROWS = dict.fromkeys(BATCH, P("dp"))
TOKENS = dict.fromkeys(BATCH, P("dp", "mp"))
# Rows over both axes, as context parallelism of whole rows has them.
ROWS_OVER_BOTH = dict.fromkeys(BATCH, P(BOTH))


def summed(x):
    """The sum of a value of a device's own, whose derivative is each device's own."""

    @jax.custom_vjp
    def of_all(x):
        return lax.psum(x, "mp")

    of_all.defvjp(lambda x: (of_all(x), None), lambda _, d: (d,))
    return of_all(x)


@jax.custom_vjp
def entering(x):
    """A replicated value that enters a region in which each device has its part."""
    return x


entering.defvjp(lambda x: (x, None), lambda _, d: (lax.psum(d, "mp"),))


@jax.custom_vjp
def entering_without_a_sum(x):
    return x


entering_without_a_sum.defvjp(lambda x: (x, None), lambda _, d: (d,))


def scaled(p, b):
    return b["x"] * p["scale"][None, None]


def own_labels(b, count):
    """Which of a device's own words is the label, ``[b, t, words]``."""
    own = lax.axis_index("mp") * count + jnp.arange(count)
    return b["labels"][..., None] == own[None, None]


def own_entropy(p, b, smooth=None):
    """The entropy by a device with some words."""
    logits = scaled(p, b) @ p["w"]
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), "mp")
    sums = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "mp")
    is_label = own_labels(b, logits.shape[-1])
    of_label = lax.psum(jnp.where(is_label, logits, 0).sum(-1), "mp")
    mean = 0.0 if smooth is None else 0.1 * smooth(logits.mean(-1))
    return most + jnp.log(sums) - of_label - mean


def gathered_logits(p, b, axis="mp"):
    return lax.all_gather(scaled(p, b) @ p["w"], axis, axis=-1, tiled=True)


def entropy(logits, labels):
    of_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_label


def mean_over(axes, losses, b):
    return lax.psum((losses * b["counts"]).sum(), axes) / lax.psum(
        b["counts"].sum(), axes
    )


def mixed(p, b, experts):
    """The square error of a mixture of a device's own experts."""
    number = lax.axis_index("mp") * experts.shape[0] + jnp.arange(experts.shape[0])
    gates = jax.nn.softmax(b["x"] @ p["router"])
    own = (jnp.arange(EXPERTS)[None] == number[:, None]).astype(gates.dtype)
    gates = jnp.einsum("bte,ne->btn", gates, own)
    return jnp.einsum(
        "btn,ntbd->btd", gates, jnp.einsum("btd,ndf->ntbf", b["x"], experts)
    )


def experts_loss(p, b, experts):
    out = summed(mixed(p, b, experts))
    return ((out - b["x"]) ** 2 * b["counts"][..., None]).sum()


def clipped(grads, squares):
    norm = jnp.sqrt(squares)
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads)


def two_layers(p, b, enter=entering):
    hidden = jnp.tanh(enter(scaled(p, b)) @ p["w"])
    out = summed(hidden @ p["u"])
    return ((out - b["x"]) ** 2 * b["counts"][..., None]).sum()


def gradients(loss, names, p, b):
    """The gradients of some parameters, summed over rows."""
    some = {name: p[name] for name in names}
    grads = jax.grad(lambda some: loss({**p, **some}, b))(some)
    return lax.psum(grads, "dp")


def square(x):
    return (x**2).sum()


class Right:
    """``(p, b) -> result``, with the ``specs`` of its batch and its result."""

    def tensor(p, b):
        out = lax.psum(jnp.tanh(b["x"] @ p["w"]) @ p["u"], "mp")
        return mean_over("dp", ((out - b["x"]) ** 2).sum(-1), b)

    def tensor_gradients(p, b):
        return gradients(two_layers, ["w", "u", "scale"], p, b)

    def smoothed(p, b):
        return mean_over("dp", own_entropy(p, b, lambda x: lax.pmean(x, "mp")), b)

    def vocabulary(p, b):
        return mean_over("dp", own_entropy(p, b), b)

    def gathered(p, b):
        return mean_over("dp", entropy(gathered_logits(p, b), b["labels"]), b)

    def of_all_tokens(p, b):
        return mean_over(BOTH, square_errors(p, b), b)

    def clipped_by_all_heads(p, b):
        grads = gradients(two_layers, ["w", "scale"], p, b)
        squares = lax.psum(square(grads["w"]), "mp") + square(grads["scale"])
        return clipped(grads, squares)

    def of_a_shared_scale(p, b):
        def own(scale):
            return square(b["x"] * scale[None, None] @ p["w"])

        return lax.psum(jax.grad(own)(p["scale"]), BOTH)

    def experts(p, b):
        return lax.psum(experts_loss(p, b, p["experts"]), "dp")

    def experts_gradients(p, b):
        grads = jax.grad(lambda experts: experts_loss(p, b, experts))(p["experts"])
        return lax.psum(grads, "dp")

    def experts_clipped(p, b):
        grads = Right.experts_gradients(p, b)
        return clipped(grads, lax.psum(square(grads), "mp"))

    def rows_over_both(p, b):
        return mean_over(BOTH, square_errors(p, b), b)

    def rows_gathered_over_both(p, b):
        rows = lax.all_gather(square_errors(p, b), BOTH, tiled=True)
        return (rows * jnp.arange(16.0)[:, None]).sum()

    def gradients_scattered_over_both(p, b):
        grads = jax.grad(lambda scale: square_errors({"scale": scale}, b).sum())
        return lax.psum_scatter(grads(p["scale"]), BOTH, tiled=True)


def square_errors(p, b):
    return (scaled(p, b) ** 2).sum(-1)


class Wrong:
    """The same, of published faults."""

    def smoothed_by_own_words(p, b):  # Megatron-LM#7452, 1
        return mean_over("dp", own_entropy(p, b, lambda x: x), b)

    def gathered_and_added(p, b):  # Megatron-LM#7452, 2
        logits = gathered_logits(p, b)
        sums = lax.psum(jnp.exp(logits).sum(-1), "mp")
        of_label = jnp.take_along_axis(logits, b["labels"][..., None], -1)[..., 0]
        return mean_over("dp", jnp.log(sums) - of_label, b)

    def by_own_counts(p, b):  # Megatron-LM#7452, 3
        total = (square_errors(p, b) * b["counts"]).sum()
        return lax.pmean(total / jnp.maximum(b["counts"].sum(), 1), BOTH)

    def gathered_over_another_axis(p, b):  # Megatron-LM#7452, 4, 6, 7
        logits = gathered_logits(p, b, "dp")
        return mean_over("dp", jax.nn.logsumexp(logits, axis=-1), b)

    def norm_of_own_heads(p, b):  # Megatron-LM#7452, 8
        grads = gradients(two_layers, ["w", "scale"], p, b)
        return clipped(grads, square(grads["w"]) + square(grads["scale"]))

    def count_added_again(p, b):  # Megatron-LM#7452, 10
        total = lax.psum((square_errors(p, b) * b["counts"]).sum(), "dp")
        count = lax.psum(b["counts"].sum(), "dp")
        return total / lax.psum(count, "mp")

    def own_share_of_a_scale(p, b):  # Megatron-LM#7452, 11
        def own(scale):
            return square(b["x"] * scale[None, None] @ p["w"])

        return lax.psum(jax.grad(own)(p["scale"]), "dp")

    def layers_in_other_places(p, b):  # Megatron-LM#7452, 12
        size = lax.axis_size("mp")
        back = [(i, size - 1 - i) for i in range(size)]
        experts = lax.ppermute(p["experts"], "mp", back)
        return lax.psum(experts_loss(p, b, experts), "dp")

    def divided_by_devices(p, b):  # Megatron-LM#3959
        losses = square_errors(p, b) / lax.axis_size("mp")
        return mean_over(BOTH, losses, b)

    def norm_of_own_experts(p, b):  # Megatron-LM#5916
        grads = Right.experts_gradients(p, b)
        return clipped(grads, square(grads))

    def labels_of_own_tokens(p, b):  # verl#4250
        later = jnp.roll(b["labels"], -1, 1)
        losses = square_errors(p, b) * later
        return mean_over(BOTH, losses, b)

    def experts_counted_per_device(p, b):  # pytorch#160285
        return Right.experts_gradients(p, b) * lax.axis_size("mp")

    def region_without_a_sum(p, b):  # torchtitan#4054
        loss = functools.partial(two_layers, enter=entering_without_a_sum)
        return gradients(loss, ["scale"], p, b)

    def rows_by_counts_of_one_axis(p, b):  # verl#5993
        total = (square_errors(p, b) * b["counts"]).sum()
        count = lax.psum(b["counts"].sum(), "dp")
        return lax.psum(total / count, BOTH)

    def rows_averaged_twice(p, b):  # torchtitan#2366
        total = (square_errors(p, b) * b["counts"]).sum()
        return lax.pmean(total / lax.psum(b["counts"].sum(), BOTH), BOTH)


SPECS = {
    "of_all_tokens": (TOKENS, P()),
    "rows_over_both": (ROWS_OVER_BOTH, P()),
    "rows_gathered_over_both": (ROWS_OVER_BOTH, P()),
    "gradients_scattered_over_both": (ROWS_OVER_BOTH, P(BOTH)),
    "tensor_gradients": (ROWS, {name: OF_PARAMS[name] for name in ("w", "u", "scale")}),
    "clipped_by_all_heads": (ROWS, {"w": COLUMNS, "scale": P()}),
    "norm_of_own_heads": (ROWS, {"w": COLUMNS, "scale": P()}),
    "region_without_a_sum": (ROWS, {"scale": P()}),
    "by_own_counts": (TOKENS, P()),
    "divided_by_devices": (TOKENS, P()),
    "labels_of_own_tokens": (TOKENS, P()),
    "rows_by_counts_of_one_axis": (ROWS_OVER_BOTH, P()),
    "rows_averaged_twice": (ROWS_OVER_BOTH, P()),
}
for _name in ("experts_gradients", "experts_clipped", "norm_of_own_experts"):
    SPECS[_name] = ROWS, P("mp")
SPECS["experts_counted_per_device"] = ROWS, P("mp")


def named(deck):
    """The programs of `Right` or `Wrong`, by name."""
    return {name: fn for name, fn in vars(deck).items() if not name.startswith("_")}


def program(name, fn, mesh):
    """The program on a mesh, and its arguments."""
    of_batch, out = SPECS.get(name, (ROWS, P()))
    specs = {"in_specs": (OF_PARAMS, of_batch), "out_specs": out}
    mapped = jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)
    return jax.jit(mapped), (PARAMS, BATCH)
