"""Processes that save without end, each killed by SIGKILL at another moment.

python tests/workers/checkpoint_kill.py 12

One process imports everything and forks the others before JAX has any threads. Each
checks the newest checkpoint, says so, and saves; what it says must be newer than all
that was whole before. Prints one JSON line.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import sys
import tempfile
import time
import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401  imported once, for all of them

import towerjax as tj
from towerjax.loop.checkpoint.saver import Saver


def values(number):
    """A state's numbers say of which step it is."""
    return {"w": np.arange(5000, dtype=np.float32) + number, "b": np.float32(number)}


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(params["b"] * batch, tower.weight)


def whole_step(saving, step, like):
    """The step of the newest checkpoint, once every number of it is right."""
    newest = max(saving.steps, default=0)
    if newest:
        state = saving.restore(step, like)
        for name, expected in values(newest).items():
            assert (np.asarray(state.params[name]) == expected).all(), newest
        assert int(state.step) == newest and saving.record(newest).step == newest
    return newest


def save_without_end(path, say):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.OneDevice("cpu:0"))
    like = step.init(values(0))
    saving = tj.Checkpointer(path, keep=2)
    newest = whole_step(saving, step, like)
    saver = Saver(saving, step, like, contextlib.ExitStack())
    say(f"{newest}\n")
    for number in range(newest + 1, newest + 10_000):
        state = step.init(values(number))
        state = tj.TrainState(
            jax.numpy.int32(number),
            state.params,
            state.opt_state,
            state.local,
            state.rng,
        )
        saver.save(state, number, batches={"used": number, "cursor": None})
        saver.wait()
        say(f"{number}\n")


def child(path):
    """``(pid, its words)`` of a process that saves."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_without_end(path, lambda text: os.write(into, text.encode()))
        except BaseException as error:
            os.write(into, f"bad: {error!r}\n".encode())
        os._exit(1)
    os.close(into)
    return pid, os.fdopen(out, "rb", buffering=0)


def seconds_of(checkpoints):
    """How long a fresh process takes for so many."""
    with tempfile.TemporaryDirectory() as path:
        pid, words = child(path)
        lines, start_s = b"", 0.0
        while lines.count(b"\n") <= checkpoints:
            lines += words.read(4096)
            start_s = start_s or time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return time.monotonic() - start_s


def main():
    warnings.simplefilter("ignore")  # of forking, with threads that only read
    kills, bad, left, said = int(sys.argv[1]), [], 0, 0
    period_s = seconds_of(2)
    with tempfile.TemporaryDirectory() as path:
        for kill in range(kills + 1):
            pid, words = child(path)
            text = b""
            while b"\n" not in text:
                ready, _, _ = select.select([words], [], [], 60)
                text += words.read(4096) if ready else b"bad: no word\n"
            first = text.split(b"\n")[0].decode()
            if first.startswith("bad") or int(first) < said:
                bad.append([kill, first, said])
            time.sleep(period_s * kill / kills)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            text += words.read(1 << 20)
            words.close()
            # Of the last line there may be half.
            numbers = [x for x in text.split(b"\n")[:-1] if x.isdigit()]
            said = max([said, *map(int, numbers)])
            left += bool(list(pathlib.Path(path).glob("*.*ing")))
        print(
            json.dumps(
                {
                    "kills": kills,
                    "bad": bad,
                    "left": left,
                    "newest": said,
                    "s": period_s,
                }
            )
        )


main()
