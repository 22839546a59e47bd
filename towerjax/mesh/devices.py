"""Translate device names to JAX devices, and limit the calls in flight on them."""

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import backend

from towerjax.mesh import live
from towerjax.mesh.private_jax import DeviceArray
from towerjax.types import PyTree
from towerjax.types.refusals import few

Device: TypeAlias = Any
"""A ``jax.Device``; type checkers take that name for a variable."""

# Matches "gpu:0", and TensorFlow's names for this device in a job of one process.
_NAME = re.compile(
    r"/?(?:job:localhost/)?(?:replica:0/)?(?:task:0/)?(?:device:)?([a-z]+):([0-9]+)"
)
_WITHOUT_CPU = (
    "JAX_PLATFORMS or jax_platforms leaves CPUs out. Add cpu to it, as in"
    " JAX_PLATFORMS=cuda,cpu, or name another device."
)


def canonical_device_name(device: Any) -> str:
    """Write a device's name as ``"platform:index"``, such as ``"gpu:0"``.

    The index counts within the platform. The platforms cuda and rocm are called gpu.
    """
    if isinstance(device, jax.Device):
        platform = device.platform
        index = jax.devices(device.platform).index(device)
    elif match := _NAME.fullmatch(str(device).lower()):
        platform = match[1]
        index = int(match[2])
    else:
        raise ValueError(
            f"devices: {device!r} is not a device name. Write 'platform:index', such as"
            " 'gpu:0' or 'cpu:3', or pass a jax.Device."
        )
    return f"{'gpu' if platform in ('cuda', 'rocm') else platform}:{index}"


def canonical_device_names(devices: Any) -> tuple[str, ...]:
    """Write the canonical names of devices of one platform, in their order."""
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"devices={devices!r:.200} must be a tuple of names or of jax.Device"
            " objects, such as devices=('gpu:0',); leave it out to use all. For a"
            " number of towers write towers=8."
        )
    names = tuple(canonical_device_name(device) for device in devices)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"devices names {', '.join(twice)} more than once in {tuple(devices)}. For"
            " several towers on a device write towers=... instead."
        )
    platforms = sorted({name.split(":")[0] for name in names})
    if len(platforms) > 1:
        raise ValueError(
            f"devices are of several platforms, {' and '.join(platforms)}, in {names},"
            " but one program runs on one platform. Name devices of one platform."
        )
    return names


def platform_devices(platform: str) -> list[Device]:
    """List the devices of a platform; none if JAX has no such platform."""
    try:
        return jax.devices(platform)
    except RuntimeError:  # JAX raises it for a platform that it lacks
        return []


def host_device() -> Device:
    """Find this process's first CPU device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(f"A CPU was requested, but {_WITHOUT_CPU}") from error


def first_of_each_process(gpus: int) -> tuple[str, ...]:
    """Name the first ``gpus`` GPUs of each process.

    For ``gpus=0`` return the name of the first CPU device of each process.
    """
    platform, wanted = ("gpu", gpus) if gpus else ("cpu", 1)
    devices = platform_devices(platform)
    if not (gpus or devices):
        raise ValueError(f"num_gpus=0 chooses the CPU, but {_WITHOUT_CPU}")
    names: list[str] = []
    for process in live.numbers_left():
        places = [i for i, d in enumerate(devices) if d.process_index == process]
        if len(places) < wanted:
            raise ValueError(
                f"num_gpus={gpus} asks for more GPUs than process {process} has,"
                f" {len(places)}. Ask for at most that many, or name the devices."
            )
        names += [f"{platform}:{i}" for i in places[:wanted]]
    return tuple(names)


def owners_of(names: Sequence[str]) -> set[int]:
    """Find the processes that own these devices.

    The set is empty if JAX does not find one of the devices.
    """
    try:
        return {device.process_index for device in find_devices(names)}
    except ValueError:
        return set()


def want_cpu_devices(number: int) -> None:
    """Ask JAX for this many CPU devices; do nothing if JAX has started its devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)


def wake_cpu_devices(number: int) -> None:
    """Start JAX's devices anew: this many CPU devices, and no mesh of `jax.set_mesh`.

    Earlier arrays can still be read, but not used in computations.
    """
    backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", number)
    jax.set_mesh(None)


def find_devices(names: Sequence[str]) -> tuple[Device, ...]:
    """Find the JAX devices with these canonical names."""
    devices = []
    for name in names:
        platform, _, index = name.partition(":")
        present = platform_devices(platform)
        if int(index) >= len(present):
            _refuse_missing(platform, len(present), names)
        devices.append(present[int(index)])
    return tuple(devices)


def _refuse_missing(platform: str, present: int, names: Sequence[str]) -> None:
    of_platform = [x for x in names if x.startswith(f"{platform}:")]
    indices = [int(x.partition(":")[2]) for x in of_platform]
    missing = [f"{platform}:{i}" for i in indices if i >= present]
    hint = ""
    if platform == "cpu":
        hint = f" Here {_WITHOUT_CPU}"
        if present:
            hint = (
                " For more CPU devices call"
                f" jax.config.update('jax_num_cpu_devices', {max(indices) + 1}) before"
                " JAX is first used."
            )
    raise ValueError(
        f"devices: {', '.join(few(map(repr, missing)))}"
        f" {'is' if len(missing) == 1 else 'are'} not on this machine, which has"
        f" {present} of platform {platform!r}; the default one is"
        f" {jax.default_backend()!r} with {len(jax.devices())}. Name devices that it"
        f" has, or write towers=... and let towers share a device.{hint}"
    )


@contextlib.contextmanager
def one_thread_at_a_time(devices: tuple[str, ...]) -> Iterator[None]:
    """Let no other thread run a program on these CPU devices within the block.

    XLA keeps the order of programs only within one thread. If two threads run programs
    with collectives, the programs may together hold all of XLA's worker threads, each
    waiting for a device that finds no worker. After 40 s XLA ends the process.
    """
    with _CALLING:
        me = threading.get_ident()
        for others, thread in [*_CALLER.items()]:
            if thread != me and not set(others).isdisjoint(devices):
                with _LOCK:
                    running = tuple(_RUNNING.get(others, ()))
                for x in running:
                    _waits_for(x)
        _CALLER[devices] = me
        yield


def bound_in_flight(devices: tuple[str, ...], *results: PyTree) -> None:
    """Record a call's results; wait for the oldest if more than 16 calls are running.

    A call is recorded by the first array of its results.
    """
    # Before JAX 0.12, several CPU devices deadlock if more than 32 programs with
    # collectives are running. A limit of 16 costs no time, and leaves room for programs
    # of other libraries.
    leaves = itertools.chain.from_iterable(map(jax.tree.leaves, results))
    # A random key is left out, because it has no ``is_ready``.
    first = [x for x in leaves if type(x) is DeviceArray][:1]
    with _LOCK:
        running = _RUNNING.setdefault(devices, [])
        running += first
        before = tuple(running)
    if len(before) > 16:
        any(_waits_for(x) for x in before)
    # The results of finished calls are dropped. Calls finish in order, so it is enough
    # to look from the oldest on, and results such as predictions may be large.
    with _LOCK:
        ran = 0
        for count, x in enumerate(running, 1):
            if (has_run := _has_run(x)) is False:
                break
            ran = count if has_run else ran
        del running[:ran]


# For each set of devices, one result of each call that may still run. Their number is
# limited for the set, over all steps and threads. The lock is reentrant, because a
# signal's handler may call a step.
_RUNNING: dict[tuple[str, ...], list[Any]] = {}
_LOCK = threading.RLock()
# For each set of devices, the thread that last called a step on it.
_CALLER: dict[tuple[str, ...], int] = {}
_CALLING = threading.RLock()


def _waits_for(x: Any) -> bool:
    """Wait for a result; return False if it was donated."""
    try:
        x.block_until_ready()
    # The caller will see the error when it reads the results.
    except (RuntimeError, ValueError):
        return not x.is_deleted()
    return True


def _has_run(x: Any) -> bool | None:
    """Return whether a result is computed; None if it was donated."""
    try:
        return None if x.is_deleted() else x.is_ready()
    except RuntimeError:  # another thread is donating it at this moment
        return None
