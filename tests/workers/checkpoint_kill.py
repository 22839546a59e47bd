"""Processes that save without end, each killed by SIGKILL at another moment.

python tests/workers/checkpoint_kill.py 20

One process imports everything and forks the others before JAX has any threads. Each
checks the newest checkpoint, says so, and saves; what it says must be newer than all
that was whole before. Prints one JSON line.
"""

import itertools
import json
import os
import pathlib
import select
import signal
import sys
import tempfile
import time
import warnings

import numpy as np
import optax
import orbax.checkpoint  # noqa: F401  imported once, for all of them

import towerjax as tj


def values(number):
    """A state's numbers say of which step it is."""
    return {"w": np.arange(5000, dtype=np.float32) + number, "b": np.float32(number)}


def loss_fn(params, batch, tower):
    """A step of rate 1 adds 1 to each number."""
    total = params["w"].sum() + params["b"]
    return tj.Weighted.mean(-total * batch, tower.weight)


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
    step = tj.build_train_step(loss_fn, optax.sgd(1.0), tj.OneDevice("cpu:0"))
    saving = tj.Checkpointer(path, every=1, keep=2, batches="count")
    whole_step(saving, step, step.init(values(0)))
    said = -1

    def say_newest(number, metrics):
        """Also at the first step, after which the first of its own is being saved."""
        nonlocal said
        newest = max(saving.steps, default=0)
        if newest > said:
            said = newest
            say(f"{newest}\n")

    ones = itertools.repeat(np.ones(1, np.float32))
    state = step.init(values(0))
    tj.run(step, state, ones, checkpointer=saving, hooks=[say_newest], progress=False)


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


def said_after(words, text, lines):
    """All that a process has said, once it is so many lines."""
    while text.count(b"\n") < lines:
        ready, _, _ = select.select([words], [], [], 60)
        said = words.read(4096) if ready else b""
        text += said or b"bad: no word\n" * lines
    return text


def seconds_of_one():
    """How long a fresh process takes for a checkpoint."""
    with tempfile.TemporaryDirectory() as path:
        pid, words = child(path)
        text = said_after(words, b"", 1)
        start_s = time.monotonic()
        said_after(words, text, 3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return (time.monotonic() - start_s) / 2


def main():
    warnings.simplefilter("ignore")  # of forking, with threads that only read
    kills = int(sys.argv[1])
    bad = []
    left = 0
    said = 0
    period_s = seconds_of_one()
    with tempfile.TemporaryDirectory() as path:
        for kill in range(kills + 1):
            pid, words = child(path)
            text = said_after(words, b"", 1)
            first = text.split(b"\n")[0].decode()
            if first.startswith("bad") or int(first) < said:
                bad.append([kill, first, said])
            # Every other one is killed after a whole checkpoint, however slow it is.
            text = said_after(words, text, 1 + kill % 2)
            time.sleep(period_s * kill / kills)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            text += words.read(1 << 20)
            words.close()
            # Of the last line there may be half.
            numbers = [x for x in text.split(b"\n")[:-1] if x.isdigit()]
            said = max([said, *map(int, numbers)])
            left += bool(list(pathlib.Path(path).glob("*.orbax-checkpoint-tmp*")))
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
