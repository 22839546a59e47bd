"""Fine-tune a small RoBERTa by `run_mlm_flax.py` as it is, on lines that are made here.

Run in a checkout by `python -m tests.foreign`; ``towers`` is 0 as published.
"""

import contextlib
import importlib.machinery
import io
import json
import logging
import os
import pathlib
import re
import runpy
import sys
import tempfile
import types
from typing import Any

import jax
import numpy as np

ROWS = 16  # lines a step, on all devices


def main(devices: int, towers: int) -> None:
    """Print the last training loss and the norm of the parameters that are saved."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    gone: Any = jax
    gone.tree_map = jax.tree.map
    fake: Any = types.ModuleType("wandb")
    fake.init = lambda **_: None
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    sys.modules["wandb"] = fake
    os.environ |= {"WANDB_USERNAME": "", "WANDB_PROJECT": "", "HF_HUB_OFFLINE": "1"}
    program = pathlib.Path("run_mlm_flax.py").absolute()

    import tokenizers  # type: ignore
    import transformers  # type: ignore

    saved: dict[str, Any] = {}

    def save(model: Any, folder: str, params: Any, **_: Any) -> None:
        saved["params"] = params

    transformers.FlaxRobertaForMaskedLM.save_pretrained = save
    logging.disable(logging.WARNING)  # of which the program asks for all
    folder = pathlib.Path(tempfile.mkdtemp())
    os.chdir(folder)
    draw = np.random.default_rng(0)
    words = [f"w{number}" for number in range(40)]
    lines = [" ".join(draw.choice(words, draw.integers(2, 31))) for _ in range(96)]
    pathlib.Path("train.txt").write_text("\n".join(lines))
    special = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>"}
    special |= {"mask": "<mask>", "bos": "<s>", "eos": "</s>"}
    vocabulary = {
        x: i for i, x in enumerate([*dict.fromkeys(special.values()), *words])
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {f"{name}_token": text for name, text in special.items()}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=32, **special
    ).save_pretrained("model")
    transformers.RobertaConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=40,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    ).save_pretrained("model")  # fmt: skip
    options = {
        "output_dir": "out", "model_type": "roberta", "config_name": "model",
        "tokenizer_name": "model", "train_file": "train.txt", "max_seq_length": 32,
        "validation_split_percentage": 33, "weight_decay": 0.01, "warmup_steps": 1,
        "per_device_train_batch_size": ROWS // (towers or devices),
        "per_device_eval_batch_size": ROWS // (towers or devices),
        "learning_rate": 0.01, "num_train_epochs": 2, "logging_steps": 1,
        "eval_steps": 7, "save_steps": 7, "dtype": "float64", "cache_dir": "cache",
    }  # fmt: skip
    sys.argv = [str(program), *(f"--{name}={x}" for name, x in options.items())]
    sys.argv += ["--line_by_line", "--do_train", "--do_eval", "--report_to=none"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(program), run_name="__main__")
    *_, loss = re.findall(r"Train Loss: ([\d.]+)", told.getvalue())
    leaves = [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(saved["params"])]
    norm = np.linalg.norm(np.concatenate(leaves))
    print(json.dumps({"loss of the last step": float(loss), "norm": float(norm)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
