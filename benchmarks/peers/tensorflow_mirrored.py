"""Time TensorFlow's ``MirroredStrategy``, with one ``tf.function`` a step."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.peers.same_work import Job, job_of, measured
from benchmarks.peers.trials import NUM_LOSSES, Trial
from benchmarks.steps import LEARNING_RATE, MOMENTUM


def run(trial: Trial) -> dict[str, Any]:
    """Measure a trial."""
    # JAX takes most of a GPU's memory, which TensorFlow needs.
    jax.config.update("jax_platforms", "cpu")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    tf = importlib.import_module("tensorflow")
    kind = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    job = job_of(trial, kind)
    step = _built(tf, job, _devices(tf, trial.devices))
    losses = [float(step()) for _ in range(NUM_LOSSES)]
    return measured(job, lambda: step().numpy(), losses)


def _devices(tf: Any, count: int) -> list[str]:
    """Return the names of the first GPUs, or of parts of the CPU without a GPU."""
    if gpus := tf.config.list_physical_devices("GPU"):
        if len(gpus) < count:
            raise ValueError(f"The trial needs {count} devices; TensorFlow has {gpus}.")
        return [f"/gpu:{i}" for i in range(count)]
    one, *_ = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(one, parts)
    return [f"/cpu:{i}" for i in range(count)]


def _built(tf: Any, job: Job, devices: list[str]) -> Callable[[], Any]:
    keras = tf.keras
    strategy = tf.distribute.MirroredStrategy(devices)
    leaves, treedef = jax.tree.flatten(job.params)
    with strategy.scope():
        variables = [keras.Variable(leaf) for leaf in leaves]
        optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)
        optimizer.build(variables)
    losses_of = _mlp_losses if job.trial.model == "mlp" else _cnn_losses
    rows = job.trial.batch // len(devices)

    def own_rows(context: Any) -> Any:
        start = context.replica_id_in_sync_group * rows
        return {k: tf.constant(x[start : start + rows]) for k, x in job.batch.items()}

    batch = strategy.experimental_distribute_values_from_function(own_rows)

    def on_replica(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            values = [variable.value for variable in variables]
            params = jax.tree.unflatten(treedef, values)
            # Gradients of the replicas are added, so a replica's share is smaller.
            loss = tf.reduce_mean(losses_of(tf, params, batch)) / len(devices)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, values), variables, strict=True)
        )
        return loss

    @tf.function
    def step() -> Any:
        shares = strategy.run(on_replica, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None)

    return step


def _mlp_losses(tf: Any, params: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params:
        x = tf.tanh(x @ layer["w"] + layer["b"])
    return tf.reduce_mean((x - batch["y"]) ** 2, axis=-1)


def _cnn_losses(tf: Any, params: Any, batch: Any) -> Any:
    x = batch["image"]
    for stride, kernel in enumerate(params["convs"], 1):
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, stride, "SAME"))
    logits = tf.reduce_mean(x, axis=(1, 2)) @ params["dense"]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
