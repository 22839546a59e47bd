"""Compare and send host values between the processes that own some devices."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from towerjax.mesh import live
from towerjax.mesh.devices import Device
from towerjax.mesh.lines import calls_after, print_line
from towerjax.mesh.private_jax import coordinator_client
from towerjax.types import PyTree

# What JAX's client of the job's key-value store raises.
StoreError = jax.errors.JaxRuntimeError

_PATIENCE_S = 10
_AXIS = "process"
_IN_ORDER = "Do all processes make this call, in the same order?"
# By the numbers of some processes, and of all that are left: the rounds in which these
# have compared values. Like JAX's own state, they are of this process. If a process is
# lost, others may have come to different rounds.
_ROUNDS: dict[tuple[tuple[int, ...], ...], Iterator[int]] = {}
# How many of the calls that all processes make this one has begun: the steps, and all.
begun = types.SimpleNamespace(steps=0, calls=0)


class Stopped(Exception):
    """Raised in an `Exchange` whose ``stopped`` event is set."""


class Exchange:
    """An all-gather of small host values through the job's coordinator.

    It does not use the devices, so it need not wait for a step that runs. The first of
    the processes collects the values, so all get the same answer.
    """

    def __init__(
        self,
        name: str,
        waits_for: str,
        processes: Sequence[int],
        stopped: threading.Event | None = None,
    ) -> None:
        """Prepare the rounds of these processes.

        ``name`` is one that no other exchange of the job has. ``waits_for`` says for
        what a process waits, with ``{}`` for the number of the other one. A wait ends
        when ``stopped`` is set.
        """
        self._name = name
        self._waits_for = waits_for
        self._processes = tuple(processes)
        self._stopped = stopped or threading.Event()
        self._client = coordinator_client()
        self._round = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values that all processes give in this round, in order.

        If a process was lost, every other one raises a `live.LostError`.
        """
        values = self.gather_from_left(value)
        if lost := set(self._processes) - values.keys():
            raise live.LostError(lost)
        return [values[number] for number in self._processes]

    def gather_from_left(self, value: Any) -> dict[int, Any]:
        """Gather this round's values by process, without those that are lost.

        All processes get the same answer.
        """
        me = jax.process_index()
        first = self._processes[0]
        prefix = f"towerjax/{self._name}"
        here = f"{prefix}/{self._round}"
        if me == first:
            answer = json.dumps({me: value} | self._collected(here))
            self._client.key_value_set(f"{here}/all", answer)
        else:
            self._client.key_value_set(f"{here}/{me}", json.dumps(value))
            answer = self._wait_for(f"{here}/all", first)
        # A process that takes part in this round has read the last one. So all have
        # read the round before the last, which is deleted.
        if self._round > 1:
            own = "all" if me == first else me
            self._client.key_value_delete(f"{prefix}/{self._round - 2}/{own}")
        self._round += 1
        return {int(number): x for number, x in json.loads(answer).items()}

    def _collected(self, here: str) -> dict[int, Any]:
        """Collect the values of the others, for the first process.

        After each wait it takes all that have come, by one question.
        """
        values = dict[int, Any]()
        waiting = list(self._processes[1:])
        while waiting:
            peer = waiting.pop(0)
            with contextlib.suppress(live.LostError):
                values[peer] = json.loads(self._wait_for(f"{here}/{peer}", peer))
            if waiting:
                there = dict(self._client.key_value_dir_get(here))
                come = {p: f"{here}/{p}" for p in waiting if f"{here}/{p}" in there}
                values |= {p: json.loads(there[key]) for p, key in come.items()}
                waiting = [p for p in waiting if p not in come]
        return values

    def _wait_for(self, key: str, peer: int) -> str:
        """Wait for the value of another process, and return it.

        If that process dies, JAX ends the job. If the job goes on without lost ones,
        this raises a `live.LostError`.
        """
        each_s = min(_PATIENCE_S, 1)
        for times in itertools.count():
            if self._stopped.is_set():
                break
            if times == _PATIENCE_S / each_s:
                me = jax.process_index()
                other = self._waits_for.replace("{}", f"{peer}")
                print_line(f"process {me} waits for {other}")
            try:
                return self._client.blocking_key_value_get(key, int(1000 * each_s))
            except StoreError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if peer in live.silent():
                    raise live.LostError([peer]) from None
        raise Stopped


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that own some devices, which compare and send host values.

    Each of them makes the same calls, in the same order.
    """

    devices: tuple[Device, ...]

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the processes, ascending."""
        return tuple(sorted({device.process_index for device in self.devices}))

    @property
    def are_several(self) -> bool:
        """Whether there is more than one process."""
        return len(self.numbers) > 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the first, which does what is done once."""
        return jax.process_index() in (self.numbers[:1] or [jax.process_index()])

    def says_if_alone(self, why: str) -> contextlib.AbstractContextManager[None]:
        """Print a line, in a context, if the others do not join in 10 s.

        ``why`` says what this process waits for.
        """
        if not self.are_several:
            return contextlib.nullcontext()
        self._count_call()
        text = f"process {jax.process_index()} waits for the others: {why}. {_IN_ORDER}"
        return calls_after(_PATIENCE_S, lambda: print_line(text))

    def require_same(self, name: str, text: str, advice: str) -> None:
        """Raise on every process unless ``text`` is the same on all of them."""
        if not self.are_several:
            return
        digest = hashlib.sha256(text.encode()).hexdigest()
        of_all = self.gather(digest, f"{name} is compared between processes")
        pairs = zip(self.numbers, of_all, strict=True)
        differing = [process for process, other in pairs if other != of_all[0]]
        if differing:
            shown = text if len(text) <= 400 else f"{len(text)} characters of text"
            raise ValueError(
                f"{name} must be the same on all {len(self.numbers)} processes, but"
                f" process{'es' * (len(differing) > 1)}"
                f" {', '.join(map(str, differing))} and process {self.numbers[0]}"
                f" differ. On process {jax.process_index()}: {shown}. {advice}"
            )

    def _count_call(self) -> None:
        """Count a call that all processes of the job make."""
        begun.calls += len(self.numbers) == jax.process_count()

    def gather(self, value: Any, why: str = "numbers are compared") -> list[Any]:
        """Gather the small values that all processes give, in process order.

        They go through JSON. ``why`` is said if one of them is late.
        """
        if not self.are_several:
            return [value]
        self._count_call()
        key = self.numbers, live.numbers_left()
        number = next(_ROUNDS.setdefault(key, itertools.count()))
        name = "/".join([".".join(map(str, numbers)) for numbers in key])
        waits_for = f"process {{}}: {why}. {_IN_ORDER}"
        return Exchange(f"{name}/{number}", waits_for, self.numbers).all_gather(value)

    def from_first(self, tree: PyTree) -> PyTree:
        """Send the first process's values, to the bit, to every process."""
        if not self.are_several:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [np.asarray(x) for x in leaves]
        words = [_words_of(x if self.is_first else np.zeros_like(x)) for x in arrays]
        rows = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        with self.says_if_alone(f"process {self.numbers[0]} sends its values"):
            placed = [
                jax.make_array_from_process_local_data(rows, x[None]) for x in words
            ]
            added = _added(placed, sharding=NamedSharding(self._mesh, PartitionSpec()))
            sent = jax.device_get([x.addressable_data(0) for x in added])
        pairs = zip(sent, arrays, strict=True)
        return treedef.unflatten(
            np.array(x).view(like.dtype).reshape(like.shape) for x, like in pairs
        )

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """A mesh of one device of each process."""
        first_of = {x.process_index: x for x in reversed(self.devices)}
        devices = [first_of[number] for number in self.numbers]
        return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))

    def call_on_first(self, make: Callable[[], Any], says: str | None = None) -> Any:
        """Call ``make`` on the first process, and return its value on every process.

        The value goes through JSON. If ``make`` raises, every process raises; ``says``
        begins the error on the others.
        """
        if not self.are_several:
            return make()
        failure = None
        answer: Any = None
        first = self.numbers[0]
        if self.is_first:
            try:
                answer = {"value": make()}
            # Raised below, after the other processes got its text.
            except Exception as error:
                failure = error
                answer = {"error": str(error)}
        answer = self.gather(answer, f"process {first} sends its values")[0]
        if failure is not None:
            raise failure
        if "error" in answer:
            says = says or f"Process {first} says"
            raise ValueError(f"{says}: {answer['error']}")
        return answer["value"]


def _words_of(x: np.ndarray) -> np.ndarray:
    """Read the bits of an array as a row of unsigned integers.

    A sum of numbers would make 0 of -0, and bfloat16 is not added everywhere.
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(np.uint8 if flat.nbytes % 4 else np.uint32)


@functools.partial(jax.jit, static_argnames="sharding")
def _added(rows: list[jax.Array], *, sharding: NamedSharding) -> list[jax.Array]:
    """Add the rows of each array, of which all but one are zero."""
    sums = [x.sum(axis=0, dtype=x.dtype) for x in rows]
    return jax.lax.with_sharding_constraint(sums, sharding)


def processes_of(arrays: PyTree) -> Processes:
    """Find the processes that own the devices of these arrays.

    Arrays of a trace have no devices.
    """
    leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    placed = [x for x in leaves if not isinstance(x, Tracer)]
    devices = {device for x in placed for device in x.sharding.device_set}
    return Processes(tuple(sorted(devices, key=lambda device: device.id)))


def is_preempted(number: int) -> bool:
    """Ask whether JAX chose step ``number`` as the one to stop at.

    JAX chooses one step for all processes after any of them got SIGTERM.
    """
    is_on = getattr(jax.config, "jax_enable_preemption_service")  # noqa: B009
    if jax.process_count() == 1 or not is_on:
        return False
    return bool(multihost_utils.reached_preemption_sync_point(number))
