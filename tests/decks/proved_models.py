"""Models as people build them, of small widths, and wrong ones beside them.

Each is a `Model`: parameters, a batch and a loss of one tower, by its name.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import towerjax as tj
from towerjax.layers.batch_norm import linen as tower_linen
from towerjax.layers.batch_norm import nnx as tower_nnx

B = 4  # rows, to draw shapes from


class Model(NamedTuple):
    params: Any
    batch: Any
    loss_fn: Any
    local: Any = None
    reads_padding: bool = False  # whether padding counts in it


def zeros(tree):
    """Arrays of these shapes: no number is looked at."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)


def inits(module, *args, **kwargs):
    """Variables of a Linen module."""
    key = jax.random.key(0)
    rngs = {"params": key, "dropout": key}
    return zeros(jax.eval_shape(functools.partial(module.init, **kwargs), rngs, *args))


def floats(*shape):
    return np.zeros((B, *shape), np.float32)


def ints(*shape):
    return np.zeros((B, *shape), np.int32)


def mean(values, tower, mask=None):
    """Over rows, or over what a mask ``[b, ...]`` keeps of them."""
    if mask is None:
        return tj.Weighted.mean(values, tower.weight)
    weight = tower.weight.reshape((-1,) + (1,) * (mask.ndim - 1))
    return tj.Weighted.mean(values, mask * weight)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


# Images.


class ResNet(nn.Module):
    """He et al., 2015: a stem, two stages, projections."""

    norm: Any

    @nn.compact
    def __call__(self, x, tower):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.max_pool(nn.relu(self.norm()(x, tower)), (3, 3), (2, 2), "SAME")
        for features, stride in ((8, 1), (16, 2)):
            y = nn.Conv(features, (3, 3), stride, use_bias=False)(x)
            y = nn.relu(self.norm()(y, tower))
            y = self.norm()(nn.Conv(features, (3, 3), use_bias=False)(y), tower)
            if x.shape != y.shape:
                x = nn.Conv(features, (1, 1), stride, use_bias=False)(x)
                x = self.norm()(x, tower)
            x = nn.relu(x + y)
        return nn.Dense(5)(x.mean((1, 2)))


def resnet(statistics="synchronised"):
    kind = functools.partial(tower_linen.TowerBatchNorm, statistics=statistics)
    module = ResNet(functools.partial(kind, use_running_average=False))
    batch = {"image": floats(16, 16, 3), "label": ints()}
    variables = inits(module, batch["image"], None)

    def loss_fn(params, b, tower):
        given = {"params": params, "batch_stats": tower.local}
        logits, new = module.apply(given, b["image"], tower, mutable=["batch_stats"])
        losses = cross_entropy(
            optax.losses.poly_loss_cross_entropy and logits, b["label"]
        )
        metrics = {
            "hits": tj.metrics.accuracy(b["label"], logits.argmax(-1), tower.weight)
        }
        return tj.TowerOutput(mean(losses, tower), metrics, local=new["batch_stats"])

    return Model(variables["params"], batch, loss_fn, variables["batch_stats"])


class NnxResNet(nnx.Module):
    """The same in NNX, of one stage."""

    def __init__(self, rngs):
        conv = functools.partial(
            nnx.Conv, kernel_size=(3, 3), use_bias=False, rngs=rngs
        )
        self.convs = nnx.List([conv(3, 8), conv(8, 8), conv(8, 8)])
        norm = tower_nnx.TowerBatchNorm
        self.norms = nnx.List([norm(8, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x, tower):
        x = nnx.relu(self.norms[0](self.convs[0](x), tower))
        y = nnx.relu(self.norms[1](self.convs[1](x), tower))
        x = nnx.relu(x + self.norms[2](self.convs[2](y), tower))
        return self.logits(self.dropout(x.mean((1, 2))))


def resnet_nnx():
    kinds = nnx.Param, nnx.BatchStat, nnx.RngState
    graph, params, stats, streams = nnx.split(NnxResNet(nnx.Rngs(0)), *kinds)

    def loss_fn(params, b, tower):
        model = nnx.merge(graph, params, tower.local, streams, copy=True)
        nnx.reseed(model, default=tower.rng)
        losses = cross_entropy(model(b["image"], tower), b["label"])
        local = nnx.state(model, nnx.BatchStat)
        return tj.TowerOutput(mean(losses, tower), local=local)

    return Model(params, {"image": floats(8, 8, 3), "label": ints()}, loss_fn, stats)


class UNet(nn.Module):
    """Ronneberger et al., 2015, with group norm and times, as in diffusion."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(4.0))[None]
        time = nn.Dense(8)(
            nn.silu(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1))
        )

        def block(x, features):
            y = nn.Conv(features, (3, 3))(nn.silu(nn.GroupNorm(2)(x)))
            y = y + nn.Dense(features)(time)[:, None, None]
            y = nn.Conv(features, (3, 3))(nn.silu(nn.GroupNorm(2)(y)))
            return y + nn.Conv(features, (1, 1))(x)

        x = nn.Conv(8, (3, 3))(x)
        first = block(x, 8)
        second = block(nn.avg_pool(first, (2, 2), (2, 2)), 16)
        flat = second.reshape(len(x), -1, 16)
        flat = flat + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(flat))
        second = flat.reshape(second.shape)
        up = jax.image.resize(second, (*first.shape[:3], 16), "bilinear")
        up = up + nn.ConvTranspose(16, (2, 2), (2, 2))(second)
        return nn.Conv(1, (3, 3))(block(jnp.concatenate([first, up], -1), 8))


def unet():
    """Denoising: a time and noise of each row."""
    module = UNet()
    batch = {"image": floats(8, 8, 1)}
    params = inits(module, batch["image"], floats())["params"]

    def loss_fn(params, b, tower):
        at, drawn = jax.random.split(tower.rng)
        step = jax.random.randint(at, (tower.rows,), 0, 100)
        noise = jax.random.normal(drawn, b["image"].shape)
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 100))[step][:, None, None, None]
        x = jnp.sqrt(kept) * b["image"] + jnp.sqrt(1 - kept) * noise
        said = module.apply({"params": params}, x, step.astype(float))
        return mean(((said - noise) ** 2).mean((1, 2, 3)), tower)

    return Model(params, batch, loss_fn)


class Vit(nn.Module):
    """Dosovitskiy et al., 2020: patches, a class token, dropout, stochastic depth."""

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(8, (4, 4), (4, 4))(image).reshape(len(image), -1, 8)
        token = self.param("token", nn.initializers.zeros, (1, 1, 8))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x = x + self.param("place", nn.initializers.normal(), (1, x.shape[1], 8))
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(
                2, deterministic=False, dropout_rate=0.1, broadcast_dropout=False
            )(nn.LayerNorm()(x))
            keep = jax.random.bernoulli(self.make_rng("dropout"), 0.9, (len(x), 1, 1))
            x = x + y * keep / 0.9
            y = nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=False)(y)
        return nn.Dense(5)(nn.LayerNorm()(x)[:, 0])


def vit():
    """With smoothed labels, and mixed pairs within a row's own two images."""
    module = Vit()
    batch = {"image": floats(8, 8, 3), "other": floats(8, 8, 3), "label": ints()}
    params = inits(module, batch["image"])["params"]

    def loss_fn(params, b, tower):
        first, second = jax.random.split(tower.rng)
        share = jax.random.beta(first, 0.8, 0.8, (tower.rows, 1, 1, 1))
        image = share * b["image"] + (1 - share) * b["other"]
        logits = module.apply({"params": params}, image, rngs={"dropout": second})
        labels = optax.smooth_labels(jax.nn.one_hot(b["label"], 5), 0.1)
        return mean(optax.softmax_cross_entropy(logits, labels), tower)

    return Model(params, batch, loss_fn)


def vae():
    """Kingma and Welling, 2013."""
    shapes = {"in": (12, 8), "mean": (8, 3), "spread": (8, 3), "out": (3, 12)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def loss_fn(params, b, tower):
        hidden = jnp.tanh(b["x"] @ params["in"])
        center = hidden @ params["mean"]
        log_var = hidden @ params["spread"]
        noise = jax.random.normal(tower.rng, center.shape)
        said = (center + jnp.exp(0.5 * log_var) * noise) @ params["out"]
        lost = optax.sigmoid_binary_cross_entropy(said, b["x"]).sum(1)
        kl = -0.5 * (1 + log_var - center**2 - jnp.exp(log_var)).sum(1)
        shown = {"kl": mean(kl, tower), "lost": mean(lost, tower)}
        return tj.TowerOutput(mean(lost + 0.5 * kl, tower), shown)

    return Model(params, {"x": floats(12)}, loss_fn)


# Text.


def gpt():
    """Layers that are scanned, under remat, with dropout; padding tokens are masked."""
    names = {"qkv": (2, 8, 24), "out": (2, 8, 8), "up": (2, 8, 16), "down": (2, 16, 8)}
    names |= {"embed": (11, 8), "place": (6, 8), "scale": (2, 2, 8)}
    params = {name: np.zeros(shape, np.float32) for name, shape in names.items()}

    def norm(x, scale):
        square = (x**2).mean(-1, keepdims=True)
        return x * lax.rsqrt(square + 1e-6) * scale[None, None]

    def loss_fn(params, b, tower):
        tokens = b["tokens"][:, :-1]
        mask = b["tokens"][:, 1:] > 0

        @jax.checkpoint
        def layer(carry, p):
            x, key = carry
            key, first = jax.random.split(key)
            q, k, v = jnp.split(norm(x, p["scale"][0]) @ p["qkv"], 3, -1)
            heads = [y.reshape(*y.shape[:2], 2, -1) for y in (q, k, v)]
            y = jax.nn.dot_product_attention(*heads, is_causal=True)
            y = y.reshape(x.shape) @ p["out"]
            x = x + y * jax.random.bernoulli(first, 0.9, y.shape) / 0.9
            x = x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"]) @ p["down"]
            return (x, key), None

        x = params["embed"][tokens] + params["place"][None]
        layers = {k: v for k, v in params.items() if k not in ("embed", "place")}
        (x, _), _ = lax.scan(layer, (x, tower.rng), layers)
        logits = x @ params["embed"].T
        hits = tj.metrics.accuracy(
            b["tokens"][:, 1:], logits.argmax(-1), mask * tower.weight[:, None]
        )
        losses = cross_entropy(logits, b["tokens"][:, 1:])
        return tj.TowerOutput(mean(losses, tower, mask), {"hits": hits})

    return Model(params, {"tokens": ints(7)}, loss_fn)


def gpt_nnx():
    """A block in NNX, with dropout of the tower."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.last = nnx.LayerNorm(8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                2, 8, dropout_rate=0.1, decode=False, broadcast_dropout=False, rngs=rngs
            )
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)
            self.embed = nnx.Embed(11, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            y = self.down(nnx.gelu(self.up(self.last(x))))
            return self.embed.attend(x + self.dropout(y))

    graph, params, streams = nnx.split(Block(nnx.Rngs(0)), nnx.Param, nnx.RngState)

    def loss_fn(params, b, tower):
        model = nnx.merge(graph, params, streams, copy=True)
        model.train()
        nnx.reseed(model, default=tower.rng)
        losses = cross_entropy(model(b["tokens"][:, :-1]), b["tokens"][:, 1:])
        return mean(losses.mean(1), tower)

    return Model(params, {"tokens": ints(7)}, loss_fn)


class Bert(nn.Module):
    """Devlin et al., 2018: segments, padding masks, two heads."""

    @nn.compact
    def __call__(self, tokens, segment, mask):
        embed = nn.Embed(11, 8)
        places = nn.Embed(6, 8)(jnp.arange(6))
        x = embed(tokens) + nn.Embed(2, 8)(segment) + places[None]
        x = nn.Dropout(0.1, deterministic=False)(nn.LayerNorm()(x))
        seen = nn.make_attention_mask(mask, mask)
        for _ in range(2):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(2)(x, mask=seen))
            x = nn.LayerNorm()(x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x))))
        return embed.attend(nn.Dense(8)(x)), nn.Dense(2)(nn.tanh(nn.Dense(8)(x[:, 0])))


def bert():
    """Masked tokens and a next sentence: two means of unequal weights."""
    module = Bert()
    batch = {"tokens": ints(6), "segment": ints(6), "length": ints(), "target": ints(6)}
    batch |= {"chosen": floats(6), "next": ints()}
    params = inits(module, ints(6), ints(6), floats(6) > 0)["params"]

    def loss_fn(params, b, tower):
        mask = jnp.arange(6)[None] < b["length"][:, None]
        rngs = {"dropout": tower.rng}
        args = b["tokens"], b["segment"], mask
        words, follows = module.apply({"params": params}, *args, rngs=rngs)
        chosen = mean(cross_entropy(words, b["target"]), tower, b["chosen"] * mask)
        return chosen + mean(cross_entropy(follows, b["next"]), tower)

    return Model(params, batch, loss_fn)


class T5(nn.Module):
    """Raffel et al., 2019: relative places in buckets, an encoder and a decoder."""

    def attention(self, x, y, bias, mask):
        q, k, v = [nn.DenseGeneral((2, 4), use_bias=False)(z) for z in (x, y, y)]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        scores = jnp.where(mask, scores, -1e9)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return nn.DenseGeneral(8, (-2, -1), use_bias=False)(out)

    def bias(self, rows, columns, both):
        far = jnp.arange(columns)[None] - jnp.arange(rows)[:, None]
        side = 4 * (far > 0) if both else 0
        far = jnp.abs(far) if both else -jnp.minimum(far, 0)
        large = 2 + (jnp.log(jnp.maximum(far, 1) / 2) / jnp.log(4.0) * 2).astype(int)
        bucket = side + jnp.where(far < 2, far, jnp.minimum(large, 3))
        return nn.Embed(8, 2)(bucket).transpose(2, 0, 1)[None]

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(11, 8)
        norm = functools.partial(nn.RMSNorm)
        seen = (source > 0)[:, None, None]
        x = embed(source)
        x = x + self.attention(norm()(x), norm()(x), self.bias(6, 6, True), seen)
        x = norm()(x + nn.Dense(8)(nn.relu(nn.Dense(16)(norm()(x)))))
        y = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
        causal = jnp.tril(jnp.ones((5, 5), bool))[None, None]
        y = y + self.attention(norm()(y), norm()(y), self.bias(5, 5, False), causal)
        y = y + self.attention(norm()(y), x, jnp.zeros((1, 1, 1, 1)), seen)
        y = y + nn.Dense(8)(nn.gelu(nn.Dense(16)(norm()(y))) * nn.Dense(16)(y))
        return embed.attend(norm()(y))


def t5():
    module = T5()
    batch = {"source": ints(6), "target": ints(5)}
    params = inits(module, batch["source"], batch["target"])["params"]

    def loss_fn(params, b, tower):
        logits = module.apply({"params": params}, b["source"], b["target"])
        losses = cross_entropy(logits, b["target"])
        z_loss = 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
        return mean(losses + z_loss, tower, b["target"] > 0)

    return Model(params, batch, loss_fn)


def mamba():
    """Gu and Dao, 2023: a causal convolution, and a selective scan over time."""
    names = {"in": (4, 12), "kernel": (3, 1, 6), "step": (6, 6), "b": (6, 3)}
    names |= {"c": (6, 3), "a": (6, 3), "d": (6,), "out": (6, 4), "bias": (6,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in names.items()}

    def loss_fn(params, b, tower):
        x, gate = jnp.split(b["x"] @ params["in"], 2, -1)
        dims = ("NWC", "WIO", "NWC")
        x = lax.conv_general_dilated(
            x,
            params["kernel"],
            (1,),
            [(2, 0)],
            dimension_numbers=dims,
            feature_group_count=6,
        )
        x = jax.nn.silu(x)
        step = jax.nn.softplus(x @ params["step"] + params["bias"][None, None])
        decay = jnp.exp(step[..., None] * -jnp.exp(params["a"])[None, None])
        taken = (step * x)[..., None] * (x @ params["b"])[:, :, None]

        def join(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, hidden = lax.associative_scan(join, (decay, taken), axis=1)
        y = (hidden * (x @ params["c"])[:, :, None]).sum(-1)
        y = (y + params["d"][None, None] * x) * jax.nn.silu(gate)
        errors = y @ params["out"] - b["y"]
        return mean((errors**2).mean((1, 2)), tower)

    return Model(params, {"x": floats(7, 4), "y": floats(7, 4)}, loss_fn)


def lstm():
    """Linen's recurrent layers, in both directions, of sequences of some lengths."""

    class Reader(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            both = nn.Bidirectional(
                nn.RNN(nn.OptimizedLSTMCell(4)), nn.RNN(nn.GRUCell(4))
            )
            return nn.Dense(3)(both(x, seq_lengths=length))

    module = Reader()
    batch = {"x": floats(6, 3), "length": ints(), "label": ints(6)}
    params = inits(module, batch["x"], batch["length"])["params"]

    def loss_fn(params, b, tower):
        logits = module.apply({"params": params}, b["x"], b["length"])
        mask = jnp.arange(6)[None] < b["length"][:, None]
        return mean(cross_entropy(logits, b["label"]), tower, mask)

    return Model(params, batch, loss_fn)


def ctc():
    """Graves et al., 2006, by optax; a mean over labels."""
    params = {"w": np.zeros((4, 6), np.float32)}
    batch = {"x": floats(9, 4), "length": ints(), "label": ints(3), "labels": ints()}

    def loss_fn(params, b, tower):
        logits = jnp.tanh(b["x"] @ params["w"])
        pads = jnp.arange(9)[None] >= b["length"][:, None]
        label_pads = jnp.arange(3)[None] >= b["labels"][:, None]
        each = optax.ctc_loss(logits, 1.0 * pads, b["label"], 1.0 * label_pads)
        count = (b["labels"] * tower.weight).sum()
        return tj.Weighted((each * tower.weight).sum(), count)

    return Model(params, batch, loss_fn)


class Moe(nn.Module):
    """Fedus et al., 2021: each token to one expert, of a capacity of each row."""

    experts: int = 4

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(self.experts)(x)
        shares = jax.nn.softmax(logits)
        best, at = lax.top_k(shares, 2)
        hot = jax.nn.one_hot(at, self.experts)
        order = jnp.cumsum(hot.reshape(len(x), -1, self.experts), 1).reshape(hot.shape)
        hot = hot * (order <= 3)
        place = jax.nn.one_hot(((order - 1) * hot).sum(-1).astype(int), 3)
        sent = jnp.einsum("btke,btkc->btec", hot, place)
        kept = jnp.einsum("btke,btkc,btk->btec", hot, place, best)
        width = x.shape[-1]
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, width, 8))
        down = self.param("down", init, (self.experts, 8, width))
        inside = jnp.einsum("btec,btd,edh->bech", sent, x, up)
        out = jnp.einsum("bech,ehd->becd", jax.nn.relu(inside), down)
        return jnp.einsum("btec,becd->btd", kept, out), shares, hot.sum(2)


def moe(of_all=True):
    """A loss of balance over the tokens of all towers."""
    module = Moe()
    batch = {"x": floats(6, 4), "y": floats(6, 4)}
    params = inits(module, batch["x"])["params"]

    def loss_fn(params, b, tower):
        y, shares, hot = module.apply({"params": params}, b["x"])
        loss = mean(((y - b["y"]) ** 2).mean((1, 2)), tower)
        share = shares.mean(1)
        load = hot.mean(1)
        if of_all:
            load = tower.mean(load, tower.weight, axis=0)
            return loss + 0.01 * mean(4 * (share * load[None]).sum(1), tower)
        own = (share * tower.weight[:, None]).sum(0) * (
            load * tower.weight[:, None]
        ).sum(0)
        return loss + 0.01 * tj.Weighted(own.sum(), tower.weight.sum())

    return Model(params, batch, loss_fn)


# Several rows at once.


def embeddings(params, b):
    """Two towers of CLIP: images and words."""
    image = jnp.tanh(b["image"] @ params["image"])
    words = params["words"][b["tokens"]].mean(1)
    return [
        x / jnp.linalg.norm(x + 1e-6, axis=1, keepdims=True) for x in (image, words)
    ]


def of_pairs(loss_fn):
    params = {"image": (6, 4), "words": (11, 4), "scale": ()}
    params = {name: np.zeros(shape, np.float32) for name, shape in params.items()}
    return Model(params, {"image": floats(6), "tokens": ints(5)}, loss_fn)


def clip():
    """Radford et al., 2021, against the rows of all towers; padding is left out."""

    def loss_fn(params, b, tower):
        own = embeddings(params, b)
        every = tower.all_gather(own, axis=0)
        is_row = tower.all_gather(tower.weight, axis=0) > 0
        label = tower.id * tower.rows + jnp.arange(tower.rows)
        losses = 0.0
        for x, others in zip(own, every[::-1], strict=True):
            logits = jnp.exp(params["scale"]) * x @ others.T
            logits = jnp.where(is_row[None], logits, -1e9)
            losses = losses + cross_entropy(logits, label)
        return mean(losses / 2, tower)

    return of_pairs(loss_fn)


def siglip():
    """Zhai et al., 2023: a sigmoid for each pair, whose own row is told by number."""

    def loss_fn(params, b, tower):
        image, words = embeddings(params, b)
        every, kept = tower.all_gather((words, tower.weight), axis=0)
        logits = jnp.exp(params["scale"]) * image @ every.T
        label = tower.id * tower.rows + jnp.arange(tower.rows)
        sign = 2 * jax.nn.one_hot(label, every.shape[0]) - 1
        losses = jax.nn.softplus(-sign * logits) * kept[None]
        return mean(losses.sum(1), tower)

    return of_pairs(loss_fn)


def simclr():
    """Chen et al., 2020: two views of each row, all of them on all towers."""

    def loss_fn(params, b, tower):
        views = embeddings(params, b)
        every = tower.all_gather(views, axis=0)
        kept = tower.all_gather(tower.weight, axis=0) > 0
        number = tower.id * tower.rows + jnp.arange(tower.rows)
        is_self = number[:, None] == jnp.arange(every[0].shape[0])[None]
        losses = 0.0
        for i in (0, 1):
            own = jnp.where(is_self | ~kept[None], -1e9, views[i] @ every[i].T)
            other = jnp.where(kept[None], views[i] @ every[1 - i].T, -1e9)
            logits = jnp.concatenate([own, other], 1) / 0.1
            positive = (views[0] * views[1]).sum(1) / 0.1
            losses = losses + jax.nn.logsumexp(logits, axis=1) - positive
        return mean(losses, tower)

    return of_pairs(loss_fn)


def moco():
    """He et al., 2019: a queue of keys that all towers share."""

    def loss_fn(params, b, tower):
        query, key = embeddings(
            {**params, "words": lax.stop_gradient(params["words"])}, b
        )
        positive = (query * key).sum(1, keepdims=True)
        logits = jnp.concatenate([positive, query @ params["queue"].T], 1) / 0.07
        label = jnp.zeros(len(logits), int)
        losses = cross_entropy(logits, label)
        hits = tj.metrics.accuracy(label, logits.argmax(1), tower.weight)
        return tj.TowerOutput(mean(losses, tower), {"hits": hits})

    model = of_pairs(loss_fn)
    return model._replace(params=model.params | {"queue": np.zeros((9, 4), np.float32)})


def gnn(offset=lambda rows: jnp.arange(rows)):
    """Graphs of five nodes and six edges, joined to one of a tower."""
    params = {"message": (3, 3), "update": (3, 3), "out": (3,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in params.items()}
    batch = {"nodes": floats(5, 3), "edges": ints(6, 2), "y": floats()}
    batch |= {"kept": floats(6)}

    def loss_fn(params, b, tower):
        rows = len(b["y"])
        x = b["nodes"].reshape(rows * 5, 3)
        edges = (b["edges"] % 5 + 5 * offset(rows)[:, None, None]).reshape(-1, 2)
        start = edges[:, 0]
        end = edges[:, 1]
        kept = b["kept"].reshape(-1)
        for _ in range(2):
            sent = jnp.tanh(x[start] @ params["message"]) * kept[:, None]
            x = jnp.tanh(
                x @ params["update"] + jax.ops.segment_sum(sent, end, rows * 5)
            )
        graph = jnp.repeat(jnp.arange(rows), 5)
        pooled = jax.ops.segment_sum(x, graph, rows) @ params["out"]
        return mean((pooled - b["y"]) ** 2, tower)

    return Model(params, batch, loss_fn)


def gat():
    """Velickovic et al., 2017: attention over the edges of each graph, by vmap."""
    params = {"w": (3, 3), "a": (6,), "out": (3,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in params.items()}
    batch = {"nodes": floats(5, 3), "edges": ints(6, 2), "y": floats()}

    def loss_fn(params, b, tower):
        def of_graph(nodes, edges):
            x = nodes @ params["w"]
            (start, end) = edges.T % 5
            both = jnp.concatenate([x[start], x[end]], 1)
            score = jax.nn.leaky_relu(both @ params["a"])
            largest = jax.ops.segment_max(score, end, 5)
            share = jnp.exp(score - largest[end])
            share = share / (jax.ops.segment_sum(share, end, 5)[end] + 1e-9)
            pooled = jax.ops.segment_sum(share[:, None] * x[start], end, 5)
            return jax.nn.elu(pooled).mean(0) @ params["out"]

        said = jax.vmap(of_graph)(b["nodes"], b["edges"])
        return mean((said - b["y"]) ** 2, tower)

    return Model(params, batch, loss_fn)


# Reinforcement learning, physics, and others.


def ppo(of_all=True):
    """Schulman et al., 2017, with advantages of all rows, and their spread."""
    params = {"pi": np.zeros((4, 3), np.float32), "v": np.zeros(4, np.float32)}
    batch = {"x": floats(6, 4), "action": ints(6), "log": floats(6), "done": floats(6)}
    batch |= {"reward": floats(6), "value": floats(6), "last": floats()}

    def loss_fn(params, b, tower):
        after = jnp.concatenate([b["value"][:, 1:], b["last"][:, None]], 1)
        delta = b["reward"] + 0.99 * after * (1 - b["done"]) - b["value"]

        def back(carry, row):
            delta, done = row
            carry = delta + 0.99 * 0.95 * (1 - done) * carry
            return carry, carry

        start = jnp.zeros(len(delta))
        _, gain = lax.scan(back, start, (delta.T, b["done"].T), reverse=True)
        gain = gain.T
        weight = tower.weight[:, None] * jnp.ones((1, 6))
        target = gain + b["value"]
        if of_all:
            center = tower.mean(gain, weight)
            spread = jnp.sqrt(tower.mean((gain - center) ** 2, weight) + 1e-8)
        else:
            center = gain.mean()
            spread = gain.std() + 1e-8
        gain = (gain - center) / spread
        logs = jax.nn.log_softmax(b["x"] @ params["pi"])
        log = jnp.take_along_axis(logs, b["action"][..., None], -1)[..., 0]
        ratio = jnp.exp(log - b["log"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        actor = -jnp.minimum(ratio * gain, clipped * gain)
        critic = (b["x"] @ params["v"] - target) ** 2
        entropy = -(jnp.exp(logs) * logs).sum(-1)
        loss = mean(actor + 0.5 * critic - 0.01 * entropy, tower, weight)
        shown = {"kl": mean(b["log"] - log, tower, weight)}
        shown |= {"clipped": mean(jnp.abs(ratio - 1) > 0.2, tower, weight)}
        return tj.TowerOutput(loss, shown)

    return Model(params, batch, loss_fn)


def dqn():
    """Van Hasselt et al., 2015: a second net chooses; a Huber loss, weights of rows."""
    params = {name: np.zeros((4, 3), np.float32) for name in ("w", "target")}
    batch = {"x": floats(4), "next": floats(4), "action": ints(), "reward": floats()}
    batch |= {"done": floats(), "weight": floats()}

    def loss_fn(params, b, tower):
        best = (b["next"] @ params["w"]).argmax(1)
        then = jnp.take_along_axis(b["next"] @ params["target"], best[:, None], 1)[:, 0]
        target = lax.stop_gradient(b["reward"] + 0.9 * (1 - b["done"]) * then)
        q = (b["x"] @ params["w"])[jnp.arange(tower.rows), b["action"]]
        losses = b["weight"] * optax.huber_loss(q, target)
        shown = {"q": mean(q, tower), "error": mean(jnp.abs(q - target), tower)}
        return tj.TowerOutput(mean(losses, tower), shown)

    return Model(params, batch, loss_fn)


def nerf():
    """Mildenhall et al., 2020: rays, samples along them, what is behind is dimmed."""
    params = {"in": np.zeros((24, 8), np.float32), "out": np.zeros((8, 4), np.float32)}
    batch = {"origin": floats(3), "direction": floats(3), "color": floats(3)}

    def loss_fn(params, b, tower):
        jitter = jax.random.uniform(tower.rng, (tower.rows, 7))
        depth = jnp.linspace(0.1, 1.0, 7)[None] + 0.1 * jitter
        at = b["origin"][:, None] + depth[..., None] * b["direction"][:, None]
        waves = at[..., None] * 2.0 ** jnp.arange(4)[None, None, None]
        waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
        out = jnp.tanh(waves.reshape(*at.shape[:2], -1) @ params["in"]) @ params["out"]
        dense = jax.nn.relu(out[..., 0])
        color = jax.nn.sigmoid(out[..., 1:])
        steps = jnp.diff(depth, axis=1, append=jnp.full((tower.rows, 1), 2.0))
        opaque = 1 - jnp.exp(-dense * steps)
        seen = jnp.cumprod(jnp.pad(1 - opaque, ((0, 0), (1, 0)), constant_values=1), 1)
        said = ((opaque * seen[:, :-1])[..., None] * color).sum(1)
        return mean(((said - b["color"]) ** 2).sum(1), tower)

    return Model(params, batch, loss_fn)


def pinn():
    """Raissi et al., 2019: derivatives of the network by its inputs, at each point."""
    params = {"in": np.zeros((2, 8), np.float32), "out": np.zeros(8, np.float32)}

    def loss_fn(params, b, tower):
        def u(point):
            return jnp.tanh(point @ params["in"]) @ params["out"]

        def residual(point):
            second = jax.hessian(u)(point)
            return jax.grad(u)(point)[0] - 0.1 * second[1, 1] - jnp.sin(u(point))

        inside = mean(jax.vmap(residual)(b["point"]) ** 2, tower)
        edge = mean((jax.vmap(u)(b["edge"]) - b["value"]) ** 2, tower)
        return inside + 10.0 * edge

    batch = {"point": floats(2), "edge": floats(2), "value": floats()}
    return Model(params, batch, loss_fn)


def fno():
    """Li et al., 2020: a Fourier layer over space."""
    params = {"real": (4, 3, 3), "imag": (4, 3, 3), "w": (3, 3)}
    params = {name: np.zeros(shape, np.float32) for name, shape in params.items()}

    def loss_fn(params, b, tower):
        x = jnp.fft.rfft(b["x"], axis=1)[:, :4]
        weights = params["real"] + 1j * params["imag"]
        x = jnp.einsum("bkc,kcd->bkd", x, weights)
        x = jnp.fft.irfft(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), 8, axis=1)
        x = jax.nn.gelu(x + b["x"] @ params["w"])
        error = jnp.linalg.norm((x - b["y"]).reshape(len(x), -1) + 1e-6, axis=1)
        size = jnp.linalg.norm(b["y"].reshape(len(x), -1) + 1e-6, axis=1)
        return mean(error / size, tower)

    return Model(params, {"x": floats(8, 3), "y": floats(8, 3)}, loss_fn)


def equilibrium():
    """Bai et al., 2019: a layer's fixed point, and steps of an ODE of each row."""
    params = {"w": np.zeros((3, 3), np.float32), "u": np.zeros((3, 3), np.float32)}

    def loss_fn(params, b, tower):
        def step(z):
            return jnp.tanh(z @ params["w"] + b["x"] @ params["u"])

        z = lax.fori_loop(0, 8, lambda i, z: step(z), jnp.zeros_like(b["x"]))

        def euler(y, time):
            slope = jnp.tanh(y @ params["w"]) * jnp.sin(time)
            middle = jnp.tanh((y + 0.05 * slope) @ params["w"])
            return y + 0.1 * middle, None

        y, _ = lax.scan(euler, z, jnp.linspace(0, 1, 10))
        return mean(((y - b["y"]) ** 2).sum(1), tower)

    return Model(params, {"x": floats(3), "y": floats(3)}, loss_fn)


def dlrm():
    """Naumov et al., 2019: tables of categories, pairs of them multiplied."""
    params = {f"table {i}": np.zeros((9, 4), np.float32) for i in range(3)}
    params |= {"dense": np.zeros((5, 4), np.float32), "out": np.zeros(10, np.float32)}
    batch = {"ids": ints(3, 2), "x": floats(5), "click": floats()}

    def loss_fn(params, b, tower):
        found = [params[f"table {i}"][b["ids"][:, i]].sum(1) for i in range(3)]
        every = jnp.stack([*found, jax.nn.relu(b["x"] @ params["dense"])], 1)
        both = jnp.einsum("bif,bjf->bij", every, every)
        i, j = np.triu_indices(4)
        said = both[:, i, j] @ params["out"]
        losses = optax.sigmoid_binary_cross_entropy(said, b["click"])
        shown = {"hits": tj.metrics.accuracy(b["click"] > 0.5, said > 0, tower.weight)}
        return tj.TowerOutput(mean(losses, tower), shown)

    return Model(params, batch, loss_fn)


def detector():
    """Anchors and boxes of each image: overlaps, the best ones, focal losses."""
    params = {
        "score": np.zeros((6, 3), np.float32),
        "box": np.zeros((6, 4), np.float32),
    }
    batch = {
        "x": floats(8, 6),
        "boxes": floats(3, 4),
        "kept": floats(3),
        "label": ints(3),
    }

    def overlap(first, second):
        low = jnp.maximum(first[:, None, :2], second[None, :, :2])
        high = jnp.minimum(first[:, None, 2:], second[None, :, 2:])
        common = jnp.prod(jnp.clip(high - low, 0), -1)
        sizes = [jnp.prod(jnp.abs(x[:, 2:] - x[:, :2]), -1) for x in (first, second)]
        return common / (sizes[0][:, None] + sizes[1][None] - common + 1e-6)

    def loss_fn(params, b, tower):
        anchors = jnp.linspace(0, 1, 32).reshape(8, 4)

        def of_image(x, boxes, kept, label):
            shares = overlap(anchors, boxes) * kept[None]
            at = shares.argmax(1)
            is_object = shares.max(1) > 0.5
            target = jax.nn.one_hot(label[at], 3) * is_object[:, None]
            focal = optax.sigmoid_focal_loss(x @ params["score"], target).sum()
            far = optax.huber_loss(x @ params["box"], boxes[at] - anchors).sum(1)
            return focal, (far * is_object).sum(), is_object.sum()

        args = b["x"], b["boxes"], b["kept"], b["label"]
        focal, far, count = jax.vmap(of_image)(*args)
        total = ((focal + far) * tower.weight).sum()
        number = tower.reduce(tj.Reduction.SUM, (count * tower.weight).sum())
        return tj.Weighted(total / jnp.maximum(number, 1), 1 / tower.num_towers)

    return Model(params, batch, loss_fn)


def distilled():
    """DINO: a student and a teacher, whose center all towers share."""
    params = {name: np.zeros((6, 4), np.float32) for name in ("student", "teacher")}
    params["center"] = np.zeros(4, np.float32)

    def loss_fn(params, b, tower):
        said = b["local"] @ params["student"] / 0.1
        taught = lax.stop_gradient(b["global"] @ params["teacher"])
        target = jax.nn.softmax((taught - params["center"][None]) / 0.04)
        losses = -(target * jax.nn.log_softmax(said)).sum(1)
        center = tower.mean(taught, tower.weight, axis=0)
        return tj.TowerOutput(mean(losses, tower), {"center": center})

    return Model(params, {"local": floats(6), "global": floats(6)}, loss_fn)


def barlow():
    """Zbontar et al., 2021: a correlation of features over all rows."""
    params = {"w": np.zeros((6, 4), np.float32)}

    def loss_fn(params, b, tower):
        views = []
        for name in ("first", "second"):
            x = b[name] @ params["w"]
            x = x - tower.mean(x, tower.weight, axis=0)[None]
            square = tower.mean(x**2, tower.weight, axis=0)
            views.append(x / jnp.sqrt(square + 1e-5)[None])
        weight = tower.weight[:, None]
        total = tower.reduce(tj.Reduction.SUM, (views[0] * weight).T @ views[1])
        count = tower.reduce(tj.Reduction.SUM, tower.weight.sum())
        off = total / count - jnp.eye(4)
        each = jnp.where(jnp.eye(4) > 0, off**2, 0.005 * off**2).sum()
        return mean(jnp.broadcast_to(each, tower.weight.shape), tower)

    return Model(params, {"first": floats(6), "second": floats(6)}, loss_fn)


RIGHT = [
    resnet, resnet_nnx, unet, vit, vae, gpt, gpt_nnx, bert, t5, mamba, lstm, ctc, moe,
    clip, siglip, simclr, moco, gnn, gat, ppo, dqn, nerf, pinn, fno, equilibrium, dlrm,
    detector, distilled, barlow,
]  # fmt: skip
RIGHT = {make.__name__: make for make in RIGHT}


# Wrong ones.


def own_negatives():
    """Contrastive, against the tower's own rows."""

    def loss_fn(params, b, tower):
        image, words = embeddings(params, b)
        logits = jnp.exp(params["scale"]) * image @ words.T
        return mean(cross_entropy(logits, jnp.arange(tower.rows)), tower)

    return of_pairs(loss_fn)


def labels_of_the_first_tower():
    """The labels of CLIP without the number of the tower's first row."""

    def loss_fn(params, b, tower):
        image, words = embeddings(params, b)
        every = tower.all_gather(words, axis=0)
        label = jnp.arange(tower.rows)
        return mean(cross_entropy(image @ every.T, label), tower)

    return of_pairs(loss_fn)


def mean_of_masked_means():
    """BERT's masked tokens, averaged by each tower."""
    model = bert()

    def loss_fn(params, b, tower):
        loss = model.loss_fn(params, b, tower)
        first, second = loss.terms
        return tj.Weighted(first.value, 1.0) + second

    return model._replace(loss_fn=loss_fn)


def normed_graphs():
    """Joined graphs whose nodes are normed over the tower."""
    model = gnn()

    def loss_fn(params, b, tower):
        nodes = b["nodes"] - b["nodes"].mean((0, 1), keepdims=True)
        return model.loss_fn(params, {**b, "nodes": nodes}, tower)

    return model._replace(loss_fn=loss_fn)


def capacity_of_a_tower():
    """Tokens of all of a tower's rows take places at its experts in turn."""
    params = {"gate": np.zeros((4, 3), np.float32), "w": np.zeros((3, 4), np.float32)}

    def loss_fn(params, b, tower):
        hot = jax.nn.one_hot((b["x"] @ params["gate"]).argmax(1), 3)
        kept = hot * (jnp.cumsum(hot, 0) <= 2)
        return mean(((kept @ params["w"] - b["x"]) ** 2).sum(1), tower)

    return Model(params, {"x": floats(4)}, loss_fn)


def scanned_rows():
    """A selective scan along rows in place of time."""
    params = {"a": np.zeros(4, np.float32)}

    def loss_fn(params, b, tower):
        def join(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        decay = jnp.exp(-jnp.exp(params["a"])[None] * jnp.abs(b["x"]))
        _, hidden = lax.associative_scan(join, (decay, b["x"]), axis=0)
        return mean((hidden**2).sum(1), tower)

    return Model(params, {"x": floats(4)}, loss_fn)


def same_noise():
    """A VAE whose towers draw the same noise."""
    model = vae()

    def loss_fn(params, b, tower):
        hidden = jnp.tanh(b["x"] @ params["in"])
        noise = jax.random.normal(tower.shared_rng, (tower.rows, 3))
        said = (hidden @ params["mean"] + noise) @ params["out"]
        return mean(((said - b["x"]) ** 2).sum(1), tower)

    return model._replace(loss_fn=loss_fn)


def own_correlation():
    """Barlow twins of the correlation over the tower's own rows."""
    params = {"w": np.zeros((6, 4), np.float32)}

    def loss_fn(params, b, tower):
        first, second = [b[name] @ params["w"] for name in ("first", "second")]
        off = (first * tower.weight[:, None]).T @ second / tower.weight.sum() - jnp.eye(
            4
        )
        return tj.Weighted((off**2).sum() * tower.weight.sum(), tower.weight.sum())

    return Model(params, {"first": floats(6), "second": floats(6)}, loss_fn)


WRONG = [
    own_negatives, labels_of_the_first_tower, mean_of_masked_means, normed_graphs,
    capacity_of_a_tower, scanned_rows, same_noise, own_correlation,
]  # fmt: skip
WRONG = {make.__name__: make for make in WRONG}
WRONG |= {
    "own batch norm": functools.partial(resnet, "local"),
    "own balance": functools.partial(moe, False),
    "own advantages": functools.partial(ppo, False),
    "edges of one graph": functools.partial(gnn, lambda rows: jnp.zeros(rows, int)),
    "edges of the next graph": functools.partial(
        gnn, lambda rows: (jnp.arange(rows) + 1) % rows
    ),
}
