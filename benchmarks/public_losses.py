"""What is proved equal to one tower of losses of public models, without a run.

The models are those of Flax's examples, read from a folder that holds a checkout of
``google/flax``, and of the packages ``transformers`` (below 5, the last that has Flax
models) and ``jraph``. They are made small, of random parameters; nothing is downloaded.
Each loss is what its source computes, returned as a mean over rows or words: ``FOLDER``
is the place of the checkout.

Run: ``python -m benchmarks.public_losses FOLDER [--only bert]``
"""

import argparse
import contextlib
import functools
import importlib
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from towerjax.check.equality.of_step import equalities_of
from towerjax.check.equality.traced_passes import StepToProve
from towerjax.proof.equal.one_tower import Equality

ROWS = 8
WORDS = 6
CLASSES = 5
SMALL = {"vocab_size": 17, "emb_dim": 8, "num_heads": 2, "num_layers": 2}
SMALL |= {"qkv_dim": 8, "mlp_dim": 16, "max_len": 16, "output_vocab_size": 17}

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Loss(NamedTuple):
    """A loss of a tower, with shapes of what it is given.

    Attributes:
      loss_fn: ``(params, batch, tower)``.
      params: Parameters, or shapes.
      batch: Arrays ``[ROWS, ...]``.
      local: Variables of each tower, such as running means.
      remedy: What makes a proof of what is not proved.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    local: Any = None
    remedy: str = ""


def floats(*shape: int) -> np.ndarray:
    """A leaf of a batch."""
    return np.zeros((ROWS, *shape), np.float32)


def ints(*shape: int) -> np.ndarray:
    """A leaf of a batch, of whole numbers."""
    return np.zeros((ROWS, *shape), np.int32)


def shapes(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The shapes of a module's variables."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    return jax.eval_shape(functools.partial(module.init, **options), keys, *args)


def mean(values: Any, mask: Any, tower: tj.Tower) -> tj.Weighted:
    """The mean of ``[b, ...]`` over the elements that a mask keeps."""
    weight = tower.weight.reshape((-1,) + (1,) * (values.ndim - 1))
    return tj.Weighted.mean(values, mask * weight)


@contextlib.contextmanager
def example(folder: pathlib.Path, name: str) -> Iterator[types.ModuleType]:
    """The models of one of Flax's examples."""
    path = str(folder / "examples" / name)
    sys.path.insert(0, path)
    try:
        yield importlib.import_module("models")
    finally:
        sys.path.remove(path)
        del sys.modules["models"]


def imagenet(folder: pathlib.Path, kind: str = "ResNet50") -> Loss:
    """Flax's ResNet with batch norm over the axis ``batch``, and weight decay."""
    with example(folder, "imagenet") as models:
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

    remedy = "`tj.TowerBatchNorm`, which leaves padding out of its moments"
    stats = variables["batch_stats"]
    return Loss(loss_fn, variables["params"], batch, stats, remedy)


def lm1b(folder: pathlib.Path) -> Loss:
    """Flax's language model, with dropout."""
    with example(folder, "lm1b") as models:
        module = models.TransformerLM(models.TransformerConfig(**SMALL))
    batch = {"inputs": ints(WORDS)}
    params = shapes(module, batch["inputs"])["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        words = batch["inputs"]
        logits = module.apply({"params": params}, words, rngs={"dropout": tower.rng})
        return mean(cross_entropy(logits, words), words > 0, tower)

    return Loss(loss_fn, params, batch)


def nlp_seq(folder: pathlib.Path) -> Loss:
    """Flax's tagger of words, with dropout."""
    with example(folder, "nlp_seq") as models:
        module = models.Transformer(models.TransformerConfig(**SMALL))
    batch = {"inputs": ints(WORDS), "targets": ints(WORDS)}
    params = shapes(module, inputs=batch["inputs"], train=False)["params"]

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        options = {"train": True, "rngs": {"dropout": tower.rng}}
        logits = module.apply({"params": params}, inputs=batch["inputs"], **options)
        targets = batch["targets"]
        return mean(cross_entropy(logits, targets), targets > 0, tower)

    return Loss(loss_fn, params, batch)


def wmt(folder: pathlib.Path) -> Loss:
    """Flax's translator, with dropout, of examples that are packed."""
    with example(folder, "wmt") as models:
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


def vae(folder: pathlib.Path) -> Loss:
    """Flax's variational autoencoder, with a draw for each row."""
    with example(folder, "vae") as models:
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


def ppo(folder: pathlib.Path, of_all: bool = True) -> Loss:
    """Flax's PPO; its advantages are divided by their spread."""
    with example(folder, "ppo") as models:
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

    remedy = "`tower.mean(gain, tower.weight)`, of all rows, for `gain.mean()`"
    return Loss(loss_fn, params, batch, remedy="" if of_all else remedy)


# Of `transformers`, whose attention drops the same for all rows of a tower.
_ONE_DRAW = (
    "`{}=0` in its config: attention drops the same words for all rows of a call"
)


def gpt2(folder: pathlib.Path, **more: float) -> Loss:
    """GPT-2 of ``transformers``, with dropout."""
    found = importlib.import_module("transformers")
    sizes = {"vocab_size": 17, "n_positions": 16, "n_embd": 8, "n_layer": 2}
    model = found.FlaxGPT2LMHeadModel(found.GPT2Config(**sizes, n_head=2, **more))
    batch = {"input_ids": ints(WORDS), "attention_mask": ints(WORDS)}

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        options = {"params": params, "dropout_rng": tower.rng, "train": True}
        logits = model(**batch, **options).logits[:, :-1]
        losses = cross_entropy(logits, batch["input_ids"][:, 1:])
        return mean(losses, batch["attention_mask"][:, 1:], tower)

    return Loss(loss_fn, model.params, batch, remedy=_ONE_DRAW.format("attn_pdrop"))


def clip(x: Any, a_min: Any = None, a_max: Any = None) -> jax.Array:
    """``jnp.clip`` with names of arguments that JAX has no more."""
    return jnp.clip(x, a_min, a_max)


def t5(folder: pathlib.Path, **more: float) -> Loss:
    """T5 of ``transformers``, with dropout."""
    found = importlib.import_module("transformers")
    source = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    vars(source)["jnp"] = types.SimpleNamespace(**vars(jnp) | {"clip": clip})
    sizes = {"vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2}
    start = {"decoder_start_token_id": 0}
    config = found.T5Config(**sizes, num_heads=2, **start, **more)
    model = found.FlaxT5ForConditionalGeneration(config)
    names = "input_ids attention_mask decoder_input_ids labels".split()
    batch = {name: ints(WORDS) for name in names}

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        given = {name: batch[name] for name in names[:-1]}
        options = {"params": params, "dropout_rng": tower.rng, "train": True}
        logits = model(**given, **options).logits
        labels = batch["labels"]
        return mean(cross_entropy(logits, labels), labels > 0, tower)

    return Loss(loss_fn, model.params, batch, remedy=_ONE_DRAW.format("dropout_rate"))


def bert(folder: pathlib.Path, **more: float) -> Loss:
    """BERT of ``transformers``, of words that are masked, with dropout."""
    found = importlib.import_module("transformers")
    sizes = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16}
    config = found.BertConfig(**sizes, max_position_embeddings=16, **more)
    model = found.FlaxBertForMaskedLM(config)
    batch = {name: ints(WORDS) for name in ("input_ids", "attention_mask", "labels")}

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
        given = batch["input_ids"], batch["attention_mask"]
        options = {"params": params, "dropout_rng": tower.rng, "train": True}
        logits = model(*given, **options).logits
        labels = batch["labels"]
        return mean(cross_entropy(logits, labels), labels > 0, tower)

    remedy = _ONE_DRAW.format("attention_probs_dropout_prob")
    return Loss(loss_fn, model.params, batch, remedy=remedy)


NODES = 5
EDGES = 6


def ogbg(folder: pathlib.Path, joined: bool = False) -> Loss:
    """Flax's graph network, of ``jraph``: for each graph, or for a tower's at once."""
    jraph = importlib.import_module("jraph")
    with example(folder, "ogbg_molpcba") as models:
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

    remedy = "`jax.vmap` over the graphs, each of its own nodes: the line above"
    return Loss(loss_fn, params, batch, remedy=remedy if joined else "")


LOSSES: dict[str, Callable[[pathlib.Path], Loss]] = {
    "Flax imagenet, ResNet-18": functools.partial(imagenet, kind="ResNet18"),
    "Flax imagenet, ResNet-50": imagenet,
    "Flax lm1b": lm1b,
    "Flax nlp_seq": nlp_seq,
    "Flax wmt": wmt,
    "Flax vae": vae,
    "Flax ppo": functools.partial(ppo, of_all=False),
    "Flax ppo, mended": ppo,
    "Flax ogbg_molpcba": functools.partial(ogbg, joined=True),
    "Flax ogbg_molpcba, mended": ogbg,
    "GPT-2": gpt2,
    "GPT-2, mended": functools.partial(gpt2, attn_pdrop=0.0),
    "T5": t5,
    "T5, mended": functools.partial(t5, dropout_rate=0.0),
    "BERT": bert,
    "BERT, mended": functools.partial(bert, attention_probs_dropout_prob=0.0),
}
"""As published, and mended where a step would depend on the split."""


def said_of(loss: Loss, padded: bool) -> list[Equality]:
    """What is proved of each leaf that a train step of two towers merges."""
    strategy = tj.Mirrored(("cpu:0",), towers=2, axis_name="batch")
    remainder: Any = "pad" if padded else "error"
    how: dict[str, Any] = {"remainder": remainder, "audit": False}
    step = tj.build_train_step(loss.loss_fn, optax.sgd(0.1), strategy, **how)
    zeros = functools.partial(jax.tree.map, lambda x: np.zeros(x.shape, x.dtype))
    given: dict[str, Any] = {"rng": jax.random.key(0)}
    if loss.local is not None:
        given["local"] = tj.TowerLocal(zeros(loss.local), tj.Reduction.MEAN)
    state = step.init(zeros(loss.params), **given)
    plan, state = step.to_audit(state)
    rows = ROWS // step.num_parts
    to_prove = StepToProve(plan, strategy, state, loss.batch, rows, padded)
    return equalities_of(to_prove)


def main() -> None:
    """Print a row for each loss and layout of batches, and beneath it what is open."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a checkout of google/flax")
    parser.add_argument("--only", default="", help="those whose names have this")
    args = parser.parse_args()
    print(f"{'loss':36}{'batches':>9}{'leaves':>8}{'proved':>8}{'CPU s':>7}")
    for name, make in LOSSES.items():
        if args.only.lower() not in name.lower():
            continue
        loss = make(args.folder)
        for layout in ("full", "padded"):
            start = time.process_time()
            said = said_of(loss, layout == "padded")
            seconds = time.process_time() - start
            unproved = [x for x in said if x.says != "proved"]
            counts = f"{len(said):>8}{len(said) - len(unproved):>8}{seconds:>7.1f}"
            print(f"{name:36}{layout:>9}{counts}", flush=True)
            for why in dict.fromkeys(f"{x.says}: {x.why}" for x in unproved):
                print(f"  {why}")
            if unproved and loss.remedy:
                print(f"  Remedy: {loss.remedy}")


if __name__ == "__main__":
    main()
