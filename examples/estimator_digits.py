"""Train, stop early, evaluate, predict and export with one model function.

The data are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; no batch divides
evenly over the 8 towers. Training stops when the validation loss has stopped improving,
and returns to the best state. The test split is evaluated once, at the end. A second
process, without the model's code, then loads the export and predicts the same.

    python examples/estimator_digits.py
    python examples/estimator_digits.py --towers 8 --devices 2 --epochs 5
"""

import argparse
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.export
import numpy as np
import optax
import rich
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.datasets import load_digits

import towerjax as tj

BATCH_SIZE = 100
SPLITS = {"train": 1190, "validation": 250, "test": 357}
EPOCHS = 60
PATIENCE = 4
LEAST_ACCURACY = 0.97
HYPERPARAMETERS = {"learning_rate": 3e-3, "dropout": 0.3}
FOLDER = pathlib.Path("runs/estimator_digits")
SERVE = """
import sys
import tempfile
import jax.export
import numpy as np

exported, rows, scores = sys.argv[1:]
with open(exported, "rb") as file:
    serve = jax.export.deserialize(bytearray(file.read()))
np.save(scores, serve.call(np.load(rows)))
"""


class Network(nn.Module):
    """Two convolutions and two dense layers: ``[b, 8, 8, 1]`` -> ``[b, 10]``."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Return the logits."""
        for features in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape((x.shape[0], -1))))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class ClassHits(tj.metrics.Additive):
    """A custom metric: how often each class is recognised, ``[10]``."""

    hits: jax.Array
    rows: jax.Array

    def compute(self) -> Any:
        """Return the share of the rows of each class."""
        return tj.metrics.ratio(self.hits, self.rows)


def model_fn(
    variables: Any,
    features: Any,
    labels: Any,
    mode: tj.estimator.Mode,
    params: Any,
    tower: Any,
) -> tj.estimator.ModelSpec:
    network = Network(params["dropout"])

    def logits_of(weights: Any) -> Any:
        train = mode is tj.estimator.Mode.TRAIN
        rngs = {"dropout": tower.rng}
        return network.apply({"params": weights}, features, train=train, rngs=rngs)

    def loss_fn(weights: Any) -> tuple[tj.Weighted, jax.Array]:
        logits = logits_of(weights)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return tj.Weighted.mean(losses, tower.weight), logits

    if mode is tj.estimator.Mode.PREDICT:
        scores = nn.softmax(logits_of(variables.params))
        return tj.estimator.ModelSpec(
            mode,
            predictions={"digit": scores.argmax(-1), "scores": scores},
            export_outputs={"digits": tj.estimator.ClassificationOutput(scores)},
        )
    if mode is tj.estimator.Mode.EVAL:
        loss, logits = loss_fn(variables.params)
        return tj.estimator.ModelSpec(
            mode, loss=loss, eval_metrics=score(labels, logits, tower)
        )
    optimizer = optimizer_of(params)
    (loss, logits), train_op = optimizer.minimize(loss_fn, variables, has_aux=True)
    accuracy = tj.metrics.accuracy(labels, logits.argmax(-1), tower.weight)
    return tj.estimator.ModelSpec(
        mode, loss=loss, train_op=train_op, eval_metrics={"accuracy": accuracy}
    )


def optimizer_of(params: Any) -> tj.estimator.TowerOptimizer:
    return tj.estimator.TowerOptimizer(optax.adam(params["learning_rate"]))


def score(labels: jax.Array, logits: jax.Array, tower: tj.Tower) -> dict[str, Any]:
    """Return sums over the tower's rows, from which metrics are computed at the end."""
    digit = logits.argmax(-1)
    is_of = nn.one_hot(labels, 10)
    hits = (digit == labels) * tower.weight
    return {
        "accuracy": tj.metrics.accuracy(labels, digit, tower.weight),
        "auc": tj.metrics.auc(is_of, nn.softmax(logits), tower.weight),
        "class_accuracy": ClassHits(hits @ is_of, tower.weight @ is_of),
    }


def load_splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> ``(features, labels)``."""
    image, label = load_digits(return_X_y=True)
    image = (image / 16).astype(np.float32).reshape((-1, 8, 8, 1))
    order = np.random.default_rng(0).permutation(len(label))
    image = image[order]
    label = label[order].astype(np.int32)
    ends = np.cumsum(list(SPLITS.values()))[:-1]
    pairs = zip(np.split(image, ends), np.split(label, ends), strict=True)
    return dict(zip(SPLITS, pairs, strict=True))


def choose_strategy(towers: int, num_devices: int | None) -> tj.Mirrored:
    jax.config.update("jax_num_cpu_devices", num_devices or towers)
    if num_devices is None:
        return tj.Mirrored(towers=towers)
    platform = jax.default_backend()
    devices = tuple(f"{platform}:{i}" for i in range(num_devices))
    return tj.Mirrored(towers=towers, devices=devices)


def init_variables(image: np.ndarray) -> tj.TrainState:
    network = Network(HYPERPARAMETERS["dropout"])
    init = jax.jit(network.init, static_argnames="train")  # one program, not fifty
    key = jax.random.key(0, impl="rbg")  # its draws compile fast
    weights = init(key, image[:1], train=False)["params"]
    optimizer = optimizer_of(HYPERPARAMETERS)
    return tj.TrainState.create(weights, optimizer, rng=jax.random.key(1))


def writers() -> list[Any]:
    """JSON lines, and TensorBoard's files where its writer is installed."""
    chosen: list[Any] = [tj.JsonLines(FOLDER / "log.jsonl", replace=True)]
    if importlib.util.find_spec("tensorboardX"):
        chosen.append(tj.TensorBoard(FOLDER / "tensorboard", replace=True))
    return chosen


def train(
    model: tj.estimator.ReplicatedModel, splits: Any, epochs: int
) -> tuple[tj.TrainState, tj.History]:
    """Train; return the variables of the best evaluation, and the history."""
    steps_per_epoch = -(-SPLITS["train"] // BATCH_SIZE)  # the last batch has 90 rows
    with tempfile.TemporaryDirectory() as folder:
        saving = tj.Checkpointer(folder, keep=1, best="accuracy")
        _, history = tj.estimator.train_and_evaluate(
            model,
            tj.batches(splits["train"], BATCH_SIZE, epochs=epochs, seed=0),
            lambda: tj.batches(splits["validation"], BATCH_SIZE),
            variables=init_variables(splits["train"][0]),
            eval_every=steps_per_epoch,
            early_stopping=tj.EarlyStopping("loss", PATIENCE),
            checkpointer=saving,
            writers=writers(),
            params=HYPERPARAMETERS,
        )
        step = model.train_step(params=HYPERPARAMETERS)
        like = splits["train"][0]
        best = saving.restore(step, init_variables(like), number=saving.best_step)
    return best, history


def export(weights: Any, path: pathlib.Path) -> None:
    """Write the scores as a program for any number of rows, with the weights inside."""
    network = Network(HYPERPARAMETERS["dropout"])
    weights = jax.device_get(weights)

    def serve(image: jax.Array) -> jax.Array:
        logits: Any = network.apply({"params": weights}, image, train=False)
        return nn.softmax(logits)

    rows = jax.export.symbolic_shape("b, 8, 8, 1")
    spec = jax.ShapeDtypeStruct(rows, np.float32)
    program = jax.export.export(jax.jit(serve), platforms=["cpu", "cuda"])(spec)
    path.write_bytes(program.serialize())


def scores_of_another_process(exported: pathlib.Path, image: np.ndarray) -> np.ndarray:
    rows = FOLDER / "rows.npy"
    scores = FOLDER / "scores.npy"
    np.save(rows, image)
    subprocess.run([sys.executable, "-c", SERVE, exported, rows, scores], check=True)
    return np.load(scores)


def draw(
    history: tj.History, kept: int, confusions: np.ndarray, path: pathlib.Path
) -> None:
    steps = [number for number, _ in history.evaluations]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(history.steps, history.metrics["loss"], linewidth=0.8, label="train")
    losses = [values["loss"] for _, values in history.evaluations]
    left.plot(steps, losses, marker="o", markersize=3, label="validation")
    left.axvline(kept, color="gray", linestyle="--", label="kept")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    left.grid(alpha=0.3)
    right.imshow(np.log1p(confusions), cmap="Blues")
    for (true, said), count in np.ndenumerate(confusions):
        if count:
            color = "white" if true == said else "black"
            right.text(said, true, f"{count}", ha="center", va="center", color=color)
    right.set(xlabel="predicted", ylabel="digit", xticks=range(10), yticks=range(10))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def table(values: dict[str, Any]) -> Table:
    shown = Table("metric", "test split", title="estimator_digits")
    for name, value in values.items():
        shown.add_row(name, " ".join(f"{x:.4f}" for x in np.atleast_1d(value)))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument("--devices", type=int, help="how many the towers share")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="at most")
    args = parser.parse_args()

    strategy = choose_strategy(args.towers, args.devices)
    splits = load_splits()
    image, label = splits["test"]
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    variables, history = train(model, splits, args.epochs)
    print(history.stopped or f"{args.epochs} epochs are over")
    test = {"features": image, "labels": label}
    evaluate = model.eval_step(params=HYPERPARAMETERS)
    values = tj.evaluate(evaluate, variables, lambda: tj.batches(test, BATCH_SIZE))

    batches = tj.batches(image, BATCH_SIZE)
    outputs = list(
        tj.estimator.predict(model, variables, batches, params=HYPERPARAMETERS)
    )
    digit = np.concatenate([output["digit"] for output in outputs])
    scores = np.concatenate([output["scores"] for output in outputs])

    exported = FOLDER / "exported.bin"
    export(variables.params, exported)
    served = scores_of_another_process(exported, image)
    confusions = np.zeros((10, 10), int)
    np.add.at(confusions, (label, digit), 1)
    draw(history, int(variables.step), confusions, FOLDER / "training.png")

    rich.print(table(values))
    print(f"picture, log and exported model in {FOLDER}")
    same = (served.argmax(-1) == digit).sum()
    print(
        f"another process, of the exported model: the same digit for {same} of"
        f" {len(digit)} images, scores within {abs(served - scores).max():.1e}"
    )
    hits = (digit == label).sum()
    print(f"test accuracy {values['accuracy']:.4f} ({hits} of {len(label)})")
    if args.epochs >= EPOCHS and values["accuracy"] < LEAST_ACCURACY:
        raise SystemExit(
            f"{args.epochs} epochs should reach a test accuracy of {LEAST_ACCURACY},"
            f" but reached {values['accuracy']:.4f}."
        )


if __name__ == "__main__":
    main()
