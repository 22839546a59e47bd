"""The training of the tests of checkpoints, on all devices of two processes.

python tests/workers/checkpoint_run.py FOLDER STEPS

The last process sends itself SIGTERM after the fifth step.
"""

import os
import pathlib
import signal
import sys
import time

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import checkpoint_model as model  # noqa: E402

import towerjax as tj  # noqa: E402

tj.cluster.initialize()


def hook(number, metrics):
    if number == 5 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if number >= 5:
        time.sleep(0.1)  # the processes agree on where to stop meanwhile


step = model.build(None)
saving = tj.Checkpointer(sys.argv[1], every=2)
tj.run(
    step,
    model.init(step),
    model.batches(),
    steps=int(sys.argv[2]),
    checkpointer=saving,
    hooks=[hook],
    audit=False,  # a sum and means of each tower's own are meant to differ
    progress=False,
)
