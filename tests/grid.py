"""Draws of a grid: a model, towers, batches and options, and its rows in float64.

Each dimension is a deck of cards that the seed shuffles: the draws in a row have a card
each, so that a few of them have all cards of all dimensions.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from containers import KINDS as CONTAINERS
from containers import as_dicts
from jax import lax
from jax.sharding import PartitionSpec as P
from layouts import names
from optax.contrib import reduce_on_plateau

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm

LAYERS = 2
IDS = 7
CLASSES = 4
FEATURES = 5
EPSILON = 1e-3
RATE = 0.2
NORM = TowerBatchNorm(False, epsilon=EPSILON, use_scale=False, use_bias=False)


# Ways from [n, h] to [n, h], by {"w": [L, h, h], "b": [L, h], "t": [IDS, h]}.


def layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"][None]), None


def layers(p):
    return {"w": p["w"], "b": p["b"]}


def unrolled(p, x, layer=layer):
    for i in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda v, i=i: v[i], layers(p)))
    return x


def by_feature(x, p):
    def one(carry, xt):
        carry = jnp.sin(carry * xt[:, None] + p["b"][None] @ p["w"])
        return carry, carry.mean(1)

    return lax.scan(one, x, x.T)[1].T, None


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda kept, g: (0.7 * kept[1].T @ g, g @ kept[0].T)
)


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(*p), t[0] * jax.nn.sigmoid(p[0])))


def convolved(p, x, b):
    dims = ("NHC", "HIO", "NHC")
    kernel = p["w"][:, :3, :1].transpose(1, 2, 0)
    how = {"rhs_dilation": (2,), "dimension_numbers": dims}
    return lax.conv_general_dilated(x[..., None], kernel, (1,), "SAME", **how).sum(-1)


# fmt: off
OPS = {
    "scan": lambda p, x, b: lax.scan(layer, x, layers(p))[0],
    "scan, remat": lambda p, x, b: lax.scan(jax.checkpoint(layer), x, layers(p))[0],
    "unrolled": lambda p, x, b: unrolled(p, x),
    "remat": lambda p, x, b: unrolled(p, x, jax.checkpoint(layer)),
    "jit": lambda p, x, b: jax.jit(unrolled)(p, x),
    "nested": lambda p, x, b: lax.scan(by_feature, x, layers(p), reverse=True)[0],
    "while": lambda p, x, b: lax.fori_loop(
        0, 3, lambda i, x: jnp.tanh(x @ p["w"][0] + p["b"][0][None]), x),
    "indexed": lambda p, x, b: lax.fori_loop(
        0, LAYERS, lambda i, x: jnp.tanh(x @ p["w"][i]), x),
    "cond": lambda p, x, b: lax.cond(
        p["b"][0, 0] > 0, lambda: jnp.tanh(x @ p["w"][0]), lambda: x * p["b"][1][None]),
    "own rule": lambda p, x, b: soft(product(jnp.array(p["w"])[1], x)),
    "convolved": convolved,
    "norm": lambda p, x, b: x @ (p["w"][0] / jnp.sqrt((p["w"] ** 2).sum() + 1)),
    "associative": lambda p, x, b: x @ lax.associative_scan(jnp.matmul, p["w"])[-1],
    "columns": lambda p, x, b: jnp.tanh(x[:, ::3] @ p["w"][0][::3]) @ p["w"][1],
    "sort": lambda p, x, b: x @ jnp.outer(*p["b"]) * jnp.sort(p["b"][1])[None],
    "embedded": lambda p, x, b: x + p["t"][b["id"]],
    "tied": lambda p, x, b: jnp.tanh(x + jnp.sin(x @ p["t"].T) @ p["t"]),
    "taken": lambda p, x, b: x + b["take"](p["table"], b["id"]),
    "complex": lambda p, x, b: (x @ p["z"]).real + (x @ p["z"]).imag ** 2,
}
# fmt: on


class OfTower:
    """A tower's own rows: what differs between towers is a number."""

    def __init__(self, draw, batch, tower, local):
        self.draw = draw
        self.tower = tower
        self.extra = tower.extra
        self.batch = {**batch, "take": tj.sparse.take}
        self.local = local

    def of_its_own(self, w, x):
        """Parameters and a number of the tower: scaled, looked up, or recomputed."""
        scaled = w[1] * ((1.0 + self.tower.id) / self.draw.towers)
        if self.draw.own == "sliced":
            return x @ lax.dynamic_slice_in_dim(w, self.tower.id % LAYERS, 1)[0].T
        if self.draw.own == "remat":
            return jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(scaled, x)
        return x @ scaled.T

    def noisy(self, x):
        return x * (1 + 0.3 * jax.random.normal(self.tower.rng, x.shape[1:]))[None]

    def shifted(self, x):
        return x + 0.1 * self.local.sum()

    def centred(self, x):
        weight = self.tower.weight * self.batch["weight"]
        mean = tj.Weighted.mean(x, weight, axis=0)
        return x - self.tower.reduce(tj.Reduction.SUM, mean).value[None]

    def gathered(self, x):
        rows, weight = self.tower.all_gather((x, self.tower.weight), axis=0)
        return x + jnp.tanh(x @ rows.T) @ (rows * weight[:, None]) / len(rows)

    def normed(self, x):
        width = x.shape[1]
        mask = self.batch["weight"]
        stats = {"batch_stats": {"mean": jnp.zeros(width), "var": jnp.ones(width)}}
        return NORM.apply(stats, x, self.tower, mask=mask, mutable=["batch_stats"])[0]

    def split(self, x):
        strategy = self.draw.strategy
        if "model" not in dict(strategy.within):
            return x
        return lax.with_sharding_constraint(x, P(strategy.rows, "model"))


class OfAll:
    """All rows: what differs between towers differs between rows."""

    def __init__(self, draw, batch, state):
        self.draw = draw
        self.extra = state["extra"]
        self.batch = {**batch, "take": lambda table, ids: table[ids]}
        self.place = draw.places()
        self.noise = state["noise"]
        (self.tower, self.part) = self.place
        self.local = state["before"]

    def of_its_own(self, w, x):
        scale = ((1.0 + self.tower) / self.draw.towers)[:, None]
        if self.draw.own == "sliced":
            odd = (self.tower % LAYERS == 1)[:, None]
            return jnp.where(odd, x @ w[1].T, x @ w[0].T)
        return (
            jnp.tanh(x @ w[1] * scale)
            if self.draw.own == "remat"
            else x @ w[1].T * scale
        )

    def noisy(self, x):
        return x * self.noise[self.place]

    def shifted(self, x):
        return x + 0.1 * self.local[self.place].sum(1, keepdims=True)

    def mean(self, x):
        """Of the rows of all towers that are worked on at once."""
        weight = self.batch["valid"] * self.batch["weight"]
        parts = jnp.eye(self.draw.micro_batches)[self.part] * weight[:, None]
        total = parts.sum(0)[:, None]
        return ((parts.T @ x) / jnp.where(total > 0, total, 1))[self.part]

    def centred(self, x):
        return x - self.mean(x)

    def gathered(self, x):
        same = (self.part[:, None] == self.part[None]) * self.batch["valid"][None]
        return x + (jnp.tanh(x @ x.T) * same) @ x / (len(x) // self.draw.micro_batches)

    def normed(self, x):
        x = x - self.mean(x)
        return x / jnp.sqrt(self.mean(x**2) + EPSILON)

    def split(self, x):
        return x


def of_rows(params, view):
    """Hidden values and errors of each row, ``[n, h]`` and ``[n]``."""
    has = view.draw.has
    batch = view.batch
    params = as_dicts(params)
    x = jnp.tanh(batch["x"] @ params["into"])
    if "local" in has:
        x = view.shifted(x)
    for p, name in zip(params["ops"], view.draw.ops, strict=True):
        x = OPS[name](p, x, batch) if name in OPS else getattr(view, name)(x)
        x = view.of_its_own(p["w"], x) if view.draw.own and "w" in p else x
        x = view.split(x)
    if "extra" in has:
        x = x * (1 + 0.1 * jnp.tanh(view.extra["mean"].mean()))
    if "whole" in has:
        x = x * batch["whole"]["by"]
    if "fixed" in has:
        x = x + 0.01 * params["fixed"][None]
    errors = jnp.tanh(x @ params["out"] * params["scale"]) - batch["y"]
    return x, (errors**2).sum(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """One point of the grid.

    Attributes:
      strategy, micro_batches, remainder, guard: As for a step.
      kind: Of the loss: ``"mean"``, ``"several"`` means and a penalty, or the name of
        a `LossReduction`; with ``"tf1 "`` before it the original's numbers.
      door: What of towerjax trains.
      ops: What the model is made of; ``optimizer`` is a name too.
      own: What is made of parameters and a number of the tower.
      has: What else it has: ``local`` variables of each tower, ``extra`` ones of all, a
        ``whole`` leaf of the batch, ``fixed`` ones, and a loss under ``remat``.
      odd: What the second batch has: ``"nan"``, ``"nothing"`` that counts, or None.
      after: What is done with the trained state.
      container: The kind of container that holds the parameters.
      seed: Of all numbers.
    """

    strategy: tj.Mirrored
    micro_batches: int
    remainder: str
    guard: str
    kind: str
    door: str
    ops: tuple[str, ...]
    optimizer: str
    own: str | None
    has: tuple[str, ...]
    odd: str | None
    after: str | None
    container: str
    seed: int

    @property
    def towers(self):
        return self.strategy.num_towers

    @property
    def reduction(self):
        """The name of the `LossReduction`, or None."""
        name = self.kind.removeprefix("tf1 ")
        return name if name.isupper() else None

    @property
    def differs(self):
        """Whether towers differ by design in more than their rows, as none should.

        By their number, which predictions have too, their own variables, a mean of
        each, or how many padded rows meet.
        """
        of_each = self.kind.startswith(("MEAN", "tf1")) or self.door in OF_MODEL
        return (
            bool(self.own) or "local" in self.has or of_each or "gathered" in self.ops
        )

    @property
    def shares(self):
        return self.towers * self.micro_batches * self.strategy.placement.row_shards

    @property
    def full(self):
        return self.shares * (2 if self.shares > 6 else 3)

    def rng(self, *of):
        return np.random.default_rng([self.seed, *of])

    @functools.cached_property
    def sizes(self):
        """A full batch, then ragged ones; of fewer rows than towers, too."""
        if self.door == "scan" or self.remainder == "error":
            return (self.full,) * 3
        if self.remainder == "drop":
            return (
                self.full,
                self.full + int(self.rng(1).integers(self.shares)),
                self.full,
            )
        return self.full, *map(int, self.rng(1).integers(1, self.full, 2))

    def kept(self, size):
        return size - size % self.shares if self.remainder == "drop" else size

    def places(self):
        """The tower and the micro-batch of each row of a full batch."""
        number = np.arange(self.full)
        rows = self.full // self.towers
        return number // rows, number % rows // (rows // self.micro_batches)

    @functools.cached_property
    def width(self):
        return int(self.rng(2).choice([4, 8, 12]))

    def params(self):
        rng = self.rng(3)
        h = self.width

        def normal(*shape):
            return rng.normal(size=shape) / np.sqrt(h)

        def of(name):
            if name == "complex":
                return {"z": normal(h, h) + 1j * normal(h, h)}
            if name in ("embedded", "tied", "taken"):
                return {"table" if name == "taken" else "t": normal(IDS, h)}
            known = name in OPS
            return {"w": normal(LAYERS, h, h), "b": normal(LAYERS, h)} if known else {}

        p = {"into": normal(FEATURES, h), "out": normal(h, CLASSES)}
        p |= {"ops": [of(name) for name in self.ops], "scale": np.float64(1.3)}
        fixed = {"fixed": rng.integers(-9, 9, h, np.int8)}
        return p | (fixed if "fixed" in self.has else {})

    def batches(self):
        """Rows of unlike weights, some of none; the first ones have hardly a label."""
        found = []
        for number, size in enumerate(self.sizes):
            rng = self.rng(4, number)
            rising = np.linspace(0.1, 1, size)
            rows = {
                "x": rng.normal(size=(size, FEATURES)) + np.arange(size)[:, None] / 9,
                "y": rng.normal(size=(size, CLASSES)),
                "id": rng.integers(0, IDS, size),
                "weight": rng.uniform(0.05, 2, size) * rising,
                "labelled": 1.0 * (rng.random(size) < rising),
            }
            rows["weight"] *= (rng.random(size) > 0.3) + 0.1 * (np.arange(size) == 0)
            if number == 1 and self.odd == "nothing":
                rows["weight"][:] = 0
            if number == 1 and self.odd == "nan":
                last = self.kept(size) - 1
                rows["y"][last] = np.nan
                rows["weight"][last] = 1
            if "whole" in self.has:
                rows["whole"] = tj.Whole({"by": np.float64(1 + number / 10)})
            found.append(rows)
        return found

    def made_optimizer(self):
        """SGD sees a wrong scale, and a bound of the norm a wrong norm."""
        rate = RATE / (self.full if self.kind == "SUM" else 1)
        momentum = optax.sgd(rate, momentum=0.5)
        return {
            "sgd": optax.sgd(rate),
            "clipped": optax.chain(optax.clip_by_global_norm(0.1), momentum),
            "decayed": optax.chain(optax.add_decayed_weights(0.1), momentum),
            "lamb": optax.lamb(1e-2),
            "plateau": optax.chain(momentum, reduce_on_plateau(patience=1), BY_LOSS),
            "several": optax.MultiSteps(momentum, 2).gradient_transformation(),
        }[self.optimizer]


def by_loss(updates, state, params=None, *, value, **_):
    return jax.tree.map(lambda x: x * (1 + jnp.tanh(value)), updates), state


BY_LOSS = optax.GradientTransformationExtraArgs(lambda _: (), by_loss)
FIXED = ("fixed", "scale")
OPTIMIZERS = ["sgd", "clipped", "plateau", "decayed", "several", "sgd", "lamb"]
# fmt: off
DOORS = ["step", "scan", "own", "calls", "dispatch", "passes", "model", "plain"]
TRAINING = ("step", "dispatch", "scan")
OF_MODEL = ("calls", "plain", "model")
KINDS = {
    TRAINING: ["SUM", "mean", "MEAN", "several", "mean"],
    ("own", "passes"): ["several", "mean"],
    OF_MODEL: ["SUM_BY_NONZERO_WEIGHTS", "tf1 SUM_BY_NONZERO_WEIGHTS", "several", "SUM",
               "SUM_OVER_BATCH_SIZE", "MEAN"],
}
REDUCING = [tj.AllReduce(), tj.PinnedTree(), tj.AllReduce(pack_below_bytes=0),
            tj.collectives.Packed(num_packs=2), tj.collectives.Hierarchical(2)]
OF_SHARDS = [REDUCING[2], REDUCING[1], REDUCING[2], *REDUCING[3:]]  # parts are small
STATES = ["mirrored", "sharded", "sharded_optimizer", "sharded"]
WIDE = [{"model": 2}, {"data": 2, "model": 2}]
# fmt: on
SPECS = {"into": P(None, "model"), "out": P("model"), "w": P(None, None, "model")}


def specs(name, leaf):
    return SPECS.get(name.rpartition("/")[2])


def drawn(seed, number):
    """The draw of this number.

    In no draw do towers meet in a loss of the original's numbers whose gradients are
    computed and applied by themselves, which is refused.
    """

    def deal(name, cards, number=number):
        block, place = divmod(number, len(cards))
        rng = np.random.default_rng([seed, block, zlib.crc32(name.encode())])
        return cards[rng.permutation(len(cards))[place]]

    rng = np.random.default_rng([seed, number])
    strategy = _strategy(deal, rng)
    door = deal("door", DOORS)
    trains = door in TRAINING
    called = door in ("calls", "plain")
    # Each group of doors has its own kinds, so that all kinds come early.
    [(doors, kinds)] = [x for x in KINDS.items() if door in x[0]]
    turn = number // len(DOORS) * len(doors) + doors.index(door)
    kind = deal(f"kind of {doors}", kinds, turn)
    odd = deal("odd", ["nan", "nothing", None], turn) if trains else None
    odd = None if door == "scan" else odd
    ops = [deal("op", list(OPS), 2 * number + i) for i in range(2)]
    meets = deal("meets", [None, "centred", "gathered", "normed"])
    as_original = kind.startswith("tf1") and door == "plain"
    if meets and strategy.tower_loop == "vmap" and not as_original:
        ops.insert(1, meets)
    if deal("noise", [False, True, False]) and not called:
        ops.insert(1, "noisy")
    if door == "plain":
        strategy = dataclasses.replace(strategy, state="mirrored")
    if odd == "nothing" or door == "plain" and kind == "several":
        kind = "mean"
    can_remat = trains and kind != "several" and "taken" not in ops
    has = {"fixed": trains, "remat": can_remat}
    has |= {"local": door not in ("passes", "model"), "whole": door != "scan"}
    has |= {"extra": door not in ("passes", "plain")}
    has = [name for name, can in has.items() if can and deal(name, [True, False])]
    has += ["whole"] * (door == "dispatch" and "whole" not in has)
    optimizer = deal("optimizer", OPTIMIZERS)
    if "complex" in ops and optimizer == "several":  # whose sums optax makes real
        optimizer = "sgd"
    once = called or kind.startswith("tf1")
    return Draw(
        strategy=strategy,
        micro_batches=1 if once else deal("micro-batches", [1, 3, 1, 2]),
        remainder=deal("remainder", ["pad", "drop", "pad", "error"]),
        guard=deal("guard", ["loss", "gradients"]),
        kind=kind,
        door=door,
        ops=tuple(ops),
        optimizer=optimizer,
        own=deal("own", [None, "scaled", "sliced", "remat"]),
        has=tuple(has),
        odd=odd,
        after=deal("after", ["evaluate", None, "predict", None]),
        container=deal("container", CONTAINERS),
        seed=int(rng.integers(2**31)),
    )


def _strategy(deal, rng):
    towers = deal("towers", [1, 2, 3, 4, 4, 6, 8, 8])
    within = {}
    where = deal("where", ["shard_map", "wide", "shard_map", "pmap", "shard_map"])
    how = {
        "tower_loop": deal("tower_loop", ["vmap", "scan"]),
        "state": deal("state", STATES),
    }
    if where == "wide":
        within = deal("within", WIDE)
        towers = min(towers, 2 if "data" in within else 4)
        how |= {"within": within, "specs": specs}
        how |= {"rows": "data"} if "data" in within else {}
    each = 2 ** len(within)
    most = towers if deal("a tower a device", [False, True, False]) else towers - 1
    counts = [
        d for d in range(1, max(most, 1) + 1) if towers % d == 0 and d * each <= 8
    ]
    devices = int(rng.choice(counts[-2:]))
    if where == "pmap":
        how |= {"executor": "pmap", "state": "mirrored"}
    sharded = how["state"] == "sharded"
    ops = deal("of shards", OF_SHARDS) if sharded else deal("reducing", REDUCING)
    is_pinned = isinstance(ops, tj.PinnedTree)
    in_groups = isinstance(ops, tj.AllReduce) and ops.group_size
    if is_pinned and how["state"] == "sharded_optimizer" or in_groups and devices % 2:
        ops = tj.AllReduce()
    elif is_pinned:
        how["tower_loop"] = "scan"
    names_of = names(devices * each)
    return tj.Mirrored(names_of, towers=towers, cross_tower_ops=ops, **how)
