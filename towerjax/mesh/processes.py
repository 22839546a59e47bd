"""Compare and broadcast host values between the processes of a job.

Every process of a job calls these functions, in the same order.
"""

import contextlib
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from towerjax.mesh.private_jax import coordinator_client
from towerjax.types import PyTree

_PATIENCE_S = 10


def print_line(text: str) -> None:
    """Print a line to stderr that begins with "towerjax:"."""
    # The line is written by one call, so that lines of other threads cannot mix with
    # it.
    print(f"towerjax: {text}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def calls_after(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call a function, in a thread, if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def says_if_alone(why: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that prints a line if other processes do not join in 10 s.

    ``why`` says what this process waits for.
    """
    if jax.process_count() == 1:
        return contextlib.nullcontext()
    text = (
        f"process {jax.process_index()} waits for the others: {why}. Do all processes"
        " make this call, in the same order?"
    )
    return calls_after(_PATIENCE_S, lambda: print_line(text))


def require_same(name: str, text: str, advice: str) -> None:
    """Raise on every process unless ``text`` is the same on all of them."""
    if jax.process_count() == 1:
        return
    _check_devices()
    digest = hashlib.sha256(text.encode()).digest()
    number = np.frombuffer(digest, np.uint8)
    with says_if_alone(f"{name} is compared between processes"):
        all_of_them = np.asarray(multihost_utils.process_allgather(number))
    differing = [
        p for p, other in enumerate(all_of_them) if (other != all_of_them[0]).any()
    ]
    if differing:
        shown = text if len(text) <= 400 else f"{len(text)} characters of text"
        raise ValueError(
            f"{name} must be the same on all {jax.process_count()} processes, but"
            f" process{'es' * (len(differing) > 1)}"
            f" {', '.join(map(str, differing))} and process 0 differ. On process"
            f" {jax.process_index()}: {shown}. {advice}"
        )


def _check_devices() -> None:
    """Raise unless all processes have equally many devices, as JAX needs."""
    owners = [device.process_index for device in jax.devices()]
    counts = [owners.count(process) for process in range(jax.process_count())]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The processes of this job have {counts} devices, but all need the same"
            " number. Set JAX_NUM_CPU_DEVICES or CUDA_VISIBLE_DEVICES so that each has"
            " equally many."
        )


def from_first_process(tree: PyTree) -> PyTree:
    """Return process 0's values, on every process."""
    if jax.process_count() == 1:
        return tree
    _check_devices()
    with says_if_alone("process 0 sends its values"):
        return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def is_preempted(number: int) -> bool:
    """Return whether JAX chose step ``number`` as the one to stop at.

    JAX chooses one step for all processes after any of them got SIGTERM.
    """
    is_on = getattr(jax.config, "jax_enable_preemption_service")  # noqa: B009
    if jax.process_count() == 1 or not is_on:
        return False
    return bool(multihost_utils.reached_preemption_sync_point(number))


class Stopped(Exception):
    """Raised in an `Exchange` whose ``stopped`` event is set."""


class Exchange:
    """An all-gather of small host values through the job's coordinator.

    It does not use the devices, so it need not wait for a step that runs.
    """

    def __init__(self, name: str, content: str, stopped: threading.Event) -> None:
        self._name = name
        self._what = content
        self._stopped = stopped
        self._client = coordinator_client()
        self._round = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values that all processes give in this round, in process order."""
        prefix = f"towerjax/{self._name}/{self._round}"
        mine = jax.process_index()
        self._client.key_value_set(f"{prefix}/{mine}", json.dumps(value))
        peers = range(jax.process_count())
        values = [self._wait_for(f"{prefix}/{peer}", peer) for peer in peers]
        # A process that takes part in this round has read the last one. So all have
        # read the round before the last, which is deleted.
        if self._round > 1:
            old = f"towerjax/{self._name}/{self._round - 2}/{mine}"
            self._client.key_value_delete(old)
        self._round += 1
        return [json.loads(value) for value in values]

    def _wait_for(self, key: str, peer: int) -> str:
        """Wait for the value of another process, and return it.

        JAX ends the job if that process dies.
        """
        for seconds in itertools.count():
            if self._stopped.is_set():
                break
            if seconds == _PATIENCE_S:
                me = jax.process_index()
                print_line(f"process {me} waits for {self._what} of process {peer}")
            try:
                return self._client.blocking_key_value_get(key, 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise Stopped


def call_on_first_process(make: Callable[[], Any], says: str = "Process 0 says") -> Any:
    """Call ``make`` on process 0, and return its value on every process.

    The value goes through JSON. If ``make`` raises, every process raises; ``says``
    begins the error on the others.
    """
    if jax.process_count() == 1:
        return make()
    failure = None
    message = b""
    if jax.process_index() == 0:
        try:
            message = json.dumps({"value": make()}).encode()
        # Raised below, after the other processes got its text.
        except Exception as error:
            failure = error
            message = json.dumps({"error": str(error)}).encode()
    size = int(from_first_process(np.array(len(message))))
    content = np.frombuffer(message, np.uint8) if message else np.zeros(size, np.uint8)
    answer = json.loads(from_first_process(content).tobytes())
    if failure is not None:
        raise failure
    if "error" in answer:
        raise ValueError(f"{says}: {answer['error']}")
    return answer["value"]
