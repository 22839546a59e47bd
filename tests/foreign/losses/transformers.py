"""Losses of models of ``transformers``, below 5, the last that has Flax models."""

import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp

import towerjax as tj
from tests.foreign.losses.given import WORDS, Loss, cross_entropy, ints, mean


def gpt2(**more: float) -> Loss:
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

    return Loss(loss_fn, model.params, batch)


def clip(x: Any, a_min: Any = None, a_max: Any = None) -> jax.Array:
    """``jnp.clip`` with names of arguments that JAX has no more."""
    return jnp.clip(x, a_min, a_max)


def t5(**more: float) -> Loss:
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

    return Loss(loss_fn, model.params, batch)


def bert(**more: float) -> Loss:
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

    return Loss(loss_fn, model.params, batch)
