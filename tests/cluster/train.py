"""A training that says where it is, saves, and at its end tells its bits.

python tests/cluster/train.py FOLDER STEPS

Of a job that was not started again, each step from the fifth on takes long.
"""

import hashlib
import os
import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import checkpoint_model as model  # noqa: E402

import towerjax as tj  # noqa: E402

cluster = tj.cluster.initialize()
folder = sys.argv[1]
steps = int(sys.argv[2])
step = model.build(None)
# Which steps are there, before one of the processes writes more of them.
saving = tj.Checkpointer(folder, every=2)


def say(text):
    os.write(1, f"{cluster.process_id} of {cluster.num_processes} {text}\n".encode())


say(f"by {cluster.how} pid {os.getpid()} on {jax.device_count()}")


def hook(number, metrics):
    say(f"step {number}")
    if (
        number >= 5
        and "WAIT_S" in os.environ
        and "SLURM_RESTART_COUNT" not in os.environ
    ):
        time.sleep(float(os.environ["WAIT_S"]))


state, history = tj.run(
    step,
    model.init(step),
    model.batches(),
    steps=steps,
    checkpointer=saving,
    hooks=[hook],
    audit=False,  # a sum and means of each tower's own are meant to differ
    progress=False,
)
saved = tj.towers.saved_values((state.params, state.opt_state))
leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)]
say(f"bits {hashlib.sha256(b''.join(leaves)).hexdigest()[:16]}")
