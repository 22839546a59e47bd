"""Leave a job together: end it if a process leaves that another one waits for.

A program may end early in one process, as by ``sys.exit(0)`` or in a loop over fewer
batches. The others then wait for it in their next step, and it waits for them in JAX's
exit. So each process says how far it came when it leaves, and who waits for a call that
a process left out ends.
"""

import atexit
import contextlib
import dataclasses
import json
import threading
import time
from typing import Any, NoReturn

from towerjax.mesh.cluster import ends
from towerjax.mesh.cluster.spec import Cluster
from towerjax.mesh.lines import print_line
from towerjax.mesh.processes import StoreError, begun

_FOLDER = "towerjax/left"
_FIRST = "towerjax/first_left"  # set when the first process leaves
_SILENCE_S = 5  # how long a process that leaves waits without a line
_PATIENCE_S = 10  # how long the others may wait for one that has left
_LOOK_S = 1.0


@dataclasses.dataclass(frozen=True)
class Left:
    """How far a process came before it left the job.

    Attributes:
      process: Its number.
      calls: The calls that it made, of those that all processes make.
      steps: How many of these were steps.
      waits: Whether it ended because it waited for a process that has left.
    """

    process: int
    calls: int
    steps: int
    waits: bool


class Leaving:
    """Tells the other processes when this one leaves, and ends it if it waits in vain.

    Args:
      client: JAX's client of the job's key-value store.
      cluster: This process and the number of all.
      name: The name of this process, for the lines that it prints.
      timeout_s: The seconds to wait for the others when this process leaves.
    """

    def __init__(
        self, client: Any, cluster: Cluster, name: str, timeout_s: float
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._name = name
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="towerjax-leaving", daemon=True
        )
        self._thread.start()
        # JAX waits for the others in a function that it registered before.
        atexit.register(self.leave)

    def leave(self) -> None:
        """Say that this process leaves, and wait until the others do so, too."""
        atexit.unregister(self.leave)
        with contextlib.suppress(StoreError):  # the job has ended
            self._tell(waits=False)
            self._over.set()
            self._thread.join()
            self._wait_for_all()

    def _tell(self, *, waits: bool) -> None:
        """Say that this process leaves, and how far it came."""
        me = self._cluster.process_id
        left = Left(me, begun.calls, begun.steps, waits)
        text = json.dumps(dataclasses.asdict(left))
        self._client.key_value_set(f"{_FOLDER}/{me}", text)
        self._client.key_value_set(_FIRST, "", allow_overwrite=True)

    def _left(self) -> list[Left]:
        """List the processes that have left so far."""
        texts = self._client.key_value_dir_get(_FOLDER)
        return [Left(**json.loads(text)) for _, text in texts]

    def _wait_for_all(self) -> None:
        began = time.monotonic()
        pause_s = 0.01
        is_silent = True
        left: list[Left] = []
        while len(left) < self._cluster.num_processes:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
            left = self._left()
            if any(x.waits for x in left):
                self._end(f"it left after {begun.steps} steps, and others wait for it")
            waited_s = time.monotonic() - began
            if is_silent and waited_s > _SILENCE_S:
                is_silent = False
                print_line(
                    f"{self._name} has left the job after {begun.steps} steps: its"
                    " program ended. It waits for the others to end (up to"
                    f" {self._timeout_s} s)."
                )
            if waited_s > self._timeout_s:
                self._end(f"the others did not end within {self._timeout_s} s")

    def _watch(self) -> None:
        """Wait until a process leaves, and then see that this one waits for none."""
        with contextlib.suppress(StoreError):  # the job has ended
            while not self._has_any_left():
                pass
            calls = -1
            since = time.monotonic()
            while not self._over.wait(_LOOK_S):
                if begun.calls != calls:
                    calls = begun.calls
                    since = time.monotonic()
                first = min(self._left(), key=lambda x: x.calls)
                if first.calls < calls and time.monotonic() - since > _PATIENCE_S:
                    self._end_for(first)

    def _has_any_left(self) -> bool:
        try:
            self._client.blocking_key_value_get(_FIRST, 10_000)
        except StoreError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return False
        return True

    def _end_for(self, first: Left) -> NoReturn:
        with contextlib.suppress(StoreError):  # the job has ended
            self._tell(waits=True)
        self._end(
            f"it has begun {begun.steps} steps, and waits for process {first.process},"
            f" which left the job after {first.steps}. All processes must make the same"
            " calls. None may end alone, as by sys.exit(0), or in a loop over fewer"
            " batches"
        )

    def _end(self, why: str) -> NoReturn:
        print_line(f"{self._name} ends: {why}.")
        # The first process serves the others. They hear why before it ends.
        time.sleep(2 * _LOOK_S if self._cluster.process_id == 0 else 0)
        ends.end_now(1)
