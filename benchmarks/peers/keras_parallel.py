"""Time Keras 3 on JAX under ``DataParallel``, by ``train_on_batch``.

Unlike the other contenders it takes the batch from the host in each step.
"""

import importlib
import os
from typing import Any

import jax
import numpy as np

from benchmarks.peers.same_work import Job, job_of, measured
from benchmarks.peers.trials import NUM_LOSSES, Trial
from benchmarks.steps import LEARNING_RATE, MOMENTUM


def run(trial: Trial) -> dict[str, Any]:
    """Measure a trial."""
    os.environ["KERAS_BACKEND"] = "jax"
    keras: Any = importlib.import_module("keras")
    job = job_of(trial, jax.devices()[0].device_kind)
    devices = keras.distribution.list_devices()[: trial.devices]
    parallel = keras.distribution.DataParallel(devices=devices)
    keras.distribution.set_distribution(parallel)
    model, inputs, targets = _built(keras, job)

    def step() -> float:
        return float(model.train_on_batch(inputs, targets))

    # Keras returns a running mean of the losses since the last reset.
    losses = []
    for _ in range(NUM_LOSSES):
        model.reset_metrics()
        losses.append(step())
    return measured(job, step, losses)


def _built(keras: Any, job: Job) -> tuple[Any, np.ndarray, np.ndarray]:
    layers = keras.layers
    params = job.params
    if job.trial.model == "mlp":
        width = params[0]["w"].shape[1]
        stack = [layers.Dense(width, activation="tanh") for _ in params]
        weights = [[layer["w"], layer["b"]] for layer in params]
        inputs = job.batch["x"]
        targets = job.batch["y"]
        loss = keras.losses.MeanSquaredError()
    else:
        stack = [
            layers.Conv2D(k.shape[-1], 3, s, "same", activation="relu", use_bias=False)
            for s, k in enumerate(params["convs"], 1)
        ]
        stack += [layers.GlobalAveragePooling2D(), layers.Dense(10, use_bias=False)]
        weights = [[k] for k in params["convs"]] + [[], [params["dense"]]]
        inputs = job.batch["image"]
        targets = job.batch["label"]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([keras.Input(inputs.shape[1:]), *stack])
    for layer, values in zip(stack, weights, strict=True):
        layer.set_weights(values)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)
    model.compile(optimizer=optimizer, loss=loss)
    return model, inputs, targets
