"""Classify which package 8 words come from: a wide embedding table on 8 towers.

The text is Python's installed standard library: runs of 8 words from the sources of ten
packages, every fifth run for testing. Each word is hashed to one of 100,000 rows of 64
numbers; the mean of a run's rows, times a small matrix, gives the packages' logits.

A step looks up 8,192 rows by `tj.sparse.take`. Towers send the gradient as these rows
and their indices, not as the whole table, and the optimizer, which is lazy, updates
only these rows. Adagrad does not change a row without a gradient, so the result is that
of the dense gradient. The bytes are those of the collectives in the compiled programs.

    python examples/embeddings.py
    python examples/embeddings.py --towers 4 --devices 2 --epochs 2
"""

import argparse
import keyword
import math
import pathlib
import re
import sysconfig
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import towerjax as tj

PACKAGES = (
    *("asyncio", "ctypes", "email", "idlelib", "importlib"),
    *("logging", "multiprocessing", "tkinter", "unittest", "xml"),
)
WORDS = 8  # in a run
TABLE_SHAPE = (100_000, 64)
BATCH_SIZE = 1024
EPOCHS = 4
LEAST_ACCURACY = 0.8
LARGEST_SHARE = 0.1  # of the dense gradient's bytes
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def load_splits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rows = []
    labels = []
    for label, package in enumerate(PACKAGES):
        root = pathlib.Path(sysconfig.get_path("stdlib")) / package
        for path in sorted(root.rglob("*.py")):
            if any("test" in part for part in path.relative_to(root).parts):
                continue
            words = re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))
            words = [word for word in words if not keyword.iskeyword(word)]
            hashed = [zlib.crc32(word.encode()) % TABLE_SHAPE[0] for word in words]
            runs = len(hashed) // WORDS
            rows += np.reshape(hashed[: runs * WORDS], (runs, WORDS)).tolist()
            labels += [label] * runs
    data = {"words": np.array(rows, np.int32), "label": np.array(labels, np.int32)}
    tested = np.arange(len(labels)) % 5 == 0
    train_split = {name: x[~tested] for name, x in data.items()}
    return train_split, {name: x[tested] for name, x in data.items()}


def init_params() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    width = TABLE_SHAPE[1]
    classes = len(PACKAGES)
    return {
        "table": 0.1 * numbers.standard_normal(TABLE_SHAPE, np.float32),
        "w": np.zeros((width, classes), np.float32),
        "b": np.zeros(classes, np.float32),
    }


def build_model(
    strategy: tj.Mirrored,
    optimizer: tj.estimator.TowerOptimizer,
    look_up: Callable[[Any, Any], jax.Array],
) -> tj.estimator.ReplicatedModel:
    def model_fn(
        variables: Any,
        features: Any,
        labels: Any,
        mode: tj.estimator.Mode,
        tower: tj.Tower,
    ) -> tj.estimator.ModelSpec:
        def loss_fn(params: Any) -> Any:
            rows = look_up(params["table"], features).mean(axis=1)
            logits = rows @ params["w"] + params["b"][None]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            hits = logits.argmax(axis=-1) == labels
            accuracy = tj.Weighted.mean(hits, tower.weight)
            return tj.Weighted.mean(losses, tower.weight), {"accuracy": accuracy}

        if mode is tj.estimator.Mode.EVAL:
            loss, metrics = loss_fn(variables.params)
            return tj.estimator.ModelSpec(mode, loss=loss, eval_metrics=metrics)
        (loss, _), train_op = optimizer.minimize(loss_fn, variables, has_aux=True)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    return tj.estimator.replicate_model_fn(model_fn, devices=strategy, donate=True)


def collective_bytes(program: str) -> dict[str, int]:
    """Count the result bytes of each kind of collective in one device's program."""
    found: dict[str, int] = {}
    for line in program.splitlines():
        if match := re.search(rf"= (.*?) ({COLLECTIVES})(-done)?\(", line):
            shapes = re.findall(r"([a-z])+(\d+)\[([\d,]*)\]", match[1])
            for _, bits, dims in shapes:
                count = math.prod(int(n) for n in dims.split(",") if n)
                found[match[2]] = found.get(match[2], 0) + count * int(bits) // 8
    return found


def shown(sent: dict[str, int]) -> str:
    parts = [f"{count / 1e6:.2f} MB {kind}" for kind, count in sorted(sent.items())]
    return ", ".join(parts) or "nothing"


def compare_bytes(programs: dict[str, str]) -> None:
    sent = {name: collective_bytes(program) for name, program in programs.items()}
    for name, found in sent.items():
        print(f"{name:<6} a step sends {shown(found)}")
    rows, dense = (sum(sent[name].values()) for name in ("rows", "dense"))
    if dense:  # one device sends nothing
        print(f"rows / dense {rows / dense:.4f}")
        if rows > LARGEST_SHARE * dense:
            raise SystemExit(f"Rows should send less than {LARGEST_SHARE} of dense.")


def accuracy_of(
    model: tj.estimator.ReplicatedModel,
    state: tj.TrainState,
    split: dict[str, np.ndarray],
) -> float:
    spec = model(state, split["words"], split["label"], tj.estimator.Mode.EVAL)
    return float((spec.eval_metrics or {})["accuracy"].value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=8, help="a divisor of 1,024")
    parser.add_argument("--devices", type=int, help="how many they share: all here")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.devices or args.towers)
    devices = args.devices or min(args.towers, jax.device_count())
    names = [f"{jax.default_backend()}:{i}" for i in range(devices)]
    strategy = tj.Mirrored(names, towers=args.towers)

    train_split, test_split = load_splits()
    labels = test_split["label"]
    print(f"{len(train_split['label']):,} runs for training, {len(labels):,} to test")
    # Losses are means over 1,024, so rows' gradients are far below adagrad's defaults.
    optimizer = tj.estimator.TowerOptimizer(
        optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-14), lazy=True
    )
    model = build_model(strategy, optimizer, tj.sparse.take)
    dense = build_model(strategy, optimizer, lambda table, ids: table[ids])
    state = model.init(tj.TrainState.create(init_params(), optimizer))
    words, label = (x[:BATCH_SIZE] for x in train_split.values())
    batch = {"features": words, "labels": label}
    programs = {
        name: one.train_step().program(state, batch).call.as_text()
        for name, one in {"dense": dense, "rows": model}.items()
    }
    compare_bytes(programs)
    for epoch in range(args.epochs):
        losses = []
        start = time.perf_counter()
        for batch in tj.batches(train_split, BATCH_SIZE, epochs=1, seed=epoch):
            if len(batch["label"]) == BATCH_SIZE:
                spec = model(
                    state, batch["words"], batch["label"], tj.estimator.Mode.TRAIN
                )
                state = spec.train_op
                losses.append(float(spec.loss.value))
        rate = len(losses) / (time.perf_counter() - start)
        print(
            f"epoch {epoch + 1}  loss {np.mean(losses):.4f}"
            f"  test accuracy {accuracy_of(model, state, test_split):.4f}"
            f"  {rate:.1f} steps/s"
        )
    accuracy = accuracy_of(model, state, test_split)
    chance = np.bincount(labels).max() / len(labels)
    print(f"test accuracy {accuracy:.4f} (most frequent package {chance:.4f})")
    if args.epochs >= EPOCHS and accuracy < LEAST_ACCURACY:
        raise SystemExit(
            f"{args.epochs} epochs should reach a test accuracy of {LEAST_ACCURACY},"
            f" but reached {accuracy:.4f}."
        )


if __name__ == "__main__":
    main()
