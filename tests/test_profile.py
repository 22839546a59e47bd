"""A run seen from outside: traces of its steps, and the terminal it leaves."""

import contextlib
import os
import pathlib
import pty
import signal
import subprocess
import sys
import termios
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored

import towerjax as tj


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)


def run(data=6, **options):
    step = tj.build_train_step(loss_fn, optax.sgd(0.25), mirrored(2))
    data = [np.full(8, 2.0, np.float32)] * data
    options = {"progress": False, "audit": False} | options
    return tj.run(step, step.init(jnp.float32(0)), data, **options)


def traced(folder):
    """The numbers of the steps in the one trace of a folder."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    with warnings.catch_warnings(action="ignore"):  # its classes have no module
        data = jax.profiler.ProfileData.from_file(str(path))
        events = [
            e for plane in data.planes for line in plane.lines for e in line.events
        ]
        stats = [dict(event.stats) for event in events if event.name == "train"]
    return sorted(int(each["step_num"]) for each in stats)


@pytest.mark.slow
def test_every_step_is_named_in_a_trace(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        run()
    assert traced(tmp_path) == [1, 2, 3, 4, 5, 6]


ENDLESS = """
import jax.numpy as jnp, numpy as np, optax, towerjax as tj
def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)
step = tj.build_train_step(loss_fn, optax.sgd(0.25), tj.Mirrored(towers=2))
data = tj.batches(np.full(8, 2.0, np.float32), 8, epochs=None)
tj.run(step, step.init(jnp.float32(0)), data, audit=False)
"""


@pytest.mark.slow
def test_two_ctrl_c_leave_a_real_terminal_as_it_was(tmp_path):
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    env = os.environ | {"TERM": "xterm", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
        start_new_session=True,
    )
    os.set_blocking(master, False)
    text, is_sent, end_s = b"", False, time.monotonic() + 100
    is_over = False
    while not is_over and time.monotonic() < end_s:
        is_over = process.poll() is not None  # and what it said is then read to the end
        with contextlib.suppress(BlockingIOError):
            while True:
                text += os.read(master, 1000)
        if not is_sent and b"steps/s" in text:  # the run is on its way
            is_sent = True
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert termios.tcgetattr(terminal) == before
    os.close(master)
    os.close(terminal)
    assert is_sent and process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in text
    # The cursor was never hidden, nor another screen shown.
    assert b"\x1b[?25l" not in text and b"\x1b[?1049h" not in text
