"""The training of the tests of checkpoints, which ends itself after the fifth step.

python tests/workers/checkpoint_run.py FOLDER SIGKILL
"""

import os
import pathlib
import signal
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
jax.config.update("jax_num_cpu_devices", 4)

import checkpoint_model as model  # noqa: E402

import towerjax as tj  # noqa: E402


def hook(number, metrics):
    if number == 5:
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])


step = model.build(4)
saving = tj.Checkpointer(sys.argv[1], every=2)
tj.run(
    step,
    model.init(step),
    model.batches(),
    steps=model.STEPS,
    checkpointer=saving,
    hooks=[hook],
    progress=False,
)
