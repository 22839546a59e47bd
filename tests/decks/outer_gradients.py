"""Gradients taken outside of a map, `value_and_grad(shard_map(loss))`: right and wrong.

A program is a loss of a device's parts, with the ``specs`` of its parameters and of its
batch. ``dp`` splits rows, ``mp`` splits columns, heads, words, tokens or layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

BOTH = ("dp", "mp")
WORDS, WIDTH, TOKENS, ROWS = 12, 8, 4, 16
DRAW = np.random.default_rng(0)


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32) / 2


PARAMS = {
    "w": drawn(WIDTH, 24),
    "b": drawn(24),
    "v": drawn(24, WIDTH),
    "out": drawn(WIDTH),
    "scale": drawn(WIDTH),
    "shift": drawn(WIDTH),
    "words": drawn(WIDTH, WORDS),
    "table": drawn(WORDS, WIDTH),
    "experts": drawn(4, WIDTH, WIDTH),
    "router": drawn(WIDTH, 4),
    "layers": drawn(4, WIDTH, WIDTH),
    "heads": drawn(3, 4, WIDTH, 4),
    "back": drawn(4, 4, WIDTH),
}
BATCH = {
    "x": drawn(ROWS, WIDTH),
    "y": drawn(ROWS),
    "mask": (DRAW.random(ROWS) < 0.7).astype(np.float32),
    "t": drawn(ROWS, TOKENS, WIDTH),
    "ids": DRAW.integers(WORDS, size=(ROWS, TOKENS)).astype(np.int32),
    "counts": (DRAW.random((ROWS, TOKENS)) < 0.7).astype(np.float32),
    "image": drawn(ROWS, 4, 4, 2),
    "halves": drawn(2, ROWS // 2, WIDTH),
    "labels": drawn(2, ROWS // 2),
}
OF_ROWS = {name: P("dp") for name in BATCH}
OF_ROWS |= dict.fromkeys(["halves", "labels"], P(None, "dp"))
OF_TOKENS = {**OF_ROWS, "t": P("dp", "mp"), "ids": P("dp", "mp")}
OF_TOKENS["counts"] = P("dp", "mp")
OF_ROWS_OVER_BOTH = {**dict.fromkeys(BATCH, P(BOTH)), "halves": P(), "labels": P()}


class Card(NamedTuple):
    """A loss, and how its parameters and its batch are split."""

    loss: Any
    params: dict[str, P]
    batch: Any = OF_ROWS
    out: Any = P()
    typed: Any = (False, True)
    after: Any = (
        None  # what follows the map, inside of the function that has a gradient
    )


def over(names, x):
    return lax.psum(x, names)


def square(x):
    return (x**2).sum()


def mlp(p, b):
    hidden = jnp.tanh(b["x"] @ p["w"] + p["b"][None])
    return hidden @ p["v"] @ p["out"]


def errors(p, b):
    return (mlp(p, b) - b["y"]) ** 2


def added(p, b):
    return over("dp", errors(p, b).sum()) / ROWS


def masked(p, b):
    return over("dp", (errors(p, b) * b["mask"]).sum()) / over("dp", b["mask"].sum())


OF_SHARD = {"w": P(), "b": P(), "v": P(), "out": P("dp")}
OF_MLP = {"w": P(), "b": P(), "v": P(), "out": P()}
COLUMNS = {"w": P(None, "mp"), "b": P("mp"), "v": P("mp"), "out": P()}


def by_columns(p, b, shift=0.0):
    hidden = jnp.tanh(b["x"] @ p["w"] + p["b"][None])
    out = over("mp", hidden @ p["v"] + shift)
    return over("dp", ((out @ p["out"] - b["y"]) ** 2).sum()) / ROWS


def attended(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def by_heads(p, b):
    q, k, v = jnp.einsum("bti,jhid->jbthd", b["t"], p["heads"])
    out = over("mp", jnp.einsum("bthd,hdo->bto", attended(q, k, v), p["back"]))
    return over("dp", ((out - b["t"]) ** 2).sum()) / (ROWS * TOKENS)


OF_HEADS = {"heads": P(None, "mp"), "back": P("mp")}


def by_tokens(p, b):
    """Queries are a device's own tokens; keys are those of all devices of ``mp``."""
    q, k, v = jnp.einsum("bti,jhid->jbthd", b["t"], p["heads"])
    k, v = [lax.all_gather(x, "mp", axis=1, tiled=True) for x in (k, v)]
    out = jnp.einsum("bthd,hdo->bto", attended(q, k, v), p["back"])
    losses = ((out - b["t"]) ** 2).sum(-1) * b["counts"]
    return losses.sum(), b["counts"].sum()


def contrast(p, b, gather, offset=True):
    """Each row's own key among the keys of all rows."""
    q = jnp.tanh(b["x"] @ p["w"])
    k = jnp.tanh(b["x"] @ p["w"] + p["b"][None])
    own = jnp.arange(len(q))
    if offset:
        own = own + lax.axis_index("dp") * len(q)
    logits = q @ gather(k).T
    of_own = jnp.take_along_axis(logits, own[:, None], 1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - of_own
    return over("dp", losses.sum()) / ROWS


def all_keys(k):
    return lax.all_gather(k, "dp", tiled=True)


def only_own_keys_learn(k):
    first = lax.axis_index("dp") * len(k)
    return lax.dynamic_update_slice(lax.stop_gradient(all_keys(k)), k, (first, 0))


OF_KEYS = {"w": P(), "b": P()}


def entropy(logits, ids):
    of_label = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_label


def of_words(x):
    return over("mp", x)


def by_words(p, b, most=lambda x: lax.pmax(x, "mp"), total=lambda x: over("mp", x)):
    logits = b["t"] @ p["words"]
    count = logits.shape[-1]
    own = lax.axis_index("mp") * count + jnp.arange(count)
    top = most(lax.stop_gradient(logits.max(-1)))
    sums = total(jnp.exp(logits - top[..., None]).sum(-1))
    is_label = b["ids"][..., None] == own[None, None]
    of_label = over("mp", jnp.where(is_label, logits, 0).sum(-1))
    losses = (top + jnp.log(sums) - of_label) * b["counts"]
    return over("dp", losses.sum()) / over("dp", b["counts"].sum())


def embedded(p, b):
    logits = p["table"][b["ids"]] @ p["words"]
    losses = entropy(logits, b["ids"]) * b["counts"]
    return over("dp", losses.sum()) / over("dp", b["counts"].sum())


def gathered(p, axes="dp"):
    return jax.tree.map(lambda x: lax.all_gather(x, axes, tiled=True), p)


def in_layers(p, b):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = lax.scan(jax.checkpoint(layer), b["x"], p["layers"])
    return ((x @ p["out"] - b["y"]) ** 2).sum()


def in_stages(p, b, count=lambda _: ROWS):
    """A pipeline of stages along ``mp``, for two micro-batches."""
    stage = lax.axis_index("mp")
    size = lax.axis_size("mp")
    given = b["halves"]
    held = jnp.zeros_like(given[0])
    losses = 0.0
    for tick in range(size + 1):
        done = jnp.where(stage == 0, given[min(tick, 1)], held)
        for w in p["layers"]:
            done = done + jnp.tanh(done @ w)
        if tick >= size - 1:
            of_labels = b["labels"][tick - size + 1]
            loss = ((done @ p["out"] - of_labels) ** 2).sum()
            losses = losses + jnp.where(stage == size - 1, loss, 0.0)
        held = lax.ppermute(done, "mp", [(i, (i + 1) % size) for i in range(size)])
    return over(BOTH, losses) / count(b)


def normed(p, b, moments):
    x = b["x"]
    mean, variance = moments(x)
    x = (x - mean[None]) * lax.rsqrt(variance + 1e-3)[None]
    x = x * p["scale"][None] + p["shift"][None]
    return over("dp", ((jnp.tanh(x) @ p["out"] - b["y"]) ** 2).sum()) / ROWS


def of_all(x):
    mean = over("dp", x.sum(0)) / ROWS
    return mean, over("dp", ((x - mean[None]) ** 2).sum(0)) / ROWS


def of_squares(x):
    mean = lax.pmean(x.mean(0), "dp")
    return mean, lax.pmean((x**2).mean(0), "dp") - mean**2


def of_own(x):
    return x.mean(0), x.var(0)


def averaged_of_own(x):
    return lax.pmean(x.mean(0), "dp"), lax.pmean(x.var(0), "dp")


OF_NORM = {"scale": P(), "shift": P(), "out": P()}


def of_images(p, b):
    kernel = p["layers"].reshape(4, 4, 2, 8)[:3, :3]
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        b["image"], kernel, (1, 1), "SAME", dimension_numbers=dims
    )
    out = jax.nn.relu(x).mean((1, 2)) @ p["out"]
    return over("dp", ((out - b["y"]) ** 2).sum()) / ROWS


def of_experts(p, b):
    number = lax.axis_index("mp") * len(p["experts"]) + jnp.arange(len(p["experts"]))
    gates = jax.nn.softmax(b["x"] @ p["router"])
    own = (jnp.arange(4)[None] == number[:, None]).astype(gates.dtype)
    gates = gates @ own.T
    of_each = jnp.einsum("bd,nde->nbe", b["x"], p["experts"])
    out = over("mp", jnp.einsum("bn,nbd->bd", gates, of_each))
    return over("dp", ((out - b["x"]) ** 2).sum()) / ROWS


def dealt(x, split, joined, axis="dp"):
    return lax.all_to_all(x, axis, split, joined, tiled=True)


def same(x):
    return x


def by_dealt_tokens(p, b, kept=same, of_expert=same, back=same, balance=0.0):
    """Each token goes to the device that has its expert, and comes back.

    ``kept`` is what of the choices ``[b, E]`` is kept. ``of_expert`` and ``back`` are
    what happens to the experts' tokens, before and after they are dealt back.
    """
    gates = jax.nn.softmax(b["x"] @ p["router"])
    chosen = kept(jax.nn.one_hot(gates.argmax(-1), 4))
    sent = jnp.einsum("be,bd->ebd", chosen, b["x"])
    hidden = jnp.tanh(jnp.einsum("ebd,edf->ebf", dealt(sent, 0, 1), p["experts"]))
    own = back(dealt(of_expert(hidden), 1, 0))
    out = jnp.einsum("be,ebd->bd", gates * chosen, own)
    share = lax.stop_gradient(over("dp", chosen.sum(0)) / ROWS)
    return over("dp", ((out - b["x"]) ** 2).sum() + balance * (gates @ share).sum())


def by_rows_of_tokens(p, b):
    """The same with tokens that are split over both axes, and experts over ``mp``."""
    gates = jax.nn.softmax(b["t"] @ p["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), 4)
    sent = jnp.einsum("bte,btd->ebtd", chosen, b["t"])
    got = dealt(sent, 0, 2, "mp")
    hidden = jnp.tanh(jnp.einsum("ebtd,edf->ebtf", got, p["experts"]))
    own = dealt(hidden, 2, 0, "mp")
    out = jnp.einsum("bte,ebtd->btd", gates * chosen, own)
    losses = ((out - b["t"]) ** 2).sum(-1) * b["counts"]
    return over(BOTH, losses.sum()) / over(BOTH, b["counts"].sum())


def per_expert(hidden):
    """Divided by the number of tokens that each expert got, from all devices."""
    count = (hidden != 0).any(-1).sum(1)
    return hidden / (1 + count)[:, None, None]


def per_device(hidden):
    return hidden / (1 + (hidden != 0).any(-1).sum())


def first_tokens(chosen):
    """The first two tokens of a device for each expert."""
    return jnp.where(jnp.cumsum(chosen, 0) <= 2, chosen, 0)


def of_other_experts(hidden):
    size = lax.axis_size("dp")
    return lax.ppermute(hidden, "dp", [(i, (i + 1) % size) for i in range(size)])


OF_DEALT = {"experts": P("dp"), "router": P()}
OF_TOKENS_DEALT = {"experts": P("mp"), "router": P()}


def by_one_hot(p, b, offset=lambda n: lax.axis_index("mp") * n, total=of_words):
    """The labels minus the number of the device's first word, as one-hot vectors."""
    logits = b["t"] @ p["words"]
    count = logits.shape[-1]
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "mp")
    sums = over("mp", jnp.exp(logits - top[..., None]).sum(-1))
    is_label = jax.nn.one_hot(b["ids"] - offset(count), count)
    losses = (top + jnp.log(sums) - total((is_label * logits).sum(-1))) * b["counts"]
    return over("dp", losses.sum()) / over("dp", b["counts"].sum())


OF_WORDS = {"words": P(None, "mp")}


@jax.custom_vjp
def summed_twice(x):
    return x


summed_twice.defvjp(lambda x: (x, None), lambda _, d: (lax.psum(d, "dp"),))


class Right:
    """Losses whose value and gradients are the same on any mesh."""

    of_mlp = Card(added, OF_MLP)
    of_means = Card(lambda p, b: lax.pmean(errors(p, b).mean(), "dp"), OF_MLP)
    masks = Card(masked, OF_MLP)
    mean_outside = Card(
        lambda p, b: errors(p, b).mean()[None], OF_MLP, out=P("dp"), after=jnp.mean
    )
    rows_outside = Card(errors, OF_MLP, out=P("dp"), after=jnp.mean)
    columns = Card(by_columns, COLUMNS)
    heads = Card(by_heads, OF_HEADS)
    tokens = Card(
        lambda p, b: jnp.divide(*over(BOTH, by_tokens(p, b))),
        {"heads": P(), "back": P()},
        OF_TOKENS,
    )
    gathered_keys = Card(lambda p, b: contrast(p, b, all_keys), OF_KEYS)
    vocabulary = Card(by_words, {"words": P(None, "mp")})
    embeddings = Card(embedded, {"table": P(), "words": P()})
    sharded = Card(lambda p, b: masked(gathered(p), b), dict.fromkeys(OF_MLP, P("dp")))
    sharded_over_both = Card(
        lambda p, b: over(BOTH, errors(gathered(p, BOTH), b).sum()) / ROWS,
        dict.fromkeys(OF_MLP, P(BOTH)),
        OF_ROWS_OVER_BOTH,
    )
    layers = Card(
        lambda p, b: over("dp", in_layers(p, b)) / ROWS, {"layers": P(), "out": P()}
    )
    norms = Card(lambda p, b: normed(p, b, of_all), OF_NORM)
    norms_of_squares = Card(lambda p, b: normed(p, b, of_squares), OF_NORM)
    images = Card(of_images, {"layers": P(), "out": P()})
    experts = Card(of_experts, {"experts": P("mp"), "router": P()})
    pipeline = Card(in_stages, {"layers": P("mp"), "out": P()})
    dealt_tokens = Card(by_dealt_tokens, OF_DEALT)
    dealt_and_balanced = Card(
        lambda p, b: by_dealt_tokens(p, b, of_expert=per_expert, balance=0.1), OF_DEALT
    )
    dealt_rows_of_tokens = Card(by_rows_of_tokens, OF_TOKENS_DEALT, OF_TOKENS)
    one_hot_labels = Card(by_one_hot, OF_WORDS)


def of_next_shard(p):
    """Parameters of which each device has a shard, and uses that of its neighbour."""
    size = lax.axis_size("dp")
    ring = [(i, (i + 1) % size) for i in range(size)]
    out = lax.ppermute(p["out"], "dp", ring).mean() * jnp.ones(WIDTH)
    return {**p, "out": out}


def own_mean(p, b):
    return (errors(p, b) * b["mask"]).sum() / (b["mask"].sum() + 0.1)


class Wrong:
    """Losses whose value or gradients depend on the mesh."""

    without_a_sum = Card(lambda p, b: errors(p, b).sum() / ROWS, OF_MLP, typed=[False])
    added_again = Card(
        lambda p, b: over("dp", over("dp", errors(p, b).sum())) / ROWS,
        OF_MLP,
        typed=[False],
    )
    sum_of_means = Card(lambda p, b: over("dp", errors(p, b).mean()), OF_MLP)
    mean_of_sums = Card(lambda p, b: lax.pmean(errors(p, b).sum(), "dp"), OF_MLP)
    own_denominators = Card(
        lambda p, b: lax.pmean(
            (errors(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1), "dp"
        ),
        OF_MLP,
    )
    divided_by_own_count = Card(
        lambda p, b: lax.pmean(
            over("dp", (errors(p, b) * b["mask"]).sum()) / (b["mask"].sum() + 0.1), "dp"
        ),
        OF_MLP,
    )
    times_devices = Card(lambda p, b: masked(p, b) * lax.axis_size("dp"), OF_MLP)
    sums_of_means_outside = Card(
        lambda p, b: errors(p, b).mean()[None], OF_MLP, out=P("dp"), after=jnp.sum
    )
    own_counts_outside = Card(
        lambda p, b: own_mean(p, b)[None],
        OF_MLP,
        out=P("dp"),
        after=jnp.mean,
    )
    square_of_own_sum = Card(
        lambda p, b: over("dp", errors(p, b).sum() ** 2) / ROWS, OF_MLP
    )
    own_clip = Card(
        lambda p, b: over("dp", jnp.minimum(errors(p, b).sum(), 3.0)), OF_MLP
    )
    decay_per_device = Card(
        lambda p, b: over("dp", errors(p, b).sum() / ROWS + square(p["w"])), OF_MLP
    )
    shift_per_device = Card(lambda p, b: by_columns(p, b, 0.5), COLUMNS)
    own_keys = Card(lambda p, b: contrast(p, b, lambda k: k, False), OF_KEYS)
    labels_of_own_rows = Card(lambda p, b: contrast(p, b, all_keys, False), OF_KEYS)
    only_own_learn = Card(lambda p, b: contrast(p, b, only_own_keys_learn), OF_KEYS)
    own_words = Card(
        lambda p, b: lax.pmean(by_words(p, b, lambda x: x, lambda x: x), "mp"),
        {"words": P(None, "mp")},
    )
    own_moments = Card(lambda p, b: normed(p, b, of_own), OF_NORM)
    averaged_variances = Card(lambda p, b: normed(p, b, averaged_of_own), OF_NORM)
    tokens_by_own_counts = Card(
        lambda p, b: lax.pmean(
            jnp.divide(by_tokens(p, b)[0], by_tokens(p, b)[1] + 0.1), BOTH
        ),
        {"heads": P(), "back": P()},
        OF_TOKENS,
    )
    tokens_by_counts_of_rows = Card(
        lambda p, b: lax.pmean(
            over("dp", by_tokens(p, b)[0]) / over("dp", by_tokens(p, b)[1] + 0.1), "mp"
        ),
        {"heads": P(), "back": P()},
        OF_TOKENS,
    )
    gradients_added_again = Card(
        lambda p, b: added(jax.tree.map(summed_twice, p), b), OF_MLP, typed=[False]
    )
    next_shard = Card(lambda p, b: masked(of_next_shard(p), b), OF_SHARD)
    first_tokens_of_a_device = Card(
        lambda p, b: by_dealt_tokens(p, b, kept=first_tokens), OF_DEALT
    )
    divided_by_tokens_of_a_device = Card(
        lambda p, b: by_dealt_tokens(p, b, of_expert=per_device), OF_DEALT
    )
    back_from_other_experts = Card(
        lambda p, b: by_dealt_tokens(p, b, of_expert=of_other_experts), OF_DEALT
    )
    back_in_another_order = Card(
        lambda p, b: by_dealt_tokens(p, b, back=lambda x: x[:, ::-1]), OF_DEALT
    )
    times_experts_of_a_device = Card(
        lambda p, b: by_dealt_tokens(p, b, of_expert=lambda x: x * len(x)), OF_DEALT
    )
    mean_of_a_devices_experts = Card(
        lambda p, b: by_dealt_tokens(p, b, of_expert=lambda x: x - x.mean(0)[None]),
        OF_DEALT,
    )
    of_own_choices = Card(
        lambda p, b: by_dealt_tokens(p, b, kept=lambda x: x - x.mean(0)[None]), OF_DEALT
    )
    label_without_offset = Card(lambda p, b: by_one_hot(p, b, lambda n: 0), OF_WORDS)
    label_by_half_the_offset = Card(
        lambda p, b: by_one_hot(p, b, lambda n: lax.axis_index("mp") * (n // 2)),
        OF_WORDS,
    )
    label_by_rows = Card(
        lambda p, b: by_one_hot(p, b, lambda n: lax.axis_index("mp") * len(b["ids"])),
        OF_WORDS,
    )
    label_without_a_sum = Card(
        lambda p, b: lax.pmean(by_one_hot(p, b, total=same), "mp"), OF_WORDS
    )
    pipeline_by_own_counts = Card(
        lambda p, b: in_stages(p, b, lambda b: b["mask"].sum() + 0.1),
        {"layers": P("mp"), "out": P()},
        typed=[False],
    )


def named(deck):
    """The cards of `Right` or `Wrong`, by name."""
    return {name: x for name, x in vars(deck).items() if isinstance(x, Card)}


def program(card, mesh, *, typed):
    """The function of value and gradients on a mesh, and its arguments.

    ``typed`` is the map's ``check_vma``.
    """
    mapped = jax.shard_map(
        card.loss,
        mesh=mesh,
        in_specs=(card.params, card.batch),
        out_specs=card.out,
        check_vma=typed,
    )
    after = card.after or (lambda loss: loss)
    fn = jax.jit(jax.value_and_grad(lambda p, b: after(mapped(p, b))))
    return fn, ({name: PARAMS[name] for name in card.params}, BATCH)
