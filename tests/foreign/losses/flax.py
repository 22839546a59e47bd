"""Losses of Flax's examples, read from a checkout that stands first in `sys.path`."""

import contextlib
import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import towerjax as tj
from tests.foreign.losses.given import (
    CLASSES,
    WORDS,
    Loss,
    cross_entropy,
    floats,
    ints,
    mean,
    shapes,
)

SMALL = {"vocab_size": 17, "emb_dim": 8, "num_heads": 2, "num_layers": 2}
SMALL |= {"qkv_dim": 8, "mlp_dim": 16, "max_len": 16, "output_vocab_size": 17}
NODES = 5
EDGES = 6


@contextlib.contextmanager
def example(flax: pathlib.Path, name: str) -> Iterator[types.ModuleType]:
    """The models of one of Flax's examples."""
    path = str(flax / "examples" / name)
    sys.path.insert(0, path)
    try:
        yield importlib.import_module("models")
    finally:
        sys.path.remove(path)
        del sys.modules["models"]


def imagenet(flax: pathlib.Path, kind: str = "ResNet50") -> Loss:
    """Flax's ResNet with batch norm over the axis ``batch``, and weight decay."""
    with example(flax, "imagenet") as models:
        module = getattr(models, kind)(num_classes=CLASSES, num_filters=4)
    batch = {"image": floats(32, 32, 3), "label": ints()}
    variables = shapes(module, batch["image"][:1], train=False)

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> Any:
        given = {"params": params, "batch_stats": tower.local}
        logits, new = module.apply(given, batch["image"], mutable=["batch_stats"])
        losses = cross_entropy(logits, batch["label"])
        decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        loss = tj.Weighted.mean(losses, tower.weight) + tj.penalty(0.5e-4 * decay)
        return tj.TowerOutput(loss, local=new["batch_stats"])

    stats = variables["batch_stats"]
    return Loss(loss_fn, variables["params"], batch, stats)


def lm1b(flax: pathlib.Path) -> Loss:
    """Flax's language model, with dropout."""
    with example(flax, "lm1b") as models:
        module = models.TransformerLM(models.TransformerConfig(**SMALL))
    batch = {"inputs": ints(WORDS)}
    params = shapes(module, batch["inputs"])["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        words = batch["inputs"]
        logits = module.apply({"params": params}, words, rngs={"dropout": tower.rng})
        return mean(cross_entropy(logits, words), words > 0, tower)

    return Loss(loss_fn, params, batch)


def nlp_seq(flax: pathlib.Path) -> Loss:
    """Flax's tagger of words, with dropout."""
    with example(flax, "nlp_seq") as models:
        module = models.Transformer(models.TransformerConfig(**SMALL))
    batch = {"inputs": ints(WORDS), "targets": ints(WORDS)}
    params = shapes(module, inputs=batch["inputs"], train=False)["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        options = {"train": True, "rngs": {"dropout": tower.rng}}
        logits = module.apply({"params": params}, inputs=batch["inputs"], **options)
        targets = batch["targets"]
        return mean(cross_entropy(logits, targets), targets > 0, tower)

    return Loss(loss_fn, params, batch)


def wmt(flax: pathlib.Path) -> Loss:
    """Flax's translator, with dropout, of examples that are packed."""
    with example(flax, "wmt") as models:
        module = models.Transformer(models.TransformerConfig(**SMALL))
    names = ("inputs", "targets")
    names += tuple(f"{x}_{y}" for x in names for y in ("positions", "segmentation"))
    batch = {name: ints(WORDS) for name in names}
    params = shapes(module, batch["inputs"], batch["targets"])["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        rngs = {"dropout": tower.rng}
        logits = module.apply({"params": params}, **batch, rngs=rngs)
        targets = batch["targets"]
        return mean(cross_entropy(logits, targets), targets > 0, tower)

    return Loss(loss_fn, params, batch)


def vae(flax: pathlib.Path) -> Loss:
    """Flax's variational autoencoder, with a draw for each row."""
    with example(flax, "vae") as models:
        module = models.model(4)
    batch = {"x": floats(784)}
    params = shapes(module, batch["x"], jax.random.key(0))["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        x = batch["x"]
        said, center, log = module.apply({"params": params}, x, tower.rng)
        bits = optax.sigmoid_binary_cross_entropy(said, x).sum(1)
        spread = -0.5 * (1 + log - center**2 - jnp.exp(log)).sum(1)
        return tj.Weighted.mean(bits + spread, tower.weight)

    return Loss(loss_fn, params, batch)


def ppo(flax: pathlib.Path, of_all: bool = True) -> Loss:
    """Flax's PPO; its advantages are divided by their spread."""
    with example(flax, "ppo") as models:
        module = models.ActorCritic(num_outputs=4)
    batch = {"states": floats(84, 84, 4), "actions": ints(), "log_probs": floats()}
    batch |= {"returns": floats(), "advantages": floats()}
    params = shapes(module, batch["states"])["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        log_probs, values = module.apply({"params": params}, batch["states"])
        gain = batch["advantages"]
        if of_all:
            gain = gain - tower.mean(gain, tower.weight)
            gain = gain / (jnp.sqrt(tower.mean(gain**2, tower.weight)) + 1e-8)
        else:
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        taken = jax.vmap(lambda each, i: each[i])(log_probs, batch["actions"])
        ratio = jnp.exp(taken - batch["log_probs"])
        clipped = gain * jnp.clip(ratio, 0.9, 1.1)
        losses = -jnp.minimum(ratio * gain, clipped)
        losses += 0.5 * (batch["returns"] - values[:, 0]) ** 2
        losses += 0.01 * (jnp.exp(log_probs) * log_probs).sum(1)
        return tj.Weighted.mean(losses, tower.weight)

    return Loss(loss_fn, params, batch)


def ogbg(flax: pathlib.Path, joined: bool = False) -> Loss:
    """Flax's graph network, of ``jraph``: for each graph, or for a tower's at once."""
    jraph = importlib.import_module("jraph")
    with example(flax, "ogbg_molpcba") as models:
        module = models.GraphNet(8, 2, 2, CLASSES, dropout_rate=0.1)
    batch = {"nodes": floats(NODES, 3), "edges": floats(EDGES, 2)}
    batch |= {"senders": ints(EDGES), "receivers": ints(EDGES)}
    batch |= {"labels": floats(CLASSES)}

    def graph_of(batch: Any) -> Any:
        """One graph of these nodes and edges."""
        return jraph.GraphsTuple(
            nodes=batch["nodes"],
            edges=batch["edges"],
            senders=batch["senders"],
            receivers=batch["receivers"],
            globals=jnp.ones((1, 1)),
            n_node=jnp.array([NODES]),
            n_edge=jnp.array([EDGES]),
        )

    def joined_of(batch: Any) -> Any:
        """The graphs of a tower as one of all of their nodes."""
        rows = len(batch["labels"])
        first = NODES * jnp.arange(rows)[:, None]
        return jraph.GraphsTuple(
            nodes=batch["nodes"].reshape(-1, 3),
            edges=batch["edges"].reshape(-1, 2),
            senders=(batch["senders"] + first).reshape(-1),
            receivers=(batch["receivers"] + first).reshape(-1),
            globals=jnp.ones((rows, 1)),
            n_node=jnp.full(rows, NODES),
            n_edge=jnp.full(rows, EDGES),
        )

    one = {name: x[0] for name, x in batch.items()}
    params = shapes(module, graph_of(one))["params"]

    def said_of(params: Any, batch: Any) -> Any:
        if joined:
            return module.apply({"params": params}, joined_of(batch)).globals
        each = jax.vmap(lambda x: module.apply({"params": params}, graph_of(x)).globals)
        return each(batch)[:, 0]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        labels = batch["labels"]
        is_known = ~jnp.isnan(labels)
        said = said_of(params, batch)
        losses = optax.sigmoid_binary_cross_entropy(said, jnp.nan_to_num(labels))
        return mean(losses, is_known, tower)

    return Loss(loss_fn, params, batch)
